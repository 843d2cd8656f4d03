"""Where the time of a training step goes: forward and backward of small models on one thread, by part and by kind.

    python -m tnt_hf.recipes.benchmarks.profile_step --out recipes/benchmarks/results/profile_step.json

One layer of a third of the 150M shape's width, with its window, chunks and reset interval. First all models take turns
without a profiler (processor time), then one step of each is profiled: the profiler slows small operations more than
large ones, so its shares say where to look and the turns say how long it takes.

Last, whether two local memories of one chunk size should run as one scan with twice the heads: both ways in turns.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes import blocked_attention
from tnt_hf.recipes.benchmarks.measure import environment, spread, take_turns, write
from tnt_hf.recipes.benchmarks.train_models import SHAPES, TRANSFORMER, WINDOW, build, config_of


SHAPE = SHAPES["shrunk"]
MODELS = {name: config_of(name, SHAPE) for name in ("TNT {16}", "TNT {64}", "Titans C=8", WINDOW, TRANSFORMER)}
MODELS["TNT {8,8}"] = config_of("TNT {16}", SHAPE, local_chunk_sizes=[8, 8])
# Of an operation and everything it calls. The first match on the way up decides.
PARTS = {
    "ChunkScan": "memory",
    "NativeScan": "memory",
    "_AllRows": "memory",
    "_RunningProjection": "Q-K projection",
    "_Taps": "convolution",
    "_Blocks": "attention",
    "aten::scaled_dot_product_attention": "attention",
    "ScaledDotProductFlashAttentionForCpuBackward0": "attention",
    "aten::linear": "linear layers",
    "MmBackward0": "linear layers",
    "aten::cross_entropy_loss": "loss",
    "LogSoftmaxBackward0": "loss",
}
STACKED = ((4, 8), (4, 16), (4, 64), (12, 16))  # heads and chunk sizes of two local memories
OTHER = "norms, gates, copies"
KINDS = ("products", "elementwise", "C", "between")
PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::mm", "aten::addmm")


def part_of(event) -> str:
    """To which of `PARTS` a profiled operation belongs."""
    while event is not None:
        name = event.name.removesuffix("Backward")
        if name in PARTS:
            return PARTS[name]
        event = event.cpu_parent
    return OTHER


def kind_of(name: str) -> str:
    """Matrix products, other tensor operations, our C, or what lies between them: Python and autograd."""
    if name.startswith("NativeScan"):
        return "C"
    if name.removesuffix("_").startswith(PRODUCTS):
        return "products"
    return "elementwise" if name.startswith("aten::") else "between"


def shares(step) -> dict:
    """Share of each part in one profiled step, and how it divides into kinds of work."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    times = Counter()
    for event in seen.events():
        times[part_of(event), kind_of(event.name)] += event.self_cpu_time_total
    total, parts = sum(times.values()), sorted({part for part, _ in times})
    return {
        part: {
            "share": round(sum(times[part, kind] for kind in KINDS) / total, 4),
            **{kind: round(times[part, kind] / total, 4) for kind in KINDS},
        }
        for part in parts
    }


def training_step(name: str, tokens: int, seed: int):
    """Forward and backward of a model on one row of random tokens."""
    model = build(name, MODELS[name], blocked_attention.NAME, seed)
    ids = torch.randint(SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(seed))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()

    return step


def two_memories(heads: int, chunk_size: int, tokens: int, seed: int) -> dict:
    """Calls that run two memories forward and backward, one after the other and as one of twice the heads."""
    g, width = torch.Generator().manual_seed(seed), SHAPE["hidden_size"] // SHAPE["num_attention_heads"]

    def memory(heads):
        q, k, v, d_o = (torch.randn(1, tokens, heads, width, generator=g) for _ in range(4))
        lr = 0.1 * torch.rand(1, tokens, heads, generator=g)
        weights = [torch.randn(heads, width, width, generator=g) * width**-0.5 for _ in range(2)]
        inputs = [x.requires_grad_() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, lr, *weights)]
        options = {"chunk_size": chunk_size, "reset_interval": SHAPE["local_reset_interval"], "grad_bound": 1.0}

        def call():
            o, _ = memory_chunkwise(*inputs[:4], inputs[4:], **options)
            torch.autograd.grad(o, inputs, d_o)

        return call

    one, both = memory(heads), memory(2 * heads)
    return {"apart": lambda: (one(), one()), "stacked": both}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--tokens", type=int, default=8192, help="of the row")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    fields = (*SHAPE, "memory_grad_bound", "max_position_embeddings")
    shape = {name: getattr(MODELS["TNT {16}"], name) for name in fields}
    report = {"environment": environment(args.seed), "shape": shape, "tokens": args.tokens, "models": {}}
    steps = {name: training_step(name, args.tokens, args.seed) for name in args.models}
    for name, clocks in take_turns(steps, args.rounds).items():
        seconds = {
            clock: spread(values) | {"rounds": [round(x, 4) for x in values]} for clock, values in clocks.items()
        }
        report["models"][name] = {"seconds": seconds, "parts": shares(steps[name])}
        parts = ", ".join(f"{part} {x['share']:.0%}" for part, x in report["models"][name]["parts"].items())
        print(f"{name}: {seconds['cpu']['median']:.2f} s of processor time; profiled: {parts}", flush=True)
    report["two local memories"] = {}
    for heads, C in STACKED:
        clocks = take_turns(two_memories(heads, C, args.tokens, args.seed), args.rounds)
        ratios = spread([a / b for a, b in zip(clocks["apart"]["cpu"], clocks["stacked"]["cpu"])])
        report["two local memories"][f"{heads} heads, C={C}"] = {"seconds": clocks, "stacked_is_faster_by": ratios}
        print(
            f"two local memories of {heads} heads, C={C}: stacked {ratios['median']:.2f}x as fast as apart", flush=True
        )
    if args.out is not None:
        write(args.out, report)


if __name__ == "__main__":
    main()
