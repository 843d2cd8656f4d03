"""`tnt eval` from end to end: what it writes, what it leaves alone, and what it refuses."""

import json
import math
import os
import shutil
import warnings

import pytest
import torch
from evaluation_oracles import V, llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_hosts import OPEN_LIZA
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.cli import main as tnt
from tnt_hf.conversion import convert_checkpoint, inject, lora_config
from tnt_hf.recipes.corpus import read_corpus
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.evaluate import TASKS, evaluate
from tnt_hf.recipes.evaluation_model import documents_of, load_model, texts_of
from tnt_hf.recipes.evaluation_perplexity import perplexity
from tnt_hf.recipes.evaluation_report import FORMAT, PICTURES, as_markdown, write_evaluation
from tnt_hf.recipes.loading_errors import reading
from tnt_hf.recipes.model_folder import is_of_ours


TEXTS = [f"def f{i}(x):\n    return x + {i}  # number {i * i} of many\n" * 3 for i in range(5)]
QUICK = {"data": TEXTS, "context": [32, 128], "tokens": 300, "samples": 2, "batch_size": 4, "progress": False}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["bytes"], V)


def small_tnt() -> TNTForCausalLM:
    torch.manual_seed(0)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"sliding_window": 8, "global_chunk_size": 8, "local_chunk_sizes": [2, 4], "local_reset_interval": 16}
    config = TNTConfig(
        vocab_size=V, initializer_range=0.1, memory_gate_init=0.5, bos_token_id=0, eos_token_id=0,
        max_position_embeddings=128, **fields,
    )  # fmt: skip
    return TNTForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A saved TNT model with tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny-tnt"
    small_tnt().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def numbers(results: dict) -> dict:
    """All results that do not depend on the clock."""
    return {name: results[name] for name in ("perplexity", "passkey", "recall", "ablations") if name in results}


# -------------------------------------------------------------------------------------------------- the whole command


@pytest.fixture(scope="module")
def evaluated(folder, text_file):
    """After `tnt eval` with its default tasks: (results, folder they were written to)."""
    arguments = ["eval", str(folder), "--data", str(text_file), "--context", "32", "128"]
    assert tnt([*arguments, "--tokens", "300", "--samples", "2", "--batch-size", "4"]) == 0
    output = folder / "evaluation"
    return json.loads((output / "evaluation.json").read_text()), output


def test_every_task_has_its_section(evaluated):
    results, _ = evaluated
    assert results["format"] == FORMAT and results["model"] == "tiny-tnt" and results["seed"] == 0
    assert results["command"].startswith("tnt eval tiny-tnt --data text.jsonl --context 32 128"), "without local paths"
    assert results["settings"]["tasks"] == list(TASKS) and "skipped" not in results
    assert results["environment"]["versions"]["torch"] == torch.__version__
    perplexity = results["perplexity"]
    assert perplexity["data"]["name"] == "text.jsonl" and perplexity["documents"] == perplexity["data"]["documents"]
    assert sum(row["tokens"] for row in perplexity["by_position"]) == perplexity["tokens"] == 300
    logs = [row["tokens"] * math.log(row["perplexity"]) for row in perplexity["by_position"]]
    assert math.log(perplexity["overall"]) == pytest.approx(sum(logs) / 300)
    assert perplexity["documents"] == 3, "however few the tokens are, a document fills the context"
    assert all(set(row) >= {"distance", "accuracy", "samples", "chance"} for row in results["passkey"])
    assert all(row["questions"] and 0 < row["chance"] < 1 for row in results["recall"])
    assert [row["context"] for row in results["cost"]] == [32, 128]
    ablations = results["ablations"]
    assert ablations["all branches"]["perplexity"] == perplexity["overall"]
    assert "memory off" in ablations and "local memory of 2 tokens off" in ablations
    assert ablations["memory off"]["perplexity"] != perplexity["overall"], "memory is on where it is not switched off"


def test_json_markdown_and_pictures_lie_in_the_folder(evaluated):
    results, output = evaluated
    assert sorted(results["files"]) == sorted(path.name for path in output.iterdir())
    pictures = [path for path in output.iterdir() if path.suffix == ".png"]
    assert len(pictures) == 5 and all(path.read_bytes()[:4] == b"\x89PNG" for path in pictures)
    page = (output / "evaluation.md").read_text()
    for heading in ("Perplexity", "Pass key", "Associative recall", "Cost", "Ablations"):
        assert f"\n## {heading}\n" in page
    assert results["command"] in page and "| memory off |" in page
    low, high = results["passkey"][0]["interval"]
    assert f" | {low:.4g} to {high:.4g} | 2 | " in page and "- context: 32, 128\n" in page


@pytest.mark.parametrize("rises, scale", [((3.0, 0.002, -0.001), "symlog"), ((3.0, 0.5, 0.0), "linear")])
def test_a_branch_that_does_little_has_a_bar_beside_one_that_does_all(rises, scale):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    PICTURES["ablations.png"][1](axes, {str(x): {"nats": x, "nats_standard_error": None} for x in rises})
    assert axes.get_xscale() == scale
    ends = axes.transData.transform([(x, 0) for x in rises if x])[:, 0] - axes.transData.transform((0, 0))[0]
    assert all(abs(end) > axes.bbox.width / 50 for end in ends)


@pytest.mark.parametrize("rises", [(1.2, 0.02, -0.003, 4e-6), (8.0, -7.0, 1e-3, -1e-3), (4.0, 0.02, -1e-5, 1e-7)])
def test_labels_on_a_symmetric_axis_stand_apart_and_every_bar_is_shown(rises):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = {f"local memory of {x} tokens off": {"nats": x, "nats_standard_error": abs(x) / 4} for x in rises}
    PICTURES["ablations.png"][1](axes, rows)
    figure.tight_layout()
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(boxes) >= 3 and all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))
    low, high = axes.get_xlim()
    assert low < min(rises) and max(rises) < high


def test_the_legend_of_the_costs_lies_on_no_curve(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: (drawn.append(self), path.touch()))
    speeds = {"prefill_tokens_per_second": 9000.0, "decode_tokens_per_second": 100.0}
    rows = [{"context": n, "state_bytes": 2**20, "kv_bytes": n * 900, **speeds} for n in (512, 2048, 8192)]
    results = {"model": "m", "settings": {}, "environment": {}, "cost": rows}
    write_evaluation(tmp_path / "out", results)
    left, _ = drawn[0].axes
    drawn[0].canvas.draw()
    box = left.get_legend().get_window_extent()
    assert len(left.get_legend().get_texts()) == 4
    assert box.y1 < left.bbox.y0 and box.y0 >= 0, "below both axes, and inside the picture"


def test_evaluate_gives_what_the_command_writes(evaluated, tokenizer):
    results, _ = evaluated
    model = small_tnt()
    again = evaluate(model, tokenizer, **{**QUICK, "data": list(TEXTS)})
    shuffled = evaluate(model, tokenizer, **{**QUICK, "data": list(TEXTS), "seed": 1}, tasks="passkey,recall")
    for part in ("passkey", "recall"):
        assert again[part] == results[part], "the same seed, the same samples"
    assert shuffled["recall"] != results["recall"]
    assert again["perplexity"]["overall"] == pytest.approx(results["perplexity"]["overall"], rel=1e-6)


def test_an_evaluation_is_replaced_only_if_asked(evaluated, folder, text_file, capsys):
    _, output = evaluated
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    arguments = ["eval", str(folder), "--data", str(text_file), "--tasks", "perplexity", "--tokens", "50"]
    assert tnt(arguments) == 2 and "--overwrite" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    other = output.parent / "other"
    assert tnt([*arguments, "--output", str(other)]) == 0
    (other / "notes.txt").write_text("mine")
    assert tnt([*arguments, "--output", str(other), "--overwrite", "--tasks", "recall"]) == 0
    assert sorted(path.name for path in other.iterdir()) == [
        "evaluation.json", "evaluation.md", "notes.txt", "recall.png"
    ], "the picture of a task that was not run again is gone, other people's files are not"  # fmt: skip


# ------------------------------------------------------------------------------------------------------ left as it was


def test_the_model_is_left_as_it_was(tokenizer):
    model = small_tnt().train()
    model.model.layers[0].mlp.eval()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    config, generation, modes = model.config.to_dict(), model.generation_config, [m.training for m in model.modules()]
    results = evaluate(model, tokenizer, local_chunk_sizes=[1], **QUICK)
    assert results["settings"]["local_chunk_sizes"] == [1, 1]
    assert model.config.to_dict() == config and model.generation_config is generation
    assert [m.training for m in model.modules()] == modes
    assert all(x.equal(state[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    stage1 = evaluate(model, tokenizer, **QUICK, tasks="perplexity")
    assert stage1["perplexity"]["overall"] != results["perplexity"]["overall"], "chunk sizes count"


def test_a_failure_leaves_the_model_as_it_was(tokenizer):
    model = small_tnt().train()
    model.lm_head.weight.data[7] = math.nan
    config = model.config.to_dict()
    with pytest.raises(ValueError, match="logits are not finite: document 0, position 1 "):
        evaluate(model, tokenizer, local_chunk_sizes=[1], **QUICK)
    assert model.training and model.config.to_dict() == config


def test_dropout_is_off(tokenizer):
    model = llama(attention_dropout=0.5).train()
    first, second = (evaluate(model, tokenizer, **QUICK, tasks="perplexity") for _ in range(2))
    assert numbers(first) == numbers(second)


# ------------------------------------------------------------------------------------------------------ kinds of model


def test_models_of_every_kind_are_loaded(tmp_path, tokenizer):
    """A source, its conversion, injected memory saved whole, and an adapter: without training all are the source."""
    source = llama()
    source.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    convert_checkpoint(tmp_path / "llama", tmp_path / "hybrid", progress=False)
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    inject(live, OPEN_LIZA)
    live.save_pretrained(tmp_path / "whole")
    adapted = get_peft_model(live, lora_config(live))
    adapted.save_pretrained(tmp_path / "adapter")
    plain = {**QUICK, "tasks": "perplexity"}
    reference = numbers(evaluate(source, tokenizer, **plain))
    for name, equal in {"llama": True, "hybrid": True, "adapter": False}.items():
        model, found = load_model(str(tmp_path / name))
        assert (numbers(evaluate(model, found, **plain)) == reference) == equal, name
    results = evaluate(model, found, **{**QUICK, "tasks": "perplexity,passkey,recall,cost,ablation"})
    assert results["ablations"]["memory off"]["perplexity"] == pytest.approx(reference["perplexity"]["overall"])
    assert results["cost"][0]["state_bytes"] > 0
    plainly = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    plainly.peft_config["default"].base_model_name_or_path = str(tmp_path / "llama")
    plainly.save_pretrained(tmp_path / "plain adapter")
    again, _ = load_model(str(tmp_path / "plain adapter"))
    assert numbers(evaluate(again, found, **plain)) == numbers(evaluate(plainly, found, **plain)) != reference
    settings = tmp_path / "adapter" / "adapter_config.json"
    good = json.loads(settings.read_text())
    for broken, message in (
        ([], "must hold a JSON object, not list"),
        (good | {"base_model_name_or_path": "nowhere/at/all"}, "base_model_name_or_path='nowhere/at/all'.*no such"),
        (good | {"tnt_injection": {}}, "kind"),
        (good | {"target_modules": None}, "MODEL .*cannot be read, |target_modules"),
    ):
        settings.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=message):
            load_model(str(tmp_path / "adapter"))
    whole, none = load_model(str(tmp_path / "whole"))
    assert none is None, "it was saved without a tokenizer"
    assert numbers(evaluate(whole, found, **plain)) == numbers(evaluate(adapted, found, **plain))


def test_recall_and_cost_need_no_tokenizer():
    results = evaluate(llama(), tasks=["recall", "cost"], **QUICK)
    assert set(results) & {"perplexity", "passkey", "recall", "cost", "ablations"} == {"recall", "cost"}
    assert results["settings"]["begin_token"] is None
    with pytest.raises(ValueError, match="tokenizer: the model has none, and perplexity, passkey, ablation need one"):
        evaluate(llama(), **QUICK)


def test_a_log_says_which_task_has_begun(capsys):
    evaluate(llama(), tasks=["recall", "cost"], **QUICK | {"progress": True})
    assert capsys.readouterr().err.splitlines() == ["recall: 2 sequences", "cost: 2 contexts"]


def test_out_of_memory_in_one_task_keeps_the_results_of_the_others(tokenizer, tmp_path, capsys):
    """2^44 token ids are 128 TiB, which no allocator gives."""
    huge = {**QUICK, "context": [32, 2**44], "batch_size": 1}
    with pytest.warns(UserWarning, match="cost failed: out of memory"):
        results = evaluate(llama(), tokenizer, tasks=["perplexity", "cost"], **huge)
    assert [row["context"] for row in results["cost"]] == [32] and results["perplexity"]["tokens"] > 0
    assert list(results["failed"]) == ["cost"] and "- cost failed: out of memory" in as_markdown(results)
    with pytest.raises(ValueError, match=r"context=17592186044416: out of memory: .*memory"):
        evaluate(llama(), tasks=["cost"], **{**huge, "context": 2**44})
    llama().save_pretrained(tmp_path / "model")
    arguments = ["eval", str(tmp_path / "model"), "--tasks", "cost", "--context", "32", str(2**44), "--output"]
    assert tnt([*arguments, str(tmp_path)]) == 1 and "cost failed" in (tmp_path / "evaluation.md").read_text()


def test_tasks_that_do_not_apply_are_skipped_with_their_reason(tokenizer):
    results = evaluate(llama(), tokenizer, **{**QUICK, "context": 64})
    assert results["settings"]["tasks"] == ["perplexity", "recall", "cost"]
    assert "needs a model with memory" in results["skipped"]["ablation"]
    assert "at least 81 tokens" in results["skipped"]["passkey"]
    for task in ("ablation", "passkey"):
        with pytest.raises(ValueError, match=task):
            evaluate(llama(), tokenizer, **{**QUICK, "context": 64, "tasks": [task]})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "metadata"),
        ("config.json", "not a valid JSON file"),
        ("tokenizer.json", "Expecting value"),
        (None, "tensor 'model.norm.weight' is missing"),
    ],
)
def test_a_damaged_folder_is_refused(folder, tmp_path, file, message):
    """Never evaluated with weights that are not the model's, nor taken for one without tokenizer."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    if file is None:
        tensors = load_file(copy / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    else:
        (copy / file).write_bytes((copy / file).read_bytes()[: (copy / file).stat().st_size // 2])
    with pytest.raises(ValueError, match=f"MODEL .*{message}"):
        load_model(str(copy))


# --------------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "perplexity,speed"}, "tasks: 'speed' must be among perplexity"),
        ({"tasks": ""}, "tasks: '' must be among"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": True}, "tokens=True"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"context": [0, 8]}, r"context=\[0, 8\]"),
        ({"context": []}, r"context=\[\]"),
        ({"held_out": 1.0}, "held_out=1.0"),
        ({"local_chunk_sizes": [3]}, "local_chunk_sizes"),
        ({"data": []}, "data: holds no text"),
        ({"data": ["", ""]}, "data: holds no text"),
        ({"data": [3]}, "a document is a int"),
        ({"data": "no/such/file.txt"}, "^data='no/such/file.txt': no such file"),
    ],
)
def test_wrong_arguments_are_named(tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(small_tnt(), tokenizer, **{**QUICK, **changes})


def test_a_context_beyond_the_models_is_told_or_refused(tokenizer):
    with pytest.warns(UserWarning, match="context=256 is beyond max_position_embeddings=128"):
        results = evaluate(small_tnt(), tokenizer, **{**QUICK, "context": 256, "tasks": "recall"})
    assert results["warnings"] == ["context=256 is beyond max_position_embeddings=128, which the model is made for"]
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="context=256: the model has positions for 64 tokens"):
        evaluate(gpt2, tokenizer, **{**QUICK, "context": 256, "tasks": "recall"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate(gpt2, tokenizer, **{**QUICK, "context": None, "tasks": "cost"})["settings"]["context"] == [
            16,
            64,
        ]
    with pytest.raises(ValueError, match=r"local_chunk_sizes=\[1\]: GPT2LMHeadModel has no local memories"):
        evaluate(gpt2, tokenizer, **{**QUICK, "context": 64, "tasks": "recall", "local_chunk_sizes": [1]})


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    with pytest.raises(ValueError, match="gives token id .*, the model knows 100"):
        evaluate(llama(vocab_size=100), tokenizer, **{**QUICK, "tasks": "perplexity"})
    highest = max(tokenizer("text")["input_ids"])
    assert documents_of(["text"], tokenizer, 60, 40, highest + 1)
    with pytest.raises(ValueError, match=f"gives token id {highest}, the model knows {highest}"):
        documents_of(["text"], tokenizer, 60, 40, highest)


def test_documents_are_read_up_to_the_number_of_tokens(tokenizer):
    texts = ["x" * 500, "y" * 10, "", "z" * 500]
    documents, facts = documents_of(texts, tokenizer, 60, 40, V)
    assert [len(ids) for ids in documents] == [40, 10, 10] and facts == {"documents": 3, "documents_cut": 2}
    documents, facts = documents_of(texts[:3], tokenizer, 400, 40, V)
    assert [len(ids) for ids in documents] == [390, 10], "what was cut is longer where there is nothing else"
    assert documents[0] == tokenizer("x" * 390)["input_ids"] and facts == {"documents": 2, "documents_cut": 1}
    assert documents_of(texts[:1], tokenizer, 500, 40, V)[1] == {"documents": 1, "documents_cut": 0}, "whole at last"


def test_a_document_of_few_long_tokens_counts_as_cut_where_its_end_is_not_read():
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "w" * 100: 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    documents, facts = documents_of([f"{'w' * 100} " * 9, "end"], tokenizer, 6, 5, 2)
    assert list(map(len, documents)) == [2, 1] and facts == {"documents": 2, "documents_cut": 1}
    documents, facts = documents_of(["end", " " * 1000 + "end"], tokenizer, 6, 5, 2)
    assert list(map(len, documents)) == [1] and facts == {"documents": 1, "documents_cut": 0}, "no token was read"


def test_the_standard_library_is_read_where_no_training_with_that_eval_share_does(tokenizer):
    results = evaluate(llama(), tokenizer, **{**QUICK, "data": "python-stdlib", "tasks": "perplexity"})
    found = results["perplexity"]["data"]
    assert (found["name"], found["held_out"]) == ("python-stdlib", 0.05)
    texts = list(texts_of("python-stdlib", None, None, "text", 0.05, seed=0))
    held_out = list(read_corpus(held_out=0.05).held_out.values())
    assert sorted(texts) == sorted(text for text in held_out if text) and texts != held_out, "in the seed's order"
    assert next(iter(texts_of("python-stdlib", None, None, "text", 0.05, seed=1))) != texts[0]


def test_a_loss_beyond_every_perplexity_is_refused():
    with pytest.raises(ValueError, match="perplexity: the mean loss is 4,000 nats per token"):
        perplexity(torch.tensor([8000.0]).double(), torch.tensor([2.0]).double())


def test_a_context_too_short_for_a_task_skips_it_before_the_others_run(tokenizer):
    results = evaluate(llama(), tokenizer, **{**QUICK, "context": [3]})
    assert {"passkey", "recall"} <= results["skipped"].keys() and "perplexity" in results
    with pytest.raises(ValueError, match="recall' needs at least 5 tokens"):
        evaluate(llama(), tokenizer, **{**QUICK, "context": [3], "tasks": "perplexity,recall"})


def test_results_are_put_into_no_folder_of_somebody_else(folder, tokenizer, tmp_path, monkeypatch):
    """A source is what a conversion is compared with, and what its licence and digests are about."""
    source, adapter = tmp_path / "llama", tmp_path / "adapter"
    llama().save_pretrained(source)
    tokenizer.save_pretrained(source)
    before = sorted(source.iterdir())
    monkeypatch.chdir(tmp_path)
    assert tnt(["eval", "llama", "--tasks", "recall", "--context", "32", "--samples", "1"]) == 0
    assert sorted(source.iterdir()) == before and (tmp_path / "evaluation" / "evaluation.json").is_file()
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert [is_of_ours(x) for x in (folder, adapter, source, tmp_path)] == [True, True, False, False]
    (source / "training.json").write_text("{}")
    assert is_of_ours(source), "a run of tnt train"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all"], "is neither a folder nor a Hub id"),
        (["{empty}"], "holds neither config.json nor adapter_config.json"),
        (["{folder}", "--tasks", "none"], "tasks: 'none'"),
        (["{folder}", "--output", "{folder}/config.json"], "is a file"),
        (["{folder}", "--output", "{folder}/config.json/x"], "cannot be written to"),
        (["{folder}", "--output", "/proc/evaluation"], "cannot be written"),
        (["{folder}", "--output", "~nobody.here/out"], "--output '~nobody.here/out': there is no such user"),
        (
            ["{folder}", "--data", "~nobody.here/x.txt", "--output", "{empty}/out"],
            "data='~nobody.here/x.txt': no such file",
        ),
        (["{folder}", "--data", "{folder}", "--output", "{folder}/evaluation"], "lies in the folder of --data"),
        (["{folder}", "--tokenizer", "{empty}", "--output", "{empty}/out"], "holds no tokenizer"),
        (["{folder}", "--device", "abacus", "--output", "{empty}/out"], "--device abacus: "),
        (["{folder}", "--data", "{empty}", "--output", "{folder}/results"], "dataset_name"),
    ],
)
def test_mistakes_end_as_one_line(folder, tmp_path, capsys, arguments, message):
    assert tnt(["eval", *(x.format(folder=folder, empty=tmp_path) for x in arguments)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("tnt eval:")]
    assert message in line
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_an_output_that_is_a_link_to_itself_is_named(folder, tmp_path, capsys):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert tnt(["eval", str(folder), "--output", str(loop)]) == 2
    assert f"tnt eval: --output {loop}: cannot be written to" in capsys.readouterr().err
    assert loop.is_symlink()


# ------------------------------------------------------------------------------------------------------------- writing


def test_files_that_no_evaluation_wrote_are_never_replaced(tmp_path, evaluated):
    results, _ = evaluated
    for name in ("evaluation.json", "evaluation.md", "cost.png"):
        output = tmp_path / f"folder of {name}"
        output.mkdir()
        (output / name).write_text("mine")
        with pytest.raises(FileExistsError, match=f"{name}: was not written by tnt eval"):
            write_evaluation(output, results, overwrite=True)
        assert [path.read_text() for path in output.iterdir()] == ["mine"]


def test_an_earlier_evaluation_survives_a_failure(tmp_path, evaluated):
    results, _ = evaluated
    write_evaluation(tmp_path, results)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_evaluation(tmp_path, {**results, "seed": math.nan}, overwrite=True)
    broken = {**results, "recall": [{"distance_to": 8}]}
    with pytest.raises(KeyError):
        write_evaluation(tmp_path, broken, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_evaluation_that_broke_off_while_it_replaced_another_blocks_none(tmp_path, evaluated, monkeypatch):
    results, _ = evaluated
    assert {"perplexity.png", "cost.png"} <= {path.name for path in write_evaluation(tmp_path, results)}
    left = {name: x for name, x in results.items() if name not in ("perplexity", "ablations", "recall", "passkey")}
    replaced = []

    def killed(source, target, replace=os.replace):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(replace(source, target))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        write_evaluation(tmp_path, left, overwrite=True)
    written = write_evaluation(tmp_path, left, overwrite=True)
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert json.loads((tmp_path / "evaluation.json").read_text())["files"] == [path.name for path in written]


@pytest.mark.parametrize("files", [5, None, {"a": 1}, [5]])
def test_a_list_of_files_that_is_none_names_none(files, tmp_path, evaluated):
    (tmp_path / "evaluation.json").write_text(json.dumps({"format": FORMAT, "files": files}))
    with pytest.raises(FileExistsError, match="evaluation.json: was not written by tnt eval"):
        write_evaluation(tmp_path, evaluated[0], overwrite=True)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [("config.json", "hidden_size", "abc"), ("config.json", "layer_types", ["a"]),
     ("config.json", "pad_token_id", 999), ("config.json", "rope_parameters", 5), ("tokenizer.json", "model", {})],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["tnt", "llama"])
def test_a_field_of_another_type_is_one_line_that_names_the_model(folder, tmp_path, file, field, value, kind):
    copy = shutil.copytree(folder, tmp_path / "copy")
    if kind == "llama":
        small = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=1)).save_pretrained(copy)
    fields = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps(fields | {field: value}))
    with pytest.raises(ValueError, match=f"^MODEL {copy}: "):
        load_model(str(copy))


def test_a_tokenizer_that_is_a_file_is_named_at_once(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--tokenizer .*file: is neither a folder nor a Hub id"):
        load_model(str(folder), tokenizer=str(tmp_path / "file"))


def test_what_an_error_names_already_is_not_named_again():
    with pytest.raises(ValueError, match="^MODEL x: tensor 'y' is missing$"), reading("MODEL x"):
        raise ValueError("MODEL x: tensor 'y' is missing")
    with pytest.raises(ValueError, match="^MODEL x: cannot be read, KeyError: 'y'$"), reading("MODEL x"):
        raise KeyError("y")
