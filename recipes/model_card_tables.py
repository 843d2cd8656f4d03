"""The tables of a model card: values as Markdown that breaks no table, and no path of the machine it was made on."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any


SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")
# Settings that say where a run wrote and how it was watched, not what it computed; and the one that is a secret.
NOT_SHOWN = {"output_dir", "run_name", "report_to", "hub_model_id", "disable_tqdm", "plots", "hub_token"}
# Columns whose names in the JSON need a word more.
HEADINGS = {
    "nats": "loss added (nats)",
    "nats_standard_error": "its standard error",
    "what": "",
    "interval": "95% interval",
}


def portable(value: Any) -> Any:
    """A setting without the machine: paths that are absolute, or start at home or above, by their last name only."""
    if isinstance(value, Mapping):
        return {str(key): portable(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [portable(x) for x in value]
    if not isinstance(value, str):
        return value
    option, equals, path = value.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={portable(path)}"
    value = value.removeprefix("file://")
    if PureWindowsPath(value).drive:
        return PureWindowsPath(value).name
    outside = value.startswith(("/", "~")) or ".." in PurePosixPath(value).parts
    return (Path(value).name or "folder") if outside else value


def portable_command(command: str) -> str:
    """A command line in which every argument is [`portable`]."""
    try:
        return shlex.join(portable(part) for part in shlex.split(command))
    except ValueError:  # quotes that do not match
        return " ".join(map(portable, command.split()))


def text(value: Any) -> str:
    """A value inside a sentence or a cell: numbers as people write them, everything else escaped."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = value.is_integer() or abs(value) >= 1000
        return f"{round(value):,}" if whole and abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, Mapping) and "median" in value:
        spread = f" ({text(value['min'])} to {text(value['max'])})" if {"min", "max"} <= value.keys() else ""
        return text(value["median"]) + spread
    if isinstance(value, list | tuple) and not any(isinstance(x, Mapping | list | tuple) for x in value):
        return ", ".join(map(text, value))
    if isinstance(value, Mapping) and not any(isinstance(x, Mapping | list | tuple) for x in value.values()):
        return ", ".join(f"{text(key)}: {text(x)}" for key, x in value.items())
    if isinstance(value, Mapping | list | tuple):
        return code(value)
    return " ".join(SPECIAL.sub(r"\\\1", str(value)).split())


def code(value: Any) -> str:
    """A value as code inside a cell, written as in YAML or on the command line."""
    shown = value if isinstance(value, str) else json.dumps(value)
    return "`" + " ".join(shown.replace("`", "'").replace("|", "\\|").split()) + "`"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table of cells that are Markdown already; empty without rows."""
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def facts(values: Mapping[str, Any]) -> str:
    """A table of two columns of the values that are there."""
    rows = [[text(key), value] for key, value in values.items() if value not in (None, "")]
    return table(["", ""], rows)


def records(entries: list[Mapping[str, Any]]) -> str:
    """A table of dicts: a column per key that holds a value in any of them."""
    keys = dict.fromkeys(key for entry in entries for key in entry)
    keys = [key for key in keys if any(entry.get(key) is not None for entry in entries)]
    rows = [["" if entry.get(key) is None else _cell(key, entry[key]) for key in keys] for entry in entries]
    return table([text(HEADINGS.get(key, key.replace("_", " "))) for key in keys], rows)


def _cell(column: str, value: Any) -> str:
    is_range = column.endswith(("interval", "_range")) and isinstance(value, list | tuple)
    return " to ".join(map(text, value)) if is_range else text(value)


def settings(groups: Mapping[str, Any]) -> str:
    """The settings of a run that were given, as `training.json` groups them; null and [] were meant as such."""
    flat: dict[str, Any] = {}
    for group in groups.values():
        for name, value in group.items():
            inner = {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {}
            flat |= inner or {name: value}
    rows = [[code(name), code(portable(value))] for name, value in flat.items() if name not in NOT_SHOWN]
    return table(["setting", "value"], rows)


def results(evaluation: Mapping[str, Any]) -> list[str]:
    """The paragraphs and tables of an evaluation, in the order of `tnt eval`."""
    found: list[str] = []
    if perplexity := evaluation.get("perplexity"):
        found += _perplexity(perplexity)
    for key, heading in (
        ("passkey", "Passkey retrieval: a number hidden in filler text, asked for at the end."),
        ("recall", "Associative recall: many key-value pairs, asked for by key."),
        ("cost", "Memory and speed by context, one sequence; bytes of memory state and of keys and values."),
    ):
        if entries := evaluation.get(key):
            found += [heading, records([portable(entry) for entry in entries])]
    if ablations := evaluation.get("ablations"):
        rows = [
            {"what": name, **(x if isinstance(x, Mapping) else {"perplexity": x})} for name, x in ablations.items()
        ]
        found += ["What each branch contributes: the same text with it switched off.", records(rows)]
    if failed := evaluation.get("failed"):
        found.append(f"Not, or not wholly, measured, as memory did not suffice: {', '.join(map(text, failed))}.")
    return found


def _perplexity(entry: Mapping[str, Any]) -> list[str]:
    found = []
    if (overall := entry.get("overall")) is not None:
        error = f" ± {text(entry['standard_error'])}" if entry.get("standard_error") is not None else ""
        count = f" over {text(entry['tokens'])} tokens" if entry.get("tokens") else ""
        where = f" of {data_name(entry['data'])}" if entry.get("data") else ""
        found.append(f"Perplexity **{text(overall)}**{error}{count}{where}.")
    if positions := entry.get("by_position"):
        found += ["By position in the text:", records([portable(x) for x in positions])]
    return found


def data_name(data: Any) -> str:
    """What an evaluation or a run calls its data, as Markdown."""
    name = data.get("name") or "text" if isinstance(data, Mapping) else data
    return code(portable(str(name)))
