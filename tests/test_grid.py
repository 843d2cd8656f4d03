"""Where tokens sit is worked out once for a batch, whoever asks, and anew when anything about the batch has changed.

Axis legend: B batch   T tokens
"""

import gc

import pytest
import torch
from test_memory import make_inputs
from tiny import tiny_model, tokens

from tnt_hf import grid_tnt
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive


PACKED = torch.cat([torch.arange(n) for n in (9, 3, 18, 10)])[None].expand(2, -1)
SHORT = torch.cat([torch.arange(n) for n in (1, 2, 3, 1, 4, 1, 8, 20)])[None].expand(2, -1)  # several sizes of chunk
PADDED = torch.ones(2, 40, dtype=torch.long)
PADDED[0, :7] = PADDED[1, 30:] = 0


@pytest.fixture
def made(monkeypatch) -> list:
    """The arguments of every grid that is made."""
    found, make = [], grid_tnt.ragged_grid
    monkeypatch.setattr(grid_tnt, "ragged_grid", lambda *x: found.append(x) or make(*x))
    return found


@pytest.mark.parametrize(
    "batch",
    [
        {"position_ids": PACKED},
        {"position_ids": SHORT},
        {"attention_mask": PADDED},
        {"position_ids": PACKED, "attention_mask": PADDED},
    ],
    ids=["packed", "short documents", "padded", "packed and padded"],
)
def test_layers_share_what_memories_of_one_kind_need(made, batch):
    counts = []
    for layers in (1, 4):
        made.clear()
        model = tiny_model(num_hidden_layers=layers)
        model(tokens(2, 40), labels=tokens(2, 40), **batch).loss.backward()
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("inference", [False, True], ids=["plain tensors", "inference tensors"])
def test_a_mask_that_is_overwritten_is_another_batch(inference):
    """Also the other one of two, and in inference mode, where tensors do not count their changes."""
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    options = {"chunk_size": 4, "reset_interval": 8}
    with torch.inference_mode(inference):
        mask, ids = torch.ones(1, 12, dtype=torch.bool), torch.zeros(1, 12, dtype=torch.long)

        def run(mask, ids):
            return memory_chunkwise(q, k, v, lr, weights, mask=mask, segment_ids=ids, **options)[0]

        run(mask, ids)
        mask[:, 3] = False
        assert run(mask, ids).equal(run(mask.clone(), ids.clone()))
        ids[:, 6:] = 1
        assert run(mask, ids).equal(run(mask.clone(), ids.clone()))
        assert run(mask, None).equal(run(mask.clone(), None))
        mask[:, 5] = False
        assert run(mask, None).equal(run(mask.clone(), None))
        run(mask, ids)
        ids.numpy()[:, 4:], mask.numpy()[:, 7] = 2, False  # which their versions do not tell
        assert run(mask, ids).equal(run(mask.clone(), ids.clone()))
        for other in (mask.roll(1), mask.roll(2)):  # beside the same ids
            assert run(other, ids).equal(run(other, ids.clone()))


def test_nothing_is_kept_longer_than_the_batch():
    gc.collect()
    before = len(grid_tnt._MADE)
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    ids = torch.zeros(1, 12, dtype=torch.long)
    for _ in range(3):  # masks of their own
        mask = torch.ones(1, 12, dtype=torch.bool)
        memory_chunkwise(q, k, v, lr, weights, chunk_size=4, mask=mask, segment_ids=ids)
    gc.collect()
    assert len(grid_tnt._MADE[ids]) == 1
    del ids, mask
    model = tiny_model()
    model(tokens(2, 40), position_ids=PACKED, labels=tokens(2, 40)).loss.backward()
    model(tokens(2, 40), attention_mask=PADDED)
    gc.collect()
    assert len(grid_tnt._MADE) == before


def test_a_grid_made_in_inference_mode_serves_no_training():
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 4] = False
    with torch.inference_mode():
        memory_chunkwise(q, k, v, lr, weights, chunk_size=4, mask=mask)
    q.requires_grad_()
    memory_chunkwise(q, k, v, lr, weights, chunk_size=4, mask=mask)[0].sum().backward()
    assert q.grad.abs().sum() > 0


# ----------------------------------------------------------------------------- parts that go on from a memory's state


@pytest.fixture
def lately(monkeypatch) -> None:
    monkeypatch.setattr(grid_tnt, "_LATELY", ())


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_all_layers_go_on_in_one_grid(made, padded, monkeypatch):
    """Three memories of two chunk sizes and a projection: three grids for all layers, as in a model of one layer. What
    comes out is what a grid of each layer's own gives."""
    ids, mask = tokens(2, 40), PADDED if padded else None

    def logits(layers: int, piece: int = 7) -> torch.Tensor:
        model, cache, found = tiny_model(num_hidden_layers=layers, memory_implementation="chunk"), None, []
        made.clear()
        monkeypatch.setattr(grid_tnt, "_LATELY", ())
        with torch.no_grad():
            for i in range(0, 40, piece):
                part = None if mask is None else mask[:, : i + piece]
                out = model(ids[:, i : i + piece], attention_mask=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                found.append(out.logits)
        return torch.cat(found, 1)

    logits(1)
    of_one = len(made)
    shared = logits(4)
    assert len(made) == of_one > 0
    monkeypatch.setattr(grid_tnt, "LARGEST", 0)
    assert logits(4).equal(shared) and len(made) > 3 * of_one


def test_parts_at_other_times_take_no_grid_of_each_other(lately, monkeypatch):
    """Conversations in turn, of rows at different times, with and without padding; float32 to the bit."""
    (q, k, v, lr), weights, _ = make_inputs(B=2, T=48)

    def part(a, b, state=None, mask=None):
        tokens = (x[:, a:b] for x in (q, k, v, lr))
        return memory_chunkwise(
            *tokens, weights, chunk_size=4, reset_interval=16, initial_state=state, mask=mask, output_final_state=True
        )

    def conversations() -> list:
        holes = torch.ones(2, 9, dtype=torch.bool)
        holes[0, 2:5] = False
        states = [part(0, n)[1] for n in (3, 4, 9)] + [part(0, 9, mask=holes)[1]]
        out = []
        for mask in (None, holes, ~holes, None):
            for i, state in enumerate(states):
                o, states[i] = part(20, 29, state, mask)
                other, end = part(20, 29, state, ~holes)
                out += [o, states[i].time, *states[i].weights, other, end.time]
        return out

    shared = conversations()
    monkeypatch.setattr(grid_tnt, "LARGEST", 0)
    assert all(a.equal(b) for a, b in zip(conversations(), shared, strict=True))


def test_a_state_s_time_is_the_caller_s_own(lately):
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    options = {"chunk_size": 4, "output_final_state": True}
    _, first = memory_chunkwise(q, k, v, lr, weights, **options)
    for _ in range(2):
        _, state = memory_chunkwise(q, k, v, lr, weights, initial_state=first, **options)
        assert state.time.tolist() == [24]
        state.time.add_(5)


def test_few_grids_are_kept_and_none_of_inference_mode_for_training(lately):
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    q.requires_grad_()
    for C in range(1, grid_tnt.KEPT):
        options = {"chunk_size": C, "output_final_state": True}
        with torch.no_grad():
            state = memory_chunkwise(q, k, v, lr, weights, **options)[1]
        with torch.inference_mode():
            memory_chunkwise(q, k, v, lr, weights, initial_state=state, **options)
        memory_chunkwise(q, k, v, lr, weights, initial_state=state, **options)[0].sum().backward()
    assert len(grid_tnt._LATELY) == grid_tnt.KEPT


def test_one_grid_of_a_kind_is_kept_and_none_of_many_slots(lately):
    """A chunk of 2^16 that ends beside one that goes on takes slots for both, however few tokens there are."""
    q = torch.zeros(2, 8, 1, 4)
    for C, times in ((4, (4, 4)), (4, (5, 6)), (2**16, (4, 2**16 - 4))):
        layout = grid_tnt.batch_layout(q, 2, None, None, torch.tensor(times), C, None)
        assert layout.grids[0].time.tolist() == [8 + time for time in times]
        assert len(grid_tnt._LATELY) == 1
    assert grid_tnt._LATELY[0][0][4] == 4


def test_documents_take_no_grid_of_a_part_without_them():
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    options = {"chunk_size": 4, "output_final_state": True}
    state = memory_chunkwise(q, k, v, lr, weights, **options)[1]
    options |= {"initial_state": state}
    ids = torch.tensor([[0] * 5 + [1] * 7])
    memory_chunkwise(q, k, v, lr, weights, **options)
    found, after = memory_chunkwise(q, k, v, lr, weights, segment_ids=ids, **options)
    expected, naive = memory_naive(q, k, v, lr, weights, segment_ids=ids, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert after.time.tolist() == naive.time.tolist() == [7]


def test_a_mask_made_in_inference_mode_serves_outside_it():
    (q, k, v, lr), weights, _ = make_inputs(T=12)
    with torch.inference_mode():
        mask = torch.arange(12)[None] != 4
    found, expected = (memory_chunkwise(q, k, v, lr, weights, mask=x, chunk_size=4)[0] for x in (mask, mask.clone()))
    assert torch.equal(found, expected)
