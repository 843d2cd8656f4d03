"""A miniature of the conversion table: what a window costs a Llama, and how much of it each way back recovers.

    python -m tnt_hf.recipes.benchmarks.miniature_conversion --out results/miniature_conversion.json
    python -m tnt_hf.recipes.benchmarks.miniature_conversion --report results/miniature_conversion.json

The models and their training are those of `tnt demo`. There is one source; seeds are those of the students: of LoRA,
of what is random in a memory, and of the order of the text, which all students of a seed see alike. Runs are written
one by one, so the first command goes on where it was stopped.

Axis legend: N windows of text   T tokens of a window
"""

import argparse
import dataclasses
import json
import math
import statistics
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import LiZACallback, LiZAConfig, convert_checkpoint, get_tptt_model, verify_conversion
from tnt_hf.recipes import blocked_attention
from tnt_hf.recipes.benchmarks import miniature_runs as runs
from tnt_hf.recipes.benchmarks.measure import environment, write
from tnt_hf.recipes.benchmarks.miniature_report import mean_and_std, plus_minus
from tnt_hf.recipes.benchmarks.training import train_in_order
from tnt_hf.recipes.corpus import read_corpus
from tnt_hf.recipes.demo_conversion import MEMORY, ConversionData, ConversionPlan, measured_on, train_source
from tnt_hf.recipes.demo_jobs import losses_by_position, shuffled
from tnt_hf.recipes.distillation import distiller, with_lora
from tnt_hf.recipes.pictures import finish, subplots


PLAN = {"teacher_steps": 700, "held_out_windows": 64}  # of the demo's plan; the same source, so it may be reused
SETTINGS = ("vocab_size", "length", "teacher_steps", "teacher_batch_size", "share", "batch_size", "window")
SETTINGS = (*SETTINGS, "lora_rank", "held_out_windows")
SOURCE, WINDOW, LORA, TNT, LIZA = "source", "window only", "window + LoRA", "TNT hybrid", "LiZA hybrid"
STUDENTS = (LORA, TNT, LIZA)
SOURCE_SEED = 0
ROWS = (SOURCE, WINDOW, LORA, TNT, LIZA)
CONVERTED = {LORA: {"memory_layers": []}, TNT: MEMORY}  # what the conversion is told
# TPTT's published settings: the delta rule without parameters of its own, mixed in up to a half.
LIZA_SETTINGS = {"operator": "delta_rule", "feature_map": "silu-l2", "gate": "pooled"}
MAG_SCHEDULE = {"mode": "gradual", "initial_weight": 0.01, "final_weight": 0.5, "transition_step": 100}
POSITIONS = ((0, 31), (31, 127), (127, 255), (255, 511))  # of predictions: the token after [from, to)


class Told:
    """A queue of reports, as the demo's jobs want it, that hands progress to `tell(step, steps, loss)`."""

    def __init__(self, tell):
        self.tell = tell

    def put(self, report: tuple | str) -> None:
        if isinstance(report, tuple):
            self.tell(*report[1:])


def student_of(name: str, plan: ConversionPlan, source: Path, text: str) -> tuple[torch.nn.Module, bool | None]:
    """`source` with its attention narrowed, LoRA and what `name` says; and whether the conversion was verified."""
    if name == LIZA:
        base = LlamaForCausalLM.from_pretrained(source)
        config = LiZAConfig(weight=0.0, max_self_attn_length=plan.window, **LIZA_SETTINGS)
        torch.manual_seed(plan.seed)
        return get_tptt_model(base, config, lora={"r": plan.lora_rank, "lora_dropout": 0.0}), None
    with TemporaryDirectory() as scratch:
        converted = Path(scratch, "converted")
        convert_checkpoint(source, converted, window=plan.window, seed=plan.seed, progress=False, **CONVERTED[name])
        passed = verify_conversion(source, converted, text=text[: plan.verify_characters], progress=False)["passed"]
        model = TNTForCausalLM.from_pretrained(converted, attn_implementation=blocked_attention.register())
    torch.manual_seed(plan.seed)
    return with_lora(model, plan.lora_rank), bool(passed)


def train_student(name: str, plan: ConversionPlan, source: Path, rows, held_out, text: str, tell) -> dict:
    """Distils a student on `rows` `[N, T]`. Returns its sizes and its rows of the table, before and after."""
    student, passed = student_of(name, plan, source, text)
    teacher = LlamaForCausalLM.from_pretrained(source, attn_implementation=blocked_attention.register())
    before = losses_by_position(student, held_out)  # no memory speaks yet: the window alone
    schedule = [LiZACallback(**MAG_SCHEDULE)] if name == LIZA else []

    def trainer(*arguments, callbacks, **keywords):
        return distiller(*arguments, teacher=teacher, callbacks=[*callbacks, *schedule], **keywords)

    samples = [{"input_ids": row, "labels": row} for row in rows]
    settings = {"warmup_steps": max(1, min(10, plan.steps // 10)), "weight_decay": 0.0, "bf16": True}
    train_in_order(student.train(), samples, plan.batch_size, plan.seed, tell, trainer, **settings)
    beside = (".lora_", ".original_module.")  # what peft keeps beside the model: gone once it is merged
    return {
        "parameters": sum(x.numel() for part, x in student.named_parameters() if not any(y in part for y in beside)),
        "trained_parameters": student.get_nb_trainable_parameters()[0],
        "checks": {} if passed is None else {"conversion_verified": passed},
        "rows": {WINDOW: measured(before), name: measured(losses_by_position(student, held_out))},
    }


def measured(losses) -> dict:
    """Mean losses of `[N, T - 1]` in nats: overall, by range of positions, and of every 32 positions."""
    mean = np.asarray(losses, np.float64).mean(0)
    return {
        "loss": float(mean.mean()),
        "loss_by_range": [float(mean[a:b].mean()) for a, b in POSITIONS if a < len(mean)],
        "loss_by_position": [float(mean[i : i + 32].mean()) for i in range(0, len(mean), 32)],
    }


def given_source(source: Path, data: ConversionData) -> dict:
    """
    What is reported of a source that `tnt demo` has trained.

    Raises:
        ValueError: its tokenizer is not that of the text.
    """
    if AutoTokenizer.from_pretrained(source).get_vocab() != data.tokenizer.get_vocab():
        raise ValueError(f"--source {source}: has another tokenizer; its demo read another corpus")
    model = LlamaForCausalLM.from_pretrained(source, attn_implementation=blocked_attention.register())
    return {"parameters": model.num_parameters(), "rows": {SOURCE: measured(losses_by_position(model, data.held_out))}}


def train_all(options: argparse.Namespace, plan: ConversionPlan) -> None:
    """Every source and student that is not in the folder of runs yet."""

    @cache  # read when the first run needs it
    def text() -> tuple[ConversionData, dict]:
        corpus = read_corpus(options.corpus, min_characters=1 if options.corpus else 500_000)
        data = ConversionData.of(plan, corpus, measured_on(corpus.held_out))
        tokens = {"held_out_tokens": data.held_out.numel(), "train_tokens": data.train.numel()}
        return data, corpus.describe() | tokens

    def work(name: str, seed: int, tell) -> dict:
        data, facts = text()
        mine = dataclasses.replace(plan, seed=seed)
        source = options.source or options.runs / f"source-seed{SOURCE_SEED}"
        common = {"environment": environment(seed), "corpus": facts}
        if name == SOURCE and options.source:
            return common | given_source(options.source, data)
        if name == SOURCE:
            source.mkdir(parents=True, exist_ok=True)
            data.tokenizer.save_pretrained(source)
            rows = shuffled(data.train, mine.teacher_steps * mine.teacher_batch_size, seed).numpy()
            found = train_source(mine, len(data.tokenizer), rows, data.held_out.numpy(), source, Told(tell), threads=1)
            return common | {"parameters": found["parameters"], "rows": {SOURCE: measured(found["held_out"])}}
        if not (source / "config.json").is_file():
            raise ValueError(
                f"{source}: is gone; delete {runs.path_of(options.runs, SOURCE, SOURCE_SEED)} to start again"
            )
        rows = shuffled(data.train, mine.steps * mine.batch_size, seed + 1000)
        return common | train_student(name, mine, source, rows, data.held_out, data.text, tell)

    runs.run_all(options.runs, [SOURCE], [SOURCE_SEED], settings_of(plan), work)
    runs.run_all(options.runs, list(STUDENTS), options.seeds, settings_of(plan), work)


def settings_of(plan: ConversionPlan) -> dict:
    """What all runs have in common."""
    return {name: getattr(plan, name) for name in SETTINGS}


def study(done: dict[str, dict[int, dict]], seeds: list[int], plan: ConversionPlan) -> dict:
    """
    The report, ready for JSON.

    Args:
        done: `{source or student: {seed: run}}`. Only students that all `seeds` have are reported.

    Returns:
        Per row perplexity, by range and by position, and `recovered`: the share of the difference in perplexity
        between the window alone and the source that came back.
    """
    rows = {name: {seed: run["rows"][name] for seed, run in found.items()} for name, found in done.items()}
    rows = {name: found for name, found in rows.items() if set(found) == set(seeds) or name == SOURCE and found}
    first = next(iter(done[LORA].values()), None)  # the window alone knows no seed: every student starts as it
    rows = rows if first is None else rows | {WINDOW: {SOURCE_SEED: first["rows"][WINDOW]}}
    rows = {name: rows[name] for name in ROWS if name in rows}
    perplexity = {row: {seed: math.exp(x["loss"]) for seed, x in found.items()} for row, found in rows.items()}
    report = {}
    for row, found in rows.items():
        ranges = zip(*([math.exp(x) for x in measured["loss_by_range"]] for measured in found.values()))
        run = next(iter(done[LORA if row == WINDOW else row].values()))
        report[row] = {
            "parameters": run["parameters"],
            "trained_parameters": {SOURCE: run["parameters"], WINDOW: 0}.get(row, run.get("trained_parameters")),
            "perplexity": mean_and_std(perplexity[row]),
            "perplexity_by_position": [
                {"from": a + 1, "to": b} | mean_and_std(dict(zip(found, values)))
                for (a, b), values in zip(POSITIONS, ranges)
            ],
            "curve": [
                round(math.exp(statistics.fmean(x)), 4)
                for x in zip(*(measured["loss_by_position"] for measured in found.values()))
            ],
        }
        if row not in (SOURCE, WINDOW) and SOURCE in rows and WINDOW in rows:
            window, source = (perplexity[x][SOURCE_SEED] for x in (WINDOW, SOURCE))
            back = {seed: (window - x) / (window - source) for seed, x in perplexity[row].items()}
            report[row]["recovered"] = mean_and_std(back)
    everything = [run for found in done.values() for run in found.values()]
    return {
        "format": "tnt-miniature-conversion-1",
        "environment": environment(seeds[0]),
        "seeds": seeds,
        "plan": settings_of(plan)
        | {
            "steps": plan.steps,
            "source_tokens": plan.teacher_steps * plan.teacher_batch_size * plan.length,
            "student_tokens": plan.steps * plan.batch_size * plan.length,
        },
        "settings": CONVERTED | {LIZA: LIZA_SETTINGS | {"mag_schedule": MAG_SCHEDULE}},
        "corpus": everything[0]["corpus"] if everything else None,
        "rows": report,
        "checks": {
            f"{check}: {run['name']}, seed {run['seed']}": held
            for run in everything
            for check, held in run.get("checks", {}).items()
        },
        "missing": {job: sorted(set(seeds) - set(done[job])) for job in STUDENTS if set(seeds) - set(done[job])},
    }


def table(result: dict) -> list[str]:
    """Markdown: one line per row, means and standard deviations over seeds."""
    rows = result["rows"]
    if not rows:
        return [f"missing: {result['missing']}"]
    ranges = [f"tokens {x['from']}-{x['to']}" for x in next(iter(rows.values()))["perplexity_by_position"]]
    head = ["model", "perplexity", *ranges, "recovered", "trained", "parameters"]
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for name, row in rows.items():
        cells = [name, plus_minus(row["perplexity"]), *(f"{x['mean']:.2f}" for x in row["perplexity_by_position"])]
        share = row.get("recovered")
        share = share and {key: 100 * share[key] if share[key] is not None else None for key in ("mean", "std")}
        cells += ["" if share is None else f"{plus_minus(share, 1)} %", f"{row['trained_parameters']:,}"]
        lines.append(f"| {' | '.join([*cells, format(row['parameters'], ',')])} |")
    return lines + [f"missing: {job}: seeds {seeds}" for job, seeds in result["missing"].items()]


def draw(result: dict, path: Path) -> None:
    """Perplexity by position, one line per row."""
    figure, axes = subplots(figsize=(8, 4.5))
    styles = {SOURCE: "k-", WINDOW: "k:", LORA: "--"}
    for name, row in result["rows"].items():
        places = [32 * i + 16 for i in range(len(row["curve"]))]
        back = f", {row['recovered']['mean']:.0%} recovered" if "recovered" in row else ""
        label = f"{name}: {plus_minus(row['perplexity'])}{back}"
        axes.plot(places, row["curve"], styles.get(name, "-"), marker=".", label=label)
    axes.axvline(result["plan"]["window"], color="grey", linestyle=":", linewidth=1)
    title = f"a Llama narrowed to {result['plan']['window']} tokens, {len(result['seeds'])} seeds"
    axes.set(xlabel="position in the row (tokens)", ylabel="held-out perplexity", title=title)
    finish(figure, path, axes)


def main(arguments: list[str] | None = None) -> None:
    """Trains and reports, or only reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write, and a picture beside it")
    parser.add_argument("--runs", type=Path, default=Path("bench_out/miniature_conversion"), help="runs go here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--source", type=Path, help="the source that `tnt demo` left in demo_out/source: train none")
    parser.add_argument("--share", type=float, default=1.0, help="of the training")
    parser.add_argument("--corpus", type=Path, help="folder of Python sources (default: the standard library)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only print the table and draw the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.report:
        options.out, result = options.report, json.loads(options.report.read_text())
    else:
        plan = ConversionPlan(**PLAN)
        plan = plan if options.share == 1 else plan.scaled(options.share)
        train_all(options, plan)
        done = runs.collect(options.runs, [SOURCE], [SOURCE_SEED], settings_of(plan))
        done |= runs.collect(options.runs, list(STUDENTS), options.seeds, settings_of(plan))
        result = study(done, options.seeds, plan)
        if options.out:
            write(options.out, result)
    print("\n".join(table(result)))
    if options.out and result["rows"]:
        draw(result, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
