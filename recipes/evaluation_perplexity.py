"""Perplexity of documents alone: overall, by position, and with branches of the model switched off.

Every token of every document is predicted exactly once. A document longer than the context is cut into pieces that
are read alone, each with a fresh memory; a piece starts with the last token of the piece before, or with the begin
token. Position p is the number of tokens the model has read of the piece when it predicts.

Axis legend
    R rows (pieces)   B rows of a batch   T tokens of a row   V vocabulary   N predicted tokens   D documents
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tnt_hf.conversion.ablations import ablations


FIRST_BUCKET = 16  # positions of the first bucket; every further one reaches twice as far
LOGITS_BYTES = 2**29  # of a batch, where no batch size is asked for
MOST_ROWS = 8


@dataclass(frozen=True)
class Rows:
    """Pieces of documents: token ids `[T]` int64 each, and the document each comes from."""

    ids: list[Tensor]
    document: list[int]

    @classmethod
    def of(cls, documents: list[list[int]], context: int, begin: int | None) -> "Rows":
        """
        Args:
            documents: token ids of each. context: most tokens the model reads at once.
            begin: token put before each document, so that its first token is predicted too; `None`: it is not.

        Raises:
            ValueError: `context` is not positive, or no document has a token to predict.
        """
        if context < 1:
            raise ValueError(f"context={context!r}: must be at least 1 token")
        rows, owner = [], []
        for i, tokens in enumerate(documents):
            ids = torch.tensor(tokens if begin is None else [begin, *tokens], dtype=torch.long)
            for start in range(0, len(ids) - 1, context):
                rows.append(ids[start : start + context + 1])
                owner.append(i)
        if not rows:
            raise ValueError(f"data: {len(documents)} documents hold no token that could be predicted")
        return cls(rows, owner)

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(len(ids) - 1 for ids in self.ids)


def rows_per_batch(batch_size: int | None, context: int, vocab_size: int) -> int:
    """`batch_size`, or as many rows as keep a batch's float32 logits in `LOGITS_BYTES`, `MOST_ROWS` at most."""
    return batch_size or max(1, min(MOST_ROWS, LOGITS_BYTES // (4 * context * vocab_size)))


def rope_follows_length(config: Any) -> bool:
    """Whether RoPE turns keys by other angles in longer rows."""
    ropes = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]  # or by layer type
    return "dynamic" in kinds or "longrope" in kinds


def _batches(lengths: list[int], batch_size: int, growing: bool) -> Iterator[list[int]]:
    """Indices of rows, the longest first, so that what does not fit is found at once; `growing`: each length alone."""
    order = sorted(range(len(lengths)), key=lambda r: (lengths[r] if growing else -lengths[r], r))
    groups = [list(same) for _, same in groupby(order, key=lambda r: lengths[r])] if growing else [order]
    for group in groups:
        yield from (group[first : first + batch_size] for first in range(0, len(group), batch_size))


@torch.inference_mode()
def token_losses(
    model: nn.Module, rows: Rows, batch_size: int, tell: Callable[[int], Any] = lambda rows_done: None
) -> list[Tensor]:
    """
    Negative log-likelihood in nats of every predicted token: for each row `[T - 1]` float64, in the order of `rows`.

    Rows of like length share a batch, padded on the right: what is read from there on changes nothing before. Where
    the longest row decides RoPE's frequencies, only rows of one length do, and the shortest are read first, because a
    model keeps what has grown.

    Raises:
        ValueError: a probability that is not a number; names the document and the position.
    """
    device = next(model.parameters()).device
    losses: list[Tensor] = [None] * len(rows.ids)
    growing = rope_follows_length(model.config)
    if growing:
        model(input_ids=rows.ids[0][:1, None].to(device), use_cache=False)  # frequencies are those of short rows again
    for batch in _batches([len(ids) for ids in rows.ids], batch_size, growing):
        ids = nn.utils.rnn.pad_sequence([rows.ids[r] for r in batch], batch_first=True)
        logits = model(input_ids=ids[:, :-1].to(device), use_cache=False).logits
        for r, row in zip(batch, logits):
            row = row[: len(rows.ids[r]) - 1]
            row = row if row.dtype == torch.float64 else row.float()
            losses[r] = (
                F.cross_entropy(row, rows.ids[r][1:].to(device), reduction="none").cpu().double()
            )  # not every device has it
            if not bool(losses[r].isfinite().all()):
                position = int((~losses[r].isfinite()).nonzero()[0]) + 1
                raise ValueError(
                    f"logits are not finite: document {rows.document[r]}, position {position} of its piece; the model"
                    " cannot be evaluated"
                )
        tell(len(batch))
    return losses


# ------------------------------------------------------------------------------------------------------------- results


def mean_and_error(sums: Tensor, counts: Tensor) -> tuple[float, float | None]:
    """
    The token-weighted mean, and its standard error over documents (of a ratio of sums), `None` for one document.

    Args:
        sums, counts: per document `[D]` float64, of the values and how many there are.
    """
    used = counts > 0
    sums, counts = sums[used], counts[used]
    total, number = float(counts.sum()), len(counts)
    mean = float(sums.sum()) / total
    if number < 2:
        return mean, None
    spread = float(((sums - mean * counts) ** 2).sum()) * number / (number - 1)
    return mean, math.sqrt(spread) / total


def by_document(rows: Rows, losses: list[Tensor], first: int = 1, last: int | None = None) -> tuple[Tensor, Tensor]:
    """Sums and counts `[D]` float64 of the losses at positions `first` to `last`, both included."""
    sums = torch.zeros(max(rows.document) + 1, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    for owner, loss in zip(rows.document, losses):
        part = loss[first - 1 : last]
        sums[owner] += part.sum()
        counts[owner] += len(part)
    return sums, counts


def perplexity(sums: Tensor, counts: Tensor) -> dict[str, Any]:
    """
    `perplexity`, its `standard_error` over documents (`None` for one document) and `tokens`.

    Raises:
        ValueError: a mean loss that no float64 holds the exp of.
    """
    mean, error = mean_and_error(sums, counts)
    if mean > math.log(sys.float_info.max):
        raise ValueError(f"perplexity: the mean loss is {mean:,.0f} nats per token, too much to exponentiate")
    value = math.exp(mean)
    tokens = int(counts.sum())
    return {"perplexity": value, "standard_error": None if error is None else value * error, "tokens": tokens}


def buckets(longest: int, first_ends: int) -> list[tuple[int, int]]:
    """1 to `first_ends`, from there to twice that and so on, both ends included, the last one ending at `longest`."""
    found, first, last = [], 1, first_ends
    while first <= longest:
        found.append((first, min(last, longest)))
        first, last = last + 1, 2 * last
    return found


def perplexity_result(rows: Rows, losses: list[Tensor]) -> dict[str, Any]:
    """The section `perplexity` of evaluation.json, without what describes the data."""
    overall = perplexity(*by_document(rows, losses))
    longest = max(len(loss) for loss in losses)
    return {
        "tokens": overall["tokens"],
        "documents": len(set(rows.document)),
        "overall": overall["perplexity"],
        "standard_error": overall["standard_error"],
        "by_position": [
            {"from": first, "to": last, **perplexity(*by_document(rows, losses, first, last))}
            for first, last in buckets(longest, FIRST_BUCKET)
        ],
    }


# ----------------------------------------------------------------------------------------------------------- ablations


def ablation_result(
    model: nn.Module,
    rows: Rows,
    batch_size: int,
    tell: Callable[[int], Any] = lambda rows_done: None,
    known: list[Tensor] | None = None,
) -> dict[str, dict[str, Any]]:
    """
    The section `ablations` of evaluation.json: perplexity with every branch off in turn, and `nats`, how much the
    loss per token rises by that, with its standard error over the same documents.

    Args:
        known: losses of the whole model on `rows`, if they have been computed.

    Raises:
        ValueError: a model without memory.
    """
    found = ablations(model)
    if not found:
        raise ValueError("tasks: 'ablation' needs a model with memory, this one has none")
    whole = token_losses(model, rows, batch_size, tell) if known is None else known
    result = {"all branches": perplexity(*by_document(rows, whole))}
    for name, without in found.items():
        with without():
            losses = token_losses(model, rows, batch_size, tell)
        rise, error = mean_and_error(*by_document(rows, [a - b for a, b in zip(losses, whole)]))
        result[name] = {**perplexity(*by_document(rows, losses)), "nats": rise, "nats_standard_error": error}
    return result
