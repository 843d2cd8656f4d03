"""Which layers a window would hurt: the source measured on a text, before it is converted."""

import math
import os
from collections.abc import Callable
from pathlib import Path

from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.source import has_tokenizer
from tnt_hf.conversion.tokenizer import load_tokenizer


MAX_TOKENS = 16_384
FEW = 1_000  # tokens behind the window: with fewer, what a layer costs is mostly chance


def narrowed_layers(own: TNTConfig, window: int, count: int = 0) -> list[int]:
    """
    The layers in which `window` hides something that the source sees, ascending.

    Args:
        own: the source's configuration with the attention that it has.
        window: in tokens.
        count: how many of the layers are to be chosen.

    Raises:
        ValueError: there is none, so that nothing can be measured, or there are fewer than `count`.
    """
    if window + 1 >= own.max_position_embeddings:
        most = f"max_position_embeddings={own.max_position_embeddings} of the source"
        raise ValueError(
            f"window={window}: hides nothing within {most}, so there is nothing to probe; give a smaller one"
        )
    layers = [l for l, kind in enumerate(own.layer_types) if "sliding" not in kind or own.sliding_window > window]
    if not layers:
        seen = f"every layer of the source sees {own.sliding_window} tokens"
        raise ValueError(f"window={window}: costs no layer anything, {seen}; there is nothing to probe")
    if count > len(layers):
        found = f"{len(layers)} of {own.num_hidden_layers} layers"
        raise ValueError(f"keep_full_attention='auto:{count}': window={window} narrows {found}")
    return layers


def measure_window(
    folder: Path,
    probe: str | os.PathLike,
    window: int,
    choosing: bool,
    progress: bool = True,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[list[float], list[float] | None]:
    """
    What a window does to every layer of the source, which is loaded and freed.

    Args:
        folder: of the source.
        probe: a text, or the path of a text file; its first 16384 tokens are used.
        window: in tokens.
        choosing: whether layers are to be chosen, for which the loss is asked as well: a pass per layer.
        say: told how many tokens are measured, and if they are few.

    Returns:
        `sensitivity.window_errors` and, if `choosing`, `sensitivity.loss_increases`, a number per layer each.

    Raises:
        ValueError: the source has no tokenizer that can be loaded, or the window hides nothing that matters to a
            prediction in the text.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tnt_hf.conversion.sensitivity import loss_increases, print_progress, segments, window_errors

    if not has_tokenizer(folder):
        raise ValueError(f"probe: {folder} has no tokenizer to read a text with")
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"probe: {error}") from error
    ids = tokenizer(read_text(probe), return_tensors="pt", verbose=False)["input_ids"][:, :MAX_TOKENS]
    taken = "" if is_file(probe) else f" ({probe_name(probe)!r} is not a file, so it is the text)"
    if ids.shape[1] <= window + 1:  # the first token that the window narrows has to predict another
        raise ValueError(
            f"probe: the text has {ids.shape[1]} tokens, which must be more than window + 1 = {window + 1}{taken}"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False, use_safetensors=True)
    behind = sum(part.shape[1] - window for part in segments(model, ids, window))
    warning = f": warning: fewer than {FEW:,} measure mostly chance, give a longer text{taken}" if behind < FEW else ""
    say(f"probe       {ids.shape[1]:,} tokens, {behind:,} of them behind a window of {window}{warning}")
    with torch.inference_mode():
        errors = window_errors(model.eval(), ids, window, print_progress if progress else None)
        if strange := [layer for layer, error in enumerate(errors) if not math.isfinite(error)]:
            raise ValueError(f"probe: the window error of layer {strange[0]} is no number; the source overflows")
        return errors, loss_increases(model, ids, window) if choosing else None


def read_text(probe: str | os.PathLike) -> str:
    """The content of the file `probe`, or `probe` itself if there is no file of that name."""
    if is_file(probe):
        try:
            return Path(probe).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"probe={str(probe)!r}: is not UTF-8 text ({error})") from error
    if isinstance(probe, os.PathLike):
        raise FileNotFoundError(f"probe={str(probe)!r}: no such file")
    return probe


def probe_name(probe: str | os.PathLike | None) -> str | None:
    """A probe in a few words: the name of its file, or the text's beginning."""
    if probe is None:
        return None
    return Path(probe).name if is_file(probe) else probe if len(probe) <= 60 else f"{probe[:60]}..."


def is_file(probe: str | os.PathLike) -> bool:
    """Whether a probe names a file; anything else is the text itself."""
    try:
        return Path(probe).is_file()
    except (OSError, ValueError):  # too long, or with characters no file name has: a text
        return False
