"""Every recipe of the package: its settings are accepted, its header comment is true, and it runs.

A recipe is run as it is, on a model of width 32 and on data that is made here: two optimizer steps through the command
itself. A stage that goes on from another one goes on from what that one left. New recipe files are covered by being
there; a source that is not known here needs its sizes in `SOURCES`.
"""

import json
import math
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import load_injected, lora_config
from tnt_hf.conversion.families import tnt_config
from tnt_hf.presets import PRESETS
from tnt_hf.recipes.chat import PLAIN_TEMPLATE
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.model_card import model_card
from tnt_hf.recipes.recipe_file import read_recipe
from tnt_hf.recipes.train import main as train


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes"
RECIPES = {f"{path.parent.name}/{path.stem}": path for path in sorted(FOLDER.glob("*/*.yaml"))}
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false"]
# What the sources of the recipes are, as their repositories say.
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SOURCES = {
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, {"rope_parameters": LLAMA3}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, {}),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, {}),
}


def source_config(name: str):
    kind, hidden, inner, layers, heads, groups, width, vocabulary, more = SOURCES[name]
    extra = {} if kind == "qwen2" else {"head_dim": width}
    return CONFIG_MAPPING[kind](
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=vocabulary, max_position_embeddings=131072, tie_word_embeddings=True,
        **extra, **more,
    )  # fmt: skip


@cache
def recipe(name: str):
    return read_recipe(["--config", str(RECIPES[name]), *ON_A_CPU])


@cache
def header(name: str) -> str:
    """The comment at the beginning of a recipe, one line."""
    lines = []
    for line in RECIPES[name].read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)


def first(name: str) -> str:
    """The recipe whose model, at its full size, `name` trains in the end."""
    model = recipe(name).model
    start = model.source or model.model
    return first(start.removeprefix("runs/")) if start.startswith("runs/") else name


@cache
def parameters(name: str) -> dict[str, int]:
    """Parameters of a recipe's model at its full size, on the meta device: all, those of its memory, those of LoRA."""
    settings = recipe(first(name)).model
    vocabulary = {"vocab_size": settings.tokenizer_vocab_size} if settings.tokenizer_vocab_size else {}
    with torch.device("meta"):
        if settings.source:
            source = source_config(settings.source)
            arguments = dict(settings.convert)
            window, keep, _ = (arguments.pop(x, None) for x in ("window", "keep_full_attention", "probe"))
            layers = list(range(int(keep.removeprefix("auto:")))) if isinstance(keep, str) else keep
            model = TNTForCausalLM(tnt_config(source, window=window, keep_full_attention=layers, **arguments))
        elif settings.model in SOURCES:
            model = AutoModelForCausalLM.from_config(source_config(settings.model))
        elif settings.model == "llama":
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**vocabulary | settings.model_config))
        else:
            model = TNTForCausalLM(TNTConfig(**PRESETS[settings.model] | vocabulary | settings.model_config))
    sizes = dict(model.named_parameters())
    rank = recipe(name).model.lora.get("r", 8)
    targets = [x for k, x in sizes.items() if re.search(r"self_attn\.[qkvo]_proj\.weight$", k)]
    return {
        "all": sum(x.numel() for x in sizes.values()),
        "memory": sum(x.numel() for k, x in sizes.items() if ".memory." in k),
        "lora": sum(rank * sum(x.shape) for x in targets),
    }


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_settings_are_accepted_and_the_header_is_true(name):
    settings, text = recipe(name), header(name)
    training, data = settings.training, settings.data
    assert re.search(r"Hardware: \S+", text) and re.search(r"Memory\b", text), text
    rows, length, product = map(number, re.search(r"Tokens per step: ([\d,]+) x ([\d,]+) = ([\d,]+)", text).groups())
    assert rows == training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert length == data.sequence_length and product == rows * length
    if steps := re.search(r"([\d,]+) steps make ([\d.]+) (million|billion)", text):
        tokens = float(steps[2]) * {"million": 1e6, "billion": 1e9}[steps[3]]
        assert tokens == settings.run.train_tokens and number(steps[1]) == math.ceil(tokens / product)
    if written := re.search(r"Parameters: ([\d,]+)", text):
        assert number(written[1]) == parameters(name)["all"]
    elif written := re.search(r"TNT of ([\d.]+) million parameters", text):
        assert float(written[1]) == round(parameters(name)["all"] / 1e6, 1)
    if written := re.search(r"([\d,]+) in the memory", text):
        assert number(written[1]) == parameters(name)["memory"]
    if written := re.search(r"([\d,]+) in LoRA", text):
        assert number(written[1]) == parameters(name)["lora"]


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("name", [name for name in RECIPES if " sum " in header(name)])
def test_the_memory_estimate_is_what_its_formulas_give(name):
    """Every line `what  formula  n GB` is computed again, and their sum."""
    text = RECIPES[name].read_text()
    lines = re.findall(r"^#   (.*?)\s{2,}(\S.*?)\s{2,}([\d.]+) GB$", text, flags=re.MULTILINE)
    length = math.prod(map(number, re.search(r"T = ([\d,]+(?: x [\d,]+)*) tokens", text)[1].split(" x ")))
    assert len(lines) >= 4
    total = 0.0
    for what, formula, size in lines:
        formula = re.sub(r"\(memory and LoRA\)| B\b|,(?=\d)|\b(memories|heads|rows|layers)\b", "", formula)
        value = eval(re.sub(r"\bx\b", "*", formula), {"T": length})
        assert abs(value / 1e9 - float(size)) < 0.06, what
        total += value
    (written,) = re.findall(r"^#   sum +([\d.]+) GB$", text, flags=re.MULTILINE)
    assert abs(total / 1e9 - float(written)) < (0.6 if "." not in written else 0.06)


def test_baselines_have_the_parameters_of_tnt():
    tnt = parameters("tnt_150m/stage1")["all"]
    for baseline in ("titans_150m/stage1", "transformer_150m/stage1"):
        assert abs(parameters(baseline)["all"] / tnt - 1) < 0.01
    gated = re.search(r"--model gated-transformer --intermediate_size (\d+)", header("transformer_150m/stage1"))
    fields = recipe("transformer_150m/stage1").model.model_config | {"intermediate_size": int(gated[1])}
    with torch.device("meta"):
        size = TNTForCausalLM(TNTConfig(**PRESETS["gated-transformer"] | fields)).num_parameters()
    assert abs(size / tnt - 1) < 0.01


def test_baselines_learn_from_the_same_text_in_the_same_way():
    own = {"model", "model_config"}
    given = [recipe(f"{name}_150m/stage1").given for name in ("tnt", "titans", "transformer")]
    tnt, *others = ({field: value for field, value in x.items() if field not in own} for x in given)
    for other in others:
        assert other == tnt


def test_tnt_150m_is_what_the_paper_says():
    stage1, stage2 = recipe("tnt_150m/stage1"), recipe("tnt_150m/stage2")
    config = stage1.model.model_config
    assert (config["global_chunk_size"], config["local_reset_interval"]) == (2048, 4096)
    assert config["local_chunk_sizes"] == [4, 8, 16, 32]
    assert stage2.model.model_config["local_chunk_sizes"] == [2, 4, 8, 16]
    training = stage1.training
    assert (training.learning_rate, training.weight_decay) == (1e-3, 0.1)
    assert training.lr_scheduler_type == "cosine" and "adamw" in training.optim
    assert stage1.data.sequence_length == 16384 and stage1.run.train_tokens == 10**10
    assert stage2.run.train_tokens == 0.05 * stage1.run.train_tokens
    assert 4.9e5 < 32 * 16384 < 5.3e5  # the half million of tokens per step


def test_tptt_alpaca_has_the_seed_s_settings():
    settings = recipe("tptt_alpaca/sft")
    adapter = lora_config(tiny_tnt(), **settings.model.lora)
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (8, 16, 0.05)
    assert settings.model.inject["operator"] == "delta_rule"
    schedule = settings.run.mag_schedule
    assert [schedule[x] for x in ("mode", "initial_weight", "final_weight", "transition_step")] == [
        "gradual",
        0.01,
        0.5,
        100,
    ]
    training = settings.training
    assert (training.learning_rate, training.max_grad_norm, training.num_train_epochs) == (5e-4, 1.0, 5)
    assert (training.per_device_train_batch_size, settings.data.sequence_length) == (3, 384)


# --- what runs ------------------------------------------------------------------------------------------------------


def tiny_tnt() -> TNTForCausalLM:
    with torch.device("meta"):
        return TNTForCausalLM(TNTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))


WORDS = "the memory learns while a model reads one more page of this long old book about rivers and bridges".split()
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def sentences(seed: int, count: int) -> str:
    order = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in order)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, a tokenizer and tiny sources in one folder; `runs/` in it is filled by the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    texts = [sentences(i, 120) for i in range(60)]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [[{"role": "user", "content": text[:30]}, {"role": "assistant", "content": text[30:90]}] for text in texts]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def run_of(place):
    """Runs a recipe's first two steps, and those of what it starts from, each once: name -> output folder."""

    def tiny_source(name: str) -> str:
        target = place / "sources" / name.replace("/", "--")
        if not target.exists():
            config = source_config(name)
            changes = TINY | {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 300}
            changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 0}
            for field, value in changes.items():
                setattr(config, field, value)
            config.head_dim = 8
            config.layer_types = None if config.model_type == "llama" else ["full_attention"] * 3
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(target)
            train_tokenizer_copy(place, target)
        return str(target)

    @cache
    def run(name: str, *more: str) -> Path:
        settings, output = recipe(name), place / "runs" / "-".join([name, *more]).replace(" ", "")
        model, data = settings.model, settings.data

        def start(named: str) -> str:
            return str(run(named.removeprefix("runs/"))) if named.startswith("runs/") else tiny_source(named)

        changes = {
            "output_dir": output, "max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "dataset_name": place / ("chats.jsonl" if settings.run.mode == "sft" else "texts.jsonl"),
            "dataset_split": "train", "sequence_length": 64, "eval_rows": 2, "logging_steps": 1, "report_to": "none",
            "dataloader_num_workers": 0, "memory_logging_steps": 1, "train_tokens": "null", "dataset_config": "null",
        }  # fmt: skip
        if more:  # alignment first: its result instead of the source
            changes |= {"source": "null", "convert": "null", "model": run(more[0]), "teacher": start(model.source)}
        elif model.source:
            changes["source"] = start(model.source)
            changes["convert.window"] = 16
            if "keep_full_attention" in model.convert:
                changes["convert.keep_full_attention"] = "auto:1"
        elif model.model in PRESETS or model.model == "llama":
            fields = TINY | {name: 32 for name in ("global_chunk_size",) if name in model.model_config}
            fields |= {name: 64 for name in ("local_reset_interval",) if name in model.model_config}
            fields |= {"sliding_window": 16} if "sliding_window" in model.model_config else {}
            fields |= {"vocab_size": 300} if "vocab_size" in model.model_config else {}
            fields |= {"num_key_value_heads": 2} if "num_key_value_heads" in model.model_config else {}
            changes |= {f"model_config.{key}": value for key, value in fields.items()}
        else:
            changes["model"] = start(model.model)
        if model.tokenizer:
            changes["tokenizer"] = place / "tokenizer"
        if model.tokenizer_vocab_size:
            changes["tokenizer_vocab_size"] = 300
        if data.streaming:
            changes["streaming"] = "true"
        words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
        assert train(["--config", str(RECIPES[name]), *ON_A_CPU, *words]) == 0, name
        return output

    return run


@pytest.mark.long
def test_distillation_goes_on_from_alignment_as_the_pages_say(run_of):
    aligned = run_of("qwen3_0b6_hybrid/align")
    output = run_of("qwen3_0b6_hybrid/distill", "qwen3_0b6_hybrid/align")
    assert json.loads((output / "training.json").read_text())["steps"] == 2
    assert not (output / "converted").exists()
    before, after = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (aligned, output))
    assert before.keys() == after.keys()
    gate = "model.layers.0.memory.gate.scale"
    assert not before[gate].equal(after[gate]) and (before[gate] - after[gate]).abs().max() < 0.1


def train_tokenizer_copy(place: Path, target: Path) -> None:
    for path in (place / "tokenizer").iterdir():
        (target / path.name).write_bytes(path.read_bytes())


# tnt_debug has every mode, tptt_alpaca injects; qwen25's differ from llama32's in their source alone
OFTEN = {"tnt_debug": (), "tptt_alpaca": (), "qwen25_1b5_hybrid": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=OFTEN.get(x.split("/")[0], pytest.mark.long)) for x in RECIPES]
)
def test_the_first_steps_run(run_of, name, capsys):
    output = run_of(name)
    record = json.loads((output / "training.json").read_text())
    assert record["steps"] == 2 and record["mode"] == recipe(name).run.mode
    assert record["recipe"] == f"{name}.yaml"
    losses = [
        x["loss"] for x in map(json.loads, (output / "training_log.jsonl").read_text().splitlines()) if "loss" in x
    ]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    is_injected = (output / "adapter_config.json").exists()
    model = load_injected(output) if is_injected else AutoModelForCausalLM.from_pretrained(output)
    ids = torch.arange(3, 35)[None]
    assert model.eval()(input_ids=ids).logits.isfinite().all()
    if model.config.model_type == "tnt" or is_injected:
        assert "## Training" in model_card(output, name)


# --- the pages ------------------------------------------------------------------------------------------------------


FOLDERS = sorted({path.parent.name for path in RECIPES.values()})


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_readme_of_a_recipe_names_its_files_and_its_commands_parse(folder):
    text = (FOLDER / folder / "README.md").read_text()
    for path in (FOLDER / folder).glob("*.yaml"):
        assert path.name in text or f"{folder}/{path.stem}" in text, path.name
    for link in re.findall(r"\]\((?!https:)([^)#]+)\)", text):
        assert (FOLDER / folder / link).exists(), link
    for command in commands(text):
        words = [re.sub(r"\$\(\(.*\)\)", "1", word) for word in command]
        if "train" in words[:2] or "tnt_hf.recipes.train" in words:
            begin = words.index("--config")
            read_recipe([*words[begin:], *ON_A_CPU])


def commands(text: str) -> list[list[str]]:
    """The commands of a page's bash blocks, as words."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [found for line in blocks.splitlines() if (found := shlex.split(line, comments=True))]


def test_expected_results_are_those_of_the_kept_runs():
    table = (FOLDER / "tnt_debug/README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d.]+) \|$", table, re.M)
    kept = {path.stem: json.loads(path.read_text()) for path in (FOLDER / "benchmarks/results/tnt_debug").iterdir()}
    assert sorted(kept) == sorted(name for name, _, _ in rows)
    for name, tokens, perplexity in rows:
        run = kept[name]
        assert run["command"] == f"tnt train --config tnt_debug/{name}"
        assert (tokens, perplexity) == (f"{run['tokens_trained']:,}", f"{run['metrics']['perplexity']:.1f}")


def test_the_index_lists_every_recipe():
    text = (FOLDER / "README.md").read_text()
    linked = set(re.findall(r"\]\((\w+)/README\.md\)", text)) | set(re.findall(r"\]\((\w+)/?\)", text))
    assert set(FOLDERS) <= linked
    assert {path.parent.name for path in FOLDER.glob("*/README.md")} <= linked
    for name in RECIPES:
        assert yaml.safe_load(RECIPES[name].read_text()), name
