"""`tnt train`: run a recipe. One YAML file is one run, and every field can be overridden.

    tnt train --config tnt_debug/stage1 --learning_rate 1e-3
    accelerate launch -m tnt_hf.recipes.train --config recipes/tnt_debug/stage1.yaml

The settings are checked before anything is loaded, the data before the model, and `output_dir` is written to once
everything is ready. The same command resumes a run that was killed.
"""

import math
import shlex
import sys
from contextlib import nullcontext
from dataclasses import MISSING, fields
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from tnt_hf.recipes.allocator import keep_freed_memory
from tnt_hf.recipes.arguments import DataArguments, ModelArguments, RunArguments
from tnt_hf.recipes.recipe_file import packaged_recipes
from tnt_hf.recipes.run_folder import check_output, check_unused, claim_output, sole_run
from tnt_hf.termination import Terminated


NEEDED = ("accelerate", "datasets", "peft", "pyarrow")
# The fields of TrainingArguments that recipes use most, with the default of a recipe; a test compares them.
TRAINER_HELP = {
    "output_dir": ("runs/<folder>/<file>", "everything the run writes; the same command resumes where it stopped"),
    "max_steps": (-1, "optimizer steps, instead of train_tokens or num_train_epochs"),
    "num_train_epochs": (1.0, "passes over the data, if nothing else sets the length"),
    "learning_rate": (5e-5, "for everything that has no rate of its own"),
    "lr_scheduler_type": ("linear", "linear, cosine, constant_with_warmup, ..."),
    "warmup_steps": (0, "warm-up steps, or their share if below 1"),
    "weight_decay": (0.0, "for matrices; none on W_init, gates, norms and biases"),
    "max_grad_norm": (1.0, "clip the gradient norm"),
    "per_device_train_batch_size": (8, "rows per device and micro-batch"),
    "gradient_accumulation_steps": (1, "micro-batches per optimizer step"),
    "activation_checkpointing": (False, "recompute layers in the backward pass, to save memory"),
    "bf16": (False, "compute in bfloat16, with weights in float32; on a CPU with use_cpu"),
    "use_cpu": (False, "train on the CPU even if there is a GPU"),
    "logging_steps": (10.0, "steps between logs"),
    "eval_strategy": ("no", "steps or epoch: evaluate while training; needs eval_split or eval_share"),
    "save_steps": (500, "steps between checkpoints"),
    "save_total_limit": (None, "checkpoints to keep"),
    "enable_jit_checkpoint": (False, "on SIGTERM, save a checkpoint at the end of the step, then stop"),
    "resume_from_checkpoint": (
        None,
        "a checkpoint, or never (a folder with one is refused); by default the newest complete one in output_dir",
    ),
    "report_to": ("tensorboard", "tensorboard, trackio, wandb, ... or none"),
    "seed": (0, "seed for everything random"),
}


def main(arguments: list[str] | None = None) -> int:
    """
    Runs a recipe. Returns the exit status: 0; 2 for a mistake in the input; 1 if a loss or a gradient was not finite;
    130 if the user stopped it, 143 if SIGTERM did (`enable_jit_checkpoint`). Each is reported in one line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or {"-h", "--help", "--help-all"} & set(arguments):
        print(help_text(everything="--help-all" in arguments))
        return 0
    try:
        train(arguments)
    except KeyboardInterrupt as error:
        print(f"tnt train: {str(error) or 'stopped by the user before the first step'}", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130
    except BrokenPipeError:  # nobody reads what it prints any more
        raise
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"tnt train: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, FloatingPointError) else 2
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def train(arguments: list[str]) -> dict[str, float]:
    """
    Runs the recipe of a command line.

    Returns:
        The final metrics, as `training.json` has them.

    Raises:
        ValueError: a setting, the data or a model is not acceptable, or `output_dir` belongs to another run.
        OSError: something cannot be read or written.
        FloatingPointError: a loss or a gradient was not finite.
        KeyboardInterrupt: the user stopped it, or SIGTERM did ([`Terminated`]); says where, and where it would resume.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ValueError(f"needs {', '.join(missing)}: pip install 'tnt-hf[train]'")
    recipe, trainer, facts = prepare(arguments)
    output, first = Path(trainer.args.output_dir), trainer.is_world_process_zero()
    with sole_run(output) if first else nullcontext():
        if first:
            check_output(output, recipe.given)  # again: another run may have had it since
            claim_output(output, recipe.given)
        try:
            metrics = trainer.fit(resume=trainer.args.resume_from_checkpoint or "auto", facts=facts)
        except KeyboardInterrupt as error:
            by = "SIGTERM" if isinstance(error, Terminated) else "the user"
            raise type(error)(_stopped(by, trainer.args, trainer.state.global_step)) from error
    if first:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        before = "no step was left to train; " if trainer.had_ended else ""
        print(f"{before}{shown}; results are in {output}", flush=True)
    return metrics


def _stopped(by: str, args: Any, step: int) -> str:
    from tnt_hf.recipes.checkpoints import next_start

    newest = next_start(args)
    after = "starts again, no checkpoint was saved" if newest is None else f"goes on from {newest.name}"
    return f"stopped by {by} after step {step}; the same command {after}"


def prepare(arguments: list[str]) -> tuple[Any, Any, dict[str, Any]]:
    """
    Everything up to the first step: (the [`~recipes.recipe_file.Recipe`], its [`~recipes.trainer.RecipeTrainer`], the
    facts that the trainer cannot know). Writes only the conversion of a `source` into `output_dir`.
    """
    import tnt_hf

    tnt_hf.register()
    from transformers import set_seed
    from transformers.integrations import is_deepspeed_zero3_enabled

    from tnt_hf.recipes.checkpoints import check_checkpoint
    from tnt_hf.recipes.model_card_tables import portable, portable_command
    from tnt_hf.recipes.models import build_model, check_packed_rows, load_tokenizer
    from tnt_hf.recipes.objectives import OBJECTIVES
    from tnt_hf.recipes.optimization import parameter_groups, run_steps
    from tnt_hf.recipes.recipe_file import read_recipe
    from tnt_hf.recipes.trainer import RecipeTrainer
    from tnt_hf.recipes.training_data import build_datasets, training_texts

    recipe = read_recipe(arguments)
    run, args = recipe.run, recipe.training
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if run.train_tokens is not None:
        args.max_steps = math.ceil(run.train_tokens / (rows_per_step * recipe.data.sequence_length))
    if is_deepspeed_zero3_enabled():  # one process makes the model while the others wait, and here it could not
        raise ValueError(
            "deepspeed: with ZeRO stage 3 no process has the weights a recipe begins with; shard them with FSDP2"
        )
    if args.device.type == "cpu" and args.fp16:
        raise ValueError("fp16=True: has no effect on a CPU; use bf16 (with use_cpu)")
    chosen = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    # of the environment, where `accelerate launch` puts it
    if args.mixed_precision.lower() not in ("", chosen):
        raise ValueError(
            f"ACCELERATE_MIXED_PRECISION={args.mixed_precision!r}: the recipe says {chosen!r}; give it --bf16 or"
            " --fp16, or accelerate launch --mixed_precision no"
        )
    if args.device.type == "cpu":
        args.dataloader_pin_memory = False  # there is nothing to pin it for
        keep_freed_memory()
    say = (lambda line: print(line, flush=True)) if args.process_index == 0 else (lambda line: None)
    check_reports(args.report_to)
    check_output(Path(args.output_dir), recipe.given)
    if args.process_index == 0:  # alone: what the others would look at may just be put back
        check_unused(Path(args.output_dir))
        if args.resume_from_checkpoint not in (None, "auto", "never"):
            check_checkpoint(args.resume_from_checkpoint, "resume_from_checkpoint", intact=False)
    callbacks = scheduled(run, args.seed)
    check_length(callbacks, args.max_steps)

    set_seed(args.seed)
    tokenizer = load_tokenizer(recipe.model, lambda: training_texts(recipe.data, run.mode))
    data = build_datasets(recipe.data, tokenizer, seed=args.seed, mode=run.mode, rows_per_step=rows_per_step)
    steps = run_steps(args, data.train)
    check_length(callbacks, steps)
    with args.main_process_first(local=False, desc="making the model"):  # one process converts for all
        model, teacher = build_model(
            recipe.model,
            run,
            output_dir=args.output_dir,
            tokenizer=tokenizer,
            sequence_length=recipe.data.sequence_length,
            seed=args.seed,
            say=say,
        )
    if args.use_liger_kernel and model.config.model_type == "tnt":
        raise ValueError("use_liger_kernel=True: liger-kernel has nothing for models of type 'tnt'")
    check_packed_rows(recipe, data.eval is not None, model, teacher)
    for callback in callbacks:
        callback.check(model)
    groups = parameter_groups(
        model, args.learning_rate, args.weight_decay, run.memory_learning_rate, run.gate_learning_rate
    )
    check_rates(run, groups)
    for line in plan(recipe, model, groups, data, rows_per_step, steps):
        say(line)
    trainer = RecipeTrainer(
        model=model,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.eval,
        data_collator=data.collator,
        processing_class=tokenizer,
        callbacks=callbacks,
        objective=OBJECTIVES[run.mode],
        teacher=teacher,
        groups=groups,
        data_state=data.state | _rests_on(recipe, teacher is not None),
        memory_logging_steps=run.memory_logging_steps,
        plots=run.plots,
    )
    facts = {
        "command": portable_command(shlex.join(["tnt", "train", *arguments])),
        "recipe": recipe.name,
        "settings": by_dataclass(portable(marked(recipe.given))),
        "mode": run.mode,
        "data": portable(data.facts),
    }
    return recipe, trainer, facts


def _rests_on(recipe: Any, with_teacher: bool) -> dict[str, str]:
    """What a run goes on with that its checkpoints do not hold, of folders: the base of an adapter, and a teacher."""
    from tnt_hf.recipes.checkpoints import weights_digest

    model, names = recipe.model, {}
    if model.trainable == "lora":
        names["base"] = model.model
    if with_teacher:
        names["teacher"] = model.teacher or model.source or model.model
    return {kind: weights_digest(name) for kind, name in names.items() if name and Path(name).is_dir()}


def check_reports(report_to: list[str]) -> None:
    """Raises ValueError if a package that is to show the curves is missing, or cannot be imported."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        callbacks = get_reporting_integration_callbacks(report_to)
    except ValueError as error:
        raise ValueError(f"report_to={report_to!r}: {error}") from error
    for callback in callbacks:
        try:
            callback()
        except (ImportError, RuntimeError) as error:
            raise ValueError(f"report_to={report_to!r}: {error}") from error


def check_length(callbacks: list, steps: int) -> None:
    """Raises ValueError if a schedule extends beyond the `steps` of the run, if that is positive."""
    from tnt_hf.recipes.callbacks import ChunkSizeSchedule

    for schedule in (callback.schedule for callback in callbacks if isinstance(callback, ChunkSizeSchedule)):
        if 0 < steps <= (last := max(schedule)):
            raise ValueError(f"chunk_size_schedule: names step {last}, but the run has {steps} steps, from 0 on")


def scheduled(run: RunArguments, seed: int) -> list:
    """The callbacks that change the model from step to step."""
    from tnt_hf.conversion import LiZACallback
    from tnt_hf.recipes.callbacks import ChunkSizeSchedule, WindowDropout

    callbacks: list[Any] = []
    if run.window_dropout:
        callbacks.append(WindowDropout(run.window_dropout, run.window_dropout_warmup_steps, seed))
    if run.chunk_size_schedule:
        callbacks.append(ChunkSizeSchedule(run.chunk_size_schedule))
    if run.mag_schedule:
        if unknown := [x for x in run.mag_schedule if x not in signature(LiZACallback).parameters]:
            raise ValueError(
                f"mag_schedule.{unknown[0]}={run.mag_schedule[unknown[0]]!r}: is not a field of LiZACallback"
            )
        try:
            callbacks.append(LiZACallback(**run.mag_schedule))
        except (TypeError, ValueError) as error:
            raise ValueError(f"mag_schedule={run.mag_schedule!r}: {error}") from error
    return callbacks


def check_rates(run: RunArguments, groups: list[dict]) -> None:
    """Raises ValueError for a learning rate of parameters that do not exist or do not learn."""
    kinds = {group["kind"] for group in groups}
    for field, of in (("memory_learning_rate", {"memory", "projection"}), ("gate_learning_rate", {"gate"})):
        if getattr(run, field) is not None and not kinds & of:
            raise ValueError(f"{field}={getattr(run, field)!r}: has no effect, no such parameter of the model learns")


def plan(recipe: Any, model: Any, groups: list[dict], data: Any, rows_per_step: int, steps: int) -> list[str]:
    """What is about to happen, in a few lines: model, parameters, data, steps, device, and where it goes."""
    args, length = recipe.training, recipe.data.sequence_length
    total = sum(parameter.numel() for parameter in model.parameters())
    counts = {}
    for group in groups:
        size = sum(parameter.numel() for parameter in group["params"])
        counts[group["kind"], group["lr"]] = counts.get((group["kind"], group["lr"]), 0) + size
    learning = ", ".join(f"{kind} {count:,} at {rate:g}" for (kind, rate), count in counts.items())
    rows = f"{len(data.train):,} " if hasattr(data.train, "__len__") else ""
    tokens = rows_per_step * length
    name = recipe.model.source or recipe.model.model
    dropped = data.facts.get("documents_dropped") or {}  # unknown of a stream
    lost = [f"{count:,} documents are left out: {reason}" for reason, count in dropped.items()]
    if cut := data.facts.get("documents_cut"):
        lost.append(f"{cut:,} documents are cut after {length:,} tokens")
    return [
        f"{recipe.run.mode}: {name}, {total:,} parameters, learning: {learning}",
        f"{recipe.data.dataset_name}: {rows}rows of {length:,} tokens",
        *(f"{recipe.data.dataset_name}: {what}" for what in lost),
        f"{steps:,} steps of {tokens:,} tokens ({rows_per_step} rows), {steps * tokens:,} tokens in all, on"
        f" {args.world_size} x {args.device}",
        f"everything is written to {args.output_dir}",
    ]


# ------------------------------------------------------------------------------------------------------- the record


def marked(given: dict[str, Any]) -> dict[str, Any]:
    """
    The settings with `./` before files and folders that exist here, so that no path is mistaken for a Hub id later:
    the relative path of those below the working directory, the name of others, as the rest means nothing elsewhere.
    """
    found = dict(given)
    for name in ("model", "source", "teacher", "tokenizer", "dataset_name", "eval_dataset_name"):
        if given.get(name) and (path := Path(given[name])).exists():
            path = path.resolve()
            found[name] = f"./{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name}"
    return found


def by_dataclass(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that were given, by the dataclass they belong to."""
    kinds = {"model": ModelArguments, "data": DataArguments, "run": RunArguments}
    owner = {field.name: kind for kind, fields_of in kinds.items() for field in fields(fields_of)}
    found: dict[str, dict[str, Any]] = {kind: {} for kind in (*kinds, "training")}
    for name, value in given.items():
        found[owner.get(name, "training")][name] = value
    return found


# ------------------------------------------------------------------------------------------------------------ the help


def help_text(everything: bool = False) -> str:
    """What `--help` prints; with `everything`, all fields of `TrainingArguments`, whose import takes a while."""
    groups = [
        (kind.__name__, kind.__doc__.strip(), _described(kind))
        for kind in (ModelArguments, DataArguments, RunArguments)
    ]
    title = "Transformers' own; those used most, with a recipe's defaults. --help-all lists all of them."
    trainer = [(name, default, text) for name, (default, text) in TRAINER_HELP.items()]
    if everything:
        from transformers import TrainingArguments

        title = "Transformers' own, with the library's defaults."
        trainer = _described(TrainingArguments)
    lines = [
        "usage: tnt train --config RECIPE [--field value ...]",
        "",
        *(__doc__ or "").strip().splitlines(),  # -OO leaves none
        "",
        "RECIPE is a YAML file, a flat mapping of the fields below, or the name of one that comes with the package:",
        f"  {', '.join(packaged_recipes())}",
        "Lists are given as --field a b, mapping entries as --field.entry value, merged with those of the file.",
        "Any field of TNTConfig is also a field and means model_config.FIELD (tnt info shows what it costs).",
    ]
    for name, text, described in [*groups, ("TrainingArguments", title, trainer)]:
        lines += ["", f"{name}: {text}"]
        width = max(len(field) for field, _, _ in described)
        for field, default, about in described:
            lines.append(f"  --{field:<{width}}  {about} [{_shown(default)}]")
    return "\n".join(lines)


def _described(kind: type) -> list[tuple[str, Any, str]]:
    """(name, default, help) of the fields of a dataclass."""
    return [
        (
            field.name,
            field.default if field.default_factory is MISSING else field.default_factory(),
            " ".join(str(field.metadata.get("help", "")).split()),
        )
        for field in fields(kind)
        if field.init
    ]


def _shown(default: Any) -> str:
    if isinstance(default, bool) or default is None:
        return {None: "none", True: "true", False: "false"}[default]
    return f"{default:g}" if isinstance(default, float) else str(getattr(default, "value", default))


if __name__ == "__main__":
    sys.exit(main())
