"""What the Triton kernels share: the guard around `import triton`, where kernels can run, and their arithmetic.

Axis legend
    rows, K: any matrix of operands; functions of one tile each, most of them element by element

Products take bf16 or fp32 operands and accumulate in float32. Travels with every pushed checkpoint.
"""

from __future__ import annotations

import math
import os
from functools import cache, lru_cache

import torch
from torch import Tensor

from .network_tnt import ROUNDING


try:
    import triton
    import triton.language as tl
except ImportError:  # Linux only, and optional there
    triton = tl = None


def jit(function=None, **options):
    """`triton.jit`; without Triton a kernel is only a name."""
    if triton is None:
        return function or jit
    return triton.jit(function, **options)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on the CPU, slowly, as in the tests
SM_80 = 163 << 10  # bytes of shared memory that one program of an A100 can have; sm_86, 89 and 120 have less
SM_90 = 227 << 10  # the same of an H100; GPUs with less have no wgmma
REGISTERS = 255  # of a thread: as many as there can be. Where a kernel needs more, ptxas left alone may take 32
AT_THE_BOUND = 1 + ROUNDING * 2**-23 if tl is None else tl.constexpr(1 + ROUNDING * 2**-23)
SMALLEST_NORM = 1e-12 if tl is None else tl.constexpr(1e-12)  # of F.normalize
NOWHERE = (None,) * 4  # what the kernels get of a dense grid where there is none
PLACES = ["first", "P", "B", "T", "S", "H"]  # numbers that no kernel is compiled for
WIDTHS = (16, 32, 64, 128)  # a tile's side is a power of two, and a product's inner axis at least 16


def unavailable(device: torch.device) -> str | None:
    """Why no kernel runs on `device`, or `None`."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"there is no Triton on {device.type!r} (the CPU needs TRITON_INTERPRET=1)"
    if device.type == "cuda" and torch.version.hip is not None:
        return "the kernels were written for GPUs by NVIDIA"
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the kernels need compute capability 8.0, bfloat16 and tf32"
    return None


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have; those of sm_90 where no GPU is."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SM_90
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def generation(device: torch.device) -> int:
    """The major compute capability; 9 where no GPU is. Tensor cores of 9 take their operands from shared memory, those
    of 10 and 11 have a memory of their own besides, all others take registers."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 9
    return torch.cuda.get_device_capability(device)[0]


@lru_cache(maxsize=64)
def tables(counts: tuple, starts: tuple, device: torch.device, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """`starts`, the first program of each step, and the number of blocks of each program, `blocks` a step, int32 on
    `device`: kept, because a copy from the host waits for all work that is under way."""
    ends = [*counts[1:], 0]
    steps = [j + 1 for j, (n, rest) in reversed(list(enumerate(zip(counts, ends)))) for _ in range(n - rest)]
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, [n * blocks for n in steps]))


def rows_of_tile(rows: int, most: int = 64) -> int:
    """Rows of a tile that holds `rows` of them, or a part: a power of two, at least 16 (a product's least side)."""
    return max(16, min(most, 1 << (rows - 1).bit_length()))


def operand(dtype: torch.dtype):
    """Triton's name for an operand type."""
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float32


def packed(tensors: list[Tensor] | None) -> Tensor | None:
    """Matrices `[P, ...]` of each program, one after the other in `[P, floats]`."""
    return None if tensors is None else torch.cat([x.flatten(1) for x in tensors], 1)


def unpacked(x: Tensor, shapes: list) -> list[Tensor]:
    """The inverse of `packed`."""
    return [y.unflatten(1, shape) for y, shape in zip(x.split([math.prod(shape) for shape in shapes], 1), shapes)]


@jit
def dot(a, b, DT: tl.constexpr):
    """a @ b of operands in DT, in float32: of three tf32 products where they are float32, exact to about 2^-21."""
    return tl.dot(a.to(DT), b.to(DT), input_precision="tf32x3")


@jit
def turned(x, DT: tl.constexpr):
    """x^T as an operand. Rounded first, x and x^T are one tile in shared memory."""
    return tl.trans(x.to(DT))


@jit
def dot_exact(a, b, DT: tl.constexpr):
    """`dot` without tf32, many times slower in float32 and the same in bfloat16; it needs less shared memory."""
    return tl.dot(a.to(DT), b.to(DT), input_precision="ieee")


@jit
def row_norms(x):
    """|x| of each row."""
    return tl.sqrt(tl.sum(x * x, 1))


@jit
def exceeds(square, bound):
    """`network_tnt.exceeds`, of |g_t|^2."""
    return tl.sqrt(square) > bound * AT_THE_BOUND


@jit
def unit(x, norm):
    """x / |x|, 0 where x is."""
    return x / tl.maximum(norm, SMALLEST_NORM)[:, None]


@jit
def through_unit(d, y, norm):
    """d x from d y, y = unit(x, norm): `network_tnt.smooth_unit_vectors`."""
    norm = tl.where(norm > SMALLEST_NORM, norm, float("inf"))
    return (d - y * tl.sum(d * y, 1)[:, None]) / norm[:, None]


@jit
def load(pointer, rows, inside, columns, WIDTH: tl.constexpr):
    """[rows, columns] of a matrix whose rows are WIDTH long; rows that are not `inside` are 0."""
    return tl.load(pointer + rows[:, None] * WIDTH + columns[None, :], mask=inside[:, None], other=0.0)


@jit
def store(pointer, rows, inside, columns, value, WIDTH: tl.constexpr):
    """The inverse of `load`."""
    at = pointer + rows[:, None] * WIDTH + columns[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside[:, None])


@jit
def place(p, B, T, S, H):
    """Program p of a dense grid, in rows of `[B, T, H]`: of its first token, from a token to the next, and how many
    tokens there are. Without `H` there is no such grid, and nobody asks."""
    if H is None:
        return 0, 1, 0
    else:
        row = p // H
        start = row // B * S
        return (row % B * T + start) * H + p % H, H, tl.minimum(S, T - start)


@jit
def nearest(i, tokens):
    """Token i of some, or the nearest one that is there: what is masked has an address in its tensor, too."""
    return tl.maximum(tl.minimum(i, tokens - 1), 0)


@jit
def chunk_place(chunk, C, P, B, T, S, H):
    """`place` of one chunk of C tokens, and without `H` of chunks that lie one after the other."""
    if H is None:
        return chunk * C, 1, C
    else:
        row, step, tokens = place(chunk % P, B, T, S, H)
        first = chunk // P * C
        return row + nearest(first, tokens) * step, step, tl.minimum(C, tokens - first)


@jit
def tile_rows(tile, begin, step, tokens, G: tl.constexpr, BR: tl.constexpr):
    """Of a tile of the rows of a chunk, G for each token: where they are, which of them there are, and which of the
    chunk they are."""
    r = tile * BR + tl.arange(0, BR)
    at = nearest(r, tokens * G)
    return (begin + at // G * step) * G + at % G, r < tokens * G, at


@jit
def only(at, flag):
    """The mask of all of a tile, if `flag` (a scalar as a mask is none for the interpreter)."""
    return at < (flag.to(tl.int64) << 62)


@jit
def mixed(W, target, keep):
    """keep W + (1 - keep) target, to be added up last: the nearer of the two, and the way from there. A chunk changes
    W by far less than W, and sums on the way there would be rounded to W's digits. Exact where keep is 0 or 1."""
    near = keep < 0.5
    return tl.where(near, target, W), tl.where(near, keep, keep - 1) * (W - target)


@jit
def phi(z, ACT: tl.constexpr):
    """The activation, SiLU or GELU."""
    if ACT == "silu":
        return z * tl.sigmoid(z)
    else:
        return 0.5 * z * (1 + tl.math.erf(z * 0.7071067811865476))


@jit
def slope(z, ACT: tl.constexpr):
    """phi'(z)."""
    if ACT == "silu":
        s = tl.sigmoid(z)
        return s * (1 + z * (1 - s))
    else:
        return 0.5 * (1 + tl.math.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)


@jit
def curve(z, ACT: tl.constexpr):
    """phi''(z)."""
    if ACT == "silu":
        s = tl.sigmoid(z)
        return s * (1 - s) * (2 + z * (1 - 2 * s))
    else:
        return 0.3989422804014327 * tl.exp(-0.5 * z * z) * (2 - z * z)


@jit
def standardise(y, inside, eps, V: tl.constexpr):
    """h = (y - mean) / s along each row of V, and 1 / s, both 0 in rows that are not `inside` (`None`: all are)."""
    y -= (tl.sum(y, 1) / V)[:, None]
    inverse = 1 / tl.sqrt(tl.sum(y * y, 1) / V + eps)
    if inside is not None:
        inverse = tl.where(inside, inverse, 0.0)
    return y * inverse[:, None], inverse


@jit
def through_standardise(grad, h, inverse, V: tl.constexpr):
    """grad times the Jacobian of h."""
    along = tl.sum(grad * h, 1) / V
    return inverse[:, None] * (grad - (tl.sum(grad, 1) / V)[:, None] - h * along[:, None])
