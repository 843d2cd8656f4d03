"""What each kind of training minimises: one function per loss, the same whether a step is cut into batches or not.

Every objective is called as `objective(model, inputs, num_items, teacher)` and returns (loss, outputs). `inputs` are
the model's, with `labels`; the prediction at token t is scored if the label at t + 1 is not -100. The loss is the sum
over the scored tokens divided by `num_items`, the scored tokens of all batches that make one optimizer step, so the
losses of those batches add up to the mean.

Axis legend: B batch   T tokens   V vocabulary   E hidden size
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tnt_hf.recipes.packing import IGNORED


def is_scored(labels: Tensor) -> Tensor:
    """`[B, T - 1]` bool: whether the prediction at each token but the last is scored, of labels `[B, T]`."""
    return labels[:, 1:] != IGNORED


def _split(inputs: dict[str, Any], num_items: Tensor | int | None) -> tuple[dict, Tensor, Tensor | int]:
    """Inputs without labels, the mask [`is_scored`], and the count to divide by."""
    scored = is_scored(inputs["labels"])
    others = {name: x for name, x in inputs.items() if name != "labels"}
    return others, scored, scored.sum() if num_items is None else num_items


def next_token(model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None = None, teacher=None):
    """Cross-entropy of the next token in nats: `pretrain`, `stage2`, `long`, and `sft` by its labels."""
    others, scored, count = _split(inputs, num_items)
    outputs = model(**others, use_cache=False)
    predicted, targets = outputs.logits[:, :-1][scored], inputs["labels"][:, 1:][scored]
    return F.cross_entropy(predicted.float(), targets, reduction="sum") / count, outputs


def next_token_sums(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Of every row, `[B, 2]` float32: the sum of the next tokens' cross-entropies in nats, and how many are scored."""
    others, scored, _ = _split(inputs, None)
    logits = model(**others, use_cache=False).logits[:, :-1]
    targets = inputs["labels"][:, 1:]
    losses = [F.cross_entropy(x[s].float(), t[s], reduction="sum") for x, t, s in zip(logits, targets, scored)]
    return torch.stack([torch.stack(losses), scored.sum(1).to(losses[0])], dim=1)


def distillation(model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None, teacher: nn.Module):
    """KL(teacher || model) of the next token in nats, against a frozen teacher: `distill`."""
    others, scored, count = _split(inputs, num_items)
    outputs = model(**others, use_cache=False)
    with torch.no_grad():
        wanted = teacher(**others, use_cache=False).logits
    found, wanted = (F.log_softmax(x[:, :-1][scored].float(), -1) for x in (outputs.logits, wanted))
    return F.kl_div(found, wanted, log_target=True, reduction="sum") / count, outputs


def alignment(model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None, teacher: nn.Module):
    """
    Mean squared error, per layer, between the model's attention and memory (after o_proj) and the teacher's attention:
    `align`. Teacher forced: every layer is given what the teacher's layer was given, so no layer sees another's error.
    """
    others, scored, count = _split(inputs, num_items)
    with torch.no_grad(), _attention(teacher) as source:
        teacher(**others, use_cache=False, logits_to_keep=1)
    with _attention(model, forced=[entered for entered, _ in source]) as student:
        outputs = model(**others, use_cache=False, logits_to_keep=1)
    layers = with_memory(model)
    errors = [(student[i][1].float() - source[i][1].float())[:, :-1][scored].pow(2).mean(-1).sum() for i in layers]
    loss = torch.stack(errors).mean() / count
    if isinstance(model, FSDPModule):  # what it does in backward hangs on the gradient of the model's output
        loss = loss + 0 * outputs.logits.flatten()[0].float()
    return loss, outputs


def _attention_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "self_attn"]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention module of every layer, found inside what wraps a model (peft, DDP)."""
    return [model.get_submodule(name) for name in _attention_names(model)]


def with_memory(model: nn.Module) -> list[int]:
    """Layers whose attention has a memory: beside it (TNT) or in it (injected)."""
    names = {name for name, _ in model.named_modules()}
    places = [(f"{name}.memory", f"{name.removesuffix('self_attn')}memory") for name in _attention_names(model)]
    return [i for i, place in enumerate(places) if names & set(place)]


@contextmanager
def _attention(model: nn.Module, forced: list[Tensor] | None = None):
    """Yields a list that holds (input, output) `[B, T, E]` of every attention module once the model has run; with
    `forced`, each module is given these inputs instead of its own."""
    modules = attention_modules(model)
    seen: list[Any] = [None] * len(modules)

    def enter(i: int, args: tuple, kwargs: dict):
        entered = args[0] if args else kwargs["hidden_states"]
        if forced is not None:
            entered = forced[i].to(entered.dtype)
        seen[i] = (entered,)
        return ((entered, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": entered})

    hooks = []
    for i, module in enumerate(modules):
        before = lambda _, args, kwargs, i=i: enter(i, args, kwargs)  # noqa: E731
        after = lambda _, args, output, i=i: seen.__setitem__(i, (*seen[i], output[0]))  # noqa: E731
        # First of all hooks: an injected memory reads the module's input in one, too.
        hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        hooks.append(module.register_forward_hook(after))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


Objective = Callable[[nn.Module, dict[str, Any], Tensor | int | None, nn.Module | None], tuple[Tensor, Any]]
OBJECTIVES: dict[str, Objective] = {
    "pretrain": next_token,
    "stage2": next_token,
    "align": alignment,
    "distill": distillation,
    "sft": next_token,
    "long": next_token,
}
