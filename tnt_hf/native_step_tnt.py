"""A few tokens of all memories of a layer in C, in place: what takes `branch_tnt` dozens of operations of torch.

Axis legend
    B batch   T tokens of this call   H memory heads   G query heads per memory head   D head width
    n = H G query rows   L layers of the memory network   C channels of q, k and v together

`step_tnt.memory_step` and what `branch_tnt` calls around it are what tests hold it to. Travels with every pushed
checkpoint.
"""

import math
from array import array

import torch
from torch import Tensor, nn

from .convolution_tnt import is_plain
from .derivative_tnt import has_tangent, transformed
from .gate_tnt import TNTGateLinear, TNTRMSNorm
from .native_build_tnt import library, runs_native
from .precision_tnt import cast
from .state_tnt import LayerState, StateLayout
from .step_settings_tnt import StepSettings
from .unit_tnt import TNTMemoryUnit


WORK = 1 << 16  # weights that are worth another thread
GATES = ("lr_proj", "momentum_proj", "decay_proj")
LAYERS = 2 * len(GATES) + 2  # where W_init begins in `native_parameters`


def native_parameters(memory: nn.Module, field: str, value: str, tensors: list[Tensor], dtype: torch.dtype):
    """
    What C reads of `memory`, a `TNTMemory` whose state has `dtype`, if its next tokens are computed there: `tensors`,
    what it has made of them, and its parameters are on the CPU and plain, and nobody has put anything around its
    modules. Else `None`.

    Returns:
        Of each memory weight and bias of the gates of theta, mu and alpha, gain and bias of its LayerNorm, `None` for
        what it has not, and W_init.
    """
    if value not in ("auto", "native") or tensors[0].device.type != "cpu":
        return None
    if torch.compiler.is_compiling() or transformed() or has_tangent(tensors):
        return None
    if memory.norm is not None and not is_plain(memory.norm, TNTRMSNorm, *tensors):
        return None
    found = []
    for unit in memory.memories._modules.values():
        attributes, modules, own = vars(unit), unit._modules, unit._parameters  # a module is slow to ask for them
        if type(unit) is not TNTMemoryUnit or "gates" in attributes:
            return None
        # FSDP1 keeps what it has gathered apart from the parameters
        if attributes.get("norm_weight") is not None or attributes.get("norm_bias") is not None:
            return None
        each = []
        for name in GATES:
            gate = modules.get(name)
            if gate is None:
                each += None, None
            elif not is_plain(gate, TNTGateLinear, *tensors) or not gate._parameters.keys() >= {"weight", "bias"}:
                return None
            else:
                each += gate._parameters["weight"], gate._parameters["bias"]
        each += own.get("norm_weight"), own.get("norm_bias"), *unit.initial()
        for x in each:
            if x is not None and not (type(x) is nn.Parameter and x.dtype == dtype and x.is_cpu and x.is_contiguous()):
                return None
        found.append(each)
    return found if runs_native(field, value, unit.initial(), tensors) else None


class NativeStep:
    """The call of a layer's code. Built once: its numbers are fixed by the weights, the batch and the chunk sizes.

    Args:
        memory: the layer's `TNTMemory`. settings: of this call. rows: B and T. whole: q, k and v come as one tensor,
            convolved already.
    """

    def __init__(
        self, memory: nn.Module, layout: StateLayout, settings: StepSettings, rows: tuple[int, int], whole: bool
    ):
        self.rows, self.threads = rows, torch.get_num_threads()
        self.whole, self.settings = whole, settings
        self.built_for = layout, settings, rows, whole, self.threads
        D, (Q, K, V), units = memory.head_dim, memory.channels, list(memory.memories)
        init, net, intervals = units[0].initial(), memory.net, layout.intervals
        H, L = K // D, len(init)
        weights = math.prod(rows) * len(units) * sum(w.numel() for w in init)
        to_init, bounded = settings.decay_target == "init", settings.grad_bound is not None
        numbers = [*rows, H, Q // K, D, L, units[0].lr_proj.in_features, len(intervals), len(units)]
        numbers += [min(self.threads, weights // WORK + 1), 0 if whole else memory.taps]
        numbers += [memory.feature_map == "silu", memory.feature_map == "quadratic", memory.value_norm]
        numbers += [memory.projection_norm, net.activation == "gelu", net.residual, to_init, bounded]
        numbers += [Q + K + V] * 3 if whole else [Q, K, V]
        numbers += [init[0].shape[1], *(w.shape[2] for w in init), *(x or 0 for x in intervals)]
        for spec in layout.specs:
            which = -1 if spec.query_projection == "none" else intervals.index(spec.projection_interval)
            numbers += [spec.chunk_size, spec.reset_interval or 0, spec.read == "current", which]
        self.numbers = array("q", map(int, numbers))

    def fits(self, layout: StateLayout, settings: StepSettings, rows: tuple[int, int], whole: bool) -> bool:
        """Whether other tokens are the same call."""
        asked = layout, settings, rows, whole, torch.get_num_threads()
        return self.built_for == asked  # layouts by value: hooks that move inputs make a copy for every call

    def __call__(self, memory, parameters, x: Tensor, parts: list[Tensor], state: LayerState, present, surprise: bool):
        """
        Args:
            parameters: those of `native_parameters`. x: the layer's input `[B, T, hidden]`, for the gates. parts: q
                `[B, T, H G D]`, k and v `[B, T, H D]` as they are projected, or one tensor `[B, T, C]`. All of them in
                the dtype of `state`, which is overwritten, its time too. present: `[B, T]` bool, `None` = all.

        Returns:
            m `[B, T, n, D]`, and if `surprise` the mean inner loss `[B, T, H]` before the write; 0 where no token is.

        Raises:
            ValueError: x has not `rows`, or a tensor of `state` not the dtype and size that the code writes to.
            MemoryError: there was no room for a thread to work in.
        """
        if x.shape[:2] != self.rows:
            raise ValueError(f"x must have {self.rows} rows and tokens, got {tuple(x.shape[:2])}")
        x, parts = x.contiguous(), [y.contiguous() for y in parts]
        given = present if present is None else present.contiguous()
        B, D, (Q, K, V), M = len(x), memory.head_dim, memory.channels, list(state.projections.values())
        o, losses = x.new_empty(*self.rows, Q // D, D), x.new_empty(*self.rows, K // D) if surprise else None
        convs, size = [], x.element_size()
        if memory.taps and not self.whole:
            convs = [f.weight.contiguous() for f in (memory.q_conv, memory.k_conv, memory.v_conv)]
            _check([state.conv], x.dtype, B * (Q + K + V) * memory.taps)
        _check(M, x.dtype, B * K // D * parameters[0][LAYERS].shape[1] ** 2)
        _check([state.time], torch.int64, B)
        # what is made here lives until the call is over
        norm = None if memory.norm is None else cast(memory.norm.weight, x.dtype).contiguous()
        tensors = [*(convs or [None] * 3), state.conv if convs else None, state.time, given, norm, o, losses, *M]
        for each, own in zip(parameters, state.memories):
            tensors += each[:LAYERS]
            for layer in zip(each[LAYERS:], own.weights, own.chunk_weights, own.momentum or [None] * len(own.weights)):
                _check(layer[1:], x.dtype, B * layer[0].numel())
                tensors += layer
        first = parts[0].data_ptr()
        places = [first, first + Q * size, first + (Q + K) * size] if self.whole else [y.data_ptr() for y in parts]
        places = array("Q", [x.data_ptr(), *places, *(0 if y is None else y.data_ptr() for y in tensors)])
        scales = [
            memory.net.eps,
            self.settings.grad_bound or 0.0,
            0.0 if memory.norm is None else memory.norm.variance_epsilon,
        ]
        scales = array("d", [*scales, *self.settings.rates])
        if library(x.dtype).token(*(y.buffer_info()[0] for y in (self.numbers, places, scales))):
            raise MemoryError(f"no room for {self.threads} threads to decode {B} rows")
        return o, losses


def _check(tensors, dtype: torch.dtype, size: int) -> None:
    for x in tensors:
        if x is not None and (x.dtype != dtype or x.numel() != size):
            raise ValueError(f"state must hold {size} numbers of {dtype}, got {x.numel()} of {x.dtype}")
