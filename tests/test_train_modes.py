"""`tnt train` for real in every mode, tiny: what is said to learn learns, everything else stays bit-identical, the
loss falls, and what was saved is what was trained."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import LiZACallback, load_injected
from tnt_hf.conversion.manifest import read_manifest
from tnt_hf.recipes import converted
from tnt_hf.recipes.checkpoints import latest_complete_checkpoint
from tnt_hf.recipes.converted import convert_once
from tnt_hf.recipes.recipe_file import read_recipe
from tnt_hf.recipes.train import main, prepare, train
from tnt_hf.recipes.trainer import RecipeTrainer


SIZES = "--hidden_size 32 --intermediate_size 48 --num_hidden_layers 2 --num_attention_heads 2 --initializer_range 0.1"
MEMORY = "--sliding_window 8 --memory_depth 1 --global_chunk_size 16 --local_chunk_sizes 4 8 --local_reset_interval 32"
NEW = f"--tokenizer_vocab_size 257 --max_position_embeddings 64 --learning_rate 1e-2 {SIZES}"
COMMON = "--sequence_length 48 --per_device_train_batch_size 4 --use_cpu --report_to none --save_strategy no"
COMMON += " --logging_steps 1 --disable_tqdm true --plots false --memory_logging_steps 0"

LORA = "--model teacher --inject.operator delta_rule --trainable lora"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text to learn, conversations, and a current directory of its own for everything the runs write."""
    folder = tmp_path_factory.mktemp("runs")
    for i in range(8):
        text = "\n".join(f"def value_{i}_{j}(x):\n    return x + {j}" for j in range(12))
        (folder / "text" / f"{i}.txt").parent.mkdir(exist_ok=True)
        (folder / "text" / f"{i}.txt").write_text(text)
    with (folder / "talk.jsonl").open("w") as file:
        for i in range(40):
            talk = [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": f"It is {i + 1}."}]
            file.write(json.dumps({"messages": talk}) + "\n")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(output: str, *parts: str, data: str = "text"):
    """A recipe trained to its end. Returns its losses, and its trainer with the model as it was trained."""
    arguments = " ".join([f"--output_dir {output} --dataset_name {data}", COMMON, *parts]).split()
    _, trainer, facts = prepare(arguments)
    trainer.fit(facts=facts)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.fixture(scope="module")
def stage1(folder):
    return run("stage1", f"--mode pretrain --model tnt --max_steps 20 {NEW} {MEMORY}")


@pytest.fixture(scope="module")
def teacher(folder):
    return run("teacher", f"--mode pretrain --model llama --max_steps 20 {NEW}")


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: x for path in sorted(Path(folder).glob("*.safetensors")) for name, x in load_file(path).items()}


def moved(before, after) -> set[str]:
    """Names of the tensors that differ; both folders hold the same ones."""
    first, second = tensors(before), tensors(after)
    assert first.keys() == second.keys()
    return {name for name in first if not torch.equal(first[name], second[name])}


def rows(seed: int = 3, length: int = 40):
    return torch.randint(1, 257, (2, length), generator=torch.Generator().manual_seed(seed))


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.eval()(input_ids=rows(), use_cache=False).logits


def falls(losses: list[float], by: float) -> bool:
    third = len(losses) // 3
    return sum(losses[-third:]) / third < sum(losses[:third]) / third - by


# --- pretrain, stage2, long -----------------------------------------------------------------------------------------


def test_pretrain_learns_everything_and_saves_what_it_learnt(stage1, folder):
    losses, trainer = stage1
    assert len(losses) == 20 and falls(losses, 0.5)
    again, found = AutoModelForCausalLM.from_pretrained("stage1", output_loading_info=True)
    assert type(again) is TNTForCausalLM and not any(found.values()) and again.config.use_cache
    assert torch.equal(logits(again), logits(trainer.model))
    _, fresh, _ = prepare(
        f"--output_dir x --dataset_name text --model tnt --max_steps 1 {COMMON} {NEW} {MEMORY}".split()
    )
    start = dict(fresh.model.named_parameters())
    assert not [name for name, x in again.named_parameters() if torch.equal(x, start[name])]
    tokenizer = AutoTokenizer.from_pretrained("stage1")
    assert len(tokenizer) == again.config.vocab_size == 257
    assert again.config.eos_token_id == tokenizer.eos_token_id == 0
    record = json.loads(Path("stage1/training.json").read_text())
    assert record["mode"] == "pretrain" and record["command"].startswith("tnt train --output_dir stage1")
    assert record["settings"]["model"]["model_config"]["local_chunk_sizes"] == [4, 8]
    assert record["settings"]["training"]["learning_rate"] == 0.01


def test_each_kind_of_parameter_has_its_rate(folder):
    rates = "--memory_learning_rate 2e-3 --gate_learning_rate 3e-3"
    arguments = f"--output_dir rates --dataset_name text --model tnt --max_steps 1 {COMMON} {NEW} {MEMORY} {rates}"
    _, trainer, _ = prepare(arguments.split())
    found = {group["kind"]: group["lr"] for group in trainer.groups}
    assert found == {"gate": 3e-3, "projection": 2e-3, "memory": 2e-3, "base": 1e-2}


def test_stage2_moves_only_local_memories_to_other_chunks(stage1):
    losses, trainer = run(
        "stage2", "--mode stage2 --model stage1 --trainable local_memories --local_chunk_sizes 1 2",
        "--max_steps 9 --learning_rate 3e-2",
    )  # fmt: skip
    changed = moved("stage1", "stage2")
    assert changed and all(".memory.memories." in name and ".memories.0." not in name for name in changed)
    learnable = {n for n in tensors("stage1") if ".memories.1." in n or ".memories.2." in n}
    assert changed == learnable
    again = AutoModelForCausalLM.from_pretrained("stage2")
    assert again.config.local_chunk_sizes == [1, 2]
    # the rates keep the chunk sizes they were trained with
    assert again.config.memory_train_chunk_sizes == [16, 4, 8]
    assert torch.equal(logits(again), logits(trainer.model))
    assert losses[0] < 5.0  # far below the log(257) = 5.5 that an untrained model has


def test_stage2_behind_closed_gates_is_told_that_nothing_will_move(stage1, capsys):
    """As of a conversion that never trained."""
    shutil.copytree("stage1", "closed")
    closed = {name: x.zero_() if name.endswith("gate.scale") else x for name, x in tensors("stage1").items()}
    save_file(closed, "closed/model.safetensors", metadata={"format": "pt"})
    for folder, told in (("closed", True), ("stage1", False)):
        options = f"--output_dir x --dataset_name text --mode stage2 --model {folder} --max_steps 1 {COMMON}".split()
        for trainable in ("local_memories", "all"):
            prepare([*options, "--trainable", trainable])
            said = capsys.readouterr().out
            assert (f"all gates of '{folder}' are closed" in said) is (told and trainable == "local_memories")


def test_stage2_of_everything_is_a_choice(stage1):
    run("stage2_all", "--mode stage2 --model stage1 --local_chunk_sizes 2 --max_steps 2")
    assert moved("stage1", "stage2_all") == set(tensors("stage1"))


def test_long_goes_on_with_longer_rows(stage1, folder):
    """Model and data by full paths, of which the record holds what means something elsewhere."""
    long = "--mode long --model stage1 --max_steps 2 --sequence_length 128 --per_device_train_batch_size 2"
    words = " ".join(COMMON.split()[4:])  # without the length and the batch of the other tests
    with pytest.raises(ValueError, match=r"sequence_length=128.*max_position_embeddings=64"):
        prepare(f"--output_dir long --dataset_name text {long} {words}".split())
    full = f"{long} {words} --max_position_embeddings 128".replace("--model ", f"--model {folder}/")
    _, trainer, facts = prepare(f"--output_dir {folder}/long --dataset_name {folder}/text {full}".split())
    trainer.fit(facts=facts)
    again = AutoModelForCausalLM.from_pretrained("long")
    assert again.config.max_position_embeddings == 128
    assert torch.equal(logits(again), logits(trainer.model)) and moved("stage1", "long")
    record = Path("long/training.json").read_text()
    assert str(folder) not in record and "--model stage1 " in json.loads(record)["command"]
    assert json.loads(record)["settings"]["model"]["model"] == "./stage1"


def test_a_run_of_so_many_tokens_over_a_stream(stage1):
    """400 tokens are 3 steps of 2 x 2 rows of 48; schedules apply on the way."""
    words = COMMON.replace("batch_size 4", "batch_size 2 --gradient_accumulation_steps 2")
    words += " --output_dir stream --dataset_name text --streaming --train_tokens 400 --model stage1"
    assert main([*words.split(), "--chunk_size_schedule", "{1: [2, 4]}", "--window_dropout", "0.5"]) == 0
    record = json.loads(Path("stream/training.json").read_text())
    assert record["steps"] == 3 and record["tokens_trained"] == 3 * 4 * 48 - 8  # the end of a pass fills up its row
    assert AutoModelForCausalLM.from_pretrained("stream").config.local_chunk_sizes == [2, 4]


# --- align, distill -------------------------------------------------------------------------------------------------

CONVERT = "--source teacher --convert.window 8 --convert.local_chunk_sizes [4] --learning_rate 1e-2"


def test_align_trains_the_memories_alone_and_the_loss_falls(teacher):
    losses, trainer = run("align", f"--mode align --trainable memory --max_steps 15 {CONVERT}")
    assert falls(losses, 0) and losses[-1] < 0.9 * losses[0]
    changed = moved("align/converted", "align")
    memory = {name for name in tensors("align") if ".memory." in name}
    assert changed == memory
    assert {n: x for n, x in tensors("align").items() if n not in memory}.keys() == tensors("teacher").keys()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("align")), logits(trainer.model))


def test_distill_through_lora_saves_one_merged_model(teacher):
    arguments = f"--mode distill --trainable lora --lora.r 2 --max_steps 15 {CONVERT}"
    losses, trainer = run("distill", arguments)
    assert falls(losses, 0)
    changed = moved("distill/converted", "distill")
    assert {name.split(".", 3)[3].split(".")[0] for name in changed} == {"self_attn", "memory"}
    assert {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in (0, 1) for x in "qkvo"} <= changed
    again, found = AutoModelForCausalLM.from_pretrained("distill", output_loading_info=True)
    assert type(again) is TNTForCausalLM and not any(found.values())
    assert not Path("distill/adapter_config.json").exists()
    assert torch.equal(logits(again), logits(trainer.model))


def test_the_teacher_of_a_converted_folder_is_its_own_base_with_full_attention(teacher):
    run("first", f"--mode align --trainable memory --max_steps 1 {CONVERT}")
    arguments = "--output_dir second --dataset_name text --mode distill --trainable memory --max_steps 1 --model"
    _, trainer, _ = prepare(f"{arguments} first/converted {COMMON}".split())
    source = LlamaForCausalLM.from_pretrained("teacher")
    assert not trainer.teacher.training and not any(p.requires_grad for p in trainer.teacher.parameters())
    assert torch.equal(logits(trainer.teacher), logits(source))
    assert trainer.teacher.config.memory_layer_indices == []  # it would be open after a training
    assert not torch.equal(logits(trainer.model), logits(source))  # it has a window


def test_a_conversion_is_made_once_and_made_anew_until_a_run_has_saved(teacher, capsys, monkeypatch):
    arguments = (
        f"--output_dir once --dataset_name text --mode distill --trainable memory --max_steps 1 {CONVERT} {COMMON}"
    )
    prepare(arguments.split())
    made = {path: path.stat().st_mtime_ns for path in Path("once/converted").iterdir()}
    assert "converting teacher" in capsys.readouterr().out
    prepare(arguments.split())
    assert "was converted before" in capsys.readouterr().out
    assert made == {path: path.stat().st_mtime_ns for path in Path("once/converted").iterdir()}
    other = [*arguments.split(), "--convert", "{keep_full_attention: [0]}"]
    Path("once/checkpoint-1").mkdir()
    Path("once/recipe.yaml").touch()
    for words in (other, [*arguments.split(), "--seed", "1"]):
        with pytest.raises(ValueError, match="once/converted is another conversion, the source or the arguments of"):
            convert_once(read_recipe(words).model, Path("once/converted"), read_recipe(words).training.seed, print)
    Path("once/checkpoint-1").rmdir()
    prepare(other)
    assert "converting teacher" in capsys.readouterr().out
    assert read_manifest("once/converted")["conversion"]["asked"]["keep_full_attention"] == [0]
    Path("moved").mkdir()
    shutil.copytree("teacher", "moved/teacher", ignore=shutil.ignore_patterns("runs", "checkpoint-*"))
    for _ in range(2):  # another checkpoint of the same name, and this one trained anew
        prepare(["moved/teacher" if word == "teacher" else word for word in other])
        assert "converting moved/teacher" in capsys.readouterr().out
        os.utime("moved/teacher/model.safetensors")
    Path("once/.converted.json").unlink()
    with pytest.raises(ValueError, match="once/converted is another conversion, no run made it; choose another"):
        prepare(other)
    with pytest.raises(ValueError, match=r"convert.windw=8: .* did you mean 'window'"):
        prepare([*arguments.split(), "--convert.windw", "8"])
    at = read_recipe(other).model, Path("twice/converted"), 0, print
    with monkeypatch.context() as patch, pytest.raises(OSError, match="text"):
        patch.setattr(
            converted, "convert_checkpoint", lambda *_, **__: (patch.undo(), convert_once(*at), open("text", "x"))
        )
        convert_once(*at)  # another run, begun as early, is faster, and its result stays its own
    assert convert_once(*at) and "was converted before" in capsys.readouterr().out
    Path("empty").mkdir()
    for output in ("refused", "empty"):
        with pytest.raises(ValueError, match="memory_depth=0: must be"):
            prepare([*arguments.replace("once", output).split(), "--convert.memory_depth", "0"])
    assert not Path("refused").exists() and not any(Path("empty").iterdir())


# --- sft ------------------------------------------------------------------------------------------------------------


def test_sft_saves_an_adapter_with_its_memory_and_its_schedule(teacher):
    losses, trainer = run(
        "sft",
        "--mode sft --model teacher --inject.operator delta_rule --inject.max_self_attn_length 8 --inject.weight 0",
        "--mag_schedule.mode ramp --mag_schedule.transition_step 4 --mag_schedule.final_weight 0.5",
        "--trainable lora --lora.r 2 --max_steps 9 --learning_rate 2e-2",
        data="talk.jsonl",
    )
    assert falls(losses, 0.05)
    weights = [entry["mag_weight"] for entry in trainer.state.log_history if "mag_weight" in entry]
    assert weights[:6] == [LiZACallback("ramp", final_weight=0.5, transition_step=4).weight_at(s) for s in range(1, 7)]
    adapter = json.loads(Path("sft/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(Path("teacher").resolve()), "or another folder's may be taken"
    again = load_injected("sft")
    assert torch.equal(logits(again), logits(trainer.model))
    base = again.get_base_model()
    assert float(base.model.layers[0].self_attn.memory.modules_to_save.default.weight) == 0.5
    wanted = LlamaForCausalLM.from_pretrained("teacher").state_dict()
    kept = [name for name, x in again.state_dict().items() if "lora" not in name and "memory" not in name]
    assert len(kept) == len(wanted)
    for name in kept:
        assert torch.equal(
            again.state_dict()[name], wanted[name.removeprefix("base_model.model.").replace("base_layer.", "")]
        )


def test_the_terminal_says_how_many_conversations_are_not_read_whole(folder, capsys):
    """Of 48 tokens, a byte each: three answers begin beyond them, two end beyond them."""
    sizes = [(1, 1)] * 40 + [(99, 1)] * 3 + [(1, 99)] * 2
    talks = [
        [{"role": "user", "content": "a" * asked}, {"role": "assistant", "content": "b" * answered}]
        for asked, answered in sizes
    ]
    words = f"--output_dir said --mode sft --model tnt --max_steps 1 {COMMON} {NEW} {MEMORY}"
    for name, kept in (("long", talks), ("short", talks[:40])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in kept))
        prepare(f"--dataset_name {name}.jsonl {words}".split())
    out = capsys.readouterr().out
    assert out.count("\neverything is written to said\n") == 2
    assert "long.jsonl: 3 documents are left out: no assistant token within sequence_length\n" in out
    assert "long.jsonl: 2 documents are cut after 48 tokens\n" in out
    assert "short.jsonl: " in out and out.count(" are left out") == out.count(" are cut") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["base", "teacher"])
def test_a_run_goes_on_with_the_weights_that_it_rests_on(teacher, kind):
    """Checkpoints of an adapter do not hold its base, and none holds a teacher."""
    shutil.copytree("teacher", f"rests_{kind}", ignore=shutil.ignore_patterns("checkpoint-*"))
    arguments = f"--mode sft --model rests_{kind} --inject.weight 0.3 --trainable lora --max_steps 1"
    if kind == "teacher":
        arguments = f"--mode distill --model teacher --inject.kind tnt --max_steps 1 --teacher rests_{kind}"
    data = "talk.jsonl" if kind == "base" else "text"
    saving = COMMON.replace("--save_strategy no", "--save_strategy steps")
    words = f"--output_dir on_{kind} --dataset_name {data} {saving} {arguments}".split()
    train(words)
    train(words)
    path = f"rests_{kind}/model.safetensors"
    save_file({name: 1.1 * x for name, x in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="(model|teacher): .*weights.*is not what it was when the run was begun"):
        train(words)


def test_sft_goes_on_from_its_adapter(teacher):
    arguments = "--mode sft --model teacher --inject.weight 0.3 --trainable lora --lora.r 2 --max_steps 1"
    run("adapter", arguments, data="talk.jsonl")
    _, trainer = run("adapter2", "--mode sft --model adapter --trainable lora --max_steps 1", data="talk.jsonl")
    before, after = (load_file(f"{name}/adapter_model.safetensors") for name in ("adapter", "adapter2"))
    assert before.keys() == after.keys() and all(not torch.equal(before[n], after[n]) for n in before if "lora_B" in n)
    assert torch.equal(logits(load_injected("adapter2")), logits(trainer.model))


@pytest.mark.long
def test_an_adapter_is_a_teacher_with_its_memory(teacher):
    run("speaker", "--mode sft --model teacher --inject.weight 0.3 --trainable lora --max_steps 1", data="talk.jsonl")
    arguments = "--mode distill --model teacher --inject.kind tnt --trainable lora --max_steps 1 --teacher speaker"
    _, trainer = run("distilled", arguments)
    assert torch.equal(logits(trainer.teacher), logits(load_injected("speaker")))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--inject.weight 0.9", "inject={'weight': 0.9}: 'speaker' has an injected memory already"),
        ("--lora.r 32", "lora.r=32: the adapter has 8 and continues with it"),
        ("--mode distill", "teacher=None: must be given for 'speaker', an adapter"),
    ],
)
def test_what_an_adapter_has_already_is_not_silently_kept(teacher, capsys, arguments, message):
    if not Path("speaker").exists():
        begun = "--mode sft --model teacher --inject.weight 0.3 --trainable lora --max_steps 1"
        run("speaker", begun, data="talk.jsonl")
    arguments = arguments if "--mode" in arguments else f"--mode sft {arguments}"
    words = f"{arguments} --model speaker --trainable lora --max_steps 1 --dataset_name talk.jsonl {COMMON}"
    assert main([*words.split(), "--output_dir", "refused"]) == 2
    assert message in capsys.readouterr().err


# --- the folder of a run --------------------------------------------------------------------------------------------


def test_the_resolved_recipe_repeats_the_run(stage1):
    _, trainer = stage1
    recipe = yaml.safe_load(Path("stage1/recipe.yaml").read_text()) if Path("stage1/recipe.yaml").exists() else None
    if recipe is None:  # `fit` alone does not claim the folder, `train` does
        train(f"--output_dir resolved --dataset_name text --model tnt --max_steps 2 {COMMON} {NEW} {MEMORY}".split())
        recipe = yaml.safe_load(Path("resolved/recipe.yaml").read_text())
    Path("again.yaml").write_text(yaml.safe_dump(recipe | {"output_dir": "repeated"}))
    assert main(["--config", "again.yaml"]) == 0
    assert not moved("resolved", "repeated")


def test_a_folder_of_something_else_is_left_alone(folder, capsys):
    arguments = f"--dataset_name text --model tnt --max_steps 1 {COMMON} {NEW} {MEMORY}".split()
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("all of it")
    assert main([*arguments, "--output_dir", "mine"]) == 2
    assert "output_dir='mine': holds files of something else" in capsys.readouterr().err
    assert [path.name for path in Path("mine").iterdir()] == ["thesis.txt"]
    assert main([*arguments, "--output_dir", "claimed"]) == 0
    weights = Path("claimed/model.safetensors").stat().st_mtime_ns
    arguments[arguments.index("--learning_rate") + 1] = "2e-2"
    assert main([*arguments, "--output_dir", "claimed"]) == 2
    error = capsys.readouterr().err
    assert "belongs to another run, learning_rate is 0.02 and was 0.01" in error and error.count("\n") == 1
    assert Path("claimed/model.safetensors").stat().st_mtime_ns == weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model nowhere/at-all", "nowhere/at-all"),
        (f"--model tnt {NEW} {MEMORY} --dataset_name none.txt", "none.txt"),
        ("--mode stage2 --model teacher", "mode='stage2' needs a TNT model"),
        ("--model teacher --hidden_size 8", "model_config.hidden_size=8: 'teacher' is not a TNT model"),
        ("--model teacher --trainable memory", "trainable='memory'"),
        ("--model teacher --trainable lora", "inject"),
        ("--model teacher --inject.operater delta_rule", "operater"),
        (f"--model tnt {NEW} {MEMORY} --vocab_size 100", "vocab_size=100"),
        ("--model teacher --dtype int8", "dtype='int8'"),
        (f"--model tnt {NEW} {MEMORY} --dtype bfloat16", "dtype='bfloat16': a new model starts in float32"),
        ("--mode distill --model teacher", "teacher=None"),
        (f"--model llama {NEW} --rope_parameters.rope_type yarn", "model_config.rope_parameters={'rope_type': 'yarn'"),
        (f"--model llama {NEW} --rope_parameters.rope_theta null", "model_config.rope_parameters.rope_theta=None: "),
        (f"--model llama {NEW} --rope_parameters.rope_theta -1", "model_config.rope_parameters.rope_theta=-1: "),
        (f"--model llama {NEW} --rms_norm_eps small", "model_config.rms_norm_eps='small': "),
        (f"--model llama {NEW} --vocab_size null", "model_config.vocab_size=None: "),
        (f"--model llama {NEW} --hidden_act none", "model_config.hidden_act='none': "),
        (f"--model llama {NEW} --num_key_value_heads 0", "model_config.num_key_value_heads=0: "),
        (f"--model llama {NEW} --pad_token_id 999", "model='llama': cannot be read, AssertionError: Padding_idx"),
        (f"--model tnt {NEW} {MEMORY} --rope_parameters.rope_type yarn", "TNTConfig.rope_parameters={'rope_type': "),
        (
            "--mode sft --model stage1 --dataset_name talk.jsonl --inject.operator delta_rule",
            "'stage1' is a TNT model, which has its memory; give --inject null, and --mag_schedule null unless",
        ),
        ("--model titan", "model='titan': (did you mean 'titans'?) "),
        (
            "--mode sft --model teacher --dataset_name talk.jsonl --mag_schedule.mode never",
            "mag_schedule={'mode': 'never'}: ",
        ),
        (f"{LORA} --lora.rank 3", "lora={'rank': 3}: "),
        (f"{LORA} --lora.r 1{'0' * 30}", "lora={'r': 1000000000000000000000000000000}: "),
        (f"{LORA} --lora.bias true", "lora={'bias': True}: "),
        (f"{LORA} --lora.bias x", "lora={'bias': 'x'}: "),
        (f"{LORA} --lora.rank_pattern null", "lora={'rank_pattern': None}: "),
        (f"{LORA} --lora.init_lora_weights 3", "lora={'init_lora_weights': 3}: "),
        (
            "--model teacher --dataset_name text --eval_dataset_name none.txt",
            "eval_dataset_name='none.txt', eval_split='train': ",
        ),
        ("--model runs/none", "model='runs/none': no such folder"),
        ("--mode distill --model teacher --teacher ./none", "teacher='./none': no such folder"),
        ("--model teacher --memory_learning_rate 1e-3", "memory_learning_rate=0.001: has no effect"),
        (f"--model transformer {NEW} --gate_learning_rate 1e-3", "gate_learning_rate=0.001: has no effect"),
        (f"--model tnt {NEW} {MEMORY} --chunk_size_schedule.1 4", "names step 1, but the run has 1 steps"),
        (f"--model tnt {NEW} {MEMORY} --chunk_size_schedule.0 7", "chunk_size_schedule: from step 0: "),
        (f"--model tnt {NEW} {MEMORY} --mag_schedule.mode ramp", "in a recipe give --mag_schedule null"),
        ("--model teacher --window_dropout 0.5", "window_dropout: no layer of LlamaForCausalLM has a sliding window"),
        ("--mode sft --model teacher --dataset_name text", "messages"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, message, teacher, stage1, capsys):
    assert main(f"{arguments} --output_dir broken --max_steps 1 {COMMON}".split() + (
        [] if "dataset_name" in arguments else ["--dataset_name", "text"])) == 2  # fmt: skip
    error = capsys.readouterr().err.splitlines()[-1]  # after the bars of loading
    assert error.startswith("tnt train: ") and message in error
    assert not Path("broken").exists() or not any(Path("broken").iterdir())


@pytest.mark.parametrize("left", [0, 5, 2000], ids=["empty", "half a header", "half the tensors"])
@pytest.mark.parametrize("field", ["model", "source", "teacher", "a model of ours"])
def test_damaged_weights_are_named_in_one_line(field, left, stage1, teacher, capsys):
    good = Path("stage1" if field == "a model of ours" else "teacher")
    bad = Path(f"bad-{good}-{left}")
    if not bad.exists():
        shutil.copytree(good, bad, ignore=shutil.ignore_patterns("runs", "checkpoint-*"))
        os.truncate(bad / "model.safetensors", left)
    arguments = {
        "model": f"--model {bad}",
        "a model of ours": f"--model {bad}",
        "source": f"--mode distill --source {bad}",
        "teacher": f"--mode distill --model teacher --teacher {bad}",
    }[field]
    assert main(f"{arguments} --output_dir broken --dataset_name text --max_steps 1 {COMMON}".split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tnt train: ") and str(bad) in error
    shutil.rmtree("broken", ignore_errors=True)


def test_a_model_that_lacks_a_tensor_is_refused(teacher, capsys):
    shutil.copytree("teacher", "lacking", ignore=shutil.ignore_patterns("runs", "checkpoint-*"))
    rest = {name: x for name, x in tensors("teacher").items() if "layers.1.self_attn.q_proj" not in name}
    save_file(rest, "lacking/model.safetensors", {"format": "pt"})
    assert main(f"--model lacking --output_dir broken --dataset_name text --max_steps 1 {COMMON}".split()) == 2
    assert "model='lacking': missing keys, the first is 'model.layers.1.self_attn.q_proj" in capsys.readouterr().err


def test_attention_that_is_not_installed_is_named(teacher, capsys):
    for start in ("--model teacher", f"--model llama {NEW}", f"--model tnt {NEW} {MEMORY}"):
        arguments = f"{start} --attn_implementation flash_attention_2 --output_dir broken --dataset_name text {COMMON}"
        assert main(arguments.split()) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("tnt train: ") and "flash_attention_2" in error


@pytest.fixture
def interruptible():
    """SIGINT as a program has it; workers of pytest-xdist ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(folder, capfd, interruptible):
    words = f"--dataset_name text --model tnt --max_steps 500 {NEW} {MEMORY} {COMMON} --output_dir stopped".split()
    words[words.index("--save_strategy") + 1] = "steps"
    words += ["--save_steps", "2", "--save_total_limit", "1"]

    def interrupt_after_a_checkpoint():
        while not list(Path("stopped").glob("checkpoint-*/complete.json")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_after_a_checkpoint, daemon=True)
    thread.start()
    assert main(words) == 130
    thread.join()
    error = capfd.readouterr().err.strip().splitlines()[-1]
    told = re.fullmatch(
        r"tnt train: stopped by the user after step (\d+); the same command goes on from checkpoint-(\d+)", error
    )
    assert told and int(told[2]) == 2 * (int(told[1]) // 2) > 0
    assert "Traceback" not in error and not Path("stopped/.tnt-train.lock").exists()
    assert latest_complete_checkpoint("stopped").name == f"checkpoint-{told[2]}"


def test_sigterm_is_one_line_and_the_same_command_goes_on(folder, capfd, monkeypatch):
    words = f"--dataset_name text --model tnt --max_steps 4 {NEW} {MEMORY} {COMMON} --output_dir terminated".split()
    step = RecipeTrainer.training_step

    def terminated(self, *inputs, **options):
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *inputs, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "training_step", terminated)
        assert main([*words, "--enable_jit_checkpoint", "true"]) == 143
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error == "tnt train: stopped by SIGTERM after step 3; the same command goes on from checkpoint-3"
    assert main(words) == 0
    assert json.loads(Path("terminated/training.json").read_text())["steps"] == 4


def test_a_run_that_has_ended_says_so(folder, capfd):
    words = f"--dataset_name text --model tnt --max_steps 2 {NEW} {MEMORY} {COMMON} --output_dir ended".split()
    words[words.index("--save_strategy") + 1] = "steps"
    said = []
    for _ in range(2):
        assert main(words) == 0
        said.append(capfd.readouterr().out.strip().splitlines()[-1])
    assert said[1] == f"no step was left to train; {said[0]}"


def test_a_model_of_other_shapes_is_refused(stage1, capsys):
    arguments = f"--mode long --model stage1 --intermediate_size 64 --dataset_name text --output_dir broken {COMMON}"
    assert main(arguments.split()) == 2
    assert "do not fit model_config={'intermediate_size': 64}" in capsys.readouterr().err


# --- other ways to start it -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accelerate_launch_starts_it(folder):
    arguments = f"--dataset_name text --model tnt --max_steps 1 {NEW} {MEMORY} {COMMON} --output_dir launched".split()
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--cpu", "--num_processes", "1"]
    done = subprocess.run([*command, "-m", "tnt_hf.recipes.train", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "results are in launched" in done.stdout and Path("launched/training.json").is_file()


@pytest.mark.slow
def test_torchrun_trains_on_two_processes(folder):
    """Two processes with half the batch each do what one process does, but for the order of float32 sums."""
    arguments = f"--dataset_name text --model tnt --max_steps 3 {NEW} {MEMORY} {COMMON}"
    two = arguments.replace("--per_device_train_batch_size 4", "--per_device_train_batch_size 2")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "tnt_hf.recipes.train", *two.split(), "--output_dir", "two"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("results are in two") == 1
    assert not Path("two/.tnt-train.lock").exists()
    train([*arguments.split(), "--output_dir", "one"])
    one, both = tensors("one"), tensors("two")
    assert one.keys() == both.keys()
    # Adam divides by the size of gradients that may be rounding noise: a step of the rate is the most that can differ
    assert all(float((one[name] - both[name]).abs().mean()) < 1e-4 for name in one)
