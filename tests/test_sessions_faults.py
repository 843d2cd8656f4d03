"""A session that cannot be written leaves the older one, and one that was changed since it was written is refused."""

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from forks import in_a_child
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_cache import filled
from tiny import tiny_model, tokens, undigested

from tnt_hf import TNTCache


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def cache(model):
    return filled(model, tokens(2, 21))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ------------------------------------------------------------------------------------------------------------- writing


def test_a_link_leads_to_the_new_session(model, cache, tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("old", "new"):
        target, link = tmp_path / "disk" / name, tmp_path / name
        link.symlink_to(target)
        if name == "old":
            target.write_text("old")
        cache.save(link)
        assert link.is_symlink() and not target.is_symlink()
        assert TNTCache.load(target, model.config).get_seq_length() == 21
    assert sorted(x.name for x in (tmp_path / "disk").iterdir()) == ["new", "old"]


def test_who_could_read_a_session_can_read_the_next_one(cache, tmp_path):
    path = tmp_path / "session"
    cache.save(path)
    assert mode(path) == 0o600  # of a conversation, whose tokens can be guessed from it
    for wanted in (0o664, 0o440):
        path.chmod(wanted)
        cache.save(path)
        assert mode(path) == wanted


def test_a_session_stays_its_owner_s(cache, tmp_path):
    owner = os.geteuid(), [os.getegid(), *os.getgroups()][-1]
    if os.geteuid() == 0:  # nobody else gives files away
        owner = 1234, 4321
    path = tmp_path / "session"
    path.touch(0o640)
    os.chown(path, *owner)
    cache.save(path)
    assert (path.stat().st_uid, path.stat().st_gid, mode(path)) == (*owner, 0o640)


@pytest.mark.parametrize("member", [True, False], ids=["of its group", "of another group"])
def test_a_session_that_another_replaces_opens_to_no_other_group(cache, tmp_path, monkeypatch, member):
    """Who is not its owner cannot give it back to them, but to its group, being of it; else the group has no say."""
    chown, path = os.chown, tmp_path / "session"
    path.touch()
    path.chmod(0o660)
    group = 4321 if os.geteuid() == 0 else [os.getegid(), *os.getgroups()][-1]
    chown(path, -1, group)

    def allowed(name, uid, gid):
        if uid != -1 or not member:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        chown(name, uid, gid)

    monkeypatch.setattr(os, "chown", allowed)
    cache.save(path)
    kept = member or path.stat().st_gid == group  # the only one that the process has
    assert mode(path) == (0o660 if kept else 0o600) and (path.stat().st_gid == group) == kept


def test_only_files_are_sessions(model, cache, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # so that nobody waits for another end
    for name in ("folder", "pipe", "loop", "link"):
        path = tmp_path / name
        before = os.lstat(path)
        for work in (cache.save, lambda path: TNTCache.load(path, model.config)):
            with pytest.raises(OSError, match="needs a regular file") as caught:
                work(path)
            assert caught.value.filename == str(path)
            assert isinstance(caught.value, IsADirectoryError) == (name == "folder")
        assert os.path.samestat(os.lstat(path), before)
    os.close(pipe)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["folder", "link", "loop", "pipe"]


def test_a_place_that_is_not_there_is_named(model, cache, tmp_path):
    path = tmp_path / "nowhere" / "session"
    for work in (cache.save, lambda path: TNTCache.load(path, model.config)):
        with pytest.raises(FileNotFoundError) as caught:
            work(path)
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_the_older_session(model, cache, tmp_path, there):
    path = tmp_path / "session"
    if there:
        filled(model, tokens(2, 9)).save(path)

    def save():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        with pytest.raises(OSError) as caught:
            cache.save(path)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path)), caught.value

    assert in_a_child(save) == 0
    assert [x.name for x in tmp_path.iterdir()] == ["session"] * there
    assert not there or TNTCache.load(path, model.config).get_seq_length() == 9


def test_a_disk_that_says_late_that_it_is_full_leaves_the_older_session(model, cache, tmp_path, monkeypatch):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "session"
    filled(model, tokens(2, 9)).save(path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        cache.save(path)
    assert caught.value.filename == str(path) and [x.name for x in tmp_path.iterdir()] == ["session"]
    assert TNTCache.load(path, model.config).get_seq_length() == 9


# ------------------------------------------------------------------------------------------------------------- reading


def test_any_bit_that_changed_is_noticed(model, cache, tmp_path):
    """A sample of the header and of the numbers. Non-finite ones are not damage by themselves."""
    path = tmp_path / "session"
    cache.save(path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, header, 3), *range(header, len(content), len(content) // 97), len(content) - 1]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << place % 7
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="session: |is not a safetensors file|is not a TNT session"):
            TNTCache.load(path, model.config)
            pytest.fail(f"byte {place} of {len(content)}: {bytes(changed[max(place - 20, 0) : place + 20])}")
    path.write_bytes(content)
    assert TNTCache.load(path, model.config).get_seq_length() == 21


@pytest.mark.parametrize("damage", ["a number", "a name", "a shape", "a type", "a note", "the architecture"])
def test_a_session_that_was_written_anew_is_not_the_one_that_was_saved(model, cache, tmp_path, damage):
    path = tmp_path / "session"
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    name = "layers.0.state.0"
    if damage == "a number":
        tensors[name].view(-1)[0] += 1
    elif damage == "a name":
        tensors[f"{name}0"] = tensors.pop(name)  # in the same place among the others
    elif damage == "a shape":
        tensors[name] = tensors[name].reshape(-1)
    elif damage == "a type":
        tensors[name] = tensors[name].view(torch.int64)
    elif damage == "a note":
        metadata["counts_padding"] = "true"
    else:
        metadata["config"] = metadata["config"].replace("hidden_size", "hidden_sise")
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="session: sha256='.*the file is damaged"):
        TNTCache.load(path, model.config)


def test_sessions_of_earlier_releases_are_read(model, cache, tmp_path):
    path = tmp_path / "session"
    cache.save(path)
    metadata, tensors = undigested(path), load_file(path)
    save_file(tensors, path, metadata=metadata)
    assert TNTCache.load(path, model.config).get_seq_length() == 21
    del metadata["counts_padding"]  # of still earlier ones
    save_file(tensors, path, metadata=metadata)
    assert TNTCache.load(path, model.config).get_seq_length() == 21
    for name in ("sha257", "own_positionr"):  # which none of them wrote
        save_file(tensors, path, metadata=metadata | {name: "true"})
        with pytest.raises(ValueError, match=f"session: unknown field '{name}'"):
            TNTCache.load(path, model.config)


@pytest.mark.parametrize("changes", [{}, {"variant": "lmm"}], ids=["default", "lmm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_diverged_memory_is_a_session(changes, dtype, tmp_path):
    model = tiny_model(dtype, **changes)
    cache = filled(model, tokens(2, 9))
    cache.layers[0].recurrent_states[0].fill_(float("nan"))
    cache.save(tmp_path / "session")
    again = TNTCache.load(tmp_path / "session", model.config)
    for name, x in cache._tensors().items():
        torch.testing.assert_close(again._tensors()[name], x, rtol=0, atol=0, equal_nan=True)
