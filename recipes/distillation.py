"""Distillation without a recipe: a `Trainer` whose student learns to predict what the model it came from predicts.

The memory, which starts silent, is trained in full; the weights that came from the source only through LoRA. Rates
differ by what a parameter does, and were found on a model of a million parameters: measure before using them at scale.
`tnt train` does the same with `mode: distill`.
"""

import torch
from peft import get_peft_model
from torch import nn
from transformers import Trainer

from tnt_hf.conversion import lora_config
from tnt_hf.recipes.objectives import distillation
from tnt_hf.recipes.optimization import parameter_groups


# The LoRA rate was chosen on validation text that the demo does not measure on.
RATES = {"lora": 6e-3, "gate": 3e-2, "projection": 3e-3, "memory": 1e-2}


def with_lora(model: nn.Module, rank: int = 8):
    """`model` with LoRA on attention's q, k, v and o, its memories trainable in full and everything else frozen."""
    return get_peft_model(model, lora_config(model, r=rank, lora_dropout=0.0))


class DistillationTrainer(Trainer):
    """`Trainer` whose loss is [`~recipes.objectives.distillation`] against a frozen `teacher`, with one rate per kind
    of parameter.

    Args:
        teacher: a causal language model with the student's vocabulary.
        rates: learning rate per kind of [`~recipes.optimization.KINDS`]; the schedule multiplies all of them alike.
        arguments, keywords: as for `Trainer`.
    """

    loss_is_scaled_for_ga = True  # by `num_items_in_batch`

    def __init__(self, *arguments, teacher: nn.Module, rates: dict[str, float] = RATES, **keywords):
        super().__init__(*arguments, **keywords)
        self.teacher, self.rates = teacher.eval().requires_grad_(False).to(self.args.device), rates

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self.accelerator.autocast():  # it wraps the model by itself, but not the teacher
            loss, outputs = distillation(model, inputs, num_items_in_batch, self.teacher)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            groups = parameter_groups(
                self.model if model is None else model, weight_decay=self.args.weight_decay, rates=self.rates
            )
            betas = (self.args.adam_beta1, self.args.adam_beta2)
            self.optimizer = torch.optim.AdamW(groups, betas=betas, eps=self.args.adam_epsilon)
        return self.optimizer
