"""LiZA beside an attention module against its settings' description, token by token and head by head."""

import pytest
import torch

from tnt_hf.conversion.architectures import Heads
from tnt_hf.conversion.injection_config import LiZAConfig
from tnt_hf.conversion.liza import LiZAMemory


T, HEADS = 9, Heads(hidden=12, query=4, key_value=2, head_dim=6)


def operator(**settings):
    """A memory that is all there is (w = 1), its inputs and its output `[T, Hq, K]`."""
    memory = LiZAMemory(LiZAConfig(weight=1.0, feature_map="identity", chunk_size=4, **settings), HEADS, 0).double()
    q, k, v = (torch.randn(1, n, T, HEADS.head_dim).double() for n in (HEADS.query, HEADS.key_value, HEADS.key_value))
    x, k = torch.randn(1, T, HEADS.hidden).double(), k / 3  # short enough for a delta rule
    out = memory(torch.zeros(1, T, HEADS.query, HEADS.head_dim).double(), q, k, v, x)
    return memory, (q[0], k[0], v[0], x[0]), out[0]


def delta_rule(q, k, v, beta, alpha):
    """q `[Hq, T, K]`, k, v `[H, T, n, K]`, beta `[H, T, n]`, alpha `[H, T]` -> `[T, Hq, K]`."""
    out = torch.zeros(T, len(q), HEADS.head_dim).double()
    for i in range(len(q)):
        head, S = i // (len(q) // len(k)), torch.zeros(HEADS.head_dim, HEADS.head_dim).double()
        for t in range(T):
            S = alpha[head, t] * S
            for key, value, strength in zip(k[head, t], v[head, t], beta[head, t]):
                S = S + strength * torch.outer(key, value - key @ S)
            out[t, i] = q[i, t] @ S
    return out


def turned(x, angle):
    """The channels j and j + K / 2 of `x` as real and imaginary parts, times e^(i angle)."""
    real, imaginary = x.chunk(2, -1)
    y = torch.complex(real, imaginary) * torch.exp(torch.tensor(1j * angle, dtype=torch.complex128))
    return torch.cat([y.real, y.imag], -1)


@pytest.mark.filterwarnings("ignore:LiZAConfig.feature_map")
def test_pooled_gates_are_sigmoids_of_the_mean_of_the_key():
    _, (q, k, v, _), out = operator(operator="gated_delta_rule", gate="pooled")
    pooled = torch.sigmoid(k.mean(-1))
    expected = delta_rule(q, k[:, :, None], v[:, :, None], pooled[..., None], pooled ** (1 / 16))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:LiZAConfig.feature_map")
@pytest.mark.parametrize("writes", [1, 2, 3])
def test_each_write_of_a_token_turns_key_and_value_further(writes):
    memory, (q, k, v, x), out = operator(operator="delta_product", gate="learned", num_writes=writes)
    angles = [torch.pi * i / writes for i in range(writes)]
    k, v = (torch.stack([turned(y, angle) for angle in angles], 2) for y in (k, v))
    beta = torch.full((HEADS.key_value, T, writes), 0.5).double()
    expected = delta_rule(q, k, v, beta, torch.ones(HEADS.key_value, T).double())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:LiZAConfig.feature_map")
@pytest.mark.parametrize("trained", [False, True])
def test_learned_gates_are_projections_of_the_layers_input(trained):
    memory, (q, k, v, x), out = operator(operator="gated_delta_rule", gate="learned")
    beta, alpha = (torch.full((HEADS.key_value, T), x, dtype=torch.float64) for x in (0.5, 0.999))
    if trained:
        for proj in (memory.beta_proj, memory.decay_proj):
            torch.nn.init.normal_(proj.weight)
        beta, alpha = (torch.sigmoid(p.weight @ x.T + p.bias[:, None]) for p in (memory.beta_proj, memory.decay_proj))
        blank = torch.zeros(1, T, HEADS.query, HEADS.head_dim).double()
        out = memory(blank, q[None], k[None], v[None], x[None])[0]
    expected = delta_rule(q, k[:, :, None], v[:, :, None], beta[..., None], alpha)
    # log(999), the bias, was rounded to float32: alpha is off by 2.4e-10 at most, in each of the T steps.
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12 if trained else 1e-8)
