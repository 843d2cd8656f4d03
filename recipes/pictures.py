"""What every picture of this project ends with."""

from pathlib import Path


def finish(figure, path: Path, legend=None) -> Path:
    """Gives the axes `legend` one, unless they have it, writes the picture, closes it and returns its path."""
    from matplotlib import pyplot

    if legend is not None and legend.get_legend() is None:
        legend.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
