"""The feature map of quadratic keys, and the basis in which a chunk makes its products."""

import pytest
import torch

from tnt_hf.features_tnt import PAIRS, Ring, quadratic, ring_products, through_ring_products


EXACT = 1e-10


def test_quadratic_keys_score_the_square():
    x, y = torch.randn(2, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(quadratic(x) @ quadratic(y).T, (x @ y.T) ** 2, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("D", [1, 2, 3, 4, 7, 8])
def test_products_around_the_ring_are_the_quadratic_ones_in_another_basis(D):
    x, weights = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True), torch.randn(3, D * (D + 1) // 2, 2)
    weights = weights.double()
    ring, want, grad = Ring.of(D, x), quadratic(x) @ weights[:2], torch.randn(2, 5, 2, dtype=torch.float64)
    close = {"rtol": EXACT, "atol": EXACT}
    torch.testing.assert_close(ring.leave(ring.enter(weights)), weights, **close)
    with torch.no_grad():
        products, inner = ring_products(x), ring.enter(weights[:2])
        torch.testing.assert_close(products @ inner, want, **close)
        torch.testing.assert_close(products @ products.mT, (x @ x.mT) ** 2, **close)
        through = through_ring_products(grad @ inner.mT, x)
    torch.testing.assert_close(through, *torch.autograd.grad(want, x, grad), **close)


def test_pairs_made_in_inference_mode_or_for_another_dtype_serve_a_training():
    PAIRS.clear()
    for dtype in (torch.float32, torch.float64):
        with torch.inference_mode():
            quadratic(torch.ones(3, 6, dtype=dtype))
        x = torch.randn(3, 6, dtype=dtype, requires_grad=True)
        y = quadratic(x)
        y.square().sum().backward()
        assert y.dtype == dtype and x.grad.isfinite().all()
    torch.testing.assert_close(y @ y.T, (x @ x.T) ** 2, rtol=EXACT, atol=EXACT)
