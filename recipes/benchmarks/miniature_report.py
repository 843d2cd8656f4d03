"""What the miniature study says: means over seeds, paired differences, the paper's claims, a table and pictures."""

import math
import statistics
from dataclasses import asdict
from pathlib import Path

from tnt_hf.recipes.benchmarks.measure import environment
from tnt_hf.recipes.benchmarks.miniature_models import (
    CONTINUED,
    PLAIN_TITANS,
    REFERENCE,
    STAGE1,
    STAGE2,
    STAGE2_ALL,
    SWITCHED,
    VARIANTS,
    Plan,
)
from tnt_hf.recipes.pictures import finish, subplots


BINS = ((0, 1), (1, 4), (4, 16), (16, 32))  # of 32 positions each
STUDENT = dict(zip(range(2, 11), (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)))  # 95%, by number of seeds
BASELINE = "sliding window only"
# What the paper found at 150M parameters: the first is better than the second.
CLAIMS = (
    ("TNT is better than Titans at the same chunk size", REFERENCE, "Titans C=8"),
    ("... the same inner rule on both sides, plain", REFERENCE, PLAIN_TITANS),
    ("... the same inner rule on both sides, Titans'", "TNT {8}, momentum and forgetting", "Titans C=8"),
    ("a second local memory helps", "TNT {8,16}", REFERENCE),
    ("four local memories help more", "TNT {4,8,16,32}", "TNT {8,16}"),
    ("the global memory helps", REFERENCE, "TNT {8}, no global memory"),
    ("Q-K projection helps", REFERENCE, "TNT {8}, no Q-K projection"),
    ("Q-K projection helps, two local memories", "TNT {8,16}", "TNT {8,16}, no Q-K projection"),
    ("a deep memory is better than a linear one", REFERENCE, "TNT {8}, linear memory"),
    *(
        (f"stage 2 helps more than as much stage 1, {name}", f"{name}, {STAGE2}", f"{name}, {STAGE1}")
        for name in CONTINUED
    ),
    *((f"... with all weights trained, {name}", f"{name}, {STAGE2_ALL}", f"{name}, {STAGE1}") for name in CONTINUED),
    ("writing to the memories helps", REFERENCE, "TNT {8}, nothing written"),
    ("TNT is better than a sliding window", REFERENCE, "sliding window only"),
    ("TNT is better than a transformer", REFERENCE, "transformer"),
    ("TNT is better than a gated transformer", REFERENCE, "gated transformer"),
    ("a gate after attention helps the transformer", "gated transformer", "transformer"),
)


def mean_and_std(by_seed: dict[int, float], digits: int = 4) -> dict:
    """Mean and standard deviation (n - 1) over seeds, and the values."""
    values = list(by_seed.values())
    std = statistics.stdev(values) if len(values) > 1 else None
    return {
        "mean": round(statistics.fmean(values), digits),
        "std": None if std is None else round(std, digits),
        "seeds": {str(seed): round(value, digits) for seed, value in by_seed.items()},
    }


def difference(better: dict[int, dict], worse: dict[int, dict]) -> dict:
    """Loss of the first minus that of the second, seed by seed where both have one (nats per token; below zero the
    first is better)."""
    return mean_and_std({seed: x["loss"] - worse[seed]["loss"] for seed, x in better.items() if seed in worse}, 5)


def verdict(found: dict) -> str:
    """`agrees`, `disagrees`, or `undecided` where the 95% interval of the mean (Student's t) holds zero."""
    count = len(found["seeds"])
    factor = STUDENT.get(count, STUDENT[10])  # beyond the table its last one, which is on the careful side
    if count < 2 or abs(found["mean"]) <= factor * found["std"] / math.sqrt(count):
        return "undecided"
    return "agrees" if found["mean"] < 0 else "disagrees"


def rows_of(done: dict[str, dict[int, dict]], seeds: list[int]) -> dict[str, dict[int, dict]]:
    """`{row of the table: {seed: measured}}` of the rows for which every seed was run; of a training that diverged
    only what was measured before."""
    rows: dict[str, dict[int, dict]] = {}
    for runs in done.values():
        for seed, run in runs.items():
            for row, measured in run["rows"].items():
                rows.setdefault(row, {})[seed] = measured
    complete = {name for name, runs in done.items() if set(runs) == set(seeds)}
    return {row: found for row, found in rows.items() if variant_of(row) in complete}


def variant_of(row: str) -> str:
    """The variant that a row of the table is of, or is a continuation of."""
    return max((name for name in VARIANTS if row.startswith(name)), key=len)


def expected_rows() -> list[str]:
    """All rows of the table in order: variants, each followed by what it was continued to."""
    rows = []
    for name in VARIANTS:
        rows += [name, *(f"{name}, {kind}" for kind in (SWITCHED, STAGE1, STAGE2, STAGE2_ALL) if name in CONTINUED)]
    return rows


def study(done: dict[str, dict[int, dict]], seeds: list[int], plan: Plan) -> dict:
    """
    The report, ready for JSON.

    Args:
        done: `{variant: {seed: run}}`, see [`~recipes.benchmarks.miniature_models.run`]. Only variants of which all
            `seeds` were run are reported; what is missing is listed with its seeds, and so is what diverged.
    """
    rows, bins = rows_of(done, seeds), [(a, b) for a, b in BINS if 32 * b <= plan.length]
    order = [row for row in expected_rows() if row in rows]
    report = {}
    for row in order:
        measured, runs = rows[row], done[variant_of(row)]
        curves = [x["loss_by_position"] for x in measured.values()]
        by_position = {
            seed: [math.exp(statistics.fmean(x["loss_by_position"][a:b])) for a, b in bins]
            for seed, x in measured.items()
        }
        report[row] = {
            "variant": variant_of(row),
            "parameters": next(iter(runs.values()))["parameters"],
            "intermediate_size": next(iter(runs.values()))["config"]["intermediate_size"],
            "tokens": next(iter(measured.values()))["tokens"],
            "perplexity": mean_and_std({seed: math.exp(x["loss"]) for seed, x in measured.items()}),
            "loss": mean_and_std({seed: x["loss"] for seed, x in measured.items()}, 5),
            "perplexity_by_position": [
                {"from": 32 * a + 1, "to": 32 * b} | mean_and_std({seed: x[i] for seed, x in by_position.items()})
                for i, (a, b) in enumerate(bins)
            ],
            "curve": [round(math.exp(statistics.fmean(part)), 4) for part in zip(*curves)],
            "difference_to_reference": difference(measured, rows[REFERENCE]) if REFERENCE in rows else None,
        }
    claims = [
        {"claim": text, "better": a, "worse": b, "difference": (found := difference(rows[a], rows[b]))}
        | {"verdict": verdict(found)}
        for text, a, b in CLAIMS
        if a in rows and b in rows and rows[a].keys() & rows[b].keys()
    ]
    everything = [run for runs in done.values() for run in runs.values()]
    return {
        "format": "tnt-miniature-1",
        "environment": environment(seeds[0]),
        "seeds": seeds,
        "plan": asdict(plan) | {"stage2_steps": plan.stage2_steps},
        "corpus": everything[0]["corpus"] if everything else None,
        "made_from": sorted(
            {(run["environment"]["commit"], run["environment"]["source_sha256"]) for run in everything}
        ),
        "cpu_seconds": round(sum(run["seconds"]["cpu"] for run in everything)),
        "rows": report,
        "claims": claims,
        "diverged": {f"{run['name']}, seed {run['seed']}": run["diverged"] for run in everything if "diverged" in run},
        "missing": {name: sorted(set(seeds) - set(runs)) for name, runs in done.items() if set(seeds) - set(runs)},
    }


# ------------------------------------------------------------------------------------------------ table and pictures


def time_of(result: dict, row: str, length: str) -> float | None:
    """Median milliseconds per token of a row's training step; `None` for one that is not measured."""
    times = result.get("time", {}).get("milliseconds_per_token", {}).get(length, {})
    return times[row]["cpu"]["median"] if row in times else None


def plus_minus(found: dict, digits: int = 2, sign: str = "") -> str:
    """`12.34 ± 0.05`."""
    spread = "" if found["std"] is None else f" ± {found['std']:.{digits}f}"
    return f"{found['mean']:{sign}.{digits}f}{spread}"


def table(result: dict) -> list[str]:
    """Markdown: every row with its spread over seeds, then the paper's claims, then what is missing."""
    rows, lines = result.get("rows", {}), []
    lengths = list(result.get("time", {}).get("milliseconds_per_token", {}))
    if rows:
        first = next(iter(rows.values()))
        ranges = [f"{x['from']}-{x['to']}" for x in first["perplexity_by_position"]]
        head = ["model", "perplexity", *(f"tokens {x}" for x in ranges), f"loss - loss of {REFERENCE}", "parameters"]
        head += [f"µs per token, {length}" for length in lengths]
        lines += [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        for name, row in rows.items():
            against = row["difference_to_reference"]
            finite, all_of = len(row["perplexity"]["seeds"]), len(result["seeds"])
            some = "" if finite == all_of else f" ({finite} of {all_of} seeds)"
            cells = [name, plus_minus(row["perplexity"]) + some]
            cells += [f"{x['mean']:.2f}" for x in row["perplexity_by_position"]]
            cells += ["" if name == REFERENCE or against is None else plus_minus(against, 4, "+")]
            cells += [f"{row['parameters']:,}"]
            times = [time_of(result, name, length) for length in lengths]
            cells += ["" if x is None else f"{1000 * x:.0f}" for x in times]
            lines.append(f"| {' | '.join(cells)} |")
    elif lengths:
        lines += [f"| model | {' | '.join(f'µs per token, {x}' for x in lengths)} |", "|---|" + "---:|" * len(lengths)]
        for name in result["time"]["milliseconds_per_token"][lengths[0]]:
            cells = [f"{1000 * time_of(result, name, x):.0f}" for x in lengths]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if claims := result.get("claims"):
        lines += ["", "| claim | loss difference | verdict |", "|---|---:|---|"]
        lines += [f"| {x['claim']} | {plus_minus(x['difference'], 4, '+')} | {x['verdict']} |" for x in claims]
    for name in ("missing", "diverged"):
        lines += [f"{name}: {what}: {found}" for what, found in result.get(name, {}).items()]
    return lines


def draw(result: dict, stem: Path) -> None:
    """Writes `<stem>_perplexity.png`, `<stem>_position.png` and, with times, `<stem>_time.png`."""
    from matplotlib import colormaps

    rows = result.get("rows", {})
    if not rows:
        return

    def picture(what: str) -> Path:
        return stem.with_name(f"{stem.name}_{what}.png")

    plan, seeds = result["plan"], result["seeds"]
    size = f"{next(iter(rows.values()))['parameters'] / 1e3:.0f}k parameters, {len(seeds)} seeds"
    figure, axes = subplots(figsize=(8, 0.32 * len(rows) + 1.2))
    for place, row in enumerate(reversed(rows.values())):
        found = row["perplexity"]
        colour = "C0" if row["variant"].startswith("TNT") else "C1" if "Titans" in row["variant"] else "grey"
        axes.errorbar(found["mean"], place, xerr=found["std"] or 0, fmt="o", color=colour, capsize=3)
        axes.plot(list(found["seeds"].values()), [place] * len(found["seeds"]), ".", color=colour, alpha=0.4)
    axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set(xlabel="held-out perplexity, mean and standard deviation", title=size)
    finish(figure, picture("perplexity"))

    figure, axes = subplots(figsize=(10.5, 5))
    zero = BASELINE if BASELINE in rows else next(iter(rows))  # text differs in difficulty from place to place
    for i, (name, row) in enumerate((name, row) for name, row in rows.items() if name == row["variant"]):
        places = [32 * j + 16 for j in range(len(row["curve"]))]
        gaps = [math.log(x / y) for x, y in zip(row["curve"], rows[zero]["curve"])]
        label = f"{name}: {row['perplexity']['mean']:.2f}"
        axes.plot(places, gaps, label=label, linewidth=1, color=colormaps["tab20"](i))
    axes.set(xlabel="position in the row (tokens)", ylabel=f"loss - loss of {zero} (nats)", title=size)
    axes.set_xscale("log", base=2)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    finish(figure, picture("position"))

    if length := next((x for x in result.get("time", {}).get("milliseconds_per_token", {})), None):
        figure, axes = subplots(figsize=(10.5, 5))
        for i, (name, row) in enumerate(rows.items()):
            if (took := time_of(result, name, length)) is not None:
                found, marker = row["perplexity"], "o" if row["variant"].startswith("TNT") else "s"
                style = {"fmt": marker, "capsize": 3, "color": colormaps["tab20"](i % 20), "label": name}
                axes.errorbar(1000 * took, found["mean"], yerr=found["std"] or 0, **style)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        axes.set(xlabel=f"µs per token of training, rows of {length}, one thread", ylabel="held-out perplexity")
        axes.set_title(f"{size}, {plan['steps'] * plan['batch_size'] * plan['length'] / 1e6:.2f}M tokens")
        finish(figure, picture("time"))
