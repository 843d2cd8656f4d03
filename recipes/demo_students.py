"""The demo's students: converted from the source, verified, distilled; the hybrid is then refined and evaluated.

Each step is what its command does: `tnt convert`, `tnt verify`, `tnt train` with `mode: distill` and `mode: stage2`,
`tnt eval`, and the card that `tnt push` uploads.

Axis legend: N windows of text   T tokens of a window
"""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint, verify_conversion
from tnt_hf.conversion.sensitivity import choose_full_attention, loss_increases
from tnt_hf.recipes import blocked_attention, evaluate
from tnt_hf.recipes.callbacks import Printer
from tnt_hf.recipes.demo_conversion import STUDENTS, ConversionPlan
from tnt_hf.recipes.demo_jobs import Job, losses_by_position
from tnt_hf.recipes.distillation import RATES, with_lora
from tnt_hf.recipes.model_card import write_card
from tnt_hf.recipes.objectives import OBJECTIVES
from tnt_hf.recipes.optimization import parameter_groups
from tnt_hf.recipes.push import push
from tnt_hf.recipes.trainer import RecipeTrainer


STAGE2_RATES = {"memory": 1e-3}
# The promises that `tnt verify` checks, in four groups.
PROMISES = {
    "its files are complete and load": ("readable", "manifest", "finite", "gates", "loads"),
    "its base is the source, bit by bit": ("configuration", "base weights"),
    "as converted it computes what the source does": ("parity", "silent"),
    "no look ahead; cache, padding and batches change nothing": (
        "future", "rows", "decode", "padding", "prefix", "modes", "state size",
    ),
}  # fmt: skip
VERIFIED, LOADED, EQUAL, CARD = "verified", "loads with AutoModelForCausalLM", "equal when loaded", "has its card"
PROMPT = "class Reader:\n    def __init__(self, "


@dataclass(frozen=True)
class Student:
    """
    What every student's job is given.

    Attributes:
        output: of the demo; a model goes to the folder of its name in there, as converted to `converted` in that.
        corpus: the name of the text. train, held_out: windows `[N, T]`, for all stages in turn and to measure on.
        text: to verify on.
    """

    plan: ConversionPlan
    output: Path
    corpus: str
    train: Any
    held_out: Any
    text: str


def train_student(name: str, given: Student, reports) -> dict:
    """
    Converts the source as `STUDENTS[name]` says, verifies the result, distils it and saves it merged. One with a local
    memory goes through stage 2 then; as distilled it stays in the folder `distilled`.
    """
    job, plan, held_out = Job(name, reports), given.plan, torch.from_numpy(given.held_out)
    source, folder, kind = given.output / "source", given.output / name, blocked_attention.register()
    settings = {"window": plan.window, "seed": plan.seed, **STUDENTS[name]}
    with job.phase("probe"):
        rows = torch.from_numpy(given.train[: plan.probe_windows])
        costs = loss_increases(LlamaForCausalLM.from_pretrained(source).eval(), rows, plan.window)
    if name.endswith("full-layer"):
        settings["keep_full_attention"] = choose_full_attention(costs, 1)
    with job.phase("convert"):
        converted = convert_checkpoint(source, folder / "converted", progress=False, **settings)
    with job.phase("verify"):
        report = verify_conversion(source, converted, text=given.text, progress=False)
    job.say("\n".join(conversion_lines(name, settings, costs, report)))

    torch.manual_seed(plan.seed)  # of LoRA
    model = TNTForCausalLM.from_pretrained(converted, attn_implementation=kind)
    teacher = LlamaForCausalLM.from_pretrained(source, attn_implementation=kind)
    with job.phase("evaluate"):
        before = losses_by_position(model, held_out)
    model = with_lora(model, plan.lora_rank)
    trained, _ = model.get_nb_trainable_parameters()
    recipe = {"source": str(source.resolve()), "convert": settings, "trainable": "lora", "lora": {"r": plan.lora_rank}}
    rows, more = np.split(given.train, [plan.steps * plan.batch_size])
    config = model.get_base_model().config
    two_stages = bool(config.memory_layer_indices and config.local_chunk_sizes)
    distilled = folder / "distilled" if two_stages else folder
    model, losses = train(job, "distill", model, teacher, rows, given, distilled, recipe, RATES)
    with job.phase("evaluate"):
        after = losses_by_position(model, held_out)
    job.say(f"{name}: perplexity {before.mean().exp():.2f} as converted, {after.mean().exp():.2f} distilled")
    measurements, facts = {"converted": before, "trained": after}, {}
    if two_stages:
        model.set_local_chunk_sizes([1])
        facts["stage2_parameters"] = model.freeze_for_stage2()
        recipe = {"model": str(distilled.resolve()), "model_config": {"local_chunk_sizes": [1]}}
        recipe["trainable"] = "local_memories"
        read = {"tokens_of_distillation_before": rows.size}
        model, _ = train(job, "stage2", model, None, more, given, folder, recipe, STAGE2_RATES, **read)
        with job.phase("evaluate"):
            measurements["stage 2"] = losses_by_position(model, held_out)
        job.say(f"{name}: perplexity {measurements['stage 2'].mean().exp():.2f} after stage 2")
    return {
        **facts,
        "parameters": model.num_parameters(),
        "trained_parameters": trained,
        "train_tokens": rows.size,
        "config": model.config.to_diff_dict(),
        "window_costs": costs,
        "full_attention_layers": settings.get("keep_full_attention", []),
        "verification": {**report, "source": source.name, "output": f"{name}/converted"},
        "checks": {VERIFIED: bool(report["passed"]), **reloaded(model, folder, held_out)},
        "seconds": job.seconds,
        "losses": losses,
        "held_out": {stage: losses.numpy() for stage, losses in measurements.items()},
    }


class Follow(TrainerCallback):
    """Hands every step's loss to `tell(step, steps, loss)`."""

    def __init__(self, tell):
        self.tell = tell

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.tell(state.global_step, state.max_steps, logs["loss"])


def conversion_lines(name: str, settings: dict, costs: list[float], report: dict) -> list[str]:
    """What the probe and `tnt verify` found; of the first student in full, of the others the verdict."""
    lines = [f"{name}: converted to a window of {settings['window']}; {report['verdict']}"]
    if name != next(iter(STUDENTS)):
        return lines
    status = {row["name"]: row["status"] for row in report["checks"]}
    for promise, names in PROMISES.items():
        made = [status[name] for name in names if status[name] in ("pass", "fail", "not run")]
        lines.append(f"    {made.count('pass')} of {len(made)} hold: {promise}")
    lines.append("    nats per token that a window in this layer alone costs:")
    return lines + [f"    layer {layer}  {cost:.4f}" for layer, cost in enumerate(costs)]


def train(
    job: Job, mode: str, model, teacher, rows, given: Student, folder: Path, recipe: dict, rates: dict, **read: int
) -> tuple[Any, list[float]]:
    """
    One pass over windows `[N, T]` as `tnt train` makes it: weights, tokenizer, training.json and plots go to `folder`.

    Args:
        recipe: the settings of the model, for the record. rates: by kind of parameter. read: of its data, too.

    Returns:
        (the model as it was saved, the loss of every step).
    """
    plan = given.plan
    steps = len(rows) // plan.batch_size
    settings = {
        "max_steps": steps,
        "per_device_train_batch_size": plan.batch_size,
        "warmup_steps": max(1, min(10, steps // 10)),
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "adam_beta2": 0.95,
        "bf16": plan.precision == "bfloat16",
        "seed": plan.seed,
    }
    arguments = TrainingArguments(
        str(folder),
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    facts = {
        "command": f"tnt demo --budget {plan.teacher_steps} --seed {plan.seed} --precision {plan.precision}",
        "mode": mode,
        "data": {"name": given.corpus, "rows": len(rows), "tokens": rows.size, **read},
        "settings": {
            "model": recipe,
            "data": {"dataset_name": given.corpus, "sequence_length": plan.length, "packing": False},
            "training": {**settings, "learning_rates": rates},
        },
    }
    with job.phase(mode) as tell:
        trainer = RecipeTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in torch.from_numpy(rows)],
            data_collator=default_data_collator,
            processing_class=AutoTokenizer.from_pretrained(given.output / "source"),
            callbacks=[Follow(tell)],
            objective=OBJECTIVES[mode],
            teacher=teacher,
            groups=parameter_groups(model, rates=rates),
            memory_logging_steps=max(1, steps // 10),
        )
        trainer.remove_callback(Printer)  # `tell` shows the progress
        trainer.fit("never", facts)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # or it would stay in bfloat16
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def reloaded(model, folder: Path, held_out) -> dict[str, bool]:
    """Whether `folder` loads with the Auto class and computes what `model` does, bit by bit, on windows `[N, T]`."""
    model.set_attn_implementation("sdpa")
    again = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = [each.eval()(input_ids=held_out[:2], use_cache=False).logits for each in (model, again)]
    return {LOADED: type(again) is TNTForCausalLM, EQUAL: torch.equal(*logits)}


def evaluate_student(name: str, given: Student, texts: Path, reports) -> dict:
    """`tnt eval` of the folder `name` on the file `texts`, its model card, and what `tnt push` would say of it."""
    job, folder, said = Job(f"{name}, evaluation", reports), given.output / name, io.StringIO()
    with job.phase("tnt eval"), redirect_stdout(said), redirect_stderr(said):
        if evaluate.main(evaluation_command(folder, texts, given.plan)):
            raise RuntimeError(said.getvalue().strip().rpartition("\n")[2])
    with job.phase("card"):
        carded = write_card(folder, name)
        push(folder, f"you/{name}", dry_run=True, say=lambda line: None)  # raises if it is not fit to be pushed
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with job.phase("generate"):
        torch.manual_seed(given.plan.seed)
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(PROMPT)["input_ids"]]])
        written = model.generate(ids, max_new_tokens=100, do_sample=True, temperature=0.7, top_k=40, pad_token_id=0)
    job.say(f"{name}: evaluated; model card written, ready to push")
    return {
        "evaluation": json.loads((folder / "evaluation" / "evaluation.json").read_text(encoding="utf-8")),
        "checks": {CARD: carded},
        "sample": tokenizer.decode(written[0], skip_special_tokens=True),
        "seconds": job.seconds,
    }


def evaluation_command(folder: Path, texts: Path, plan: ConversionPlan) -> list[str]:
    """What follows `tnt eval`."""
    options = {
        "tasks": "perplexity,cost,ablation",
        "data": texts,
        "context": [plan.length // 4, plan.length],
        "tokens": plan.evaluation_tokens,
        "batch-size": plan.batch_size,
        "seed": plan.seed,
        "device": "cpu",  # where everything else of the demo runs
    }
    words = [[f"--{name}", *map(str, x if isinstance(x, list) else [x])] for name, x in options.items()]
    return [str(folder), *(word for option in words for word in option)]
