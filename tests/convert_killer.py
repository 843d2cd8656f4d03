"""Conversions of FOLDER/source that die at one file operation after the other, each in a process of its own.

Usage: convert_killer.py FOLDER [every]

After each death the result must be absent, the old one or the new one, each complete; the source untouched; and the
next run must succeed and leave nothing else behind. A full disk must be an error that leaves nothing. Prints the
number of deaths; with `every`, one at every operation.
"""

import hashlib
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from forks import in_a_child

from tnt_hf.conversion import staging
from tnt_hf.conversion.convert import convert_checkpoint
from tnt_hf.conversion.manifest import check_manifest, read_manifest


MOMENTS = ("open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "tempfile.mkdtemp", "ctypes.dlsym")


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def convert(folder: Path, **options):
    return convert_checkpoint(folder / "source", folder / "result", progress=False, link="copy", **options)


def die_at(moment: int, folder: Path, **options) -> int:
    """Converts and dies before file operation number `moment`. Returns the number of operations if it gets further."""
    reader, writer = os.pipe()

    def work():
        count = itertools.count()
        root = str(folder)

        def hook(event, arguments):
            ours = event in MOMENTS and (event.startswith("ctypes") or root in str(arguments[0]))
            if ours and next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        convert(folder, **options)
        os.write(writer, str(next(count)).encode())

    status = in_a_child(work)
    os.close(writer)
    with open(reader) as found:
        text = found.read()
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, "failed instead of dying"
    return int(text or 0)


def kill_everywhere(folder: Path, overwrite: bool, exchange: bool, every: bool) -> int:
    if not exchange:
        staging._exchange = lambda first, second: False
    result, source = folder / "result", digest(folder / "source")

    def prepare():
        if overwrite and not result.exists():
            assert in_a_child(lambda: convert(folder, seed=1)) == 0

    prepare()
    total = die_at(-1, folder, overwrite=overwrite, seed=2)
    shutil.rmtree(result)
    # The beginning and the end are where folders come and go; between them one write is like the other.
    first = [] if overwrite else [*range(7), *range(7, total - 10, 20)]
    moments = range(total) if every else [*first, *range(max(total - 10, 7), total)]
    for moment in moments:
        prepare()
        old = overwrite and digest(result)
        die_at(moment, folder, overwrite=overwrite, seed=2)
        assert digest(folder / "source") == source
        aside = list(folder.glob(".result.tnt-partial-*/old"))
        if result.exists():
            assert check_manifest(result) == [], check_manifest(result)
            new = read_manifest(result)["conversion"]["seed"] == 2
            assert new or digest(result) == old
        else:
            # Without an exchange there is one step between the old folder and the new: the next run goes back.
            assert not overwrite or (not exchange and digest(aside[0]) == old)
        assert in_a_child(lambda: convert(folder, overwrite=True, seed=1)) == 0
        assert sorted(path.name for path in folder.iterdir()) == ["result", "source"], moment
        assert check_manifest(result) == []
        if not overwrite:
            shutil.rmtree(result)
    shutil.rmtree(result, ignore_errors=True)
    return len(moments)


def fill_the_disk(folder: Path) -> None:
    """The limit on a file's size stands in for the disk's: both are errors of a write in the middle of a shard."""

    def work(**options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        try:
            convert(folder, **options)
        except OSError as error:
            assert error.strerror == "File too large" and Path(error.filename).is_relative_to(folder), repr(error)
            return
        raise AssertionError("no error")

    for options in ({}, {"check": False}, {"dtype": "float64"}):
        assert in_a_child(lambda options=options: work(**options)) == 0
        assert [path.name for path in folder.iterdir()] == ["source"]


if __name__ == "__main__":
    where, every = Path(sys.argv[1]), "every" in sys.argv[2:]
    fill_the_disk(where)
    # Last the one that changes the module.
    modes = ((False, True), (True, True), (True, False))
    print(sum(kill_everywhere(where, overwrite, exchange, every) for overwrite, exchange in modes), "moments")
