"""`tnt eval`: perplexity, retrieval over distance, cost by context and ablations of any causal language model.

    tnt eval runs/tnt_debug/stage1 --tasks perplexity,ablation
    python -m tnt_hf.recipes.evaluate MODEL --context 1024 4096

`evaluate` does the same for a model in memory. The model is left as it was, to the bit. Slow imports wait until there
is something to evaluate, so `--help` answers at once.
"""

import argparse
import shlex
import sys
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from os.path import expanduser, realpath
from pathlib import Path
from typing import Any

from tnt_hf.command_line import parse_arguments
from tnt_hf.settings import Integers


TASKS = ("perplexity", "passkey", "recall", "cost", "ablation")


def evaluate(
    model,
    tokenizer=None,
    *,
    tasks: str | Iterable[str] | None = None,
    data: str | Iterable[str] = "python-stdlib",
    data_config: str | None = None,
    split: str | None = None,
    text_column: str = "text",
    held_out: float | None = None,
    context: int | Iterable[int] | None = None,
    tokens: int = 32_768,
    samples: int = 32,
    seed: int = 0,
    batch_size: int | None = None,
    local_chunk_sizes: int | list[int] | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Evaluates a causal language model, which is left as it was.

    Args:
        model: TNT or any other; with injected memory and adapters as `load_injected` returns it.
        tokenizer: needed for every task except recall and cost.
        tasks: some of `TASKS`; by default all that apply; `skipped` in the result names the others with the reason.
        data: `python-stdlib`, a file, folder or Hub id as for `dataset_name` in a recipe, or an iterable of texts.
        data_config, split, text_column: for a dataset; the split is "train" by default.
        held_out: evaluate the share of the documents that training with this `eval_share` leaves out; by default 0.05
            for `python-stdlib`, and 0, meaning all documents, for anything else.
        context: lengths in tokens. Every task uses the longest; cost is measured at each. By default 1024 and a
            quarter of it, or less where `max_position_embeddings` is less.
        tokens: text tokens, at most; no document brings more than the longest context or a sixteenth of `tokens`,
            whichever is more, unless there is too little text otherwise.
        samples: number of pass keys per distance, and of recall sequences.
        batch_size: rows at a time; by default 8, or fewer where their logits would exceed 512 MiB.
        local_chunk_sizes: chunk sizes of a TNT model for this evaluation.

    Returns:
        The content of evaluation.json; see the README. `failed` names tasks that ran out of memory; the others, and
        the cost of shorter contexts, are there.

    Raises:
        ValueError: an unknown task, one that cannot be run, an argument out of range, a context beyond what a model
            without rotary positions knows, no text, logits that are not finite, memory for none of the tasks.
    """
    from tnt_hf.recipes.evaluation_run import evaluate_model

    results = evaluate_model(
        model,
        tokenizer,
        _tasks(tasks),
        tasks is not None,
        data=data,
        data_config=data_config,
        split=split,
        text_column=text_column,
        held_out=_held_out(data, held_out),
        context=context,
        tokens=tokens,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        local_chunk_sizes=local_chunk_sizes,
        progress=progress,
    )
    failed = [f"{task} failed: {reason}" for task, reason in results.get("failed", {}).items()]
    for note in [*results.get("warnings", []), *failed]:
        warnings.warn(note, stacklevel=2)
    return results


def _held_out(data: str | Iterable[str], held_out: float | None) -> float:
    from tnt_hf.recipes.corpus import HELD_OUT
    from tnt_hf.recipes.sources import STANDARD_LIBRARY

    return (HELD_OUT if data == STANDARD_LIBRARY else 0.0) if held_out is None else held_out


def _tasks(tasks: str | Iterable[str] | None) -> list[str]:
    chosen = TASKS if tasks is None else tasks.split(",") if isinstance(tasks, str) else tasks
    chosen = [task.strip() for task in chosen]
    if unknown := [task for task in chosen if task not in TASKS]:
        raise ValueError(f"tasks: {unknown[0]!r} must be among {', '.join(TASKS)}")
    return [task for task in TASKS if task in chosen]


# ------------------------------------------------------------------------------------------------------- command line


def build_parser() -> argparse.ArgumentParser:
    """Options of `tnt eval`."""
    parser = argparse.ArgumentParser(
        prog="tnt eval", description="Evaluate a causal language model with or without memory."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="folder or Hub id: TNT, any causal LM, injected memory, adapter"
    )
    parser.add_argument(
        "--tasks", metavar="LIST", help=f"comma-separated: {','.join(TASKS)} (default: all that apply)"
    )
    parser.add_argument(
        "--data", default="python-stdlib", help="python-stdlib (held-out files), file, folder or Hub id"
    )
    parser.add_argument("--data-config", metavar="NAME", help="configuration of a Hub dataset")
    parser.add_argument("--split", help="split of a dataset (default: train)")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column with the text (default: text)")
    parser.add_argument(
        "--held-out",
        type=float,
        metavar="SHARE",
        help="held-out share of the data, as eval_share (default: 0.05 for python-stdlib)",
    )
    parser.add_argument(
        "--context", action=Integers, nargs="+", metavar="TOKENS",
        help="context lengths; tasks use the longest, cost is measured at each (default: 1024, or all positions"
        " of a model that has fewer, and a quarter of it)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=32_768, help="text tokens, at most (default: %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=32, help="pass keys per distance, recall sequences (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for everything random (default: 0)")
    parser.add_argument("--batch-size", type=int, metavar="ROWS", help="default: 8, or what keeps logits in 512 MiB")
    parser.add_argument(
        "--local-chunk-sizes", action=Integers, nargs="+", metavar="C", help="of a TNT model: one for all, or one each"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or Hub id (default: the model's)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float64", "float32", "bfloat16", "float16"),
        help="auto: the checkpoint's own",
    )
    parser.add_argument("--device", help="default: cuda if available, otherwise cpu")
    parser.add_argument(
        "--output", metavar="DIR",
        help="default: MODEL/evaluation if MODEL is the folder of a run or of a model with memory, else ./evaluation",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier evaluation in DIR")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with MODEL")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """`tnt eval`. Returns 0, or 1 where a task failed; mistakes in the input raise `ValueError` or `OSError`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(build_parser(), arguments)
    _tasks(options.tasks)
    if missing := [name for name in ("matplotlib", "tqdm") if find_spec(name) is None]:
        raise ValueError(f"tnt eval needs {', '.join(missing)}: pip install 'tnt-hf[train]'")

    from tnt_hf.recipes.evaluation_model import load_model
    from tnt_hf.recipes.evaluation_note import training_note
    from tnt_hf.recipes.evaluation_report import as_markdown, check_output, write_evaluation
    from tnt_hf.recipes.evaluation_run import is_exhaustion
    from tnt_hf.recipes.model_folder import is_of_ours
    from tnt_hf.recipes.sources import STANDARD_LIBRARY
    from tnt_hf.termination import orderly_termination

    if options.output is not None and not options.output.strip():
        raise ValueError(f"--output {options.output!r}: must name a folder; the working directory is '.'")
    local = Path(options.model).is_dir()
    if options.output is None:
        output = Path(options.model if local and is_of_ours(Path(options.model)) else "") / "evaluation"
    else:
        output = Path(expanduser(options.output))
        if str(output).startswith("~"):  # it would be made here; a folder of that name is ./~...
            raise ValueError(f"--output {options.output!r}: there is no such user, or none with a home folder")
    if not options.data.strip():
        raise ValueError(f"--data {options.data!r}: must name {STANDARD_LIBRARY}, a file, a folder or a dataset")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed {options.seed}: must be at least 0 and below 2**32")
    data, written = (Path(realpath(path)) for path in (options.data, output))  # `resolve` of a loop raises before 3.13
    if data.is_dir() and data in (written, *written.parents):
        raise ValueError(f"--output {output}: lies in the folder of --data, whose content it would change")
    check_output(output, options.overwrite)
    note = None
    if local:
        held_out = _held_out(options.data, options.held_out)
        chosen = options.data, options.data_config, options.split, options.text_column
        note = training_note(Path(options.model), *chosen, held_out)
    model, tokenizer = load_model(
        options.model,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
    )
    names = (
        "tasks data data_config split text_column held_out context tokens samples seed batch_size local_chunk_sizes"
    )
    try:
        results = evaluate(model, tokenizer, **{name: getattr(options, name) for name in names.split()})
    except IndexError as error:
        if "index out of range" not in str(error):
            raise
        raise ValueError(f"MODEL {options.model}: its tokenizer gives ids that the model does not know") from error
    except (MemoryError, RuntimeError) as error:  # outside the tasks
        if not is_exhaustion(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"out of memory before the first task: {first}") from error
    results["command"] = shlex.join(
        ["tnt", "eval", *(Path(x).name if Path(x).is_absolute() else x for x in arguments)]
    )
    results["model"] = Path(options.model).resolve().name if local else options.model
    if note and {"perplexity", "ablations"} & set(results):
        results["warnings"] = [*results.get("warnings", []), note]
    try:
        with orderly_termination():
            written = write_evaluation(output, results, options.overwrite)
    except OSError as error:
        print(as_markdown(results))  # what took its time is not lost with the disk
        raise OSError(str(error) if str(output) in str(error) else f"--output {output}: {error}") from error
    print(as_markdown(results))
    for task, reason in results.get("skipped", {}).items():
        print(f"{task} skipped: {reason}", file=sys.stderr)
    print(f"written to {output}: {', '.join(path.name for path in written)}")
    return int("failed" in results)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as mistake:
        print(f"tnt eval: {mistake}", file=sys.stderr)
        sys.exit(2)
