"""Optimizer groups: which parameters learn at which rate, and which of them decay.

Weight decay is for the matrices of ordinary layers. W_init of a memory, every gate, norms and biases have values that
mean something in themselves, and decay would pull them to zero.
"""

import copy
import math
import re
from typing import Any

import torch
from torch import nn
from transformers import Trainer


# What a parameter is, by the first pattern that its name contains.
KINDS = (
    ("lora", r"\.lora_\w+\."),
    ("gate", r"\.memory\.(.*\.)?gate\.scale"),
    ("projection", r"\.memory\.(.*\.)?[qkv]_(proj|conv)\."),
    ("memory", r"\.memory\."),
    ("base", ""),
)
# W_init and the token-dependent gates are all that `memories.N` holds; LiZA's gates are beta_proj and decay_proj.
UNDECAYED = r"norm|\.bias$|persistent_(keys|values)|\.memory\.(.*\.)?(memories\.\d+|gate|beta_proj|decay_proj)\."


def kind_of(name: str) -> str:
    """The kind of a parameter, one of `KINDS`, from its name in `model.named_parameters()`."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter: matrices other than W_init, gates, norms and persistent tokens."""
    return parameter.ndim > 1 and not re.search(UNDECAYED, name)


def parameter_groups(
    model: nn.Module,
    learning_rate: float | None = None,
    weight_decay: float = 0.0,
    memory_learning_rate: float | None = None,
    gate_learning_rate: float | None = None,
    rates: dict[str, float] | None = None,
) -> list[dict]:
    """
    Optimizer groups that hold every trainable parameter of `model` exactly once.

    Args:
        learning_rate: for everything that has no other rate.
        weight_decay: for what [`decays`]; 0 for the rest.
        memory_learning_rate: for the memory; gate_learning_rate: for the factor with which it joins attention.
        rates: one rate per kind in `KINDS`, instead of these three.

    Returns:
        `{"params", "lr", "weight_decay", "kind", "names"}`, at most two for each kind, in the order of `KINDS`.

    Raises:
        ValueError: nothing is trainable, or `rates` lacks the kind of a trainable parameter.
    """
    if rates is None:
        memory = learning_rate if memory_learning_rate is None else memory_learning_rate
        gate = learning_rate if gate_learning_rate is None else gate_learning_rate
        rates = {"lora": learning_rate, "gate": gate, "projection": memory, "memory": memory, "base": learning_rate}
    groups = {
        (kind, decayed): {"params": [], "names": [], "kind": kind, "weight_decay": weight_decay if decayed else 0.0}
        for kind, _ in KINDS
        for decayed in (True, False)
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = kind_of(name)
            if rates.get(kind) is None:
                raise ValueError(f"rates={rates!r}: has no rate for {name}, whose kind is {kind!r}")
            group = groups[kind, decays(name, parameter)]
            group["lr"] = rates[kind]
            group["params"].append(parameter)
            group["names"].append(name)
    if not any(group["params"] for group in groups.values()):
        raise ValueError(f"model={type(model).__name__}: has no trainable parameter")
    return [group for group in groups.values() if group["params"]]


def run_steps(args: Any, rows: Any) -> int:
    """Optimizer steps of the run, as `Trainer` counts them."""
    if args.max_steps > 0:
        return args.max_steps
    batches = len(rows) / (args.per_device_train_batch_size * args.world_size)
    batches = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    return math.ceil(max(1, math.ceil(batches / args.gradient_accumulation_steps)) * args.num_train_epochs)


def try_optimizer(trainer: Trainer) -> None:
    """
    Build a run's optimizer and schedule for a single number, so that mistakes in them show before the run.

    Raises:
        ValueError: they cannot be made, an option changes nothing, or the schedule gives no valid rate at its first or
            last step, where a run would end without its model.
    """
    args, model = trainer.args, trainer.model
    try:
        kind, options = trainer.get_optimizer_cls_and_kwargs(args, model)
        if args.optim_args:
            without = copy.copy(args)
            without.optim_args = None
            if trainer.get_optimizer_cls_and_kwargs(without, model)[1] == options:
                raise ValueError("optim_args changes nothing of this optimizer")
        optimizer = kind([{"params": [nn.Parameter(torch.zeros(1))]}], **options)
        rows = trainer.train_dataset
        steps = 1 if rows is None else run_steps(args, rows)
        schedule = trainer.create_scheduler(num_training_steps=steps, optimizer=optimizer)
        for step in () if rows is None else (0, steps):
            for factor_at in getattr(schedule, "lr_lambdas", ()):
                if not 0 <= (factor := factor_at(step)) < math.inf:
                    raise ValueError(f"the schedule multiplies the rate by {factor} in step {step}")
    except (ArithmeticError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        names = ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")
        given = ", ".join(f"{name}={getattr(x, 'value', x)}" for name in names if (x := getattr(args, name)))
        raise ValueError(f"{given}: {error}") from error
    trainer.lr_scheduler = None
