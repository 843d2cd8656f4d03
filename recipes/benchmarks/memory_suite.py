"""Suite `memory`: forward and backward of the memory op against TTT-MLP, NeuralMemory and an eager vmap(grad) form.

The first two are the rows of memory_op.py. The third is how the memory would be written with torch.func: the gradient
of every token's loss at the chunk's first weights by vmap(grad), the weights of every token materialised, the outer
gradient by autograd. Both sides compute one function of the same inputs, also with momentum and forgetting.

Axis legend: B = 1 batch   T tokens   H heads   C tokens of a chunk   D head width
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks import memory_op
from tnt_hf.recipes.benchmarks.gate import require_agreement
from tnt_hf.recipes.benchmarks.measure import NOT_MEASURED, columns, summarise, take_turns, times_faster
from tnt_hf.recipes.benchmarks.settings import MemorySettings


RIVALS = ("vmap(grad)", "TTT-MLP", "titans-pytorch")
OURS, THEIRS = "tnt-hf", "vmap(grad)"
FULL = ", momentum and forgetting"
KINDS = {"": None, FULL: "init", f"{FULL} to zero": "zero"}  # and toward what the memory forgets
# float32 sums in another order; gradients pass through hundreds of chunks
TOLERANCE = 1e-4
CPU_ONLY = True  # where all contestants run
# Of our speed without momentum and forgetting, how much is kept with both.
FULL_SPEED = 0.7


def _loss(weights: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> Tensor:
    """Of one token of one head: half the squared error of f(W, k)."""
    return 0.5 * (F.silu(k @ weights[0]) @ weights[1] - v).square().sum()


_token_gradients = vmap(vmap(grad(_loss), in_dims=(None, 0, 0)))  # [H, C, ...] of weights [H, ...]


def vmap_grad(q, k, v, lr, w1, w2, momentum=None, decay=None, *, chunk_size: int, target: str | None) -> Tensor:
    """The memory with `read="current"`: q, k, v `[1, T, H, D]`, gates `[1, T, H]`, weights `[H, D, D]` -> o."""
    weights = (w1, w2)
    steps = zeros = tuple(torch.zeros_like(w) for w in weights)
    targets = zeros if target == "zero" else weights
    chunked = [
        None if x is None else x[0].transpose(0, 1).split(chunk_size, 1) for x in (q, k, v, lr, momentum, decay)
    ]
    outputs = []
    for chunk in range(len(chunked[0])):
        q_c, k_c, v_c, lr_c, mu_c, alpha_c = (None if x is None else x[chunk] for x in chunked)
        updates = [-lr_c[..., None, None] * g for g in _token_gradients(weights, k_c, v_c)]
        if momentum is None:
            every = [w[:, None] + g.cumsum(1) for w, g in zip(weights, updates)]
        else:
            tokens = []
            for t in range(lr_c.shape[1]):
                mu, alpha = mu_c[:, t, None, None], alpha_c[:, t, None, None]
                steps = tuple(mu * s + g[:, t] for s, g in zip(steps, updates))
                last = tokens[-1] if tokens else weights
                tokens.append(tuple(torch.lerp(w, to, alpha) + s for w, to, s in zip(last, targets, steps)))
            every = [torch.stack(x, 1) for x in zip(*tokens)]
        outputs.append((F.silu(q_c[:, :, None] @ every[0]) @ every[1]).squeeze(2))
        weights = tuple(w[:, -1] for w in every)
    return torch.cat(outputs, 1).transpose(0, 1)[None]


def ours(q, k, v, lr, w1, w2, momentum=None, decay=None, *, chunk_size: int, target: str | None) -> Tensor:
    """The same of this package."""
    gates = {} if momentum is None else {"momentum": momentum, "decay": decay, "decay_target": target}
    return memory_chunkwise(q, k, v, lr, [w1, w2], **gates, chunk_size=chunk_size)[0]


def inputs(settings: MemorySettings, full: bool) -> list[Tensor]:
    """q, k, v, lr, W_1, W_2 and with `full` momentum and forgetting, of unit keys and rates that stay stable."""
    g = torch.Generator().manual_seed(settings.seed)
    T, H, D = settings.tokens, settings.heads, settings.width
    q, k, v = (F.normalize(torch.randn(1, T, H, D, generator=g), dim=-1) for _ in range(3))
    lr = 0.1 * torch.rand(1, T, H, generator=g)
    weights = [torch.randn(H, D, D, generator=g) * D**-0.5 for _ in range(2)]
    gates = [0.9 * torch.rand(1, T, H, generator=g), 0.01 * torch.rand(1, T, H, generator=g)] if full else []
    return [x.to(settings.device).requires_grad_() for x in (q, k, v, lr, *weights, *gates)]


def _call(function, tensors: list[Tensor], chunk_size: int, target: str | None):
    d_o = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].device)

    def call():
        o = function(*tensors, chunk_size=chunk_size, target=target)
        return o, *torch.autograd.grad(o, tensors, d_o)

    return call


def against_vmap(chunk_size: int, settings: MemorySettings, tell) -> dict:
    """Both sides, plain and with momentum and forgetting; toward zero, theirs is only checked."""
    calls, differences = {}, {}
    for kind, target in KINDS.items():
        tensors = inputs(settings, full=target is not None)
        calls[OURS + kind], theirs = (_call(f, tensors, chunk_size, target) for f in (ours, vmap_grad))
        tell(f"checking{kind}")
        name = f"{THEIRS}{kind} against {OURS} at C={chunk_size}"
        differences[kind.lstrip(", ") or "plain"] = require_agreement(name, theirs(), calls[OURS + kind](), TOLERANCE)
        if target != "zero":
            calls[THEIRS + kind] = theirs
    seconds = take_turns(calls, settings.rounds, tell=tell)
    return {"largest_relative_difference": differences} | summarise(seconds, OURS, settings.tokens)


def prepare(settings: MemorySettings) -> MemorySettings:
    """Makes titans-pytorch importable. Raises `ValueError` for a device these comparisons are not made for."""
    if settings.device != "cpu":
        raise ValueError(f"device={settings.device!r}: the suite memory is for the CPU, where all contestants run")
    if settings.titans is not None and str(settings.titans) not in sys.path:
        if not (settings.titans / "titans_pytorch").is_dir():
            raise ValueError(f"titans={str(settings.titans)!r}: holds no titans_pytorch")
        sys.path.append(str(settings.titans))
    return settings


def rows(settings: MemorySettings) -> list[str]:
    """One per rival and chunk size."""
    return [f"{rival} C={size}" for rival in RIVALS for size in settings.chunk_sizes]


def measure(name: str, settings: MemorySettings, tell) -> dict:
    """One row."""
    rival, _, size = name.rpartition(" C=")
    tell("running")
    if rival == THEIRS:
        return against_vmap(int(size), settings, tell)
    if rival == "TTT-MLP":
        return memory_op.against_ttt(settings.ttt_lm, int(size), settings.rounds, settings)
    variants = [(m, same) for m in settings.titans_expansions for same in (False, True)]
    return {
        f"{'same-maths-' if same else ''}expansion-{m}": memory_op.against_titans(
            int(size), m, settings.titans_rounds, settings, same
        )
        for m, same in variants
    }


def summary(found: dict[str, dict], settings: MemorySettings) -> dict:
    """How many times faster this package is, per rival, kind and chunk size, and which targets that meets."""
    faster: dict[str, dict[str, dict]] = {}
    kept: dict[str, dict[str, dict]] = {kind.lstrip(", "): {} for kind, target in KINDS.items() if target}
    for row, entry in found.items():
        rival, _, size = row.rpartition(" C=")
        if rival == THEIRS:
            seconds = {name: x["seconds"] for name, x in entry.items() if "seconds" in x}
            for kind in ("", FULL):
                faster.setdefault(rival + kind, {})[size] = times_faster(
                    seconds, OURS + kind, THEIRS + kind, settings.clock
                )
            for kind in kept:
                kept[kind][size] = times_faster(seconds, f"{OURS}, {kind}", OURS, settings.clock)
            continue
        other = "ttt-lm" if rival == "TTT-MLP" else rival
        for kind, result in entry.items():
            measured = isinstance(result, dict) and isinstance(result.get(other), dict)
            if measured:
                faster.setdefault(f"{rival} {kind}", {})[size] = result[other]["speedup"][settings.clock]
            elif kind != OURS:
                faster.setdefault(f"{rival} {kind}", {})[size] = NOT_MEASURED
    targets = {"TTT-MLP": memory_op.TARGETS["ttt-lm"], "titans-pytorch": memory_op.TARGETS["titans-pytorch"]}
    holds = {
        f"{name} C={size}": ratio["median"] >= targets[name.split()[0]][int(size)]
        for name, sizes in faster.items()
        for size, ratio in sizes.items()
        if isinstance(ratio, dict) and int(size) in targets.get(name.split()[0], {})
    }
    for kind, sizes in kept.items():
        holds |= {f"{kind} C={size}": ratio["median"] >= FULL_SPEED for size, ratio in sizes.items()}
    targets |= dict.fromkeys(kept, FULL_SPEED)
    return {"times_faster": faster, "speed_kept": kept, "holds": holds, "targets": targets}


def table(result: dict) -> list[str]:
    """Ratios by chunk size."""
    found = result["summary"]
    sizes = [str(size) for size in result["settings"]["chunk_sizes"]]

    def cell(ratio) -> str:
        return f"{ratio['median']:.2f}" if isinstance(ratio, dict) else ratio or ""

    lines = [(name, *(cell(by_size.get(s)) for s in sizes)) for name, by_size in found["times_faster"].items()]
    for kind, kept in found["speed_kept"].items():
        lines.append((f"speed kept with {kind}", *(cell(kept.get(s)) for s in sizes)))
    return columns([("times faster than", *(f"C = {s}" for s in sizes)), *lines])
