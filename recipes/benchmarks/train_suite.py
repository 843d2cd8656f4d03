"""Suite `train`: one training step of models of equal size, at several row lengths (the paper's Table 1, Figure 4).

A step is forward, backward and the AdamW update, of a fixed number of tokens: longer rows are fewer. Where a row is
longer than that, the step is one row. All contestants take turns at every length, after a check of each of them. Who
does not fit into the memory beside the others is left out of that length.

Axis legend: B batch   T tokens
"""

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable

import torch

from tnt_hf.recipes.allocator import keep_freed_memory
from tnt_hf.recipes.benchmarks.measure import columns, spread, take_turns, times_faster, waiting
from tnt_hf.recipes.benchmarks.settings import TrainSettings
from tnt_hf.recipes.benchmarks.train_models import (
    BLOCKED,
    CONTESTANTS,
    EXECUTIONS,
    SHAPES,
    TRANSFORMER,
    WINDOW,
    build,
    check,
    compiling,
    equal_configs,
)
from tnt_hf.recipes.evaluation_run import is_exhaustion


GATE = "check"
NOT_FITTING = "out of memory"
# (contestant, against whom, tokens of a row, times as fast)
TARGETS = (
    ("TNT {64}", "Titans C=8", 8192, 4.0),
    ("TNT {16}", TRANSFORMER, 8192, 1.3),
    ("TNT {16}", TRANSFORMER, 32768, 3.0),
)
DEFAULTS = {
    "cpu": {"shape": "shrunk", "tokens": 8192, "dtype": "float32", "attention": "blocked_causal"},
    "cuda": {"shape": "150m", "tokens": 65536, "dtype": "bfloat16", "attention": "sdpa"},
}


def prepare(settings: TrainSettings) -> TrainSettings:
    """The settings with what depends on the device. Raises `ValueError` for an unknown name."""
    chosen = {name: getattr(settings, name) or x for name, x in DEFAULTS[settings.device].items()}
    everybody = tuple(name for name in CONTESTANTS if name != BLOCKED or settings.device == "cpu")
    settings = dataclasses.replace(settings, **chosen, contestants=settings.contestants or everybody)
    for name, value, known in (
        ("shape", settings.shape, SHAPES),
        ("dtype", settings.dtype, ("float32", "bfloat16")),
        ("execution", settings.execution, EXECUTIONS),
        *(("contestants", contestant, CONTESTANTS) for contestant in settings.contestants),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, known))}")
    if settings.device == "cpu":
        keep_freed_memory()  # as `tnt train` does
    return settings


def rows(settings: TrainSettings) -> list[str]:
    """The check of everybody, then one row per length."""
    return [GATE, *map(str, settings.contexts)]


def measure(name: str, settings: TrainSettings, tell) -> dict:
    """One row."""
    with compiling(settings.execution):
        return check_all(settings, tell) if name == GATE else time_steps(int(name), settings, tell)


def check_all(settings: TrainSettings, tell) -> dict:
    """How far every contestant is from the recurrence."""
    differences, rounded = {}, {}
    how = (settings.attention, settings.device, settings.seed, settings.memory_implementation, settings.execution)
    autocast = None if settings.dtype == "float32" else getattr(torch, settings.dtype)
    for contestant in settings.contestants:
        tell(contestant)
        differences[contestant], rounded[contestant] = check(contestant, *how, autocast)
    found = {"largest_relative_difference": differences}
    return found if autocast is None else found | {f"largest_relative_distance_in_{settings.dtype}": rounded}


def time_steps(context: int, settings: TrainSettings, tell) -> dict:
    """Seconds of every contestant's step at one row length."""
    shape, batch_size = SHAPES[settings.shape], max(1, settings.tokens // context)
    g = torch.Generator().manual_seed(settings.seed)
    ids = torch.randint(shape["vocab_size"], (batch_size, context), generator=g).to(settings.device)
    losses = {}

    def step(contestant, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=settings.device == "cuda" or None)
        run = EXECUTIONS[settings.execution](model)

        def call():
            with autocast(settings):
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[contestant] = loss.detach()

        return call

    implementation = {"memory_implementation": settings.memory_implementation}
    configs = equal_configs(list(settings.contestants), shape, **implementation)
    models, calls, bytes_of_first_steps = {}, {}, {}

    def begin(contestant):
        model = build(contestant, configs[contestant], settings.attention, settings.seed)
        models[contestant] = model.to(settings.device)
        calls[contestant] = step(contestant, models[contestant])
        calls[contestant]()

    for contestant in settings.contestants:
        tell(f"{contestant}, first step")
        if (size := fits(lambda name=contestant: begin(name), settings.device)) is None:
            models.pop(contestant, None), calls.pop(contestant, None)
        elif settings.device == "cuda":
            bytes_of_first_steps[contestant] = size
    for contestant in list(calls) if settings.device == "cuda" else ():  # beside the moments of all others
        tell(f"{contestant}, second step")
        if fits(calls[contestant], settings.device) is None:
            del models[contestant], calls[contestant], losses[contestant], bytes_of_first_steps[contestant]
    if not calls:
        raise SystemExit(f"{ids.numel()} tokens do not fit into the memory for any contestant: choose fewer --tokens")
    warmup = 2 if context <= settings.tokens else 0  # until what is freed and kept suffices; longer steps take minutes
    seconds = take_turns(calls, settings.rounds, warmup, tell, waiting(settings.device))
    final = {contestant: loss.item() for contestant, loss in losses.items()}
    if wrong := [contestant for contestant, loss in final.items() if not math.isfinite(loss)]:
        raise SystemExit(f"{', '.join(wrong)}: the loss is not finite at {context} tokens")
    return {
        "tokens": ids.numel(),
        "batch_size": batch_size,
        "parameters": {contestant: model.num_parameters() for contestant, model in models.items()},
        "seconds": seconds,
        "last_loss": final,
        "did_not_fit": [contestant for contestant in settings.contestants if contestant not in calls],
        **({"bytes_of_first_step": bytes_of_first_steps} if bytes_of_first_steps else {}),
    }


def fits(call: Callable[[], object], device: str) -> int | None:
    """Bytes of a GPU that a call needed beside what was there, 0 on a CPU; `None` if there were not enough."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not is_exhaustion(error):
            raise
    else:
        return torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    gc.collect()  # with the error its frames are gone
    torch.cuda.empty_cache()
    return None


def autocast(settings: TrainSettings):
    """Around a forward pass."""
    if settings.dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(settings.device, torch.bfloat16)


def summary(found: dict[str, dict], settings: TrainSettings) -> dict:
    """Microseconds per token, how many times as fast as the Transformer and as Titans C=8, and the targets."""
    clock = settings.clock
    lengths = {name: entry for name, entry in found.items() if name != GATE}
    times: dict[str, dict] = {contestant: {} for contestant in settings.contestants}
    for length, entry in lengths.items():
        for contestant, clocks in entry["seconds"].items():
            times[contestant][length] = spread([1e6 * x / entry["tokens"] for x in clocks[clock]])
    others = (TRANSFORMER, BLOCKED, "Titans C=8")
    pairs = [(ours, other) for other in others for ours in settings.contestants if ours != other]
    pairs += [(f"TNT {{{size}}}", f"Titans C={size}") for size in (16, 64, 128) if f"TNT {{{size}}}" in times]
    faster = {
        f"{ours} against {other}": {
            length: times_faster(entry["seconds"], ours, other, clock)
            for length, entry in lengths.items()
            if {ours, other} <= entry["seconds"].keys()
        }
        for ours, other in pairs
        if other in settings.contestants
    }
    targets = [
        {"ours": ours, "other": other, "tokens": tokens, "wanted": wanted, "found": ratios[str(tokens)]}
        for ours, other, tokens, wanted in TARGETS
        if str(tokens) in (ratios := faster.get(f"{ours} against {other}", {}))
    ]
    for target in targets:
        target["holds"] = target["found"]["median"] >= target["wanted"]
    return {"microseconds_per_token": times, "times_faster": faster, "targets": targets}


def table(result: dict) -> list[str]:
    """Microseconds per token of all contestants at all lengths, and the targets."""
    times, lengths = result["summary"]["microseconds_per_token"], list(map(str, result["settings"]["contexts"]))

    def cells(by_length, base):
        return [
            f"{by_length[n]['median'] - base.get(n, {'median': 0})['median']:.4g}" if n in by_length else NOT_FITTING
            for n in lengths
        ]

    lines = [(name, *cells(by_length, {})) for name, by_length in times.items()]
    text = columns([("microseconds per token at", *(f"{int(length):,}" for length in lengths)), *lines])
    if len(times.get(WINDOW, {})) == len(lengths):
        over = [(name, *cells(by, times[WINDOW])) for name, by in times.items() if name != WINDOW]
        text += ["", *columns([(f"over {WINDOW}", *(f"{int(length):,}" for length in lengths)), *over])]
    for target in result["summary"]["targets"]:
        spread_ = target["found"]
        text.append(
            f"{target['ours']} against {target['other']} at {target['tokens']:,} tokens: {spread_['median']:.2f}x"
            f" ({spread_['min']:.2f} to {spread_['max']:.2f}), asked {target['wanted']:.1f}x"
        )
    return text
