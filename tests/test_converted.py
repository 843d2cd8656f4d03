"""The conversion of a recipe's `source` is used again only as it was made."""

import os
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tnt_hf.conversion.manifest import MANIFEST
from tnt_hf.recipes import converted
from tnt_hf.recipes.arguments import ModelArguments
from tnt_hf.recipes.converted import CONVERTED, convert_once


SHARD = "model-base-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("source")
    LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def again(source, tmp_path):
    """What asks for a conversion that was made, and says what happened. Its shards are its own, to be spoilt."""
    model = ModelArguments(source=str(source), convert={"window": 8, "link": "copy", "memory_layers": [0]})

    def convert():
        said = []
        assert convert_once(model, tmp_path / "converted", 0, said.append) == tmp_path / "converted"
        return said[0].partition(" ")[0]

    assert convert() == "converting"
    return convert


def spoil(path) -> None:
    """One bit, with the size and the time as they were."""
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_conversion_as_it_was_made_is_used_again(again, tmp_path):
    (tmp_path / "converted" / "evaluation").mkdir()  # by `tnt eval`
    (tmp_path / "converted" / "evaluation" / "evaluation.json").touch()
    assert again() != "converting"


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_conversion_that_was_changed_is_refused(again, tmp_path, name):
    folder = tmp_path / "converted"
    spoil(folder / name)
    with pytest.raises(ValueError, match=f"^output_dir: {folder} is not what was converted, {name}: its SHA-256 dif"):
        again()
    shutil.rmtree(folder)  # as it is told
    assert again() == "converting" and again() != "converting"


def test_a_conversion_that_lacks_a_file_or_has_another_is_refused(again, tmp_path):
    folder = tmp_path / "converted"
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match="pytorch_model.bin: not in the manifest; delete it, to convert anew, or choo"
    ):
        again()
    (folder / "pytorch_model.bin").unlink()
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json: missing"):
        again()
    (folder / MANIFEST).unlink()
    with pytest.raises(ValueError, match=f"{MANIFEST}: .*No such file"):
        again()


def test_of_a_large_file_the_size_must_do(again, tmp_path, monkeypatch):
    path = tmp_path / "converted" / SHARD
    monkeypatch.setattr(converted, "READ", path.stat().st_size - 1)
    spoil(path)
    assert again() != "converting"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=f"{SHARD}: .* bytes, .* when converted"):
        again()


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_a_record_that_cannot_be_read_is_named(again, tmp_path, text):
    (tmp_path / CONVERTED).write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path / CONVERTED}: (is not valid JSON|must hold a JSON object)"):
        again()
