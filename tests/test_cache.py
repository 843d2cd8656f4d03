"""TNTCache: constant size, correct batch operations, a change of chunk sizes in mid-conversation."""

import pytest
import torch
from tiny import MODES, few_modes, later, left_padded, tiny_config, tiny_model, tokens
from tiny_hosts import OPEN_TNT, tiny_host
from transformers import CompileConfig, DynamicCache, StaticCache

from tnt_hf import TNTCache, memory_state_bytes
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import inject
from tnt_hf.costs_tnt import key_value_bytes, memory_state_shapes
from tnt_hf.state_tnt import StateLayout


# Logits below 2 in float64 (3e-15 was found): rows of another batch or length may be summed in another order.
CLOSE = {"rtol": 0, "atol": 1e-13}
modes = pytest.mark.parametrize("changes", MODES.values(), ids=MODES.keys())


def go_on(model, cache, ids):
    """Logits of `ids` after what the cache has seen."""
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True).logits


def filled(model, ids, cache=None, **kwargs):
    cache = TNTCache(model.config) if cache is None else cache
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True, **kwargs)
    return cache


@modes
def test_size_is_constant_and_as_documented(changes):
    model = tiny_model(torch.float32, **changes)
    expected = 3 * memory_state_bytes(model.config)
    layers = model.config.memory_layer_indices
    sizes = []
    cache = TNTCache(model.config)
    for length in (1, 20, 60):
        filled(model, tokens(3, length), cache)
        assert cache.state_bytes() == expected
        sizes.append(cache.nbytes())
        assert sizes[-1] == expected + 3 * sum(key_value_bytes(model.config, cache.get_seq_length()))
    if "full_attention" not in (changes.get("layer_types") or []):
        assert sizes[1] == sizes[2]
    shapes = [shape for name, shape in memory_state_shapes(model.config) if name != "conv"]
    for i in layers:
        states = cache.layers[i].recurrent_states
        assert [tuple(x.shape[1:]) for x in states.values()] == shapes
        assert len(states) == model.config.number_of_conv_states
        assert states[len(states) - 1].tolist() == [81] * 3  # memory time


@modes
def test_batch_operations_equal_those_on_the_inputs(changes):
    model, ids, rest = tiny_model(**changes), tokens(3, 21), tokens(3, 4, seed=2)
    rows = torch.tensor([2, 0, 0])
    expected = go_on(model, filled(model, ids), rest)[rows]

    cache = filled(model, ids)
    cache.reorder_cache(rows)
    torch.testing.assert_close(go_on(model, cache, rest[rows]), expected, **CLOSE)
    cache = filled(model, ids)
    cache.batch_select_indices(rows)
    torch.testing.assert_close(go_on(model, cache, rest[rows]), expected, **CLOSE)
    cache = filled(model, ids)
    cache.batch_repeat_interleave(2)
    twice = go_on(model, cache, rest.repeat_interleave(2, 0))
    torch.testing.assert_close(twice, go_on(model, filled(model, ids), rest).repeat_interleave(2, 0), **CLOSE)


@pytest.mark.parametrize("name", ["default", "window and full attention", "lmm", "window of 1"])
def test_caches_of_the_library_hold_the_same_state(name):
    model, ids, rest = tiny_model(**MODES[name]), tokens(2, 21), tokens(2, 4, seed=2)
    expected = go_on(model, filled(model, ids), rest)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=30)):
        filled(model, ids, cache)
        torch.testing.assert_close(go_on(model, cache, rest), expected, **CLOSE)
        cache.reset()
        filled(model, ids, cache)
        torch.testing.assert_close(go_on(model, cache, rest), expected, **CLOSE)


# Models with as many layers and state slots as the default one, whose state means something else.
OTHERS = {
    "num_key_value_heads": 1, "hidden_size": 64, "head_dim": 4, "memory_num_heads": 1, "memory_conv_kernel": 0,
    "memory_feature_map": "identity", "memory_expansion": 2, "global_chunk_size": 4, "global_read": "current",
    "local_reset_interval": 32, "sliding_window": 5, "num_persistent_tokens": 1, "memory_value_norm": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", [TNTCache, lambda config: DynamicCache(config=config)], ids=["ours", "library"])
@pytest.mark.parametrize("field, value", OTHERS.items(), ids=OTHERS.keys())
def test_a_cache_of_another_architecture_is_refused_and_left_alone(field, value, kind):
    model, other = tiny_model(), tiny_model(**{field: value})
    cache = kind(other.config)
    go_on(other, cache, tokens(2, 9))
    held = {i: [x.clone() for x in layer.recurrent_states.values()] for i, layer in enumerate(cache.layers)}
    expected = rf"{field}: the cache was filled with {value!r}, the model has {getattr(model.config, field)!r}"
    for length in (1, 3):  # both ways through the memory
        with pytest.raises(ValueError, match=expected):
            go_on(model, cache, tokens(2, length))
    assert cache.get_seq_length() == 9
    for i, states in held.items():
        assert all(torch.equal(a, b) for a, b in zip(states, cache.layers[i].recurrent_states.values()))
    assert go_on(other, cache, tokens(2, 1)).isfinite().all()


def test_state_is_written_in_place_without_gradients_only():
    model, cache = tiny_model(), TNTCache(tiny_config())
    filled(model, tokens(1, 5), cache)
    before = cache.layers[0].recurrent_states[0]
    filled(model, tokens(1, 1), cache)
    assert cache.layers[0].recurrent_states[0] is before
    model(tokens(1, 1), past_key_values=cache)
    assert cache.layers[0].recurrent_states[0] is not before
    with torch.inference_mode():
        model(tokens(1, 1), past_key_values=cache)
    filled(model, tokens(1, 1), cache)  # after inference_mode: its tensors cannot be written outside it
    model(tokens(1, 3), past_key_values=cache).logits.sum().backward()


def test_the_state_is_never_the_trained_w_init():
    """Before a chunk's end W_xi is W_init; writing over it would change the model, which may be frozen."""
    model = tiny_model(memory_implementation="naive").requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    cache = TNTCache(model.config)
    model(tokens(1, 3), past_key_values=cache)  # gradients are enabled, but nothing wants one
    go_on(model, cache, tokens(1, 9, seed=2))
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


LAYOUTS = {
    "num_hidden_layers": 3,
    "memory_layers": [1],
    "global_chunk_size": 4,
    "local_chunk_sizes": [1, 4],
    "local_reset_interval": 8,
    "global_read": "current",
    "qk_projection": "none",
    "memory_depth": 1,
    "memory_momentum": True,
}


@pytest.mark.parametrize("field", LAYOUTS)
def test_models_in_one_process_have_their_own_layouts(field):
    StateLayout.of(tiny_config())
    other = tiny_config(**{field: LAYOUTS[field]})
    assert StateLayout.of(other) == StateLayout._made(other) != StateLayout.of(tiny_config())


def test_a_row_that_sits_out_a_call_keeps_its_state():
    model, mask = tiny_model(memory_momentum=True), torch.ones(2, 15, dtype=torch.long)
    mask[1, 9:] = 0
    cache = filled(model, tokens(2, 9))
    before = {name: x[1].clone() for name, x in cache._tensors().items()}
    filled(model, tokens(2, 6, seed=2), cache, attention_mask=mask)
    for name, x in cache._tensors().items():
        if "conv" in name or "state" in name:
            torch.testing.assert_close(x[1], before[name], **CLOSE)


CACHES = {
    "ours": lambda model: TNTCache(model.config),
    "library": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "pads, sample",
    [
        pytest.param(0, False, id="greedy", marks=pytest.mark.long),
        pytest.param(3, True, id="padded prompt, sampling"),
    ],
)
@few_modes
def test_a_batch_goes_on_whose_rows_ended_one_by_one(changes, pads, sample):
    """`generate` feeds padding to rows that have ended, which is not part of their conversation."""
    goes_on_after_rows_ended(tiny_model(**changes), CACHES["ours"], pads, sample)


@pytest.mark.parametrize("cache", CACHES)
def test_rows_end_one_by_one_in_every_cache(cache):
    # without a window: that of the library's caches counts padding
    goes_on_after_rows_ended(tiny_model(layer_types=["full_attention"] * 2), CACHES[cache], 3, False)


def test_rows_end_one_by_one_without_a_memory():
    goes_on_after_rows_ended(tiny_model(memory_layers=[], layer_types=None), CACHES["ours"], 3, False)


@pytest.mark.slow
@pytest.mark.parametrize("layer_types", [None, ["full_attention"]], ids=["window", "full attention"])
def test_rows_end_one_by_one_in_a_compiled_model(layer_types):
    torch.compiler.reset()
    shape = {"layer_types": layer_types, "num_hidden_layers": 1, "sliding_window": 8}  # beyond the new tokens
    model, plain = (tiny_model(**shape) for _ in range(2))
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    goes_on_after_rows_ended(model, CACHES["ours"], 3, False, plain)


@pytest.mark.parametrize(
    "layer_types",
    [*later(None), ["full_attention"] * 2],
    ids=["window", "full attention"],
)
def test_a_static_cache_is_decoded_from_in_one_graph(layer_types):
    """As `generate` does by itself on a GPU."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model, (ids, mask) = tiny_model(layer_types=layer_types), left_padded([tokens(9), tokens(6, seed=3)])
    compiled = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    found = model.generate(ids, cache_implementation="static", compile_config=compiled, **settings)
    assert torch.equal(found, model.generate(ids, **settings))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def goes_on_after_rows_ended(model, make, pads, sample, plain=None):
    ids, mask = left_padded([tokens(9), tokens(9 - pads, seed=3)])
    settings = {"max_new_tokens": 12, "do_sample": sample, "pad_token_id": 0}
    torch.manual_seed(0)
    free = (plain or model).generate(ids, attention_mask=mask, **settings)[:, 9:].tolist()
    eos, cache = next(x for i, x in enumerate(free[0]) if x not in free[1][: i + 4]), make(model)
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=mask, eos_token_id=eos, past_key_values=cache, **settings)
    ended = [row.index(eos) if eos in row else 11 for row in out[:, 9:].tolist()]
    assert ended[1] > ended[0] + 2 and (out[0, 10 + ended[0] :] == 0).all() and cache.ended.rows is None
    valid = torch.arange(out.shape[1] - 9) <= torch.tensor(ended)[:, None]
    mask = torch.cat([mask, valid.long(), torch.ones(2, 4, dtype=torch.long)], 1)
    out = torch.cat([out, tokens(2, 4, seed=8)], 1)
    settings |= {"attention_mask": mask, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    cached = model.generate(out, past_key_values=cache, **settings)
    anew = (plain or model).generate(out, use_cache=False, **settings)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(anew.logits), **CLOSE)


@pytest.mark.parametrize("changes", [{}, {"memory_layers": []}], ids=["memory", "a window alone"])
def test_what_cannot_forget_drafts_for_no_other_model(changes):
    model, ids = tiny_model(**changes), tokens(1, 9)
    assert not any(layer.is_croppable for layer in TNTCache(model.config).layers)
    other = tiny_model(memory_layers=[], sliding_window=None)
    with pytest.raises(ValueError, match="assistant_model: with memory or a window it cannot draft"):
        other.generate(ids, max_new_tokens=6, assistant_model=model, do_sample=False)


def test_a_draft_by_the_first_layers_is_the_first_layers():
    model, ids = tiny_model(memory_layers=[], sliding_window=None, num_hidden_layers=3), tokens(1, 9)
    called = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, _: called.append(layer))
    greedy = model.generate(ids, max_new_tokens=6)
    called.clear()
    assert torch.equal(model.generate(ids, max_new_tokens=6, assistant_early_exit=1), greedy)
    first, *others = map(called.count, model.model.layers)
    assert first > max(others)


@pytest.mark.parametrize("memory_layers", [[0, 1], [1]], ids=["every layer", "the second layer"])
def test_a_memory_cannot_be_cropped(memory_layers):
    model, ids = tiny_model(layer_types=["full_attention"] * 2, memory_layers=memory_layers), tokens(1, 12)
    cache = filled(model, ids[:, :9])
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="tokens_to_remove=-4: a memory cannot forget tokens"):
        cache.crop(-4)
    cache.crop(0)
    expected = go_on(model, filled(model, ids[:, :9]), ids[:, 9:])
    assert torch.equal(go_on(model, cache, ids[:, 9:]), expected)


def test_without_a_memory_a_cache_can_be_cropped():
    model, ids = tiny_model(layer_types=["full_attention"] * 2, memory_layers=[]), tokens(1, 12)
    cache = filled(model, ids[:, :9])
    cache.crop(-4)
    expected = go_on(model, filled(model, ids[:, :5]), ids[:, 5:])
    torch.testing.assert_close(go_on(model, cache, ids[:, 5:]), expected, **CLOSE)


@pytest.mark.parametrize("changes", [{}, {"memory_layers": []}])
def test_continuous_batching_is_refused(changes):
    with pytest.raises(ValueError, match="continuous batching: a TNT model cannot use their paged cache"):
        tiny_model(**changes).generate_batch([[3, 4, 5], [6, 7]])


def test_generate_refuses_a_contradicting_mask_for_a_single_token():
    model, ids, mask = tiny_model(), tokens(2, 9), torch.ones(2, 10, dtype=torch.long)
    cache = filled(model, ids)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match=r"\[6, 9\] of the 9 cached tokens.*has read \[9, 9\]"):
        model.generate(tokens(2, 10), past_key_values=cache, attention_mask=mask, max_new_tokens=2)


def test_a_mask_that_contradicts_what_the_memory_has_read_is_refused():
    model, ids = tiny_model(), tokens(2, 9)
    cache, mask = filled(model, ids), torch.ones(2, 12, dtype=torch.long)
    mask[0, 5:8] = 0
    with pytest.raises(ValueError, match=r"\[6, 9\] of the 9 cached tokens.*has read \[9, 9\]"):
        filled(model, tokens(2, 3), cache, attention_mask=mask)
    cache = filled(model, ids, attention_mask=mask[:, :9])
    filled(model, tokens(2, 3), cache, attention_mask=mask)
    with pytest.raises(ValueError, match=r"\[12, 12\] of the 12 cached tokens.*has read \[9, 12\]"):
        filled(model, tokens(2, 2), cache, attention_mask=torch.ones(2, 14, dtype=torch.long))


def test_a_mask_that_contradicts_is_refused_at_one_token_too():
    """A loop that decodes by hand with a mask of ones, after rows that were padded; the first of its masks counts."""
    model, mask = tiny_model(), torch.ones(2, 9, dtype=torch.long)
    mask[0, :5] = 0
    cache, one = filled(model, tokens(2, 9), attention_mask=mask), torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\[9, 9\] of the 9 cached tokens.*has read \[4, 9\]"):
        filled(model, tokens(2, 1), cache, attention_mask=torch.ones(2, 10, dtype=torch.long))
    for _ in range(3):
        mask = torch.cat([mask, one], 1)
        filled(model, tokens(2, 1), cache, attention_mask=mask)
    mask = torch.cat([mask, one, one], 1)
    filled(model, tokens(2, 2), cache, attention_mask=mask)
    with pytest.raises(ValueError, match=r"\[14, 14\] of the 14 cached tokens.*has read \[9, 14\]"):
        filled(model, tokens(2, 1), cache, attention_mask=torch.ones(2, 15, dtype=torch.long))
    cache.reset()
    mask = mask[:, :12]
    filled(model, tokens(2, 12), cache)
    mask = torch.cat([mask, one], 1)
    with pytest.raises(ValueError, match=r"\[7, 12\] of the 12 cached tokens.*has read \[12, 12\]"):
        filled(model, tokens(2, 1), cache, attention_mask=mask)


def test_a_cache_that_is_not_to_be_used_is_refused_by_generate():
    """The library would feed all tokens again with every new one, and each time the memory would read them."""
    for model in (tiny_model(), inject(tiny_host("llama"), OPEN_TNT)):
        cache, ids = DynamicCache(config=model.config), tokens(1, 6)
        with pytest.raises(ValueError, match="use_cache=False"):
            model.generate(ids, past_key_values=cache, use_cache=False, max_new_tokens=2)
        assert cache.get_seq_length() == 0
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
        assert cache.get_seq_length() == 7


# --------------------------------------------------------------------------------------------- a change of chunk sizes


@pytest.mark.parametrize("sizes", [([2, 4], [1, 1]), ([1, 1], [2, 4]), ([2, 4], [8, 4]), ([2, 4], [1, 4])])
def test_chunk_sizes_change_at_a_boundary(sizes, tmp_path):
    before, after = sizes
    model, rest = tiny_model(local_chunk_sizes=before), tokens(2, 9, seed=2)
    cache = filled(model, tokens(2, 24))
    cache.save(tmp_path / "session.safetensors")
    model.set_local_chunk_sizes(after)
    resumed = TNTCache.load(tmp_path / "session.safetensors", model.config)
    assert resumed.state_bytes() == 2 * memory_state_bytes(model.config, "float64"), "at once, not with the next token"
    a, b = go_on(model, cache, rest), go_on(model, resumed, rest)
    assert torch.equal(a, b)
    assert cache.state_bytes() == 2 * memory_state_bytes(model.config, "float64")
    # the same, prefilled token by token: the memory before the boundary is the only thing that may differ
    stepwise = filled(tiny_model(local_chunk_sizes=before), tokens(2, 24))
    step = torch.cat([go_on(model, stepwise, rest[:, t : t + 1]) for t in range(9)], 1)
    torch.testing.assert_close(step, a, **CLOSE)


@pytest.mark.parametrize("time, sizes", [(23, [1, 1]), (22, [8, 4])], ids=["of the old size", "of the new size"])
def test_chunk_sizes_do_not_change_inside_a_chunk(time, sizes):
    model = tiny_model()
    cache = filled(model, tokens(1, time))
    dynamic = filled(model, tokens(1, 24), DynamicCache(config=model.config))
    model.set_local_chunk_sizes(sizes)
    with pytest.raises(ValueError, match=rf"local_chunk_sizes.*time \[{time}\]"):
        go_on(model, cache, tokens(1, 1))
    with pytest.raises(ValueError, match="local_chunk_sizes"):
        go_on(model, dynamic, tokens(1, 1))
    assert go_on(model, TNTCache(model.config), tokens(1, 1)).isfinite().all()


def test_chunk_sizes_do_not_change_where_the_projection_depends_on_them():
    model = tiny_model(qk_projection="chunk")
    cache = filled(model, tokens(1, 16))  # at a boundary
    model.set_local_chunk_sizes([1, 1])
    with pytest.raises(ValueError, match="local_chunk_sizes.*qk_projection='chunk' depends on it"):
        go_on(model, cache, tokens(1, 1))


@pytest.mark.parametrize("name", CACHES)
def test_a_reset_cache_is_empty_for_any_chunk_size(name):
    model, ids, make = tiny_model(), tokens(1, 9), CACHES[name]
    cache = filled(model, tokens(1, 23), make(model))
    cache.reset()
    model.set_local_chunk_sizes([1, 1] if name == "ours" else [4, 2])  # which need as much room as [2, 4]
    assert torch.equal(go_on(model, cache, ids), go_on(model, make(model), ids))


def test_one_unchanged_memory_keeps_its_chunk():
    """[2, 4] -> [1, 4] at time 22 is inside the second memory's chunk, which goes on as if nothing had happened."""
    model, ids = tiny_model(local_chunk_sizes=[2, 4]), tokens(1, 22)
    cache = filled(model, ids)
    start = [cache.layers[0].recurrent_states[j].clone() for j in range(4 + 4 + 2, 4 + 4 + 4)]
    model.set_local_chunk_sizes([1, 4])
    cache.adapt(model.config)
    after = [cache.layers[0].recurrent_states[j] for j in range(4 + 2 + 2, 4 + 2 + 4)]
    for a, b in zip(start, after):
        assert torch.equal(a, b)


def test_a_long_random_context_stays_bounded():
    """Untrained weights, keys that are alike, a global chunk of 512 tokens: a summed step must not diverge
    (with the uncapped rate the state passes 1e8 on the way)."""
    changes = {"global_chunk_size": 512, "local_reset_interval": 512, "memory_layers": [0], "initializer_range": 0.02}
    sizes = {}
    for scaling in ("capped", "none"):
        model, cache = tiny_model(torch.float32, memory_lr_scaling=scaling, memory_max_lr=0.5, **changes), None
        with torch.inference_mode():
            for piece in tokens(1, 4096).split(1024, dim=1):
                cache = model(piece, past_key_values=cache, use_cache=True).past_key_values
        states = cache.layers[0].recurrent_states.values()
        sizes[scaling] = max(x.abs().max().item() for x in states if x.is_floating_point())
    assert sizes["capped"] < 1e3, sizes
    assert not sizes["none"] < 1e3, sizes


@pytest.mark.parametrize("length", [1, 3])
def test_a_state_of_a_graph_is_not_written_in_place(length):
    model = tiny_model()
    cache = TNTCache(model.config)
    for _ in range(2):
        model(tokens(1, 8), past_key_values=cache, use_cache=True)
    held = cache.layers[0].recurrent_states[0]
    before = held.detach().clone()
    with torch.no_grad():
        model(tokens(1, length), past_key_values=cache, use_cache=True)
    assert held.requires_grad and torch.equal(held, before)


def test_positions_and_documents_cover_the_call():
    """Or each would be read as something else: one position for all tokens, two documents as one."""
    model, ids = tiny_model(), tokens(1, 9)
    for shape in ((9,), (1, 1), (1, 4), (2, 9), (3, 1, 9)):
        with pytest.raises(
            ValueError, match=rf"position_ids has the shape \[{', '.join(map(str, shape))}\].*\[1, 9\]"
        ):
            model(ids, position_ids=torch.zeros(shape, dtype=torch.long))
    for ends in ([4, 9], [0, 4, 8], [0, 4, 12], [0, 6, 4, 9], [[0, 4, 9]], []):
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            with pytest.raises(ValueError, match=rf"{name}=\[.*must rise from 0 to the 9 tokens"):
                model(ids, **{name: torch.tensor(ends, dtype=torch.int32)})
    with torch.no_grad():
        alone = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)
        torch.testing.assert_close(model(ids, cu_seq_lens_k=torch.tensor([0, 4, 4, 9])).logits, alone)


def test_masks_and_caches_have_the_shape_of_the_call():
    model, ids = tiny_model(), tokens(2, 9)
    for shape in ((2, 8), (2, 12), (3, 9), (1, 9)):
        with pytest.raises(ValueError, match=rf"attention_mask has the shape \[{shape[0]}, {shape[1]}\].*\[2, 9\]"):
            model(ids, attention_mask=torch.ones(shape), use_cache=False)
    with torch.no_grad():
        cache = model(ids).past_key_values
        with pytest.raises(ValueError, match=f"{CACHE_NAME} holds 2 rows, and 1 are given"):
            model(ids[:1, :2], past_key_values=cache)


@pytest.mark.parametrize("window", [4, *later(1, None)])
def test_attention_alone_with_the_librarys_bare_cache_and_in_one_graph(window):
    model, ids = tiny_model(memory_layers=[], sliding_window=window), tokens(2, 12)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=False)
    found = model.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=DynamicCache())
    assert torch.equal(found, expected)
    torch._dynamo.reset()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(whole(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


def test_a_device_that_does_not_exist_is_not_the_files_fault(tmp_path):
    config = tiny_model().config
    with pytest.raises(ValueError, match="device='foo'"):
        TNTCache.load(tmp_path / "session.safetensors", config, device="foo")


@pytest.mark.parametrize("memory_layers", [[0, 1], [1]])
def test_a_window_does_not_hold_the_prompt(memory_layers):
    cache = filled(model := tiny_model(memory_layers=memory_layers), tokens(2, 60))
    for layer in cache.layers:
        for x in (layer.keys, layer.values):
            assert x.shape[2] == model.config.sliding_window - 1
            assert x.untyped_storage().nbytes() == x.nbytes


@pytest.mark.parametrize("length", [1, 3])
def test_training_goes_on_behind_a_prompt_of_inference_mode(length):
    model, gradients = tiny_model(), []
    for mode in (torch.no_grad, torch.inference_mode):
        model.zero_grad()
        with mode():
            cache = model(tokens(2, 5), use_cache=True).past_key_values
        model(tokens(2, length, seed=2), past_key_values=cache).logits.square().sum().backward()
        gradients.append(model.model.layers[0].memory.q_proj.weight.grad.clone())
    assert torch.equal(*gradients)


@modes
def test_text_in_segments_trains_with_a_cache_that_is_detached(changes):
    """Truncated backpropagation through time, the order of writing and `backward()` left to the user."""
    model, ids = tiny_model(**changes).train(), tokens(2, 34)
    segments = ids.split(17, 1)  # inside a chunk

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    def loss(segment, cache):
        return model(segment, past_key_values=cache, use_cache=True, labels=segment).loss

    cache, before = TNTCache(model.config), TNTCache(model.config)
    first = loss(segments[0], cache)
    cache.detach()
    second = loss(segments[1], cache)
    cache.detach()
    written = go_on(model, cache, tokens(2, 1, seed=3))  # in place, where it can
    alone = gradients(model(segments[0], labels=segments[0], use_cache=False).loss)
    torch.testing.assert_close(gradients(first), alone, **CLOSE)
    filled(model, segments[0], before)
    torch.testing.assert_close(gradients(second), gradients(loss(segments[1], before)), **CLOSE)
    torch.testing.assert_close(written, go_on(model, filled(model, ids), tokens(2, 1, seed=3)), **CLOSE)
