"""The settings of each benchmark suite: one dataclass per suite, its defaults, and what `--quick` makes of them.

Nothing here is slow to import, so `tnt bench --help` answers without torch.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _option(default: Any, help: str):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """What all suites share. Every number except the seed must be at least 1."""

    device: str = _option("auto", "cpu or cuda; auto is cuda if available and the suite can use it")
    threads: int = _option(1, "torch threads on the CPU; with 1, ratios are of processor time")
    rounds: int = _option(5, "rounds, in each of which all contestants take one turn")
    seed: int = _option(0, "seed for weights and inputs")

    def __post_init__(self):
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: must be cpu, cuda or auto")
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if not values:
                raise ValueError(f"{name}={value!r}: must not be empty")
            if name != "seed" and any(isinstance(x, int) and x < 1 for x in values):
                raise ValueError(f"{name}={value!r}: must be at least 1")

    @property
    def clock(self) -> str:
        """What ratios compare: the thread's processor time, or wall time where work is done outside it."""
        return "cpu" if self.device == "cpu" and self.threads == 1 else "wall"

    def portable(self) -> dict[str, Any]:
        """As it goes into a result: only the last part of paths, which mean nothing elsewhere."""
        plain = {name: value.name if isinstance(value, Path) else value for name, value in vars(self).items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


@dataclass(frozen=True)
class MemorySettings(Settings):
    """The memory op alone."""

    chunk_sizes: tuple[int, ...] = _option((8, 16, 64, 256), "tokens per chunk")
    tokens: int = _option(2048, "tokens per sequence")
    heads: int = _option(4, "memory heads")
    width: int = _option(64, "width of a head")
    expansion: int = _option(4, "hidden width of TTT-MLP's network over its head width")
    titans_expansions: tuple[int, ...] = _option((4, 1), "the same for NeuralMemory, whose default is 4")
    titans_rounds: int = _option(3, "rounds against NeuralMemory, whose small chunks take minutes")
    ttt_lm: Path | None = _option(None, "ttt.py of ttt-lm-pytorch")
    titans: Path | None = _option(None, "folder to import titans-pytorch from, if it is not installed")

    def __post_init__(self):
        super().__post_init__()
        if ragged := [size for size in self.chunk_sizes if self.tokens % size]:
            raise ValueError(
                f"tokens={self.tokens}: must be a multiple of chunk_sizes={ragged[0]}, for TTT-MLP's sake"
            )
        if self.ttt_lm is not None and not self.ttt_lm.is_file():
            raise ValueError(f"ttt_lm={str(self.ttt_lm)!r}: is not a file")


@dataclass(frozen=True)
class TrainSettings(Settings):
    """Training steps of whole models."""

    rounds: int = _option(3, "rounds, in each of which all contestants take one step")
    shape: str | None = _option(None, "150m, shrunk, narrow or tiny (default: shrunk on a CPU, else 150m)")
    contexts: tuple[int, ...] = _option((2048, 4096, 8192, 16384, 32768), "tokens per row")
    tokens: int | None = _option(None, "tokens per step, at least one row (default: 8,192 on a CPU, else 65,536)")
    contestants: tuple[str, ...] | None = _option(None, "names as in the table (default: all)")
    dtype: str | None = _option(None, "float32 or bfloat16, by autocast (default: float32 on a CPU, else bfloat16)")
    memory_implementation: str = _option("auto", "as in TNTConfig")
    attention: str | None = _option(None, "window attention (default: blocked_causal on a CPU, else sdpa)")
    execution: str = _option("eager", "eager or compiled (by torch.compile), for all contestants")


@dataclass(frozen=True)
class DecodeSettings(Settings):
    """Decoding and prefill of whole models."""

    shape: str | None = _option(None, "demo, 150m or tiny (default: demo on a CPU, else 150m)")
    dtype: str | None = _option(None, "float32 or bfloat16 (default: float32 on a CPU, else bfloat16)")
    memory_implementation: str = _option("auto", "as in TNTConfig")
    contexts: tuple[int, ...] = _option((1024, 4096, 16384, 65536, 131072), "tokens already read")
    batch_sizes: tuple[int, ...] = _option((1, 8), "rows that decode together")
    steps: int = _option(32, "decoded tokens per turn")
    prefill_limit: int = _option(131072, "longest prompt whose prefill is also timed for the Llama")
    repeat_limit: int | None = _option(
        None, "longest prompt that is read once per round, not just once (default: 16,384 on a CPU, else 131,072)"
    )


@dataclass(frozen=True)
class LizaSettings(Settings):
    """LiZA's linear operators alone."""

    lengths: tuple[int, ...] = _option((512, 1024, 2048, 4096), "tokens per sequence")
    heads: int = _option(4, "heads of queries, keys and values")
    width: int = _option(64, "width of a head")
    chunk_size: int = _option(64, "tokens per chunk")
    order: int = _option(2, "writes per token of the delta product")
    tptt: Path | None = _option(None, "folder to import TPTT from, if it is not installed")


@dataclass(frozen=True)
class ConversionSettings(Settings):
    """A conversion against cp."""

    rounds: int = _option(3, "rounds, in each of which all stages take one turn")
    shape: str = _option("8b", "8b or tiny")
    stages: tuple[str, ...] = _option(("cp", "copy", "link", "cast"), "stages to run, in this order")
    folder: Path | None = _option(None, "folder with room for two checkpoints, 36 GB for 8b")


@dataclass(frozen=True)
class Suite:
    """One line of `tnt bench --list`."""

    about: str
    settings: type[Settings]
    quick: dict[str, Any]


SUITES: dict[str, Suite] = {
    "memory": Suite(
        "the memory op against TTT-MLP, titans-pytorch and vmap(grad), forward and backward",
        MemorySettings,
        {"chunk_sizes": (16, 64), "tokens": 512, "rounds": 2, "titans_rounds": 1, "titans_expansions": (1,)},
    ),
    "train": Suite(
        "training steps of TNT, Titans and Transformers of equal size at 2k to 32k tokens",
        TrainSettings,
        {"contexts": (2048,), "tokens": 2048, "rounds": 1},
    ),
    "decode": Suite(
        "decoding, prefill and cache bytes at 1k to 128k tokens against a Llama of equal size",
        DecodeSettings,
        {"contexts": (1024, 8192), "rounds": 2, "steps": 8},
    ),
    "liza": Suite(
        "LiZA's linear operators against TPTT and SDPA, forward and backward",
        LizaSettings,
        {"lengths": (512,), "rounds": 2},
    ),
    "conversion": Suite(
        "seconds of a conversion against cp, and its memory",
        ConversionSettings,
        {"shape": "tiny", "rounds": 1},
    ),
}


def add_options(parser: argparse.ArgumentParser, settings: type[Settings]) -> None:
    """One option per field; what is not given is `None` in the namespace."""
    for option in dataclasses.fields(settings):
        kind, default = option.type, option.default
        many = "tuple" in str(kind)
        parse = int if "int" in str(kind) else Path if "Path" in str(kind) else str
        shown = " ".join(map(str, default)) if many and default else default
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=parse,
            nargs="+" if many else None,
            metavar="N" if parse is int else option.name.upper().rstrip("S"),
            help=option.metadata["help"] + ("" if default is None else f" (default: {shown})"),
        )


def read_options(options: argparse.Namespace, suite: Suite, quick: bool) -> Settings:
    """The suite's settings, updated with what was given.

    Raises:
        ValueError: a value that does not fit; names field and value.
    """
    names = [option.name for option in dataclasses.fields(suite.settings)]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return suite.settings(**(suite.quick if quick else {}) | given)
