"""LoRA beside a memory: what is trained, merged and taken out, for every architecture (for what is saved and loaded
again see test_load_injected.py)."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from tiny_adapters import OPERATORS, generated, logits, train, with_lora
from tiny_hosts import HOSTS, OPEN_LIZA, OPEN_TNT, hosts, tiny_host
from transformers import AutoModelForCausalLM

from tnt_hf.conversion.adapters import get_tptt_model, lora_config, without_adapters
from tnt_hf.conversion.architectures import ARCHITECTURES
from tnt_hf.conversion.inject import inject, unload
from tnt_hf.conversion.reload import load_injected
from tnt_hf.conversion.schedules import mag_modules


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of the base model."""
    folder = tmp_path_factory.mktemp("source")
    tiny_host("llama").save_pretrained(folder)
    return folder


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_max_lr", 0.02),
        ("memory_lr_scaling", "train_chunk"),
        ("memory_grad_bound", 0.01),
        ("memory_decay_target", "zero"),
    ],
)
@torch.no_grad()
def test_a_memory_that_is_trained_in_full_follows_the_configuration(field, value, tmp_path):
    """peft trains a copy of it, which has a copy of the configuration."""

    def opened(**changes):
        return train(tiny_model(memory_decay=True, **changes))

    wanted, model = opened(**{field: value}), opened()
    adapted = get_peft_model(model, lora_config(model)).eval()
    assert not torch.equal(logits(adapted), logits(wanted))
    setattr(adapted.config, field, value)
    assert torch.equal(logits(adapted), logits(wanted))
    assert torch.equal(generated(adapted), generated(wanted))
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted), logits(wanted))
    merged = adapted.merge_and_unload()
    assert torch.equal(logits(merged), logits(wanted))
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(wanted))


def test_a_memory_that_is_trained_in_full_runs_in_the_kernels_that_are_asked_for():
    model = tiny_model()
    adapted = get_peft_model(model, lora_config(model))
    adapted.config.memory_implementation = "triton"
    with pytest.raises(ValueError, match="memory_implementation='triton'"):
        logits(adapted)


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


def test_a_memory_that_was_saved_is_not_replaced(tmp_path):
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="base='.*': holds a memory, which would be lost; load it with load_injected"):
        get_tptt_model(tmp_path, OPEN_TNT)
