"""Distillation: a converted model learns to predict what its source predicts.

The memory, which starts silent, is trained in full; the weights that came from the source only through LoRA. Rates
differ by what a parameter does, and were found on a model of a million parameters: measure before using them at scale.

Axis legend: B batch   T tokens   V vocabulary
"""

import re
from functools import partial

import torch
import torch.nn.functional as F
from peft import get_peft_model
from torch import Tensor, nn
from transformers import Trainer

from tnt_hf.conversion import lora_config
from tnt_hf.recipes.data import IGNORED
from tnt_hf.recipes.training import train_in_order


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
    return get_peft_model(model, lora_config(model, r=rank, lora_dropout=0.0))


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


def distil(
    student: nn.Module, teacher: nn.Module, rows: Tensor, batch_size: int, seed: int, tell, **changes
) -> list[float]:
    """One pass over `rows` `[N, T]` in their order; trains `student` in place. Arguments and result as for
    [`~recipes.training.train_in_order`]."""
    warmup = max(1, min(10, len(rows) // batch_size // 10))
    settings = {"warmup_steps": warmup, "weight_decay": 0.0, "bf16": True} | changes
    samples = [{"input_ids": row, "labels": row} for row in rows]
    trainer = partial(DistillationTrainer, teacher=teacher)
    return train_in_order(student, samples, batch_size, seed, tell, trainer, **settings)
