"""What a checkpoint is read from: the files that are asked of the Hub, links, indices and headers of tensors."""

import json
from fnmatch import fnmatch
from types import SimpleNamespace

import huggingface_hub
import pytest
from checkpoints import save_source
from huggingface_hub.errors import HTTPError

from tnt_hf.conversion import load_injected, source
from tnt_hf.conversion.source import INDEX, check_reachable, inside, locate, read_header, read_source


OUTSIDE = "outside the checkpoint's folder"


# --- the Hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """What is asked for, as (revision, patterns), and the folder that holds it."""
    calls, folder = [], tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)

    def download(name, *, revision, allow_patterns):
        calls.append((revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(source, "check_reachable", lambda name: None)
    return calls, folder


def test_weights_are_of_the_commit_whose_configuration_was_read(hub):
    """Whatever is pushed in between."""
    calls, folder = hub
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "part"}}))
    locate("a/b", "main")
    assert [revision for revision, _ in calls] == ["main", "c0ffee"]
    assert calls[1][1] == ["model.safetensors", "part"]


@pytest.mark.parametrize(
    "name",
    "LICENSE LICENSE.md License.txt license USE_POLICY.md NOTICE Copying adapter_config.json README.md"
    " additional_chat_templates/tool.jinja".split(),
)
def test_what_comes_along(hub, name):
    calls, _ = hub
    locate("a/b")
    assert any(fnmatch(name, pattern) for pattern in calls[0][1])
    assert not any(fnmatch("modeling_llama.py", pattern) for pattern in calls[0][1])


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_name_the_hub_does_not_know(monkeypatch, status):
    def answer(*_, **__):
        error = HTTPError("no")
        error.response = SimpleNamespace(status_code=status)
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    with pytest.raises(OSError, match="knows none of that name, or none for you"):
        check_reachable("owner/private")


def test_a_token_and_a_cache_of_ones_own(tmp_path, monkeypatch):
    """They are asked for a model, and for its adapter's base."""
    asked = []

    def download(name, *, token, cache_dir, **_):
        asked.append((name, token, cache_dir))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: asked.append((name, self.token)))
    hub = {"token": "hf_mine", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match="a/b: holds neither"):
        load_injected("a/b", **hub)
    assert asked == [("a/b", "hf_mine"), *[("a/b", *hub.values())] * 2]


# --- files and links ------------------------------------------------------------------------------------------------


def test_a_folder_is_known_by_its_own_path(tmp_path, monkeypatch):
    """A link, or another working directory later, changes nothing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert locate("link") == (tmp_path / "real").resolve()


def test_links_to_blobs_are_those_of_the_hubs_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("{}")
    snapshot, other = (tmp_path / kind / "c0ffee" for kind in ("snapshots", "others"))
    for folder in (snapshot, other):
        folder.mkdir(parents=True)
        (folder / "config.json").symlink_to("../../blobs/1")
    assert inside(snapshot, "config.json").name == "1"
    with pytest.raises(ValueError, match=OUTSIDE):
        inside(other, "config.json")


def test_a_chat_template_is_not_fetched_from_elsewhere(tmp_path):
    folder = save_source(tmp_path / "source")
    (folder / "additional_chat_templates").mkdir()
    (tmp_path / "secret").write_text("{{ x }}")
    (folder / "additional_chat_templates" / "a.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=OUTSIDE):
        read_source(folder)


def test_a_dead_link_is_missing_weights_whatever_lies_beside_it(tmp_path):
    folder = save_source(tmp_path / "source")
    names = [tensor.name for tensor in read_header(folder / "model.safetensors")]
    (folder / "model.safetensors").rename(folder / "part")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "part")}))
    assert sorted(read_source(folder).tensors) == sorted(names)
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match="model.safetensors: missing"):
        read_source(folder)


# --- headers --------------------------------------------------------------------------------------------------------


def shard(path, **tensors):
    """A file of 8 bytes of float32. tensors: shape, first byte and end of each."""
    header = {name: {"dtype": "F32", "shape": x[0], "data_offsets": x[1:]} for name, x in tensors.items()}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    return path


def test_an_empty_tensor_may_lie_where_another_begins(tmp_path):
    """In any order of the header."""
    full, empty = {"a": ([2], 0, 8)}, {"b": ([0], 0, 0)}
    for tensors in (full | empty, empty | full):
        assert [tensor.name for tensor in read_header(shard(tmp_path / "x", **tensors))] == ["b", "a"]


def test_a_shape_has_no_negative_sizes(tmp_path):
    with pytest.raises(ValueError, match="header of tensor 'a' is damaged"):
        read_header(shard(tmp_path / "x", a=([-1, -2], 0, 8)))


def test_a_header_has_a_largest_length(tmp_path, monkeypatch):
    path = shard(tmp_path / "x", a=([2], 0, 8))
    assert read_header(path)
    monkeypatch.setattr(source, "MAX_HEADER", 20)
    with pytest.raises(ValueError, match="no safetensors file"):
        read_header(path)
