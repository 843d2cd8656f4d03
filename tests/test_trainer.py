"""RecipeTrainer: what it computes, when it stops, what it logs and what it leaves behind."""

import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import get_peft_model
from tiny import tiny_model, tokens
from torch.nn import functional as F
from train_killer import CONFIG, samples, trainer
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import tnt_hf
from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import lora_config
from tnt_hf.conversion.verify_measures import perplexity_of
from tnt_hf.recipes.callbacks import ChunkSizeSchedule, Printer, Progress, WindowDropout
from tnt_hf.recipes.exact_resume import LOG
from tnt_hf.recipes.finite import stop_if_not_finite
from tnt_hf.recipes.objectives import next_token
from tnt_hf.recipes.optimization import parameter_groups, run_steps
from tnt_hf.recipes.packing import RowCollator, assemble
from tnt_hf.recipes.trainer import RecipeTrainer


NO_SAVE = {"save_strategy": "no", "max_steps": 2}


def weights(run: RecipeTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run of four steps that logs every second and reads the memory every step; and its trainer."""
    folder = tmp_path_factory.mktemp("run") / "out"
    run = trainer(folder, max_steps=4, save_steps=2, report_to="tensorboard")
    run.memory_logging_steps, run.plots = 1, True
    facts = {"mode": "pretrain", "recipe": "tnt_debug/stage1.yaml", "command": "tnt train", "data": {"name": "random"}}
    run.metrics = run.fit(facts=facts)
    return run


# --- what a step computes ---


def test_accumulation_changes_nothing_but_the_order_of_sums(tmp_path):
    data = samples(8)
    data[0]["labels"] = data[0]["labels"].clone()
    data[0]["labels"][4:] = -100  # batches with different numbers of scored tokens
    found = []
    for size, count in ((4, 1), (1, 4)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count, "logging_steps": 1}
        run = trainer(tmp_path, data=data, config={"attention_dropout": 0.0}, **NO_SAVE, **changes)
        run.train()
        found.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert len(found[0]) == 2
    # float32 sums of losses near 4 in another order; a wrong divisor would be off by a tenth and more
    assert found[0] == pytest.approx(found[1], abs=2e-5)


def test_the_objective_trains_and_the_next_token_evaluates(tmp_path):
    """Here the objective is to be wrong, and the evaluation must see it."""
    seen = []

    def unlearn(model, inputs, num_items, teacher):
        seen.append((teacher, int(num_items), model.training))
        loss, outputs = next_token(model, inputs, num_items)
        return -loss, outputs

    run = trainer(tmp_path, config={"attention_dropout": 0.0}, **NO_SAVE)
    run.objective, run.teacher = unlearn, "the teacher"
    before = run.evaluate()["eval_loss"]
    with torch.no_grad():
        expected = [run.model(**{k: v[None] for k, v in row.items()}).loss.item() for row in samples(4)]
    assert before == pytest.approx(sum(expected) / 4, abs=1e-6)
    metrics = run.fit()
    assert metrics["eval_loss"] > before and metrics["loss"] < 0
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert set(seen) == {("the teacher", 4 * 31, True)}  # of both batches of a step, without the first token of a row


def test_the_losses_of_several_processes_add_up(tmp_path, monkeypatch):
    """The tokens are counted over all processes and gradients are averaged over them, so each multiplies its share."""
    run = trainer(tmp_path, config={"attention_dropout": 0.0}, **NO_SAVE)
    batch = {name: x[None] for name, x in samples(1)[0].items()}
    alone = run.compute_loss(run.model, batch, num_items_in_batch=62)
    monkeypatch.setattr(type(run.accelerator), "num_processes", 2)
    assert run.compute_loss(run.model, batch, num_items_in_batch=62).item() == pytest.approx(2 * alone.item())


def test_the_metrics_are_those_of_the_model_that_is_saved(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    run.state.log_history = [{"step": 2, "loss": 1.0, "eval_loss": 2.0}, {"step": 4, "loss": 0.5, "eval_loss": 3.0}]
    run.state.global_step, run.state.best_model_checkpoint = 4, str(tmp_path / "checkpoint-2")
    assert run._metrics() == {"loss": 0.5, "eval_loss": 3.0, "perplexity": math.exp(3)}
    run.args.load_best_model_at_end = True
    assert run._metrics() == {"loss": 1.0, "eval_loss": 2.0, "perplexity": math.exp(2)}
    run.add_callback(ChunkSizeSchedule({0: 4, 3: 1}))
    run.evaluate = lambda: {"eval_loss": 2.5}
    assert run._metrics()["eval_loss"] == 2.5, "the best weights were evaluated with other chunks"


def test_a_teacher_is_frozen_and_knows_no_dropout(tmp_path):
    model, teacher = (TNTForCausalLM(TNTConfig(**CONFIG)).train() for _ in range(2))
    run = RecipeTrainer(model, TrainingArguments(str(tmp_path), report_to="none", use_cpu=True), teacher=teacher)
    assert run.teacher is teacher and not teacher.training and model.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_one_process_trains_on_one_gpu(tmp_path, caplog):
    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    args._n_gpu = 2  # as where two are visible; `Trainer` would copy the model to both in every step
    run = RecipeTrainer(TNTForCausalLM(TNTConfig(**CONFIG)), args)
    assert run.args.n_gpu == 1 and "2 GPUs are visible to this one process" in caplog.text


def test_the_evaluation_loss_is_the_mean_over_scored_tokens(tmp_path):
    """Whatever the batches: rows of other lengths and with other numbers of scored tokens weigh by their tokens."""
    rows = samples(8)
    for i, row in enumerate(rows):
        length = 4 + 4 * i
        rows[i] = {name: x[:length] for name, x in row.items()}
        rows[i]["labels"] = rows[i]["labels"].clone()
        rows[i]["labels"][: i % 3] = -100
    rows[5]["labels"][:] = -100  # a row that is not scored at all
    found = []
    for size in (1, 3, 8):
        run = trainer(tmp_path, per_device_eval_batch_size=size, **NO_SAVE)
        run.eval_dataset, run.data_collator = rows, RowCollator(0, packed=False)
        found.append(run.evaluate()["eval_loss"])
    sums, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            scores = run.model(input_ids=row["input_ids"][None]).logits[0].double().log_softmax(-1)
            for t, label in enumerate(row["labels"][1:].tolist()):
                if label != -100:
                    sums, tokens = sums - scores[t, label].item(), tokens + 1
    # float32 logits of other batch shapes; the mean over rows or batches would be off by a hundredth and more
    assert found == pytest.approx([sums / tokens] * 3, abs=1e-6)


def test_an_evaluation_reads_all_rows_whatever_training_drops(tmp_path):
    found = []
    for drop in (False, True):
        run = trainer(tmp_path, dataloader_drop_last=drop, per_device_eval_batch_size=3, **NO_SAVE)
        found.append(run.evaluate()["eval_loss"])
    assert found[0] == found[1] and run.args.dataloader_drop_last
    assert run.get_train_dataloader().batch_sampler.drop_last


def test_an_evaluation_that_scores_no_token_is_no_evaluation(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    for row in run.eval_dataset:
        row["labels"] = torch.full_like(row["labels"], -100)
    with pytest.raises(ValueError, match="eval_dataset: no token of its 4 rows is scored"):
        run.evaluate()


def test_groups_reach_the_optimizer(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    run.create_optimizer()
    groups = {(g["kind"], g["weight_decay"] > 0): g for g in run.optimizer.param_groups}
    assert groups["gate", False]["lr"] == 3e-2 and groups["base", True]["weight_decay"] == 0.1
    assert sum(len(g["params"]) for g in groups.values()) == len(list(run.model.parameters()))


# --- numbers that are none ---


def spoil(run: RecipeTrainer, name: str, step: int, value: float = math.nan) -> None:
    """The gradient of a parameter gets one `value` in optimizer step `step`."""

    def hook(gradient):
        gradient = gradient.clone()
        if run.state.global_step + 1 == step:
            gradient.view(-1)[0] = value
        return gradient

    dict(run.model.named_parameters())[name].register_hook(hook)


@pytest.mark.parametrize(
    ("changes", "value"),
    [({}, math.nan), ({"max_grad_norm": 0.0}, math.inf), ({"bf16": True, "gradient_accumulation_steps": 1}, math.nan)],
    ids=["clipped", "not clipped", "bf16"],
)
def test_a_bad_gradient_stops_before_the_optimizer(tmp_path, changes, value):
    run = trainer(tmp_path, save_steps=1, max_steps=4, **changes)
    spoil(run, "model.layers.0.memory.memories.0.lr_proj.weight", 2, value)
    taken = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            taken.append(weights(run))

    run.add_callback(Watch)
    with pytest.raises(
        FloatingPointError, match="^step 2: gradients not finite: model.layers.0.memory.memories.0.lr_pr"
    ):
        run.fit()
    assert len(taken) == 1 and equal(taken[0], weights(run)) and run.optimizer.state
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "training.json").exists() and not (tmp_path / "model.safetensors").exists()


def test_the_message_names_the_first_tensors_and_counts_the_rest(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    with torch.no_grad():
        run.model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError) as error:
        run.fit()
    message = str(error.value)
    assert message.startswith("step 1: the loss is nan, nan; weights not finite: model.layers.0.mlp.up_proj.weight;")
    assert " more" in message and "nothing was saved" in message and "\n" not in message


def test_a_bad_gradient_of_an_adapter_stops_too(tmp_path):
    base = trainer(tmp_path / "a", **NO_SAVE).model
    model = get_peft_model(base, lora_config(base, r=2))
    args = TrainingArguments(str(tmp_path / "b"), use_cpu=True, report_to="none", disable_tqdm=True, **NO_SAVE)
    run = RecipeTrainer(model=model, args=args, train_dataset=samples(), groups=parameter_groups(model, 1e-3))
    name = next(name for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad)
    spoil(run, name, 1)
    with pytest.raises(FloatingPointError, match="step 1: gradients not finite: base_model.*lora_B"):
        run.fit()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_evaluation_that_is_no_number_stops_before_anything_is_saved(tmp_path, value):
    """The last step may spoil what no later one looks at."""

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                model.lm_head.weight.data.fill_(value)

    run = trainer(tmp_path, max_steps=2, save_steps=2, logging_steps=2, more=[Spoil()])
    with pytest.raises(FloatingPointError, match="^step 2: eval_loss=nan: .*nothing of it was saved"):
        run.fit()
    assert not list(tmp_path.glob("checkpoint-*")) and not list(tmp_path.glob("*.safetensors"))
    assert not (tmp_path / "training.json").exists() and "eval_loss" not in (tmp_path / LOG).read_text()


def test_the_log_file_holds_null_for_what_is_no_number(tmp_path):
    """A gradient of float16 may overflow now and then, and a perplexity too; JSON has no word for it."""
    run = trainer(tmp_path, **NO_SAVE)
    run.train()
    run.log({"grad_norm": math.inf, "other": math.nan, "eval_loss": 1e3})
    run._restore_progress()  # writes all of it again
    run.log({"grad_norm": math.inf, "other": math.nan, "eval_loss": 1e3})
    lines = (tmp_path / LOG).read_text().splitlines()
    assert not [word for word in ("NaN", "Infinity") if word in "".join(lines)]
    for line in lines[-2:]:
        entry = json.loads(line)
        assert entry["grad_norm"] is entry["other"] is entry["eval_perplexity"] is None and entry["eval_loss"] == 1e3
    assert math.isnan(perplexity_of(math.nan)) and perplexity_of(math.inf) == math.inf and perplexity_of(0.0) == 1


def test_what_gets_no_gradient_is_named(tmp_path, caplog):
    run = trainer(tmp_path, **NO_SAVE)
    run.model.register_parameter("nowhere", torch.nn.Parameter(torch.ones(1)))
    run.fit()
    assert caplog.text.count("No gradient reached nowhere in the first step") == 1


# --- the log ---


def test_what_is_logged(done):
    log = [entry for entry in done.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in log] == [2, 4]
    for entry in log:
        assert entry["tokens"] == entry["step"] * 4 * 32 and entry["tokens_per_second"] > 0
        assert entry["grad_norm"] > 0 and entry["peak_memory_mib"] > 128
        assert entry["learning_rate"] == entry["learning_rate/base"]
        assert entry["learning_rate/gate"] == pytest.approx(3 * entry["learning_rate"])
        assert {f"memory/{name}/layer_0" for name in ("gate", "share", "surprise")} <= entry.keys()
        assert 0 < entry["memory/share"] < 1 and entry["memory/fast_weight_change"] > 0
    narrowed = WindowDropout(0.5, seed=1)
    assert log[1]["window_dropout"] == narrowed.share(2, 4)
    between = [entry for entry in done.state.log_history if "memory/gate" in entry and "loss" not in entry]
    assert [entry["step"] for entry in between] == [1, 3]
    evaluated = [entry for entry in done.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluated] == [4]
    assert evaluated[0]["eval_perplexity"] == pytest.approx(math.exp(evaluated[0]["eval_loss"]))


def test_the_last_step_is_logged_and_evaluated_whatever_the_interval(tmp_path):
    """And once: an evaluation that was due there is not repeated."""
    run = trainer(tmp_path, logging_steps=7, eval_strategy="steps", eval_steps=2, **NO_SAVE)
    run.fit()
    for name in ("loss", "eval_loss"):
        assert [entry["step"] for entry in run.state.log_history if name in entry] == [2]


@pytest.mark.parametrize("quiet", [False, True])
def test_one_callback_shows_the_progress(tmp_path, quiet):
    run = trainer(tmp_path, disable_tqdm=quiet, **NO_SAVE)
    shown = [type(x) for x in run.callback_handler.callbacks if isinstance(x, (ProgressCallback, PrinterCallback))]
    assert shown == [Printer if quiet else Progress]


def test_the_log_file_is_the_log(done):
    lines = (done.folder / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == done.state.log_history


def test_tensorboard_has_the_same_numbers(done):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(done.folder / "runs"))
    events.Reload()
    entries = {entry["step"]: entry for entry in done.state.log_history if "loss" in entry}
    for name in ("loss", "tokens_per_second", "memory/gate/layer_0", "memory/surprise", "learning_rate/memory"):
        points = {point.step: point.value for point in events.Scalars(f"train/{name}")}
        assert points[4] == pytest.approx(entries[4][name], rel=1e-6), name


def test_the_clock_of_tokens_per_second_stands_still_while_nothing_is_trained(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    run._batch = {"input_ids": run.eval_dataset[0]["input_ids"][None]}
    for pause in (run.evaluate, run._probe):
        begun, clock = time.perf_counter(), run._clock
        pause()
        assert 0 < run._clock - clock < time.perf_counter() - begun


def test_tokens_per_second_are_those_since_the_last_entry(tmp_path):
    run = trainer(tmp_path, **NO_SAVE)
    run.state.num_input_tokens_seen = 100
    for new in (True, False):
        logs = {"loss": 1.0}
        run.log(logs)
        assert (logs["tokens_per_second"] > 0) == new


def test_a_checkpoint_between_two_entries_knows_its_tokens(tmp_path):
    trainer(tmp_path, save_steps=1, logging_steps=2, max_steps=2).train()
    states = [json.loads((tmp_path / f"checkpoint-{n}" / "trainer_state.json").read_text()) for n in (1, 2)]
    assert [state["num_input_tokens_seen"] for state in states] == [4 * 32, 2 * 4 * 32]


def test_reading_the_memory_does_not_change_the_training(tmp_path):
    """Dropout makes the random state matter."""
    found = []
    for steps in (1, 0):
        run = trainer(tmp_path, **NO_SAVE)
        run.memory_logging_steps = steps
        run.train()
        found.append((weights(run), torch.get_rng_state(), run.optimizer.state_dict()["state"]))
    read = any("memory/gate" in entry for entry in run.state.log_history)
    assert not read and equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    for key, state in found[0][2].items():
        assert equal(state, found[1][2][key])


def test_padding_is_no_token_that_was_trained_on(tmp_path):
    data = samples(4)
    for row in data:
        row["attention_mask"] = (torch.arange(32) < 20).long()
        row["labels"] = row["input_ids"].masked_fill(row["attention_mask"] == 0, -100)
    run = trainer(tmp_path, data=data, **NO_SAVE)
    run.train()
    assert run.state.num_input_tokens_seen == 2 * 4 * 20


def test_filler_is_no_token_that_was_trained_on(tmp_path):
    """A row whose last document has one token looks as if it were filled up with one, and is not."""
    ids = torch.arange(1, 33).numpy()
    cuts = ([20], [31], [31, 32], [32])  # where documents end; what is left of 32 is filled up
    pieces = [[(x, None) for x in np.split(ids, cut) if len(x)][: len(cut)] for cut in cuts]
    data = [assemble(row, fill_to=32) for row in pieces]
    assert data[1]["labels"].tolist() == data[2]["labels"].tolist()
    run = trainer(tmp_path, data=data, remove_unused_columns=False, **NO_SAVE)
    run.data_collator, run.eval_dataset = RowCollator(0, packed=True), data
    run.fit()
    assert run.state.num_input_tokens_seen == 2 * (20 + 31 + 32 + 32)


def test_a_schedule_over_epochs_is_tried_at_its_own_last_step(tmp_path):
    settings = {"max_steps": -1, "num_train_epochs": 4, "warmup_steps": 0.1, "lr_scheduler_type": "polynomial"}
    trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match="to a negative power"):
        trainer(tmp_path, **settings, lr_scheduler_kwargs={"power": -1})


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch", "accumulation", "epochs"), [(6, 1, 2), (4, 2, 1), (7, 2, 1.5), (20, 1, 1.4)])
def test_the_steps_that_are_announced_are_those_of_the_library(tmp_path, drop_last, batch, accumulation, epochs):
    settings = {"max_steps": -1, "num_train_epochs": epochs, "dataloader_drop_last": drop_last}
    settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    run = trainer(tmp_path, **settings)
    wanted = run.set_initial_training_values(run.args, run.get_train_dataloader())[-1]
    assert run_steps(run.args, run.train_dataset) == wanted


@pytest.mark.parametrize("steps", [-1, 1.5, True, None])
def test_steps_between_readings_must_be_a_number(tmp_path, steps):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match=f"memory_logging_steps={steps!r}"):
        RecipeTrainer(model=None, args=args, memory_logging_steps=steps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adam_beta2": 2.0}, "optim=adamw_torch.*, lr_scheduler_type=.*: Invalid beta parameter at index 1: 2"),
        ({"optim": "lomo"}, "optim=lomo, .*: .*lomo"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"periods": 3}}, "lr_scheduler_type=.*: .*'periods'"),
        (  # in the last step, when all is trained and nothing is saved
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": -1}},
            r"lr_scheduler_type=polynomial, lr_scheduler_kwargs=.'power': -1.: .* to a negative power",
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": -1.0}},
            r"lr_end.*the schedule multiplies the rate by -[0-9.]+ in step",
        ),
        ({"optim_args": "momentum=0.9"}, "optim_args=momentum=0.9, .*optim_args changes nothing of this optimizer"),
        ({"optim": "adafactor", "optim_args": "x"}, "optim_args=x"),
        (
            {"metric_for_best_model": "accuracy"},
            "metric_for_best_model='accuracy': an evaluation gives eval_loss only",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_the_optimizer_refuses_is_known_before_the_run(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path / "run", **NO_SAVE, **changes)
    assert not list(tmp_path.glob("run/*"))


def test_what_no_objective_does_is_refused(tmp_path):
    with pytest.raises(ValueError, match="label_smoothing_factor=0.1"):
        trainer(tmp_path, label_smoothing_factor=0.1)


def test_the_librarys_trainer_smooths_the_labels_of_the_next_token(tmp_path):
    model, ids = tiny_model(torch.float32), tokens(2, 20)
    stock = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, label_smoothing_factor=0.1))
    with torch.no_grad():
        found = stock.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # float32, summed in another order


# --- what is left ---


def test_a_full_disk_is_told_with_the_log(tmp_path):
    (tmp_path / "training_log.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*training_log.jsonl'"):
        trainer(tmp_path, **NO_SAVE).fit()


def test_models_and_checkpoints_load_like_any_other(done):
    ids = samples(2)[0]["input_ids"][None]
    with torch.no_grad():
        expected = done.model.eval()(ids).logits
    for folder in (done.folder, done.folder / "checkpoint-4"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(model) is tnt_hf.TNTForCausalLM and model.config.use_cache is True
        assert model.config.sliding_window == CONFIG["sliding_window"]
        assert model.config.local_chunk_sizes == [2, 4]  # the schedule begins with step 4, which was not trained
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
    assert done.model.config.use_cache is True


def test_after_training_the_model_is_the_one_that_was_saved(tmp_path):
    """Mixed precision ends with the training."""
    run = trainer(tmp_path, bf16=True, **NO_SAVE | {"max_steps": 1})
    run.fit()
    ids = samples(2)[0]["input_ids"][None]
    with torch.no_grad():
        found = run.model.eval()(ids).logits
        assert torch.equal(found, AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits)


def test_the_record(done):
    record = json.loads((done.folder / "training.json").read_text())
    assert (
        record["format"] == "tnt-training-1" and record["mode"] == "pretrain" and record["data"] == {"name": "random"}
    )
    assert record["recipe"] == "tnt_debug/stage1.yaml" and record["command"] == "tnt train"
    assert record["steps"] == 4 and record["tokens_trained"] == 4 * 4 * 32 and record["seed"] == 1
    assert record["metrics"] == done.metrics and set(done.metrics) == {"loss", "eval_loss", "perplexity"}
    assert record["parameters"] == record["trained_parameters"] == sum(p.numel() for p in done.model.parameters())
    assert record["seconds"] > 0 and record["peak_memory_bytes"] > 2**27
    assert record["tokens_per_second"] > record["tokens_trained"] / record["seconds"]
    assert {"cpu", "cpu_capability", "cores", "python", "versions", "commit"} <= record["environment"].keys()
    assert record["environment"]["versions"]["torch"] == torch.__version__


def test_plots_are_drawn(done):
    for name in ("loss.png", "gates.png"):
        assert (done.folder / name).read_bytes().startswith(b"\x89PNG")
    assert not list(done.folder.glob("*.partial"))


def test_a_run_that_stops_early_leaves_its_log_and_plots(tmp_path):
    run = trainer(tmp_path, save_strategy="no", max_steps=4)
    run.plots = True
    spoil(run, "lm_head.weight", 4)
    with pytest.raises(FloatingPointError):
        run.fit()
    assert (tmp_path / "loss.png").exists() and (tmp_path / "gates.png").exists()
    assert [json.loads(line)["step"] for line in (tmp_path / "training_log.jsonl").read_text().splitlines()] == [2]
    assert run.model.config.sliding_window == CONFIG["sliding_window"]


def test_a_model_without_memory_trains(tmp_path):
    run = trainer(tmp_path, config={"memory_layers": []}, **NO_SAVE)
    run.remove_callback(next(x for x in run.callback_handler.callbacks if type(x).__name__ == "ChunkSizeSchedule"))
    run.plots = True
    run.fit()
    assert not any("memory" in key for entry in run.state.log_history for key in entry if key != "peak_memory_mib")
    assert (tmp_path / "loss.png").exists() and not (tmp_path / "gates.png").exists()


def test_an_empty_shard_has_no_largest_number(tmp_path):
    """FSDP2 leaves a process without a part of a tensor that has fewer rows than there are processes."""
    model = torch.nn.ParameterList([torch.ones(2), torch.ones(0, 3)])
    for weight in model:
        weight.grad = torch.zeros_like(weight)
    stop_if_not_finite(1, [torch.tensor(1.0)], model)
    model[0].grad[1] = torch.nan
    stop_if_not_finite(1, [torch.tensor(1.0)], model, gradients_too=False)  # the scaler of float16 sees to them
    with pytest.raises(FloatingPointError, match="gradients not finite: 0"):
        stop_if_not_finite(1, [torch.tensor(1.0)], model)


def test_what_is_not_a_number_is_logged_as_it_is(tmp_path):
    run = trainer(tmp_path, max_steps=1, save_strategy="no")
    run.train()
    run.log({"note": "a word"})
    assert json.loads((tmp_path / LOG).read_text().splitlines()[-1])["note"] == "a word"


def test_a_plot_that_cannot_be_drawn_costs_no_run(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("no font")

    monkeypatch.setattr("tnt_hf.recipes.trainer.draw_plots", fail)
    run = trainer(tmp_path, **NO_SAVE | {"max_steps": 1})
    run.plots = True
    run.fit()
    assert "The plots could not be drawn: OSError: no font" in caplog.text
    assert (tmp_path / "training.json").is_file()


def test_evaluations_and_teachers_are_in_the_precision_of_training(tmp_path):
    run, found = trainer(tmp_path, bf16=True, **NO_SAVE), set()
    run.fit()  # which unwraps the model at its end
    run.model.model.layers[0].mlp.register_forward_hook(lambda module, args, y: found.add(y.dtype))
    run.evaluate(run.train_dataset)
    assert found == {torch.bfloat16}

    def objective(model, inputs, num_items, teacher):
        found.add(teacher.model.layers[0].mlp(torch.zeros(1, 1, CONFIG["hidden_size"])).dtype)
        return next_token(model, inputs, num_items)

    found.clear()
    model, teacher = (TNTForCausalLM(TNTConfig(**CONFIG)) for _ in range(2))
    settings = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, bf16=True)
    run = RecipeTrainer(model, settings, teacher=teacher, objective=objective)
    run.compute_loss(model, {name: x[None] for name, x in samples(1)[0].items()})
    assert found == {torch.bfloat16}


@pytest.mark.parametrize("drop_last, wanted", [(False, 3), (True, 2)])
def test_the_steps_of_several_processes_share_the_rows(drop_last, wanted):
    settings = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 1}
    settings |= {"per_device_train_batch_size": 2, "world_size": 2, "dataloader_drop_last": drop_last}
    assert run_steps(SimpleNamespace(**settings), range(10)) == wanted
