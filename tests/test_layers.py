"""The layers that have a forward or a backward of their own on a CPU, against the library's operations.

Axis legend: B batch   T tokens   C channels   K taps of a kernel
"""

import itertools

import pytest
import torch
from tiny import tiny_config
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tnt_hf import TNTConfig, TNTForCausalLM, branch_tnt, modeling_tnt
from tnt_hf.convolution_tnt import BLOCK, TNTCausalConv, convolve, convolve_token, is_plain
from tnt_hf.gate_tnt import TNTRMSNorm
from tnt_hf.projection_tnt import unit_vectors


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("T", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_causal_convolution_is_the_librarys(kernel, T):
    torch.manual_seed(T)
    conv = TNTCausalConv(6, kernel)
    window = torch.randn(2, 6, T + kernel - 1, requires_grad=True)
    found, wanted = conv(window), nn.Conv1d.forward(conv, window)
    assert found.shape == wanted.shape == (2, 6, T)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # both sum K products in float32
    towards = torch.randn_like(found)
    inputs = (window, conv.weight)
    for a, b in zip(torch.autograd.grad(found, inputs, towards), torch.autograd.grad(wanted, inputs, towards)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # the weight's sums B T products


def test_the_convolutions_gradient_is_its_derivative():
    conv = TNTCausalConv(2, 4).double()
    window = torch.randn(1, BLOCK + 7, 2, dtype=torch.float64).transpose(1, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(conv, {"weight": w}, x), (window, conv.weight)
    )


@pytest.mark.parametrize(
    "dtype, half, autocast",
    [
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float16, torch.float16, False),
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float64, torch.float64, True),  # which autocast leaves alone
    ],
)
def test_sums_of_a_convolution_in_half_precision_are_rounded_once(dtype, half, autocast):
    torch.manual_seed(0)
    conv, window = TNTCausalConv(4, 4).to(dtype), torch.randn(2, 4, 2 * BLOCK + 9, dtype=dtype, requires_grad=True)
    nn.init.normal_(conv.weight)
    reduced = half if half.itemsize < 4 else torch.bfloat16
    with torch.autocast("cpu", reduced, enabled=autocast):  # a convolution's weights and inputs are rounded there, too
        y, library = conv(window), nn.Conv1d.forward(conv, window)
    towards = torch.randn_like(y)
    inputs = [window, conv.weight]
    found = [y, *torch.autograd.grad(y, inputs, towards)]
    assert [x.dtype for x in found] == [half, dtype, dtype] and library.dtype == half
    exact = [x.detach().to(half).double().requires_grad_() for x in inputs]
    y = nn.functional.conv1d(*exact, groups=4)
    wanted = [y, *torch.autograd.grad(y, exact, towards.double())]
    digits, sums = torch.finfo(half).eps / 2, 100 * torch.finfo(torch.promote_types(half, torch.float32)).eps
    for x, z in zip(found, wanted):  # sums are rounded, too, beside which the smallest of them are nothing
        torch.testing.assert_close(x.double(), z, rtol=1.01 * digits, atol=sums * float(z.detach().abs().max()))
    torch.testing.assert_close(found[0], library, rtol=2 * digits, atol=sums)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_one_token_is_convolved_as_the_row_is(masked, train):
    torch.manual_seed(0)
    convs = [TNTCausalConv(channels, 4) for channels in (4, 2, 6)]
    parts = tuple(torch.randn(3, 9, conv.in_channels) for conv in convs)
    mask = torch.rand(3, 9) > 0.4 if masked else None
    with torch.set_grad_enabled(train):
        wanted, wanted_tail = convolve(convs, parts, 3, None, mask, None)
        tail = torch.zeros_like(wanted_tail)
        for t in range(9):
            present = None if mask is None else mask[:, t : t + 1]
            y, tail = convolve_token(convs, tuple(x[:, t : t + 1] for x in parts), tail, present)
            # a tap at a time here, all four in one sum there
            torch.testing.assert_close(y, torch.cat(wanted, -1)[:, t : t + 1], rtol=0, atol=1e-6)
        assert torch.equal(tail, wanted_tail)


def plainly(norm: TNTRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_rms_norm_is_differentiable_twice(shape):
    torch.manual_seed(0)
    norm = TNTRMSNorm(5, 1e-6).double()
    x, weight = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.rand(5, dtype=torch.float64) + 0.5
    weight.requires_grad_()
    with torch.no_grad():
        norm.weight.copy_(weight)
    torch.testing.assert_close(norm(x), plainly(norm, x))

    def f(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, x)

    assert torch.autograd.gradcheck(f, (x, weight))
    assert torch.autograd.gradgradcheck(f, (x, weight))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e12, 1e15, 1e18])
def test_rms_norm_has_the_gradient_of_what_a_memory_becomes_that_diverges(size):
    """A finite one that is wrong would not stop a run."""
    torch.manual_seed(0)
    norm = TNTRMSNorm(64, 1e-6)
    nn.init.normal_(norm.weight)
    x, d_y = (size * torch.randn(7, 64)).requires_grad_(), torch.randn(7, 64)
    found = torch.autograd.grad(norm(x), (x, norm.weight), d_y)
    norm.double()
    x = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(plainly(norm, x), (x, norm.weight), d_y.double())
    for a, b in zip(found, wanted):  # rounding of float32, relative to the largest
        assert (a - b).abs().max() <= 1e-6 * b.abs().max()


def test_rms_norm_gives_the_same_bits_with_and_without_gradients():
    torch.manual_seed(0)
    norm = TNTRMSNorm(64, 1e-6)
    nn.init.normal_(norm.weight)
    x = torch.randn(7, 300, 64)
    with torch.no_grad():
        alone = norm(x)
    assert torch.equal(norm(x), alone)
    for x_learns, weight_learns in itertools.product([False, True], repeat=2):
        norm.weight.requires_grad_(weight_learns)
        here = x.clone().requires_grad_(x_learns)
        y = norm(here)
        assert y.requires_grad is (x_learns or weight_learns)
        if y.requires_grad:
            y.sum().backward()
            assert (here.grad is not None) is x_learns


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_may_lie_in_any_order_in_memory(order):
    """A transposed input, a transposed gradient, an expanded input: as of a copy."""
    torch.manual_seed(0)
    norm, back = TNTRMSNorm(8, 1e-6).double(), [order.index(i) for i in range(3)]
    x, d = (torch.randn(4, 3, 8, dtype=torch.float64).permute(order).contiguous().permute(back) for _ in range(2))
    for rows, f in itertools.product([x, x[:1].expand_as(x)], [norm, unit_vectors]):
        ours, copies = (torch.autograd.grad(f(y), y, d) for y in (rows.detach().requires_grad_(), leaf(rows)))
        torch.testing.assert_close(ours, copies, rtol=0, atol=1e-14)  # sums in another order


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def test_rms_norm_of_what_was_made_in_inference_mode():
    norm = TNTRMSNorm(8, 1e-6)
    with torch.inference_mode():
        x = torch.randn(4, 3, 8)
    found, expected = (torch.autograd.grad(norm(y).square().sum(), norm.weight)[0] for y in (x, x.clone()))
    torch.testing.assert_close(found, expected)


def test_rms_norm_rounds_no_gradient_to_half_precision():
    """Where `backward` is called inside autocast."""
    torch.manual_seed(0)
    norm, x = TNTRMSNorm(64, 1e-6), torch.randn(7, 64, requires_grad=True)
    y = norm(x)
    inputs, d = (x, norm.weight), torch.randn_like(y)
    expected = torch.autograd.grad(y, inputs, d, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, inputs, d)
    assert all(map(torch.equal, found, expected))


def test_autocast_rounds_an_input_once_for_all_that_read_it(monkeypatch):
    """And to the same bits as in every layer by itself. Memories and gates read it unrounded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = TNTForCausalLM(
        TNTConfig(num_attention_heads=2, attention_output_gate=True, local_chunk_sizes=[4], **sizes)
    ).eval()
    ids, read = torch.randint(32, (2, 13)), {}
    for name, module in model.model.layers[0].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, x, name=name: read.update({name: x[0]}))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids, use_cache=False).logits
        groups = [
            "self_attn.q self_attn.k self_attn.v self_attn.gate",
            "mlp.gate mlp.up",
            "memory.q memory.k memory.v",
        ]
        for group in groups:
            first, *others = [read[f"{name}_proj"] for name in group.split()]
            assert first.dtype == torch.bfloat16 and all(x is first for x in others), group
        assert read["memory.memories.0.lr_proj"].dtype == torch.float32
        for file in (modeling_tnt, branch_tnt):
            monkeypatch.setattr(file, "rounded", lambda x: x)
        assert torch.equal(found, model(ids, use_cache=False).logits)
    assert read["mlp.up_proj"].dtype == torch.float32


def test_layers_can_be_traced(tmp_path):
    torch.manual_seed(0)
    for layer, x in ((TNTRMSNorm(8, 1e-6), torch.randn(2, 5, 8)), (TNTCausalConv(6, 3), torch.randn(2, 6, 9))):
        traced = torch.jit.trace(layer, x)
        torch.jit.save(traced, tmp_path / "layer.pt")
        torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x), layer(x))


def test_rms_norm_can_be_mapped_over_rows():
    norm, x = TNTRMSNorm(8, 1e-6), torch.randn(4, 3, 8)
    assert torch.equal(torch.vmap(norm)(x), norm(x))
    per_row = torch.vmap(torch.func.grad(lambda row: norm(row).square().sum()))(x)
    x.requires_grad_()
    torch.testing.assert_close(per_row, torch.autograd.grad(norm(x).square().sum(), x)[0])


def test_a_frozen_convolution_hands_on_the_same_gradient():
    conv, x = TNTCausalConv(6, 4).double(), torch.randn(2, 6, 300, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(conv(x).square().sum(), x, retain_graph=True)
    conv.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(conv(x).square().sum(), x)[0], wanted, rtol=0, atol=0)
    assert conv.weight.grad is None


def test_earlier_taps_of_a_convolution_start_as_noise():
    config = tiny_config()
    taps = TNTForCausalLM(config).model.layers[0].memory.q_conv.weight
    assert 0.5 < taps[..., :-1].std() / config.initializer_range < 2
    assert 0.5 < (taps[..., -1] - 1).std() / config.initializer_range < 2


@pytest.mark.parametrize("dtype, autocast", [(torch.bfloat16, False), (torch.float32, True)])
def test_one_token_is_rounded_to_half_precision_once(dtype, autocast):
    conv, x = TNTCausalConv(64, 4).to(dtype), torch.randn(3, 4, 64).bfloat16().to(dtype)
    nn.init.normal_(conv.weight)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, _ = convolve_token([conv], (x[:, 3:],), x[:, :3].transpose(1, 2), None)
    weight = conv.weight.bfloat16().double()[:, 0]
    exact = (x.double().transpose(1, 2) * weight).sum(-1)[:, None]
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_a_hook_of_all_modules_is_around_each(register):
    conv = TNTCausalConv(4, 4)
    with register(lambda *_: None):
        assert not is_plain(conv, TNTCausalConv)
    assert is_plain(conv, TNTCausalConv)
