"""The memory branch of a layer: from hidden states to the sum of all memories, and how it joins attention.

Axis legend
    B batch   T tokens of this call   Q = Hq * head_dim channels before o_proj   H memory heads   D memory head width
    n = Q / D memory query rows   C channels of q, k and v together

    q, k, v = projections of the layer's input -> causal convolution -> SiLU -> L2 norm      (v: L2 norm)
    m = norm(sum over memories of memory_chunkwise(q or q M, k, v))                           (TNT Eq. 15)

Except that memory_gate="mix" has no such norm, and keys of all pairs of channels ("quadratic") no SiLU.

Only valid tokens of one document meet: the convolution, the memory and its time skip padding and restart with every
packed document. This file travels with every pushed checkpoint.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .cache_name_tnt import with_cache_name
from .compiler_tnt import apart, is_exporting
from .configuration_tnt import TNTConfig
from .convolution_tnt import (
    TNTCausalConv,
    convolve,
    convolve_token,
    is_on_one_device,
    is_one_product,
    is_untouched,
)
from .features_tnt import pairs, quadratic
from .gate_tnt import TNTMemoryGate, TNTRMSNorm
from .kernels_choice_tnt import (
    choose,
    unsupported_features,
    unsupported_projection,
    unsupported_scan,
    unsupported_step,
    untrusted,
)
from .kernels_parts_tnt import INTERPRETED
from .native_step_tnt import NativeStep, native_parameters
from .network_tnt import Net, norms
from .precision_tnt import autocast_dtype, cast, full_precision, rounded, wide
from .projection_tnt import project_queries
from .state_tnt import LayerState, StateLayout
from .step_settings_tnt import StepSettings
from .step_tnt import Clock, project_step
from .tokens_tnt import memory_token, memory_tokens
from .unit_tnt import FIELD, TNTMemoryUnit


FEW_TOKENS = 16  # behind a state C takes one after the other; whole chunks are dozens of operations of torch


class Beside:
    """A layer's memory as its attention gets it: no module, which hooks on the attention would move like a tensor."""

    def __init__(self, memory: "TNTMemory"):
        self.memory, self.gate, self.shared = memory, memory.gate, memory.shared

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self.memory(*args, **kwargs)


class TNTMemory(nn.Module):
    """All memories of one layer over shared q, k, v."""

    def __init__(self, config: TNTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.shared = config.memory_projections == "shared"
        self.value_norm, self.head_dim = config.memory_value_norm, config.memory_head_dim
        # attributes of a config are slow to read, and these are fixed by the weights
        self.feature_map = config.memory_feature_map
        self.projection_norm = config.qk_projection_norm
        self.net = Net(config.memory_activation, config.memory_residual, config.rms_norm_eps)
        H, D = config.memory_num_heads, config.memory_head_dim
        self.channels = (config.num_attention_heads * config.head_dim, H * D, H * D)
        if not self.shared:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(config.hidden_size, width, bias=False) for width in self.channels
            )
        self.taps = max(config.memory_conv_kernel - 1, 0)  # earlier tokens a convolution sees
        if self.taps:
            self.q_conv, self.k_conv, self.v_conv = (TNTCausalConv(width, self.taps + 1) for width in self.channels)
        self.memories = nn.ModuleList([TNTMemoryUnit(config) for _ in config.memory_specs])
        # "mix" is published on the plain output, which a norm would change
        self.norm = None if config.memory_gate == "mix" else TNTRMSNorm(D, eps=config.rms_norm_eps)
        self.gate = TNTMemoryGate(config)
        self.native_step: NativeStep | None = None
        if config.variant != "mag":
            self.o_proj = nn.Linear(self.channels[0], config.hidden_size, bias=False)
        if config.variant == "mal":
            self.input_layernorm = TNTRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @with_cache_name
    def forward(
        self,
        hidden_states: Tensor,
        shared: tuple[Tensor, Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        layout: StateLayout | None = None,
        settings: StepSettings | None = None,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        output_surprise: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            hidden_states: `[B, T, hidden]`, the normed input of the layer.
            shared: the attention's q `[B, T, Q]`, k, v `[B, T, Hkv * head_dim]` before RoPE (normed where there is a
                `qk_norm`), with shared projections.
            layout: of the state, `StateLayout.of(config)` by default. settings: `StepSettings.of(config)` likewise.
            mask: `[B, T]` bool, `False` = absent. segment_ids: `[B, T]` int, a change starts a new document.

        Returns:
            m `[B, T, Q]` in the dtype of `hidden_states` and the surprise `[B, T]` or `None`.
        """
        layout = StateLayout.of(self.config) if layout is None else layout
        settings = StepSettings.of(self.config) if settings is None else settings
        dtype, keep = wide(hidden_states.dtype), cache is not None
        state = LayerState.read(cache, self.layer_idx, layout) if keep else None
        if shared is None:
            x = rounded(hidden_states)
            shared = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        convs = [self.q_conv, self.k_conv, self.v_conv] if self.taps else []
        T = hidden_states.shape[1]
        few = T == 1 or not torch.compiler.is_compiling() and T <= FEW_TOKENS  # in graphs it would be a guard on T
        if (
            few
            and segment_ids is None
            and self._steps_in_place(state, dtype, (hidden_states, *shared, mask), settings)
        ):
            found = self._step(hidden_states, shared, convs, layout, settings, state, mask, output_surprise)
            if found is not None:
                return found
        tail = None if state is None else state.conv
        given = (autocast_dtype(shared[0].device) if convs else None) or shared[0].dtype
        operands = given if given == torch.bfloat16 else dtype
        (q, k, v), conv = memory_tokens(
            convs, shared, self.taps, tail, mask, segment_ids,
            head_dim=self.head_dim,
            silu=self.feature_map == "silu",
            units=(True, True, self.value_norm),
            dtype=dtype,
            operands=self._operands_of_kernels(operands, dtype, layout, settings, shared[0].device),
        )  # fmt: skip
        with full_precision(hidden_states.device):
            if self.feature_map == "quadratic" and layout.intervals:
                q, k = quadratic(q), quadratic(k)  # M is over the products; else every memory makes its own
            o, new_state, surprise = self._remember(
                hidden_states, q, k, v, operands, layout, settings, state, keep, mask, segment_ids, output_surprise
            )
            o = o if self.norm is None else self.norm(o)
        if keep:
            new_state.conv = conv
            new_state.write(cache, self.layer_idx, layout)
            if self.feature_map == "quadratic":  # a compiled step can only take these ready-made
                pairs(self.head_dim, q.device, dtype)
        return o.flatten(-2).to(hidden_states.dtype), surprise

    def _operands_of_kernels(self, operands, dtype, layout, settings, device) -> torch.dtype | None:
        """What q, k and v are rounded to where Triton alone multiplies them; else `None`."""
        value = settings.implementation
        if value not in ("auto", "triton") or (value == "auto" and device.type != "cuda"):
            return None
        groups = self.channels[0] // self.channels[1]
        if self.feature_map == "quadratic" or unsupported_features(device, dtype, self.head_dim):
            return None
        if value == "auto" and untrusted(self.head_dim):
            return None
        if layout.intervals and unsupported_projection(device, dtype, self.head_dim, operands, groups):
            return None
        for spec, unit in zip(layout.specs, self.memories):
            momentum = unit.momentum_proj is not None
            if unsupported_scan(device, dtype, spec.read, list(unit.weights), operands, momentum, groups):
                return None
        return dtype if INTERPRETED else operands  # it is wrong for bfloat16

    def _steps_in_place(
        self,
        state: LayerState | None,
        dtype: torch.dtype,
        tensors: tuple[Tensor | None, ...],
        settings: StepSettings,
    ) -> bool:
        """Whether a few tokens, `tensors`, may overwrite `state`: it is there, and nobody else can notice."""
        if state is None or torch.is_grad_enabled() or settings.implementation == "naive":
            return False
        hooked = False
        for i in range(len(state.memories)):
            unit = self.memories._modules[str(i)]
            if not isinstance(unit, TNTMemoryUnit) or type(unit).forward is not TNTMemoryUnit.own_forward:
                return False  # something around it, or in its place, which is called for one token, too
            for module in (unit, unit._modules["weights"]):
                if not is_untouched(module):
                    return False
                hooked = hooked or "forward" in vars(module)
        if hooked and not is_on_one_device(self, tensors):
            return False  # what the hooks would move is not where the step needs it
        return torch.compiler.is_compiling() or state.is_writable(dtype)

    def _step(self, hidden_states, shared, convs, layout, settings, state, mask, output_surprise):
        """`forward` after `state`, which is overwritten, of one token; of more in C, or `None` where it cannot run."""
        (B, T), H, D = hidden_states.shape[:2], self.channels[1] // self.head_dim, self.head_dim
        value, dtype = settings.implementation, state.memories[0].weights[0].dtype
        native = native_parameters(self, FIELD, value, [hidden_states, *shared], dtype)
        # what C convolves, and the tail that it writes, has the state's dtype
        alike = native and all(x.dtype == dtype for x in (*shared, *([state.conv] if convs else [])))
        if T > 1 and not native:
            return None
        if convs and not (alike and all(is_one_product(f, shared[0]) for f in convs)):
            if T > 1:
                parts, tail = convolve(convs, shared, self.taps, state.conv, mask, None)
                x = torch.cat(parts, -1)
            else:
                x, tail = convolve_token(convs, shared, state.conv, mask)
            state.conv.copy_(tail)
            shared = [x]
        if native:
            whole = len(shared) == 1
            step = self.native_step  # another thread may put one of other rows there
            if step is None or not step.fits(layout, settings, (B, T), whole):
                step = self.native_step = NativeStep(self, layout, settings, (B, T), whole)
            x, tokens = cast(hidden_states, dtype), [cast(x, dtype) for x in shared]
            o, surprise = step(self, native, x, tokens, state, mask, output_surprise)
            return cast(o.flatten(-2), hidden_states.dtype), None if surprise is None else surprise.mean(2)
        here = None if mask is None else mask[:, 0]
        clock = Clock.of(state.time, here)
        with full_precision(hidden_states.device):
            q, k, v = memory_token(shared, self.channels, D, self.feature_map, self.value_norm)
            present = None
            if here is not None:
                present = here.repeat_interleave(H).view(-1, 1, 1)
            queries = {
                interval: project_step(
                    state.projections[interval], q, k, interval, self.projection_norm, present, clock
                )
                for interval in layout.intervals
            }
            o, surprises, x = None, [], hidden_states[:, 0]
            # a program is torch
            how = "chunk" if is_exporting() else value
            how = choose(FIELD, how, x.device, unsupported_step, q.dtype, state.memories[0].weights)
            options = settings.options
            bounded = how == "chunk" and options["grad_bound"] is not None
            size = norms(k, keepdim=True) if bounded else None
            units = self.memories._modules
            for i, (spec, memory) in enumerate(zip(layout.specs, state.memories)):
                query = q if spec.query_projection == "none" else queries[spec.projection_interval]
                given = x, query, k, v, spec, settings.rates[i], self.net, options, memory, present, clock, size, how
                read, error = units[str(i)].step(*given)
                o = read if o is None else o + read
                if output_surprise:
                    loss = 0.5 * error.square().sum(-1)
                    surprises.append((loss if present is None else loss * present[..., 0]).view(B, H).mean(1))
            state.time.add_(1 if here is None else here)
            o = o.view(B, 1, -1, D)
            o = o if self.norm is None else self.norm(o)
        surprise = torch.stack(surprises).mean(0)[:, None] if output_surprise else None
        return cast(o.flatten(-2), hidden_states.dtype), surprise

    def _remember(
        self, hidden_states, q, k, v, operands, layout, settings, state, keep, mask, segment_ids, output_surprise
    ):
        """Sum of all memories `[B, T, n, D]` (TNT Eq. 15), the new state and the mean surprise."""
        queries, projections = {}, {}
        how = "chunk"
        if layout.intervals:
            value = settings.implementation
            sizes = wide(q.dtype), q.shape[-1], operands, q.shape[2] // k.shape[2]
            how = choose(FIELD, value, q.device, unsupported_projection, *sizes)
        tokens = (q.to(operands), k.to(operands)) if how == "triton" else (q, k)
        for interval in layout.intervals:
            query, projections[interval] = apart(
                project_queries,
                *tokens,
                reset_interval=interval,
                implementation=how,
                normalize=self.projection_norm,
                unit_keys=k.shape[-1] == self.head_dim and tokens[1] is k,  # neither products nor rounded
                mask=mask,
                segment_ids=segment_ids,
                initial_state=None if state is None else (state.projections[interval], state.time),
                output_final_state=keep,
            )
            queries[interval] = query.to(q.dtype)  # operands are rounded, gates and states are not
        products = "quadratic" if self.feature_map == "quadratic" and not layout.intervals else "identity"
        outputs, states, surprises = [], [], []
        for i, (spec, unit) in enumerate(zip(layout.specs, self.memories)):
            o, memory_state, surprise = unit(
                hidden_states,
                q if spec.query_projection == "none" else queries[spec.projection_interval],
                k,
                v,
                spec,
                settings.rates[i],
                settings.implementation,
                operands,
                mask=mask,
                segment_ids=segment_ids,
                initial_state=None if state is None else state.memories[i],
                output_final_state=keep,
                output_surprise=output_surprise,
                feature_map=products,
                **settings.options,
            )
            outputs.append(o)
            states.append(memory_state)
            surprises.append(surprise)
        new_state = LayerState(None, states, projections, states[0].time) if keep else None
        total = sum(outputs[1:], outputs[0].to(wide(q.dtype)))  # what is added to it needs no copy
        return total, new_state, torch.stack(surprises).mean((0, -1)) if output_surprise else None
