"""The Triton kernels of a memory that reads at its chunk's start against the recurrence, token by token."""

from types import SimpleNamespace

import pytest
import torch
from interpreter import assert_close, in_precision, randoms, run_cases, watch_launches
from test_memory import everything, leaves, make_inputs, run
from tiny import later

import tnt_hf.kernels_global_tnt as kernels
from tnt_hf import memory_tnt
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive


def test_in_the_interpreter():
    run_cases(__file__, "not slow and not long")


@pytest.mark.long
def test_in_the_interpreter_with_more_programs_and_pieces():
    run_cases(__file__, "long and not slow")


@pytest.mark.slow
def test_in_the_interpreter_with_all_combinations():
    run_cases(__file__, "slow")


@pytest.mark.parametrize("chunks, rows", [(1, 16), (1, 2048), (4, 2048), (96, 2048), (1000, 2048), (7, 1000)])
def test_splits_cover_a_chunk_once(chunks, rows):
    shape = kernels.spread(rows, chunks, 64)
    assert shape.splits * shape.tiles * shape.rows >= rows > (shape.splits - 1) * shape.tiles * shape.rows
    assert chunks * shape.splits <= max(kernels.PROGRAMS, chunks)


def apply(plan, depth, qk, v, *rest):
    """The kernels, called and returning as `ChunkScan` does."""
    (*coef, gain, bias), states = rest[:8], [rest[i : i + depth] for i in range(8, len(rest), depth)]
    W, xi, S, target = (None if x[0] is None else x for x in states)
    ln = None if gain is None else (gain, bias)
    o, loss, *final = kernels.global_scan(plan, *qk.split(plan.rows(qk), 1), v, coef, ln, target, xi, W, S)
    return o, loss, *(y for x in final for y in x or [None] * depth)


def use_kernels(monkeypatch, apply=apply):
    monkeypatch.setattr(memory_tnt, "ChunkScan", SimpleNamespace(apply=apply))


def compare(monkeypatch, programs=kernels.PROGRAMS, rows=16, bound=None, split=None, options=None, **inputs):
    """Outputs, final state, surprise and all gradients of the kernels in float32 and of the recurrence in float64."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "rows_of_tile", lambda n, most: rows)
    use_kernels(monkeypatch, lambda plan, *x: apply(plan if bound is None else plan._replace(bound=bound), *x))
    single = make_inputs(**{"T": 40, "H": 2, "K": 16, "V": 16, "hidden": 32, "dtype": torch.float32, **inputs})
    if "layernorm" in single[2]:  # well-conditioned: it divides by the spread of what the weights make, which is 0.1,
        for w in single[1]:  # and then steps of a whole chunk throw the weights about, in any float32 arithmetic
            w *= 2
        single[0][3].mul_(0.3)
    options = {"chunk_size": 32, "read": "chunk_start", **(options or {})}
    results = []
    for op, dtype in ((memory_chunkwise, torch.float32), (memory_naive, torch.float64)):
        tensors, weights, rest = in_precision(single, dtype)
        x = [y.requires_grad_() for y in leaves(tensors, weights, rest)]
        limit = {"implementation": "chunk"} if op is memory_chunkwise else {"grad_bound": bound}
        o, state, surprise = run(op, tensors, weights, rest, split=split, **limit, **options)
        outputs = [o.mT, *(y.mT for y in everything(state))]  # their gradients are laid out otherwise than they are
        loss = sum((y * r).sum() for y, r in zip(outputs, randoms(outputs)))
        results.append([*outputs, surprise, *torch.autograd.grad(loss, x)])
    assert_close(*results)


GATES = [*later({}, {"momentum": True}, {"decay": True}), {"momentum": True, "decay": True}]


@pytest.mark.parametrize("gates", GATES, ids=str)
def case_momentum_and_forgetting(monkeypatch, gates):
    compare(monkeypatch, **gates)


@pytest.mark.long
def case_one_program_runs_through_all_tiles_of_a_chunk(monkeypatch):
    compare(monkeypatch, programs=1)


@pytest.mark.long
def case_more_shares_than_are_taken_up_at_once(monkeypatch):
    """Three splits of a chunk, two of whose sums are added at a time."""
    monkeypatch.setattr(kernels, "GROUP", 2)
    compare(monkeypatch, T=100, momentum=True, decay=True, options={"chunk_size": 48})


def case_one_layer_and_query_groups(monkeypatch):
    compare(monkeypatch, depth=1, G=2, momentum=True, decay=True, options={"residual": True, "decay_target": "zero"})


def case_gelu_and_residual_backward_on_the_gpu_of_their_tensors(monkeypatch):
    launches = watch_launches(monkeypatch)
    compare(monkeypatch, H=1, hidden=16, options={"residual": True, "activation": "gelu"})
    forward = launches.count(False)  # `triton_scan` sees to those, and is not what calls the kernels here
    assert 0 < forward < len(launches) and all(launches[forward:])


@pytest.mark.parametrize("depth", [1, 2])
def case_layernorm(monkeypatch, depth):
    compare(monkeypatch, H=1, programs=1, depth=depth, layernorm=True, options={"residual": True})


@pytest.mark.parametrize("depth", [1, 2])
def case_gradient_bound(monkeypatch, depth):
    compare(monkeypatch, H=1, depth=depth, bound=0.7, momentum=True)


def case_a_state_is_carried_into_an_unfinished_chunk(monkeypatch):
    compare(monkeypatch, H=1, B=2, split=[9, 37, 4], T=50, momentum=True, decay=True)


def case_padding_packing_and_resets(monkeypatch):
    rows = {"mask": torch.rand(2, 50) > 0.3, "segment_ids": (torch.arange(50) // 23).expand(2, -1)}
    compare(monkeypatch, H=1, B=2, T=50, momentum=True, options={"chunk_size": 8, "reset_interval": 16, **rows})


def case_chunks_that_fill_no_tile(monkeypatch):
    compare(monkeypatch, H=1, T=20, options={"chunk_size": 6, "reset_interval": 12})


def case_without_a_final_state_and_twice_backward(monkeypatch):
    """The last chunk's writes are read by nobody: their gradient is 0; and backward leaves what it needs as it was."""
    use_kernels(monkeypatch)
    single = make_inputs(T=40, K=16, V=16, hidden=16, dtype=torch.float32, momentum=True, decay=True)
    results = []
    for op, dtype in ((memory_chunkwise, torch.float32), (memory_naive, torch.float64)):
        tensors, weights, rest = in_precision(single, dtype)
        x = [y.requires_grad_() for y in leaves(tensors, weights, rest)]
        form = {"implementation": "chunk"} if op is memory_chunkwise else {}
        o, _ = op(*tensors, weights, chunk_size=16, reset_interval=32, read="chunk_start", **form, **rest)
        (r,) = randoms([o])
        torch.autograd.grad((o * r).sum(), x, retain_graph=True)
        results.append([o, *torch.autograd.grad((o * r).sum(), x)])
    assert_close(*results)


def case_without_gradients_the_same_numbers_and_losses(monkeypatch):
    results = []

    def both(plan, *x):
        results.append(apply(plan._replace(keep_loss=True), *x))
        with torch.no_grad():
            results.append(apply(plan._replace(keep_loss=True, keep_state=False), *x))
        return results[0]

    use_kernels(monkeypatch, both)
    tensors, weights, gates = make_inputs(T=40, K=16, V=16, hidden=16, dtype=torch.float32, momentum=True)
    weights[0].requires_grad_()
    memory_chunkwise(
        *tensors, weights, chunk_size=16, read="chunk_start", output_final_state=True, implementation="chunk", **gates
    )
    (o, loss, *_), (lean, lean_loss, *state) = results
    assert torch.equal(o, lean) and torch.equal(loss, lean_loss) and set(state) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("layernorm", [False, True])
@pytest.mark.parametrize("bound", [None, 0.7])
@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def case_all_combinations(monkeypatch, depth, gates, bound, layernorm, activation):
    target = "zero" if bound and not layernorm else "init"  # a LayerNorm of outputs near 0 is noise
    options = {"activation": activation, "residual": depth == 2, "decay_target": target}
    inputs = {"B": 2, "H": 1, "G": depth, "T": 50, "depth": depth, "layernorm": layernorm, **gates}
    compare(monkeypatch, bound=bound, split=[21, 29], options=options, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [64, 128])
def case_the_real_width(monkeypatch, hidden):
    compare(monkeypatch, H=1, T=128, K=64, V=64, hidden=hidden, rows=32, momentum=True, options={"chunk_size": 64})
