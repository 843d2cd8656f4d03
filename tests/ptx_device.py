"""A GPU for Triton where none is: kernels are compiled as for it, and the PTX that comes out runs on the CPU.

All that a launch does on the host is Triton's own: specialisation on values and alignment, options, the compiler.
Tensors are the CPU's, memory that nothing has written holds NaN, and every access is checked (`ptx_memory`).

As a plugin of pytest (`-p ptx_device`) it is the GPU of the compute capability in `TNT_PTX` (90); and any module runs
on it: `python tests/ptx_device.py 90 tnt_hf.recipes.benchmarks.kernels_gpu --heads 1 --out FILE`.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
import triton
from ptx_block import Block
from ptx_memory import Fault, Memory, Region
from ptx_program import UNSIGNED, Program, dtype_of
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # that one program can have
MOST_BLOCKS = 65535  # along the second and third axis of a grid


class EmulatedDriver(DriverBase):
    """Triton's driver of the device. `instructions` counts those that each kernel ran, by name."""

    def __init__(self, capability: int):
        self.capability, self.shared_bytes, self.instructions = capability, SHARED_BYTES[capability], Counter()
        self.launcher_cls = lambda source, metadata: (
            lambda x, y, z, *rest: self.launch(source, metadata, (x, y, z), rest[6:])
        )  # after the stream, the function, two records and two hooks
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": self.shared_bytes},
            load_binary=lambda name, kernel, shared, device: (name, name, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError

    def launch(self, source, metadata, grid: tuple, arguments: tuple) -> None:
        """Runs all blocks of a grid, one after the other."""
        program = parsed(next(k for k in compiled_from(source.fn) if k.metadata is metadata).asm["ptx"])
        used = [x for x, kind in zip(arguments, source.signature.values(), strict=True) if kind != "constexpr"]
        if max(grid[1:]) > MOST_BLOCKS:
            raise Fault(f"a grid of {grid}")
        memory = Memory("global memory", regions_of([x for x in used if isinstance(x, torch.Tensor)]))
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in used]
        values += [0, 0]  # Triton's own scratch memory, of which there is none
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas != 1:
            raise NotImplementedError(metadata)
        bits = {name: bits_of(x, kind) for (kind, name), x in zip(program.parameters, values, strict=True)}
        for number, place in enumerate(itertools.product(*(range(n) for n in reversed(grid)))):
            memory.start_block(number)
            block = Block(program, bits, place[::-1], grid, memory, metadata.shared)
            self.instructions[source.fn.__name__] += block.run()


def compiled_from(function):
    for kernels, *_ in function.device_caches.values():
        yield from kernels.values()


@cache
def parsed(text: str) -> Program:
    return Program(text)


def bits_of(value, kind: str) -> np.generic:
    dtype = dtype_of(kind)
    if dtype.kind == "f":
        return np.array(value, dtype).view(UNSIGNED[dtype.itemsize])[()]
    return UNSIGNED[dtype.itemsize](int(value) % (1 << 8 * dtype.itemsize))


def regions_of(tensors: list[torch.Tensor]) -> list[Region]:
    """What a kernel may touch: from each tensor's first element to its last; those that overlap are one region."""
    spans: list[list[int]] = []
    for begin, end in sorted((x.data_ptr(), x.data_ptr() + extent(x)) for x in tensors if x.numel()):
        if spans and begin < spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], end)
        else:
            spans.append([begin, end])
    return [Region.of_process(begin, end - begin) for begin, end in spans]


def extent(x: torch.Tensor) -> int:
    return (sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) + 1) * x.element_size()


def install(capability: int) -> EmulatedDriver:
    """Makes the device Triton's, and the package's kernels run for tensors of the CPU."""
    from tnt_hf import (
        kernels_choice_tnt,
        kernels_global_tnt,
        kernels_parts_tnt,
        kernels_projection_tnt,
        kernels_tnt,
    )

    driver = EmulatedDriver(capability)
    triton.runtime.driver.set_active(driver)
    for module in (kernels_parts_tnt, kernels_choice_tnt):
        module.unavailable = lambda device: None
    for module in (kernels_parts_tnt, kernels_choice_tnt, kernels_global_tnt, kernels_projection_tnt, kernels_tnt):
        module.shared_memory = lambda device: driver.shared_bytes
    for module in (kernels_parts_tnt, kernels_choice_tnt, kernels_global_tnt, kernels_tnt):
        module.generation = lambda device: capability // 10
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN
    return driver


def pytest_configure(config) -> None:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    config.driver = install(int(os.environ.get("TNT_PTX", "90")))


def pytest_terminal_summary(terminalreporter, config) -> None:
    terminalreporter.write_line(f"instructions on sm_{config.driver.capability}: {dict(config.driver.instructions)}")


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import ptx_device  # by its name, not as __main__

    ptx_device.install(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
