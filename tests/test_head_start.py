"""Copies that begin before the conversion is imported: the same result, and nothing left where it goes wrong."""

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import save_source

import tnt_hf.conversion.head_start
from tnt_hf.conversion import convert_checkpoint
from tnt_hf.conversion.convert_command import add_arguments, run
from tnt_hf.conversion.head_start import HeadStart, head_start
from tnt_hf.conversion.manifest import check_manifest
from tnt_hf.conversion.source import read_header


COPY = {"link": "copy", "check": False}
# The command, stopped where its heavy imports would begin.
LIGHT = """
import sys
sys.argv[0] = "tnt"
from contextlib import ExitStack
from tnt_hf.conversion.head_start import head_start
with ExitStack() as stack:
    begun = head_start("source", "result", {"link": "copy", "check": False}, print, stack)
    [copy.result() for copy in begun._copies.values()]
    assert begun.copied > 0 and not {"torch", "transformers", "numpy"} & sys.modules.keys()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    save_source(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(["source", "result", "--copy", "--no-check", "--quiet", *arguments]))


def contents(folder):
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in ("README.md", "tnt_manifest.json")
    }


def test_copies_need_neither_torch_nor_transformers(folder):
    subprocess.run([sys.executable, "-c", LIGHT], check=True)
    assert [path.name for path in folder.iterdir()] == ["source"]


def test_the_result_is_what_it_is_without(folder, monkeypatch):
    taken = []
    take = HeadStart.take
    monkeypatch.setattr(HeadStart, "take", lambda self, origin: taken.append(take(self, origin)) or taken[-1])
    assert convert() == 0
    assert taken and None not in taken
    convert_checkpoint("source", "plain", progress=False, **COPY)
    assert contents(folder / "result") == contents(folder / "plain")
    assert check_manifest(folder / "result") == []
    shard = next((folder / "result").glob("model-base-*"))
    assert shard.stat().st_nlink == 1


@pytest.mark.parametrize("mistake", ["memory_depht=2", "local_chunk_sizes=[0]", "window=0"])
def test_a_mistake_that_is_found_later_leaves_nothing(folder, mistake):
    with pytest.raises(ValueError):
        convert(mistake)
    assert [path.name for path in folder.iterdir()] == ["source"]


def test_what_stops_a_conversion_stops_its_copies(folder, monkeypatch):
    """The folder can only be removed when nobody writes into it any more."""
    begun, may_go_on = [], []

    def slow(origin, path, advance):
        begun.append(path)
        while not may_go_on:
            advance(1)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"half")

    monkeypatch.setattr("tnt_hf.conversion.head_start.copy_unread", slow)
    with pytest.raises(ValueError, match="memory_depht"):
        convert("memory_depht=2")
    assert begun and [path.name for path in folder.iterdir()] == ["source"]


def test_shards_of_another_kind_replace_the_copies(tmp_path, monkeypatch):
    """Whether a source is fused is known later only: its copies go, and new shards come under the same names."""
    save_source(tmp_path / "source", "phi3")
    monkeypatch.chdir(tmp_path)
    drop, counted = HeadStart.drop, []
    monkeypatch.setattr(HeadStart, "drop", lambda self: drop(self) or counted.append(self.copied))
    assert convert() == 0
    assert counted == [0], "what was removed needs its room again"
    convert_checkpoint("source", "plain", progress=False, **COPY)
    assert contents(tmp_path / "result") == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    "settings",
    [
        {"link": "link"},
        {"link": "auto", "check": False},  # one file system: links
        {"link": "copy"},  # small: read on the way
        {"link": "copy", "check": True},
        {**COPY, "dtype": "bfloat16"},
        {**COPY, "probe": "text"},
    ],
)
def test_nothing_is_begun_where_nothing_is_gained(folder, settings):
    with ExitStack() as stack:
        assert head_start("source", "result", settings, print, stack) is None
    assert [path.name for path in folder.iterdir()] == ["source"]


@pytest.mark.parametrize("fault", ["no source", "inside", "no room", "exists", "damaged"])
def test_mistakes_are_left_to_the_conversion(folder, monkeypatch, fault):
    source, output = "source", "result"
    if fault == "no source":
        source = "nowhere"
    elif fault == "inside":
        output = "source/result"
    elif fault == "no room":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    elif fault == "exists":
        (folder / "result").mkdir()
        (folder / "result" / "mine.txt").write_text("mine")
    else:
        (folder / "source" / "model.safetensors").write_bytes(b"short")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with ExitStack() as stack:
        assert head_start(source, output, COPY, print, stack) is None
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")
@pytest.mark.parametrize(
    "fields, some", [({}, True), ({"memory_projections": "shared"}, False), ({"link": "copy"}, False)]
)
def test_what_the_memory_copies_is_read_ahead_where_shards_are_linked(folder, monkeypatch, fields, some):
    """Every byte of the q, k and v projections and no other; nothing where the memory copies none of them."""
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *call: asked.append(call))
    monkeypatch.setattr(tnt_hf.conversion.head_start, "AHEAD", 2)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        head_start("source", "result", {"link": "link", "check": False} | fields, print, stack)
        for thread in set(threading.enumerate()) - before:
            if not thread.name.startswith("ThreadPoolExecutor"):  # those of copies wait for the end of the stack
                thread.join(60)
    tensors = read_header(folder / "source" / "model.safetensors")
    spans = [x for x in tensors if re.search(r"self_attn\.[qkv]_proj\.weight", x.name)]
    expected = {byte for x in spans for byte in range(x.start, x.start + x.nbytes)} if some else set()
    assert {byte for start, length, _ in asked for byte in range(start, start + length)} == expected
    assert {advice for *_, advice in asked} <= {os.POSIX_FADV_WILLNEED} and spans


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system cannot be asked to read ahead")
def test_reading_ahead_ends_with_the_conversion(folder, monkeypatch):
    asked, ended = threading.Semaphore(0), threading.Event()

    def advise(*call):
        asked.release()
        assert ended.wait(60)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        head_start("source", "result", {"link": "link", "check": False}, print, stack)
        (reader,) = set(threading.enumerate()) - before
        assert asked.acquire(timeout=60)
    ended.set()
    reader.join(60)
    assert not reader.is_alive() and not asked.acquire(blocking=False), "it went on"


class Elsewhere(type(Path())):
    """A file on another file system."""

    def stat(self, **options):
        return SimpleNamespace(st_size=super().stat(**options).st_size, st_dev=-1)


@pytest.mark.parametrize("name", ["*-00001-of-*.safetensors", "*.safetensors"])
def test_shards_of_another_file_system_are_copied_unless_links_were_asked_for(tmp_path, monkeypatch, name):
    """Then the conversion says what is in the way."""
    save_source(tmp_path / "source", shards="20KB")
    monkeypatch.chdir(tmp_path)
    read = tnt_hf.conversion.head_start.read_source

    def read_elsewhere(*arguments):
        found = read(*arguments)
        shards = {x: Elsewhere(y) if y.match(name) else y for x, y in found.shards.items()}
        return dataclasses.replace(found, shards=shards)

    monkeypatch.setattr(tnt_hf.conversion.head_start, "read_source", read_elsewhere)
    with ExitStack() as stack:
        assert head_start("source", "result", {"link": "link", "check": False}, print, stack) is None
    with ExitStack() as stack:
        assert head_start("source", "result", {"check": False}, print, stack) is not None


def test_an_earlier_result_is_left_alone_unless_it_may_be_overwritten(folder):
    convert_checkpoint("source", "result", progress=False, **COPY)
    with ExitStack() as stack:
        assert head_start("source", "result", COPY, print, stack) is None
        assert head_start("source", "result", COPY | {"overwrite": True}, print, stack) is not None


def test_a_bar_that_comes_later_shows_what_was_copied_before(tmp_path, monkeypatch):
    """Of all shards, as does the room that is still asked for."""
    save_source(tmp_path / "source", shards="20KB")
    monkeypatch.chdir(tmp_path)
    total, told = sum(x.stat().st_size for x in Path("source").glob("*.safetensors")), []
    with ExitStack() as stack:
        begun = head_start("source", "result", COPY, print, stack)
        [copy.result() for copy in begun._copies.values()]
        begun.follow(told.append)
        assert sum(told) == begun.copied == total


def test_nothing_is_begun_where_there_is_room_for_the_copies_only(folder, monkeypatch):
    size = (folder / "source" / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size + 100))
    with ExitStack() as stack:
        assert head_start("source", "result", COPY, print, stack) is None
