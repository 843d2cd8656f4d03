"""How far two sets of logits are from each other, and what a sequence of calls of one model gives.

Axis legend
    B batch   T tokens   V vocabulary   N rows compared, one per valid token
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tnt_hf.cache_name_tnt import CACHE_NAME

from .shards import ALIGNMENT


ROWS = 64  # rows of logits held in float64 at once
# Largest distance of a token's logits, in standard deviations of all logits, that rounding explains where two ways of
# computing one thing add up in another order. About 200 times what a correct model of random weights shows in float32
# and 2 to 10 times in half precision. Rounding grows with depth: a source that shows more raises it, see `rounding`.
ROUNDING = {torch.float64: 1e-8, torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# A lost state or a leak moves logits by 0.3 to 2; nothing beyond this is passed as rounding.
MOST_ROUNDING = 0.25


@dataclass
class Difference:
    """Logits `got` against `want`.

    Attributes:
        bitwise: equal in every bit. finite: no infinity or NaN in `got`.
        max_abs: largest |got - want|. worst_token: largest rms over V of one token's difference, and `rms` the rms of
            all of it, both in standard deviations of `want`.
        kl: mean of KL(want || got) over tokens, in nats. top1: share of tokens whose best logit is the same one.
        tie: largest lead, in standard deviations, that `want`'s best logit has over the one `got` prefers.
    """

    bitwise: bool
    finite: bool
    max_abs: float
    rms: float
    worst_token: float
    kl: float
    top1: float
    tie: float

    def within(self, tolerance: float) -> bool:
        """Whether no token is further than `tolerance` standard deviations, nor its choice beyond a tie."""
        return self.finite and self.worst_token <= tolerance and self.tie <= 4 * tolerance

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return asdict(self)


def difference(got: Tensor, want: Tensor) -> Difference:
    """
    Args:
        got, want: `[..., V]` of one shape.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"got has shape {tuple(got.shape)}, want {tuple(want.shape)}.")
    got, want = got.flatten(0, -2), want.flatten(0, -2)
    total = squares = moved = kl = 0.0
    largest = worst = tie = 0.0
    agree, finite = 0, True
    for a, b in zip(got.split(ROWS), want.split(ROWS)):
        a, b = a.double(), b.double()
        finite = finite and bool(a.isfinite().all())
        delta = (a - b).square()
        total, squares, moved = total + float(b.sum()), squares + float(b.square().sum()), moved + float(delta.sum())
        largest = _larger(largest, float(delta.max().sqrt()))
        worst = _larger(worst, float(delta.mean(-1).max()))
        log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
        kl += float((log_b.exp() * (log_b - log_a)).sum())
        chosen, best = a.argmax(-1), b.argmax(-1)
        agree += int((chosen == best).sum())
        lead = b.gather(-1, best[:, None]) - b.gather(-1, chosen[:, None])
        tie = _larger(tie, float(lead.max()))
    count, rows = want.numel(), len(want)
    std = math.sqrt(max(squares / count - (total / count) ** 2, 0.0)) or 1.0
    return Difference(
        bitwise=got.dtype == want.dtype and torch.equal(got, want),
        finite=finite,
        max_abs=largest,
        rms=math.sqrt(moved / count) / std,
        worst_token=math.sqrt(worst) / std,
        kl=max(kl / rows, 0.0) if kl == kl else kl,
        top1=agree / rows,
        tie=tie / std,
    )


def _larger(a: float, b: float) -> float:
    """The maximum, and NaN once there was one (`max` loses it)."""
    return b if b > a or b != b else a


def next_token_loss(logits: Tensor, ids: Tensor) -> float:
    """Mean cross entropy in nats of logits `[1, T, V]` for the tokens that follow in ids `[1, T]`."""
    total = 0.0
    for a, target in zip(logits[0, :-1].split(ROWS), ids[0, 1:].split(ROWS)):
        total += float(F.cross_entropy(a.double(), target, reduction="sum"))
    return total / (ids.shape[1] - 1)


def addresses(model: nn.Module) -> dict[str, int]:
    """Where each parameter begins, in bytes behind a multiple of `ALIGNMENT`; those of mapped files lie as in them."""
    return {name: p.data_ptr() % ALIGNMENT for name, p in model.named_parameters()}


@torch.no_grad()
def move_to(model: nn.Module, wanted: dict[str, int]) -> None:
    """Copies the parameters whose [`addresses`] are not the `wanted` ones to memory where they are. Shards that were
    linked or copied have them; those of another size need not, and then some BLAS round their products differently."""
    found = addresses(model)
    for name, p in model.named_parameters():
        if found[name] != wanted.get(name, found[name]) and wanted[name] % p.element_size() == 0:
            room = torch.empty(p.nbytes + 2 * ALIGNMENT, dtype=torch.uint8, device=p.device)
            first = (wanted[name] - room.data_ptr()) % ALIGNMENT
            p.data = room[first : first + p.nbytes].view(p.dtype).view(p.shape).copy_(p)


def forward(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits `[B, T, V]` of one call without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def in_pieces(model: nn.Module, ids: Tensor, pieces: list[int]) -> tuple[Tensor, Any]:
    """Logits `[B, T, V]` of consecutive calls with a cache, `pieces` tokens each, and the cache."""
    logits, cache = [], None
    for part in ids.split(pieces, 1):
        with torch.no_grad():
            out = model(input_ids=part, use_cache=True, **{CACHE_NAME: cache})
        cache = getattr(out, CACHE_NAME)
        logits.append(out.logits)
    return torch.cat(logits, 1), cache


def padded(rows: list[Tensor], length: int, side: str) -> tuple[Tensor, Tensor]:
    """Rows `[n]` of ids padded with token 0 on the `side` "left" or "right": ids and mask `[B, length]`."""
    ids = rows[0].new_zeros(len(rows), length)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


def observe(
    model: nn.Module, text: Tensor, noise: Tensor, n: int, progress: Callable[[str], None]
) -> dict[str, Tensor]:
    """
    What a conversion must not change, from the source and from the result alike.

    Args:
        text, noise: ids `[1, T]`. n: tokens of the short inputs, which no window reaches.

    Returns:
        Logits `[N, V]` in the model's dtype: of `"text"` and `"random"` whole, and of their first tokens `"short"`,
        `"left padding"`, `"right padding"` (valid tokens) and `"cached"` (token by token after half of them).
    """
    progress("forward")
    found = {"text": forward(model, text)[0], "random": forward(model, noise)[0]}
    found["short"] = forward(model, text[:, :n])[0]
    progress("padding, cache")
    rows = [text[0, : max(1, n - 3)], noise[0, : max(1, n // 2)]]
    for side in ("left", "right"):
        ids, mask = padded(rows, len(rows[0]) + 2, side)
        found[f"{side} padding"] = forward(model, ids, mask)[mask.bool()]
    # One less: in a source of two windows, the token that fills one gets a mask there, and another order of additions.
    n = max(1, min(n - 1, 32))
    half = n // 2
    found["cached"] = in_pieces(model, text[:, :n], [*[half] * (half > 0), *[1] * (n - half)])[0][0]
    return found


def rounding(found: dict[str, Tensor], dtype: torch.dtype, padded_rows: float) -> float:
    """
    The tolerance for a result: four times what its source shows between calls that compute the same in other shapes,
    and at least `ROUNDING` of its dtype. `found` is what [`observe`] gives for the source, `padded_rows` how far its
    longer padded rows are from the same rows alone.
    """
    short, cached, padding = found["short"], found["cached"], found["left padding"]
    n = min(len(short), len(cached))
    first = max(1, len(short) - 3)
    shown = [difference(cached[:n], short[:n]).worst_token, difference(padding[:first], short[:first]).worst_token]
    return min(MOST_ROUNDING, max(ROUNDING[dtype], *(4 * x for x in [*shown, padded_rows])))


def perplexity_of(loss: float) -> float:
    """exp(loss), infinite where float64 ends; of nan it is nan."""
    return math.inf if loss >= 700 else math.exp(loss)
