"""What a converted folder holds besides weights, and the ways to ask for it: command line, probe, Hub id."""

import argparse
import errno
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import yaml
from checkpoints import reload, save_source
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tnt_hf.cli import main
from tnt_hf.conversion import convert_checkpoint, verify_conversion
from tnt_hf.conversion.convert_command import add_arguments, run
from tnt_hf.conversion.files import copy_file, sha256
from tnt_hf.conversion.manifest import MANIFEST, add_digests, check_manifest, read_manifest
from tnt_hf.conversion.shards import NewTensor, by_one_thread, inspect, write_shard
from tnt_hf.conversion.source import read_header
from tnt_hf.recipes.benchmarks.bench import main as benchmark
from tnt_hf.recipes.data import train_tokenizer


WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(90))]
TEXT = " ".join(f"w{i * i % 90}" for i in range(120))
STRANGER = """
import sys
sys.path.append(sys.argv[1])
from importlib.util import find_spec
assert find_spec("tnt_hf") is None, "tnt_hf can still be imported"
import torch
from pathlib import Path
exec(Path("result/README.md").read_text().split("```python")[1].split("```")[0])
torch.save((model(torch.arange(3, 23)[None]).logits, tokenizer("w1 w2")["input_ids"]), sys.argv[2])
"""


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template="{{ messages[0]['content'] }}", **special
    ).save_pretrained(folder)


@pytest.fixture
def source(tmp_path) -> Path:
    folder = save_source(tmp_path / "source")
    save_tokenizer(folder)
    return folder


COMMAND = """
import argparse, sys
sys.argv[0] = "tnt"
from tnt_hf.conversion.convert_command import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
assert "torch" not in sys.modules, "the help has to wait for torch"
sys.exit(run(parser.parse_args()))
"""


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.long
def test_a_stranger_can_load_it_by_the_quick_start_of_its_card(tmp_path, source):
    """In a process that cannot import this package, from the code that is in the folder."""
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-I", "-S", "-c", STRANGER, sysconfig.get_paths()["purelib"], str(tmp_path / "found")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logits, ids = torch.load(tmp_path / "found")
    with torch.no_grad():
        assert logits.equal(reload(source)(torch.arange(3, 23)[None]).logits)
    assert ids == [WORDS.index("w1"), WORDS.index("w2")]
    travelling = {path.name: path.read_bytes() for path in (Path(__file__).parents[1] / "tnt_hf").glob("*_tnt.py")}
    assert {path.name: path.read_bytes() for path in result.glob("*.py")} == travelling


def test_a_tokenizer_that_config_json_names_is_named_again(tmp_path, source):
    for name, kind in (("config.json", "GPT2TokenizerFast"), ("tokenizer_config.json", None)):
        fields = json.loads((source / name).read_text()) | {"tokenizer_class": kind}
        (source / name).write_text(json.dumps(fields))
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    assert json.loads((result / "config.json").read_text())["tokenizer_class"] == "GPT2TokenizerFast"


@pytest.mark.parametrize("dtype, cast", [("float32", False), ("bfloat16", True)])
def test_a_dtype_that_the_source_has_is_no_cast(tmp_path, source, dtype, cast):
    result = convert_checkpoint(source, tmp_path / "result", progress=False, dtype=dtype)
    assert json.loads((result / MANIFEST).read_text())["conversion"]["cast"] is cast


@pytest.mark.parametrize("attention", [None, "eager"])
def test_info_reads_what_was_converted(tmp_path, source, attention, capsys):
    """Also what it says for a source without a tokenizer's class, or with an attention of its own."""
    (source / "tokenizer_config.json").unlink(missing_ok=True)
    fields = json.loads((source / "config.json").read_text()) | {"attn_implementation": attention}
    (source / "config.json").write_text(json.dumps(fields))
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    saved = json.loads((result / "config.json").read_text())
    assert saved["tokenizer_class"] and saved.get("attn_implementation") == attention
    assert main(["info", str(result)]) == 0 and "parameters" in capsys.readouterr().out


def test_generation_settings_of_an_old_checkpoint_come_along(tmp_path, source):
    """Without a file of their own they stand in config.json, where the library finds them for a Llama."""
    (source / "generation_config.json").unlink()
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields))
    plain = convert_checkpoint(source, tmp_path / "plain", progress=False)
    assert not (plain / "generation_config.json").exists()
    fields |= {"repetition_penalty": 1.8, "max_length": 40, "suppress_tokens": [1, 2]}
    (source / "config.json").write_text(json.dumps(fields))
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    expected, found = (AutoModelForCausalLM.from_pretrained(x).generation_config for x in (source, result))
    expected._from_model_config = False  # it has a file of its own now
    assert found.to_dict() == expected.to_dict() and found.repetition_penalty == 1.8
    assert verify_conversion(source, result, tokens=24)["passed"]


def test_tokenizer_generation_config_and_licence_come_along(tmp_path, source):
    generation = json.loads((source / "generation_config.json").read_text()) | {"temperature": 0.5, "do_sample": True}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "LICENSE").write_text("as is")
    (source / "LICENSES").mkdir()
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "LICENSE",
    ):
        assert (result / name).read_bytes() == (source / name).read_bytes()
    assert (result / "additional_chat_templates" / "tool.jinja").exists()
    assert not (result / "modeling_evil.py").exists()
    assert reload(result).generation_config.temperature == 0.5
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(result)
    assert old(TEXT)["input_ids"] == new(TEXT)["input_ids"] and old.chat_template == new.chat_template


def test_tokenizer_files_without_a_class_name_keep_their_family(tmp_path):
    """vocab.json and merges.txt alone: the library picks the class by the model type, which is ours now."""
    source = save_source(tmp_path / "source", "qwen2")
    (source / "vocab.json").write_text(
        json.dumps({c: i for i, c in enumerate("abcdefgh")} | {"ab": 8, "<|endoftext|>": 9})
    )
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(result)
    assert type(old) is type(new) and old("abba")["input_ids"] == new("abba")["input_ids"]


def test_the_card_is_complete_and_passes_the_licence_on(tmp_path, source):
    head = "license: llama3.1\nlanguage: [en]\ntags: [x]\nbase_model: owner/llama\n"
    (source / "README.md").write_text(f"---\n{head}---\n# The source\n")
    settings = {"window": 16, "keep_full_attention": [1], "memory_layers": [0, 2], "seed": 3}
    result = convert_checkpoint(source, tmp_path / "result", progress=False, **settings)
    card = (result / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["license"] == "llama3.1" and metadata["language"] == ["en"]
    assert metadata["base_model"] == "owner/llama"  # the source is a folder, of which the Hub knows nothing
    assert metadata["library_name"] == "transformers" and metadata["pipeline_tag"] == "text-generation"
    assert "tnt convert source result --window 16 --keep-full-attention 1 --seed 3 'memory_layers=[0, 2]'" in card
    assert "every position below 16, bit for bit" in card and "layer 1: full attention" in card
    assert "beside the attention of\nlayers 0, 2." in card
    assert str(tmp_path) not in card + (result / "config.json").read_text() + (result / MANIFEST).read_text()
    assert not re.search(r"TODO|FIXME|PLACEHOLDER|\{[a-z]\w*\}|your[-_ ]|None", card)


@pytest.mark.parametrize("link", ["link", "copy"])
def test_the_manifest_notices_every_change(tmp_path, source, link):
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link=link, check=False)
    assert check_manifest(result) == []
    shard = next(result.glob("model-base-*"))
    entry = read_manifest(result)["files"][shard.name]
    assert entry["how"] == {"link": "linked", "copy": "copied"}[link] and entry["sha256"] is None
    assert add_digests(result) == [shard.name]
    assert check_manifest(result) == [] and add_digests(result) == []
    assert not any("sha256_from" in file for file in read_manifest(result)["files"].values()), (
        "all that is new was read"
    )

    (result / "evaluation").mkdir()  # as `tnt eval` and `tnt push --regenerate-card` leave it
    for name in ("evaluation/evaluation.json", "README.previous1.md"):
        (result / name).write_text("{}")
    assert check_manifest(result) == []

    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    (result / "config.json").unlink()
    (result / "merges.txt").write_text("more")
    (result / "README.md").write_text("less")
    problems = check_manifest(result)
    assert [problem.partition(":")[0] for problem in problems] == [
        "README.md",
        "config.json",
        shard.name,
        "merges.txt",
    ]


@pytest.mark.parametrize("link", ["link", "copy"])
def test_a_shard_that_was_never_read_is_recognised_by_its_time(tmp_path, source, link):
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link=link, check=False)
    shard = next(result.glob("model-base-*"))
    os.utime(shard, ns=(1, 1))
    assert check_manifest(result) == [f"{shard.name}: changed after the conversion, which did not read it"]


@pytest.mark.parametrize("link", ["link", "copy"])
def test_a_shard_of_the_hubs_cache_has_its_digest_by_name(tmp_path, source, link):
    """Unread, it is known by the name that the cache gave its content, and checked against it later."""
    for folder in ("blobs", "snapshots"):
        (tmp_path / "repository" / folder).mkdir(parents=True)
    source = source.rename(tmp_path / "repository" / "snapshots" / "1")
    shard = source / "model.safetensors"
    digest = sha256(shard)
    blob = shard.rename(tmp_path / "repository" / "blobs" / digest)
    shard.symlink_to(blob)
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link=link, check=False)
    name = next(result.glob("model-base-*")).name
    entry = read_manifest(result)["files"][name]
    assert entry["sha256"] == digest and entry["sha256_from"] == "the one the Hub gave it"
    assert check_manifest(result) == [] and add_digests(result) == []

    read = convert_checkpoint(source, tmp_path / "read", progress=False, link=link, check=True)
    assert "sha256_from" not in read_manifest(read)["files"][name]

    shard.unlink()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    shard.symlink_to(blob.rename(blob.with_name("0" * 64)))
    blob.with_name("0" * 64).write_bytes(content)
    damaged = convert_checkpoint(source, tmp_path / "damaged", progress=False, link=link, check=False)
    assert check_manifest(damaged) == [f"{name}: its SHA-256 differs from the one the Hub gave it"]


@pytest.mark.parametrize("link", ["link", "copy"])
@pytest.mark.parametrize("etag, later, known", [("{}", 0, True), ("{}", 60, False), ('"{:.40}"', 0, False)])
def test_a_shard_downloaded_into_a_folder_has_its_digest_noted(tmp_path, source, link, etag, later, known):
    """`hf download --local-dir` leaves the ETag, which is the SHA-256 of a large file; not after a change."""
    shard = source / "model.safetensors"
    note = source / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'0' * 40}\n{etag.format(sha256(shard))}\n{shard.stat().st_mtime - later}\n")
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link=link, check=False)
    entry = read_manifest(result)["files"][next(result.glob("model-base-*")).name]
    assert entry["sha256"] == (sha256(shard) if known else None) and ("sha256_from" in entry) == known
    assert check_manifest(result) == []


@pytest.mark.parametrize("link", ["link", "copy"])
@pytest.mark.parametrize("check, limit, read", [(None, 2**31, True), (None, 1000, False), (True, 1000, True)])
def test_shards_are_read_by_default_up_to_a_size(tmp_path, source, monkeypatch, link, check, limit, read):
    monkeypatch.setattr("tnt_hf.conversion.convert.READ", limit)
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link=link, check=check)
    shard = next(result.glob("model-base-*"))
    digest = read_manifest(result)["files"][shard.name]["sha256"]
    assert digest == (sha256(shard) if read else None)


OUTSIDE = {"../x": {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1}', json.dumps({"format": 1, "conversion": {}, "files": OUTSIDE})]
)
def test_a_damaged_manifest_is_a_finding(tmp_path, content):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "x").write_text("x")  # it is there, of the size that is said
    (folder / MANIFEST).write_text(content)
    assert len(check_manifest(folder)) == 1


# ------------------------------------------------------------------------------------------------- command line, probe


def command(monkeypatch, folder: Path, *arguments: str) -> None:
    """`tnt convert ...` in a folder, without the program around it."""
    monkeypatch.chdir(folder)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([*arguments, "--quiet"])) == 0


def test_a_terminal_without_the_letters_of_a_name(tmp_path, source, monkeypatch):
    """The conversion is done, and said to be."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["convert", str(source), str(tmp_path / "z\xe9"), "--window", "16"]) == 0
    assert b"z\\xe9" in terminal.buffer.getvalue() and (tmp_path / "z\xe9" / "config.json").is_file()


@pytest.mark.parametrize("words, few", [(120, True), (1_084, True), (1_085, False)])
def test_how_much_was_probed_is_told_and_that_it_is_little(tmp_path, source, words, few):
    """In segments of 64 tokens, all the positions there are, whose first 5 see everything through a window of 5."""
    said = []
    text = " ".join(f"w{i * i % 90}" for i in range(words))
    convert_checkpoint(source, tmp_path / "result", window=5, probe=text, progress=False, say=said.append)
    [line] = [line for line in said if line.startswith("probe ")]
    assert f"{words:,} tokens, {words - 5 * -(-words // 64):,} of them behind a window of 5" in line
    assert ("warning: fewer than 1,000" in line) == few == ("is not a file, so it is the text" in line)


@pytest.mark.parametrize(
    "case, options, message",
    [
        ("mistral, window", {"window": 5}, "window=5: costs no layer anything, every layer of the source sees 5"),
        ("llama", {"window": 63}, "window=63: hides nothing within max_position_embeddings=64"),
        (
            "qwen2, tied, window in some layers",
            {"window": 5, "keep_full_attention": "auto:2"},
            "narrows 1 of 3 layers",
        ),
        ("llama", {"window": 5, "keep_full_attention": "auto:4"}, "'auto:4': window=5 narrows 3 of 3 layers"),
        ("mistral, window", {"window": 4, "keep_full_attention": "auto:4"}, "window=4 narrows 3 of 3 layers"),
    ],
)
def test_a_probe_with_nothing_to_measure_or_to_choose_is_refused(tmp_path, case, options, message):
    save_tokenizer(save_source(tmp_path / "source", case))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "source", tmp_path / "result", probe=TEXT * 9, progress=False, **options)
    assert not (tmp_path / "result").exists()


def test_a_probe_that_overflows_is_named(tmp_path):
    folder = save_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    with pytest.raises(ValueError, match="probe: the window error of layer 1 is no number; the source overflows"):
        convert_checkpoint(folder, tmp_path / "result", window=5, probe=TEXT * 9, progress=False)


@pytest.mark.parametrize("words, measures", [(6, False), (7, True)])
def test_behind_the_window_a_probe_needs_a_token_that_predicts_another(tmp_path, source, words, measures):
    with nullcontext() if measures else pytest.raises(ValueError, match="6 tokens, which must be more than window"):
        convert_checkpoint(source, tmp_path / "result", window=5, probe=" ".join(WORDS[4 : 4 + words]), progress=False)


def test_a_layer_that_the_window_does_not_narrow_is_not_chosen(tmp_path):
    """Its loss does not change, which is more than a loss that the window happens to improve."""
    save_source(tmp_path / "source", "qwen2, tied, window in some layers", vocab_size=257)
    train_tokenizer(["bytes"], 257).save_pretrained(tmp_path / "source")
    options = {"window": 5, "keep_full_attention": "auto:1", "progress": False}
    for words in range(8, 40):
        text = " ".join(str(i * i) for i in range(words))
        result = convert_checkpoint(tmp_path / "source", tmp_path / f"{words}", probe=text, **options)
        found = read_manifest(result)["conversion"]
        assert found["window_losses"][1:] == [0, 0] and found["full_attention_layers"] == [0]
        if found["window_losses"][0] < 0:
            return
    raise AssertionError("no text is better off with the window")


def test_the_command_line(tmp_path, source, monkeypatch, capsys):
    (tmp_path / "settings.yaml").write_text("window: 16\nmemory_max_lr: 1e-1\nmemory_layers: [0]\n")
    arguments = ["source", "result", "--config", "settings.yaml", "--keep-full-attention", "auto:1", "--probe", TEXT]
    more = ["--memory-layers", "0,2", "--seed", "5", "local_chunk_sizes=[4, 8]"]
    command(monkeypatch, tmp_path, *arguments, *more)
    said = capsys.readouterr().out
    config = reload(tmp_path / "result").config
    assert config.sliding_window == 16 and config.memory_layer_indices == [0, 2]
    assert config.local_chunk_sizes == [4, 8] and config.memory_max_lr == 0.1
    found = read_manifest(tmp_path / "result")["conversion"]
    errors, (kept,) = found["window_errors"], found["full_attention_layers"]
    losses = found["window_losses"]
    assert len(errors) == len(losses) == 3 and kept == losses.index(max(losses)) and found["seed"] == 5
    assert "sliding" not in config.layer_types[kept] and sum("sliding" in kind for kind in config.layer_types) == 2
    for line in (
        "window error",
        "loss added",
        f"{losses[kept]:.4g}",
        "29,",
        "window 16",
        "next        tnt verify source result",
        str(tmp_path / "result"),
    ):
        assert line in said, said
    [marked] = [line for line in said.splitlines() if line.endswith("full attention")]
    assert marked.count("#") == 40, "the longest bar is that of the layer that was chosen"
    assert "gate " not in said
    card = (tmp_path / "result" / "README.md").read_text()
    assert f"| {kept} | {errors[kept]:.4g} | {losses[kept]:.4g} | full attention |" in card
    assert ("window_errors.png" in card) == (tmp_path / "result" / "window_errors.png").exists()
    command(monkeypatch, tmp_path, "source", "open", "memory_gate_init=0.5")
    assert "gate        open from the start" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere", "result"], "nowhere"),
        (["source", ""], "output='': must name a folder"),
        (["", "result"], "source='': must name a folder"),
        (["source", "result", "--window", "2147483648"], "must be an integer of 1 to 2147483647"),
        (
            ["source", "result", "--config", "source/model.safetensors"],
            "--config='source/model.safetensors': is neither JSON nor",
        ),
        (["source", "result", "memory_layers=[0"], "is not valid YAML"),
        (["source", "result", "memory_layers=" + "[" * 5000], "is not valid YAML"),
        (["source", "result", "overwrite=maybe"], "overwrite='maybe'"),
        (["source", "result", "window=8", "probe=5"], "probe=5"),
        (["source", "result", "--window", "8", "--probe", "text.txt"], "'text.txt' is not a file"),
        (["source", "result", "--window", "8", "--probe", "source/model.safetensors"], "is not UTF-8 text"),
        (["source", "result", "--window", "0"], "window=0"),
        (["source", "result", "--keep-full-attention", "a,b"], "--keep-full-attention a,b"),
        (["source", "result", "--window", "16", "--keep-full-attention", "auto:1"], "needs a probe"),
        (["source", "result", "--window", "16", "--probe", "w1 w2"], "2 tokens"),
        (["source", "result", "--window", "2", "--probe", "w1 w2 w3"], "probe: the text has 3 tokens"),
        (["source", "result", "hidden_size=64"], "hidden_size=64: is taken from the source"),
        (["source", "result", "memory_depht=2"], "memory_depht"),
        (["source", "result", "memory_depth"], "FIELD=VALUE"),
        (["source", "result", "--window", "16", "window=8"], "window is given twice"),
        (["source", "result", "memory_depth=2", "memory_depth=1"], "memory_depth is given twice"),
        (["source", "result", "say=1"], "cannot be set"),
        (["source", "result", "--dtype", "int8"], "int8"),
        (["source", "result", "--max-shard-size", "big"], "max_shard_size='big'"),
        (["source", "result", "--config", "nowhere.yaml"], "--config nowhere.yaml: is not a file"),
    ],
)
def test_a_mistake_is_one_line_and_makes_nothing(tmp_path, source, monkeypatch, arguments, message):
    with pytest.raises((ValueError, OSError)) as caught:
        command(monkeypatch, tmp_path, *arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# ----------------------------------------------------------------------------------------------------------------- Hub


def test_a_hub_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="source='tnt-hf-tests/nothing': [^\n]*$"):
        convert_checkpoint("tnt-hf-tests/nothing", tmp_path / "result", progress=False)


@pytest.mark.long
def test_a_hub_id(tmp_path, source):
    """Only the weights that the index names are fetched, no code, and the shards link to the cache's own files."""
    single = (source / "model.safetensors").read_bytes()
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.suffix != ".safetensors"}
    names = list(reload(source).state_dict())
    files |= {
        "part-1.safetensors": single,
        "model.safetensors.index.json": json.dumps(
            {"weight_map": dict.fromkeys(names, "part-1.safetensors")}
        ).encode(),
        "additional_chat_templates/tool.jinja": b"{{ tools }}",
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"raise SystemExit",
        "README.md": b"---\nlicense: mit\n---\n",
    }
    with HubServer() as server:
        wanted, newer = "c0ffee" + 34 * "0", files | {"part-1.safetensors": b"of a newer commit"}
        server.commits["owner/tiny-llama"] = [(wanted, files), ("decade" + 34 * "0", newer)]
        environment = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, "owner/tiny-llama", "result", "--revision", wanted],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{done.stderr}\n{server.unknown}"
    fetched = {request.rpartition("/")[2] for request in server.requests if "resolve" in request}
    assert not fetched & {"consolidated.safetensors", "pytorch_model.bin", "modeling_evil.py"}
    result = tmp_path / "result"
    entry = read_manifest(result)["files"]["model-base-00001-of-00001.safetensors"]
    assert entry["how"] == "linked" and entry["sha256"], "the cache names the file by its SHA-256"
    assert (result / "additional_chat_templates" / "tool.jinja").read_text() == "{{ tools }}"
    assert check_manifest(result) == []
    metadata = yaml.safe_load((result / "README.md").read_text().split("---")[1])
    assert metadata["base_model"] == "owner/tiny-llama" and metadata["license"] == "mit"
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert reload(source)(ids).logits.equal(reload(result)(ids).logits)


# ----------------------------------------------------------------------------------------------------------- benchmark


@pytest.mark.slow  # `tnt bench` runs the suite in test_bench
def test_the_benchmark_runs_on_a_tiny_shape(tmp_path, capsys):
    """What it measures on an 8B shape is committed; this is the suite, with a process that links."""
    (folder := tmp_path / "folder").mkdir()
    options = ["--shape", "tiny", "--stages", "cp", "link", "--rounds", "1", "--folder", str(folder)]
    assert benchmark(["conversion", *options, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "conversion.json").read_text())
    (row,) = report["rows"].values()
    assert 0 < row["imports_mib"] <= row["summary"]["link"]["anonymous_mib"]
    assert row["summary"]["cp"]["seconds"]["median"] > 0
    assert {"commit", "versions", "cpu"} <= report["environment"].keys() and not list(folder.iterdir())


def test_tensors_are_made_by_one_thread_and_torch_keeps_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (by_one_thread(torch.get_num_threads), torch.get_num_threads()) == (1, 2)
        with pytest.raises(ZeroDivisionError):
            by_one_thread(lambda: 1 / 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_new_shard_is_read_while_it_is_written(tmp_path, fails):
    """Its reader never gets ahead of what is there, and gives up with the writer."""
    path, readers, waiting = tmp_path / "new.safetensors", [], Event()

    def made():
        assert waiting.wait(60), "the first tensor was not read before the second was there"
        if fails:
            raise OSError("no space")
        return torch.rand(2**16)

    def begun(written):
        def wait(size):
            if size > path.stat().st_size - 4 * 2**16:  # asks for the second tensor
                waiting.set()
            written.wait(size)

        readers.append(pool.submit(inspect, path, read_header(path), "new", wait=wait))

    tensors = [
        NewTensor("ready", "F32", (2**16,), lambda: torch.rand(2**16)),
        NewTensor("slow", "F32", (2**16,), made),
    ]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="no space") if fails else nullcontext():
            write_shard(path, tensors, lambda count: None, begun)
        with pytest.raises(InterruptedError) if fails else nullcontext():
            assert readers[0].result(60) == sha256(path)


@pytest.mark.parametrize("refuses", ["always", "after a piece", "no such call"])
def test_what_the_kernel_does_not_copy_is_read_and_written(tmp_path, monkeypatch, refuses):
    """A copy between two file systems may not be offered. Of one that was begun and fails, what it lacks is written
    outside the kernel, where another reason fails again and is told of the file that it is about."""
    content, told, begun = os.urandom(2**18 + 5), [], []
    (tmp_path / "old").write_bytes(content)

    def kernel(old, new, count, offset):
        if refuses == "always" or begun:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        begun.append(os.write(new, content[:1000]))
        return 1000

    monkeypatch.setattr(os, "copy_file_range", kernel)
    if refuses == "no such call":
        monkeypatch.delattr(os, "copy_file_range")
    copy_file(tmp_path / "old", tmp_path / "new", told.append)
    assert (tmp_path / "new").read_bytes() == content and sum(told) == len(content) and len(told) > 1
    assert bool(begun) == (refuses == "after a piece")


@pytest.mark.parametrize("in_kernel", [True, False])
def test_a_file_that_shrinks_while_it_is_copied_is_named(tmp_path, monkeypatch, in_kernel):
    (tmp_path / "old").write_bytes(b"1234")
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=7))
    if not in_kernel:
        monkeypatch.delattr(os, "copy_file_range")
    with pytest.raises(ValueError, match="old: ends 3 bytes too early"):
        copy_file(tmp_path / "old", tmp_path / "new", lambda _: None)
