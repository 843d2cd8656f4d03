"""How memory joins attention: each `memory_gate` against its equation, on the layout before o_proj."""

import re

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from tiny import tiny_config, tiny_model

from tnt_hf import TNTForCausalLM
from tnt_hf.gate_tnt import TNTMemoryGate


HEADS, WIDTH = 4, 8


def random_gate(kind: str) -> TNTMemoryGate:
    config = tiny_config(
        memory_gate=kind,
        memory_projections="own",
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        head_dim=WIDTH,
    )
    gate = TNTMemoryGate(config).double()
    generator = torch.Generator().manual_seed(0)
    for x in [*gate.parameters(), *gate.buffers()]:
        x.data = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return gate


def published(gate, attn, m, x):
    h = attn.unflatten(-1, (HEADS, WIDTH))
    h = h / (h.square().mean(-1, keepdim=True) + gate.norm.variance_epsilon).sqrt() * gate.norm.weight
    return h.flatten(-2) * torch.sigmoid(m)


def add(gate, attn, m, x):
    opened = 2 * torch.sigmoid(F.linear(x, gate.proj.weight, gate.proj.bias))  # one per query head
    return attn + gate.scale * opened.repeat_interleave(WIDTH, -1) * m


EQUATIONS = {
    "add": add,
    "product": lambda gate, attn, m, x: attn * 2 * torch.sigmoid(F.linear(m, gate.proj.weight, gate.proj.bias)),
    "published": published,
    "mix": lambda gate, attn, m, x: (1 - gate.weight) * attn + gate.weight * m,
}


@pytest.mark.parametrize("kind", EQUATIONS)
def test_the_gate_is_its_equation(kind):
    gate = random_gate(kind)
    attn, m, x = torch.randn(3, 2, 5, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # float64, a handful of operations
    torch.testing.assert_close(gate(attn, m, x), EQUATIONS[kind](gate, attn, m, x), rtol=1e-12, atol=1e-12)


def test_lmm_is_the_gated_memory_alone():
    gate = random_gate("add")
    m, x = torch.randn(2, 2, 5, HEADS * WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gate(None, m, x), add(gate, 0, m, x), rtol=1e-12, atol=1e-12)


def test_a_scheduled_weight_begins_at_its_start_without_the_library():
    assert TNTMemoryGate(tiny_config(memory_gate="mix", memory_gate_init=0.25)).weight == 0.25


@pytest.mark.parametrize("fields", [*({"memory_gate": kind} for kind in EQUATIONS), {"memory_layers": []}], ids=str)
def test_what_stays_in_float32_is_there(fields):
    """Each pattern names a tensor of the model, and what they name keeps its width in half precision."""
    model = tiny_model(**fields)
    for part in (model, model.model):
        kept = part._keep_in_fp32_modules_strict
        assert bool(kept) == bool(model.config.memory_layer_indices)
        for pattern in kept:
            assert any(re.search(rf"(?:^|\.){pattern}(?:\.|$)", name) for name in part.state_dict())


def test_a_memory_starts_with_half_its_rate_half_its_momentum_and_next_to_no_forgetting():
    model = TNTForCausalLM(tiny_config(memory_momentum=True, memory_decay=True)).double()
    unit = model.model.layers[0].memory.memories[0]
    for gate, bias in zip(unit.gates(torch.zeros(1, 32, dtype=torch.float64), torch.float64), (0.0, 0.0, -7.0)):
        assert torch.equal(gate, torch.sigmoid(torch.full_like(gate, bias)))


def test_gates_have_a_bias_to_learn_wherever_it_starts():
    model = TNTForCausalLM(tiny_config(memory_momentum=True, memory_decay=True))
    unit = model.model.layers[0].memory.memories[0]
    for gate in (unit.lr_proj, unit.momentum_proj, unit.decay_proj):
        assert gate.bias.requires_grad


def test_an_adapter_on_its_projection_opens_a_gate():
    gate = TNTMemoryGate(tiny_config(memory_gate="product"))
    torch.nn.init.zeros_(gate.proj.weight)
    assert gate.is_closed()
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False), gate)
    assert not gate.is_closed()
