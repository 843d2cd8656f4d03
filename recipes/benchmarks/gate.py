"""The check before every comparison: a contestant that computes something else is not timed, it stops the suite."""

from collections.abc import Callable, Iterable

from torch import Tensor


def largest_distance(got: list[Tensor | None], want: list[Tensor | None], least: float) -> float:
    """The largest distance of any pair of tensors, relative to the norm of the wanted one, but at least to `least` of
    the largest norm: what nearly cancels is rounding. `None` is 0."""
    floor = least * max(x.double().norm().item() for x in want if x is not None)
    return max(_differences(got, want, lambda x: x.norm().item(), floor), key=_nan_is_the_worst)


def largest_difference(got: Iterable[Tensor | None], want: Iterable[Tensor | None]) -> float:
    """The largest difference of any pair of tensors, relative to the largest entry of the wanted one; `None` is 0."""
    return max(_differences(got, want, lambda x: x.abs().max().item()), key=_nan_is_the_worst)


def _differences(
    got: Iterable[Tensor | None], want: Iterable[Tensor | None], size_of: Callable, floor: float = 0.0
) -> list[float]:
    differences = []
    for x, y in zip(got, want, strict=True):
        if x is None and y is None:
            continue
        x, y = (0.0 * other if one is None else one for one, other in ((x, y), (y, x)))
        x, y = x.detach().double().cpu(), y.detach().double().cpu()
        difference, size = size_of(x - y), max(size_of(y), floor)
        differences.append(difference / size if size else difference)
    return differences


def _nan_is_the_worst(difference: float) -> float:
    return float("inf") if difference != difference else difference


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
