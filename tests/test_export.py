"""`export_injected`: the standalone TNT model computes what the injected one did; what cannot be one is refused."""

import copy
import dataclasses
import json

import pytest
import torch
from peft import get_peft_model
from tiny import tokens
from tiny_hosts import HOSTS, OPEN_LIZA, OPEN_TNT, padded, tiny_host
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import export
from tnt_hf.conversion.adapters import get_tptt_model, lora_config
from tnt_hf.conversion.export import export_injected, exported_config
from tnt_hf.conversion.families import FAMILIES
from tnt_hf.conversion.inject import inject, set_max_self_attn_length
from tnt_hf.conversion.injection_config import TNTInjectionConfig
from tnt_hf.conversion.manifest import MANIFEST, check_manifest, read_manifest
from tnt_hf.conversion.reload import load_injected


IDS = tokens(2, 33)
# (rtol, atol) of logits of a few units in float32, where the two models mask a window in different ways: the same
# sums in another order.
ROUNDING = (1e-5, 1e-5)
WINDOWS = {"own": None, "narrow": 4}


def logits(model, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(**(inputs or {"input_ids": IDS})).logits


def generated(model, ids=IDS[:, :9]) -> torch.Tensor:
    return model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, pad_token_id=0)


def exported(model, folder):
    return AutoModelForCausalLM.from_pretrained(export_injected(model, folder / "out"))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_cached_generation_are_equal(kind, window, tmp_path):
    model = inject(tiny_host(kind), dataclasses.replace(OPEN_TNT, max_self_attn_length=WINDOWS[window]))
    tnt = exported(model, tmp_path)
    assert type(tnt) is TNTForCausalLM
    sliding = WINDOWS[window] or HOSTS[kind].get("sliding_window")
    assert tnt.config.sliding_window == sliding and tnt.config.memory_layer_indices == [0, 1]
    torch.testing.assert_close(logits(tnt), logits(model), rtol=ROUNDING[0], atol=ROUNDING[1])
    if kind == "llama" and window == "own":
        assert torch.equal(logits(tnt), logits(model))
    assert torch.equal(generated(tnt), generated(model))


def test_padding_is_as_before(tmp_path):
    model = inject(tiny_host("qwen3"), OPEN_TNT)
    inputs = padded([IDS[0], IDS[1, :20]])
    valid = inputs["attention_mask"].bool()
    tnt = exported(model, tmp_path)
    torch.testing.assert_close(logits(tnt, **inputs)[valid], logits(model, **inputs)[valid], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_bfloat16_keeps_every_tensor_and_its_dtype(kind, tmp_path):
    host = tiny_host(kind, torch.bfloat16)
    host.model.rotary_emb = tiny_host(kind).model.rotary_emb  # `.to(bfloat16)` rounds its angles, loading does not
    model = inject(host, OPEN_TNT)
    tnt = exported(model, tmp_path)
    assert torch.equal(logits(tnt), logits(model))
    ours = {name.replace(".self_attn.memory.", ".memory."): x for name, x in model.state_dict().items()}
    for name, x in tnt.state_dict().items():
        if name in ours:
            assert x.dtype == ours[name].dtype and torch.equal(x, ours[name]), name


CONFIGS = {
    "one layer, window": TNTInjectionConfig(
        layers=[1], memory_gate_init=0.5, max_self_attn_length=4, global_chunk_size=8
    ),
    "deep, momentum": TNTInjectionConfig(
        memory_depth=2,
        memory_expansion=2,
        memory_momentum=True,
        memory_decay=True,
        memory_layernorm=True,
        memory_residual=True,
        memory_gate_init=0.5,
        global_chunk_size=8,
        qk_projection="shard",
    ),
    "product": TNTInjectionConfig(memory_gate="product", global_chunk_size=8, memory_feature_map="silu"),
    "published": TNTInjectionConfig(memory_gate="published", global_chunk_size=8),
    "mix, a gap": TNTInjectionConfig(
        memory_gate="mix",
        memory_gate_init=0.3,
        global_chunk_size=8,
        local_chunk_sizes=[2],
        local_reset_interval=12,
        allow_memory_gap=True,
    ),
    "local memories only": TNTInjectionConfig(global_chunk_size=None, local_chunk_sizes=[4], memory_gate_init=0.5),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_kind_of_memory(config, tmp_path):
    kind = "llama" if CONFIGS[config].max_self_attn_length else "mistral"
    model = inject(tiny_host(kind, tie_word_embeddings=True), CONFIGS[config])
    tnt = exported(model, tmp_path)
    torch.testing.assert_close(logits(tnt), logits(model), rtol=ROUNDING[0], atol=ROUNDING[1])
    assert torch.equal(generated(tnt), generated(model))
    assert tnt.lm_head.weight is tnt.model.embed_tokens.weight


def test_a_scheduled_window_counts(tmp_path):
    model = inject(tiny_host("llama"), OPEN_TNT)
    set_max_self_attn_length(model, 6)
    tnt = exported(model, tmp_path)
    assert tnt.config.sliding_window == 6
    torch.testing.assert_close(logits(tnt), logits(model), rtol=ROUNDING[0], atol=ROUNDING[1])


def test_trained_with_lora_then_merged(tmp_path):
    model = get_tptt_model(tiny_host("qwen2"), OPEN_TNT)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for unmerged in (model, model.get_base_model()):
        with pytest.raises(ValueError, match="LoRA adapters; export what its merge_and_unload"):
            export_injected(unmerged, tmp_path / "out")
    model = model.eval().merge_and_unload()
    torch.testing.assert_close(logits(exported(model, tmp_path)), logits(model), rtol=ROUNDING[0], atol=ROUNDING[1])
    again = get_peft_model(
        exported_again := AutoModelForCausalLM.from_pretrained(tmp_path / "out"), lora_config(exported_again)
    )
    assert torch.equal(logits(again.eval()), logits(exported_again))


def test_the_folder_is_a_whole_repository(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    model = inject(tiny_host("llama"), OPEN_TNT)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    folder = export_injected(model, tmp_path / "out", tokenizer=tokenizer)
    names = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "README.md", "tokenizer.json", "modeling_tnt.py", "branch_tnt.py", MANIFEST} <= names
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_tnt.TNTForCausalLM"
    assert config["model_type"] == "tnt" and "tnt_injection" not in config
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.5
    assert check_manifest(folder) == []
    assert "peft_config" not in vars(model) and model.config.tnt_injection["kind"] == "tnt"  # the model is as it was
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_is_only_replaced_if_asked(tmp_path):
    model = inject(tiny_host("llama"), OPEN_TNT)
    export_injected(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(FileExistsError, match="exists"):
        export_injected(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    export_injected(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(FileExistsError):
        export_injected(model, tmp_path / "mine", overwrite=True)


def injected(kind="llama", config=OPEN_TNT, **changes):
    return inject(tiny_host(kind, **changes), config)


def with_nan():
    model = injected()
    with torch.no_grad():
        model.model.layers[1].self_attn.memory.gate.scale[0] = float("nan")
    return model


def with_another_layer():
    model = injected()
    config = model.model.layers[1].self_attn.memory.config = copy.deepcopy(
        model.model.layers[1].self_attn.memory.config
    )
    config.memory_grad_bound = 0.5
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_another_layer, "layer 1: its memory is configured differently from that of layer 0"),
        (lambda: tiny_host("llama"), "LlamaForCausalLM: has no injected memory"),
        (lambda: injected(config=OPEN_LIZA), "operator='delta_rule': a TNT model has TNT's memory only"),
        (lambda: injected(config=TNTInjectionConfig(memory_projections="shared")), "after RoPE"),
        (lambda: injected("gpt2"), "model_type='gpt2': a TNT model computes what one of llama"),
        (lambda: injected("qwen2", TNTInjectionConfig(max_self_attn_length=7)), "windows of 5 and 7 tokens"),
        (lambda: injected("mistral", TNTInjectionConfig(layers=[0], max_self_attn_length=4)), "windows of 4 and 5"),
        (with_nan, "layers.1.self_attn.memory.gate.scale: holds nan"),
    ],
)
def test_what_cannot_be_a_tnt_model_is_refused(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_injected(model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_must_be_one(tmp_path):
    with pytest.raises(ValueError, match="tokenizer=str"):
        export_injected(injected(), tmp_path / "out", tokenizer="gpt2")


def test_a_base_that_was_loaded_alone_has_no_memory(tmp_path):
    """Its configuration still says what was injected."""
    host = tiny_host("llama")
    inject(host, OPEN_TNT)
    expected = host(tokens(1, 20)).logits
    host.save_pretrained(tmp_path / "whole")
    get_peft_model(host, lora_config(host)).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="has no injected memory"):
        export_injected(base, tmp_path / "result")
    tuned = load_injected(base, tmp_path / "adapter")
    torch.testing.assert_close(tuned(tokens(1, 20)).logits, expected)


def test_a_gap_behind_the_hosts_own_window_was_accepted_with_it():
    settings = TNTInjectionConfig(global_chunk_size=8, local_chunk_sizes=[2], local_reset_interval=12)
    config = exported_config(inject(tiny_host("mistral", sliding_window=4), settings))
    assert config.allow_memory_gap and (config.sliding_window, config.local_reset_interval) == (4, 12)


def test_a_head_that_was_tied_keeps_its_own_weights(tmp_path):
    """Trained apart from the embedding it began as; what the library saves and loads keeps them apart, too."""
    model = inject(tiny_host("llama", tie_word_embeddings=True), OPEN_TNT)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 0.1 * torch.randn_like(model.lm_head.weight))
    exported = AutoModelForCausalLM.from_pretrained(export_injected(model, tmp_path / "out"))
    torch.testing.assert_close(exported(tokens(1, 20)).logits, model(tokens(1, 20)).logits)
    assert not exported.config.tie_word_embeddings and model.config.tie_word_embeddings


def test_a_base_without_a_head_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="is not in both the injected model and its TNT form"):
        export_injected(inject(tiny_host("llama").model, OPEN_TNT), tmp_path / "out")


def test_a_folder_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "llama").mkdir(parents=True)
    model = inject(tiny_host("llama"), OPEN_TNT)
    for name, named in (("some/llama", True), ("here/llama", False)):
        model.name_or_path = name
        card = (export_injected(model, tmp_path / "out" / name) / "README.md").read_text()
        assert (f"base_model: {name}\n" in card) == named


def test_all_files_reach_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    flushed = set()
    monkeypatch.setattr(export, "flush", lambda path: flushed.add(path.name))
    folder = export_injected(inject(tiny_host("llama"), OPEN_TNT), tmp_path / "out")
    assert flushed == {path.name for path in folder.iterdir()} - {MANIFEST}  # which is written flushed


def test_files_in_folders_are_in_the_manifest_and_may_be_overwritten(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    model, name = inject(tiny_host("llama"), OPEN_TNT), "additional_chat_templates/tool_use.jinja"
    folder = export_injected(model, tmp_path / "out", tokenizer=tokenizer)
    assert (folder / name).is_file() and name in read_manifest(folder)["files"]
    export_injected(model, tmp_path / "out", overwrite=True)
    assert not (folder / name).exists()
