"""No denormal numbers in a memory's chunks, and the processor's mode as it was found."""

import pytest
import torch

from tnt_hf.denormals_tnt import without_denormals
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive


pytestmark = pytest.mark.usefixtures("form")
TINY = torch.finfo(torch.float32).tiny


def flushes() -> bool:
    return bool(torch.tensor(TINY) * 0.5 == 0)


def forgetting(op, T=140):
    """Weights halved at every token, to 2^-140 of what they were: (output, final weights, gradient of the first)."""
    q, k, v = torch.randn(3, 1, T, 1, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(1, 4, 4, requires_grad=True)
    gates = {"momentum": torch.full((1, T, 1), 0.5), "decay": torch.full((1, T, 1), 0.5), "decay_target": "zero"}
    o, state = op(q, k, v, torch.zeros(1, T, 1), [weights], **gates, chunk_size=4, output_final_state=True)
    (gradient,) = torch.autograd.grad(state.weights[0].sum(), weights)
    return o, state.weights[0], gradient


def test_chunks_take_them_for_zero():
    (o, *ours), (exact, *theirs) = forgetting(memory_chunkwise), forgetting(memory_naive)
    for x, y in zip(ours, theirs):
        assert 0 < y.abs().max() < TINY
        assert torch.equal(x, torch.zeros_like(x))
    # rounding of sums in another order, and what is flushed: below the smallest normal number
    torch.testing.assert_close(o, exact, rtol=1e-5, atol=TINY)


@pytest.mark.parametrize("before", [False, True])
def test_mode_is_left_as_it_was(before):
    @without_denormals
    def fail():
        assert flushes()
        raise RuntimeError

    torch.set_flush_denormal(before)
    try:
        forgetting(memory_chunkwise)
        assert flushes() == before
        with pytest.raises(RuntimeError):
            fail()
        assert flushes() == before
    finally:
        torch.set_flush_denormal(False)
