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

from tnt_hf.recipes.data import read_corpus, train_tokenizer, windows
from tnt_hf.recipes.demo_jobs import Plan, probe, train_recall, train_text
from tnt_hf.recipes.demo_report import Progress, draw, environment, summary, write_results


PROMPT = "class Reader:\n    def __init__(self, "
NEEDED = ("accelerate", "matplotlib", "tokenizers", "tqdm")


def run_jobs(jobs: dict, workers: int) -> dict:
    """Runs `{name: (function, *arguments)}` in worker processes, showing progress. A job that fails stops the demo."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, Progress() as progress:
        reports = manager.Queue()
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            running = {
                name: pool.submit(function, *arguments, reports) for name, (function, *arguments) in jobs.items()
            }
            while any(not future.done() for future in running.values()) or not reports.empty():
                for future in running.values():
                    if future.done() and future.exception() is not None:
                        pool.shutdown(wait=True, cancel_futures=True)
                        raise future.exception()
                try:
                    progress.show(*reports.get(timeout=0.5))
                except queue.Empty:
                    pass
            return {name: future.result() for name, future in running.items()}


# ------------------------------------------------------------------------------------------------------- the program


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of `tnt demo`."""
    plan = Plan()
    parser = argparse.ArgumentParser(
        prog="tnt demo", description="Train, compare, save and reload a small TNT on real text."
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
    if options.workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options.workers = min(4, cores)
    for name in ("budget", "workers"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"tnt demo needs {', '.join(missing)}: pip install 'tnt-hf[train]'")
    return options


def shuffled(train, count: int, seed: int):
    """`count` windows `[count, T]` in a random order that `seed` fixes, every one once before any comes again."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(len(train), generator=generator) for _ in range(-(-count // len(train)))]
    return train[torch.cat(rounds)[:count]]


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


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns 0, or 1 if the reloaded checkpoint is not the one that was saved."""
    start = time.perf_counter()
    options = parse(arguments)
    plan = Plan(seed=options.seed).scaled(options.budget)
    say = lambda text: print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)  # noqa: E731
    checkpoint = options.output / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)

    corpus = read_corpus(options.corpus, min_characters=1 if options.corpus else 500_000)
    found = corpus.describe()
    say(
        f"corpus: {found['train_files']} files with {found['train_characters'] / 1e6:.1f} M characters to train on,"
        f" {found['held_out_files']} files with {found['held_out_characters'] / 1e6:.2f} M held out,"
        f" {found['files_in_another_encoding']} not in UTF-8, {found['files_left_out_as_unreadable']} unreadable"
    )
    tokenizer = train_tokenizer(corpus.train.values(), plan.vocab_size)
    train, lost = windows(corpus.train.values(), tokenizer, plan.length)
    held_out, _ = windows(corpus.held_out.values(), tokenizer, plan.length)
    say(f"byte-level BPE of {len(tokenizer)}: {train.numel() / 1e6:.1f} M training tokens, {lost} in files too short")
    train = shuffled(train, plan.text_steps * plan.batch_size, plan.seed)
    held_out = held_out[:: max(1, len(held_out) // plan.held_out_windows)][: plan.held_out_windows]
    tokenizer.save_pretrained(checkpoint)

    text = (plan, len(tokenizer), train.numpy(), held_out.numpy(), checkpoint)
    jobs = {
        "text, TNT": (train_text, True, *text),
        "text, window only": (train_text, False, *text),
        "recall, TNT": (train_recall, True, plan),
        "recall, window only": (train_recall, False, plan),
    }
    say(f"4 trainings, {options.workers} at a time: {', '.join(jobs)}")
    done = run_jobs(jobs, options.workers)
    say("trained; reloading the checkpoint")
    checks, sample = reload(checkpoint, tokenizer, held_out, done["text, TNT"].pop("probe"), plan.seed)

    seconds = time.perf_counter() - start
    characters = sum(len(token) for row in held_out[:, 1:].tolist() for token in tokenizer.convert_ids_to_tokens(row))
    facts = {
        "command": " ".join(
            ["tnt demo", f"--budget {options.budget}", f"--seed {options.seed}", f"--workers {options.workers}"]
        ),
        "seconds": seconds,
        "environment": environment(),
        "plan": asdict(plan),
        "corpus": found,
        "bytes_per_token": characters / held_out[:, 1:].numel(),
        "checks": checks,
        "sample": sample,
    }
    results = write_results(options.output, facts, done)
    draw(options.output, results, done)
    print(summary(results), flush=True)
    say(f"results.json, loss.png, perplexity.png, recall.png and checkpoint/ are in {options.output}")
    return 0 if all(checks.values()) else 1
