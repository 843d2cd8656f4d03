"""Settings of the library's Trainer that decide which rows a run reads, which model it keeps and what it reports."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_hosts import tiny_host
from torch.utils.data import DataLoader
from train_killer import trainer
from transformers import Trainer

from tnt_hf.recipes.checkpoints import checkpoints
from tnt_hf.recipes.models import check_packed_rows
from tnt_hf.recipes.objectives import next_token


# Every step is worse than the last one: the best is that of step 1, of which there need not be a checkpoint.
BEST = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 4}


def worsening(folder, **settings):
    run = trainer(folder, **BEST | settings)
    run.objective = lambda *call: (-next_token(*call)[0], None)
    return run


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_loaded(run, folder) -> bool:
    return all(torch.equal(run.model.state_dict()[name], w) for name, w in weights_of(folder).items())


def test_the_best_without_a_checkpoint_lends_its_numbers_to_no_other_model(tmp_path):
    run = worsening(tmp_path, save_steps=2)
    metrics = run.fit()
    losses = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    assert sorted(losses, key=losses.get) == [1, 2, 3, 4]
    assert is_loaded(run, tmp_path / "checkpoint-2"), "the best of those that are saved"
    assert metrics["eval_loss"] == losses[2]
    assert metrics["eval_loss"] == pytest.approx(run.evaluate()["eval_loss"], rel=1e-6)
    assert json.loads((tmp_path / "training.json").read_text())["metrics"] == metrics


def test_a_run_whose_best_has_no_checkpoint_goes_on(tmp_path):
    whole = worsening(tmp_path, save_steps=2).fit()
    weights = weights_of(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert worsening(tmp_path, save_steps=2).fit() == whole
    assert all(torch.equal(w, weights[name]) for name, w in weights_of(tmp_path).items())


def test_the_newest_checkpoint_stays_beside_the_best(tmp_path):
    run = worsening(tmp_path, save_steps=1, save_total_limit=1)
    metrics = run.fit()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-4"]
    assert is_loaded(run, tmp_path / "checkpoint-1") and run.args.save_total_limit == 1
    again = worsening(tmp_path, save_steps=1, save_total_limit=1)
    assert again.fit() == metrics and again.had_ended


def test_a_run_that_groups_rows_by_their_length_goes_on_to_the_bit(tmp_path):
    settings = {"train_sampling_strategy": "group_by_length", "save_steps": 7}  # in the middle of its second epoch
    trainer(tmp_path, **settings).fit()
    weights = weights_of(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-8")
    trainer(tmp_path, **settings).fit()
    assert all(torch.equal(w, weights[name]) for name, w in weights_of(tmp_path).items())


def test_every_process_writes_its_progress_where_only_the_model_is_saved(tmp_path, monkeypatch):
    run = trainer(tmp_path, save_only_model=True)
    run.train_exactly()
    monkeypatch.setattr(type(run.args), "should_save", False)  # as in every process but the first
    run.state.global_step = 9
    run._save_checkpoint(run.model, None)
    assert [path.name for path in (tmp_path / "checkpoint-9").iterdir()] == ["progress_0.json"]


def test_processes_that_share_batches_go_on_with_the_rows_of_their_epoch(tmp_path, monkeypatch):
    """Of two processes the first. Who goes on skips batches, which puts more between accelerate and the sampler."""
    run = trainer(tmp_path, train_sampling_strategy="group_by_length")
    run._started = True
    monkeypatch.setattr(Trainer, "_run_epoch", lambda self, epoch: None)

    def rows(epoch: int, skip: int = 0) -> list[list[int]]:
        loader = DataLoader(range(20), sampler=run._get_train_sampler(), batch_size=2)
        loader = prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=False)
        loader = skip_first_batches(loader, skip) if skip else loader
        run._run_epoch(epoch=epoch)
        loader.set_epoch(epoch)  # as `Trainer` does there
        return [batch.tolist() for batch in loader]

    assert rows(0) != rows(1) and rows(1, skip=2) == rows(1)[2:]


@pytest.mark.parametrize("internal", [False, True])
def test_a_model_in_shards_is_saved_whole(tmp_path, monkeypatch, internal):
    """What accelerate calls a checkpoint of it may stay in shards; also where saving fails it goes on as it was."""
    run, kinds = trainer(tmp_path), []
    plugin = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT")
    plugin.set_state_dict_type = lambda kind: setattr(plugin, "state_dict_type", kind)
    monkeypatch.setattr(run, "is_fsdp_enabled", True)
    monkeypatch.setattr(run, "accelerator", SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))

    def save(self, *args):
        kinds.append(plugin.state_dict_type)
        raise OSError("no room")

    monkeypatch.setattr(Trainer, "save_model", save)
    with pytest.raises(OSError, match="no room"):
        run.save_model(str(tmp_path), _internal_call=internal)
    assert kinds == ["SHARDED_STATE_DICT" if internal else "FULL_STATE_DICT"]
    assert plugin.state_dict_type == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("make", [lambda: tiny_host("llama"), lambda: tiny_model(torch.float32)])
def test_flash_attention_reads_packed_documents_apart_in_single_rows_only(make, evaluates):
    model = make()
    model.config._attn_implementation = "flash_attention_2"  # which this machine need not have
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2}
    recipe = SimpleNamespace(data=SimpleNamespace(packing=True), training=SimpleNamespace(**sizes))
    if evaluates:
        with pytest.raises(ValueError, match="per_device_eval_batch_size=2: 'flash_attention_2' keeps packed"):
            check_packed_rows(recipe, evaluates, model, None)
        check_packed_rows(recipe, evaluates, tiny_host("llama"), model)  # no evaluation asks a teacher
    check_packed_rows(recipe, False, model, None)
    recipe.training.per_device_train_batch_size = 4
    for models in ((model, None), (tiny_host("llama"), model)):
        with pytest.raises(ValueError, match="per_device_train_batch_size=4: 'flash_attention_2' keeps packed"):
            check_packed_rows(recipe, evaluates, *models)
    recipe.data.packing = False
    check_packed_rows(recipe, evaluates, model, None)


def test_tokens_per_second_count_training_alone(tmp_path):
    """Neither evaluations, before the first step too, nor checkpoints; a resumed run neither."""

    def slow(run):
        evaluate, save = run.evaluation_loop, run._save

        def waiting(function):
            def call(*args, **kwargs):
                time.sleep(0.5)
                return function(*args, **kwargs)

            return call

        run.evaluation_loop, run._save = waiting(evaluate), waiting(save)
        return run

    def run(folder, **options):
        steps = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
        return slow(trainer(folder, max_steps=4, **steps | options))

    first = run(tmp_path / "out")
    first.fit()
    assert 0 < first.seconds_training < first.seconds - 4 * 0.5
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    again = run(tmp_path / "out")
    again.fit()
    assert again._resumed.name == "checkpoint-2"
    assert 0 < again.seconds_training < again.seconds - 4 * 0.5
