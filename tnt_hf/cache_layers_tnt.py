"""The layers of a TNTCache: the library's hybrid cache layers with correct batch operations and padding.

Axis legend
    B batch   T tokens of this call

Travels with every pushed checkpoint.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from .compiler_tnt import is_exporting


class _Stateful:
    """Batch operations that the library defines for keys and values only, and those it defines but a memory cannot."""

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        """
        Raises:
            ValueError: `tokens_to_remove` is not 0.
        """
        if tokens_to_remove:
            raise ValueError(f"tokens_to_remove={tokens_to_remove}: a memory cannot forget tokens; none is removed.")

    def _map_states(self, function: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for j, state in states.items():
                states[j] = None if state is None else function(state)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_states(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_states(lambda x: x[indices, ...])


class _ValidWindow:
    """A window of valid tokens: `valid` `[B, T]` bool marks those among the new ones, padding leaves it first."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, valid: Tensor | None = None, **kwargs):
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        total, exporting = keys.shape[2], is_exporting()
        if valid is None and not exporting and self.sliding_window > 1:
            if total > 2 * self.sliding_window:  # the library's slice would keep the whole prompt in memory
                self.keys, self.values = self.keys.clone(), self.values.clone()
            return keys, values
        keep = torch.sym_min(self.sliding_window - 1, total)
        # a slice would tie a program to lengths on one side of the window
        last = torch.arange(total - keep, total, device=keys.device) if exporting else slice(total - keep, total)
        if valid is None:  # the library's layer drops nothing at a window of 1, and in its exporter
            self.keys, self.values = keys[:, :, last], values[:, :, last]
            return keys, values
        earlier = valid.new_ones(valid.shape[0], total - valid.shape[1])
        order = torch.argsort(torch.cat([earlier, valid], 1).int(), dim=1, stable=True)[:, last]
        self.keys, self.values = (
            x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values)
        )
        return keys, values


class TNTFullLayer(_Stateful, LinearAttentionAndFullAttentionLayer):
    """Memory state and the keys and values of full attention."""


class TNTSlidingLayer(_Stateful, _ValidWindow, LinearAttentionAndSlidingWindowAttentionLayer):
    """Memory state and the keys and values of a sliding window."""


class TNTWindowLayer(_ValidWindow, DynamicSlidingWindowLayer):
    """A sliding window without memory, which keeps nothing that could come back."""

    is_croppable = False
