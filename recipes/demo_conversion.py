"""The conversion part of the demo: a Llama is trained, converted, verified, and distilled back to what it was.

Every student sees the same text in the same order, a tenth of what the source was trained on, through LoRA on
attention; the hybrids train their memories as well. So each hybrid has a control that differs in the memory alone.

Axis legend: N windows of text   T tokens of a window   V vocabulary
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tnt_hf.recipes.data import Corpus, is_held_out, train_tokenizer, windows
from tnt_hf.recipes.demo_jobs import Job, losses_by_position, shuffled


@dataclass(frozen=True)
class ConversionPlan:
    """How much of everything; lengths are tokens. `scaled` derives a shorter or longer run from the default one."""

    seed: int = 0
    vocab_size: int = 1024
    length: int = 512
    teacher_steps: int = 1200
    teacher_batch_size: int = 8
    share: float = 0.1  # of the teacher's tokens, for every student
    batch_size: int = 2
    window: int = 32
    lora_rank: int = 8
    held_out_windows: int = 128
    probe_characters: int = 20_000  # of training text, on which the layer that keeps full attention is chosen
    verify_characters: int = 4_000

    def scaled(self, share: float) -> "ConversionPlan":
        """The plan with `share` of the default's training."""
        counts = {"teacher_steps": max(1, round(self.teacher_steps * share))}
        counts["held_out_windows"] = max(8, round(self.held_out_windows * min(1, share)))
        return ConversionPlan(**{**asdict(self), **counts})

    @property
    def steps(self) -> int:
        """Steps of a student."""
        return max(1, round(self.teacher_steps * self.teacher_batch_size * self.share / self.batch_size))


# What a linear memory lacks beside softmax is sharpness: scores (q . k)^2 bring back half as much again as q . k. It
# stays silent until its first chunk is full, all of which the window sees; a local memory added noise there, and work.
MEMORY = {"memory_feature_map": "quadratic", "local_chunk_sizes": [], "memory_max_lr": 1.0}
# What the conversion is told, by the name of the result.
HYBRIDS = {
    "hybrid": MEMORY,
    "hybrid, one full layer": {**MEMORY, "keep_full_attention": "auto:1"},
}
CONTROLS = {
    "window + LoRA": {"memory_layers": []},
    "one full layer + LoRA": {"memory_layers": [], "keep_full_attention": "auto:1"},
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


# ----------------------------------------------------------------------------------------------------------- the jobs


def train_source(plan: ConversionPlan, vocab_size: int, train, held_out, folder: Path, reports) -> dict:
    """Trains the Llama on windows `[N, T]`, which it leaves in `folder`: Muon for matrices, AdamW for the rest."""
    import torch
    from transformers import LlamaForCausalLM

    from tnt_hf.recipes import blocked_attention

    job = Job("conversion, source", reports)
    torch.manual_seed(plan.seed)
    config = teacher_config(plan, vocab_size)
    model = LlamaForCausalLM._from_config(config, attn_implementation=blocked_attention.register()).train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01, momentum=0.95, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps, warmup, decay = plan.teacher_steps, min(50, plan.teacher_steps // 10), 0.35
    shape = lambda step: min(1, (step + 1) / (warmup + 1), (1 - step / steps) / decay + 0.02)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, shape) for optimizer in optimizers]
    losses = []
    with job.phase("train") as tell:
        for step, rows in enumerate(torch.from_numpy(train).split(plan.teacher_batch_size)[:steps], 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=rows, labels=rows, use_cache=False).loss
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
    return {
        "parameters": model.num_parameters(),
        "train_tokens": steps * plan.teacher_batch_size * plan.length,
        "config": model.config.to_diff_dict(),
        "seconds": job.seconds,
        "losses": losses,
        "held_out": measured,
    }


def train_student(
    name: str, changes: dict, plan: ConversionPlan, source: Path, train, held_out, text: str, folder: Path, reports
) -> dict:
    """Converts `source` with `changes`, verifies the result, distils it on windows `[N, T]` and saves it merged."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    from tnt_hf import TNTForCausalLM
    from tnt_hf.conversion import convert_checkpoint, verify_conversion
    from tnt_hf.recipes import blocked_attention
    from tnt_hf.recipes.distillation import distil, with_lora

    job = Job(f"conversion, {name}", reports)
    held_out = torch.from_numpy(held_out)
    kind = blocked_attention.register()
    with TemporaryDirectory() as scratch:
        converted = Path(scratch, "converted")
        with job.phase("convert and verify"):
            settings = {"window": plan.window, "seed": plan.seed, "progress": False, **changes}
            probe = text[: plan.probe_characters] if "keep_full_attention" in changes else None
            convert_checkpoint(source, converted, probe=probe, **settings)
            report = verify_conversion(source, converted, text=text[: plan.verify_characters], progress=False)
        torch.manual_seed(plan.seed)  # of LoRA
        model = TNTForCausalLM.from_pretrained(converted, attn_implementation=kind)
        teacher = LlamaForCausalLM.from_pretrained(source, attn_implementation=kind)
        with job.phase("evaluate"):
            before = losses_by_position(model, held_out).numpy()
        student = with_lora(model, plan.lora_rank)
        trainable, _ = student.get_nb_trainable_parameters()
        with job.phase("distil") as tell:
            rows = torch.from_numpy(train)[: plan.steps * plan.batch_size]
            losses = distil(student, teacher, rows, plan.batch_size, plan.seed, tell)
    model = student.merge_and_unload()
    with job.phase("evaluate"):
        after = losses_by_position(model, held_out).numpy()
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = [each(input_ids=held_out[:2], use_cache=False).logits for each in (model.eval(), again)]
    return {
        "parameters": model.num_parameters(),
        "trained_parameters": trainable,
        "train_tokens": plan.steps * plan.batch_size * plan.length,
        "config": model.config.to_diff_dict(),
        "verification": {**report, "source": source.name, "output": name},
        "checks": {
            "conversion_verified": bool(report["passed"]),
            "reloaded_by_auto_class": type(again) is TNTForCausalLM,
            "reloaded_logits_equal": torch.equal(*logits),
        },
        "seconds": job.seconds,
        "losses": losses,
        "held_out": {"converted": before, "trained": after},
    }


@dataclass(frozen=True)
class ConversionData:
    """What all jobs of this part read: windows `[N, T]` of tokens, and text for choosing a layer and verifying."""

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
        text = "".join(corpus.train.values())[: max(plan.probe_characters, plan.verify_characters)]
        return cls(tokenizer, train, rows, text)


def conversion_jobs(plan: ConversionPlan, data: ConversionData, output: Path) -> tuple[dict, dict[str, str]]:
    """The jobs of this part for `run_jobs`, and which job each has to wait for. Checkpoints go to `output`."""
    source, held_out = output / "source", data.held_out.numpy()
    data.tokenizer.save_pretrained(source)
    seen = shuffled(data.train, plan.teacher_steps * plan.teacher_batch_size, plan.seed).numpy()
    again = shuffled(data.train, plan.steps * plan.batch_size, plan.seed + 1).numpy()
    jobs = {"conversion, source": (train_source, plan, len(data.tokenizer), seen, held_out, source)}
    for name, changes in {**HYBRIDS, **CONTROLS}.items():
        folder = output / name.replace(" + ", "-").replace(", ", "-").replace(" ", "-").lower()
        jobs[f"conversion, {name}"] = (
            train_student, name, changes, plan, source, again, held_out, data.text, folder
        )  # fmt: skip
    return jobs, dict.fromkeys(list(jobs)[1:], "conversion, source")
