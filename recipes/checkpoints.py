"""Checkpoints that are complete or do not count, and runs that go on only as they began.

`Trainer` writes a checkpoint file by file, so a process that dies while saving leaves a folder that looks like one.
Here the last file to be written is `complete.json`: it lists every other file with its size and SHA-256 and what the
run was, and a checkpoint without it, or with another list, is never resumed from and never a reason to delete an older
one. Digests are compared before a run goes on, sizes whenever checkpoints are counted.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tnt_hf.conversion.files import flush, sha256, write_json


logger = logging.getLogger(__name__)

SEAL = "complete.json"
FORMAT = "tnt-checkpoint-1"
DELETED = ".deleted-"  # before the name of a checkpoint that is being deleted
REPLACED = ".replaced-"  # before the name of a complete one, until another is complete in its place
# Settings that decide which rows a step sees, or what it does with them. Resumed with another value a run would be
# neither the old one nor the new one: `Trainer` restores the old learning rates, for example, without a word.
FIXED = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dataloader_num_workers",
    "dataloader_drop_last",
    "train_sampling_strategy",
    "seed",
    "data_seed",
    "num_train_epochs",
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "bf16",
    "fp16",
    "neftune_noise_alpha",
)
DIGESTS = {
    "data.data": "dataset_name: the content of the data",
    "data.tokenizer": "tokenizer: what it does",
    "data.base": "model: the weights of the base, which checkpoints of an adapter do not hold,",
    "data.teacher": "teacher: its weights, or those of the model it is made of,",
}
PIECES, PIECE = 16, 1 << 16  # of a file of weights, in `weights_digest`: bytes
UNIMPORTANT = ("use_cache", "_name_or_path", "transformers_version", "_attn_implementation", "auto_map")


# ------------------------------------------------------------------------------------------------ complete and partial


def seal(folder: Path, run: dict[str, Any]) -> None:
    """Declare the checkpoint in `folder` complete, once every process has written its part. `run` is [`run_state`]."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)
    for path in [*files, folder]:
        flush(path)
    names = [path.relative_to(folder).as_posix() for path in files]
    entries = [{"bytes": path.stat().st_size, "sha256": digest} for path, digest in zip(files, digests(files))]
    write_json(folder / SEAL, {"format": FORMAT, "files": dict(zip(names, entries)), "run": run})


def digests(files: list[Path]) -> list[str]:
    """The SHA-256 of files, several at a time: one core reads slower than a disk."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(sha256, files))


def weights_digest(folder: str | os.PathLike) -> str:
    """What tells the weights in a folder from others: SHA-256 of the sizes of their files and of pieces of each, for
    to read an 8B's takes half a minute, and training changes them everywhere."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".safetensors", ".bin") and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for i in range(PIECES):
                    file.seek(max(size - PIECE, 0) * i // (PIECES - 1))
                    digest.update(file.read(PIECE))
    return digest.hexdigest()


def fault(folder: Path, intact: bool = False) -> str | None:
    """Why the checkpoint in `folder` is not complete, in a few words; `None` if it is. `intact`: files are read."""
    try:
        found = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        files = {folder / name: (entry["bytes"], entry["sha256"]) for name, entry in found["files"].items()}
        if found["format"] != FORMAT or not isinstance(found["run"], dict):
            return f"{SEAL} is not one of {FORMAT}"
    except FileNotFoundError:
        return f"has no {SEAL}: its save did not end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{SEAL} cannot be read ({type(error).__name__})"
    for path, (size, _) in files.items():
        if not path.is_file():
            return f"{path.relative_to(folder)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(folder)} has {path.stat().st_size} bytes instead of {size}"
    for path, digest in zip(files, digests(list(files)) if intact else ()):
        if files[path][1] != digest:
            return f"{path.relative_to(folder)} is not what was written: its SHA-256 is {digest[:16]}..."
    return None


def check_checkpoint(folder: str | os.PathLike, field: str = "resume", intact: bool = True) -> None:
    """
    Raises:
        ValueError: the folder that `field` names does not exist, or is not a complete checkpoint. With `intact`, the
            files are read.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{field}={str(folder)!r}: there is no such folder; name a checkpoint, or leave it out")
    if (why := fault(Path(folder), intact)) is not None:
        raise ValueError(f"{field}={str(folder)!r}: is not a complete checkpoint, {why}")


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The folders `checkpoint-N` of a run, complete or not, by their step."""
    found = {}
    for path in Path(output_dir).glob("checkpoint-*"):
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def step_of(checkpoint: str | os.PathLike) -> int:
    """N of a folder `checkpoint-N`."""
    return int(os.fspath(checkpoint).rpartition("-")[2])


def latest_complete_checkpoint(output_dir: str | os.PathLike, intact: bool = False) -> Path | None:
    """The newest complete checkpoint of a run, or `None`. Newer ones that are not complete are named in a warning."""
    for path in reversed(checkpoints(output_dir)):
        if (why := fault(path, intact)) is None:
            return path
        logger.warning("%s is not complete and is not used: %s", path, why)
    return None


def next_start(args) -> Path | None:
    """The checkpoint that the command with these `TrainingArguments` would go on from."""
    if args.resume_from_checkpoint not in (None, "auto", "never"):
        return Path(args.resume_from_checkpoint)
    if args.world_size == 1:  # of several, others may still write
        bring_back(args.output_dir)
    return latest_complete_checkpoint(args.output_dir)


def make_room(folder: Path) -> None:
    """Take away what is where a checkpoint is to be written. A complete one lies aside until `settle`."""
    if fault(folder) is None:
        aside = folder.with_name(f"{REPLACED}{folder.name}")
        _remove(aside)
        folder.rename(aside)
    else:  # of a run that died while saving
        _discard(folder)


def settle(folder: Path) -> None:
    """The checkpoint in `folder`, complete or not, is final: where it is not, the one it was to replace comes back."""
    aside = folder.with_name(f"{REPLACED}{folder.name}")
    if fault(folder) is None:
        _remove(aside)
        return
    _discard(folder)
    if fault(aside) is not None:  # it was being deleted
        _discard(aside)
    elif folder.exists():
        raise OSError(
            errno.ENOTEMPTY, f"cannot be removed, so {aside.name}, complete, cannot take its place", str(folder)
        )
    else:
        aside.rename(folder)


def bring_back(output_dir: str | os.PathLike) -> None:
    """Put complete checkpoints back that a run was replacing when it was killed."""
    for aside in _set_aside(output_dir, REPLACED):
        settle(aside.with_name(aside.name.removeprefix(REPLACED)))


def _set_aside(output_dir: str | os.PathLike, prefix: str) -> list[Path]:
    """The checkpoints with `prefix` before their names; what else is called so is somebody's own."""
    return [x for x in Path(output_dir).glob(f"{prefix}*") if re.fullmatch(r"checkpoint-\d+", x.name[len(prefix) :])]


def _discard(folder: Path) -> None:
    """
    Remove what a save that did not end has left.

    Raises:
        OSError: whether it ended cannot be read. ValueError: another release says that it did.
    """
    try:
        found = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        found = None
    if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{folder / SEAL}: format={found['format']!r} is not {FORMAT!r}: move the folder away")
    _remove(folder)


def _remove(path: Path) -> None:
    path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


def delete_old_checkpoints(
    output_dir: str | os.PathLike,
    limit: int | None,
    best: str | None = None,
    saved: Path | None = None,
    named: Path | None = None,
) -> None:
    """
    Delete the oldest complete checkpoints until `limit` are left.

    Args:
        best, named: always stay: the best one, and the one that the session was told to go on from, as the same
            command needs it again after a kill. What is best to one that stays does too, without which nobody could
            go on from it.
        saved: the newest, which always stays; by default that of the most steps. Those of more steps are of an earlier
            pass, which is being made again: they do not count, and stay until they are replaced.
    """
    if not limit or limit < 0:
        return
    complete = [path for path in checkpoints(output_dir) if fault(path) is None]
    counted = [path for path in complete if saved is None or step_of(path) <= step_of(saved)]
    stay = {Path(path).resolve() for path in (best, named) if path is not None}
    old = [path for path in counted[:-1] if path.resolve() not in stay][: max(len(counted) - limit, 0)]
    needed = set() if best is None else {best_of(path) for path in complete if path not in old}
    for path in _set_aside(output_dir, DELETED):
        _remove(path)
    for path in old:
        if path.name in needed:
            continue
        # Under another name first: what a kill leaves of it must not count, and goes with the next.
        gone = path.with_name(f"{DELETED}{path.name}")
        try:
            path.rename(gone)
        except OSError:  # of a file system that renames no folders
            (path / SEAL).unlink()
            gone = path
        _remove(gone)


def best_of(checkpoint: Path) -> str | None:
    """The name of the checkpoint that was the best so far when this one was saved, if there was one: what an
    evaluation without a checkpoint found to be better does not count."""
    state = checkpoint / "trainer_state.json"
    best = json.loads(state.read_text(encoding="utf-8")).get("best_model_checkpoint") if state.is_file() else None
    return best and Path(best).name


# ------------------------------------------------------------------------------------------------------- the same run


def run_state(args, world_size: int, model_config: dict[str, Any], data: dict[str, Any], **more: Any) -> dict:
    """What must not change between a run and its continuation, as JSON has it.

    Args:
        args: `TrainingArguments`. data: what the order of the rows depends on.
        more: further settings by name.
    """
    config = {name: value for name, value in model_config.items() if name not in UNIMPORTANT}
    settings = {name: getattr(args, name) for name in FIXED}
    found = {"world_size": world_size, **settings, "data": data, **more, "model_config": config}
    return json.loads(json.dumps(found, default=_plain, sort_keys=True))


def _plain(value: Any) -> Any:
    return getattr(value, "value", None) or str(value)


def callback_settings(callbacks: list) -> dict[str, Any]:
    """The settings of those callbacks that change what a step does: they have `settings`."""
    return {type(x).__name__: x.settings for x in callbacks if isinstance(getattr(x, "settings", None), dict)}


def check_same_run(checkpoint: Path, now: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: the run that `checkpoint` belongs to had other settings than `now` ([`run_state`]); they are named.
    """
    before = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))["run"]
    if changed := list(_differences(before, now)):
        raise ValueError(
            f"{'; '.join(changed)}. {checkpoint} can only be continued with the settings it was made with: set them"
            " back, or start a new run (another output_dir, with --model naming this folder)."
        )


_ABSENT = object()


def _differences(before: dict, now: dict, prefix: str = ""):
    for name in [*before, *(name for name in now if name not in before)]:
        old, new = before.get(name, _ABSENT), now.get(name, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new and f"{prefix}{name}" in DIGESTS:
            yield f"{DIGESTS[prefix + name]} is not what it was when the run was begun"
        elif old != new:
            shown = ["nothing" if x is _ABSENT else repr(x) for x in (new, old)]
            yield f"{prefix}{name}={shown[0]}: the run was begun with {shown[1]}"
