"""The tasks of `tnt eval` on a model in memory, and what must hold before the first one starts."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tnt_hf
from tnt_hf.conversion.ablations import ablations
from tnt_hf.recipes.environment import environment
from tnt_hf.recipes.evaluation_cost import REPEATS, cost_rows
from tnt_hf.recipes.evaluation_model import documents_of, texts_of
from tnt_hf.recipes.evaluation_perplexity import (
    Rows,
    ablation_result,
    perplexity_result,
    rows_per_batch,
    token_losses,
)
from tnt_hf.recipes.evaluation_report import FORMAT
from tnt_hf.recipes.evaluation_retrieval import (
    PASSKEY_CHANCE,
    PasskeySamples,
    begin_token,
    passkey_distances,
    passkey_result,
    recall_length,
    recall_result,
    recall_vocabulary,
)
from tnt_hf.recipes.memory_statistics import host_of


OF_TEXT = ("perplexity", "passkey", "ablation")  # need a tokenizer
DEFAULT_CONTEXT = 1024
CUT = 16  # no document brings more than this part of all tokens, unless the context is longer


def contexts_of(config, context: int | Iterable[int] | None) -> tuple[list[int], list[str]]:
    """
    Lengths in ascending order, and a warning where rotary positions go on beyond `max_position_embeddings`.

    Raises:
        ValueError: no positive integers, or more tokens than a model without rotary positions has positions for.
    """
    known = getattr(config, "max_position_embeddings", None)
    if context is None:
        longest = min(DEFAULT_CONTEXT, known or DEFAULT_CONTEXT)
        return sorted({max(1, longest // 4), longest}), []
    contexts = sorted({context} if isinstance(context, int) else set(context))
    if not contexts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in contexts):
        raise ValueError(f"context={context!r}: must be positive integers (tokens)")
    if not known or contexts[-1] <= known:
        return contexts, []
    if getattr(config, "rope_parameters", None) is None:
        raise ValueError(f"context={contexts[-1]}: the model has positions for {known} tokens")
    return contexts, [f"context={contexts[-1]} is beyond max_position_embeddings={known}, which the model is made for"]


def possible_tasks(
    model: nn.Module, tokenizer, tasks: list[str], asked_for: bool, context: int, seed: int
) -> tuple[list[str], dict[str, str]]:
    """
    Those of `tasks` that can be run, and the reasons why others cannot.

    Raises:
        ValueError: a task that was asked for cannot be run, or one of text without a tokenizer.
    """
    if tokenizer is None and (missing := [task for task in tasks if task in OF_TEXT]):
        raise ValueError(f"tokenizer: the model has none, and {', '.join(missing)} need one; recall and cost do not")
    skipped = {}
    for task in tasks:
        try:
            if task == "passkey":
                PasskeySamples(tokenizer, context)
            elif task == "recall":
                recall_length(tokenizer, context)
                recall_vocabulary(tokenizer, host_of(model).config.vocab_size, seed)
            elif task == "ablation" and not ablations(model):
                raise ValueError("tasks: 'ablation' needs a model with memory, this one has none")
        except ValueError as error:
            if asked_for:
                raise
            skipped[task] = str(error)
    return [task for task in tasks if task not in skipped], skipped


@contextmanager
def as_it_was(model: nn.Module, local_chunk_sizes: int | list[int] | None) -> Iterator[None]:
    """Eval mode, and other chunk sizes where asked for; afterwards everything is as it was."""
    host, sizes = host_of(model), None
    if local_chunk_sizes is not None:
        if not hasattr(host, "set_local_chunk_sizes"):
            raise ValueError(
                f"local_chunk_sizes={local_chunk_sizes!r}: {type(host).__name__} has no local memories that can change"
            )
        sizes = host.config.local_chunk_sizes
        host.set_local_chunk_sizes(local_chunk_sizes)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        if sizes is not None:
            host.set_local_chunk_sizes(sizes)


@contextmanager
def _bar(task: str, total: int, unit: str, shown: bool):
    """A progress bar on a terminal, elsewhere one line: a log says which task has begun."""
    from tqdm import tqdm

    with tqdm(total=total, desc=task.ljust(10), unit=unit, disable=None if shown else True, dynamic_ncols=True) as bar:
        if shown and bar.disable:
            print(f"{task}: {total} {unit}{'s' * (total != 1)}", file=sys.stderr, flush=True)
        yield bar.update


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that memory is full. Not every allocator has an error of its own for that."""
    said = ("out of memory", "t allocate memory", "annot allocate memory", "not enough memory", "ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(text in str(error) for text in said)


@contextmanager
def _kept_apart(task: str, failed: dict[str, str]) -> Iterator[None]:
    """Where memory ends in one task, the others keep their results."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        failed[task] = f"out of memory: {str(error).strip().partition(chr(10))[0]}"


def run_tasks(
    model: nn.Module,
    tokenizer,
    tasks: list[str],
    data: str | Iterable[str],
    data_config: str | None,
    split: str | None,
    text_column: str,
    held_out: float,
    contexts: list[int],
    tokens: int,
    samples: int,
    seed: int,
    batch_size: int | None,
    progress: bool,
) -> dict[str, Any]:
    """The content of evaluation.json; arguments are those of `evaluate`, checked."""
    config, context, device = host_of(model).config, contexts[-1], next(model.parameters()).device
    batch = rows_per_batch(batch_size, context, config.vocab_size)
    common = {"samples": samples, "seed": seed, "batch_size": batch}
    results: dict[str, Any] = {
        "format": FORMAT,
        "command": None,
        "model": Path(str(getattr(config, "_name_or_path", ""))).name or type(model).__name__,
        "environment": environment(),
        "seed": seed,
        "settings": {
            "tasks": tasks,
            "context": contexts,
            "batch_size": batch,
            "samples": samples,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "device": device.type,
            "local_chunk_sizes": getattr(config, "local_chunk_sizes", None) or None,
            "begin_token": begin_token(tokenizer),
        },
    }
    rows = losses = None
    failed: dict[str, str] = {}
    if {"perplexity", "ablation"} & set(tasks):
        texts = texts_of(data, data_config, split, text_column, held_out, seed)
        documents, facts = documents_of(texts, tokenizer, tokens, max(context, tokens // CUT), config.vocab_size)
        name = (Path(data).name if Path(data).exists() else data) if isinstance(data, str) else "texts"
        facts = {"name": name, "config": data_config, "split": split, "held_out": held_out, **facts}
        rows = Rows.of(documents, context, begin_token(tokenizer))
    if "perplexity" in tasks:
        with _kept_apart("perplexity", failed), _bar("perplexity", len(rows.ids), "row", progress) as tell:
            losses = token_losses(model, rows, batch, tell)
            results["perplexity"] = {"data": facts, **perplexity_result(rows, losses)}
    if "passkey" in tasks:
        room = PasskeySamples(tokenizer, context)
        total = samples * len(passkey_distances(room.shortest, room.longest))
        with _kept_apart("passkey", failed), _bar("passkey", total, "prompt", progress) as tell:
            found = passkey_result(model, tokenizer, context, **common, tell=tell)
            results["passkey"] = [{**row, "chance": PASSKEY_CHANCE} for row in found]
    if "recall" in tasks:
        with _kept_apart("recall", failed), _bar("recall", samples, "sequence", progress) as tell:
            found, task = recall_result(model, tokenizer, context, **common, tell=tell)
            results["recall"] = [{**row, "chance": task.chance} for row in found]
    if "cost" in tasks:
        results["settings"]["cost_repeats"] = REPEATS
        with _kept_apart("cost", failed), _bar("cost", len(contexts), "context", progress) as tell:
            for row in cost_rows(model, contexts, config.vocab_size, seed):
                results.setdefault("cost", []).append(row)
                tell(1)
    if "ablation" in tasks:
        results["settings"]["ablation_data"] = facts["name"]
        passes = len(ablations(model)) + (losses is None)
        with _kept_apart("ablation", failed), _bar("ablation", passes * len(rows.ids), "row", progress) as tell:
            results["ablations"] = ablation_result(model, rows, batch, tell, losses)
    if failed and not {"perplexity", "passkey", "recall", "cost", "ablations"} & results.keys():
        raise ValueError(f"context={context}: {next(iter(failed.values()))}")
    return results | ({"failed": failed} if failed else {})


def evaluate_model(model: nn.Module, tokenizer, tasks: list[str], asked_for: bool, **options: Any) -> dict[str, Any]:
    """`evaluate`, its tasks read and put in order. `asked_for`: whether the user named them."""
    tnt_hf.register()
    for name in ("tokens", "samples", "batch_size"):
        value = options[name]
        if (name, value) != ("batch_size", None) and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ValueError(f"{name}={value!r}: must be a positive integer")
    if not isinstance(options["held_out"], (int, float)) or not 0 <= options["held_out"] < 1:
        raise ValueError(f"held_out={options['held_out']!r}: must be a share in [0, 1)")
    contexts, notes = contexts_of(host_of(model).config, options.pop("context"))
    possible, skipped = possible_tasks(model, tokenizer, tasks, asked_for, contexts[-1], options["seed"])
    with as_it_was(model, options.pop("local_chunk_sizes")):
        results = run_tasks(model, tokenizer, possible, contexts=contexts, **options)
    return results | ({"skipped": skipped} if skipped else {}) | ({"warnings": notes} if notes else {})
