"""Reading a checkpoint without believing it: folder or Hub id, index, safetensors headers.

Nothing here reads tensor data. A header says where every tensor lies; whoever needs the bytes streams them
(conversion/shards.py).
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnt_hf.settings import check_text


ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Every dtype of the format, to tell "not a number we convert" from "not a safetensors file".
OTHER_DTYPES = set("BOOL U8 I8 U16 I16 U32 I32 U64 I64 F8_E4M3 F8_E5M2 F8_E8M0 F6_E2M3 F6_E3M2 F4 C64".split())
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, the limit of the format
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
# What a model folder holds besides its weights that a converted one needs too. Code is never taken along.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json",
    "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
READ_BY_ALL = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
# One of them is the sign of a tokenizer.
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
TEXTS = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY|COPYING)[\w.-]*", re.IGNORECASE)
TEMPLATES = "additional_chat_templates"
# Buffers that old releases of the library stored and newer ones compute: nobody reads them.
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
CONFIGS = ("config.json", "adapter_config.json", "tokenizer_config.json")  # one of them is in every repository
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `nbytes` bytes from `start` of `path`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def rows(self, first: int, count: int) -> "StoredTensor":
        """`count` rows from `first` on, which are consecutive bytes."""
        row = self.nbytes // self.shape[0]
        return StoredTensor(self.name, self.dtype, (count, *self.shape[1:]), self.path, self.start + first * row)


@dataclass(frozen=True)
class Source:
    """A checkpoint whose files fit together.

    Attributes:
        folder: resolved. name: what the user called it. fields: of `config.json`.
        shards: file name -> resolved path, in the order of the names. tensors: name -> [`StoredTensor`].
        companions: path relative to the folder -> resolved path, of tokenizer, generation config and licence files.
    """

    folder: Path
    name: str
    fields: dict[str, Any]
    shards: dict[str, Path]
    tensors: dict[str, StoredTensor]
    companions: dict[str, Path]


def locate(source: str | os.PathLike, revision: str | None = None, **hub: Any) -> Path:
    """
    The resolved folder of a checkpoint; a Hub id is downloaded into the Hub's cache: weights in safetensors, JSON and
    tokenizer files, never code. hub: `token` and `cache_dir`, if not the usual ones.

    Raises:
        FileNotFoundError: neither a folder nor the form of a Hub id. ValueError: no name, or an object.
    """
    if not isinstance(source, (str, os.PathLike)):
        made = f"source={type(source).__name__}: must be a folder or a Hub id"
        raise ValueError(f"{made}; save a live model first, or give it a memory by tnt_hf.conversion.inject")
    if not str(source).strip():
        raise ValueError(f"source={str(source)!r}: must name a folder or a Hub id; the working directory is '.'")
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r}: {source} is a local folder")
        folder = folder.resolve()
        check_text("source", str(folder))  # which files of the result name
        return folder
    if folder.exists():
        raise NotADirectoryError(f"source={str(source)!r}: is a file, not a checkpoint folder")
    if not HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f"source={str(source)!r}: no such folder, and a Hub id has the form owner/name")
    from huggingface_hub import snapshot_download

    small = [*COMPANIONS, "config.json", "adapter_config.json", INDEX, "README.md", f"{TEMPLATES}/*.jinja"]
    texts, cases = ("licen*", "notice*", "use_policy*", "copying*"), (str.lower, str.upper, str.capitalize)
    small += [case(text) for text in texts for case in cases]  # of which TEXTS says what they are
    try:
        check_reachable(str(source), **hub)
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=small, **hub))
    except OSError as error:  # explains itself in several lines, the first of which may not name the source
        raise OSError(f"source={str(source)!r}: {' '.join(str(error).split())}") from error
    index = folder / INDEX
    # A repository may hold the weights twice, in other layouts; only what the index names is fetched.
    names = {SINGLE, *(read_index(index).values() if index.exists() else ())}
    snapshot_download(str(source), revision=folder.name, allow_patterns=sorted(names), **hub)
    return folder.resolve()


def check_reachable(name: str, token: str | bool | None = None, cache_dir: str | os.PathLike | None = None) -> None:
    """
    Asks once whether `name` can be read, where the library asks for every file, and again and again if nobody answers.

    Raises:
        OSError: in one line that does not repeat `name`: neither here nor in the Hub's cache, and either no name of a
            repository, or the Hub has none or cannot be reached.
    """
    if Path(name).exists():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, HTTPError  # of httpx or httpx2, as the Hub's client has it
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise FileNotFoundError("no such folder") from None
    if name.startswith("runs/"):  # where training writes
        raise FileNotFoundError("no such folder")
    if any(isinstance(try_to_load_from_cache(name, file, cache_dir=cache_dir), str) for file in CONFIGS):
        return
    api = HfApi(token=token)
    try:
        api.model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HTTPError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        unknown = "knows none of that name, or none for you" if status in (401, 403, 404) else ""
        what = unknown or f"cannot be reached ({' '.join(str(error).split())})"
        raise OSError(f"no such folder, and the Hub at {api.endpoint} {what}") from error


def read_source(folder: Path, name: str | None = None) -> Source:
    """
    Check a checkpoint folder and describe it.

    Raises:
        ValueError: no usable `config.json`, an adapter, weights in pickles only, an index or a shard that is damaged,
            tensors the index and the shards do not agree about, a file outside the folder.
        OSError: a file is missing or cannot be read.
    """
    config = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder}: holds an adapter (adapter_config.json); merge it into its base model first")
    if not config.exists():
        raise FileNotFoundError(f"{folder}: has no config.json")
    fields = read_json(inside(folder, "config.json"))
    shards = _shards(folder)
    tensors: dict[str, StoredTensor] = {}
    for path in shards.values():
        for tensor in read_header(path):
            if COMPUTED.fullmatch(tensor.name):
                continue
            if tensor.name in tensors:
                raise ValueError(f"{path}: tensor {tensor.name!r} is in {tensors[tensor.name].path.name} as well")
            tensors[tensor.name] = tensor
    if SINGLE not in shards:
        _compare_with_index(folder, tensors)
    return Source(folder, name or str(folder), fields, shards, tensors, _companions(folder))


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files of a tokenizer; for some architectures the library makes an empty one of none."""
    return any((folder / name).exists() for name in TOKENIZERS)


def inside(folder: Path, name: str) -> Path:
    """
    The resolved path of the regular file `name` of a folder. A link may lead out of it only as the Hub's cache has it:
    from `snapshots/<commit>/` to `blobs/` of the same repository.

    Raises:
        ValueError: `name` is not a plain name, or leads elsewhere. FileNotFoundError: there is no such file.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or re.search(r"[/\\\x00]", name):
        raise ValueError(f"{folder / INDEX}: {name!r} is not a plain file name; a checkpoint stays inside its folder")
    path = folder / name
    real = Path(os.path.realpath(path))  # unlike `resolve`, it bears links that lead to themselves
    allowed = [folder.resolve()]
    if folder.parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    if real.parent not in allowed:
        raise ValueError(f"{path}: leads to {real}, outside the checkpoint's folder")
    if not real.exists():
        raise FileNotFoundError(f"{path}: missing")
    if not real.is_file():
        raise ValueError(f"{path}: is not a regular file")
    return real


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming the file if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_index(path: Path) -> dict[str, str]:
    """`weight_map` of an index: tensor name -> file name. Raises ValueError if it is not one."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise ValueError(f"{path}: weight_map[{tensor!r}]={shard!r} is not a file name")
    return weight_map


def _shards(folder: Path) -> dict[str, Path]:
    """File name -> resolved path; the single file wins over an index, as in the library."""
    if os.path.lexists(folder / SINGLE):
        return {SINGLE: inside(folder, SINGLE)}
    if os.path.lexists(folder / INDEX):
        names = sorted(set(read_index(inside(folder, INDEX)).values()))
        return {name: inside(folder, name) for name in names}
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if found:
        raise ValueError(
            f"{folder}: no {SINGLE}, only {found[0]}. Pickles can run code and are not read: save the model once with"
            " save_pretrained, which writes safetensors"
        )
    raise FileNotFoundError(f"{folder}: has no {SINGLE} and no {INDEX}")


def _compare_with_index(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    index = read_index(inside(folder, INDEX))
    for name, shard in index.items():
        if COMPUTED.fullmatch(name):
            continue
        if name not in tensors:
            raise ValueError(f"{folder / shard}: tensor {name!r} of {INDEX} is missing")
        if tensors[name].path != inside(folder, shard):
            raise ValueError(f"{folder / INDEX}: tensor {name!r} is in {tensors[name].path.name}, not in {shard}")
    if extra := sorted(tensors.keys() - index.keys()):
        raise ValueError(f"{tensors[extra[0]].path}: tensor {extra[0]!r} is not in {INDEX}")


def _companions(folder: Path) -> dict[str, Path]:
    names = [path.name for path in folder.iterdir()]
    found = [name for name in names if name in COMPANIONS or TEXTS.fullmatch(name) and not (folder / name).is_dir()]
    companions = {name: inside(folder, name) for name in sorted(found)}
    for name, path in companions.items():
        if name in READ_BY_ALL:
            read_json(path)  # a damaged one would only be found out by who loads the copy
    templates = folder / TEMPLATES
    if templates.is_dir():
        root = folder.resolve().parent.parent / "blobs" if folder.parent.name == "snapshots" else templates.resolve()
        for path in sorted(templates.glob("*.jinja")):
            real = Path(os.path.realpath(path))
            if real.parent not in (root, templates.resolve()):
                raise ValueError(f"{path}: leads to {real}, outside the checkpoint's folder")
            companions[f"{TEMPLATES}/{path.name}"] = real
    return companions


def read_header(path: Path) -> list[StoredTensor]:
    """
    The tensors of a safetensors file in the order of their bytes.

    Raises:
        ValueError: the file is truncated or damaged, or its tensors overlap, leave gaps or are of an integer or
            8-bit type.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path}: is truncated or no safetensors file ({size} bytes, a header of {length})")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{path}: the __metadata__ of its header is damaged")
    tensors = []
    for name, entry in header.items():
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            whole = all(type(n) is int and n >= 0 for n in (*shape, start, end))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: the header of tensor {name!r} is damaged") from error
        if not whole or not isinstance(dtype, str):
            raise ValueError(f"{path}: the header of tensor {name!r} is damaged")
        if dtype in OTHER_DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has dtype {dtype}; supported are {', '.join(ITEMSIZE)}")
        if dtype not in ITEMSIZE or math.prod(shape) * ITEMSIZE[dtype] != end - start:
            raise ValueError(f"{path}: tensor {name!r} has {end - start} bytes, not {dtype} {list(shape)}")
        tensors.append(StoredTensor(name, dtype, shape, path, 8 + length + start))
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    place = 8 + length
    for tensor in tensors:
        if tensor.start != place:
            raise ValueError(f"{path}: its tensors overlap or leave a gap at byte {min(tensor.start, place)}")
        place += tensor.nbytes
    if place != size:
        raise ValueError(f"{path}: is truncated or damaged: {size} bytes, its header describes {place}")
    return tensors


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a name appears twice")
    return found
