"""Check a converted checkpoint's promises against its source: the parity report."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments; imports nothing heavy."""
    parser.add_argument("source", metavar="SRC", help="folder or Hub id of the model that was converted")
    parser.add_argument("output", metavar="OUT", help="folder of the result, fresh or trained")
    parser.add_argument("--text", metavar="FILE_OR_TEXT", help="probe text (default: text that comes with Python)")
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="length of the probe, read in about 60 forward passes (default: past the window)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown")
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="compute in this dtype (default: as saved)",
    )
    parser.add_argument("--revision", help="of a Hub id (default: the commit that was converted)")
    parser.add_argument("--seed", type=int, default=0, help="seed for random ids and the gates opened in the checks")
    parser.add_argument(
        "--record-digests",
        action="store_true",
        help="after a pass, take the SHA-256 of shards not read yet and record it in the manifest",
    )


def run(options: argparse.Namespace) -> int:
    """
    Returns:
        The exit status: 0 if every promise holds, 1 if one does not.

    Raises:
        ValueError, OSError: wrong input, exit status 2 of the command line.
    """
    from .files import write_json, write_text
    from .manifest import add_digests
    from .verify import verify_conversion
    from .verify_files import unlisted
    from .verify_report import as_markdown, as_text, check_place

    folders = [Path(options.source), Path(options.output)]
    given = {name: place for name in ("json", "markdown") if (place := getattr(options, name)) is not None}
    places = [check_place(f"--{name}", place, folders) for name, place in given.items()]
    if len(set(places)) < len(places):
        raise ValueError(f"--markdown={options.markdown!r}: is the file of --json")
    report = verify_conversion(
        options.source,
        options.output,
        text=options.text,
        tokens=options.tokens,
        dtype=options.dtype,
        seed=options.seed,
        revision=options.revision,
    )
    print(as_text(report))
    if options.json is not None:
        write_json(Path(options.json), report)
    if options.markdown is not None:
        write_text(Path(options.markdown), as_markdown(report))
    if options.record_digests and report["passed"] and not unlisted(Path(options.output)):
        for name in add_digests(options.output):
            print(f"digest recorded: {name}")
    return 0 if report["passed"] else 1
