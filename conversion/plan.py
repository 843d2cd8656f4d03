"""What a conversion will write, decided and checked before anything is written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.families import Family, base_shapes
from tnt_hf.conversion.layout import BASE, base_names
from tnt_hf.conversion.shards import NewTensor, split_by_size
from tnt_hf.conversion.source import Source, StoredTensor


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
         "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One base shard of the result: `source`, byte for byte, or `tensors`, written anew."""

    name: str
    source: Path | None
    tensors: list[NewTensor]
    size: int


def parse_size(text: str | int) -> int:
    """Bytes of `"5GB"`, `"512 MiB"` or a number. Raises ValueError if it is not a positive size."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*((?:[KMGT]i?)?B)?\s*", str(text), re.IGNORECASE | re.ASCII)
    size = int(float(match[1]) * UNITS[(match[2] or "B").upper()]) if match else 0
    if size < 1:
        raise ValueError(f"max_shard_size={text!r}: must be a size such as 5GB or 512MiB")
    return size


def our_tensors(source: Source, family: Family, config: TNTConfig) -> dict[str, StoredTensor]:
    """
    The source's tensors under our names, fused ones split into their rows.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape than the configuration says.
    """
    layers = config.num_hidden_layers
    if layers > len(source.tensors):  # before a table of that many rows is made
        raise ValueError(f"{source.folder}: num_hidden_layers={layers}, but there are {len(source.tensors)} tensors")
    says = f"config.json says num_hidden_layers={layers}"
    expected = dict(base_shapes(config))
    found: dict[str, StoredTensor] = {}
    for name, tensor in source.tensors.items():
        parts = family.our_names(name)
        if parts == [name]:
            found[name] = tensor
            continue
        if not set(parts) <= expected.keys():
            raise _unknown(tensor, name, says, f"model.{parts[0]}" in expected)
        rows = [expected[part][0] for part in parts]
        if tensor.shape != (sum(rows), *expected[parts[0]][1:]):
            raise ValueError(
                f"{tensor.path}: tensor {name!r} has shape {list(tensor.shape)}, not {[sum(rows), '...']}"
            )
        for i, part in enumerate(parts):
            found[part] = tensor.rows(sum(rows[:i]), rows[i])
    for name, tensor in found.items():
        if name not in expected:
            raise _unknown(tensor, name, says, f"model.{name}" in expected)
        if tensor.shape != expected[name]:
            shapes = f"{list(tensor.shape)}, by config.json it must be {list(expected[name])}"
            raise ValueError(f"{tensor.path}: tensor {name!r} has shape {shapes}")
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := [name for name in expected if name not in found and name not in optional]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{source.folder}: tensor {missing[0]!r}{more} missing; {says}")
    return found


def _unknown(tensor: StoredTensor, name: str, says: str, headless: bool) -> ValueError:
    if headless:
        says = (
            "its names are those of a model without a head, those that AutoModelForCausalLM saves begin with 'model.'"
        )
    return ValueError(f"{tensor.path}: unknown tensor {name!r}; {says}")


def is_same_bytes(source: Source, tensors: Mapping[str, StoredTensor], dtype: str | None) -> bool:
    """Whether the source's shards can serve as they are: no cast and no split."""
    return all(
        source.tensors.get(name) is tensor and dtype in (None, tensor.dtype) for name, tensor in tensors.items()
    )


def base_shards(
    source: Source, tensors: Mapping[str, StoredTensor], dtype: str | None, most: int
) -> tuple[list[Shard], dict[str, str]]:
    """The base shards of the result and its index so far (tensor name -> shard name)."""
    if is_same_bytes(source, tensors, dtype):
        names = base_names(source.shards.values())
        shards = [Shard(name, path, [], path.stat().st_size) for path, name in names.items()]
        return shards, {name: names[tensor.path] for name, tensor in tensors.items()}
    new = [NewTensor(name, dtype or tensor.dtype, tensor.shape, tensor) for name, tensor in tensors.items()]
    groups = split_by_size(new, most)
    shards, index = [], {}
    for i, group in enumerate(groups, 1):
        name = BASE.format(i, len(groups))
        shards.append(Shard(name, None, group, sum(tensor.nbytes for tensor in group)))
        index |= {tensor.name: name for tensor in group}
    return shards, index
