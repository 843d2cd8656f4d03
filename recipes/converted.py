"""The conversion of a recipe's `source`, made once per output_dir."""

import json
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tnt_hf import TNTConfig
from tnt_hf.conversion import convert_checkpoint
from tnt_hf.conversion.files import write_json
from tnt_hf.conversion.head_start import READ
from tnt_hf.conversion.manifest import check_manifest
from tnt_hf.conversion.source import read_json
from tnt_hf.recipes.arguments import ModelArguments
from tnt_hf.recipes.loading_errors import naming


CONVERSION_ARGUMENTS = (
    "window", "keep_full_attention", "probe", "dtype", "link", "seed", "max_shard_size", "check", "revision",
)  # fmt: skip
CONVERTED = ".converted.json"  # in output_dir: of what, and how, its folder `converted` was made


def convert_once(model: ModelArguments, target: Path, seed: int, say: Callable[[str], object]) -> Path:
    """
    `source` converted into the folder `target`, or the conversion that is there already if it is the same. Another one
    is replaced as long as no checkpoint was made of it.

    Raises:
        ValueError: an argument that the conversion does not have; a run has gone on from another conversion, or one is
            there that no run made, or that was changed since.
    """
    known = [*CONVERSION_ARGUMENTS, *TNTConfig.__annotations__]
    for name, value in model.convert.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"convert.{name}={value!r}: is not an argument of convert_checkpoint{hint}")
    arguments = {"seed": seed, **model.convert}
    wanted = {"source": _identity(model.source), "arguments": json.loads(json.dumps(arguments, default=str))}
    record, there = target.parent / CONVERTED, target.is_dir() and any(target.iterdir())
    if there:
        before = read_json(record) if record.is_file() else {}
        if before == wanted:
            if problems := check_manifest(target, READ):
                raise ValueError(
                    f"output_dir: {target} is not what was converted, {problems[0]}; delete it, to convert anew, or"
                    " choose another output_dir"
                )
            say(f"{model.source} was converted before, into {target}")
            return target
        if not before or any(target.parent.glob("checkpoint-*")) or (target.parent / "training.json").exists():
            what = "the source or the arguments of the run's conversion have changed" if before else "no run made it"
            raise ValueError(f"output_dir: {target} is another conversion, {what}; choose another output_dir")
    say(f"converting {model.source} into {target}")
    new = not target.parent.exists()
    try:
        with naming("source", model.source):
            target.parent.mkdir(parents=True, exist_ok=True)
            if not there and target.is_dir() and any(target.iterdir()):  # another run was faster
                return convert_once(model, target, seed, say)
            write_json(record, {"begun": wanted})  # equal to nothing: a kill may leave the old one
            convert_checkpoint(model.source, target, progress=False, say=say, overwrite=there, **arguments)
            write_json(record, wanted)
    except Exception:
        if not there and record.is_file() and read_json(record) == {"begun": wanted}:  # not of a run beside this one
            record.unlink()
            if new and not any(target.parent.iterdir()):
                target.parent.rmdir()
        raise
    return target


def _identity(source: str) -> dict[str, Any]:
    """What tells a checkpoint from another one of the same name: its place and, of a folder, its files."""
    folder = Path(source)
    if not folder.is_dir():
        return {"name": source}
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.suffix == ".safetensors"}
    return {"name": str(folder.resolve()), "files": {name: [x.st_size, x.st_mtime_ns] for name, x in files.items()}}
