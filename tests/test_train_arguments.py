"""A recipe as people write it: one flat file, a command line over it, and one line about every mistake."""

import os
import re
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from tnt_hf import TNTConfig
from tnt_hf.presets import PRESETS
from tnt_hf.recipes import recipe_file
from tnt_hf.recipes import train as train_command
from tnt_hf.recipes.arguments import MODES, NEW_MODELS, DataArguments, ModelArguments, RunArguments
from tnt_hf.recipes.recipe_file import TRAINER_DEFAULTS, find_recipe, packaged_recipes, read_recipe
from tnt_hf.recipes.train import TRAINER_HELP, by_dataclass, help_text, main, marked, prepare


ROOT = Path(__file__).parents[1]
OURS = (ModelArguments, DataArguments, RunArguments)


def read(*arguments: str):
    """A recipe on the CPU with a tokenizer, which a new model needs."""
    return read_recipe(["--tokenizer", "somewhere", "--use_cpu", *arguments])


@pytest.fixture
def file(tmp_path):
    """Writes a recipe and returns the option that names it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "folder" / "run.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return ["--config", str(path)]

    return write


# --- the fields -----------------------------------------------------------------------------------------------------


def test_no_two_dataclasses_share_a_field():
    names = Counter(field.name for kind in (*OURS, TrainingArguments) for field in fields(kind))
    assert not [name for name, count in names.items() if count > 1]
    # Fields of TNTConfig that are meant as such have no namesake, but for two that `Trainer` decides or we load by.
    assert set(names) & set(TNTConfig.__annotations__) == {"use_cache"}


def test_every_field_says_what_it_is_and_has_a_default():
    for kind in OURS:
        assert all(field.metadata["help"] for field in fields(kind))
        assert kind() == kind()
        assert not [
            x for x in vars(kind()).values() if isinstance(x, dict) and any(x is y for y in vars(kind()).values())
        ]
    assert set(NEW_MODELS) == {*PRESETS, "llama"}


def test_defaults_are_those_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = read().training
    for name, value in TRAINER_DEFAULTS.items():
        assert getattr(args, name) == value
    assert args.report_to == ["tensorboard"] and args.output_dir == os.path.join("runs", "train")
    assert read("--report_to", "none", "--logging_steps", "3").training.logging_steps == 3


def test_what_is_evaluated_at_once_fits_where_training_does():
    rows = ("--per_device_train_batch_size", "1")
    assert read(*rows).training.per_device_eval_batch_size == 1
    assert read(*rows, "--per_device_eval_batch_size", "3").training.per_device_eval_batch_size == 3


def test_the_help_tells_the_defaults():
    args = read().training
    for name, (default, text) in TRAINER_HELP.items():
        found = getattr(args, name)
        found = getattr(found, "value", found)
        if name not in ("output_dir", "report_to", "use_cpu"):
            assert default == found, name
        assert text and f"--{name} " in help_text()
    for kind in OURS:
        assert all(re.search(rf"^  --{field.name} +\S", help_text(), flags=re.M) for field in fields(kind))
    everything = help_text(everything=True)
    assert all(f"--{field.name} " in everything for field in fields(TrainingArguments) if field.init)
    assert set(packaged_recipes()) >= {
        f"tnt_debug/{name}" for name in ("stage1", "stage2", "align", "distill", "sft", "long")
    }


def test_an_entry_with_a_number_for_a_name_is_overridden_like_any_other(file):
    found = read(*file("chunk_size_schedule: {2: [2, 4], 6: [1, 2]}"), "--chunk_size_schedule.6", "2")
    assert found.run.chunk_size_schedule == {2: [2, 4], 6: 2}
    found = read(*file("chunk_size_schedule: {2: [2, 4]}"), "--chunk_size_schedule.6", "2")
    assert {int(step): sizes for step, sizes in found.run.chunk_size_schedule.items()} == {2: [2, 4], 6: 2}


@pytest.mark.parametrize("words, said", [([], "no"), (["--bf16"], "bf16")], ids=["float32", "bfloat16"])
def test_the_environment_does_not_choose_the_precision(file, tmp_path, monkeypatch, words, said):
    """Which `accelerate launch` writes there."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    given = [*file("tokenizer: somewhere"), "--use_cpu", *words, "--output_dir", str(tmp_path / "out")]
    wrong = "ACCELERATE_MIXED_PRECISION='bf16': the recipe says 'no'" if said == "no" else "somewhere"
    with pytest.raises((ValueError, OSError), match=wrong):
        prepare(given)
    assert not (tmp_path / "out").exists()


def test_half_precision_that_a_cpu_does_not_train_in_is_refused(file, tmp_path):
    with pytest.raises(ValueError, match="fp16=True: has no effect on a CPU; use bf16"):
        prepare([*file("tokenizer: somewhere"), "--use_cpu", "--fp16", "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_weights_that_no_process_has_in_full_are_refused(file, tmp_path, monkeypatch):
    """ZeRO stage 3 shares a model out while it is made, by all processes together; here one makes it for all."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations import deepspeed

    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})  # as of `--deepspeed FILE` and `accelerate launch`
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", weakref.ref(config))
    with pytest.raises(ValueError, match="deepspeed: with ZeRO stage 3 .* shard them with FSDP2"):
        prepare([*file("tokenizer: somewhere"), "--use_cpu", "--output_dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "option, message",
    [
        (("--ignore_data_skip", "true"), "ignore_data_skip=True: .* would read other data"),
        (("--eval_on_start", "true"), "eval_on_start=True: needs data to evaluate on: give eval_share"),
        (("--eval_strategy", "steps", "--eval_steps", "2"), "eval_strategy='steps': needs data to evaluate on"),
    ],
)
def test_settings_that_break_a_promise_or_lack_data_are_refused(file, option, message):
    with pytest.raises(ValueError, match=message):
        read(*file("model: tnt\ntokenizer: somewhere\neval_share: 0.0"), *option)


# --- file and command line ------------------------------------------------------------------------------------------


def test_the_file_is_flat_and_numbers_are_numbers(file):
    config = file("learning_rate: 1e-3\nwarmup_steps: 2.\nhidden_size: 64\nmode: pretrain\nsequence_length: 1e3\n"
                  "streaming: false\nlr_scheduler_kwargs: {min_lr_rate: 1e-1}\nsave_strategy: no\n")  # fmt: skip
    recipe = read(*config)
    assert recipe.training.learning_rate == 0.001 and recipe.data.sequence_length == 1000
    assert type(recipe.data.sequence_length) is int
    assert recipe.training.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    assert recipe.training.save_strategy == "no"  # YAML reads that word as false
    assert recipe.model.model_config == {"hidden_size": 64}
    assert recipe.name == "folder/run.yaml" and recipe.training.output_dir == "runs/folder/run"


def test_a_file_named_from_inside_its_folder_is_in_that_folder(file, tmp_path, monkeypatch):
    file("mode: pretrain")
    monkeypatch.chdir(tmp_path / "folder")
    for name in ("run.yaml", "run", "../folder/run.yaml"):
        recipe = read("--config", name)
        assert recipe.name == "folder/run.yaml" and recipe.training.output_dir == os.path.join("runs", "folder", "run")


def test_the_command_line_wins_and_mappings_are_merged(file):
    config = file(
        "learning_rate: 1e-3\ntrainable: lora\nlora: {r: 4, lora_alpha: 8}\n"
        "model_config: {hidden_size: 32, rope_parameters: {rope_type: default, rope_theta: 1e4}}\n"
        "num_hidden_layers: 3\n"
    )
    recipe = read(
        *config, "--learning-rate", "2e-3", "--lora.r=16", "--hidden_size", "64", "--local_chunk_sizes", "4", "8",
        "--model_config.rope_parameters.rope_theta", "1e6", "--model_config.sliding_window", "null",
        "--chunk_size_schedule", "{0: [8], 100: [1]}", "--max-steps", "-1",
    )  # fmt: skip
    assert recipe.training.learning_rate == 0.002 and recipe.training.max_steps == -1
    assert recipe.model.lora == {"r": 16, "lora_alpha": 8}
    assert recipe.model.model_config == {
        "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "num_hidden_layers": 3,
        "local_chunk_sizes": [4, 8],
        "sliding_window": None,
    }
    assert recipe.run.chunk_size_schedule == {0: [8], 100: [1]}
    assert read(*config, "--trainable", "all", "--lora", "null").model.lora == {}


def test_a_list_may_have_commas():
    recipe = read("--local_chunk_sizes", "4,8", "--run_name", "4,8")
    assert recipe.model.model_config == {"local_chunk_sizes": [4, 8]} and recipe.training.run_name == "4,8"
    with pytest.raises(ValueError, match="train_tokens='1,000,000': must be an integer"):
        read("--train_tokens", "1,000,000")


def test_values_take_the_type_of_their_field():
    recipe = read("--run_name", "2026", "--train_tokens", "1e6", "--packing", "false", "--report_to", "none",
                  "--lr_scheduler_type", "cosine", "--eval_share", "0", "--bf16")  # fmt: skip
    assert recipe.training.run_name == "2026" and recipe.run.train_tokens == 10**6
    assert recipe.data.packing is False and recipe.training.bf16 is True and recipe.data.eval_share == 0
    assert recipe.training.lr_scheduler_type == "cosine"
    assert read("--run_name", "2026" * 9).training.run_name == "2026" * 9
    assert read("--report_to", "tensorboard", "wandb").training.report_to == ["tensorboard", "wandb"]
    assert read("--optim", "adamw_torch").training.optim == "adamw_torch"


@pytest.mark.parametrize("name", ["tr #2", "a\nb", "&a b", "*a", "!x", "x\ty", "1 'q'", "{a", "a: b"])
def test_a_path_is_what_was_typed(name):
    """YAML would end it at a comment, fold its lines, or refuse it."""
    recipe = read(
        "--output_dir", name, "--dataset_name", name, "--model_config.hidden_act", "gelu", "--adam_beta1", "0"
    )
    assert (recipe.training.output_dir, recipe.data.dataset_name) == (name, name)
    assert type(recipe.training.adam_beta1) is float
    with pytest.raises(ValueError, match="output_dir='.udcff': is not UTF-8"):
        read("--output_dir", "\udcff")


def test_steps_on_the_command_line_replace_the_epochs_of_the_file(file):
    words = [*file("num_train_epochs: 3"), "--tokenizer", "somewhere"]
    assert read_recipe(words).training.num_train_epochs == 3
    short = read_recipe([*words, "--max_steps", "2"])
    assert short.training.max_steps == 2 and "num_train_epochs" not in short.given


def test_a_dataset_on_the_command_line_replaces_that_of_the_file_with_its_configuration(file):
    config = file("dataset_name: a/b\ndataset_config: sample")
    assert read(*config).data.dataset_config == "sample"
    assert read(*config, "--dataset_name", "c/d").data.dataset_config is None
    assert read(*config, "--dataset_name", "c/d", "--dataset_config", "other").data.dataset_config == "other"


def test_what_was_given_is_kept_for_the_record(file):
    recipe = read(*file("mode: pretrain\neval_share: 0.1\nweight_decay: 0.1\n"), "--hidden_size", "64")
    assert by_dataclass(recipe.given) == {
        "model": {"tokenizer": "somewhere", "model_config": {"hidden_size": 64}},
        "data": {"eval_share": 0.1},
        "run": {"mode": "pretrain"},
        "training": {"weight_decay": 0.1, "use_cpu": True},
    }


def test_the_record_marks_what_is_here_and_holds_no_path_of_the_machine(tmp_path, monkeypatch):
    (tmp_path / "work" / "runs" / "stage1").mkdir(parents=True)
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    given = {"model": "runs/stage1", "teacher": str(tmp_path / "work/runs/stage1"), "tokenizer": "org/name", "seed": 1}
    for texts in ("../texts", str(tmp_path / "texts")):
        marks = marked(given | {"dataset_name": texts})
        assert marks == given | {"model": "./runs/stage1", "teacher": "./runs/stage1", "dataset_name": "./texts"}


def test_recipes_of_the_package_have_short_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tnt_debug/stage1", "tnt_debug/stage1.yaml", "recipes/tnt_debug/stage1.yaml"):
        assert find_recipe(name) == ROOT / "recipes" / "tnt_debug" / "stage1.yaml"
    (tmp_path / "tnt_debug").mkdir()
    (tmp_path / "tnt_debug" / "stage1.yaml").write_text("mode: pretrain")
    assert find_recipe("tnt_debug/stage1") == Path("tnt_debug/stage1.yaml")  # a file of yours goes first
    with pytest.raises(FileNotFoundError, match="is neither a file nor a recipe of the package .*tnt_debug/stage1"):
        find_recipe("tnt_debug/stage9")


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--learning_rat 3", "learning_rat='3': is not a field; did you mean 'learning_rate'?"),
        ("--lr 3", "lr='3': is not a field; did you mean 'learning_rate'?"),
        ("--hidden_sise 3", "hidden_sise='3': is not a field; did you mean 'hidden_size'?"),
        ("--model_config.hidden_sise 3", "model_config.hidden_sise=3: is not a field; did you mean 'hidden_size'?"),
        ("3", "'3': is not an option"),
        ("--seed 1 --seed 2", "--seed 2: is given twice"),
        ("--output_dir", "output_dir: --output_dir needs a value"),
        ("--dataset_name --seed 1", "dataset_name: --dataset_name needs a value"),
        ("--learning_rate abc", "learning_rate='abc': must be a number"),
        ("--learning_rate .nan", "learning_rate=nan: must be finite"),
        ("--learning_rate .inf", "learning_rate=inf: must be finite"),
        (f"--ddp_timeout {10**30}", f"ddp_timeout={10**30}: must be an integer of 64 bits"),
        (f"--ddp_timeout {10**15}", "TrainingArguments: OverflowError: "),
        (f"--learning_rate {10**400}", "learning_rate=1000"),
        ("--train_tokens 1e30", "train_tokens=1000"),
        ("--learning_rate -1", "learning_rate=-1: must be at least 0"),
        ("--memory_learning_rate -1e-3", "memory_learning_rate=-0.001: must be at least 0"),
        ("--sequence_length 1.5", "sequence_length=1.5: must be an integer"),
        ("--sequence_length 0", "sequence_length=0: must be at least 1"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size=0: must be at least 1"),
        ("--seed true", "seed=True: must be an integer"),
        ("--save_steps 0", "save_steps=0: must be at least 1, or below 1 a share of the run"),
        ("--eval_steps -3", "eval_steps=-3: must be at least 1, or below 1 a share of the run"),
        ("--logging_steps 0", "logging_steps=0: must be at least 1, or below 1 a share of the run"),
        ("--adam_beta1 1.5", "adam_beta1=1.5: must be at least 0 and below 1"),
        ("--adam_epsilon -1e-8", "adam_epsilon=-1e-08: must be at least 0"),
        ("--max_steps 0", "max_steps=0: must be at least 1, or -1 for whole epochs"),
        ("--max_steps -5", "max_steps=-5: must be at least 1, or -1 for whole epochs"),
        ("--tokenizer_vocab_size 1e9", "tokenizer_vocab_size=1000000000: must be 257 (a token for every"),
        ("--tokenizer_vocab_size 256", "tokenizer_vocab_size=256: must be 257 (a token for every byte and one for"),
        ("--hidden_size 32 --model_config.hidden_size 64", "model_config.hidden_size: is given twice, once as m"),
        ("--num_train_epochs 0", "num_train_epochs=0: must be above 0"),
        ("--output_dir=", "output_dir=None: must name a folder"),
        ("--dataset_name=", "dataset_name='': must name a file, a folder or a dataset"),
        ("--push_to_hub", "push_to_hub=True: would upload checkpoints that nobody checked"),
        ("--hub_model_id me/memory", "hub_model_id='me/memory': has no effect, as a run uploads nothing"),
        ("--optim_target_modules all-linear", "optim_target_modules='all-linear': has no effect"),
        ("--eval_steps 5", "eval_steps=5: has no effect without eval_strategy=steps"),
        (
            "--gradient_checkpointing_kwargs.use_reentrant true",
            "gradient_checkpointing_kwargs={'use_reentrant': True}: has no effect without gradient_checkpointing",
        ),
        (
            "--gradient_checkpointing --gradient_checkpointing_kwargs.reentrant true",
            "gradient_checkpointing_kwargs={'reentrant': True}: 'reentrant' must be among use_reentrant, ",
        ),
        ("--accelerator_config.split_batches true", "accelerator_config={'split_batches': True}: split_batches would"),
        (
            "--accelerator_config.use_seedable_sampler false",
            "accelerator_config={'use_seedable_sampler': False}: without use_seedable_sampler a run that goes on",
        ),
        ("--accelerator_config file.json", "accelerator_config='file.json': settings are written down with the run"),
        ("--remove_unused_columns true", "remove_unused_columns=True: would remove what tells filler from tokens"),
        ("--dataloader_persistent_workers", "dataloader_persistent_workers=True: has no effect without dataloader_nu"),
        ("--do_train false", "do_train=False: a recipe trains; tnt eval measures the model of a folder"),
        ("--fsdp_config.version 2", "fsdp_config={'version': 2}: has no effect without fsdp"),
        ("--streaming --max_steps 2 --train_sampling_strategy sequential", "train_sampling_strategy='sequential': "),
        ("--streaming --max_steps 2 --data_seed 3", "data_seed=3: has no effect with streaming"),
        ("--eval_accumulation_steps 0", "eval_accumulation_steps=0: must be at least 1"),
        ("--ddp_timeout -1", "ddp_timeout=-1: must be at least 1"),
        ("--eval_delay -3", "eval_delay=-3: must be at least 0"),
        ("--neftune_noise_alpha -1", "neftune_noise_alpha=-1: must be at least 0"),
        ("--torch_compile_backend fast", "torch_compile_backend='fast': must be one of no, eager, aot_eager"),
        ("--auto_find_batch_size", "auto_find_batch_size=True: would change the batch in the run"),
        ("--greater_is_better true", "greater_is_better=True: an evaluation gives eval_loss only"),
        ("--load_best_model_at_end", "load_best_model_at_end=True: needs evaluations; give eval_strategy"),
        ("--torch_compile_mode fast", "torch_compile_mode='fast': must be one of default, "),
        ("--label_names x", "label_names=['x']: is not used: an evaluation gives eval_loss only"),
        ("--label_names []", "label_names=[]: is not used"),
        ("--include_for_metrics inputs", "include_for_metrics=['inputs']: is not used"),
        ("--batch_eval_metrics", "batch_eval_metrics=True: is not used"),
        ("--bf16_full_eval", "bf16_full_eval=True: has no effect on the evaluations of a run; with bf16 they are"),
        (
            "--activation_checkpointing --activation_checkpointing_kwargs.every_n_layers 0",
            "activation_checkpointing_kwargs={'every_n_layers': 0}: every_n_layers must be an integer of at least 1",
        ),
        ("--max_steps 3 --num_train_epochs 2", "num_train_epochs=2: has no effect beside max_steps=3: give one of"),
        ("--hub_token hf_secret", "hub_token: settings are saved with the run, so a secret is refused; set HF_TOKEN"),
        ("--window_dropout_warmup_steps 5", "window_dropout_warmup_steps=5: has no effect without window_dropout"),
        ("--packing maybe", "packing='maybe': must be true or false"),
        ("--model_config 3", "model_config=3: must be a mapping"),
        ("--learning_rate.x 3", "learning_rate.x='3': learning_rate is not a mapping"),
        ("--lr_scheduler_type cosin", "lr_scheduler_type='cosin': must be one of 'linear', 'cosine'"),
        ("--mode pretraining", f"mode='pretraining': must be one of {', '.join(MODES)}"),
        ("--trainable head", "trainable='head': must be one of all, memory, local_memories, lora"),
        ("--window_dropout 1.5", "window_dropout=1.5: must be in [0, 1]"),
        ("--eval_share 1", "eval_share=1: must be in [0, 1)"),
        ("--max_steps 3 --train_tokens 5", "train_tokens=5: sets the length of the run, and so does max_steps=3"),
        ("--tokenizer_vocab_size 300", "tokenizer_vocab_size=300: trains a tokenizer, but tokenizer names one"),
        ("--mode stage2", "mode='stage2': goes on from a trained model; name its folder as model, not the preset"),
        ("--mode long --model titans", "mode='long': goes on from a trained model"),
        ("--mode distill", "mode='distill': goes on from a trained model"),
        ("--mode stage2 --source x", "mode='stage2': goes on from a trained TNT model"),
        ("--source x --model y", "model='y': is what is trained, but source names a checkpoint"),
        ("--source x --hidden_size 3", "model_config={'hidden_size': 3}: belongs to a model that exists"),
        ("--source x --inject.weight 0", "inject={'weight': 0}: puts memory into a live model"),
        ("--model y --convert.window 3", "convert={'window': 3}: needs source"),
        ("--inject.weight 0", "inject={'weight': 0}: needs a pretrained model"),
        ("--model y --lora.r 3", "lora={'r': 3}: has no effect with trainable='all'"),
        ("--mode align --model y", "trainable='all': mode='align' trains the memory and its gates only"),
        ("--mode align --model y --trainable memory --gradient_checkpointing", "gradient_checkpointing=True: would"),
        ("--mode align --model y --trainable memory --activation_checkpointing", "activation_checkpointing=True: "),
        ("--model y --teacher z", "teacher='z': has no effect in mode='pretrain'"),
        ("--mode sft --model y", "dataset_name='python-stdlib': holds no conversations"),
        ("--streaming", "streaming=True: has no length that is known; give train_tokens or max_steps"),
        ("--config tnt_debug/stage1 x", "config='tnt_debug/stage1 x': must be one file"),
        ("--log_level foo", "log_level='foo': must be one of detail, debug, info, warning, error, critical, passive"),
        ("--ddp_backend foo", "ddp_backend='foo': must be one of nccl, gloo, "),
        ("--accelerator_config.foo 1", "TypeError: AcceleratorConfig.__init__() got an unexpected keyword argument"),
        ("--config", "--config: names no file"),
        ("--config nowhere/x", "config='nowhere/x': is neither a file nor a recipe of the package"),
    ],
    ids=lambda value: value if value.startswith("-") or value == "3" else "",
)  # fmt: skip
def test_a_mistake_is_named_in_one_line(arguments, message, capsys):
    words = arguments.split()
    assert main([*words, "--tokenizer", "somewhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tnt train: ") and error.count("\n") == 1
    assert message in error and "hf_secret" not in error


def test_what_is_no_checkpoint_is_named_before_the_run_has_a_folder(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, why in (("nowhere", "there is no such folder"), ("empty", "is not a complete checkpoint, has no ")):
        words = ["--resume_from_checkpoint", str(tmp_path / name), "--output_dir", str(tmp_path / "run")]
        assert main([*words, "--tokenizer", "somewhere", "--use_cpu"]) == 2
        assert f"resume_from_checkpoint='{tmp_path / name}': {why}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_missing_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr(recipe_file, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="use_liger_kernel=True: needs the package liger-kernel"):
        read("--use_liger_kernel")


def test_a_package_that_does_nothing_for_a_model_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(recipe_file, "find_spec", lambda name: name != "tensorboard")  # as if liger-kernel were here
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text " * 99)
    new = "--model tnt --hidden_size 8 --num_hidden_layers 1 --num_attention_heads 1 --tokenizer_vocab_size 257"
    with pytest.raises(ValueError, match="use_liger_kernel=True: liger-kernel has nothing for models of type 'tnt'"):
        prepare(
            f"{new} --dataset_name text.txt --sequence_length 8 --max_steps 1 --use_cpu --use_liger_kernel".split()
        )


def test_a_new_model_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer=None: must be given with the preset 'titans', or tokenizer_vocab"):
        read_recipe(["--model", "titans"])
    read_recipe(["--model", "titans", "--tokenizer_vocab_size", "300"])
    read_recipe(["--model", "some/folder"])
    for field in ("model", "source"):  # whose tokens mean something already
        with pytest.raises(ValueError, match="tokenizer_vocab_size=300: trains a tokenizer for a new model"):
            read_recipe([f"--{field}", "some/folder", "--tokenizer_vocab_size", "300"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "must hold a mapping of fields, not list"),
        ("a: [\n", "is not valid YAML"),
        ("learning_rate: fast\n", "learning_rate='fast': must be a number"),
        ("train_tokens: .inf\n", "train_tokens=inf: must be finite"),
        ("model: 3\n", "model=3: must be a string"),
        ("dataset_name: ' '\n", "dataset_name=' ': must name a file, a folder or a dataset"),
        ("3: 4\n", "3=4: is not a field"),
        ("hidden_size: 8\nmodel_config: {hidden_size: 8}\n", "model_config.hidden_size: is given twice, once as mod"),
        ("local_chunk_sizes: [8]\nmodel_config: 8\n", "model_config=8: must be a mapping"),
    ],
)
def test_mistakes_in_the_file(text, message, file, capsys):
    assert main([*file(text), "--tokenizer", "somewhere"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "-m tnt_hf.recipes.train",
        "-u -m tnt_hf.recipes.train",  # as torchrun does
        "-mtnt_hf.recipes.train",
        "-m tnt_hf.cli train",
        "-m tnt_hf.recipes.evaluate",
        "-m tnt_hf.recipes.push",
    ],
)
def test_help_is_quick_however_a_command_is_started(words):
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1", "COLUMNS": "200"}
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words.split(), "--help"], capture_output=True, text=True, env=environment
        )
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0 and done.stdout.startswith("usage: tnt "), done.stderr[-500:]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tnt_hf" in imported and not sorted(imported & {"torch", "transformers", "numpy", "datasets"})
    assert min(seconds) < 2


@pytest.mark.long
def test_the_package_is_registered_unless_a_command_starts_it():
    """Importing it makes the Auto classes know TNT, also in a program that has a -m of its own among its arguments."""
    words = ["-c", "import sys, tnt_hf; print('torch' in sys.modules)", "-m", "tnt_hf.recipes.train"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_what_is_not_installed_is_named_before_anything_is_done(monkeypatch, capsys):
    monkeypatch.setattr(train_command, "find_spec", lambda name: None if name in ("peft", "datasets") else name)
    assert train_command.main(["--config", "tnt_debug/stage1"]) == 2
    assert capsys.readouterr().err == "tnt train: needs datasets, peft: pip install 'tnt-hf[train]'\n"
