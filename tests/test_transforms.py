"""Second derivatives and `torch.func`, which the naive form has of everything: memories, their convolution, norms and
Q-K projection. Backwards written by hand say that they have not."""

import pytest
import torch
from test_memory import assert_same, make_inputs
from tiny import left_padded, tiny_model, tokens
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from tnt_hf import features_tnt
from tnt_hf.convolution_tnt import TNTCausalConv, convolve
from tnt_hf.features_tnt import quadratic
from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.projection_tnt import project_queries, unit_vectors


CLOSE = 1e-9  # float64; second derivatives of two layers multiply its rounding
IDS, PADDING = left_padded([tokens(13), tokens(9, seed=2)])
ROWS = {
    "rows": {},
    "padded": {"attention_mask": PADDING},
    "packed": {"position_ids": torch.cat([torch.arange(6), torch.arange(7)])[None].expand(2, -1)},
}
MODES = {
    "default": {},
    "two reset intervals": {"global_chunk_size": 4, "local_reset_interval": [4, 8], "memory_conv_kernel": 2},
    "quadratic keys": {"memory_depth": 1, "memory_feature_map": "quadratic", "memory_momentum": True},
    "Eq. 7 as printed": {"qk_projection": "chunk", "memory_decay": True, "memory_grad_bound": 0.3},
    "mal": {"variant": "mal", "memory_layernorm": True, "memory_activation": "gelu", "num_persistent_tokens": 1},
}


def naive_model(**changes):
    """With all parameters off their initial zeros and ones, where some derivatives jump. SDPA's kernels have no second
    derivatives."""
    model = tiny_model(memory_implementation="naive", attn_implementation="eager", num_hidden_layers=1, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
    return model


def loss_of(model, ids, **rows):
    def loss(parameters):
        logits = functional_call(model, parameters, (ids,), {"use_cache": False, **rows}).logits
        targets = ids[:, 1:]
        if "attention_mask" in rows:  # padding sees nothing at all
            targets = targets.masked_fill(rows["attention_mask"][:, :-1] == 0, -100)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())

    return loss


AT_ONCE = "two reset intervals", "rows"


@pytest.mark.parametrize(
    "mode, rows",
    [
        pytest.param(mode, rows, marks=[pytest.mark.long] * (mode != "default" and (mode, rows) != AT_ONCE))
        for mode in MODES
        for rows in ROWS
    ],
)
def test_a_naive_model_can_be_transformed_and_has_second_derivatives(mode, rows):
    model = naive_model(**MODES[mode])
    loss, live = loss_of(model, IDS, **ROWS[rows]), dict(model.named_parameters())
    weights = {name: p.detach() for name, p in live.items()}
    generator = torch.Generator().manual_seed(4)
    towards = {name: torch.randn(p.shape, dtype=p.dtype, generator=generator) for name, p in weights.items()}
    towards["model.embed_tokens.weight"][0] = 0.0  # padding, whose gradient torch leaves out
    size = torch.cat([x.flatten() for x in towards.values()]).norm()
    towards = {name: x / size for name, x in towards.items()}
    unused = {"allow_unused": True, "materialize_grads": True}  # a document within a chunk reads no writes of it
    first = torch.autograd.grad(loss(live), list(live.values()), create_graph=True, **unused)
    along = sum((x * y).sum() for x, y in zip(first, towards.values()))
    second = torch.autograd.grad(along, list(live.values()), **unused)

    by_func, moved = jvp(grad(loss), (weights,), (towards,))
    assert_same([by_func[name] for name in live], list(first), CLOSE)
    assert_same([moved[name] for name in live], list(second), CLOSE)
    ahead, behind = (grad(loss)({name: w + h * towards[name] for name, w in weights.items()}) for h in (1e-5, -1e-5))
    found = torch.cat([((ahead[name] - behind[name]) / 2e-5).flatten() for name in weights])
    wanted = torch.cat([x.flatten() for x in second])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))  # differences: h^2


def test_gradients_of_each_row_by_vmap():
    model, ids = naive_model(), tokens(3, 9)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def of_row(weights, row):
        return loss_of(model, row[None])(weights)

    found = vmap(grad(of_row), (None, 0))(weights, ids)
    for i, row in enumerate(ids):
        wanted = grad(of_row)(weights, row)
        assert_same([found[name][i] for name in weights], [wanted[name] for name in weights], CLOSE)


@pytest.mark.parametrize("implementation", ["chunk", "auto"])
def test_other_forms_say_what_can_be_transformed(implementation):
    model = tiny_model(memory_implementation=implementation)
    with pytest.raises(RuntimeError, match=r"torch\.func.*'naive' can"):
        grad(loss_of(model, IDS))(dict(model.named_parameters()))
    k = torch.randn(1, 8, 1, 4)
    weight, lr = torch.randn(1, 4, 4), torch.rand(1, 8, 1)
    with pytest.raises(RuntimeError, match=r"torch\.func.*'naive' can"):
        grad(lambda k: memory_chunkwise(k, k, k, lr, [weight], chunk_size=4)[0].sum())(k)
    with pytest.raises(RuntimeError, match=r"torch\.func.*'naive' can"):
        grad(lambda k: project_queries(k, k, reset_interval=4)[0].sum())(k)


def test_convolution_and_unit_vectors_are_differentiable_twice():
    torch.manual_seed(0)
    conv = TNTCausalConv(3, 4).double()
    window = torch.randn(2, 3, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(conv.weight).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x, w: functional_call(conv, {"weight": w}, x), (window, weight))
    assert torch.autograd.gradgradcheck(unit_vectors, window)
    conv.requires_grad_(False)
    assert torch.autograd.gradgradcheck(conv, window)


@pytest.mark.parametrize("size", [0.0, 1e-14, 1.0])
def test_derivatives_of_unit_vectors_where_there_is_no_direction(size):
    torch.manual_seed(0)
    x, towards = (torch.randn(2, 5, dtype=torch.float64) for _ in range(2))
    x[0] *= size

    def f(x):
        return (unit_vectors(x) * towards).sum() + (unit_vectors(x)[1] * torch.arange(5)).sum().square()

    x.requires_grad_()
    (once,), (first,) = (torch.autograd.grad(f(x), x, create_graph=again) for again in (False, True))
    assert_same([once, grad(f)(x.detach())], [first, first], CLOSE)
    (second,) = torch.autograd.grad((first * towards)[1].sum(), x)
    moved = jvp(grad(f), (x.detach(),), (towards * torch.tensor([[0.0], [1.0]]),))[1]
    assert_same([moved], [second], CLOSE)
    assert jvp(grad(f), (x.detach(),), (towards,))[1].isfinite().all()


def test_second_derivatives_of_absent_tokens_of_the_recurrence():
    (q, k, v, lr), weights, gates = make_inputs(T=9)
    mask, towards = torch.rand(q.shape[:2], generator=torch.Generator().manual_seed(0)) > 0.4, torch.randn_like(k)
    assert not mask.all()

    def f(k):
        settings = {"chunk_size": 4, "query_projection": "shard", "implementation": "naive", "mask": mask}
        return memory_chunkwise(q, k, v, lr, weights, **settings, **gates)[0].square().sum()

    first, moved = jvp(grad(f), (k,), (towards,))
    k.requires_grad_()
    (wanted,) = torch.autograd.grad(f(k), k, create_graph=True)
    assert_same([first, moved], [wanted, *torch.autograd.grad((wanted * towards).sum(), k)], CLOSE)


def test_what_is_made_once_outlives_no_transform(monkeypatch):
    monkeypatch.setattr(features_tnt, "PAIRS", {})
    x = torch.randn(2, 9, 5)

    def products(x):
        return quadratic(x).square().sum()

    inside = jvp(grad(products), (x,), (x,))
    torch.testing.assert_close(jvp(grad(products), (x,), (x,)), inside)
    assert quadratic(x).shape == (2, 9, 15)

    convs, ids = [TNTCausalConv(5, 3)], (torch.arange(9) // 4).expand(2, -1)

    def convolved(x):
        return convolve(convs, (x,), 2, None, None, ids)[0][0].square().sum()

    inside = jvp(grad(convolved), (x,), (x,))
    torch.testing.assert_close(jvp(grad(convolved), (x,), (x,)), inside)
    x.requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(convolved(x), x)[0], inside[0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reset_interval", [None, 5])
def test_the_naive_projection_is_the_chunks(reset_interval, normalize):
    torch.manual_seed(0)
    q, k = torch.randn(2, 17, 4, 3, dtype=torch.float64), torch.randn(2, 17, 2, 3, dtype=torch.float64)
    M, time = torch.randn(2, 2, 3, 3, dtype=torch.float64), torch.tensor([3, 5])
    inputs = [x.requires_grad_() for x in (q, k, M)]
    for mask in (None, torch.rand(2, 17) > 0.3):
        for segment_ids in (None, (torch.arange(17) // 6).expand(2, -1)):
            rows = {"mask": mask, "segment_ids": segment_ids, "initial_state": (M, time), "normalize": normalize}
            results = []
            for implementation in ("naive", "chunk"):
                found = project_queries(
                    q, k, reset_interval=reset_interval, output_final_state=True, implementation=implementation, **rows
                )
                probe = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in found)
                results.append([*found, *torch.autograd.grad(probe, inputs)])
            assert_same(*results, CLOSE)


def test_many_gradients_at_once():
    """`is_grads_batched`, which vectorizes the Jacobians of `torch.autograd.functional`."""
    model = naive_model()
    x = model.get_input_embeddings()(IDS).detach()[:1]

    def f(x):
        return model(inputs_embeds=x, use_cache=False).logits.sum(-1)

    wanted, found = (torch.autograd.functional.jacobian(f, x, vectorize=many) for many in (False, True))
    assert_same([found], [wanted], CLOSE)
    for implementation in ("chunk", "native"):
        model.config.memory_implementation = implementation
        with pytest.raises(RuntimeError, match="is_grads_batched=True.*'naive' takes many"):
            torch.autograd.functional.jacobian(f, x, vectorize=True)


@torch.no_grad()
def test_a_decoded_token_does_not_lose_its_tangent():
    """Not every operation of torch has one; C has none."""
    model = tiny_model(attn_implementation="eager")
    x = model.get_input_embeddings()(IDS)
    cache = model(inputs_embeds=x[:, :5]).past_key_values
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="does not support"):
        model(inputs_embeds=forward_ad.make_dual(x[:, 5:6], x[:, 5:6]), past_key_values=cache)
    with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        model(inputs_embeds=forward_ad.make_dual(x, x))
    wanted = model(inputs_embeds=x).logits
    with forward_ad.dual_level():  # which another thread may have opened
        assert torch.equal(model(inputs_embeds=x).logits, wanted)
