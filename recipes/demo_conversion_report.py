"""What came out of the demo: the share of the lost quality that came back, plots and a table.

Axis legend: N windows   T tokens of a window
"""

import math
from pathlib import Path

import numpy as np

from tnt_hf.recipes.demo_conversion import STUDENTS
from tnt_hf.recipes.demo_report import difference, table, text_result
from tnt_hf.recipes.pictures import finish, subplots


SOURCE, WINDOW, STAGE2 = "source", "window", "hybrid, stage 2"
POINT = 32  # tokens of a point of the picture
SAMPLES = 1000  # resamplings of the windows of text for a standard error
# What was measured, by its name in results.json, in the order of the table.
LABELS = {
    SOURCE: "Llama, full attention",
    WINDOW: "window of {window}, untrained",
    "lora": "window, LoRA",
    "hybrid": "window, LoRA and memory",
    STAGE2: "window, LoRA and memory, stage 2",
    "full-layer": "one full layer, untrained",
    "lora-full-layer": "one full layer, LoRA",
    "hybrid-full-layer": "one full layer, LoRA and memory",
}


def recovered(losses: np.ndarray, source: np.ndarray, window: np.ndarray) -> dict:
    """
    Share of what the window cost that came back: 0 is the converted model before training, 1 the source.

    Args:
        losses, source, window: `[N, T - 1]` nats per token on the same text.

    Returns:
        `perplexity` and `loss`: the share of the difference in perplexity and in nats; `..._standard_error` of both.
    """
    means = np.stack([x.mean(1) for x in (losses, source, window)])

    def shares(means):
        after, full, narrow = means.mean(-1)
        p_after, p_full, p_narrow = np.exp([after, full, narrow])
        return (p_narrow - p_after) / (p_narrow - p_full), (narrow - after) / (narrow - full)

    rows = np.random.default_rng(0).integers(0, means.shape[1], (SAMPLES, means.shape[1]))
    spread = np.array([shares(means[:, row]) for row in rows]).std(0)
    share = shares(means)
    return {
        "perplexity": float(share[0]),
        "perplexity_standard_error": float(spread[0]),
        "loss": float(share[1]),
        "loss_standard_error": float(spread[1]),
    }


def all_losses(done: dict) -> dict[str, np.ndarray]:
    """Held-out losses `[N, T - 1]` of everything that was measured, in the order of `LABELS`."""
    found = {SOURCE: done[SOURCE]["held_out"]}
    for name in STUDENTS:
        if name in done:
            measured = done[name]["held_out"]
            found["full-layer" if name.endswith("full-layer") else WINDOW] = measured["converted"]
            found[name] = measured["trained"]
            if "stage 2" in measured:
                found[STAGE2] = measured["stage 2"]
    return {name: found[name] for name in LABELS if name in found}


def conversion_results(done: dict, bytes_per_token: float) -> dict:
    """What the jobs `done` found, for results.json."""
    losses = all_losses(done)
    students = {name: done[name] for name in STUDENTS if name in done}
    window = losses.get(WINDOW)
    trained = {name: x for name, x in losses.items() if name not in (SOURCE, WINDOW)}
    results = {
        "text": {name: text_result(x, bytes_per_token) for name, x in losses.items()},
        "curves": {"tokens_per_point": POINT, "perplexity": {name: curve(x) for name, x in losses.items()}},
        "recovered": {} if window is None else {n: recovered(x, losses[SOURCE], window) for n, x in trained.items()},
        "window_costs": next(job["window_costs"] for job in students.values()),
        "full_attention_layers": {name: job["full_attention_layers"] for name, job in students.items()},
        "verification": {name: job["verification"] for name, job in students.items()},
        "checks": {
            f"{name}: {what}": held for name, job in done.items() for what, held in job.get("checks", {}).items()
        },
        "jobs": {name: job_facts(job) for name, job in done.items()},
    }
    if STAGE2 in losses:
        results["stage2_difference"] = difference(losses[STAGE2], losses["hybrid"])
    if "evaluation" in done:
        results |= {key: done["evaluation"][key] for key in ("evaluation", "sample")}
    return results


def curve(losses: np.ndarray) -> list[float]:
    """Perplexity of losses `[N, T - 1]` by position, a number for every `POINT` tokens, the last for what is left."""
    return [math.exp(losses[:, i : i + POINT].mean()) for i in range(0, losses.shape[1], POINT)]


def job_facts(job: dict) -> dict:
    """Sizes, tokens, seconds, configuration and the loss of every step of a job."""
    keys = ("parameters", "trained_parameters", "stage2_parameters", "train_tokens", "seconds", "config", "losses")
    return {key: job[key] for key in keys if key in job}


# ------------------------------------------------------------------------------------------------------------ pictures


def draw(output: Path, results: dict) -> list[str]:
    """Draws conversion.png, held-out perplexity by position, and loss.png, the trainings, of what results.json holds.
    Returns their names."""
    figure, axes = subplots(figsize=(7.5, 4.5))
    plan, size = results["plan"], results["curves"]["tokens_per_point"]
    for name, means in results["curves"]["perplexity"].items():
        style = {SOURCE: "k-", WINDOW: "k:"}.get(name, "-" if "hybrid" in name else "--")
        # Stage 2 may change nothing: its line leaves to be seen what it lies on.
        marker = {"marker": "."}
        if name == STAGE2:
            style, marker = ":", {"marker": "o", "markersize": 9, "markerfacecolor": "none"}
        label = f"{LABELS[name].format(**plan)}: {results['text'][name]['perplexity']:.2f}"
        axes.plot([i * size + 1 + size / 2 for i in range(len(means))], means, style, **marker, label=label)
    axes.axvline(plan["window"], color="grey", linestyle=":", label="attention window")
    axes.set(
        xlabel="position in the window of text (tokens)",
        ylabel="held-out perplexity",
        title=f"A Llama, converted to a window of {plan['window']} tokens",
    )
    finish(figure, output / "conversion.png", axes)

    figure, (left, right) = subplots(1, 2, figsize=(11, 4.5))
    for name, job in results["jobs"].items():
        if "losses" in job:
            axes = left if name == SOURCE else right
            losses = np.array(job["losses"])
            width = max(1, len(losses) // 20)
            smooth = np.convolve(losses, np.ones(width) / width, "valid")
            tokens = (np.arange(len(smooth)) + width) * job["train_tokens"] / len(losses) / 1e3
            axes.plot(tokens, smooth, label=f"{LABELS[name].format(**plan)} (mean of {width} steps)")
    left.set(title="The Llama", ylabel="training loss (nats per token)", xlabel="training tokens (thousands)")
    right.set(title="Distillation", ylabel="KL from the Llama (nats per token)", xlabel="training tokens (thousands)")
    left.legend(fontsize="small")
    right.set_ylim(0, 1.4 * right.get_ylim()[1])  # room for the legend above the curves
    finish(figure, output / "loss.png", right)
    return ["conversion.png", "loss.png"]


# --------------------------------------------------------------------------------------------------------------- text


def summary(results: dict) -> list[str]:
    """The lines that end the demo; every number is one of results.json."""
    text, plan, jobs = results["text"], results["plan"], results["jobs"]
    ranges = list(text[SOURCE]["perplexity_by_position"])
    rows = [["", "perplexity", *(f"tokens {name}" for name in ranges), "recovered", "trained", "parameters"]]
    for name, row in text.items():
        share, job = results["recovered"].get(name), jobs.get(name, {})
        back = "" if share is None else f"{share['perplexity']:.1%} ± {share['perplexity_standard_error']:.1%}"
        if name == WINDOW:
            back = "0%"
        rows.append([LABELS[name].format(**plan), row["perplexity"], *row["perplexity_by_position"].values(), back])
        if name == STAGE2:
            job = {
                "trained_parameters": jobs["hybrid"]["stage2_parameters"],
                "parameters": jobs["hybrid"]["parameters"],
            }
        rows[-1] += [job.get("trained_parameters", "all" if name == SOURCE else ""), job.get("parameters", "")]
    student = next(name for name in STUDENTS if name in jobs)
    lines = [
        "",
        f"A Llama trained on {jobs[SOURCE]['train_tokens']:,} tokens, converted to a window of {plan['window']} and"
        f" distilled on {jobs[student]['train_tokens']:,}. Held-out perplexity, at all tokens and by position:",
        *table(rows),
        "recovered: share of the perplexity that the window cost; trained: parameters that learnt",
    ]
    if layers := next((layers for layers in results["full_attention_layers"].values() if layers), None):
        lines.append(
            f"one full layer: layer {layers[0]} keeps full attention; a window in it alone costs"
            f" {results['window_costs'][layers[0]]:.4f} nats per token, more than in any other"
        )
    if (gap := results.get("stage2_difference")) is not None:
        far = abs(gap["mean"]) > 2 * gap["standard_error"]
        verdict = ("better" if gap["mean"] < 0 else "worse") if far else "no more than chance"
        lines.append(
            f"stage 2, the local memory alone at chunk size 1, changed the loss by {gap['mean']:+.4f} ±"
            f" {gap['standard_error']:.4f} nats per token: {verdict}"
        )
    lines += evaluation_lines(results) + [""]
    if "sample" in results:
        lines += ["Written by the hybrid:", *("    " + line for line in results["sample"].splitlines()), ""]
    failed = [name for name, held in results["checks"].items() if not held]
    lines.append(f"checks: {len(results['checks']) - len(failed)} of {len(results['checks'])} hold")
    lines += [f"FAILED: {name}" for name in failed]
    seconds = (f"{name} {sum(job['seconds'].values()):.0f}" for name, job in jobs.items())
    return [*lines, f"seconds: {results['seconds']:.0f} in all; {', '.join(seconds)}"]


def evaluation_lines(results: dict) -> list[str]:
    """What `tnt eval` found of the hybrid: its branches, and what a context costs."""
    found = results.get("evaluation")
    if found is None:
        return []
    ablations = [["", "perplexity"], *([name, row["perplexity"]] for name, row in found["ablations"].items())]
    cost = [
        ["context in tokens", "memory state, bytes", "keys and values, bytes", "tokens read per second", "written"]
    ]
    for row in found["cost"]:
        speeds = (f"{row[f'{what}_tokens_per_second']:,.0f}" for what in ("prefill", "decode"))
        cost.append([f"{row['context']:,}", row["state_bytes"], row["kv_bytes"], *speeds])
    overall = found["perplexity"]
    error = overall["standard_error"]  # none of one document
    spread = "" if error is None else f" ± {error:.3f}"
    return [
        "",
        f"tnt eval of the hybrid: perplexity {overall['overall']:.3f}{spread} over {overall['documents']} documents,"
        " and with a branch switched off",
        *table(ablations),
        *table(cost),
    ]
