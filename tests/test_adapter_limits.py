"""Adapters and injections that would not be what they say: names that reach into the memory, configurations that
change behind a model's back, wrappers that peft leaves behind. They are refused, copied or taken out."""

import json

import pytest
import torch
from peft import AdaptionPromptConfig, get_peft_model
from tiny import tiny_model, tokens
from tiny_hosts import tiny_host
from transformers import DynamicCache

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import (
    LiZAConfig,
    TNTInjectionConfig,
    get_tptt_model,
    inject,
    load_injected,
    lora_config,
    unload,
)
from tnt_hf.conversion.inject import set_max_self_attn_length
from tnt_hf.conversion.injection_config import injection_from_dict
from tnt_hf.recipes.models import finished, set_trainable


IDS = tokens(2, 9)
OPEN = LiZAConfig(weight=0.5)


def add_adapter(model) -> None:
    """LoRA by the library's own method, for which transformers 5.24 wants a newer peft than this package."""
    try:
        model.add_adapter(lora_config(model))
    except ValueError as error:
        if "PEFT" not in str(error):
            raise
        pytest.skip(str(error))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [("mixtral", "gate", "mlp.gate"), ("llama", "norm", "model.norm"), ("llama", "q_proj", "self_attn.q_proj")],
)
def test_what_is_saved_in_full_is_no_part_of_the_memory(kind, name, other, tmp_path):
    """peft would train a copy of that part, which nobody asks, and freeze the part."""
    host = tiny_host(kind)
    before = host.state_dict().keys()
    with pytest.raises(ValueError, match=f"modules_to_save=.*{name!r} is also the end of .*memory.* name {other!r}"):
        get_tptt_model(host, TNTInjectionConfig(), lora={"modules_to_save": [name]})
    assert host.state_dict().keys() == before
    model = get_tptt_model(host, TNTInjectionConfig(), lora={"modules_to_save": [other], "lora_dropout": 0.0})
    assert all(p.requires_grad for n, p in model.named_parameters() if ".memory.modules_to_save." in n)
    model.save_pretrained(tmp_path)
    assert logits(load_injected(tiny_host(kind), tmp_path)).equal(logits(model))


@pytest.mark.parametrize("name", ["q_proj.weight", "gate.proj.weight"])
def test_no_parameter_of_the_memory_gets_lora(name):
    with pytest.raises(ValueError, match=f"target_parameters=.*{name}.* is inside the memory"):
        get_tptt_model(tiny_host("mixtral"), TNTInjectionConfig(), lora={"target_parameters": [name]})
    lora = {"target_parameters": ["experts.gate_up_proj"], "lora_dropout": 0.0}
    get_tptt_model(tiny_host("mixtral"), TNTInjectionConfig(), lora=lora)


def test_a_model_has_its_own_configuration():
    config = LiZAConfig(weight=0.5)
    model = inject(tiny_host("llama"), config)
    before = logits(model)
    config.operator = "linear"
    assert logits(model).equal(before) and model.config.tnt_injection["operator"] == "delta_rule"
    config.operator = "strange"
    with pytest.raises(ValueError, match="LiZAConfig.operator='strange'"):
        inject(tiny_host("llama"), config)


def test_what_a_deleted_adapter_leaves_behind_goes_with_the_memory(tmp_path):
    """The library's `delete_adapter` leaves its layers around the weights, which would be saved by other names."""
    host = tiny_host("llama")
    before, names = logits(host), list(host.state_dict())
    model = inject(host, OPEN)
    add_adapter(model)
    with pytest.raises(ValueError, match=r"model.delete_adapter\('default'\)"):
        unload(model)
    model.delete_adapter("default")
    source = unload(model)
    assert logits(source).equal(before) and list(source.state_dict()) == names


def test_lora_without_its_memory_is_refused():
    """The library's `enable_adapters` does not switch on what is saved in full."""
    model = inject(tiny_host("llama"), OPEN)
    source = logits(unload(inject(tiny_host("llama"), OPEN)))
    add_adapter(model)
    on = logits(model)
    model.disable_adapters()
    assert logits(model).equal(source) and not on.equal(source)
    model.enable_adapters()
    with pytest.raises(ValueError, match="memory is switched off, but LoRA is not"):
        model(IDS)
    for module in model.modules():
        if hasattr(module, "modules_to_save"):
            module.enable_adapters(True)
    assert logits(model).equal(on)


def test_a_models_own_memory_is_switched_on_with_its_adapter():
    model = tiny_model()
    source = logits(model)
    add_adapter(model)
    for module in model.modules():
        if hasattr(module, "modules_to_save"):
            torch.nn.init.normal_(module.modules_to_save.default.gate.scale)
    on = logits(model)
    model.disable_adapters()
    assert logits(model).equal(source) and not on.equal(source)
    model.enable_adapters()
    assert logits(model).equal(on)


@pytest.mark.parametrize(
    ("names", "others"),
    [
        *[(["lm_head"], {"ensure_weight_tying": tying}) for tying in (False, True)],
        *[(["embed_tokens"], {"ensure_weight_tying": tying}) for tying in (False, True)],
        *[(["q_proj", "lm_head", "embed_tokens"], {"ensure_weight_tying": tying}) for tying in (False, True)],
        (["embed_tokens"], {"modules_to_save": ["lm_head"]}),
        (["lm_head"], {"modules_to_save": ["embed_tokens"]}),
    ],
)
def test_merged_into_tied_layers_it_is_the_same_model(names, others, tmp_path):
    """peft would add what one of them learned to the weight of both."""
    model = tiny_model(torch.float32, tie_word_embeddings=True)
    model = set_trainable(model, "lora", {"target_modules": names, "lora_dropout": 0.0, **others})
    for name, parameter in model.named_parameters():
        if "lora" in name or "modules_to_save" in name and ".memory." not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    expected = logits(model)
    merged = finished(model)
    merged.save_pretrained(tmp_path)
    # float32 in another order: W x + B A x against (W + B A) x
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert logits(TNTForCausalLM.from_pretrained(tmp_path)).equal(logits(merged))


def test_single_tokens_beside_lora_on_tied_layers_are_refused():
    model = tiny_model(torch.float32, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="trainable_token_indices beside LoRA on a tied head or embedding cannot be"):
        set_trainable(model, "lora", {"target_modules": ["lm_head"], "trainable_token_indices": [1, 5]})


def test_lists_are_what_json_gives_back(tmp_path):
    config = TNTInjectionConfig(local_chunk_sizes=(2, 4), global_chunk_size=8, layers=range(1, -1, -1))
    assert config.layers == [0, 1] and config == injection_from_dict(json.loads(json.dumps(config.to_dict())))
    get_tptt_model(tiny_host("llama"), config).save_pretrained(tmp_path)
    load_injected(inject(tiny_host("llama"), config), tmp_path)
    load_injected(tiny_host("llama"), tmp_path, injection=config)


def test_unload_leaves_the_hooks_of_others():
    model, called = tiny_host("llama"), []
    for module in (model.model, model.model.layers[0].self_attn):
        module.register_forward_pre_hook(lambda module, _: called.append(type(module).__name__))
        module.register_forward_hook(lambda *_: called.append("after"))
    unload(inject(model, OPEN))(tokens(1, 3))
    assert called == ["LlamaModel", "LlamaAttention", "after", "after"]


def test_what_peft_cannot_place_is_refused(tmp_path):
    """The library renames the shared experts of some hosts, and LoRA in them would keep its first values."""
    source, wrapped = tmp_path / "source", tmp_path / "adapter"
    host = tiny_host("laguna")
    host.save_pretrained(source)
    model = get_tptt_model(host, OPEN, lora={"target_modules": "all-linear"})
    model.save_pretrained(wrapped)
    with pytest.raises(ValueError, match="peft does not find the place of tensor '.*shared_experts"):
        load_injected(source, wrapped)


def test_parts_of_a_memory_that_the_library_renames_are_found(tmp_path):
    """As it does with everything in Phi-3.5 MoE that ends in gate.weight."""
    model = inject(tiny_host("phimoe"), TNTInjectionConfig(memory_gate="mix"))
    model.save_pretrained(tmp_path)
    assert logits(load_injected(tmp_path)).equal(logits(model))


def test_trained_tokens_come_with_an_adapter_and_go_with_it(tmp_path):
    source, names = tiny_host("llama"), list(tiny_host("llama").state_dict())
    before = logits(source)
    model = get_tptt_model(source, OPEN, lora={"trainable_token_indices": [1, 2]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.requires_grad
    model.save_pretrained(tmp_path)
    assert logits(load_injected(tiny_host("llama"), tmp_path)).equal(logits(model))
    assert logits(unload(model)).equal(before)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(values | {"trainable_token_indices": [1, 2, 3]}))
    base = tiny_host("llama")
    with pytest.raises(ValueError, match="trainable_tokens_delta' has shape"):
        load_injected(base, tmp_path)
    assert list(base.state_dict()) == names and logits(base).equal(before)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("adapter_config.json", "rank_pattern", 3),
        ("adapter_config.json", "bias", True),
        ("config.json", "vocab_size", "x"),
    ],
)
def test_a_value_of_another_type_is_refused_with_the_name_of_its_folder(file, field, value, tmp_path):
    model = inject(tiny_host("llama"), OPEN)
    if file == "adapter_config.json":
        model = get_tptt_model(unload(model), OPEN)
    model.save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | {field: value}))
    base = tiny_host("llama")
    names = list(base.state_dict())
    with pytest.raises(ValueError, match=f"{tmp_path.name}: cannot be read, "):
        load_injected(*((base, tmp_path) if file == "adapter_config.json" else (tmp_path,)))
    assert list(base.state_dict()) == names


def test_of_an_adapter_and_its_base_the_damaged_one_is_named(tmp_path):
    source, wrapped = tmp_path / "source", tmp_path / "adapter"
    host = tiny_host("llama")
    host.save_pretrained(source)
    get_tptt_model(host, OPEN).save_pretrained(wrapped)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": "x"}))
    with pytest.raises(ValueError, match="the base model of adapter .* cannot be loaded: .*source: cannot be read, "):
        load_injected(source, wrapped)


WRONG = [
    (lambda model: inject(model, OPEN, seed="x"), "seed='x'"),
    (lambda model: inject(model, OPEN, seed=2**70), "seed=1180"),
    (lambda model: inject(model, TNTInjectionConfig(memory_gate="auto")), "memory_gate='auto'"),
    (lambda model: inject(model, TNTInjectionConfig(memory_gate_init="auto")), "memory_gate_init='auto'"),
    (lambda model: injection_from_dict({"kind": ["tnt"]}), r"kind=\['tnt'\]"),
    (lambda model: LiZAConfig.from_dict(None), "settings=None"),
    (lambda model: load_injected(model, "adapter", injection={"kind": "tnt"}), "injection: must be"),
    (lambda model: load_injected(5), "base=5"),
    (lambda model: load_injected(model, 5), "adapter=5"),
    (lambda model: load_injected(model, "adapter", adapter_name="a.b"), "adapter_name='a.b'"),
    (lambda model: unload(None), "model=None"),
    (lambda model: set_max_self_attn_length("llama", 3), "model='llama'"),
    (lambda model: lora_config(None), "model=NoneType"),
    (lambda model: get_tptt_model(model, OPEN, lora={"target_modules": 5}), "target_modules=5"),
    (lambda model: get_tptt_model(model, OPEN, lora={"target_modules": "("}), r"target_modules='\('"),
    (lambda model: get_tptt_model(model, OPEN, lora={"modules_to_save": [5]}), r"modules_to_save=\[5\]"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_named_and_change_nothing(wrong, message):
    model = tiny_host("llama")
    before, names = logits(model), list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        wrong(model)
    assert list(model.state_dict()) == names and logits(model).equal(before)


@pytest.mark.parametrize("config", [OPEN, TNTInjectionConfig(memory_gate_init=1.0)], ids=["liza", "tnt"])
def test_a_memory_that_came_with_the_model_stays_where_its_adapter_is_disabled(config, tmp_path):
    """It is what TRL takes for the reference: the model as it was before the adapter."""
    inject(tiny_host("llama"), config, seed=3).save_pretrained(tmp_path / "model")
    before = logits(load_injected(tmp_path / "model"))
    assert not before.equal(logits(tiny_host("llama")))
    model = load_injected(tmp_path / "model")
    model = get_peft_model(model, lora_config(model, lora_dropout=0.0))
    assert logits(model).equal(before)
    with torch.no_grad():
        for parameter in filter(lambda x: x.requires_grad, model.parameters()):
            parameter += 0.1
    trained = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    models = (model, load_injected(tmp_path / "adapter"))
    for model in models:
        with model.disable_adapter():
            assert logits(model).equal(before)
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                pieces = [model(x, past_key_values=cache).logits for x in IDS.split([5, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), before)  # float32, sums in another order
        with pytest.raises(ValueError, match="another model or injection: disable_adapter=True, the model has False"):
            model(IDS[:, :1], past_key_values=cache)
        assert logits(model).equal(trained) and not trained.equal(before)
    inner = unload(model)
    assert logits(inner).equal(logits(tiny_host("llama")))


def test_attention_that_a_wrapper_hides_is_refused():
    """peft's AdaptionPrompt puts the last layers' attention into modules of its own."""
    model = inject(tiny_host("llama"), OPEN)
    model = get_peft_model(model, AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_layers=1, adapter_len=4))
    with pytest.raises(ValueError, match="layer 1: AdaptedAttention hides the injected memory"):
        model(IDS)


def test_a_state_read_without_autograd_is_gone_on_from_with_it():
    model, cache = inject(tiny_host("llama"), OPEN), DynamicCache()
    with torch.inference_mode():
        model(IDS[:, :5], past_key_values=cache)
    later = model(IDS[:, 5:], past_key_values=cache).logits
    torch.testing.assert_close(later, model(IDS).logits[:, 5:])  # float32, sums in another order
    later.sum().backward()
    assert all(x.grad.isfinite().all() for x in model.model.layers[0].self_attn.parameters())


@pytest.mark.long
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_decoding_of_liza_is_one_graph(grad):
    model, cache = inject(tiny_host("llama"), OPEN), DynamicCache()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(grad):
        model(IDS[:, :8], past_key_values=cache)
        torch.testing.assert_close(  # float32, sums in another order
            compiled(IDS[:, 8:], past_key_values=cache).logits, model(IDS).logits[:, 8:]
        )
    torch._dynamo.reset()
