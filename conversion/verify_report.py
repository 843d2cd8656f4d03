"""The report as data and as text: a verdict first, then one line per promise, then what was measured besides."""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


PASS, FAIL, NOT_APPLICABLE, MEASURED, NOT_RUN = "pass", "fail", "not applicable", "measured", "not run"
LABEL = {PASS: "ok", FAIL: "FAIL", NOT_APPLICABLE: "-", MEASURED: "measured", NOT_RUN: "not run"}
SHOWN = 3  # names of many
REASON = 160  # characters of a reason in the table; the JSON has all of it


def check_place(field: str, place: str | os.PathLike, verified: Iterable[Path]) -> Path:
    """
    The resolved path of a file to write what was found to.

    Raises:
        FileNotFoundError: its folder does not exist. ValueError: it is a folder, or lies in one that is `verified`,
            whose files it would change.
    """
    path = Path(place).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{field}={str(place)!r}: there is no such folder")
    if path.is_dir():
        raise ValueError(f"{field}={str(place)!r}: is a folder, not a file")
    for folder in verified:
        if folder.is_dir() and path.is_relative_to(folder.resolve()):
            raise ValueError(f"{field}={str(place)!r}: lies in {str(folder)!r}, which is what is verified")
    return path


class Report:
    """
    Rows of the report: each promise with its status and what was measured.

    Args:
        say: told what is checked next.
    """

    def __init__(self, say: Callable[[str], None]):
        self.rows: list[dict[str, Any]] = []
        self.say = say

    def add(self, name: str, promise: str, status: str, measured: dict | None = None, reason: str = "") -> None:
        """A row whose status is known."""
        row = {"name": name, "promise": promise, "status": status, "measured": measured or {}, "reason": reason}
        self.rows.append(row)

    def check(self, name: str, promise: str, function: Callable, *args: Any, unless: str = "") -> None:
        """
        A row from `function(*args)`, which returns whether the promise holds and what was measured. A result too
        damaged to be asked does not hold its promise: what was raised is the reason. Where `unless` says why nothing
        is promised, the numbers are reported all the same.
        """
        self.say(name)
        try:
            holds, measured = function(*args)
        except Exception as error:  # whatever a broken file or model raises is the finding
            self.add(name, promise, FAIL, reason=f"{type(error).__name__}: {error}".strip())
            return
        self.add(name, promise, MEASURED if unless else PASS if holds else FAIL, measured, unless)

    def measured(self, name: str) -> dict[str, Any]:
        """What the row `name` measured, empty where it could not."""
        return next((row["measured"] for row in self.rows if row["name"] == name), {})

    def summary(self, memory: str) -> dict[str, Any]:
        """`passed` and `verdict` of all rows; `memory` is closed, open, none or unknown."""
        promised = [row for row in self.rows if row["status"] in (PASS, FAIL, NOT_RUN)]
        failed = [row["name"] for row in promised if row["status"] == FAIL]
        other = len(self.rows) - len(promised)
        rest = f"; {other} without a promise" if other else ""
        if failed:
            verdict = f"FAILED: {len(failed)} of {len(promised)} promises do not hold ({', '.join(failed)}){rest}"
        else:
            what = "there is no memory" if memory == "none" else f"the memory is {memory}"
            verdict = f"PASSED: all {len(promised)} promises hold; {what}{rest}"
        return {"passed": not failed, "verdict": verdict, "checks": self.rows}


def json_ready(value: Any) -> Any:
    """The same with string keys, and what JSON has no number for (NaN, infinity) as text."""
    if isinstance(value, dict):
        return {str(name): json_ready(x) for name, x in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [json_ready(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def as_text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    rows = _rows(report)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [report["verdict"], _subject(report), ""]
    lines += ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[3]]).rstrip() for row in rows]
    for title, table in _tables(report).items():
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines += ["", title]
        for row in table:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]
            lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def as_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown, for a model card or an issue."""
    lines = [f"**{report['verdict']}**", "", _subject(report), ""]
    lines += _markdown([("", "check", "promise", "measured"), *_rows(report)])
    for title, table in _tables(report).items():
        lines += ["", f"**{title}**", "", *_markdown(table)]
    return "\n".join(lines) + "\n"


def _markdown(table: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return [lines[0], "|" + "---|" * len(table[0]), *lines[1:]]


def _subject(report: dict[str, Any]) -> str:
    probe = report["probe"]
    if not probe:
        return f"{report['source']} -> {report['output']}"
    missed = [name for name, reached in probe["crossed"].items() if not reached]
    text = f"{report['source']} -> {report['output']}, {probe['dtype']}, {probe['tokens']} tokens of {probe['text']}"
    return text + (f"; not reached, so not checked: {', '.join(missed)}" if missed else "")


def _rows(report: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for row in report["checks"]:
        numbers = "" if row["name"] == "branches" else _numbers(row["measured"])
        reason = " ".join(row["reason"].split())
        reason = reason if len(reason) <= REASON else reason[: REASON - 3] + "..."
        said = "; ".join(x for x in (numbers, reason) if x)
        rows.append((LABEL[row["status"]], row["name"], row["promise"], said))
    return rows


def _numbers(measured: dict[str, Any]) -> str:
    """The most telling numbers of a check in a few characters."""
    if "as it is" in measured:  # checked twice
        once, *more = (_numbers(found) for found in measured.values())
        return once + "".join("; gates opened: " + ("the same" if other == once else other) for other in more)
    said = _distances(measured)
    said += [f"{measured[key]} {key}" for key in ("changed", "missing", "extra") if measured.get(key)]
    if measured.get("not_finite"):
        said.append(f"{measured['not_finite']} not finite")
    if "tensors" in measured and not said:
        said.append(f"{measured['tensors']} tensors")
    if measured.get("names"):
        said.append(", ".join(measured["names"]))
    said += [f"{n}: {x['source']} in the source, {x['result']} here" for n, x in measured.get("different", {}).items()]
    said += measured.get("problems", [])[:SHOWN]
    if unread := measured.get("without_digest"):
        said.append(f"{len(unread)} by size and time alone: --record-digests takes the SHA-256")
    said += [f"{k.removesuffix('_keys')}: {', '.join(x[:SHOWN])}" for k, x in measured.items() if k.endswith("_keys")]
    if "promised" in measured:
        said.append(f"{measured['promised']:,} bytes")
    return ", ".join(said)


def _distances(measured: dict[str, Any]) -> list[str]:
    said = []
    if measured.get("finite") is False:
        said.append("NaN or infinite")
    if measured.get("bitwise"):
        said.append("bit-equal")
    elif "worst_token" in measured:
        limit = f" of {measured['tolerance']:g}" if "tolerance" in measured else ""
        said.append(f"{_short(measured['worst_token'])}{limit} std, top-1 {_percent(measured['top1'])}")
    elif "max_abs" in measured and "tensors" not in measured:
        said.append("bit-equal" if measured["max_abs"] == 0 else f"max|d| {_short(measured['max_abs'])}")
    if measured.get("later_logits_change") is False:
        said.append("later tokens change nothing at all")
    whole = measured.get("text")
    if whole is not None and not whole["bitwise"]:
        numbers = f"max|d| {_short(whole['max_abs'])}, KL {_short(whole['kl'])}, top-1 {_percent(whole['top1'])}"
        said.append(f"whole text: {numbers}")
    return said


def _tables(report: dict[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    tables = {}
    if accounting := report["accounting"]:
        header = ("", "source", "result")
        names = {
            "parameters": "parameters", "memory_parameters": "of the memory", "perplexity": "perplexity of the probe",
            "kv_bytes": "bytes of keys and values", "memory_state_bytes": "bytes of memory state",
            "peak_anonymous_bytes": "peak anonymous memory",
        }  # fmt: skip
        rows = []
        for key, name in names.items():
            cells = [accounting.get(model, {}).get(key) for model in ("source", "result")]
            if key == "kv_bytes":
                longest = str(report["probe"]["tokens"])
                name, cells = f"{name} at {longest} tokens", [x and x.get(longest) for x in cells]
            elif key == "peak_anonymous_bytes":
                cells = [x and f"{x / 2**20:,.0f} MiB" for x in cells]
            rows.append((name, *("-" if x is None else _short(x) for x in cells)))
        tables["Accounting, per sequence"] = [header, *rows]
    if ablations := report["ablations"]:
        header = ("probe text", "perplexity", "KL from all branches", "KL from source", "top-1 of source")
        rows = [
            (
                name,
                *(_short(x[k]) for k in ("perplexity", "kl_from_all_branches", "kl_from_source")),
                _percent(x["top1"]),
            )
            for name, x in ablations.items()
        ]
        tables["Ablations"] = [header, *rows]
    return tables


def _percent(x: float) -> str:
    return f"{100 * x:.4g}%" if isinstance(x, float) else str(x)


def _short(x: Any) -> str:
    return f"{x:,}" if isinstance(x, int) else f"{x:.3g}" if isinstance(x, float) else str(x)
