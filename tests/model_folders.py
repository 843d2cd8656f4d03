"""Folders as runs leave them: a tiny model with tokenizer, results, plots, and all the files that stay at home."""

import json
from pathlib import Path

import torch
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.recipes.data import train_tokenizer


VOCABULARY = 260
RUN = {
    "format": "tnt-training-1",
    "command": "tnt train --config /srv/jobs/stage1.yaml --dataset_name=/srv/data/books.jsonl --hidden_size 32",
    "recipe": "tnt_debug/stage1.yaml",
    "settings": {
        "model": {"model": "tnt", "model_config": {"hidden_size": 32}, "tokenizer": "/srv/tokenizers/small"},
        "data": {"dataset_name": "/srv/data/books.jsonl", "sequence_length": 128},
        "run": {"mode": "pretrain", "train_tokens": 100_000},
        "training": {"learning_rate": 3e-3, "output_dir": "/srv/runs/books", "hub_token": "not-to-be-seen"},
    },
    "mode": "pretrain",
    "data": {"name": "/srv/data/books|one.jsonl", "split": "train", "rows": 781, "tokens": 99_968, "documents": 12},
    "tokens_trained": 99_968,
    "steps": 97,
    "parameters": 30_000,
    "trained_parameters": 20_000,
    "metrics": {"loss": 2.468, "eval_loss": 2.643},
    "seconds": 61.4,
    "tokens_per_second": 1628.3,
    "peak_memory_bytes": 987_654_321,
    "seed": 7,
    "environment": {"cpu": "Model <X> | 2 cores", "versions": {"torch": "2.13.0"}, "commit": "0123abc"},
}
RESULTS = {
    "format": "tnt-evaluation-1",
    "command": "tnt eval /srv/runs/books --tasks perplexity,passkey",
    "model": "/srv/runs/books",
    "seed": 3,
    "perplexity": {
        "data": "python-stdlib",
        "tokens": 4096,
        "overall": 12.3456,
        "standard_error": 0.1234,
        "by_position": [{"from": 0, "to": 64, "perplexity": 21.5}, {"from": 64, "to": 128, "perplexity": 9.25}],
    },
    "passkey": [{"distance": 64, "accuracy": 0.75, "interval": [0.5, 0.9], "samples": 20}],
    "recall": [{"distance_from": 0, "distance_to": 32, "accuracy": 0.625, "questions": 80}],
    "cost": [{"context": 1024, "state_bytes": 14_864, "kv_bytes": 768, "decode_tokens_per_second": {"median": 98.7}}],
    "ablations": {
        "all branches": {"perplexity": 12.3456},
        "local 0 (C=8) off": {"perplexity": 14.25, "nats": 0.1435, "nats_standard_error": 0.0123},
    },
}
# Name -> content of what a run leaves behind and a repository must not hold.
LEFT_BEHIND = {
    "checkpoint-10/model.safetensors": "weights",
    "checkpoint-10/optimizer.pt": "optimizer",
    "optimizer.pt": "optimizer",
    "rng_state.pth": "random state",
    "trainer_state.json": "{}",
    "training_args.bin": "pickle",
    "runs/events.out.tfevents.1": "events",
    "train.lock": "",
    ".cache/huggingface/x.json": "{}",
    ".env": "HF_TOKEN=hf_secretsecretsecretsecretsecret",
    "evaluation/.evaluation.json.123": "half",
    "notes.txt": "mine",
}
PICTURE = bytes.fromhex("89504e470d0a1a0a")


def save_tokenizer(folder: Path) -> None:
    train_tokenizer(["the memory learns while the model reads"], VOCABULARY).save_pretrained(folder)


def save_run(folder: Path, **changes) -> Path:
    """A trained and evaluated TNT model in `folder`, as `tnt train` and `tnt eval` leave it."""
    model = tiny_model(torch.float32, vocab_size=VOCABULARY, max_position_embeddings=256, **changes)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "training.json").write_text(json.dumps(RUN))
    (folder / "training_log.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps(RESULTS))
    (folder / "evaluation" / "evaluation.md").write_text("# Evaluation\n")
    for name in ("loss.png", "gates.png", "evaluation/perplexity.png"):
        (folder / name).write_bytes(PICTURE)
    return folder


def leave_behind(folder: Path) -> None:
    for name, content in LEFT_BEHIND.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def save_letters(folder: Path, **fields) -> str:
    """A tiny model of these fields with a tokenizer of one token per letter; its name."""
    letters = {letter: index for index, letter in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = TNTConfig(**fields | {"vocab_size": len(letters), "initializer_range": 0.3, "eos_token_id": None})
    TNTForCausalLM(config).save_pretrained(folder)
    return str(folder)
