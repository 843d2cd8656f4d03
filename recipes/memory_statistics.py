"""What the memory does in a model as it is now: how open its gates are, how surprised it is, how far its weights move.

One row is read once more, without gradients, in `eval()`. Nothing of the training takes part, so its numbers are the
same to the bit with and without this.

Axis legend
    B batch (1 here)   T tokens   H memory heads   Q = Hq * head_dim channels before o_proj
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.conversion.ablations import gates
from tnt_hf.conversion.liza import LiZAMemory
from tnt_hf.gate_tnt import TNTMemoryGate
from tnt_hf.unit_tnt import TNTMemoryUnit


# By `memory_gate`, see `_gate_hook`.
GATE_LABELS = {
    "add": "factor on the memory (0: closed)",
    "mix": "weight of the memory (0: closed)",
    "product": "factor on attention (1: closed)",
    "published": "factor on attention (0.5: no memory)",
}


def host_of(model: nn.Module) -> nn.Module:
    """The model itself, or the one inside a `PeftModel`."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def first_row(inputs: dict[str, Any]) -> dict[str, Tensor] | None:
    """The valid tokens of the first row of a batch: `input_ids` `[1, T]` and, if given, `position_ids` `[1, T]`."""
    if not isinstance(ids := inputs.get("input_ids"), Tensor):
        return None
    mask = inputs.get("attention_mask")
    valid = slice(None) if mask is None or mask.ndim != 2 else mask[0].bool()
    names = [name for name in ("input_ids", "position_ids") if isinstance(inputs.get(name), Tensor)]
    row = {name: inputs[name].expand(len(ids), -1)[0][valid][None] for name in names}
    return row if row["input_ids"].shape[1] > 1 else None


def gate_label(model: nn.Module) -> str:
    """What `memory/gate` is the mean of, and its value where the memory adds nothing, in a few words."""
    kinds = [gate.kind for gate in gates(model)]
    return GATE_LABELS[kinds[0]] if kinds else GATE_LABELS["mix"]  # of LiZA


def all_closed(model: nn.Module) -> bool:
    """Whether no gate of a TNT model lets anything of its memory through, as where a conversion starts: the memories'
    gradients are 0."""
    found = gates(model)
    return bool(found) and all(gate.is_closed() for gate in found)


def memory_statistics(model: nn.Module, row: dict[str, Tensor]) -> dict[str, float]:
    """
    Read `row` ([`first_row`]) once and tell what the memory of every layer did.

    Returns:
        By name, where i is the layer:

        - `memory/gate/layer_i`: the factor on what memory adds. "add": mean of |a| 2 sigmoid(W_g x); "mix" and LiZA:
          w; both 0 when closed. "product": mean of 2 sigmoid(W_g norm(m)), 1 when closed; "published": mean of
          sigmoid(norm(m)), 0.5 without memory.
        - `memory/share/layer_i`: |memory part| / (|memory part| + |attention part|), root mean squares over channels
          and tokens of what is summed before o_proj; absent where there is no attention beside the memory.
        - `memory/surprise/layer_i`: mean of 1/2 |f(W_xi, k_t) - v_t|^2 before the write.
        - `memory/fast_weight_norm/layer_i`: |W_t| after the row's last token, mean over memories and heads.
        - `memory/fast_weight_change/layer_i`: |W_t - W_init| / |W_init| likewise, absent while W_init is zero.

        and the means over layers without `/layer_i`. Empty for a model without memory.
    """
    found: dict[str, dict[int, list[Tensor]]] = {}
    hooks = []

    def note(name: str, layer: int, value: Tensor) -> None:
        found.setdefault(name, {}).setdefault(layer, []).append(value.detach().float())

    for module in model.modules():
        if isinstance(module, LiZAMemory):
            hooks.append(module.register_forward_hook(_liza_hook(note, module.layer_idx)))
        elif isinstance(module, TNTMemory):
            for part in module.modules():
                if isinstance(part, TNTMemoryGate):
                    hooks.append(part.register_forward_hook(_gate_hook(note, module.layer_idx)))
                elif isinstance(part, TNTMemoryUnit):
                    hooks.append(part.register_forward_pre_hook(_ask_for_state, with_kwargs=True))
                    hooks.append(part.register_forward_hook(_unit_hook(note, module.layer_idx)))
    if not hooks:
        return {}
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            model(**row, use_cache=False, **few_logits(model))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return _named(found)


def few_logits(model: nn.Module) -> dict[str, int]:
    """The logits of long rows are by far the largest tensor of such a pass, and nobody reads them."""
    inner = getattr(host_of(model), "module", host_of(model))
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(inner).forward).parameters else {}


def _named(found: dict[str, dict[int, list[Tensor]]]) -> dict[str, float]:
    named = {}
    for name, layers in found.items():
        values = {layer: torch.stack(parts).mean().item() for layer, parts in sorted(layers.items())}
        named[f"memory/{name}"] = sum(values.values()) / len(values)
        named |= {f"memory/{name}/layer_{layer}": value for layer, value in values.items()}
    return named


def _share(memory: Tensor, attention: Tensor) -> Tensor:
    memory, attention = (x.float().pow(2).mean().sqrt() for x in (memory, attention))
    return memory / (memory + attention).clamp_min(torch.finfo(torch.float32).tiny)


def _gate_hook(note, layer: int):
    def hook(gate: TNTMemoryGate, args: tuple, output: Tensor) -> None:
        attn, memory, hidden_states = args
        if gate.kind == "add":
            opened = 2 * torch.sigmoid(gate.proj(hidden_states)).float()
            factor = (gate.scale.detach().float().abs().unflatten(0, (gate.heads, -1)).mean(-1) * opened).mean()
            parts = None if attn is None else (output - attn, attn)
        elif gate.kind == "product":
            factor, parts = (2 * torch.sigmoid(gate.proj(memory))).float().mean(), (output - attn, attn)
        elif gate.kind == "published":
            silent = gate.norm(attn.unflatten(-1, (gate.heads, -1))).flatten(-2) / 2
            factor, parts = torch.sigmoid(memory).float().mean(), (output - silent, silent)
        else:
            factor, parts = gate.weight, (gate.weight * memory, (1 - gate.weight) * attn)
        note("gate", layer, factor)
        if parts is not None:
            note("share", layer, _share(*parts))

    return hook


def _liza_hook(note, layer: int):
    def hook(memory: LiZAMemory, args: tuple, output: Tensor) -> None:
        attention = (1 - memory.weight) * args[0].float()
        note("gate", layer, memory.weight)
        note("share", layer, _share(output.float() - attention, attention))

    return hook


def _ask_for_state(unit: TNTMemoryUnit, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, {**kwargs, "output_final_state": True, "output_surprise": True}


def _unit_hook(note, layer: int):
    def norm(tensors) -> Tensor:  # [B, H]
        return torch.stack([x.flatten(2).float().pow(2).sum(-1) for x in tensors]).sum(0).sqrt()

    def hook(unit: TNTMemoryUnit, args: tuple, output: tuple) -> None:
        _, state, surprise = output
        start = [x.detach()[None] for x in unit.weights]
        note("surprise", layer, surprise.mean())
        note("fast_weight_norm", layer, norm(state.weights).mean())
        if bool((norm(start) > 0).all()):
            moved = norm([now - before for now, before in zip(state.weights, start)])
            note("fast_weight_change", layer, (moved / norm(start)).mean())

    return hook
