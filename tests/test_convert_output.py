"""A conversion's folder: where it is, what it holds beside the model, and that all of it has reached the disk."""

import errno
import fcntl
import json
import math
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from checkpoints import save_source
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from tnt_hf.cli import main
from tnt_hf.conversion import convert_checkpoint, staging
from tnt_hf.conversion.files import sha256
from tnt_hf.conversion.manifest import check_manifest
from tnt_hf.conversion.model_card import front_matter
from tnt_hf.conversion.source import INDEX, read_header, read_source
from tnt_hf.conversion.staging import LOCK, Staging, target_of
from tnt_hf.recipes.model_card import write_card


@pytest.fixture
def source(tmp_path) -> Path:
    return save_source(tmp_path / "source", shards="45KB")


def test_an_output_may_be_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert target_of("~/model") == tmp_path / "model"


def test_a_live_model_is_no_source(tmp_path):
    with pytest.raises(ValueError, match="source=Linear: must be a folder or a Hub id; save a live model first"):
        convert_checkpoint(torch.nn.Linear(1, 1), tmp_path / "result", progress=False)


@pytest.mark.parametrize("link", ["copy", "link"])
def test_all_that_a_conversion_writes_is_on_the_disk(tmp_path, source, monkeypatch, link):
    """The files, the folders they are in, and the name of the result."""
    flushed, real = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino) or real(file))
    (tmp_path / "results").mkdir()
    result = convert_checkpoint(source, tmp_path / "results" / "one", progress=False, link=link)
    paths = [result.parent, result, *(x for x in result.rglob("*") if x.stat().st_nlink == 1 or x.is_dir())]
    assert [path.name for path in paths if path.stat().st_ino not in flushed] == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EIO])
def test_a_file_system_that_flushes_no_folders_is_as_good(tmp_path, source, monkeypatch, code):
    """Some of networks and of virtual machines say so; other errors are errors."""
    real = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(code, os.strerror(code))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            convert_checkpoint(source, tmp_path / "result", progress=False)
    else:
        assert check_manifest(convert_checkpoint(source, tmp_path / "result", progress=False)) == []


def test_a_file_system_without_locks_is_named_and_nothing_is_left(tmp_path, source, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    (dead := tmp_path / ".result.tnt-partial-dead").mkdir()
    (dead / LOCK).touch()  # which may be another run's
    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(2):
        with pytest.raises(OSError, match="output='.*result'.* locks no files .Function not.*; choose another"):
            convert_checkpoint(source, tmp_path / "result", progress=False)
        assert sorted(path.name for path in tmp_path.iterdir()) == [dead.name, "source"]


def test_a_replacement_that_was_done_leaves_an_old_folder_to_remove(tmp_path, source):
    """A process that dies behind both steps; also of a name that a pattern would not find."""
    target, said = convert_checkpoint(source, tmp_path / "res[u]lt", progress=False), []
    dead = tmp_path / f".{target.name}.tnt-partial-dead"
    shutil.copytree(target, dead / "old")
    (dead / LOCK).touch()
    with pytest.raises(FileExistsError, match="overwrite=True"), Staging(target, False, said.append):
        pass
    assert said == [f"removed {dead.name}, left over from an interrupted run"]
    assert check_manifest(target) == [] and not dead.exists()


def test_the_index_tells_the_bytes_of_all_tensors(tmp_path, source):
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    index = json.loads((result / INDEX).read_text())
    tensors = {x.name: x for path in result.glob("*.safetensors") for x in read_header(path)}
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in tensors.values())}
    assert index["weight_map"] == {name: tensors[name].path.name for name in sorted(tensors)}


def test_an_index_may_name_stored_frequencies(tmp_path):
    """As those of old checkpoints in several files do."""
    source = save_source(tmp_path / "source", shards="20KB")
    name, index = "model.layers.0.self_attn.rotary_emb.inv_freq", json.loads((source / INDEX).read_text())
    shard = source / index["weight_map"]["model.norm.weight"]
    save_file(load_file(shard) | {name: torch.rand(4)}, shard, metadata={"format": "pt"})
    index["weight_map"][name] = shard.name
    (source / INDEX).write_text(json.dumps(index))
    assert name not in read_source(source).tensors
    convert_checkpoint(source, tmp_path / "result", progress=False)


def test_further_chat_templates_come_along_but_none_from_elsewhere(tmp_path, source):
    (source / "LICENSES").mkdir()  # a folder is no text
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ messages }}")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    assert (result / templates.name / "tools.jinja").read_text() == "{{ messages }}" and check_manifest(result) == []
    (tmp_path / "secret").write_text("secret")
    (templates / "secret.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"secret\.jinja: leads to .*, outside the checkpoint's folder"):
        convert_checkpoint(source, tmp_path / "other", progress=False)


def test_the_command_that_comes_next_takes_names_for_no_options(tmp_path, source, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source.rename("-source")
    assert main(["convert", "--window", "16", "--", "-source", "-a result"]) == 0
    assert "\nnext        tnt verify ./-source './-a result'\n" in capsys.readouterr().out


def test_generation_settings_of_their_own_file_win_over_those_of_the_configuration(source, tmp_path):
    for name, temperature in (("config.json", 0.3), ("generation_config.json", 0.7)):
        settings = json.loads((source / name).read_text()) | {"temperature": temperature, "do_sample": True}
        (source / name).write_text(json.dumps(settings))
    convert_checkpoint(source, tmp_path / "out", progress=False)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7


def test_folders_on_the_way_to_a_failure_go_with_it(tmp_path, source):
    shard = sorted(source.glob("*.safetensors"))[-1]
    tensors = load_file(shard)
    next(iter(tensors.values())).fill_(math.nan)
    save_file(tensors, shard, metadata={"format": "pt"})
    (tmp_path / "there").mkdir()
    for place in ("new/newer", "there/newer"):
        with pytest.raises(ValueError, match="nan or infinity"):
            convert_checkpoint(source, tmp_path / place / "result", progress=False)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_dir()) == [
        "source",
        "there",
    ]


@pytest.mark.parametrize("said, kept", [("no", "no"), ("[en, no]", ["en", "no"]), ("en", "en"), ("", None)])
def test_norwegian_is_a_language(tmp_path, source, said, kept):
    (source / "README.md").write_text(f"---\nlanguage: {said}\n---\n")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    assert front_matter(result)["language"] == kept
    assert ModelCard.load(result / "README.md").data.language == kept


def prepend(path: Path) -> None:
    path.write_text("Read this first.\n\n" + path.read_text())


def set_a_field(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))


def train(path: Path) -> None:
    """The same names and sizes, another number."""
    *content, last = path.read_bytes()
    path.write_bytes(bytes([*content, last ^ 1]))


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


CHANGES = {
    "a card of one's own": ("README.md", prepend, "bytes, "),
    "another field": ("config.json", set_a_field, "bytes, "),
    "a trained memory": ("model-memory-00001-of-00001.safetensors", train, "its SHA-256 differs"),
    "weights nobody has read": ("model-base-00001-of-", touch, "changed after the conversion"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_overwriting_takes_nothing_that_was_changed(tmp_path, source, change):
    """Not even under a name that the conversion knows: it is refused until that file is out of the way."""
    name, edit, said = CHANGES[change]
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link="copy", check=False)
    path = next(result.glob(f"{name}*"))
    edit(path)
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match="was changed since the conversion.*move it away first") as caught:
        convert_checkpoint(source, result, progress=False, overwrite=True)
    assert repr(path.name) in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)
    assert path.read_bytes() == content and [x.name for x in tmp_path.iterdir() if x.name[0] == "."] == []
    path.rename(tmp_path / "mine")
    convert_checkpoint(source, result, progress=False, overwrite=True)
    assert check_manifest(result) == [] and (tmp_path / "mine").read_bytes() == content


def test_a_change_during_the_work_is_noticed_at_its_end(tmp_path, source):
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    with Staging(result, True, print) as staging:
        train(memory := result / "model-memory-00001-of-00001.safetensors")
        trained = memory.read_bytes()
        with pytest.raises(FileExistsError, match="'model-memory.*its SHA-256 differs.*move it away first"):
            staging.commit()
    assert memory.read_bytes() == trained


@pytest.mark.parametrize("check", [False, True])
def test_a_linked_shard_that_changed_with_its_source_holds_nothing_up(tmp_path, source, check):
    """Its source has it still, and is what the conversion is to be made of again; alone, it is the last one."""
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link="link", check=check)
    shard = next(result.glob("model-base-*"))
    origin = next(x for x in source.iterdir() if x.stat().st_ino == shard.stat().st_ino)
    train(shard)
    touch(shard)
    convert_checkpoint(source, result, progress=False, link="link", check=check, overwrite=True)
    assert check_manifest(result) == [] and shard.samefile(origin)
    train(shard)
    os.utime(shard, ns=(2, 2))
    origin.unlink()
    with pytest.raises(FileExistsError, match=f"{shard.name}', which was changed since the conversion"):
        Staging(result, True, print).__enter__()


def test_a_card_that_tnt_wrote_holds_nothing_up(tmp_path, source):
    """As `tnt push` does; what somebody has written into it since does."""
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    assert write_card(result, "owner/hybrid")
    convert_checkpoint(source, result, progress=False, overwrite=True)
    write_card(result, "owner/hybrid")
    prepend(result / "README.md")
    with pytest.raises(FileExistsError, match="'README.md', which was changed since the conversion"):
        convert_checkpoint(source, result, progress=False, overwrite=True)


def test_a_folder_is_read_once_to_be_replaced(tmp_path, source, monkeypatch):
    result, read = convert_checkpoint(source, tmp_path / "result", progress=False), []
    monkeypatch.setattr("tnt_hf.conversion.staging.sha256", lambda path: read.append(path) or sha256(path))
    with Staging(result, True, print) as staging:
        (staging.folder / "new").touch()
        staging.commit()
    assert len(read) == len(set(read)) > 5 and [x.name for x in result.iterdir()] == ["new"]


# --- a replacement in two steps, where the system cannot swap folders ---


def break_off(monkeypatch, what, meanwhile=lambda: None) -> None:
    """Between the steps: the folder to be replaced has been moved away."""
    rename, count = os.rename, []
    monkeypatch.setattr(staging, "_exchange", lambda *_: False)

    def second(*names):
        count.append(names)
        if len(count) == 2:
            meanwhile()
            raise what
        rename(*names)

    monkeypatch.setattr(os, "rename", second)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("what", [KeyboardInterrupt(), OSError(errno.EIO, "broken")], ids=["interrupt", "error"])
def test_a_replacement_that_breaks_off_between_its_steps_is_undone(tmp_path, source, monkeypatch, what):
    target = convert_checkpoint(source, tmp_path / "result", progress=False)
    before = bytes_of(target)
    break_off(monkeypatch, what)
    with pytest.raises(type(what)):
        convert_checkpoint(source, target, overwrite=True, seed=1, progress=False)
    assert bytes_of(target) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result", "source"]


def test_what_was_to_be_replaced_is_kept_where_its_place_was_taken(tmp_path, source, monkeypatch):
    """By the run that broke off, and by those after it, until the place is free."""
    target = convert_checkpoint(source, tmp_path / "result", progress=False)
    before = bytes_of(target)
    break_off(monkeypatch, OSError(errno.ENOTEMPTY, "taken"), lambda: (target.mkdir(), (target / "x").touch()))
    lost = "old, which an interrupted run was replacing, cannot go back to"
    with pytest.raises(OSError, match="taken"), pytest.warns(UserWarning, match=lost):
        convert_checkpoint(source, target, overwrite=True, seed=1, progress=False)
    monkeypatch.undo()
    (old,) = tmp_path.glob(".result.tnt-partial-*/old")
    with pytest.raises(FileExistsError, match="not a conversion, never overwritten"):
        convert_checkpoint(source, target, overwrite=True, progress=False)
    assert bytes_of(old) == before
    (target / "x").unlink()  # an empty folder is none
    with pytest.raises(FileExistsError, match="overwrite=True"):
        convert_checkpoint(source, target, progress=False)
    assert bytes_of(target) == before and not old.exists()


def test_a_folder_that_only_another_user_can_look_into_is_passed_by(tmp_path, source):
    """Also a live one's: its lock cannot be opened."""
    locked = tmp_path / ".result.tnt-partial-other" / LOCK
    locked.mkdir(parents=True)  # which the superuser cannot open either
    convert_checkpoint(source, tmp_path / "result", progress=False)
    assert locked.is_dir()
