"""One token of the memory's recurrence: as the papers print it (`token`), and in place for decoding (`memory_step`).

Axis legend
    B batch   H memory heads   G query heads per memory head   K key width   V value width   L layers of the network
    C tokens per chunk   P = B H programs, the batch of every matrix product

`token` returns new tensors, so autograd can follow it. `memory_step` overwrites the state, which is all that decoding
wants: nothing is allocated that stays, and addresses do not change (`torch.compile`, graph capture). Tests hold it to
`token`. Travels with every pushed checkpoint.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiler_tnt import fuses
from .network_tnt import (
    Net,
    apply_net,
    bounded,
    excess,
    inner_gradient,
    inner_offset,
    norms,
    product,
    smooth_unit_vectors,
)


@dataclass
class MemoryState:
    """What one memory knows after its last token. Size does not depend on the number of tokens seen. `torch.save` and
    `torch.load` keep it.

    Tensors are float32, or float64 for float64 inputs; K is the width of the feature map's keys.

    Attributes:
        weights: `L` tensors `[B, H, d_in, d_out]`, the current weights W_t.
        chunk_weights: `L` tensors of the same shapes, W_xi of the running chunk (the same tensors as `weights` at
            chunk size 1).
        momentum: `L` tensors of the same shapes, S_t, or `None` without momentum.
        projection: `[B, H, K, K]`, M_t = sum of k^T k / |k|^2 since the last reset, or `None` without query
            projection.
        time: `[B]` int64, memory time: valid tokens of the current document seen so far.
    """

    weights: list[Tensor]
    chunk_weights: list[Tensor]
    momentum: list[Tensor] | None
    projection: Tensor | None
    time: Tensor

    def detach(self) -> "MemoryState":
        """The same values without their graph, for truncated backpropagation through time."""
        weights, alike = [w.detach() for w in self.weights], self.chunk_weights is self.weights
        start = weights if alike else [w.detach() for w in self.chunk_weights]
        S = self.momentum and [s.detach() for s in self.momentum]
        M = self.projection if self.projection is None else self.projection.detach()
        return MemoryState(weights, start, S, M, self.time)


torch.serialization.add_safe_globals([MemoryState])  # tensors alone: `torch.load` reads it back as it does those


def token(state: MemoryState, init: list[Tensor], net: Net, options: dict, q, k, v, lr, momentum, decay, present):
    """One token of the recurrence for every row of a batch: the paper's equations in order.

    q `[B, H, G, K]`; k `[B, H, 1, K]`; v `[B, H, 1, V]`; lr, momentum, decay `[B, H]`; present `[B]` bool or `None`
    (all). Returns the read-out `[B, H, G, V]`, the new state and the inner loss before the write `[B, H]`.
    """
    weights, start, S, M, ln = (
        state.weights,
        state.chunk_weights,
        state.momentum,
        state.projection,
        options["layernorm"],
    )
    C, interval = options["chunk_size"], options["reset_interval"]

    def pick(rows: Tensor, new, old):  # per batch row: rows at their own memory time
        return [torch.where(rows.view(-1, *[1] * (o.dim() - 1)), n, o) for n, o in zip(new, old)]

    def happens(rows: Tensor) -> bool:  # skips idle work, but waits for no device, and no graph branches
        return torch.compiler.is_compiling() or not rows.is_cpu or bool(rows.any())

    reset = None if interval is None else state.time % interval == 0
    if reset is not None and present is not None:
        reset = reset & present
    if reset is not None and happens(reset):
        weights, start = pick(reset, init, weights), pick(reset, init, start)
        S = S and pick(reset, [torch.zeros_like(s) for s in S], S)
        M = M if M is None else pick(reset, [torch.zeros_like(M)], [M])[0]
    a, delta, error = inner_gradient(net, start, k, inner_offset(net, k, v, ln and ln[1]), ln and ln[0])
    if options["grad_bound"] is not None:
        lr = bounded(lr[..., None], a, delta, options["grad_bound"])[..., 0]
    theta = lr[..., None, None]
    step = [-(theta * x.transpose(-1, -2)) @ d for x, d in zip(a, delta)]  # -theta_t g_t
    if S is not None:
        step = [momentum[..., None, None] * s + g for s, g in zip(S, step)]  # S_t (Titans Eq. 14)
    if decay is None:
        new = [w + s for w, s in zip(weights, step)]  # W_t (Titans Eq. 13)
    else:
        alpha = decay[..., None, None]
        target = init if options["decay_target"] == "init" else [torch.zeros_like(w) for w in weights]
        new = [(1 - alpha) * w + alpha * w0 + s for w, w0, s in zip(weights, target, step)]

    query = q
    if M is not None:
        unit, oldM = smooth_unit_vectors(k), M
        if options["query_projection"] == "chunk":  # the sum of Eq. 7 as printed, from the chunk's first token
            oldM = M * (state.time % C != 0).view(-1, 1, 1, 1)
        newM = oldM + unit.transpose(-1, -2) @ unit
        query = q @ oldM + (q @ unit.transpose(-1, -2)) * unit  # q @ newM, with an exact direction behind a reset
        query = smooth_unit_vectors(query) if options["normalize_projection"] else query
        M = newM if present is None else pick(present, [newM], [M])[0]
    o = apply_net(net, new if options["read"] == "current" else start, query, ln)
    loss = 0.5 * (error * error).sum((-1, -2))

    time = state.time + 1
    if present is None:
        S = S and step
    else:
        S = S and pick(present, step, S)
        new = pick(present, new, weights)
        time = state.time + present
        o = o * present.view(-1, 1, 1, 1)
        loss = loss * present.view(-1, 1)
    if C == 1:
        start = new
    elif happens(ends := time % C == 0):  # the next token begins a chunk
        start = pick(ends, new, start)
    return o, MemoryState(new, start, S, M, time), loss


# -------------------------------------------------------------------------------------------- the same token, in place


class Clock(NamedTuple):
    """When a token comes, per row: on the host, so that eager decoding touches only rows at a boundary, or as tensors
    `[B]`, so that a compiled step is the same graph at every token.

    Attributes:
        time: memory time before the token. present: whether the row has a token, `None` = all.
    """

    time: list[int] | Tensor
    present: list[bool] | Tensor | None

    @classmethod
    def of(cls, time: Tensor, present: Tensor | None) -> "Clock":
        """The clock of `time` `[B]` int64 and `present` `[B]` bool; on the host unless a graph is being compiled or a
        device would have to be waited for."""
        if torch.compiler.is_compiling() or time.device.type != "cpu":
            return cls(time, present)
        return cls(time.tolist(), None if present is None else present.tolist())

    def resets(self, interval: int | None) -> "list[int] | slice | Tensor | None":
        """Rows whose present token is the first of its shard: an index, or `None` for none of them."""
        if interval is None:
            return None
        if isinstance(self.time, Tensor):
            first = _divides(interval, self.time)
            return first if self.present is None else first & self.present
        if self.present is None:
            return _index([t % interval == 0 for t in self.time])
        return _index([t % interval == 0 and here for t, here in zip(self.time, self.present)])

    def ends(self, chunk_size: int) -> "list[int] | slice | Tensor | None":
        """Rows that stand at the end of a chunk once the token is written: an index, or `None` for none of them."""
        if isinstance(self.time, Tensor):
            return _divides(chunk_size, self.time + (1 if self.present is None else self.present))
        if self.present is None:
            return _index([(t + 1) % chunk_size == 0 for t in self.time])
        return _index([(t + here) % chunk_size == 0 for t, here in zip(self.time, self.present)])


def _divides(n: int, time: Tensor) -> Tensor:
    """time % n == 0. A compiled step asks it for every few elements of a state, so it had better not divide."""
    return (time & (n - 1) if n & (n - 1) == 0 else time % n) == 0


def _index(rows: list[bool]) -> list[int] | slice | None:
    if all(rows):
        return slice(None)
    return [i for i, row in enumerate(rows) if row] or None


def overwrite(tensors: list[Tensor], rows: "list[int] | slice | Tensor", new: list[Tensor]) -> None:
    """`tensors[rows] = new[rows]` in place, for tensors `[B, ...]` and anything that broadcasts to them."""
    for x, y in zip(tensors, new):
        if isinstance(rows, Tensor):
            x.copy_(torch.where(rows.view(-1, *[1] * (x.dim() - 1)), y, x))
        else:
            x[rows] = y.to(x.dtype).expand_as(x)[rows]


def project_step(M: Tensor, q: Tensor, unit: Tensor, interval: int | None, normalize: bool, present, clock: Clock):
    """q_t M_t `[P, G, K]` for one token (see `project_queries`); M `[B, H, K, K]` becomes M_t.

    q `[P, G, K]`; unit `[P, 1, K]`: the key, of length 1; present `[P, 1, 1]` bool or `None` (all).
    interval: tokens between resets of M.
    """
    if (rows := clock.resets(interval)) is not None:
        overwrite([M], rows, [M.new_zeros(())])
    if present is not None:
        unit = torch.where(present, unit, 0.0)
    M = M.flatten(0, 1)
    # not q @ M_t: behind a reset that is (q . u) u, whose direction a rounded u^T u would blur
    newest = product(q, unit.mT) * unit
    out = newest + product(q, M) if fuses() else torch.baddbmm(newest, q, M)
    M.addcmul_(unit.mT, unit)
    return out.div_(norms(out, keepdim=True).clamp_min_(1e-12)) if normalize else out  # F.normalize in fewer calls


def memory_step(
    state: MemoryState,
    init: list[Tensor],
    net: Net,
    options: dict,
    q,
    k,
    v,
    lr,
    momentum,
    decay,
    present,
    clock: Clock,
    lr_scale: float = 1.0,
    key_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`token` in place: the tensors of `state`, contiguous and of one dtype, become those after the token.

    `state.time` stays: memories share it, so whoever calls them advances it.

    q `[P, G, K]`; k `[P, 1, K]`; v `[P, 1, V]`; lr, momentum, decay `[B, H]`; present `[P, 1, 1]` bool, `None` = all.
    state, init, net, options: those of `token`. clock: `Clock.of(state.time, ...)`. lr_scale: factor of lr.
    key_norm: |k| `[P, 1, 1]`, which memories share, if all tokens are present.
    Returns the read-out `[P, G, V]` and the error f(W_xi, k) - v `[P, 1, V]` before the write.
    """
    W, start, S, ln, C = (
        state.weights,
        state.chunk_weights,
        state.momentum,
        options["layernorm"],
        options["chunk_size"],
    )
    if (rows := clock.resets(options["reset_interval"])) is not None:
        overwrite(W, rows, init)
        if C > 1:
            overwrite(start, rows, init)
        if S is not None:
            overwrite(S, rows, [s.new_zeros(()) for s in S])
    # [B, H] -> [P, 1, 1]
    theta, mu, alpha = (None if x is None else x.reshape(-1, 1, 1) for x in (lr, momentum, decay))
    if present is not None:  # whatever an absent token holds: 0 * nan is nan
        q, k, v, theta = (torch.where(present, x, 0.0) for x in (q, k, v, theta))
        mu = None if mu is None else torch.where(present, mu, 1.0)
        alpha = None if alpha is None else torch.where(present, alpha, 0.0)

    B, at = W[0].shape[0], [w.flatten(0, 1) for w in start]
    if ln is not None:
        ln = [x.expand(B, *x.shape).flatten(0, 1) for x in ln]
    plain = len(at) == 1 and ln is None and not net.residual
    if plain and not fuses():  # what `inner_gradient` says, in one operation
        error = torch.baddbmm(v, k, at[0], beta=-1)
        a, delta = [k], [error]
    else:
        a, delta, error = inner_gradient(net, at, k, inner_offset(net, k, v, ln and ln[1]), ln and ln[0])
    if options["grad_bound"] is not None:
        of_k = norms(k, keepdim=True) if key_norm is None or present is not None else key_norm
        of_a, of_delta = ([norms(x, keepdim=True) for x in y] for y in (a[1:], delta))
        theta = theta / excess([of_k, *of_a], of_delta, options["grad_bound"])
    query = q
    if options["query_projection"] != "none":
        interval = C if options["query_projection"] == "chunk" else options["reset_interval"]
        unit, normalize = F.normalize(k, dim=-1), options["normalize_projection"]
        query = project_step(state.projection, q, unit, interval, normalize, present, clock)
    if options["read"] == "chunk_start":
        o = apply_net(net, at, query, ln)
    now = at if C == 1 else [w.flatten(0, 1) for w in W]
    if alpha is not None:
        for w, w0 in zip(now, init):
            if options["decay_target"] == "init":
                w.lerp_(w0.to(w.dtype).expand(B, *w0.shape).flatten(0, 1), alpha)
            else:
                w.mul_(1 - alpha)
    for i, (w, x, d) in enumerate(zip(now, a, delta)):  # W_t (Titans Eq. 13)
        if S is None:
            w.addcmul_(x.mT, theta * d, value=-lr_scale)
        else:
            s = S[i].flatten(0, 1).mul_(mu).addcmul_(x.mT, theta * d, value=-lr_scale)  # S_t (Titans Eq. 14)
            w.add_(s if present is None else s * present)
    if options["read"] == "current":
        o = apply_net(net, now, query, ln)
    if C > 1 and (rows := clock.ends(C)) is not None:  # the next token begins a chunk
        overwrite(start, rows, W)
    return o if present is None else o * present, error
