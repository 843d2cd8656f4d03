"""A decoded token while it is compiled: in other words than eager, with the same result, and without calls of a
library for what a compiler puts into one loop.

Axis legend: B batch   P programs   K key width   V value width   D head width
"""

import pytest
import torch
from tiny import tiny_model, tokens
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from transformers import StaticCache

from tnt_hf.compiler_tnt import FEW_ROWS
from tnt_hf.features_tnt import quadratic
from tnt_hf.gate_tnt import TNTGateLinear
from tnt_hf.network_tnt import Net, product
from tnt_hf.step_tnt import Clock, MemoryState, memory_step, project_step
from tnt_hf.tokens_tnt import memory_token, memory_tokens


LIBRARY = {"mm", "addmm", "bmm", "baddbmm"}  # operations that inductor does not make loops of
EXACT = {"atol": 1e-12, "rtol": 1e-12}  # float64, sums of at most 64 numbers near 1 in another order


class Graphs:
    """A compiler that runs a graph as it is and remembers its operations."""

    def __init__(self):
        self.operations: list[str] = []
        self.count = 0

    def __call__(self, graph, _):
        self.count += 1
        nodes = graph.graph.nodes
        self.operations += [str(n.target).split(".")[1] for n in nodes if str(n.target).startswith("aten.")]
        return graph.forward

    def compile(self, function, **options):
        torch.compiler.reset()
        return torch.compile(function, backend=aot_autograd(fw_compiler=self), fullgraph=True, **options)

    @property
    def calls(self) -> list[str]:
        return [name for name in self.operations if name in LIBRARY]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def copies(*tensors):
    return [x.clone() for x in tensors]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_the_librarys(transposed):
    graphs, x, w = Graphs(), normal(3, 2, 8), normal(3, 8, 8, seed=1)
    w = w.mT if transposed else w
    torch.testing.assert_close(graphs.compile(product)(x, w), torch.bmm(x, w), **EXACT)
    assert not graphs.calls


@pytest.mark.parametrize("value_norm", [True, False])
@pytest.mark.parametrize("feature_map", ["identity", "silu", "quadratic"])
@pytest.mark.parametrize("joined", [False, True])
def test_one_token_is_that_of_many(joined, feature_map, value_norm):
    """Compiled and not, also where a head is nearly 0, and where it is, whose length is taken for 1e-12."""
    parts = [normal(3, 1, heads * 8, seed=heads) for heads in (4, 2, 2)]
    parts[1][0, 0, :8], parts[1][0, 0, 8:] = 0.0, 1e-9
    many, _ = memory_tokens(
        [], tuple(parts), 0, None, None, None,
        head_dim=8, silu=feature_map == "silu", units=(True, True, value_norm), dtype=torch.float64,
    )  # fmt: skip
    if feature_map == "quadratic":
        many[:2] = map(quadratic, many[:2])
    graphs, parts = Graphs(), [torch.cat(parts, -1)] if joined else parts
    for function in (graphs.compile(memory_token), memory_token):
        found = function(copies(*parts), (32, 16, 16), 8, feature_map, value_norm)
        assert [x.shape[:2] for x in found] == [(6, 2), (6, 1), (6, 1)]
        for x, y in zip(found, many, strict=True):
            torch.testing.assert_close(x, y.reshape(x.shape), **EXACT)
    assert "cat" not in graphs.operations and not graphs.calls


@pytest.mark.parametrize("normalize", [True, False])
def test_the_query_projection_is_that_of_eager(normalize):
    graphs, q, M = Graphs(), normal(6, 2, 8), normal(3, 2, 8, 8, seed=1)
    unit = torch.nn.functional.normalize(normal(6, 1, 8, seed=2), dim=-1)
    time = torch.tensor([3, 4, 8])  # row 0 inside a shard, the others at the first token of one

    def run(M):
        return project_step(M, q, unit, 4, normalize, None, Clock.of(time, None)), M

    for x, y in zip(graphs.compile(run)(*copies(M)), run(*copies(M)), strict=True):
        torch.testing.assert_close(x, y, **EXACT)
    assert not graphs.calls


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"residual": True}, {"layernorm": True}, {"grad_bound": 0.5}, {"gates": True}]
)
def test_a_step_is_that_of_eager(options, depth):
    B, H, D = 3, 2, 8
    graphs, net = Graphs(), Net("silu", options.get("residual", False), 1e-5)
    init = [normal(H, D, D, seed=i) / 3 for i in range(depth)]
    W, start, S = ([normal(B, H, D, D, seed=10 * n + i) / 3 for i in range(depth)] for n in (1, 2, 3))
    ln = [1 + normal(H, 1, D, seed=5) / 9, normal(H, 1, D, seed=6) / 9] if options.get("layernorm") else None
    q, k, v = normal(B * H, 2, D, seed=7), normal(B * H, 1, D, seed=8), normal(B * H, 1, D, seed=9)
    lr, mu, alpha = (normal(B, H, seed=n).sigmoid() for n in (10, 11, 12))
    mu, alpha = (mu, alpha) if options.get("gates") else (None, None)
    time = torch.tensor([3, 4, 7])  # inside a chunk of 2, at the beginning of a shard of 4, at the end of a chunk
    settings = {
        "layernorm": ln, "chunk_size": 2, "reset_interval": 4, "read": "current", "query_projection": "none",
        "normalize_projection": False, "decay_target": "init", "grad_bound": options.get("grad_bound"),
    }  # fmt: skip

    def run(W, start, S):
        state = MemoryState(W, start, S if mu is not None else None, None, time)
        found = memory_step(state, init, net, settings, q, k, v, lr, mu, alpha, None, Clock.of(time, None))
        return *found, *W, *start, *S

    given = W, start, S
    found = graphs.compile(run)(*(copies(*x) for x in given))
    for x, y in zip(found, run(*(copies(*x) for x in given)), strict=True):
        torch.testing.assert_close(x, y, **EXACT)
    assert not graphs.calls


def gate(dtype: torch.dtype = torch.float64) -> TNTGateLinear:
    layer = TNTGateLinear(8, 3, 0.5).to(dtype)
    layer.weight.copy_(normal(3, 8))
    layer.bias.copy_(normal(3, seed=1))
    return layer


@pytest.mark.parametrize("shape", [(FEW_ROWS, 8), (2, 1, 8)])
def test_a_gate_of_few_rows_calls_no_library(shape):
    graphs, layer, x = Graphs(), gate(), normal(*shape, seed=2)
    torch.testing.assert_close(graphs.compile(layer)(x), layer(x), **EXACT)
    assert not graphs.calls


def test_a_gate_in_half_precision_rounds_once():
    graphs, layer, x = Graphs(), gate(torch.bfloat16), normal(2, 8, seed=2).bfloat16()
    found = graphs.compile(layer)(x)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, atol=0, rtol=2**-8)  # of bfloat16's 8 bits


def test_a_gate_of_many_rows_calls_the_library():
    graphs, layer, x = Graphs(), gate(), normal(FEW_ROWS + 1, 8, seed=2)
    torch.testing.assert_close(graphs.compile(layer)(x), layer(x), **EXACT)
    assert graphs.calls


def test_a_gate_of_any_number_of_rows_calls_the_library():
    """One graph, which may not ask how many there are."""
    graphs, layer, x = Graphs(), gate(), normal(4, 8, seed=2)
    compiled = graphs.compile(layer, dynamic=True)
    torch._dynamo.mark_dynamic(x, 0)
    for rows in (x, normal(30, 8, seed=3)):
        torch.testing.assert_close(compiled(rows), layer(rows), **EXACT)
    assert len(graphs.calls) == graphs.count == 1


def test_a_gate_whose_weight_is_no_plain_tensor_is_called():
    """Quantised and distributed weights know `linear`, and not all that a sum of products needs."""
    graphs, layer, x = Graphs(), gate(), normal(2, 8, seed=2)
    want, weight = layer(x), layer.weight.detach()
    layer.weight = torch.nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    torch.testing.assert_close(graphs.compile(layer)(x).a, want, **EXACT)
    assert graphs.calls


def test_a_gate_in_autocast_rounds_as_autocast_does():
    graphs, layer, x = Graphs(), gate(torch.float32), normal(2, 8, seed=2).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert graphs.compile(layer)(x).dtype == layer(x).dtype == torch.bfloat16
    assert graphs.calls


def test_a_program_keeps_the_products():
    """It may be run operation by operation, where they cost less than sums."""

    class Product(torch.nn.Module):
        def forward(self, x, w):
            return product(x, w)

    program = torch.export.export(Product(), (normal(3, 2, 8), normal(3, 8, 8)))
    assert any("bmm" in str(n.target) for n in program.graph.nodes)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes",
    [
        {"memory_projections": "own", "memory_depth": 1, "memory_feature_map": "quadratic", "qk_projection": "none"},
        {"memory_projections": "shared"},
    ],
)
def test_a_token_calls_the_library_for_its_projections_alone(changes):
    graphs, model, ids = Graphs(), tiny_model(num_hidden_layers=1, **changes), tokens(2, 12)
    want, cache = model(ids).logits[:, 11:], StaticCache(model.config, max_cache_len=12)
    model(ids[:, :11], past_key_values=cache)
    found = graphs.compile(model.forward)(input_ids=ids[:, 11:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, want, atol=1e-9, rtol=0)  # float64, as in the tests of eager steps
    own = 3 if model.config.memory_projections == "own" else 0
    assert len(graphs.calls) == 7 + own + 1  # q, k, v, o, three of the MLP, the memory's own, the head


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@torch.enable_grad()
def test_layers_and_memories_share_compiled_code():
    """Torch compiles a function 8 times and then runs it as it is: not once per layer, memory or method of a cache."""
    torch._dynamo.reset()
    model, ids = tiny_model(torch.float32, num_hidden_layers=5), tokens(2, 40)
    step = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        step(ids, labels=ids, use_cache=False).loss.backward()
        with torch.no_grad():
            step(ids, labels=ids, use_cache=False)
        step(ids[:, :23], labels=ids[:, :23], use_cache=False).loss.backward()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_compiled_decoding_is_one_graph():
    """Full graph, static cache: the step across a reset and chunk boundaries is the same graph as any other."""
    torch._dynamo.reset()
    model, ids = tiny_model(num_hidden_layers=1), tokens(2, 24)
    full = model(ids, use_cache=False).logits
    cache = StaticCache(model.config, max_cache_len=24)
    model(ids[:, :9], past_key_values=cache, use_cache=True)
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for t in range(9, 24):
        inputs = model.prepare_inputs_for_generation(
            ids[:, : t + 1], next_sequence_length=1, past_key_values=cache, attention_mask=torch.ones(2, t + 1).long()
        )
        found = step(**inputs, use_cache=True).logits[:, -1]
        torch.testing.assert_close(found, full[:, t], atol=1e-9, rtol=0)  # float64, as in the tests of eager steps
