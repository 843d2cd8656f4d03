"""Input to the memory operation: what is bad is an error that names the argument and its value, before any compute."""

import dataclasses
import math

import pytest
import torch
from test_memory import make_inputs

from tnt_hf.memory_tnt import MemoryState, memory_chunkwise
from tnt_hf.projection_tnt import project_queries


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk_size": 0}, "chunk_size.*0"),
        ({"chunk_size": 2.0}, "chunk_size.*2.0"),
        ({"reset_interval": 6}, "reset_interval.*chunk_size=4.*6"),
        ({"read": "future"}, "read.*future"),
        ({"query_projection": "all"}, "query_projection.*all"),
        ({"activation": "relu"}, "activation.*relu"),
        ({"feature_map": "cubic"}, "feature_map.*cubic"),
        ({"feature_map": "quadratic"}, r"weights\[0\] must have shape \[2, 10, '\*'\]"),
        ({"feature_map": "quadratic", "residual": True}, "residual=True.*feature_map='quadratic'"),
        ({"decay_target": "mean"}, "decay_target.*mean"),
        ({"omega_window": 2}, "omega_window.*2"),
        ({"omega_gate": torch.rand(4, 32, 2)}, "omega_gate .*, got a tensor$"),
        ({"implementation": "triton"}, "implementation.*triton"),
        ({"decay": torch.ones(1, 12, 1, dtype=torch.float64)}, r"decay.*\[1, 12, 2\].*\[1, 12, 1\]"),
        ({"chunk_size": True}, "chunk_size.*True"),
        ({"grad_bound": True}, "grad_bound.*True"),
        ({"grad_bound": math.inf}, "grad_bound.*inf"),
        ({"grad_bound": -1.0}, "grad_bound.*-1.0"),
        ({"grad_bound": 1e-40}, "grad_bound.*at least 1.18e-38, got 1e-40"),
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, r"mask.*\[1, 12\].*\[1, 5\]"),
        ({"mask": torch.ones(1, 12)}, "mask.*bool.*float32"),
        ({"segment_ids": torch.ones(1, 12)}, "segment_ids.*integers"),
        ({"segment_ids": torch.ones(1, 12, dtype=torch.bool)}, "segment_ids.*integers, got torch.bool"),
        ({"momentum": torch.ones(1, 12, 3, dtype=torch.float64)}, r"momentum.*\[1, 12, 2\].*\[1, 12, 3\]"),
        ({"layernorm": (torch.ones(4), torch.ones(2, 4), 1e-6)}, r"layernorm gain.*\[2, 4\]"),
        ({"layernorm": (torch.ones(2, 4), torch.ones(2, 5), 1e-6)}, r"layernorm bias.*\[2, 4\]"),
        ({"layernorm": (torch.ones(2, 4), torch.ones(2, 4), 0.0)}, "layernorm eps.*0.0"),
        ({"layernorm": (torch.ones(2, 4), torch.ones(2, 4), "small")}, "layernorm eps.*small"),
        ({"layernorm": torch.ones(2, 4)}, "layernorm.*Tensor"),
        ({"chunk_size": 1 << 70}, "chunk_size.*1180591620717411303424"),
        ({"grad_bound": "tight"}, "grad_bound.*tight"),
        ({"residual": "no"}, "residual.*'no'"),
        ({"normalize_projection": None}, "normalize_projection.*None"),
        ({"output_final_state": 1}, "output_final_state.*1"),
        ({"mask": [[True] * 12]}, "mask.*list"),
        ({"segment_ids": [[0] * 12]}, "segment_ids.*list"),
        ({"mask": torch.ones(1, 12, dtype=torch.bool, device="meta")}, "mask must be on cpu like q, got meta"),
        ({"momentum": torch.ones(1, 12, 2, device="meta")}, "momentum must be on cpu like q, got meta"),
        ({"initial_state": "last"}, "initial_state.*last"),
        ({"initial_state": {}}, "initial_state.*dict"),
    ],
)
def test_bad_options_are_named(change, message):
    tensors, weights, _ = make_inputs()
    with pytest.raises(ValueError, match=message):
        memory_chunkwise(*tensors, weights, **{"chunk_size": 4, **change})


def test_bad_tensors_are_named():
    (q, k, v, lr), weights, _ = make_inputs(G=2)
    for args, message in [
        ((q[:, :, :3], k, v, lr, weights), "q must have a multiple of k's 2 heads, got 3"),
        ((q, k[:, :5], v, lr, weights), r"k must have shape .* got \[1, 5, 2, 4\]"),
        ((q, k, v.long(), lr, weights), "v must be a floating point tensor, got torch.int64"),
        ((q, k, v, lr, [weights[0], weights[1][:, :4]]), r"weights\[1\] must have shape"),
        ((q, k, v, lr, [weights[0], weights[1][..., :1]]), r"weights\[1\] must have shape .*, 4\], got .*, 1\]"),
        ((q, k, v, lr, weights[0]), "weights must be a list.*Tensor"),
        ((q, k, v, lr, [w.to("meta") for w in weights]), r"weights\[0\] must be on cpu like q, got meta"),
        ((q, k, v, lr, []), "weights must be a list that holds at least one layer"),
        ((q[:, :0], k[:, :0], v[:, :0], lr[:, :0], weights), "q must not be empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            memory_chunkwise(*args, chunk_size=4)
    with pytest.raises(ValueError, match="residual=True needs keys and values of one width, got K=4, V=3"):
        memory_chunkwise(q, k, v[..., :3], lr, [weights[0], weights[1][:, :, :3]], chunk_size=4, residual=True)
    with pytest.raises(ValueError, match="reset_interval.*-1"):
        project_queries(q, k, reset_interval=-1)
    with pytest.raises(ValueError, match="initial_state.time.*int64"):
        project_queries(q, k, reset_interval=4, initial_state=(torch.zeros(1, 2, 4, 4, dtype=q.dtype), 3))
    with pytest.raises(ValueError, match="initial_state.time.*-3"):
        project_queries(q, k, reset_interval=4, initial_state=(q.new_zeros(1, 2, 4, 4), torch.tensor([-3])))
    state = memory_chunkwise(q, k, v, lr, weights, chunk_size=4, output_final_state=True)[1]
    with pytest.raises(ValueError, match="initial_state.momentum must be a tensor"):
        memory_chunkwise(q, k, v, lr, weights, momentum=lr, chunk_size=4, initial_state=state)


def test_what_an_absent_token_holds_is_not_read_by_the_projection():
    (q, k, *_), _, _ = make_inputs(T=1)
    M, time, absent = q.new_ones(1, 2, 4, 4), torch.tensor([3]), torch.zeros(1, 1, dtype=torch.bool)
    options = {"reset_interval": 8, "mask": absent, "initial_state": (M, time), "output_final_state": True}
    out, after = project_queries(q * torch.nan, k * torch.nan, **options)
    assert not out.any() and after.equal(M)


@pytest.mark.parametrize("implementation", ["naive", "chunk", "native"])
@pytest.mark.parametrize("T", [1, 6])
def test_a_state_of_another_precision_is_brought_to_that_of_the_computation(implementation, T):
    """Bfloat16 that was stored, or the float32 of a model that now runs in float64; what was given stays as it was."""
    (q, k, v, lr), weights, gates = make_inputs(momentum=True, decay=True)
    options = {"query_projection": "shard", "chunk_size": 4, "output_final_state": True}
    state = memory_chunkwise(q, k, v, lr, weights, **gates, **options)[1]

    def to(dtype, state):
        lists = [[y.to(dtype) for y in kind] for kind in (state.weights, state.chunk_weights, state.momentum)]
        return MemoryState(*lists, state.projection.to(dtype), state.time)

    x = [y[:, :T] for y in (q, k, v, lr)]
    rows = {name: y[:, :T] for name, y in gates.items()}
    short = to(torch.bfloat16, state)
    options |= {"implementation": implementation}
    found, after = memory_chunkwise(*x, weights, **rows, **options, initial_state=short)
    expected, same = memory_chunkwise(*x, weights, **rows, **options, initial_state=to(torch.float64, short))
    assert torch.equal(found, expected) and torch.equal(after.weights[0], same.weights[0])
    assert {y.dtype for y in (found, *after.weights, *after.momentum, after.projection)} == {torch.float64}
    assert short.weights[0].dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", ["naive", "chunk"])
def test_a_state_is_returned_only_if_asked_for(implementation):
    x, lr = torch.randn(1, 4, 1, 2), torch.full((1, 4, 1), 0.1)
    weights, how = [torch.zeros(1, 2, 2)], {"chunk_size": 2, "implementation": implementation}
    assert memory_chunkwise(x, x, x, lr, weights, **how)[1] is None
    assert memory_chunkwise(x, x, x, lr, weights, **how, output_final_state=True)[1] is not None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": torch.ones(1, 5, dtype=torch.bool)}, "mask must have shape"),
        ({"mask": torch.ones(1, 6)}, "mask must be bool"),
        ({"segment_ids": torch.zeros(1, 6)}, "segment_ids must be int"),
        ({"q": torch.ones(1, 6, 3, 4)}, "q must have a multiple of k's"),
        ({"normalize": "no"}, "normalize must be True or False.*no"),
        ({"initial_state": 3}, r"initial_state must be \(M, time\)"),
        ({"initial_state": [torch.zeros(1, 2, 4, 4), torch.zeros(1)]}, r"initial_state must be \(M, time\)"),
    ],
    ids=str,
)
def test_the_projection_checks_its_rows_and_options(change, message):
    given = {"q": torch.ones(1, 6, 4, 4), "k": torch.ones(1, 6, 2, 4), "reset_interval": 4}
    with pytest.raises(ValueError, match=message):
        project_queries(**{**given, **change})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weights": None}, "initial_state.weights must hold 2 layers"),
        ({"chunk_weights": None}, "initial_state.chunk_weights must hold 2 layers"),
        ({"projection": torch.zeros(1, 2, 4, 5)}, r"initial_state.projection must have shape \[1, 2, 4, 4\]"),
        ({"time": torch.zeros(1)}, r"initial_state.time must be int64 \[1\], got torch.float32"),
        (
            {"time": torch.zeros(2, dtype=torch.int64)},
            r"initial_state.time must be int64 \[1\], got torch.int64 \[2\]",
        ),
        ({"time": torch.zeros(1, dtype=torch.int64, device="meta")}, "initial_state.time must be on cpu like q"),
        ({"time": torch.tensor([-3])}, "initial_state.time must count tokens"),
    ],
    ids=str,
)
def test_a_bad_state_is_named(change, message):
    tensors, weights, _ = make_inputs()
    state = memory_chunkwise(*tensors, weights, chunk_size=4, output_final_state=True)[1]
    with pytest.raises(ValueError, match=message):
        memory_chunkwise(*tensors, weights, chunk_size=4, initial_state=dataclasses.replace(state, **change))
