"""The numbers of `tnt eval` are right: models with known answers must get exactly those.

Axis legend: B batch   T tokens   V vocabulary
"""

import math
from types import SimpleNamespace

import pytest
import torch
from evaluation_oracles import Lookup, Successor, V, llama, uniform
from tiny import tiny_config, tiny_model, tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host
from torch.nn.functional import log_softmax

from tnt_hf import TNTForCausalLM, memory_state_bytes
from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.conversion import inject
from tnt_hf.conversion.ablations import ablations, gates, opened
from tnt_hf.recipes import evaluation_cost
from tnt_hf.recipes.data import train_tokenizer
from tnt_hf.recipes.evaluation_cost import DECODED, cache_bytes, cost_at, cost_rows
from tnt_hf.recipes.evaluation_perplexity import (
    Rows,
    ablation_result,
    buckets,
    by_document,
    mean_and_error,
    perplexity,
    perplexity_result,
    rows_per_batch,
    token_losses,
)
from tnt_hf.recipes.evaluation_retrieval import (
    FIRST_DISTANCES,
    PasskeySamples,
    accuracy,
    passkey_distances,
    passkey_result,
    recall_result,
    recall_vocabulary,
)
from tnt_hf.recipes.evaluation_run import is_exhaustion
from tnt_hf.recipes.recall import Recall


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["bytes"], V)


def documents(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed=n).tolist() for n in lengths]


def listen(model, lengths: list[int]) -> None:
    """Notes how many tokens every forward pass gets."""
    note = lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1])  # noqa: E731
    model.model.register_forward_pre_hook(note, with_kwargs=True)


# ---------------------------------------------------------------------------------------------------------- perplexity


def test_every_token_is_predicted_once_after_at_most_a_context():
    texts = documents(1, 2, 7, 8, 9, 40)
    rows = Rows.of(texts, 8, begin=0)
    again = [[] for _ in texts]
    for owner, ids in zip(rows.document, rows.ids):
        assert 2 <= len(ids) <= 9
        assert ids[0] == (again[owner][-1] if again[owner] else 0)
        again[owner] += ids[1:].tolist()
    assert again == texts and rows.tokens == sum(map(len, texts))
    assert Rows.of(texts, 8, begin=None).tokens == rows.tokens - len(texts), "no token stands before the first one"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_losses_are_those_of_a_naive_loop(batch_size):
    """A model that is asked anew for every token, with everything before it in its piece and nothing else."""
    model, texts, context = tiny_model(), documents(5, 30, 17), 12
    rows = Rows.of(texts, context, begin=3)
    losses = token_losses(model, rows, batch_size)
    expected = [[] for _ in texts]
    for d, text in enumerate(texts):
        ids = [3, *text]
        for t in range(1, len(ids)):
            piece = ids[(t - 1) // context * context : t]
            with torch.no_grad():
                logits = model(torch.tensor([piece])).logits[0, -1]
            expected[d].append(-float(log_softmax(logits, -1)[ids[t]]))
    found = [[] for _ in texts]
    for owner, loss in zip(rows.document, losses):
        found[owner] += loss.tolist()
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)  # float64; a batch sums in another order
    result = perplexity_result(rows, losses)
    flat = [x for document in expected for x in document]
    assert result["tokens"] == len(flat) == 52
    assert result["overall"] == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-10), "every token counts alike"


def test_losses_of_half_precision_are_of_float32():
    """The logits are rounded, what is made of them is not."""
    model, rows = llama().bfloat16(), Rows.of(documents(30), 40, begin=3)
    with torch.no_grad():
        logits = model(rows.ids[0][None, :-1]).logits[0]
    expected = -log_softmax(logits.double(), -1).gather(1, rows.ids[0][1:, None])[:, 0]
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(token_losses(model, rows, 1)[0], expected, rtol=1e-6, atol=1e-6)  # float32


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    rows = Rows.of(documents(30, 70), 64, begin=None)
    result = perplexity_result(rows, token_losses(uniform(), rows, 2))
    assert [row["perplexity"] for row in result["by_position"]] == pytest.approx([V] * 3, rel=1e-6)
    assert result["overall"] == pytest.approx(V, rel=1e-6) and result["standard_error"] < 1e-3


def test_positions_count_the_tokens_read():
    """1/2 after 1 to 16 tokens and 1/4 after more: a perplexity of 2 there, of 4 here, token-weighted in between."""
    rows = Rows.of([[(7 + i) % V for i in range(n)] for n in (41, 11)], 40, begin=None)
    result = perplexity_result(rows, token_losses(llama(cls=Successor), rows, 2))
    found = [(row["from"], row["to"], row["tokens"], row["perplexity"]) for row in result["by_position"]]
    assert found == [(1, 16, 26, pytest.approx(2)), (17, 32, 16, pytest.approx(4)), (33, 40, 8, pytest.approx(4))]
    assert result["overall"] == pytest.approx(2 ** ((26 + 2 * 24) / 50))


def test_buckets_cover_every_position_once():
    for longest in (1, 16, 17, 100, 4096):
        covered = [p for first, last in buckets(longest, 16) for p in range(first, last + 1)]
        assert covered == list(range(1, longest + 1))


def test_the_standard_error_is_over_documents():
    values = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    mean, error = mean_and_error(10 * values, torch.full((4,), 10.0, dtype=torch.float64))
    assert mean == pytest.approx(3) and error == pytest.approx(float(values.std()) / 2), "of equal documents"
    sums, counts = torch.tensor([3.0, 30.0, 50.0]), torch.tensor([1.0, 12.0, 20.0])
    ratios = [(83 - s) / (33 - n) for s, n in zip(sums.tolist(), counts.tolist())]
    jackknife = math.sqrt(2 / 3 * sum((r - sum(ratios) / 3) ** 2 for r in ratios))
    assert mean_and_error(sums, counts)[1] == pytest.approx(jackknife, rel=0.5), "of the same size as the jackknife's"
    assert mean_and_error(sums[:1], counts[:1]) == (3.0, None)
    found = perplexity(10 * values, torch.full((4,), 10.0))
    assert found["standard_error"] == pytest.approx(math.exp(3) * error), "of the exponential, to first order"
    assert mean_and_error(sums, counts * torch.tensor([1, 0, 0])) == (3.0, None), "documents without tokens are none"


def test_strange_logits_are_refused_with_their_place():
    model = llama()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(1, torch.tensor([4]), math.nan))
    with pytest.raises(ValueError, match="not finite: document 1, position 5 "):
        token_losses(model, Rows.of(documents(3, 20), 16, begin=0), 1)


def test_impossible_rows_are_refused():
    with pytest.raises(ValueError, match="context=0"):
        Rows.of(documents(3), 0, begin=None)
    with pytest.raises(ValueError, match="1 documents hold no token"):
        Rows.of(documents(1), 8, begin=None)


def test_batches_keep_their_logits_small():
    assert rows_per_batch(3, 10**6, 10**6) == 3, "what was asked for"
    assert rows_per_batch(None, 128, 1000) == 8
    assert rows_per_batch(None, 2048, 32_000) == 2 and 4 * 2 * 2048 * 32_000 <= 2**29
    assert rows_per_batch(None, 10**6, 10**6) == 1


# ----------------------------------------------------------------------------------------------------------- ablations


def test_branches_are_named_as_people_say_it():
    memories = [name for name in ablations(tiny_model(local_chunk_sizes=[1, 2])) if "memory of " in name]
    assert memories == ["global memory of 8 tokens off", "local memory of 1 token off", "local memory of 2 tokens off"]


@pytest.mark.parametrize("variant", ["mag", "mal", "lmm"])
def test_attention_is_switched_off_only_where_it_stands_beside_the_memory(variant):
    names = ablations(tiny_model(variant=variant)).keys()
    assert "memory off" in names and ("attention off" in names) == (variant == "mag")


def test_an_open_memory_matters_and_a_closed_one_does_not():
    rows = Rows.of(documents(40, 25), 40, begin=0)
    opened = tiny_model(memory_gate_init=0.5)
    result = ablation_result(opened, rows, 2)
    assert list(result) == ["all branches", *ablations(opened)] and len(result) == 6
    with torch.no_grad():
        for gate in gates(opened):
            gate.scale.zero_()
    closed = perplexity_result(rows, token_losses(opened, rows, 2))["overall"]
    assert (
        result["memory off"]["perplexity"] == pytest.approx(closed, rel=1e-12) != result["all branches"]["perplexity"]
    )
    assert all(abs(row["nats"]) > 1e-6 for name, row in result.items() if name != "all branches")
    off = ablation_result(opened, rows, 2)["memory off"]
    assert off["nats"] == off["nats_standard_error"] == 0.0


@pytest.mark.parametrize("changes", [{}, {"memory_gate": "product"}, {"memory_gate": "published"}, {"variant": "mal"}])
def test_memory_off_is_a_memory_that_says_nothing(changes):
    """The gate of the paper also norms attention and halves it where the memory is silent, and still does."""
    rows, model = Rows.of(documents(40, 25), 40, begin=0), tiny_model(**changes)

    def silent(_, __, output):
        return torch.zeros_like(output[0]), *output[1:]

    with opened(model, seed=0):
        result = ablation_result(model, rows, 2)
        for module in model.modules():
            if isinstance(module, TNTMemory):
                module.register_forward_hook(silent)
        found = perplexity_result(rows, token_losses(model, rows, 2))["overall"]
    assert result["memory off"]["perplexity"] == pytest.approx(found, rel=1e-12)
    assert result["memory off"]["perplexity"] != result["all branches"]["perplexity"]


def test_attention_off_is_a_mixing_weight_of_1():
    """As for LiZA, whose formula it is."""
    rows, model = Rows.of(documents(40, 25), 40, begin=0), tiny_model(memory_gate="mix")
    result = ablation_result(model, rows, 2)
    for name, weight in (("attention off", 1.0), ("memory off", 0.0)):
        for gate in gates(model):
            gate.weight.fill_(weight)
        found = perplexity_result(rows, token_losses(model, rows, 2))["overall"]
        assert result[name]["perplexity"] == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_perplexity_does_not_depend_on_what_shares_a_batch(kind, batch_size):
    """Nor on what was read before: RoPE's frequencies follow the longest row, and stay."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        pairs = 4
        rope |= {"original_max_position_embeddings": 32, "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs}
    sizes = {"sliding_window": 64, "max_position_embeddings": 32 if kind == "dynamic" else 128}

    def fresh():
        return tiny_model(rope_parameters=rope, **sizes)

    rows = Rows.of(documents(20, 30, 50, 80, 100, 25, 50), 100, begin=0)
    long = [ids for ids in rows.ids if len(ids) > 32]  # none of them brings the frequencies of short rows back
    model = fresh()
    for read in (rows, Rows(long, [0] * len(long))):
        alone = [token_losses(fresh(), Rows([ids], [0]), 1)[0] for ids in read.ids]
        for found, wanted in zip(token_losses(model, read, batch_size), alone, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_nats_are_the_rise_of_the_loss():
    rows, model = Rows.of(documents(40, 25), 40, begin=0), tiny_model(memory_gate_init=0.5)
    known = token_losses(model, rows, 2)
    read = []
    result = ablation_result(model, rows, 2, read.append, known)
    assert sum(read) == len(rows.ids) * len(ablations(model)), "what is known is not computed again"
    for name, row in result.items():
        rise = math.log(row["perplexity"] / result["all branches"]["perplexity"])
        assert name == "all branches" or row["nats"] == pytest.approx(rise, abs=1e-12)
    assert by_document(rows, known)[0].tolist() == pytest.approx([float(loss.sum()) for loss in known])


@pytest.mark.parametrize("settings", [OPEN_TNT, OPEN_LIZA], ids=["tnt", "liza"])
def test_without_injected_memory_the_host_is_left(settings):
    rows = Rows.of(documents(40), 40, begin=0)
    host = perplexity_result(rows, token_losses(tiny_host("llama"), rows, 1))["overall"]
    model = tiny_host("llama")
    inject(model, settings)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    result = ablation_result(model, rows, 1)
    assert result["memory off"]["perplexity"] == host != result["all branches"]["perplexity"]
    assert result["attention off"]["perplexity"] not in (host, result["all branches"]["perplexity"])
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if "memory" in type(m).__name__)


def test_a_model_without_memory_has_nothing_to_switch_off():
    with pytest.raises(ValueError, match="'ablation' needs a model with memory"):
        ablation_result(llama(), Rows.of(documents(9), 8, begin=None), 1)


# ------------------------------------------------------------------------------------------------------------ pass key


def test_the_key_is_where_the_distance_says(tokenizer):
    samples = PasskeySamples(tokenizer, 220)
    for distance in passkey_distances(samples.shortest, samples.longest):
        prompts, answers = samples.draw(4, distance, torch.Generator().manual_seed(0))
        assert prompts.shape == (4, 220 - samples.answer)
        for prompt, answer in zip(prompts.tolist(), answers):
            last = len(prompt) - 1 - distance
            assert prompt[last - len(answer) + 1 : last + 1] == answer
            text = tokenizer.decode(prompt[1:])
            assert text.count(tokenizer.decode(answer)) == 1 and text.endswith("What is the pass key? The pass key is")
            assert prompt[0] == tokenizer.bos_token_id
    assert len({tuple(answer) for answer in answers}) == 4
    prompts, _ = samples.draw(4, samples.shortest, torch.Generator().manual_seed(0))
    assert len({tuple(prompt[:20]) for prompt in prompts.tolist()}) == 4, "the filler begins anywhere"


def test_distances_run_from_the_shortest_to_the_longest():
    assert passkey_distances(50, 600) == [50, 128, 512, 600]
    assert passkey_distances(20, 20) == [20]
    assert passkey_distances(32, 128) == [32, 128]


@pytest.mark.parametrize(("reach", "found"), [(132, {52: 1, 128: 0, 237: 0}), (133, {52: 1, 128: 1, 237: 0})])
def test_the_key_is_found_by_who_looks_far_enough(tokenizer, reach, found):
    """Of the six tokens of the key the first is five further away than the last, up to which the distance counts."""
    model = llama(cls=Lookup)
    model.reach = reach
    rows = passkey_result(model, tokenizer, 266, 3, 0, 2)
    assert {row["distance"]: row["accuracy"] for row in rows} == found
    assert {row["samples"] for row in rows} == {3}


def test_the_key_is_asked_for_by_decoding(tokenizer):
    """One prefill, then single tokens; the model's own settings of generation neither count nor change."""
    model, lengths = llama(), []
    model.model.register_forward_pre_hook(
        lambda _, args, kw: lengths.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    own = model.generation_config
    own.eos_token_id, own.repetition_penalty, own.do_sample = 5, 9.0, True
    before = own.to_dict()
    passkey_result(model, tokenizer, 120, 1, 0, 1)
    samples = PasskeySamples(tokenizer, 120)
    runs = len(passkey_distances(samples.shortest, samples.longest))
    assert lengths == [114, 1, 1, 1, 1, 1] * runs
    assert model.generation_config is own and own.to_dict() == before

    oracle = llama(cls=Lookup)
    oracle.generation_config = own
    own.eos_token_id = tokenizer("1")["input_ids"]  # would end an answer early
    assert all(row["accuracy"] == 1 for row in passkey_result(oracle, tokenizer, 120, 8, 0, 8))


def test_a_pass_key_needs_text_and_room(tokenizer):
    with pytest.raises(ValueError, match="needs at least 81 tokens"):
        PasskeySamples(tokenizer, 80)
    assert PasskeySamples(tokenizer, 81).longest == PasskeySamples(tokenizer, 81).shortest
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="'passkey' needs one for text"):
        PasskeySamples(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"), 512)
    with pytest.raises(ValueError, match="distance=9999"):
        PasskeySamples(tokenizer, 100).draw(1, 9999, torch.Generator())


def test_strange_logits_while_decoding_are_refused(tokenizer):
    model = llama()
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="pass key at a distance of 52, position 114"):
        passkey_result(model, tokenizer, 120, 1, 0, 1)
    with pytest.raises(ValueError, match="recall, position 1"):
        recall_result(model, None, 32, 1, 0, 1)


def test_a_token_that_is_never_written_is_not_strange(tokenizer):
    model = llama(cls=Lookup)
    model.answers = lambda ids: Lookup.answers(model, ids).index_fill(-1, torch.tensor([0]), -math.inf)
    assert all(row["accuracy"] == 1 for row in passkey_result(model, tokenizer, 120, 1, 0, 1))
    assert all(row["accuracy"] == 1 for row in recall_result(model, None, 32, 1, 0, 1)[0])


def test_the_interval_of_an_accuracy():
    """Wilson's: it holds the share, is inside [0, 1], has a width at both ends, and shrinks with the count."""
    assert accuracy(8, 32)["interval"] == pytest.approx([0.1325, 0.4211], abs=1e-4)
    for right, count in ((0, 5), (5, 5), (2, 5)):
        low, high = accuracy(right, count)["interval"]
        assert 0 <= low <= right / count <= high <= 1 and high - low > 0.3
        assert high - low > -float.__sub__(*accuracy(right * 9, count * 9)["interval"])


# -------------------------------------------------------------------------------------------------------------- recall


def test_recall_is_perfect_as_far_as_a_model_looks_back():
    model = llama(cls=Lookup)
    for reach in (8, 64, 10**9):
        model.reach = reach
        rows, task = recall_result(model, None, 200, 6, 0, 4)
        assert [(row["distance_from"], row["accuracy"]) for row in rows] == [
            (first, float(reach >= last)) for first, last in buckets(200, FIRST_DISTANCES)
        ]
        assert sum(row["questions"] for row in rows) == 6 * 12, "12 pairs in every sequence"
    assert task == Recall()


def test_chance_is_the_accuracy_of_a_fixed_guess():
    model = llama(cls=Lookup)
    model.reach, model.otherwise = 0, 70
    rows, task = recall_result(model, None, 256, 200, 0, 50)
    count = sum(row["questions"] for row in rows)
    share = sum(row["accuracy"] * row["questions"] for row in rows) / count
    assert share == pytest.approx(task.chance, abs=4 * math.sqrt(task.chance / count)), "within four standard errors"


def test_recall_on_a_text_tokenizer_uses_ordinary_tokens(tokenizer):
    task, ids = recall_vocabulary(tokenizer, V, 0)
    assert task == Recall() and len(set(ids.tolist())) == task.vocab_size
    drawn = [recall_vocabulary(tokenizer, V, seed)[1] for seed in range(9)]
    assert not {*tokenizer.all_special_ids} & {i for ids in drawn for i in ids.tolist()}
    assert len({tuple(ids.tolist()) for ids in drawn}) == 9
    model = llama(cls=Lookup)
    rows, _ = recall_result(model, tokenizer, 101, 4, 0, 4)
    assert all(row["accuracy"] == 1 for row in rows), "behind the begin token as well"
    small, ids = recall_vocabulary(None, 20, 0)
    assert small.vocab_size <= 20 and small.values > 1 and ids.tolist() == list(range(small.vocab_size))
    with pytest.raises(ValueError, match="7 ordinary tokens"):
        recall_vocabulary(None, 7, 0)
    with pytest.raises(ValueError, match="context=4"):
        recall_result(model, tokenizer, 4, 1, 0, 1)


# ---------------------------------------------------------------------------------------------------------------- cost


def test_bytes_are_those_of_the_cache():
    """State as `memory_state_bytes` counts it, at any context; keys and values of the window."""
    config = tiny_config(sliding_window=16, dtype="float32")
    model = TNTForCausalLM(config).eval()
    rows = list(cost_rows(model, [8, 64], 64, 0))  # the query sees 16 tokens with its own, so the cache keeps 15
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert [row["kv_bytes"] for row in rows] == [8 * per_token, 15 * per_token]
    assert [row["state_bytes"] for row in rows] == [memory_state_bytes(config, "float32")] * 2
    rows = list(cost_rows(llama(), [1, 8, 64], V, 0))
    assert [(row["state_bytes"], row["kv_bytes"]) for row in rows] == [(0, n * 2 * 2 * 32 * 4) for n in (1, 8, 64)]
    assert "decode_tokens_per_second" not in rows[0], "a single token is read, none is decoded"
    assert cache_bytes(None) == (0, 0)
    with pytest.raises(ValueError, match="tuple"):
        cache_bytes(())


def test_speed_is_of_what_was_computed(monkeypatch):
    """A prefill of all tokens but the last at once, then single ones: of a model that takes 5 ms for each token of
    the first, 50 ms for each of the others, and in the first round ten times as long."""
    model, lengths, now = tiny_model(torch.float32), [], [0.0]
    listen(model, lengths)

    def take(_, args, kwargs):
        T = kwargs["input_ids"].shape[1]
        now[0] += (0.05 if T == 1 else 0.005 * T) * (10 if len(lengths) <= 1 + DECODED else 1)

    model.model.register_forward_pre_hook(take, with_kwargs=True)
    monkeypatch.setattr(evaluation_cost, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    row = cost_at(model, tokens(1, 40))
    assert lengths == [40 - DECODED, *[1] * DECODED] * 4, "one round to warm up, three that count"
    for name, speed in {"prefill": 200, "decode": 20}.items():
        assert row[f"{name}_tokens_per_second"] == pytest.approx(speed)
        assert row[f"{name}_tokens_per_second_range"] == pytest.approx([speed, speed])


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", True),
        ("more than one element refers to a single memory location", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_only_full_memory_is_taken_for_full_memory(said, full):
    assert is_exhaustion(RuntimeError(said)) is full and is_exhaustion(MemoryError(said))


def test_a_document_without_a_prediction_is_not_counted():
    rows = Rows.of([[1, 2, 3], [7], [4, 5]], 8, None)
    losses = [torch.ones(len(x) - 1, dtype=torch.float64) for x in rows.ids]
    assert perplexity_result(rows, losses)["documents"] == 2
