"""What ends a training: numbers that are not finite, before they reach a weight; and a look at what does not learn."""

import logging
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn


logger = logging.getLogger(__name__)

SHOWN = 3  # tensors that the error names


def stop_if_not_finite(step: int, losses: list[Tensor], model: nn.Module, gradients_too: bool = True) -> None:
    """
    Look at every loss and gradient of an optimizer step; all processes stop if one of them must.

    Args:
        step: number of the optimizer step, for the message. losses: of its batches, 0-dim.
        gradients_too: not with float16, whose gradients overflow now and then: the scaler skips such a step.

    Raises:
        FloatingPointError: a number is not finite. It names the step and the first few tensors.
    """
    largest = torch.stack([loss.float().abs().max() for loss in losses])
    gradients = [_local(p.grad) for p in model.parameters() if gradients_too and p.grad is not None]
    if gradients := [x for x in gradients if x.numel()]:  # a shard may be empty
        norms = torch._foreach_norm(gradients, ord=math.inf)
        largest = torch.cat([largest, torch.stack([x.float().to(largest.device) for x in norms])])
    broken = (~torch.isfinite(largest)).any().float()
    if dist.is_initialized():
        dist.all_reduce(broken, dist.ReduceOp.MAX)  # or those that go on would wait for those that stopped
    if not broken:
        return
    named = list(model.named_parameters())
    found = {
        "the loss is": [str(loss.item()) for loss in losses if not _finite(loss)],
        "weights not finite:": [name for name, p in named if not _finite(p)],
        "gradients not finite:": [name for name, p in named if p.grad is not None and not _finite(p.grad)],
    }
    what = "; ".join(f"{kind} {_first(names)}" for kind, names in found.items() if names)
    raise FloatingPointError(
        f"step {step}: {what or 'another process found a number that is not finite'}. The optimizer did not take this"
        " step, and nothing was saved. Lower learning rates, a lower max_grad_norm or memory_grad_bound usually help."
    )


def warn_of_idle(model: nn.Module) -> None:
    """Name the trainable parameters of `model` that the step which is over gave no gradient. What the data of one step
    does not reach, another may, so this ends nothing."""
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        logger.warning("No gradient reached %s in the first step; what never gets one does not learn", _first(missing))


def _local(x: Tensor) -> Tensor:
    """This process's part of a sharded tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def _finite(x: Tensor) -> bool:
    return bool(_local(x.detach()).isfinite().all())


def _first(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
