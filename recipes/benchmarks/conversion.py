"""What a conversion costs: seconds against `cp`, and anonymous memory, on a synthetic checkpoint of an 8B's shape.

    python -m tnt_hf.recipes.benchmarks.conversion --folder DIR --out results/conversion.json

Every stage is a process of its own. `cp` and our copy take turns and both end with their files flushed to the disk;
what the page cache holds of the source is not controlled, so both may read it warm. Anonymous memory (RssAnon) is what
a process takes from others; pages of mapped and cached files are not in it. It is sampled every few milliseconds, and
given beside what the imports alone take. Needs three times the checkpoint's size in space, 48 GB for the 8B.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from tnt_hf.conversion.families import base_shapes, read_source_config, tnt_config
from tnt_hf.conversion.memory_use import anonymous_bytes
from tnt_hf.conversion.shards import NewTensor, split_by_size
from tnt_hf.recipes.benchmarks.measure import environment, spread


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
SHARDS = 4
BLOCK = 32 * 2**20  # bytes of random numbers, repeated
SAMPLE = 0.003  # seconds between two looks at a process
LIMITS = {"copy_over_cp": 1.2, "link_seconds": 10, "same_dtype_mib": 256, "cast_mib": 2048}
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
        raise SystemExit("the conversion could not be imported")
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
        raise SystemExit(f"the conversion failed with status {process.returncode}")
    return {"seconds": round(end - start, 3), "anonymous_mib": round(peak / 2**20, 1)}


def copy(source: Path, result: Path) -> dict:
    """`cp`, with its files flushed to the disk."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, result], check=True)
    subprocess.run(["sync", *result.iterdir(), result], check=True)
    return {"seconds": round(time.perf_counter() - start, 3)}


def measure(args) -> dict:
    source, result = args.folder / "source", args.folder / "result"
    size = make_source(source, args.shape, args.seed)
    need = 3 * size
    if (free := shutil.disk_usage(args.folder).free + size) < need:
        raise SystemExit(f"--folder {args.folder}: {free / 1e9:.0f} GB are free, {need / 1e9:.0f} GB are needed")
    stages = {
        "cp": lambda: copy(source, result),
        "copy": lambda: convert(source, result, "--copy"),
        "link": lambda: convert(source, result, "--link"),
        "cast": lambda: convert(source, result, "--dtype", "float16"),
    }
    found = {name: [] for name in args.stages}
    for turn in range(args.rounds):
        for i in range(len(args.stages)):
            name = args.stages[(turn + i) % len(args.stages)]
            subprocess.run(["sync"], check=True)  # nobody pays for what another left unwritten
            found[name].append(stages[name]())
            shutil.rmtree(result)
            print(f"round {turn + 1}: {name} {json.dumps(found[name][-1])}", file=sys.stderr, flush=True)
    shutil.rmtree(source)
    return {"tensor_bytes": size, "rounds": found, "imports_mib": imports(), **summarise(found)}


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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON to write")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where there is room; source/ and result/ come in it"
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--stages", default="cp,copy,link,cast", help="which, in this order")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.stages = args.stages.split(",")
    report = {"environment": environment(args.seed), "shape": {"name": args.shape} | SHAPES[args.shape]}
    report |= measure(args)
    json.dump({key: report[key] for key in ("summary", "holds")}, sys.stdout, indent=1)
    print()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
