"""TNT's memory as the `memory` of another model's attention module.

Axis legend
    B batch   T tokens of this call   Hq query heads   H key/value heads   D head width
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.precision_tnt import wide

from .memory_tensors import WIDE, InitialValues


class InjectedTNTMemory(TNTMemory):
    """[`TNTMemory`] and its gate in one call. Its tensors are those under `model.layers.N.memory` of a TNT model."""

    @property
    def state_slots(self) -> int:
        """State tensors it keeps in a cache layer."""
        return self.config.number_of_conv_states

    @property
    def keys_after_rope(self) -> bool:
        return self.shared

    def is_open(self) -> bool:
        """Whether it has a say."""
        return not self.gate.is_closed()

    def forward(
        self,
        attn_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """
        Args:
            attn_output: `[B, T, Hq, D]`. query `[B, Hq, T, D]`, key and value `[B, H, T, D]` of this call's tokens:
                used by shared projections only.
            hidden_states: `[B, T, hidden]`, the attention module's input.
            mask: `[B, T]` bool, `False` = absent. segment_ids: `[B, T]` int, a change starts a new document.
            cache: holds the state, `None` to keep none.

        Returns:
            `[B, T, Hq, D]` in the dtype of `attn_output`.
        """
        shared = tuple(x.transpose(1, 2).flatten(-2) for x in (query, key, value)) if self.shared else None
        memory, _ = super().forward(hidden_states, shared, cache, mask=mask, segment_ids=segment_ids)
        return self.gate(attn_output.flatten(-2), memory, hidden_states).view(attn_output.shape)


def build_tnt(
    config: TNTConfig,
    layer_idx: int,
    qkv: tuple[Tensor, Tensor, Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> InjectedTNTMemory:
    """
    The memory of a layer as a conversion with the same seed starts it.

    Args:
        qkv: weights of q `[Hq * D, hidden]`, k and v `[H * D, hidden]`, copied where the memory has these heads;
            `None` with shared projections.
        dtype: of the projections; the memories' weights and rates are float32 at least.
    """
    with torch.device("meta"):  # draws nothing from a generator that other threads draw from
        memory = InjectedTNTMemory(config, layer_idx)
    memory.to_empty(device="cpu")
    values = InitialValues(config, memory, layer_idx, seed)
    copies = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), qkv or ()))
    for name, tensor in [*memory.named_parameters(), *memory.named_buffers()]:
        copied = name in copies and copies[name].shape == tensor.shape
        value = copies[name].detach().clone() if copied else values.make(name)
        tensor.data = value.to(device, wide(dtype) if name.startswith(WIDE) else dtype)
    return memory
