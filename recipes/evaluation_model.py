"""The model and the documents that `tnt eval` is about.

A model may be a TNT checkpoint, any causal language model, a model with injected memory, or an adapter beside its
base. Documents are text that no training of this package reads by default, or whatever the user names.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

import tnt_hf
from tnt_hf.conversion import load_injected
from tnt_hf.conversion.reload import ADAPTER_CONFIG
from tnt_hf.conversion.source import HUB_ID, TOKENIZERS, check_reachable, read_json
from tnt_hf.recipes.loading_errors import reading
from tnt_hf.recipes.model_folder import file_of
from tnt_hf.recipes.sources import read_texts


TOKENIZER_FILES = ("tokenizer_config.json", *TOKENIZERS)
CHARACTERS_PER_TOKEN = 32  # how much of a long text is read to find that many tokens


def load_model(
    name: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """
    The model in eval mode, with injected memory and adapters if it has them, and its tokenizer or `None`.

    Args:
        name: folder or Hub id. tokenizer: folder or Hub id of another one. device: by default cuda where there is one.

    Raises:
        ValueError, OSError: no such model, a damaged one or one that lacks a tensor, code that is not trusted, no
            such device.
    """
    tnt_hf.register()
    if not name.strip():
        raise ValueError(f"MODEL {name!r}: must name a folder or a Hub id; the working directory is '.'")
    if not Path(name).is_dir() and (Path(name).exists() or not HUB_ID.fullmatch(name)):
        raise ValueError(f"MODEL {name}: is neither a folder nor a Hub id")
    for option, place in (("MODEL", name), ("--tokenizer", tokenizer or name)):
        try:
            check_reachable(place)
        except OSError as error:
            raise OSError(f"{option} {place}: {error}") from error
    if tokenizer and not Path(tokenizer).is_dir() and (Path(tokenizer).exists() or not HUB_ID.fullmatch(tokenizer)):
        raise ValueError(f"--tokenizer {tokenizer}: is neither a folder nor a Hub id")
    with reading(f"MODEL {name}"):
        model, base = _load(name, dtype, trust_remote_code)
        places = [tokenizer] if tokenizer else [name, base]
        place = next((place for place in places if any(file_of(place, file) for file in TOKENIZER_FILES)), None)
        found = None if place is None else AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    if tokenizer and found is None:
        raise ValueError(f"--tokenizer {tokenizer}: holds no tokenizer")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if str(device).startswith("meta"):
        raise ValueError(f"--device {device}: holds no numbers")
    try:
        return model.to(device).eval(), found
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {device}: {error}") from error


def _load(name: str, dtype: str, trust_remote_code: bool) -> tuple[nn.Module, str]:
    """The model, and the name of its base: itself, or the one that an adapter names."""
    base, settings = name, None
    adapter = file_of(name, ADAPTER_CONFIG)
    if adapter is not None:
        fields = read_json(adapter)
        base, settings = fields.get("base_model_name_or_path"), fields.get("tnt_injection")
        if not base:
            raise ValueError(f"{ADAPTER_CONFIG} does not name the base model")
        try:
            check_reachable(base)
        except OSError as error:
            raise ValueError(f"base_model_name_or_path={base!r} of {ADAPTER_CONFIG}: {error}") from error
        if Path(base).is_file():
            raise ValueError(f"base_model_name_or_path={base!r} of {ADAPTER_CONFIG}: is a file")
    elif Path(name).is_dir() and not Path(name, "config.json").is_file():
        raise ValueError(f"holds neither config.json nor {ADAPTER_CONFIG}")
    for place in dict.fromkeys((name, base)):
        if os.path.lexists(path := Path(place, GENERATION_CONFIG_NAME)):
            read_json(path)  # the library goes on without one that it cannot read
    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    arguments = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if settings is not None or getattr(config, "tnt_injection", None) or (adapter and config.model_type == "tnt"):
        return load_injected(name, **arguments), base
    model, info = AutoModelForCausalLM.from_pretrained(base, output_loading_info=True, **arguments)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"tensor {missing[0]!r} is missing")
    others = [x for x in sorted(info["unexpected_keys"]) if x.startswith(f"{model.base_model_prefix}.")]
    if config.model_type == "tnt" and others:
        raise ValueError(f"tensor {others[0]!r} belongs to another configuration")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, name)
    return model, base


def texts_of(
    data: str | Iterable[str], config: str | None, split: str | None, text_column: str, held_out: float, seed: int
) -> Iterable[str]:
    """
    The documents' texts, lazily, files and shards in an order that follows from the seed; given texts as they come.

    Args:
        data: what `dataset_name` of a recipe may be, or the texts. config, split: of a dataset, by default "train".
        held_out: share of the documents, chosen by the hash that a recipe's `eval_share` goes by; 0 is all of them.

    Raises:
        ValueError: nothing of that name can be read.
    """
    if not isinstance(data, str):
        return data
    chosen = {"config": config, "split": split or "train", "text_column": text_column}
    return read_texts(data, **chosen, streaming=True, share=held_out, seed=seed, field="data")


def documents_of(
    texts: Iterable[str], tokenizer, tokens: int, longest: int, vocab_size: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """
    Documents as token ids until there are `tokens` of them. None is longer than `longest`, its rest is not read; only
    if that leaves fewer tokens than asked for, the first of those that were cut are longer.

    Returns:
        (token ids of each document, how many documents there are and how many were cut).

    Raises:
        ValueError: no text, or a token id that the model does not know.
    """
    documents: list[list[int]] = []
    cut: dict[int, str] = {}

    def read(text: str, limit: int, place: int) -> list[int]:
        part = text[: CHARACTERS_PER_TOKEN * limit]
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        check_ids(ids, vocab_size)
        cut.pop(place, None)
        if ids and (len(ids) > limit or len(part) < len(text)):
            cut[place] = text
        return ids[:limit]

    total = 0
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"data: a document is a {type(text).__name__}, not text")
        if ids := read(text, min(longest, tokens - total), len(documents)):
            documents.append(ids)
            total += len(ids)
        if total >= tokens:
            break
    if not documents:
        raise ValueError("data: holds no text, or --held-out leaves none of it")
    for place, text in list(cut.items()):
        if total < tokens:
            longer = read(text, len(documents[place]) + tokens - total, place)
            total += len(longer) - len(documents[place])
            documents[place] = longer
    return documents, {"documents": len(documents), "documents_cut": len(cut)}


def check_ids(ids: list[int], vocab_size: int) -> None:
    """Raises `ValueError` for a token id that the model does not know."""
    if ids and (highest := max(ids)) >= vocab_size:
        raise ValueError(f"tokenizer: gives token id {highest}, the model knows {vocab_size}")
