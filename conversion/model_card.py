"""The model card of a conversion, complete as it is: what was converted, how, what holds, and how to use it."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from tnt_hf.configuration_tnt import TNTConfig
from tnt_hf.conversion.manifest import MANIFEST
from tnt_hf.conversion.source import HUB_ID, TOKENIZERS, Source, inside
from tnt_hf.settings import dump_yaml


PASSED_ON = ("license", "license_name", "license_link", "language")
REMOTE_CODE = """\
`trust_remote_code=True` runs the `*_tnt.py` files of this folder, which are all the code the model needs beside
Transformers 5.23 or newer. Before you do that with somebody else's copy, read them or pin a `revision`. With `tnt-hf`
installed, `import tnt_hf` makes the argument unnecessary."""
CITATION = """\
```bibtex
@article{tnt2025,
  title   = {TNT: Improving Chunkwise Training for Test-Time Memorization},
  journal = {arXiv preprint arXiv:2511.07343},
  year    = {2025}
}
@article{titans2025,
  title   = {Titans: Learning to Memorize at Test Time},
  author  = {Behrouz, Ali and Zhong, Peilin and Mirrokni, Vahab},
  journal = {arXiv preprint arXiv:2501.00663},
  year    = {2025}
}
```"""

TEMPLATE = """\
---
{metadata}---

# {title}

{source}, converted into {what}

## Quick start

```python
{quick_start}
```

{remote_code}

## What was done

```bash
{command}
```

| setting | value |
|---|---|
{settings}
{probe}
## What holds

{promises}
`{manifest}` holds the size of every file and the SHA-256 of those that were read while converting.
`tnt verify SOURCE FOLDER` checks both, and everything claimed here, against the source.

## Limits

- {untrained}
{of_memory}- What the source model may and may not be used for applies to this model too.

## Citation

{citation}
"""

MEMORY = """\
a TNT hybrid: the same transformer with a test-time memory
([TNT, arXiv 2511.07343](https://arxiv.org/abs/2511.07343), on Titans-MAG, arXiv 2501.00663) beside the attention of
{where}. {start}"""
MEMORY_LIMITS = """\
- The memory works within one sequence; it keeps nothing between sequences.
- Generation keeps the memory's state in the cache: use the model's default cache, or `TNTCache(model.config)`.
"""

TEXT_START = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {name}  # this folder, or the Hub id it was uploaded to
tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
inputs = tokenizer("Test-time memory is", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""
IDS_START = """\
import torch
from transformers import AutoModelForCausalLM

path = {name}  # this folder, or the Hub id it was uploaded to
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
print(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=32))  # the source's tokenizer {why}"""


def public_name(folder: Path, source: str) -> str:
    """What to call a source in public: its Hub id where it has one, otherwise its folder's name, never a path."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.name if Path(source).is_dir() else source


def front_matter(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's model card; empty if it has none that can be read."""
    if not (folder / "README.md").exists():
        return {}
    text = inside(folder, "README.md").read_text(encoding="utf-8", errors="replace")
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", text, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}  # a card nobody can read says nothing about the licence
    found = found if isinstance(found, dict) else {}
    if "language" in found:  # YAML takes Norwegian's code for a truth value
        said = found["language"]
        named = ["no" if x is False else x for x in (said if isinstance(said, list) else [said])]
        found["language"] = named if isinstance(said, list) else named[0]
    return found


def command_line(conversion: dict[str, Any], name: str) -> str:
    """The `tnt convert` command that repeats a conversion; folders by their names, a probe text in short."""
    parts = ["tnt", "convert", conversion["source"], name]
    asked = conversion["asked"]
    keep = asked["keep_full_attention"]
    options = {
        "--revision": conversion["revision"],
        "--window": conversion["window"],
        "--keep-full-attention": ",".join(map(str, keep)) if isinstance(keep, list | tuple) else keep,
        "--probe": asked["probe"],
        "--dtype": conversion["dtype"] if conversion["cast"] else None,
        "--seed": conversion["seed"] or None,
    }
    for option, value in options.items():
        parts += [] if value is None else [option, str(value)]
    parts += [f"--{asked['link']}"] if asked["link"] != "auto" else []
    parts += [f"{field}={json.dumps(value)}" for field, value in conversion["fields"].items()]
    return shlex.join(parts)


def attention_summary(config: TNTConfig) -> list[str]:
    """Attention and memory per group of like layers: `"layers 0-5, 7: window 512, memory"`."""
    groups: dict[str, list[int]] = {}
    for layer, kind in enumerate(config.layer_types):
        attention = f"window {config.sliding_window}" if "sliding" in kind else "full attention"
        groups.setdefault(attention + (", memory" if "hybrid" in kind else ""), []).append(layer)
    return [f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: {what}" for what, layers in groups.items()]


def ranges(numbers: list[int]) -> str:
    """`"0-5, 7"` of ascending numbers."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def model_card(config: TNTConfig, conversion: dict[str, Any], checkpoint: Source, name: str, tokenizer: bool) -> str:
    """
    The README.md of a conversion.

    Args:
        config: of the result. conversion: what the manifest says about it. checkpoint: the source.
        name: of the result's folder. tokenizer: whether one can be loaded from there.
    """
    source, window, closed = conversion["source"], conversion["window"], conversion["memory_starts_closed"]
    why = "cannot be loaded from here" if any(x in checkpoint.companions for x in TOKENIZERS) else "does not exist"
    layers, count = config.memory_layer_indices, config.num_hidden_layers
    metadata = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    said = front_matter(checkpoint.folder)
    base = source if HUB_ID.fullmatch(source) else said.get("base_model")  # of a folder, what it was made from
    metadata |= {"base_model": base} if base else {}
    metadata |= {key: value for key, value in said.items() if key in PASSED_ON}
    metadata["tags"] = ["tnt", "titans", "test-time-memory", "custom_code"]
    start = "The memory starts closed: it changes nothing until it is trained."
    if not closed:
        start = "The memory does not start closed: it changes the output from the start."
    where = "every layer" if len(layers) == count else f"layers {ranges(layers)}"
    parameters = conversion["parameters"]
    rows = {
        "source": source + (f" at `{conversion['revision']}`" if conversion["revision"] else ""),
        "architecture of the source": conversion["model_type"],
        "attention and memory": "; ".join(attention_summary(config)),
        "memories": "; ".join(
            f"{spec.name}, {spec.chunk_size} tokens per chunk"
            + (f", reset every {spec.reset_interval}" if spec.reset_interval else "")
            for spec in config.memory_specs
        ),
        "parameters": f"{parameters['base']:,} base, {parameters['memory']:,} memory",
        "dtype": conversion["dtype"] + ("" if conversion["cast"] else ", as in the source"),
        "seed": conversion["seed"],
        "tnt-hf": conversion["tnt_hf"],
    }
    return TEMPLATE.format(
        metadata=dump_yaml(metadata),
        title=name,
        source=f"[{source}](https://huggingface.co/{source})" if HUB_ID.fullmatch(source) else f"`{source}`",
        what=MEMORY.format(where=where, start=start) if layers else "TNT's form without a memory.",
        of_memory=MEMORY_LIMITS if layers else "",
        quick_start=(TEXT_START if tokenizer else IDS_START).format(name=json.dumps(name), why=why),
        remote_code=REMOTE_CODE,
        citation=CITATION,
        command=command_line(conversion, name),
        settings="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        probe=_probe(conversion),
        promises=_promises(conversion, bool(layers)),
        manifest=MANIFEST,
        untrained=_untrained(window, closed, bool(layers)),
    )


def _untrained(window: int | None, closed: bool, has_memory: bool) -> str:
    if not has_memory:
        return "What the window hides is lost." if window is not None else "It computes what the source computes."
    if not closed:
        hidden = "" if window is None else " What the window hides is lost until the memory is trained."
        return "This is an untrained start: the memory changes the output and has learnt nothing yet." + hidden
    if window is not None:
        return "This is an untrained start: what the window hides is lost until the memory is trained."
    return "This is an untrained start: it attends like the source, and the memory adds nothing yet."


def _promises(conversion: dict[str, Any], has_memory: bool) -> str:
    if has_memory and not conversion["memory_starts_closed"]:
        return "The base weights are the source's. The output differs from the source's from the first token.\n"
    whose = f"those of the source loaded in {conversion['dtype']}" if conversion["cast"] else "the source's"
    where = "" if conversion["window"] is None else f" at every position below {conversion['window']}"
    exact = "bit for bit"
    if conversion["fused"]:
        exact = "up to rounding (its fused projections are separate matrix products here)"
    return f"As converted, the logits are {whose}{where}, {exact}.\n"


def _probe(conversion: dict[str, Any]) -> str:
    errors = conversion["window_errors"]
    if errors is None:
        return ""
    kept = conversion["full_attention_layers"] or []
    losses = conversion.get("window_losses")
    added = [f" {loss:.4g} |" for loss in losses] if losses else [""] * len(errors)
    rows = "\n".join(
        f"| {layer} | {error:.4g} |{added[layer]} {'full attention' if layer in kept else ''} |"
        for layer, error in enumerate(errors)
    )
    also = ", and what it adds to the loss of the next token, which decides" * bool(losses)
    drawn = "loss that a window adds in each layer" if losses else "window error of each layer"
    picture = f"\n![{drawn}](window_errors.png)\n" if conversion["plot"] else ""
    return f"""
How much a window of {conversion["window"]} tokens changes the attention output of each layer, alone, on the probe text
(relative squared error){also}:

| layer | window error |{" loss added (nats) |" * bool(losses)} |
|---|---|{"---|" * bool(losses)}---|
{rows}
{picture}"""
