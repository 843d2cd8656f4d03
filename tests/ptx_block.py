"""A block of threads that runs PTX on the CPU: slowly, and with every access checked (`ptx_memory`).

Axis legend
    n threads of the block, W warps of 32
    a register: an array over the threads, unsigned and as wide as declared, or bool

Threads go in lockstep, one instruction after the other, and `mask` has those that take part, if not all do. Nothing is
ever late by chance: what would have to be waited for is marked as pending until it is, and may not be touched.
Approximate functions (ex2, div.full) are exact.
"""

from __future__ import annotations

import numpy as np
from ptx_memory import PENDING, Fault, Memory, Region
from ptx_products import Products
from ptx_program import SIGNED, UNSIGNED, Instruction, Program, dtype_of


SHARED_BASE = 1024  # the address of shared memory: tensor cores want tiles at multiples of it

# In `name.type`, with operands of that type.
FUNCTIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,  # of integers: the low half
    "mad": lambda a, b, c: a * b + c,
    "min": lambda a, b: np.fmin(a, b),
    "max": lambda a, b: np.fmax(a, b),
    "neg": lambda a: -a,
    "abs": lambda a: np.abs(a),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "rem": np.fmod,
    "sqrt": np.sqrt,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a.astype(np.float64)),
    "ex2": lambda a: np.exp2(a.astype(np.float64)),
    "fma": lambda a, b, c: a.astype(np.float64) * b + c,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b,
    "shl": lambda a, by: np.where(by < 8 * a.itemsize, a << np.minimum(by, 8 * a.itemsize - 1), 0),
    "shr": lambda a, by: np.where(
        (by < 8 * a.itemsize) | (a.dtype.kind == "i"), a >> np.minimum(by, 8 * a.itemsize - 1), 0
    ),
}
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater}
COMPARE |= {"ge": np.greater_equal, "neu": np.not_equal, "num": lambda a, b: (a == a) & (b == b)}


class Block(Products):
    """One block of a launch: its registers and its shared memory."""

    def __init__(self, program: Program, arguments: dict, place: tuple, grid: tuple, memory: Memory, shared: int):
        self.program, self.arguments, self.memory = program, arguments, memory
        self.n, self.W = program.threads, program.threads // 32
        self.registers: dict[str, np.ndarray] = {"%tid.x": np.arange(self.n, dtype=np.uint32)}
        for axis, here, all in zip("xyz", place, grid):
            self.registers[f"%ctaid.{axis}"] = np.full(self.n, here, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.n, all, np.uint32)
        self.warp = (np.arange(self.n) // 32).astype(np.int32)
        bytes_ = np.full(max(shared, 16), 0xFF, np.uint8)  # NaN, in every float format
        self.shared = Memory("shared memory", [Region(SHARED_BASE, bytes_)])
        self.copies: list[list] = [[]]  # what each group of asynchronous copies brings, the open group last
        self.products: list[list] = [[]]  # what each group of asynchronous products reads

    def run(self) -> int:
        """Returns the number of instructions that ran. Where threads part ways, those that are behind go first."""
        at, steps = np.zeros(self.n, np.int64), 0
        with np.errstate(all="ignore"):
            while True:
                here, steps = at == at.min(), steps + 1
                i = self.program.code[at.min()]
                at[here] += 1
                mask = here & (self.registers[i.guard] != i.inverted) if i.guard else here
                if not mask.any():
                    continue
                if i.parts[0] == "bra":
                    at[mask] = self.program.labels[i.operands[0][1]]
                elif i.parts[0] == "ret":
                    self.all_of(None if mask.all() else mask)
                    return steps
                else:
                    self.checked_step(i, None if mask.all() else mask)

    def checked_step(self, i: Instruction, mask) -> None:
        try:
            self.step(i, mask)
        except Fault as error:
            raise Fault(f"{error} [{i.text}]") from None

    def step(self, i: Instruction, mask) -> None:
        name = i.parts[0]
        special = getattr(self, "do_" + name, None)
        if special is not None:
            special(i, mask)
        elif name in FUNCTIONS:
            dtype, (to, *rest) = dtype_of(i.parts[-1]), i.operands
            values = [self.get(x, np.uint32 if name in ("shl", "shr") and j else dtype) for j, x in enumerate(rest)]
            if name in ("shl", "shr"):
                values[1] = values[1].astype(dtype)
            self.set(to, np.asarray(FUNCTIONS[name](*values)).astype(dtype), mask)
        else:
            raise NotImplementedError(i.text)

    # registers

    def get(self, operand: tuple, dtype) -> np.ndarray:
        """[n] of `dtype`: a register's bits, its low ones if it is wider, or a constant."""
        what, x, dtype = operand[0], operand[1], np.dtype(dtype)
        if what == "register":
            value = self.registers[x]
            if value.dtype != bool and value.itemsize > dtype.itemsize:
                value = value.astype(UNSIGNED[dtype.itemsize])
            return value if value.dtype == bool else value.view(dtype)
        if dtype.kind == "b":
            return np.full(self.n, bool(x))
        x = SHARED_BASE if what == "symbol" and x == "global_smem" else x
        return np.full(self.n, x & ((1 << 8 * dtype.itemsize) - 1), UNSIGNED[dtype.itemsize]).view(dtype)

    def set(self, operand: tuple, value: np.ndarray, mask=None) -> None:
        """Writes a register, extended with the sign of its type, of the threads in `mask`."""
        name = operand[1]
        if value.dtype != bool:
            width, kind = self.program.width(name), SIGNED if value.dtype.kind == "i" else UNSIGNED
            if value.itemsize < width:
                value = value.astype(kind[width])
            value = np.ascontiguousarray(value).view(UNSIGNED[width])
        if mask is not None:
            before = self.registers.get(name, ~value)  # what was never set is anything
            value = np.where(mask, value, before)
        self.registers[name] = value

    def address(self, operand: tuple) -> np.ndarray:
        _, base, offset = operand
        narrow = base[0] == "register" and self.program.width(base[1]) == 4
        return self.get(base, np.uint32 if narrow else np.uint64).astype(np.uint64) + np.uint64(offset % (1 << 64))

    def lanes(self, mask) -> np.ndarray:
        return np.arange(self.n) if mask is None else np.flatnonzero(mask)

    @staticmethod
    def several(operand: tuple) -> list[tuple]:
        return operand[1] if operand[0] == "vector" else [operand]

    # numbers

    def do_mov(self, i: Instruction, mask) -> None:
        """Also packs the numbers of a vector, the lowest first, and unpacks them."""
        (to, value), dtype = i.operands, dtype_of(i.parts[-1])
        if "vector" not in (to[0], value[0]):
            self.set(to, self.get(value, dtype), mask)
            return
        parts = self.several(value)
        whole = np.stack([self.get(x, UNSIGNED[dtype.itemsize // len(parts)]) for x in parts], 1)
        to = self.several(to)
        for x, part in zip(to, whole.view(UNSIGNED[dtype.itemsize // len(to)]).T, strict=True):
            if x[1] != "_":  # which nobody reads
                self.set(x, part, mask)

    def do_mul(self, i: Instruction, mask) -> None:
        self.product(i, mask, "mul")

    def do_mad(self, i: Instruction, mask) -> None:
        self.product(i, mask, "mad")

    def product(self, i: Instruction, mask, name: str) -> None:
        dtype, (to, a, b, *c) = dtype_of(i.parts[-1]), i.operands
        wide = np.dtype((SIGNED if dtype.kind == "i" else UNSIGNED)[8]) if "wide" in i.parts else dtype
        values = [*(self.get(x, dtype).astype(wide) for x in (a, b)), *(self.get(x, wide) for x in c)]
        self.set(to, FUNCTIONS[name](*values), mask)

    def do_neg(self, i: Instruction, mask) -> None:
        if i.parts[1].startswith("bf16"):
            bits, sign = (np.uint32, 0x80008000) if i.parts[1] == "bf16x2" else (np.uint16, 0x8000)
            self.set(i.operands[0], self.get(i.operands[1], bits) ^ bits(sign), mask)
        else:
            self.set(i.operands[0], -self.get(i.operands[1], dtype_of(i.parts[-1])), mask)

    def do_bfe(self, i: Instruction, mask) -> None:
        """`size` bits from the bit `first` on."""
        dtype = dtype_of(i.parts[-1])
        first, size = (int(x[1]) for x in i.operands[2:])
        bits = (self.get(i.operands[1], dtype).astype(np.int64) >> first) & ((1 << size) - 1)
        if dtype.kind == "i":
            bits = np.where(bits >> (size - 1), bits - (1 << size), bits)
        self.set(i.operands[0], bits.astype(dtype), mask)

    def do_prmt(self, i: Instruction, mask) -> None:
        """Four of the eight bytes of two registers, each chosen by four bits: a byte, or (8) its sign alone."""
        a, b, choice = (self.get(x, np.uint32) for x in i.operands[1:])
        eight, out = np.stack([a, b], 1).view(np.uint8), np.empty((self.n, 4), np.uint8)
        for j in range(4):
            code = (choice >> np.uint32(4 * j)).astype(np.int64) & 15
            byte = np.take_along_axis(eight, (code & 7)[:, None], 1)[:, 0]
            out[:, j] = np.where(code & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        self.set(i.operands[0], out.view(np.uint32)[:, 0], mask)

    def do_selp(self, i: Instruction, mask) -> None:
        yes, no = (self.get(x, dtype_of(i.parts[-1])) for x in i.operands[1:3])
        self.set(i.operands[0], np.where(self.get(i.operands[3], bool), yes, no), mask)

    def do_setp(self, i: Instruction, mask) -> None:
        _, compare, dtype = i.parts
        self.set(i.operands[0], COMPARE[compare](*(self.get(x, dtype_of(dtype)) for x in i.operands[1:])), mask)

    def do_cvt(self, i: Instruction, mask) -> None:
        to, *values = i.operands
        if i.name in ("cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"):
            halves = [bfloat16(self.get(x, np.float32)) for x in reversed(values)]  # the first is the upper one
            self.set(to, np.stack(halves, 1).view(UNSIGNED[2 * len(halves)])[:, 0], mask)
        elif i.name == "cvt.f32.bf16":
            self.set(to, self.get(values[0], np.uint16).astype(np.uint32) << np.uint32(16), mask)
        elif i.name == "cvt.rna.tf32.f32":
            bits = self.get(values[0], np.uint32)
            self.set(to, np.where(bits & 0x7F800000 == 0x7F800000, bits, bits + 0x1000) & np.uint32(0xFFFFE000), mask)
        elif i.parts[-1][0] in "su" and (i.parts[1] == "rn" or len(i.parts) == 3):  # of integers
            after, before = (dtype_of(x) for x in i.parts[-2:])
            self.set(to, self.get(values[0], before).astype(after), mask)
        else:
            raise NotImplementedError(i.text)

    # memory

    def space(self, i: Instruction) -> Memory:
        return self.shared if "shared" in i.parts else self.memory

    def do_ld(self, i: Instruction, mask) -> None:
        dtype, (to, at) = dtype_of(i.parts[-1]), i.operands
        if i.parts[1] == "param":
            self.set(to, np.full(self.n, self.arguments[at[1][1]]).astype(dtype), mask)
            return
        lanes, to = self.lanes(mask), self.several(to)
        found = self.space(i).load(self.address(at)[lanes], dtype.itemsize * len(to), self.warp[lanes])
        for x, part in zip(to, np.ascontiguousarray(found).view(dtype).T, strict=True):
            whole = np.zeros(self.n, dtype)
            whole[lanes] = part
            self.set(x, whole, mask)

    def do_st(self, i: Instruction, mask) -> None:
        dtype, (at, values), lanes = dtype_of(i.parts[-1]), i.operands, self.lanes(mask)
        parts = np.stack([self.get(x, dtype) for x in self.several(values)], 1)[lanes]
        self.space(i).store(self.address(at)[lanes], parts.view(np.uint8).reshape(len(lanes), -1), self.warp[lanes])

    def do_bar(self, i: Instruction, mask) -> None:
        if i.name == "bar.warp.sync":
            return
        if mask is not None or i.text != "bar.sync 0":
            raise NotImplementedError(i.text)
        self.memory.synchronise()
        self.shared.synchronise()

    def do_fence(self, i: Instruction, mask) -> None:
        if i.name != "fence.proxy.async.shared::cta":
            raise NotImplementedError(i.text)
        self.shared.fence_async()

    def do_cp(self, i: Instruction, mask) -> None:
        """cp.async from global to shared memory: `size` bytes, then zeros up to `width`."""
        if i.parts[2] == "commit_group":
            self.copies.append([])
        elif i.parts[2] == "wait_group":  # until no more than so many are under way
            left = i.operands[0][1] + 1
            arrived, self.copies = self.copies[:-left], self.copies[-left:]
            for copy in (x for group in arrived for x in group):
                self.arrive(*copy)
        else:
            width, lanes = i.operands[2][1], self.lanes(mask)
            size = self.get(i.operands[3], np.uint32)[lanes] if len(i.operands) > 3 else np.full(len(lanes), width)
            to, source = (self.address(x)[lanes] for x in i.operands[:2])
            region, offset = self.shared.find(to, width)
            at = self.shared.granules(offset, width)
            self.shared.note_write(region, at, self.warp[lanes])
            region.written[at] = PENDING
            self.copies[-1].append((region, offset, at, source, size, width, self.warp[lanes]))

    def arrive(self, region: Region, offset, at, source, size, width: int, warp) -> None:
        content = np.zeros((len(offset), width), np.uint8)
        for many in np.unique(size[size > 0]):
            rows = size == many
            content[rows, :many] = self.memory.load(source[rows], int(many), warp[rows])
        region.data[offset[:, None] + np.arange(width)] = content
        region.written[at], region.writer[at] = self.shared.tick(), warp[:, None]


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, nearest).astype(np.uint16)
