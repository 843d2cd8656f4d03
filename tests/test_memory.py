"""The memory operation: one recurrence, several forms, one answer.

The oracle below is written from the papers' equations with `torch.func.grad` for the inner gradient; everything else
is held to it or to `memory_naive`. float64 throughout: 1e-10 leaves five digits above the rounding of a 24-token
recurrence and catches any wrong term.
"""

import ast
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import later
from torch.utils.flop_counter import FlopCounterMode

from tnt_hf import block_tnt, coefficients_tnt, grid_tnt, memory_tnt, network_tnt, rebuild_tnt, reverse_tnt, scan_tnt
from tnt_hf.features_tnt import feature_width
from tnt_hf.memory_tnt import MemoryState, memory_chunkwise, memory_naive


pytestmark = pytest.mark.usefixtures("form")
EXACT = 1e-10
MODULES = (memory_tnt, grid_tnt, network_tnt, coefficients_tnt, scan_tnt, rebuild_tnt, block_tnt, reverse_tnt)


def make_inputs(
    seed=0,
    B=1,
    T=12,
    H=2,
    G=1,
    K=4,
    V=4,
    depth=2,
    hidden=5,
    momentum=False,
    decay=False,
    layernorm=False,
    feature_map="identity",
    rate=0.5,
    dtype=torch.float64,
):
    """Random op inputs: (tensors q, k, v, lr), weights, options that are tensors."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64).to(dtype)

    tensors = [
        F.normalize(randn(B, T, H * G, K), dim=-1),
        F.normalize(randn(B, T, H, K), dim=-1),
        0.5 * randn(B, T, H, V),
        rate * rand(B, T, H),
    ]
    widths = [feature_width(feature_map, K), *[hidden] * (depth - 1), V]
    weights = [randn(H, a, b) / math.sqrt(a) for a, b in zip(widths, widths[1:])]
    options = {}
    if momentum:
        options["momentum"] = 0.95 * rand(B, T, H)
    if decay:
        options["decay"] = 0.3 * rand(B, T, H)
    if layernorm:
        options["layernorm"] = (1 + 0.1 * randn(H, V), 0.1 * randn(H, V), 1e-6)
    tensors[1] *= 0.8 + 0.4 * rand(B, T, H, 1)  # a model's keys have length 1, which would hide a factor
    return tensors, weights, options


def leaves(tensors, weights, options):
    scalars = [options[name] for name in ("momentum", "decay") if name in options]
    return [*tensors, *weights, *scalars, *options.get("layernorm", ())[:2]]


def cut(tensors, options, where):
    return [x[:, where] for x in tensors], {n: x if n == "layernorm" else x[:, where] for n, x in options.items()}


def run(op, tensors, weights, options, split=None, mask=None, segment_ids=None, **settings_):
    """The op over the sequence in pieces: outputs, final state, surprise."""
    outputs, surprises, state, begin = [], [], settings_.pop("initial_state", None), 0
    for length in split or [tensors[0].shape[1]]:
        where = slice(begin, begin + length)
        begin += length
        x, o = cut(tensors, options, where)
        rows = {
            "mask": None if mask is None else mask[:, where],
            "segment_ids": None if segment_ids is None else segment_ids[:, where],
        }
        out, state, surprise = op(
            *x, weights, **o, **rows, **settings_, initial_state=state, output_final_state=True, output_surprise=True
        )
        outputs.append(out)
        surprises.append(surprise)
    return torch.cat(outputs, 1), state, torch.cat(surprises, 1)


def everything(state: MemoryState):
    projection = [] if state.projection is None else [state.projection]
    return [*state.weights, *state.chunk_weights, *(state.momentum or []), *projection]


def probe(result):
    """A scalar that depends on every output and every state tensor."""
    g = torch.Generator().manual_seed(7)
    return sum(
        (x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in (result[0], *everything(result[1]))
    )


def assert_same(got, want, tolerance=EXACT, what=""):
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape, (what, i, x.shape, y.shape)
        error = (x - y).abs().max().item() / max(1.0, y.abs().max().item())
        assert error <= tolerance, f"{what} tensor {i}: relative error {error:.1e} > {tolerance:.0e}"


# ----------------------------------------------------------------------------------------------- against the equations


def oracle(
    q,
    k,
    v,
    lr,
    weights,
    *,
    chunk_size,
    reset_interval,
    read,
    projection,
    normalize,
    residual,
    activation,
    target,
    momentum,
    decay,
    layernorm,
):
    """One head, one document, as the papers print it; weights are lists of [d_in, d_out]."""
    phi = {"silu": F.silu, "gelu": F.gelu}[activation]

    def f(W, x):
        y = x
        for w in W[:-1]:
            y = phi(y @ w)
        y = y @ W[-1]
        if layernorm is not None:
            gain, bias, eps = layernorm
            y = F.layer_norm(y, y.shape, gain, bias, eps)
        return x + y if residual else y

    def inner_loss(W, key, value):
        return 0.5 * (f(W, key) - value).square().sum()

    W, S, M, out = (
        list(weights),
        [torch.zeros_like(w) for w in weights],
        torch.zeros(q.shape[-1], q.shape[-1], dtype=q.dtype),
        [],
    )
    for t in range(len(q)):
        if reset_interval is not None and t % reset_interval == 0:
            W, S, M = list(weights), [torch.zeros_like(w) for w in weights], torch.zeros_like(M)
        if t % chunk_size == 0:
            W_xi = W
            M = torch.zeros_like(M) if projection == "chunk" else M
        gradient = torch.func.grad(inner_loss)(W_xi, k[t], v[t])
        S = [momentum[t] * s - lr[t] * g for s, g in zip(S, gradient)]
        W = [(1 - decay[t]) * w + decay[t] * (w0 if target == "init" else 0) + s for w, w0, s in zip(W, weights, S)]
        M = M + torch.outer(k[t], k[t]) / k[t].dot(k[t])
        x = q[t] if projection == "none" else q[t] @ M
        x = x / x.norm() if projection != "none" and normalize else x
        out.append(f(W if read == "current" else W_xi, x))
    return torch.stack(out), W


@pytest.mark.parametrize("op", [memory_naive, memory_chunkwise])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"momentum": True, "decay": True},
        {"momentum": True, "decay": True, "target": "zero", "read": "chunk_start"},
        {"layernorm": True, "residual": True, "activation": "gelu"},
        {"projection": "shard", "reset_interval": 6},
        {"projection": "chunk", "reset_interval": 6, "normalize": False, "momentum": True},
        {"feature_map": "quadratic", "momentum": True, "decay": True},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain",
)
def test_matches_the_published_recurrence(op, depth, case):
    defaults = {"target": "init", "read": "current", "projection": "none", "normalize": True}
    case = {**defaults, "reset_interval": None, "residual": False, "activation": "silu", **case}
    flags = {name: case.pop(name, False) for name in ("momentum", "decay", "layernorm")}
    flags["feature_map"] = kind = case.pop("feature_map", "identity")
    (q, k, v, lr), weights, options = make_inputs(T=14, H=2, G=2, depth=depth, **flags)
    named = {
        "query_projection": case["projection"],
        "normalize_projection": case["normalize"],
        "decay_target": case["target"],
        **{name: case[name] for name in ("reset_interval", "read", "residual", "activation")},
    }
    named["feature_map"] = kind
    out, state = op(q, k, v, lr, weights, **options, **named, chunk_size=3, output_final_state=True)
    if kind == "quadratic":
        i, j = torch.triu_indices(4, 4)
        q, k = (x[..., i] * x[..., j] * torch.where(i == j, 1, 2).double().sqrt() for x in (q, k))
    zeros = torch.zeros(1, 14, 2, dtype=torch.float64)
    momentum, decay = options.get("momentum", zeros), options.get("decay", zeros)
    for head in range(4):
        kv = head // 2
        ln = options.get("layernorm")
        want, W = oracle(
            q[0, :, head],
            *(x[0, :, kv] for x in (k, v, lr)),
            [w[kv] for w in weights],
            chunk_size=3,
            momentum=momentum[0, :, kv],
            decay=decay[0, :, kv],
            layernorm=ln and (ln[0][kv], ln[1][kv], ln[2]),
            **case,
        )
        assert_same([out[0, :, head]], [want], what="read-out")
        assert_same([w[0, kv] for w in state.weights], W, what="weights")


def test_momentum_and_forgetting_of_zero_are_none():
    tensors, weights, _ = make_inputs(T=11)
    zeros = torch.zeros_like(tensors[3])
    plain = run(memory_chunkwise, tensors, weights, {}, chunk_size=4)
    gated = run(memory_chunkwise, tensors, weights, {"momentum": zeros, "decay": zeros}, chunk_size=4)
    assert_same([gated[0], *gated[1].weights], [plain[0], *plain[1].weights], 1e-14)


# ----------------------------------------------------------------------- chunkwise = naive: outputs, states, gradients


@st.composite
def cases(draw):
    chunk = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    T = draw(st.integers(1, 24))
    residual = draw(st.booleans())
    K = draw(st.integers(3, 5))

    def pick(*values):
        return draw(st.sampled_from(values))

    shape = {
        "seed": draw(st.integers(0, 2**16)),
        "B": pick(1, 2),
        "T": T,
        "H": pick(1, 2),
        "G": pick(1, 2, 3),
        "K": K,
        "V": K if residual else pick(3, 4, 5),
        "depth": pick(1, 2, 3),
        "feature_map": "identity" if residual else pick("identity", "identity", "quadratic"),
        **{name: draw(st.booleans()) for name in ("momentum", "decay", "layernorm")},
    }
    options = {
        "chunk_size": chunk,
        "reset_interval": pick(None, chunk, 2 * chunk, 3 * chunk),
        "read": pick("current", "chunk_start"),
        "query_projection": pick("none", "shard", "chunk"),
        # normalised in a test of its own: on a rank-one M, q M / |q M| is a sign function of q
        "normalize_projection": False,
        "activation": pick("silu", "gelu"),
        "feature_map": shape["feature_map"],
        "residual": residual,
        "decay_target": pick("init", "zero"),
        "grad_bound": pick(None, None, 0.2, 1e30),
    }
    cells = st.lists(st.booleans(), min_size=shape["B"] * T, max_size=shape["B"] * T)
    rows, split = {}, None
    if draw(st.booleans()):
        rows["mask"] = torch.tensor(draw(cells)).view(-1, T)
    if draw(st.booleans()):
        split = []
        while sum(split) < T:
            split.append(draw(st.integers(1, T - sum(split))))
    elif draw(st.booleans()):
        rows["segment_ids"] = torch.tensor(draw(cells)).view(-1, T).cumsum(1)
    return shape, options, rows, split


def assert_is_naive(case):
    shape, options, rows, split = case
    tensors, weights, gates = make_inputs(**shape)
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    naive = run(memory_naive, tensors, weights, gates, **rows, **options)
    chunk = run(memory_chunkwise, tensors, weights, gates, split, **rows, **options)
    assert torch.equal(chunk[1].time, naive[1].time)
    assert_same(
        [chunk[0], chunk[2], *everything(chunk[1])], [naive[0], naive[2], *everything(naive[1])], what="forward"
    )
    got, want = (torch.autograd.grad(probe(x), inputs, materialize_grads=True) for x in (chunk, naive))
    assert_same(got, want, what="gradient")


@pytest.mark.parametrize("examples", [50, *later(250)])
def test_chunkwise_is_naive_in_all_combinations(examples):
    settings(max_examples=examples)(given(cases())(assert_is_naive))()


@pytest.mark.parametrize("projection", ["shard", "chunk"])
@pytest.mark.parametrize("T, C, interval", [(21, 4, 12), (170, 32, 96)])
def test_normalised_projection_gradients(projection, T, C, interval):
    tensors, weights, gates = make_inputs(T=T, K=8, V=8, G=2, momentum=True)
    tensors[3] = 2 / C * tensors[3]  # a longer chunk with steps of the same size
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    options = {"chunk_size": C, "reset_interval": interval, "query_projection": projection}
    naive, chunk = (run(op, tensors, weights, gates, **options) for op in (memory_naive, memory_chunkwise))
    assert_same([chunk[0], *everything(chunk[1])], [naive[0], *everything(naive[1])])
    assert_same(torch.autograd.grad(probe(chunk), inputs), torch.autograd.grad(probe(naive), inputs))


def test_a_long_scan_replays_its_segments():
    """40 chunks: more than one checkpoint segment, rows of different lengths, a carried start."""
    tensors, weights, gates = make_inputs(B=2, T=161, momentum=True, decay=True, layernorm=True)
    tensors[3] = 0.1 * tensors[3]  # a stable run: rounding must not grow over 161 tokens
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    mask = torch.ones(2, 161, dtype=torch.bool)
    mask[1, :57] = False
    naive = run(memory_naive, tensors, weights, gates, mask=mask, chunk_size=4)
    chunk = run(memory_chunkwise, tensors, weights, gates, [3, 158], mask=mask, chunk_size=4)
    assert_same([chunk[0], *everything(chunk[1])], [naive[0], *everything(naive[1])])
    assert_same(torch.autograd.grad(probe(chunk), inputs), torch.autograd.grad(probe(naive), inputs))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("layernorm", [False, True])
def test_float32_gradients(activation, layernorm):
    """float32 takes other kernels than float64 (one of them, `gelu.out`, is broken on strided buffers in torch 2.13).
    1e-4 is some hundred roundings of 6e-8, ten times what is seen."""
    tensors, weights, options = make_inputs(T=96, K=16, V=16, hidden=64, layernorm=layernorm, momentum=True)
    tensors[3] = 0.1 * tensors[3]
    results = []
    for dtype in (torch.float64, torch.float32):
        cast = [[x.to(dtype) for x in y] for y in (tensors, weights)]
        gates = {
            n: (*(y.to(dtype) for y in x[:2]), x[2]) if n == "layernorm" else x.to(dtype) for n, x in options.items()
        }
        inputs = leaves(*cast, gates)
        for x in inputs:
            x.requires_grad_()
        out = run(memory_chunkwise, *cast, gates, chunk_size=8, activation=activation)[0]
        results.append([x.double() for x in torch.autograd.grad(out.square().sum(), inputs)])
    for got, want in zip(results[1], results[0]):
        assert (got - want).norm() <= 1e-4 * want.norm()


def test_zero_momentum_has_a_gradient():
    """mu = 0 exactly: products through a zero still have derivatives (no logarithms, no divisions)."""
    tensors, weights, gates = make_inputs(T=9, momentum=True, decay=True)
    gates["momentum"][:, 2::3] = 0
    gates["momentum"].requires_grad_()
    want, got = (
        torch.autograd.grad(probe(run(op, tensors, weights, gates, chunk_size=5)), gates["momentum"])[0]
        for op in (memory_naive, memory_chunkwise)
    )
    assert want[:, 2::3].abs().min() > 0
    assert_same([got], [want])


# ------------------------------------------------------------------------------------------- memory time and documents


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [1, 2, 5, 13, 37])
def test_padding_changes_nothing(side, pad):
    tensors, weights, gates = make_inputs(T=19, momentum=True, decay=True)
    options = {"chunk_size": 4, "reset_interval": 8, "query_projection": "shard"}
    alone = run(memory_chunkwise, tensors, weights, gates, **options)

    def padded(x):
        junk = torch.full(
            (1, pad, *x.shape[2:]), math.nan, dtype=x.dtype
        )  # an absent token must not be touched at all
        return torch.cat([junk, x] if side == "left" else [x, junk], 1)

    mask = padded(torch.ones(1, 19)).nan_to_num(0).bool()
    got = run(
        memory_chunkwise,
        [padded(x) for x in tensors],
        weights,
        {n: padded(x) for n, x in gates.items()},
        mask=mask,
        **options,
    )
    assert_same([got[0][mask][None], *everything(got[1])], [alone[0], *everything(alone[1])], 1e-13)
    assert not got[0][~mask].any() and got[1].time.item() == 19


def test_packed_documents_are_documents_alone():
    lengths = [5, 1, 9, 16]
    tensors, weights, gates = make_inputs(T=31, momentum=True)
    options = {"chunk_size": 4, "reset_interval": 8, "query_projection": "shard"}
    segment_ids = torch.repeat_interleave(torch.tensor([3, 0, 7, 5]), torch.tensor(lengths))[None]
    packed = run(memory_chunkwise, tensors, weights, gates, segment_ids=segment_ids, **options)
    alone, begin = [], 0
    for n in lengths:
        x, g = cut(tensors, gates, slice(begin, begin + n))
        begin += n
        alone.append(run(memory_chunkwise, x, weights, g, **options))
    assert_same([packed[0]], [torch.cat([x[0] for x in alone], 1)], 1e-13)
    assert_same(everything(packed[1]), everything(alone[-1][1]), 1e-13)


@pytest.mark.parametrize("T", [6, 8], ids=["inside a shard", "at a reset"])
def test_a_row_without_tokens_keeps_its_state(T):
    tensors, weights, _ = make_inputs(B=2, T=T)
    options = {"chunk_size": 4, "reset_interval": 8, "query_projection": "shard"}
    first = run(memory_chunkwise, tensors, weights, {}, **options)[1]
    mask = torch.tensor([[True] * T, [False] * T])
    second = run(memory_chunkwise, tensors, weights, {}, mask=mask, initial_state=first, **options)[1]
    assert second.time.tolist() == [2 * T, T]
    assert all(torch.equal(x[1], y[1]) for x, y in zip(everything(second), everything(first)))


def test_chunk_size_may_change_at_a_chunk_boundary():
    """Stage 2 decodes at chunk size 1 what stage 1 prefilled at 4."""
    tensors, weights, _ = make_inputs(T=16)
    prompt, rest = (cut(tensors, {}, w)[0] for w in (slice(0, 8), slice(8, 16)))
    state = run(memory_chunkwise, prompt, weights, {}, chunk_size=4)[1]
    single = MemoryState(state.weights, state.weights, None, None, state.time)
    assert_same(state.chunk_weights, state.weights, 0)
    a = run(memory_naive, rest, weights, {}, initial_state=single, chunk_size=1)
    b = run(memory_chunkwise, rest, weights, {}, [1] * 8, initial_state=state, chunk_size=1)
    assert_same([b[0], *everything(b[1])], [a[0], *everything(a[1])])


@pytest.mark.parametrize("read", ["current", "chunk_start"])
@pytest.mark.parametrize("op", [memory_naive, memory_chunkwise])
def test_the_future_is_invisible(op, read):
    tensors, weights, gates = make_inputs(T=20, G=2, momentum=True, decay=True, layernorm=True, dtype=torch.float32)
    options = {"chunk_size": 8, "reset_interval": 16, "read": read, "query_projection": "shard"}
    before = op(*tensors, weights, **gates, **options)[0]
    other, _, other_gates = make_inputs(seed=1, T=20, G=2, momentum=True, decay=True, dtype=torch.float32)
    for t in range(1, 20):
        changed = [torch.cat([x[:, :t], y[:, t:]], 1) for x, y in zip(tensors, other)]
        changed_gates = {
            n: x if n == "layernorm" else torch.cat([x[:, :t], other_gates[n][:, t:]], 1) for n, x in gates.items()
        }
        after = op(*changed, weights, **changed_gates, **options)[0]
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


# ------------------------------------------------------------------------------------------- learning, precision, size


def test_it_learns_without_autograd():
    tensors, weights, gates = make_inputs(T=12, momentum=True)
    want = run(memory_chunkwise, tensors, weights, gates, chunk_size=4)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            got = run(memory_chunkwise, tensors, weights, gates, chunk_size=4)
        assert_same([got[0], *everything(got[1])], [want[0], *everything(want[1])], 1e-14)
    assert all((w - w0).abs().max() > 1e-3 for w, w0 in zip(want[1].weights, weights))


def test_no_inner_autograd_in_the_source():
    """The only uses of torch.autograd are the hand-written outer backward passes."""
    allowed = {"torch.autograd.Function"}
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                assert not name.startswith("torch.func") and ".backward" not in name, name
                assert "autograd" not in name or any(x.startswith(name) for x in allowed), name


def test_a_second_pass_is_less_surprising():
    (q, k, v, lr), weights, _ = make_inputs(T=16, K=32, V=32, depth=1)
    twice = [torch.cat([x, x], 1) for x in (q, k, v, lr)]
    surprise = run(memory_chunkwise, twice, weights, {}, chunk_size=4)[2]
    assert surprise[:, 16:].mean() < 0.7 * surprise[:, :16].mean()


@pytest.mark.parametrize("grad_bound", [None, 1.0])
def test_inputs_that_nothing_reads_have_a_gradient_of_zero(grad_bound):
    """A document shorter than a chunk that is read at its start: processes that train together must all have one."""
    (q, k, v, lr), weights, _ = make_inputs(T=8, depth=1)
    inputs = {name: x.requires_grad_() for name, x in (("q", q), ("k", k), ("v", v), ("lr", lr))}
    gates = {name: torch.full_like(lr, 0.1).requires_grad_() for name in ("momentum", "decay")}
    o, _ = memory_chunkwise(
        *inputs.values(), weights, **gates, chunk_size=8, read="chunk_start", grad_bound=grad_bound
    )
    o.square().sum().backward()
    assert q.grad.any()
    assert all(x.grad is not None and not x.grad.any() for x in (k, v, lr, *gates.values()))


def test_bfloat16_inputs_keep_a_float32_state():
    tensors, weights, _ = make_inputs(T=24, K=16, V=16, dtype=torch.float32)
    want = run(memory_chunkwise, tensors, weights, {}, chunk_size=4)
    low = [x.bfloat16() for x in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(memory_chunkwise, low, weights, {}, chunk_size=4)
    assert got[0].dtype == torch.bfloat16 and all(w.dtype == torch.float32 for w in got[1].weights)
    assert_same([w.float() for w in got[1].weights], want[1].weights, 2e-2)  # bf16 has 8 bits: 4e-3 per input


def bytes_kept(tensors, weights, **settings_):
    """All that the graph keeps per token, inputs included, and the output."""
    for x in (*tensors, *weights):
        x.requires_grad_()
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, _ = memory_chunkwise(*tensors, weights, **settings_)
    return sum(kept.values()) / tensors[0].shape[1], out


def test_products_of_channels_are_not_kept():
    """1 head x 32, whose products are 528 wide: two such tensors alone would take 4,224 bytes."""
    tensors, weights, _ = make_inputs(T=4096, H=1, K=32, V=32, depth=1, feature_map="quadratic", dtype=torch.float32)
    for read in ("current", "chunk_start"):
        per_token, _ = bytes_kept(
            tensors, weights, chunk_size=64, reset_interval=2048, feature_map="quadratic", read=read
        )
        assert per_token < 1000, f"{per_token:.0f} bytes per token and head"


def test_gradient_of_32k_tokens_fits():
    """1 head x 64, chunk 16."""
    tensors, weights, _ = make_inputs(T=32768, H=1, K=64, V=64, hidden=64, dtype=torch.float32)
    per_token, out = bytes_kept(tensors, weights, chunk_size=16, reset_interval=2048)
    assert per_token < 2700, f"{per_token:.0f} bytes per token and head"
    out.square().mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in (*tensors, *weights))


def test_one_token_compiles_without_a_graph_break():
    tensors, weights, gates = make_inputs(B=2, T=9, momentum=True, decay=True)
    options = {"chunk_size": 4, "reset_interval": 8, "query_projection": "shard"}
    want = run(memory_naive, tensors, weights, gates, **options)[0]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, g, state):
        return memory_chunkwise(*x, weights, **g, **options, initial_state=state, output_final_state=True)

    x, g = cut(tensors, gates, slice(0, 2))
    out, state = memory_chunkwise(*x, weights, **g, **options, output_final_state=True)
    outputs = [out]
    for t in range(2, 9):
        x, g = cut(tensors, gates, slice(t, t + 1))
        out, state = step([y.contiguous() for y in x], {n: y.contiguous() for n, y in g.items()}, state)
        outputs.append(out)
    assert_same([torch.cat(outputs, 1)], [want])


@pytest.mark.parametrize("read", ["chunk_start", "current"])
@pytest.mark.parametrize("lengths", [[8] * 16, [8] * 8 + [64], [16, 20, 16, 64, 12], [8] * 4 + [96]], ids=str)
def test_short_documents_do_not_take_a_long_chunk_each(read, lengths):
    """Packed in one row they are what they are alone and cost what one document of the row's length does, with chunks
    of 64, longer than most of them. Ids may come back after another document."""
    tensors, weights, gates = make_inputs(T=128, momentum=True, decay=True)
    inputs = leaves(tensors, weights, gates)
    for x in inputs:
        x.requires_grad_()
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)) % 2, torch.tensor(lengths))[None]

    def results(op, ids):
        o, _ = op(*tensors, weights, chunk_size=64, read=read, segment_ids=ids, **gates)
        return o, *torch.autograd.grad(o.square().sum(), inputs, materialize_grads=True)

    assert_same(results(memory_chunkwise, segment_ids), results(memory_naive, segment_ids))
    with FlopCounterMode(display=False) as packed:
        results(memory_chunkwise, segment_ids)
    with FlopCounterMode(display=False) as one:
        results(memory_chunkwise, None)
    assert packed.get_total_flops() < 2.5 * one.get_total_flops()  # slots are powers of two


def test_a_short_prompt_does_not_take_a_long_chunk():
    tensors, weights, _ = make_inputs(B=2, T=20)
    flops = []
    for chunk_size in (32, 4096):
        with FlopCounterMode(display=False) as counter:
            memory_chunkwise(*tensors, weights, chunk_size=chunk_size, mask=torch.ones(2, 20, dtype=torch.bool))
        flops.append(counter.get_total_flops())
    assert flops[1] == flops[0]
