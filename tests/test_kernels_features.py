"""The Triton kernels between the projections and the memories against the same in torch, `memory_tokens`, which runs
in float64 here: outputs, and the gradients of tokens and weights."""

import pytest
import torch
from interpreter import assert_close, in_precision, randoms, run_cases

from tnt_hf import kernels_features_tnt
from tnt_hf.convolution_tnt import TNTCausalConv
from tnt_hf.kernels_parts_tnt import INTERPRETED
from tnt_hf.tokens_tnt import memory_tokens


@pytest.mark.long  # by default those of whole models run these kernels
def test_in_the_interpreter():
    run_cases(__file__, "not slow")


DOCUMENTS = [[5, 1, 1, 2, 61], [70]]  # lengths, of the rows of a batch
CASES = {  # head width, tokens, earlier tokens a convolution sees, documents, options
    "as the models have it": (16, 70, 3, False, {}),
    "packed documents": (16, 70, 3, True, {}),
    "several tiles": (64, 70, 3, True, {}),  # of 32 tokens
    "no SiLU, values as they are": (32, 70, 2, True, {"silu": False, "units": (True, True, False)}),
    "no convolution": (32, 70, 0, False, {}),
    "fewer tokens than taps": (16, 2, 3, False, {}),
}


def make(name: str, dtype: torch.dtype):
    D, T, taps, packed, options = CASES[name]
    torch.manual_seed(0)
    parts = [torch.randn(2, T, heads * D, dtype=torch.float64) for heads in (3, 1, 1)]
    parts[1][0, -1] = 0.0  # a key of no length
    convs = [TNTCausalConv(x.shape[2], taps + 1).double() for x in parts] if taps else []
    for conv in convs:
        torch.nn.init.normal_(conv.weight)
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(x)) % 2, torch.tensor(x)) for x in DOCUMENTS])
    convs = [conv.to(dtype) for conv in convs]
    parts = [x.requires_grad_() for x in in_precision(parts, dtype)]
    options = {"silu": True, "units": (True, True, True), "head_dim": D} | options
    return (convs, tuple(parts), taps, None, None, ids if packed else None), options


def measured(args, **options):
    tokens, tail = memory_tokens(*args, **options)
    inputs = [*args[1], *(conv.weight for conv in args[0])]
    gradients = torch.autograd.grad(tokens, inputs, randoms(tokens))
    return [*tokens, *gradients, *([] if tail is None else [tail])]


@pytest.mark.parametrize("name", CASES)
def case_they_are_the_torch_form(name):
    args, options = make(name, torch.float64)
    want = measured(args, dtype=torch.float64, **options)
    args, options = make(name, torch.float32)
    got = measured(args, dtype=torch.float32, operands=torch.float32, **options)
    assert_close(got, want, name)


def case_the_tail_is_of_the_last_document():
    """However short that is: what comes next must not see the one before."""
    convs, parts, taps, *_ = make("packed documents", torch.float32)[0]
    for last in (1, 2, 3, 4):
        ids = (torch.arange(70) >= 70 - last).long().expand(2, -1)
        options = {"head_dim": 16, "silu": True, "units": (True, True, True), "dtype": torch.float32}
        plain, found = (
            memory_tokens(convs, parts, taps, None, None, ids, operands=x, **options)[1] for x in (None, torch.float32)
        )
        assert torch.equal(found, plain) and bool((found[..., : max(taps - last, 0)] == 0).all())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is wrong for bfloat16")
@pytest.mark.parametrize("name", CASES)
def case_bfloat16(name):
    """Inputs, outputs and d z are rounded, and nothing else."""
    args, options = make(name, torch.bfloat16)
    got = measured(args, dtype=torch.float32, operands=torch.bfloat16, **options)
    exact = make(name, torch.float64)[0]
    exact = (
        [conv.double() for conv in args[0]],
        tuple(x.detach().double().requires_grad_() for x in args[1]),
        *exact[2:],
    )
    want = measured(exact, dtype=torch.float64, **options)
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() <= 2**-7 * y.norm()  # twice by up to 2^-8


def case_a_frozen_convolution_takes_no_sum_over_tokens(monkeypatch):
    """Nor the memory for one, a copy of its weight for every tile; the tokens' gradients are the same."""
    args, options = make("packed documents", torch.float32)
    options |= {"dtype": torch.float32, "operands": torch.float32}
    wanted = torch.autograd.grad(sum(x.square().sum() for x in memory_tokens(*args, **options)[0]), args[1])
    shares = []
    launch = kernels_features_tnt._launch

    def watched(kernel, x, tensors, constants):
        if kernel is kernels_features_tnt.features_reverse:
            shares.append(tensors[5])
        launch(kernel, x, tensors, constants)

    monkeypatch.setattr(kernels_features_tnt, "_launch", watched)
    for conv in args[0][:2]:
        conv.requires_grad_(False)
    found = torch.autograd.grad(sum(x.square().sum() for x in memory_tokens(*args, **options)[0]), args[1])
    assert sorted(x is None for x in shares) == [False, True, True]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # another kernel, another order of its sums


def case_only_what_the_kernels_know_is_theirs(monkeypatch):
    """A convolution that somebody has changed is called, and so it is where tokens are absent or a cache goes on."""
    args, options = make("as the models have it", torch.float32)
    (convs, parts, taps, *_), options = args, options | {"dtype": torch.float32, "operands": torch.float32}
    calls = []
    convs[1].register_forward_hook(lambda *_: calls.append(1))
    memory_tokens(convs, parts, taps, None, None, None, **options)
    assert len(calls) == 1
    convs = make("as the models have it", torch.float32)[0][0]
    mask, tail = torch.ones(2, 70, dtype=torch.bool), torch.randn(2, 80, 3)
    for given in ((tail, None), (None, mask)):
        plain = memory_tokens(convs, parts, taps, *given, None, **{**options, "operands": None})
        found = memory_tokens(convs, parts, taps, *given, None, **options)
        assert all(torch.equal(x, y) for x, y in zip(found[0], plain[0], strict=True))
