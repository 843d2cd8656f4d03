"""Kernels of the Q-K projection, the global memory and the decode step as they are launched for a head width of 64
with bfloat16 operands: what to compile to see their registers and spills.

`ROWS`: name -> (kernel, types of its run-time arguments that are not "*fp32", compile-time arguments, options).
"""

import triton.language as tl

from tnt_hf.kernels_chunk_tnt import read, read_reverse, write_reverse, write_sums
from tnt_hf.kernels_decode_tnt import ELEMENTS as DECODED
from tnt_hf.kernels_decode_tnt import token
from tnt_hf.kernels_features_tnt import ELEMENTS as FEATURES
from tnt_hf.kernels_features_tnt import features, features_reverse
from tnt_hf.kernels_global_tnt import (
    BLOCK,
    GROUP,
    READ_REVERSE_ROWS,
    READ_ROWS,
    WRITE_REVERSE_ROWS,
    WRITE_REVERSE_ROWS_MOMENTUM,
    WRITE_ROWS,
)
from tnt_hf.kernels_parts_tnt import REGISTERS
from tnt_hf.kernels_projection_tnt import COLUMNS, ELEMENTS, project, project_reverse, running_sums, through_norm
from tnt_hf.kernels_state_tnt import advance, retreat


D = 64
TOKENS = dict.fromkeys(
    (
        "x",
        "y",
        "d_z",
        "d_y",
        "q",
        "k",
        "v",
        "o",
        "u",
        "a",
        "b",
        "out",
        "d_o",
        "d_out",
        "d_q",
        "d_k",
        "d_v",
        "d_u",
        "d_raw",
    ),
    "*bf16",
)
NUMBERS = dict.fromkeys(("C", "T", "row_stride", "R", "H", "tiles", "interval", "splits", "rest"), "i32")
NUMBERS |= dict.fromkeys(("first", "then", "P", "B", "S"), "i32")
NUMBERS |= dict.fromkeys(("read_splits", "write_splits", "written"), "i32") | dict.fromkeys(("eps", "bound"), "fp32")
TYPES = {**TOKENS, **NUMBERS, "starts": "*i32", "lengths": "*i32", "time": "*i64", "ids": "*i64", "present": "*i8"}


def row(kernel, warps: int, **constants):
    """A kernel with those of the compile-time arguments that it has."""
    types = {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}
    options = {"num_warps": warps}
    if constants.get("DT") == tl.float32:
        types |= dict.fromkeys(types.keys() & TOKENS.keys(), "*fp32")
        options |= {"maxnreg": REGISTERS} if kernel is write_reverse else {}
    return kernel, types, {n: x for n, x in constants.items() if n in kernel.arg_names}, options


def projection(groups: int) -> dict:
    sides = {"K": D, "G": groups, "BC": 64, "BN": COLUMNS, "DT": tl.bfloat16}
    return {
        f"projection sums, G={groups}": row(running_sums, 4, REVERSE=False, **sides),
        f"projection forward, G={groups}": row(project, 4, NORMALIZE=True, **sides),
        f"projection backward, G={groups}": row(project_reverse, 8, **sides),
    }


def tokens() -> dict:
    """From the projections to the memories, as the recipes have it: four taps, SiLU, packed documents."""
    kind = {"D": D, "TAPS": 3, "IDS": True, "ACT": True, "UNIT": True, "BT": FEATURES // D}
    ahead = kind | {"ACT": False, "UNIT": False, "AHEAD": True}
    return {
        "features": row(features, 4, AHEAD=False, **kind),
        "features backward": row(features_reverse, 4, **kind),
        "features backward, tokens": row(features, 4, **ahead),
    }


def chunk(name: str, expansion=1, depth=2, momentum=False, forgetting=False, norm=False, bound=False, DT=tl.bfloat16):
    """The global memory's kernels, in a model that trains."""
    large = expansion > 1 or norm
    net = {"K": D, "E": D * expansion, "V": D, "L": depth, "ACT": "silu", "RESIDUAL": False, "NORM": norm}
    net |= {"G": 1, "DT": DT, "MOMENTUM": momentum, "BOUND": bound, "LOSS": False}
    state = {
        "FLOATS": D * D * expansion * depth,
        "BLOCK": BLOCK,
        "GROUP": GROUP,
        "FORGET": "init" if forgetting else "none",
        "MOMENTUM": momentum,
    }
    back = (WRITE_REVERSE_ROWS_MOMENTUM if momentum else WRITE_REVERSE_ROWS)[large]
    return {
        f"global read, {name}": row(read, 4, BR=READ_ROWS[large], **net),
        f"global read backward, {name}": row(read_reverse, 8, BR=READ_REVERSE_ROWS[large], **net),
        f"global write, {name}": row(write_sums, 8, BR=WRITE_ROWS[large], **net),
        f"global write backward, {name}": row(write_reverse, 8, BR=back, **net),
        f"global state, {name}": row(advance, 4, KEPT=momentum, **state),
        f"global state backward, {name}": row(retreat, 4, SAME=True, **state),
    }


def step(name: str, expansion=1, depth=2, groups=1, gates=False, projection="none", chunked=False) -> dict:
    """The decode step, and with `gates` all that a memory may have but a LayerNorm."""
    options = {"MOMENTUM": gates, "DECAY": gates, "TO_INIT": True, "MASKED": gates, "RESETS": gates, "BOUND": gates}
    options |= {"PROJECTION": projection, "NORMALIZE": True, "CURRENT": True, "CHUNKED": chunked, "NORM": False}
    sides = {"K": D, "E": D * expansion, "V": D, "L": depth, "G": groups, "BG": groups, "BK": 2048 // D}
    sides |= {"BE": min(D * expansion, DECODED // (groups * D)), "ACT": "silu", "RESIDUAL": False}
    return {f"decode, {name}": row(token, 8, **sides, **options)}


ROWS = {
    **tokens(),
    **projection(1),
    **projection(4),
    "projection norm backward": row(through_norm, 4, K=D, BR=ELEMENTS // D),
    **chunk("m=1"),
    **chunk("m=1 linear", depth=1),
    **chunk("m=1 bound", bound=True),
    **chunk("m=1 LayerNorm", norm=True),
    **chunk("m=1 momentum forgetting", momentum=True, forgetting=True),
    **chunk("m=1 momentum forgetting bound", momentum=True, forgetting=True, bound=True),
    **chunk("m=2", expansion=2),
    **chunk("m=2 momentum forgetting", expansion=2, momentum=True, forgetting=True),
    **chunk("m=1 float32", DT=tl.float32),
    **step("C=1 m=1"),
    **step("C=16 m=1 projected", chunked=True, projection="shard"),
    **step("C=16 m=1 GQA 4 with everything", chunked=True, groups=4, gates=True, projection="shard"),
    **step("C=16 m=2 with everything", expansion=2, chunked=True, gates=True, projection="shard"),
    **step("C=1 m=1 linear", depth=1),
}
