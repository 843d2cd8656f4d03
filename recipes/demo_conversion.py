"""The demo's plan, its text and its source, a Llama that stands for the checkpoint you have.

Every student sees the same text in the same order, a tenth of what the source was trained on, through LoRA on
attention; the hybrids train their memories as well. So each hybrid has a control that differs in the memory alone.

Axis legend: N windows of text   T tokens of a window   V vocabulary
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tnt_hf.recipes.corpus import Corpus, is_held_out
from tnt_hf.recipes.data import train_tokenizer, windows
from tnt_hf.recipes.demo_jobs import Job, losses_by_position


PRECISIONS = ("float32", "bfloat16")
TRIALS = 4  # training steps of which the fastest counts


@dataclass(frozen=True)
class ConversionPlan:
    """How much of everything, and in which of [`PRECISIONS`] matrices are multiplied; lengths are tokens. `scaled`
    derives a shorter or longer run from the default one."""

    seed: int = 0
    precision: str = "float32"
    vocab_size: int = 1024
    length: int = 512
    teacher_steps: int = 700
    teacher_batch_size: int = 8
    share: float = 0.1  # of the teacher's tokens, for every student
    batch_size: int = 2
    window: int = 32
    lora_rank: int = 8
    stage2_share: float = 0.05  # of a student's tokens
    held_out_windows: int = 128
    probe_windows: int = 16  # of training text, on which the layer that keeps full attention is chosen
    verify_characters: int = 4_000
    evaluation_tokens: int = 8_192

    def scaled(self, share: float) -> "ConversionPlan":
        """The plan with `share` of the default's training."""
        counts = {"teacher_steps": max(1, round(self.teacher_steps * share))}
        counts["held_out_windows"] = max(8, round(self.held_out_windows * min(1, share)))
        counts["evaluation_tokens"] = max(2_048, round(self.evaluation_tokens * min(1, share)))
        return ConversionPlan(**{**asdict(self), **counts})

    @property
    def steps(self) -> int:
        """Steps of a student."""
        return max(1, round(self.teacher_steps * self.teacher_batch_size * self.share / self.batch_size))

    @property
    def stage2_steps(self) -> int:
        """Steps of stage 2."""
        return max(1, round(self.steps * self.stage2_share))


# What a linear memory lacks beside softmax is sharpness: scores (q . k)^2 bring back half as much again as q . k. It
# stays silent until its first chunk is full, all of which the window sees.
# Without the bound, memories of two of four layers diverged on this text, and distillation shut their gates.
MEMORY = {"memory_feature_map": "quadratic", "local_chunk_sizes": [], "memory_max_lr": 1.0, "memory_grad_bound": 1.0}
# A local memory beside it, for stage 2. Started again every 128 tokens it would cost a twentieth of what comes back.
LOCAL = {"local_chunk_sizes": [16], "local_reset_interval": 512}
# What the conversion is told, by the name of the result's folder: hybrids with a memory in every layer, and controls.
# In those with a full layer, the layer whose window costs most keeps full attention.
STUDENTS = {
    "hybrid": MEMORY | LOCAL,
    "hybrid-full-layer": MEMORY,
    "lora": {"memory_layers": []},
    "lora-full-layer": {"memory_layers": []},
}


def measured_on(held_out: dict[str, str]) -> dict[str, str]:
    """The half of the held-out files, by a hash of their names, on which no setting of this demo was chosen."""
    return {name: text for name, text in held_out.items() if not is_held_out("v" + name, 0.5)}


def teacher_config(plan: ConversionPlan, vocab_size: int):
    """The source: a Llama of about 0.9 million parameters with grouped queries and tied embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=plan.length,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


@dataclass(frozen=True)
class ConversionData:
    """What all jobs read: windows `[N, T]` of tokens, and training text to verify on."""

    tokenizer: Any
    train: Any
    held_out: Any
    text: str

    @classmethod
    def of(cls, plan: ConversionPlan, corpus: Corpus, held_out: dict[str, str]) -> "ConversionData":
        """From the corpus to train on and the texts to measure on."""
        tokenizer = train_tokenizer(corpus.train.values(), plan.vocab_size)
        train, _ = windows(corpus.train.values(), tokenizer, plan.length)
        rows, _ = windows(held_out.values(), tokenizer, plan.length)
        rows = rows[:: max(1, len(rows) // plan.held_out_windows)][: plan.held_out_windows]
        text = "".join(corpus.train.values())[: plan.verify_characters]
        return cls(tokenizer, train, rows, text)


# ----------------------------------------------------------------------------------------------------------- the jobs


def source_loss(model, rows, precision: str):
    """Next-token loss of windows `[N, T]`."""
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        return model(input_ids=rows, labels=rows, use_cache=False).loss


def faster_precision(plan: ConversionPlan) -> str:
    """In which of [`PRECISIONS`] this machine trains the source faster: bfloat16 may as well be the slower one."""
    import torch
    from transformers import LlamaForCausalLM

    from tnt_hf.recipes import blocked_attention

    kind = blocked_attention.register()
    model = LlamaForCausalLM._from_config(teacher_config(plan, plan.vocab_size), attn_implementation=kind).train()
    rows = torch.zeros(plan.teacher_batch_size, plan.length, dtype=torch.long)
    seconds = dict.fromkeys(PRECISIONS, math.inf)
    for _ in range(TRIALS):  # by turns, as the machine may be busy
        for precision in PRECISIONS:
            start = time.perf_counter()
            source_loss(model, rows, precision).backward()
            seconds[precision] = min(seconds[precision], time.perf_counter() - start)
    return min(PRECISIONS, key=seconds.get)


def train_source(
    plan: ConversionPlan, vocab_size: int, train, held_out, folder: Path, reports, threads: int = 2
) -> dict:
    """
    Trains the Llama on windows `[N, T]`, which it leaves in `folder`: Muon for matrices, AdamW for the rest.

    Args:
        train, held_out: token ids `[N, T]`, int64 arrays. threads: of torch; nothing else can run before the source.
    """
    import torch
    from transformers import LlamaForCausalLM

    from tnt_hf.recipes import blocked_attention
    from tnt_hf.recipes.float32_muon import Float32Muon

    job = Job("source", reports, threads)
    torch.manual_seed(plan.seed)
    config = teacher_config(plan, vocab_size)
    model = LlamaForCausalLM._from_config(config, attn_implementation=blocked_attention.register()).train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = Float32Muon if plan.precision == "float32" else torch.optim.Muon
    optimizers = [
        muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps, warmup, decay = plan.teacher_steps, min(50, plan.teacher_steps // 10), 0.35
    shape = lambda step: min(1, (step + 1) / (warmup + 1), (1 - step / steps) / decay + 0.02)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]
    losses = []
    with job.phase("train") as tell:
        for step, rows in enumerate(torch.from_numpy(train).split(plan.teacher_batch_size)[:steps], 1):
            loss = source_loss(model, rows, plan.precision)
            model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(rest, 1.0, error_if_nonfinite=True)
            for each in (*optimizers, *schedules):
                each.step()
            losses.append(loss.item())
            tell(step, steps, losses[-1])
    with job.phase("evaluate"):
        measured = losses_by_position(model, torch.from_numpy(held_out)).numpy()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokens = steps * plan.teacher_batch_size * plan.length
    job.say(
        f"source: a Llama of {model.num_parameters():,} parameters, trained on {tokens:,} tokens, has a held-out"
        f" perplexity of {math.exp(measured.mean()):.2f}"
    )
    return {
        "parameters": model.num_parameters(),
        "train_tokens": tokens,
        "config": model.config.to_diff_dict(),
        "seconds": job.seconds,
        "losses": losses,
        "held_out": measured,
    }
