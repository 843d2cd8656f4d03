"""The dual form's scalars are the recurrence's, whatever the pieces a chunk is made of.

Axis legend: P chunks   C tokens of a chunk
"""

import pytest
import torch

from tnt_hf.coefficients_tnt import PIECE, chunk_coefficients


P = 3
SIZES = [1, 7, PIECE, 31, 3 * PIECE, 50, 4 * PIECE]  # pieces of 1, 10 and `PIECE` tokens


def gates(C: int, names: str) -> list[torch.Tensor | None]:
    """theta, mu, 1 - alpha and present, `[P, C]` float64; some of mu and 1 - alpha are 0."""
    g = torch.Generator().manual_seed(C)
    theta, mu, keep = (torch.rand(P, C, generator=g, dtype=torch.float64) for _ in range(3))
    absent, no_mu, none_kept = (torch.rand(P, C, generator=g) < 0.2 for _ in range(3))
    mu, keep = mu.masked_fill(no_mu, 0.0), keep.masked_fill(none_kept, 0.0)
    present = (~absent).double() if "present" in names else None
    if present is not None:
        theta, mu, keep = theta * present, mu.masked_fill(absent, 1.0), keep.masked_fill(absent, 1.0)
    theta.requires_grad_()
    return [
        theta,
        mu.requires_grad_() if "mu" in names else None,
        keep.requires_grad_() if "keep" in names else None,
        present,
    ]


def token_by_token(theta, mu, keep, present):
    """What the state after every token is made of, by the recurrences of S_t and W_t: c, A, D, s_end, m_end."""
    C = theta.shape[1]
    W, S, *writes = torch.eye(2 + C, dtype=theta.dtype)[:, None].expand(-1, P, -1)  # what W_0, S_0, -g_i are made of
    rows = []
    for t in range(C):
        S = (torch.zeros_like(S) if mu is None else mu[:, t, None] * S) + theta[:, t, None] * writes[t]
        W = (W if keep is None else keep[:, t, None] * W) + (S if present is None else present[:, t, None] * S)
        rows.append(W)
    rows = torch.stack(rows, 1)
    return rows[..., 2:], rows[..., 0], rows[..., 1], S[:, 2:], S[:, 1]


@pytest.mark.parametrize("current", [True, False], ids=["all rows", "last row"])
@pytest.mark.parametrize("names", ["mu", "keep", "mu keep", "mu keep present"])
@pytest.mark.parametrize("C", SIZES)
def test_coefficients_are_the_recurrence(C, names, current):
    inputs = gates(C, names)
    found, wanted = chunk_coefficients(*inputs, current), token_by_token(*inputs)
    if not current:
        wanted = wanted[0][:, -1:], wanted[1][:, -1:], wanted[2][:, -1:], *wanted[3:]
    pairs = [(x, y) for x, y in zip(found[1:], wanted) if x is not None]
    assert [x is None for x in found[1:]] == [False, "keep" not in names, *3 * ["mu" not in names]]
    for x, y in pairs:
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)  # float64, sums of at most 64 terms in another order
    g = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=g, dtype=y.dtype) for _, y in pairs]
    leaves = [x for x in inputs[:3] if x is not None]
    grads = (torch.autograd.grad(side, leaves, weights) for side in zip(*pairs))
    for x, y in zip(*grads):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def test_what_a_read_cannot_see_has_no_part_in_gradients():
    """c_{t,i} with i > t is 0 for all gates; a caller may hand back anything for it."""
    inputs = gates(3 * PIECE, "mu keep")
    c, *rest = chunk_coefficients(*inputs, True)[1:]
    assert torch.equal(c, c.tril())
    d_c = torch.randn(c.shape, generator=torch.Generator().manual_seed(2), dtype=c.dtype)
    whole, lower = (torch.autograd.grad(c, inputs[:3], x, retain_graph=True) for x in (d_c, d_c.tril()))
    assert all(torch.equal(x, y) for x, y in zip(whole, lower))


def test_autocast_rounds_no_gradient():
    inputs = [None if x is None else x.detach().float().requires_grad_() for x in gates(2 * PIECE, "mu keep")[:3]]
    found = chunk_coefficients(*inputs, None, True)[1:]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)) for x in found]
    plain = torch.autograd.grad(found, inputs, weights, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(x, y) for x, y in zip(torch.autograd.grad(found, inputs, weights), plain))
