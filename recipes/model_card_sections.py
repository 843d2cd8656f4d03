"""The sections of a model card, each a function of what a folder holds; `""` where there is nothing to say."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from tnt_hf import TNTConfig
from tnt_hf.conversion.manifest import MANIFEST, read_manifest
from tnt_hf.conversion.model_card import PASSED_ON, REMOTE_CODE, attention_summary, command_line, front_matter
from tnt_hf.conversion.source import HUB_ID, read_json
from tnt_hf.costs_tnt import memory_state_bytes
from tnt_hf.recipes.arguments import DataArguments
from tnt_hf.recipes.file_formats import kind_of
from tnt_hf.recipes.model_card_tables import (
    code,
    data_name,
    facts,
    portable,
    portable_command,
    results,
    settings,
    text,
)
from tnt_hf.recipes.model_folder import TRAINING, Model


PLOTS = ("loss.png", "gates.png")
PAPERS = "([TNT, arXiv 2511.07343](https://arxiv.org/abs/2511.07343), on Titans, arXiv 2501.00663)"
START = """\
```python
{imports}

path = {name}  # this folder, or the Hub id it was uploaded to
model = {load}
{use}
```"""
USE_TEXT = """\
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
inputs = tokenizer("Test-time memory is", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"""
USE_IDS = """\
print(model.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=32))  # comes without a tokenizer"""
MODES = {
    "pretrain": "Next-token prediction from scratch (stage 1).",
    "stage2": "Next-token prediction with smaller local chunks (stage 2).",
    "align": "Memory and gates alone, layer by layer against the source's full attention.",
    "distill": "KL divergence to the frozen source.",
    "sft": "Next-token prediction on conversations.",
    "long": "Next-token prediction at a longer context.",
}


def tnt_config(model: Model) -> TNTConfig | None:
    """The configuration of a TNT model, `None` for others."""
    return TNTConfig.from_dict(dict(model.config)) if model.kind == "tnt" else None


def has_memory(model: Model) -> bool:
    """Whether any layer has a memory."""
    return bool(tnt_config(model).memory_layer_indices) if model.kind == "tnt" else bool(model.sizes["memory"])


def summary(model: Model) -> str:
    """What it is, in a sentence or two."""
    count, memory = sum(model.sizes.values()), model.sizes["memory"]
    started = f" of {_link(model.base)}" if model.base else ""
    if model.kind == "adapter":
        what = "LoRA and a test-time memory" if memory else "LoRA"
        return f"An adapter{started}: {what}, {count:,} parameters{f' {PAPERS}' if memory else ''}."
    if model.kind == "injected":
        return f"A {text(model.config['model_type'])} model with a memory inside its attention, {count:,} parameters."
    made = f", {text(memory)} of them in its memory" if memory else ""
    kind = f"test-time memory {PAPERS}" if memory else "the architecture of TNT's baselines, without a memory"
    converted = f" It was converted from {_link(model.conversion['source'])}." if "source" in model.conversion else ""
    return f"A causal language model of {count:,} parameters{made}: {kind}.{converted}"


def quick_start(model: Model, name: str) -> str:
    """Code that loads the model and generates; it runs as it stands beside the folder, or with a Hub id."""
    base, has_text = model.base, model.has_tokenizer
    # Without our package the library needs the remote code to read config.json, the tokenizer's reader too.
    tokenizer = "path, trust_remote_code=True" if model.kind == "tnt" else "path"
    if model.kind == "adapter" and base and not has_text:
        tokenizer, has_text = json.dumps(base), HUB_ID.fullmatch(base) is not None
    lines = [] if has_text else ["import torch"]
    if model.kind == "tnt":
        lines.append("from transformers import AutoModelForCausalLM" + ", AutoTokenizer" * has_text)
        load = "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)"
    else:
        lines += ["from transformers import AutoTokenizer"] * has_text + [
            "from tnt_hf.conversion import load_injected"
        ]
        local = model.kind == "adapter" and base and not HUB_ID.fullmatch(base)
        load = f"load_injected({json.dumps(base) + ', ' if local else ''}path)"
    use = USE_TEXT.format(tokenizer=tokenizer) if has_text else USE_IDS
    block = START.format(imports="\n".join(lines), name=json.dumps(name), load=load, use=use)
    after = REMOTE_CODE if model.kind == "tnt" else "It needs the package `tnt-hf`, which puts the memory back."
    return f"{block}\n\n{after}"


def architecture(model: Model) -> str:
    """What the model consists of, and what its memory costs."""
    shown = {"parameters": ", ".join(f"{n:,} {'in the ' * (k == 'memory')}{k}" for k, n in model.sizes.items() if n)}
    if model.kind == "adapter":
        lora = {key: model.config.get(key) for key in ("r", "lora_alpha", "lora_dropout", "target_modules")}
        shown |= {key.replace("_", " "): code(x) for key, x in lora.items() if x is not None}
    if (config := tnt_config(model)) is None:
        injection = model.config.get("tnt_injection") or {}
        names = {"weight": "weight at the start"}  # the saved one is a tensor, which a schedule may have moved
        return facts(
            shown
            | {names.get(x, x.replace("_", " ")): code(value) for x, value in injection.items() if value is not None}
        )
    heads = f"{config.num_attention_heads} query and {config.num_key_value_heads} key-value heads"
    shown |= {
        "layers": f"{config.num_hidden_layers}, {config.hidden_size:,} wide, {heads} of {config.head_dim}",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "positions": f"{config.max_position_embeddings:,}",
        "attention and memory": "; ".join(attention_summary(config)),
        "dtype": str(config.dtype or "float32").removeprefix("torch."),
    }
    if config.memory_layer_indices:
        shown["memories"] = "; ".join(
            f"{spec.name}, {spec.chunk_size:,} token{'s' * (spec.chunk_size > 1)} per chunk"
            + (f", reset every {spec.reset_interval:,}" if spec.reset_interval else "")
            for spec in config.memory_specs
        )
        shown["memory network"] = (
            f"{config.memory_depth} layer{'s' * (config.memory_depth > 1)}, {config.memory_num_heads} heads of"
            f" {config.memory_head_dim}, joined by {code(config.memory_gate)}"
        )
        shown["Q-K projection"] = code(config.qk_projection)
        size = memory_state_bytes(config, shown["dtype"])
        shown["memory state"] = f"{size:,} bytes per sequence, at any context length"
    return facts(shown)


def origin(model: Model, name: str) -> str:
    """The conversion, export or earlier stage that a model comes from."""
    found = model.conversion
    if "source" in found:
        start = "The memory was trained after the conversion." if model.training else ""
        command = f"```bash\n{portable_command(command_line(found, name))}\n```"
        return f"Converted from {_link(found['source'])} by\n\n{command}\n\n{start}".strip()
    if "exported_from" in found:
        return f"A {text(found['exported_from'])} model with an injected memory, saved as a standalone model."
    if model.start and model.kind == "tnt":
        return f"Training started from {_link(model.start)}."
    return ""


def training_data(model: Model) -> str:
    """What the model read."""
    data = dict(model.training.get("data") or {})
    name = data.pop("name", None)
    shown = {
        "text": f"[{name}](https://huggingface.co/datasets/{name})"
        if hub_datasets(model.training)
        else data_name(name)
    }
    if name == "python-stdlib":
        shown["text"] += ", the source text of Python's standard library"
    data.pop("encoding", None)
    if isinstance(data.get("digest"), str):
        data["digest"] = data["digest"][:16]
    shown = (shown if name else {}) | {key.replace("_", " "): _fact(x) for key, x in data.items()}
    return facts(shown)


def training(model: Model) -> str:
    """Command, hyperparameters, figures and curves of the run."""
    run = model.training
    if not run:
        return ""
    environment = dict(run.get("environment") or {})
    versions = environment.pop("versions", None) or {}
    shown = {
        "tokens": _fact(run.get("tokens_trained")),
        "optimizer steps": _fact(run.get("steps")),
        "parameters trained": _fact(run.get("trained_parameters")),
        "time": f"{run['seconds']:,.0f} s" if run.get("seconds") is not None else None,
        "tokens per second": f"{run['tokens_per_second']:,.0f}" if run.get("tokens_per_second") is not None else None,
        "peak memory": f"{run['peak_memory_bytes'] / 2**20:,.0f} MiB" if run.get("peak_memory_bytes") else None,
        "seed": _fact(run.get("seed")),
        **{f"{key.replace('_', ' ')} at the end": _fact(x) for key, x in (run.get("metrics") or {}).items()},
        **{key.replace("_", " "): _fact(x) for key, x in environment.items() if key not in ("command", "seed")},
        "versions": ", ".join(f"{key} {text(x)}" for key, x in versions.items()) or None,
    }
    pictures = [f"![{Path(name).stem}]({name})" for name in PLOTS if (model.folder / name).is_file()]
    parts = [
        MODES.get(run.get("mode"), ""),
        f"```bash\n{portable_command(run['command'])}\n```" if run.get("command") else "",
        settings(run.get("settings") or {}),
        facts(shown),
        "\n".join(pictures),
    ]
    return "\n\n".join(part for part in parts if part)


def evaluation_results(model: Model) -> str:
    """What was measured, and by which command."""
    found = results(model.evaluation)
    if not found:
        return ""
    command = model.evaluation.get("command")
    folder = model.folder / "evaluation"
    warnings = "\n".join(f"- Warning: {text(portable(note))}." for note in model.evaluation.get("warnings", []))
    parts = [f"```bash\n{portable_command(command)}\n```" if command else "", warnings, *found]
    parts += ["\n".join(f"![{p.stem}](evaluation/{p.name})" for p in sorted(folder.glob("*.png")))]
    return "\n\n".join(part for part in parts if part)


def limits(model: Model) -> str:
    """What the model cannot do and what nobody has measured."""
    lines = []
    if has_memory(model):
        lines += ["The memory works within one sequence; it keeps nothing between sequences."]
        lines += ["Speculative decoding, offloaded and quantized caches are refused: a memory cannot be rolled back."]
    if model.training:
        given = model.training.get("settings", {}).get("data", {})
        length = given.get("sequence_length", DataArguments().sequence_length)
        tokens = model.training.get("tokens_trained")
        seen = f"{tokens:,} tokens, in rows" if tokens else "rows"
        lines += [f"The run above read {seen} of {length:,}; longer texts are untested unless results say otherwise."]
    if not results(model.evaluation):
        lines += ["No evaluation results are included."]
    if model.base:
        lines += [f"What {_link(model.base)} may and may not be used for applies to this model too."]
    return "\n".join(f"- {line}" for line in lines)


def metadata(model: Model, name: str, license: str | None = None) -> ModelCardData:
    """The card's YAML; licence, language and base model as the folder's card or the nearest one of what it was made
    from says them, and all datasets of the Hub that any of these were trained on."""
    kept, datasets = {"license": license} if license else {}, hub_datasets(model.training)
    bases = [model.base]
    for place in model.lineage:
        said = {key: x for key, x in front_matter(place).items() if x}
        names = [key for key in PASSED_ON if not (key.startswith("license") and "license" in kept)]
        kept = {key: said[key] for key in names if key in said} | kept
        if (place / MANIFEST).is_file():
            bases.append(read_manifest(place)["conversion"].get("source"))
        bases.append(said.get("base_model"))
        datasets += hub_datasets(read_json(path)) if (path := place / TRAINING).is_file() else []
    base = next((x for x in bases if isinstance(x, str) and HUB_ID.fullmatch(x) and not Path(x).is_dir()), None)
    kept |= {"base_model": base} if base else {}
    tags = [
        "tnt",
        *["test-time-memory"] * has_memory(model),
        *{"tnt": ["custom_code"], "adapter": ["lora"]}.get(model.kind, []),
    ]
    found = model_index(model)
    return ModelCardData(
        library_name="peft" if model.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        tags=tags,
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=name if found else None,
        eval_results=found or None,
        **kept,
    )


def hub_datasets(run: dict[str, Any]) -> list[str]:
    """The data of a `training.json`, if it is a dataset of the Hub."""
    name = (run.get("data") or {}).get("name")
    if not isinstance(name, str) or not HUB_ID.fullmatch(name):
        return []
    return [] if kind_of(Path(name)) or Path(name).exists() else [name]  # a file, here or where it was trained


def model_index(model: Model) -> list[EvalResult]:
    """The evaluation as the Hub's model-index has it, which has no place for what `tnt eval` warns of."""
    found, rows = model.evaluation, []

    def add(dataset: str, kind: str, metric: tuple[str, str], value: float) -> None:
        task = {"task_type": "text-generation", "task_name": "Text Generation"}
        what = {"dataset_name": dataset, "dataset_type": kind, "metric_type": metric[0], "metric_name": metric[1]}
        rows.append(EvalResult(**task, **what, metric_value=float(f"{value:.6g}")))

    perplexity = found.get("perplexity") or {}
    if perplexity.get("overall") is not None and not found.get("warnings"):
        data = data_name(perplexity.get("data") or "held-out text").strip("`")
        add(data, data if HUB_ID.fullmatch(data) else "text", ("perplexity", "Perplexity"), perplexity["overall"])
    for entry in found.get("passkey") or []:
        metric = ("accuracy", f"Accuracy at a distance of {entry['distance']} tokens")
        add("Passkey retrieval", "passkey", metric, entry["accuracy"])
    for entry in found.get("recall") or []:
        metric = ("accuracy", f"Accuracy at {entry['distance_from']} to {entry['distance_to']} tokens")
        add("Associative recall", "recall", metric, entry["accuracy"])
    return rows


def _fact(value: Any) -> str | None:
    """A value of a JSON file as the cell of a table."""
    return None if value is None or value == [] else text(portable(value))


def _link(name: str) -> str:
    """A Hub id as a link, a folder as code."""
    return f"[{name}](https://huggingface.co/{name})" if HUB_ID.fullmatch(name) else code(name)
