"""Schedules over the steps of a training, and what is read of the memory."""

import json
import os
import re
import signal

import pytest
import torch
from matplotlib.figure import Figure
from tiny import TINY, tiny_model, tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host
from train_killer import samples, trainer
from transformers import TrainerCallback, TrainerControl, TrainerState

from tnt_hf import TNTCache, step_settings_tnt
from tnt_hf.conversion import LiZAConfig, inject
from tnt_hf.gate_tnt import TNTMemoryGate
from tnt_hf.recipes.callbacks import ChunkSizeSchedule, Printer, WindowDropout, narrow_window
from tnt_hf.recipes.memory_statistics import all_closed, first_row, gate_label, memory_statistics
from tnt_hf.recipes.preemption import CheckpointOnTermination
from tnt_hf.recipes.training_plots import draw_plots, smoothed, spans_decades
from tnt_hf.state_tnt import LayerState, StateLayout


NO_SAVE = {"save_strategy": "no"}


def at(callback: TrainerCallback, event: str, step: int, model) -> None:
    getattr(callback, event)(None, TrainerState(global_step=step), TrainerControl(), model=model)


# --- window dropout ---


def test_which_steps_are_narrowed_depends_on_seed_and_step_only():
    first, again, other = WindowDropout(0.3, seed=1), WindowDropout(0.3, seed=1), WindowDropout(0.3, seed=2)
    steps = range(2000)
    chosen = [first.narrows(step) for step in steps]
    assert chosen == [again.narrows(step) for step in steps] != [other.narrows(step) for step in steps]
    assert 0.26 < sum(chosen) / len(chosen) < 0.34  # four standard errors around 0.3
    assert first.share(0, 2000) == sum(chosen) / 2000 and first.share(5, 5) == 0
    assert not any(map(WindowDropout(0.0).narrows, steps)) and all(map(WindowDropout(1.0).narrows, steps))


def test_the_probability_grows_over_the_warmup():
    callback = WindowDropout(1.0, warmup_steps=1000, seed=3)
    quarters = [callback.share(start, start + 250) for start in (0, 250, 500, 750, 1000)]
    assert quarters == sorted(quarters) and quarters[0] < 0.25 and quarters[-1] == 1.0
    assert callback.settings == {"probability": 1.0, "warmup_steps": 1000}  # those of a run that goes on


@pytest.mark.parametrize("probability", [-0.1, 1.1, "0.5", True, float("nan"), None])
def test_the_probability_must_be_one(probability):
    with pytest.raises(ValueError, match="window_dropout="):
        WindowDropout(probability)


@pytest.mark.parametrize("steps", [-1, 0.5, True])
def test_warmup_steps_must_be_steps(steps):
    with pytest.raises(ValueError, match=f"window_dropout_warmup_steps={steps!r}"):
        WindowDropout(0.5, warmup_steps=steps)


def test_a_narrowed_step_sees_an_eighth_of_the_window():
    model, ids = tiny_model(sliding_window=16), tokens(1, 24)
    narrow = tiny_model(sliding_window=2)
    narrow.load_state_dict(model.state_dict())
    callback = WindowDropout(1.0)
    with torch.no_grad():
        whole, expected = model(ids).logits, narrow(ids).logits
        at(callback, "on_step_begin", 0, model)  # of a step that something stopped
        at(callback, "on_step_begin", 0, model)
        assert torch.equal(model(ids).logits, expected) and not torch.equal(whole, expected)
        at(callback, "on_step_end", 1, model)
        assert torch.equal(model(ids).logits, whole) and model.config.sliding_window == 16


def test_layers_with_full_attention_keep_it():
    model = tiny_model(sliding_window=8, layer_types=["full_attention", "sliding_attention"])
    before, written = list(model.config.layer_types), model.config.to_dict()
    undo = narrow_window(model)
    assert model.config.layer_types == before and model.config.sliding_window == 1
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 1]
    undo()
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, 8]
    assert model.config.to_dict() == written


def test_a_layer_of_memory_alone_has_no_window():
    model = tiny_model(sliding_window=16, variant="lmm", memory_layers=[1])
    undo = narrow_window(model)
    assert model.model.layers[0].self_attn.sliding_window == 2
    undo()
    assert model.model.layers[0].self_attn.sliding_window == 16


def test_the_window_of_an_injected_model_is_narrowed():
    model = inject(tiny_host("llama"), LiZAConfig(weight=0.5, chunk_size=8, max_self_attn_length=16))
    ids = tokens(1, 24)
    with torch.no_grad():
        whole = model(ids).logits
        undo = narrow_window(model)
        assert not torch.equal(model(ids).logits, whole)
        undo()
        assert torch.equal(model(ids).logits, whole)


def test_a_narrowed_window_holds_the_token_itself():
    injected = inject(tiny_host("llama"), LiZAConfig(max_self_attn_length=7))
    narrow_window(injected)
    assert [layer.self_attn.max_self_attn_length for layer in injected.model.layers] == [1, 1]
    tnt = tiny_model(sliding_window=7)
    narrow_window(tnt)
    assert [layer.self_attn.sliding_window for layer in tnt.model.layers] == [1, 1]


def test_a_model_without_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no layer of TNTForCausalLM has a sliding window"):
        trainer(tmp_path, config={"memory_layers": [], "sliding_window": None}, **NO_SAVE).fit()
    with pytest.raises(ValueError, match="no layer of LlamaForCausalLM has a sliding window"):
        narrow_window(inject(tiny_host("llama"), OPEN_LIZA))


def test_a_window_that_the_memory_needs_is_refused_and_kept():
    """Resets inside a global chunk are allowed while the window covers the gap, which the narrowed one does not."""
    fields = {"sliding_window": 32, "global_chunk_size": 16, "local_reset_interval": 8}
    model = tiny_model(**fields)
    with pytest.raises(ValueError, match="local_reset_interval|memory_gap"):
        at(WindowDropout(0.5), "on_train_begin", 0, model)
    assert model.config.sliding_window == 32 and model.model.layers[0].self_attn.sliding_window == 32


# --- the terminal ---


def test_a_line_says_nothing_about_single_layers(capsys):
    state, control = TrainerState(is_local_process_zero=True), TrainerControl()
    for logs in ({"memory/gate/layer_0": 0.5, "epoch": 0.1}, {"loss": 2.0, "memory/gate": 0.5, "epoch": 0.1}):
        Printer().on_log(None, state, control, logs=logs)
    (line,) = capsys.readouterr().out.splitlines()
    assert "loss" in line and "epoch" in line and "memory" not in line


# --- chunk sizes ---


def test_sizes_follow_the_steps(tmp_path):
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(list(model.config.local_chunk_sizes))

    run = trainer(tmp_path, more=[Watch()], max_steps=5, **NO_SAVE)
    run.remove_callback(ChunkSizeSchedule)
    run.add_callback(ChunkSizeSchedule({"1": [4, 8], 3: 1}))  # a step is text where it comes from the command line
    run.callback_handler.callbacks.append(run.pop_callback(Watch))
    run.fit()
    assert seen == [[2, 4], [4, 8], [4, 8], [1, 1], [1, 1]]
    assert json.loads((tmp_path / "config.json").read_text())["local_chunk_sizes"] == [1, 1]


def test_a_continued_run_has_the_sizes_of_its_step():
    model, callback = tiny_model(), ChunkSizeSchedule({4: [8, 8], 2: [1, 2]})
    for step, expected in ((0, [2, 4]), (2, [2, 4]), (3, [1, 2]), (5, [8, 8])):
        model.config.local_chunk_sizes = [2, 4]
        at(callback, "on_train_begin", step, model)
        assert model.config.local_chunk_sizes == expected, step  # of the last step that was trained
        at(callback, "on_step_begin", step, model)
        assert model.config.local_chunk_sizes == (callback.sizes_at(step) or [2, 4])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "names no step"),
        ({"soon": [1]}, "'soon' must be a number"),
        ({-1: [1]}, "-1 must be a number"),
        ({1.5: [1]}, "1.5 must be a number"),
        ({1: [1], "1": [2]}, "step 1 is named twice"),
        ({1: "4"}, "from step 1: '4' must be"),
        ({1: 2.0}, "from step 1: 2.0 must be"),
        ({1: [True]}, "must be"),
        ({1: None}, "must be"),
    ],
)
def test_a_schedule_names_steps(schedule, message):
    with pytest.raises(ValueError, match=f"chunk_size_schedule.*{message}"):
        ChunkSizeSchedule(schedule)


@pytest.mark.long
@pytest.mark.parametrize("sizes", [[2, 4, 8], [3], 0])
def test_sizes_are_tried_before_anything_is_trained(tmp_path, sizes):
    run = trainer(tmp_path, **NO_SAVE)
    run.remove_callback(ChunkSizeSchedule)
    run.add_callback(ChunkSizeSchedule({0: [4, 4], 6: sizes}))
    before = run.model.lm_head.weight.detach().clone()
    with pytest.raises(ValueError, match="chunk_size_schedule: from step 6"):
        run.fit()
    assert run.model.config.local_chunk_sizes == [2, 4] and torch.equal(run.model.lm_head.weight, before)


def test_a_model_without_local_memories_has_no_chunk_sizes():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no local memories"):
        at(ChunkSizeSchedule({0: [1]}), "on_train_begin", 0, tiny_host("llama"))
    with pytest.raises(ValueError, match="TNTForCausalLM has no local memories"):
        at(ChunkSizeSchedule({0: 1}), "on_train_begin", 0, tiny_model(local_chunk_sizes=[]))


# --- what the memory does ---


def row(length: int = 24) -> dict:
    return {"input_ids": tokens(1, length)}


def test_surprise_and_fast_weights_are_those_of_the_model():
    model = tiny_model()
    read = memory_statistics(model, row())
    with torch.no_grad():
        cache = TNTCache(model.config)
        out = model(**row(), past_key_values=cache, use_cache=True, output_surprise=True)
    for i, surprise in enumerate(out.surprise):
        assert read[f"memory/surprise/layer_{i}"] == pytest.approx(surprise.mean().item(), rel=1e-5)
    assert read["memory/surprise"] == pytest.approx(torch.stack(out.surprise).mean().item(), rel=1e-5)
    state = LayerState.read(cache, 0, StateLayout.of(model.config))
    norms = [torch.stack([x.flatten(2).pow(2).sum(-1) for x in m.weights]).sum(0).sqrt() for m in state.memories]
    assert read["memory/fast_weight_norm/layer_0"] == pytest.approx(torch.stack(norms).mean().item(), rel=1e-5)


def test_weights_that_have_not_moved_have_not_changed(monkeypatch):
    model = tiny_model(memory_depth=2)
    monkeypatch.setattr(step_settings_tnt, "lr_factors", lambda config: [0.0] * len(config.memory_specs))
    read = memory_statistics(model, row())
    assert read["memory/fast_weight_change"] == 0 and read["memory/fast_weight_norm"] > 0


def test_a_linear_memory_starts_empty_so_its_change_has_no_unit():
    read = memory_statistics(tiny_model(memory_depth=1), row())
    assert read["memory/fast_weight_norm"] > 0 and "memory/fast_weight_change" not in read


CLOSED = {"add": 0.0, "product": 1.0, "published": 0.5, "mix": 0.0}


@pytest.mark.parametrize("gate", CLOSED)
def test_a_memory_that_is_silent_has_no_share(gate):
    model = tiny_model(memory_gate=gate, **({"memory_gate_init": 0.0} if gate in ("add", "mix") else {}))
    if gate in ("product", "published"):  # no scale to close: the memory itself says nothing
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.memory.norm.weight)
    read = memory_statistics(model, row())
    for name in ("", "/layer_0", "/layer_1"):
        assert read[f"memory/gate{name}"] == pytest.approx(CLOSED[gate], abs=1e-6)
        assert read[f"memory/share{name}"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("gate", CLOSED)
def test_a_memory_that_speaks_has_a_share(gate):
    model = tiny_model(memory_gate=gate, **({"memory_gate_init": 0.25} if gate in ("add", "mix") else {}))
    for module in model.modules():
        if type(module).__name__ == "TNTMemoryGate" and hasattr(module, "proj"):
            torch.nn.init.normal_(module.proj.weight)
    read = memory_statistics(model, row())
    assert 0.01 < read["memory/share"] < 0.99
    if gate == "mix":
        assert read["memory/gate"] == pytest.approx(0.25)


def test_the_share_is_of_what_is_summed():
    """Attention's output is zero, so all of the output is memory; with a memory twice as loud as attention, 2/3."""
    model = tiny_model(memory_gate_init=1.0)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
    assert memory_statistics(model, row())["memory/share"] == pytest.approx(1, abs=1e-6)

    gate = model.model.layers[0].memory.gate
    loud = torch.randn(1, 24, TINY["hidden_size"], dtype=torch.float64)
    gate.register_forward_pre_hook(lambda _, args: (loud / 2, loud, args[2]))
    assert memory_statistics(model, row())["memory/share/layer_0"] == pytest.approx(2 / 3, rel=1e-5)


def test_the_gate_is_open_whichever_sign_it_has():
    model = tiny_model()
    for layer in model.model.layers:
        layer.memory.gate.scale.data = torch.linspace(-0.5, 0.5, 32).double()
    expected = torch.linspace(-0.5, 0.5, 32).abs().mean().item()  # and 2 sigmoid(0) of the token's own factor
    assert memory_statistics(model, row())["memory/gate"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", ["mal", "lmm"])
def test_a_memory_without_attention_beside_it_has_no_share(variant):
    read = memory_statistics(tiny_model(variant=variant), row())
    assert read["memory/gate"] == pytest.approx(1.0) and not any("share" in name for name in read)


def test_an_injected_liza_operator_is_read():
    model, seen = inject(tiny_host("llama"), LiZAConfig(weight=0.3, chunk_size=8)), []
    memory = model.model.layers[0].self_attn.memory
    memory.register_forward_hook(lambda _, args, output: seen.append((0.7 * args[0], output - 0.7 * args[0])))
    read = memory_statistics(model, row())
    assert read["memory/gate/layer_1"] == pytest.approx(0.3)
    attention, operator = (x.pow(2).mean().sqrt().item() for x in seen[0])
    assert read["memory/share/layer_0"] == pytest.approx(operator / (operator + attention), rel=1e-4)
    read = memory_statistics(inject(tiny_host("gpt2"), LiZAConfig(weight=0.0, chunk_size=8)), row())
    assert read["memory/share"] == 0 and read["memory/gate"] == 0


def test_an_injected_tnt_memory_is_read():
    read = memory_statistics(inject(tiny_host("qwen3"), OPEN_TNT), row())
    names = {"gate", "share", "surprise", "fast_weight_norm"}
    assert {f"memory/{name}/layer_{i}" for name in names for i in (0, 1)} <= read.keys()


@pytest.mark.parametrize("gate", ["add", "product", "mix", "published"])
def test_gates_are_closed_where_no_gradient_passes(gate):
    model = tiny_model(memory_gate=gate)
    parameters = [part for module in model.modules() if isinstance(module, TNTMemoryGate) for part in gate_of(module)]
    for opened in (True, False, True):
        for parameter in parameters:
            parameter.data.fill_(0.5 if opened else 0.0)
        model.zero_grad()
        model(**row(), labels=row()["input_ids"]).loss.backward()
        gradients = [x.grad for name, x in model.named_parameters() if ".memories." in name]
        assert all_closed(model) is not any(bool(x.any()) for x in gradients)
    assert not all_closed(tiny_model(memory_layers=[]))


def gate_of(module: TNTMemoryGate) -> list[torch.Tensor]:
    """What closes it."""
    found = {"add": ["scale"], "product": ["proj"], "mix": ["weight"], "published": []}[module.kind]
    return [x.weight if isinstance(x, torch.nn.Module) else x for x in (getattr(module, name) for name in found)]


def test_one_open_gate_is_enough():
    model = tiny_model(memory_gate_init=0.0)
    assert all_closed(model)
    model.model.layers[1].memory.gate.scale.data[3] = 0.1
    assert not all_closed(model)


def test_layers_without_memory_are_absent():
    assert memory_statistics(tiny_model(memory_layers=[]), row()) == {}
    read = memory_statistics(tiny_model(memory_layers=[1]), row())
    assert "memory/gate/layer_1" in read and "memory/gate/layer_0" not in read


@pytest.mark.parametrize("training", [True, False])
def test_reading_leaves_nothing_behind(training):
    model = tiny_model(attention_dropout=0.5).train(training)
    before, hooks = torch.get_rng_state(), sum(len(m._forward_hooks) for m in model.modules())
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(out.shape[1]))
    first = memory_statistics(model, row())
    hook.remove()
    assert shapes == [1], "nobody reads the other logits, and they are large"
    assert model.training is training and torch.equal(torch.get_rng_state(), before)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert all(p.grad is None for p in model.parameters()) and memory_statistics(model, row()) == first


def test_padding_is_not_read():
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    found = first_row({"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert found.keys() == {"input_ids"} and torch.equal(found["input_ids"], ids[:1, 6:])
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    assert torch.equal(first_row({"input_ids": ids, "position_ids": packed})["position_ids"], packed)
    assert first_row({"inputs_embeds": ids}) is None and first_row({"input_ids": ids[:, :1]}) is None


def test_packed_rows_are_read_as_their_documents():
    """The state after the row is that of its last document."""
    model, ids = tiny_model(), tokens(1, 24)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = memory_statistics(model, {"input_ids": ids, "position_ids": positions})
    alone = memory_statistics(model, {"input_ids": ids[:, 10:]})
    name = "memory/fast_weight_norm/layer_1"
    assert packed[name] == pytest.approx(alone[name], rel=1e-6)
    assert packed[name] != pytest.approx(memory_statistics(model, {"input_ids": ids})[name], rel=1e-6)


def test_smoothing_does_not_lag():
    line = [float(x) for x in range(50, 0, -1)]
    assert smoothed(line, reach=5) == pytest.approx(line)
    assert smoothed([0.0, 3.0, 0.0, 3.0], reach=1) == pytest.approx([0, 1, 2, 3])


@pytest.mark.parametrize("gate", ["add", "product", "mix", "published", "LiZA"])
def test_the_picture_says_what_a_closed_gate_is_and_what_surprise_measures(gate, tmp_path, monkeypatch):
    if gate == "LiZA":
        model = inject(tiny_host("llama"), LiZAConfig(weight=0.0, chunk_size=8))
    else:
        model = tiny_model(memory_gate=gate)
    for module in model.modules():
        if isinstance(module, TNTMemoryGate):
            for parameter in gate_of(module):
                parameter.data.zero_()
            module.register_forward_pre_hook(lambda _, args: (args[0], 0 * args[1], args[2]))  # "published" stays open
    found = memory_statistics(model, row())
    (closed,) = re.findall(r"\(([\d.]+): ", gate_label(model))
    assert found["memory/gate"] == float(closed)
    labels = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kwargs: (
        path.touch(), labels.update({axes.get_title(): axes.get_ylabel() for axes in self.axes})
    ))  # fmt: skip
    draw_plots([{"step": step, **found} for step in (1, 2)], tmp_path, gate_label(model))
    assert labels["gate"] == gate_label(model)
    if gate != "LiZA":
        assert labels["surprise: loss before the write"] == "½ |f(W, k) − v|², mean over tokens"
        assert "|W − W_init| / |W_init|" in labels.values() and "|W|" not in labels.values()


def test_two_decades_need_a_logarithmic_axis():
    assert spans_decades([0.0, 0.5, 51.0]) and spans_decades([3e13, 1.0])
    assert not spans_decades([1.0, 99.0]) and not spans_decades([0.0, 0.0]) and not spans_decades([])
    assert not spans_decades([-1.0, 0.001, 5.0])  # a logarithm could not show it


def test_training_shortens_the_window_in_training_only(tmp_path):
    windows = {"step": set(), "evaluation": set()}

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            windows["step"].add(model.config.sliding_window)

        def on_prediction_step(self, args, state, control, model=None, **kwargs):
            windows["evaluation"].add(model.config.sliding_window)

    run = trainer(tmp_path, more=[Watch()], max_steps=6, eval_strategy="steps", eval_steps=1, **NO_SAVE)
    run.train_dataset = samples(8, 20)
    run.fit()
    assert windows == {"step": {2, 16}, "evaluation": {16}}


# --- SIGTERM ---


def test_more_sigterms_change_nothing_until_the_training_has_ended():
    callback, signals = CheckpointOnTermination(), []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        callback.on_train_begin(None, TrainerState(), TrainerControl())
        os.kill(os.getpid(), signal.SIGTERM)
        assert not signals and callback.on_step_end(None, TrainerState(), control := TrainerControl()) is None
        assert control.should_save
        os.kill(os.getpid(), signal.SIGTERM)
        assert not signals
        callback.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals == [signal.SIGTERM]
    finally:
        callback.restore()
        signal.signal(signal.SIGTERM, before)


def test_sizes_need_memories():
    model = tiny_model(memory_layers=[])
    for change in (lambda: model.set_local_chunk_sizes([1]), lambda: ChunkSizeSchedule({0: [1]}).check(model)):
        with pytest.raises(ValueError, match="ha[sve]+ no local memories"):
            change()


def test_the_share_is_that_of_the_steps_it_names():
    callback = WindowDropout(0.5, seed=1)
    assert [callback.share(step, step + 1) for step in range(20)] == list(map(callback.narrows, range(20)))


def test_a_window_that_was_narrowed_before_stays_noted():
    model = tiny_model(sliding_window=16)
    model.set_sliding_window(8)
    narrow_window(model)()
    assert model.config.window_narrowed and model.config.sliding_window == 8


def test_the_share_of_a_mix_is_of_its_two_parts():
    model = tiny_model(memory_gate="mix", memory_gate_init=0.25)
    loud = torch.randn(1, 24, TINY["hidden_size"], dtype=torch.float64)
    model.model.layers[0].memory.gate.register_forward_pre_hook(lambda _, args: (loud, loud, args[2]))
    assert memory_statistics(model, row())["memory/share/layer_0"] == pytest.approx(0.25, rel=1e-5)


def test_the_change_of_fast_weights_is_relative_to_where_they_start():
    model = tiny_model(memory_depth=2)
    read, cache = memory_statistics(model, row()), TNTCache(model.config)
    with torch.no_grad():
        model(**row(), past_key_values=cache)
    state = LayerState.read(cache, 0, StateLayout.of(model.config))

    def norm(weights):
        return torch.stack([x.flatten(2).pow(2).sum(-1) for x in weights]).sum(0).sqrt()

    changes = []
    for memory, unit in zip(state.memories, model.model.layers[0].memory.memories):
        start = [x.detach()[None] for x in unit.weights]
        changes.append((norm([now - before for now, before in zip(memory.weights, start)]) / norm(start)).mean())
    assert read["memory/fast_weight_change/layer_0"] == pytest.approx(torch.stack(changes).mean().item(), rel=1e-5)


def test_a_change_has_a_unit_only_where_every_head_has_one():
    model = tiny_model(memory_depth=2)
    for unit in model.model.layers[0].memory.memories:
        for weight in unit.weights:
            weight.data[0] = 0
    read = memory_statistics(model, row())
    assert "memory/fast_weight_change/layer_0" not in read and "memory/fast_weight_change/layer_1" in read
