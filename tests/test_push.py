"""`tnt push`: what goes up, what stays at home, and that a stranger who pulls it has the very same model.

Pushes run in this process against a Hub on the loopback interface; the stranger is a process without this package.
"""

import json
import os
import re
import shutil
import socket
import sysconfig
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import constants
from model_folders import LEFT_BEHIND, VOCABULARY, leave_behind, save_run, save_tokenizer
from safetensors.torch import load_file, save_file
from test_hub import finish, start
from tiny import tiny_model
from tiny_hosts import tiny_host
from transformers import AutoModelForCausalLM, AutoTokenizer

from tnt_hf.cli import main as tnt
from tnt_hf.conversion import LiZAConfig, convert_checkpoint, get_tptt_model, inject, load_injected
from tnt_hf.conversion.manifest import check_manifest
from tnt_hf.recipes.model_card import is_generated
from tnt_hf.recipes.model_folder import read_model
from tnt_hf.recipes.push import is_stale, main, push
from tnt_hf.recipes.push_checks import check_secrets, files_to_push


CLIENT = str(Path(__file__).with_name("push_client.py"))
IDS = torch.tensor([[5, 9, 2, 77, 31, 8, 100, 41, 6, 5, 9, 2]])
CODE = {path.name for path in (Path(__file__).parents[1] / "tnt_hf").glob("*_tnt.py")}
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
RESULTS = {"training.json", "training_log.jsonl", "loss.png", "gates.png", "README.md"}
EVALUATION = {f"evaluation/{name}" for name in ("evaluation.json", "evaluation.md", "perplexity.png")}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained folder with everything a run leaves behind."""
    folder = save_run(tmp_path_factory.mktemp("push") / "books")
    leave_behind(folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub of one's own, with a token for it."""
    with HubServer() as server:
        point_at(server.endpoint, monkeypatch, tmp_path / "hub-cache")
        yield server
        assert not server.unknown


def point_at(endpoint: str, monkeypatch, cache: Path) -> None:
    """What HF_ENDPOINT and its like do, which the library reads once, when it is imported."""
    for name, value in {
        "ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_CACHE": str(cache),
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_loopback")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


def copied(folder: Path, target: Path) -> Path:
    return shutil.copytree(folder, target / folder.name)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_a_stranger_pulls_the_very_same_model(run, hub, tmp_path):
    """Logits are equal bit for bit, and the code on the card runs where nobody has installed this package."""
    push(run, "user/books", say=lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    with torch.inference_mode():
        save_file({"logits": model(IDS).logits, "ids": IDS}, tmp_path / "pushed.safetensors")
    home = tmp_path / "stranger"
    home.mkdir()
    site = sysconfig.get_paths()["purelib"]
    command = ["-I", "-S", CLIENT, "user/books", str(tmp_path / "pushed.safetensors"), str(home / "out"), site]
    finish(start(command, home, hub.endpoint), hub)
    pulled = load_file(home / "out")
    assert pulled["logits"].equal(load_file(tmp_path / "pushed.safetensors")["logits"])


def test_exactly_what_belongs_goes_up_as_one_commit(run, hub, tmp_path, capsys):
    folder = copied(run, tmp_path)
    assert main([str(folder), "user/books", "--private", "--message", "the third try"]) == 0
    out = capsys.readouterr().out
    _, files = hub.files("user/books")
    assert files.keys() == WEIGHTS | CODE | RESULTS | EVALUATION
    assert len(hub.commits["user/books"]) == 2 and hub.visibility == {"user/books": "private"}
    for name in files.keys() - {"training.json", "evaluation/evaluation.json"}:
        assert files[name] == (folder / name).read_bytes(), name
    for name in files:
        assert re.search(rf"^ *[\d,]+  {re.escape(name)}", out, flags=re.MULTILINE), name
    assert out.index("bytes in") < out.index("pushed to")
    for name in {name.split("/")[0] for name in LEFT_BEHIND if not name.startswith("evaluation")}:
        assert name in out.split("stays here:")[1]
    commits = [request for request in hub.requests if "/commit/" in request]
    assert commits == ["POST /api/models/user/books/commit/main"]
    assert hub.messages == ["the third try"]


def test_no_path_of_this_machine_goes_up(run, hub):
    push(run, "user/books", say=lambda line: None)
    _, files = hub.files("user/books")
    for name, content in files.items():
        assert b"/srv" not in content and str(run.parent).encode() not in content, name
    assert json.loads(files["training.json"])["settings"]["data"]["dataset_name"] == "books.jsonl"
    assert "/srv" in (run / "training.json").read_text()  # ours stays as it was


def test_a_dry_run_lists_and_touches_nothing(run, hub, tmp_path, capsys, monkeypatch):
    folder = copied(run, tmp_path)
    before = contents(folder)
    monkeypatch.delenv("HF_TOKEN")
    assert tnt(["push", str(folder), "user/books", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "model.safetensors" in out and "README.md" in out and "pushed" not in out
    assert out.startswith("would upload to user/books (nothing is sent):\n")
    assert out.endswith("all checks passed; the Hub was not asked\n")
    assert contents(folder) == before and hub.requests == []


def test_a_dry_run_whose_checks_fail_does_not_say_that_they_passed(run, tmp_path, capsys):
    folder = copied(run, tmp_path)
    (folder / "config.json").write_text("{")
    assert tnt(["push", str(folder), "user/books", "--dry-run"]) == 2
    assert capsys.readouterr().out == ""


def test_only_a_dry_run_says_that_nothing_is_sent(run, hub):
    push(run, "user/books", dry_run=True, revision="next", say=(said := []).append)
    assert said[0] == "would upload to user/books, branch next (nothing is sent):"
    push(run, "user/books", say=(said := []).append)
    assert not any("would upload" in line or "all checks passed" in line for line in said)


def test_a_licence_nobody_named_is_asked_for_and_stays_once_given(run, hub, tmp_path):
    folder = copied(run, tmp_path)
    push(folder, "user/books", dry_run=True, say=(said := []).append)
    assert any("says no licence" in line and "--license" in line for line in said)
    assert tnt(["push", str(folder), "user/books", "--license", "apache-2.0"]) == 0
    push(folder, "user/books", say=(said := []).append)
    assert b"\nlicense: apache-2.0\n" in hub.files("user/books")[1]["README.md"]
    assert not any("licence" in line for line in said)
    (folder / "README.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match="license='mit': README.md is edited by hand"):
        push(folder, "user/books", license="mit", say=said.append)
    with pytest.raises(ValueError, match="license='Apache 2': must be one of the Hub's names"):
        push(folder, "user/books", license="Apache 2", say=said.append)


def test_a_branch_is_made_and_main_is_left_alone(run, hub):
    push(run, "user/books", revision="stage-2", say=lambda line: None)
    assert hub.files("user/books")[1] == {}
    assert "model.safetensors" in hub.files("user/books", "stage-2")[1]
    push(run, "user/books", revision="stage-2", message="again", say=lambda line: None)  # it exists now
    assert hub.visibility == {"user/books": None}, "as its owner has set, which may be private"


def test_what_an_earlier_push_left_cannot_be_loaded_with_this_one(run, hub, tmp_path):
    """Five shards, then one file: an index that stayed behind would name shards that are gone."""
    sharded = copied(run, tmp_path)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(run).save_pretrained(sharded, max_shard_size="30KB")
    push(sharded, "user/books", say=lambda line: None)
    before = hub.files("user/books")[1].keys()
    assert sum(name.endswith(".safetensors") for name in before) > 2 and "model.safetensors.index.json" in before
    hub.commits["user/books"][-1][1]["NOTES.md"] = b"somebody's"
    push(run, "user/books", say=(said := []).append)
    assert hub.files("user/books")[1].keys() == WEIGHTS | CODE | RESULTS | EVALUATION | {"NOTES.md"}
    assert "removes model.safetensors.index.json, left there by an earlier push" in said


def test_an_edited_card_is_kept_on_both_sides(run, hub, tmp_path):
    folder = copied(run, tmp_path)
    (folder / "README.md").write_text("# Mine\n")
    push(folder, "user/books", say=(said := []).append)
    assert hub.files("user/books")[1]["README.md"] == b"# Mine\n" == (folder / "README.md").read_bytes()
    assert any("--regenerate-card" in line for line in said)

    push(folder, "user/books", regenerate_card=True, say=(said := []).append)
    assert is_generated(hub.files("user/books")[1]["README.md"].decode())
    assert (folder / "README.previous.md").read_text() == "# Mine\n"

    hub.commits["user/books"][-1][1]["README.md"] += b"\nwritten in the browser\n"
    push(folder, "user/books", say=(said := []).append)
    assert hub.files("user/books")[1]["README.md"].endswith(b"browser\n")
    assert any("edited in the repository" in line for line in said)


def test_a_tokenizer_s_code_is_not_run(hub, tmp_path):
    """As where a conversion refers to the source's on the Hub: who loads it decides."""
    folder, said = tmp_path / "hybrid", []
    tiny_model(vocab_size=VOCABULARY).save_pretrained(folder)
    save_tokenizer(folder)
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields |= {"tokenizer_class": "Foo", "auto_map": {"AutoTokenizer": [None, "owner/name--tokenization_foo.Foo"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    push(folder, "user/hybrid", say=said.append)
    assert any("the tokenizer needs code, which is not run here" in line for line in said)


def test_a_conversion_is_verified_after_it_was_pushed(hub, tmp_path):
    source = tiny_host("llama", vocab_size=VOCABULARY)
    source.save_pretrained(tmp_path / "llama")
    save_tokenizer(tmp_path / "llama")
    hybrid = convert_checkpoint(tmp_path / "llama", tmp_path / "hybrid", window=4, progress=False, check=False)
    push(hybrid, "user/hybrid", say=lambda line: None)
    assert check_manifest(hybrid) == []
    pulled = tmp_path / "pulled"
    for name, content in hub.files("user/hybrid")[1].items():
        (pulled / name).parent.mkdir(parents=True, exist_ok=True)
        (pulled / name).write_bytes(content)
    assert check_manifest(pulled) == []


def test_an_adapter_goes_up_and_comes_back(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tiny_host("llama", vocab_size=VOCABULARY)
    base.save_pretrained("llama")
    adapted = get_tptt_model(str(tmp_path / "llama"), LiZAConfig(weight=0.4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained("adapter")
    told: list[str] = []
    push("adapter", "user/adapter", say=told.append)
    assert any("its base is" in line and "a folder that readers do not have" in line for line in told)
    files = hub.files("user/adapter")[1]
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "llama"
    again = load_injected("llama", "user/adapter")
    with torch.inference_mode():
        assert again(IDS).logits.equal(adapted.eval()(IDS).logits)


def test_an_injected_model_goes_up_and_comes_back(hub, tmp_path):
    host = tiny_host("llama", vocab_size=VOCABULARY)
    inject(host, LiZAConfig(weight=0.4))
    host.save_pretrained(tmp_path / "injected")
    push(tmp_path / "injected", "user/injected", say=lambda line: None)
    with torch.inference_mode():
        assert load_injected("user/injected")(IDS).logits.equal(host.eval()(IDS).logits)


# --- mistakes --------------------------------------------------------------------------------------------------------


def set_field(folder: Path, file: str, **fields) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def not_a_number(tensors) -> None:
    tensors["lm_head.weight"][0, 0] = float("nan")


def index_names(folder: Path, shard: str) -> None:
    (folder / "model.safetensors").rename(folder / "moved.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))


def add_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folder)


NORM = "model.norm.weight"
FAULTS = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors"),
    "truncated weights": (lambda f: os.truncate(f / "model.safetensors", 900), "is truncated"),
    "nan in the weights": (lambda f: change_weights(f, not_a_number), "'lm_head.weight' holds nan"),
    "a tensor is missing": (lambda f: change_weights(f, lambda t: t.pop(NORM)), f"{NORM!r} of the configuration"),
    "no head": (lambda f: change_weights(f, lambda t: t.pop("lm_head.weight")), "'lm_head.weight' of the config"),
    "a tensor too many": (lambda f: change_weights(f, lambda t: t.update(x=torch.ones(2))), "'x' does not belong to"),
    "another shape": (lambda f: change_weights(f, lambda t: t.update({NORM: torch.ones(31)})), f"{NORM!r} has shape"),
    "config out of range": (lambda f: set_field(f, "config.json", num_hidden_layers=-1), "num_hidden_layers=-1"),
    "no dtype": (lambda f: set_field(f, "config.json", dtype="letters"), "config.json: TNTConfig.dtype='letters'"),
    "padding beyond the vocabulary": (lambda f: set_field(f, "config.json", pad_token_id=9999), "pad_token_id=9999"),
    "settings are not a mapping": (lambda f: set_field(f, "training.json", settings=5), "training.json"),
    "nan in the config": (lambda f: set_field(f, "config.json", note=float("nan")), "config.json: holds NaN"),
    "nan in the results": (lambda f: set_field(f, "training.json", metrics={"loss": float("inf")}), "holds Infinity"),
    "no auto_map": (lambda f: set_field(f, "config.json", auto_map=None), "names no code"),
    "code of somebody else": (
        lambda f: set_field(
            f, "config.json", auto_map={"AutoConfig": "o/r--a_tnt.C", "AutoModelForCausalLM": "modeling_tnt.M"}
        ),
        "'o/r--a_tnt.C' is not FILE.CLASS",
    ),
    "a code file is missing": (lambda f: (f / "memory_tnt.py").unlink(), "memory_tnt.py: missing"),
    "the class is missing": (lambda f: (f / "modeling_tnt.py").write_text("x = 1"), "defines no class"),
    "code is not Python": (lambda f: (f / "cache_tnt.py").write_text("def"), "cache_tnt.py: is not valid Python"),
    "a shard nobody names": (
        lambda f: shutil.copy(f / "model.safetensors", f / "model-00001-of-00002.safetensors"),
        "model-00001-of-00002.safetensors: belongs to no model",
    ),
    "an index beside a whole model": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        "beside model.safetensors",
    ),
    "an index that leads outside": (lambda f: index_names(f, "../x.safetensors"), "not a plain file name"),
    "a link that leads outside": (lambda f: (f / "LICENSE").symlink_to(__file__), "outside the checkpoint's folder"),
    "a card that is a link": (lambda f: replace_by_link(f / "README.md"), "outside the checkpoint's folder"),
    "results that are a link": (lambda f: replace_by_link(f / "evaluation"), "evaluation: leads to"),
    "templates that are a link to themselves": (
        lambda f: (f / "additional_chat_templates").symlink_to("additional_chat_templates"),
        "additional_chat_templates: is a link that leads nowhere",
    ),
    "a token in the card": (
        lambda f: (f / "README.md").write_text("# Mine\nhf_" + "a1B2" * 9),
        "README.md: holds what looks like a token or a private key",
    ),
    "tokenizer too large": (lambda f: add_token(f), f"vocab_size is {VOCABULARY}"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer cannot be loaded"),
    "a token in a file": (
        lambda f: set_field(f, "training.json", note="hf_" + "a1B2" * 9),
        "training.json: holds what looks like a token or a private key",
    ),
    "a private key in the licence": (
        lambda f: (f / "LICENSE").write_text("-----BEGIN OPENSSH PRIVATE " + "KEY-----\n"),
        "LICENSE: holds what looks like a token or a private key",
    ),
    "plain model": (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "model_type='gpt2'"),
    "no folder": (lambda f: shutil.rmtree(f), "no such folder"),
}  # fmt: skip


def replace_by_link(path):
    """`path` moved out of its folder, with a link in its place."""
    elsewhere = path.parent.parent / f"elsewhere-{path.name}"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("not to be published")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("secret", ["hf_" + "a1B2" * 9, "ghp_" + "a1B2" * 9, "sk-" + "a1B2" * 9, "AKIA" + "A1B2" * 4])
def test_secrets_are_found_and_names_like_them_are_not(secret):
    with pytest.raises(ValueError, match="looks like a token"):
        check_secrets("notes.txt", f'key = "{secret}"'.encode())
    check_secrets("notes.txt", b"hf_hub_download, task-123, risk-free, AKIA")


def test_only_pictures_of_the_run_or_the_card_go_along(run, tmp_path):
    folder = copied(run, tmp_path)
    (folder / "private.png").write_bytes(b"mine")
    (folder / "shown.png").write_bytes(b"to be seen")
    (folder / "README.md").write_text("# Mine\n![what it does](shown.png)\n")
    names = files_to_push(read_model(folder))
    assert {"loss.png", "gates.png", "shown.png"} <= names.keys() and "private.png" not in names


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_does_not_fit_together_stays_at_home(run, hub, tmp_path, capsys, fault):
    folder = copied(run, tmp_path)
    break_it, message = FAULTS[fault]
    break_it(folder)
    before = contents(folder)
    assert main([str(folder), "user/books"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tnt push: ") and error.count("\n") == 1 and message in error
    assert hub.requests == [] and contents(folder) == before


@pytest.mark.parametrize("fault", ["no folder", "no configuration", "plain model", "a tensor is missing"])
def test_a_folder_that_cannot_be_pushed_is_named_with_its_path(run, tmp_path, capsys, fault):
    """The last part says little where every run has a stage1."""
    folder = copied(run, tmp_path)
    {"no configuration": lambda f: (f / "config.json").unlink(), **{k: x[0] for k, x in FAULTS.items()}}[fault](folder)
    assert main([str(folder), "user/books", "--dry-run"]) == 2
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("repo", ["books", "a/b/c", "user/", "us er/x", "../x", "user/x.git", "user/a--b", ""])
def test_a_malformed_repository_is_refused_before_anything_else(run, hub, repo, capsys):
    assert main([str(run), repo]) == 2
    assert f"REPO={repo!r}" in capsys.readouterr().err and hub.requests == []


@pytest.mark.parametrize("revision", ["", "-x", "a b", "a..b"])
def test_a_malformed_branch_is_refused(run, hub, revision, capsys):
    assert main([str(run), "user/books", f"--revision={revision}"]) == 2
    assert "revision=" in capsys.readouterr().err and hub.requests == []


def test_without_a_token_nothing_begins(run, hub, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main([str(run), "user/books"]) == 2
    assert "hf auth login" in capsys.readouterr().err and hub.requests == []


def test_without_a_network_it_says_so(run, monkeypatch, tmp_path, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        point_at(f"http://127.0.0.1:{free.getsockname()[1]}", monkeypatch, tmp_path)
        assert main([str(run), "user/books"]) == 2
    assert "nothing was committed, the Hub at http://127.0.0.1" in capsys.readouterr().err


def test_offline_mode_is_named(run, hub, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main([str(run), "user/books"]) == 2
    assert "offline mode" in capsys.readouterr().err


def test_a_failure_in_the_middle_leaves_the_repository_as_it_was(run, hub, tmp_path, capsys):
    push(run, "user/books", say=lambda line: None)
    before = hub.files("user/books")
    changed = copied(run, tmp_path)
    change_weights(changed, lambda tensors: tensors[NORM].mul_(2))
    hub.is_full = True
    assert main([str(changed), "user/books"]) == 2
    error = capsys.readouterr().err
    assert "nothing was committed" in error and "no space left" in error
    assert hub.files("user/books") == before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "a_tnt.py", "adapter_config.json"]
)
def test_what_an_earlier_push_left_is_taken_away(name):
    assert is_stale(name)


@pytest.mark.parametrize("name", ["onnx/model.safetensors", "code/a_tnt.py", "NOTES.md", "train.py"])
def test_what_others_put_there_stays(name):
    assert not is_stale(name)
