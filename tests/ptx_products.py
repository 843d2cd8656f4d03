"""What threads of a warp do together in PTX: shuffles, matrices to and from shared memory, tensor cores.

Axis legend
    W warps, G groups of four   g, t of a lane: lane // 4 and lane % 4   N, K of a product: its columns, its inner axis

Fragments: a lane holds rows g and g + 8 of a 16-row tile, of bfloat16 and of sums columns 2t and 2t + 1, of tf32
column t. Products are summed in float64 and rounded once; hardware rounds in between.
"""

from __future__ import annotations

import re

import numpy as np
from ptx_memory import PENDING, SEVERAL, Fault
from ptx_program import Instruction


TF32 = np.uint32(0xFFFFE000)  # the bits that count
WARPGROUP = 4


class Products:
    """The part of `ptx_block.Block` in which lanes meet."""

    def all_of(self, mask) -> None:
        if mask is not None:
            raise Fault("some threads of a warp are missing")

    def do_shfl(self, i: Instruction, mask) -> None:
        self.all_of(mask)
        to, value, by, clamp, members = i.operands
        if (clamp, members) != (("integer", 31), ("integer", -1)):
            raise NotImplementedError(i.text)
        lane, by = np.arange(self.n), self.get(by, np.uint32).astype(np.int64)
        source = {"bfly": (lane % 32) ^ by, "idx": by}[i.parts[2]]
        if (source > 31).any():
            raise Fault("a shuffle from outside of the warp")
        self.set(to, self.get(value, np.uint32)[lane // 32 * 32 + source])

    # 8 x 8 matrices of 16 bits, whose rows 8 lanes each have the addresses of: [W, matrices, 8, 8]

    def row_addresses(self, operand: tuple, matrices: int) -> tuple[np.ndarray, np.ndarray]:
        address = self.address(operand).reshape(self.W, 32)[:, : 8 * matrices]
        return address.reshape(-1), np.repeat(np.arange(self.W, dtype=np.int32), 8 * matrices)

    def do_ldmatrix(self, i: Instruction, mask) -> None:
        self.all_of(mask)
        to = self.several(i.operands[0])
        address, warp = self.row_addresses(i.operands[1], len(to))
        rows = np.ascontiguousarray(self.shared.load(address, 16, warp)).view(np.uint16)
        rows = rows.reshape(self.W, len(to), 8, 8)
        if "trans" in i.parts:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        for x, pairs in zip(to, rows.view(np.uint32).reshape(self.W, len(to), 32).swapaxes(0, 1)):
            self.set(x, pairs.reshape(-1))

    def do_stmatrix(self, i: Instruction, mask) -> None:
        self.all_of(mask)
        values = self.several(i.operands[1])
        address, warp = self.row_addresses(i.operands[0], len(values))
        rows = np.stack([self.get(x, np.uint32).reshape(self.W, 32) for x in values], 1).view(np.uint16)
        rows = rows.reshape(self.W, len(values), 8, 8)
        if "trans" in i.parts:
            rows = rows.swapaxes(2, 3)
        self.shared.store(address, np.ascontiguousarray(rows).reshape(-1, 8).view(np.uint8), warp)

    # fragments

    def tile(self, operand: tuple, half: bool) -> np.ndarray:
        """[W, 8, 8] of a register of bfloat16 pairs, [W, 8, 4] of one of tf32."""
        bits = self.get(operand, np.uint32)
        if half:
            return widen(bits.view(np.uint16)).reshape(self.W, 8, 8)
        return (bits & TF32).view(np.float32).reshape(self.W, 8, 4)

    def rows_of(self, operands: list, half: bool) -> np.ndarray:
        """[W, 16, K] of the left factor's four registers: rows g, then g + 8, of the left half, then of the right."""
        upper_left, lower_left, upper_right, lower_right = (self.tile(x, half) for x in operands)
        return np.block([[upper_left, upper_right], [lower_left, lower_right]])

    def sums(self, operands: list) -> np.ndarray:
        """[W, 16, N] of accumulators, four for every 8 columns."""
        each = np.stack([self.get(x, np.float32).reshape(self.W, 8, 4) for x in operands], -1)
        # W, g, t, 8 columns, (row half, column of the pair) -> W, row half, g, 8 columns, t, column of the pair
        return each.reshape(self.W, 8, 4, -1, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(self.W, 16, -1)

    def set_sums(self, operands: list, value: np.ndarray) -> None:
        each = value.astype(np.float32).reshape(self.W, 2, 8, -1, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        for x, part in zip(operands, each.reshape(len(operands), -1), strict=True):
            self.set(x, part)

    # products

    def do_mma(self, i: Instruction, mask) -> None:
        self.all_of(mask)
        types = ".".join(i.parts[3:])
        half = types == "m16n8k16.row.col.f32.bf16.bf16.f32"
        if not half and types != "m16n8k8.row.col.f32.tf32.tf32.f32":
            raise NotImplementedError(i.text)
        d, a, b, c = (x[1] for x in i.operands)
        right = np.concatenate([self.tile(x, half) for x in b], 2)  # [W, 8 columns, K]
        self.set_sums(d, product(self.rows_of(a, half), right) + self.sums(c))

    def do_wgmma(self, i: Instruction, mask) -> None:
        """Four warps multiply what is in shared memory (or, of the left factor, in registers), beside the threads."""
        self.all_of(mask)
        if i.parts[1] == "commit_group":
            self.products.append([])
        elif i.parts[1] == "wait_group":
            left = i.operands[0][1] + 1
            done, self.products = self.products[:-left], self.products[-left:]
            for region, at in (x for group in done for x in group):
                region.read[at], region.reader[at] = self.shared.tick(), SEVERAL
        elif i.parts[1] == "mma_async":
            self.multiply(i)

    def multiply(self, i: Instruction) -> None:
        shape, types = i.parts[4], ".".join(i.parts[5:])
        half = types == "f32.bf16.bf16"
        N, K = (int(x) for x in re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())
        d, a, b, keep, sign_a, sign_b, *side = i.operands
        if not half and types != "f32.tf32.tf32" or (sign_a, sign_b) != (("integer", 1),) * 2:
            raise NotImplementedError(i.text)
        rows_adjacent = [x[1] == 1 for x in side] + [False] * 2
        if a[0] == "vector":
            left = self.rows_of(a[1], half).reshape(-1, 64, K)
        else:
            left = self.described(a, 64, K, half, rows_adjacent.pop(0))
        right = self.described(b, N, K, half, rows_adjacent.pop(0))
        keep = self.get(keep, bool)
        if keep.any() != keep.all():
            raise Fault("threads of a product differ in whether they add to its sum")
        before = self.sums(d[1]) if keep.all() else 0
        self.set_sums(d[1], product(left, right).reshape(self.W, 16, N) + before)

    def described(self, operand: tuple, rows: int, K: int, half: bool, rows_adjacent: bool) -> np.ndarray:
        """[G, rows, K] of shared memory, where a matrix descriptor says.

        It has a start, a leading and a stride offset, and the swizzle: lines of 16, 128, 64 or 32 bytes, eight of
        which are a pattern whose 16-byte units are exchanged by address. Along a line lie a row's numbers, or, if
        `rows_adjacent`, those of one column.
        """
        size = 2 if half else 4
        each, found = 16 // size, []  # numbers of a unit
        r, k = np.arange(rows)[:, None], np.arange(K)[None, :]
        for word in (int(x) for x in self.get(operand, np.uint64)[:: 32 * WARPGROUP]):
            start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
            units = {0: 1, 1: 8, 2: 4, 3: 2}[word >> 62]
            if word >> 49 & 7:
                raise NotImplementedError("a base offset")
            along, across = (r, k) if rows_adjacent else (k, r)
            if units == 1 and rows_adjacent:
                leading, stride = stride, leading
            unit, line = along // each, across % 8
            at = unit % units * 16 + unit // units * leading + line * 16 * units + across // 8 * stride
            address = start + at + along % each * size
            address = address ^ ((address >> 7 & (units - 1)) << 4)
            found.append(self.read_beside(address.reshape(-1).astype(np.uint64), size, half).reshape(rows, K))
        return np.stack(found)

    def read_beside(self, address: np.ndarray, size: int, half: bool) -> np.ndarray:
        """Numbers that a tensor core reads for itself: pending until somebody waits for the product."""
        region, offset = self.shared.find(address, size)
        at = self.shared.granules(offset, size)
        if (region.written[at] >= self.shared.barrier).any():
            raise Fault("shared memory: a product reads what no barrier has ordered")
        if (region.written[at] >= self.shared.fence).any():
            raise Fault("shared memory: a product reads what no fence has made visible")
        region.read[at] = PENDING
        self.products[-1].append((region, at))
        bits = np.ascontiguousarray(region.data[offset[:, None] + np.arange(size)])
        return widen(bits.view(np.uint16)) if half else (bits.view(np.uint32) & TF32).view(np.float32)


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return left.astype(np.float64) @ right.astype(np.float64).swapaxes(1, 2)
