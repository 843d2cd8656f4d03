"""Names of the shards of a result.

They are chosen for what happens later: `save_pretrained` into the result removes shards of this form that it does not
write itself, so nothing of an old state stays behind; and it never writes these, so the source's bytes behind a hard
link are never touched.
"""

from collections.abc import Iterable
from pathlib import Path


BASE, MEMORY = "model-base-{:05d}-of-{:05d}.safetensors", "model-memory-00001-of-00001.safetensors"


def base_names(shards: Iterable[Path]) -> dict[Path, str]:
    """What the shards of a source, in their order, are called where they are taken as they are."""
    shards = list(shards)
    return {path: BASE.format(i, len(shards)) for i, path in enumerate(shards, 1)}
