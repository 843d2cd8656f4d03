"""What every picture of this project begins and ends with. Pyplot stays out of it: a notebook that calls us shows its
own pictures with it."""

from pathlib import Path


def subplots(rows: int = 1, columns: int = 1, figsize: tuple[float, float] | None = None, **options):
    """A figure and its axes, as `pyplot.subplots` gives them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize)
    return figure, figure.subplots(rows, columns, **options)


def finish(figure, path: Path, legend=None) -> Path:
    """Gives the axes `legend` one, unless they have it, writes the picture and returns its path."""
    if legend is not None and legend.get_legend() is None:
        legend.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return path
