"""Several processes: weights that FSDP2 shards, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_hosts import tiny_host
from train_killer import log_of, trainer
from transformers import AutoModelForCausalLM

from tnt_hf.recipes.run_folder import LOCK, sole_run


def test_sharding_that_accelerate_leaves_out_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="distributed_type=FSDP: accelerate leaves it out on 1 x cpu"):
        trainer(tmp_path)


@pytest.mark.slow
def test_fsdp2_trains_as_one_process_does_and_goes_on_after_a_kill(tmp_path):
    command = [sys.executable, Path(__file__).with_name("fsdp2_ranks.py"), tmp_path]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, whole, killed = (tmp_path / name for name in ("alone", "whole", "sharded"))
    for key in ("loss", "eval_loss"):
        one, two = ([entry[key] for entry in log_of(run) if key in entry] for run in (alone, whole))
        # The same sums in another order: float32 rounding of a loss near 4, which the steps carry on.
        assert len(one) == len(two) and all(abs(a - b) < 2e-5 for a, b in zip(one, two)), (one, two)
    assert log_of(whole) == log_of(killed)
    assert (whole / "model.safetensors").read_bytes() == (killed / "model.safetensors").read_bytes()
    assert not (tmp_path / "shards" / "checkpoint-8" / "model.safetensors").exists()
    assert (tmp_path / "shards" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert load_file(alone / "model.safetensors").keys() == load_file(whole / "model.safetensors").keys()

    one, two = (log_of(tmp_path / run) for run in ("align_alone", "align"))
    for key in ("loss", "grad_norm"):
        pairs = [(a[key], b[key]) for a, b in zip(one, two, strict=True) if key in a]
        assert pairs and all(a > 0 and abs(a - b) < 1e-4 * a for a, b in pairs), (key, pairs)

    code, other = ({path.name for path in run.glob("*.py")} for run in (alone, whole))
    assert code == other and "modeling_tnt.py" in code
    assert (alone / "config.json").read_text() == (whole / "config.json").read_text()
    ids = torch.arange(1, 25)[None]
    loaded = AutoModelForCausalLM.from_pretrained(whole)
    again = AutoModelForCausalLM.from_pretrained(whole / "checkpoint-8")
    assert torch.equal(loaded(ids).logits, again(ids).logits)


RUN = """
--config tnt_debug/stage1 --max_steps 2 --warmup_steps 0 --hidden_size 32 --intermediate_size 48
--num_attention_heads 2 --tokenizer_vocab_size 257 --sequence_length 32 --max_position_embeddings 32
--per_device_train_batch_size 2 --dataset_name text --eval_share 0 --use_cpu --plots false --report_to none
--output_dir run
""".split()


@pytest.mark.slow
def test_a_second_run_of_two_processes_is_refused_as_one_of_one_is(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a memory reads and writes; " * 40)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tnt_hf.recipes.train", *RUN]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with sole_run(tmp_path / "run"):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode != 0 and "tnt train: output_dir='run': another run is writing to it" in done.stderr
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "results are in run" in done.stdout, done.stderr[-3000:]


TENSOR_PARALLEL = """
import sys, torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from tnt_hf.conversion import LiZAConfig, TNTInjectionConfig, inject

ids = torch.arange(1, 25)[None]
load, split = AutoModelForCausalLM.from_pretrained, DistributedConfig(tp_plan="auto")
alone = inject(load(sys.argv[1]), LiZAConfig(weight=0.5))(ids).logits
model = load(sys.argv[1], distributed_config=split)
for projections in ("own", "shared"):
    try:
        inject(model, TNTInjectionConfig(memory_projections=projections, memory_gate="multiply"))
    except ValueError as error:
        assert "tensor parallelism (tp_plan) splits its heads over 2 processes" in str(error)
    else:
        sys.exit("not refused")
logits = inject(model, LiZAConfig(weight=0.5))(ids).logits
torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)  # sums over two processes, rounded in float32
"""


def two_processes(script: Path, text: str, *arguments) -> None:
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_tensor_parallelism_splits_the_heads_of_liza_and_is_refused_for_those_of_tnt(tmp_path):
    tiny_host("llama").save_pretrained(tmp_path / "llama")
    two_processes(tmp_path / "split.py", TENSOR_PARALLEL, tmp_path / "llama")


FULLY_SHARDED = """
import sys, torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import tnt_hf

ids = torch.arange(1, 41)[None]
for folder in sys.argv[1:]:
    alone = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    assert isinstance(model.model.layers[0], FSDPModule)
    model.gradient_checkpointing_enable()
    both = [(m, torch.optim.SGD(m.train().parameters(), lr=0.1)) for m in (alone, model)]
    for _ in range(2):
        losses = []
        for m, optimizer in both:
            (loss := m(ids, labels=ids, use_cache=False).loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=0, atol=0)
    # Last: after a forward without gradients FSDP2 does not gather the final norm and the head anew, a Llama's either.
    assert torch.equal(*[m.eval().generate(ids[:, :9], max_new_tokens=5, do_sample=False) for m in (alone, model)])
    model.save_pretrained(folder + "-saved")
    torch.distributed.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder + "-saved").state_dict()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(saved[name], tensor), name
"""


@pytest.mark.long
def test_a_model_in_half_precision_is_sharded_as_it_is_loaded(tmp_path):
    """FSDP2 of transformers, one group of tensors per dtype: memories are float32, and so are parts of their gates."""
    folders = [tmp_path / gate for gate in ("add", "mix")]
    for folder in folders:
        tiny_model(torch.bfloat16, memory_gate=folder.name, tie_word_embeddings=folder.name == "mix").save_pretrained(
            folder
        )
    two_processes(tmp_path / "sharded.py", FULLY_SHARDED, *folders)
