"""Synthetic multi-query associative recall, a function of a seed.

Axis legend: N samples   T tokens   P key-value pairs of a sample
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnt_hf.recipes.packing import IGNORED


if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall: pairs (key, value) are shown once, and later each key is asked for once.

    A sample is T/2 slots of two tokens. P of them show a pair, P later ones repeat the pair, and only the repeated
    value is scored; the rest is filler. The token ids are keys, then values, then `fillers` symbols.
    """

    keys: int = 64
    values: int = 64
    fillers: int = 16

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.keys + self.values + self.fillers

    @property
    def chance(self) -> float:
        """Accuracy of a model that knows that a value comes next, but not which."""
        return 1 / self.values

    def samples(self, count: int, length: int, pairs: int, seed: int) -> "dict[str, Tensor]":
        """`input_ids`, `labels` and `distance`, each `[N, T]` int64 with T = `length`.

        `labels` is the value where it is scored and -100 elsewhere (transformers shifts them). `distance` is, at the
        same places, how many tokens before the question's key the value was shown (the key is the last token the model
        sees before it answers), and 0 elsewhere.
        """
        import torch

        slots = length // 2
        if length % 2 or not 0 < 2 * pairs <= slots or pairs > self.keys:
            raise ValueError(
                f"pairs={pairs!r} needs an even length >= {4 * pairs} and {pairs} keys, got {length!r}, {self.keys}"
            )
        generator = torch.Generator().manual_seed(seed)
        rand = lambda n: torch.rand(count, n, generator=generator)  # noqa: E731
        shown, asked = rand(slots).argsort(1)[:, : 2 * pairs].view(count, pairs, 2).sort(-1).values.unbind(-1)
        keys = rand(self.keys).argsort(1)[:, :pairs]
        values = self.keys + torch.randint(self.values, (count, pairs), generator=generator)
        ids = torch.randint(self.keys + self.values, self.vocab_size, (count, length), generator=generator)
        for slot in (shown, asked):
            ids.scatter_(1, 2 * slot, keys).scatter_(1, 2 * slot + 1, values)
        labels = torch.full_like(ids, IGNORED).scatter_(1, 2 * asked + 1, values)
        distance = torch.zeros_like(ids).scatter_(1, 2 * asked + 1, 2 * asked - (2 * shown + 1))
        return {"input_ids": ids, "labels": labels, "distance": distance}
