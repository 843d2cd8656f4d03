"""One token at a time: the step that overwrites the state equals the recurrence as the paper prints it, and a model
that decodes with it is the model that reads everything at once, whoever else has a copy of its cache or listens to it.

Axis legend: B batch   H memory heads   G query heads per memory head   K key width   V value width
"""

import copy
import math
import re
from contextlib import nullcontext

import pytest
import torch
from tiny import MODES, few_modes, later, left_padded, tiny_config, tiny_model, tokens
from torch.nn.functional import normalize
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from transformers import DynamicCache, LlamaConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from tnt_hf import TNTCache, TNTForCausalLM
from tnt_hf.convolution_tnt import TNTCausalConv
from tnt_hf.masks_tnt import build_masks
from tnt_hf.network_tnt import Net, norms
from tnt_hf.projection_tnt import project_queries
from tnt_hf.step_tnt import Clock, MemoryState, memory_step, project_step, token
from tnt_hf.unit_tnt import TNTMemoryUnit


B, H, G, K = 3, 2, 2, 6
EXACT = {"atol": 1e-12, "rtol": 0}
PLAIN = {
    "chunk_size": 4, "reset_interval": 8, "read": "current", "query_projection": "none", "normalize_projection": True,
    "decay_target": "init", "grad_bound": None, "layernorm": None,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "one token per chunk": {"chunk_size": 1},
    "chunk start": {"read": "chunk_start"},
    "chunk start, one token per chunk": {"read": "chunk_start", "chunk_size": 1},
    "never reset": {"reset_interval": None},
    "projection": {"query_projection": "shard", "normalize_projection": False},
    "projection since the chunk": {"query_projection": "chunk"},
    "forgetting to zero": {"decay_target": "zero"},
    "bounded": {"grad_bound": 0.3},
    "sizes that are not powers of 2": {"chunk_size": 3, "reset_interval": 6},
}


def random_state(g, weights, momentum: bool, projection: bool, chunk_size: int, time) -> MemoryState:
    def like(x):
        return x + 0.1 * torch.randn(B, *x.shape, generator=g, dtype=x.dtype)

    W = [like(x) for x in weights]
    start = W if chunk_size == 1 else [like(x) for x in weights]
    S = [like(0 * x) for x in weights] if momentum else None
    M = torch.randn(B, H, K, K, generator=g, dtype=torch.float64) if projection else None
    return MemoryState(W, start, S, M, time)


def random_token(g, momentum: bool, decay: bool):
    def unit(*shape):  # as in a model; at length 1 and these rates nothing grows
        return normalize(torch.randn(*shape, generator=g, dtype=torch.float64), dim=-1)

    lr, mu, alpha = (0.5 * torch.rand(B, H, generator=g, dtype=torch.float64) for _ in range(3))
    return unit(B, H, G, K), unit(B, H, 1, K), unit(B, H, 1, K), lr, mu if momentum else None, alpha if decay else None


@pytest.mark.parametrize(
    "depth, residual, layernorm, momentum, decay",
    [
        (1, False, False, False, True),
        (1, True, False, False, False),
        (1, False, True, False, False),
        (2, True, True, True, False),
        (2, False, False, True, True),
        (2, False, False, False, False),
    ],
)
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("absent", [*later(False), True], ids=["all present", "some absent"])
@torch.no_grad()
def test_the_step_in_place_is_the_recurrence(depth, residual, layernorm, momentum, decay, changes, absent):
    """Twenty tokens across every boundary, rows at different times, whatever the clock is read with and whoever knows
    the lengths of the keys."""
    g, options = torch.Generator().manual_seed(depth), PLAIN | changes
    weights = [torch.randn(H, K, K, generator=g, dtype=torch.float64) * K**-0.5 for _ in range(depth)]
    net = Net("silu", residual, 1e-6)
    if layernorm:
        options["layernorm"] = [torch.randn(H, 1, K, generator=g, dtype=torch.float64) for _ in range(2)]
    projection = options["query_projection"] != "none"
    expected = random_state(g, weights, momentum, projection, options["chunk_size"], torch.tensor([0, 3, 7]))
    found = {on_host: copy.deepcopy(expected) for on_host in (True, False)}
    for _ in range(20):
        inputs = random_token(g, momentum, decay)
        present = torch.rand(B, generator=g) < 0.6 if absent else None
        o, expected, loss = token(expected, weights, net, options, *inputs, present)
        if absent:  # what an absent token holds is not seen
            shown = [present.view(-1, *[1] * (x.dim() - 1)) if x is not None else None for x in inputs]
            inputs = [x if x is None else torch.where(row, x, torch.nan) for x, row in zip(inputs, shown)]
        for on_host, state in found.items():
            clock = Clock.of(state.time, present) if on_host else Clock(state.time, present)
            q, k, v = (x.flatten(0, 1) for x in inputs[:3])
            rows = None if present is None else present.repeat_interleave(H).view(-1, 1, 1)
            scaled = 4 * inputs[3], *inputs[4:], rows, clock, 0.25, norms(k, keepdim=True) if on_host else None
            here, error = memory_step(state, weights, net, options, q, k, v, *scaled)
            here, error = (x.unflatten(0, (B, H)) for x in (here, error))
            state.time += 1 if present is None else present
            torch.testing.assert_close(here, o, **EXACT)
            if present is None:
                torch.testing.assert_close(0.5 * error.square().sum((-1, -2)), loss, **EXACT)
            torch.testing.assert_close(vars(state), vars(expected), **EXACT)


@pytest.mark.parametrize("name", ["default", "stage 2", "Titans", "mal"])
@torch.no_grad()
def test_decoding_allocates_no_state(name):
    model = tiny_model(**MODES[name])
    cache = model(tokens(2, 5), use_cache=True).past_key_values

    def addresses():
        states = [layer.recurrent_states | {"conv": layer.conv_states[0]} for layer in cache.layers]
        return [{j: x.data_ptr() for j, x in state.items()} for state in states]

    before = addresses()
    for t in range(20):
        model(tokens(2, 1, seed=t), past_key_values=cache)
    assert addresses() == before


@torch.no_grad()
def test_a_copy_of_a_cache_is_not_written_to():
    model, ids = tiny_model(), tokens(2, 9)
    cache = model(tokens(2, 5), use_cache=True).past_key_values
    kept = copy.deepcopy(cache)
    first = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(9)]
    again = [model(ids[:, t : t + 1], past_key_values=kept).logits for t in range(9)]
    assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("before", [False, True], ids=["behind it", "before it"])
@pytest.mark.parametrize("part", ["memories.0", "q_conv", "k_proj", "gate"])
@torch.no_grad()
def test_hooks_and_adapters_take_effect_while_decoding(part, before):
    """Whatever is put around a module of the memory changes a decoded token as it changes a read one."""
    model, ids = tiny_model(), tokens(2, 12)
    plain = model(ids).logits

    def half(module, args, output):
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

    def half_of_the_second(module, args):
        return (args[0], args[1] / 2, *args[2:]) if len(args) > 1 else (args[0] / 2,)

    module = model.model.layers[1].memory.get_submodule(part)
    module.register_forward_pre_hook(half_of_the_second) if before else module.register_forward_hook(half)
    full, cache, decoded = model(ids).logits, TNTCache(model.config), []
    for t in range(12):
        decoded.append(model(ids[:, t : t + 1], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(decoded, 1), full, atol=1e-9, rtol=0)
    assert not torch.allclose(full, plain)


class HalfUnit(TNTMemoryUnit):
    def forward(self, *args, **kwargs):
        o, *rest = super().forward(*args, **kwargs)
        return (o / 2, *rest)


@pytest.mark.parametrize("how", ["hook of all modules", "class of its own"])
@torch.no_grad()
def test_another_memory_takes_effect_while_decoding(how):
    model, ids = tiny_model(), tokens(2, 12)
    plain, cache = model(ids).logits, TNTCache(model.config)

    def half(module, args, output):
        return (output[0] / 2, *output[1:]) if type(module) is TNTMemoryUnit else output

    with register_module_forward_hook(half) if how == "hook of all modules" else nullcontext():
        if how == "class of its own":
            model.model.layers[1].memory.memories[0].__class__ = HalfUnit
        full = model(ids).logits
        decoded = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(12)]
    torch.testing.assert_close(torch.cat(decoded, 1), full, atol=1e-9, rtol=0)
    assert not torch.allclose(full, plain)


@pytest.mark.parametrize("how", ["hook of all modules", "forward of the class"])
@torch.no_grad()
def test_another_convolution_takes_effect_while_decoding(how, monkeypatch):
    model, ids = tiny_model(), tokens(2, 12)
    plain, cache, own = model(ids).logits, TNTCache(model.config), TNTCausalConv.forward

    def half(module, args, output):
        return output / 2 if type(module) is TNTCausalConv else output

    if how == "forward of the class":
        monkeypatch.setattr(TNTCausalConv, "forward", lambda self, window: own(self, window) / 2)
    with register_module_forward_hook(half) if how == "hook of all modules" else nullcontext():
        full = model(ids).logits
        decoded = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(12)]
    torch.testing.assert_close(torch.cat(decoded, 1), full, atol=1e-9, rtol=0)
    assert not torch.allclose(full, plain)


@pytest.mark.parametrize("pads", [0, 5], ids=["all valid", "padded"])
@few_modes
@torch.no_grad()
def test_a_clock_that_stays_on_its_device_tells_every_layer_the_same_time(monkeypatch, changes, pads):
    """As on a GPU, where nobody waits to read it: the clock of all layers is a tensor."""
    monkeypatch.setattr(Clock, "of", classmethod(lambda cls, time, present: cls(time, present)))
    model, ids, cache = tiny_model(**changes), tokens(2, 40), TNTCache(tiny_config(**changes))
    mask = torch.ones_like(ids)
    mask[0, :pads] = mask[1, 20 : 20 + pads] = 0
    full, decoded = model(ids, attention_mask=mask).logits, []
    for t in range(40):
        past = mask[:, : t + 1] if pads else None
        decoded.append(model(ids[:, t : t + 1], attention_mask=past, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(decoded, 1)[mask.bool()], full[mask.bool()], atol=1e-9, rtol=0)


def test_a_step_with_gradients_is_the_same_step():
    """Gradients flow through decoded tokens; the state they started from is not overwritten. Across a reset, before
    which one row has nothing to say for two tokens."""
    model, ids, mask = tiny_model(), tokens(2, 8), torch.ones(2, 20, dtype=torch.long)
    mask[1, 14:16] = 0
    cache = TNTCache(tiny_config())

    def decode(cache):
        steps = range(12, 20)
        return [model(ids[:, t - 12, None], attention_mask=mask[:, : t + 1], past_key_values=cache) for t in steps]

    with torch.no_grad():
        model(tokens(2, 12), past_key_values=cache)
        expected = decode(copy.deepcopy(cache))
    found = decode(cache)
    for t, (a, b) in enumerate(zip(found, expected)):
        present = mask[:, 12 + t].bool()
        torch.testing.assert_close(a.logits[present], b.logits[present], atol=1e-9, rtol=0)
    found[-1].logits.sum().backward()
    assert model.model.layers[0].memory.memories[1].lr_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", MODES)
@torch.no_grad()
def test_a_state_that_is_not_contiguous_is_decoded_from(name):
    """Its rows and heads cannot be one axis without a copy, whose changes would be lost."""
    model, ids = tiny_model(**MODES[name]), tokens(2, 9)
    expected, cache = model(ids).logits, TNTCache(tiny_config(**MODES[name]))
    model(ids[:, :5], past_key_values=cache)
    for layer in cache.layers:
        for j, x in getattr(layer, "recurrent_states", {}).items():
            if x is not None and x.dim() == 4:
                layer.recurrent_states[j] = x.transpose(0, 1).contiguous().transpose(0, 1)
    found = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, 9)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 5:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@torch.no_grad()
def test_one_token_keeps_to_the_mask_it_is_given(attn):
    """Also if the cache has no note of it: a finished mask of attention, and tokens that are hidden after the fact."""
    attention = {"global_chunk_size": None, "local_chunk_sizes": [], "sliding_window": None}
    model = tiny_model(**attention, num_hidden_layers=1, attn_implementation=attn)
    ids, cache, seen = tokens(1, 9), TNTCache(model.config), torch.arange(9)[None] >= 5
    expected = model(ids, attention_mask=seen.long()).logits[:, 8:]
    finished = seen[:, None, None]
    if attn == "eager":
        finished = torch.zeros(finished.shape).masked_fill(~finished, -torch.inf)
    model(ids[:, :8], past_key_values=cache)
    for mask in (finished, seen.long()):
        found = model(ids[:, 8:], attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits
        torch.testing.assert_close(found, expected, **EXACT)


@torch.no_grad()
def test_one_token_has_the_mask_that_the_library_makes():
    """None while the window fills up, and one of ones as soon as it is full: SDPA rounds the two differently, and a
    converted model decodes to the bit as its source does."""
    model, ids = tiny_model(), tokens(1, 8)
    caches = TNTCache(model.config), DynamicCache(config=model.config)
    for step in ids.split(1, 1):
        embeds = model.get_input_embeddings()(step)
        found, expected = (build_masks(model.config, embeds, None, cache)["sliding_attention"] for cache in caches)
        assert found is expected is None or torch.equal(found, expected)
        for cache in caches:
            model(step, past_key_values=cache)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_one_token_after_a_compiled_padded_prompt():
    """A compiled call leaves no note in the cache that there is padding."""
    torch.compiler.reset()
    model, ids = tiny_model(sliding_window=None, num_hidden_layers=1, local_chunk_sizes=[]), tokens(2, 10)
    mask = torch.tensor([[0] * 3 + [1] * 7, [1] * 10])
    cache = TNTCache(model.config)
    prompt = torch.compile(model.forward, backend="eager")
    prompt(input_ids=ids[:, :9], attention_mask=mask[:, :9], past_key_values=cache, use_cache=True)
    found = model(ids[:, 9:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids, attention_mask=mask).logits[:, 9:], atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_generate_with_a_compiled_forward():
    """`model.forward = torch.compile(model.forward)`: its positions count on, which is not a packed document."""
    torch.compiler.reset()
    model, ids = tiny_model(num_hidden_layers=1, local_chunk_sizes=[]), tokens(2, 9)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, disable_compile=True, **options)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)


class Half(torch.nn.Module):
    def forward(self, x):
        return x / 2


@torch.no_grad()
def test_a_parametrized_start_takes_effect_while_decoding():
    model, ids, cache = tiny_model(), tokens(2, 12), TNTCache(tiny_config())
    parametrize.register_parametrization(model.model.layers[0].memory.memories[1].weights, "0", Half())
    decoded = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(12)]
    torch.testing.assert_close(torch.cat(decoded, 1), model(ids).logits, atol=1e-9, rtol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_compiled_step_is_compiled_once():
    """Across chunk ends and resets. (The second graph: the library's static window counts its tokens in an integer,
    which becomes a symbol when it has changed.)"""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model, ids = tiny_model(torch.float32, num_hidden_layers=1), tokens(1, 30)
    full, cache = model(ids).logits, StaticCache(model.config, max_cache_len=30)
    model(ids[:, :9], past_key_values=cache)
    step = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    for t in range(9, 30):
        logits = step(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(logits[:, 0], full[:, t], atol=1e-4, rtol=0)
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("in_place", [True, False])
def test_the_first_token_behind_a_reset_is_projected_onto_its_key(in_place):
    """There q M is (q . u) u: its direction must not depend on how small q . u is."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(4000, 1, 1, 16, generator=g), torch.randn(4000, 1, 1, 16, generator=g)
    M, time = torch.zeros(4000, 1, 16, 16), torch.zeros(4000, dtype=torch.long)
    if in_place:
        unit = normalize(k, dim=-1)
        found = project_step(M, q[:, 0], unit[:, 0], 8, True, None, Clock.of(time, None))[:, None]
    else:
        found, _ = project_queries(q, k, reset_interval=8, initial_state=(M, time))
    q, k = q.double(), k.double()
    want = normalize((q * k).sum(-1, keepdim=True) * k, dim=-1)
    # float32 rounds at 6e-8; a product with the rounded u^T u is off by 1e-3 where q . u is small
    assert (found - want).abs().max() < 1e-6


def test_an_absent_token_leaves_the_projection_as_it_is():
    """Whatever it holds, and also where the row's next token begins a shard."""
    q, k, M = torch.randn(3, 1, 2, 16), torch.randn(3, 1, 1, 16), torch.randn(3, 1, 16, 16)
    time, mask = torch.tensor([5, 5, 8]), torch.tensor([[True], [False], [False]])
    options = {"reset_interval": 8, "mask": mask, "initial_state": (M, time), "output_final_state": True}
    found, after = project_queries(q, k, **options)
    assert torch.equal(after[1:], M[1:]) and not found[1:].any()
    assert found[0].any() and not torch.equal(after[0], M[0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"memory_value_norm": False}, {"memory_layernorm": True}],
    ids=["unit values", "raw values", "a LayerNorm"],
)
@torch.no_grad()
def test_decoded_tokens_are_as_surprising_as_read_ones(changes):
    """Those that are absent, in the middle of one row, are not."""
    model, ids, mask = tiny_model(**changes), tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    for name, x in model.named_parameters():
        if name.endswith("norm_bias"):  # with one, an absent token would be as surprising as the bias is long
            torch.nn.init.normal_(x, std=0.1)
    mask[1, 14:16] = 0
    expected, cache = model(ids, attention_mask=mask, use_cache=False, output_surprise=True), TNTCache(model.config)
    for t in range(20):
        step = {"attention_mask": mask[:, : t + 1], "past_key_values": cache, "output_surprise": True}
        found, present = model(ids[:, t, None], **step), mask[:, t].bool()
        torch.testing.assert_close(found.logits[present, 0], expected.logits[present, t], atol=1e-9, rtol=0)
        for a, b in zip(found.surprise, expected.surprise, strict=True):
            torch.testing.assert_close(a[:, 0], b[:, t], atol=1e-9, rtol=0)
            assert not a[~present].any()


@pytest.mark.parametrize("padding", [0, 3])
def test_attention_to_all_tokens_decodes_speculatively(padding):
    """It can be rolled back; what a window or a memory has let go cannot."""
    model, ids = tiny_model(memory_layers=[], sliding_window=None), tokens(1, 9).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    options = {"attention_mask": mask, "max_new_tokens": 25, "do_sample": False}
    wanted = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), wanted)
    other = tiny_model(memory_layers=[], sliding_window=None, num_hidden_layers=1)
    for assistant in (model, other):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), wanted)
    model.set_sliding_window(8)
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(ids, prompt_lookup_num_tokens=3, **options)


def test_masks_are_made_without_a_cache():
    model, ids = tiny_model(), tokens(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    made = model.create_masks_for_generate(model.config, model.get_input_embeddings()(ids), mask, None)
    with torch.no_grad():
        found = model(ids, attention_mask=made, use_cache=False, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
        wanted = model(ids, attention_mask=mask, use_cache=False)
    torch.testing.assert_close(found.logits[mask.bool()], wanted.logits[mask.bool()], rtol=0, atol=1e-12)


def test_without_local_memories_there_is_no_stage_2():
    model = tiny_model(local_chunk_sizes=[])
    with pytest.raises(ValueError, match=r"local_chunk_sizes=\[\]: has no local memories to train"):
        model.freeze_for_stage2()
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="local_chunk_sizes=1: the model has no local memories"):
        model.set_local_chunk_sizes(1)
    model.set_local_chunk_sizes([])


def test_what_is_no_list_of_layers_or_chunk_sizes_is_named():
    model = tiny_model(local_chunk_sizes=[2, 4])
    before = model.config.to_dict()
    for sizes in (None, 1.5, "2", {}, [None, 2]):
        with pytest.raises(
            ValueError, match=f"local_chunk_sizes={re.escape(repr(sizes))}: needs one positive integer"
        ):
            model.set_local_chunk_sizes(sizes)
    for layers in ("a", 9, [0, "b"], [[0]]):
        with pytest.raises(ValueError, match="are not among the layers .* that attend"):
            model.set_sliding_window(8, layers=layers)
    assert model.config.to_dict() == before
    for config in (None, 3, LlamaConfig()):
        with pytest.raises(ValueError, match=f"config={type(config).__name__}: must be the TNTConfig"):
            TNTCache(config)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields",
    [
        {"memory_grad_bound": 0.01, "memory_decay_target": "zero"},
        {"memory_max_lr": 0.01},
        {"memory_lr_scaling": "train_chunk"},
        {"memory_train_chunk_sizes": [256] * 3},
    ],
    ids=list,
)
def test_the_inner_optimiser_of_a_model_may_change(fields, tmp_path):
    """No weight depends on it, and whoever sees a memory diverge sets it on the model at hand."""
    model, ids = tiny_model(memory_decay=True), tokens(2, 30)
    before = model(ids).logits
    model.generate(ids, max_new_tokens=5)  # which prepares its steps
    for name, value in fields.items():
        setattr(model.config, name, value)
    model.save_pretrained(tmp_path)
    loaded = TNTForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert not torch.allclose(model(ids).logits, before)
    for read in (
        lambda x: x(ids).logits,
        lambda x: x.generate(ids, max_new_tokens=5, output_logits=True, return_dict_in_generate=True).logits[-1],
    ):
        assert torch.equal(read(model), read(loaded))
    name, kept = next(iter(fields.items()))
    for value in (-1.0, 0.0, math.inf, math.nan) if isinstance(kept, float) else ():
        cache = model(ids).past_key_values
        setattr(model.config, name, value)
        with pytest.raises(ValueError, match=f"{name} must be a positive finite number"):
            model(ids[:, :1], past_key_values=cache)
        setattr(model.config, name, kept)


def test_beams_that_end_are_not_padding():
    model, ids = tiny_model(), tokens(2, 8)
    options = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    end = model.generate(ids, **options)[0, 11].item()
    options |= {"eos_token_id": end, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


class EndsFirst(StoppingCriteria):
    """The first of two rows ends after two tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 10, input_ids.shape[1] >= 20])


def test_rows_that_end_without_an_end_token_get_no_padding():
    model, ids = tiny_model(), tokens(2, 8)
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    ends = StoppingCriteriaList([EndsFirst()])
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, stopping_criteria=ends), alone)


@pytest.mark.parametrize("changes", [{}, {"memory_decay": True, "memory_momentum": True, "memory_depth": 1}], ids=str)
@torch.no_grad()
def test_rows_of_a_model_cast_to_half_precision_reset_apart(changes):
    """Its initial weights are bfloat16, its state is float32."""
    model = tiny_model(torch.float32, **changes).to(torch.bfloat16)
    ids, mask = left_padded([tokens(13), tokens(6)])
    more = tokens(2, 12, seed=2)
    whole, valid = torch.cat([ids, more], 1), torch.cat([mask, mask.new_ones(2, 12)], 1)
    wanted, cache = model(whole, attention_mask=valid).logits[:, 13:], TNTCache(model.config)
    model(ids, attention_mask=mask, past_key_values=cache)
    steps = [
        model(more[:, i : i + 1], attention_mask=valid[:, : 14 + i], past_key_values=cache).logits for i in range(12)
    ]
    # bfloat16 keeps 8 bits, which two layers round a dozen times
    assert (torch.cat(steps, 1) - wanted).float().norm() < 0.05 * wanted.float().norm()
