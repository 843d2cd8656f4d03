"""The Triton kernels on a GPU: held to the recurrence in float64, then timed against the torch form.

    python -m tnt_hf.recipes.benchmarks.kernels_gpu --out results/kernels_gpu.json

Every case is checked first, on a short sequence, against `memory_naive` in float64 on the same rounded inputs: outputs
and all gradients, relative to the largest entry. A case beyond its limit is reported with its error and not timed.
Times are CUDA events around the forward and around forward + backward, implementations taking turns. Without a CUDA
device every case says "not measured".
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from tnt_hf.memory_tnt import memory_chunkwise, memory_naive
from tnt_hf.recipes.benchmarks.measure import environment, spread


DEVICE, NOT_MEASURED = "cuda", "not measured"
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 2e-2)}  # of outputs and of gradients
CASES = {
    "C=16 m=1": {"chunk_size": 16},
    "C=16 m=1 linear": {"chunk_size": 16, "depth": 1},
    "C=16 m=1 bound": {"chunk_size": 16, "grad_bound": 1.0},
    "C=16 m=1 LayerNorm": {"chunk_size": 16, "layernorm": True, "grad_bound": 1.0},
    "C=16 m=1 momentum forgetting": {"chunk_size": 16, "momentum": True, "decay": True},
    "C=16 m=2": {"chunk_size": 16, "expansion": 2},
    "C=8 m=1": {"chunk_size": 8},
    "C=64 m=1": {"chunk_size": 64},
    "C=128 m=1": {"chunk_size": 128},
}


def inputs_of(case: dict, tokens: int, args, dtype: torch.dtype) -> tuple[list, list, dict, dict]:
    """(q, k, v, lr), weights, options that are tensors, and the other options of the op."""
    g = torch.Generator().manual_seed(args.seed)
    H, D = args.heads, args.width
    hidden = D * case.get("expansion", 1)
    widths = [D, hidden, D] if case.get("depth", 2) == 2 else [D, D]

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    def gate(scale):
        return (scale * torch.rand(1, tokens, H, generator=g)).to(DEVICE)

    q, k, v = (F.normalize(normal(1, tokens, H, D), dim=-1).to(DEVICE, dtype) for _ in range(3))
    weights = [(normal(H, a, b) / a**0.5).to(DEVICE) for a, b in zip(widths, widths[1:])]
    options = {}
    if case.get("momentum"):
        options["momentum"] = gate(0.9)
    if case.get("decay"):
        options["decay"] = gate(0.01)
    if case.get("layernorm"):
        options["layernorm"] = ((1 + 0.1 * normal(H, D)).to(DEVICE), (0.1 * normal(H, D)).to(DEVICE), 1e-6)
    fixed = {name: case[name] for name in ("chunk_size", "grad_bound", "residual") if name in case}
    return [q, k, v, gate(0.1)], weights, options, fixed | {"reset_interval": args.reset_interval}


def leaves(tensors, weights, options) -> list[torch.Tensor]:
    scalars = [options[name] for name in ("momentum", "decay") if name in options]
    return [x.requires_grad_() for x in (*tensors, *weights, *scalars, *options.get("layernorm", ())[:2])]


def double(x):
    if isinstance(x, torch.Tensor):
        return x.detach().double()
    if isinstance(x, dict):
        return {name: double(y) for name, y in x.items()}
    return type(x)(double(y) for y in x) if isinstance(x, list | tuple) else x


def check(case: dict, args, dtype: torch.dtype) -> tuple[float, float]:
    """Largest error of the outputs and of any gradient."""
    *rounded, fixed = inputs_of(case, args.check_tokens, args, dtype)
    results = []
    for op, (tensors, weights, options) in ((memory_naive, double(rounded)), (triton, rounded)):
        wanted = leaves(tensors, weights, options)
        o, _ = op(*tensors, weights, **options, **fixed)
        d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        results.append([o, *torch.autograd.grad(o, wanted, d_o)])
    errors = [((y.double() - x).abs().max() / x.abs().max()).item() for x, y in zip(*results)]
    return errors[0], max(errors[1:])


def triton(*args, **options):
    return memory_chunkwise(*args, implementation="triton", **options)


def seconds(case: dict, args, dtype: torch.dtype) -> dict:
    """Seconds of the forward and of forward + backward, `{implementation: {what: spread}}`."""
    tensors, weights, options, fixed = inputs_of(case, args.tokens, args, dtype)
    wanted = leaves(tensors, weights, options)
    d_o = torch.randn_like(tensors[0])

    def forward(op):
        return op(*tensors, weights, **options, **fixed)[0]

    calls = {
        "forward": lambda op: forward(op),
        "forward and backward": lambda op: torch.autograd.grad(forward(op), wanted, d_o),
    }
    times = {name: {what: [] for what in calls} for name in ("triton", "chunk")}
    for turn in range(args.rounds + 1):  # the first compiles
        for name, op in (("triton", triton), ("chunk", memory_chunkwise)):
            for what, call in calls.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call(op)
                end.record()
                torch.cuda.synchronize()
                if turn:
                    times[name][what].append(begin.elapsed_time(end) / 1e3)
    return {name: {what: spread(x, 6) for what, x in of.items()} for name, of in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    for name, value in (
        ("tokens", 65536), ("check-tokens", 192), ("heads", 12), ("width", 64), ("reset-interval", 2048),
        ("rounds", 7), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    report = {"environment": environment(args.seed), "arguments": {**vars(args), "out": args.out.name}, "cases": {}}
    for name in args.cases.split(","):
        report["cases"][name] = entry = {}
        for kind, limits in LIMITS.items():
            if not torch.cuda.is_available():
                entry[kind] = NOT_MEASURED
                continue
            errors = check(CASES[name], args, getattr(torch, kind))
            entry[kind] = {"error": dict(zip(("output", "gradient"), errors)), "limits": limits}
            within = all(error <= limit for error, limit in zip(errors, limits))
            entry[kind]["seconds"] = seconds(CASES[name], args, getattr(torch, kind)) if within else NOT_MEASURED
            print(name, kind, entry[kind], flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
