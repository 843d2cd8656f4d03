"""The folder of a run: whose it is, and that one run at a time writes to it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tnt_hf.conversion.files import naming
from tnt_hf.recipes.checkpoints import REPLACED, bring_back


RESOLVED = "recipe.yaml"  # the settings of a run, in its output_dir
LOCK = ".tnt-train.lock"
# What may differ between a run and its continuation.
FREE = (
    "dataloader_prefetch_factor", "ddp_timeout", "disable_tqdm", "enable_jit_checkpoint", "eval_accumulation_steps",
    "eval_on_start", "eval_steps", "eval_strategy", "log_level", "logging_first_step", "logging_steps",
    "memory_logging_steps", "output_dir", "per_device_eval_batch_size", "plots", "report_to", "resume_from_checkpoint",
    "run_name", "save_steps", "save_strategy", "save_total_limit", "torch_empty_cache_steps",
)  # fmt: skip
# Not where the evaluations decide over the learning rate, or over the weights that are kept.
DECIDING = {"eval_on_start", "eval_steps", "eval_strategy", "save_steps", "save_strategy"}
DECIDING |= {"per_device_eval_batch_size"}  # over the last bit of a loss
# What a run leaves that ended before it saved anything to go on from: the folder is still free for another one.
UNFINISHED = (RESOLVED, "converted", "gates.png", "loss.png", "runs", "training_log.jsonl")


def check_output(output: Path, given: dict[str, Any]) -> None:
    """
    Whether a run with the settings `given` may use the folder `output`.

    Raises:
        ValueError: it holds files that no run wrote, or a checkpoint or a model of a run with other settings; or it
            lies in the folder of the data.
        FileExistsError: it is a file, or lies in one.
        PermissionError: nothing can be written there.
    """
    for field in ("dataset_name", "eval_dataset_name"):
        data = Path(os.path.expanduser(given.get(field) or "python-stdlib"))
        if data.is_dir() and output.resolve().is_relative_to(data.resolve()):
            raise ValueError(
                f"output_dir={str(output)!r}: lies in {field}={given[field]!r}, so what the run writes would be read"
                " as data; choose a folder outside"
            )
    there = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise FileExistsError(f"output_dir={str(output)!r}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"output_dir={str(output)!r}: nothing can be written to {there}")
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    found = {name for name in found if not name.startswith(".") or name.startswith(REPLACED)}
    if not found - {"converted"}:
        return
    if RESOLVED not in found:
        raise ValueError(
            f"output_dir={str(output)!r}: holds files of something else ({min(found - {'converted'})}), choose another"
        )
    if found <= {*UNFINISHED, "gates.png.partial", "loss.png.partial"}:
        return
    from tnt_hf.recipes.recipe_file import default_settings  # here: it takes its time, and a new folder needs it not

    before, default = _settings(output), default_settings()
    free = set(FREE)
    if given.get("load_best_model_at_end") or given.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
        free -= DECIDING if given.get("eval_steps") else {*DECIDING, "logging_steps"}  # which evaluations then follow
    for name in sorted({*before, *given} - free):
        # A default that is given is the same setting as one that is not.
        if before.get(name, default.get(name)) != given.get(name, default.get(name)):
            shown = ["the default" if name not in x else repr(x[name]) for x in (given, before)]
            raise ValueError(
                f"output_dir={str(output)!r}: belongs to another run, {name} is {shown[0]} and was {shown[1]}; choose"
                " another output_dir, or delete it"
            )


def _settings(output: Path) -> dict[str, Any]:
    """The settings of the run that `output` belongs to."""
    from tnt_hf.settings import parse_yaml

    try:
        settings = parse_yaml((output / RESOLVED).read_text(encoding="utf-8"))
        named = isinstance(settings, dict) and all(isinstance(name, str) for name in settings)
        reason = None if named else "holds no mapping of fields"
    except ValueError as error:  # also for bytes that are not text
        reason = str(error)
    if reason is not None:
        raise ValueError(
            f"output_dir={str(output)!r}: its {RESOLVED} {reason}, so its owner is unknown; choose another"
        )
    return settings


def claim_output(output: Path, given: dict[str, Any]) -> None:
    """Write the settings into the folder, as a recipe that repeats the run. Raises OSError naming it if it cannot."""
    from tnt_hf.settings import dump_yaml

    output.mkdir(parents=True, exist_ok=True)
    partial = output / f".{RESOLVED}.partial"
    with naming(output / RESOLVED):
        partial.write_text(dump_yaml(given), encoding="utf-8")
        os.replace(partial, output / RESOLVED)


@contextmanager
def sole_run(output: Path) -> Iterator[None]:
    """
    A context in which no other process may be in this context for the same folder, which is made if need be.

    The lock is of the kind that belongs to one process and not to those it forks: it ends with the process, however
    that ends, even where dataloader workers live for some seconds longer.

    Raises:
        ValueError: another run writes to the folder.
        OSError: the folder cannot be made, or cannot be locked.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / LOCK
    while True:
        file = path.open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
        except FileNotFoundError:  # the run that held it has just ended and taken it away
            pass
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise ValueError(f"output_dir={str(output)!r}: another run is writing to it; wait, or end it") from error
        except OSError as error:
            file.close()
            reason = f"its file system locks no files ({error.strerror})"
            raise OSError(error.errno, f"output_dir={str(output)!r}: {reason}; choose another") from error
        file.close()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def check_unused(output: Path) -> None:
    """Raises ValueError if a run is writing to `output`; leaves nothing there, and puts checkpoints back that a killed
    run was replacing."""
    if (output / LOCK).exists() or any(output.glob(f"{REPLACED}*")):
        with sole_run(output):
            bring_back(output)
