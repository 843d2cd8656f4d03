"""Where tokens sit is worked out once for a batch, whoever asks, and anew when anything about the batch has changed.

Axis legend: B batch   T tokens
"""

import gc

import pytest
import torch
from test_memory import make_inputs
from tiny import tiny_model, tokens

from tnt_hf import grid_tnt
from tnt_hf.memory_tnt import memory_chunkwise


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
