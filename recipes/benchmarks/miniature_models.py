"""The models of the miniature study: one table of variants, made equal in parameters, and the training of one of them.

Everything is the paper's setting divided by about a hundred: 16 tokens of window, global chunks of 32, local memories
that start anew every 128 tokens, rows of 1024. Of one seed, all variants see the same rows in the same order.

Axis legend: N rows   T tokens of a row
"""

import copy
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer
from transformers.utils import logging

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.recipes import blocked_attention
from tnt_hf.recipes.benchmarks.train_models import parameters_of
from tnt_hf.recipes.benchmarks.training import train_in_order
from tnt_hf.recipes.corpus import Corpus
from tnt_hf.recipes.data import train_tokenizer, windows
from tnt_hf.recipes.demo_conversion import measured_on
from tnt_hf.recipes.demo_jobs import losses_by_position, shuffled
from tnt_hf.recipes.optimization import parameter_groups


REFERENCE = "TNT {8}"
INNER = {"memory_momentum": True, "memory_decay": True}
TITANS = {"global_chunk_size": 8, "global_read": "current", "local_chunk_sizes": []}
PLAIN_TITANS = "Titans C=8, no momentum or forgetting"
# In the order in which they are trained: what the study is about comes first.
VARIANTS: dict[str, dict[str, Any]] = {
    "sliding window only": {"memory_layers": []},
    "transformer": {"memory_layers": [], "sliding_window": None},
    "gated transformer": {"memory_layers": [], "sliding_window": None, "attention_output_gate": True},
    REFERENCE: {"local_chunk_sizes": [8]},
    PLAIN_TITANS: TITANS,
    "TNT {8}, no global memory": {"local_chunk_sizes": [8], "global_chunk_size": None},
    "TNT {8}, no Q-K projection": {"local_chunk_sizes": [8], "qk_projection": "none"},
    "TNT {8,16}": {"local_chunk_sizes": [8, 16]},
    "TNT {4,8,16,32}": {"local_chunk_sizes": [4, 8, 16, 32]},
    "TNT {8}, linear memory": {"local_chunk_sizes": [8], "memory_depth": 1},
    "TNT {8}, nothing written": {"local_chunk_sizes": [8], "memory_max_lr": 1e-9},  # what else the branch is good for
    "Titans C=8": TITANS | INNER,
    "TNT {8}, momentum and forgetting": {"local_chunk_sizes": [8]} | INNER,
    "TNT {8,16}, no Q-K projection": {"local_chunk_sizes": [8, 16], "qk_projection": "none"},
}
# Continued for 5% more tokens, three times from the same weights. Stage 2 halves the local chunks.
CONTINUED = (REFERENCE, "TNT {4,8,16,32}")
STAGE1, SWITCHED, STAGE2, STAGE2_ALL = "stage 1 continued", "chunks halved", "stage 2", "stage 2, all weights"
CONTINUATIONS = (STAGE1, SWITCHED, STAGE2, STAGE2_ALL)


@dataclass(frozen=True)
class Plan:
    """How much of everything; lengths are tokens. `scaled` derives a shorter or longer run."""

    vocab_size: int = 512
    length: int = 1024
    batch_size: int = 2
    steps: int = 250
    hidden_size: int = 64
    intermediate_size: int = 192  # of the variant with most parameters; all others get wider
    layers: int = 2
    heads: int = 2
    learning_rate: float = 1e-2
    stage2_learning_rate: float = 1e-3  # where the cosine of stage 1 ends
    held_out_rows: int = 48
    grad_bound: float | None = 1.0  # of the memory's inner gradient, as in the recipes; without it runs end in NaN

    def scaled(self, share: float) -> "Plan":
        """The plan with `share` of the default's training."""
        if not share > 0:
            raise ValueError(f"--share {share}: must be positive")
        rows = max(8, round(self.held_out_rows * min(1, share)))
        return Plan(**asdict(self) | {"steps": max(2, round(self.steps * share)), "held_out_rows": rows})

    @property
    def stage2_steps(self) -> int:
        """Steps on top: 5%."""
        return max(1, round(0.05 * self.steps))

    @property
    def row_count(self) -> int:
        """Rows that a run reads."""
        return (self.steps + self.stage2_steps) * self.batch_size


def config_of(name: str, plan: Plan, intermediate_size: int | None = None) -> TNTConfig:
    """The configuration of a variant. Sizes of initial weights and of the memory's gate were chosen for the demo on
    other files of this corpus; they and the rate are the same for all."""
    fields = {
        "vocab_size": plan.vocab_size,
        "hidden_size": plan.hidden_size,
        "intermediate_size": intermediate_size or plan.intermediate_size,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "sliding_window": 16,
        "max_position_embeddings": plan.length,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": plan.hidden_size**-0.5,
        "memory_gate_init": 0.3,
        "global_chunk_size": 32,
        "local_reset_interval": 128,
        "memory_grad_bound": plan.grad_bound,
    }
    return TNTConfig(**fields | VARIANTS[name])


def equal_configs(plan: Plan) -> dict[str, TNTConfig]:
    """All variants, their MLPs widened until they have as many parameters as the largest one."""
    counts = {name: parameters_of(config_of(name, plan)) for name in VARIANTS}
    largest, per_channel = max(counts.values()), 3 * plan.hidden_size * plan.layers
    return {
        name: config_of(name, plan, plan.intermediate_size + round((largest - count) / per_channel))
        for name, count in counts.items()
    }


@dataclass(frozen=True)
class Rows:
    """Training rows `[N, T]`, and rows of the held-out files on which nothing was ever chosen."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, plan: Plan, corpus: Corpus) -> "Rows":
        """Tokenised by a byte-level BPE of the training text."""
        tokenizer = train_tokenizer(corpus.train.values(), plan.vocab_size)
        train, _ = windows(corpus.train.values(), tokenizer, plan.length)
        rows, _ = windows(measured_on(corpus.held_out).values(), tokenizer, plan.length)
        return cls(train, rows[:: max(1, len(rows) // plan.held_out_rows)][: plan.held_out_rows])


def build(config: TNTConfig, seed: int) -> TNTForCausalLM:
    """A model in training mode, with the attention that is fastest here."""
    torch.manual_seed(seed)
    return TNTForCausalLM._from_config(config, attn_implementation=blocked_attention.register()).train()


def train(model, rows: Tensor, rate: float, plan: Plan, seed: int, tell, warmup: float = 0.1) -> list[float]:
    """One pass over `rows`, AdamW with cosine decay as in the paper. Returns the loss of every step."""

    def trainer(model, arguments, **keywords):
        groups = parameter_groups(model, rate, weight_decay=0.1)
        return Trainer(model, arguments, optimizers=(torch.optim.AdamW(groups, betas=(0.9, 0.95)), None), **keywords)

    samples = [{"input_ids": row, "labels": row} for row in rows]
    steps = round(warmup * len(rows) / plan.batch_size)
    return train_in_order(model, samples, plan.batch_size, seed, tell, trainer, warmup_steps=steps, bf16=True)


def run(name: str, seed: int, plan: Plan, rows: Rows, tell) -> dict:
    """
    Trains one variant and measures it, with all its continuations.

    Args:
        tell: called with (step, steps, loss).

    Returns:
        `parameters`, `config`, `seconds` (wall and processor), `losses` (means of ten steps), and per row of the
        table its `tokens`, `loss` and `loss_by_position` (nats, means of 32 positions). A training that ends in no
        number has `diverged` instead of what was not measured.
    """
    logging.set_verbosity_error()
    config = equal_configs(plan)[name]
    model, start = build(config, seed), (time.perf_counter(), time.process_time())
    seen = shuffled(rows.train, plan.row_count, seed)
    cut, per_row = plan.steps * plan.batch_size, plan.length
    result = {"parameters": model.num_parameters(), "config": config.to_diff_dict(), "rows": {}}

    def measure(row: str, tokens: int):
        losses = losses_by_position(model, rows.held_out)
        by_position = [part.mean().item() for part in losses.double().split(32, 1)]
        result["rows"][row] = {
            "tokens": tokens, "loss": losses.double().mean().item(), "loss_by_position": by_position
        }  # fmt: skip
        model.train()

    try:
        losses = train(model, seen[:cut], plan.learning_rate, plan, seed, tell)
        result["losses"] = [sum(losses[i : i + 10]) / len(losses[i : i + 10]) for i in range(0, len(losses), 10)]
        measure(name, cut * per_row)
        if name in CONTINUED:
            weights, sizes = copy.deepcopy(model.state_dict()), config.local_chunk_sizes
            more = partial(train, model, seen[cut:], plan.stage2_learning_rate, plan, seed, tell)
            for kind in CONTINUATIONS:
                model.load_state_dict(weights)
                model.requires_grad_(True)
                model.set_local_chunk_sizes(sizes if kind == STAGE1 else [size // 2 for size in sizes])
                if kind == STAGE2:
                    result["stage2_parameters"] = model.freeze_for_stage2()
                if kind != SWITCHED:
                    more()
                measure(f"{name}, {kind}", (cut if kind == SWITCHED else len(seen)) * per_row)
    except FloatingPointError as error:
        result["diverged"] = str(error)
    result["seconds"] = {"wall": time.perf_counter() - start[0], "cpu": time.process_time() - start[1]}
    return result
