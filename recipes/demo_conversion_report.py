"""What the conversion part of the demo shows: shares of the lost quality that came back, a plot and a table.

Axis legend: N windows   T tokens of a window
"""

import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tnt_hf.recipes.demo_conversion import CONTROLS, HYBRIDS, ConversionPlan
from tnt_hf.recipes.demo_report import finish, table, text_result


POSITIONS = ((1, 32), (32, 128), (128, 256), (256, None))  # of the predicted token in its window: [from, to)
SOURCE, WINDOW = "source", "window only"


def recovered(losses: np.ndarray, source: np.ndarray, window: np.ndarray, samples: int = 1000) -> dict:
    """
    Share of what the window cost that came back: 0 is the converted model before training, 1 the source.

    Args:
        losses, source, window: `[N, T - 1]` nats per token on the same text.
        samples: resamplings of the N windows (seed 0) for the standard errors.

    Returns:
        `perplexity` and `loss`: the share of the difference in perplexity and in nats; `..._standard_error` of both.
    """
    means = np.stack([x.mean(1) for x in (losses, source, window)])

    def shares(means):
        after, full, narrow = means.mean(-1)
        p_after, p_full, p_narrow = np.exp([after, full, narrow])
        return (p_narrow - p_after) / (p_narrow - p_full), (narrow - after) / (narrow - full)

    rows = np.random.default_rng(0).integers(0, means.shape[1], (samples, means.shape[1]))
    spread = np.array([shares(means[:, row]) for row in rows]).std(0)
    share = shares(means)
    return {
        "perplexity": float(share[0]),
        "perplexity_standard_error": float(spread[0]),
        "loss": float(share[1]),
        "loss_standard_error": float(spread[1]),
    }


def all_losses(done: dict) -> dict[str, np.ndarray]:
    """Held-out losses `[N, T - 1]` of everything that was measured, by the name it has in the table."""
    students = {name: done[f"conversion, {name}"]["held_out"] for name in (*CONTROLS, *HYBRIDS)}
    losses = {SOURCE: done["conversion, source"]["held_out"], WINDOW: students["window + LoRA"]["converted"]}
    losses["one full layer"] = students["one full layer + LoRA"]["converted"]
    return losses | {name: x["trained"] for name, x in students.items()}


def conversion_result(done: dict, plan: ConversionPlan, bytes_per_token: float) -> dict:
    """The dictionary that goes into results.json under "conversion"."""
    losses = all_losses(done)
    jobs = {name.removeprefix("conversion, "): job for name, job in done.items() if name.startswith("conversion, ")}
    checks = {f"{check}: {name}": held for name, job in jobs.items() for check, held in job.get("checks", {}).items()}
    types = jobs["hybrid, one full layer"]["config"]["layer_types"]
    return {
        "plan": asdict(plan) | {"steps": plan.steps},
        "text": {name: text_result(x, bytes_per_token, POSITIONS) for name, x in losses.items()},
        "recovered": {
            name: recovered(x, losses[SOURCE], losses[WINDOW])
            for name, x in losses.items()
            if name not in (SOURCE, WINDOW)
        },
        "full_attention_layers": [i for i, kind in enumerate(types) if "sliding" not in kind],
        "checks": checks,
        "verification": {name: jobs[name]["verification"] for name in (*CONTROLS, *HYBRIDS)},
    }


def draw_conversion(output: Path, results: dict, done: dict) -> None:
    """Writes conversion.png: held-out perplexity by position in the window of text, one line per model."""
    from matplotlib import pyplot

    result = results["conversion"]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    size = 32
    for name, losses in all_losses(done).items():
        starts = range(0, losses.shape[1], size)
        means = [math.exp(losses[:, i : i + size].mean()) for i in starts]
        style = {SOURCE: "k-", WINDOW: "k:"}.get(name, "--" if name in CONTROLS else "-")
        label = f"{name}: {result['text'][name]['perplexity']:.2f} overall"
        axes.plot([i + 1 + size / 2 for i in starts], means, style, marker=".", label=label)
    axes.axvline(result["plan"]["window"], color="grey", linestyle=":", label="attention window")
    axes.set(
        xlabel="position in the window of text (tokens)",
        ylabel="held-out perplexity",
        title=f"A Llama, converted to a window of {result['plan']['window']} tokens with memory",
    )
    finish(figure, axes, output / "conversion.png")


def conversion_summary(results: dict) -> list[str]:
    """The table of the conversion part."""
    result = results["conversion"]
    text, plan = result["text"], result["plan"]
    jobs = {name.removeprefix("conversion, "): job for name, job in results["jobs"].items()}
    ranges = list(text[SOURCE]["perplexity_by_position"])
    rows = [["", "perplexity", *(f"tokens {name}" for name in ranges), "recovered", "trained", "parameters"]]
    for name, row in text.items():
        share = result["recovered"].get(name)
        job = jobs.get(name, {})
        back = "" if share is None else f"{share['perplexity']:.1%} ± {share['perplexity_standard_error']:.1%}"
        if name == WINDOW:
            back = "0%"
        rows.append([name, row["perplexity"], *row["perplexity_by_position"].values(), back])
        rows[-1] += [job.get("trained_parameters", "all" if name == SOURCE else ""), job.get("parameters", "")]
    tokens = {name: jobs[name]["train_tokens"] for name in (SOURCE, "hybrid")}
    passed = sum(map(bool, result["checks"].values()))
    lines = [
        "",
        f"Conversion: a Llama trained on {tokens[SOURCE]:,} tokens, attention narrowed to {plan['window']}, distilled"
        f" on {tokens['hybrid']:,}. Held-out perplexity",
        *table(rows),
        "recovered: share of the perplexity that the window cost. Full attention was kept in layer"
        f" {', '.join(map(str, result['full_attention_layers']))}, where the window's error is largest.",
        *(f"verification of {name}: {report['verdict']}" for name, report in result["verification"].items()),
        f"verified, reloaded and equal: {passed} of {len(result['checks'])} checks",
    ]
    return lines
