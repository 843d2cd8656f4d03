"""The Triton kernels on a GPU: held to the recurrence in float64, then timed against the torch form.

    python -m tnt_hf.recipes.benchmarks.kernels_gpu --out kernels_gpu.json

Every case is checked first, on a short sequence with resets, against `memory_naive` in float64 on the same rounded
inputs, and a whole model (global and local memories, projection, decoding) against itself in float64 and torch. Errors
are of the norm: a gradient has a jump where a limit on it begins to bind, so single numbers may differ by anything. A
case beyond its limit is reported with its error and not timed, one that cannot run with its message, and all results
so far are in the file after every case. Times, of bfloat16, are CUDA events around the forward and around forward +
backward, implementations taking turns; the torch form computes in float32. `layer` is one memory of a layer at the
size of a whole training step, 0.5M tokens, and the time of its kernels alone. Without a CUDA device every case says
"not measured". Errors alone can be had without one, of the compiled kernels on an emulated GPU:

    python tests/ptx_device.py 90 tnt_hf.recipes.benchmarks.kernels_gpu --heads 1 --out kernels_ptx.json
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tnt_hf import TNTCache, TNTConfig, TNTForCausalLM
from tnt_hf.conversion.files import write_json
from tnt_hf.kernels_parts_tnt import unavailable
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive
from tnt_hf.recipes.benchmarks.measure import NOT_MEASURED, environment, spread


MODEL = "model"
LIMITS = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 2e-2)}  # of outputs and of gradients
MODEL_LIMITS = (1e-4, 1e-3)  # of logits and of gradients: float32 through layers of attention and memory
DECODED = 40  # tokens
TIMED, LAYERS = "bfloat16", ("C=16 m=1", "C=16 m=1 bound")
KERNELS = ("forward_kernel", "reverse_kernel")
CASES = {
    "C=16 m=1": {"chunk_size": 16},
    "C=16 m=1 linear": {"chunk_size": 16, "depth": 1},
    "C=16 m=1 bound": {"chunk_size": 16, "grad_bound": 1.0},
    "C=16 m=1 LayerNorm": {"chunk_size": 16, "layernorm": True, "grad_bound": 1.0},
    "C=16 m=1 momentum forgetting": {"chunk_size": 16, "momentum": True, "decay": True},
    "C=16 m=1 GQA 4": {"chunk_size": 16, "groups": 4},
    "C=16 m=1 projection": {"chunk_size": 16, "query_projection": "shard"},
    "C=16 m=1 masked": {"chunk_size": 16, "masked": True},
    "C=16 m=2": {"chunk_size": 16, "expansion": 2},
    "C=8 m=1": {"chunk_size": 8},
    "C=64 m=1": {"chunk_size": 64},
    "C=128 m=1": {"chunk_size": 128},
    "global": {"read": "chunk_start"},
    "global momentum forgetting": {"read": "chunk_start", "momentum": True, "decay": True},
}


def inputs_of(case: dict, tokens: int, reset: int, args, dtype: torch.dtype) -> tuple[list, list, dict, dict]:
    """(q, k, v, lr), weights, options that are tensors, and the other options of the op. A case without a chunk size
    is of a global memory: its chunk has `reset` tokens, and it has no resets."""
    g = torch.Generator(args.device).manual_seed(args.seed)
    H, D = args.heads, args.width
    hidden = D * case.get("expansion", 1)
    widths = [D, hidden, D] if case.get("depth", 2) == 2 else [D, D]

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=args.device)

    def gate(scale):
        return scale * torch.rand(1, tokens, H, generator=g, device=args.device)

    heads = H * case.get("groups", 1), H, H
    q, k, v = (F.normalize(normal(1, tokens, n, D), dim=-1).to(dtype) for n in heads)
    weights = [normal(H, a, b) / a**0.5 for a, b in zip(widths, widths[1:])]
    options = {}
    if case.get("momentum"):
        options["momentum"] = gate(0.9)
    if case.get("decay"):
        options["decay"] = gate(0.01)
    if case.get("layernorm"):
        options["layernorm"] = (1 + 0.1 * normal(H, D), 0.1 * normal(H, D), 1e-6)
    if case.get("masked"):
        options["mask"] = torch.rand(1, tokens, generator=g, device=args.device) > 0.1
    fixed = {name: case[name] for name in ("chunk_size", "grad_bound", "query_projection", "read") if name in case}
    resets = {"reset_interval": reset} if "chunk_size" in case else {"chunk_size": reset}
    return [q, k, v, gate(0.1)], weights, options, fixed | resets


def leaves(tensors, weights, options) -> list[torch.Tensor]:
    scalars = [options[name] for name in ("momentum", "decay") if name in options]
    return [x.requires_grad_() for x in (*tensors, *weights, *scalars, *options.get("layernorm", ())[:2])]


def double(x):
    if isinstance(x, torch.Tensor):
        return x.detach().double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: double(y) for name, y in x.items()}
    return type(x)(double(y) for y in x) if isinstance(x, list | tuple) else x


triton, chunk = (partial(memory_chunkwise, implementation=name) for name in ("triton", "chunk"))


def errors(wanted, got) -> tuple[float, float]:
    """Of the first tensor, and the largest of all others."""
    found = [((y.double() - x).norm() / x.norm()).item() for x, y in zip(wanted, got, strict=True)]
    return found[0], max(found[1:], key=lambda x: float("inf") if x != x else x)  # NaN is the worst


def check(case: dict, args, dtype: torch.dtype) -> tuple[float, float]:
    """Errors of the output and of the gradients."""
    reset = max(case.get("chunk_size", 0), args.check_tokens // 3)
    *rounded, fixed = inputs_of(case, args.check_tokens, reset, args, dtype)
    results = []
    for op, (tensors, weights, options) in ((memory_naive, double(rounded)), (triton, rounded)):
        wanted = leaves(tensors, weights, options)
        o, _ = op(*tensors, weights, **options, **fixed)
        d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
        results.append([o, *torch.autograd.grad(o, wanted, d_o)])
    return errors(*results)


def check_model(args) -> dict[str, tuple[float, float]]:
    """Errors of logits and gradients, and of decoded logits in eager mode, of a model with all its kinds of memory,
    the last shards not full."""
    chunk = args.check_tokens // 12
    config = TNTConfig(
        vocab_size=64, hidden_size=4 * args.width, intermediate_size=4 * args.width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=2 * chunk, global_chunk_size=4 * chunk,
        local_chunk_sizes=[chunk], local_reset_interval=4 * chunk, memory_momentum=True, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    exact = TNTForCausalLM(config).to(args.device, torch.float64)
    config = TNTConfig(**{**config.to_dict(), "memory_implementation": "triton"})
    model = TNTForCausalLM(config).to(args.device)
    model.load_state_dict(exact.state_dict())
    tokens = args.check_tokens - chunk - chunk // 2
    ids = torch.randint(64, (2, tokens), generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    results, first = [], tokens - DECODED
    for net in (exact, model):
        out = net(ids, labels=ids)
        results.append([out.logits, *torch.autograd.grad(out.loss, list(net.parameters()))])
    with torch.no_grad():
        cache, steps = TNTCache(config), [first, *[1] * DECODED]
        decoded = torch.cat([model(x, cache=cache).logits for x in ids.split(steps, 1)], 1)
    return {"training": errors(*results), "decoding": errors([results[0][0]] * 2, [decoded] * 2)}


def calls(case: dict, tokens: int, args, op) -> dict:
    """The forward of a case and its forward + backward with `op`, to be called."""
    tensors, weights, options, fixed = inputs_of(case, tokens, args.reset_interval, args, getattr(torch, TIMED))
    wanted = leaves(tensors, weights, options)
    d_o = torch.randn_like(tensors[0])

    def forward():
        return op(*tensors, weights, **options, **fixed)[0]

    return {"forward": forward, "forward and backward": lambda: torch.autograd.grad(forward(), wanted, d_o)}


def seconds(contestants: dict[str, dict], rounds: int) -> dict:
    """`{name: {what: spread}}` of `calls`."""
    times = {name: {what: [] for what in of} for name, of in contestants.items()}
    for turn in range(rounds + 1):  # the first compiles
        for name, of in contestants.items():
            for what, call in of.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                if turn:
                    times[name][what].append(begin.elapsed_time(end) / 1e3)
    return {name: {what: spread(x, 6) for what, x in of.items()} for name, of in times.items()}


def kernel_seconds(call) -> dict[str, float]:
    """Of the local memory's kernels in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [x for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    return {name: round(sum(x.device_time for x in events if x.name == name) / 1e6, 6) for name in KERNELS}


def layer(name: str, args) -> dict:
    """One memory of a layer, alone."""
    of = calls(CASES[name], args.layer_tokens, args, triton)
    return {"seconds": seconds({"triton": of}, args.rounds)["triton"]} | {
        f"kernels of {what}": kernel_seconds(call) for what, call in of.items()
    }


def run_by(device: str) -> str:
    """Who runs kernels here: Triton's interpreter, or its driver for which GPU."""
    if unavailable(torch.device(device)):
        return NOT_MEASURED
    from triton.knobs import runtime
    from triton.runtime import driver

    if runtime.interpret:
        return "triton.runtime.interpreter"
    who = type(driver.active)
    return f"{who.__module__}.{who.__name__}, sm_{driver.active.get_current_target().arch}"


def measure(name: str, kind: str, args) -> dict | str:
    """One entry of the report."""
    if unavailable(torch.device(args.device)):
        return NOT_MEASURED
    if name == MODEL:
        return {"error": check_model(args), "limits": MODEL_LIMITS}
    found, limits = check(CASES[name], args, getattr(torch, kind)), LIMITS[kind]
    entry = {"error": dict(zip(("output", "gradient"), found)), "limits": limits, "seconds": NOT_MEASURED}
    right = all(error <= limit for error, limit in zip(found, limits))
    if args.device != "cpu" and kind == TIMED and right:
        ops = {"triton": triton, "chunk": chunk}
        contestants = {n: calls(CASES[name], args.tokens, args, op) for n, op in ops.items()}
        entry["seconds"] = seconds(contestants, args.rounds)
    return entry


def attempt(function, *arguments) -> dict | str:
    """What it returns, or what it failed with."""
    try:
        return function(*arguments)
    except Exception as error:  # a compiler's, a driver's: what it says is the result, and the other cases go on
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join([MODEL, *CASES]))
    for name, value in (
        ("tokens", 65536), ("layer-tokens", 1 << 19), ("check-tokens", 192), ("heads", 12), ("width", 64),
        ("reset-interval", 2048), ("rounds", 7), ("seed", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    if args.out.exists():  # what a GPU has measured is not measured again for nothing
        parser.error(f"--out {args.out}: is there already; choose another file")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"environment": environment(args.seed), "arguments": {**vars(args), "out": args.out.name}}
    report |= {"run_by": run_by(args.device), "layer": {}, "cases": {}}
    for name in tqdm(args.cases.split(","), unit="case"):
        report["cases"][name] = {
            kind: attempt(measure, name, kind, args) for kind in (LIMITS if name != MODEL else ["float32"])
        }
        tqdm.write(f"{name}: {json.dumps(report['cases'][name])}")
        if name in LAYERS:
            found = report["cases"][name][TIMED]
            timed = found != NOT_MEASURED and found.get("seconds", NOT_MEASURED) != NOT_MEASURED
            report["layer"][name] = attempt(layer, name, args) if timed else NOT_MEASURED
        write_json(args.out, report)


if __name__ == "__main__":
    main()
