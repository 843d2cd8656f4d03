"""Where each token of a batch sits in memory time: documents cut into shards, shards into chunks.

Axis legend
    B batch   T tokens   H heads   C tokens per chunk   rows: one shard of one document each   N chunks of all rows

A token's memory time is its index among the valid tokens of its own document, and boundaries are functions of memory
time only. Padding, packing, splits of a prompt and rows at different times are therefore one thing: map tokens onto
rows of chunks, compute, map back. Travels with every pushed checkpoint.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .derivative_tnt import transformed


# ------------------------------------------------------------- the grid: tokens -> [rows, chunks], by memory time only


class Grid(NamedTuple):
    """Where each token sits. Row = one shard of one document; rows are ordered by length, so step j runs the first
    `counts[j]` rows.

    Dense rows (no mask, no packing, fresh state) are reshapes; otherwise `tokens` `[N C]` and `slots` `[B T]` index
    both ways."""

    size: tuple[int, int, int]  # B, T and the slots of a chunk, C or fewer
    counts: list[int]
    starts: list[int]
    rows: int
    row_batch: Tensor | None  # [rows] batch row of each grid row
    carried: Tensor | None  # [rows] bool: the row goes on from the initial state
    full: Tensor | bool  # [rows] bool: the row's last chunk is complete (dense: one answer for all last rows)
    last_row: Tensor | slice  # [B] the row that holds each batch row's last token
    time: Tensor  # [B] memory time after the last token
    slots: Tensor | None
    tokens: Tensor | None
    padded: bool

    def dense(self, H: int) -> tuple[int, int, int, int]:
        """Where kernels find a dense grid's tokens in `[B, T, H]` rows: B, T, tokens of a shard and H. No copy brings
        them into the order of the programs, which is by shard, batch row and head."""
        (B, T, C), shards = self.size, self.rows // self.size[0]
        return B, T, len(self.counts) * C if shards > 1 else T, H

    def places(self) -> Tensor:
        """[N C] int64: the token of `[B T]` in each slot, B T where there is none."""
        if self.tokens is not None:
            return self.tokens
        (B, T, C), shards, steps = self.size, self.rows // self.size[0], len(self.counts)
        tokens = torch.arange(B * T, device=self.time.device).view(B, T)
        tokens = F.pad(tokens, (0, shards * steps * C - T), value=B * T)
        return tokens.view(B, shards, steps, C).permute(2, 1, 0, 3).flatten()

    def chunks(self, x: Tensor) -> Tensor:
        """A dense grid's [B, T, H, ...] -> [steps, shards, B, H, C, ...], which costs no copy; empty slots are 0."""
        (B, T, C), steps = self.size, len(self.counts)
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, self.rows // B * steps * C - T)) if self.padded else x
        x = x.reshape(B, self.rows // B, steps, C, *x.shape[2:])
        return x.permute(2, 1, 0, 4, 3, *range(5, x.dim()))

    def scatter(self, y: Tensor) -> Tensor:
        """A dense grid's [N, H, C, ...] -> [B, T, H, ...]."""
        B, T, C = self.size
        y = y.unflatten(0, (len(self.counts), self.rows // B, B))
        y = y.permute(2, 1, 0, 4, 3, *range(5, y.dim())).flatten(1, 3)
        return y[:, :T]

    def rowwise(self, init: Tensor, given: Tensor | None) -> Tensor:
        """State at the start of every row, [rows H, ...]: `init` `[H, ...]`, or the carried `given` `[B, H, ...]`."""
        x = init.expand(self.rows, *init.shape)
        if given is not None:
            x = torch.where(self.carried.view(-1, *[1] * init.dim()), given.to(init.dtype)[self.row_batch], x)
        return x.reshape(-1, *init.shape[1:])


def chunk_slots(tokens: int, C: int) -> int:
    """Slots of a chunk of C tokens whose rows hold at most `tokens`: powers of two, for which kernels are compiled."""
    return min(C, max(16, 1 << (tokens - 1).bit_length()))


def dense_grid(B: int, T: int, C: int, interval: int | None, device) -> Grid:
    """Fresh rows without mask or packing: shards of `interval` tokens (`None`: one) fold into the batch."""
    length = T if interval is None else min(T, interval)
    shards, steps = -(-T // length), -(-length // C)
    last = -(-(T - (shards - 1) * length) // C)  # steps of the last shard
    counts = [B * (shards if j < last else shards - 1) for j in range(steps)]
    starts = [j * B * shards for j in range(steps)]
    full = (T - (shards - 1) * length) % C == 0  # of the last shard: no other row's final state is read
    time = torch.full((B,), T, device=device)
    C = chunk_slots(length, C) if steps == 1 else C
    return Grid(
        (B, T, C),
        counts,
        starts,
        shards * B,
        None,
        None,
        full,
        slice(-B, None),
        time,
        None,
        None,
        shards * steps * C != T,
    )


def document_starts(
    ids: Tensor, present: Tensor | None, starts: Callable[[Tensor, Tensor], Tensor] = torch.ne
) -> Tensor:
    """`[B, T]` bool: present tokens where `starts(id here, id of the present token before)` holds."""
    present = torch.ones_like(ids, dtype=torch.bool) if present is None else present
    index = torch.where(present, torch.arange(ids.shape[1], device=ids.device), -1).cummax(1).values
    previous = F.pad(index[:, :-1], (1, 0), value=-1)
    return present & (previous >= 0) & starts(ids, ids.gather(1, previous.clamp_min(0)))


def alike_documents(present: Tensor, segment_ids: Tensor, C: int) -> tuple[Tensor, list[Tensor]]:
    """Packed documents sorted by length, so that short ones do not each take a chunk of C slots.

    Returns ids `[B, T]` that no two documents of a row share, and one mask `[B, T]` for each group whose rows take the
    same number of slots.
    """
    ids = document_starts(segment_ids, present).cumsum(1)
    lengths = torch.zeros_like(ids).scatter_add(1, ids, present.long())
    sizes = sorted({chunk_slots(n, C) for n in lengths.unique().tolist() if n})
    if len(sizes) < 2:
        return ids, [present]
    length, below = lengths.gather(1, ids).clamp_max(C), [0, *sizes[:-1]]
    return ids, [present & (length > low) & (length <= high) for low, high in zip(below, sizes)]


def ragged_grid(
    present: Tensor, segment_ids: Tensor | None, time0: Tensor, C: int, interval: int | None, align: bool = True
) -> Grid:
    """Masks, packed documents and rows at different memory times. Row b < B is where batch row b goes on; others
    start at W_init."""
    B, T = present.shape
    new_document = torch.zeros_like(present) if segment_ids is None else document_starts(segment_ids, present)
    count = present.cumsum(1) - present.long()
    document_start = torch.where(new_document, count, 0).cummax(1).values
    in_first = new_document.cumsum(1) == 0
    time = count - document_start + torch.where(in_first, time0[:, None], 0)
    new_row = new_document
    if interval is not None:
        new_row = new_document | (present & (time % interval == 0) & (count > 0))
    row = B - 1 + new_row.flatten().cumsum(0).view(B, T)
    row = torch.where(new_row.cumsum(1) == 0, torch.arange(B, device=row.device)[:, None], row)

    start = torch.cat([time0, time[new_row]])
    lead = start % C if align else torch.zeros_like(start)  # an unfinished chunk keeps its boundaries
    length = lead + torch.bincount(row[present], minlength=len(start))
    chunks = (-(-length // C)).clamp_min(1)
    order = torch.argsort(chunks, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    counts = (chunks > torch.arange(int(chunks.max()), device=chunks.device)[:, None]).sum(1)
    starts = counts.cumsum(0) - counts
    slot = time - start[row] + lead[row]
    N = int(counts.sum())
    full = length % C == 0
    if len(counts) == 1:  # nothing comes behind this chunk, so its slots need not reach to its end
        slot, C = slot - lead[row], chunk_slots(int((length - lead).max()), C)
    slots = (starts[torch.where(present, slot // C, 0)] + rank[row]) * C + slot % C
    slots = torch.where(present, slots, N * C)
    tokens = torch.full((N * C,), B * T, device=row.device)
    tokens[slots[present]] = torch.arange(B * T, device=row.device).view(B, T)[present]

    batch = torch.arange(B, device=row.device)
    row_batch = torch.cat([batch, batch[:, None].expand(B, T)[new_row]])
    carried = torch.arange(len(start), device=row.device) < B
    if interval is not None:
        carried = carried & ((start % interval != 0) | (length == lead))  # no token, no reset
    end_time = count[:, -1] + present[:, -1] - document_start[:, -1] + torch.where(in_first[:, -1], time0, 0)
    return Grid(
        (B, T, C), counts.tolist(), starts.tolist(), len(start), row_batch[order], carried[order], full[order],
        rank[row[:, -1]], end_time, slots.flatten(), tokens, True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ the layout: grids and the tokens


class Places(NamedTuple):
    """Which rows of a tensor another one has."""

    index: Tensor  # [m] of the rows to take
    empty: Tensor | None  # which of them are zeros instead

    @classmethod
    def of(cls, index: Tensor, rows: int) -> "Places":
        """index `[m]` of `rows` rows, or `rows` for zeros."""
        empty = (index == rows).nonzero().flatten()
        return cls(index.clamp_max(rows - 1), empty if len(empty) else None)

    def take(self, x: Tensor) -> Tensor:
        taken = x.index_select(0, self.index)
        return taken if self.empty is None else taken.index_fill_(0, self.empty, 0)


class _Take(torch.autograd.Function):
    """`there.take(x)` of rows that are taken once at most: the gradient takes them `back`, where autograd would fill
    with zeros and add."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.ways = there, back
        return there.take(x)

    @staticmethod
    def backward(ctx, d_taken):
        there, back = ctx.ways
        return _Take.apply(d_taken, back, there), None, None


class Layout(NamedTuple):
    """Where the tokens of a batch sit: in one grid, or in several whose rows are documents of like length."""

    heads: int  # H
    grids: list[Grid]
    there: Places | None = None  # of [B T H] tokens, for every slot of the grids' [N, H, C]; None: the grid is dense
    back: Places | None = None  # of all those slots, for every token

    def programs(self, x: Tensor) -> list[Tensor]:
        """[B, T, H, ...] -> [N H, C, ...] of every grid; empty slots are 0."""
        if self.there is None:
            return [self.grids[0].chunks(x).flatten(0, 3)]
        slots = _Take.apply(x.reshape(-1, *x.shape[3:]), self.there, self.back)
        parts = slots.split([len(grid.tokens) * self.heads for grid in self.grids])
        return [part.unflatten(0, (-1, grid.size[2])) for grid, part in zip(self.grids, parts)]

    def rows(self, *parts: Tensor) -> list[Tensor]:
        """[B, T, H, G, K] each -> [N H, C G of all parts, K]: a chunk's rows of the first part, then of the next."""
        if self.there is None:
            chunks = [self.grids[0].chunks(x).flatten(-3, -2) for x in parts]
            return [torch.cat(chunks, -2).flatten(0, -3)]
        programs = [[x.flatten(1, 2) for x in self.programs(part)] for part in parts]
        return [x[0] if len(x) == 1 else torch.cat(x, 1) for x in zip(*programs)]

    def tokens(self, programs: list[Tensor]) -> Tensor:
        """[N H, C, ...] of every grid -> [B, T, H, ...]; absent tokens get 0."""
        if self.there is None:
            return self.grids[0].scatter(programs[0].unflatten(0, (-1, self.heads)))
        slots = [x.flatten(0, 1) for x in programs]
        slots = slots[0] if len(slots) == 1 else torch.cat(slots)
        B, T, _ = self.grids[0].size
        return _Take.apply(slots, self.back, self.there).unflatten(0, (B, T, self.heads))


def layout_of(grids: list[Grid], H: int) -> Layout:
    """Of ragged grids that share no token."""
    (B, T, _), there, total = grids[0].size, [], sum(len(grid.tokens) for grid in grids) * H
    head = torch.arange(H, device=grids[0].tokens.device)
    back, start = grids[0].slots.new_full((B * T, H), total), 0
    for grid in grids:
        C, slots = grid.size[2], grid.slots[:, None]
        tokens = grid.tokens.view(-1, 1, C)
        there.append(torch.where(tokens < B * T, tokens * H + head[:, None], B * T * H).flatten())
        here = start + (slots // C * H + head) * C + slots % C
        back = torch.where(slots < len(grid.tokens), here, back)
        start += len(grid.tokens) * H
    return Layout(H, grids, Places.of(torch.cat(there), B * T * H), Places.of(back.flatten(), total))


def batch_layout(
    q: Tensor, H: int, mask: Tensor | None, segment_ids: Tensor | None, time: Tensor | None, C: int,
    interval: int | None, align: bool = True, alike: bool = False,
) -> Layout:  # fmt: skip
    """Of a batch like q `[B, T, ...]`, where any of the other tensors may be absent. alike: by `alike_documents`."""
    B, T, here = *q.shape[:2], q.device
    if time is not None:
        return _made_lately(mask, segment_ids, B, T, here, H, time, C, interval, align)
    return made_once(_alike if alike else _ragged, mask, segment_ids, B, T, here, H, None, C, interval, align)


def _ragged(mask, segment_ids, B, T, device, H, time, *sizes) -> Layout:
    time = torch.zeros(B, dtype=torch.long, device=device) if time is None else time
    return layout_of([ragged_grid(_present(mask, B, T, device), segment_ids, time, *sizes)], H)


def _alike(mask, segment_ids, B, T, device, H, _, C, *sizes) -> Layout:
    ids, groups = alike_documents(_present(mask, B, T, device), segment_ids, C)
    time = torch.zeros(B, dtype=torch.long, device=device)
    return layout_of([ragged_grid(group, ids, time, C, *sizes) for group in groups], H)


def _present(mask: Tensor | None, B: int, T: int, device: torch.device) -> Tensor:
    return torch.ones(B, T, dtype=torch.bool, device=device) if mask is None else mask


_LATELY: tuple[tuple, ...] = ()  # (what, the tensors, the layout), the newest first
KEPT, LARGEST = 16, 1 << 17  # so many of them, of so many slots times heads: 30 MB at most


def _made_lately(mask, segment_ids, B, T, device, H, time, *sizes) -> Layout:
    """`_ragged` of a part that goes on from a state. Every layer and memory has a time of its own, so tensors are
    compared by value: that waits for the device once, and what it saves waits a dozen times."""
    global _LATELY
    given = [x for x in (time, mask, segment_ids) if x is not None]
    if B * T * H > LARGEST or torch.compiler.is_compiling() or transformed():
        return _ragged(mask, segment_ids, B, T, device, H, time, *sizes)
    what = (B, T, device, H, *sizes, mask is None, segment_ids is None, torch.is_inference_mode_enabled())
    for other, tensors, layout in _LATELY:
        if other == what and all(torch.equal(a, b) for a, b in zip(tensors, given)):
            return layout
    layout, others = _ragged(mask, segment_ids, B, T, device, H, time, *sizes), [x for x in _LATELY if x[0] != what]
    if sum(len(grid.tokens) for grid in layout.grids) * H <= LARGEST:  # a row has whole chunks, of few tokens too
        _LATELY = ((what, [x.clone() for x in given], layout), *others[: KEPT - 1])
    return layout


# By document ids and a mask, as long as both live: {what: (versions, values, result)}.
_MADE = WeakTensorKeyDictionary()


def made_once(function: Callable, mask: Tensor | None, segment_ids: Tensor | None, *rest):
    """`function(mask, segment_ids, *rest)`, made once for all layers and memories that are given these very tensors,
    because it waits for the device a dozen times."""
    key, other = (mask, None) if segment_ids is None else (segment_ids, mask)
    inputs = [x for x in (key, other) if x is not None]
    if not inputs or torch.compiler.is_compiling() or transformed():
        return function(mask, segment_ids, *rest)
    if torch.is_inference_mode_enabled() or any(x.is_inference() for x in inputs):
        return function(mask, segment_ids, *rest)  # such tensors do not tell when they are overwritten
    made = _MADE.setdefault(key, WeakTensorKeyDictionary()).setdefault(inputs[-1], {})
    versions, on_cpu = [x._version for x in inputs], [x for x in inputs if x.is_cpu]
    found = made.get((function, rest))
    # What numpy writes into a tensor, its version does not tell.
    if found is None or found[0] != versions or not all(map(torch.equal, found[1], on_cpu)):
        result = function(mask, segment_ids, *rest)
        found = made[function, rest] = versions, [x.clone() for x in on_cpu], result
    return found[2]
