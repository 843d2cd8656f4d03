"""`verify_conversion` passes what is right and, for every promise, fails what is broken on purpose."""

import argparse
import gc
import json
import multiprocessing
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import later
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tnt_hf import TNTForCausalLM, branch_tnt, modeling_tnt, state_tnt, unit_tnt
from tnt_hf.conversion import convert_checkpoint, verify, verify_command, verify_conversion
from tnt_hf.conversion.ablations import opened
from tnt_hf.conversion.memory_use import PeakMemory
from tnt_hf.conversion.verify_measures import ROUNDING, difference, forward, next_token_loss, rounding
from tnt_hf.conversion.verify_probe import probe_ids
from tnt_hf.conversion.verify_report import as_markdown, as_text
from tnt_hf.conversion.verify_structure import check_decode, splits


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
SOURCES = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=12),
    "phi3": Phi3Config(**SIZES),
}
MEMORY = {"global_chunk_size": 8, "local_chunk_sizes": [4], "local_reset_interval": 16}
TOKENS = 29  # crosses window, chunks and resets, and ends inside of each
WINDOW = 6


def make_source(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(SOURCES[name]).to(dtype).save_pretrained(folder)
    return folder


def convert(source: Path, output: Path, **options) -> Path:
    return convert_checkpoint(source, output, **{**MEMORY, "link": "copy", "progress": False, **options})


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """A Llama and its conversion with a window. Nobody changes these."""
    folder = tmp_path_factory.mktemp("pair")
    source = make_source(folder / "source")
    return source, convert(source, folder / "output", window=WINDOW)


@pytest.fixture
def broken(pair, tmp_path) -> Path:
    """A copy of the conversion to break."""
    return Path(shutil.copytree(pair[1], tmp_path / "broken"))


@pytest.fixture(scope="module")
def report(pair) -> dict:
    return check(*pair)


def check(source: Path, output: Path, **options) -> dict:
    report = verify_conversion(source, output, **{"tokens": TOKENS, "progress": False, **options})
    json.dumps(report, allow_nan=False), as_text(report), as_markdown(report)
    return report


def statuses(report: dict) -> dict[str, str]:
    return {row["name"]: row["status"] for row in report["checks"]}


def failed(report: dict) -> set[str]:
    assert report["passed"] == report["verdict"].startswith("PASSED")
    found = {name for name, status in statuses(report).items() if status == "fail"}
    assert report["passed"] == (not found)
    return found


def shard_with(folder: Path, tensor: str) -> Path:
    return next(path for path in folder.glob("*.safetensors") if tensor in safe_open(path, "pt").keys())


def edit_tensor(folder: Path, tensor: str, change) -> None:
    """`change` a tensor in place in its file."""
    path = shard_with(folder, tensor)
    tensors = load_file(path)
    change(tensors[tensor])
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# ------------------------------------------------------------------------------------------------ what is right passes


@pytest.mark.parametrize(
    "name, dtype, window",
    [
        ("llama", torch.float32, None),
        ("llama", torch.bfloat16, WINDOW),
        ("mistral", torch.bfloat16, None),
        pytest.param("mistral", torch.float32, WINDOW, marks=pytest.mark.long),
        ("qwen2", torch.float32, None),
        pytest.param("qwen3", torch.float32, WINDOW, marks=pytest.mark.long),
        ("phi3", torch.float32, None),
        pytest.param("llama", torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("llama", torch.float32, 1, marks=pytest.mark.slow),
        pytest.param("llama", torch.float32, 2, marks=pytest.mark.slow),
        pytest.param("mistral", torch.float32, None, marks=pytest.mark.slow),
        pytest.param("mistral", torch.bfloat16, WINDOW, marks=pytest.mark.slow),
        pytest.param("qwen2", torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("qwen2", torch.float32, WINDOW, marks=pytest.mark.slow),
        pytest.param("qwen2", torch.bfloat16, WINDOW, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.float32, None, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, WINDOW, marks=pytest.mark.slow),
        pytest.param("phi3", torch.bfloat16, WINDOW, marks=pytest.mark.slow),
    ],
)
def test_a_fresh_conversion_keeps_every_promise(tmp_path, name, dtype, window):
    source = make_source(tmp_path / "source", name, dtype)
    report = check(source, convert(source, tmp_path / "output", window=window))
    assert failed(report) == set()
    assert set(statuses(report).values()) == {"pass", "measured"}
    assert report["memory"] == "closed"
    assert report["probe"]["equal_positions"] == window
    parity = next(row["measured"] for row in report["checks"] if row["name"] == "parity")
    if name != "phi3":  # its fused products round differently
        assert parity["bitwise"] and parity["max_abs"] == 0
    for name, found in report["ablations"].items():
        if name != "attention off":
            assert found["kl_from_all_branches"] == 0, name


def test_both_sides_compute_the_attention_that_the_source_names(tmp_path):
    source = make_source(tmp_path / "source")
    edit_config(source, attn_implementation="eager")
    output = convert(source, tmp_path / "output")
    edit_config(output, attn_implementation=None)  # as `save_pretrained` leaves it
    assert failed(check(source, output)) == {"manifest"}


def test_a_rope_that_depends_on_the_length_promises_what_it_can(tmp_path):
    """Beyond its own length a dynamic RoPE turns earlier keys otherwise than a cache holds them, in the source too."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    source = make_source(tmp_path / "source")
    edit_config(source, rope_parameters=rope, max_position_embeddings=20)
    output = convert(source, tmp_path / "output")
    within, beyond = check(source, output, tokens=None), check(source, output)
    assert failed(within) == failed(beyond) == set() and within["probe"]["tokens"] == 20 < TOKENS
    assert statuses(within)["decode"] == "pass" and statuses(beyond)["decode"] == "measured"


@pytest.mark.parametrize(
    "options",
    [
        {"memory_gate": "mix", "window": WINDOW, "keep_full_attention": [1]},
        {"memory_gate": "product", "memory_layers": [1]},
        {"memory_depth": 2, "memory_momentum": True, "memory_decay": True, "memory_conv_kernel": 3},
        pytest.param({"qk_projection": "shard", "local_chunk_sizes": [2, 4]}, marks=pytest.mark.slow),
        {"memory_layers": [], "window": WINDOW},
        {"dtype": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_conversion_keeps_its_promises(pair, tmp_path, options):
    output = convert(pair[0], tmp_path / "output", **options)
    for dtype in (None, "float32", "float16") if "dtype" in options else (None,):  # what was cast, in another one too
        report = check(pair[0], output, dtype=dtype)
        assert failed(report) == set()
    assert report["memory"] == ("none" if options.get("memory_layers") == [] else "closed")


def test_a_trained_result_promises_its_structure_and_reports_its_distance(pair, tmp_path):
    model = TNTForCausalLM.from_pretrained(pair[1])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.memory.gate.scale.uniform_(-1, 1)
            layer.self_attn.q_proj.weight.mul_(1.1)
    model.save_pretrained(tmp_path)
    report = check(pair[0], tmp_path)
    assert failed(report) == set() and report["memory"] == "open"
    found = statuses(report)
    assert {found[name] for name in ("parity", "base weights", "configuration", "branches")} == {"measured"}
    assert {found[name] for name in ("manifest", "silent")} == {"not applicable"}
    assert report["ablations"]["memory off"]["kl_from_all_branches"] > 1e-3
    one_off = [x["kl_from_all_branches"] for name, x in report["ablations"].items() if " memory of " in name]
    assert len(one_off) == 2 and min(one_off) > 1e-4
    changed = next(row["measured"] for row in report["checks"] if row["name"] == "base weights")
    assert changed["changed"] == 2 and changed["names"][0] == "model.layers.0.self_attn.q_proj.weight"


# ------------------------------------------------------------------------------------------- a broken folder is found


def flip_bit(name: str):
    def change(tensor: torch.Tensor) -> None:
        tensor.view(torch.int32).view(-1)[3] ^= 1

    return lambda folder: edit_tensor(folder, name, change)


def truncate(folder: Path) -> None:
    path = shard_with(folder, "model.norm.weight")
    path.write_bytes(path.read_bytes()[:-10])


def drop_tensor(folder: Path) -> None:
    path = shard_with(folder, "model.layers.1.memory.gate.scale")
    tensors = load_file(path)
    del tensors["model.layers.1.memory.gate.scale"]
    save_file(tensors, path, metadata={"format": "pt"})


def lead_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(fields))


def poison(folder: Path) -> None:
    edit_tensor(folder, "model.layers.0.memory.v_proj.weight", lambda tensor: tensor.view(-1)[:1].fill_(torch.nan))


BASE, OURS = "model.layers.1.mlp.up_proj.weight", "model.layers.0.memory.k_proj.weight"
FAULTS = {
    "one bit of a base shard": (flip_bit(BASE), {"manifest", "base weights"}),
    "one bit of a memory shard": (flip_bit(OURS), {"manifest"}),
    "a perturbed norm": (
        lambda folder: edit_tensor(folder, "model.norm.weight", lambda tensor: tensor.copy_(tensor.flip(0) + 0.1)),
        {"manifest", "base weights", "parity"},
    ),
    "another rope_theta": (
        lambda folder: edit_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        {"manifest", "configuration", "parity"},
    ),
    "another epsilon": (
        lambda folder: edit_config(folder, rms_norm_eps=1e-2),
        {"manifest", "configuration", "parity"},
    ),
    "nan behind a closed gate": (poison, {"manifest", "finite", "future", "rows", "decode", "padding", "modes"}),
    "a truncated shard": (truncate, {"manifest", "finite", "gates", "base weights", "loads"}),
    "a missing tensor": (drop_tensor, {"manifest", "finite", "gates", "base weights"}),
    "a missing shard": (
        lambda folder: shard_with(folder, BASE).unlink(),
        {"manifest", "finite", "gates", "base weights", "loads"},
    ),
    "an index that leads outside": (lead_outside, {"manifest", "finite", "gates", "base weights", "loads"}),
    "an unexpected file": (lambda folder: (folder / "extra.bin").write_bytes(b"x"), {"manifest"}),
    "a broken config.json": (lambda folder: (folder / "config.json").write_text("{"), {"manifest", "readable"}),
    "an impossible field": (lambda folder: edit_config(folder, num_hidden_layers=-1), {"manifest", "readable"}),
    "a dtype there is not": (lambda folder: edit_config(folder, dtype="float7"), {"manifest", "readable"}),
    "a missing config.json": (lambda folder: (folder / "config.json").unlink(), {"manifest", "readable"}),
    "another width": (
        lambda folder: edit_config(folder, intermediate_size=41),
        {"manifest", "configuration", "loads"},
    ),
    "a damaged manifest": (lambda folder: (folder / "tnt_manifest.json").write_text("[]"), {"manifest"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_fails_by_name_and_without_a_traceback(pair, broken, capsys, fault):
    damage, expected = FAULTS[fault]
    damage(broken)
    options = argparse.ArgumentParser()
    verify_command.add_arguments(options)
    json_file = broken.parent / "report.json"
    arguments = [str(pair[0]), str(broken), "--tokens", "16", "--json", str(json_file)]
    assert verify_command.run(options.parse_args(arguments)) == 1
    assert failed(json.loads(json_file.read_text())) >= expected
    out = capsys.readouterr().out
    assert out.startswith("FAILED: ")
    named = [line.removeprefix("FAIL").strip() for line in out.splitlines() if line.startswith("FAIL ")]
    assert all(any(line.startswith(name) for line in named) for name in expected)


def test_a_changed_base_tensor_is_found_without_a_manifest(pair, broken):
    (broken / "tnt_manifest.json").unlink()
    flip_bit(BASE)(broken)
    report = check(pair[0], broken)
    assert failed(report) == {"base weights"}
    assert statuses(report)["manifest"] == "not applicable"


# --------------------------------------------------------------------------------------------- a broken model is found


def memory_op(change):
    """The memory's op with its arguments or outputs changed."""
    real = unit_tnt.memory_chunkwise

    def patched(*args, **options):
        return change(real, args, options)

    return unit_tnt, "memory_chunkwise", patched


def output_changed(by):
    def change(real, args, options):
        o, *rest = real(*args, **options)
        return (by(o), *rest)

    return memory_op(change)


def without(name: str):
    return memory_op(lambda real, args, options: real(*args, **{**options, name: None}))


def see_everything():
    real = modeling_tnt.build_masks

    def patched(config, inputs_embeds, attention_mask, past_key_values, segment_ids=None):
        masks = real(config, inputs_embeds, attention_mask, past_key_values, segment_ids)
        T = inputs_embeds.shape[1]
        past = 0 if past_key_values is None else past_key_values.cached_window(0)
        return {"memory": masks["memory"], "sliding_attention": torch.ones(1, 1, T, past + T, dtype=torch.bool)}

    return modeling_tnt, "build_masks", patched


def forget(when):
    real = branch_tnt.TNTMemory.forward

    def patched(self, *args, **options):
        m, surprise = real(self, *args, **options)
        return (m * 0 if when(self) else m), surprise

    return branch_tnt.TNTMemory, "forward", patched


def disturbed_by_padding_behind():
    def change(real, args, options):
        o, *rest = real(*args, **options)
        return (o + (0 if options["mask"] is None else 0.1 * ~options["mask"][:, -1:, None, None]), *rest)

    return memory_op(change)


def blind():
    return torch.nn.Embedding, "forward", lambda self, ids: self.weight[0].expand(*ids.shape, -1)


def one_key_too_many():
    """The cached window is a token wider than the window of the forward pass."""
    real = modeling_tnt.build_masks

    def patched(config, inputs_embeds, attention_mask, past_key_values, segment_ids=None):
        masks = real(config, inputs_embeds, attention_mask, past_key_values, segment_ids)
        if past_key_values is None and masks["sliding_attention"] is not None:
            mask = masks["sliding_attention"]
            masks["sliding_attention"] = mask & ~torch.ones_like(mask).tril(-config.sliding_window + 1)
        return masks

    return modeling_tnt, "build_masks", patched


BROKEN_MODELS = {
    "attention without a causal mask": (see_everything, {"parity", "future", "decode", "prefix"}),
    "a memory that reads one token ahead": (lambda: output_changed(lambda o: o.roll(-1, 1)), {"future"}),
    "a memory that averages over the text": (
        lambda: output_changed(lambda o: o + o.mean(1, keepdim=True)),
        {"future", "decode", "prefix"},
    ),
    "rows that share one memory": (lambda: output_changed(lambda o: o.mean(0, keepdim=True).expand_as(o)), {"rows"}),
    "state lost between calls": (lambda: (state_tnt.LayerState, "read", classmethod(lambda *args: None)), {"decode"}),
    "padding that enters the memory": (lambda: without("mask"), {"padding"}),
    "a bias that depends on the length": (lambda: output_changed(lambda o: o + 0.1 * (o.shape[1] % 5)), {"prefix"}),
    "a memory that stops without gradients": (lambda: forget(lambda _: not torch.is_grad_enabled()), {"modes"}),
    "a memory that stops in training": (lambda: forget(lambda memory: memory.training), {"modes"}),
    "padding behind a row that disturbs it": (disturbed_by_padding_behind, {"padding"}),
    "a model that does not read": (blind, {"future"}),
    "a window one key narrower in one pass": (one_key_too_many, {"parity", "decode"}),
    "a promise of another size": (lambda: (verify, "memory_state_bytes", lambda *args: 4), {"state size"}),
}


@pytest.mark.parametrize("fault", [*list(BROKEN_MODELS)[:7], *later(*list(BROKEN_MODELS)[7:])])
def test_a_broken_model_fails_by_name(pair, monkeypatch, fault):
    make, expected = BROKEN_MODELS[fault]
    monkeypatch.setattr(*make())
    found = failed(check(*pair))
    assert found >= expected
    assert not found & {"manifest", "finite", "base weights", "configuration", "loads"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lost_state_is_far_beyond_rounding(tmp_path, monkeypatch, dtype):
    """The tolerances separate: what is right lies 5 times below, a lost state 2 times above, in both dtypes."""
    source = make_source(tmp_path / "source", dtype=dtype)
    output = convert(source, tmp_path / "output")

    model = TNTForCausalLM.from_pretrained(output).eval()
    ids = torch.randint(61, (1, 64))
    with opened(model, 0):
        full = forward(model, ids)
        holds, found = check_decode(model, ids, full, 0, ROUNDING[dtype])
        assert holds and found["worst_token"] < ROUNDING[dtype] / 5
        monkeypatch.setattr(state_tnt.LayerState, "read", classmethod(lambda *args: None))
        holds, found = check_decode(model, ids, full, 0, ROUNDING[dtype])
        assert not holds and found["worst_token"] > 2 * ROUNDING[dtype]


# ------------------------------------------------------------------------------------------------- the report, options


def test_the_report_reads_in_half_a_minute_and_loads_one_model_at_a_time(pair, tmp_path, capsys, monkeypatch):
    real, together = TNTForCausalLM.from_pretrained, []
    earlier = {id(x): x for x in gc.get_objects() if type(x) is LlamaForCausalLM}  # of other tests

    def spy(*args, **options):
        together.extend(x for x in gc.get_objects() if type(x) is LlamaForCausalLM and id(x) not in earlier)
        return real(*args, **options)

    monkeypatch.setattr(TNTForCausalLM, "from_pretrained", spy)
    parser = argparse.ArgumentParser()
    verify_command.add_arguments(parser)
    files = {"json": tmp_path / "report.json", "markdown": tmp_path / "report.md"}
    arguments = [str(x) for x in (*pair, "--json", files["json"], "--markdown", files["markdown"], "--tokens", TOKENS)]
    assert verify_command.run(parser.parse_args([*arguments, "--dtype", "float64", "--seed", "3"])) == 0
    assert not together
    out = capsys.readouterr().out
    report = json.loads(files["json"].read_text())
    assert out.splitlines()[0] == report["verdict"] and report["verdict"].startswith("PASSED: all ")
    assert report["probe"]["dtype"] == "float64" and report["probe"]["seed"] == 3
    promises = [line for line in out.splitlines() if line.startswith("ok ")]
    assert len(promises) == sum(row["status"] == "pass" for row in report["checks"])
    assert len(out.splitlines()) < 45
    markdown = files["markdown"].read_text()
    assert markdown.startswith(f"**{report['verdict']}**") and "| ok | parity |" in markdown


def test_a_shard_without_a_digest_is_reported_until_it_is_recorded(pair, tmp_path, capsys):
    output = convert(pair[0], tmp_path / "output", window=WINDOW, check=False)
    parser, note = argparse.ArgumentParser(), "1 by size and time alone: --record-digests takes the SHA-256"
    verify_command.add_arguments(parser)
    options = parser.parse_args([str(pair[0]), str(output), "--tokens", str(TOKENS), "--record-digests"])
    for said in (True, False):
        assert verify_command.run(options) == 0
        out = capsys.readouterr().out
        assert (note in out) == said == ("digest recorded: model-base-00001" in out)


def test_accounting_is_that_of_the_models(pair, report):
    model, source = TNTForCausalLM.from_pretrained(pair[1]), LlamaForCausalLM.from_pretrained(pair[0])
    found = report["accounting"]
    assert found["source"]["parameters"] == found["result"]["base_parameters"] == source.num_parameters()
    assert found["result"]["memory_parameters"] == model.num_parameters() - source.num_parameters()
    cache, memory = (x(torch.ones(1, TOKENS, dtype=torch.long)).past_key_values for x in (source, model))
    assert found["result"]["memory_state_bytes"] == memory.state_bytes()
    assert found["source"]["kv_bytes"][str(TOKENS)] == sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    assert found["result"]["kv_bytes"][str(TOKENS)] == 2 * 2 * 2 * 8 * (WINDOW - 1) * 4
    assert found["result"]["peak_anonymous_bytes"] > 2**20


def make_tokenizer(folder: Path) -> None:
    vocab = {chr(32 + i): i for i in range(60)} | {"[UNK]": 60}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_probe_text_is_read_with_the_tokenizer_of_the_source(pair, tmp_path):
    source = Path(shutil.copytree(pair[0], tmp_path / "source"))
    make_tokenizer(source)
    ids, _, label = probe_ids(source, None, 200, 61, seed=0)
    assert (ids.shape, label) == ((1, 200), "standard library of Python")
    (tmp_path / "probe.txt").write_text("SPAM AND EGGS, " * 2)
    report = check(source, pair[1], text=str(tmp_path / "probe.txt"))
    assert (report["probe"]["text"], report["probe"]["tokens"]) == ("probe.txt", TOKENS)
    loss = report["accounting"]["source"]["loss"]
    assert report["accounting"]["source"]["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)
    assert probe_ids(source, "LONG " * 100, 300, 61, seed=0)[2] == "text given"
    with pytest.raises(ValueError, match="text='TOO SHORT': has 9 tokens"):
        check(source, pair[1], text="TOO SHORT")


@pytest.mark.parametrize(
    "options, error, named",
    [
        ({"tokens": 3}, ValueError, "tokens=3"),
        ({"dtype": "float8"}, ValueError, "dtype='float8'"),
        ({"report": "no/such/folder/report.json"}, FileNotFoundError, "report='no/such"),
        ({"text": "needs a tokenizer"}, ValueError, "text='needs a tokenizer'"),
    ],
)
def test_wrong_options_are_refused_before_any_compute(pair, options, error, named):
    with pytest.raises(error, match=named):
        check(*pair, **options)


def test_wrong_folders_are_refused(pair, tmp_path):
    with pytest.raises(ValueError, match="model_type='llama'.*swapped"):
        check(pair[0], pair[0])
    with pytest.raises(ValueError, match="model_type='tnt'"):
        check(pair[1], pair[1])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check(pair[0], tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        check(tmp_path / "nowhere", pair[1])


# ---------------------------------------------------------------------------------------------------------- the pieces


def test_difference_by_hand():
    want = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 1.0]])
    got = want + torch.tensor([[0.0, 0.0, 0.0], [-1.5, 0.0, 0.0]])
    found = difference(got, want)
    std = want.std(correction=0).item()
    p, q = want.softmax(-1), got.softmax(-1)
    assert (found.bitwise, found.finite, found.max_abs, found.top1) == (False, True, 1.5, 0.5)
    assert found.rms == pytest.approx((1.5**2 / 6) ** 0.5 / std)
    assert found.worst_token == pytest.approx((1.5**2 / 3) ** 0.5 / std)
    assert found.tie == pytest.approx(1.0 / std)
    assert found.kl == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    same = difference(want, want.clone())
    assert same.bitwise and same.max_abs == same.kl == same.worst_token == 0 and same.top1 == 1
    assert not difference(want * (1 + 1e-7), want).bitwise and not difference(want.double(), want).bitwise
    assert same.within(1e-3) and not replace(same, worst_token=2e-3).within(1e-3)
    assert replace(same, tie=3e-3).within(1e-3) and not replace(same, tie=5e-3).within(1e-3), "another token is chosen"
    logits, ids = torch.randn(1, 70, 9), torch.randint(9, (1, 70))
    assert next_token_loss(logits, ids) == pytest.approx(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item(), rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_nan_is_within_any_tolerance(bad):
    want = torch.randn(130, 5)
    got = want.clone()
    got[70, 2] = bad
    found = difference(got, want)
    assert not found.finite and not found.bitwise and not found.within(1e9)


@pytest.mark.parametrize("shown, rows, tolerance", [(0, 0, 0.1), (0.01, 0, 0.1), (0.04, 0.05, 0.2), (0.5, 0, 0.25)])
def test_the_tolerance_follows_the_rounding_that_the_source_shows(shown, rows, tolerance):
    short = torch.randn(12, 501)
    std, sign = short.std(correction=0), torch.tensor([1.0, -1.0]).repeat(251)[:501]
    moved = short.clone()
    moved[4] += shown * std * sign
    found = {"short": short, "cached": moved[:11], "left padding": torch.cat([short[:9], torch.zeros(6, 501)])}
    assert rounding(found, torch.bfloat16, rows) == pytest.approx(tolerance, rel=0.05)  # std of all rows, not of 11


@pytest.mark.parametrize("length", [16, 17, 37, 100])
def test_splits_cover_the_text_and_go_token_by_token(pair, length):
    config = TNTForCausalLM.from_pretrained(pair[1]).config
    for pieces in splits(config, length, seed=1):
        assert sum(pieces) == length and min(pieces) > 0 and len(pieces) > 1
    assert splits(config, length, seed=1)[1].count(1) >= 16


@pytest.mark.long
def test_peak_memory_sees_what_is_gone_at_the_end():
    # a process of its own: one that trained before may hold as much already
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_peak_of_a_block) > 50 * 2**20


def _peak_of_a_block() -> int:
    with PeakMemory() as memory:
        block = torch.ones(2**24)  # 64 MiB
        threading_pause = torch.zeros(1)
        for _ in range(200):
            threading_pause += block[:4096].sum()
        del block
    return memory.peak - memory.start
