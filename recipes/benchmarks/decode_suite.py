"""Suite `decode`: decoding, prefill and cache bytes of TNT against a Llama of equal size, by tokens that were read.

Both read random tokens. TNT's prompt is read in one call, and its cache decodes on from there. Keys and values of the
Llama are random numbers of as many tokens, for nothing in its speed depends on what they are; it decodes with the
library's default cache, which is copied as it grows, and with the static one, which is not. Every decoded token is a
forward call of its own. The memory goes on from turn to turn, the Llama's cache goes back to its context. In the row
`flat` the shortest and the longest context take turns with each other.

Axis legend: B batch   T tokens
"""

import copy
import dataclasses
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.recipes.benchmarks.gate import require_agreement
from tnt_hf.recipes.benchmarks.measure import columns, spread, take_turns, times_faster, waiting
from tnt_hf.recipes.benchmarks.settings import DecodeSettings


SHAPES: dict[str, dict[str, Any]] = {
    # that of the demo, with its window
    "demo": {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 32},
    "150m": {"vocab_size": 32128, "hidden_size": 768, "intermediate_size": 1792, "num_hidden_layers": 12}
    | {"num_attention_heads": 12, "num_key_value_heads": 12, "sliding_window": 512},
    "tiny": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8},
}
MEMORIES = {"TNT {16}": {"local_chunk_sizes": [16]}, "TNT {1}": {"local_chunk_sizes": [1]}}
LLAMA, STATIC = "Llama", "Llama, static cache"
GATE, FLAT_ROW, CHECKED_TOKENS = "check", "flat", 75
DEFAULTS = {
    "cpu": {"shape": "demo", "dtype": "float32", "repeat_limit": 16384},
    "cuda": {"shape": "150m", "dtype": "bfloat16", "repeat_limit": 131072},
}
# On a CPU in float64: sums in another order, and no more. On a GPU in float32, whose matrix products may round.
TOLERANCES = {"cpu": 1e-8, "cuda": 1e-3}
# Of the speed at the shortest context, at the longest; and of the Llama's at about 1k tokens of cache.
FLAT, OF_LLAMA = 0.95, 0.5


def config_of(name: str, settings: DecodeSettings, **more) -> TNTConfig:
    """Of a TNT contestant. Random weights on random tokens need the bound to stay finite."""
    fields = {"max_position_embeddings": 1 << 18, "eos_token_id": None, "memory_grad_bound": 1.0}
    fields["memory_implementation"] = settings.memory_implementation
    return TNTConfig(**fields | SHAPES[settings.shape] | MEMORIES[name] | more)


def tnt(name: str, settings: DecodeSettings, **more) -> TNTForCausalLM:
    """A model, ready to decode."""
    torch.manual_seed(settings.seed)
    return TNTForCausalLM(config_of(name, settings, **more)).eval()


def llama(settings: DecodeSettings) -> LlamaForCausalLM:
    """With full attention and, by the width of its MLP, as many parameters as the TNT models."""
    shape = {name: value for name, value in SHAPES[settings.shape].items() if name != "sliding_window"}
    with torch.device("meta"):
        wanted = TNTForCausalLM(config_of("TNT {1}", settings)).num_parameters()

    def config(width: int) -> LlamaConfig:
        fields = {"max_position_embeddings": 1 << 18, "eos_token_id": None, "attn_implementation": "sdpa"}
        return LlamaConfig(**shape | {"intermediate_size": width}, **fields)

    with torch.device("meta"):
        missing = wanted - LlamaForCausalLM(config(shape["intermediate_size"])).num_parameters()
    per_channel = 3 * shape["hidden_size"] * shape["num_hidden_layers"]
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(config(shape["intermediate_size"] + round(missing / per_channel))).eval()


def placed(model: PreTrainedModel, settings: DecodeSettings) -> PreTrainedModel:
    """As it is timed."""
    return model.to(settings.device, getattr(torch, settings.dtype))


def empty_cache(name: str, model: PreTrainedModel, room: int):
    """Of the contestant's kind; the static one has room for so many tokens."""
    if name in MEMORIES:
        return TNTCache(model.config)
    return StaticCache(model.config, max_cache_len=room) if name == STATIC else DynamicCache(config=model.config)


def filled(model: LlamaForCausalLM, context: int, batch_size: int, more: int, static: bool):
    """A Llama's cache that holds random keys and values of `context` tokens, with room for `more`."""
    config, weight = model.config, model.lm_head.weight
    shape = (batch_size, config.num_key_value_heads, context, config.head_dim)
    cache = empty_cache(STATIC if static else LLAMA, model, context + more)
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        cache.update(keys, values, layer)
    return cache


def cache_bytes(cache) -> int:
    """Of all layers."""
    if isinstance(cache, TNTCache):
        return cache.nbytes()
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


@torch.inference_mode()
def check(name: str, settings: DecodeSettings) -> float:
    """Logits of a prompt read in two calls and one token at a time against those of one call. Returns the largest
    relative difference. Raises `SystemExit` where it is too large."""
    if name in MEMORIES:  # small chunks, so that the few tokens pass them, the window and a reset
        model: Any = tnt(name, settings, sliding_window=16, global_chunk_size=32, local_reset_interval=32)
    else:
        model = llama(settings)
    model = model.to(settings.device, torch.float64 if settings.device == "cpu" else torch.float32)
    cache = empty_cache(name, model, CHECKED_TOKENS)
    ids = torch.randint(model.config.vocab_size, (2, CHECKED_TOKENS), generator=torch.Generator().manual_seed(1))
    ids, half = ids.to(settings.device), CHECKED_TOKENS // 2
    pieces = [ids[:, :7], ids[:, 7:half], *ids[:, half:].split(1, 1)]
    steps = [model(piece, use_cache=True, **{CACHE_NAME: cache}).logits for piece in pieces]
    want = model(ids, use_cache=False).logits
    return require_agreement(name, [torch.cat(steps, 1)], [want], TOLERANCES[settings.device])


def prepare(settings: DecodeSettings) -> DecodeSettings:
    """Sorted contexts, and what depends on the device. Raises `ValueError` for an unknown shape or dtype."""
    chosen = {name: getattr(settings, name) or x for name, x in DEFAULTS[settings.device].items()}
    for name, known in (("shape", tuple(SHAPES)), ("dtype", ("float32", "bfloat16"))):
        if chosen[name] not in known:
            raise ValueError(f"{name}={chosen[name]!r}: must be one of {', '.join(map(repr, known))}")
    return dataclasses.replace(settings, **chosen, contexts=tuple(sorted(settings.contexts)))


def rows(settings: DecodeSettings) -> list[str]:
    """The check of everybody, one row per context, and the shortest against the longest."""
    return [GATE, *map(str, settings.contexts), FLAT_ROW]


def measure(name: str, settings: DecodeSettings, tell) -> dict:
    """One row."""
    if name == FLAT_ROW:
        return in_turns(settings, tell)
    if name != GATE:
        return at_context(int(name), settings, tell)
    found = {}
    for contestant in (*MEMORIES, LLAMA, STATIC):
        tell(contestant)
        found[contestant] = check(contestant, settings)
    return {"largest_relative_difference": found}


def prompt(context: int, settings: DecodeSettings) -> torch.Tensor:
    """Random tokens `[1, T]`."""
    vocabulary, g = SHAPES[settings.shape]["vocab_size"], torch.Generator().manual_seed(settings.seed)
    return torch.randint(vocabulary, (1, context), generator=g).to(settings.device)


def read(name: str, model: PreTrainedModel, ids: torch.Tensor):
    """A cache that holds the prompt. Raises `SystemExit` if a logit is not finite."""
    cache = empty_cache(name, model, ids.shape[1])
    logits = model(ids, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache}).logits
    if not logits.isfinite().all():
        raise SystemExit(f"{name}: logits are not finite after {ids.shape[1]} tokens")
    return cache


@torch.inference_mode()
def at_context(context: int, settings: DecodeSettings, tell) -> dict:
    """Prefill of so many tokens, decoding from there with every batch size, and the bytes of the caches."""
    models: dict[str, PreTrainedModel] = {name: tnt(name, settings) for name in MEMORIES} | {LLAMA: llama(settings)}
    models = {name: placed(model, settings) for name, model in models.items()}
    ids, wait = prompt(context, settings), waiting(settings.device)
    caches: dict[str, Any] = {}

    def reading(name):
        def call():
            caches[name] = read(name, models[name], ids)

        return call

    readers = {name: reading(name) for name in models if name in MEMORIES or context <= settings.prefill_limit}
    rounds, warmup = (settings.rounds, 1) if context <= settings.repeat_limit else (1, 0)
    prefill = take_turns(readers, rounds, warmup, lambda text: tell(f"prefill, {text}"), wait)
    caches.pop(LLAMA, None)
    result = {"prefill": prefill, "parameters": {n: m.num_parameters() for n, m in models.items()}, "decode": {}}
    result["cache_bytes"] = {name: cache_bytes(cache) for name, cache in caches.items()}
    for batch_size in settings.batch_sizes:
        calls = {}
        for name in (*MEMORIES, LLAMA, STATIC):
            if name in MEMORIES:
                cache = copy.deepcopy(caches[name])
                cache.batch_repeat_interleave(batch_size)
            else:
                cache = filled(models[LLAMA], context, batch_size, settings.steps, static=name == STATIC)
            if name == LLAMA:
                result["cache_bytes"][name] = cache_bytes(cache) // batch_size
            calls[name] = decoding(name, models.get(name, models[LLAMA]), cache, batch_size, settings)
        label = f"decoding {batch_size} rows"
        seconds = take_turns(calls, settings.rounds, 1, lambda text, label=label: tell(f"{label}, {text}"), wait)
        result["decode"][str(batch_size)] = seconds
    return result


@torch.inference_mode()
def in_turns(settings: DecodeSettings, tell) -> dict:
    """One row decoding from the shortest and from the longest context in turns, TNT only."""
    result, wait = {}, waiting(settings.device)
    for name in MEMORIES:
        model, calls = placed(tnt(name, settings), settings), {}
        for context in (settings.contexts[0], settings.contexts[-1]):
            tell(f"{name}, reading {context} tokens")
            cache = read(name, model, prompt(context, settings))
            calls[str(context)] = decoding(name, model, cache, 1, settings)
        seconds = take_turns(calls, 2 * settings.rounds, 1, lambda text, n=name: tell(f"{n}, {text}"), wait)
        result[name] = seconds
    return result


def decoding(name: str, model: PreTrainedModel, cache, batch_size: int, settings: DecodeSettings):
    """A call that decodes so many greedy tokens, one forward each, from where the last one ended."""
    state = {"ids": torch.zeros(batch_size, 1, dtype=torch.long, device=settings.device)}

    def call():
        ids = state["ids"]
        for _ in range(settings.steps):
            logits = model(ids, use_cache=True, **{CACHE_NAME: cache}).logits
            ids = logits[:, -1:].argmax(-1)
        if not logits.isfinite().all():
            raise SystemExit(f"{name}: logits are not finite while decoding")
        state["ids"] = ids
        if name == LLAMA:
            cache.crop(-settings.steps)
        elif name == STATIC:
            for layer in cache.layers:
                layer.cumulative_length -= settings.steps

    return call


def summary(found: dict[str, dict], settings: DecodeSettings) -> dict:
    """Tokens per second by context, the longest over the shortest, TNT over the Llama, and what was asked."""
    clock = settings.clock
    contexts = {name: entry for name, entry in found.items() if name not in (GATE, FLAT_ROW)}
    decode: dict[str, dict] = {}
    against: dict[str, dict] = {}
    prefill: dict[str, dict] = {}
    sizes: dict[str, dict] = {}
    for context, entry in contexts.items():
        for batch_size, seconds in entry["decode"].items():
            tokens = settings.steps * int(batch_size)
            for name, clocks in seconds.items():
                by_context = decode.setdefault(batch_size, {}).setdefault(name, {})
                by_context[context] = spread([tokens / x for x in clocks[clock]], 1)
            for name in MEMORIES:
                for other in (LLAMA, STATIC):
                    ratios = against.setdefault(batch_size, {}).setdefault(f"{name} / {other}", {})
                    ratios[context] = times_faster(seconds, name, other, clock)
        for name, clocks in entry["prefill"].items():
            prefill.setdefault(name, {})[context] = spread([int(context) / x for x in clocks[clock]], 1)
        for name, size in entry["cache_bytes"].items():
            sizes.setdefault(name, {})[context] = size
    first, last = (str(n) for n in (settings.contexts[0], settings.contexts[-1]))
    flat = {name: times_faster(seconds, last, first, clock) for name, seconds in found[FLAT_ROW].items()}
    holds = {f"{name}: same bytes of cache at every context": len(set(sizes[name].values())) == 1 for name in MEMORIES}
    holds |= {f"{name}: {last} as fast as {first}": ratio["median"] >= FLAT for name, ratio in flat.items()}
    if "1" in against:
        ratio = against["1"][f"TNT {{1}} / {LLAMA}"][first]["median"]
        holds[f"TNT {{1}} decodes at {OF_LLAMA} of the Llama at {first}"] = ratio >= OF_LLAMA
    return {
        "decode_tokens_per_second": decode,
        "decode_against_llama": against,
        "decode_longest_over_shortest": flat,
        "prefill_tokens_per_second": prefill,
        "cache_bytes": sizes,
        "targets": {"longest_over_shortest": FLAT, "against_llama": OF_LLAMA},
        "holds": holds,
    }


def table(result: dict) -> list[str]:
    """Tokens per second and bytes by context."""
    found, contexts = result["summary"], list(map(str, result["settings"]["contexts"]))
    head = tuple(f"{int(context):,}" for context in contexts)

    def cells(by_context):
        return [f"{by_context[c]['median']:,.0f}" if c in by_context else "not measured" for c in contexts]

    text = []
    for batch_size, by_name in found["decode_tokens_per_second"].items():
        lines = [(name, *cells(by)) for name, by in by_name.items()]
        text += [*columns([(f"decode, batch {batch_size}, tokens/s at", *head), *lines]), ""]
        ratios = found["decode_against_llama"][batch_size]
        lines = [(name, *(f"{by[c]['median']:.2f}" for c in contexts)) for name, by in ratios.items()]
        text += [*columns([("times the speed", *head), *lines]), ""]
    lines = [(name, *cells(by)) for name, by in found["prefill_tokens_per_second"].items()]
    text += [*columns([("prefill, tokens/s", *head), *lines]), ""]
    lines = [(name, *(by[c] for c in contexts)) for name, by in found["cache_bytes"].items()]
    text += columns([("bytes of cache per row", *head), *lines])
    for name, ratio in found["decode_longest_over_shortest"].items():
        text.append(f"{name}: {head[-1]} against {head[0]} tokens, in turns: {ratio['median']:.2f} of the speed")
    return text
