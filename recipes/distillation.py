"""Distillation without a recipe: the student learns to predict what the model it came from predicts.

The memory, which starts silent, is trained in full; the weights that came from the source only through LoRA. Rates
differ by what a parameter does, and were found on a model of a million parameters: measure before using them at scale.
`tnt train` does the same with `mode: distill`.
"""

from peft import get_peft_model
from torch import nn
from transformers import TrainingArguments

from tnt_hf.conversion import lora_config
from tnt_hf.recipes.objectives import distillation
from tnt_hf.recipes.optimization import parameter_groups
from tnt_hf.recipes.trainer import RecipeTrainer


# The LoRA rate was chosen on validation text that the demo does not measure on.
RATES = {"lora": 6e-3, "gate": 3e-2, "projection": 3e-3, "memory": 1e-2}


def with_lora(model: nn.Module, rank: int = 8):
    """`model` with LoRA on attention's q, k, v and o, its memories trainable in full and everything else frozen."""
    return get_peft_model(model, lora_config(model, r=rank, lora_dropout=0.0))


def distiller(
    model: nn.Module, args: TrainingArguments, *, teacher: nn.Module, rates: dict[str, float] = RATES, **keywords
) -> RecipeTrainer:
    """
    A trainer of `model` with the loss [`~recipes.objectives.distillation`], without statistics and plots.

    Args:
        teacher: a causal language model with the student's vocabulary; it is frozen.
        rates: learning rate per kind of [`~recipes.optimization.KINDS`]; the schedule multiplies all of them alike.
        args, keywords: as for [`~recipes.trainer.RecipeTrainer`].
    """
    groups = parameter_groups(model, weight_decay=args.weight_decay, rates=rates)
    keywords |= {"objective": distillation, "teacher": teacher, "groups": groups}
    return RecipeTrainer(model, args, memory_logging_steps=0, plots=False, **keywords)
