"""Converts a pretrained checkpoint into a standalone TNT checkpoint, as a stream.

TNT's base tensors have Llama's names, so a source of the same dtype is linked or copied as it is, and one shard of
memory tensors, an index, a configuration and the model's code are written beside it. Only a cast or a fused tensor
needs new shards. The result appears all at once when it is complete (staging), after every check (source, plan).
"""

import json
import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tnt_hf import __version__
from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.families import family_of, read_source_config, tnt_config
from tnt_hf.conversion.head_start import READ, HeadStart
from tnt_hf.conversion.manifest import write_manifest
from tnt_hf.conversion.memory_tensors import initial_memory_tensors
from tnt_hf.conversion.model_card import model_card, public_name
from tnt_hf.conversion.plan import base_shards, is_same_bytes, our_tensors, parse_size
from tnt_hf.conversion.probe import measure_window, narrowed_layers, probe_name
from tnt_hf.conversion.shards import STORED, TORCH
from tnt_hf.conversion.source import Source, locate, read_source
from tnt_hf.conversion.staging import Staging, check_target, target_of
from tnt_hf.conversion.tokenizer import CONFIG as TOKENIZER_CONFIG
from tnt_hf.conversion.tokenizer import settings as tokenizer_settings
from tnt_hf.conversion.writer import Writer


LINKS = ("auto", "link", "copy")


def convert_checkpoint(
    source: str | os.PathLike,
    output: str | os.PathLike,
    *,
    window: int | None = None,
    keep_full_attention: list[int] | str | None = None,
    probe: str | os.PathLike | None = None,
    dtype: Any = None,
    link: str = "auto",
    overwrite: bool = False,
    seed: int = 0,
    max_shard_size: str | int = "5GB",
    progress: bool = True,
    check: bool | None = None,
    revision: str | None = None,
    say: Callable[[str], object] | None = None,
    begun: HeadStart | None = None,
    **fields: Any,
) -> Path:
    """
    Convert a Llama, Mistral, Qwen2, Qwen3 or Phi-3 checkpoint into a TNT checkpoint that computes the same, unless
    `fields` open the memory's gate (`memory_gate_init` other than 0, `memory_gate="published"`).

    With `window=None` its logits equal the source's bit for bit (in float64, up to float32 rounding); with a window W,
    at every position < W. `output` appears complete or not at all, whatever happens on the way. (Phi-3's fused
    projections become separate matrix products, which round differently: equal up to rounding.)

    Args:
        source: a folder or a Hub id (`revision` for the latter).
        output: the folder to create.
        window: keys every query sees (tokens), its own included. `None` keeps the source's attention.
        keep_full_attention: layers that keep full attention despite the window, or `"auto:N"`: the N whose
            window costs most, in next-token loss on `probe`.
        probe: a text, or the path of a text file, to measure each layer's window error on and, for `"auto:N"`, the
            loss that its window adds, which decides. Loads the source.
        dtype: dtype of the base tensors, such as `"bfloat16"`; `None` keeps theirs.
        link: `"auto"` links the shards where the file system can, otherwise copies them; `"link"` insists on links;
            `"copy"` copies. A linked shard is the source's file under a second name: changing it in place changes
            both. (`save_pretrained` writes new files and is safe.)
        overwrite: replace `output` if it is an earlier conversion in which nothing was added or changed since.
        seed: seed for the few tensors that start at random.
        max_shard_size: maximum size of newly written shards.
        progress: show a bar, in bytes.
        check: read linked and copied shards for their SHA-256 and to find nan and infinity, which takes about twice
            as long as copying them; by default up to 1 GiB in all. Newly written shards are always read.
        say: called with each line that reports what happens; by default nothing is reported.
        begun: copies for this same conversion already under way, see [`~conversion.head_start.head_start`].
        fields: memory fields of [`TNTConfig`], such as `memory_layers=[0, 2]` or `global_chunk_size=256`.

    Returns:
        The resolved path of the result.

    Raises:
        ValueError: a setting, a configuration, a shard or the architecture is not acceptable.
        OSError: `output` exists, a file is missing, the disk is full, a link is impossible.
    """
    say = say or (lambda line: None)
    count = _check_settings(link, seed, window, keep_full_attention, probe)
    for name, value in (("overwrite", overwrite), ("check", False if check is None else check)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: must be True or False")
    most, cast = parse_size(max_shard_size), stored_dtype(dtype)
    folder, target = locate(source, revision), target_of(output)
    _check_apart(folder, target)
    check_target(target, overwrite)

    checkpoint = read_source(folder, str(source))
    # Everything a probe does not change is checked before it, because it takes a while.
    layers = None if count else keep_full_attention
    try:
        source_config = read_source_config(checkpoint.fields)
        config = tnt_config(source_config, window=window, keep_full_attention=layers, **fields)
        narrowed = [] if probe is None else narrowed_layers(tnt_config(source_config), window, count)
    except ValueError as error:
        raise ValueError(f"{checkpoint.name}: {error}") from error
    tensors = our_tensors(checkpoint, family_of(source_config.model_type), config)
    if link == "link" and not is_same_bytes(checkpoint, tensors, cast):
        reason = "fused tensors" if cast is None else f"dtype={dtype}"
        raise ValueError(f"link='link': {checkpoint.name} needs shards of its own ({reason})")

    errors = losses = None
    if probe is not None:
        from tnt_hf.conversion.sensitivity import choose_full_attention, table

        errors, losses = measure_window(folder, probe, window, bool(count), progress, say)
        if losses is not None:
            costs = [loss if l in narrowed else -math.inf for l, loss in enumerate(losses)]
            layers = choose_full_attention(costs, count)
            config = tnt_config(source_config, window=window, keep_full_attention=layers, **fields)
        say(table(errors, layers, losses))
    _complete(config, checkpoint, source_config, cast, say)
    name = public_name(folder, str(source))
    tokenizer = tokenizer_settings(checkpoint, name, source_config.model_type, say)
    config.tokenizer_class = tokenizer.named

    memory = list(initial_memory_tensors(config, tensors, STORED[config.dtype], seed))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    conversion = {
        "tnt_hf": __version__,
        "source": name,
        "revision": folder.name if folder.parent.name == "snapshots" else None,
        "model_type": source_config.model_type,
        "window": window,
        "full_attention_layers": layers,
        "window_errors": errors,
        "window_losses": losses,
        "plot": errors is not None and find_spec("matplotlib") is not None,
        "dtype": str(config.dtype).removeprefix("torch."),
        "cast": any(cast not in (None, tensor.dtype) for tensor in tensors.values()),
        "fused": any(checkpoint.tensors.get(name) is not tensor for name, tensor in tensors.items()),
        "seed": seed,
        "fields": fields,
        "memory_starts_closed": config.memory_gate == "product" or config.memory_gate_init == 0,
        "parameters": {
            "base": sum(math.prod(tensor.shape) for name, tensor in tensors.items() if name not in tied),
            "memory": sum(math.prod(tensor.shape) for tensor in memory),
        },
        "asked": {"keep_full_attention": keep_full_attention, "probe": probe_name(probe), "link": link},
    }
    if check is None:
        check = sum(path.stat().st_size for path in checkpoint.shards.values()) <= READ
    if begun is not None and not is_same_bytes(checkpoint, tensors, cast):
        begun.drop()
    with Staging(target, overwrite, say) if begun is None else nullcontext(begun.staging) as staging:
        writer = Writer(checkpoint, staging.folder, link, check, progress, say, begun)
        writer.weights(*base_shards(checkpoint, tensors, cast, most), memory)
        writer.companions()
        if tokenizer.content is not None:
            writer.text("tokenizer.json", tokenizer.content)
        if tokenizer.fields is not None:
            writer.text(TOKENIZER_CONFIG, json.dumps(tokenizer.fields, indent=2, ensure_ascii=False) + "\n")
        writer.code()
        writer.text("config.json", config.to_json_string(use_diff=True))
        if conversion["plot"]:
            writer.plot(errors, layers, losses)
        writer.text("README.md", model_card(config, conversion, checkpoint, target.name, tokenizer.loads))
        write_manifest(staging.folder, writer.entries(), conversion)
        staging.commit()
    return target


def _check_settings(link, seed, window, keep, probe) -> int:
    """What can be said about the settings alone. Returns the N of `"auto:N"`, or 0."""
    if link not in LINKS:
        raise ValueError(f"link={link!r}: must be one of {', '.join(map(repr, LINKS))}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"seed={seed!r}: must be an integer from 0 to 2147483647")
    if window is None and (keep is not None or probe is not None):
        name, value = ("probe", probe) if keep is None else ("keep_full_attention", keep)
        raise ValueError(f"{name}={value!r}: needs a window; without one every layer keeps the source's attention")
    if not isinstance(probe, str | os.PathLike | None):
        raise ValueError(f"probe={probe!r}: must be a text or the path of a text file")
    if not isinstance(keep, str):
        return 0
    match = re.fullmatch(r"auto:([1-9]\d*)", keep)
    if match is None:
        raise ValueError(f"keep_full_attention={keep!r}: must be a list of layers or 'auto:N'")
    if probe is None:
        raise ValueError(f"keep_full_attention={keep!r}: needs a probe, a text to measure the layers on")
    return int(match[1])


def _check_apart(folder: Path, target: Path) -> None:
    """Neither folder may hold the other, by any name."""
    if target == folder or target.exists() and target.samefile(folder):
        raise ValueError(f"output={str(target)!r}: is the source itself")
    for inner, outer, what in (
        (target, folder, "output is inside the source"),
        (folder, target, "it holds the source"),
    ):
        if any(parent.exists() and parent.samefile(outer) for parent in inner.parents if outer.exists()):
            raise ValueError(f"output={str(target)!r}: {what} {folder}")


def stored_dtype(dtype: Any) -> str | None:
    """A torch dtype or its name as safetensors writes it. Raises ValueError if weights cannot have it."""
    if dtype is None:
        return None
    names = {str(value).removeprefix("torch."): name for name, value in TORCH.items()}
    if (name := str(dtype).removeprefix("torch.")) not in names:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(names)}")
    return names[name]


def _first_dtype(checkpoint: Source) -> torch.dtype:
    """That the library loads a checkpoint in whose configuration says nothing: of its first tensor."""
    with safe_open(next(iter(checkpoint.shards.values())), framework="pt") as file:
        first = next(iter(file.keys()), None)
        return torch.float32 if first is None else TORCH[file.get_slice(first).get_dtype()]


def _names_attention(name: object) -> bool:
    """Whether the library would look for an attention of that name: its own, also where flash attention is not
    installed, or a kernel's repository."""
    return isinstance(name, str) and (
        name == "eager" or name in ALL_ATTENTION_FUNCTIONS.valid_keys() or "/" in name or "flash" in name
    )


def _complete(
    config: TNTConfig,
    checkpoint: Source,
    source_config: PreTrainedConfig,
    cast: str | None,
    say: Callable[[str], object],
) -> None:
    """What a saved configuration says beyond the architecture, as the library would read it from the source."""
    config.dtype = TORCH[cast] if cast else source_config.dtype or _first_dtype(checkpoint)
    if not isinstance(config.dtype, torch.dtype) or config.dtype not in STORED:
        raise ValueError(f"{checkpoint.name}: dtype={config.dtype}: must be one of {', '.join(map(str, STORED))}")
    config.architectures = ["TNTForCausalLM"]
    if (attention := source_config._attn_implementation) is not None:  # another one rounds differently
        if not _names_attention(attention):
            raise ValueError(
                f"{checkpoint.name}: attn_implementation={attention!r}: transformers has no attention of that name"
            )
        config.attn_implementation = attention
    if "auto_map" in checkpoint.fields:
        kind = source_config.model_type
        say(f"the source names code of its own (auto_map), which is not run: it is read as the library's {kind}")
