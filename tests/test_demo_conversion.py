"""The demo's parts: attention in blocks, distillation, shares of what was lost, how much text everything sees."""

import json
import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.recipes import blocked_attention, demo_conversion
from tnt_hf.recipes.benchmarks.training import train_in_order
from tnt_hf.recipes.demo_conversion import PRECISIONS, ConversionPlan, measured_on
from tnt_hf.recipes.demo_conversion_report import conversion_results, draw, recovered
from tnt_hf.recipes.distillation import RATES, distiller, with_lora
from tnt_hf.recipes.float32_muon import Float32Muon
from tnt_hf.recipes.optimization import parameter_groups


BACKBONE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.15,
}


def teacher(seed: int = 0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**BACKBONE)).eval()


def student(memory_layers=None, seed: int = 0):
    torch.manual_seed(seed)
    config = TNTConfig(
        **BACKBONE,
        sliding_window=8,
        memory_layers=memory_layers,
        memory_depth=1,
        global_chunk_size=8,
        local_chunk_sizes=[4],
        local_reset_interval=16,
        qk_projection="none",
    )
    return TNTForCausalLM(config)


def rows(count: int, length: int, seed: int = 1):
    return torch.randint(BACKBONE["vocab_size"], (count, length), generator=torch.Generator().manual_seed(seed))


# --- attention in blocks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 7, 64, 200])
@pytest.mark.parametrize("length", [1, 63, 64, 150])
@pytest.mark.parametrize("blocks", ["WIDE", "HALF"])
def test_attention_in_blocks_is_the_librarys(blocks, length, window, monkeypatch):
    monkeypatch.setattr(blocked_attention, "WIDE", getattr(blocked_attention, blocks))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < (window or length))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3).transpose(1, 2)
    found, _ = blocked_attention.blocked_causal_attention(None, q, k, v, None, scaling=0.3, sliding_window=window)
    weight = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (wanted, found)))
    # float64 sums in another order
    assert torch.allclose(found, wanted, atol=1e-12) and all(torch.allclose(*pair, atol=1e-12) for pair in pairs)


def test_half_precision_takes_larger_blocks():
    q, window = torch.empty(4, 300, 8), 64
    wide, half = (len(list(blocked_attention._Blocks.steps(x, window))) for x in (q, q.bfloat16()))
    assert (wide, half) == (5, 3)


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 7])
def test_attention_in_blocks_can_be_compiled(window):
    q, k, v = (torch.randn(1, 2, 80, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def gradients(attend):
        found = attend(None, q, k, v, None, sliding_window=window)[0]
        return found, *torch.autograd.grad(found.square().sum(), (q, k, v))

    attend = blocked_attention.blocked_causal_attention
    compiled = torch.compile(attend, backend="aot_eager")  # around the blocks, which stay out of the graph
    torch.testing.assert_close(gradients(compiled), gradients(attend))


def test_attention_in_blocks_refuses_what_it_would_ignore():
    model = teacher()
    model.set_attn_implementation(blocked_attention.register())
    ids = rows(2, 9)
    mask = torch.ones_like(ids)
    model(input_ids=ids, attention_mask=mask, use_cache=False)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    with torch.no_grad(), pytest.raises(ValueError, match=f"{CACHE_NAME}.*9"):
        model(input_ids=ids[:, :1], past_key_values=model(input_ids=ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="dropout=0.1"):
        x = torch.zeros(1, 1, 2, 4)
        blocked_attention.blocked_causal_attention(None, x, x, x, None, dropout=0.1)


# --- distillation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory_layers", "with_memory"), [(None, {0, 1}), ([1], {1}), ([], set())])
def test_lora_and_memory_are_all_that_learns(memory_layers, with_memory):
    model = with_lora(student(memory_layers), rank=3)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    lora = {name for name in names if "lora_" in name}
    assert all(".self_attn." in name for name in lora) and len(lora) == 2 * 4 * 2
    layers = {int(name.split(".layers.")[1][0]) for name in set(names) - lora}
    assert layers == with_memory and all(".memory." in name for name in set(names) - lora)
    groups = parameter_groups(model, rates=RATES)
    assert {group["kind"]: group["lr"] for group in groups} == {
        kind: RATES[kind] for kind in (RATES if with_memory else ("lora",))
    }
    counted = sum(p.numel() for group in groups for p in group["params"])
    assert counted == model.get_nb_trainable_parameters()[0]


def trained(batch_size: int, model, like, **changes):
    trainer = partial(distiller, teacher=like)
    samples = [{"input_ids": row, "labels": row} for row in rows(8, 21)]
    return train_in_order(model, samples, batch_size, 0, lambda *_: None, trainer, warmup_steps=1, **changes)


def test_merged_model_is_the_trained_one():
    start = student().state_dict()
    model = with_lora(student(), rank=2)
    losses = trained(2, model, teacher())
    assert len(losses) == 4 and all(np.isfinite(losses))
    ids = rows(2, 30, seed=5)
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        found = merged(input_ids=ids).logits
    assert type(merged) is TNTForCausalLM and merged.config.use_cache
    # float32: W x + B A x against (W + B A) x, logits of order 1
    assert float((wanted - found).abs().max()) < 1e-4
    changed = {name for name, x in merged.state_dict().items() if not torch.equal(x, start[name])}
    assert changed and all(".memory." in n or ".self_attn." in n for n in changed)
    assert {n for n in start if ".memory." in n and "proj" in n} <= changed


def test_a_step_does_not_depend_on_how_it_is_cut_into_batches():
    losses = trained(4, with_lora(student(), rank=2), teacher(), max_steps=2)
    other = trained(2, with_lora(student(), rank=2), teacher(), max_steps=2, gradient_accumulation_steps=2)
    # float32 sums in another order; accumulation counted twice would double the loss
    assert losses == pytest.approx(other, rel=1e-4)


def test_a_loss_that_is_no_number_ends_the_training():
    broken = teacher()
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="step 1: the loss is nan"):
        trained(2, with_lora(student()), broken)


def test_the_teacher_is_frozen(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = distiller(with_lora(student()), arguments, teacher=teacher().train())
    assert not trainer.teacher.training and not any(p.requires_grad for p in trainer.teacher.parameters())


# --- report ---------------------------------------------------------------------------------------------------------


def test_shares_follow_from_the_losses():
    noise = np.random.default_rng(0).normal(0, 0.1, (40, 6))
    source, window = np.log(8.0) + noise, np.log(12.0) + noise
    scale = float(np.exp(noise.mean()))  # perplexities 8, 12 and 9 times this
    result = recovered(np.log(9.0) + noise, source, window)
    assert scale > 0 and result["perplexity"] == pytest.approx(3 / 4)
    assert result["loss"] == pytest.approx(np.log(12 / 9) / np.log(12 / 8))
    assert result["perplexity_standard_error"] < 1e-9  # every window lost and regained the same
    assert recovered(window, source, window)["perplexity"] == 0 and recovered(source, source, window)["loss"] == 1
    assert recovered(np.log(13.0) + noise, source, window)["perplexity"] < 0
    uneven = np.log(9.0) + np.random.default_rng(1).normal(0, 0.5, (40, 6))
    assert 0.02 < recovered(uneven, source, window)["loss_standard_error"] < 0.5


def results_of(source, window, hybrid) -> dict:
    """What results.json holds of losses `[N, T - 1]`, of which stage 2 changes none."""
    held_out = {"converted": window, "trained": hybrid, "stage 2": hybrid}
    facts = {"window_costs": [0.1], "full_attention_layers": [], "verification": {}}
    done = {"source": {"held_out": source}, "hybrid": {"held_out": held_out, **facts}}
    done = {name: job | {"losses": [3.0, 2.0], "train_tokens": 64} for name, job in done.items()}
    return json.loads(json.dumps({"plan": {"window": 32}, **conversion_results(done, 2.0)}))


def test_the_results_hold_what_is_drawn():
    by_position = np.log(np.repeat([4.0, 3.0, 2.0], 32))[:-1]  # perplexities of three points, the last of 31 tokens
    results = results_of(*(np.stack([x + 0.1, x - 0.1]) for x in (by_position, by_position + 1, by_position + 2)))
    curves = results["curves"]
    assert curves["tokens_per_point"] == 32
    assert curves["perplexity"].keys() == {"source", "window", "hybrid", "hybrid, stage 2"}
    for factor, name in enumerate(("source", "window", "hybrid")):
        assert curves["perplexity"][name] == pytest.approx(np.exp(factor) * np.array([4.0, 3.0, 2.0]))
    assert [job["losses"] for job in results["jobs"].values()] == [[3.0, 2.0]] * 2


def test_what_stage_2_lies_on_can_be_seen(tmp_path):
    """Where stage 2 changes nothing, both colours are in the picture."""
    from matplotlib import colors
    from matplotlib.image import imread

    draw(tmp_path, results_of(*(np.full((2, 511), loss) for loss in (2.0, 3.0, 2.5))))
    picture = imread(tmp_path / "conversion.png")[..., :3]
    for colour in ("C0", "C1"):  # of the hybrid, and of it after stage 2: more than the few points of the legend
        assert (np.abs(picture - colors.to_rgb(colour)).max(-1) < 0.01).sum() > 400, colour


def test_students_see_a_tenth_of_the_sources_tokens():
    for plan in (ConversionPlan(), ConversionPlan().scaled(0.5), ConversionPlan().scaled(0.01)):
        seen = plan.steps * plan.batch_size / (plan.teacher_steps * plan.teacher_batch_size)
        assert seen == pytest.approx(plan.share, rel=0.2 if plan.teacher_steps < 20 else 1e-3)
    assert ConversionPlan().scaled(1) == ConversionPlan()


@pytest.mark.parametrize("slower", PRECISIONS)
def test_the_source_trains_in_what_is_faster_here(monkeypatch, slower):
    def loss(model, rows, precision):
        time.sleep(0.05 if precision == slower else 0)
        return next(model.parameters()).sum()

    monkeypatch.setattr(demo_conversion, "source_loss", loss)
    assert {demo_conversion.faster_precision(ConversionPlan()), slower} == set(PRECISIONS)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_the_optimizer_of_the_source_rounds_to_float32(shape):
    start, gradient = torch.randn(shape), torch.randn(shape)
    X = gradient.double() if shape[0] < shape[1] else gradient.double().T
    X = X / X.norm()
    for _ in range(5):  # Newton-Schulz with the coefficients of Muon
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    X = X if shape[0] < shape[1] else X.T
    for kind, nearer in ((Float32Muon, True), (torch.optim.Muon, False)):
        weight = torch.nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        kind([weight], lr=1.0, weight_decay=0.0, nesterov=True).step()
        rate = max(1, shape[0] / shape[1]) ** 0.5
        error = (start.double() - rate * X - weight.detach()).abs().max()
        assert (error < 1e-5) == nearer  # float32 rounds 1 to 6e-8, bfloat16 to 4e-3
        assert torch.equal(weight.grad, gradient)


def test_results_are_measured_on_files_no_setting_was_chosen_on():
    texts = {f"package/module_{i}.py": "" for i in range(400)}
    half = measured_on(texts)
    assert 150 < len(half) < 250 and measured_on(half) == half and list(half) == [n for n in texts if n in half]
