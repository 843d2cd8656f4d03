"""The schedule of the Memory-as-Gate weight, in runs of the real Trainer: every step's weight is a function of its
number, whatever accumulates, resumes or is killed."""

import json
import math
import multiprocessing
import os
import signal

import pytest
import torch
from test_inject import attention_modules
from tiny import tiny_model
from tiny_hosts import tiny_host
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

from tnt_hf.conversion import LiZACallback, LiZAConfig, inject, lora_config, schedules
from tnt_hf.conversion.inject import set_max_self_attn_length
from tnt_hf.conversion.injection_config import TNTInjectionConfig, injection_from_dict
from tnt_hf.conversion.schedules import mag_modules


def liza_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return inject(LlamaForCausalLM(config), LiZAConfig(operator="delta_rule", weight=0.25))


def trained(model, folder, *callbacks, resume=None, **options) -> Trainer:
    """Three steps by default, each logged, a checkpoint after each."""
    ids = torch.randint(0, 64, (24, 7), generator=torch.Generator().manual_seed(1))
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 1, **options}
    arguments = TrainingArguments(folder, use_cpu=True, disable_tqdm=True, report_to=[], **settings)
    data = [{"input_ids": x, "labels": x} for x in ids]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_seen(model) -> list[float]:
    """A list that fills with the first gate's weight at every training forward."""
    seen, gate = [], next(mag_modules(model))
    gate.register_forward_pre_hook(lambda module, _: seen.append(module.weight.item()) if module.training else None)
    return seen


# ------------------------------------------------------------------------------------------------------- the schedules


@pytest.mark.parametrize(
    "options, weights",
    [
        ({"mode": "constant", "final_weight": 0.3}, [0.3, 0.3, 0.3]),
        ({"initial_weight": 0.0, "final_weight": 1.0, "transition_step": 4}, [0, 0.25, 0.5, 0.75, 1, 1, 1]),
        ({"initial_weight": 0.8, "final_weight": 0.2, "transition_step": 2}, [0.8, 0.5, 0.2, 0.2]),
        ({"transition_step": 1}, [0.01, 0.5, 0.5]),
        ({"mode": "cyclic"}, [0.01, 0.5, 0.01, 0.5]),
        ({"mode": "cyclic", "weight_list": (0, 1, 0.5)}, [0, 1, 0.5, 0, 1]),
        ({"mode": "switch"}, [0, 0.5, 0, 0.5]),
        ({"mode": "switch", "switch_period": 2, "final_weight": 0.1}, [0, 0, 0.1, 0.1, 0, 0]),
        ({"mode": "ramp", "transition_step": 2, "final_weight": 1.0}, [0, 0.5, 1, 1]),
    ],
    ids=str,
)
def test_modes(options, weights):
    callback = LiZACallback(**options)
    assert [callback.weight_at(step) for step in range(len(weights))] == pytest.approx(weights, abs=1e-15)


def test_the_default_rises_to_one_half_over_100_steps():
    callback = LiZACallback()
    got = [callback.weight_at(step) for step in (0, 50, 100, 10**6)]
    assert got == pytest.approx([0.01, 0.255, 0.5, 0.5], abs=1e-15)
    rise = [callback.weight_at(step + 1) - callback.weight_at(step) for step in range(100)]
    assert rise == pytest.approx([0.0049] * 100)


# ----------------------------------------------------------------------------------------------------------- real runs


@pytest.mark.parametrize(
    "make", [liza_model, lambda: tiny_model(torch.float32, memory_gate="mix")], ids=["liza", "tnt"]
)
def test_each_step_trains_with_its_weight_and_says_so(make, tmp_path):
    model = make()
    assert len(list(mag_modules(model))) == 2
    seen, callback = weights_seen(model), LiZACallback(transition_step=4)
    trainer = trained(model, tmp_path, callback)
    assert seen == pytest.approx([callback.weight_at(step) for step in range(3)])
    assert all(gate.weight.item() == pytest.approx(callback.weight_at(3)) for gate in mag_modules(model))
    logged = {entry["step"]: entry["mag_weight"] for entry in trainer.state.log_history}
    assert logged == pytest.approx({step: callback.weight_at(step) for step in (1, 2, 3)})
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert saved == trainer.state.log_history[:2]


def test_reporters_behind_it_see_the_weight(tmp_path):
    class Reporter(TrainerCallback):
        def __init__(self):
            self.logs = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logs.append(dict(logs))

    reporter = Reporter()
    trainer = trained(liza_model(), tmp_path, LiZACallback("constant"), reporter, max_steps=1)
    assert [entry.get("mag_weight") for entry in reporter.logs] == [0.5, 0.5]  # the step and the summary
    trainer.evaluate(trainer.train_dataset)
    assert reporter.logs[-1]["mag_weight"] == 0.5 and "eval_loss" in reporter.logs[-1]
    state, logs = TrainerState(global_step=2, log_history=[{"step": 1}]), {}
    LiZACallback().on_log(None, state, None, trainer.model, logs)
    assert logs == {"mag_weight": 0.5} and state.log_history == [{"step": 1}], "an entry of another step"


def test_accumulation_counts_optimizer_steps(tmp_path):
    model = liza_model()
    seen, callback = weights_seen(model), LiZACallback(transition_step=4)
    trained(model, tmp_path, callback, gradient_accumulation_steps=3, per_device_train_batch_size=1)
    assert seen == pytest.approx([callback.weight_at(step) for step in (0, 0, 0, 1, 1, 1, 2, 2, 2)])


@pytest.mark.parametrize("mode", ["gradual", "cyclic", "switch"])
def test_a_resumed_run_is_the_whole_run(mode, tmp_path):
    settings = {"mode": mode, "weight_list": [0.1, 0.2, 0.7], "transition_step": 3}
    torch.manual_seed(1)
    start, whole = liza_model().state_dict(), liza_model()
    whole.load_state_dict(start)
    seen_whole = weights_seen(whole)
    trained(whole, tmp_path, LiZACallback(**settings))
    resumed = liza_model()  # other weights: everything must come from the checkpoint
    seen = weights_seen(resumed)
    trained(resumed, tmp_path, LiZACallback(**settings), resume=str(tmp_path / "checkpoint-1"))
    assert seen == seen_whole[1:]
    for (name, x), y in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


class Kill(TrainerCallback):
    """The machine goes away in the middle of the third step, after two checkpoints."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_resumes_with_its_weights(tmp_path):
    model = liza_model()
    child = multiprocessing.get_context("fork").Process(
        target=trained, args=(model, tmp_path, LiZACallback(transition_step=4), Kill())
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    seen, callback = weights_seen(model), LiZACallback(transition_step=4)
    trained(model, tmp_path, callback, resume=True)
    assert seen == pytest.approx([callback.weight_at(2)])
    assert next(mag_modules(model)).weight.item() == pytest.approx(callback.weight_at(3))


def test_of_a_peft_model_the_memories_in_use(tmp_path):
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memory"])
    model = get_peft_model(liza_model(), lora)
    model.add_adapter("other", lora)
    model.set_adapter("other")
    assert len(list(mag_modules(model))) == 2
    trained(model, tmp_path, LiZACallback("constant", final_weight=0.75), max_steps=1)
    memory = model.base_model.model.model.layers[0].self_attn.memory
    weights = {name: memory.modules_to_save[name].weight.item() for name in ("default", "other")}
    assert weights == {"default": 0.25, "other": 0.75}
    # a source that is heard alone without an adapter; the next adapter begins with it
    assert memory.original_module.weight.item() == 0.75


@pytest.mark.parametrize("adapter", ["none", "ours", "without the memory"])
def test_of_a_weight_that_an_adapter_will_lack_there_is_a_warning(adapter, tmp_path, caplog):
    from peft import LoraConfig, get_peft_model

    model = liza_model()
    if adapter != "none":
        lora = lora_config(model) if adapter == "ours" else LoraConfig(r=2, target_modules=["q_proj"])
        model = get_peft_model(model, lora)
    trained(model, tmp_path, LiZACallback("constant", final_weight=0.75), max_steps=1)
    said = [record.getMessage() for record in caplog.records if record.name == schedules.__name__]
    assert len(said) == (adapter == "without the memory")
    assert all("make the adapter with lora_config(model)" in text for text in said)


# ---------------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mode": "linear"}, "mode='linear'.*gradual"),
        ({"mode": None}, "mode=NoneType"),
        ({"mode": torch.nn.Linear(2, 2)}, "mode=Linear.*the model comes from the Trainer"),
        ({"initial_weight": -0.1}, "initial_weight=-0.1"),
        ({"final_weight": 1.5}, "final_weight=1.5"),
        ({"final_weight": math.nan}, "final_weight=nan"),
        ({"final_weight": True}, "final_weight=True"),
        ({"final_weight": "0.5"}, "final_weight='0.5'"),
        ({"initial_weight": (0.1,)}, r"initial_weight=\(0.1,\)"),
        ({"transition_step": 0}, "transition_step=0"),
        ({"transition_step": 10.0}, "transition_step=10.0"),
        ({"switch_period": -1}, "switch_period=-1"),
        ({"mode": "cyclic", "weight_list": []}, r"weight_list=\[\]"),
        ({"mode": "cyclic", "weight_list": 0.5}, "weight_list=0.5"),
        ({"mode": "cyclic", "weight_list": [0.1, 2]}, r"weight_list\[1\]=2"),
    ],
)
def test_bad_settings_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        LiZACallback(**options)


@pytest.mark.parametrize("make", [lambda: tiny_model(torch.float32), lambda: LlamaForCausalLM(liza_model().config)])
def test_a_model_without_a_scheduled_weight_is_refused_before_training(make, tmp_path):
    model = make()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"model={type(model).__name__}.*inject"):
        trained(model, tmp_path, LiZACallback())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not list(tmp_path.iterdir())


def test_a_model_without_such_a_weight_is_told_what_to_leave_out():
    with pytest.raises(ValueError, match=r"in a recipe give --mag_schedule null; or inject LiZA"):
        LiZACallback("ramp").on_train_begin(None, None, None, model=torch.nn.Linear(1, 1))


def test_sizes_that_followed_the_window_outlive_a_change_of_it():
    model = inject(tiny_host("llama"), TNTInjectionConfig(max_self_attn_length=8))
    fields = ("global_chunk_size", "local_reset_interval")
    sizes = [[getattr(x.memory.config, name) for name in fields] for x in attention_modules(model).values()]
    set_max_self_attn_length(model, 32)
    again = inject(tiny_host("llama"), injection_from_dict(model.config.tnt_injection))
    assert sizes == [[getattr(x.memory.config, name) for name in fields] for x in attention_modules(again).values()]
    assert again.config.tnt_injection["max_self_attn_length"] == 32


def test_a_window_that_leaves_tokens_to_no_memory_is_refused():
    sizes = {"global_chunk_size": 16, "local_chunk_sizes": [4], "local_reset_interval": 24}
    model = inject(tiny_host("llama"), TNTInjectionConfig(max_self_attn_length=16, **sizes))
    with pytest.raises(ValueError, match="local_reset_interval"):
        set_max_self_attn_length(model, 8)
    assert model.config.tnt_injection["max_self_attn_length"] == 16
    assert {x.max_self_attn_length for x in attention_modules(model).values()} == {16}
