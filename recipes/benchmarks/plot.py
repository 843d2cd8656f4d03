"""The picture of a memory_op.json: how many times faster tnt-hf is, per contestant and chunk size.

python -m tnt_hf.recipes.benchmarks.plot results/memory_op.json results/memory_op.png
"""

import argparse
import json
from pathlib import Path


def bars(report: dict, clock: str) -> dict[str, dict[int, dict]]:
    """{contestant: {chunk size: spread of the ratio}} of everything that was measured."""
    found = {}
    for rival in ("ttt-lm", "titans-pytorch"):
        for chunk_size, entry in report[rival].items():
            for name, result in entry.items():
                if isinstance(result, dict) and isinstance(result.get(rival), dict):
                    found.setdefault(f"{rival} {name}", {})[int(chunk_size)] = result[rival]["speedup"][clock]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    report = json.loads(args.results.read_text())
    found = bars(report, args.clock)
    figure, axis = plt.subplots(figsize=(9, 4.5))
    sizes = sorted({size for entry in found.values() for size in entry})
    width = 0.8 / max(1, len(found))
    for i, (name, entry) in enumerate(found.items()):
        place = [sizes.index(size) + (i - (len(found) - 1) / 2) * width for size in entry]
        middle = [x["median"] for x in entry.values()]
        error = [[x["median"] - x["min"] for x in entry.values()], [x["max"] - x["median"] for x in entry.values()]]
        axis.bar(place, middle, width, label=name, yerr=error, capsize=2)
    for rival, style in (("ttt-lm", "--"), ("titans-pytorch", ":")):
        for size, target in report["targets"].get(rival, {}).items():
            if int(size) in sizes:
                x = sizes.index(int(size))
                axis.hlines(target, x - 0.45, x + 0.45, colors="black", linestyles=style, linewidth=1)
    axis.set_yscale("log")
    axis.set_xticks(range(len(sizes)), [f"C = {size}" for size in sizes])
    axis.set_ylabel(f"times faster, {args.clock} time")
    hardware = report["environment"]
    axis.set_title(f"forward + backward, {hardware['threads']} thread, {hardware['cpu']}; lines: targets", fontsize=9)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=120)


if __name__ == "__main__":
    main()
