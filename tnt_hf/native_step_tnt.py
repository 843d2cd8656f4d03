"""One token of all memories of a layer in C, in place: what takes `branch_tnt` some sixty operations of torch.

Axis legend
    B batch   H memory heads   G query heads per memory head   D head width   n = H G query rows   L layers of the
    memory network   C channels of q, k and v together

`step_tnt.memory_step` and what `branch_tnt` calls around it are what tests hold it to. Travels with every pushed
checkpoint.
"""

from array import array

import torch
from torch import Tensor, nn

from .convolution_tnt import is_plain
from .derivative_tnt import transformed
from .gate_tnt import TNTGateLinear, TNTRMSNorm
from .native_build_tnt import library, runs_native
from .precision_tnt import cast
from .state_tnt import LayerState, StateLayout


WORK = 1 << 16  # weights that are worth another thread
GATES = ("lr_proj", "momentum_proj", "decay_proj")
LAYERS = 2 * len(GATES) + 2  # where W_init begins in `native_parameters`


def native_parameters(memory: nn.Module, field: str, value: str, tensors: list[Tensor], dtype: torch.dtype):
    """
    What C reads of `memory`, a `TNTMemory` whose state has `dtype`, if its next token is computed there: `tensors`,
    what it has made of the token, and its parameters are on the CPU and plain, and nobody has put anything around its
    modules. Else `None`.

    Returns:
        Of each memory weight and bias of the gates of theta, mu and alpha, gain and bias of its LayerNorm, `None` for
        what it has not, and W_init.
    """
    if value not in ("auto", "native") or tensors[0].device.type != "cpu":
        return None
    if (
        torch.compiler.is_compiling()
        or transformed()
        or not (memory.norm is None or is_plain(memory.norm, TNTRMSNorm))
    ):
        return None
    found = []
    for unit in memory.memories._modules.values():
        modules, own = unit._modules, unit._parameters  # what a module has is slow to ask it for
        each = []
        for name in GATES:
            gate = modules.get(name)
            if gate is None:
                each += None, None
            elif not is_plain(gate, TNTGateLinear):
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
        memory: the layer's `TNTMemory`. rows: B. whole: q, k and v come as one tensor, convolved already.
    """

    def __init__(self, memory: nn.Module, layout: StateLayout, rows: int, whole: bool):
        self.layout, self.key = layout, (rows, whole, torch.get_num_threads())
        D, (Q, K, V), units = memory.head_dim, memory.channels, list(memory.memories)
        init, net, intervals = units[0].initial(), memory.net, layout.intervals
        H, L = K // D, len(init)
        weights = rows * len(units) * sum(w.numel() for w in init)
        bound, to_init = memory.options["grad_bound"], memory.options["decay_target"] == "init"
        numbers = [rows, H, Q // K, D, L, units[0].lr_proj.in_features, len(intervals), len(units)]
        numbers += [min(self.key[2], weights // WORK + 1), 0 if whole else memory.taps]
        numbers += [memory.feature_map == "silu", memory.feature_map == "quadratic", memory.value_norm]
        numbers += [memory.projection_norm, net.activation == "gelu", net.residual, to_init, bound is not None]
        numbers += [Q + K + V] * 3 if whole else [Q, K, V]
        numbers += [init[0].shape[1], *(w.shape[2] for w in init), *(x or 0 for x in intervals)]
        for spec in layout.specs:
            which = -1 if spec.query_projection == "none" else intervals.index(spec.projection_interval)
            numbers += [spec.chunk_size, spec.reset_interval or 0, spec.read == "current", which]
        self.numbers = array("q", map(int, numbers))

    def fits(self, layout: StateLayout, rows: int, whole: bool) -> bool:
        return self.layout is layout and self.key == (rows, whole, torch.get_num_threads())

    def __call__(self, memory, parameters, x: Tensor, parts: list[Tensor], state: LayerState, present, surprise: bool):
        """
        Args:
            parameters: those of `native_parameters`. x: the layer's input `[B, hidden]`, for the gates. parts: q
                `[B, 1, H G D]`, k and v `[B, 1, H D]` as they are projected, or one tensor `[B, 1, C]`. All of them in
                the dtype of `state`, which is overwritten, its time too. present: `[B]` bool, `None` = all.

        Returns:
            m `[B, n, D]`, and if `surprise` the mean inner loss `[B, H]` before the write; 0 where no token is.

        Raises:
            MemoryError: there was no room for a thread to work in.
        """
        x, parts = x.contiguous(), [y.contiguous() for y in parts]
        given = present if present is None else present.contiguous()
        o = x.new_empty(len(x), memory.channels[0] // memory.head_dim, memory.head_dim)
        losses = x.new_empty(len(x), self.numbers[1]) if surprise else None
        if self.key[1]:
            first, (Q, K, _), size = parts[0].data_ptr(), memory.channels, x.element_size()
            places = [x.data_ptr(), first, first + Q * size, first + (Q + K) * size, 0, 0, 0, 0]
        else:
            convs = (
                [f.weight.contiguous() for f in (memory.q_conv, memory.k_conv, memory.v_conv)] if memory.taps else []
            )
            places = [y.data_ptr() for y in (x, *parts, *convs)]
            places += [state.conv.data_ptr()] if convs else [0, 0, 0, 0]
        norm = None if memory.norm is None else cast(memory.norm.weight, x.dtype)
        tensors = [state.time, given, norm, o, losses, *state.projections.values()]
        for each, own in zip(parameters, state.memories):
            tensors += each[:LAYERS]
            for layer in zip(each[LAYERS:], own.weights, own.chunk_weights, own.momentum or own.weights):
                tensors += layer if own.momentum else (*layer[:3], None)
        net, bound = memory.net, memory.options["grad_bound"]
        scales = [net.eps, bound or 0.0, 0.0 if memory.norm is None else memory.norm.variance_epsilon]
        scales += [unit.max_lr * factor for unit, factor in zip(memory.memories._modules.values(), memory.lr_factors)]
        scales, places = array("d", scales), array("Q", places + [0 if y is None else y.data_ptr() for y in tensors])
        if library(x.dtype).token(*(y.buffer_info()[0] for y in (self.numbers, places, scales))):
            raise MemoryError(f"no room for {self.numbers[8]} threads to decode {len(x)} rows")
        return o, losses
