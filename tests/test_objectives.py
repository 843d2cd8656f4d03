"""What each kind of training minimises, and which parameters learn at which rate: against definitions spelled out."""

import pytest
import torch
import torch.nn.functional as F
from tiny_hosts import tiny_host
from transformers import LlamaConfig, LlamaForCausalLM

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import LiZAConfig, TNTInjectionConfig, inject, lora_config
from tnt_hf.recipes.objectives import (
    OBJECTIVES,
    alignment,
    attention_modules,
    distillation,
    next_token,
    next_token_sums,
    with_memory,
)
from tnt_hf.recipes.optimization import KINDS, decays, kind_of, parameter_groups
from tnt_hf.recipes.packing import IGNORED


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MEMORY = {"sliding_window": 4, "global_chunk_size": 8, "local_chunk_sizes": [2, 4], "local_reset_interval": 16}


def llama(seed: int = 0, **changes):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()


def hybrid(teacher, **changes):
    """A TNT model with the weights of a Llama, and memories that are open."""
    torch.manual_seed(1)
    model = TNTForCausalLM(TNTConfig(**SIZES | MEMORY | changes))
    model.load_state_dict(teacher.state_dict(), strict=False)
    return model.eval()


def batch(rows: int = 4, length: int = 23, seed: int = 0):
    """Rows with unscored tokens at the front, in the middle and at the end, as many in each row as no other has."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SIZES["vocab_size"], (rows, length), generator=generator)
    labels = ids.clone()
    for i in range(rows):
        labels[i, : 3 * i] = IGNORED
        labels[i, 15 : 15 + i] = IGNORED
    return {"input_ids": ids, "labels": labels}


def scored(labels):
    return [(b, t) for b in range(len(labels)) for t in range(labels.shape[1] - 1) if labels[b, t + 1] != IGNORED]


@pytest.fixture(scope="module")
def models():
    teacher = llama()
    return hybrid(teacher), teacher


# --- the losses, term by term ---------------------------------------------------------------------------------------


def test_next_token_is_the_mean_cross_entropy_of_scored_tokens(models):
    student, inputs = models[0], batch()
    places = scored(inputs["labels"])
    with torch.no_grad():
        logits = student(inputs["input_ids"], use_cache=False).logits
        total = sum(float(-logits[b, t].log_softmax(-1)[inputs["input_ids"][b, t + 1]]) for b, t in places)
        loss, outputs = next_token(student, inputs)
        given, _ = next_token(student, inputs, 1000)
        own = student(**inputs, use_cache=False, num_items_in_batch=torch.tensor(len(places))).loss
    assert float(loss) == pytest.approx(total / len(places), rel=1e-5)  # float32 sums in another order
    assert float(given) == pytest.approx(total / 1000, rel=1e-5)
    assert torch.equal(outputs.logits, logits)
    assert float(loss) == pytest.approx(float(own), rel=1e-5)


def test_distillation_is_the_kl_divergence_of_scored_predictions(models):
    student, teacher = models
    inputs = batch()
    places = scored(inputs["labels"])
    with torch.no_grad():
        mine, wanted = (x(inputs["input_ids"], use_cache=False).logits.log_softmax(-1) for x in (student, teacher))
        total = sum(float((wanted[b, t].exp() * (wanted[b, t] - mine[b, t])).sum()) for b, t in places)
        loss, _ = distillation(student, inputs, None, teacher)
        none, _ = distillation(teacher, inputs, None, teacher)
    assert float(loss) == pytest.approx(total / len(places), rel=1e-4)  # differences of logarithms in float32
    assert float(none) == 0


def test_alignment_is_the_mean_over_layers_of_the_error_of_attention_and_memory(models):
    """Spelled out with the student's own modules: layer i is given the input of the teacher's layer i."""
    student, teacher = models
    inputs, given, wanted, found = batch(), {}, {}, {}

    def keep(store, i, get):
        return lambda *call: store.__setitem__(i, get(*call))

    hooks = [x.register_forward_pre_hook(keep(given, i, lambda _, a, k: k["hidden_states"]), with_kwargs=True)
             for i, x in enumerate(attention_modules(teacher))]  # fmt: skip
    hooks += [x.register_forward_hook(keep(wanted, i, lambda _, a, out: out[0]))
              for i, x in enumerate(attention_modules(teacher))]  # fmt: skip
    teacher(inputs["input_ids"], use_cache=False)
    for i, layer in enumerate(student.model.layers):
        x = given[i]
        positions = student.model.rotary_emb(x, position_ids=torch.arange(x.shape[1])[None])
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        window = ((distance >= 0) & (distance < MEMORY["sliding_window"]))[None, None]
        nothing = {"mask": None, "segment_ids": None, "output_surprise": False}
        found[i], _ = layer.self_attn(x, positions, window, memory=layer.memory, memory_inputs=nothing)
    for hook in hooks:
        hook.remove()
    places = scored(inputs["labels"])
    errors = [sum(float((found[i][b, t] - wanted[i][b, t]).pow(2).mean()) for b, t in places) for i in found]
    loss, _ = alignment(student, inputs, None, teacher)
    assert float(loss) == pytest.approx(sum(errors) / len(errors) / len(places), rel=1e-4)  # float32


def test_losses_of_half_precision_are_of_float32():
    """The model's numbers are rounded, what is made of them is not."""
    teacher = llama()
    student, teacher, inputs = hybrid(teacher).bfloat16(), teacher.bfloat16(), batch()
    places = tuple(zip(*scored(inputs["labels"])))
    with torch.no_grad():
        mine, wanted = (x(inputs["input_ids"], use_cache=False).logits.double()[places] for x in (student, teacher))
        mine, wanted = mine.log_softmax(-1), wanted.log_softmax(-1)
        losses = F.nll_loss(mine, inputs["labels"][:, 1:][places], reduction="none")
        divergence = (wanted.exp() * (wanted - mine)).sum() / len(losses)
        sums = next_token_sums(student, inputs)
        assert next_token(student, inputs)[0].item() == pytest.approx(losses.mean().item(), rel=1e-5)
        assert sums[:, 0].sum().item() == pytest.approx(losses.sum().item(), rel=1e-5)
        assert distillation(student, inputs, None, teacher)[0].item() == pytest.approx(divergence.item(), rel=1e-5)
        assert alignment(student, inputs, None, teacher)[0].dtype == torch.float32
        assert alignment(student, inputs, None, teacher.float())[0].isfinite()  # a teacher of another precision


def test_alignment_sees_no_error_of_another_layer(models):
    """What layer 0 of the student computes changes the loss of layer 0 alone: its inputs are the teacher's."""
    student, teacher = models
    inputs = batch()
    loss, _ = alignment(student, inputs, None, teacher)
    weights = [next(layer.memory.memories[0].weights.parameters()) for layer in student.model.layers]
    before = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        student.model.layers[0].mlp.down_proj.weight.mul_(-3)
    after = torch.autograd.grad(alignment(student, inputs, None, teacher)[0], weights)
    with torch.no_grad():
        student.model.layers[0].mlp.down_proj.weight.div_(-3)
    assert all(torch.equal(x, y) and x.abs().sum() > 0 for x, y in zip(before, after))


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "memory_layers": [1, 2]},
    ],
    ids=["in every layer", "a narrowed layer without memory does not count"],
)
def test_alignment_of_a_closed_memory_with_full_attention_is_exact(changes):
    teacher = llama()
    student = hybrid(teacher, memory_gate_init=0.0, global_chunk_size=None, **changes)
    loss, _ = alignment(student, batch(), None, teacher)
    assert float(loss) == 0


@pytest.mark.parametrize(
    "config", [TNTInjectionConfig(memory_gate_init=0.5, global_chunk_size=8, max_self_attn_length=4)]
)
def test_alignment_of_an_injected_model_takes_the_same_way(config):
    """An injected memory reads the module's input in a hook of its own, which has to see the teacher's, too."""
    teacher, student = llama(), inject(llama(), config)
    inputs = batch()
    assert with_memory(student) == [0, 1, 2]
    loss, _ = alignment(student, inputs, None, teacher)
    loss.backward()
    for name, parameter in student.named_parameters():
        if ".memory." in name:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    with torch.no_grad():
        student.model.layers[0].mlp.down_proj.weight.mul_(-3)
    assert float(alignment(student, inputs, None, teacher)[0]) == float(loss)
    assert not any(module._forward_hooks for module in attention_modules(teacher))


# --- a step does not depend on how it is cut into batches -----------------------------------------------------------


@pytest.mark.parametrize("mode", OBJECTIVES)
def test_parts_of_a_step_add_up_to_the_whole(mode, models):
    student, teacher = models
    inputs, objective = batch(), OBJECTIVES[mode]
    count = len(scored(inputs["labels"]))
    student.zero_grad()
    whole, _ = objective(student, inputs, torch.tensor(count), teacher)
    whole.backward()
    wanted = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    total = 0.0
    for rows in ([0], [1, 2], [3]):
        part, _ = objective(student, {name: x[rows] for name, x in inputs.items()}, torch.tensor(count), teacher)
        part.backward()
        total += float(part.detach())
    assert total == pytest.approx(float(whole.detach()), rel=1e-5)  # float32 sums in another order; means would be 4x
    assert any(".memory." in name for name in wanted)
    for name, parameter in student.named_parameters():
        if name in wanted:
            scale = float(wanted[name].abs().max()) + 1e-6
            # float32, relative to the largest entry
            assert float((parameter.grad - wanted[name]).abs().max()) < 1e-4 * scale + 1e-7, name
    student.zero_grad()


def test_packed_documents_do_not_see_each_other(models):
    """Positions that restart separate documents for the student and the teacher alike."""
    student, teacher = models
    inputs = batch(1, 24)
    inputs["labels"] = inputs["input_ids"].clone()
    inputs["labels"][:, :13] = IGNORED
    inputs["position_ids"] = torch.cat([torch.arange(12), torch.arange(12)])[None]
    other = {name: x.clone() for name, x in inputs.items()}
    other["input_ids"][:, :12] = (other["input_ids"][:, :12] + 7) % SIZES["vocab_size"]
    for objective in (next_token, distillation, alignment):
        with torch.no_grad():
            losses = [float(objective(student, x, None, teacher)[0]) for x in (inputs, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6), objective  # nothing but rounding


# --- optimizer groups -----------------------------------------------------------------------------------------------


def every_feature():
    fields = ("qk_norm", "attention_bias", "attention_output_gate", "memory_momentum", "memory_decay")
    fields = dict.fromkeys((*fields, "memory_layernorm"), True)
    return TNTForCausalLM(TNTConfig(**SIZES | MEMORY, **fields, num_persistent_tokens=2))


def test_every_trainable_parameter_is_in_one_group_with_its_rate():
    model = every_feature()
    model.lm_head.weight.requires_grad_(False)
    groups = parameter_groups(model, 1e-3, 0.1, memory_learning_rate=2e-3, gate_learning_rate=3e-3)
    names = [name for group in groups for name in group["names"]]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(names) == sorted(trainable)
    for group in groups:
        assert all(parameter is trainable[name] for name, parameter in zip(group["names"], group["params"]))
        for name in group["names"]:
            wanted = 3e-3 if ".gate.scale" in name else 2e-3 if ".memory." in name else 1e-3
            assert group["lr"] == wanted, name
    assert {group["lr"] for group in parameter_groups(model, 1e-3)} == {1e-3}


def test_decay_spares_initial_weights_gates_norms_and_biases():
    model = every_feature()
    decayed = {name for g in parameter_groups(model, 1e-3, 0.1) if g["weight_decay"] for name in g["names"]}
    every = dict(model.named_parameters())
    linear = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "q_conv",
        "k_conv",
        "v_conv",
    )
    wanted = {n for n in every if n.endswith(tuple(f"{x}.weight" for x in (*linear, "embed_tokens", "lm_head")))}
    assert decayed == wanted
    assert "model.layers.0.mlp.gate_proj.weight" in decayed  # a projection of the MLP, no gate
    spared = set(every) - decayed
    for part in ("memories.0.weights.0", "lr_proj.weight", "decay_proj.weight", "norm_weight", "gate.scale",
                 "gate.proj.weight", "q_norm.weight", "self_attn.q_proj.bias", "persistent_keys"):  # fmt: skip
        assert any(part in name for name in spared), part
    assert {g["weight_decay"] for g in parameter_groups(model, 1e-3, 0.1)} == {0.0, 0.1}


def test_a_vector_does_not_decay_whatever_its_name():
    parameters = dict(tiny_host("gpt2").named_parameters())
    assert "transformer.h.0.ln_1.weight" in parameters  # a norm by no such name
    assert {name for name, x in parameters.items() if decays(name, x)} == {
        n for n, x in parameters.items() if x.ndim > 1
    }


def test_kinds_are_found_inside_peft_and_injected_models():
    from peft import get_peft_model

    model = hybrid(llama())
    adapted = get_peft_model(model, lora_config(model))
    kinds = {group["kind"] for group in parameter_groups(adapted, 1e-3)}
    assert kinds == {"lora", "gate", "projection", "memory"}
    targets = ["q_proj", "embed_tokens"]  # with DoRA's magnitudes, and tensors of their own for embeddings
    adapted = get_peft_model(hybrid(llama()), lora_config(model, use_dora=True, target_modules=targets))
    assert {group["kind"] for group in parameter_groups(adapted, 1e-3)} == kinds
    live = inject(llama(), LiZAConfig(operator="gated_delta_rule", gate="learned"))
    found = {name: kind_of(name) for name, _ in live.named_parameters() if "memory" in name}
    assert found and set(found.values()) == {"memory"}
    assert not any(decays(name, p) for name, p in live.named_parameters() if "memory" in name)
    assert [kind for kind, _ in KINDS] == ["lora", "gate", "projection", "memory", "base"]


def test_a_rate_that_is_missing_and_a_model_that_learns_nothing_are_errors():
    model = hybrid(llama())
    rates = {"lora": 1e-3, "gate": 1e-3, "projection": 1e-3, "memory": 1e-3}
    with pytest.raises(ValueError, match=r"embed_tokens.*kind is 'base'"):
        parameter_groups(model, rates=rates)
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(model.requires_grad_(False), 1e-3)


def test_weights_that_are_not_decayed_stay_where_nothing_pulls_them():
    """One step of AdamW without a gradient moves what decays, and nothing else."""
    model = every_feature()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2, 0.5))
    F.mse_loss(torch.stack([p.sum() * 0 for p in model.parameters()]).sum(), torch.zeros(())).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, start[name])
        assert moved == (decays(name, parameter) and bool(start[name].any())), name
