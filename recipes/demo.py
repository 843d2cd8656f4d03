"""The demo: what this package is for, from a Llama trained on real text to a hybrid that can be pushed, in minutes.

A small Llama learns the source text of Python's standard library. `tnt convert` narrows its attention to a window
with a memory beside it, `tnt verify` proves what that promises, distillation brings back what the window hides,
stage 2 refines the local memory, `tnt eval` measures the result, and a model card is written. Controls without memory
show what LoRA alone brings back.

The amount of work is fixed by `--budget`, not by the clock, so a run can be repeated exactly. Students share nothing
and run in worker processes, as many at a time as there are cores.
"""

import argparse
import json
import shlex
import shutil
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from tnt_hf.command_line import parse_arguments
from tnt_hf.conversion.files import write_json
from tnt_hf.recipes.corpus import Corpus, read_corpus
from tnt_hf.recipes.demo_conversion import (
    PRECISIONS,
    STUDENTS,
    ConversionData,
    ConversionPlan,
    faster_precision,
    measured_on,
    train_source,
)
from tnt_hf.recipes.demo_conversion_report import conversion_results, draw, summary
from tnt_hf.recipes.demo_jobs import run_jobs, shuffled
from tnt_hf.recipes.environment import cores, environment
from tnt_hf.termination import orderly_termination


NEEDED = ("accelerate", "matplotlib", "peft", "tokenizers", "tqdm")
FORMAT, RESULTS, PICTURES = "tnt-demo-1", "results.json", ("conversion.png", "loss.png")
TEXTS = "held_out.jsonl"
HYBRID = "hybrid"  # the one that goes all the way


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options of `tnt demo`."""
    plan = ConversionPlan()
    parser = argparse.ArgumentParser(
        prog="tnt demo",
        description="Train a small Llama on real text, convert it, verify, distil, refine and evaluate the hybrid.",
    )
    parser.add_argument(
        "--only", choices=STUDENTS, action="append", metavar="MODEL", help=f"{', '.join(STUDENTS)}; may be repeated"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_out"), metavar="DIR",
        help="default: %(default)s; what an earlier demo left there is replaced",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=int, default=plan.teacher_steps, metavar="STEPS",
        help="steps of the Llama; everything else follows in proportion (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=plan.seed, help="seed for everything random (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("auto", *PRECISIONS), default="auto", help="auto: whichever trains faster here"
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="training jobs at a time (default: one per core, at most 4)"
    )
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="Python sources (default: the standard library)")
    options = parse_arguments(parser, arguments)
    options.only = [name for name in STUDENTS if name in (options.only or STUDENTS)]
    if options.workers is None:
        options.workers = min(4, cores())
    for name in ("budget", "workers"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: must be at least 1")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"tnt demo needs {', '.join(missing)}: pip install 'tnt-hf[train]'")
    return options


def claim(output: Path) -> None:
    """
    An empty folder for the demo: what an earlier demo left there is removed; other files are not touched.

    Raises:
        FileExistsError: something else is there.
    """
    ours = ["source", *STUDENTS, TEXTS, *PICTURES]
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"--output {output}: is a file")
    if output.is_dir() and any(output.iterdir()):
        try:
            found = json.loads((output / RESULTS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise FileExistsError(f"--output {output}: holds files that no demo wrote; choose another folder")
        for path in (output / name for name in ours):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / RESULTS, {"format": FORMAT, "finished": False})


def jobs_of(options: argparse.Namespace, plan: ConversionPlan, corpus: Corpus) -> tuple[dict, dict, float]:
    """The jobs, what each has to wait for, and the bytes per held-out token."""
    from tnt_hf.recipes.demo_students import Student, evaluate_student, train_student

    texts = corpus.held_out if options.corpus else measured_on(corpus.held_out)
    data = ConversionData.of(plan, corpus, texts)
    lines = [json.dumps({"text": text}) + "\n" for text in texts.values()]
    (options.output / TEXTS).write_text("".join(lines), encoding="utf-8")
    data.tokenizer.save_pretrained(options.output / "source")
    held_out = data.held_out.numpy()
    seen = shuffled(data.train, plan.teacher_steps * plan.teacher_batch_size, plan.seed)
    again = shuffled(data.train, (plan.steps + plan.stage2_steps) * plan.batch_size, plan.seed + 1)
    name = options.corpus.name if options.corpus else "python-stdlib"
    given = Student(plan, options.output, name, again.numpy(), held_out, data.text)
    source = options.output / "source"
    jobs: dict = {"source": (train_source, plan, len(data.tokenizer), seen.numpy(), held_out, source)}
    jobs |= {name: (train_student, name, given) for name in options.only}
    after = dict.fromkeys(options.only, ("source",))
    if HYBRID in options.only:  # when nothing else runs, as it also measures speed
        jobs["evaluation"] = (evaluate_student, HYBRID, given, options.output / TEXTS)
        after["evaluation"] = tuple(options.only)
    predicted = data.held_out[:, 1:]
    tokens = (data.tokenizer.convert_ids_to_tokens(row) for row in predicted.tolist())
    return jobs, after, sum(len(token) for row in tokens for token in row) / predicted.numel()


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo. Returns 0; 1 if a check fails; 130 if it was interrupted."""
    start = time.perf_counter()
    options = parse(arguments)
    plan = ConversionPlan(seed=options.seed).scaled(options.budget / ConversionPlan().teacher_steps)

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    corpus = read_corpus(options.corpus, min_characters=1 if options.corpus else 500_000)
    found = corpus.describe()
    say(
        f"corpus: {found['train_files']} files with {found['train_characters'] / 1e6:.1f} M characters to train on,"
        f" {found['held_out_files']} files with {found['held_out_characters'] / 1e6:.2f} M held out"
    )
    claim(options.output)
    try:
        with orderly_termination():
            if options.precision == "auto":
                options.precision = faster_precision(plan)
                say(f"training in {options.precision}, the faster one here of {' and '.join(PRECISIONS)}")
            plan = replace(plan, precision=options.precision)
            jobs, after, bytes_per_token = jobs_of(options, plan, corpus)
            done = run_jobs(jobs, options.workers, after, say)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except FloatingPointError as error:
        say(f"stopped: {error}")
        return 1
    results = {
        "format": FORMAT,
        "finished": True,
        "command": " ".join(
            ["tnt demo", f"--budget {options.budget}", f"--seed {options.seed}", f"--precision {options.precision}"]
            + [f"--workers {options.workers}"]
            + [f"--only {name}" for name in options.only if options.only != list(STUDENTS)]
            + ([f"--corpus {shlex.quote(options.corpus.name)}"] if options.corpus else [])
        ),
        "environment": environment(),
        "plan": asdict(plan) | {"steps": plan.steps, "stage2_steps": plan.stage2_steps},
        "corpus": found,
        **conversion_results(done, bytes_per_token),
        "seconds": time.perf_counter() - start,
    }
    write_json(options.output / RESULTS, results)
    pictures = draw(options.output, results)
    print("\n".join(summary(results)), flush=True)
    say(f"{RESULTS}, {', '.join(pictures)} and every model are in {options.output}")
    if HYBRID in done:
        hybrid = options.output / HYBRID
        name = shlex.quote(str(hybrid))
        print(
            "\nThe hybrid is an ordinary checkpoint, with its model card and tnt eval's report beside it. Try:\n"
            f"  tnt generate {name} --prompt 'class Reader:' --temperature 0.7\n"
            f"  tnt push {name} YOU/tnt-demo --dry-run\n"
            f'  python -c "import tnt_hf; from transformers import AutoModelForCausalLM as A;'
            f" print(A.from_pretrained('{hybrid}'))\""
        )
    return 0 if all(results["checks"].values()) else 1
