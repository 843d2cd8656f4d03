"""What Triton's compiler makes of the kernels for a GPU, run without one (`ptx_device`), is the recurrence.

The other files' cases run here too, compiled. This file's own are those that the interpreter cannot run, bfloat16 on
tensor cores at the real head width, and what shows that the emulated GPU notices a kernel's faults.
"""

import os
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreter import run_cases
from test_kernels_local import cast, outcome
from test_kernels_local import triton as triton_op
from test_memory import make_inputs
from tiny import tiny_model

from tnt_hf.kernels_local_tnt import forward_kernel
from tnt_hf.memory_tnt import memory_naive
from tnt_hf.recipes.benchmarks import kernels_gpu


triton = pytest.importorskip("triton")
tl = triton.language

import ptx_device  # noqa: E402  it imports Triton
from ptx_memory import Fault, Memory, Region  # noqa: E402
from ptx_program import Program  # noqa: E402


TESTS = Path(__file__).parent.glob("test_kernels_*.py")
FILES = sorted(x.name for x in TESTS if "\ndef test_in_the_interpreter(" in x.read_text())
EVERYWHERE = [80, 90]


@pytest.mark.long
def test_on_an_h100():
    run_cases(__file__, "not slow", 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", EVERYWHERE)
def test_with_every_option_of_the_script_for_a_gpu(capability):
    run_cases(__file__, "slow" if capability == 90 else "slow or not slow", capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", EVERYWHERE)
@pytest.mark.parametrize("file", FILES)
def test_with_the_interpreter_s_cases(file, capability):
    run_cases(str(Path(__file__).with_name(file)), "not slow", capability)


def case_an_emulated_gpu_runs_them(request):
    assert request.config.driver.capability == int(os.environ["TNT_PTX"])
    assert "TRITON_INTERPRET" not in os.environ


def checked(name: str, dtype: torch.dtype, tokens: int) -> tuple[float, float]:
    """Errors of outputs and gradients."""
    args = Namespace(check_tokens=tokens, heads=1, width=64, seed=0, device="cpu")
    return kernels_gpu.check(kernels_gpu.CASES[name], args, dtype)


USUAL = {("C=16 m=1 projection", "bfloat16"), ("global", "bfloat16")}
EVERY = [(name, kind) for name in kernels_gpu.CASES for kind in kernels_gpu.LIMITS]


@pytest.mark.parametrize("name, kind", [pytest.param(*x, marks=[pytest.mark.slow] * (x not in USUAL)) for x in EVERY])
def case_of_the_script_for_a_gpu(name, kind, request):
    """Three chunks of 64 tokens, or shards of that: the global memory's tiles are as large as they get."""
    before = request.config.driver.instructions.total()
    if (name, kind, request.config.driver.capability) == ("global momentum forgetting", "float32", 80):
        with pytest.raises(ValueError, match="on this GPU"):
            checked(name, torch.float32, tokens=192)
        return
    found = checked(name, getattr(torch, kind), tokens=192)
    assert all(error <= limit for error, limit in zip(found, kernels_gpu.LIMITS[kind], strict=True)), found
    assert request.config.driver.instructions.total() > before


def case_a_carried_state_in_bfloat16():
    """Inside of a chunk, whose W_xi the backward needs beside W: as near to float64 as a memory that starts anew."""
    rounded = make_inputs(T=40, H=2, K=64, V=64, hidden=64, dtype=torch.float32)
    rounded[0][:3] = [x.bfloat16() for x in rounded[0][:3]]
    settings = {"chunk_size": 16, "split": [11, 29]}
    want = outcome(memory_naive, *cast(rounded, torch.float64), **settings)
    got = outcome(triton_op, *rounded, **settings)
    for name, x in want.items():
        assert (got[name] - x).norm() < 2e-2 * x.norm(), name


def case_tensor_cores_multiply_bfloat16_as_it_is():
    checked("C=16 m=1", torch.bfloat16, tokens=48)
    *_, last = ptx_device.compiled_from(forward_kernel)
    assert ".bf16.bf16" in last.asm["ptx"] and ".tf32" not in last.asm["ptx"]


@pytest.mark.slow
def case_a_model_trains_in_bfloat16():
    """Packed documents under autocast, from the projections to the sum of the memories: gradients as near to those in
    float32 as the torch form's, whose matrix products alone are in bfloat16."""
    ids, positions = torch.arange(40)[None] % 13, torch.cat([torch.arange(23), torch.arange(17)])[None]
    found = {}
    for name in ("float32", "chunk", "triton"):
        sizes = {"head_dim": 16, "global_chunk_size": 8, "local_chunk_sizes": [4, 8], "local_reset_interval": 16}
        model = tiny_model(torch.float32, **sizes, memory_implementation="chunk" if name == "float32" else name)
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "float32"):
            loss = model(ids, labels=ids, position_ids=positions, use_cache=False).loss
        memory = [x for parameter, x in model.named_parameters() if ".memory." in parameter]
        found[name] = torch.cat([x.flatten() for x in torch.autograd.grad(loss, memory)])
    errors = {name: (found[name] - found["float32"]).norm() / found["float32"].norm() for name in ("chunk", "triton")}
    assert 0 < errors["triton"] < 1.5 * errors["chunk"] < 0.1, errors


@triton.jit
def rotate(x, y, out, N: tl.constexpr, BY: tl.constexpr, BARRIER: tl.constexpr):
    """x = y, out = x rotated, through memory."""
    i = tl.arange(0, N) + tl.program_id(0) * N
    tl.store(x + i, tl.load(y + i))
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + i, tl.load(x + (i + BY) % N))


def case_threads_that_do_not_wait_for_each_other_are_a_race():
    y, (x, out) = torch.randn(256), torch.empty(2, 256)
    rotate[(1,)](x, y, out, 256, 64, True)
    assert torch.equal(out, y.roll(-64))
    with pytest.raises(Fault, match="global memory: a race. Block 0"):
        rotate[(1,)](torch.zeros(256), y, out, 256, 64, False)
    with pytest.raises(Fault, match="global memory: a race. Block 1"):  # it reads what block 0 wrote
        rotate[(2,)](torch.zeros(512), torch.randn(512), torch.empty(512), 256, 64, True)


def case_only_tensors_can_be_touched():
    with pytest.raises(Fault, match="not in one tensor"):
        rotate[(1,)](torch.empty(255), torch.randn(256), torch.empty(256), 256, 0, True)


def case_addresses_are_multiples_of_what_is_read():
    memory = Memory("memory", [Region(0, np.arange(64, dtype=np.uint8))])
    address, warp = np.arange(0, 64, 4, dtype=np.uint64), np.zeros(16, np.int32)
    assert memory.load(address, 4, warp).ravel().tolist() == list(range(64))
    with pytest.raises(Fault, match="not a multiple of 4"):
        memory.load(address[:-1] + np.uint64(2), 4, warp[:-1])


@pytest.mark.parametrize("name", ["C=16 m=1", "global"])
def case_no_kernel_does_without_its_barriers(monkeypatch, name):
    """Those the compiler puts around what threads exchange: with every other one gone there is a race."""

    def with_half(text):
        first, *rest = re.split(r"bar\.sync\s+0;", text)
        return Program(first + "".join(("bar.sync 0;" if j % 2 else "") + x for j, x in enumerate(rest)))

    monkeypatch.setattr(ptx_device, "parsed", with_half)
    with pytest.raises(Fault, match="shared memory: a race"):
        checked(name, torch.bfloat16, tokens=48)
