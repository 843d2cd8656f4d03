"""From a recipe's model fields to what is trained: load, make, convert or inject, choose what learns, find a teacher.

preset  -> a new TNT model            source -> converted into output_dir/converted, then loaded
folder  -> loaded                     inject -> a live model of the library with a memory put into it
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import inject, language_model, load_injected, lora_config
from tnt_hf.conversion.injection_config import injection_from_dict
from tnt_hf.conversion.reload import ADAPTER_CONFIG
from tnt_hf.conversion.source import read_json
from tnt_hf.presets import PRESETS
from tnt_hf.recipes.arguments import NEW_MODELS, ModelArguments, RunArguments
from tnt_hf.recipes.chat import PLAIN_TEMPLATE
from tnt_hf.recipes.converted import convert_once
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.encoding import vocabulary_size
from tnt_hf.recipes.loading_errors import naming
from tnt_hf.recipes.memory_statistics import all_closed
from tnt_hf.recipes.model_folder import file_of
from tnt_hf.recipes.objectives import attention_modules, with_memory
from tnt_hf.recipes.optimization import kind_of
from tnt_hf.recipes.recipe_file import Recipe


def load_tokenizer(model: ModelArguments, texts: Callable[[], Any]) -> Any:
    """
    The tokenizer of a recipe: `tokenizer`, one of `tokenizer_vocab_size` trained on `texts()`, or the model's own.

    Raises:
        ValueError: a vocabulary size below 257, or a tokenizer without an end-of-sequence token.
        OSError: there is none.
    """
    if model.tokenizer_vocab_size is not None:
        tokenizer = train_tokenizer(texts(), model.tokenizer_vocab_size)
        tokenizer.chat_template = PLAIN_TEMPLATE
        return tokenizer
    field = next(x for x in ("tokenizer", "source", "model") if getattr(model, x))
    name = getattr(model, field)
    with naming(field, name):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer={name!r}: has no eos_token, which ends documents")
    return tokenizer


def build_model(
    model: ModelArguments,
    run: RunArguments,
    *,
    output_dir: str | Path,
    tokenizer: Any,
    sequence_length: int,
    seed: int,
    say: Callable[[str], object],
) -> tuple[nn.Module, nn.Module | None]:
    """
    The model to train, with `requires_grad` only where it learns, and its frozen teacher in the modes that have one.

    Args:
        output_dir: of the run; a `source` is converted into its folder `converted`, once.
        tokenizer: whose vocabulary the model has to cover, and gives a new model its size and special tokens.
        sequence_length: tokens that the model has to have positions for.
        seed: of what starts at random.
        say: told what is being done, a line each.

    Returns:
        (model, teacher or `None`). With `trainable="lora"` the model is a `PeftModel`.

    Raises:
        ValueError: a model that does not fit the recipe, naming the field.
        OSError: a model cannot be read or a conversion cannot be written.
    """
    name = model.model
    if model.source is not None:
        name = str(convert_once(model, Path(output_dir) / "converted", seed, say))
    torch.manual_seed(seed)
    student = new_model(model, tokenizer) if name in NEW_MODELS else load_model(name, model, seed)
    _check_sizes(student, tokenizer, sequence_length)
    if run.mode == "stage2" and student.config.model_type != "tnt":
        raise ValueError(f"model={name!r}: mode='stage2' needs a TNT model, not {student.config.model_type!r}")
    teacher = None
    if run.mode in ("align", "distill"):
        teacher = load_teacher(name, model)
        _check_teacher(student, teacher, run.mode)
    if model.trainable == "local_memories" and all_closed(student):
        say(f"note: all gates of {name!r} are closed, so its memories get gradients of 0; a stage 1 opens them")
    return set_trainable(student, model.trainable, model.lora), teacher


# --------------------------------------------------------------------------------------------------------- the student


def new_model(model: ModelArguments, tokenizer: Any) -> nn.Module:
    """
    A model with random weights, a preset of TNT's or a Llama: the tokenizer's vocabulary and special tokens, and
    `model_config`.

    Raises:
        ValueError: a field that is invalid or unknown to a Llama; half precision; a folder has the name of the preset.
    """
    if Path(model.model).is_dir():
        raise ValueError(
            f"model={model.model!r}: is a preset and a folder here; write './{model.model}' for the folder, or start"
            " elsewhere for the preset"
        )
    if _dtype(model).itemsize < 4:  # and the memory's weights are never less than float32
        raise ValueError(f"dtype={model.dtype!r}: a new model starts in float32; bf16: true computes in bfloat16")
    fields = PRESETS.get(model.model, {}) | {"vocab_size": vocabulary_size(tokenizer)}
    fields |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    if model.model in PRESETS:
        config = TNTConfig(**fields | model.model_config)
    else:
        if unknown := sorted(model.model_config.keys() - LlamaConfig().to_dict().keys()):
            raise ValueError(
                f"model_config.{unknown[0]}={model.model_config[unknown[0]]!r}: is not a field of a Llama"
            )
        try:  # the fields of a Llama are fields of TNT's, which refuses what the library finds out when it computes
            TNTConfig(**fields | model.model_config, memory_layers=[], sliding_window=None)
        except ValueError as error:
            raise ValueError(str(error).replace("TNTConfig.", "model_config.", 1)) from error
        config = LlamaConfig(**fields | model.model_config)
    with naming("model", model.model, model.attn_implementation):
        return AutoModelForCausalLM.from_config(config, **_load_options(model))


def load_model(name: str, model: ModelArguments, seed: int = 0) -> nn.Module:
    """
    A model from a folder or the Hub: TNT's own with `model_config` applied, an injected one with its memory, or any
    other of the library, into which `inject` is put.

    Raises:
        ValueError: tensors are missing, left over or of another shape; `model_config` for a model other than
            TNT; an injection that does not fit.
    """
    options = _load_options(model)
    with naming("model", name):
        adapter = file_of(name, ADAPTER_CONFIG)
    if adapter is not None:
        _refuse_fields(name, model, injected=True)
        with naming("model", name, model.attn_implementation):
            return load_injected(name, is_trainable=True, **options).train()
    with naming("model", name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    if config.model_type == "tnt":
        if model.inject:
            hint = "give --inject null, and --mag_schedule null unless its memory_gate is 'mix'"
            raise ValueError(f"inject={model.inject!r}: {name!r} is a TNT model, which has its memory; {hint}")
        return _load_tnt(name, model)
    _refuse_fields(name, model, injected=hasattr(config, "tnt_injection"))
    if hasattr(config, "tnt_injection"):
        with naming("model", name, model.attn_implementation):
            return load_injected(name, **options).requires_grad_(True).train()
    live = _load_other("model", name, model)
    if model.inject:
        live = inject(language_model(live), injection_from_dict({"kind": "liza", **model.inject}), seed=seed)
    return live


def _load_tnt(name: str, model: ModelArguments) -> nn.Module:
    """A TNT model with other fields: what a model can change while it lives is changed after loading, so that the
    rates that belong to the chunk sizes of its training stay."""
    fields, live = model.model_config, ("local_chunk_sizes", "sliding_window")
    fixed = {field: value for field, value in fields.items() if field not in live}
    with naming("model", name, model.attn_implementation):
        try:
            options = _load_options(model)
            loaded, found = TNTForCausalLM.from_pretrained(name, output_loading_info=True, **fixed, **options)
        except RuntimeError as error:  # the library's, many lines long
            raise ValueError(f"its weights do not fit model_config={fixed!r}") from error
    _refuse_misfits("model", name, found, ("missing_keys", "unexpected_keys", "mismatched_keys"))
    if "local_chunk_sizes" in fields:
        loaded.set_local_chunk_sizes(fields["local_chunk_sizes"])
    if "sliding_window" in fields:
        loaded.set_sliding_window(fields["sliding_window"])
    return loaded


def _load_other(field: str, name: str, model: ModelArguments) -> nn.Module:
    """A causal language model of any architecture, with every one of its tensors from the checkpoint."""
    with naming(field, name, model.attn_implementation):
        if _holds_injection(name, model):
            return load_injected(name, **_load_options(model))
        loaded, found = AutoModelForCausalLM.from_pretrained(
            name, output_loading_info=True, trust_remote_code=model.trust_remote_code, **_load_options(model)
        )
    _refuse_misfits(field, name, found, ("missing_keys", "mismatched_keys"))
    return loaded


def _holds_injection(name: str, model: ModelArguments) -> bool:
    """Whether a folder or Hub repository has a memory that the library alone would leave out."""
    if (path := file_of(name, ADAPTER_CONFIG)) is not None:
        return read_json(path).get("tnt_injection") is not None
    return hasattr(AutoConfig.from_pretrained(name, trust_remote_code=model.trust_remote_code), "tnt_injection")


def _refuse_misfits(field: str, name: str, found: dict[str, Any], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        if found[kind]:
            raise ValueError(f"{field}={name!r}: {kind.replace('_', ' ')}, the first is {sorted(found[kind])[0]!r}")


def set_trainable(model: nn.Module, trainable: str, lora: dict[str, Any] | None = None) -> nn.Module:
    """
    Freeze what is not to learn. Returns `model`, wrapped by peft for `"lora"`.

    Raises:
        ValueError: nothing would learn: the model has no (local) memory; `lora` has a setting that peft cannot use.
    """
    if trainable == "lora":
        if hasattr(model, "peft_config"):
            own = model.peft_config[model.active_adapter].to_dict()
            for name, value in (lora or {}).items():
                if value != own.get(name) and not (isinstance(own.get(name), set) and set(value) == own[name]):
                    raise ValueError(f"lora.{name}={value!r}: the adapter has {own.get(name)!r} and continues with it")
            return model
        from peft import get_peft_model

        if Path(model.name_or_path).is_dir():  # the adapter names its base, which no other folder is to be taken for
            model.name_or_path = str(Path(model.name_or_path).resolve())
        try:
            found = get_peft_model(model, lora_config(model, **(lora or {})))
            if (
                (lora or {}).get("trainable_token_indices")
                and model.config.model_type == "tnt"
                and _adapts_tied(model)
            ):
                raise ValueError("trainable_token_indices beside LoRA on a tied head or embedding cannot be merged")
            return found
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # peft checks few of its settings, the others fail wherever it uses them
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"lora={lora!r}: {said}" if lora else said) from error
    if hasattr(model, "peft_config"):
        raise ValueError(f"trainable={trainable!r}: the model is an adapter, which needs trainable='lora'")
    if trainable == "local_memories":
        if not isinstance(model, TNTForCausalLM):
            raise ValueError(f"trainable={trainable!r}: {type(model).__name__} has no local memory")
        model.freeze_for_stage2()
        return model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable == "all" or kind_of(name) in ("gate", "projection", "memory"))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"trainable={trainable!r}: {type(model).__name__} has no memory with parameters")
    return model


def finished(model: nn.Module) -> nn.Module:
    """
    What a run saves of the model it trained: LoRA on a TNT model is merged, which makes a standalone model that
    `AutoModelForCausalLM` loads. An adapter on an injected model stays one, for `load_injected`, since a base of the
    library cannot hold its memory.
    """
    if hasattr(model, "peft_config") and model.get_base_model().config.model_type == "tnt":
        _untie_adapted(model.get_base_model())
        model = model.merge_and_unload()
    model.config.use_cache = True  # Trainer turns it off, and it would be saved like that
    return model


def _untie_adapted(model: nn.Module) -> None:
    """Where LoRA adapts one of two tied layers, or both, each needs a weight of its own to be merged into; a head that
    is trained in full has one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    head = model.get_output_embeddings()
    if _adapts_tied(model) and not isinstance(head, ModulesToSaveWrapper):
        head = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False


def _adapts_tied(model: nn.Module) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return model.config.tie_word_embeddings and any(isinstance(end, BaseTunerLayer) for end in ends)


# --------------------------------------------------------------------------------------------------------- the teacher


def load_teacher(name: str, model: ModelArguments) -> nn.Module:
    """
    The frozen teacher: `teacher`, else `source`, else the model that memory was injected into, else the TNT model's
    own base weights with full attention in every layer and no memory.
    """
    source = model.teacher or model.source or (name if model.inject else None)
    if source is not None:
        teacher = _load_other("teacher" if model.teacher else "source" if model.source else "model", source, model)
    else:
        if file_of(name, ADAPTER_CONFIG) is not None:
            raise ValueError(f"teacher=None: must be given for {name!r}, an adapter")
        config = AutoConfig.from_pretrained(name, trust_remote_code=model.trust_remote_code)
        if config.model_type != "tnt":
            raise ValueError(f"teacher=None: must be given for {name!r}, a model of type {config.model_type!r}")
        fields = {"memory_layers": [], "sliding_window": None, "layer_types": None}
        teacher = TNTForCausalLM.from_pretrained(name, **fields, **_load_options(model))
    return teacher.eval().requires_grad_(False)


def _check_teacher(student: nn.Module, teacher: nn.Module, mode: str) -> None:
    mine, theirs = student.config, teacher.config
    if mode == "distill" and mine.vocab_size != theirs.vocab_size:
        raise ValueError(f"teacher: has a vocabulary of {theirs.vocab_size}, the model one of {mine.vocab_size}")
    if mode == "align":
        counts = [len(attention_modules(model)) for model in (student, teacher)]
        if not counts[0]:
            raise ValueError(f"mode='align': needs layers with self_attn, and {type(student).__name__} has none")
        if counts[0] != counts[1] or mine.hidden_size != theirs.hidden_size:
            raise ValueError(
                f"teacher: has {counts[1]} layers of attention of width {theirs.hidden_size}, the model {counts[0]} of"
                f" {mine.hidden_size}; mode='align' compares them one by one"
            )
        if not with_memory(student):
            raise ValueError(f"model={type(student).__name__}: has no memory beside attention for mode='align'")


# ------------------------------------------------------------------------------------------------------------- details


def _dtype(model: ModelArguments) -> torch.dtype:
    dtype = getattr(torch, model.dtype or "float32", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={model.dtype!r}: must be a floating-point type of torch, such as 'bfloat16'")
    return dtype


def _load_options(model: ModelArguments) -> dict[str, Any]:
    attention = model.attn_implementation
    return {"dtype": _dtype(model)} | ({} if attention is None else {"attn_implementation": attention})


def _refuse_fields(name: str, model: ModelArguments, injected: bool) -> None:
    if model.inject and injected:
        raise ValueError(f"inject={model.inject!r}: {name!r} has an injected memory already")
    if model.model_config:
        field, value = next(iter(model.model_config.items()))
        raise ValueError(
            f"model_config.{field}={json.dumps(value)}: {name!r} is not a TNT model, only those take fields"
        )


def check_packed_rows(recipe: Recipe, evaluates: bool, model: nn.Module, teacher: nn.Module | None) -> None:
    """Raises `ValueError` where the library's flash attention would see all documents of a row as one: it is told
    them by `position_ids`, which it reads of a single row only."""
    sizes = ("per_device_train_batch_size", *["per_device_eval_batch_size"] * evaluates)
    asked = [(model, name) for name in sizes] + [(teacher, sizes[0])] * (teacher is not None)
    for reader, name in asked if recipe.data.packing else ():
        kind, rows = str(reader.config.get_text_config()._attn_implementation), getattr(recipe.training, name)
        if "flash" in kind and rows > 1:
            raise ValueError(
                f"{name}={rows}: {kind!r} keeps packed documents apart in one row at a time; take 1 (longer rows,"
                " gradient_accumulation_steps), packing: false, or attn_implementation: sdpa"
            )


def _check_sizes(model: nn.Module, tokenizer: Any, sequence_length: int) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if (needed := vocabulary_size(tokenizer)) > rows:
        raise ValueError(f"tokenizer: its ids need {needed} rows, but vocab_size={rows}")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        raise ValueError(
            f"sequence_length={sequence_length}: is more than max_position_embeddings={positions} of the model; raise"
            " it by model_config (for other models than TNT, in config.json), and rope_parameters where it needs that"
        )
