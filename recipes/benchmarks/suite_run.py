"""How a suite is run: row by row into one JSON, which is always whole, and goes on where it was stopped.

A suite is a module with

    rows(settings) -> list of names, in order                  prepare(settings) -> settings with all choices made
    measure(name, settings, tell) -> the row, ready for JSON    summary(rows, settings) -> what the rows say
    table(result) -> lines of text                              CPU_ONLY, true if "auto" is no GPU for it

`tell(text)` shows what is being done. A row is one comparison: all that is in it took turns with each other.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

import tnt_hf.conversion
import tnt_hf.recipes
from tnt_hf.recipes.benchmarks.measure import environment, write
from tnt_hf.recipes.benchmarks.settings import Settings
from tnt_hf.recipes.loading_errors import reading


# What two parts of one result must have in common; the date and the commit of a text change nothing.
SAME = ("cpu", "gpus", "threads", "versions", "all_sources_sha256")


def digest() -> str:
    """Of everything that could be timed or time: `source_sha256` is of the model's modules alone."""
    folders = [Path(module.__file__).parent for module in (tnt_hf, tnt_hf.conversion, tnt_hf.recipes)]
    files = sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def resolve(settings: Settings, cpu_only: bool = False) -> Settings:
    """The settings with a device, checked.

    Raises:
        ValueError: cuda where there is none.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch finds no such device here")
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() and not cpu_only else "cpu"
    return dataclasses.replace(settings, device=device)


def start(path: Path, head: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """What is there of a result, or a new one: `overwrite` replaces all but an unfinished one that was begun alike.

    Raises:
        ValueError: a finished result is there, or an unfinished one that was begun otherwise.
    """
    new = head | {"complete": False, "rows": {}}
    if not path.exists():
        return new
    try:
        with reading(f"{path} is not a result of a suite; replace it with --overwrite"):
            found = json.loads(path.read_text())
            complete = found["complete"]
            changed = [name for name in ("suite", "settings") if found[name] != head[name]]
            changed += [name for name in SAME if found["environment"][name] != head["environment"][name]]
            dict(found["rows"])
    except ValueError:
        if overwrite:
            return new
        raise
    if overwrite and (complete or changed):
        return new
    if complete:
        raise ValueError(f"{path} exists: choose another --out, or replace it with --overwrite")
    if changed:
        raise ValueError(f"{path} is unfinished, of another {', '.join(changed)}: start anew with --overwrite")
    return found


def run_suite(name: str, module: ModuleType, settings: Settings, folder: Path, overwrite: bool) -> None:
    """
    Measures every row that is not there yet, writes `folder/name.json` after each, then the summary and the picture.

    Raises:
        ValueError: see [`start`] and the suite. SystemExit: a contestant is wrong.
    """
    from tnt_hf.recipes.benchmarks.plot import draw_file

    settings = module.prepare(resolve(settings, getattr(module, "CPU_ONLY", False)))
    torch.set_num_threads(settings.threads)
    path = folder / f"{name}.json"
    where = environment(settings.seed, all_sources_sha256=digest())
    head = {"suite": name, "environment": where, "settings": settings.portable()}
    result = start(path, json.loads(json.dumps(head | {"clock": settings.clock})), overwrite)
    todo = [row for row in module.rows(settings) if row not in result["rows"]]
    with tqdm(todo, desc=name, unit="row", disable=None, dynamic_ncols=True) as bar:
        for row in bar:
            result["rows"][row] = module.measure(
                row, settings, lambda text, row=row: bar.set_postfix_str(f"{row}: {text}")
            )
            write(path, result)
    result["summary"] = module.summary(result["rows"], settings)
    result["complete"] = True
    write(path, result)
    print("\n".join(module.table(result)))
    print(f"\n{path}\n{draw_file(path)}")
