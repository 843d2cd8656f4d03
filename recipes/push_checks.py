"""What of a folder belongs into a repository, and whether it may go there: complete, finite, and without secrets.

Nothing here writes, and only a model with an injected memory is loaded: all others are checked by their headers, and
every tensor is read once, in pieces.
"""

import ast
import json
import re
from functools import lru_cache
from os.path import realpath
from pathlib import Path

import torch

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion.manifest import MANIFEST
from tnt_hf.conversion.reload import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_injected
from tnt_hf.conversion.shards import inspect
from tnt_hf.conversion.source import COMPANIONS, INDEX, TEMPLATES, TEXTS, inside, read_header, read_json, read_source
from tnt_hf.conversion.tokenizer import load_tokenizer, names_code
from tnt_hf.recipes.encoding import vocabulary_size
from tnt_hf.recipes.loading_errors import reading
from tnt_hf.recipes.model_card_tables import portable, portable_command
from tnt_hf.recipes.model_folder import EVALUATION, TRAINING, Model


# Of the Hub, GitHub, OpenAI and its like, AWS, and a private key of any kind.
SECRET = re.compile(
    rb"\b(hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|sk-[A-Za-z0-9_-]{20,}|AKIA[A-Z0-9]{16})\b"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
PICTURES = (".png", ".svg")
OURS = ("loss.png", "gates.png", "window_errors.png")  # pictures that runs and conversions leave
NOT_READ = (".safetensors", ".model", *PICTURES)  # what is not text
NAMES_OF_FOLDERS = ("_name_or_path", "name_or_path", "base_model_name_or_path")


def files_to_push(model: Model) -> dict[str, Path]:
    """
    Name in the repository -> path, of everything that belongs there but the card: configuration, weights, code,
    tokenizer, licence, results and plots. Checkpoints, optimizer states, event files and hidden files do not.

    Raises:
        ValueError: what is there does not fit together; the message names the file. OSError: a file is missing.
    """
    folder = model.folder
    if model.kind == "adapter":
        names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
        shards: set[str] = {ADAPTER_WEIGHTS}
    else:
        shards = set(read_source(folder).shards)
        names = ["config.json", *sorted(shards), *([INDEX] if len(shards) > 1 or (folder / INDEX).exists() else [])]
        names += _code_files(model)
    stray = {path.name for path in folder.glob("*.safetensors")} | {p.name for p in folder.glob(INDEX)}
    if stray := sorted(stray - set(names)):
        raise ValueError(f"{folder}/{stray[0]}: belongs to no model here; move it away, or readers may load it")
    if INDEX in names and "model.safetensors" in shards:
        raise ValueError(f"{folder}/{INDEX}: stands beside model.safetensors, which holds the whole model")
    found = sorted(path.name for path in folder.iterdir() if path.is_file())
    names += [name for name in found if name in COMPANIONS or TEXTS.fullmatch(name)]
    card = folder / "README.md"
    shown = card.read_text(encoding="utf-8", errors="replace") if card.is_file() and not card.is_symlink() else ""
    names += [name for name in found if name in (TRAINING, "training_log.jsonl", MANIFEST, *OURS)]
    names += [name for name in found if name.endswith(PICTURES) and f"({name})" in shown]
    files = {name: inside(folder, name) for name in dict.fromkeys(names)}
    evaluation = (folder / EVALUATION).parent
    for part in (folder / TEMPLATES, evaluation):
        if (real := Path(realpath(part))).parent != folder.resolve():
            raise ValueError(f"{folder}/{part.name}: leads to {real}, outside the folder")
        if part.is_symlink() and not part.exists():
            raise ValueError(f"{folder}/{part.name}: is a link that leads nowhere")
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        files[f"{TEMPLATES}/{path.name}"] = inside(path.parent, path.name)
    if (folder / EVALUATION).is_file():
        for path in sorted(evaluation.iterdir()):
            if path.name == "evaluation.json" or path.suffix in (".md", *PICTURES):
                files[f"{evaluation.name}/{path.name}"] = inside(evaluation, path.name)
    return files


def _code_files(model: Model) -> list[str]:
    """The files `auto_map` names and those they import, each of which must be there and define what it should."""
    if model.kind != "tnt":
        return []
    auto_map = model.config.get("auto_map")
    if not isinstance(auto_map, dict) or not {"AutoConfig", "AutoModelForCausalLM"} <= auto_map.keys():
        raise ValueError(f"{model.folder}/config.json: auto_map={auto_map!r} names no code; save_pretrained writes it")
    found: dict[str, frozenset[str]] = {}
    for kind, target in auto_map.items():
        if not isinstance(target, str) or not re.fullmatch(r"\w+\.\w+", target):
            raise ValueError(
                f"{model.folder}/config.json: auto_map[{kind!r}]={target!r} is not FILE.CLASS of this folder;"
                " load the model where tnt_hf is imported and save it again"
            )
        module, name = target.split(".")
        _follow(model.folder, module, found)
        if name not in found[module]:
            raise ValueError(f"{model.folder}/{module}.py: defines no class {name}, which auto_map names")
    return sorted(f"{module}.py" for module in found)


def _follow(folder: Path, module: str, found: dict[str, frozenset[str]]) -> None:
    """Adds the module and those it imports, each with the names of its classes."""
    if module in found:
        return
    path = folder / f"{module}.py"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}/{path.name}: missing, but config.json or another file needs it")
    try:
        found[module], needed = _classes_and_imports(inside(folder, path.name).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{folder}/{path.name}: is not valid Python ({error})") from error
    for other in needed:
        _follow(folder, other, found)


@lru_cache(maxsize=128)  # the same files lie in every folder of a release, and take half a second
def _classes_and_imports(source: str) -> tuple[frozenset[str], list[str]]:
    """Names of the classes of a module, and of the modules beside it that it imports."""
    tree = ast.parse(source)
    classes = frozenset(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    beside = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1)
    return classes, [node.module for node in beside if node.module]


def check_files(model: Model, files: dict[str, Path]) -> list[str]:
    """
    Everything a reader will rely on.

    Returns:
        What is worth knowing but no mistake, one line each.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    for name, path in files.items():
        if path.suffix in NOT_READ:
            continue
        content = path.read_bytes()
        check_secrets(name, content)
        if path.suffix == ".json":
            _check_json(name, content)
    for name, path in files.items():
        if path.suffix == ".safetensors":
            inspect(path, read_header(path), name)
    if model.kind == "adapter":
        if not model.sizes["lora"] and not model.sizes["memory"]:
            raise ValueError(f"{ADAPTER_WEIGHTS}: holds no tensor of LoRA and none of a memory")
        base = model.config.get("base_model_name_or_path")
        if isinstance(base, str) and (Path(base).is_dir() or portable(base) != base):
            note = f"{ADAPTER_CONFIG}: its base is {base!r}, a folder that readers do not have: push that, and name it"
            return [note, *_check_tokenizer(model)]
    else:
        _check_complete(model)
    return _check_tokenizer(model)


def check_secrets(name: str, content: bytes) -> None:
    """Raises ValueError if the content of the file `name` has something in it that must not be published."""
    if SECRET.search(content):
        raise ValueError(f"{name}: holds what looks like a token or a private key; remove it, and revoke it")


def _check_json(name: str, content: bytes) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(f"{name}: holds {constant}, which is neither JSON nor a result")

    try:
        json.loads(content, parse_constant=refuse)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: is not valid JSON ({error})") from error


def _check_complete(model: Model) -> None:
    """The tensors are those of the model that the configuration describes, name by name and shape by shape."""
    if model.kind == "injected":
        with reading(str(model.folder)):
            load_injected(model.folder)  # compares every tensor itself, which it must load for that
        return
    with reading(f"{model.folder}/config.json"), torch.device("meta"):
        config = TNTConfig.from_dict(dict(model.config))
        config._attn_implementation = "eager"  # whatever it names, of which this machine may lack the package
        built = TNTForCausalLM(config)
    wanted = {name: tuple(x.shape) for name, x in built.state_dict().items()}
    stored = {name: x.shape for name, x in read_source(model.folder).tensors.items()}
    tied = {"lm_head.weight"} if built.config.tie_word_embeddings else set()
    if missing := sorted(wanted.keys() - stored.keys() - tied):
        raise ValueError(f"{model.folder}: tensor {missing[0]!r} of the configuration is missing")
    if strange := sorted(stored.keys() - wanted.keys()):
        raise ValueError(f"{model.folder}: tensor {strange[0]!r} does not belong to the configured model")
    if wrong := [name for name in stored if stored[name] != wanted[name]]:
        raise ValueError(
            f"{model.folder}: tensor {wrong[0]!r} has shape {list(stored[wrong[0]])}, the configuration says"
            f" {list(wanted[wrong[0]])}"
        )


def _check_tokenizer(model: Model) -> list[str]:
    if not model.has_tokenizer:
        return ["no tokenizer: readers need one from elsewhere"] if model.kind != "adapter" else []
    try:
        tokenizer = load_tokenizer(model.folder)
    except ValueError:
        if not names_code(model.folder):
            raise
        return ["the tokenizer needs code, which is not run here: its ids were not compared with vocab_size"]
    size = model.config.get("vocab_size")
    if size is not None and (needed := vocabulary_size(tokenizer)) > size:
        raise ValueError(f"{model.folder}: the ids of its tokenizer need {needed} rows, vocab_size is {size}")
    return []


def left_out(model: Model, files: dict[str, Path]) -> list[str]:
    """What lies in the folder and stays there: files, and folders with a slash."""
    found = []
    for path in sorted(model.folder.iterdir()):
        name = path.name + "/" * path.is_dir()
        inside_it = any(pushed.startswith(name) for pushed in files) if path.is_dir() else path.name in files
        if not inside_it and name != "README.md":
            found.append(name)
    return found


def public_json(name: str, path: Path) -> bytes | None:
    """The content of a JSON file without the paths of this machine, `None` if there are none in it."""
    if path.suffix != ".json":
        return None
    values = read_json(path)
    clean = {key: portable(x) if key in NAMES_OF_FOLDERS else x for key, x in values.items()}
    if name in (TRAINING, EVALUATION):
        clean = portable(values)
        if isinstance(values.get("command"), str):
            clean["command"] = portable_command(values["command"])
    return None if clean == values else (json.dumps(clean, indent=2) + "\n").encode()
