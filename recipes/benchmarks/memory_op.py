"""The memory op against ttt-lm-pytorch's TTT-MLP and titans-pytorch's NeuralMemory: forward + backward, one thread.

Rows of the suite `memory`; contestants take turns in one process (see measure.py). Against TTT-MLP both sides compute
the same function of the same inputs, and the run stops if outputs or gradients disagree. As published, it has biases
and a GELU of its own, so there the difference is only reported. Against NeuralMemory there are two rows. The first is
what it does by default: it averages its gates over a chunk, adds its momentum once per chunk and reads the chunk's
first weights; ours does all that per token, so only shapes, depth, width, gates and projections are equal (ours does
more). "same-maths" is NeuralMemory without momentum and LayerNorm against `memory_chunkwise` with its semantics: again
one function of the same inputs and parameters, and the run stops if they disagree.
"""

from pathlib import Path

import torch
from torch import nn

from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks import contestants
from tnt_hf.recipes.benchmarks.gate import require_agreement
from tnt_hf.recipes.benchmarks.measure import NOT_MEASURED, summarise, take_turns


TARGETS = {"ttt-lm": {8: 4.0, 16: 3.0, 64: 2.0}, "titans-pytorch": {8: 50.0, 16: 10.0, 64: 3.0}}
TOLERANCE = 1e-4  # relative, float32; outputs and every gradient
TTT_VARIANTS = {"matched": ("silu", "silu"), "matched-gelu": ("gelu", "gelu"), "published": (None, "gelu")}


def ttt_inputs(tokens: int, heads: int, width: int, expansion: int, seed: int) -> list[torch.Tensor]:
    """q, k, v `[1, T, H, D]`, lr `[1, T, H]`, W_1, W_2, LayerNorm gain and bias."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    q, k = (normal(1, tokens, heads, width) for _ in range(2))
    v, lr = normal(1, tokens, heads, width) * 0.1, torch.rand(1, tokens, heads, generator=g) / width
    w1, w2 = normal(heads, width, expansion * width) * 0.125, normal(heads, expansion * width, width) * 0.0625
    gain, bias = 1 + 0.1 * normal(heads, width), 0.1 * normal(heads, width)
    return [x.requires_grad_() for x in (q, k, v, lr, w1, w2, gain, bias)]


def our_ttt(activation: str):
    def run(q, k, v, lr, w1, w2, gain, bias, chunk_size):
        options = {"residual": True, "activation": activation, "layernorm": (gain, bias, 1e-6)}
        return memory_chunkwise(q, k, v, lr, [w1, w2], chunk_size=chunk_size, **options)[0]

    return run


def forward_backward(f, inputs, chunk_size):
    """A call that runs f and its gradient for every input, and returns both."""
    d_o = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def call():
        o = f(*inputs, chunk_size)
        return o, *torch.autograd.grad(o, inputs, d_o)

    return call


def against_ttt(path: Path | None, chunk_size: int, rounds: int, args) -> dict:
    inputs = ttt_inputs(args.tokens, args.heads, args.width, args.expansion, args.seed)
    report = dict.fromkeys(TTT_VARIANTS, NOT_MEASURED)
    if path is None:
        call = forward_backward(our_ttt("silu"), inputs, chunk_size)
        report["tnt-hf"] = summarise(take_turns({"tnt-hf": call}, rounds), "tnt-hf", args.tokens)["tnt-hf"]
        return report
    for name, (matched, activation) in TTT_VARIANTS.items():
        theirs = forward_backward(contestants.ttt_mlp(path, matched), inputs, chunk_size)
        ours = forward_backward(our_ttt(activation), inputs, chunk_size)
        tolerance = TOLERANCE if matched else float("inf")
        found = require_agreement(f"TTT-MLP at C={chunk_size}", ours(), theirs(), tolerance)
        times = summarise(take_turns({"tnt-hf": ours, "ttt-lm": theirs}, rounds), "tnt-hf", args.tokens)
        report[name] = {"largest_relative_difference": found} | times
    return report


class OurNeuralMemory(nn.Module):
    """The projections of titans-pytorch's NeuralMemory around `memory_chunkwise`: equal work outside the op."""

    def __init__(self, dim: int, heads: int, chunk_size: int, expansion: int, max_lr: float):
        super().__init__()
        width, self.heads, self.chunk_size, self.max_lr = dim // heads, heads, chunk_size, max_lr
        self.norms = nn.ModuleList([nn.RMSNorm(dim), nn.RMSNorm(dim)])  # of what is read and what is stored
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.gates = nn.Linear(dim, heads, bias=False), nn.Linear(dim, 3 * heads)
        shapes = ((width, expansion * width), (expansion * width, width))
        self.weights = nn.ParameterList([nn.init.xavier_uniform_(torch.empty(s)).repeat(heads, 1, 1) for s in shapes])
        self.gain = nn.Parameter(torch.ones(heads, width))

    def forward(self, x):
        reading, storing = (norm(x) for norm in self.norms)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)) for f, y in ((self.q, reading), (self.k, storing), (self.v, storing))
        )
        # its loss is a mean over the width and not half of a sum: the same step needs 2 / width of its rate
        lr, momentum, decay = self.gates(storing).sigmoid().chunk(3, -1)
        lr = lr * (self.max_lr * 2 / k.shape[-1])
        options = {"activation": "gelu", "residual": True, "layernorm": (self.gain, torch.zeros_like(self.gain), 1e-5)}
        options |= {"momentum": momentum, "decay": decay, "decay_target": "zero", "chunk_size": self.chunk_size}
        o, _ = memory_chunkwise(q, k, v, lr, list(self.weights), **options)
        return self.out((o * self.gate(reading).sigmoid()[..., None]).flatten(-2))


class SameNeuralMemory(nn.Module):
    """NeuralMemory without momentum and LayerNorm, computed by `memory_chunkwise`: W <- (1 - alpha) W - sum_i theta_i
    g_i once per chunk with one alpha, of the chunk's mean input; token t reads the weights of chunk (t + 1) // C."""

    def __init__(self, dim: int, heads: int, chunk_size: int, expansion: int, max_lr: float):
        super().__init__()
        width, self.heads, self.chunk_size, self.max_lr = dim // heads, heads, chunk_size, max_lr
        self.norms = nn.ModuleList([nn.RMSNorm(dim), nn.RMSNorm(dim)])
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate = nn.Linear(dim, heads, bias=False)
        self.lr, self.decay = nn.Linear(dim, heads), nn.Linear(dim, heads)
        shapes = ((width, expansion * width), (expansion * width, width))
        self.weights = nn.ParameterList([nn.init.xavier_uniform_(torch.empty(s)).repeat(heads, 1, 1) for s in shapes])

    def in_order(self) -> list[nn.Parameter]:
        """As `contestants.titans_parameters` has them."""
        layers = (*self.norms, self.q, self.k, self.v, self.out, self.gate, self.lr, self.decay)
        return [p for layer in layers for p in layer.parameters()] + [*self.weights]

    def forward(self, x):
        C, h = self.chunk_size, nn.functional.rms_norm(x, x.shape[-1:])
        reading, storing = (norm.weight * h for norm in self.norms)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)) for f, y in ((self.q, reading), (self.k, storing), (self.v, storing))
        )
        # its loss: a mean over the width, not half a sum
        lr = self.lr(storing).sigmoid() * (self.max_lr * 2 / k.shape[-1])
        decay = self.decay(storing.unflatten(1, (-1, C)).mean(2)).sigmoid()
        decay = nn.functional.pad(decay[:, :, None], (0, 0, 0, C - 1)).flatten(1, 2)  # by a chunk's first token alone
        q = nn.functional.pad(q, (0, 0, 0, 0, 1, C - 1))  # read by the next token's weights
        k, v = (nn.functional.pad(y, (0, 0, 0, 0, 0, C)) for y in (k, v))  # zeros write nothing
        lr, decay = (nn.functional.pad(y, (0, 0, 0, C)) for y in (lr, decay))
        options = {"activation": "gelu", "decay": decay, "decay_target": "zero", "read": "chunk_start"}
        o, _ = memory_chunkwise(q, k, v, lr, list(self.weights), chunk_size=C, **options)
        return self.out((o[:, 1 : 1 + x.shape[1]] * self.gate(reading).sigmoid()[..., None]).flatten(-2))


def against_titans(chunk_size: int, expansion: int, rounds: int, args, same_maths: bool) -> dict:
    torch.manual_seed(args.seed)
    dim = args.heads * args.width
    shape = (dim, args.heads, chunk_size, expansion, 1e-2)
    theirs = contestants.titans_memory(*shape, plain=same_maths)
    ours = (SameNeuralMemory if same_maths else OurNeuralMemory)(*shape)
    x = torch.randn(1, args.tokens, dim).requires_grad_()
    d_o = torch.randn(1, args.tokens, dim)

    def training_step(module, parameters):
        def call():
            o = module(x)
            o = o[0] if isinstance(o, tuple) else o
            grads = torch.autograd.grad(o, [x, *parameters], d_o, allow_unused=True)
            if not all(g is None or g.isfinite().all() for g in grads):
                raise SystemExit(f"{type(module).__name__}: non-finite gradient")
            return o, *grads

        return call

    calls = {"tnt-hf": training_step(ours, ours.in_order() if same_maths else list(ours.parameters()))}
    report = {"titans-pytorch": NOT_MEASURED}
    if theirs is not None:
        wanted = contestants.titans_parameters(theirs) if same_maths else list(theirs.parameters())
        calls["titans-pytorch"] = training_step(theirs, wanted)
        if same_maths:
            with torch.no_grad():
                for mine, other in zip(ours.in_order(), wanted, strict=True):
                    mine.copy_(other)
            got, want = (calls[name]() for name in ("tnt-hf", "titans-pytorch"))
            name = f"NeuralMemory at C={chunk_size}"
            report["largest_relative_difference"] = require_agreement(name, got, want, TOLERANCE)
    return report | summarise(take_turns(calls, rounds), "tnt-hf", args.tokens)
