"""The memory op against ttt-lm-pytorch's TTT-MLP and titans-pytorch's NeuralMemory: forward + backward, one thread.

    python -m tnt_hf.recipes.benchmarks.memory_op --out results/memory_op.json [--ttt-lm path/to/ttt.py]

Contestants take turns in one process (see measure.py). Against TTT-MLP both sides compute the same function of the
same inputs and the run stops if outputs or gradients disagree. Against NeuralMemory there are two rows. The first is
what it does by default: it averages its gates over a chunk, adds its momentum once per chunk and reads the chunk's
first weights; ours does all that per token, so only shapes, depth, width, gates and projections are equal (ours does
more). "same-maths" is NeuralMemory without momentum and LayerNorm against `memory_chunkwise` with its semantics: again
one function of the same inputs and parameters, and the run stops if they disagree.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks import contestants
from tnt_hf.recipes.benchmarks.measure import environment, summarise, take_turns


TARGETS = {"ttt-lm": {8: 4.0, 16: 3.0, 64: 2.0}, "titans-pytorch": {8: 50.0, 16: 10.0, 64: 3.0}}
TOLERANCE = 1e-4  # relative, float32; outputs and every gradient
TTT_VARIANTS = {"matched": ("silu", "silu"), "matched-gelu": ("gelu", "gelu"), "published": (None, "gelu")}
NOT_MEASURED = "not measured"


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


def disagreement(x, y) -> float:
    """Largest difference of any output or gradient, relative to its own largest entry."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(x, y))


def against_ttt(path: Path | None, chunk_size: int, rounds: int, args) -> dict:
    inputs = ttt_inputs(args.tokens, args.heads, args.width, args.expansion, args.seed)
    report = dict.fromkeys(TTT_VARIANTS, NOT_MEASURED)
    if path is None:
        call = forward_backward(our_ttt("silu"), inputs, chunk_size)
        report["tnt-hf"] = summarise(take_turns({"tnt-hf": call}, rounds), "tnt-hf", args.tokens)["tnt-hf"]
        return report
    for name, matched, activation in (
        ("matched", "silu", "silu"),
        ("matched-gelu", "gelu", "gelu"),
        ("published", None, "gelu"),
    ):
        theirs = forward_backward(contestants.ttt_mlp(path, matched), inputs, chunk_size)
        ours = forward_backward(our_ttt(activation), inputs, chunk_size)
        entry = {"largest_relative_difference": disagreement(ours(), theirs())}
        if matched is not None and not entry["largest_relative_difference"] <= TOLERANCE:
            raise SystemExit(
                f"TTT-MLP at C={chunk_size} disagrees: {entry['largest_relative_difference']:.1e} > {TOLERANCE}"
            )
        entry |= summarise(take_turns({"tnt-hf": ours, "ttt-lm": theirs}, rounds), "tnt-hf", args.tokens)
        report[name] = entry
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
        C, (reading, storing) = self.chunk_size, (norm(x) for norm in self.norms)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)) for f, y in ((self.q, reading), (self.k, storing), (self.v, storing))
        )
        lr = self.lr(storing).sigmoid() * (
            self.max_lr * 2 / k.shape[-1]
        )  # its loss: a mean over the width, not half a sum
        decay = self.decay(storing.unflatten(1, (-1, C)).mean(2)).sigmoid()
        decay = nn.functional.pad(decay[:, :, None], (0, 0, 0, C - 1)).flatten(1, 2)  # by a chunk's first token alone
        q = nn.functional.pad(q, (0, 0, 0, 0, 1, 0))  # read by the next token's weights
        k, v = (nn.functional.pad(y, (0, 0, 0, 0, 0, 1)) for y in (k, v))
        lr, decay = (nn.functional.pad(y, (0, 0, 0, 1)) for y in (lr, decay))
        options = {"activation": "gelu", "decay": decay, "decay_target": "zero", "read": "chunk_start"}
        o, _ = memory_chunkwise(q, k, v, lr, list(self.weights), chunk_size=C, **options)
        return self.out((o[:, 1:] * self.gate(reading).sigmoid()[..., None]).flatten(-2))


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
            difference = disagreement(calls["tnt-hf"](), calls["titans-pytorch"]())
            report["largest_relative_difference"] = difference
            if not difference <= TOLERANCE:
                raise SystemExit(f"NeuralMemory at C={chunk_size} disagrees: {difference:.1e} > {TOLERANCE}")
    return report | summarise(take_turns(calls, rounds), "tnt-hf", args.tokens)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument(
        "--ttt-lm", type=Path, help="ttt.py of test-time-training/ttt-lm-pytorch (not measured without it)"
    )
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[8, 16, 64], help="tokens")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--expansion", type=int, default=4, help="hidden width of the memory / head width, in TTT-MLP")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--titans-rounds", type=int, default=5, help="its small chunks take minutes")
    parser.add_argument("--titans-expansions", type=int, nargs="+", default=[4, 1], help="4 is its default")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = {"tokens": args.tokens, "heads": args.heads, "width": args.width, "batch": 1, "dtype": "float32"}
    report = {
        "environment": environment(args.seed),
        "shape": shape,
        "targets": TARGETS,
        "ttt-lm": {},
        "titans-pytorch": {},
    }
    for C in args.chunk_sizes:
        report["ttt-lm"][str(C)] = entry = against_ttt(args.ttt_lm, C, args.rounds, args)
        print_line(f"ttt-lm TTT-MLP m={args.expansion} C={C}", entry, "ttt-lm", TARGETS["ttt-lm"].get(C))
    for C in args.chunk_sizes:
        report["titans-pytorch"][str(C)] = entry = {}
        for m in args.titans_expansions:
            for name, same_maths in (("", False), ("same-maths-", True)):
                entry[f"{name}expansion-{m}"] = against_titans(C, m, args.titans_rounds, args, same_maths)
        print_line(f"titans-pytorch C={C}", entry, "titans-pytorch", TARGETS["titans-pytorch"].get(C))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def print_line(title: str, entry: dict, rival: str, target: float | None) -> None:
    for name, result in entry.items():
        if name == "tnt-hf":
            print(f"{title} tnt-hf alone: {result['tokens_per_second']['cpu']['median']:.0f} tokens/s of cpu time")
            continue
        if not isinstance(result, dict) or not isinstance(result.get(rival), dict):
            print(f"{title} {name}: {NOT_MEASURED}", flush=True)
            continue
        ours, theirs = (result[who]["tokens_per_second"]["cpu"]["median"] for who in ("tnt-hf", rival))
        middle, low, high = (result[rival]["speedup"]["cpu"][key] for key in ("median", "min", "max"))
        print(f"{title} {name}: {ours:.0f} against {theirs:.0f} tokens/s of cpu time,", end=" ")
        print(f"{middle:.2f}x ({low:.2f} to {high:.2f}), target {target}", flush=True)


if __name__ == "__main__":
    main()
