"""What training through a long sequence costs in memory: bytes per token and head, the op's own inputs included.

    python -m tnt_hf.recipes.benchmarks.memory_bytes --out results/memory_bytes.json

Three figures: what the graph keeps between forward and backward (saved tensors, counted by storage), the growth of the
process's peak resident size over forward + backward, and the state that decoding carries, whatever the length.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks.measure import environment, write


def resident_bytes() -> tuple[int, int] | None:
    """(now, peak) of this process, or `None` where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def measure(args) -> dict:
    g = torch.Generator().manual_seed(args.seed)
    T, H, D = args.tokens, args.heads, args.width
    weights = [
        torch.randn(H, a, b, generator=g) * a**-0.5 for a, b in ((D, args.expansion * D), (args.expansion * D, D))
    ]
    q, k, v = (F.normalize(torch.randn(1, T, H, D, generator=g), dim=-1) for _ in range(3))
    lr = 0.1 * torch.rand(1, T, H, generator=g)
    leaves = [x.requires_grad_() for x in (q, k, v, lr, *weights)]
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    options = {"chunk_size": args.chunk_size, "reset_interval": args.reset_interval}
    some = [x[:, :64] for x in leaves[:4]]
    memory_chunkwise(*some, weights, **options)[0].sum().backward()  # code pages and workspaces
    for x in leaves:
        x.grad = torch.zeros_like(x)
    before = resident_bytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, state = memory_chunkwise(*leaves[:4], weights, **options, output_final_state=True)
    o.square().mean().backward()
    after = resident_bytes()
    if not all(x.grad.isfinite().all() for x in leaves):
        raise SystemExit("non-finite gradient")
    states = {
        x.untyped_storage().data_ptr(): x.numel() * x.element_size() for x in (*state.weights, *state.chunk_weights)
    }
    per = T * H
    return {
        "graph_bytes_per_token_and_head": round(sum(kept.values()) / per, 1),
        "peak_growth_bytes_per_token_and_head": None if before is None else round((after[1] - before[0]) / per, 1),
        "state_bytes": sum(states.values()) + 8,  # and the memory time
        "input_bytes_per_token_and_head": round(sum(x.numel() * 4 for x in leaves[:4]) / per, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--expansion", type=int, default=1)
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--reset-interval", type=int, help="tokens; none = never")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    shape = {name: value for name, value in vars(args).items() if name not in ("out", "seed")}
    report = {
        "environment": environment(args.seed),
        "shape": shape | {"depth": 2, "dtype": "float32"},
        **measure(args),
    }
    json.dump({name: value for name, value in report.items() if name != "environment"}, sys.stdout, indent=1)
    print()
    if args.out is not None:
        write(args.out, report)


if __name__ == "__main__":
    main()
