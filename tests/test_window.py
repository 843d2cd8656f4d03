"""Attention over windows and packed documents in linear time: the plain softmax's numbers, without its T x T scores.

Axis legend
    B batch   T queries   S keys   P persistent keys   H heads   D head width   W tokens of the window
"""

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from tiny import later, tiny_model, tokens
from tiny_hosts import tiny_host
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tnt_hf import window_tnt
from tnt_hf.conversion import LiZAConfig, inject
from tnt_hf.recipes import blocked_attention
from tnt_hf.window_tnt import Window, window_attention, window_of


EXACT = 1e-12  # float64 sums in another order
H, D = 2, 8
CASES = {  # W, T, cached keys, persistent keys, lengths of the documents of each row, negative ones of padding
    "wider than a block": (300, 1300, 0, 0, None),
    "narrower than a block": (5, 1100, 0, 0, None),
    "a token sees itself": (1, 1024, 0, 0, None),
    "no multiple of 8": (131, 1177, 0, 0, None),
    "wider than the first rows": (1000, 2010, 0, 0, None),
    "goes on from a full window": (40, 1200, 39, 0, None),
    "goes on from a few tokens": (300, 1300, 7, 0, None),
    "persistent keys": (33, 1100, 32, 3, None),
    "packed documents": (64, 1200, 0, 0, [[1, 799, 400], [1200]]),
    "many documents": (200, 1200, 0, 0, [[50] * 24, [128, 1, 1071]]),
    "packed, persistent keys": (64, 1200, 0, 2, [[10, 1190], [900, 300]]),
    "padding in front": (40, 1300, 0, 0, [[-300, 1000], [1300]]),
    "padding behind": (40, 1300, 0, 0, [[1300], [700, -600]]),
    "padding around": (40, 1300, 0, 3, [[-1, 1299], [-100, 1100, -100]]),
    "padding and a cache": (40, 1200, 39, 0, [[-19, 1220], [1239]]),
    "padding around and a cache": (300, 1300, 30, 0, [[-30, 1200, -100], [-10, 1320]]),
    "a row of padding": (40, 1100, 0, 0, [[1100], [-1100]]),
    "padding and packed documents": (40, 1100, 0, 0, [[-100, 300, 700], [500, 590, -10]]),
    "documents without a window": (None, 300, 0, 0, [[100, 200], [1, 299]]),
}


def documents_of(lengths: list[list[int]] | None) -> torch.Tensor | None:
    """Ids `[B, S]`, -1 of padding; not every one is one more than the last."""
    if lengths is None:
        return None
    rows = [[-1 if n < 0 else 3 * i for i, n in enumerate(row) for _ in range(abs(n))] for row in lengths]
    return torch.tensor(rows)


def random_case(name: str) -> tuple[list[torch.Tensor], Window, int]:
    W, T, cached, P, lengths = CASES[name]
    torch.manual_seed(0)
    q = torch.randn(2, H, T, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, H, P + cached + T, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return [q, k, v], Window(W, documents_of(lengths), None), P


def as_called(width, embeds: torch.Tensor, cached: int, documents: torch.Tensor | None, P: int) -> Window | None:
    """As the masks of a model ask for it: documents and padding apart, the former without a cache."""
    if documents is None or bool((documents >= 0).all()):
        return window_of(width, embeds, cached, documents, P)
    return window_of(width, embeds, cached, None if cached else documents.clamp_min(0), P, documents >= 0)


def softmax_attention(q, k, v, window: Window, P: int) -> torch.Tensor:
    """The same, spelled out token by token. `[B, T, H, D]`."""
    B, T, S = len(q), q.shape[2], k.shape[2] - P
    seen = torch.zeros(B, T, P + S, dtype=torch.bool)
    for t in range(T):
        last = S - T + t
        seen[:, t, :P] = True
        seen[:, t, P + (0 if window.width is None else max(0, last + 1 - window.width)) : P + last + 1] = True
        if window.documents is not None:
            seen[:, t, P:] &= window.documents == window.documents[:, last, None]
    scores = (q @ k.mT / D**0.5).masked_fill(~seen[:, None], -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def assert_same(found, expected, inputs, tolerance=EXACT):
    g = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    for x, y in zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(expected, inputs, g)):
        torch.testing.assert_close(x, y, rtol=0, atol=10 * tolerance)  # sums over all queries of a key


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_the_softmax_over_the_window(name):
    inputs, window, P = random_case(name)
    found = window_attention(*inputs, window, P, scaling=D**-0.5)
    assert_same(found, softmax_attention(*inputs, window, P), inputs)


@pytest.mark.parametrize("flash", [False, *later(True)])
@pytest.mark.parametrize("name", ["wider than a block", "persistent keys", "packed documents"])
def test_query_heads_share_keys_and_values(name, flash, monkeypatch):
    """Three of them each; on a CPU the forward is that of repeated keys and values to the bit."""
    inputs, window, P = random_case(name)
    q, k, v = torch.randn(2, 3 * H, *inputs[0].shape[2:], dtype=torch.float64, requires_grad=True), *inputs[1:]
    if flash:
        monkeypatch.setattr(window_tnt, "_flash_runs", lambda x: True)
        monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attention)
        window = as_called(window.width, q.new_zeros(2, q.shape[2], 4), k.shape[2] - q.shape[2], window.documents, P)
    copies = [x.repeat_interleave(3, 1) for x in (k, v)]
    found = window_attention(q, k, v, window, P, scaling=D**-0.5)
    assert torch.equal(found, window_attention(q, *copies, window, P, scaling=D**-0.5))
    assert_same(found, softmax_attention(q, *copies, window, P), [q, k, v])


# ----------------------------------------------------------------------------------------------------------- the model

LONG = {"sliding_window": 40, "local_chunk_sizes": [32], "global_chunk_size": 64, "local_reset_interval": 64}
MODELS = {
    "mag": {},
    "mal": {"variant": "mal"},
    "persistent tokens": {"num_persistent_tokens": 3},
    "window and full attention": {"layer_types": ["sliding_attention", "full_attention"]},
    "no memory": {"global_chunk_size": None, "local_chunk_sizes": []},
}


def both_ways(fields: dict, **call) -> list[torch.Tensor]:
    """Logits of "sdpa" and of "eager", whose mask has T T entries; and the gradients of both."""
    found = []
    for attention in ("sdpa", "eager"):
        model = tiny_model(attn_implementation=attention, **LONG | fields)
        logits = model(**call).logits
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_it_says_with_eager_attention(name):
    found, expected = both_ways(MODELS[name], input_ids=tokens(2, 1100), use_cache=False)
    for x, y in zip(found, expected):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)  # the sums of two layers and of a long row


def test_packed_documents_stay_apart():
    positions = torch.cat([torch.arange(n) for n in (3, 697, 400)])[None]
    found, expected = both_ways({}, input_ids=tokens(1, 1100), position_ids=positions, use_cache=False)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-8, atol=1e-9)
    alone = tiny_model(**LONG)(input_ids=tokens(1, 1100)[:, 700:]).logits
    torch.testing.assert_close(found[0][:, 700:], alone, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("parts", [(1050, 50), (1, 1099), (39, 1061)])
def test_a_prompt_read_in_parts(parts):
    model, ids = tiny_model(**LONG), tokens(2, 1100)
    with torch.no_grad():
        whole, cache, found = model(ids, use_cache=False).logits, None, []
        for part in ids.split(parts, 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache, found = out.past_key_values, [*found, out.logits]
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-8, atol=1e-9)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_a_model_without_data_computes_shapes():
    model = tiny_model(**LONG).to("meta")
    assert model(tokens(2, 1100).to("meta"), use_cache=False).logits.shape == (2, 1100, 64)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_as_large_as_all_scores(packed):
    """From T to 2 T tokens the largest tensor doubles, training included."""
    model, largest = tiny_model(torch.float32, **LONG), []
    for T in (2048, 4096):
        positions = torch.arange(T)[None] % 1000 if packed else None
        with _Largest() as most:
            model(tokens(1, T), position_ids=positions, use_cache=False).logits.sum().backward()
        largest.append(most.elements)
    assert largest[1] <= 2.1 * largest[0] < 4096**2 / 4


def test_padding_is_a_document_of_its_own():
    W, T, cached, P, lengths = CASES["padding around and a cache"]
    documents = documents_of(lengths)
    window = as_called(W, torch.zeros(2, T, 4), cached, documents, P)
    assert torch.equal(window.documents == -1, documents == -1) and window.documents.unique().tolist() == [-1, 0]
    between = torch.ones(2, cached + T, dtype=torch.bool)
    between[1, 500] = False
    assert window_of(W, torch.zeros(2, T, 4), cached, None, P, between) is None


PADDED = {  # tokens of each call, padding of the second row: how many in front and behind
    "in front": ((1100,), (200, 0)),
    "behind": ((1100,), (0, 150)),
    "around": ((1100,), (70, 50)),
    "a prompt in parts": ((50, 1100), (30, 0)),
    "a padded first part": ((50, 1100), (60, 90)),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_row_says_what_it_says_alone(name):
    lengths, (front, behind) = PADDED[name]
    T = sum(lengths)
    model, ids, mask = tiny_model(**LONG), tokens(2, T), torch.ones(2, T, dtype=torch.long)
    mask[1, :front] = mask[1, T - behind :] = 0
    valid, cache, found = mask[1].bool(), None, []
    with torch.no_grad(), _Largest() as most:
        for end, n in zip(torch.tensor(lengths).cumsum(0).tolist(), lengths):
            out = model(ids[:, end - n : end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            cache, found = out.past_key_values, [*found, out.logits]
    alone = model(ids[1:, valid], use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1)[1:, valid], alone, rtol=1e-8, atol=1e-9)
    assert most.elements < 2 * 1100**2  # no mask of all tokens


def test_what_a_mask_serves_as_well_keeps_it():
    """Rows of fewer than two blocks are computed as the library computes them."""
    embeds = torch.zeros(1, 1300, 4)
    assert window_of(40, embeds, 0, None, 0) is not None
    assert window_of(40, embeds[:, :1023], 0, None, 0) is None
    assert window_of(700, embeds, 0, None, 0) is None
    assert window_of(None, embeds, 0, torch.zeros(1, 1300), 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("W, T, width", [(16, 1100, 16), (256, 1300, 64), (512, 4096, 128), (900, 2000, 32)])
def test_before_the_window_cuts_it_is_full_attention_to_the_bit(W, T, width, dtype):
    """A converted model is its source wherever the window hides nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, H, width).to(dtype).transpose(1, 2) for _ in range(3))
    assert window_of(W, q[:, 0], 0, None, 0) is not None
    found = window_attention(q, k, v, Window(W, None, None))
    full = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert torch.equal(found[:, :W], full[:, :W]) and not torch.equal(found, full)


@pytest.mark.parametrize(
    "W, T, front", [(16, 1100, 0), (300, 1400, 0), (512, 2048, 200), (512, 2147, 333), (64, 3000, 1)]
)
def test_what_is_promised_to_the_bit_is_computed_in_the_same_shapes(W, T, front, monkeypatch):
    """SDPA on a CPU takes 256 queries and 512 keys at a time; another shape rounds differently with some BLAS."""
    valid = torch.ones(1, T, dtype=torch.bool)
    valid[0, :front] = False
    q, k, v = (torch.randn(1, 1, T, 8) for _ in range(3))
    sdpa, seen = F.scaled_dot_product_attention, []

    def watched(q, k, *rest, **options):
        seen.append((q.shape[2], k.shape[2]))
        return sdpa(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    window_attention(q, k, v, window_of(W, q[:, 0], 0, None, 0, valid if front else None))
    queries, keys = seen[0]
    assert queries >= 768 and queries >= -(-(front + W) // 256) * 256
    assert keys % 512 == 0 or keys == T


def test_nor_does_it_behind_padding():
    W, T, front = 512, 2048, 200
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, T, H, 32).transpose(1, 2) for _ in range(3))
    valid = torch.ones(2, T, dtype=torch.bool)
    valid[1, :front] = False
    seen = torch.ones(T, T, dtype=torch.bool).tril() & valid[:, None, None]
    found = window_attention(q, k, v, window_of(W, q[:, 0], 0, None, 0, valid))
    full = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
    assert torch.equal(found[0, :W], full[0, :W])
    assert torch.equal(found[1, front : front + W], full[1, front : front + W])
    valid[1, :1100] = False
    assert window_of(W, q[:, 0], 0, None, 0, valid) is None  # no two blocks are left


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", blocked_attention.NAME])
def test_a_compiled_training_step_has_as_many_operations_for_any_length(attention):
    """And stops for nothing but what is taken out of the graph on purpose: a layer's memory and its blocks."""
    blocked_attention.register()
    fields = LONG | {"attn_implementation": attention, "num_hidden_layers": 1}
    model, operations = tiny_model(**fields).train(), []

    def count(graph, inputs):
        operations[-1] += len(graph.graph.nodes)
        return graph.forward

    for T in (1100, 1900):
        torch._dynamo.reset()
        counters.clear()
        operations.append(0)
        batch = {"input_ids": tokens(1, T), "labels": tokens(1, T), "use_cache": False}
        losses = [step(**batch).loss for step in (model, torch.compile(model, backend=count))]
        found, expected = (torch.autograd.grad(loss, list(model.parameters())) for loss in reversed(losses))
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)
        assert not [x for x in counters["graph_break"] if "torch.compiler.disable" not in x]
    assert operations[0] == operations[1] > 100


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_window_without_memory_compiles_to_one_graph():
    model = tiny_model(**LONG | MODELS["no memory"])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for T in (1100, 1300, 1700):  # from the second length on it is not told
        found = compiled(tokens(1, T), use_cache=False).logits
        torch.testing.assert_close(found, model(tokens(1, T), use_cache=False).logits, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_window_of_an_injected_model(kind):
    T, W = 1200, 40
    ids, host = tokens(2, T), tiny_host(kind, torch.float64, max_position_embeddings=2 * T)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = ((distance >= 0) & (distance < W)).expand(2, 1, T, T)
    with torch.no_grad():
        expected = host(ids, attention_mask=seen).logits
    inject(host, LiZAConfig(weight=0.0, max_self_attn_length=W))
    with _Largest() as most:
        found = host(ids).logits
        found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)  # RoPE and the norms are float32's
    assert most.elements < T**2


# --------------------------------------------------------------------------------------------------------------- flash


def varlen_attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """`torch.nn.attention.varlen.varlen_attn` as torch documents it, sequence by sequence; [tokens, H, D]."""
    (left, right), outputs = window_size, []
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and right == 0
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(q) and cu_seq_k[-1] == len(k) == len(v)
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    for i in range(len(cu_seq_q) - 1):
        x, y, z = q[cu_seq_q[i] : cu_seq_q[i + 1]], k[cu_seq_k[i] : cu_seq_k[i + 1]], v[cu_seq_k[i] : cu_seq_k[i + 1]]
        ahead = torch.arange(len(y)) - (torch.arange(len(x)) + len(y) - len(x))[:, None]
        seen = (ahead <= 0) & ((ahead >= -left) if left >= 0 else True)
        scores = torch.einsum("qhd,khd->hqk", x, y) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), z))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[3]])
def test_what_flash_attention_is_asked_for(name, monkeypatch):
    monkeypatch.setattr(window_tnt, "_flash_runs", lambda x: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attention)
    inputs, (width, documents, *_), P = random_case(name)
    (q, k, v), T = inputs, inputs[0].shape[2]
    window = as_called(width, q.new_zeros(2, T, 4), k.shape[2] - T, documents, P)
    found = window_attention(q, k, v, window, P, scaling=D**-0.5)
    assert_same(found, softmax_attention(q, k, v, window, P), inputs)


def test_torch_knows_what_flash_attention_is_asked_for():
    """The arguments, on tensors without data: this is not a run of the kernel."""
    q, bounds = torch.empty(10, H, D, dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.int32)
    attend = torch.nn.attention.varlen.varlen_attn
    assert attend(q, q, q, bounds, bounds, 5, 5, scale=0.5, window_size=(3, 0)).shape == q.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case[3]])
def test_flash_attention(name):
    inputs, (width, documents, *_), P = random_case(name)
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in inputs)
    there = None if documents is None else documents.cuda()
    window = as_called(width, q.new_zeros(2, q.shape[2], 4), k.shape[2] - q.shape[2], there, P)
    found = window_attention(q, k, v, window, P, scaling=D**-0.5)
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    expected = softmax_attention(*exact, Window(width, documents, None), P)
    g = torch.randn_like(expected)
    pairs = zip(torch.autograd.grad(found, (q, k, v), g.to(found)), torch.autograd.grad(expected, exact, g))
    for x, y in [(found, expected), *pairs]:
        size = y.norm() if y.any() else g.norm()  # a token that sees itself alone moves with its value alone
        assert (x.double().cpu() - y).norm() < 1e-2 * size  # bfloat16 holds 3 digits


@pytest.mark.parametrize("flash", [False, True], ids=["no FlashAttention", "FlashAttention, which has none"])
def test_dropout_in_blocks_scales_what_it_keeps(flash, monkeypatch):
    monkeypatch.setattr(window_tnt, "_flash_runs", lambda x: flash)
    inputs, window, P = random_case("narrower than a block")
    torch.manual_seed(0)
    (q, k, _), ones = inputs, torch.ones_like(inputs[2])
    found = window_attention(q, k, ones, window, P, dropout=0.5)
    assert found.mean().item() == pytest.approx(1, abs=0.05)  # of 35,200 means over 5 keys, each 0 or 2
    assert found.std() > 0.3


def test_attention_runs_in_blocks_under_autocast():
    inputs, window, P = random_case("wider than a block")
    q, k, v = (x.detach().float() for x in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = window_attention(q, k, v, window, P)
        exact = window_attention(*inputs, window, P)
    expected = F.scaled_dot_product_attention(q, k, v, window_tnt._seen(1300, 1300, 300, q.device))
    assert found.dtype == torch.bfloat16 and exact.dtype == torch.float64  # which autocast leaves alone
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), rtol=0, atol=2e-2)  # bfloat16 inputs


@pytest.mark.parametrize("D, persistent, dropout", [(12, 0, 0.0), (264, 0, 0.0), (8, 2, 0.0), (8, 0, 0.5)])
def test_what_flash_attention_cannot_do_is_not_asked_of_it(D, persistent, dropout, monkeypatch):
    monkeypatch.setattr(window_tnt, "_flash_runs", lambda x: True)
    monkeypatch.setattr(window_tnt, "_flash", lambda *args: pytest.fail("was asked"))
    q, k, v = torch.randn(3, 1, 2, 40 + persistent, D)
    o = window_attention(q[:, :, persistent:], k, v, Window(16, None, None), persistent, dropout=dropout)
    assert o.shape == (1, 40, 2, D)
