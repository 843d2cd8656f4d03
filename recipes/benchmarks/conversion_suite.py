"""Suite `conversion`: conversion.py, seconds of a conversion against `cp` and its memory, as a suite of one row."""

import argparse
import dataclasses
import tempfile
from pathlib import Path

from tnt_hf.recipes.benchmarks import conversion
from tnt_hf.recipes.benchmarks.measure import columns
from tnt_hf.recipes.benchmarks.settings import ConversionSettings


def prepare(settings: ConversionSettings) -> ConversionSettings:
    """Raises `ValueError` for an unknown shape or stage, or a large shape without a folder."""
    for name, values, known in (
        ("shape", (settings.shape,), conversion.SHAPES),
        ("stages", settings.stages, ("cp", "copy", "link", "cast")),
    ):
        if unknown := [value for value in values if value not in known]:
            raise ValueError(f"{name}={unknown[0]!r}: must be one of {', '.join(known)}")
    if settings.folder is None and settings.shape != "tiny":
        raise ValueError(f"folder=None: shape {settings.shape} needs room for three checkpoints; name a folder")
    return dataclasses.replace(settings, stages=tuple(settings.stages))


def rows(settings: ConversionSettings) -> list[str]:
    """One, as all stages take turns."""
    return [settings.shape]


def measure(name: str, settings: ConversionSettings, tell) -> dict:
    """All stages in turns."""
    tell("running")
    args = argparse.Namespace(shape=name, stages=list(settings.stages), rounds=settings.rounds, seed=settings.seed)
    if settings.folder is not None:
        return conversion.measure(argparse.Namespace(folder=settings.folder, **vars(args)))
    with tempfile.TemporaryDirectory() as folder:
        return conversion.measure(argparse.Namespace(folder=Path(folder), **vars(args)))


def summary(found: dict[str, dict], settings: ConversionSettings) -> dict:
    """What `conversion.summarise` says."""
    (row,) = found.values()
    return {name: row[name] for name in ("summary", "limits", "holds")}


def table(result: dict) -> list[str]:
    """Seconds and anonymous memory of every stage; limits are for the large shape."""
    (row,) = result["rows"].values()
    stages = [(name, x) for name, x in row["summary"].items() if "seconds" in x]
    lines = [(name, x["seconds"]["median"], x.get("anonymous_mib")) for name, x in stages]
    lines.append(("imports alone", None, row["imports_mib"]))
    text = columns([("stage", "seconds", "anonymous MiB"), *lines])
    if "copy_over_cp" in row["summary"]:
        text.append(
            f"copy over cp: {row['summary']['copy_over_cp']['median']}, at most {row['limits']['copy_over_cp']}"
        )
    return text
