"""The check before every comparison: a contestant that computes something else is not timed, it stops the suite."""

from collections.abc import Iterable

from torch import Tensor


def largest_difference(got: Iterable[Tensor | None], want: Iterable[Tensor | None]) -> float:
    """The largest difference of any pair of tensors, relative to the largest entry of the wanted one; `None` is 0."""
    differences = []
    for x, y in zip(got, want, strict=True):
        if x is None and y is None:
            continue
        x, y = (0.0 * other if one is None else one for one, other in ((x, y), (y, x)))
        x, y = x.detach().double().cpu(), y.detach().double().cpu()
        difference, size = (x - y).abs().max().item(), y.abs().max().item()
        differences.append(difference / size if size else difference)
    return max(differences, key=lambda d: float("inf") if d != d else d)  # NaN is the worst


def require_agreement(
    name: str, got: Iterable[Tensor | None], want: Iterable[Tensor | None], tolerance: float
) -> float:
    """
    The largest difference, if it is within the tolerance.

    Raises:
        SystemExit: it is not, or is not a number; names the contestant.
    """
    found = largest_difference(got, want)
    if not found <= tolerance:
        raise SystemExit(f"{name} is wrong: largest relative difference {found:.1e}, allowed {tolerance:.0e}")
    return found
