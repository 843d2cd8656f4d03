"""Distillation: a converted model learns to predict what its source predicts.

The memory, which starts silent, is trained in full; the weights that came from the source only through LoRA. Rates
differ by what a parameter does, and were found on a model of a million parameters: measure before using them at scale.

Axis legend: B batch   T tokens   V vocabulary
"""

import math
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tnt_hf.recipes.data import IGNORED


# Which parameters learn at which rate: the first pattern that a name contains decides, the rest of the memory follows.
KINDS = (
    ("lora", r"\.lora_[AB]\."),
    ("gate", r"\.memory\..*gate\.scale"),
    ("projection", r"\.memory\..*\.?[qkv]_(proj|conv)\."),
    ("memory", r"\.memory\."),
)
RATES = {"lora": 2e-3, "gate": 3e-2, "projection": 3e-3, "memory": 1e-2}


def distillation_loss(student: Tensor, teacher: Tensor, labels: Tensor, num_items: Tensor | int | None = None):
    """
    KL(teacher || student) in nats, over the tokens that are scored.

    Args:
        student, teacher: logits `[B, T, V]`; computed in float32.
        labels: `[B, T]`, only their -100 matter: the prediction at t is scored if the token at t + 1 is.
        num_items: scored tokens of all batches that make one optimizer step, by default those of this batch.

    Returns:
        The sum over scored tokens divided by `num_items`, so that it is the mean however a step is cut into batches.
    """
    scored = labels[:, 1:] != IGNORED
    student, teacher = (F.log_softmax(x[:, :-1][scored].float(), -1) for x in (student, teacher))
    loss = F.kl_div(student, teacher, log_target=True, reduction="sum")
    return loss / (scored.sum() if num_items is None else num_items)


def with_lora(model: nn.Module, rank: int = 8):
    """`model` with LoRA on attention's q, k, v and o, its memories trainable in full and everything else frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model,
        LoraConfig(
            r=rank,
            lora_alpha=16,
            # Not the memory's own projections, which have the same last names.
            target_modules=r".*\.self_attn\.[qkvo]_proj",
            modules_to_save=["memory"] if getattr(model.config, "memory_layer_indices", None) else None,
        ),
    )


def parameter_groups(model: nn.Module, rates: dict[str, float]) -> list[dict]:
    """Optimizer groups of the trainable parameters of `model`, one per entry of `KINDS` that occurs.

    Raises:
        ValueError: a trainable parameter fits no kind, or `rates` lacks its kind.
    """
    groups: dict[str, list] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = next((kind for kind, pattern in KINDS if re.search(pattern, name)), None)
            if kind not in rates:
                raise ValueError(f"rates={rates!r}: has no rate for {name}, whose kind is {kind!r}")
            groups.setdefault(kind, []).append(parameter)
    return [{"params": group, "lr": rates[kind], "kind": kind} for kind, group in groups.items()]


class DistillationTrainer(Trainer):
    """`Trainer` whose loss is [`distillation_loss`] against a frozen `teacher`, with one rate per kind of parameter.

    Args:
        teacher: a causal language model with the student's vocabulary.
        rates: learning rate per kind (`KINDS`); the schedule of the arguments multiplies all of them alike.
        arguments, keywords: as for `Trainer`.
    """

    loss_is_scaled_for_ga = True  # by `num_items_in_batch`

    def __init__(self, *arguments, teacher: nn.Module, rates: dict[str, float] = RATES, **keywords):
        super().__init__(*arguments, **keywords)
        self.teacher, self.rates = teacher.eval().requires_grad_(False).to(self.args.device), rates

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        inputs = {name: x for name, x in inputs.items() if name != "labels"}
        outputs = model(**inputs, use_cache=False)
        with torch.no_grad(), self.accelerator.autocast():
            target = self.teacher(**inputs, use_cache=False).logits
        loss = distillation_loss(outputs.logits, target, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            groups = parameter_groups(self.model if model is None else model, self.rates)
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(
                groups, betas=betas, eps=self.args.adam_epsilon, weight_decay=self.args.weight_decay
            )
        return self.optimizer


class StopIfNotFinite(TrainerCallback):
    """Reports every step, and ends a training whose loss or gradient is no number: `Trainer` itself would go on."""

    def __init__(self, tell: Callable[[int, int, float], None]):
        self.tell, self.losses = tell, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.tell(state.global_step, state.max_steps, logs["loss"])
            if not math.isfinite(logs["loss"]) or not math.isfinite(logs["grad_norm"]):
                raise RuntimeError(f"step {state.global_step}: loss {logs['loss']}, gradient norm {logs['grad_norm']}")


def distil(
    student: nn.Module, teacher: nn.Module, rows: Tensor, batch_size: int, seed: int, tell, folder: str, **changes
) -> list[float]:
    """One pass over `rows` `[N, T]` in their order; trains `student` in place.

    Args:
        changes: of the `TrainingArguments` below. folder: where Trainer may write; it writes nothing.
        tell: called with (step, steps, loss) after each step.

    Returns:
        The loss of every step.
    """
    steps = len(rows) // batch_size
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": batch_size,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": max(1, min(10, steps // 10)),
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "bf16": True,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": seed,
    }
    samples = [{"input_ids": row, "labels": row} for row in rows]
    follow = StopIfNotFinite(tell)
    arguments = TrainingArguments(**{**settings, **changes})
    trainer = DistillationTrainer(student, arguments, train_dataset=samples, callbacks=[follow], teacher=teacher)
    trainer.remove_callback(PrinterCallback)  # `tell` shows the progress
    trainer.train()
    return follow.losses
