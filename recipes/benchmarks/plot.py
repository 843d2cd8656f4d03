"""The picture of a result, from its JSON alone: `tnt bench plot FILE.json`."""

import json
from pathlib import Path

from tnt_hf.recipes.loading_errors import reading
from tnt_hf.recipes.pictures import finish, subplots


def hardware(report: dict) -> str:
    """For a title."""
    environment = report["environment"]
    if report.get("settings", {}).get("device") == "cuda":
        return environment["gpus"][0]
    return f"{environment['threads']} thread, {environment['cpu']}"


def grouped(axis, series: dict[str, dict[str, dict]], groups: list[str]) -> None:
    """Bars of medians with their range, one colour per series."""
    width = 0.8 / max(1, len(series))
    for i, (name, entry) in enumerate(series.items()):
        place = [groups.index(group) + (i - (len(series) - 1) / 2) * width for group in entry]
        middle = [x["median"] for x in entry.values()]
        error = [[x["median"] - x["min"] for x in entry.values()], [x["max"] - x["median"] for x in entry.values()]]
        axis.bar(place, middle, width, label=name, yerr=error, capsize=2)
    axis.set_xticks(range(len(groups)), groups)


def lines(axis, series: dict[str, dict[str, dict]], suffix: str = "", colors: dict | None = None, **style) -> None:
    """Lines of medians over a length in tokens, both axes logarithmic, one colour for each name."""
    colors = colors or _colors(series)
    for name, entry in series.items():
        lengths = sorted(map(int, entry))
        middle, low, high = ([entry[str(n)][key] for n in lengths] for key in ("median", "min", "max"))
        label = name + suffix
        axis.plot(lengths, middle, marker="o", markersize=3, label=label, color=colors[name], **style)
        axis.fill_between(lengths, low, high, color=colors[name], alpha=0.15, linewidth=0)
    _tokens(axis)


def _colors(names) -> dict[str, tuple]:
    """There may be more contestants than the usual ten colours."""
    from matplotlib import colormaps

    return dict(zip(names, colormaps["tab20"].colors))


def _tokens(axis) -> None:
    """A logarithmic axis of tokens, 2k for 2,048."""
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:.0f}k" if n >= 1024 else f"{n:.0f}")
    axis.set_xlabel("tokens")
    axis.grid(alpha=0.3, which="both", linewidth=0.5)


# ---------------------------------------------------------------------------------------------- one function per suite


def memory(report: dict):
    """Ratios of the suite `memory`, with the goals as lines."""
    faster = report["summary"]["times_faster"]
    found = {n: {f"C = {c}": x for c, x in by.items() if isinstance(x, dict)} for n, by in faster.items()}
    targets = {name: x for name, x in report["summary"]["targets"].items() if isinstance(x, dict)}
    found = {name: entry for name, entry in found.items() if entry}
    figure, axis = subplots(figsize=(9, 5))
    groups = sorted({group for entry in found.values() for group in entry}, key=lambda name: int(name.split()[-1]))
    grouped(axis, found, groups)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.06))
    asked = ", ".join(f"{name} {line}" for name, line in zip(targets, ("dashed", "dotted")))
    for style, (_, by_size) in zip(("--", ":"), targets.items()):
        for size, target in by_size.items():
            if f"C = {size}" in groups:
                x = groups.index(f"C = {size}")
                axis.hlines(target, x - 0.45, x + 0.45, colors="black", linestyles=style, linewidth=1)
    axis.set_yscale("log")
    axis.set_ylabel(f"times faster, {report['clock']} time")
    axis.set_title(f"forward + backward, {hardware(report)}; black lines: the goal against {asked}", fontsize=9)
    return figure


def train(report: dict):
    """Time per token over the length of a row."""
    figure, axis = subplots(figsize=(9, 5.5))
    lines(axis, report["summary"]["microseconds_per_token"])
    axis.set_xlabel("tokens of a row")
    axis.set_ylabel(f"microseconds of {report['clock']} time per token")
    settings = report["settings"]
    axis.set_title(f"training step, {settings['shape']} shape, {settings['dtype']}, {hardware(report)}", fontsize=9)
    axis.legend(fontsize=7, ncols=2)
    return figure


def decode(report: dict):
    """Tokens per second of decoding and prefill, and cache bytes, over the context."""
    found = report["summary"]
    figure, axes = subplots(1, 3, figsize=(14, 4.5))
    colors = _colors(dict.fromkeys(name for by_name in found["decode_tokens_per_second"].values() for name in by_name))
    for style, (batch_size, by_name) in zip(("-", "--", ":", "-."), found["decode_tokens_per_second"].items()):
        lines(axes[0], by_name, f", batch {batch_size}", colors, linestyle=style)
    lines(axes[1], found["prefill_tokens_per_second"], colors=colors)
    for name, sizes in found["cache_bytes"].items():
        places = [int(n) for n in sizes]
        axes[2].plot(places, list(sizes.values()), marker="o", markersize=3, label=name, color=colors[name])
    _tokens(axes[2])
    for axis, title in zip(axes, ("decode, tokens/s", "prefill, tokens/s", "bytes of cache per row")):
        axis.set_title(title, fontsize=9)
        axis.legend(fontsize=7, handlelength=4)
    figure.suptitle(f"{report['settings']['shape']} shape, {hardware(report)}", fontsize=9)
    return figure


def liza(report: dict):
    """Tokens per second of the operators over the length."""
    figure, axis = subplots(figsize=(9, 5))
    lines(axis, report["summary"]["tokens_per_second"])
    axis.set_ylabel(f"tokens per second of {report['clock']} time")
    axis.set_title(f"forward + backward, {hardware(report)}", fontsize=9)
    axis.legend(fontsize=7, ncols=2)
    return figure


def conversion(report: dict):
    """Seconds of every stage."""
    (row,) = report["rows"].values()
    stages = {name: x for name, x in row["summary"].items() if isinstance(x, dict) and "seconds" in x}
    figure, axis = subplots(figsize=(6, 4))
    grouped(axis, {"seconds": {name: x["seconds"] for name, x in stages.items()}}, list(stages))
    axis.set_ylabel("seconds")
    axis.set_title(f"conversion of {row['tensor_bytes'] / 1e9:.1f} GB, {report['environment']['cpu']}", fontsize=9)
    return figure


SUITES = {function.__name__: function for function in (memory, train, decode, liza, conversion)}


def draw_file(result: Path, picture: Path | None = None) -> Path:
    """
    Draws what a result holds.

    Args:
        picture: by default the result's name with `.png`.

    Returns:
        The picture's path.

    Raises:
        ValueError: the file is not a finished result of a suite.
    """
    with reading(f"{result} is not a result of a suite"):
        report = json.loads(result.read_text())
        name, complete = report.get("suite"), report.get("complete")
        known = name in SUITES
    if not known:
        raise ValueError(f"{result} has suite={name!r}: must be one of {', '.join(SUITES)}")
    if not complete:
        raise ValueError(f"{result} is unfinished: start the suite {name} again with the same settings")

    with reading(f"{result} is not a result of the suite {name}"):
        figure = SUITES[name](report)
    return finish(figure, picture or result.with_suffix(".png"))
