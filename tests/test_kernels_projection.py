"""The Triton kernels of the Q-K projection against its definition: q_t times the sum of u_i^T u_i over the tokens
i <= t of t's own document and shard."""

import pytest
import torch
import torch.nn.functional as F
from interpreter import assert_close, in_precision, randoms, run_cases, watch_launches

from tnt_hf.projection_tnt import project_queries


def test_in_the_interpreter():
    run_cases(__file__, "not slow")


@pytest.mark.slow
def test_in_the_interpreter_with_long_rows():
    run_cases(__file__, "slow")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run here")
def test_what_cannot_run_raises():
    q = torch.randn(1, 3, 1, 16)
    with pytest.raises(ValueError, match="implementation.*fast"):
        project_queries(q, q, reset_interval=None, implementation="fast")
    with pytest.raises(ValueError, match="implementation='triton'.*(no Triton on|not installed)"):
        project_queries(q, q, reset_interval=None, implementation="triton")


def shards(mask, segment_ids, interval):
    """[B, T] the shard that each token belongs to, -1 for absent ones; the largest holds a row's last token."""
    B, T = mask.shape
    shard = torch.full((B, T), -1)
    for b in range(B):
        time, document, number = 0, None, 0
        for t in range(T):
            if mask[b, t]:
                if segment_ids is not None and document is not None and segment_ids[b, t] != document:
                    time, number = 0, number + 1
                elif interval is not None and time and time % interval == 0:
                    number += 1
                document, time = None if segment_ids is None else segment_ids[b, t], time + 1
                shard[b, t] = number
    return shard


def definition(q, k, *, reset_interval, normalize, mask=None, segment_ids=None):
    """q_t M_t of every token, and the last M of every row."""
    mask = torch.ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
    shard = shards(mask, segment_ids, reset_interval)
    visible = ((shard[:, :, None] == shard[:, None]) & mask[:, :, None] & mask[:, None]).tril().to(q.dtype)
    u = F.normalize(k, dim=-1).repeat_interleave(q.shape[2] // k.shape[2], 2)
    out = torch.einsum("bthk,bihk,bti,bihl->bthl", q, u, visible, u)
    last = (shard == shard.amax(1, keepdim=True)).to(q.dtype)
    u = F.normalize(k, dim=-1)
    return F.normalize(out, dim=-1) if normalize else out, torch.einsum("bt,bthk,bthl->bhkl", last, u, u)


def in_pieces(q, k, lengths, *, mask=None, segment_ids=None, **options):
    """The kernels over consecutive pieces of the tokens, each going on from the state of the last."""
    outputs, M, time, begin = [], None, torch.zeros(len(q), dtype=torch.long), 0
    for length in lengths:
        here = slice(begin, begin + length)
        rows = {name: x[:, here] for name, x in (("mask", mask), ("segment_ids", segment_ids)) if x is not None}
        state = None if M is None else (M, time)
        out, M = project_queries(
            q[:, here], k[:, here], initial_state=state, output_final_state=True, implementation="triton", **rows,
            **options,
        )  # fmt: skip
        outputs.append(out)
        time = time + (length if mask is None else mask[:, here].sum(1))
        begin += length
    return torch.cat(outputs, 1), M


def compare(B, T, H, G, K, pieces=None, **options):
    k = torch.randn(B, T, H, K)
    q = torch.randn(B, T, H * G, K) + k.repeat_interleave(G, 2)  # unlike all keys, its projection's direction is noise
    results = []
    for dtype in (torch.float32, torch.float64):
        x = [y.requires_grad_() for y in in_precision([q, k], dtype)]
        outputs = in_pieces(*x, pieces or [T], **options) if dtype == torch.float32 else definition(*x, **options)
        loss = sum((o * r).sum() for o, r in zip(outputs, randoms(outputs)))
        results.append([*outputs, *torch.autograd.grad(loss, x)])
    assert_close(*results)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("G", [1, 3])
def case_one_chunk_of_a_length_that_fills_no_tile(G, normalize):
    compare(2, 11, 2, G, 16, reset_interval=None, normalize=normalize)


@pytest.mark.parametrize("interval, G", [(None, 2), (20, 1)])
def case_several_chunks_and_resets(interval, G):
    compare(1, 90, 2, G, 32, reset_interval=interval, normalize=False)


def case_padding_and_packed_documents():
    mask, segment_ids = torch.rand(2, 40) > 0.3, (torch.arange(40) // 13).expand(2, -1)
    compare(2, 40, 1, 2, 16, mask=mask, segment_ids=segment_ids, reset_interval=8, normalize=True)


@pytest.mark.parametrize("interval", [None, 16])
def case_pieces_carry_the_state_and_its_gradient(interval):
    mask = torch.rand(2, 45) > 0.3
    compare(2, 45, 1, 1, 16, [17, 1, 27], mask=mask, reset_interval=interval, normalize=False)


def case_every_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    launches = watch_launches(monkeypatch)
    compare(1, 8, 1, 1, 16, reset_interval=None, normalize=True)
    assert len(launches) == 6 and all(launches)  # two forward, and again sums, both ways, two gradients


@pytest.mark.slow
@pytest.mark.parametrize("interval", [None, 128])
@pytest.mark.parametrize("K, groups", [(64, 2), (128, 1)])  # no GPU has the shared memory for float32 and (128, 2)
def case_rows_of_several_chunks_of_which_the_last_is_short(K, groups, interval):
    compare(1, 150, 2, groups, K, reset_interval=interval, normalize=True)


def case_unsupported_operands_are_refused():
    for q, reason in (
        (torch.randn(1, 3, 1, 24), "keys have the width 24"),
        (torch.randn(1, 3, 1, 16).double(), "float64"),
    ):
        with pytest.raises(ValueError, match=f"implementation='triton'.*{reason}"):
            project_queries(q, q, reset_interval=None, implementation="triton")
