"""Suite `conversion`: seconds of a conversion against `cp`, and anonymous memory, on a synthetic checkpoint of an 8B's
shape, as a suite of one row.

Every stage is a process of its own. `cp` and our copy take turns and both end with their files flushed to the disk;
what the page cache holds of the source is not controlled, so both may read it warm. Anonymous memory (RssAnon) is what
a process takes from others; pages of mapped and cached files are not in it. It is sampled every few milliseconds, and
given beside what the imports alone take. Needs twice the checkpoint's size in space, and some room: 36 GB for the 8B.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from tnt_hf.conversion.families import base_shapes, read_source_config, tnt_config
from tnt_hf.conversion.memory_use import anonymous_bytes
from tnt_hf.conversion.shards import NewTensor, split_by_size
from tnt_hf.recipes.benchmarks.measure import columns, spread
from tnt_hf.recipes.benchmarks.settings import ConversionSettings


SHAPES = {
    "8b": {  # Llama-3.1-8B
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
STAGES = ("cp", "copy", "link", "cast")
SHARDS = 4
BLOCK = 32 * 2**20  # bytes of random numbers, repeated
SAMPLE = 0.003  # seconds between two looks at a process
LIMITS = {"copy_over_cp": 1.2, "link_seconds": 10, "same_dtype_mib": 256, "cast_mib": 2048}
ROOM = 2 * 2**30  # bytes beside the source and one result, or as many as one of them has
# As the command line starts: its program name keeps `import tnt_hf` from loading the model.
IMPORTS = """
import sys
sys.argv[0] = "tnt"
from tnt_hf.conversion import convert
print("imported", flush=True)
sys.stdin.readline()
"""


def make_source(folder: Path, shape: str, seed: int) -> int:
    """A bfloat16 Llama checkpoint of finite random numbers in four shards. Returns its bytes of tensors."""
    fields = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"} | SHAPES[shape]
    config = tnt_config(read_source_config(fields))
    tensors = [NewTensor(name, "BF16", shape, lambda: torch.empty(0)) for name, shape in base_shapes(config)]
    total = sum(tensor.nbytes for tensor in tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    block = bytearray(BLOCK)
    values = torch.frombuffer(block, dtype=torch.bfloat16)
    values.copy_(0.02 * torch.randn(len(values), generator=torch.Generator().manual_seed(seed)))
    groups = split_by_size(tensors, total // SHARDS + max(tensor.nbytes for tensor in tensors) // 2)
    index = {}
    for i, group in enumerate(groups, 1):
        name, header, place = f"model-{i:05d}-of-{len(groups):05d}.safetensors", {}, 0
        for tensor in group:
            end = place + tensor.nbytes
            header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [place, end]}
            index[tensor.name], place = name, end
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, place, BLOCK):
                file.write(memoryview(block)[: min(BLOCK, place - start)])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    subprocess.run(["sync", *folder.iterdir()], check=True)
    return total


def imports() -> float:
    """Anonymous MiB of a process that has imported the conversion, and done nothing yet."""
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdout.readline().strip() != "imported":
        raise RuntimeError("the conversion could not be imported")
    size = anonymous_bytes(process.pid) or 0
    process.communicate("go\n")
    return round(size / 2**20, 1)


def convert(source: Path, result: Path, *options: str) -> dict:
    """`tnt convert`: seconds from start to end, and the peak of its anonymous MiB."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tnt_hf.cli", "convert", str(source), str(result), "--quiet", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid) or 0)
        time.sleep(SAMPLE)
    end = time.perf_counter()
    if process.returncode:
        raise RuntimeError(f"the conversion failed with status {process.returncode}")
    return {"seconds": round(end - start, 3), "anonymous_mib": round(peak / 2**20, 1)}


def copy(source: Path, result: Path) -> dict:
    """`cp`, with its files flushed to the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, result], check=True)
    subprocess.run(["sync", *result.iterdir(), result], check=True)
    return {"seconds": round(time.perf_counter() - start, 3)}


def prepare(settings: ConversionSettings) -> ConversionSettings:
    """Raises `ValueError` for an unknown shape or stage, or a large shape without a folder."""
    for name, values, known in (("shape", (settings.shape,), SHAPES), ("stages", settings.stages, STAGES)):
        if unknown := [value for value in values if value not in known]:
            raise ValueError(f"{name}={unknown[0]!r}: must be one of {', '.join(known)}")
    if settings.folder is None and settings.shape != "tiny":
        raise ValueError(f"folder=None: shape {settings.shape} needs room for two checkpoints; name a folder")
    return dataclasses.replace(settings, stages=tuple(settings.stages))


def rows(settings: ConversionSettings) -> list[str]:
    """One, as all stages take turns."""
    return [settings.shape]


def measure(name: str, settings: ConversionSettings, tell) -> dict:
    """All stages in turns, in `source` and `result` of the folder, which are removed again."""
    with tempfile.TemporaryDirectory() if settings.folder is None else nullcontext(settings.folder) as folder:
        source, result = Path(folder) / "source", Path(folder) / "result"
        if there := [path for path in (source, result) if path.exists()]:
            raise ValueError(f"folder={str(folder)!r}: {there[0].name} is in it already")
        tell("making the source")
        try:
            size = make_source(source, name, settings.seed)
            need, free = size + min(size, ROOM), shutil.disk_usage(folder).free
            if free < need:
                raise ValueError(
                    f"folder={str(folder)!r}: {free / 1e9:.3g} GB are free beside the source, not {need / 1e9:.3g}"
                )
            found = take_turns(source, result, settings, tell)
        finally:
            for path in (source, result):
                shutil.rmtree(path, ignore_errors=True)
    return {"tensor_bytes": size, "rounds": found, "imports_mib": imports(), **summarise(found)}


def take_turns(source: Path, result: Path, settings: ConversionSettings, tell) -> dict[str, list[dict]]:
    """What every stage took, round by round; each round starts with another stage."""
    stages = {
        "cp": lambda: copy(source, result),
        "copy": lambda: convert(source, result, "--copy"),
        "link": lambda: convert(source, result, "--link"),
        "cast": lambda: convert(source, result, "--dtype", "float16"),
    }
    found: dict[str, list[dict]] = {name: [] for name in settings.stages}
    for turn in range(settings.rounds):
        for i in range(len(found)):
            stage = settings.stages[(turn + i) % len(found)]
            tell(f"round {turn + 1}, {stage}")
            subprocess.run(["sync"], check=True)  # nobody pays for what another left unwritten
            found[stage].append(stages[stage]())
            shutil.rmtree(result)
    return found


def summarise(found: dict[str, list[dict]]) -> dict:
    """Medians, the ratio to `cp` of each round, and whether the limits hold."""
    summary = {name: {"seconds": spread([x["seconds"] for x in runs])} for name, runs in found.items()}
    for name, runs in found.items():
        if name != "cp":
            summary[name] |= {"anonymous_mib": max(x["anonymous_mib"] for x in runs)}
    holds = {}
    if {"cp", "copy"} <= found.keys():
        ratios = [ours["seconds"] / cp["seconds"] for ours, cp in zip(found["copy"], found["cp"])]
        summary["copy_over_cp"] = spread(ratios)
        holds["copy_over_cp"] = summary["copy_over_cp"]["median"] <= LIMITS["copy_over_cp"]
    if "link" in found:
        holds["link_seconds"] = summary["link"]["seconds"]["max"] < LIMITS["link_seconds"]
    for name, limit in (("copy", "same_dtype_mib"), ("link", "same_dtype_mib"), ("cast", "cast_mib")):
        if name in found:
            holds[f"{name}_{limit}"] = summary[name]["anonymous_mib"] <= LIMITS[limit]
    return {"summary": summary, "limits": LIMITS, "holds": holds}


def summary(found: dict[str, dict], settings: ConversionSettings) -> dict:
    """What [`summarise`] says."""
    (row,) = found.values()
    return {name: row[name] for name in ("summary", "limits", "holds")}


def table(result: dict) -> list[str]:
    """Seconds and anonymous memory of every stage; limits are for the large shape."""
    (row,) = result["rows"].values()
    stages = [(name, x) for name, x in row["summary"].items() if "seconds" in x]
    lines = [(name, x["seconds"]["median"], x.get("anonymous_mib")) for name, x in stages]
    lines.append(("imports alone", None, row["imports_mib"]))
    text = columns([("stage", "seconds", "anonymous MiB"), *lines])
    if "copy_over_cp" in row["summary"]:
        limit = f", at most {row['limits']['copy_over_cp']}" if result["settings"]["shape"] == "8b" else ""
        text.append(f"copy over cp: {row['summary']['copy_over_cp']['median']}{limit}")
    return text
