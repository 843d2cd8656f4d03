"""A model card says what the folder holds, all of it and nothing else, and its code runs."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import save_source
from huggingface_hub import ModelCard
from model_folders import PICTURE, RESULTS, RUN, VOCABULARY, save_run, save_tokenizer
from tiny import tiny_model
from tiny_hosts import tiny_host
from transformers import AutoModelForCausalLM

from tnt_hf.conversion import LiZAConfig, convert_checkpoint, get_tptt_model, inject
from tnt_hf.conversion.manifest import MANIFEST, check_manifest
from tnt_hf.recipes.model_card import is_generated, model_card, sections, write_card
from tnt_hf.recipes.model_card_tables import records, text
from tnt_hf.recipes.model_folder import read_model


ALL = ["", "Quick start", "Architecture", "Training data", "Training", "Results", "Limits", "Citation"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("cards") / "books")


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """A hybrid of a Llama whose card says a licence, as converted."""
    folder = tmp_path_factory.mktemp("conversion")
    source = save_source(folder / "llama", vocab_size=VOCABULARY)
    save_tokenizer(source)
    (source / "README.md").write_text("---\nlicense: llama3.2\nlanguage: en\n---\n# A llama\n")
    return convert_checkpoint(source, folder / "hybrid", window=8, progress=False)


def copied(folder, target):
    return shutil.copytree(folder, target / folder.name)


def metadata(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def without_code(card: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", card, flags=re.DOTALL)


def run_quick_start(card: str, beside, monkeypatch, capsys) -> str:
    """What the card's code prints where the folder is, under the name the card gives it."""
    (block,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(beside)
    capsys.readouterr()
    exec(compile(block, "quick start", "exec"), {})
    return capsys.readouterr().out


def test_every_section_is_there_and_nothing_is_a_placeholder(run):
    card = model_card(run, "user/books")
    assert list(sections(card)) == ALL
    for heading, body in sections(card).items():
        assert len(body.split()) > 10, heading
    prose = without_code(card)
    assert not re.search(r"\{\w*\}|TODO|More Information|\bNone\b|\bnan\b|\binf\b", prose)
    assert not re.search(r"\n\n\n", card) and card.endswith("-->\n")


def test_every_figure_of_the_results_is_in_the_card(run):
    card = model_card(run, "user/books")
    training, results = sections(card)["Training"], sections(card)["Results"]
    for shown in (
        "99,968",
        "| optimizer steps | 97 |",
        "| parameters trained | 20,000 |",
        "61 s",
        "1,628",
        "| peak memory | 942 MiB |",
        "2.468",
        "2.643",
        "torch 2.13.0",
        "0123abc",
        "| 7 |",
    ):
        assert shown in training, shown
    tables = ("| 0 | 64 | 21.5 |", "| 64 | 128 | 9.25 |", "| 64 | 0.75 | 0.5 to 0.9 | 20 |", "| 0 | 32 | 0.625 | 80 |")
    tables += ("| 1,024 | 14,864 | 768 | 98.7 |", "| local 0 (C=8) off | 14.25 | 0.1435 | 0.0123 |")
    tables += ("|  | perplexity | loss added (nats) | its standard error |",)
    for shown in ("**12.35** ± 0.1234 over 4,096 tokens", *tables):
        assert shown in results, shown
    assert "| `model_config.hidden_size` | `32` |" in training and "| `mode` | `pretrain` |" in training
    assert "| `learning_rate` | `0.003` |" in training and "| `train_tokens` | `100000` |" in training
    for picture in ("](loss.png)", "](gates.png)"):
        assert picture in training
    assert "](evaluation/perplexity.png)" in results
    assert "read 99,968 tokens, in rows of 128" in sections(card)["Limits"]


def test_two_numbers_are_a_range_only_in_a_column_of_ranges():
    shown = records([{"interval": [0.5, 0.9], "seconds_range": [1, 2], "local_chunk_sizes": [4, 8]}])
    assert shown.splitlines()[-1] == "| 0.5 to 0.9 | 1 to 2 | 4, 8 |"
    assert text([0, 7]) == "0, 7"


def test_what_the_evaluation_warns_of_and_lacks_is_in_the_card(run, tmp_path):
    folder = copied(run, tmp_path)
    path = folder / "evaluation" / "evaluation.json"
    found = json.loads(path.read_text())
    assert "perplexity" in [
        x["metrics"][0]["type"] for x in metadata(model_card(folder, "user/books"))["model-index"][0]["results"]
    ]
    changed = {"warnings": ["the text it is evaluated on is not held out"], "failed": {"passkey": "out of memory: 12"}}
    path.write_text(json.dumps(found | changed))
    card = model_card(folder, "user/books")
    assert "wholly, measured, as memory did not suffice: passkey." in sections(card)["Results"]
    assert "- Warning: the text it is evaluated on is not held out." in sections(card)["Results"]
    shown = metadata(card).get("model-index", [{"results": []}])[0]["results"]
    assert "perplexity" not in [x["metrics"][0]["type"] for x in shown]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_architecture_is_counted_and_not_claimed(dtype, run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(run, dtype=dtype)
    model.save_pretrained(copied(run, tmp_path))
    body = sections(model_card(tmp_path / run.name, "books"))["Architecture"]
    memory = sum(x.numel() for name, x in model.named_parameters() if ".memory." in name)
    assert f"{model.num_parameters() - memory:,} base, {memory:,} in the memory" in body
    start = sections(model_card(tmp_path / run.name, "books"))[""]
    assert f"of {model.num_parameters():,} parameters, {memory:,} of them in its memory: test-time memory" in start
    cache = model(torch.tensor([list(range(1, 40))]), use_cache=True).past_key_values
    states = [s for layer in cache.layers for x in (layer.recurrent_states, layer.conv_states) for s in x.values()]
    size = sum(s.numel() * s.element_size() for s in states if s is not None)
    assert f"{size:,} bytes per sequence" in body


def test_no_path_of_the_machine_and_no_secret(run, tmp_path):
    card = model_card(run, "books")
    assert "/srv" not in card and "not-to-be-seen" not in card and str(tmp_path.anchor + "tmp") not in card
    assert "tnt train --config stage1.yaml --dataset_name=books.jsonl --hidden_size 32" in card
    assert "tnt eval books --tasks perplexity,passkey" in card


def test_settings_that_say_none_are_settings(run, tmp_path):
    folder = copied(run, tmp_path)
    given = {"model_config": {"memory_layers": [], "sliding_window": None}, "lora": {}}
    (folder / "training.json").write_text(json.dumps(RUN | {"settings": {"model": given}}))
    shown = sections(model_card(folder, "books"))["Training"]
    for row in ("`model_config.memory_layers` | `[]`", "`model_config.sliding_window` | `null`", "`lora` | `{}`"):
        assert f"| {row} |" in shown, row


def test_what_people_call_things_cannot_break_the_card(run, tmp_path):
    assert "Model \\<X\\> \\| 2 cores" in model_card(run, "books")
    assert "| text | `books\\|one.jsonl` |" in model_card(run, "books")
    odd = copied(run, tmp_path)
    changed = copy.deepcopy(RESULTS)
    changed["ablations"] = {"a|b\n## Gone\n<script>": {"perplexity": 1.0}}
    (odd / "evaluation" / "evaluation.json").write_text(json.dumps(changed))
    results = sections(model_card(odd, "books"))["Results"]
    assert "| a\\|b \\#\\# Gone \\<script\\> | 1 |" in results


def test_metadata_is_what_the_hub_reads(run):
    card = model_card(run, "user/books")
    found = ModelCard(card).data
    assert (found.library_name, found.pipeline_tag) == ("transformers", "text-generation")
    assert found.tags == ["tnt", "test-time-memory", "custom_code"]
    assert found.model_name == "user/books"
    values = {(x.dataset_name, x.metric_type): x.metric_value for x in found.eval_results}
    assert values == {
        ("python-stdlib", "perplexity"): 12.3456,
        ("Passkey retrieval", "accuracy"): 0.75,
        ("Associative recall", "accuracy"): 0.625,
    }
    assert "license" not in metadata(card) and "datasets" not in metadata(card) and "base_model" not in metadata(card)


@pytest.mark.parametrize("name", ["owner/texts", "owner/texts-1.5"])
def test_a_dataset_of_the_hub_is_named_in_the_metadata(run, tmp_path, name):
    folder = copied(run, tmp_path)
    (folder / "training.json").write_text(json.dumps(RUN | {"data": {"name": name, "tokens": 5}}))
    card = model_card(folder, "books")
    assert metadata(card)["datasets"] == [name]
    assert f"[{name}](https://huggingface.co/datasets/{name})" in sections(card)["Training data"]
    (folder / "training.json").write_text(json.dumps(RUN | {"data": {"name": "texts/books.jsonl", "tokens": 5}}))
    assert "datasets" not in metadata(model_card(folder, "books"))  # a file, where it was trained


def test_the_hub_learns_what_it_was_evaluated_on_where_that_is_its_own(run, tmp_path):
    folder = copied(run, tmp_path)
    path = folder / "evaluation" / "evaluation.json"
    found = json.loads(path.read_text())
    for name, dataset in [("owner/texts", "owner/texts"), ("some texts.jsonl", "text")]:
        found["perplexity"]["data"] = {"name": name}
        path.write_text(json.dumps(found))
        shown = {x.metric_type: x for x in ModelCard(model_card(folder, "user/books")).data.eval_results}
        assert (shown["perplexity"].dataset_name, shown["perplexity"].dataset_type) == (name, dataset)


def test_a_section_without_data_is_absent(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path / "bare")
    card = model_card(tmp_path / "bare", "bare")
    assert list(sections(card)) == ["", "Quick start", "Architecture", "Limits", "Citation"]
    assert "No evaluation results are included" in card and "model-index" not in card


def test_a_baseline_has_no_memory_in_its_card(tmp_path):
    tiny_model(torch.float32, memory_layers=[], sliding_window=None).save_pretrained(tmp_path / "plain")
    card = model_card(tmp_path / "plain", "plain")
    assert metadata(card)["tags"] == ["tnt", "custom_code"]
    assert "memory state" not in card and "Speculative" not in card and "full attention" in card
    assert "parameters: the architecture of TNT's baselines, without a memory." in card


def test_the_quick_start_runs(run, monkeypatch, capsys):
    out = run_quick_start(model_card(run, run.name), run.parent, monkeypatch, capsys)
    assert out.startswith("Test-time memory is")


def test_nothing_asks_before_it_runs_remote_code(run, conversion):
    """Where this package is not installed, the library asks on the terminal, for the tokenizer too."""
    for folder in (run, conversion):
        (block,) = re.findall(r"^```python\n(.*?)^```", model_card(folder, "name"), flags=re.MULTILINE | re.DOTALL)
        calls = re.findall(r"from_pretrained\((.*?)\)", block)
        assert calls and all("trust_remote_code=True" in call for call in calls)


def test_the_quick_start_runs_without_a_tokenizer(tmp_path, monkeypatch, capsys):
    tiny_model(torch.float32).save_pretrained(tmp_path / "ids")
    out = run_quick_start(model_card(tmp_path / "ids", "ids"), tmp_path, monkeypatch, capsys)
    assert out.startswith("tensor([[ 1,  2,  3,") or out.startswith("tensor([[1, 2, 3,")


# --- conversions, injected models, adapters --------------------------------------------------------------------------


def test_an_untrained_conversion_keeps_the_card_of_the_conversion(conversion):
    written = (conversion / "README.md").read_text()
    card = model_card(conversion, conversion.name)
    assert card.startswith(written.rstrip())
    assert metadata(card)["license"] == "llama3.2"


def test_results_of_an_untrained_conversion_stand_before_its_limits(conversion, tmp_path):
    folder = copied(conversion, tmp_path)
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps(RESULTS))
    headings = list(sections(card := model_card(folder, "hybrid")))
    assert headings.index("Results") == headings.index("Limits") - 1
    assert "What holds" in headings and "12.35" in card
    assert ModelCard(card).data.eval_results[0].metric_value == 12.3456
    assert metadata(card)["license"] == "llama3.2"


def saved_again(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)


def changed_in_place(folder):
    shard = sorted(folder.glob("model-base-*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1  # the last number's, of which the size says nothing
    shard.write_bytes(content)


@pytest.mark.parametrize("train", [saved_again, changed_in_place])
def test_trained_weights_end_the_promises_of_the_conversion(conversion, tmp_path, train):
    """Also if nothing was written about the training: the weights are not those of the manifest."""
    folder = copied(conversion, tmp_path)
    train(folder)
    card = model_card(folder, "hybrid")
    assert "What holds" not in sections(card) and "bit for bit" not in card
    assert "tnt convert llama hybrid --window 8" in sections(card)["Where it comes from"]


def test_a_run_that_began_with_a_conversion_says_so(conversion, tmp_path):
    folder = save_run(tmp_path / "run")
    shutil.copytree(conversion, folder / "converted")
    card = model_card(folder, "run")
    assert "tnt convert llama run --window 8" in sections(card)["Where it comes from"]
    assert metadata(card)["license"] == "llama3.2"  # of the source, which the converted folder carries along
    assert "may and may not be used for" in sections(card)["Limits"]


@pytest.mark.parametrize("name", ["/srv/runs/books/stage1", "runs/books/stage1", "./books/stage1"])
def test_stage_2_names_stage_1(run, tmp_path, name):
    folder = copied(run, tmp_path)
    settings = {"model": {"model": name}}
    (folder / "training.json").write_text(json.dumps(RUN | {"mode": "stage2", "settings": settings}))
    assert "Training started from `stage1`" in model_card(folder, "stage2")


def test_what_its_origins_say_is_in_the_metadata_of_the_last_stage(conversion, tmp_path):
    """Licence and base model of the source and the data of every stage, though only the first has `converted/`."""
    first = save_run(tmp_path / "distill")
    card = (conversion / "README.md").read_text()
    assert "base_model" not in metadata(card)  # a folder, which readers do not have
    card = card.replace("license:", "base_model: owner/llama\nlicense:")
    (shutil.copytree(conversion, first / "converted") / "README.md").write_text(card)
    (first / "training.json").write_text(json.dumps(RUN | {"data": {"name": "owner/texts"}}))
    second = save_run(tmp_path / "long")
    began = {"settings": {"model": {"model": str(first)}}, "data": {"name": "owner/books"}}
    (second / "training.json").write_text(json.dumps(RUN | began))
    found = metadata(model_card(second, "long"))
    assert (found["license"], found["language"], found["base_model"]) == ("llama3.2", "en", "owner/llama")
    assert found["datasets"] == ["owner/books", "owner/texts"]


def test_the_nearest_licence_is_taken_whole(run, tmp_path):
    """A name or a link that belongs to the licence of an earlier model is not put beside another licence."""
    folder = copied(run, tmp_path)
    (folder / "converted").mkdir()
    (folder / "converted" / "README.md").write_text("---\nlicense: other\nlicense_name: theirs\n---\n")
    found = metadata(model_card(folder, "books"))
    assert (found["license"], found["license_name"]) == ("other", "theirs")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    found = metadata(model_card(folder, "books"))
    assert found["license"] == "mit" and "license_name" not in found
    found = metadata(model_card(folder, "books", license="apache-2.0"))
    assert found["license"] == "apache-2.0" and "license_name" not in found


def test_a_licence_that_is_given_is_that_of_a_conversion_too(conversion, tmp_path):
    folder = copied(conversion, tmp_path)
    assert write_card(folder, "hybrid", license="mit")
    card = (folder / "README.md").read_text()
    assert metadata(card)["license"] == "mit" and "What holds" in sections(card)
    assert metadata(model_card(folder, "hybrid"))["license"] == "mit", "it stays"


def injected_model():
    host = tiny_host("llama", vocab_size=VOCABULARY)
    inject(host, LiZAConfig(weight=0.3))
    return host


def test_an_injected_model_is_loaded_as_such(tmp_path, monkeypatch, capsys):
    injected_model().save_pretrained(tmp_path / "injected")
    card = model_card(tmp_path / "injected", "injected")
    body = sections(card)["Architecture"]
    assert "delta_rule" in body and "| weight at the start | `0.3` |" in body and "| weight |" not in body
    assert metadata(card)["tags"] == ["tnt", "test-time-memory"]  # no code of its own
    assert "3" in run_quick_start(card, tmp_path, monkeypatch, capsys)


def test_an_adapter_names_its_base_and_loads_on_it(tmp_path, monkeypatch, capsys):
    tiny_host("llama", vocab_size=VOCABULARY).save_pretrained(tmp_path / "llama")
    save_tokenizer(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    get_tptt_model(str(tmp_path / "llama"), LiZAConfig(weight=0.3)).save_pretrained("adapter")
    (tmp_path / "llama" / "README.md").write_text("---\nlicense: llama3.2\nbase_model: owner/llama\n---\n")
    card = model_card("adapter", "adapter")
    assert (metadata(card)["license"], metadata(card)["base_model"]) == ("llama3.2", "owner/llama")
    assert metadata(card)["library_name"] == "peft" and str(tmp_path) not in card
    assert 'load_injected("llama", path)' in card
    assert run_quick_start(card, tmp_path, monkeypatch, capsys).startswith("Test-time memory is")
    # peft has left its empty form behind, which is nobody's work
    assert "More Information Needed" in (tmp_path / "adapter" / "README.md").read_text()
    assert write_card("adapter", "adapter")
    assert "More Information Needed" not in (tmp_path / "adapter" / "README.md").read_text()


def test_peft_s_form_that_somebody_began_to_fill_in_is_kept(tmp_path):
    adapter = get_tptt_model(tiny_host("llama", vocab_size=VOCABULARY), LiZAConfig(weight=0.3))
    adapter.save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    card.write_text(card.read_text().replace("[More Information Needed]", "me", 1))
    assert not write_card(tmp_path, "adapter") and "me" in card.read_text()


# --- whose card it is ------------------------------------------------------------------------------------------------


def test_a_generated_card_is_updated_and_an_edited_one_is_kept(run, tmp_path):
    folder = copied(run, tmp_path)
    readme = folder / "README.md"
    assert write_card(folder, "first") and "# first" in readme.read_text()
    readme.write_bytes(readme.read_bytes().replace(b"\n", b"\r\n"))  # some editors do, and it says nothing new
    assert write_card(folder, "second") and "# second" in readme.read_text()

    edited = readme.read_text().replace("12.35", "12.34")
    readme.write_text(edited)
    assert not is_generated(edited)
    assert not write_card(folder, "third") and readme.read_text() == edited

    assert write_card(folder, "third", regenerate=True) and "# third" in readme.read_text()
    assert (folder / "README.previous.md").read_text() == edited
    readme.write_text("mine")
    assert write_card(folder, "fourth", regenerate=True)
    assert (folder / "README.previous1.md").read_text() == "mine"
    readme.write_bytes(mine := "café".encode("latin-1"))  # whatever it is written in
    assert not write_card(folder, "fifth") and readme.read_bytes() == mine


def test_the_card_of_a_conversion_is_updated_together_with_its_digest(conversion, tmp_path):
    folder = copied(conversion, tmp_path)
    assert write_card(folder, "owner/hybrid")
    assert "# owner/hybrid" in (folder / "README.md").read_text()
    assert check_manifest(folder) == []
    (folder / "README.md").write_text("mine")
    assert not write_card(folder, "owner/hybrid")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: shutil.rmtree(f), "no such folder"),
        (lambda f: (f / "config.json").unlink(), "neither config.json nor adapter_config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "model_type='llama'"),
        (lambda f: (f / "training.json").write_text("{"), "training.json: is not valid JSON"),
        (lambda f: (f / "model.safetensors").write_bytes(PICTURE), "model.safetensors: is truncated"),
        (lambda f: (f / MANIFEST).write_text("{}"), "is not a manifest"),
    ],
    ids=["no folder", "no config", "another model", "damaged results", "damaged weights", "damaged manifest"],
)
def test_a_damaged_folder_gets_no_card(run, tmp_path, break_it, message):
    folder = copied(run, tmp_path)
    break_it(folder)
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        write_card(folder, "books")
    assert not (folder / "README.md").exists()


def test_the_card_that_is_shown_is_as_it_was_generated():
    """Of what `tnt_debug/stage2` and `tnt eval` left; its figures are those of the results beside it."""
    folder = Path(__file__).parents[1] / "model_cards" / "tnt_debug"
    card = (folder / "README.md").read_text()
    parts = sections(card)
    assert is_generated(card) and list(parts) == [*ALL[:3], "Where it comes from", *ALL[3:]]
    training, evaluation = (
        json.loads((folder / x).read_text()) for x in ("training.json", "evaluation/evaluation.json")
    )
    assert f"| perplexity at the end | {text(training['metrics']['perplexity'])} |" in parts["Training"]
    assert f"Perplexity **{evaluation['perplexity']['overall']:.2f}**" in parts["Results"]
    for name, row in evaluation["ablations"].items():
        assert f"| {name} | {text(row['perplexity'])} |" in parts["Results"]
    for found in (training, evaluation):
        assert found["environment"]["commit"] in parts["Training"] and not found["environment"]["uncommitted_changes"]
    for picture in re.findall(r"\]\(([\w/]+\.png)\)", card):
        assert (folder / picture).is_file()


def test_weights_without_a_digest_are_told_by_their_time(conversion, tmp_path):
    folder = copied(conversion, tmp_path)
    manifest, shard = json.loads((folder / MANIFEST).read_text()), next(folder.glob("model-base-*.safetensors"))
    entry = manifest["files"][shard.name]
    entry |= {"sha256": None, "mtime_ns": shard.stat().st_mtime_ns}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert read_model(folder).is_as_converted
    os.utime(shard, ns=(0, entry["mtime_ns"] + 1))
    assert not read_model(folder).is_as_converted
