"""Memory beside weights that a library keeps quantized.

One that is injected starts from what the projections multiply with. How bitsandbytes, torchao and quanto keep their
weights differs; the three kinds here are a weight of integers, one of small floats with a scale beside it, and a
tensor of a class of its own. Of a TNT model that is loaded quantized the memory is not, so that it can be trained.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hosts import tiny_host
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import LiZAConfig, TNTInjectionConfig, inject, load_injected, unload


OPEN = {"global_chunk_size": 8, "local_chunk_sizes": [4], "memory_gate_init": 0.5}
STORED = {"integers": torch.int8, "small floats": torch.float8_e4m3fn, "a class of its own": None}


class Own(torch.Tensor):
    """Looks like a matrix of floats, as torchao's tensors do, and is to be touched by its own module alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.clone, torch.Tensor.to, torch.Tensor.detach):
            raise RuntimeError("copied as if it were plain")
        return super().__torch_function__(function, types, args, kwargs or {})


class QuantizedLinear(nn.Module):
    """x (scale w)^T + bias with w `[out, in]` in `dtype` and one scale per row."""

    def __init__(self, linear: nn.Module, dtype: torch.dtype | None):
        super().__init__()
        weight = linear.weight.detach()
        weight = weight if isinstance(linear, nn.Linear) else weight.T  # GPT-2's
        scale = weight.abs().amax(1, keepdim=True) / 100
        stored = (weight / scale).round()
        stored = stored.as_subclass(Own) if dtype is None else stored.to(dtype)
        self.register_buffer("weight", stored)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.as_subclass(torch.Tensor).to(dtype) * self.scale.to(dtype)

    def forward(self, x):
        return nn.functional.linear(x, self.matrix(x.dtype), self.bias)


def quantize(model, stored: str, names=("q_proj", "k_proj", "v_proj", "o_proj")):
    for layer in model.base_model.layers if hasattr(model.base_model, "layers") else model.base_model.h:
        attention = layer.self_attn if hasattr(layer, "self_attn") else layer.attn
        for name in names:
            setattr(attention, name, QuantizedLinear(getattr(attention, name), STORED[stored]))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("kind", ["mistral", "llama"])  # without and with biases
def test_the_memory_starts_from_the_values(kind, stored, dtype):
    model, ids = quantize(tiny_host(kind, dtype=dtype), stored), torch.randint(1, 60, (2, 20))
    before = model(ids).logits
    inject(model, TNTInjectionConfig(**OPEN | {"memory_gate_init": 0.0}))
    assert model(ids).logits.equal(before)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, expected = getattr(attention.memory, name).weight, getattr(attention, name).matrix(dtype)
        assert type(weight) is nn.Parameter and weight.dtype == dtype
        # a bias that was added and taken away again leaves its rounding
        torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert unload(model)(ids).logits.equal(before)


@pytest.mark.parametrize("config", [TNTInjectionConfig(**OPEN), LiZAConfig(weight=0.5, max_self_attn_length=8)])
def test_it_learns_beside_them(config):
    model, ids = quantize(tiny_host("llama", dtype=torch.bfloat16), "integers"), torch.randint(1, 60, (2, 20))
    inject(model, config)
    model(ids, labels=ids).loss.backward()
    memory = model.model.layers[0].self_attn.memory
    assert all(p.grad is not None and p.grad.isfinite().all() for p in memory.parameters())


def test_transposed_and_fused():
    model = quantize(tiny_host("gpt2", dtype=torch.float32), "integers", ("c_attn", "c_proj"))
    inject(model, TNTInjectionConfig(**OPEN))
    attention = model.transformer.h[0].attn
    found = [getattr(attention.memory, name).weight for name in ("q_proj", "k_proj", "v_proj")]
    torch.testing.assert_close(torch.cat(found).detach(), attention.c_attn.matrix(torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("returned", [lambda k: (k, k), lambda k: k[..., :3], lambda k: k * float("nan")])
def test_what_is_no_matrix_is_refused_and_nothing_changed(returned):
    model, ids = tiny_host("llama", dtype=torch.float32), torch.randint(1, 60, (2, 20))
    before = model(ids).logits
    projection = quantize(model, "integers", ("k_proj",)).model.layers[1].self_attn.k_proj
    forward = projection.forward
    projection.forward = lambda x: returned(forward(x))
    with pytest.raises(ValueError, match=r"k_proj: memory_projections='own' .* not Tensor torch.int8"):
        inject(model, TNTInjectionConfig(**OPEN))
    projection.forward = forward
    assert not hasattr(model.config, "tnt_injection") and model(ids).logits.shape == before.shape


@pytest.mark.parametrize("variant", ["mag", "mal", "lmm"])
def test_the_librarys_quantizers_leave_a_memory_alone(variant):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    config = TNTConfig(**sizes, num_attention_heads=4, sliding_window=8, memory_layers=[1], variant=variant)
    assert not TNTForCausalLM(config)._keep_in_fp32_modules
    config.quantization_config = {"quant_method": "quanto"}
    model = TNTForCausalLM(config)
    kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    for module in (model, model.model):
        for name, linear in module.named_modules():
            if isinstance(linear, nn.Linear):  # torchao asks for the parameter
                found = {should_convert_module(x, kept) for x in (name, f"{name}.weight")}
                assert found == {"memory." not in name and name != "lm_head"}, name
    assert set(model._get_dtype_plan(torch.float16)) == set(model._keep_in_fp32_modules_strict)


def test_a_whole_model_that_was_saved_quantized_says_how_to_keep_it(tmp_path):
    inject(tiny_host("llama"), TNTInjectionConfig(**OPEN)).save_pretrained(tmp_path)
    place, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(load_file(place) | {"model.layers.0.mlp.down_proj._qdata": torch.ones(2, dtype=torch.int8)}, place)
    with pytest.raises(ValueError, match="has dtype I8; supported"):
        load_injected(tmp_path)
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "torchao"}})
    )
    with pytest.raises(ValueError, match="saved quantized .*I8.*save an adapter instead"):
        load_injected(tmp_path)
