"""A conversion that cannot be right fails with one clear line, before it writes anything, and loses nothing."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import LONGROPE, reload, save_source
from safetensors.torch import load_file, save_file

from tnt_hf.conversion import convert, convert_checkpoint, writer
from tnt_hf.conversion.files import ROOM
from tnt_hf.conversion.manifest import MANIFEST, check_manifest
from tnt_hf.conversion.shards import TORCH, is_finite
from tnt_hf.conversion.source import INDEX, read_header
from tnt_hf.conversion.staging import LOCK, Staging, clean_up


SHARD = "model-00001-of-00003.safetensors"
KILLER = Path(__file__).with_name("convert_killer.py")


@pytest.fixture
def source(tmp_path) -> Path:
    return save_source(tmp_path / "source", shards="45KB")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(tmp_path: Path, message: str, **options) -> str:
    """The conversion raises an error that contains `message`, in one line, and changes nothing anywhere."""
    before = content(tmp_path)
    with pytest.raises((ValueError, OSError)) as caught:
        options = {"output": tmp_path / "result", "progress": False} | options
        convert_checkpoint(options.pop("source", tmp_path / "source"), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)
    assert content(tmp_path) == before and not (tmp_path / "result").exists()
    assert not list(tmp_path.glob(".result*"))
    return str(caught.value)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_index(source: Path, **changes) -> None:
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    weight_map = {name: shard for name, shard in (weight_map | changes).items() if shard is not None}
    edit_json(source / INDEX, weight_map=weight_map)


def edit_tensors(path: Path, **changes) -> None:
    """Replace tensors of a shard; `None` removes one. Dots are written as `__`."""
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({n: x for n, x in tensors.items() if x is not None}, path, metadata={"format": "pt"})


def holder(source: Path, tensor: str) -> Path:
    return source / json.loads((source / INDEX).read_text())["weight_map"][tensor]


# -------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    "field, value",
    [
        *(("num_hidden_layers", value) for value in (-1, 0, 2, 4, 10**9, 10**30, True, "3", 2.5)),
        *(("rms_norm_eps", value) for value in (float("nan"), float("inf"), 0.0, -1e-6, "small")),
        *(("hidden_size", value) for value in (0, -32, 48, 2**40)),
        *(("num_attention_heads", value) for value in (0, 5, -4)),
        ("num_key_value_heads", 3),
        ("vocab_size", -97),
        ("vocab_size", 96),
        ("intermediate_size", 49),
        ("head_dim", 0),
        ("hidden_act", "nothing"),
        ("attention_dropout", 1.5),
        ("max_position_embeddings", 0),
        ("attention_bias", True),
        ("rope_parameters", {"rope_type": "unheard of", "rope_theta": 1e4}),
        ("rope_parameters", [1]),
        *(("rope_parameters", {"rope_type": "default", "rope_theta": x}) for x in (float("nan"), 0, -1e4, "big")),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": float("inf")}),
        ("rope_parameters", {"rope_type": ["default"], "rope_theta": 1e4}),
        ("rope_parameters", LONGROPE | {"long_factor": [1.0, 1.0]}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("pad_token_id", 97),
        ("is_causal", False),
        ("model_type", ["llama"]),
        ("model_type", "gpt2"),
        ("model_type", "tnt"),
        ("model_type", None),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("logit_scale", 0.5),
        ("dtype", "int8"),
        ("dtype", {"": "float32"}),
        ("attn_implementation", "nonsense"),
        ("attn_implementation", 5),
    ],
)  # fmt: skip
def test_bad_config_values(tmp_path, source, field, value):
    edit_json(source / "config.json", **{field: value})
    message = refused(tmp_path, "source")
    named = {"attention_bias": "q_proj.bias", "intermediate_size": "mlp", "num_attention_heads": "heads"}
    named |= dict.fromkeys(("hidden_size", "vocab_size"), "embed_tokens" if value in (48, 96) else field)
    assert named.get(field, field) in message


def test_an_unsupported_architecture_lists_the_supported(tmp_path, source):
    edit_json(source / "config.json", model_type="mamba")
    refused(tmp_path, "'mamba': not supported; supported are llama, mistral, qwen2, qwen3, phi3")
    edit_json(source / "config.json", model_type="gpt2")
    refused(tmp_path, "qwen3, phi3; tnt_hf.conversion.inject gives a loaded one a memory")


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"llama"', '{"a":' * 100_000], ids=lambda text: text[:9])
def test_a_damaged_config(tmp_path, source, text):
    (source / "generation_config.json").write_text(text)
    refused(tmp_path, "generation_config.json")
    (source / "config.json").write_text(text)
    refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, "window=2.5"),
        ({"window": 10**30}, "window=10000"),
        ({"window": 7, "keep_full_attention": 1}, "keep_full_attention=1"),
        ({"local_chunk_sizes": 2.5}, "local_chunk_sizes=2.5"),
        ({"max_shard_size": "9" * 400}, "max_shard_size='999"),
        ({"window": 7, "keep_full_attention": [3]}, "keep_full_attention=[3]"),
        ({"window": 7, "keep_full_attention": [1, 1]}, "keep_full_attention=[1, 1]"),
        ({"window": 7, "keep_full_attention": "auto:0", "probe": "x"}, "auto:0"),
        ({"keep_full_attention": [1]}, "needs a window"),
        ({"probe": "text"}, "needs a window"),
        ({"window": 7, "probe": "text"}, "no tokenizer"),
        ({"memory_layers": [5]}, "memory_layers"),
        ({"variant": "mal"}, "variant='mal'"),
        ({"memory_gate": "nothing"}, "memory_gate"),
        ({"local_chunk_sizes": [0]}, "local_chunk_sizes"),
        ({"link": "symlink"}, "link='symlink'"),
        ({"full_attention_layers": [1]}, "full_attention_layers=[1]: TNTConfig has no such field"),
        ({"source_config": 1}, "source_config=1: TNTConfig has no such field"),
        ({"link": "link", "dtype": "bfloat16"}, "needs shards of its own"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": True}, "seed=True"),
        ({"max_shard_size": "0"}, "max_shard_size='0'"),
        ({"max_shard_size": "1iB"}, "max_shard_size='1iB'"),
        ({"revision": "main"}, "revision='main'"),
    ],
)
def test_bad_settings(tmp_path, source, options, message):
    refused(tmp_path, message, **options)


# -------------------------------------------------------------------------------------------------------------- source


def pickle_only(source: Path):
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()
    torch.save({}, source / "pytorch_model.bin")


def adapter(source: Path):
    (source / "adapter_config.json").write_text("{}")


def no_weights(source: Path):
    for path in [*source.glob("*.safetensors"), source / INDEX]:
        path.unlink()


def swapped_in_the_index(source: Path):
    edit_index(source, **{"lm_head.weight": SHARD, "model.embed_tokens.weight": "model-00003-of-00003.safetensors"})


def leads_outside(source: Path):
    shutil.move(source / SHARD, source.parent / "elsewhere")
    (source / SHARD).symlink_to(source.parent / "elsewhere")


def leads_to_itself(source: Path):
    (source / "tokenizer.json").symlink_to("tokenizer.json")


def a_folder(source: Path):
    (source / SHARD).unlink()
    (source / SHARD).mkdir()


def in_two_shards(source: Path):
    edit_tensors(source / SHARD, model__norm__weight=torch.ones(32))
    edit_tensors(source / "model-00002-of-00003.safetensors", model__norm__weight=torch.ones(32))


def quantized(source: Path):
    path = holder(source, "model.norm.weight")
    edit_tensors(path, model__norm__weight=torch.ones(32, dtype=torch.int8))


def a_wrong_shape(source: Path):
    edit_tensors(holder(source, "model.norm.weight"), model__norm__weight=torch.ones(31))


def an_unknown_tensor(source: Path):
    edit_tensors(source / SHARD, score__weight=torch.ones(2, 32))
    edit_index(source, **{"score.weight": SHARD})


def a_missing_tensor(source: Path):
    edit_tensors(holder(source, "model.norm.weight"), model__norm__weight=None)
    edit_index(source, **{"model.norm.weight": None})


def without_a_head(source: Path):
    edit_tensors(holder(source, "lm_head.weight"), lm_head__weight=None)
    edit_index(source, **{"lm_head.weight": None})


def more_layers_than_tensors(source: Path):
    edit_json(source / "config.json", num_hidden_layers=99)


SOURCES = {
    pickle_only: "Pickles can run code",
    adapter: "holds an adapter",
    no_weights: "has no model.safetensors",
    swapped_in_the_index: "lm_head.weight",
    leads_outside: "outside the checkpoint's folder",
    leads_to_itself: "tokenizer.json: missing",
    a_folder: "not a regular file",
    in_two_shards: "model.norm.weight",
    quantized: "has dtype I8",
    a_wrong_shape: "has shape [31]",
    an_unknown_tensor: "unknown tensor 'score.weight'",
    a_missing_tensor: "tensor 'model.norm.weight' missing",
    without_a_head: "tensor 'lm_head.weight' missing",
    more_layers_than_tensors: "num_hidden_layers=99, but there are 30 tensors",
    lambda source: (source / SHARD).unlink(): "missing",
    lambda source: (source / "config.json").unlink(): "config.json",
    lambda source: (source / INDEX).write_text("{}"): "has no weight_map",
    lambda source: edit_index(source, **{"model.norm.weight": None}): "is not in model.safetensors.index.json",
    lambda source: edit_index(source, **{"model.more.weight": SHARD}): "'model.more.weight'",
    lambda source: edit_index(source, **{"model.norm.weight": 3}): "is not a file name",
    lambda source: edit_index(source, **{"model.norm.weight": "../x"}): "'../x' is not a plain file name",
    lambda source: edit_index(source, **{"model.norm.weight": str(source / SHARD)}): "is not a plain file name",
    lambda source: edit_index(source, **{"model.norm.weight": "sub/x"}): "is not a plain file name",
    lambda source: edit_index(source, **{"model.norm.weight": ".."}): "is not a plain file name",
}


@pytest.mark.parametrize("break_it", SOURCES, ids=lambda f: f.__name__ if f.__name__ != "<lambda>" else SOURCES[f])
def test_broken_sources(tmp_path, source, break_it):
    break_it(source)
    refused(tmp_path, SOURCES[break_it])


def test_truncated_and_damaged_shards(tmp_path, source):
    path = source / SHARD
    whole = path.read_bytes()
    for size in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(tmp_path, SHARD)
    for damaged in (whole + b"x", b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:]):
        path.write_bytes(damaged)
        refused(tmp_path, SHARD)
    header = int.from_bytes(whole[:8], "little")
    path = tmp_path / "flipped"
    for i in range(0, 8 + header, 4):  # any bit of a header: an understandable error, or a header that is as good
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
        try:
            assert sum(tensor.nbytes for tensor in read_header(path)) == len(whole) - 8 - header
        except ValueError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    "damage",
    [
        {"model.norm.weight": {"dtype": ["F32"], "shape": [32], "data_offsets": [0, 128]}},
        {"model.norm.weight": {"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]}},
        {"model.norm.weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}},
        {"model.norm.weight": "F32"},
        {"__metadata__": ["pt"]},
        {"__metadata__": {"format": "pt", "n": 1}},
        "[" * 100_000,
    ],
    ids=lambda damage: str(damage)[:60],
)
def test_a_header_that_lies(tmp_path, damage):
    path = save_source(tmp_path / "source") / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    text = damage if isinstance(damage, str) else json.dumps(json.loads(whole[8:end]) | damage)
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + whole[end:])
    refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "leave a gap at byte"),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {}, "__metadata__": {}}',
            "twice",
        ),
        ('{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}', "header of tensor 'a' is damaged"),
    ],
)
def test_a_header_that_is_no_safetensors(tmp_path, text, message):
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(ValueError, match=message):
        read_header(tmp_path / "x")


def test_a_fused_tensor_of_another_size(tmp_path):
    source = save_source(tmp_path / "source", "phi3")
    name, tensors = "model.layers.0.self_attn.qkv_proj.weight", load_file(source / "model.safetensors")
    edit_tensors(source / "model.safetensors", **{name: torch.cat([tensors[name], tensors[name][:8]])})
    refused(tmp_path, f"tensor {name!r} has shape [72, 32], not [64, '...']")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_are_none(tmp_path, dtype, value):
    source = save_source(tmp_path / "source", dtype=dtype)
    weight = load_file(source / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    weight[-1, -1] = value
    edit_tensors(source / "model.safetensors", model__layers__1__mlp__up_proj__weight=weight)
    message = "tensor 'model.layers.1.mlp.up_proj.weight' holds nan or infinity"
    refused(tmp_path, message, link="copy")
    refused(tmp_path, message, dtype=torch.float64)
    refused(tmp_path, message, link="link")
    convert_checkpoint(source, tmp_path / "unread", link="link", check=False, progress=False)  # as its help says


@pytest.mark.parametrize("name, dtype", TORCH.items())
def test_what_counts_as_a_number(name, dtype):
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, -info.tiny, 1.0, -3.0], dtype=dtype)
    as_bytes = lambda tensor: memoryview(bytearray(tensor.view(torch.uint8).tolist()))  # noqa: E731
    assert is_finite(as_bytes(numbers), name)
    for none in (float("inf"), float("-inf"), float("nan")):
        for place in range(len(numbers)):
            spoilt = numbers.clone()
            spoilt[place] = none
            assert not is_finite(as_bytes(spoilt), name)


def test_numbers_that_do_not_fit_the_new_dtype(tmp_path):
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    edit_tensors(source / "model.safetensors", model__norm__weight=torch.full((32,), 1e5, dtype=torch.bfloat16))
    refused(tmp_path, "'model.norm.weight' holds nan or infinity (F16)", dtype="float16")


# -------------------------------------------------------------------------------------------------------------- output


def test_the_output_must_be_another_folder(tmp_path, source):
    (tmp_path / "alias").symlink_to(source)
    for output in (source, tmp_path / "alias", source / "x", tmp_path / "alias" / "x" / "y", tmp_path):
        for overwrite in (False, True):
            refused(tmp_path, "source", output=output, overwrite=overwrite)


@pytest.mark.parametrize("name, message", [("loop", "leads nowhere"), ("caf\udce9", "is not UTF-8 text")])
def test_paths_that_nothing_can_be_written_to_or_about(tmp_path, source, name, message):
    (tmp_path / "loop").symlink_to("loop")
    assert "output='" in refused(tmp_path, message, output=tmp_path / name)
    if name != "loop":
        shutil.copytree(source, tmp_path / name)
        assert "source='" in refused(tmp_path, message, source=tmp_path / name)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_mount_point_is_refused_before_any_work(tmp_path, source, monkeypatch, overwrite):
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mounted)
    monkeypatch.setattr(convert, "read_source", lambda *args: pytest.fail("work was done"))
    with pytest.raises(ValueError, match="output='.*mounted': is a mount point.*name a folder inside it"):
        convert_checkpoint(source, mounted, progress=False, overwrite=overwrite)
    monkeypatch.undo()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == mounted)
    assert convert_checkpoint(source, mounted / "result", progress=False) == mounted / "result"


def test_existing_folders_are_only_replaced_when_asked_and_only_conversions(tmp_path, source):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        refused(tmp_path, "never overwritten", output=mine, overwrite=overwrite)
    refused(tmp_path, "is not a folder", output=mine / "thesis.txt", overwrite=True)
    (mine / "thesis.txt").unlink()
    convert_checkpoint(source, mine, progress=False)  # an empty folder has nothing to lose
    refused(tmp_path, "--overwrite", output=mine)
    (tmp_path / "link").symlink_to(mine)
    convert_checkpoint(source, tmp_path / "link", progress=False, overwrite=True, window=7)
    assert reload(mine).config.sliding_window == 7 and (tmp_path / "link").is_symlink()
    edit_json(source / "config.json", rms_norm_eps=-1)
    refused(tmp_path, "rms_norm_eps", output=mine, overwrite=True)
    assert check_manifest(mine) == []


def test_overwriting_takes_nothing_that_no_conversion_wrote(tmp_path, source):
    result = convert_checkpoint(source, tmp_path / "mine", progress=False)
    (result / "checkpoint-500").mkdir()
    (result / "checkpoint-500" / "trained").write_text("for days")
    refused(tmp_path, "holds 'checkpoint-500/trained', which no conversion wrote", output=result, overwrite=True)
    shutil.rmtree(result / "checkpoint-500")
    convert_checkpoint(source, result, progress=False, overwrite=True)
    (result / MANIFEST).write_text("")  # an empty file of that name proves nothing
    refused(tmp_path, "never overwritten", output=result, overwrite=True)


def test_a_shard_that_does_not_reach_the_disk_ends_the_conversion(tmp_path, source, monkeypatch):
    def broken(path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.EIO, "fsync failed", str(path))

    monkeypatch.setattr(writer, "flush", broken)
    with pytest.raises(OSError, match="fsync failed"):
        convert_checkpoint(source, tmp_path / "result", progress=False, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_without_room_for_the_memory_beside_links_is_noticed_first(tmp_path, source, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=ROOM + 1))
    with pytest.raises(OSError, match="GiB are free"):
        convert_checkpoint(source, tmp_path / "result", progress=False, link="link")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_is_too_small_is_noticed_first(tmp_path):
    """A file of zeros that takes no room: twice what is free."""
    rows = 2 * shutil.disk_usage(tmp_path).free // 128
    if rows >= 2**31:
        pytest.skip("the disk is too large for a vocabulary")
    source = save_source(tmp_path / "source", tie_word_embeddings=True)
    edit_json(source / "config.json", vocab_size=rows)
    tensors = load_file(source / "model.safetensors")
    header, place = {}, 0
    for name, tensor in tensors.items():
        shape = [rows, 32] if "embed" in name else list(tensor.shape)
        end = place + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    for options in ({"link": "copy"}, {"dtype": "float64"}):
        with pytest.raises(OSError, match="GiB are free") as caught:
            convert_checkpoint(source, tmp_path / "result", progress=False, **options)
        assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert_checkpoint(source, tmp_path / "result", progress=False, link="link")  # takes no room


def test_links_that_cannot_be_made(tmp_path, source, monkeypatch):
    """Another file system: `link` says so, `auto` copies and says so."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    refused(tmp_path, "link='link'", link="link")
    said = []
    result = convert_checkpoint(source, tmp_path / "result", progress=False, say=said.append)
    assert "copying the shards" in said[0] and check_manifest(result) == []


def test_all_shards_are_linked_or_none(tmp_path, monkeypatch):
    """The last one lies on another file system."""
    source = save_source(tmp_path / "source", shards="20KB")
    shards, link = sorted(source.glob("model-*.safetensors")), os.link

    def refuse_the_last(origin, target):
        if Path(origin).name == shards[-1].name:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        link(origin, target)

    monkeypatch.setattr(os, "link", refuse_the_last)
    assert len(shards) > 1
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    assert {path.stat().st_nlink for path in (*shards, *result.glob("model-base-*"))} == {1}
    assert check_manifest(result) == []


# ----------------------------------------------------------------------------------------------- interrupted, together


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_a_full_disk(tmp_path, source, every):
    """Processes that die at one file operation after the other, and one without room: see convert_killer.py."""
    # In memory where there is such a place: a disk takes its time for every flush, and nothing here loses power.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        shutil.copytree(source, Path(folder) / "source")
        command = [sys.executable, KILLER, folder, *["every"] * every]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert int(done.stdout.split()[0]) > 30, done.stdout
        assert [path.name for path in Path(folder).iterdir()] == ["source"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_command_that_is_ended_leaves_nothing(tmp_path, source, number):
    """The process gets the signal when it writes the model card, with all shards in place."""
    program = f"""
import os, signal, sys
from tnt_hf.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in signal.SIGTERM, signal.SIGHUP:  # as under nohup they may be ignored
    signal.signal(number, signal.SIG_DFL)
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("README.md") and "w" in (arguments[1] or ""):
        os.kill(os.getpid(), {int(number)})
sys.addaudithook(hook)
sys.exit(main(["convert", "source", "result", "--quiet"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_two_at_once_do_not_disturb_each_other(tmp_path, source):
    target = tmp_path / "result"
    with Staging(target, False, print) as slow:
        (slow.folder / "half").write_text("done")
        convert_checkpoint(source, target, progress=False)
        assert (slow.folder / "half").exists(), "a living process lost its work"
        with pytest.raises(FileExistsError, match="overwrite"):
            slow.commit()
    assert check_manifest(target) == [] and not list(tmp_path.glob(".result*"))


def test_leftovers_are_removed_only_if_they_are_ours(tmp_path, source):
    names = {".result.tnt-partial-dead": LOCK, ".result.tnt-partial-foreign": "notes.txt", ".results": LOCK}
    for name, file in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / ".result.tnt-partial-file").touch()
    (tmp_path / ".result.tnt-partial-link").symlink_to(tmp_path / ".results")
    said = []
    convert_checkpoint(source, tmp_path / "result", progress=False, say=said.append)
    for name in ("file", "link"):
        (tmp_path / f".result.tnt-partial-{name}").unlink()
    assert said == ["removed .result.tnt-partial-dead, left over from an interrupted run"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"source", "result", ".result.tnt-partial-foreign", ".results"} and any(
        (tmp_path / ".results").iterdir()
    )


def test_leftovers_that_another_run_removes_first(tmp_path, monkeypatch):
    dead = tmp_path / ".result.tnt-partial-dead"
    dead.mkdir()
    (dead / LOCK).touch()
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *args: (shutil.rmtree(dead, ignore_errors=True), lock(*args)))
    clean_up(tmp_path / "result", pytest.fail)
    assert not list(tmp_path.iterdir())


def test_a_replacement_cut_in_half_is_undone(tmp_path, source):
    """Where two folders cannot be swapped in one step, a process that dies between two leaves the old one aside."""
    target, said = convert_checkpoint(source, tmp_path / "result", progress=False), []
    dead = tmp_path / ".result.tnt-partial-dead"
    (dead / "model").mkdir(parents=True)
    (dead / LOCK).touch()
    os.rename(target, dead / "old")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        with Staging(target, False, said.append):
            pass
    assert said[0] == f"brought back {target}, which an interrupted run was replacing"
    assert check_manifest(target) == [] and not dead.exists()


def test_the_manifest_is_in_every_result(tmp_path, source):
    result = convert_checkpoint(source, tmp_path / "a" / "b" / "result", progress=False)
    assert (result / MANIFEST).is_file() and check_manifest(result) == []
