"""The decode step as one Triton kernel against the recurrence, token by token."""

import pytest
import torch
from interpreter import assert_close, assert_rounded_once, in_precision, run_cases
from test_memory import everything, make_inputs

from tnt_hf.kernels_decode_tnt import token_step
from tnt_hf.memory_tnt import MemoryState, memory_naive
from tnt_hf.network_tnt import Net


OPTIONS = {
    "reset_interval": None,
    "read": "current",
    "query_projection": "none",
    "normalize_projection": True,
    "decay_target": "init",
    "grad_bound": None,
}


def test_in_the_interpreter():
    run_cases(__file__, "not slow")


@pytest.mark.slow
def test_in_the_interpreter_with_all_combinations():
    run_cases(__file__, "slow")


def own_state(weights, batch, chunk_size, momentum, projection):
    """A fresh state of tensors that may be overwritten."""
    H, K = weights[0].shape[:2]
    W = [w.expand(batch, *w.shape).clone() for w in weights]
    xi = W if chunk_size == 1 else [w.clone() for w in W]
    S = [torch.zeros_like(w) for w in W] if momentum else None
    M = torch.zeros(batch, H, K, K) if projection else None
    return MemoryState(W, xi, S, M, torch.zeros(batch, dtype=torch.long))


def steps(tensors, weights, layernorm=None, momentum=None, decay=None, mask=None, state=None, **options):
    """All tokens, one launch each, in the tensors of one state, by default a fresh one."""
    (q, k, v, lr), (B, T, H, _) = tensors, tensors[1].shape
    if state is None:
        project = options["query_projection"] != "none"
        state = own_state(weights, B, options["chunk_size"], momentum is not None, project)
    options = {**options, "layernorm": None if layernorm is None else [x[:, None] for x in layernorm[:2]]}
    net = Net(options["activation"], options["residual"], 0.0 if layernorm is None else layernorm[2])
    outputs, losses = [], []
    for t in range(T):
        gates = [x if x is None else x[:, t] for x in (lr, momentum, decay, mask)]
        o, error = token_step(
            state, weights, net, options, q[:, t].unflatten(1, (H, -1)), k[:, t, :, None], v[:, t, :, None], *gates
        )
        outputs.append(o.flatten(1, 2))
        losses.append(0.5 * error.square().sum((-1, -2)))
        state.time = state.time + (1 if mask is None else mask[:, t])
    return torch.stack(outputs, 1), state, torch.stack(losses, 1)


@torch.no_grad()
def compare(mask=None, chunk_size=4, activation="silu", residual=False, options=None, **inputs):
    """Read-outs, losses and the state after the last token, of rows that are at different memory times."""
    single = make_inputs(**{"B": 2, "T": 7, "H": 1, "K": 16, "V": 16, "hidden": 32, "dtype": torch.float32, **inputs})
    q, k = single[0][:2]
    q += k.repeat_interleave(q.shape[2] // k.shape[2], 2)  # unlike all keys, its projection's direction is noise
    options = {**OPTIONS, "chunk_size": chunk_size, "activation": activation, "residual": residual, **(options or {})}
    tensors, weights, rest = single
    o, state, loss = steps(tensors, weights, mask=mask, **rest, **options)
    tensors, weights, rest = in_precision(single, torch.float64)
    want, end, surprise = memory_naive(
        *tensors, weights, mask=mask, output_final_state=True, output_surprise=True, **rest, **options
    )
    assert_close([o, *everything(state), loss], [want, *everything(end), surprise])


RAGGED = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
GATES = [{}, {"momentum": True}, {"decay": True}, {"momentum": True, "decay": True}]


@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4])
def case_momentum_and_forgetting(chunk_size, gates):
    compare(chunk_size=chunk_size, **gates)


@torch.no_grad()
def case_what_a_token_forgets_is_rounded_to_the_digits_of_the_weights_once():
    tensors, weights, gates = make_inputs(T=1, H=1, K=16, V=16, hidden=32, decay=True, dtype=torch.float32)
    tensors[3].zero_()
    moved = [torch.full_like(w, 1e-3) for w in weights]
    near = [(w + x)[None] for w, x in zip(weights, moved)]
    (x, w, rest), W = in_precision((tensors, weights, gates), torch.float64), [y.double() for y in near]
    state = MemoryState(W, W, None, None, torch.zeros(1, dtype=torch.long))
    end = memory_naive(*x, w, initial_state=state, output_final_state=True, chunk_size=1, **rest)[1]
    state = own_state(weights, 1, 1, False, False)
    for y, z in zip(state.weights, near):
        y.copy_(z)
    steps(
        tensors, weights, decay=gates["decay"], state=state, chunk_size=1, activation="silu", residual=False, **OPTIONS
    )
    assert_rounded_once(state.weights, end.weights, moved)


@pytest.mark.parametrize("projection", ["shard", "chunk"])
def case_projected_queries_resets_and_absent_tokens(projection):
    options = {"query_projection": projection, "reset_interval": 4}
    compare(RAGGED, chunk_size=2, G=2, momentum=True, options=options)


@pytest.mark.parametrize("projection", ["shard", "chunk"])
def case_a_projection_that_is_never_reset(projection):
    compare(T=5, chunk_size=2, options={"query_projection": projection})


def case_one_layer_with_everything():
    options = {
        "query_projection": "shard",
        "normalize_projection": False,
        "reset_interval": 4,
        "grad_bound": 0.4,
        "decay_target": "zero",
    }
    gates = {"momentum": True, "decay": True, "layernorm": True}
    compare(RAGGED, chunk_size=2, residual=True, depth=1, G=3, options=options, **gates)


def case_reads_at_the_chunk_start():
    compare(RAGGED, options={"read": "chunk_start"}, decay=True)


def case_gradient_bound_layernorm_and_gelu():
    compare(activation="gelu", residual=True, layernorm=True, options={"grad_bound": 0.4})


def case_several_tiles_of_hidden_units():
    """Eight query heads: a tile's products with all of them are what has to fit."""
    compare(T=3, G=8, K=32, V=16, hidden=64, chunk_size=1)


@pytest.mark.slow
@pytest.mark.parametrize("gates", GATES, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layernorm", [False, True])
@pytest.mark.parametrize("grad_bound", [None, 0.4])
@pytest.mark.parametrize("read", ["current", "chunk_start"])
def case_all_combinations(read, grad_bound, layernorm, depth, chunk_size, gates):
    options = {"read": read, "grad_bound": grad_bound, "reset_interval": 4, "query_projection": "shard"}
    compare(RAGGED, chunk_size=chunk_size, depth=depth, layernorm=layernorm, residual=True, options=options, **gates)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [64, 128])
def case_the_real_width(hidden):
    compare(T=3, K=64, V=64, hidden=hidden, G=4, chunk_size=2, momentum=True, decay=True)


def case_a_state_that_cannot_be_written_is_refused():
    tensors, weights, _ = make_inputs(K=16, V=16, hidden=16, dtype=torch.float32)
    q, k, v, lr = (x[:, 0] for x in tensors)
    step = q[:, :, None], k[:, :, None], v[:, :, None], lr, None, None, None
    options = {**OPTIONS, "chunk_size": 4, "layernorm": None}
    for change, reason in (
        ({"weights": [w.expand(1, *w.shape) for w in weights]}, "share memory"),  # would overwrite W_init
        ({"weights": [w[None].mT.contiguous().mT for w in weights]}, "contiguous"),
    ):
        state = own_state(weights, 1, 4, False, False)
        for name, value in change.items():
            setattr(state, name, value)
        with pytest.raises(ValueError, match=reason):
            token_step(state, weights, Net("silu", False, 0.0), options, *step)
