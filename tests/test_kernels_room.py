"""What is accepted on a GPU fits into its shared memory, by Triton's own account at the launch."""

import pytest
import torch
from interpreter import run_cases
from test_memory import leaves, make_inputs

from tnt_hf import kernels_global_tnt
from tnt_hf.kernels_choice_tnt import unsupported_scan
from tnt_hf.memory_tnt import memory_chunkwise


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86])
def test_with_less_shared_memory_than_an_h100(capability):
    run_cases(__file__, "slow or not slow", capability)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(16, 128, 16), (128, 16, 128)], ids=str)
def case_a_global_memory_in_float32(monkeypatch, request, widths):
    """Forward and backward are compiled and loaded; what they compute is other tests' matter."""
    monkeypatch.setattr(request.config.driver, "launch", lambda *_: None)
    monkeypatch.setattr(kernels_global_tnt, "PROGRAMS", 1)  # each runs through several tiles, as with long chunks
    K, hidden, V = widths
    tensors, weights, rest = make_inputs(T=256, H=1, K=K, V=V, hidden=hidden, dtype=torch.float32)
    assert unsupported_scan(tensors[0].device, torch.float32, "chunk_start", weights, torch.float32, False) is None
    x = [y.requires_grad_() for y in leaves(tensors, weights, rest)]
    options = {"chunk_size": 128, "read": "chunk_start", "implementation": "triton", **rest}
    o, _ = memory_chunkwise(*tensors, weights, **options)
    torch.autograd.grad(o.sum(), x)
