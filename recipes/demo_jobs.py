"""The models of the text and recall parts and their four trainings, each of which runs in a process of its own.

Axis legend: N windows or samples   T tokens of a window   V vocabulary
"""

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tnt_hf.recipes.data import IGNORED, Recall


@dataclass(frozen=True)
class Plan:
    """How much of everything. `scaled` derives a shorter or longer run from the default one; lengths are tokens."""

    seed: int = 0
    vocab_size: int = 512
    length: int = 512
    batch_size: int = 2
    stage1_steps: int = 750
    stage2_steps: int = 50
    text_lr: float = 3e-3
    stage2_lr: float = 1e-3
    held_out_windows: int = 64
    recall_steps: int = 500
    recall_batch_size: int = 32
    recall_length: int = 128
    recall_lr: float = 3e-3
    recall_samples: int = 512
    short_share: float = (
        0.3  # of the recall steps at half the length: short first is what makes the long ones learnable
    )

    def scaled(self, budget: int) -> "Plan":
        """The plan with `budget` steps in stage 1 and everything else in proportion."""
        if budget < 1:
            raise ValueError(f"--budget {budget}: must be at least 1 step")
        share = budget / self.stage1_steps
        counts = {}
        for name in ("stage1_steps", "stage2_steps", "recall_steps"):
            counts[name] = max(1, round(getattr(self, name) * share))
        for name in ("held_out_windows", "recall_samples"):
            counts[name] = max(8, round(getattr(self, name) * min(1, share)))
        return Plan(**{**asdict(self), **counts})

    @property
    def text_steps(self) -> int:
        """Steps of the twin: both stages."""
        return self.stage1_steps + self.stage2_steps


# ------------------------------------------------------------------------------------------------------------- models


def text_config(plan: Plan, vocab_size: int, memory: bool):
    """The language model: two layers with a window of 16 tokens, a global and a local memory.

    The values below were chosen in short runs on this corpus. What mattered most are the size of the initial weights,
    1/sqrt(hidden_size), as the smaller default learns too slowly for so few steps, and a memory that joins attention
    at 0.3 of its size.
    """
    from tnt_hf import TNTConfig

    return TNTConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=672,
        num_hidden_layers=2,
        num_attention_heads=4,
        sliding_window=16,
        max_position_embeddings=plan.length,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=1 / 16,
        memory_layers=None if memory else [],
        memory_depth=1,
        memory_gate_init=0.3,
        global_chunk_size=32,
        local_chunk_sizes=[8],
        local_reset_interval=128,
    )


def recall_config(plan: Plan, vocab_size: int, memory: bool):
    """The recall model: two layers with a window of 16 tokens, so that attention alone reaches 31 tokens back."""
    from tnt_hf import TNTConfig

    return TNTConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        sliding_window=16,
        max_position_embeddings=plan.recall_length,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
        memory_layers=None if memory else [],
        memory_depth=1,
        global_chunk_size=32,
        local_chunk_sizes=[8],
        local_reset_interval=64,
    )


def build(config_of, plan: Plan, vocab_size: int, memory: bool):
    """A model in training mode. With and without memories the backbone starts from the same weights."""
    import torch

    from tnt_hf import TNTForCausalLM

    torch.manual_seed(plan.seed)
    model = TNTForCausalLM(config_of(plan, vocab_size, memory=True))
    if not memory:
        twin = TNTForCausalLM(config_of(plan, vocab_size, memory=False))
        twin.load_state_dict({name: x for name, x in model.state_dict().items() if name in twin.state_dict()})
        model = twin
    return model.train()


# ------------------------------------------------------------------------------------------- training and evaluation


def fit(model, samples: list[dict], batch_size: int, lr: float, plan: Plan, tell) -> list[float]:
    """One pass over `samples` in their order. Returns the loss of every step."""
    from tnt_hf.recipes.training import train_in_order

    warmup = max(1, min(60, len(samples) // batch_size // 10))
    changes = {"learning_rate": lr, "weight_decay": 0.1, "warmup_steps": warmup}
    return train_in_order(model, samples, batch_size, plan.seed, tell, **changes)


def losses_by_position(model, ids):
    """Negative log-likelihood `[N, T - 1]` of every token of `ids` `[N, T]` but the first."""
    import torch
    import torch.nn.functional as F

    model.eval()
    with torch.inference_mode():
        parts = []
        for part in ids.split(8):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            parts.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return torch.cat(parts)


def recall_hits(model, samples: dict):
    """Whether each scored token is predicted exactly, and the distance it is recalled over: two vectors."""
    import torch

    model.eval()
    with torch.inference_mode():
        ids = samples["input_ids"]
        best = torch.cat([model(input_ids=part, use_cache=False).logits[:, :-1].argmax(-1) for part in ids.split(64)])
    labels, distance = samples["labels"][:, 1:], samples["distance"][:, 1:]
    scored = labels != IGNORED
    return (best == labels)[scored], distance[scored]


# ------------------------------------------------------------------------------ the jobs, each a process of its own


def shuffled(train, count: int, seed: int):
    """`count` windows `[count, T]` in a random order that `seed` fixes, every one once before any comes again."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(len(train), generator=generator) for _ in range(-(-count // len(train)))]
    return train[torch.cat(rounds)[:count]]


class Job:
    """What a job has to report: progress while it runs, and seconds per phase in `seconds`."""

    def __init__(self, name: str, reports):
        import torch
        from transformers.utils import logging

        torch.set_num_threads(1)  # jobs share the cores, and results do not depend on how many there are
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.name, self.reports, self.seconds = name, reports, {}

    @contextmanager
    def phase(self, name: str):
        """Times a phase; yields the function that reports its progress as (step, steps, loss)."""
        start = time.perf_counter()
        yield lambda step, steps, loss: self.reports.put((f"{self.name}, {name}", step, steps, loss))
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def train_text(memory: bool, plan: Plan, vocab_size: int, train, held_out, output: Path, reports) -> dict:
    """Trains the language model on windows `[N, T]`, with memories in two stages, which it leaves in `output`."""
    import torch

    job = Job("text, TNT" if memory else "text, window only", reports)
    samples = [{"input_ids": row, "labels": row} for row in torch.from_numpy(train)]
    held_out = torch.from_numpy(held_out)
    model = build(text_config, plan, vocab_size, memory)
    result = {"parameters": model.num_parameters(), "config": model.config.to_diff_dict(), "seconds": job.seconds}

    def evaluate(name: str):
        with job.phase(f"evaluate {name}"):
            result.setdefault("held_out", {})[name] = losses_by_position(model, held_out).numpy()

    def train_on(name: str, part: list[dict], lr: float):
        with job.phase(name) as tell:
            result.setdefault("losses", []).extend(fit(model, part, plan.batch_size, lr, plan, tell))

    if not memory:
        train_on("train", samples, plan.text_lr)
        evaluate("window only")
        return result

    cut = plan.stage1_steps * plan.batch_size
    train_on("stage 1", samples[:cut], plan.text_lr)
    evaluate("stage 1")
    model.set_local_chunk_sizes([1])
    evaluate("stage 1 at C_L = 1")
    result["stage2_parameters"] = model.freeze_for_stage2()
    train_on("stage 2", samples[cut:], plan.stage2_lr)
    evaluate("stage 2")
    model.save_pretrained(output)
    result["probe"] = probe(model, held_out)
    return result


def probe(model, held_out) -> list:
    """What a reloaded model must repeat exactly: logits `[2, T, V]` and a greedy continuation, as arrays."""
    import torch

    model.eval()
    with torch.inference_mode():
        logits = model(input_ids=held_out[:2], use_cache=False).logits
        tokens = model.generate(held_out[:1, :40], max_new_tokens=40, do_sample=False, pad_token_id=0)
    return [logits.numpy(), tokens.numpy()]


def train_recall(memory: bool, plan: Plan, reports) -> dict:
    """Trains the recall model, first on short samples, and measures accuracy by distance."""
    job = Job("recall, TNT" if memory else "recall, window only", reports)
    task = Recall()
    model = build(recall_config, plan, task.vocab_size, memory)
    short = round(plan.recall_steps * plan.short_share)
    samples = []
    for steps, length, seed in (
        (short, plan.recall_length // 2, plan.seed + 1),
        (plan.recall_steps - short, plan.recall_length, plan.seed + 2),
    ):
        if steps:
            made = task.samples(steps * plan.recall_batch_size, length, length // 8, seed)
            samples += [{"input_ids": x, "labels": y} for x, y in zip(made["input_ids"], made["labels"])]
    with job.phase("train") as tell:
        losses = fit(model, samples, plan.recall_batch_size, plan.recall_lr, plan, tell)
    with job.phase("evaluate"):
        fresh = task.samples(plan.recall_samples, plan.recall_length, plan.recall_length // 8, plan.seed + 3)
        hit, distance = recall_hits(model, fresh)
    reach = model.config.num_hidden_layers * (model.config.sliding_window - 1)
    return {
        "parameters": model.num_parameters(),
        "config": model.config.to_diff_dict(),
        "seconds": job.seconds,
        "losses": losses,
        "chance": task.chance,
        "window": model.config.sliding_window,
        "reach": reach,  # tokens that attention alone passes on through all layers
        "hit": hit.numpy(),
        "distance": distance.numpy(),
    }
