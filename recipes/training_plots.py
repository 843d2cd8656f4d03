"""loss.png and gates.png: a run's log at a glance."""

from functools import partial
from pathlib import Path

from tnt_hf.recipes.pictures import subplots


INK, ACCENT, GRID = "#3b4252", "#c8553d", "#d8dee9"
# What is drawn of each layer, its title and its unit; of fast weights the first that was logged.
PANELS = {
    "gate": ("gate", "factor on the memory"),
    "share": ("memory's share of the output", "|memory| / (|memory| + |attention|)"),
    "surprise": ("surprise: loss before the write", "½ |f(W, k) − v|², mean over tokens"),
    "fast_weight_change": ("fast weights after a row: change", "|W − W_init| / |W_init|"),
    "fast_weight_norm": ("fast weights after a row: norm", "|W|"),
}
LINEAR = ("gate", "share")  # of the output, where small is as good as none


def draw_plots(log: list[dict], folder: Path, gate: str = PANELS["gate"][1]) -> None:
    """
    Draw what there is to draw of a `Trainer`'s log history: loss.png if a loss was logged, gates.png if a memory was.

    Args:
        log: the history.
        folder: where the files go.
        gate: what the gate's value is and when it is closed, see [`~recipes.memory_statistics.gate_label`].
    """
    from matplotlib import rc_context

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.grid": True}
    style |= {
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.labelsize": 9,
        "figure.dpi": 120,
    }
    with rc_context(style):
        for name, draw in (("loss.png", _loss), ("gates.png", partial(_gates, gate=gate))):
            figure = draw(log)
            if figure is not None:
                unfinished = folder / f"{name}.partial"
                figure.savefig(unfinished, format="png", bbox_inches="tight")
                unfinished.replace(folder / name)


def smoothed(values: list[float], reach: int | None = None) -> list[float]:
    """The mean of each value and its neighbours, `reach` on both sides (a fortieth of all), fewer near the ends. An
    exponential mean would lag behind a loss that falls."""
    reach = len(values) // 40 if reach is None else reach
    found = []
    for i in range(len(values)):
        side = min(reach, i, len(values) - 1 - i)
        near = values[i - side : i + side + 1]
        found.append(sum(near) / len(near))
    return found


def spans_decades(values: list[float]) -> bool:
    """Whether numbers that cannot be negative need a logarithmic axis: above two decades, zeros aside."""
    positive = [value for value in values if value > 0]
    return bool(positive) and min(values) >= 0 and max(positive) > 100 * min(positive)


def _loss(log: list[dict]):
    train = [(e["step"], e["loss"]) for e in log if "loss" in e]
    evaluated = [(e["step"], e["eval_loss"]) for e in log if "eval_loss" in e]
    if not train:
        return None
    figure, axes = subplots(figsize=(7, 4))
    steps, losses = zip(*train)
    many = len(train) >= 20
    axes.plot(steps, losses, color=INK, alpha=0.3 if many else 1, linewidth=1, marker=None if many else "o", ms=3)
    if many:
        axes.plot(steps, smoothed(list(losses)), color=INK, linewidth=1.8, label="training, smoothed")
    else:
        axes.lines[0].set_label("training")
    if evaluated:
        axes.plot(*zip(*evaluated), color=ACCENT, linewidth=1.8, marker="o", ms=4, label="held out, next token")
    axes.set(xlabel="step", ylabel="loss per token", title="Loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    rates = [(e["step"], e["learning_rate"]) for e in log if "learning_rate" in e and "loss" in e]
    if rates:
        right = axes.twinx()
        right.plot(*zip(*rates), color=GRID, linewidth=1.2, zorder=0)
        right.set_ylabel("learning rate", color="#8a93a5")
        right.tick_params(colors="#8a93a5")
        right.grid(False)
        right.set_ylim(bottom=0)
        right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        axes.set_zorder(right.get_zorder() + 1)
        axes.patch.set_visible(False)
    return figure


def _gates(log: list[dict], gate: str):
    from matplotlib import colormaps

    panels = {}
    for name in PANELS:
        prefix = f"memory/{name}/layer_"
        layers = sorted({int(key.removeprefix(prefix)) for e in log for key in e if key.startswith(prefix)})
        if layers:
            panels[name] = layers
    if "fast_weight_change" in panels:
        del panels["fast_weight_norm"]
    if not panels:
        return None
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = subplots(rows, columns, figsize=(4.6 * columns, 3.1 * rows), squeeze=False)
    most = max(layer for layers in panels.values() for layer in layers)
    colors = colormaps["viridis"]
    for axes, (name, layers) in zip(grid.flat, panels.items()):
        values = []
        for layer in layers:
            points = [(e["step"], e[key]) for e in log if (key := f"memory/{name}/layer_{layer}") in e]
            values += [value for _, value in points]
            few = len(points) < 20
            color = colors(0.9 * layer / max(most, 1))
            axes.plot(*zip(*points), color=color, linewidth=1.3, marker="o" if few else None, ms=3, label=str(layer))
        title, unit = PANELS[name]
        axes.set(title=title, xlabel="step", ylabel=gate if name == "gate" else unit)
        axes.xaxis.get_major_locator().set_params(integer=True)  # of a run of few steps, too
        if name not in LINEAR and spans_decades(values):
            axes.set_yscale("log", nonpositive="mask")
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    shown = grid.flat[0].get_legend_handles_labels()
    stride = max(1, len(shown[0]) // 12)  # of many layers not each is named
    handles, names = shown[0][::stride], shown[1][::stride]
    figure.tight_layout()
    figure.legend(handles, names, title="layer", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
