"""A model with a branch switched off, or with its gates opened, in memory only and undone afterwards.

Axis legend
    B batch   T tokens   Q = Hq * head_dim channels before o_proj
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn

from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.gate_tnt import CLOSED_BY, TNTMemoryGate
from tnt_hf.unit_tnt import TNTMemoryUnit

from .liza import LiZAMemory


def gates(model: nn.Module) -> list[TNTMemoryGate]:
    """The gates of all memory layers, in order."""
    return [module for module in model.modules() if isinstance(module, TNTMemoryGate)]


@contextmanager
def opened(model: nn.Module, seed: int) -> Iterator[None]:
    """Every gate open by a random amount, channel by channel, so that attention and memory both count."""
    generator = torch.Generator().manual_seed(seed)
    before = []
    with torch.no_grad():
        for gate in gates(model):
            if gate.kind not in CLOSED_BY:
                continue
            value = attrgetter(CLOSED_BY[gate.kind])(gate)
            before.append((value, value.clone()))
            random = torch.rand(value.shape, generator=generator)
            width = value.shape[-1] ** -0.5 if gate.kind == "product" else 1.0
            # "mix" weighs: between a quarter and three quarters. The others: either sign.
            value.copy_(0.25 + 0.5 * random if gate.kind == "mix" else 2 * width * (2 * random - 1))
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in before:
                value.copy_(old)


@contextmanager
def _hooked(handles: list) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_memory(model: nn.Module):
    """The memory layers compute their attention alone, as if the memory said nothing or the gate were closed."""

    def attention_alone(gate: TNTMemoryGate, args: tuple, output: Tensor) -> Tensor:
        if args[0] is None:
            return torch.zeros_like(output)
        if gate.kind != "published":
            return args[0]
        nothing = torch.zeros_like(args[1])  # leaves attention its norm, and half of it
        return gate.forward(args[0], nothing, args[2])

    return _hooked([gate.register_forward_hook(attention_alone) for gate in gates(model)])


def without_attention(model: nn.Module):
    """The memory layers have their memory alone, as if a gate that mixes had the weight 1; layers without memory are
    left as they are."""

    def memory_alone(gate: TNTMemoryGate, args: tuple, output: Tensor) -> Tensor:
        attention, memory, *rest = args
        if gate.kind == "mix":
            return memory.to(output.dtype)
        return gate.forward(None if attention is None else torch.zeros_like(attention), memory, *rest)

    return _hooked([gate.register_forward_hook(memory_alone) for gate in gates(model)])


def without_one_memory(model: nn.Module, index: int):
    """In every layer, memory `index` of `config.memory_specs` reads nothing; the others stay."""

    def silent(_, __, output: tuple) -> tuple:
        return (torch.zeros_like(output[0]), *output[1:])

    units = [m for name, m in model.named_modules() if isinstance(m, TNTMemoryUnit) and name.endswith(f".{index}")]
    return _hooked([unit.register_forward_hook(silent) for unit in units])


@contextmanager
def _mixed(model: nn.Module, weight: float) -> Iterator[None]:
    """Every LiZA layer with its mixing weight at `weight`: 0 is attention alone, 1 the linear operator alone."""
    before = [(module, module.weight.clone()) for module in model.modules() if isinstance(module, LiZAMemory)]
    for module, _ in before:
        module.weight.fill_(weight)
    try:
        yield
    finally:
        for module, old in before:
            module.weight.copy_(old)


def ablations(model: nn.Module) -> dict[str, Callable]:
    """Every branch that can be switched off, as a context manager by its name; empty for a model without memory."""
    if any(isinstance(module, LiZAMemory) for module in model.modules()):
        return {"memory off": lambda: _mixed(model, 0), "attention off": lambda: _mixed(model, 1)}
    memory = next((module for module in model.modules() if isinstance(module, TNTMemory)), None)
    if memory is None:
        return {}
    found = {"memory off": lambda: without_memory(model)}
    if memory.config.variant == "mag":
        found["attention off"] = lambda: without_attention(model)
    specs = memory.config.memory_specs
    for i, spec in enumerate(specs if len(specs) > 1 else []):
        size = "1 token" if spec.chunk_size == 1 else f"{spec.chunk_size} tokens"
        name = f"{spec.name} memory of {size} off"
        found[f"{name} ({i})" if name in found else name] = lambda i=i: without_one_memory(model, i)
    return found
