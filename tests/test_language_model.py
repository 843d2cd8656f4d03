"""The language model of one that sees: the same numbers on text, and a memory can be injected into it."""

import pytest
import torch
from tiny import tokens
from tiny_hosts import CLOSED, OPEN_TNT, SIZES, padded, tiny_host
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint, get_tptt_model, inject, language_model, load_injected
from tnt_hf.recipes.arguments import ModelArguments
from tnt_hf.recipes.models import load_model


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
# model_type: its vision_config, the type of its language model and that one's settings, other settings of the whole.
COMPOSITES = {
    "gemma3": (SiglipVisionConfig(**VISION), "gemma3_text", {"sliding_window": 5}, {"mm_tokens_per_image": 4}),
    "gemma4": (
        {**VISION, "num_key_value_heads": 2, "head_dim": 16},
        "gemma4_text",
        {**PER_LAYER, "sliding_window": 5, "use_bidirectional_attention": "vision"},
        {"audio_config": None},
    ),
    "mistral3": (PixtralVisionConfig(**VISION), "mistral", {"sliding_window": 5}, {}),
    "llava": (CLIPVisionConfig(**VISION), "llama", {}, {}),
    "internvl": ({**VISION, "image_size": [28, 28], "patch_size": [14, 14]}, "qwen2", {}, {}),
    "qwen3_5": ({"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}, "qwen3_5_text", LINEAR, {}),
}
composites = pytest.mark.parametrize("kind", COMPOSITES)


def tiny_composite(kind: str, dtype: torch.dtype = torch.float32):
    """A model of images and text in eval mode, with large weights. Its language model has 8 channels per head."""
    vision, text, settings, others = COMPOSITES[kind]
    config = AutoConfig.for_model(text, **SIZES, head_dim=8, **settings)
    config = AutoConfig.for_model(kind, text_config=config, vision_config=vision, **others)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape) if parameter.ndim > 1 else parameter)
    return model.to(dtype).eval()


@torch.no_grad()
def logits(model, **call):
    return model(**call).logits


CALLS = ({"input_ids": tokens(2, 21)}, padded([tokens(13), tokens(4, seed=2)]))


@composites
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_text_it_is_the_model_bit_for_bit_and_a_closed_memory_too(kind, dtype):
    model = tiny_composite(kind, dtype)
    expected = [logits(model, **call) for call in CALLS]
    with pytest.raises(ValueError, match=rf"model_type='{kind}': is a composite model; .*language_model\(model\)"):
        inject(model, OPEN_TNT)
    found = language_model(model)
    assert type(found) is type(tiny_host(COMPOSITES[kind][1])) and not found.training
    assert all(torch.equal(logits(found, **call), wanted) for call, wanted in zip(CALLS, expected))
    inject(found, CLOSED["tnt"])
    assert all(torch.equal(logits(found, **call), wanted) for call, wanted in zip(CALLS, expected))


@composites
def test_it_is_saved_and_generates_as_a_model_of_its_own(kind, tmp_path):
    """The weights tell whether the head is the embeddings: the settings of a composite model contradict each other."""
    whole = tiny_composite(kind)
    written = whole.generate(tokens(1, 6), max_new_tokens=8, do_sample=False)
    found = language_model(whole)
    assert torch.equal(found.generate(tokens(1, 6), max_new_tokens=8, do_sample=False), written)
    found.save_pretrained(tmp_path / "plain")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(logits(again, **call), logits(found, **call)) for call in CALLS)
    inject(found, OPEN_TNT).save_pretrained(tmp_path / "injected")
    assert not torch.equal(logits(found, **CALLS[0]), logits(again, **CALLS[0]))
    again = load_injected(tmp_path / "injected")
    assert all(torch.equal(logits(again, **call), logits(found, **call)) for call in CALLS)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])  # of which AutoModelForCausalLM makes composite models
def test_an_adapter_finds_its_base_by_name(kind, tmp_path):
    tiny_composite(kind).save_pretrained(tmp_path / "base")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(whole).__name__.endswith("ForConditionalGeneration")
    model = get_tptt_model(str(tmp_path / "base"), OPEN_TNT, lora={"r": 2, "init_lora_weights": False}).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = load_injected(tmp_path / "adapter").eval()
    assert all(torch.equal(logits(again, **call), logits(model, **call)) for call in CALLS)


def test_a_recipe_trains_the_language_model(tmp_path):
    tiny_composite("gemma3").save_pretrained(tmp_path)
    arguments = ModelArguments(model=str(tmp_path), inject={"kind": "tnt", "local_chunk_sizes": [4]})
    model = load_model(str(tmp_path), arguments)
    assert model.config.model_type == "gemma3_text"
    model(tokens(1, 9), labels=tokens(1, 9)).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".gate." in name)


@pytest.mark.parametrize("kind", ["mistral3", "llava", "internvl"])
def test_it_can_be_converted(kind, tmp_path):
    whole = tiny_composite(kind)
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=rf"model_type='{kind}': is a composite model.*language_model\(model\)"):
        convert_checkpoint(tmp_path / "whole", tmp_path / "hybrid")
    expected = logits(whole, input_ids=tokens(2, 21))
    language_model(whole).save_pretrained(tmp_path / "text")
    convert_checkpoint(tmp_path / "text", tmp_path / "hybrid")
    hybrid = TNTForCausalLM.from_pretrained(tmp_path / "hybrid").eval()
    assert torch.equal(logits(hybrid, input_ids=tokens(2, 21)), expected)


def test_what_is_none_is_itself_or_named():
    model = tiny_host("llama")
    assert language_model(model) is model
    t5 = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    t5 = T5ForConditionalGeneration(t5)
    assert language_model(t5) is t5
    with pytest.raises(ValueError, match="encoder-decoder"):
        inject(t5, OPEN_TNT)
    with pytest.raises(ValueError, match="model: must be a transformers PreTrainedModel, not Linear"):
        language_model(torch.nn.Linear(2, 2))


def test_how_it_generates_comes_along():
    model = tiny_composite("llava")
    model.generation_config.eos_token_id = 5
    assert language_model(model).generation_config.eos_token_id == 5
