"""What `tnt eval` writes: evaluation.json, evaluation.md and pictures, complete or not at all."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tnt_hf.conversion.files import flush, write_json
from tnt_hf.conversion.staging import left_over, owned_folder
from tnt_hf.recipes.pictures import finish, subplots
from tnt_hf.recipes.training_plots import spans_decades


FORMAT = "tnt-evaluation-1"
JSON, MARKDOWN = "evaluation.json", "evaluation.md"
SCRATCH = ".tnt-eval-"  # before the name of a folder that an evaluation is written in


# -------------------------------------------------------------------------------------------------------------- files


def check_output(output: Path, overwrite: bool) -> None:
    """
    Whether results may be written into a folder. What evaluations left there that were killed is removed.

    Raises:
        FileExistsError: `output` holds an evaluation and `overwrite` is not asked for, or a file of the same name that
            no evaluation wrote.
        NotADirectoryError: `output` is a file.
        OSError: it cannot be made, or nothing can be written there.
    """
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"--output {output}: is a file, not a folder")
    ours = _written_here(output)
    if (output / JSON).exists():
        if not ours:
            raise FileExistsError(f"{output / JSON}: was not written by tnt eval; it is never overwritten")
        if not overwrite:
            raise FileExistsError(f"{output / JSON}: exists; --overwrite replaces it, --output names another folder")
    for name in (MARKDOWN, *PICTURES):
        if (output / name).exists() and name not in ours:
            raise FileExistsError(f"{output / name}: was not written by tnt eval; it is never overwritten")
    missing = [path for path in (output, *output.parents) if not path.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
        for path in missing:
            path.rmdir()
    except OSError as error:
        raise OSError(f"--output {output}: cannot be written to ({error.strerror})") from error
    for folder in left_over(output, SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A folder in `output` for as long as this context lasts."""
    try:
        folder, lock = owned_folder(output, SCRATCH, f"--output {output}")
    except OSError:  # of a file system without locks: if this is killed, nobody can tell and it stays
        folder, lock = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=output)), None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.close()


def _written_here(output: Path) -> list[str]:
    """Names of the files of the evaluation in a folder; empty if there is none."""
    try:
        found = json.loads((output / JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    files = found.get("files") if isinstance(found, dict) and found.get("format") == FORMAT else None
    return [name for name in files if isinstance(name, str)] if isinstance(files, list) else []


def write_evaluation(output: Path, results: dict[str, Any], overwrite: bool = False) -> list[Path]:
    """
    Writes `results` and what is drawn from them; a file is replaced in one step, evaluation.json first.

    Returns:
        The files written.

    Raises:
        FileExistsError: see [`check_output`].
    """
    check_output(output, overwrite)
    pictures = [name for name, (section, _) in PICTURES.items() if results.get(section)]
    names = [JSON, MARKDOWN, *pictures]
    stale = sorted(set(_written_here(output)) & {MARKDOWN, *PICTURES} - set(names))
    # While what was drawn of the older one is there, it belongs to this one: whoever breaks off leaves nobody's files.
    results = {**results, "files": names + stale}
    output.mkdir(parents=True, exist_ok=True)
    with _scratch(output) as made:
        (made / JSON).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (made / MARKDOWN).write_text(as_markdown(results), encoding="utf-8")
        for name in pictures:
            section, draw = PICTURES[name]
            _picture(draw, results[section], made / name)
        for name in names:
            flush(made / name)
        for name in names:
            os.replace(made / name, output / name)
    for name in stale:
        (output / name).unlink(missing_ok=True)
    if stale:
        write_json(output / JSON, {**results, "files": names})
    return [output / name for name in names]


# ------------------------------------------------------------------------------------------------------------ Markdown


def as_markdown(results: dict[str, Any]) -> str:
    """The results as a page of tables."""
    lines = [f"# Evaluation of {results['model']}", ""]
    if results.get("command"):
        lines += ["```bash", results["command"], "```", ""]
    lines += [f"- {name}: {_cell(value)}" for name, value in results["settings"].items() if value is not None]
    lines += [f"- {name}: {_cell(value)}" for name, value in results["environment"].items() if value not in (None, [])]
    lines += [f"- warning: {text}" for text in results.get("warnings", [])]
    lines += [f"- {task} failed: {reason}" for task, reason in results.get("failed", {}).items()]
    if perplexity := results.get("perplexity"):
        error = perplexity["standard_error"]
        over = f"standard error over {perplexity['documents']} documents"
        spread = "" if error is None else f" ± {_cell(error)} ({over})"
        what = f"{perplexity['tokens']:,} tokens of {perplexity['data']['name']}"
        lines += ["", "## Perplexity", "", f"{_cell(perplexity['overall'])}{spread}, {what}."]
        lines[-1] += " Position: tokens read before the predicted one."
        lines += ["", *_table(perplexity["by_position"])]
    notes = {
        "passkey": "Exact match of the greedy continuation; tokens from the key to the end of the question.",
        "recall": "The likeliest of all tokens is the value of the key just read; tokens from value to key.",
        "cost": f"One sequence; medians of {results['settings'].get('cost_repeats')} repeats, and lowest to highest.",
    }
    titles = {"passkey": "Pass key", "recall": "Associative recall", "cost": "Cost"}
    for section, note in notes.items():
        if section in results:
            lines += ["", f"## {titles[section]}", "", note, "", *_table(results[section])]
    if "ablations" in results:
        lines += ["", "## Ablations", "", "`nats`: rise of the loss per token with the branch switched off.", ""]
        lines += _table([{"what": name, **row} for name, row in results["ablations"].items()])
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[key.replace("_", " ") for key in keys], ["---"] * len(keys)]
    lines += [["" if row.get(key) is None else _entry(row[key]) for key in keys] for row in rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _entry(value: Any) -> str:
    """What stands in a table; a list in there is a range."""
    return " to ".join(map(_cell, value)) if isinstance(value, list | tuple) else _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(x)}" for key, x in value.items())
    if isinstance(value, bool) or not isinstance(value, (int, float, list, tuple)):
        return str(value).replace("|", "\\|")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


# ------------------------------------------------------------------------------------------------------------ pictures


def _picture(draw: Callable, section: Any, path: Path) -> None:
    figure, axes = subplots(figsize=(7, 4))
    draw(axes, section)
    finish(figure, path, axes)


def _token_axis(axes, lengths: list[int], label: str) -> None:
    """Lengths in tokens on a logarithmic axis that names each of them."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize="small")
    axes.minorticks_off()
    axes.set_xlabel(label)


def _draw_perplexity(axes, section: dict[str, Any]) -> None:
    rows = section["by_position"]
    places, errors = [row["to"] for row in rows], [row["standard_error"] or 0.0 for row in rows]
    axes.errorbar(places, [row["perplexity"] for row in rows], errors, marker="o", capsize=3, label="by position")
    axes.axhline(section["overall"], color="grey", linestyle="--", label=f"overall: {section['overall']:.2f}")
    axes.set(ylabel="perplexity, ± standard error", title="Perplexity by position")
    _token_axis(axes, places, "position: up to so many tokens read")


def _draw_accuracy(axes, rows: list[dict[str, Any]], key: str, title: str) -> None:
    places, share = [row[key] for row in rows], [row["accuracy"] for row in rows]
    bars = list(zip(*((x - low, high - x) for x, (low, high) in zip(share, (row["interval"] for row in rows)))))
    axes.errorbar(places, share, bars, marker="o", capsize=3, label="accuracy")
    axes.axhline(rows[0]["chance"], color="grey", linestyle="--", label=f"chance: {rows[0]['chance']:.2g}")
    axes.set(ylabel="accuracy, 95% interval", ylim=(-0.03, 1.03), title=title)
    _token_axis(axes, places, "distance: up to so many tokens" if key == "distance_to" else "distance in tokens")


def _draw_cost(axes, rows: list[dict[str, Any]]) -> None:
    contexts = [row["context"] for row in rows]
    axes.plot(contexts, [row["state_bytes"] / 2**20 for row in rows], "o-", label="memory state (MiB)")
    axes.plot(contexts, [row["kv_bytes"] / 2**20 for row in rows], "o-", label="keys and values (MiB)")
    axes.set(ylim=(0, None), ylabel="MiB per sequence", title="Cost by context")
    speed = axes.twinx()
    for name, color in (("prefill", "C2"), ("decode", "C3")):
        if all((key := f"{name}_tokens_per_second") in row for row in rows):
            speed.plot(contexts, [row[key] for row in rows], ".:", color=color)
            axes.plot([], [], ".:", color=color, label=f"{name} (tokens/s)")  # so that one legend names everything
    speed.set(yscale="log", ylabel="tokens per second")
    _token_axis(axes, contexts, "context in tokens")
    # Below, where no curve runs: the place that is best for the left axis is that of any curve on the right one.
    axes.legend(fontsize="small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw_ablations(axes, section: dict[str, Any]) -> None:
    rows = {name: row for name, row in section.items() if "nats" in row}
    rises = [row["nats"] for row in rows.values()]
    errors = [row["nats_standard_error"] or 0.0 for row in rows.values()]
    axes.barh(list(rows), rises, xerr=errors, label="rise of the loss")
    sizes = [abs(rise) for rise in rises if rise]
    if spans_decades(sizes):  # symmetric, as switching a branch off may lower the loss
        ends = [rise + side * error for rise, error in zip(rises, errors) for side in (-1, 1)]
        _symmetric_axis(axes, min(sizes), min(0.0, *ends), max(0.0, *ends))
        axes.grid(axis="x", alpha=0.3)
    axes.invert_yaxis()
    axes.set(xlabel="nats per token, on the same text", title="With a branch switched off")


def _symmetric_axis(axes, smallest: float, low: float, high: float) -> None:
    """A logarithmic axis for both signs, linear below `smallest`, that shows all of `low` to `high`. Its ticks have
    room for their labels, which the library's own around 0 have not."""
    axes.set_xscale("symlog", linthresh=smallest)
    scale = axes.xaxis.get_transform()
    start, end = scale.transform([low, high])
    margin = 0.05 * (end - start)
    axes.set_xlim(scale.inverted().transform([start - margin * (low < 0), end + margin * (high > 0)]))
    powers = [10.0**power for power in range(math.floor(math.log10(smallest)), math.ceil(math.log10(high - low)) + 1)]
    ticks = [0.0]
    for sign, side in ((1, high), (-1, -low)):
        last = 0.0
        for power in powers:
            place = scale.transform([power])[0]
            if power <= side and place - last >= (end - start) / 7:
                ticks.append(sign * power)
                last = place
    axes.set_xticks(sorted(ticks))


PICTURES: dict[str, tuple[str, Callable]] = {
    "perplexity.png": ("perplexity", _draw_perplexity),
    "passkey.png": ("passkey", lambda axes, rows: _draw_accuracy(axes, rows, "distance", "Pass key by distance")),
    "recall.png": ("recall", lambda axes, rows: _draw_accuracy(axes, rows, "distance_to", "Recall by distance")),
    "cost.png": ("cost", _draw_cost),
    "ablations.png": ("ablations", _draw_ablations),
}
