"""The demo: train a small TNT on Python's standard library, compare it with its twin, save it and load it again.

Stage 1 trains everything with local chunks of 8 tokens, stage 2 only the local memories with chunks of one token. The
twin is the same model without memories, so it has a sliding window only: it starts from the same backbone weights and
sees the same text in the same order, as much as both stages together. A second, synthetic task (`data.Recall`) shows
over which distance each of the two can look something up.

The amount of work is fixed by `--budget`, not by the clock, so a run can be repeated exactly. The four trainings share
nothing and run in worker processes, as many at a time as there are cores, one torch thread each.
"""

import argparse
import multiprocessing
import os
import queue
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from tnt_hf.recipes.data import Corpus, read_corpus, train_tokenizer, windows
from tnt_hf.recipes.demo_conversion import ConversionData, ConversionPlan, conversion_jobs, measured_on
from tnt_hf.recipes.demo_conversion_report import conversion_result, conversion_summary, draw_conversion
from tnt_hf.recipes.demo_jobs import Plan, probe, shuffled, train_recall, train_text
from tnt_hf.recipes.demo_report import (
    Progress,
    closing,
    draw_recall,
    draw_text,
    environment,
    job_facts,
    recall_results,
    recall_summary,
    text_results,
    text_summary,
    write_results,
)


PROMPT = "class Reader:\n    def __init__(self, "
PARTS = ("text", "recall", "conversion")
NEEDED = ("accelerate", "matplotlib", "tokenizers", "tqdm")


def run_jobs(jobs: dict, workers: int, after: dict[str, str] | None = None) -> dict:
    """Runs `{name: (function, *arguments)}` in worker processes, showing progress. A job that fails stops the demo.

    Args:
        after: `{name: other}`, jobs that start when another one is done.
    """
    waiting = dict(after or {})
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, Progress() as progress:
        reports = manager.Queue()
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            running = {}
            while len(running) < len(jobs) or any(not job.done() for job in running.values()) or not reports.empty():
                for job in running.values():
                    if job.done() and job.exception() is not None:
                        pool.shutdown(wait=True, cancel_futures=True)
                        raise job.exception()
                for name, (function, *arguments) in jobs.items():
                    other = running.get(waiting.get(name))
                    if name not in running and (name not in waiting or other is not None and other.done()):
                        running[name] = pool.submit(function, *arguments, reports)
                try:
                    progress.show(*reports.get(timeout=0.5))
                except queue.Empty:
                    pass
            return {name: running[name].result() for name in jobs}


# ------------------------------------------------------------------------------------------------------- the program


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of `tnt demo`."""
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="tnt demo", description="Train, compare, save and reload a small TNT on real text; convert a Llama."
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", metavar="PART", help=f"one of {', '.join(PARTS)}; may be repeated"
    )
    parser.add_argument("--output", type=Path, default=Path("demo_out"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--budget",
        type=int,
        default=plan.stage1_steps,
        metavar="STEPS",
        help="steps of stage 1; everything else follows in proportion (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument(
        "--workers", type=int, metavar="N", help="trainings at a time (default: one per core, at most 4)"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="Python sources (default: the standard library)")
    options = parser.parse_args(arguments)
    options.only = [part for part in PARTS if part in (options.only or PARTS)]
    if options.workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options.workers = min(4, cores)
    for name in ("budget", "workers"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    needed = NEEDED + (("peft",) if "conversion" in options.only else ())
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ValueError(f"tnt demo needs {', '.join(missing)}: pip install 'tnt-hf[train]'")
    return options


def reload(checkpoint: Path, tokenizer, held_out, expected: list, seed: int) -> tuple[dict, str]:
    """Loads the checkpoint with the Auto class, compares it bit for bit, and continues `PROMPT` with it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tnt_hf import TNTForCausalLM  # the first name of the package registers the model with the Auto classes

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # as in the process that trained it: the order of a sum depends on the number of threads
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    logits, tokens = probe(model, held_out)
    checks = {
        "reloaded_by_auto_class": type(model) is TNTForCausalLM,
        "reloaded_logits_equal": bool(np.array_equal(logits, expected[0])),
        "reloaded_generation_equal": bool(np.array_equal(tokens, expected[1])),
    }
    torch.manual_seed(seed)
    prompt = torch.tensor([[tokenizer.bos_token_id, *tokenizer(PROMPT)["input_ids"]]])
    written = model.generate(prompt, max_new_tokens=120, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0)
    return checks, tokenizer.decode(written[0], skip_special_tokens=True)


def text_jobs(plan: Plan, corpus: Corpus, checkpoint: Path, say) -> tuple[dict, object, object]:
    """The jobs of the text part for `run_jobs`, the tokenizer and the held-out windows `[N, T]`."""
    tokenizer = train_tokenizer(corpus.train.values(), plan.vocab_size)
    train, lost = windows(corpus.train.values(), tokenizer, plan.length)
    held_out, _ = windows(corpus.held_out.values(), tokenizer, plan.length)
    say(f"byte-level BPE of {len(tokenizer)}: {train.numel() / 1e6:.1f} M training tokens, {lost} in files too short")
    train = shuffled(train, plan.text_steps * plan.batch_size, plan.seed)
    held_out = held_out[:: max(1, len(held_out) // plan.held_out_windows)][: plan.held_out_windows]
    checkpoint.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(checkpoint)
    arguments = (plan, len(tokenizer), train.numpy(), held_out.numpy(), checkpoint)
    jobs = {"text, TNT": (train_text, True, *arguments), "text, window only": (train_text, False, *arguments)}
    return jobs, tokenizer, held_out


def bytes_per_token(tokenizer, rows) -> float:
    """Of the predicted tokens of `rows` `[N, T]`: a byte-level token has one character per byte."""
    predicted = rows[:, 1:]
    return sum(len(t) for row in predicted.tolist() for t in tokenizer.convert_ids_to_tokens(row)) / predicted.numel()


def present(output: Path, results: dict, done: dict) -> tuple[list[str], list[str]]:
    """Draws every part of `results`. Returns the names of the pictures and the lines to print."""
    import matplotlib

    matplotlib.use("Agg")
    pictures, lines = [], []
    for part, names, draw, summary in (
        ("text", ("loss.png", "perplexity.png"), draw_text, text_summary),
        ("recall", ("recall.png",), draw_recall, recall_summary),
        ("conversion", ("conversion.png",), draw_conversion, conversion_summary),
    ):
        if part in results:
            draw(output, results, done)
            pictures += names
            lines += summary(results)
    return pictures, lines + closing(results)


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns 0, or 1 if a check fails: a checkpoint that is not what was saved, or a conversion."""
    start = time.perf_counter()
    options = parse(arguments)
    share = options.budget / Plan().stage1_steps
    plan, conversion = Plan(seed=options.seed).scaled(options.budget), ConversionPlan(seed=options.seed).scaled(share)
    say = lambda text: print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)  # noqa: E731
    output, parts = options.output, options.only
    output.mkdir(parents=True, exist_ok=True)

    corpus, jobs, after = None, {}, {}
    if parts != ["recall"]:
        corpus = read_corpus(options.corpus, min_characters=1 if options.corpus else 500_000)
        found = corpus.describe()
        say(
            f"corpus: {found['train_files']} files with {found['train_characters'] / 1e6:.1f} M characters to train"
            f" on, {found['held_out_files']} files with {found['held_out_characters'] / 1e6:.2f} M held out,"
            f" {found['files_in_another_encoding']} not in UTF-8, {found['files_left_out_as_unreadable']} unreadable"
        )
    if "conversion" in parts:
        texts = corpus.held_out if options.corpus else measured_on(corpus.held_out)
        converted = ConversionData.of(conversion, corpus, texts)
        jobs, after = conversion_jobs(conversion, converted, output / "conversion")
    if "text" in parts:
        more, tokenizer, held_out = text_jobs(plan, corpus, output / "checkpoint", say)
        jobs |= more
    if "recall" in parts:
        jobs |= {"recall, TNT": (train_recall, True, plan), "recall, window only": (train_recall, False, plan)}
    say(f"{len(jobs)} trainings, {options.workers} at a time: {'; '.join(jobs)}")
    done = run_jobs(jobs, options.workers, after)
    say("trained")

    results = {
        "command": " ".join(
            ["tnt demo", f"--budget {options.budget}", f"--seed {options.seed}", f"--workers {options.workers}"]
            + [f"--only {part}" for part in parts if parts != list(PARTS)]
        ),
        "environment": environment(),
        "plan": asdict(plan),
        "corpus": corpus and corpus.describe(),
        "checks": {},
    }
    if "text" in parts:
        checks, sample = reload(output / "checkpoint", tokenizer, held_out, done["text, TNT"].pop("probe"), plan.seed)
        results |= text_results(done, plan, bytes_per_token(tokenizer, held_out)) | {"sample": sample}
        results["checks"] |= checks
    if "recall" in parts:
        results |= recall_results(done)
    if "conversion" in parts:
        per_token = bytes_per_token(converted.tokenizer, converted.held_out)
        results["conversion"] = conversion_result(done, conversion, per_token)
    results["jobs"] = {name: job_facts(job) for name, job in done.items()}
    results["seconds"] = time.perf_counter() - start
    write_results(output, results)
    pictures, lines = present(output, results, done)
    print("\n".join(lines), flush=True)
    say(f"results.json, {', '.join(pictures)} and the trained models are in {output}")
    checks = {**results["checks"], **results.get("conversion", {}).get("checks", {})}
    return 0 if all(checks.values()) else 1
