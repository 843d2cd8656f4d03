"""The hand-written backward of the memory and the gradient bound: every way back to a chunk's weights, one answer."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from test_memory import assert_same, leaves, make_inputs, probe, run
from tiny import later, tiny_model, tokens

from tnt_hf import native_tnt, plan_tnt, projection_tnt, reverse_tnt
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive
from tnt_hf.network_tnt import smooth_unit_vectors
from tnt_hf.projection_tnt import project_queries, unit_vectors


pytestmark = pytest.mark.usefixtures("form")


@pytest.mark.parametrize("grad_bound", [None, 2.0])  # about half of these gradients are larger than 2
@pytest.mark.parametrize(
    "gates",
    [(), *later(("momentum",), ("decay",)), ("momentum", "decay")],
    ids=str,
)
@pytest.mark.parametrize(
    "keep_ratio, block_elements", [(0, 50), pytest.param(0, 1 << 17, marks=pytest.mark.long), (1e9, 50)]
)
def test_every_way_back_to_a_chunks_weights(monkeypatch, keep_ratio, block_elements, gates, grad_bound):
    """States kept, undone or replayed, in blocks of one chunk or many: the same gradients."""
    monkeypatch.setattr(plan_tnt, "KEEP_RATIO", keep_ratio)
    monkeypatch.setattr(reverse_tnt, "BLOCK_ELEMENTS", block_elements)
    tensors, weights, options = make_inputs(B=2, T=70, G=2, depth=3, layernorm=True, **dict.fromkeys(gates, True))
    tensors[3] = 0.1 * tensors[3]
    inputs = leaves(tensors, weights, options)
    for x in inputs:
        x.requires_grad_()
    naive, chunk = (
        run(op, tensors, weights, options, chunk_size=3, reset_interval=48, grad_bound=grad_bound)
        for op in (memory_naive, memory_chunkwise)
    )
    assert_same(torch.autograd.grad(probe(chunk), inputs), torch.autograd.grad(probe(naive), inputs))


@pytest.mark.parametrize("read", ["current", "chunk_start"])
@pytest.mark.parametrize("keep_ratio", [0, 1e9])
def test_gradients_are_ordinary_tensors(monkeypatch, keep_ratio, read):
    """The backwards work in inference mode; what they return may be kept, changed and differentiated by anyone."""
    returned = []

    def watch(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x: returned.append(function(*x)) or returned[-1])

    watch(reverse_tnt, "_gradients")
    watch(projection_tnt, "_projection_gradients")
    monkeypatch.setattr(plan_tnt, "KEEP_RATIO", keep_ratio)
    tensors, weights, gates = make_inputs(B=2, T=20, G=2, layernorm=True, momentum=True, decay=True)
    settings = {"chunk_size": 4, "reset_interval": 8, "read": read, "output_final_state": True}
    settings["implementation"] = "chunk"
    _, state = memory_chunkwise(*tensors, weights, **gates, **settings)
    inputs = [x.requires_grad_() for x in (*leaves(tensors, weights, gates), *state.weights)]
    q, M = project_queries(*tensors[:2], reset_interval=None, output_final_state=True)
    result = memory_chunkwise(q, *tensors[1:], weights, **gates, **settings, initial_state=state)
    torch.autograd.grad(probe(result) + M.sum(), inputs, allow_unused=True)
    assert [sum(x is not None for x in found) for found in returned] == [18, 3]
    assert not any(x.is_inference() for found in returned for x in found if x is not None)


@pytest.mark.parametrize("read", ["current", "chunk_start"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_for_a_backward_that_is_not_taken(monkeypatch, mode, read):
    """For one row the weights are views of parameters, and those ask for a gradient in every mode."""
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    weights, kept = [torch.nn.Parameter(w) for w in weights], []
    for module, name in ((native_tnt, "_blank_tape"), (reverse_tnt, "blank_tape")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, real=real: kept.append(x) or real(*x))
    for taken in (True, False):
        with contextlib.nullcontext() if taken else mode():
            memory_chunkwise(q, k, v, lr, weights, chunk_size=4, read=read)
        assert bool(kept) == taken
        kept.clear()


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("hidden", [5, 40])
def test_backward_may_run_twice(momentum, hidden):
    """Nothing that was saved is overwritten, whichever way (kept, undone, replayed) leads back to the weights."""
    tensors, weights, gates = make_inputs(T=96, momentum=momentum, hidden=hidden, layernorm=True)
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    loss = probe(run(memory_chunkwise, tensors, weights, gates, chunk_size=2))
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_same(torch.autograd.grad(loss, inputs), first, 0)


def test_backward_inside_autocast_is_the_same():
    """Autocast would round its products to bfloat16, or find operands of two dtypes."""
    tensors, weights, gates = make_inputs(T=20, depth=2, momentum=True, dtype=torch.float32)
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    loss = probe(run(memory_chunkwise, tensors, weights, gates, chunk_size=4, query_projection="shard"))
    outside = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(loss, inputs)
    assert_same(inside, outside, 0)


def test_gradient_bound_limits_the_step():
    (q, k, v, lr), weights, _ = make_inputs(T=8, depth=2)
    v = 100 * v
    state = run(memory_chunkwise, [q, k, v, lr], weights, {}, chunk_size=8, grad_bound=0.5)[1]
    step = torch.stack([(w[0] - w0).square().sum((1, 2)) for w, w0 in zip(state.weights, weights)]).sum(0).sqrt()
    assert (step <= 0.5 * lr[0].sum(0) + 1e-12).all()


@pytest.mark.parametrize("grad_bound", [1e-30, 1e30])
@pytest.mark.parametrize("op", [memory_naive, memory_chunkwise])
def test_a_gradient_bound_at_the_ends_of_float32(op, grad_bound):
    """Neither its square nor one over it is a float32: it binds everywhere, or nowhere."""
    tensors, weights, _ = make_inputs(T=8, dtype=torch.float32)
    state = run(op, tensors, weights, {}, chunk_size=4, grad_bound=grad_bound)[1]
    free = run(op, tensors, weights, {}, chunk_size=4)[1].weights
    assert all(
        torch.equal(w, x) for w, x in zip(state.weights, free if grad_bound > 1 else [w[None] for w in weights])
    )


@pytest.mark.parametrize("implementation", ["naive", "chunk", "native"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_a_gradient_bound_of_gradients_beyond_a_floats_square(implementation, chunks):
    """|v|, or |g| of two layers, is a float32 and its square is not: as much is written as of smaller ones."""

    def written(size, depth):
        (q, k, v, lr), weights, _ = make_inputs(T=4, depth=depth, dtype=torch.float32)
        tensors, state, options = [q, size * k, v if depth > 1 else size * v, lr], None, {"grad_bound": 1.0}
        options |= {"chunk_size": 1, "implementation": implementation, "output_final_state": True}
        for i in range(chunks):
            rows = slice(i * 4 // chunks, (i + 1) * 4 // chunks)
            _, state = memory_chunkwise(*(x[:, rows] for x in tensors), weights, **options, initial_state=state)
        return sum((w - x).square().sum() for w, x in zip(state.weights, weights)).sqrt()

    for depth, small, large in ((2, 1e8, 3e10), (1, 1e8, 1e12)):
        assert written(large, depth) == pytest.approx(float(written(small, depth)), rel=1e-2) != 0


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_gradients_through_a_gradient_bound_of_any_size(size):
    """A linear memory with its values, weights and bound times `size`, whose cube overflows float32."""
    (q, k, v, lr), (weight,), _ = make_inputs(T=8, depth=1, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (q, k, v, lr, weight)]

    def gradients(dtype, size, bound=1.5):
        q, k, v, lr, w = (x.to(dtype) for x in inputs)
        o = run(memory_chunkwise, [q, k, size * v, lr], [size * w], {}, chunk_size=4, grad_bound=bound * size)[0]
        return torch.autograd.grad((o / size).sum(), inputs)

    wanted = gradients(torch.float64, 1.0)
    assert_same(gradients(torch.float32, size), wanted, 1e-5)  # float32 rounds
    with pytest.raises(AssertionError):
        assert_same(gradients(torch.float64, 1.0, bound=1e9), wanted, 1e-2)  # the bound was met


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("read", ["current", "chunk_start"])
@pytest.mark.parametrize("op", [memory_naive, memory_chunkwise])
def test_no_gradient_at_the_bound_itself(op, read, dtype):
    """Linear, with W_init = 0, keys and values of length 1: the first chunk's |g_t| are 1, up to rounding."""
    (q, k, v, lr), (weight,), _ = make_inputs(T=32, depth=1, dtype=dtype)
    k, v = (F.normalize(x, dim=-1) for x in (k, v))
    inputs = [x.detach().requires_grad_() for x in (q, k, v, lr, 0 * weight)]

    def gradients(bound):
        *tensors, weight = inputs
        o, state, _ = run(op, tensors, [weight], {}, chunk_size=32, read=read, grad_bound=bound)
        return torch.autograd.grad(o.sum() + state.weights[0].square().sum(), inputs)

    assert_same(gradients(1.0), gradients(None), 64 * torch.finfo(dtype).eps)  # |g_t| is only so close to 1
    with pytest.raises(AssertionError):
        assert_same(gradients(0.999), gradients(None), 1e-2)


@pytest.mark.parametrize("feature_map", ["identity", "quadratic"])
def test_nothing_uninitialised_leaves_the_backward(monkeypatch, feature_map):
    """A last shard that is shorter leaves unused programs between blocks; new memory holds NaN here."""
    monkeypatch.setattr(reverse_tnt, "BLOCK_ELEMENTS", 1)
    tensors, weights, options = make_inputs(T=44, H=1, feature_map=feature_map)
    for x in (*tensors, *weights):
        x.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            out, _ = memory_chunkwise(*tensors, weights, chunk_size=2, reset_interval=24, feature_map=feature_map)
            found = torch.autograd.grad(out.sum(), (*tensors, *weights))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("unit", [unit_vectors, smooth_unit_vectors])
def test_the_backward_of_unit_vectors_is_the_librarys(unit, again):
    """But where there is nothing to turn, at 0 and up to what F.normalize divides by at least: its slope of 1e12, once
    per layer, is more than float32 holds."""
    g = torch.Generator().manual_seed(0)
    x, d = (torch.randn(2, 5, 3, 4, generator=g, dtype=torch.float64) for _ in range(2))
    x[0, 0], x[0, 1] = 0, 1e-13 * x[0, 1]
    x.requires_grad_()
    outputs = [unit(x), F.normalize(x, dim=-1)]
    assert_same(outputs[:1], outputs[1:], 1e-15)
    [found], [wanted] = (torch.autograd.grad(y, x, d, create_graph=again) for y in outputs)
    assert (found[0, :2] == 0).all()
    assert_same([found[0, 2:], found[1]], [wanted[0, 2:], wanted[1]], 1e-14)
    if again:
        [found], [wanted] = (torch.autograd.grad(y.square().sum(), x) for y in (found, wanted))
        assert (found[0, :2] == 0).all()
        assert_same([found[0, 2:], found[1]], [wanted[0, 2:], wanted[1]], 1e-13)
    nothing = x[:, :0].detach().requires_grad_()
    assert torch.autograd.grad(unit(nothing).sum(), nothing)[0].shape == nothing.shape


@pytest.mark.parametrize("first", [1, 9])
def test_a_padding_token_that_is_attended_to_has_a_gradient(first):
    """The embedding of `pad_token_id` is 0 and stays it. Where that token also begins documents, q, k and v are 0 in
    every layer."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        model = tiny_model(dtype, num_hidden_layers=6, layer_types=None, memory_layers=None).train()
        ids = tokens(2, 30)
        ids[:, :first] = model.config.pad_token_id
        model(ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        gradients.append([x.grad.double() for x in model.parameters()])
    for x, y in zip(*gradients, strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm() + 1e-7  # 3e-6 was found; the loss is near 4


def test_a_query_before_the_first_key_has_no_gradient():
    """Keys of zeros leave M at zero, where the derivative of q M / |q M| is 1e12: no rounding error may meet it."""
    g = torch.Generator().manual_seed(0)
    q, k, d = (torch.randn(1, 9, 2, 4, generator=g) for _ in range(3))
    k[:, :3] = 0
    q.requires_grad_(), k.requires_grad_()
    projected, _ = project_queries(q, k, reset_interval=None)
    d_q, d_k = torch.autograd.grad(projected, (q, k), d)
    assert (d_q[:, :3] == 0).all() and (d_k[:, :3] == 0).all()
    assert (d_q[:, 3:] != 0).any() and d_q.abs().max() < 1e3


@pytest.mark.parametrize("op", [memory_naive, memory_chunkwise])
@pytest.mark.parametrize("T", [1, 5])
def test_what_an_absent_token_holds_is_not_seen(op, T):
    """Not even if it is not a number; one token that goes on from a state takes a way of its own."""
    tensors, weights, _ = make_inputs(T=T)
    state = memory_naive(*tensors, weights, chunk_size=2, output_final_state=True)[1]
    mask = torch.ones(tensors[0].shape[:2], dtype=torch.bool)
    mask[0, 0] = False
    results = []
    for filling in (0.0, torch.nan):
        inputs = [x.detach().clone() for x in tensors]
        for x in inputs:
            x[0, 0] = filling
            x.requires_grad_()
        o, end = op(*inputs, weights, chunk_size=2, mask=mask, initial_state=state, output_final_state=True)
        results.append([o, *end.weights, *torch.autograd.grad(o.square().sum() + end.weights[0].sum(), inputs)])
    assert_same(*results, 0)


@pytest.mark.parametrize("reset_interval", [None, 64])
def test_keys_of_unit_length_need_no_second_division(reset_interval):
    """The same projection and gradients behind `unit_vectors`, whose derivative has nothing along the key. One key is
    zero."""
    g = torch.Generator().manual_seed(0)
    q, x = (torch.randn(2, 150, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    x[0, 7] = 0
    weight, inputs = torch.randn(4, generator=g, dtype=torch.float64), [q.requires_grad_(), x.requires_grad_()]
    (found, dx), (wanted, want_dx) = (
        (o, torch.autograd.grad(o.square().mul(weight).sum(), inputs))
        for o in (
            project_queries(q, unit_vectors(x), reset_interval=reset_interval, unit_keys=known)[0]
            for known in (True, False)
        )
    )
    assert_same([found, *dx], [wanted, *want_dx], 1e-12)
    with pytest.raises(ValueError, match="unit_keys"):
        project_queries(q, x, reset_interval=None, unit_keys=1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_compiled_autograd_calls_the_backward_as_it_is():
    tensors, weights, options = make_inputs(B=2, T=40)
    inputs = [x.requires_grad_() for x in leaves(tensors, weights, options)]

    def step():
        o = run(memory_chunkwise, tensors, weights, options, chunk_size=4, reset_interval=16, query_projection="shard")
        probe(o).backward()

    gradients = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        for call in (step, torch.compile(step, backend="aot_eager")):
            call()
            gradients.append([x.grad for x in inputs])
            for x in inputs:
                x.grad = None
    assert_same(*gradients)


def hessian_product(implementation, activation="silu", layernorm=False, grad_bound=None):
    """H c of a function of k that the memory is a part of, as autograd has it and from differences of its gradient."""
    (q, k, v, lr), weights, gates = make_inputs(T=6, layernorm=layernorm)
    if grad_bound is not None:
        k[:, 1] = 0.0  # where a length has no derivative
    c = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(1))

    def gradient(k, **graph):
        k = k.detach().requires_grad_()
        options = {"chunk_size": 4, "activation": activation, "implementation": implementation}
        o, _ = memory_chunkwise(q, k, v, lr, weights, **options, **gates, grad_bound=grad_bound)
        return k, torch.autograd.grad((o.sum() + k).square().sum(), k, **graph)[0]

    k, first = gradient(k, create_graph=True)
    ahead, behind = (gradient(k + step * c)[1] for step in (1e-6, -1e-6))
    return torch.autograd.grad((first * c).sum(), k)[0], (ahead - behind) / 2e-6


@pytest.mark.parametrize("options", [{}, {"layernorm": True}, {"activation": "gelu"}, {"grad_bound": 0.3}])
def test_second_derivatives_are_those_of_the_naive_form_or_an_error(options):
    torch.testing.assert_close(*hessian_product("naive", **options), rtol=1e-6, atol=1e-6)  # of central differences
    with pytest.raises(RuntimeError, match="create_graph=True.*naive"):
        hessian_product("chunk", **options)


@pytest.fixture
def poisoned():
    """Memory that nobody has written to holds NaN."""
    torch.use_deterministic_algorithms(True)  # which fills it
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("read", ["chunk_start", "current"])
@pytest.mark.parametrize("momentum, decay", [(False, False), (True, True)])
def test_nothing_is_read_that_was_not_written(poisoned, read, momentum, decay):
    """Rows of unlike length, whose grids have places that no token fills."""
    tensors, weights, gates = make_inputs(T=21, momentum=momentum, decay=decay)
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    options = {"chunk_size": 4, "reset_interval": 16, "read": read, "query_projection": "shard"}
    o, state, loss = memory_chunkwise(
        *tensors, weights, **gates, **options, output_final_state=True, output_surprise=True
    )
    total = o.square().sum() + sum(x.sum() for x in state.weights)
    assert all(x.isfinite().all() for x in (o, loss, *torch.autograd.grad(total, inputs)))


def test_a_state_inside_a_chunk_goes_on_token_by_token():
    """At chunk size 1 every token begins a chunk, and its gradient is taken at the weights before it."""
    (q, k, v, lr), weights, _ = make_inputs(T=11)
    first, rest = ([x[:, :6] for x in (q, k, v, lr)], [x[:, 6:] for x in (q, k, v, lr)])
    _, state = memory_naive(*first, weights, chunk_size=4, output_final_state=True)
    assert not torch.equal(state.weights[0], state.chunk_weights[0])
    naive, whole = (f(*rest, weights, chunk_size=1, initial_state=state)[0] for f in (memory_naive, memory_chunkwise))
    found, single = state, []
    for t in range(5):
        one = [x[:, t : t + 1] for x in rest]
        o, found = memory_chunkwise(*one, weights, chunk_size=1, initial_state=found, output_final_state=True)
        single.append(o)
    assert_same([naive, torch.cat(single, 1)], [whole, whole], 1e-12)  # float64 sums in another order


@pytest.mark.parametrize("gates", [{}, {"momentum": True, "decay": True}], ids=["plain", "gates"])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_detached_state_goes_on_from_values_alone(chunk_size, gates):
    tensors, weights, gates = make_inputs(B=2, T=13, **gates)
    settings = {**gates, "chunk_size": chunk_size, "query_projection": "shard", "output_final_state": True}
    inputs = leaves(tensors, weights, gates)
    with torch.no_grad():
        _, values = memory_chunkwise(*tensors, weights, **settings)
    for x in inputs:
        x.requires_grad_()
    _, state = memory_chunkwise(*tensors, weights, **settings)
    detached = state.detach()
    assert (detached.chunk_weights is detached.weights) == (chunk_size == 1)
    found, expected = (
        torch.autograd.grad(
            probe(memory_chunkwise(*tensors, weights, **settings, initial_state=before)), inputs, allow_unused=True
        )
        for before in (detached, values)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
