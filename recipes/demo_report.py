"""What the demo shows: progress while it runs, then results.json, three plots and a table.

Axis legend: N windows   T tokens of a window
"""

import json
import math
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np


PACKAGES = ("tnt-hf", "torch", "transformers", "accelerate", "tokenizers", "numpy")
POSITIONS = ((1, 32), (32, 128), (128, None))  # of the predicted token in its window: [from, to)
LINE_SECONDS = 20  # between two lines of a phase where there is no terminal to redraw


class Progress:
    """One bar per phase on a terminal; a line now and then elsewhere, so that a log stays readable."""

    def __init__(self):
        self.bars, self.printed = {}, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for bar in self.bars.values():
            bar.close()

    def show(self, phase: str, step: int, steps: int, loss: float) -> None:
        """Takes one report of a phase: `step` of `steps` is done."""
        if sys.stderr.isatty():
            from tqdm import tqdm

            if phase not in self.bars:
                self.bars[phase] = tqdm(total=steps, desc=phase.ljust(26), unit="step", dynamic_ncols=True)
            bar = self.bars[phase]
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update(step - bar.n)
        elif step == steps or time.perf_counter() - self.printed.get(phase, 0.0) > LINE_SECONDS:
            self.printed[phase] = time.perf_counter()
            print(f"         {phase:26s} step {step:4d} of {steps}   loss {loss:.3f}", file=sys.stderr, flush=True)


def environment() -> dict:
    """Hardware, versions and, in a git checkout, the commit this was run from."""
    names = {}
    for name in PACKAGES:
        try:
            names[name] = version(name)
        except PackageNotFoundError:
            names[name] = None
    cpu = Path("/proc/cpuinfo")
    models = (
        [line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "platform": platform.system(),
        "python": platform.python_version(),
        "packages": names,
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def text_result(losses: np.ndarray, bytes_per_token: float, positions=POSITIONS) -> dict:
    """Perplexity and bits per byte of losses `[N, T - 1]` (entry t is of token t + 1), and perplexity by position."""
    mean = float(losses.mean())
    ranges = {f"{a}-{(b or losses.shape[1] + 1) - 1}": losses[:, a - 1 : b and b - 1] for a, b in positions}
    return {
        "perplexity": math.exp(mean),
        "bits_per_byte": mean / math.log(2) / bytes_per_token,
        "perplexity_by_position": {name: math.exp(part.mean()) for name, part in ranges.items() if part.size},
    }


def difference(a: np.ndarray, b: np.ndarray) -> dict:
    """Mean loss of `a` minus that of `b` (nats per token, minus: `a` is better), standard error over windows."""
    per_window = (a - b).mean(1)
    return {
        "mean": float(per_window.mean()),
        "standard_error": float(per_window.std(ddof=1) / math.sqrt(len(per_window))),
    }


def recall_result(job: dict, bins: int = 6) -> list[dict]:
    """Accuracy by distance: inside the window, within reach of attention through all layers, and beyond."""
    hit, distance = job["hit"], job["distance"]
    edges = [1, job["window"], job["reach"] + 1]
    edges += [round(x) for x in np.linspace(edges[-1], distance.max() + 1, bins - 1)[1:]]
    rows = []
    for low, high in zip(edges[:-1], edges[1:]):
        inside = (distance >= low) & (distance < high)
        if inside.any():
            rows.append(
                {"from": low, "to": high - 1, "questions": int(inside.sum()), "accuracy": float(hit[inside].mean())}
            )
    return rows


def text_results(done: dict, plan, bytes_per_token: float) -> dict:
    """Both text models on the held-out windows, by stage: `plan` is the one they were trained by."""
    losses = {**done["text, TNT"]["held_out"], **done["text, window only"]["held_out"]}
    per_step = plan.batch_size * plan.length
    tokens = {"stage 1": plan.stage1_steps * per_step, "stage 2": plan.text_steps * per_step}
    tokens |= {"stage 1 at C_L = 1": tokens["stage 1"], "window only": tokens["stage 2"]}
    return {
        "bytes_per_token": bytes_per_token,
        "text": {
            name: {**text_result(x, bytes_per_token), "train_tokens": tokens[name]} for name, x in losses.items()
        },
        "text_difference_to_window_only": {
            name: difference(x, losses["window only"]) for name, x in losses.items() if name != "window only"
        },
    }


def recall_results(done: dict) -> dict:
    """Both recall models: accuracy by distance, and beyond what attention reaches."""
    recall = {name: done[f"recall, {name}"] for name in ("TNT", "window only")}
    beyond = {name: float(job["hit"][job["distance"] > job["reach"]].mean()) for name, job in recall.items()}
    reach = {"chance": recall["TNT"]["chance"], "from_distance": recall["TNT"]["reach"] + 1}
    return {
        "recall": {name: recall_result(job) for name, job in recall.items()},
        "recall_beyond_attention": beyond | reach,
    }


def job_facts(job: dict) -> dict:
    """Sizes, tokens, seconds and configuration of a job, for results.json."""
    keys = ("parameters", "trained_parameters", "stage2_parameters", "train_tokens", "seconds", "config")
    return {key: job[key] for key in keys if key in job}


def write_results(output: Path, results: dict) -> None:
    """Writes `results.json`."""
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def draw_text(output: Path, results: dict, done: dict) -> None:
    """Writes loss.png and perplexity.png."""
    from matplotlib import pyplot

    plan = results["plan"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in (("text, TNT", "TNT"), ("text, window only", "window only")):
        losses = np.array(done[name]["losses"])
        width = max(1, len(losses) // 30)
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        tokens = (np.arange(len(smooth)) + width) * plan["batch_size"] * plan["length"] / 1e3
        axes.plot(tokens, smooth, label=f"{label} (mean of {width} steps)")
    axes.axvline(results["text"]["stage 1"]["train_tokens"] / 1e3, color="grey", linestyle=":", label="stage 2 begins")
    axes.set(xlabel="training tokens (thousands)", ylabel="training loss (nats per token)", title="Training")
    finish(figure, axes, output / "loss.png")

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, losses in {**done["text, TNT"]["held_out"], **done["text, window only"]["held_out"]}.items():
        size = 32
        means = [losses[:, i : i + size].mean() for i in range(0, losses.shape[1], size)]
        middle = [i + 1 + size / 2 for i in range(0, losses.shape[1], size)]
        axes.plot(
            middle, np.exp(means), marker=".", label=f"{name}: {results['text'][name]['perplexity']:.1f} overall"
        )
    axes.axvline(done["text, TNT"]["config"]["sliding_window"], color="grey", linestyle=":", label="attention window")
    axes.set(
        xlabel="position in the window of text (tokens)", ylabel="held-out perplexity", title="Held-out perplexity"
    )
    finish(figure, axes, output / "perplexity.png")


def draw_recall(output: Path, results: dict, done: dict) -> None:
    """Writes recall.png."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, rows in results["recall"].items():
        middle = [(row["from"] + row["to"]) / 2 for row in rows]
        axes.plot(middle, [row["accuracy"] for row in rows], marker="o", label=name)
    reach = results["recall_beyond_attention"]
    axes.axhline(reach["chance"], color="grey", linestyle="--", label="chance")
    axes.axvline(reach["from_distance"], color="grey", linestyle=":", label="beyond: no path through attention")
    axes.set(
        xlabel="distance between value and question (tokens)",
        ylabel="accuracy",
        ylim=(0, 1),
        title="Recall by distance",
    )
    finish(figure, axes, output / "recall.png")


def finish(figure, axes, path: Path) -> None:
    """Adds the legend, writes the picture and closes it."""
    from matplotlib import pyplot

    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(rows: list[list]) -> list[str]:
    """Lines with the first column aligned to the left and numbers to the right."""
    cells = [
        [f"{x:.3f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x for x in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells]


def text_summary(results: dict) -> list[str]:
    """The table of the text part."""
    text, jobs, plan = results["text"], results["jobs"], results["plan"]
    ranges = list(text["window only"]["perplexity_by_position"])
    rows = [["", "perplexity", "bits/byte", *(f"tokens {name}" for name in ranges), "parameters", "trained on tokens"]]
    for name in ("stage 1", "stage 1 at C_L = 1", "stage 2", "window only"):
        row, twin = text[name], name == "window only"
        rows.append([name if twin else f"TNT {name}", row["perplexity"], row["bits_per_byte"]])
        rows[-1] += row["perplexity_by_position"].values()
        rows[-1] += [jobs["text, window only" if twin else "text, TNT"]["parameters"], row["train_tokens"]]
    lines = ["", f"Held-out perplexity, {plan['held_out_windows']} windows of {plan['length']} tokens", *table(rows)]
    for name in ("stage 1", "stage 2"):
        gap = results["text_difference_to_window_only"][name]
        lines.append(
            f"TNT {name} against window only: {gap['mean']:+.4f} nats per token (minus: better),"
            f" standard error {gap['standard_error']:.4f}"
        )
    return lines


def recall_summary(results: dict) -> list[str]:
    """The table of the recall part."""
    recall, beyond = results["recall"], results["recall_beyond_attention"]
    rows = [["distance in tokens", *(f"{row['from']}-{row['to']}" for row in recall["TNT"]), "parameters"]]
    for name, bins in recall.items():
        rows.append([name, *(row["accuracy"] for row in bins), results["jobs"][f"recall, {name}"]["parameters"]])
    reach = beyond["from_distance"] - 1
    return ["", f"Recall: accuracy by distance. Chance {beyond['chance']:.3f}; attention reaches {reach} tokens"] + (
        table(rows)
    )


def closing(results: dict) -> list[str]:
    """Seconds, a sample of the text model and every check."""
    seconds = (f"{name} {sum(job['seconds'].values()):.0f}" for name, job in results["jobs"].items())
    lines = ["", f"Seconds: {results['seconds']:.0f} in all; {'; '.join(seconds)}", ""]
    if "sample" in results:
        lines += ["Written by the stage-2 model:", *("    " + line for line in results["sample"].splitlines()), ""]
    for name, held in results["checks"].items():
        verdict = "yes" if held else "NO: this is not the model that was saved, or a promise of the conversion fails"
        lines.append(f"{name.replace('_', ' ')}: {verdict}")
    return lines
