"""One YAML is one run: a file and a command line become the four dataclasses of a recipe.

    --config recipes/tnt_debug/stage1.yaml --learning_rate 1e-3 --model_config.hidden_size 64 --local_chunk_sizes 4 8

The file is a flat mapping of fields; the command line overrides it, and mappings are merged, not replaced. A field of
`TNTConfig` may stand wherever a recipe field may, and means `model_config.FIELD`. Everything is checked before
anything is loaded: names, types, ranges, and settings that contradict each other.
"""

import math
import os
import types
import typing
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tnt_hf.recipes.arguments import DataArguments, ModelArguments, RunArguments
from tnt_hf.recipes.contradictions import check_settings, shown
from tnt_hf.settings import check_text, parse_value, read_yaml


# What a recipe expects of `TrainingArguments` where it says nothing; the library has other ideas.
TRAINER_DEFAULTS = {
    "num_train_epochs": 1.0,
    "logging_steps": 10.0,
    "logging_nan_inf_filter": False,
    "save_only_model": False,
    "remove_unused_columns": False,
    "seed": 0,
}
AT_LEAST_1 = (
    "dataloader_prefetch_factor", "ddp_timeout", "eval_accumulation_steps", "eval_rows", "gradient_accumulation_steps",
    "per_device_eval_batch_size", "per_device_train_batch_size", "sequence_length", "tokenizer_vocab_size",
    "train_tokens",
)  # fmt: skip
AT_LEAST_0 = (
    "adam_epsilon", "dataloader_num_workers", "eval_delay", "gate_learning_rate", "learning_rate", "max_grad_norm",
    "memory_learning_rate", "memory_logging_steps", "neftune_noise_alpha", "num_train_epochs", "seed", "warmup_steps",
    "weight_decay", "window_dropout_warmup_steps",
)  # fmt: skip
INTERVALS = ("eval_steps", "logging_steps", "save_steps")  # at 0 or less the library means something else
OURS = (RunArguments, DataArguments, ModelArguments)
LEAST_TOKENS = 257
MOST_TOKENS = 1_000_000  # of a vocabulary: the trainer of the tokenizer allocates all of them at once, or aborts


@dataclass
class Recipe:
    """A run: its four dataclasses, and where they came from.

    Attributes:
        training: `transformers.TrainingArguments`.
        given: the settings that were given, `{field: value}`, in the order of the dataclasses.
        name: `<folder>/<file>.yaml` of the recipe, `None` without one.
    """

    model: ModelArguments
    data: DataArguments
    run: RunArguments
    training: Any
    given: dict[str, Any]
    name: str | None


def default_settings() -> dict[str, Any]:
    """The value of every field that a recipe does not mention, as YAML would write it."""
    from transformers import TrainingArguments

    return _defaults(TrainingArguments, *OURS) | TRAINER_DEFAULTS


def _defaults(*kinds: type) -> dict[str, Any]:
    found = {}
    for field in (field for kind in kinds for field in fields(kind)):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        found[field.name] = getattr(default, "value", default)
    return found


class Text(str):
    """A value from the command line, not yet read."""


class Flag(Text):
    """Stands for the value of an option given without one: true, if the field can be that."""


def read_recipe(arguments: list[str]) -> Recipe:
    """
    The recipe that a command line asks for: `--config FILE` and `--field value` for any field.

    Raises:
        ValueError: an unknown field (naming the closest one), a value of the wrong type or out of range, or settings
            that contradict each other.
        OSError: the file of the recipe cannot be read.
    """
    from transformers import HfArgumentParser, TrainingArguments

    path, overrides = _command_line(arguments)
    settings = {} if path is None else _read(path)
    hints = _hints()
    flat = flatten(settings, overrides)
    if {"max_steps", "train_tokens"} & overrides.keys() and "num_train_epochs" not in overrides:
        flat.pop("num_train_epochs", None)  # the command line says how long, instead of the file
    if "dataset_name" in overrides and "dataset_config" not in overrides:
        flat.pop("dataset_config", None)  # it is one of the dataset that the file names
    given = {name: _typed(name, flat[name], hint) for name, hint in hints.items() if name in flat}
    for names, least in ((AT_LEAST_1, 1), (AT_LEAST_0, 0)):
        for name in names:
            if given.get(name) is not None and given[name] < least:
                raise ValueError(f"{name}={given[name]!r}: must be at least {least}")
    for name in INTERVALS:
        if given.get(name) is not None and not given[name] > 0:
            raise ValueError(f"{name}={given[name]!r}: must be at least 1, or below 1 a share of the run")
    for name in ("adam_beta1", "adam_beta2"):
        if name in given and not 0 <= given[name] < 1:
            raise ValueError(f"{name}={given[name]!r}: must be at least 0 and below 1")
    choices = {field.name: field.metadata.get("choices") for field in fields(TrainingArguments)}
    for name, value in given.items():  # which the library looks up when everything is loaded
        if choices.get(name) and value is not None and value not in choices[name]:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices[name])}")
    if given.get("use_liger_kernel") and not find_spec("liger_kernel"):
        raise ValueError("use_liger_kernel=True: needs the package liger-kernel, which is not installed")
    if (backend := given.get("torch_compile_backend")) is not None:
        from accelerate.utils import DynamoBackend  # here: it takes its time

        if backend.upper() not in (known := [kind.value for kind in DynamoBackend]):
            raise ValueError(f"torch_compile_backend={backend!r}: must be one of {', '.join(known).lower()}")
    mode = given.get("torch_compile_mode")
    if mode is not None and given.get("torch_compile_backend") in (None, "inductor"):
        from torch._inductor import list_mode_options  # here: it takes its time

        if mode not in list_mode_options():
            raise ValueError(f"torch_compile_mode={mode!r}: must be one of {', '.join(list_mode_options())}")
    if given.get("max_steps", -1) < 1 and given.get("max_steps", -1) != -1:  # which the library would not obey
        raise ValueError(f"max_steps={given['max_steps']!r}: must be at least 1, or -1 for whole epochs")
    if not LEAST_TOKENS <= (given.get("tokenizer_vocab_size") or LEAST_TOKENS) <= MOST_TOKENS:
        raise ValueError(
            f"tokenizer_vocab_size={given['tokenizer_vocab_size']!r}: must be {LEAST_TOKENS} (a token for every byte"
            f" and one for the end) to {MOST_TOKENS}"
        )
    name = None if path is None else f"{path.parent.name}/{path.name}"
    check_settings(given, _defaults(*OURS))

    training = TRAINER_DEFAULTS | {"report_to": "tensorboard" if find_spec("tensorboard") else "none"}
    training["output_dir"] = os.path.join("runs", *(("train",) if path is None else (path.parent.name, path.stem)))
    if "per_device_train_batch_size" in given:  # as many rows as fit into memory; their number changes no evaluation
        training["per_device_eval_batch_size"] = given["per_device_train_batch_size"]
    parser = HfArgumentParser((ModelArguments, DataArguments, RunArguments, TrainingArguments))
    try:
        return Recipe(*parser.parse_dict(training | _widened(given, hints)), given=given, name=name)
    # it looks for packages, devices and entries, and computes with numbers
    except (ImportError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"TrainingArguments: {type(error).__name__}: {error}") from error


def flatten(*layers: dict[str, Any]) -> dict[str, Any]:
    """
    Settings from files and command lines, later ones over earlier ones, by the field that they set: a `TNTConfig`
    field becomes one of `model_config`.

    Raises:
        ValueError: a name that is not a field, or one given twice in one layer.
    """
    from tnt_hf import TNTConfig

    hints, known = _hints(), set(TNTConfig.__annotations__)
    flat: dict[str, Any] = {}
    for layer in layers:
        placed: set[str] = set()
        for name, value in layer.items():
            for field in _place(flat, name, value, hints, known):
                if field in placed:
                    raise ValueError(f"{field}: is given twice, once as {name}")
                placed.add(field)
    return flat


@cache
def _hints() -> dict[str, Any]:
    """The type of every field of a recipe."""
    from transformers import TrainingArguments

    hints = {}
    for kind in (ModelArguments, DataArguments, RunArguments, TrainingArguments):
        types_of = typing.get_type_hints(kind)
        hints |= {field.name: types_of[field.name] for field in fields(kind) if field.init}
    return hints


# --------------------------------------------------------------------------------------- the file and the command line


def _command_line(arguments: list[str]) -> tuple[Path | None, dict[str, Any]]:
    """The path behind `--config`, and `{name: Text or list of them}`; `--a-b=c`, `--a_b c`, `--flag`, `--list 1 2`."""
    given: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(f"{word!r}: is not an option; settings are given as --field value")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        name = name.replace("-", "_")
        if name in given:
            raise ValueError(f"--{name} {' '.join(values)}: is given twice")
        if not values:
            given[name] = Flag("true")
        else:
            given[name] = Text(values[0]) if len(values) == 1 else [Text(value) for value in values]
    config = given.pop("config", None)
    if isinstance(config, Flag):
        raise ValueError("--config: names no file")
    if isinstance(config, list):
        raise ValueError(f"config={' '.join(config)!r}: must be one file")
    return (None if config is None else find_recipe(config).resolve()), given


def find_recipe(name: str) -> Path:
    """
    The file of a recipe: a path, or `tnt_debug/stage1` for one that comes with the package.

    Raises:
        FileNotFoundError: neither exists.
    """
    packaged = Path(__file__).parent
    inside = str(name).removeprefix("recipes/")
    for path in (Path(name), Path(f"{name}.yaml"), packaged / inside, packaged / f"{inside}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(packaged_recipes())
    raise FileNotFoundError(f"config={str(name)!r}: is neither a file nor a recipe of the package ({known})")


def packaged_recipes() -> list[str]:
    """The names of the recipes that come with the package, such as `tnt_debug/stage1`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in Path(__file__).parent.glob("*/*.yaml"))


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    settings = read_yaml(path, "config")
    if settings is not None and not isinstance(settings, dict):
        raise ValueError(f"config={str(path)!r}: must hold a mapping of fields, not {type(settings).__name__}")
    return settings or {}


def _place(flat: dict[str, Any], name: Any, value: Any, hints: dict[str, Any], config_fields: set[str]) -> list[str]:
    """
    Put a setting into `flat` under its field, `a.b` into the mapping a, a field of TNTConfig into model_config.
    Returns the names of what it sets, those in mappings with dots.
    """
    first, *rest = str(name).split(".")
    if first not in hints and first in config_fields:
        first, rest = "model_config", [first, *rest]
    if first not in hints:
        raise ValueError(f"{name}={shown(value)}: is not a field{_closest(first, [*hints, *config_fields])}")
    if rest and not _is_mapping(hints[first]):
        raise ValueError(f"{name}={shown(value)}: {first} is not a mapping")
    if rest or _is_mapping(hints[first]):
        value = _parsed(name, value)
    for key in reversed(rest):
        value = {key: value}
    for field in value if first == "model_config" and isinstance(value, dict) else ():
        if field not in config_fields:
            raise ValueError(
                f"model_config.{field}={shown(value[field])}: is not a field{_closest(field, config_fields)}"
            )
    flat[first] = _merged(flat.get(first), value)
    return _entries(first, value)


def _entries(name: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [name]
    return [entry for key, inner in value.items() for entry in _entries(f"{name}.{key}", inner)]


MEANT = {
    "lr": "learning_rate", "batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs",
    "seq_len": "sequence_length", "seq_length": "sequence_length", "max_seq_length": "sequence_length",
}  # fmt: skip  # what other trainers call a field


def _closest(name: Any, known: Any) -> str:
    near = [MEANT[name]] if name in MEANT else get_close_matches(str(name), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _merged(old: Any, new: Any) -> Any:
    """`new` over `old`, mapping by mapping; null empties a mapping. YAML's numbers are keys too: 6 is "6"."""
    if isinstance(old, dict) and new is None:
        return {}
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    known = {str(key): key for key in old}
    named = {known.get(str(key), key): value for key, value in new.items()}
    return old | {key: _merged(old.get(key), value) for key, value in named.items()}


def _parsed(name: str, value: Any, text: bool = False) -> Any:
    """A value from the command line as YAML reads it, but for text without quotes, which stays as it was typed, less
    blanks around it: what follows a # is part of a path, and with `text` so is a * before it. Others as they are."""
    if isinstance(value, list):
        return [_parsed(name, item) for item in value]
    if not isinstance(value, Text):
        return value
    check_text(name, value)
    try:
        found = parse_value(str(value))
    except ValueError as error:
        if text:
            return str(value)
        raise ValueError(f"{name}: {error}") from error
    return value.strip() if isinstance(found, str) and value[0] not in "'\"" else found


# ---------------------------------------------------------------------------------------------------- types and ranges


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a type hint."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_mapping(hint: Any) -> bool:
    return any((typing.get_origin(kind) or kind) is dict for kind in _kinds(hint))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that YAML made may stand in a field of this type."""
    origin = typing.get_origin(kind) or kind
    if origin is typing.Any:
        return True
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin in (int, float):
        return isinstance(value, (int, float) if origin is float else int) and not isinstance(value, bool)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [member.value for member in origin]
    if origin is list:
        items = typing.get_args(kind) or (typing.Any,)
        return isinstance(value, list) and all(_fits(item, items[0]) for item in value)
    return isinstance(origin, type) and type(value) is origin


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as a field of type `hint` may hold it; raises `ValueError`, naming the field."""
    kinds, raw = _kinds(hint), value
    if isinstance(value, Flag) and bool not in kinds:
        raise ValueError(f"{name}: --{name} needs a value")
    value = _parsed(name, value, text=str in kinds)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be finite")
    if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)  # 1e9 tokens
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if value is False and any("no" in [member.value for member in kind] for kind in enums):
        value = "no"  # which YAML reads as false
    if enums and value is not None:  # the library also takes any string there, and fails later
        kinds = tuple(kind for kind in kinds if kind is not str)
    if any(_fits(value, kind) for kind in kinds):
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:  # which nothing that computes with it takes
            raise ValueError(f"{name}={value!r}: must be an integer of 64 bits")
        return value
    if isinstance(raw, Text) and str in kinds:
        return str(raw)
    if isinstance(raw, Text) and any(typing.get_origin(kind) is list and _fits([value], kind) for kind in kinds):
        return [value]
    names = [
        "one of " + ", ".join(repr(member.value) for member in kind) if kind in enums else _type_name(kind)
        for kind in kinds
    ]
    raise ValueError(f"{name}={shown(raw if isinstance(value, list) else value)}: must be {' or '.join(names)}")


def _widened(given: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers as floats where a field holds nothing else, which not everybody who reads it converts."""
    real = [name for name, value in given.items() if type(value) is int and int not in _kinds(hints[name])]
    return given | {name: float(given[name]) for name in real if float in _kinds(hints[name])}


def _type_name(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    names = {
        int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping",
        list: "a list", types.NoneType: "null",
    }  # fmt: skip
    return names.get(origin, str(getattr(origin, "__name__", origin)))
