"""LoRA beside a memory: what is trained, saved, loaded again, merged and taken out, for every architecture.

Training is imitated by giving every trainable tensor another value; test_adapter_training.py trains."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hub_server import HubServer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tokens
from tiny_hosts import HOSTS, OPEN_LIZA, OPEN_TNT, hosts, layouts, tiny_host
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tnt_hf.conversion.adapters import get_tptt_model, lora_config, without_adapters
from tnt_hf.conversion.architectures import ARCHITECTURES
from tnt_hf.conversion.inject import inject, set_max_self_attn_length, unload
from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig
from tnt_hf.conversion.reload import load_injected
from tnt_hf.conversion.schedules import mag_modules


IDS = tokens(2, 19)
MIX = TNTInjectionConfig(memory_gate="mix", memory_gate_init=0.5, global_chunk_size=8)
OPERATORS = {
    "liza": OPEN_LIZA,
    "learned": LiZAConfig(operator="gated_delta_rule", gate="learned", layers=[1], max_self_attn_length=4),
    "tnt": OPEN_TNT,
    "mix": MIX,
}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def generated(model) -> torch.Tensor:
    return model.generate(input_ids=IDS[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)


def train(model, seed: int = 0):
    """Another value for everything that an adapter trains, and for the scheduled weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        for module in mag_modules(model):
            module.weight.fill_(0.37 + 0.1 * seed)
    return model.eval()


def with_lora(kind: str = "llama", operator: str = "tnt", dtype=torch.float32, **overrides):
    model = inject(tiny_host(kind, dtype), OPERATORS[operator])
    return get_peft_model(model, lora_config(model, **overrides))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of the base model."""
    folder = tmp_path_factory.mktemp("source")
    tiny_host("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(source, tmp_path_factory):
    """Folder of a trained adapter, and the logits of its model."""
    folder = tmp_path_factory.mktemp("adapter")
    model = train(get_tptt_model(source, OPEN_TNT))
    model.save_pretrained(folder)
    return folder, logits(model)


# --- what is adapted ------------------------------------------------------------------------------------------------


def test_there_is_a_host_of_every_architecture():
    assert set(HOSTS) == set(ARCHITECTURES)
    assert f"{len(ARCHITECTURES)} architectures" in (Path(__file__).parents[1] / "README.md").read_text()


@hosts
def test_lora_is_on_q_k_v_and_o_and_the_memory_is_trained_in_full(kind):
    model = with_lora(kind)
    row = ARCHITECTURES[kind]
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapted = {name.split(".lora_")[0].split("base_model.model.")[1] for name in names if ".lora_" in name}
    assert {".".join(name.split(".")[-2:]) for name in adapted} == {f"{row.attention}.{x}" for x in row.projections}
    attentions = row.attention_modules(row.base_of(model.get_base_model())).values()
    assert len(adapted) == sum(getattr(x, name) is not None for x in attentions for name in row.projections)
    memory = {name for name, _ in model.named_parameters() if ".memory.modules_to_save.default." in name}
    assert names == memory | {name for name in names if ".lora_" in name}
    assert any("memories.0.weights" in name for name in memory) and any("gate.scale" in name for name in memory)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout, config.task_type) == (8, 16, 0.05, "CAUSAL_LM")
    assert config.fan_in_fan_out == (kind == "gpt2")


def test_a_fresh_adapter_changes_nothing():
    model = with_lora("qwen3").eval()
    assert torch.equal(logits(model), logits(inject(tiny_host("qwen3"), OPEN_TNT)))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", r".*\.[kv]_proj"])
def test_other_targets_leave_the_memory_out(targets):
    model = with_lora(target_modules=targets, r=2)
    adapted = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    assert adapted and not [name for name in adapted if ".memory." in name]
    assert model.peft_config["default"].r == 2


def test_further_modules_are_saved_beside_the_memory():
    model = with_lora(modules_to_save=["lm_head"])
    assert model.peft_config["default"].modules_to_save == ["memory", "lm_head"]
    head = {name for name, x in model.named_parameters() if x.requires_grad and "lm_head" in name}
    assert head == {"base_model.model.lm_head.modules_to_save.default.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "rank=8: is not a field of LoraConfig"),
        ({"r": 0}, "r=0: must be"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0: must be"),
        ({"lora_dropout": "0.1"}, "lora_dropout='0.1': must be"),
        ({"lora_alpha": -1}, "lora_alpha=-1: must be"),
        ({"lora_alpha": float("inf")}, "lora_alpha=inf: must be"),
        ({"modules_to_save": "lm_head"}, "modules_to_save='lm_head': must be a list"),
        ({"tnt_injection": {}}, "tnt_injection={}: is not a field"),
    ],
)
def test_bad_overrides(change, message):
    with pytest.raises(ValueError, match=message):
        lora_config(inject(tiny_host("llama"), OPEN_LIZA), **change)


def test_a_model_without_memory_is_refused():
    with pytest.raises(ValueError, match="model=LlamaForCausalLM: has no injected memory"):
        lora_config(tiny_host("llama"))


# --- saving and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_is_loaded_by_its_folder_alone(kind, operator, tmp_path):
    tiny_host(kind).save_pretrained(tmp_path / "base")
    model = train(get_tptt_model(tmp_path / "base", OPERATORS[operator].to_dict()))
    model.save_pretrained(tmp_path / "adapter")
    again = load_injected(tmp_path / "adapter")
    assert type(again) is type(model) and not again.training
    assert not [name for name, x in again.named_parameters() if x.requires_grad]
    assert torch.equal(logits(again), logits(model)) and torch.equal(generated(again), generated(model))
    if operator in ("liza", "learned", "mix"):
        assert {module.weight.item() for module in mag_modules(again)} == {torch.tensor(0.37).item()}
    again.save_pretrained(tmp_path / "once more")  # a model that was loaded keeps its settings
    assert torch.equal(logits(load_injected(tiny_host(kind), tmp_path / "once more")), logits(model))


@layouts
def test_an_adapter_in_bfloat16(kind, tmp_path):
    model = train(with_lora(kind, "mix", torch.bfloat16))
    model.save_pretrained(tmp_path)
    again = load_injected(tiny_host(kind, torch.bfloat16), tmp_path)
    assert torch.equal(logits(again), logits(model))
    types = {name: x.dtype for name, x in model.state_dict().items()}
    assert types == {name: x.dtype for name, x in again.state_dict().items()}


def test_training_goes_on_from_a_loaded_adapter(adapter, source):
    model = load_injected(None, adapter[0], is_trainable=True)
    fresh = get_tptt_model(source, OPEN_TNT)
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters()):
        assert one.requires_grad == other.requires_grad, name


def test_peft_alone_warns_and_works_on_an_injected_base(adapter):
    base = inject(tiny_host("llama"), OPEN_TNT)
    with pytest.warns(UserWarning, match="tnt_injection"):
        model = PeftModel.from_pretrained(base, adapter[0])
    assert torch.equal(logits(model), adapter[1])


def test_the_library_alone_warns_and_has_no_memory(adapter):
    with pytest.warns(UserWarning, match="tnt_injection"):
        model = AutoModelForCausalLM.from_pretrained(adapter[0])
    assert not any(".memory." in name for name, _ in model.named_modules())


def test_an_adapter_made_without_our_config_needs_the_settings(tmp_path):
    model = inject(tiny_host("llama"), OPEN_TNT)
    plain = LoraConfig(target_modules=["self_attn.q_proj"], modules_to_save=["memory"], task_type="CAUSAL_LM")
    model = train(get_peft_model(model, plain))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="names no injection"):
        load_injected(tiny_host("llama"), tmp_path)
    assert torch.equal(logits(load_injected(tiny_host("llama"), tmp_path, injection=OPEN_TNT)), logits(model))


def test_a_window_changed_in_training_is_saved(tmp_path):
    model = train(with_lora())
    set_max_self_attn_length(model, 3)
    model.save_pretrained(tmp_path)
    again = load_injected(tiny_host("llama"), tmp_path)
    assert torch.equal(logits(again), logits(model))
    set_max_self_attn_length(again, 5)  # and once more, after it was loaded
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_injected(tiny_host("llama"), tmp_path / "again")), logits(again))
    assert not torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match="max_self_attn_length='auto'"):
        set_max_self_attn_length(again, "auto")


def test_two_adapters_and_none(adapter, tmp_path):
    model = with_lora()
    model.add_adapter("second", lora_config(model))
    model.set_adapter("second")
    second = logits(train(model, seed=1))
    model.save_pretrained(tmp_path, selected_adapters=["second"])

    model = load_injected(tiny_host("llama"), adapter[0])
    load_injected(model, tmp_path / "second", adapter_name="second")
    assert torch.equal(logits(model), adapter[1])
    model.set_adapter("second")
    assert torch.equal(logits(model), second)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(tiny_host("llama")))
    assert torch.equal(logits(model), second)
    with pytest.raises(ValueError, match="adapter_name='second': the PeftModel has"):
        load_injected(model, tmp_path / "second", adapter_name="second")
    damaged(tmp_path / "second", "missing tensor")
    with pytest.raises(ValueError, match="is missing"):
        load_injected(model, tmp_path / "second", adapter_name="third")
    assert list(model.peft_config) == ["default", "second"] and torch.equal(logits(model), second)


def damaged(folder, damage: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    values, tensors = json.loads(config.read_text()), load_file(weights)
    memory = next(name for name in tensors if ".memory." in name)
    if damage == "no config":
        config.unlink()
    elif damage == "no weights":
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif damage == "no JSON":
        config.write_text("{")
    elif damage == "another method":
        config.write_text(json.dumps({**values, "peft_type": "IA3"}))
    elif damage == "unknown setting":
        values["tnt_injection"]["depth"] = 3
        config.write_text(json.dumps(values))
    elif damage == "unknown module":  # peft says so when it has put in all the others
        config.write_text(json.dumps({**values, "trainable_token_indices": {"nothing": [0]}}))
    elif damage == "missing tensor":
        del tensors[memory]
        save_file(tensors, weights)
    elif damage == "extra tensor":
        save_file({**tensors, "base_model.model.extra": torch.zeros(1)}, weights)
    else:
        save_file({**tensors, memory: torch.zeros(3)}, weights)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no config", "neither a folder nor|has no adapter_config.json"),
        ("no weights", "has no adapter_model.safetensors"),
        ("truncated", "truncated|damaged|header"),
        ("no JSON", "adapter_config.json"),
        ("another method", "peft_type='IA3' is not 'LORA'"),
        ("unknown setting", "TNTInjectionConfig.depth=3"),
        ("unknown module", "Target modules .'nothing'. not found"),
        ("missing tensor", "is missing"),
        ("extra tensor", "belongs to another model"),
        ("other shape", r"has shape \(3,\), the model needs"),
    ],
)
def test_damaged_adapters_are_refused_and_the_base_stays_as_it_was(adapter, damage, message, tmp_path):
    folder = shutil.copytree(adapter[0], tmp_path / "adapter")
    damaged(folder, damage)
    base = tiny_host("llama")
    before = (base.config.to_dict(), list(base.state_dict()))
    with pytest.raises(ValueError, match=message):
        load_injected(base, folder)
    assert (base.config.to_dict(), list(base.state_dict())) == before
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert torch.equal(logits(base), logits(tiny_host("llama")))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda: tiny_host("llama", hidden_size=48), "has shape"),
        (lambda: tiny_host("llama", num_hidden_layers=3), "is missing"),
        (lambda: inject(tiny_host("llama"), OPEN_LIZA), "tnt_injection: "),
        (lambda: inject(tiny_host("llama"), dataclasses.replace(OPEN_TNT, layers=[1])), "tnt_injection: layers="),
        (lambda: "nowhere/to be found", "base='nowhere/to be found': the base model"),
        (lambda: tiny_host("gpt2"), "its target_modules are not in GPT2LMHeadModel"),
    ],
)
def test_other_bases_are_refused(adapter, base, message):
    with pytest.raises(ValueError, match=message):
        load_injected(base(), adapter[0])


def test_other_settings_and_arguments_are_refused(adapter, source, tmp_path):
    with pytest.raises(ValueError, match="injection: .*layers=.0. of"):
        load_injected(source, adapter[0], injection=dataclasses.replace(OPEN_TNT, layers=[0]))
    with pytest.raises(ValueError, match="dtype: only for a base that is loaded here"):
        load_injected(tiny_host("llama"), adapter[0], dtype=torch.float32)
    with pytest.raises(ValueError, match="adapter=None: needs a folder"):
        load_injected(tiny_host("llama"))
    with pytest.raises(ValueError, match="'no such folder': is neither"):
        load_injected("no such folder")
    with pytest.raises(ValueError, match="holds neither adapter_config.json nor config.json"):
        load_injected(tmp_path)


# --- whole injected models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["learned", "tnt"])
@layouts
def test_a_whole_injected_model_is_loaded_with_its_memory(kind, operator, tmp_path):
    model = train(inject(tiny_host(kind), OPERATORS[operator]))
    model.save_pretrained(tmp_path)
    again = load_injected(tmp_path)
    assert type(again) is type(model) and again.config.tnt_injection == model.config.tnt_injection
    assert torch.equal(logits(again), logits(model)) and torch.equal(generated(again), generated(model))
    with pytest.raises(ValueError, match="injected memory|tnt_inject"):  # never without the memory in silence
        AutoModelForCausalLM.from_pretrained(tmp_path)(IDS)
    assert torch.equal(logits(unload(again)), logits(unload(model)))


@pytest.mark.parametrize("before, after", [(8, 2), (2, None), (None, 4)])
def test_sizes_that_followed_a_window_stay_when_it_changes(before, after, tmp_path):
    config = TNTInjectionConfig(local_chunk_sizes=2, memory_gate_init=0.7, max_self_attn_length=before)
    model = inject(tiny_host("llama"), config)
    set_max_self_attn_length(model, after)
    model.save_pretrained(tmp_path)
    again = load_injected(tmp_path)
    assert torch.equal(logits(again), logits(model))
    memories = [x.model.layers[0].self_attn.memory.config for x in (model, again)]
    assert memories[0].global_chunk_size == memories[1].global_chunk_size == (before or 512)
    assert memories[0].local_reset_interval == memories[1].local_reset_interval


def test_a_window_that_could_not_be_loaded_again_is_refused():
    sizes = {"global_chunk_size": 8, "local_chunk_sizes": 4, "local_reset_interval": 12}
    model = inject(tiny_host("llama"), TNTInjectionConfig(max_self_attn_length=8, **sizes))
    with pytest.raises(ValueError, match="gap|local_reset_interval"):  # before it could not be loaded again
        set_max_self_attn_length(model, 3)
    assert model.config.tnt_injection["max_self_attn_length"] == 8


def test_a_whole_model_in_bfloat16_shards_and_eager_attention(tmp_path):
    model = train(inject(tiny_host("llama", torch.bfloat16, attn="eager"), MIX))
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    again = load_injected(tmp_path, attn_implementation="eager")
    assert {name: x.dtype for name, x in again.state_dict().items()} == {
        name: x.dtype for name, x in model.state_dict().items()
    }
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", ""])
def test_a_model_of_another_head_is_loaded_as_it_was_saved(kind, head, tmp_path):
    """Also one without a head."""
    made = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel").from_config(tiny_host(kind).config)
    model = train(inject(made, OPEN_TNT))
    model.save_pretrained(tmp_path)
    again = load_injected(tmp_path).eval()
    assert type(again) is type(model)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(again(IDS)[:1], model(IDS)[:1]))


def test_an_architecture_that_cannot_be_made_is_named(tmp_path):
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForRanking"))
    with pytest.raises(
        ValueError, match=r"architectures=\['LlamaForRanking'\]: is not one that AutoModelForCausalLM, "
    ):
        load_injected(tmp_path)


def test_an_adapter_of_a_classifier(tmp_path):
    """On a base with the head; where the base has none, nobody can know its size."""
    tiny_host("llama").save_pretrained(tmp_path / "causal")
    classifier = AutoModelForSequenceClassification.from_config(tiny_host("llama").config)
    classifier.save_pretrained(tmp_path / "base")
    model = inject(AutoModelForSequenceClassification.from_pretrained(tmp_path / "base"), OPEN_TNT)
    model = train(get_peft_model(model, lora_config(model, task_type="SEQ_CLS")))
    model.save_pretrained(tmp_path / "adapter")
    for again in (load_injected(tmp_path / "adapter"), load_injected(classifier, tmp_path / "adapter")):
        assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match=r"causal': has no head for the task_type='SEQ_CLS' .*ForSequenceClass"):
        load_injected(tmp_path / "causal", tmp_path / "adapter")


def test_an_adapter_on_a_whole_injected_model(tmp_path):
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path / "base")
    base = load_injected(tmp_path / "base")
    model = train(get_peft_model(base, lora_config(base)))
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(load_injected(tmp_path / "adapter")), logits(model))


def test_damaged_whole_models_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="has no tnt_injection"):
        load_injected(source)
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for pick in (".memory.", "mlp.up_proj"):
        name = next(name for name in tensors if pick in name)
        save_file(
            {key: x for key, x in tensors.items() if key != name}, tmp_path / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
            load_injected(tmp_path)


# --- merging and taking out -----------------------------------------------------------------------------------------


@hosts
def test_merged_lora_keeps_the_memory(kind):
    model = train(with_lora(kind, r=2))
    before = logits(model)
    merged = model.merge_and_unload()
    # W x + B (A x) against (W + B A) x: the same sums in another order, on logits of a few units
    torch.testing.assert_close(logits(merged), before, rtol=1e-4, atol=1e-4)
    assert type(merged) is type(tiny_host(kind)) and merged.config.tnt_injection
    merged = unload(merged)
    assert list(merged.state_dict()) == list(tiny_host(kind).state_dict())
    assert not torch.allclose(logits(merged), logits(tiny_host(kind)))  # the trained projections stay


def test_a_whole_model_keeps_its_attention_and_is_called_what_it_was_asked_for_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inject(tiny_host("llama", attn="eager"), OPEN_LIZA).save_pretrained("saved")
    loaded = load_injected("saved")
    assert loaded.config._attn_implementation == "tnt_inject_eager" and loaded.name_or_path == "saved"
    weights = load_file("saved/model.safetensors") | {"model.layers.0.extra.weight": torch.ones(2)}
    save_file(weights, "saved/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="'model.layers.0.extra.weight' belongs to another model"):
        load_injected("saved")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2"])
def test_unload_without_merging_is_the_source(kind, operator):
    model = train(with_lora(kind, operator, modules_to_save=["lm_head"]))
    host = tiny_host(kind)
    plain = unload(model)
    assert type(plain) is type(host) and not hasattr(plain, "peft_config")
    assert plain.config.to_dict() == host.config.to_dict()
    own, theirs = plain.state_dict(), host.state_dict()
    assert list(own) == list(theirs) and all(torch.equal(own[name], theirs[name]) for name in own)
    assert torch.equal(logits(plain), logits(host)) and torch.equal(generated(plain), generated(host))


def test_weights_that_were_changed_cannot_be_the_source():
    model = train(with_lora())
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged into its weight"):
        unload(model)
    for name, value in (("init_lora_weights", "olora"), ("bias", "all")):
        with pytest.raises(ValueError, match=f"{name}={value!r} of adapter 'default'"):
            unload(with_lora(**{name: value}))
    host = tiny_host("llama")
    with pytest.raises(ValueError, match="must be a PeftModel, not LlamaForCausalLM; pass the PeftModel itself"):
        without_adapters(host)
    host.peft_config = {"default": LoraConfig()}  # as `add_adapter` leaves it
    with pytest.raises(ValueError, match=r"take out what add_adapter put in, model.delete_adapter\('default'\)"):
        without_adapters(host)


@pytest.mark.parametrize("operator", ["liza", "learned", "tnt"])
def test_without_its_adapter_a_model_is_the_source(operator):
    model = train(with_lora("qwen2", operator))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(tiny_host("qwen2")))
        assert torch.equal(generated(model), generated(tiny_host("qwen2")))


# --- one call, and models that are TNT already ----------------------------------------------------------------------


def test_one_call_makes_memory_and_lora(source):
    model = get_tptt_model(source, {"operator": "linear", "weight": 0.25}, lora={"r": 4}, attn_implementation="eager")
    assert model.config.tnt_injection["operator"] == "linear" and model.peft_config["default"].r == 4
    assert [module.weight.item() for module in mag_modules(model)] == [0.25, 0.25]
    assert model.config._attn_implementation.endswith("eager")


@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        ({"operator_mode": "delta_rule"}, None, "is operator here"),
        (None, None, "config: must be a LiZAConfig.*NoneType"),
        ({"operator": "delta"}, None, "LiZAConfig.operator='delta'"),
        (OPEN_LIZA, {"ranks": 3}, "ranks=3: is not a field"),
        (OPEN_LIZA, 8, "lora=int: must be a dict"),
        (OPEN_LIZA, {"target_modules": ["nothing"]}, "target_modules=.'nothing'.: match no module of Llama"),
        (OPEN_LIZA, {"trainable_token_indices": {"nothing": [0]}}, "Target modules .'nothing'. not found"),  # by peft
    ],
)
def test_one_call_that_fails_leaves_the_model_as_it_was(config, lora, message):
    model = tiny_host("llama")
    with pytest.raises(ValueError, match=message):
        get_tptt_model(model, config, lora)
    assert model.config.to_dict() == tiny_host("llama").config.to_dict()
    assert list(model.state_dict()) == list(tiny_host("llama").state_dict())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model), logits(tiny_host("llama")))
    inject(model, OPEN_LIZA)


@pytest.mark.parametrize("gate", ["add", "mix"])
def test_a_tnt_model_gets_lora_and_keeps_its_memory(gate, tmp_path):
    tiny_model(torch.float32, memory_gate=gate).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(model, lora_config(model))
    names = [name.split(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name]
    assert [name.rpartition("layers.")[2] for name in names] == [
        f"{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"
    ]
    train(model).save_pretrained(tmp_path / "adapter")
    for base in ((), (tiny_model(torch.float32, memory_gate=gate),)):
        assert torch.equal(logits(load_injected(*base, tmp_path / "adapter")), logits(model))
    with model.disable_adapter():  # of a TNT model the memory is a part, and stays
        assert torch.equal(logits(model), logits(tiny_model(torch.float32, memory_gate=gate)))
    # as for merged LoRA above
    torch.testing.assert_close(logits(model.merge_and_unload()), logits(load_injected(tmp_path / "adapter")))


@pytest.mark.parametrize(
    "targets", [["q_proj", "q_conv"], ["k_conv"], ["memory.v_proj", "v_proj"], r".*\.q_conv"], ids=str
)
def test_what_is_in_the_memory_alone_gets_no_lora_and_says_so(targets):
    model = tiny_model(torch.float32)
    with pytest.raises(ValueError, match=r"target_modules=.*_(conv|proj)' is inside the memory, which is trained in"):
        lora_config(model, target_modules=targets)


# --- the Hub --------------------------------------------------------------------------------------------------------

PULL = """
import sys, torch
torch.set_num_threads(1)  # as in the tests, whose bits it is compared with
from tnt_hf.conversion import load_injected
model = load_injected(sys.argv[1])
torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
print(model.peft_config["default"].base_model_name_or_path if hasattr(model, "peft_config") else model.name_or_path)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["adapter", "whole"])
def test_a_model_is_loaded_from_the_hub(what, adapter, source, tmp_path):
    """Fresh processes whose Hub is on the loopback interface; the adapter names its base by a Hub id."""
    folder = shutil.copytree(adapter[0], tmp_path / "adapter")
    values = json.loads((folder / "adapter_config.json").read_text())
    values |= {"base_model_name_or_path": "me/base", "revision": f"{1:040x}"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    whole = train(inject(tiny_host("llama"), OPEN_TNT))
    whole.save_pretrained(tmp_path / "whole")
    torch.save(IDS, tmp_path / "ids")
    repositories = {"me/base": source, "me/adapter": folder, "me/whole": tmp_path / "whole"}
    with HubServer() as server:
        for i, (name, path) in enumerate(repositories.items()):
            server.commits[name] = [(f"{i + 1:040x}", {x.name: x.read_bytes() for x in path.iterdir()})]
        server.commits["me/base"].append((f"{9:040x}", {"config.json": b"of a newer commit"}))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", PULL, f"me/{what}", tmp_path / "ids", tmp_path / "logits"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n{server.unknown}"
    assert done.stdout.split()[-1] == {"adapter": "me/base", "whole": "me/whole"}[what]
    assert torch.equal(torch.load(tmp_path / "logits"), adapter[1] if what == "adapter" else logits(whole))
