"""The kernels' cases run in a process of their own: Triton's interpreter, which executes kernels on the CPU, has to be
chosen before Triton is imported, and so has the emulated GPU (`ptx_device`), which executes what they are compiled to.
In such a file the functions called `case_...` are the tests of that process."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor


# Float32 rounds at 6e-8, and what is compared are sums of up to a few hundred products of rounded numbers, several
# products deep. Torch's own float32 arithmetic is as far from float64 (1e-7 to 8e-7 in these cases).
TOLERANCE = 1e-6


def run_cases(path: str, marks: str, capability: int | None = None) -> None:
    """All `case_*` of a file with these marks, in the interpreter or on an emulated GPU."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-o", "python_functions=case_*", path]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider"]
    if capability is None:
        environment["TRITON_INTERPRET"] = "1"
    else:
        command += ["-p", "ptx_device"]
        environment |= {"TNT_PTX": str(capability), "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def assert_rounded_once(got, exact, moved) -> None:
    """Float32 numbers are the float64 ones `exact`, rounded once: off by half the way to the next number, and by the
    error of what was added to them, products and sums of float32 that stay below `moved`."""
    for x, y, z in zip(got, exact, moved, strict=True):
        near = y.float().abs()
        half = (torch.nextafter(near, torch.tensor(torch.inf)) - near).double() / 2
        assert ((x.double() - y).abs() <= half + 2**-22 * z.abs()).all()


def in_precision(x, dtype: torch.dtype):
    """Floating-point tensors of nested lists, tuples and dicts in another precision."""
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if isinstance(x, list | tuple):
        return type(x)(in_precision(y, dtype) for y in x)
    return {name: in_precision(y, dtype) for name, y in x.items()} if isinstance(x, dict) else x


def assert_close(got, want, what: str = "") -> None:
    """Every tensor within `TOLERANCE` of the float64 one, relative to its norm."""
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape and x.dtype == torch.float32 and y.dtype == torch.float64, (what, i, x.shape)
        error = (x - y).norm().item()
        assert error <= TOLERANCE * y.norm().item(), f"{what} tensor {i}: {error:.1e} of {y.norm().item():.1e}"


def watch_launches(monkeypatch) -> list[bool]:
    """Filled with, for every launch, whether its tensors' GPU was made the current one, the one that Triton takes."""
    from triton.runtime.jit import KernelInterface

    inside, launches, launch = [], [], KernelInterface.__getitem__

    @contextmanager
    def device_of(x):
        inside.append(x)
        try:
            yield
        finally:
            inside.pop()

    def watched(kernel, grid):
        launches.append(bool(inside))
        return launch(kernel, grid)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(KernelInterface, "__getitem__", watched)
    return launches


def randoms(like, seed: int = 7) -> list[Tensor]:
    """One random tensor for each, the same in every precision: what gradients are taken of."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=g).to(x.dtype) for x in like]
