"""A run whose weights FSDP2 shards over two processes, killed and continued, beside the same run in one process.

Usage: fsdp2_ranks.py FOLDER. Leaves FOLDER/alone, FOLDER/sharded (begun, killed, continued) and FOLDER/whole (the same
without the kill); FOLDER/shards, the same with checkpoints in shards, and continued from one; FOLDER/thin, of three
processes, one of which has none of the two heads of a memory; and FOLDER/align_alone and FOLDER/align, whose loss is
of activations and not of the model's output.

Accelerate leaves FSDP out where there is no accelerator. Here it is told that CPUs are enough, as they are for torch.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import yaml
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from forks import in_a_child
from train_killer import Die, ranks, samples, trainer, was_killed

from tnt_hf import TNTForCausalLM
from tnt_hf.recipes.objectives import alignment


EXAMPLE = yaml.safe_load((Path(__file__).parents[1] / "recipes" / "accelerate_fsdp2.yaml").read_text())
# As `accelerate launch` tells them to the processes that it starts.
OPTIONS = {
    key.upper(): value if isinstance(value, str) else json.dumps(value)
    for key, value in EXAMPLE["fsdp_config"].items()
}
CALM = {"config": {"attention_dropout": 0.0, "tie_word_embeddings": True}}  # each process draws its own dropout


def shard_on_cpus() -> None:
    os.environ |= {"ACCELERATE_USE_FSDP": "true", **OPTIONS}
    begin = AcceleratorState.__init__

    def begin_sharded(self, *args, **options):
        begin(self, *args, **options)
        plugin = options.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
        if plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = begin_sharded


def sharded(folder: Path, **options) -> None:
    shard_on_cpus()
    run = trainer(folder, gradient_accumulation_steps=1, **CALM, **options)
    run.fit()
    assert type(run.model).__name__ == "FSDPTNTForCausalLM"  # otherwise this has shown nothing


def in_shards(folder: Path) -> None:
    OPTIONS["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    sharded(folder)


def align(folder: Path, begin=lambda: None, **options) -> None:
    begin()
    run = trainer(folder, max_steps=2, logging_steps=1, **CALM, **options)
    torch.manual_seed(1)
    run.objective, run.teacher = alignment, TNTForCausalLM(run.model.config).eval().requires_grad_(False)
    run.fit()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    assert in_a_child(lambda: trainer(folder / "alone", **CALM).fit()) == 0
    assert ranks(lambda rank: sharded(folder / "whole")) == [0, 0]
    assert any(map(was_killed, ranks(lambda rank: sharded(folder / "sharded", more=[Die(5, "step")] if rank else []))))
    assert ranks(lambda rank: sharded(folder / "sharded")) == [0, 0]
    assert ranks(lambda rank: in_shards(folder / "shards")) == [0, 0]
    shutil.rmtree(folder / "shards" / "checkpoint-8")
    (folder / "shards" / "model.safetensors").unlink()
    assert ranks(lambda rank: in_shards(folder / "shards")) == [0, 0]
    thin = {"data": samples(24), "per_device_eval_batch_size": 1, "max_steps": 2}
    assert ranks(lambda rank: sharded(folder / "thin", **thin), 3) == [0, 0, 0]
    assert in_a_child(lambda: align(folder / "align_alone")) == 0
    assert ranks(lambda rank: align(folder / "align", shard_on_cpus, gradient_accumulation_steps=1)) == [0, 0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
