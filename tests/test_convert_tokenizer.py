"""A conversion gives the ids of its source's tokenizer, whatever the library makes of the model's type.

The library reads the files of some types with a class of its own choice: those of a Mistral or a Phi-3 name a Llama's,
whose ids differ in the spaces around special tokens; those of a Qwen2 may name any.
"""

import json

import pytest
from checkpoints import save_source
from tiny import later
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from tnt_hf.cli import main
from tnt_hf.conversion import convert_checkpoint, verify_conversion
from tnt_hf.conversion.manifest import MANIFEST, check_manifest
from tnt_hf.conversion.verify_report import Report
from tnt_hf.conversion.verify_tokenizer import check_tokenizer
from tnt_hf.recipes.data import train_tokenizer


TEXTS = ["<s>[INST] hi there [/INST] ok</s>", " leading", "x</s> y</s>z", "year 1984 in 2024", "a\n\n b\tc", ""]
CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer", None]


def sentencepiece_like(folder, named) -> None:
    """As the files of Llama 2 and Mistral 7B: a space is a letter, and one comes before the text."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁▁", "hi", "▁th", "ere", "[INST]", *"abcdeghiklnoptxyz/[]INST0123456789"]
    tokenizer = Tokenizer(
        models.BPE(vocab={x: i for i, x in enumerate(dict.fromkeys(words))}, merges=[("▁", "▁")], unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | ({"tokenizer_class": named} if named else {})))


def of_bytes(folder, named) -> None:
    """As the files of GPT-2, Llama 3 and Qwen."""
    train_tokenizer(["year 1984 in 2024 <s> hi there"] * 3, 280).save_pretrained(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields.pop("tokenizer_class", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | ({"tokenizer_class": named} if named else {})))


FILES = {"pieces": sentencepiece_like, "bytes": of_bytes}


def ids(folder) -> list:
    return ids_of(AutoTokenizer.from_pretrained(folder))


def ids_of(tokenizer) -> list:
    return [(tokenizer(text)["input_ids"], tokenizer.decode(tokenizer(text)["input_ids"])) for text in TEXTS]


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("model_type", ["mistral", "qwen2", *later("llama", "qwen3", "phi3")])
def test_the_ids_are_the_source_s(tmp_path, model_type, files):
    source = save_source(tmp_path / "source", model_type)
    for named in CLASSES:
        FILES[files](source, named)
        result = convert_checkpoint(source, tmp_path / "result", progress=False, overwrite=True)
        assert ids(result) == ids(source), named


@pytest.mark.parametrize("flag", [True, *later(None)])
def test_a_pattern_that_is_mended_for_mistrals_alone(tmp_path, flag):
    """By their type and an old release in config.json, in large vocabularies."""
    source, said = save_source(tmp_path / "source", "mistral"), []
    of_bytes(source, "LlamaTokenizer")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<{i}>": len(vocabulary) + i for i in range(100_001)}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, more in (
        ("config.json", {"transformers_version": "4.46.0"}),
        ("tokenizer_config.json", {} if flag is None else {"fix_mistral_regex": flag}),
    ):
        (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | more))
    result = convert_checkpoint(source, tmp_path / "result", progress=False, say=said.append)
    assert ids(result) == ids(source)
    if flag:
        assert ids(source) != ids_of(AutoTokenizer.from_pretrained(source, fix_mistral_regex=False))
        assert check_manifest(result) == []
    else:
        assert any("fix_mistral_regex=True" in line for line in said)


def with_code(folder, ran) -> None:
    """A tokenizer of a class in a file of its own, which leaves a mark where it is run."""
    of_bytes(folder, "FooTokenizer")
    (folder / "tokenization_foo.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import TokenizersBackend\n"
        "class FooTokenizer(TokenizersBackend): pass\n"
    )
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields["auto_map"] = {"AutoTokenizer": [None, "tokenization_foo.FooTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def test_a_tokenizer_s_own_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    source, ran = save_source(tmp_path / "source", vocab_size=300), tmp_path / "ran"
    with_code(source, ran)
    said = []
    result = convert_checkpoint(source, tmp_path / "result", progress=False, say=said.append)
    assert any("tokenizer cannot be loaded" in line for line in said)
    assert any("has code of its own, which is not copied" in line for line in said)
    assert "auto_map" not in json.loads((result / "tokenizer_config.json").read_text())
    assert main(["verify", str(source), str(result), "--tokens", "16"]) == 0
    assert "random ids" in capsys.readouterr().out
    assert not ran.exists()
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        verify_conversion(source, result, text="a text to be read", progress=False)


def test_the_card_of_a_source_whose_tokenizer_is_elsewhere_starts(tmp_path):
    source = save_source(tmp_path / "source", vocab_size=300)
    with_code(source, tmp_path / "ran")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    card = (result / "README.md").read_text()
    [code] = [part.split("```")[0] for part in card.split("```python\n")[1:] if "generate" in part]
    assert "the source's tokenizer cannot be loaded from here" in code
    exec(code.replace('"result"', repr(str(result))), {})


def test_code_on_the_hub_is_referred_to(tmp_path):
    """From there it can be had, and who loads the result decides whether it runs."""
    source = save_source(tmp_path / "models--owner--name" / "snapshots" / ("a" * 40), vocab_size=300)
    with_code(source, tmp_path / "ran")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    fields = json.loads((result / "tokenizer_config.json").read_text())
    assert fields["auto_map"] == {"AutoTokenizer": [None, "owner/name--tokenization_foo.FooTokenizer"]}
    assert "AutoTokenizer.from_pretrained" in (result / "README.md").read_text()


def test_verify_compares_the_ids(tmp_path):
    source = save_source(tmp_path / "source", "mistral", vocab_size=300)
    sentencepiece_like(source, "LlamaTokenizer")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)

    def row() -> dict:
        check_tokenizer(source, result, report := Report(lambda step: None))
        return report.rows[0]

    assert row()["status"] == "pass" and row()["measured"]["unlike"] == 0
    (result / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    assert row()["status"] == "fail"
    assert "11 of 13 texts, such as 'a text', by" in (said := row()["measured"]["problems"][0]), said
    assert said.endswith("by TokenizersBackend in the source and LlamaTokenizer here")
    (result / MANIFEST).unlink()
    assert row()["status"] == "measured" and row()["measured"]["unlike"] > 0  # a trained one may have other tokens
