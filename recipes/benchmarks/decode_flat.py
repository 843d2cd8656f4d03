"""Is decoding flat in context? Tokens per second and bytes of state at a memory time of 1k and of 64k tokens.

    python -m tnt_hf.recipes.benchmarks.decode_flat --out results/decode_flat.json

Both states are filled with that many random tokens for real, once for the memory op alone and once for a small
`TNTForCausalLM` with its cache. The two then take turns in one process (see measure.py), every round from the same
state.
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion.files import write_json
from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks.measure import environment, summarise, take_turns


TARGET = 0.95  # of the tokens/s at the short context


def op_contestant(context: int, steps: int, args):
    """`steps` calls of one token each, with a deep memory that has momentum and forgetting, and its bytes of state."""
    g = torch.Generator().manual_seed(args.seed)
    H, D = args.heads, args.width
    weights = [torch.randn(H, D, D, generator=g) * D**-0.5 for _ in range(2)]

    def tokens(n):
        q, k = (F.normalize(torch.randn(1, n, H, D, generator=g), dim=-1) for _ in range(2))
        v = F.normalize(torch.randn(1, n, H, D, generator=g), dim=-1)
        rates = {"momentum": 0.9 * torch.rand(1, n, H, generator=g), "decay": 0.01 * torch.rand(1, n, H, generator=g)}
        return (q, k, v, 0.1 * torch.rand(1, n, H, generator=g)), rates

    options = {"chunk_size": args.chunk_size, "reset_interval": args.reset_interval, "query_projection": "shard"}
    options |= {"output_final_state": True}
    state = None
    for done in range(0, context, args.piece):
        x, rates = tokens(min(args.piece, context - done))
        _, state = memory_chunkwise(*x, weights, **rates, **options, initial_state=state)
    x, rates = tokens(steps)

    def decode():
        s = state
        for t in range(steps):
            here = {name: y[:, t : t + 1] for name, y in rates.items()}
            o, s = memory_chunkwise(*(y[:, t : t + 1] for y in x), weights, **here, **options, initial_state=s)
        if not o.isfinite().all():
            raise SystemExit(f"the op is not finite at memory time {context}")

    tensors = [*state.weights, *state.chunk_weights, *state.momentum, state.projection, state.time]
    return decode, {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in tensors}


def model_contestant(context: int, steps: int, args):
    """`steps` forward calls of one token each after a prefill in pieces, and the cache's bytes."""
    torch.manual_seed(args.seed)
    # Random weights on random tokens: the summed steps of a 1024-token chunk diverge at the default rate.
    config = TNTConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        sliding_window=64,
        global_chunk_size=1024,
        local_chunk_sizes=[args.chunk_size],
        local_reset_interval=args.reset_interval,
        max_position_embeddings=1 << 18,
        eos_token_id=None,
    )
    model = TNTForCausalLM(config).eval()
    cache = TNTCache(config)
    for done in range(0, context, args.piece):
        ids = torch.randint(0, 512, (1, min(args.piece, context - done)))
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    ids = torch.randint(0, 512, (1, steps))

    def decode():
        here = copy.deepcopy(cache)
        for t in range(steps):
            logits = model(ids[:, t : t + 1], use_cache=True, **{CACHE_NAME: here}).logits
        if not logits.isfinite().all():
            raise SystemExit(f"the model is not finite at memory time {context}")

    return decode, cache.nbytes()


def compare(contestant, args) -> dict:
    calls, sizes = {}, {}
    for context in args.contexts:
        calls[str(context)], size = contestant(context, args.steps, args)
        sizes[str(context)] = size if isinstance(size, int) else sum(size.values())
    seconds = take_turns(calls, args.rounds)
    short, long = map(str, args.contexts)
    report = summarise(seconds, long, args.steps)
    # `speedup` is how many times faster the long context was than the short one
    return {"contexts": report, "long_over_short": report[short]["speedup"], "state_bytes": sizes}


@torch.inference_mode()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--contexts", type=int, nargs=2, default=[1024, 65536], help="memory times in tokens")
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens per round, a multiple of the chunk size")
    parser.add_argument("--piece", type=int, default=2048, help="tokens per prefill call")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--reset-interval", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = {"environment": environment(args.seed), "target": TARGET}
    for name, contestant in (("op", op_contestant), ("model", model_contestant)):
        report[name] = result = compare(contestant, args)
        ratio, sizes = result["long_over_short"]["cpu"], list(result["state_bytes"].values())
        middle, low, high = (ratio[key] for key in ("median", "min", "max"))
        print(f"{name}: tokens/s at {args.contexts[1]} over {args.contexts[0]}: {middle:.3f} of cpu time", end=" ")
        print(f"({low:.3f} to {high:.3f}), target {TARGET}; state {sizes[0]} and {sizes[1]} bytes", flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(args.out, report)


if __name__ == "__main__":
    main()
