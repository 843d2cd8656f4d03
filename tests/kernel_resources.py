"""Registers, spills and shared memory of the Triton kernels, compiled for sm_90 where no GPU is: a table of kernels.

`python tests/kernel_resources.py NAME ...` prints the figures of those rows as JSON; `--record` compiles all of them
and writes `kernel_figures.json`, which `test_kernels_aot.py` holds the code to. It runs in a process of its own: a
process with TRITON_INTERPRET has no kernels to compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import kernel_rows
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tnt_hf import kernels_tnt
from tnt_hf.kernels_local_reverse_tnt import reverse_kernel
from tnt_hf.kernels_local_tnt import forward_kernel
from tnt_hf.kernels_parts_tnt import SM_90
from tnt_hf.kernels_tnt import Shape
from tnt_hf.network_tnt import Net


FIGURES = Path(__file__).with_name("kernel_figures.json")
TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = {80: 163 << 10, 90: SM_90, 100: SM_90}  # of one program
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def measure(kernel, types: dict[str, str], constants: dict, options: dict, target: GPUTarget = TARGET) -> dict:
    """Compiles `kernel`: `types` are those of its run-time arguments ("*fp32" for what is not named), `constants` its
    compile-time ones and those that are `None`, `options` what a launch passes to the compiler. Addresses and what is
    called a stride are multiples of 16, as a launch finds them to be."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: types.get(name, "*fp32") for name in names}
    known = {name for name in names if signature[name][0] == "*" or name.endswith("_stride")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in known}
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run([TOOLS / tool, *flags, path], capture_output=True, text=True, check=True).stdout
            for tool, *flags in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm",))
        )
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spill_loads": instructions.count("LDL"),
        "spill_stores": instructions.count("STL"),
        "shared_bytes": compiled.metadata.shared,
        "instructions": len(instructions),
    }


def local(
    kernel, chunk_size=16, width=64, expansion=1, depth=2, groups=1, momentum=False, decay=False, norm=False,
    bound=None, carried=False, operands=torch.bfloat16, target=TARGET,
) -> Callable[[], dict]:  # fmt: skip
    """A row of the table: a kernel of the local memory while it trains, as `kernels_tnt` launches it."""

    def figures() -> dict:
        net = Net("silu", False, 1e-6)
        widths = (width, width * expansion if depth == 2 else width, width)
        rows, blocks = Shape.split(chunk_size)
        shape = Shape(rows, blocks, groups, widths, depth, net, momentum, momentum or decay, bound, operands)
        absent = {"loss", "end", "x_end", "d_x_end"}
        for used, names in (
            (carried, "x d_x"), (norm, "gain bias d_gain d_bias"), (momentum or decay, "c d_c"),
            (not (momentum or decay), "d_theta"), (decay, "A d_A target d_target"),
            (momentum, "D s_end m_end d_D d_s_end d_m_end"),
        ):  # fmt: skip
            absent |= set() if used else set(names.split())
        absent &= set(kernel.arg_names)
        tokens = "*bf16" if operands == torch.bfloat16 else "*fp32"
        types = dict.fromkeys(("q", "k", "v", "o", "d_o", "d_q", "d_k", "d_v"), tokens)
        types |= dict.fromkeys(("starts", "lengths"), "*i32")
        types |= dict.fromkeys(("B", "T", "S", "H", "state_stride", "kept_stride", "first", "last", "every"), "i32")
        types |= dict.fromkeys(("bound", "eps"), "fp32")
        if kernel is reverse_kernel and shape.states == torch.bfloat16:
            types |= {"kept": tokens, "x": tokens}
        constants = {**shape.constants, **dict.fromkeys(absent)}
        room = SHARED_BYTES[target.arch]
        generation = patch.object(kernels_tnt, "generation", lambda device: target.arch // 10)
        with generation, patch.object(kernels_tnt, "shared_memory", lambda device: room):
            options = shape.launch(kernel is reverse_kernel, torch.device("cuda"))
        return measure(kernel, types, constants, options, target)

    return figures


def both(name: str, **options) -> dict[str, Callable[[], dict]]:
    """Forward and backward with the same options."""
    return {f"local {kind}, {name}": local(kernel, **options) for kind, kernel in LOCAL.items()}


LOCAL = {"forward": forward_kernel, "backward": reverse_kernel}
ROWS: dict[str, Callable[[], dict]] = {
    **both("C=16 m=1"),
    **both("C=16 m=1 linear", depth=1),
    **both("C=16 m=1 bound", bound=1.0),
    **both("C=16 m=1 LayerNorm", norm=True),
    **both("C=16 m=1 GQA 4", groups=4),
    **both("C=16 m=1 carried", carried=True),
    **both("C=16 m=1 momentum", momentum=True),
    **both("C=16 m=1 momentum forgetting", momentum=True, decay=True),
    **both("C=16 m=2", expansion=2),
    **both("C=16 m=2 momentum", expansion=2, momentum=True),
    **both("C=16 m=4", expansion=4),
    **both("C=64 m=1", chunk_size=64),
    **both("C=64 m=1 momentum", chunk_size=64, momentum=True),
    **both("C=64 m=1 momentum forgetting", chunk_size=64, momentum=True, decay=True),
    **both("C=64 m=2", chunk_size=64, expansion=2),
    **both("C=64 m=2 momentum", chunk_size=64, expansion=2, momentum=True),
    **both("C=16 m=1 float32", operands=torch.float32),
    **both("C=16 m=1 width 16", width=16),
    **both("C=16 m=1 width 32", width=32),
    **both("C=16 m=1 width 128", width=128),
    **both("C=16 m=1 width 32 float32", width=32, operands=torch.float32),
    **both("C=16 m=1 on sm_80", target=GPUTarget("cuda", 80, 32)),
    **both("C=64 m=1 momentum on sm_100", chunk_size=64, momentum=True, target=GPUTarget("cuda", 100, 32)),
    **{name: partial(measure, *row) for name, row in kernel_rows.ROWS.items()},
}


def main(names: list[str]) -> None:
    """The figures of `names` on standard output, or with `--record` of all rows in `kernel_figures.json`."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    record = names == ["--record"]
    figures = {"triton": triton.__version__, "target": f"sm_{TARGET.arch}", "kernels": {}}
    for name in ROWS if record else names:
        figures["kernels"][name] = ROWS[name]()
        print(name, figures["kernels"][name], file=sys.stderr, flush=True)
    if record:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    else:
        print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
