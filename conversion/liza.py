"""LiZA: a linear operator on attention's own q, k and v, mixed in by a weight (TPTT's Memory-as-Gate).

Axis legend
    B batch   T tokens of this call   Hq query heads   H key/value heads   K head width   n writes per token

    O = w O_lin(phi(q), phi(k), v) + (1 - w) O_attn          before o_proj
"""

import math

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from tnt_hf.gate_tnt import TNTMixingWeight
from tnt_hf.precision_tnt import full_precision, wide

from .architectures import Heads
from .injected_cache import read_state, write_state
from .injection_config import LiZAConfig
from .linear_attention import feature_map, linear_attention


DECAY_START = math.log(0.999 / 0.001)  # a learned alpha starts at 0.999
DECAY_ROOT = 16  # a pooled alpha is the 16th root of a sigmoid near 1/2, or it would forget within a few tokens


class LiZAMemory(TNTMixingWeight):
    """
    The `memory` of an attention module: mixes the output of attention with that of a linear operator.

    Attributes:
        weight: w, a 0-dim buffer of float32 at least, saved with the model and set by schedules.
        state_slots: how many tensors it keeps in a cache layer: the operator's state and the number of tokens read.
    """

    is_memory_as_gate = True
    keys_after_rope = True
    state_slots = 2

    def __init__(self, config: LiZAConfig, heads: Heads, layer_idx: int):
        super().__init__()
        if not isinstance(config, LiZAConfig):
            raise ValueError(
                f"config={type(config).__name__}: must be a LiZAConfig; unlike TPTT's LiZAttention, this is put"
                " beside an attention module, by inject(model, config)."
            )
        self.config, self.layer_idx = config, layer_idx
        self.writes = config.num_writes if config.operator == "delta_product" else 1
        if self.writes > 1 and heads.head_dim % 2:
            raise ValueError(f"LiZAConfig.num_writes={self.writes}: needs an even head_dim, not {heads.head_dim}.")
        self.weight = nn.Buffer(torch.tensor(float(config.weight), dtype=torch.float32))
        if config.gate == "learned":
            # made without drawing from a generator that other threads draw from
            self.beta_proj = nn.utils.skip_init(nn.Linear, heads.hidden, heads.key_value * self.writes)
            nn.init.zeros_(self.beta_proj.weight)
            nn.init.zeros_(self.beta_proj.bias)
            if config.operator == "gated_delta_rule":
                self.decay_proj = nn.utils.skip_init(nn.Linear, heads.hidden, heads.key_value)
                nn.init.zeros_(self.decay_proj.weight)
                nn.init.constant_(self.decay_proj.bias, DECAY_START)

    def is_open(self) -> bool:
        """Whether it affects the output."""
        return bool(self.weight != 0)

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
            attn_output: `[B, T, Hq, K]`. query `[B, Hq, T, K]`, key and value `[B, H, T, K]` of this call's tokens.
            hidden_states: `[B, T, hidden]`, the attention module's input.
            mask: `[B, T]` bool, `False` = absent. segment_ids: `[B, T]` int, a change starts a new document.
            cache: holds the state, `None` to keep none.

        Returns:
            `[B, T, Hq, K]` in the dtype of `attn_output`, and `attn_output` itself at w = 0.
        """
        config = self.config
        with full_precision(query.device):
            dtype = query.dtype if config.implementation == "fla" else wide(query.dtype)  # its kernels want half
            q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key, value))
            if self.writes > 1:
                k, v = rotations(k, self.writes), rotations(v, self.writes)
            beta, decay = self._gates(hidden_states, k)
            o, state = linear_attention(
                feature_map(q, config.feature_map),
                feature_map(k, config.feature_map),
                v,
                rule=config.operator if self.writes > 1 or config.operator != "delta_product" else "delta_rule",
                beta=beta,
                decay=decay,
                chunk_size=config.chunk_size,
                mask=mask,
                segment_ids=segment_ids,
                initial_state=None if cache is None else read_state(cache, self.layer_idx),
                output_final_state=cache is not None,
                implementation=config.implementation,
                check_decay=False,  # a sigmoid; nan goes through, as it does in attention
            )
            if cache is not None:
                write_state(cache, self.layer_idx, state, q.shape[1] if mask is None else mask.sum(1))
            mixed = (self.weight * o + (1 - self.weight) * attn_output).to(attn_output.dtype)
            # Silent at w = 0 whatever the operator holds: 0 * nan is nan.
            return torch.where(self.weight == 0, attn_output, mixed)

    def _gates(self, hidden_states: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """beta `[B, T, H]`, `[B, T, H, n]` for n > 1, and alpha `[B, T, H]` or `None`, from k `[B, T, H, (n,) K]`."""
        pooled, forgets = torch.sigmoid(k.mean(-1)), self.config.operator == "gated_delta_rule"
        if self.config.gate == "pooled":
            return pooled, pooled ** (1 / DECAY_ROOT) if forgets else None

        def project(proj: nn.Linear) -> Tensor:
            return torch.sigmoid(proj(hidden_states.to(proj.weight.dtype)).to(k.dtype))

        return project(self.beta_proj).view(pooled.shape), project(self.decay_proj) if forgets else None

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.config.operator}, {self.config.feature_map}, gate={self.config.gate}"


LiZAttention = LiZAMemory


def rotations(x: Tensor, count: int) -> Tensor:
    """`x` `[..., K]` rotated by i pi / count in the channel pairs (j, j + K / 2), i < count: `[..., count, K]`."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], -1)
    angles = [math.pi * i / count for i in range(count)]
    return torch.stack([math.cos(angle) * x + math.sin(angle) * turned for angle in angles], -2)
