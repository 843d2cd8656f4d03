"""The memory of an emulated GPU: accesses outside of tensors, misaligned ones, and races are errors.

A clock counts accesses. Only a barrier orders what the warps of a block do, and nothing orders blocks: it is a race if
one of them writes what another touched since the last barrier, or what another block touched at all.
"""

from __future__ import annotations

import ctypes

import numpy as np


NEVER, PENDING = -1, 1 << 60  # times: of nothing, and of what runs beside the threads until they wait for it
SEVERAL = -2  # warps or blocks
GRANULE = 2  # bytes; smaller ones are not told apart


class Fault(RuntimeError):
    """What makes a GPU stop, or what it does not notice."""


class Region:
    """Bytes from the address `base` on, and who touched them when."""

    def __init__(self, base: int, data: np.ndarray):
        self.base, self.data, size = base, data, -(-len(data) // GRANULE)
        self.written, self.read = np.full(size, NEVER, np.int64), np.full(size, NEVER, np.int64)  # the time
        self.writer, self.reader = np.full(size, NEVER, np.int32), np.full(size, NEVER, np.int32)  # the warp
        self.read_by = np.full(size, NEVER, np.int32)  # the block

    @classmethod
    def of_process(cls, base: int, size: int) -> Region:
        return cls(base, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base)))


class Memory:
    """The regions of one address space, and the clock of the block that runs.

    A lane's access has `width` bytes at `address`; `warp` is its warp. All are arrays over lanes.
    """

    def __init__(self, name: str, regions: list[Region]):
        self.name, self.regions, self.clock = name, regions, 0
        self.start_block(0)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def start_block(self, block: int) -> None:
        self.block, self.began = block, self.tick()
        self.barrier = self.fence = self.began

    def synchronise(self) -> None:
        self.barrier = self.tick()

    def fence_async(self) -> None:
        """What was written until now can be seen by tensor cores that read for themselves."""
        self.fence = self.tick()

    def find(self, address: np.ndarray, width: int) -> tuple[Region, np.ndarray]:
        """The region that holds all of the addresses, and the offsets into it."""
        if (address % np.uint64(width)).any():
            raise Fault(f"{self.name}: {width} bytes at an address that is not a multiple of {width}")
        low, high = int(address.min()), int(address.max()) + width
        for region in self.regions:
            if region.base <= low and high <= region.base + len(region.data):
                return region, (address - np.uint64(region.base)).astype(np.int64)
        raise Fault(f"{self.name}: bytes {low:#x} to {high:#x} are not in one tensor")

    @staticmethod
    def granules(offset: np.ndarray, width: int) -> np.ndarray:
        """[lanes, granules of each]."""
        return offset[:, None] // GRANULE + np.arange(max(1, width // GRANULE))

    def load(self, address: np.ndarray, width: int, warp: np.ndarray) -> np.ndarray:
        """[lanes, width] bytes."""
        region, offset = self.find(address, width)
        self.note_read(region, self.granules(offset, width), warp)
        return region.data[offset[:, None] + np.arange(width)]

    def store(self, address: np.ndarray, value: np.ndarray, warp: np.ndarray) -> None:
        """The inverse of `load`."""
        width = value.shape[1]
        region, offset = self.find(address, width)
        at = offset[:, None] + np.arange(width)
        changed = (region.data[at] != value).any()
        region.data[at] = value
        one_of_several = (region.data[at] != value).any(1)  # lanes whose value another lane's has replaced
        self.note_write(region, self.granules(offset, width), warp, changed, one_of_several)

    def unordered(self, time: np.ndarray, who: np.ndarray, warp: np.ndarray) -> np.ndarray:
        """Where an access at `time` by warp `who` is not ordered with one of now."""
        other_block = (time != NEVER) & (time < self.began)
        return other_block | (time >= PENDING) | ((time >= self.barrier) & (who != warp[:, None]))

    def note_read(self, region: Region, at: np.ndarray, warp: np.ndarray) -> None:
        bad = self.unordered(region.written[at], region.writer[at], warp)
        if bad.any():
            self.race("reads", region, at[bad][0])
        before = (region.read[at] >= self.barrier) & (region.reader[at] != warp[:, None])
        region.reader[at] = warp[:, None]
        several = before | (region.reader[at] != warp[:, None])  # or of this very instruction
        region.reader[at[several]] = SEVERAL
        region.read[at] = self.tick()
        others = (region.read_by[at] != NEVER) & (region.read_by[at] != self.block)
        region.read_by[at] = np.where(others, SEVERAL, self.block)

    def note_write(self, region: Region, at, warp, changed=True, one_of_several=None) -> None:
        """To write what is there (not `changed`) hurts nobody."""
        bad = self.unordered(region.written[at], region.writer[at], warp)
        bad |= self.unordered(region.read[at], region.reader[at], warp)
        bad |= (region.read_by[at] != NEVER) & (region.read_by[at] != self.block)
        if changed and bad.any():
            self.race("writes", region, at[bad][0])
        region.written[at], region.writer[at] = self.tick(), warp[:, None]
        if one_of_several is not None and (one_of_several[:, None] & (region.writer[at] != warp[:, None])).any():
            raise Fault(f"{self.name}: two warps write different values to one address")

    def race(self, does: str, region: Region, at: int) -> None:
        raise Fault(
            f"{self.name}: a race. Block {self.block}, since {self.began} with its last barrier at {self.barrier}, "
            f"{does} at {self.clock} byte {at * GRANULE} of {len(region.data)}, which warp {region.writer[at]} wrote "
            f"at {region.written[at]} and warp {region.reader[at]} of block {region.read_by[at]} read at "
            f"{region.read[at]}"
        )
