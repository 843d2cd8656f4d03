"""`training.json`: what a finished run was, from which its model card and its continuations are made."""

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from tnt_hf.conversion.files import write_json
from tnt_hf.conversion.reload import ADAPTER_WEIGHTS
from tnt_hf.conversion.source import INDEX, SINGLE, read_index
from tnt_hf.recipes.environment import command_line, environment
from tnt_hf.recipes.model_folder import TRAINING


FORMAT = "tnt-training-1"


def lacking(folder: Path) -> str | None:
    """What `folder` lacks of the results of a run that has ended, in one line; `None` if nothing. Of weights the
    headers are read, which tell the sizes."""
    if not (folder / TRAINING).is_file():
        return f"{TRAINING} is missing"
    paths, path = [x for name in (SINGLE, ADAPTER_WEIGHTS) if (x := folder / name).exists()], folder / INDEX
    try:
        if not paths and path.is_file():
            paths = sorted({folder / name for name in read_index(path).values()})
        for path in paths:
            with safe_open(path, framework="numpy"):  # of any dtype, where `read_header` knows those we convert
                pass
    except ValueError as error:
        return str(error)
    except (OSError, SafetensorError) as error:
        return f"{path.name} cannot be read ({error})"
    return None if paths else "the weights are missing"


def count_parameters(model: nn.Module) -> dict[str, int]:
    """All parameters of `model`, and those that are trained."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {"parameters": sum(n for n, _ in sizes), "trained_parameters": sum(n for n, trained in sizes if trained)}


def write_run_record(trainer, facts: dict[str, Any], counts: dict[str, int], metrics: dict[str, float]) -> None:
    """
    Write `training.json` into the run's folder: the last file of a run, so that it is there if the run has ended.

    Args:
        trainer: a `RecipeTrainer` that has trained.
        facts: command, recipe, settings, mode, data; what is missing is `None` (the command: of this process).
        counts: of [`count_parameters`]. metrics: the final ones.
    """
    state, seconds = trainer.state, trainer.seconds
    peaks = [round(2**20 * x["peak_memory_mib"]) for x in state.log_history if "peak_memory_mib" in x]
    defaults = {"command": command_line(), "recipe": None, "settings": {}, "mode": None, "data": {}}
    record = {
        "format": FORMAT,
        **defaults,
        **facts,
        "tokens_trained": state.num_input_tokens_seen,
        "steps": state.global_step,
        **counts,
        "metrics": {name: x if math.isfinite(x) else None for name, x in metrics.items()},
        "seconds": round(seconds, 3),
        "tokens_per_second": state.num_input_tokens_seen / trainer.seconds_training if seconds else None,
        "peak_memory_bytes": max(peaks, default=None),
        "processes": trainer.args.world_size,
        "seed": trainer.args.seed,
        "environment": environment(),
    }
    write_json(trainer.folder / TRAINING, record)
