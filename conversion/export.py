"""`export_injected`: writes an injected model with TNT's memory as a standalone TNT repository, with equal logits.

Axis legend of the weights: rows are output channels, `[out, in]`; a fused weight is q, k, v (gate, up) one below the
other.
"""

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from tnt_hf import TNTConfig, TNTForCausalLM, __version__

from .architectures import architecture_of
from .families import FAMILIES, family_of, tnt_config
from .files import flush, sha256
from .injected_attention import is_injected
from .injection_config import LiZAConfig, TNTInjectionConfig
from .manifest import file_entry, write_manifest
from .source import HUB_ID
from .staging import Staging, check_target, target_of


# What a `TNTInjectionConfig` says about attention and not about the memory.
NOT_MEMORY = ("layers", "max_self_attn_length")
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- tnt
- test-time-memory
{base}---

# {name}

A {family} model with a TNT memory (arXiv 2511.07343) beside the attention of layers {layers}, exported by
tnt-hf {version}. It computes what the injected model did.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```

`trust_remote_code` is not needed where `tnt_hf` is installed and imported.
"""


def export_injected(
    model: PreTrainedModel, output: str | os.PathLike, *, tokenizer: Any = None, overwrite: bool = False
) -> Path:
    """
    Write a model that [`inject`] gave TNT's memory, trained or not, as a [`TNTForCausalLM`] repository with its code.

    The tensors are the same. The logits are equal, bit for bit, where the same attention kernel runs (in float64, up
    to float32 rounding); with windows they differ in rounding, because the two mask attention in different ways.

    Args:
        model: with [`TNTInjectionConfig`] and own projections, of a family in [`FAMILIES`]. It is not changed.
        output: the folder to create; it appears complete or not at all.
        tokenizer: saved with the model.
        overwrite: replace `output` if it is an earlier conversion or export, and unchanged since.

    Returns:
        The resolved path of the result.

    Raises:
        ValueError: unmerged LoRA; no memory, a LiZA operator, shared projections, an architecture or a
            combination of windows that TNT does not have; tensors that are not finite or not in memory.
        OSError: `output` exists, or the disk is full.
    """
    config = exported_config(model)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(f"tokenizer={type(tokenizer).__name__}: has no save_pretrained.")
    target = target_of(output)
    check_target(target, overwrite)
    with torch.device("meta"):
        exported = TNTForCausalLM(config)
    tensors = _exported_tensors(model, exported)
    exported.load_state_dict(tensors, assign=True)
    exported.tie_weights()
    exported.generation_config = copy.deepcopy(model.generation_config)
    with Staging(target, overwrite, lambda line: None) as staging:
        exported.save_pretrained(staging.folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging.folder)
        (staging.folder / "README.md").write_text(_card(model, config, target.name), encoding="utf-8")
        files = {}
        for path in sorted(x for x in staging.folder.rglob("*") if x.is_file()):
            flush(path)
            files[path.relative_to(staging.folder).as_posix()] = file_entry(path, "written", sha256(path))
        about = {"tnt_hf": __version__, "exported_from": model.config.model_type, "dtype": str(config.dtype)}
        write_manifest(staging.folder, files, about | {"injection": model.config.tnt_injection})
        staging.commit()
    return target


def exported_config(model: PreTrainedModel) -> TNTConfig:
    """
    The [`TNTConfig`] of the standalone model that computes what an injected one does.

    Raises:
        ValueError: see [`export_injected`].
    """
    if hasattr(model, "peft_config"):
        raise ValueError("model: carries LoRA adapters; export what its merge_and_unload() returns.")
    settings = getattr(getattr(model, "config", None), "tnt_injection", None)
    if settings is None or not any(map(is_injected, model.modules())):
        raise ValueError(f"model={type(model).__name__}: has no injected memory.")
    if settings["kind"] == LiZAConfig.kind:
        raise ValueError(
            f"operator={settings['operator']!r}: a TNT model has TNT's memory only; keep an injected model with a LiZA"
            " operator as it is (save_pretrained, load_injected)."
        )
    if settings["memory_projections"] != "own":
        raise ValueError(
            f"memory_projections={settings['memory_projections']!r}: the memory was given keys and queries after"
            " RoPE, a TNT model shares those before; inject with 'own'."
        )
    if model.config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type={model.config.model_type!r}: a TNT model computes what one of {', '.join(FAMILIES)} does."
        )
    row = architecture_of(model)
    attentions = row.attention_modules(row.base_of(model))
    memories = {i: x.memory for i, x in attentions.items() if is_injected(x)}
    first = next(iter(memories.values()))
    if odd := [i for i, memory in memories.items() if memory.config.to_dict() != first.config.to_dict()]:
        raise ValueError(f"layer {odd[0]}: its memory is configured differently from that of layer {min(memories)}.")
    names = [x.name for x in dataclasses.fields(TNTInjectionConfig) if x.name not in NOT_MEMORY]
    fields = {name: copy.deepcopy(getattr(first.config, name)) for name in names}
    fields["memory_layers"] = sorted(memories)
    # Attention's window decides whether TNTConfig finds a gap; whoever injected this one has accepted it.
    chunk, resets = first.config.global_chunk_size, first.config.local_reset_interval
    resets = resets if isinstance(resets, list) else [resets]
    fields["allow_memory_gap"] |= any(chunk and reset and reset % chunk for reset in resets)
    host = copy.deepcopy(model.config)
    del host.tnt_injection
    # Tied and changed since, a head has a tensor of its own, which the library saves and loads, too.
    if (head := model.get_output_embeddings()) is not None:
        host.tie_word_embeddings &= head.weight is model.get_input_embeddings().weight
    plain = tnt_config(host, **fields)

    own = [plain.sliding_window if "sliding" in kind else None for kind in plain.layer_types]
    limits = {i: attentions[i].max_self_attn_length for i in memories}
    windows = [min((w for w in (own[i], limits.get(i)) if w is not None), default=None) for i in range(len(own))]
    if windows == own:
        return plain
    finite = sorted({window for window in windows if window is not None})
    if len(finite) > 1:
        raise ValueError(
            f"max_self_attn_length={max(filter(None, limits.values()))}: layers would have windows of"
            f" {' and '.join(map(str, finite))} tokens; a TNT model has one sliding_window and full attention."
        )
    full = [i for i, window in enumerate(windows) if window is None]
    return tnt_config(host, window=finite[0], keep_full_attention=full or None, **fields)


def _exported_tensors(model: PreTrainedModel, exported: TNTForCausalLM) -> dict[str, Tensor]:
    """The tensors of `model` under TNT's names, fused ones split; they share storage where that is possible."""
    shapes = {name: x.shape for name, x in exported.state_dict().items()}
    family, tensors = family_of(model.config.model_type), {}
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta":
            raise ValueError(f"{name}: is not in memory (offloaded); load the model without offloading.")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: holds nan or infinity.")
        name = name.replace(".self_attn.memory.", ".memory.")
        parts = family.our_names(name)
        if parts == [name]:
            tensors[name] = tensor
            continue
        pieces = tensor.split([shapes[part][0] for part in parts])
        tensors |= {part: piece.clone() for part, piece in zip(parts, pieces)}
    if different := sorted(set(tensors) ^ set(shapes)):
        raise ValueError(f"{different[0]}: is not in both the injected model and its TNT form.")
    return tensors


def _card(model: PreTrainedModel, config: TNTConfig, name: str) -> str:
    origin = model.name_or_path
    base = f"base_model: {origin}\n" if HUB_ID.fullmatch(origin) and not Path(origin).exists() else ""
    layers = ", ".join(map(str, config.memory_layer_indices))
    return CARD.format(base=base, name=name, family=model.config.model_type, layers=layers, version=__version__)
