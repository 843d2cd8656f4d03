"""How memory joins attention: the gates of [`TNTConfig`]'s `memory_gate`, and the norm and linear layer they are of.

Axis legend
    B batch   T tokens   Q = Hq * head_dim channels before o_proj

This file travels with every pushed checkpoint.
"""

import torch
from torch import Tensor, nn

from .compiler_tnt import fused_linear
from .configuration_tnt import TNTConfig
from .derivative_tnt import transformed
from .precision_tnt import cast, full_precision, wide


# By `memory_gate`, the tensor of [`TNTMemoryGate`] that silences the memory where it is 0. "published" has none.
CLOSED_BY = {"add": "scale", "product": "proj.weight", "mix": "weight"}


class _RMSNorm(torch.autograd.Function):
    """weight * x / rms(x), with a backward of half the passes over x that autograd takes through its steps."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse, ctx.eps = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), eps
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        with full_precision(d_y.device):  # unlike the forward, it may be called inside one
            x, weight, inverse = ctx.saved_tensors
            if torch.is_grad_enabled():  # to be differentiated again
                inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
            product = d_y * x
            # one after the other: of a memory that diverges the third power would be 0
            along = (product @ weight)[..., None] * inverse / -x.shape[-1] * inverse * inverse
            d_x = (d_y * weight).mul_(inverse).addcmul_(x, along)
            d_weight = product.reshape(-1, len(weight)).mT @ inverse.reshape(-1) if ctx.needs_input_grad[1] else None
            return d_x, d_weight, None


class TNTRMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, dtype = self.weight, hidden_states.dtype  # a module's attributes are slow to read
        rounds_once = dtype.itemsize >= 4 and dtype == weight.dtype
        if rounds_once and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()):
            # what was made in inference mode cannot be saved for a backward
            graded = torch.is_grad_enabled()
            saved = graded and not hidden_states.is_inference()
            if hidden_states.is_cpu and saved:  # the same operations in one call, equal to the bit
                return _RMSNorm.apply(hidden_states, weight, self.variance_epsilon)
            # one kernel each way on a GPU; there without gradients, the sums of the base models
            if (hidden_states.is_cpu and not graded) or (hidden_states.is_cuda and saved):
                return torch.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)
        hidden_states = hidden_states.to(wide(dtype))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)

    own_forward = forward  # what C and Triton compute in its place, see `is_plain`

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class TNTGateLinear(nn.Linear):
    """A linear layer of a gate, which starts at `sigmoid(bias_start)` everywhere (no weight) or around it."""

    def __init__(
        self, in_features: int, out_features: int, bias_start: float | None = None, zero_weight: bool = False
    ):
        super().__init__(in_features, out_features, bias=bias_start is not None)
        self.bias_start, self.zero_weight = bias_start, zero_weight

    def forward(self, x: Tensor) -> Tensor:
        y = fused_linear(x, self)
        return super().forward(x) if y is None else y

    own_forward = forward  # what C and Triton compute in its place, see `is_plain`


class TNTMixingWeight(nn.Module):
    """Base of modules whose buffer `weight` a schedule sets: casting the model to half precision does not round it."""

    def _apply(self, fn, recurse=True):
        weight = self._buffers.get("weight")
        super()._apply(fn, recurse)
        if weight is not None and self.weight.dtype.itemsize < 4:
            self.weight = nn.Buffer(weight.to(self.weight.device))
        return self


class TNTMemoryGate(TNTMixingWeight):
    """How memory joins attention, on the `[B, T, Q]` layout before o_proj: `memory_gate` of [`TNTConfig`]."""

    def __init__(self, config: TNTConfig):
        super().__init__()
        self.kind, self.start, self.heads = config.memory_gate, config.memory_gate_init, config.num_attention_heads
        channels = config.num_attention_heads * config.head_dim
        dtype = wide(torch.get_default_dtype())  # which is the model's while it is made
        if self.kind == "add":
            self.scale = nn.Parameter(torch.empty(channels, dtype=dtype))
            self.proj = TNTGateLinear(config.hidden_size, config.num_attention_heads, zero_weight=True)
        elif self.kind == "product":
            self.proj = TNTGateLinear(channels, channels, zero_weight=True)
        elif self.kind == "published":
            self.norm = TNTRMSNorm(config.head_dim, eps=config.rms_norm_eps)
        else:
            # scheduled by the training recipe and saved with the model
            self.weight = nn.Buffer(torch.full((), float(self.start), dtype=dtype))
            self.is_memory_as_gate = True

    def is_closed(self) -> bool:
        """Whether memory has no say: all that is there in place of the tensor that silences it, adapters too, is 0."""
        closing = CLOSED_BY.get(self.kind, "").partition(".")[0]
        tensors = [*self.named_parameters(), *self.named_buffers()]
        return bool(closing) and not any(bool(x.any()) for name, x in tensors if name.partition(".")[0] == closing)

    def forward(self, attn: Tensor | None, memory: Tensor, hidden_states: Tensor) -> Tensor:
        """attn (`None`: memory alone, gate "add" only) and memory `[B, T, Q]`, hidden_states `[B, T, hidden]`."""
        if self.kind == "add":
            # half + half is twice as fast as 2 * half: a number becomes a tensor first
            half, scale = torch.sigmoid(self.proj(hidden_states)).unsqueeze(-1), self.scale
            gated = scale * (memory.unflatten(-1, (self.heads, -1)) * (half + half)).flatten(-2)
            if not torch.is_grad_enabled():
                # A closed channel must be silent whatever is behind it: 0 * nan is nan.
                gated = gated.masked_fill_(scale.logical_not(), 0.0)
            return cast(gated, memory.dtype) if attn is None else attn + cast(gated, attn.dtype)
        if self.kind == "product":
            return attn * (2 * torch.sigmoid(self.proj(memory)))
        if self.kind == "published":
            return self.norm(attn.unflatten(-1, (self.heads, -1))).flatten(-2) * torch.sigmoid(memory)
        mixed = ((1 - self.weight) * attn + self.weight * memory).to(attn.dtype)
        return torch.where(self.weight == 0, attn, mixed)  # silent whatever the memory holds, as above
