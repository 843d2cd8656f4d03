"""What a converted folder holds against what its source holds, tensor by tensor and without building a model.

Every tensor is read in blocks of rows, so memory does not depend on the size of the model.
"""

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tnt_hf import TNTConfig, __version__
from tnt_hf.gate_tnt import CLOSED_BY

from .families import FAMILIES, tnt_config
from .manifest import MANIFEST, check_manifest, read_manifest, without_digest
from .source import StoredTensor, read_source
from .writer import CODE


BLOCK = 1 << 23  # elements read at once
NAMED = 5  # names shown where there are many
# Fields of TNTConfig that change what the base computes.
BASE_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
    "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm", "attention_output_gate", "num_persistent_tokens",
    "variant",
)  # fmt: skip


class Shards:
    """The tensors of a checkpoint folder, by name and in blocks of rows.

    Raises:
        ValueError, OSError: files that are missing, damaged or do not fit together, see [`read_source`].
    """

    def __init__(self, folder: Path):
        self._tensors = read_source(folder).tensors
        self._open = cache(lambda path: safe_open(path, framework="pt"))

    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return self._at(name).shape

    def _at(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ValueError(f"tensor {name!r} is missing")
        return self._tensors[name]

    def blocks(self, name: str, first: int = 0, rows: int | None = None) -> Iterator[Tensor]:
        """The tensor's rows `first` to `first + rows` (all by default) in consecutive blocks."""
        shape, file = self.shape(name), self._open(self._at(name).path)
        if not shape:
            yield file.get_tensor(name)
            return
        end = shape[0] if rows is None else first + rows
        step = max(1, BLOCK // max(1, math.prod(shape[1:])))
        part = file.get_slice(name)
        for start in range(first, end, step):
            yield part[start : min(start + step, end)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype agree in every bit; NaN equals NaN, 0 does not equal -0."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def unlisted(output: Path) -> str:
    """Why no manifest speaks of this folder's weights; empty where one does, also where it is damaged."""
    if not (output / MANIFEST).exists():
        return f"the folder has no {MANIFEST}; a trained one has none"
    try:
        listed = {name for name in read_manifest(output)["files"] if name.endswith(".safetensors")}
    except (OSError, ValueError):
        return ""
    # `save_pretrained` removes the shards of a conversion, whose names it never writes; see layout.py.
    found = {path.name for path in output.glob("*.safetensors")}
    return (
        f"saved over after the conversion: {MANIFEST} lists none of these shards"
        if found and not found & listed
        else ""
    )


def rounded_to(output: Path) -> str | None:
    """The dtype that the conversion was asked to give the base, if its manifest says so."""
    try:
        conversion = read_manifest(output)["conversion"]
        return conversion["dtype"] if conversion["cast"] else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def converted_revision(output: Path, source: str) -> str | None:
    """The commit of the Hub's `source` that `output` was converted from, if its manifest says so."""
    try:
        conversion = read_manifest(output)["conversion"]
        return conversion["revision"] if conversion["source"] == source and not Path(source).is_dir() else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_files(output: Path) -> tuple[bool, dict[str, Any]]:
    """Every file is as the manifest says."""
    problems = check_manifest(output)
    unread = [] if problems else without_digest(output)
    return not problems, {"problems": problems} | ({"without_digest": unread} if unread else {})


def check_code(output: Path, auto_map: dict[str, str]) -> tuple[bool, dict[str, Any]]:
    """Every file that `trust_remote_code` runs is the installed one, byte by byte; what the checks run is that one."""
    ours = {path.name: path for path in CODE.glob("*_tnt.py")}
    named = {target.split(".")[0] + ".py" for target in auto_map.values()}
    problems = []
    for name in sorted(named | ours.keys() | {path.name for path in output.glob("*_tnt.py")}):
        if not (output / name).is_file():
            problems.append(f"{name}: missing")
        elif name not in ours:
            problems.append(f"{name}: tnt_hf {__version__} has no such file")
        elif (output / name).read_bytes() != ours[name].read_bytes():
            problems.append(f"{name}: differs from that of tnt_hf {__version__}")
    return not problems, {"problems": problems}


def check_finite(output: Path) -> tuple[bool, dict[str, Any]]:
    """No tensor of the folder holds an infinite value or none at all."""
    shards = Shards(output)
    bad = [n for n in shards.names() if not all(bool(x.isfinite().all()) for x in shards.blocks(n))]
    return not bad, {"tensors": len(shards.names()), "not_finite": len(bad), "names": bad[:NAMED]}


def check_base_weights(source: Path, output: Path, model_type: str, tied: bool) -> tuple[bool, dict[str, Any]]:
    """Every base tensor is the source's, bit by bit; of another dtype, the source's value rounded to it."""
    ours, theirs = Shards(output), Shards(source)
    base = {name for name in ours.names() if ".memory." not in name}
    changed, missing, matched, worst = [], [], set(), 0.0
    for name in theirs.names():
        first = 0
        for ours_name in FAMILIES[model_type].our_names(name):
            if ours_name not in base:
                missing += [] if tied and ours_name == "lm_head.weight" else [ours_name]
                continue
            matched.add(ours_name)
            shape = ours.shape(ours_name)
            expected = (shape[0], *theirs.shape(name)[1:]) if shape and ours_name != name else theirs.shape(name)
            same = shape == expected
            if same:
                rows = shape[0] if shape else None
                for a, b in zip(ours.blocks(ours_name), theirs.blocks(name, first, rows)):
                    b = b.to(a.dtype)
                    if not same_bits(a, b):
                        same = False
                        worst = max(worst, float((a.double() - b.double()).abs().max()))
                first += rows or 0
            changed += [] if same else [ours_name]
    extra = sorted(base - matched - ({"lm_head.weight"} if tied else set()))
    found = {"tensors": len(matched), "changed": len(changed), "missing": len(missing), "extra": len(extra)}
    found |= {"max_abs": worst, "names": [*changed, *missing, *extra][:NAMED]}
    return not (changed or missing or extra), found


def check_config(source_config: Any, config: TNTConfig) -> tuple[bool, dict[str, Any]]:
    """Every field that the base computes with is what the source's configuration says."""
    wrong = {}
    expected = tnt_config(source_config)
    names = [*BASE_FIELDS, *(["max_position_embeddings"] if _turns_by_length(expected) else [])]
    for name in names:
        want, got = (_plain(getattr(c, name), name, c) for c in (expected, config))
        if want != got:
            wrong[name] = {"source": want, "result": got}
    return not wrong, {"fields": len(names), "different": wrong}


def _turns_by_length(config: TNTConfig) -> bool:
    """Whether the frequencies of RoPE are computed from `max_position_embeddings`."""
    rope = config.rope_parameters
    return rope["rope_type"] == "dynamic" or rope["rope_type"] in ("yarn", "longrope") and rope.get("factor") is None


def _plain(value: Any, name: str, config: TNTConfig) -> Any:
    if name == "attention_output_bias" and value is None:
        return config.attention_bias
    return {k: x for k, x in sorted(value.items()) if x is not None} if isinstance(value, dict) else value


def unchanged_positions(source_config: Any, config: TNTConfig) -> int | None:
    """Positions from the start at which every layer sees what it sees in the source; `None` if that is all of them."""
    expected = tnt_config(source_config)
    limit = None
    for own, now in zip(_windows(expected), _windows(config)):
        if own != now:
            limit = min(x for x in (own, now, limit) if x is not None)
    return limit


def _windows(config: TNTConfig) -> list[int | None]:
    return [config.sliding_window if "sliding" in kind else None for kind in config.layer_types]


def memory_state(output: Path, config: TNTConfig) -> str:
    """`"none"`, `"closed"` (every gate is at zero, so the result computes its attention alone) or `"open"`."""
    if not config.memory_layer_indices:
        return "none"
    shards = Shards(output)
    if config.memory_gate not in CLOSED_BY:
        return "open"
    names = [f"model.layers.{i}.memory.gate.{CLOSED_BY[config.memory_gate]}" for i in config.memory_layer_indices]
    return "open" if any(bool(block.any()) for name in names for block in shards.blocks(name)) else "closed"
