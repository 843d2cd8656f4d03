"""The fields of a recipe besides those of `TrainingArguments`: model, data and run.

One recipe is one flat mapping over four dataclasses, these three and transformers' own; no two of them share a name.
This file imports nothing slow, so `--help` can read it without waiting for torch.
"""

from dataclasses import dataclass, field
from typing import Any

from tnt_hf.presets import PRESETS


MODES = ("pretrain", "stage2", "align", "distill", "sft", "long")
# What `model` makes anew: TNT's presets, and a plain Llama to convert or to inject into.
NEW_MODELS = (*PRESETS, "llama")
TRAINABLE = ("all", "memory", "local_memories", "lora")


def _option(default: Any, help: str):
    """A dataclass field with its line of help; mutable defaults are copied for every instance."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class ModelArguments:
    """Which model is trained, what it starts from, and which of its parameters learn."""

    model: str = _option(
        "tnt", "tnt, titans, ... (a preset), llama, a folder, or a Hub id; stage 2 names the folder of stage 1"
    )
    model_config: dict[str, Any] = _option(
        {}, "TNTConfig fields that override the model's own; `--hidden_size 64` means the same"
    )
    tokenizer: str | None = _option(None, "folder or Hub id; by default the model's own")
    tokenizer_vocab_size: int | None = _option(
        None, "instead: train a byte-level BPE of this size on the training text"
    )
    source: str | None = _option(None, "checkpoint to convert first; also the teacher of align and distill")
    convert: dict[str, Any] = _option({}, "arguments of convert_checkpoint (window, ...) and TNTConfig fields")
    teacher: str | None = _option(None, "folder or Hub id of the frozen teacher, by default `source`")
    inject: dict[str, Any] = _option(
        {}, "LiZAConfig or TNTInjectionConfig fields: inject memory into the model, before LoRA"
    )
    trainable: str = _option("all", "all, memory, local_memories, or lora (LoRA on q, k, v, o and the memory in full)")
    lora: dict[str, Any] = _option({}, "LoraConfig fields that override those of tnt_hf.conversion.lora_config")
    attn_implementation: str | None = _option(
        None, "sdpa, eager, flash_attention_2, ...; by default the library's choice"
    )
    dtype: str | None = _option(None, "dtype of the weights: float32 (default), bfloat16, ...")
    trust_remote_code: bool = _option(False, "run code that comes with a checkpoint")


@dataclass
class DataArguments:
    """Which text is read and how it is cut into rows."""

    dataset_name: str = _option("python-stdlib", "python-stdlib, a Hub id, or a local file or folder")
    dataset_config: str | None = _option(None, "configuration of a Hub dataset")
    dataset_split: str = _option("train", "split to train on")
    streaming: bool = _option(False, "read a Hub dataset or files while training")
    text_column: str = _option("text", "column with the text")
    messages_column: str = _option("messages", "column with the conversations, for sft")
    eval_dataset_name: str | None = _option(None, "data to evaluate on, by default the same")
    eval_split: str | None = _option(None, "split to evaluate on")
    eval_share: float = _option(0.0, "held-out share of local data, chosen by a hash of the document")
    eval_rows: int = _option(64, "rows of sequence_length to evaluate on")
    sequence_length: int = _option(2048, "tokens per row")
    packing: bool = _option(True, "several documents in a row; positions and memory restart at each")
    assistant_only_loss: bool = _option(True, "score only what the assistant says, for sft")


@dataclass
class RunArguments:
    """What kind of training it is, and what only training with memory needs."""

    mode: str = _option("pretrain", "pretrain, stage2, align, distill, sft or long")
    train_tokens: int | None = _option(None, "tokens in the whole run, instead of max_steps")
    memory_learning_rate: float | None = _option(None, "for the memory's parameters, by default learning_rate")
    gate_learning_rate: float | None = _option(None, "for the factor by which memory joins, by default learning_rate")
    window_dropout: float = _option(0.0, "probability that a step hides the sliding window's older keys")
    window_dropout_warmup_steps: int = _option(0, "steps over which window_dropout grows from 0")
    chunk_size_schedule: dict[str, Any] = _option({}, "{step: [C_1, ...]}: local chunk sizes from that step on")
    mag_schedule: dict[str, Any] = _option({}, "arguments of LiZACallback: the mixing weight over the steps")
    memory_logging_steps: int = _option(10, "steps between logs of gates, surprise and fast-weight norms; 0 for none")
    plots: bool = _option(True, "draw loss.png and gates.png at the end")
