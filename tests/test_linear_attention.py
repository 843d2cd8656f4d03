"""LiZA's linear operators: the published recurrences, and the chunkwise form that must equal them.

float64 throughout: 1e-10 leaves five digits above the rounding of some 30 tokens and catches any wrong term.
"""

import importlib.util
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tnt_hf.conversion import linear_kernels
from tnt_hf.conversion.linear_attention import feature_map, linear_attention
from tnt_hf.memory_tnt import memory_chunkwise


EXACT = 1e-10
RULES = ("delta_rule", "gated_delta_rule", "delta_product", "linear")
FORMS = ("chunk", "recurrent")


def make_inputs(
    rule="delta_rule", seed=0, B=1, T=12, H=2, G=1, K=4, V=3, n=2, gated=None, state=False, dtype=torch.float64
):
    """Named tensors of the operator; unit keys and strengths in 0..2, where a delta step is a contraction."""
    g = torch.Generator().manual_seed(seed)
    writes = (n,) if rule == "delta_product" else ()

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def rand(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64).to(dtype)

    tensors = {
        "q": randn(B, T, H * G, K),
        "k": F.normalize(randn(B, T, H, *writes, K), dim=-1),
        "v": randn(B, T, H, *writes, V),
        "beta": 2 * rand(B, T, H, *writes),
    }
    if gated if gated is not None else rule == "gated_delta_rule":
        tensors["decay"] = 1 - 0.7 * rand(B, T, H)
    if state:
        tensors["initial_state"] = randn(B, H, K, V)
    return tensors


def run(tensors, rule, split=None, **options):
    """The operator over the sequence in pieces -> output, final state."""
    tensors = dict(tensors)
    outputs, state, begin = [], tensors.pop("initial_state", None), 0
    rows = {name: options.pop(name) for name in ("mask", "segment_ids") if name in options}
    for length in split or [tensors["q"].shape[1]]:
        here = {name: x[:, begin : begin + length] for name, x in {**tensors, **rows}.items()}
        begin += length
        o, state = linear_attention(**here, rule=rule, initial_state=state, output_final_state=True, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def gradients(result, tensors):
    """Of a scalar that depends on every output and every entry of the state."""
    g = torch.Generator().manual_seed(7)
    probe = sum((x * torch.randn(x.shape, generator=g, dtype=x.dtype)).sum() for x in result)
    return torch.autograd.grad(probe, list(tensors.values()))


def assert_same(got, want, tolerance=EXACT, what=""):
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert x.shape == y.shape, (what, i, x.shape, y.shape)
        error = (x - y).abs().max().item() / max(1.0, y.abs().max().item())
        assert error <= tolerance, f"{what} {i}: relative error {error:.1e} > {tolerance:.0e}"


# -------------------------------------------------------------------------------------------- against the publications


def oracle(rule, q, k, v, beta, decay, S):
    """One head, one document, with explicit transition matrices: k, v `[T, n, ...]`, beta `[T, n]`, decay `[T]`."""
    outputs, eye = [], torch.eye(k.shape[-1], dtype=k.dtype)
    for t in range(len(q)):
        transition, write = decay[t] * eye, torch.zeros_like(S)
        for key, value, b in zip(k[t], v[t], beta[t]):
            householder = eye if rule == "linear" else eye - b * torch.outer(key, key)
            transition, write = householder @ transition, householder @ write + b * torch.outer(key, value)
        S = transition @ S + write
        outputs.append(q[t] @ S)
    return torch.stack(outputs), S


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rule, gated",
    [("delta_rule", False), ("gated_delta_rule", True), *((x, y) for x in RULES[2:] for y in (False, True))],
)
def test_is_the_published_recurrence(rule, gated, form):
    x = make_inputs(rule, T=13, G=3, gated=gated, state=True)
    o, state = run(x, rule, implementation=form, chunk_size=5, scale=0.5)
    decay = x.get("decay", torch.ones(1, 13, 2, dtype=torch.float64))
    k, v, beta = (x[name] if rule == "delta_product" else x[name].unsqueeze(3) for name in ("k", "v", "beta"))
    for head in range(6):
        kv = head // 3
        want = oracle(rule, x["q"][0, :, head], *(y[0, :, kv] for y in (k, v, beta, decay)), x["initial_state"][0, kv])
        assert_same([o[0, :, head], state[0, kv]], [0.5 * want[0], want[1]])


def test_the_delta_rule_is_the_linear_memory():
    """Two derivations, one operator: gradient descent on |k W - v|^2 / 2, one token at a time, from W = 0."""
    x = make_inputs(B=2, T=17, G=2)
    o, state = run(x, "delta_rule", chunk_size=8)
    weights = [torch.zeros(2, 4, 3, dtype=torch.float64)]
    want, memory = memory_chunkwise(*x.values(), weights, chunk_size=1, read="current", output_final_state=True)
    assert_same([o, state], [want, memory.weights[0]])


def test_gates_of_one_are_no_gates():
    x = make_inputs("linear", gated=False)
    ones = torch.ones_like(x["beta"])
    bare = run({name: x[name] for name in "qkv"}, "linear", chunk_size=5)
    assert_same(run({**x, "beta": ones, "decay": ones}, "linear", chunk_size=5), bare, 1e-14)
    gated, plain = ({**x, **extra} for extra in ({"decay": ones}, {}))
    assert_same(run(gated, "gated_delta_rule"), run(plain, "delta_rule"), 1e-14)
    one = {name: y if name == "q" else y.unsqueeze(3) for name, y in x.items()}
    assert_same(run(one, "delta_product"), run(plain, "delta_rule"), 0)


# --------------------------------------------------------------------- chunks = recurrence: outputs, states, gradients


@st.composite
def cases(draw):
    def pick(*values):
        return draw(st.sampled_from(values))

    rule, B, T = pick(*RULES), pick(1, 2), draw(st.integers(1, 24))
    shape = {
        "rule": rule,
        "seed": draw(st.integers(0, 2**16)),
        "B": B,
        "T": T,
        "H": pick(1, 2),
        "G": pick(1, 2, 3),
        "K": pick(1, 3, 5),
        "V": pick(1, 4),
        "n": pick(1, 2, 3),
        "gated": pick(False, True) if rule in ("delta_product", "linear") else None,
        "state": draw(st.booleans()),
    }
    cells = st.lists(st.booleans(), min_size=B * T, max_size=B * T)
    rows, split = {}, None
    if draw(st.booleans()):
        rows["mask"] = torch.tensor(draw(cells)).view(B, T)
    if draw(st.booleans()):
        split = []
        while sum(split) < T:
            split.append(draw(st.integers(1, T - sum(split))))
    elif draw(st.booleans()):
        rows["segment_ids"] = torch.tensor(draw(cells)).view(B, T).cumsum(1)
    return shape, rows, split, pick(1, 2, 3, 7, 8, 64)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(cases())
def test_chunks_are_the_recurrence_in_all_combinations(case):
    shape, rows, split, chunk_size = case
    x = make_inputs(**shape)
    for y in x.values():
        y.requires_grad_()
    naive = run(x, shape["rule"], implementation="recurrent", **rows)
    chunk = run(x, shape["rule"], split, chunk_size=chunk_size, **rows)
    assert_same(chunk, naive, what="forward")
    assert_same(gradients(chunk, x), gradients(naive, x), what="gradient")


@pytest.mark.parametrize("rule", RULES)
def test_a_long_sequence_stays_exact(rule):
    x = make_inputs(rule, T=333, G=2, K=8, V=8, gated=rule != "delta_rule")
    for y in x.values():
        y.requires_grad_()
    naive, chunk = (run(x, rule, implementation=form) for form in ("recurrent", "chunk"))
    assert_same(chunk, naive)
    assert_same(gradients(chunk, x), gradients(naive, x))


@pytest.mark.parametrize("rule", ["gated_delta_rule", "delta_product", "linear"])
@pytest.mark.parametrize("dtype, tiny, tolerance", [(torch.float64, 1e-300, EXACT), (torch.float32, 1e-37, 1e-5)])
def test_tiny_decays_are_exact(rule, dtype, tiny, tolerance):
    """Products of decays underflow and no quotient of them exists. float32: 1e-5 is a hundred roundings of 6e-8."""
    x = make_inputs(rule, T=24, gated=True, state=True, dtype=dtype)
    x["decay"][:, 3::5] = tiny
    x["decay"][:, 4::10] = tiny
    x["decay"][:, 6] = 1.0
    for y in x.values():
        y.requires_grad_()
    naive, chunk = (run(x, rule, implementation=form, chunk_size=16) for form in ("recurrent", "chunk"))
    assert_same(chunk, naive, tolerance)
    got, want = gradients(chunk, x), gradients(naive, x)
    assert all(y.isfinite().all() for y in got)
    assert_same(got, want, tolerance)


# ----------------------------------------------------------------------------------------- tokens, documents, decoding


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("pad", [1, 4, 13])
def test_padding_changes_nothing(form, side, pad):
    x = make_inputs("gated_delta_rule", T=19, G=2)
    alone = run(x, "gated_delta_rule", implementation=form, chunk_size=4)

    def padded(y):  # an absent token must not be looked at
        junk = torch.full((1, pad, *y.shape[2:]), math.nan, dtype=y.dtype)
        return torch.cat([*[junk] * (side != "right"), y, *[junk] * (side != "left")], 1)

    mask = padded(torch.ones(1, 19)).nan_to_num(0).bool()
    inputs = {name: padded(y).requires_grad_() for name, y in x.items()}
    o, state = run(inputs, "gated_delta_rule", implementation=form, chunk_size=4, mask=mask)
    assert_same([o[mask][None], state], alone, 1e-13)
    assert not o[~mask].any()
    for gradient in gradients((o, state), inputs):
        assert gradient.isfinite().all() and not gradient[~mask].any()


@pytest.mark.parametrize("rule", RULES)
def test_packed_documents_are_documents_alone(rule):
    lengths = [5, 1, 9, 16]
    x = make_inputs(rule, T=31)
    segment_ids = torch.repeat_interleave(torch.tensor([3, 0, 7, 5]), torch.tensor(lengths))[None]
    packed = run(x, rule, segment_ids=segment_ids, chunk_size=8)
    alone = [run(dict(zip(x, y)), rule, chunk_size=8) for y in zip(*(y.split(lengths, 1) for y in x.values()))]
    assert_same(packed, [torch.cat([o for o, _ in alone], 1), alone[-1][1]], 1e-13)


def test_padding_between_documents_does_not_restart_them():
    """The id of a padding token says nothing: the first token there goes on from the state, and a document from its
    last token there."""
    x = make_inputs(T=10, state=True)
    ids = torch.tensor([[5, 1, 1, 0, 1, 9, 2, 2, 0, 2]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 0, 1]]).bool()
    alone = {name: y if name == "initial_state" else y[mask][None] for name, y in x.items()}
    want = run(alone, "delta_rule", segment_ids=ids[mask][None])
    for form in FORMS:
        o, state = run(x, "delta_rule", implementation=form, chunk_size=4, mask=mask, segment_ids=ids)
        assert_same([o[mask][None], state], want, 1e-13)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_tokens_keeps_its_state(form, rule):
    x = make_inputs(rule, B=2, T=6, state=True)
    mask = torch.tensor([[True] * 6, [False] * 6])
    o, state = run(x, rule, implementation=form, chunk_size=4, mask=mask)
    assert torch.equal(state[1], x["initial_state"][1]) and not torch.equal(state[0], x["initial_state"][0])
    assert not o[1].any()


@pytest.mark.parametrize("rule", RULES)
def test_decoding_token_by_token_is_the_whole(rule):
    x = make_inputs(rule, B=2, T=21, G=2)
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, :6] = False  # rows at different times
    whole = run(x, rule, chunk_size=8, mask=mask)
    assert_same(run(x, rule, [9] + [1] * 12, chunk_size=8, mask=mask), whole, 1e-13)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_the_future_is_invisible(form, rule):
    """Bit for bit, in the dtype of models."""
    first, other = (make_inputs(rule, seed=seed, T=20, G=2, dtype=torch.float32) for seed in (0, 1))
    before, _ = run(first, rule, implementation=form, chunk_size=8)
    for t in range(1, 20):
        changed = {name: torch.cat([x[:, :t], other[name][:, t:]], 1) for name, x in first.items()}
        after, _ = run(changed, rule, implementation=form, chunk_size=8)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


def test_it_remembers():
    """What a delta rule is for: a key's latest value, also after it was written twice. Plain attention adds them."""
    key, old, new = torch.eye(4)[:1], torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])
    q = k = key.expand(2, 4).view(1, 2, 1, 4)
    v, beta = torch.cat([old, new]).view(1, 2, 1, 2), torch.ones(1, 2, 1)
    assert torch.equal(linear_attention(q, k, v, beta=beta)[0][0, 1], new)
    assert torch.equal(linear_attention(q, k, v, rule="linear")[0][0, 1], old + new)


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, form):
    x = make_inputs("gated_delta_rule", T=20, dtype=dtype)
    want = run({name: y.float() for name, y in x.items()}, "gated_delta_rule", implementation=form)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            o, state = linear_attention(**x, rule="gated_delta_rule", output_final_state=True, implementation=form)
        assert o.dtype == dtype and torch.equal(o, want[0].to(dtype))
        assert state.dtype == torch.float32 and torch.equal(state, want[1])


def test_is_the_same_without_autograd():
    x = make_inputs()
    want = run(x, "delta_rule")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(run(x, "delta_rule"), want, 0)


@pytest.mark.parametrize(
    "name, published",
    [
        ("silu-l2", lambda x: x * torch.sigmoid(x) / (x * torch.sigmoid(x)).square().sum(-1, keepdim=True).sqrt()),
        ("elu+1", lambda x: torch.where(x > 0, x + 1, x.exp())),
        ("softmax", lambda x: x.exp() / x.exp().sum(-1, keepdim=True)),
        ("identity", lambda x: x),
    ],
)
def test_feature_maps(name, published):
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    assert_same([feature_map(x, name)], [published(x)], 1e-14)
    half = x.to(torch.float16)
    assert torch.equal(feature_map(half, name), feature_map(half.float(), name).half())
    zeros = torch.zeros(1, 4, requires_grad=True)  # the key of a token without embedding
    mapped = feature_map(zeros, name)
    assert mapped.isfinite().all() and torch.autograd.grad(mapped.sum(), zeros)[0].abs().max() <= 1e6


# ---------------------------------------------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize(
    "rule, change, message",
    [
        ("delta", {}, "rule='delta'.*delta_rule"),
        (["delta_rule"], {}, r"rule=\['delta_rule'\]"),
        ("delta_rule", {"implementation": "triton"}, "implementation='triton'.*chunk"),
        ("delta_rule", {"chunk_size": 0}, "chunk_size=0"),
        ("delta_rule", {"chunk_size": True}, "chunk_size=True"),
        ("delta_rule", {"chunk_size": 2.0}, "chunk_size=2.0"),
        ("delta_rule", {"scale": math.nan}, "scale=nan"),
        ("delta_rule", {"scale": True}, "scale=True"),
        ("delta_rule", {"q": torch.ones(1, 12, 3, 4)}, r"q=\[1, 12, 3, 4\].*2 heads.*3"),
        ("delta_rule", {"q": torch.ones(1, 12, 2, 4).long()}, "q=torch.int64.*floating"),
        ("delta_rule", {"q": torch.ones(1, 0, 2, 4), "k": torch.ones(1, 0, 2, 4)}, "q=.*empty|k=.*empty"),
        ("delta_rule", {"k": torch.ones(1, 12, 2, 5)}, r"k=\[1, 12, 2, 5\].*shape \[1, 12, '\*', 4\]"),
        ("delta_rule", {"v": torch.ones(1, 11, 2, 3)}, r"v=\[1, 11, 2, 3\]"),
        ("delta_rule", {"beta": None}, "beta=None"),
        ("delta_rule", {"beta": torch.ones(1, 12, 3)}, r"beta=\[1, 12, 3\].*\[1, 12, 2\]"),
        ("delta_rule", {"decay": torch.ones(1, 12, 2)}, "decay=.*delta_rule.*gated_delta_rule"),
        ("gated_delta_rule", {"decay": None}, "decay=None"),
        ("gated_delta_rule", {"decay": torch.zeros(1, 12, 2)}, r"decay=0.0.*\(0, 1\]"),
        ("gated_delta_rule", {"decay": torch.full((1, 12, 2), 1.5)}, "decay=1.5"),
        ("gated_delta_rule", {"decay": torch.full((1, 12, 2), math.nan)}, "decay=nan"),
        ("linear", {"decay": -torch.ones(1, 12, 2)}, "decay=-1.0"),
        ("delta_rule", {"decay": 0.9}, "decay=0.9"),
        ("delta_product", {"k": torch.ones(1, 12, 2, 4)}, r"k=\[1, 12, 2, 4\].*\[1, 12, '\*', '\*', 4\]"),
        ("delta_product", {"beta": torch.ones(1, 12, 2)}, r"beta=\[1, 12, 2\].*\[1, 12, 2, 2\]"),
        ("delta_rule", {"mask": torch.ones(1, 12)}, "mask=torch.float32.*bool"),
        ("delta_rule", {"mask": torch.ones(1, 5, dtype=torch.bool)}, r"mask=\[1, 5\].*\[1, 12\]"),
        ("delta_rule", {"mask": [True] * 12}, "mask="),
        ("delta_rule", {"segment_ids": torch.ones(1, 12)}, "segment_ids=torch.float32.*integers"),
        ("delta_rule", {"initial_state": torch.ones(1, 2, 4, 4)}, r"initial_state=\[1, 2, 4, 4\].*\[1, 2, 4, 3\]"),
    ],
)
def test_bad_input_is_named(rule, change, message):
    x = make_inputs(rule if isinstance(rule, str) else "delta_rule")
    with pytest.raises(ValueError, match=message):
        linear_attention(**{**x, **change}, rule=rule)


def test_unknown_feature_map():
    with pytest.raises(ValueError, match="feature_map='relu'.*silu-l2"):
        feature_map(torch.ones(2), "relu")


def test_a_decay_of_an_absent_token_is_not_judged():
    x = make_inputs("gated_delta_rule")
    x["decay"][:, 0] = 0.0
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 0] = False
    linear_attention(**x, rule="gated_delta_rule", mask=mask)


def test_kernels_without_their_package():
    if importlib.util.find_spec("fla") is not None:
        pytest.skip("flash-linear-attention is installed")
    with pytest.raises(ImportError, match="implementation='fla': the package flash-linear-attention is not installed"):
        linear_attention(**make_inputs(dtype=torch.bfloat16), implementation="fla")


def test_kernels_that_cannot_run_say_why(tmp_path, monkeypatch):
    """On a CPU, with the package there (empty: it must not be reached), all reasons at once."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'fla'.*CUDA.*cpu.*bfloat16.*float64.*chunk_size=8.*300 features"):
        linear_attention(**make_inputs(K=300), implementation="fla", chunk_size=8)


def published(erases, n, q, k, v, beta, gate, options):
    """What flash-linear-attention documents of its kernels, by the recurrence."""
    bounds, first, outputs, states = options["cu_seqlens"], options["initial_state"], [], []
    rows = [(b, 0, q.shape[1]) for b in range(len(q))]
    if bounds is not None:
        rows = [(0, *bounds[i : i + 2].tolist()) for i in range(len(bounds) - 1)]
    for i, (b, start, stop) in enumerate(rows):
        parts = {"k": k, "v": v} | ({} if beta is None else {"beta": beta})
        here = {name: x[b, start * n : stop * n].unflatten(0, (-1, n)).transpose(1, 2) for name, x in parts.items()}
        here = here if erases else {name: x.squeeze(2) for name, x in here.items()}
        here["q"] = q[b, start:stop]
        if gate is not None:
            here["decay"] = gate[b, start:stop].exp().to(q.dtype)
        o, state = linear_attention(
            **{name: x[None] for name, x in here.items()},
            rule="delta_product" if erases else "linear",
            implementation="recurrent",
            initial_state=None if first is None else first[i : i + 1],
            output_final_state=True,
        )
        outputs.append(o[0])
        states.append(state[0])
    return torch.stack(outputs) if bounds is None else torch.cat(outputs)[None], torch.stack(states)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "rule, gated",
    [
        ("delta_rule", False),
        ("gated_delta_rule", True),
        *itertools.product(("delta_product", "linear"), (False, True)),
    ],
)
def test_what_the_kernels_are_given_is_the_same_operator(rule, gated, packed, monkeypatch):
    """Repeated for each query head, flat over writes, documents as `cu_seqlens`: only the kernels are replaced."""
    monkeypatch.setattr(linear_kernels, "check_kernels", lambda q, chunk_size: None)
    monkeypatch.setattr(linear_kernels, "_kernel", published)
    x = make_inputs(rule, B=2, G=2, gated=gated, state=True)
    rows = {"mask": torch.arange(12) < torch.tensor([[12], [9]])}
    if packed:
        rows["segment_ids"] = torch.tensor([[0] * 5 + [1] * 7, [3] * 4 + [4] * 2 + [5] * 6])
    found, expected = (run(x, rule, implementation=form, **rows) for form in ("fla", "recurrent"))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)  # gates pass through a logarithm in float32
