"""What a folder with a model of ours holds, read from its files alone: no model is built and no tensor is loaded."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from tnt_hf.conversion.files import sha256
from tnt_hf.conversion.manifest import MANIFEST, read_manifest
from tnt_hf.conversion.reload import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tnt_hf.conversion.source import TOKENIZERS, read_header, read_json, read_source
from tnt_hf.recipes.model_card_tables import portable


TRAINING, EVALUATION = "training.json", "evaluation/evaluation.json"


@dataclass(frozen=True)
class Model:
    """
    What a folder holds, read without building a model.

    Attributes:
        kind: `"tnt"`, `"injected"` (a model of the library with a memory in it) or `"adapter"`.
        config: of `config.json`, or of `adapter_config.json`. training, evaluation: of those files; empty without.
        conversion: what the manifest says of the folder, or of `converted/` in it; empty without.
        is_as_converted: the weights are those that the conversion wrote.
    """

    folder: Path
    kind: str
    config: dict[str, Any]
    training: dict[str, Any]
    evaluation: dict[str, Any]
    conversion: dict[str, Any]
    is_as_converted: bool

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Parameters as saved: `"memory"` and, in an adapter, `"lora"` or else `"base"`."""
        adapter = self.kind == "adapter"
        tensors = read_header(self.folder / ADAPTER_WEIGHTS) if adapter else read_source(self.folder).tensors.values()
        count = {"lora" if adapter else "base": 0, "memory": 0}
        for tensor in tensors:
            kind = "memory" if ".memory." in tensor.name else "lora" if adapter else "base"
            count[kind] += math.prod(tensor.shape)
        return count

    @property
    def has_tokenizer(self) -> bool:
        """Whether a tokenizer was saved with the model."""
        return any((self.folder / name).is_file() for name in ("tokenizer_config.json", *TOKENIZERS))

    @property
    def base(self) -> str | None:
        """What an adapter adapts, what a model was converted from or began with: a Hub id or a folder's name."""
        given = self.training.get("settings", {}).get("model", {})
        if self.kind == "adapter":
            return _public(self.config.get("base_model_name_or_path"))
        return _public(self.conversion.get("source") or given.get("source")) or self.start

    @property
    def lineage(self) -> list[Path]:
        """This folder and those it was made from, as far as they are still here; the nearest first."""
        found: list[Path] = []
        folder: Path | None = self.folder
        while folder is not None and folder not in found:
            found += [folder, folder / "converted"]
            folder = _made_from(folder)
        return found

    @property
    def start(self) -> str | None:
        """The model that a training began with, as `base`; `None` from scratch, where it is the name of a preset."""
        given = self.training.get("settings", {}).get("model", {}).get("model")
        return _public(given) if isinstance(given, str) and "/" in given else None


def _made_from(folder: Path) -> Path | None:
    """The folder that a training began with or an adapter adapts; `None` for a Hub id or what is not here."""
    if (folder / ADAPTER_CONFIG).is_file():
        name = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    else:
        run = read_json(path) if (path := folder / TRAINING).is_file() else {}
        name = run.get("settings", {}).get("model", {}).get("model")
        name = name if isinstance(name, str) and "/" in name else None  # a preset's has none
    return Path(name).resolve() if isinstance(name, str) and name and Path(name).is_dir() else None


def _public(name: Any) -> str | None:
    """A Hub id, or the name of a folder; what is a folder here may look like a Hub id."""
    if not isinstance(name, str) or not name:
        return None
    return Path(name).name if name.startswith(("runs/", "./")) or Path(name).is_dir() else portable(name)


def read_model(folder: str | os.PathLike) -> Model:
    """
    What the card of a folder is about.

    Raises:
        ValueError: neither a TNT model, a model with an injected memory nor an adapter; a file that is damaged.
        OSError: a file is missing.
    """
    folder = Path(folder).resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"folder={str(folder)!r}: no such folder")
    if (folder / ADAPTER_CONFIG).is_file():
        kind, config = "adapter", read_json(folder / ADAPTER_CONFIG)
    elif (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        kind = "tnt" if config.get("model_type") == "tnt" else "injected"
        if kind == "injected" and "tnt_injection" not in config:
            raise ValueError(
                f"{folder}: model_type={config.get('model_type')!r} has no memory, and this is for models with one"
            )
    else:
        raise FileNotFoundError(f"{folder}: holds neither config.json nor {ADAPTER_CONFIG}")
    training, evaluation = (read_json(p) if (p := folder / n).is_file() else {} for n in (TRAINING, EVALUATION))
    conversion, unchanged = {}, False
    for place in (folder, folder / "converted"):
        if (place / MANIFEST).is_file() and not conversion:
            manifest = read_manifest(place)
            conversion = manifest["conversion"]
            unchanged = place == folder and not training and _weights_are_of(folder, manifest["files"])
    return Model(folder, kind, config, training, evaluation, conversion, unchanged)


def file_of(name: str, file: str) -> Path | None:
    """The path of a file of a folder or Hub repository, `None` if it has none of that name."""
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def is_of_ours(folder: Path) -> bool:
    """Whether a folder is a run's, an adapter's or that of a model with memory, which results may be put into."""
    if any((folder / name).is_file() for name in (TRAINING, ADAPTER_CONFIG)):
        return True
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return config.get("model_type") == "tnt" or "tnt_injection" in config


def _weights_are_of(folder: Path, files: Mapping[str, Any]) -> bool:
    """Whether the folder's shards are those of its manifest; without a digest, size and time of change must do."""
    shards = {path.name: path for path in folder.glob("*.safetensors")}
    if shards.keys() != {name for name in files if name.endswith(".safetensors")}:
        return False
    for name, path in shards.items():
        entry, stat = files[name], path.stat()
        if stat.st_size != entry["size"]:
            return False
        digest = entry.get("sha256")
        if digest != sha256(path) if digest else stat.st_mtime_ns != entry.get("mtime_ns"):
            return False
    return True
