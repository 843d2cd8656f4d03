"""The chunks of a scan: how many programs each has, and some of them in a row as a block.

Axis legend
    B batch   T tokens   H heads   C tokens per chunk   G query heads per memory head
    K, V widths of rows that are cut
    P programs: grid rows x heads, the batch of every matrix product   N chunks over all rows, ordered by step and
    then by row

Travels with every pushed checkpoint.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .network_tnt import Net


BLOCK_ELEMENTS = 1 << 17  # of a block's widest activation: few kernel launches, and a block stays in the cache
KEEP_RATIO = 1  # all states are kept if they take at most so many times what the tokens of a chunk keep anyway


class Plan(NamedTuple):
    """What a scan needs besides tensors. `counts` and `starts` are in programs (rows x heads)."""

    net: Net
    counts: list[int]
    starts: list[int]
    groups: int
    current: bool
    carried: bool  # step 0 takes its gradients at a carried W_xi
    full: Tensor | bool
    keep_state: bool
    keep_loss: bool
    bound: float | None  # of |g_i|: c_{t,i} shrinks by the excess
    # B, T, tokens of a shard and H of a dense grid whose q, k, v and o are `[B, T, heads, D]`, not `[N, C, D]`
    dense: tuple[int, int, int, int] | None = None
    quadratic: bool = False  # of q and k the network sees the products, which are made chunk by chunk
    graded: bool = True  # whether a gradient is taken: views of parameters ask for one even where none is
    slots: Tensor | None = None  # [N C] of a row of heads: the token there, of B T, where q, k, v and o are as above

    def rows(self, qk: Tensor) -> tuple[int, int]:
        """Queries C G and keys C of a chunk in qk `[P, C G + C, K]`."""
        C = qk.shape[1] // (self.groups + 1)
        return qk.shape[1] - C, C


class Block(NamedTuple):
    """Some chunks in a row. What does not touch the weights is done for all programs of a block at once."""

    steps: range
    here: slice  # of the programs' axis
    sizes: list[int]  # programs of each chunk
    spans: list[int]  # and with the unused ones of a dense grid behind them

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1 and self.sizes == self.spans

    def cut(self, x: Tensor | None) -> list[Tensor | None]:
        """[programs, ...] -> per chunk."""
        if x is None:
            return [None] * len(self.sizes)
        if self.sizes == self.spans and len(self.sizes) == 1:
            return [x]
        pieces = x.split_with_sizes(self.spans)
        return pieces if self.sizes == self.spans else [y[:n] for y, n in zip(pieces, self.sizes)]

    def cuts(self, tensors) -> list[tuple[Tensor | None, ...]]:
        """Several tensors -> per chunk, a tuple of their parts: views that are made once are cheap."""
        return list(zip(*map(self.cut, tensors))) if tensors else [()] * len(self.sizes)

    def blank(self, like: Tensor, *shape: int) -> Tensor:
        """[programs, *shape] to be written chunk by chunk, with zeros at unused programs."""
        return (like.new_empty if self.sizes == self.spans else like.new_zeros)(sum(self.spans), *shape)

    def stack(self, pieces: list[Tensor]) -> Tensor:
        """The inverse of `cut`, with zeros at unused programs."""
        if self.sizes != self.spans:
            pads = [m - n for n, m in zip(self.sizes, self.spans)]
            pieces = [F.pad(x, (0, 0) * (x.dim() - 1) + (0, m)) if m else x for x, m in zip(pieces, pads)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def spread(self, x: Tensor) -> Tensor:
        """Values of rows, for every chunk."""
        return self.stack([x[:n] for n in self.sizes])

    def fold(self, total: Tensor, x: Tensor) -> None:
        """total `[rows, ...]` += x `[programs, ...]`, the adjoint of `spread`."""
        if len(self.sizes) == 1:
            total[: self.sizes[0]] += x[: self.sizes[0]]
        elif self.even:
            total[: self.sizes[0]] += x.unflatten(0, (-1, self.sizes[0])).sum(0)
        else:
            for y, n in zip(self.cut(x), self.sizes):
                total[:n] += y

    def fold_product(self, total: Tensor, x: Tensor, y: Tensor) -> None:
        """total `[rows, K, V]` += x^T y of every chunk."""
        n = self.sizes[0]
        if self.even:  # one product with all rows of x and y
            x, y = (z.unflatten(0, (-1, n)).transpose(0, 1).flatten(1, 2) for z in (x, y))
            total[:n].baddbmm_(x.mT, y)
        else:
            for x_j, y_j, n in zip(self.cut(x), self.cut(y), self.sizes):
                total[:n].baddbmm_(x_j.mT, y_j)


def keeps_all(W: list[Tensor], C: int, momentum: bool) -> bool:
    """Whether a forward keeps the state before every chunk, small against what C tokens keep (`scan_tnt.Tape`)."""
    widths, floats = [w.shape[2] for w in W], sum(w[0].numel() for w in W) * (2 if momentum else 1)
    return floats <= KEEP_RATIO * C * (3 * sum(widths[:-1]) + 4 * widths[-1])  # k, v, y twice


def whole(plan: Plan, total: int) -> Block:
    """All chunks as one block, with the `total - ...` programs that a dense grid may not use at its end."""
    ends = [*plan.starts[1:], total]
    spans = [b - a for a, b in zip(plan.starts, ends)]
    return Block(range(len(plan.counts)), slice(0, total), plan.counts, spans)


def blocks(plan: Plan, length: int) -> list[Block]:
    """All chunks in order, `length` steps to a block."""
    steps, blocks = len(plan.counts), []
    for begin in range(0, steps, length):
        end = min(begin + length, steps)
        ends = [*plan.starts[begin + 1 : end], plan.starts[end - 1] + plan.counts[end - 1]]
        spans = [b - a for a, b in zip(plan.starts[begin:end], ends)]
        blocks.append(Block(range(begin, end), slice(plan.starts[begin], ends[-1]), plan.counts[begin:end], spans))
    return blocks
