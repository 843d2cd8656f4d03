"""A miniature of the TNT paper's tables: 14 models of equal size, the same text, three seeds, on one core.

    python -m tnt_hf.recipes.benchmarks.miniature --out results/miniature.json          trains, measures and reports
    python -m tnt_hf.recipes.benchmarks.miniature --time --out results/miniature.json   times training steps in turns
    python -m tnt_hf.recipes.benchmarks.miniature --report results/miniature.json       the table and pictures again

Every run is written when it is done, so the first command goes on where it was stopped, and several processes with
different `--only` may fill one folder. The report holds the rows that all seeds have finished, and names the rest.
"""

import argparse
import json
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

from tnt_hf.recipes.benchmarks import miniature_report as report
from tnt_hf.recipes.benchmarks import miniature_runs as runs
from tnt_hf.recipes.benchmarks.measure import environment, spread, take_turns, write
from tnt_hf.recipes.benchmarks.miniature_models import VARIANTS, Plan, Rows, build, equal_configs, run
from tnt_hf.recipes.corpus import read_corpus


TIMED_LENGTHS = (1024, 4096)  # tokens of the row
TIMED_TOKENS = 4096  # of a step


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of this program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write, and pictures beside it; a --time goes into the same")
    parser.add_argument("--runs", type=Path, default=Path("bench_out/miniature"), help="one JSON per run goes here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only", nargs="*", choices=VARIANTS, metavar="VARIANT", help="train these or none; all are reported"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the training")
    parser.add_argument("--no-bound", action="store_true", help="leave the memory's inner gradient unbounded")
    parser.add_argument("--corpus", type=Path, help="folder of Python sources (default: the standard library)")
    parser.add_argument("--time", action="store_true", help="only measure the time of a training step")
    parser.add_argument("--rounds", type=int, default=7, help="of --time")
    parser.add_argument("--report", type=Path, metavar="JSON", help="only print the table and draw the pictures")
    return parser.parse_args(arguments)


def milliseconds_per_token(plan: Plan, length: int, rounds: int, batch_size: int) -> dict[str, dict]:
    """Forward and backward of every variant in turns: a spread over `rounds` for each clock."""
    ids = torch.randint(plan.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(0))

    def step(model):
        def work():
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            model.zero_grad()

        return work

    contestants = {name: step(build(config, 0)) for name, config in equal_configs(plan).items()}
    seconds = take_turns(contestants, rounds)
    scale = 1000 / ids.numel()
    return {n: {c: spread([scale * x for x in xs], 5) for c, xs in clocks.items()} for n, clocks in seconds.items()}


def time_all(options: argparse.Namespace, plan: Plan) -> dict:
    """The part of the report that `--time` writes."""
    lengths = {}
    for length in TIMED_LENGTHS:
        batch_size = max(1, TIMED_TOKENS // length)
        lengths[str(length)] = milliseconds_per_token(plan, length, options.rounds, batch_size)
    return {"environment": environment(0), "rounds": options.rounds, "milliseconds_per_token": lengths}


def train_all(options: argparse.Namespace, plan: Plan) -> None:
    """Everything that is not in the folder of runs yet."""

    @cache  # read when the first run needs it
    def text() -> tuple[Rows, dict]:
        corpus = read_corpus(options.corpus, min_characters=1 if options.corpus else 500_000)
        rows = Rows.of(plan, corpus)
        if len(rows.train) < plan.row_count:
            print(f"{len(rows.train)} rows of text for {plan.row_count}: some are seen again", file=sys.stderr)
        tokens = {"held_out_tokens": rows.held_out.numel(), "train_tokens": rows.train.numel()}
        return rows, corpus.describe() | tokens

    def work(name: str, seed: int, tell) -> dict:
        rows, facts = text()
        return {"environment": environment(seed), "corpus": facts, **run(name, seed, plan, rows, tell)}

    names = list(VARIANTS) if options.only is None else options.only
    runs.run_all(options.runs, names, options.seeds, asdict(plan), work)


def main(arguments: list[str] | None = None) -> None:
    """Trains, times or reports."""
    options = parse(arguments)
    torch.set_num_threads(1)  # one core, and results do not depend on how many there are
    if options.report:
        result = json.loads(options.report.read_text())
        options.out = options.report
    else:
        plan = Plan(grad_bound=None) if options.no_bound else Plan()
        plan = plan if options.share == 1 else plan.scaled(options.share)
        old = json.loads(options.out.read_text()) if options.out and options.out.is_file() else {}
        if options.time:
            result = old | {"time": time_all(options, plan)}
        else:
            train_all(options, plan)
            done = runs.collect(options.runs, list(VARIANTS), options.seeds, asdict(plan))
            result = report.study(done, options.seeds, plan) | {k: v for k, v in old.items() if k == "time"}
        if options.out:
            write(options.out, result)
    print("\n".join(report.table(result)))
    if options.out:
        report.draw(result, options.out.with_suffix(""))


if __name__ == "__main__":
    main()
