"""Adapters and whole injected models that are saved and loaded again: with all they had, or refused by name."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading

import peft
import pytest
import torch
import transformers
from hub_server import HubServer
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_adapters import IDS, MIX, OPERATORS, generated, logits, train, with_lora
from tiny_hosts import OPEN_LIZA, OPEN_TNT, layouts, tiny_host
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import logging

from tnt_hf.conversion.adapters import get_tptt_model, lora_config
from tnt_hf.conversion.inject import inject, set_max_self_attn_length, unload
from tnt_hf.conversion.injection_config import TNTInjectionConfig
from tnt_hf.conversion.reload import load_injected
from tnt_hf.conversion.schedules import LiZACallback, mag_modules


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


def test_what_could_not_be_saved_is_refused_at_once():
    """The library's check of a configuration knows eager attention by one name."""
    host = tiny_host("llama", attn="eager")
    host.config.output_attentions = True
    with pytest.raises(ValueError, match="config.output_attentions=True: .* pass output_attentions=True in the call"):
        inject(host, OPEN_TNT)
    host.config.output_attentions = False
    assert len(inject(host, OPEN_TNT)(IDS, output_attentions=True).attentions) == len(host.model.layers)


# --- saving and loading ---------------------------------------------------------------------------------------------


def test_other_threads_draw_what_they_would_have_drawn():
    """As those of a server that samples with one model while it loads another."""
    model, drawn = tiny_host("llama"), []

    def load():
        for config in (OPEN_TNT, dataclasses.replace(OPEN_LIZA, gate="learned", operator="gated_delta_rule")) * 4:
            unload(inject(model, config))

    thread = threading.Thread(target=load)
    torch.manual_seed(5)
    thread.start()
    while thread.is_alive():
        drawn.append(torch.rand(1))
    torch.manual_seed(5)
    assert len(drawn) > 100 and torch.equal(torch.cat(drawn), torch.cat([torch.rand(1) for _ in drawn]))


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


@pytest.mark.parametrize("operator", ["liza", "mix", "tnt"])
@pytest.mark.parametrize("how", ["loaded", "scheduled"])
def test_the_next_adapter_is_the_reference_that_trl_makes_of_it(how, operator, tmp_path):
    """It adds an adapter and copies the parameters of the first; the mixing weight is none."""
    model = train(with_lora(operator=operator, lora_dropout=0.0))
    if how == "loaded":
        model.save_pretrained(tmp_path)
        model = load_injected(tiny_host("llama"), tmp_path, is_trainable=True).eval()
    else:
        LiZACallback("constant", final_weight=0.9)._set(model, 0)
    policy = logits(model)
    model.add_adapter("ref", model.peft_config["default"])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if ".default." in name:
                parameters[name.replace(".default.", ".ref.")].copy_(parameter)
    model.set_adapter("ref")
    assert torch.equal(logits(model), policy)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(tiny_host("llama")))


@pytest.mark.parametrize("saved", [[], ["lm_head"]], ids=["memory", "memory and head"])
def test_an_adapter_of_a_model_with_more_tokens(saved, tmp_path):
    """As with a chat template that brings its own: peft then saves the embeddings, and some tensors twice."""

    def resized():
        host = tiny_host("llama")
        host.resize_token_embeddings(host.config.vocab_size + 16)
        return host

    host = inject(resized(), OPEN_TNT)
    model = train(get_peft_model(host, lora_config(host, modules_to_save=saved)))
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    assert torch.equal(logits(load_injected(resized(), tmp_path)), logits(model))


@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("first", [True, False])
def test_adapters_that_change_the_base_are_loaded_alone(start, first, adapter, tmp_path):
    """peft takes their first values out of the base's weights, which the others are on."""
    changing = train(with_lora(init_lora_weights=start))
    changing.save_pretrained(tmp_path)
    folders = [tmp_path, adapter[0]] if first else [adapter[0], tmp_path]
    model = load_injected(tiny_host("llama"), folders[0])
    before = logits(model)
    torch.testing.assert_close(
        before, logits(changing) if first else adapter[1], rtol=0, atol=1e-5
    )  # its own QR or SVD
    with pytest.raises(
        ValueError, match=f"init_lora_weights='{start}' of adapter '{'default' if first else 'second'}'"
    ):
        load_injected(model, folders[1], adapter_name="second")
    assert torch.equal(logits(model), before) and list(model.peft_config) == ["default"]


@pytest.mark.parametrize("damage", ["unknown module", "missing tensor", "other shape"])
def test_a_damaged_adapter_leaves_the_adapters_of_a_model_as_they_were(adapter, damage, tmp_path):
    """Also where the memory would have come with it."""
    damaged(shutil.copytree(adapter[0], tmp_path / "adapter"), damage)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = train(get_peft_model(tiny_host("llama"), lora))
    before, trained = logits(model), {name for name, x in model.named_parameters() if x.requires_grad}
    with pytest.raises(ValueError):
        load_injected(model, tmp_path / "adapter", adapter_name="second")
    assert list(model.peft_config) == ["default"] and torch.equal(logits(model), before)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == trained
    assert not hasattr(model.config, "tnt_injection") and model.get_base_model().peft_config is model.peft_config
    load_injected(model, adapter[0], adapter_name="second")
    model.set_adapter("second")
    assert torch.equal(logits(model), adapter[1])


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="the library's add_adapter refuses this PEFT"
)
def test_an_adapter_that_the_library_put_in_is_not_replaced(adapter):
    host = tiny_host("llama")
    host.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    before = logits(host)
    for put in (lambda: load_injected(host, adapter[0]), lambda: get_tptt_model(host, OPEN_TNT)):
        with pytest.raises(ValueError, match=r"has the adapter 'default'.* model.delete_adapter\('default'\)"):
            put()
        assert torch.equal(logits(host), before) and not hasattr(host.config, "tnt_injection")
    host.delete_adapter("default")
    assert torch.equal(logits(load_injected(host, adapter[0])), adapter[1])


def test_the_model_inside_a_peft_model_is_refused(adapter):
    around = get_peft_model(tiny_host("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="they are of a PeftModel: pass that"):
        load_injected(around.get_base_model(), adapter[0])
    with pytest.raises(ValueError, match="not PeftModel: inject into the base model, before LoRA"):
        get_tptt_model(around, OPEN_TNT)


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
    for local in (adapter[0], source):
        with pytest.raises(ValueError, match="revision='main': .* is a local folder"):
            load_injected(local, revision="main")
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


def test_a_model_that_lost_its_memory_gets_it_back_with_an_adapter(tmp_path):
    """The library alone reads a folder without its memory, and leaves the settings in the configuration."""
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path / "base")
    base = load_injected(tmp_path / "base")
    model = train(get_peft_model(base, lora_config(base)))
    model.save_pretrained(tmp_path / "adapter")
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="sdpa")
    assert torch.equal(logits(load_injected(bare, tmp_path / "adapter")), logits(model))


def test_a_revision_that_an_adapter_names_is_none_of_a_folder(tmp_path):
    """As of a base that came from the Hub, and lies in a folder now."""
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path / "base")
    base = load_injected(tmp_path / "base")
    model = train(get_peft_model(base, lora_config(base)))
    model.save_pretrained(tmp_path / "adapter")
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(values | {"revision": "main"}))
    assert torch.equal(logits(load_injected(tmp_path / "adapter")), logits(model))


def test_options_of_from_pretrained_reach_the_model(adapter, source, tmp_path):
    """For a whole model and for the base of an adapter."""
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    for model in (load_injected(tmp_path, **options), load_injected(source, adapter[0], **options)):
        assert model.config._attn_implementation == "tnt_inject_eager"
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16


def test_a_whole_model_of_another_injection_or_with_more_of_it_is_refused(tmp_path):
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    assert load_injected(tmp_path, injection=OPEN_TNT).config.tnt_injection
    with pytest.raises(ValueError, match=r"injection: layers=\[0\] of .* is not the layers=None that was saved"):
        load_injected(tmp_path, injection=dataclasses.replace(OPEN_TNT, layers=[0]))
    name = "model.layers.0.self_attn.memory.memories.7.weights.0"
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"tensor '{name}' belongs to another model or injection"):
        load_injected(tmp_path)


def test_loading_leaves_the_librarys_verbosity_as_it_was(tmp_path):
    inject(tiny_host("llama"), OPEN_TNT).save_pretrained(tmp_path)
    logging.set_verbosity_info()
    load_injected(tmp_path)
    assert logging.get_verbosity() == logging.INFO


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
