"""`tnt bench`: named benchmark suites, each with one JSON and one picture as its result.

    tnt bench --list
    tnt bench train --quick
    tnt bench memory --out results --ttt-lm path/to/ttt.py
    tnt bench plot results/train.json

Contestants take turns in one process and are compared within a round, after a check that they compute what they
should; a wrong one stops the suite. The JSON holds hardware, commit, versions, settings, command and every round, and
is written after every row: an interrupted suite resumes where it was if started again with the same settings.
"""

import argparse
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from tnt_hf.command_line import parse_arguments
from tnt_hf.recipes.benchmarks.settings import SUITES, add_options, read_options


def build_parser(suite: str | None) -> argparse.ArgumentParser:
    """The parser of one suite, or of the overview when none is named."""
    raw = argparse.RawDescriptionHelpFormatter
    if suite == "plot":
        parser = argparse.ArgumentParser(prog="tnt bench plot", description="Draw a result's picture from its JSON.")
        parser.add_argument("result", type=Path, metavar="FILE.json", help="result as a suite wrote it")
        parser.add_argument("--picture", type=Path, metavar="FILE", help="default: FILE.png beside it")
        return parser
    if suite is None:
        parser = argparse.ArgumentParser(
            prog="tnt bench", description=__doc__, epilog="\n".join(_listing()), formatter_class=raw
        )
        parser.add_argument(
            "suite", metavar="SUITE", help="one of those below, or plot; SUITE --help shows its options"
        )
        parser.add_argument("--list", action="store_true", help="list the suites")
        return parser
    about = SUITES[suite].about
    parser = argparse.ArgumentParser(prog=f"tnt bench {suite}", description=about[0].upper() + about[1:] + ".")
    parser.add_argument("--out", type=Path, default=Path("bench_out"), metavar="FOLDER", help="default: bench_out")
    parser.add_argument("--quick", action="store_true", help="takes a minute or less: smaller, and too short to quote")
    parser.add_argument("--overwrite", action="store_true", help="replace the result in FOLDER")
    add_options(parser, SUITES[suite].settings)
    return parser


def _listing() -> list[str]:
    return [f"  {name:<12}{suite.about}" for name, suite in SUITES.items()]


def main(arguments: list[str] | None = None) -> int:
    """Runs one suite or draws one picture. Returns the exit status.

    Raises:
        ValueError: an unknown suite, a value that does not fit, or a result that would be overwritten.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--list"]:
        print("\n".join(_listing()))
        return 0
    name = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name is None:
        build_parser(None).parse_args(arguments)
    if name != "plot" and name not in SUITES:
        raise ValueError(f"suite {name!r}: must be one of {', '.join(SUITES)}")
    options = parse_arguments(build_parser(name), arguments[1:])
    if missing := [package for package in ("matplotlib", "tqdm") if find_spec(package) is None]:
        raise ValueError(f"tnt bench needs {', '.join(missing)}: pip install 'tnt-hf[train]'")
    if name == "plot":
        from tnt_hf.recipes.benchmarks.plot import draw_file

        print(draw_file(options.result, options.picture))
        return 0
    settings = read_options(options, SUITES[name], options.quick)
    from tnt_hf.recipes.benchmarks.suite_run import run_suite

    module = import_module(f"tnt_hf.recipes.benchmarks.{name}_suite")
    run_suite(name, module, settings, options.out, options.overwrite)
    return 0


if __name__ == "__main__":
    sys.exit(main())
