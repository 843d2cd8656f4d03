"""One memory's parameters, W_init and the gates of theta, mu and alpha, and what it computes with them: many tokens at
once, or the next one in place.

Axis legend
    B batch   T tokens of this call   H memory heads   D memory head width   n memory query rows
    P = B H programs   G query heads per memory head   K key width

This file travels with every pushed checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .compiler_tnt import apart
from .configuration_tnt import MemorySpec, TNTConfig
from .gate_tnt import TNTGateLinear
from .kernels_choice_tnt import choose, unsupported_scan
from .memory_tnt import MemoryState, memory_chunkwise
from .native_build_tnt import runs_native
from .network_tnt import Net
from .precision_tnt import cast, wide
from .step_tnt import Clock, memory_step


FIELD = "memory_implementation"
DECAY_BIAS = -7.0  # alpha = sigmoid(decay_proj(x)) starts near 1e-3


# Each class below owns the parameters it initialises: for code that travels with a checkpoint the library does not
# call `_init_weights` on modules that hold none themselves.


class TNTInitialWeights(nn.ParameterList):
    """W_init of one memory: L tensors `[H, d_in, d_out]`. Called, so that hooks which fetch offloaded weights run."""

    __call__ = nn.Module.__call__  # a list of parameters refuses calls

    def forward(self) -> list[Tensor]:
        # FSDP2 frees what it gathered as soon as this returns
        return [w.clone() for w in self] if self._forward_hooks else list(self)


class TNTMemoryUnit(nn.Module):
    """The parameters of one memory: W_init and the token-dependent gates theta, mu, alpha; float32 at least."""

    def __init__(self, config: TNTConfig):
        super().__init__()
        H, D = config.memory_num_heads, config.memory_head_dim
        self.eps = config.rms_norm_eps
        self.network = {"activation": config.memory_activation, "residual": config.memory_residual}
        self.depth = len(config.memory_weight_shapes)
        self.weights = TNTInitialWeights([nn.Parameter(torch.empty(H, *s)) for s in config.memory_weight_shapes])
        self.lr_proj = TNTGateLinear(config.hidden_size, H, 0.0)
        self.momentum_proj = TNTGateLinear(config.hidden_size, H, 0.0) if config.memory_momentum else None
        self.decay_proj = TNTGateLinear(config.hidden_size, H, DECAY_BIAS) if config.memory_decay else None
        self.norm_weight = nn.Parameter(torch.empty(H, D)) if config.memory_layernorm else None
        self.norm_bias = nn.Parameter(torch.empty(H, D)) if config.memory_layernorm else None
        self.to(wide(torch.get_default_dtype()))  # which is the model's while it is made

    def forward(
        self,
        hidden_states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: MemorySpec,
        rate: float,
        implementation: str,
        operands: torch.dtype,
        **options: Any,
    ) -> tuple[Tensor, MemoryState | None, Tensor | None]:
        """
        Args:
            hidden_states: `[B, T, hidden]`.
            q: `[B, T, n, D]`, already projected by M where the spec asks for it. k, v: `[B, T, H, D]`.
            spec: chunk size, reset interval (tokens) and read of this memory. rate: the largest theta.
            implementation: the config's `memory_implementation`.
            operands: of Triton's products, bfloat16 where the layer's activations are; nothing else rounds.
            options: mask, segment_ids, initial_state, output_final_state, output_surprise, feature_map,
                decay_target and grad_bound of [`memory_chunkwise`].

        Returns:
            o `[B, T, n, D]`, the state, the surprise `[B, T, H]`; the latter two `None` if not asked for.
        """

        dtype = wide(q.dtype)
        lr, momentum, decay = self.gates(hidden_states, dtype)
        lr = rate * lr
        weights, tokens = self.weights(), (q, k, v)
        memory = dtype, spec.read, weights, operands, momentum is not None, q.shape[2] // k.shape[2]
        how = choose(FIELD, implementation, q.device, unsupported_scan, *memory)
        if how == "triton":
            tokens = (x.to(operands) for x in tokens)
        elif implementation == "native" or q.device.type == "cpu":
            if implementation == "native":
                runs_native(FIELD, implementation, weights, tokens)  # or raises, in the name of the field
            how = implementation  # what runs "chunk" on the CPU is decided there
        layernorm = None if self.norm_weight is None else (self.norm_weight, self.norm_bias, self.eps)
        o, *result = apart(
            memory_chunkwise,
            *tokens,
            lr,
            weights,
            momentum=momentum,
            decay=decay,
            chunk_size=spec.chunk_size,
            reset_interval=spec.reset_interval,
            read=spec.read,
            layernorm=layernorm,
            implementation=how,
            **self.network,
            **options,
        )
        return o, *result, *([] if options["output_surprise"] else [None])

    own_forward = forward  # what the steps of one token compute in its place

    def gates(self, hidden_states: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """theta over its largest value, mu and alpha of tokens `[..., hidden]`: `[..., H]` of `dtype`, or `None` for
        what it has not."""
        return tuple(
            None if f is None else torch.sigmoid(cast(f(cast(hidden_states, f.weight.dtype)), dtype))
            for f in (self.lr_proj, self.momentum_proj, self.decay_proj)
        )

    def initial(self) -> list[Tensor]:
        """W_init. A ParameterList is slow to walk, and what lies under it lacks what is parametrized."""
        parameters = self.weights._parameters
        return list(parameters.values()) if len(parameters) == self.depth else list(self.weights)

    def step(
        self,
        hidden_states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spec: MemorySpec,
        rate: float,
        net: Net,
        options: dict[str, Any],
        state: MemoryState,
        present: Tensor | None,
        clock: Clock,
        key_norm: Tensor | None,
        how: str,
    ) -> tuple[Tensor, Tensor]:
        """One token of every row in place, arguments as in `memory_step`; hidden_states `[B, hidden]`. how: "chunk" or
        "triton"."""
        affine = None if self.norm_weight is None else (self.norm_weight, self.norm_bias)
        options = {
            **options,
            "chunk_size": spec.chunk_size,
            "reset_interval": spec.reset_interval,
            "read": spec.read,
            "query_projection": "none",  # it is shared by all memories, see TNTMemory
            "normalize_projection": False,
            "layernorm": affine and [x.to(q.dtype)[:, None] for x in affine],
        }
        init, gates = self.initial(), self.gates(hidden_states, q.dtype)
        if how == "chunk":
            return memory_step(state, init, net, options, q, k, v, *gates, present, clock, rate, key_norm)
        from .kernels_decode_tnt import token_step

        rows = state.time.shape[0], -1
        tokens, gates = (x.unflatten(0, rows) for x in (q, k, v)), (rate * gates[0], *gates[1:])
        here = None if present is None else present.view(rows)[:, 0]
        return tuple(x.flatten(0, 1) for x in token_step(state, init, net, options, *tokens, *gates, here))
