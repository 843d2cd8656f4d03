"""Tokens per second of greedy decoding: models with memory against a Llama of as many parameters, 1k tokens cached.

    python -m tnt_hf.recipes.benchmarks.decode --out results/decode_demo.json

All models have the shape of the demo's (`tnt demo`): `hybrid` is what the demo converts its Llama into, at stage 2;
`tnt` is TNT from scratch, deep memories with Q-K projection, one of them local with chunks of one token. Their caches
are filled for real, with random tokens up to every memory time. The Llama's MLP is widened until it has as many
parameters; its cache holds `--llama-context` tokens. `compiled` are the same steps through `torch.compile`, with the
library's static cache; `in pieces` is reading on, as in the next turn of a conversation, `--piece` tokens per call.
Everybody takes turns in one process on one thread (see measure.py), a whole step of a user's loop each: forward,
argmax.

Axis legend: B batch   T tokens
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion.families import tnt_config
from tnt_hf.recipes.benchmarks.measure import environment, summarise, take_turns, write
from tnt_hf.recipes.demo_conversion import STUDENTS, ConversionPlan, teacher_config


TARGETS = {"eager over Llama": 0.5, "compiled over Llama": 0.8, "long over short context": 0.95}
PIECE = 4096  # tokens per call while a cache is filled


def tnt_models() -> dict[str, TNTConfig]:
    """The demo's hybrid after stage 2, and TNT from scratch in the same shape."""
    plan = ConversionPlan()
    source = teacher_config(plan, plan.vocab_size)
    stage_2 = {"local_chunk_sizes": [1]}
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    shape += ("num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    scratch = {name: getattr(source, name) for name in shape}
    return {
        "hybrid": tnt_config(source, window=plan.window, **STUDENTS["hybrid"] | stage_2),
        "tnt": TNTConfig(**scratch, sliding_window=plan.window, **stage_2),
    }


def llama_of(parameters: int) -> LlamaForCausalLM:
    """The demo's Llama with its MLP widened to `parameters` at least."""
    plan = ConversionPlan()
    config = teacher_config(plan, plan.vocab_size)
    missing = parameters - LlamaForCausalLM(config).num_parameters()
    per_channel = 3 * config.hidden_size * config.num_hidden_layers
    config.intermediate_size += max(0, round(missing / per_channel))
    return LlamaForCausalLM(LlamaConfig(**config.to_dict())).eval()


def fill(model, cache, batch: int, tokens: int, generator: torch.Generator):
    """Let `model` read that many random tokens into `cache`."""
    for done in range(0, tokens, PIECE):
        ids = torch.randint(model.config.vocab_size, (batch, min(PIECE, tokens - done)), generator=generator)
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
    return cache


def greedy(step: Callable, cache, batch: int, steps: int, rewind: Callable, piece: int = 1) -> Callable:
    """A function that decodes `steps` tokens, the last of which must be finite, and then rewinds the cache. Several
    tokens in a call, a `piece`, are not chosen one after the other, but all at once from the call before."""
    first = torch.zeros(batch, piece, dtype=torch.long)

    def decode():
        ids = first
        for _ in range(steps // piece):
            logits = step(input_ids=ids, use_cache=True, **{CACHE_NAME: cache}).logits
            ids = logits.argmax(-1)
        if not logits.isfinite().all():
            raise SystemExit("the logits are not finite")
        rewind()

    return decode


def nothing() -> None:
    """A memory need not be rewound: a step costs the same at any context."""


def llama_contestant(
    llama, batch: int, context: int, steps: int, g: torch.Generator, compiled: bool, piece: int = 1
) -> Callable:
    """The Llama at a cache of `context` tokens, to which every call returns."""
    if not compiled:
        cache = fill(llama, DynamicCache(config=llama.config), batch, context, g)
        return greedy(llama, cache, batch, steps, lambda: cache.crop(-steps), piece)
    cache = fill(llama, StaticCache(llama.config, max_cache_len=context + steps), batch, context, g)

    def rewind():
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    return greedy(torch.compile(llama.forward), cache, batch, steps, rewind)


def tnt_contestant(
    model, batch: int, context: int, steps: int, g: torch.Generator, compiled: bool, piece: int = 1
) -> tuple[Callable, int | None]:
    """A model with memory that has read `context` tokens, and how many bytes it keeps."""
    cache = StaticCache(model.config, max_cache_len=context + steps) if compiled else TNTCache(model.config)
    fill(model, cache, batch, context, g)
    size = None if compiled else cache.nbytes()
    return greedy(torch.compile(model.forward) if compiled else model, cache, batch, steps, nothing, piece), size


@torch.inference_mode()
def measure(
    models: tuple[str, ...] = ("hybrid", "tnt"),
    *,
    batches: tuple[int, ...] = (1, 8),
    contexts: tuple[int, ...] = (1024, 131072),
    llama_context: int = 1024,
    compiled: bool = True,
    steps: int = 64,
    piece: int = 8,
    rounds: int = 15,
    seed: int = 0,
    say: Callable[[str], object] = print,
) -> dict:
    """
    Tokens per second of everyone and ratios to the Llama's, per model and batch.

    Args:
        batches: rows. contexts: memory times in tokens, the first of which is compared with the Llama.
        llama_context: tokens in the Llama's cache. compiled: also through `torch.compile`, at the first context.
        steps: tokens per turn. piece: of them in a call, `in pieces`.

    Returns:
        `{model: {"parameters", "llama_parameters", "batch B": {"contestants", "over_llama", "pieces_over_tokens",
        "long_over_short", "cache_bytes"}}}`; a ratio is of tokens/s, `{"wall", "cpu": {"median", "min", "max"}}`.

    Raises:
        ValueError: `piece` does not divide `steps`.
    """
    if piece < 1 or steps % piece:
        raise ValueError(f"piece={piece}: must divide steps={steps}")
    g, report = torch.Generator().manual_seed(seed), {}
    for name in models:
        torch.manual_seed(seed)
        model = TNTForCausalLM(tnt_models()[name]).eval()
        llama = llama_of(model.num_parameters())
        report[name] = {"parameters": model.num_parameters(), "llama_parameters": llama.num_parameters()}
        for batch in batches:
            calls, sizes = {"Llama": llama_contestant(llama, batch, llama_context, steps, g, False)}, {}
            for context in contexts if batch == 1 else contexts[:1]:
                calls[f"eager {context}"], size = tnt_contestant(model, batch, context, steps, g, False)
                sizes[str(context)] = size
            calls["Llama in pieces"] = llama_contestant(llama, batch, llama_context, steps, g, False, piece)
            calls["in pieces"], _ = tnt_contestant(model, batch, contexts[0], steps, g, False, piece)
            if compiled:
                torch.compiler.reset()
                calls["compiled Llama"] = llama_contestant(llama, batch, llama_context, steps, g, True)
                calls["compiled"], _ = tnt_contestant(model, batch, contexts[0], steps, g, True)
            seconds = take_turns(calls, rounds, warmup=2)
            entry = {"contestants": summarise(seconds, f"eager {contexts[0]}", batch * steps), "cache_bytes": sizes}
            pairs = {"eager": (f"eager {contexts[0]}", "Llama"), "in pieces": ("in pieces", "Llama in pieces")}
            if compiled:
                pairs |= {"compiled": ("compiled", "compiled Llama"), "compiled over eager": ("compiled", "Llama")}
            entry["over_llama"] = {kind: ratio(seconds, *pair) for kind, pair in pairs.items()}
            entry["pieces_over_tokens"] = ratio(seconds, "in pieces", f"eager {contexts[0]}")
            if len(sizes) > 1:
                pair = (f"eager {contexts[-1]}", f"eager {contexts[0]}")
                entry["long_over_short"] = ratio(seconds, *pair)
            report[name][f"batch {batch}"] = entry
            say(line(name, batch, entry))
    return report


def ratio(seconds: dict, ours: str, theirs: str) -> dict:
    """Tokens/s of `ours` over tokens/s of `theirs`, formed inside a round."""
    return summarise({ours: seconds[ours], theirs: seconds[theirs]}, ours, 1)[theirs]["speedup"]


def line(name: str, batch: int, entry: dict) -> str:
    """What is printed of a model and a batch: processor time."""
    rates = {who: each["tokens_per_second"]["cpu"]["median"] for who, each in entry["contestants"].items()}
    ratios = {**entry["over_llama"], "long/short": entry.get("long_over_short")}
    ratios["pieces/tokens"] = entry["pieces_over_tokens"]
    words = [f"{who} {rate:.0f}" for who, rate in rates.items()]
    told = [
        f"{kind} {x['cpu']['median']:.2f} ({x['cpu']['min']:.2f}-{x['cpu']['max']:.2f})"
        for kind, x in ratios.items()
        if x
    ]
    return f"{name}, batch {batch}: tokens/s {', '.join(words)}; over Llama: {', '.join(told)}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument("--models", nargs="+", default=["hybrid", "tnt"], choices=["hybrid", "tnt"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 131072], help="memory times in tokens")
    parser.add_argument("--llama-context", type=int, default=1024, help="tokens in the Llama's cache")
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens per turn")
    parser.add_argument("--piece", type=int, default=8, help="tokens of a call in pieces")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = measure(
        tuple(args.models),
        batches=tuple(args.batches),
        contexts=tuple(args.contexts),
        llama_context=args.llama_context,
        compiled=not args.no_compile,
        steps=args.steps,
        piece=args.piece,
        rounds=args.rounds,
        seed=args.seed,
    )
    if args.out is not None:
        write(args.out, {"environment": environment(args.seed), "targets": TARGETS, "models": found})


if __name__ == "__main__":
    main()
