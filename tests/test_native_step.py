"""One decoded token, or a few, in C (`native_step_tnt`) is what `branch_tnt` computes in operations of torch, whatever
the model; and where it cannot be, torch computes it."""

import copy
import io
from itertools import cycle

import pytest
import torch
from tiny import FEW, MODES, at_once, left_padded, tiny_model, tokens
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from tnt_hf import native_step_tnt
from tnt_hf.branch_tnt import FEW_TOKENS
from tnt_hf.gate_tnt import TNTGateLinear, TNTRMSNorm
from tnt_hf.native_build_tnt import unavailable
from tnt_hf.native_step_tnt import NativeStep, native_parameters
from tnt_hf.state_tnt import LayerState, StateLayout
from tnt_hf.step_settings_tnt import StepSettings


pytestmark = pytest.mark.skipif(unavailable(torch.float32) is not None, reason="no native code")
EXACT = 1e-12  # of float64 numbers near 1, whose sums are taken in another order
STEPS = 20  # cross every boundary of chunks and shards
# What `MODES` does not have, together.
MORE = {
    "three layers": {"memory_depth": 3, "memory_activation": "gelu", "memory_grad_bound": 0.5},
    "forgetting to 0": {"memory_decay": True, "memory_decay_target": "zero", "memory_depth": 2},
    "all at once, read late": {
        "memory_momentum": True, "memory_decay": True, "memory_layernorm": True, "memory_depth": 2,
        "memory_grad_bound": 1.0, "memory_value_norm": False, "local_chunk_sizes": [1],
    },
    "projected quadratic keys": {"memory_feature_map": "quadratic", "qk_projection": "shard", "memory_depth": 1},
    "odd widths": {"head_dim": 10, "memory_head_dim": 10, "memory_conv_kernel": 2},
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How often a layer's token was computed in C."""
    counted, call = [], NativeStep.__call__

    def counting(*args):
        counted.append(1)
        return call(*args)

    monkeypatch.setattr(NativeStep, "__call__", counting)
    return counted


def awake(model):
    """Gates that do something: those that start at zero are opened, and tokens differ in theirs."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if any(x in name for x in (".memories.", ".gate.", "memory.norm.", "_conv.")):
                x.add_(0.2 * torch.randn(x.shape, generator=g, dtype=x.dtype))
    return model


ROWS = [tokens(9 + STEPS), tokens(4 + STEPS, seed=2), tokens(7 + STEPS, seed=3)]


@torch.no_grad()
def decode(model, how: str, rows=ROWS, absent=(), surprise: bool = True, pieces=(1,)) -> list[torch.Tensor]:
    """Logits and `surprise` of `STEPS` tokens of rows that began at different times, in `pieces` of so many tokens,
    then all states. At the steps `absent` the first row has no token."""
    model.config.memory_implementation = how
    ids, mask = left_padded(rows)
    prompt = ids.shape[1] - STEPS
    for step in absent:
        mask[0, prompt + step] = 0
    cache = model(ids[:, :prompt], attention_mask=mask[:, :prompt]).past_key_values
    found, begin, sizes = [], prompt, cycle(pieces)
    while begin < ids.shape[1]:
        piece = slice(begin, begin := begin + next(sizes))
        seen = {"attention_mask": mask[:, :begin], "past_key_values": cache}
        out = model(ids[:, piece], output_surprise=surprise, **seen)
        found += [out.logits * mask[:, piece, None], *(out.surprise or ())]
    for layer in cache.layers:
        if getattr(layer, "recurrent_states", None):
            found += [*layer.recurrent_states.values(), *(x for x in layer.conv_states.values() if x is not None)]
    return found


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = EXACT) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if x.numel():
            assert (x - y).abs().max() <= tolerance * (1 + y.abs().max()), (x - y).abs().max()


@pytest.mark.parametrize("changes", at_once(MODES | MORE, (*FEW, *MORE)))
def test_it_is_what_torch_computes(calls, changes):
    """Logits, surprise and every state, in float64, with padding and an absent token."""
    model = awake(tiny_model(**changes))
    want = decode(model, "chunk", absent=(6,))
    assert not calls
    got = decode(model, "auto", absent=(6,))
    assert len(calls) == STEPS * len(model.config.memory_layer_indices)
    assert_same(got, want)


@pytest.mark.parametrize("changes", at_once(MODES | MORE, (*FEW, *MORE)))
def test_so_are_a_few_tokens_in_one_call(calls, changes):
    model, how = awake(tiny_model(**changes)), {"absent": (1, 6), "pieces": (3, FEW_TOKENS, 1)}
    want = decode(model, "chunk", **how)
    assert not calls
    got = decode(model, "auto", **how)
    assert len(calls) == 3 * len(model.config.memory_layer_indices)
    assert_same(got, want)


def test_more_than_a_few_are_whole_chunks(calls):
    model, pieces = awake(tiny_model()), (FEW_TOKENS + 1, STEPS - FEW_TOKENS - 1)
    assert_same(decode(model, "auto", pieces=pieces), decode(model, "chunk", pieces=pieces))
    assert len(calls) == 2


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_few_tokens_are_to_the_bit_what_they_are_one_by_one(dtype):
    model = awake(tiny_model(dtype, memory_momentum=True, memory_decay=True))
    memory, layout, T = model.model.layers[0].memory, StateLayout.of(model.config), FEW_TOKENS
    ids, mask = left_padded(ROWS)
    cache = model(ids, attention_mask=mask).past_key_values
    x = torch.randn(len(ids), T, model.config.hidden_size, generator=torch.Generator().manual_seed(5), dtype=dtype)
    present = torch.rand(len(ids), T, generator=torch.Generator().manual_seed(6)) < 0.8
    found = []
    for size in (1, T):
        state = LayerState.read(copy.deepcopy(cache), 0, layout)
        step, parts = NativeStep(memory, layout, StepSettings.of(model.config), (len(ids), size), False), []
        shared = [f(x) for f in (memory.q_proj, memory.k_proj, memory.v_proj)]
        parameters = native_parameters(memory, "f", "native", shared, dtype)
        for piece in (slice(t, t + size) for t in range(0, T, size)):
            tokens_here = [y[:, piece] for y in shared]
            parts.append(step(memory, parameters, x[:, piece], tokens_here, state, present[:, piece], True))
        states = [state.time, state.conv, *state.projections.values()]
        states += [
            y for own in state.memories for kind in (own.weights, own.chunk_weights, own.momentum) for y in kind
        ]
        found.append([torch.cat(y, 1) for y in zip(*parts)] + states)
    for one_by_one, together in zip(*found, strict=True):
        assert torch.equal(one_by_one, together)


def test_float32_is_no_further_from_the_truth_than_torch_s():
    model = awake(tiny_model(torch.float32))
    errors = {}
    truth = decode(copy.deepcopy(model).double(), "chunk")
    for how in ("chunk", "native"):
        found = decode(model, how)
        pairs = [(x, y) for x, y in zip(found, truth) if y.is_floating_point()]
        errors[how] = max(((x - y).norm() / y.norm().clamp_min(1e-3)).item() for x, y in pairs)
    assert errors["native"] <= max(2 * errors["chunk"], 2e-6), errors


def test_a_model_in_bfloat16_has_its_memories_in_c(calls):
    """Half precision convolves in torch; W_init and the gates are float32, as `from_pretrained` loads them."""
    model = awake(tiny_model(torch.float32))
    for name, x in model.named_parameters():
        if ".memories." not in name and not name.endswith("gate.scale"):
            x.data = x.data.bfloat16()
    want, got = decode(model, "chunk"), decode(model, "auto")
    assert calls
    # 8 bits of a number: both round it alike, unless it lies between two
    assert_same(got, want, 2**-6)


@pytest.mark.long
def test_neither_threads_nor_other_rows_change_a_bit(monkeypatch):
    model, threads = awake(tiny_model(torch.float32)), torch.get_num_threads()
    alone = [x[:1] for x in decode(model, "native", [ROWS[0]])]
    together = [x[:1] for x in decode(model, "native", [ROWS[0]] * 3)]
    monkeypatch.setattr(native_step_tnt, "WORK", 1)
    torch.set_num_threads(2)
    try:
        shared_out = [x[:1] for x in decode(model, "native", [ROWS[0]] * 3)]
    finally:
        torch.set_num_threads(threads)
    for x, y in zip(together, shared_out, strict=True):
        assert torch.equal(x, y)
    assert_same(alone, together, 1e-5)  # what the library multiplies before may be rounded otherwise


@torch.no_grad()
def test_an_absent_token_leaves_a_row_as_it_was():
    model = awake(tiny_model(memory_momentum=True, memory_decay=True, memory_implementation="native"))
    cache = model(tokens(2, 7)).past_key_values
    states = [x for layer in cache.layers for x in (*layer.recurrent_states.values(), layer.conv_states[0])]
    before = [x.clone() for x in states]
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 7] = 0
    model(tokens(2, 1), attention_mask=mask, past_key_values=cache)
    for x, y in zip(states, before):
        assert torch.equal(x[0], y[0]) and not torch.equal(x[1], y[1])


@torch.no_grad()
def test_chunk_sizes_may_change_between_two_calls(calls):
    model = awake(tiny_model())
    for sizes in ([2, 4], [1, 1], [8, 2]):
        model.config.local_chunk_sizes = sizes
        assert_same(decode(model, "native"), decode(model, "chunk"))
    assert calls


def test_a_model_that_has_decoded_can_be_copied_and_pickled(calls):
    model = awake(tiny_model())
    want = decode(model, "native", surprise=False)  # the library records that by a hook, which cannot be pickled
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_same(decode(other, "native", surprise=False), want)
    assert len(calls) == 3 * STEPS * 2


def hook(model):
    model.model.layers[0].memory.memories[0].lr_proj.register_forward_hook(lambda module, args, y: y + 1)


def patch(model):
    gate = model.model.layers[0].memory.memories[0].lr_proj
    forward = gate.forward
    gate.forward = lambda x: forward(x) - 1


def hook_the_norm(model):
    model.model.layers[0].memory.norm.register_forward_hook(lambda module, args, y: 2 * y)


class Half(nn.Module):
    def forward(self, x):
        return x / 2


def change_the_gates(model):
    unit = model.model.layers[0].memory.memories[0]
    gates = unit.gates
    unit.gates = lambda *args: [None if x is None else x / 2 for x in gates(*args)]


def parametrize_gain(model):
    parametrize.register_parametrization(model.model.layers[0].memory.memories[0], "norm_weight", Half())


def parametrize_bias(model):
    parametrize.register_parametrization(model.model.layers[0].memory.memories[0], "norm_bias", Half())


class Around(nn.Module):
    """As peft puts one around what it trains as a whole."""

    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "unit" else getattr(self.unit, name)

    def forward(self, *args, **kwargs):
        o, *rest = self.unit(*args, **kwargs)
        return 2 * o, *rest


def wrap(model):
    memories = model.model.layers[0].memory.memories
    memories[0] = Around(memories[0])


AROUND = [hook, hook_the_norm, patch, change_the_gates, parametrize_gain, parametrize_bias, wrap]


@pytest.mark.parametrize("around", AROUND)
def test_what_is_put_around_a_module_takes_effect(calls, around):
    """In that layer torch computes the token; in the other one C does."""
    model, plain = (awake(tiny_model(memory_layernorm=True)) for _ in range(2))
    plain = decode(plain, "native")
    del calls[:]
    around(model)
    got, want = decode(model, "native"), decode(model, "chunk")
    assert len(calls) == STEPS
    assert_same(got, want)
    assert (got[0] - plain[0]).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["lr_proj.weight", "lr_proj.bias", "norm_weight", "norm_bias", "weights.0"])
def test_weights_that_are_no_parameters_are_read(calls, name):
    """FSDP1 with `use_orig_params=False` gathers them into plain attributes. In that layer torch computes the token;
    W_init alone is read as it stands."""
    model = awake(tiny_model(memory_layernorm=True))
    path, _, last = f"memories.1.{name}".rpartition(".")
    module = model.model.layers[0].memory.get_submodule(path)
    vars(module)[last] = module._parameters.pop(last)
    got, want = decode(model, "native"), decode(model, "chunk")
    assert len(calls) == STEPS * (1 + name.startswith("weights"))
    assert_same(got, want)


@pytest.mark.parametrize("kind", [TNTGateLinear, TNTRMSNorm])
@pytest.mark.parametrize("how", ["hook of all modules", "another forward of the class"])
def test_what_is_put_around_a_class_takes_effect(calls, monkeypatch, kind, how):
    model = awake(tiny_model())
    plain, forward = decode(model, "native"), kind.forward
    del calls[:]
    if how == "another forward of the class":
        monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) + 1)
        got, want = decode(model, "native"), decode(model, "chunk")
    else:
        with register_module_forward_hook(lambda module, args, y: y + 1 if type(module) is kind else None):
            got, want = decode(model, "native"), decode(model, "chunk")
    assert not calls and (got[0] - plain[0]).abs().max() > 1e-6
    assert_same(got, want)


def test_parameters_lie_as_they_like(calls):
    """Columns of a matrix, as `load_state_dict(assign=True)` may leave them, and one number for all channels."""
    model = awake(tiny_model())
    first, second = (layer.memory.norm.weight for layer in model.model.layers)
    first.data = torch.stack([first.data, 3 * first.data], 1)[:, 0]
    second.data = second.data[:1].expand(len(second))
    assert_same(decode(model, "native"), decode(model, "chunk"))
    assert len(calls) == 2 * STEPS


@torch.no_grad()
def test_another_thread_may_decode_other_rows_meanwhile(monkeypatch):
    """Exactly between the question whether the last token's call fits and that call."""
    model, fits = awake(tiny_model()), NativeStep.fits
    few, many = tokens(1, 10), tokens(4, 10)
    want, other = model(few).logits[:, 9:], model(many[:, :9]).past_key_values
    cache = model(few[:, :8]).past_key_values
    model(few[:, 8:9], past_key_values=cache)

    def meanwhile(self, *args):
        found = fits(self, *args)
        monkeypatch.setattr(NativeStep, "fits", fits)
        model(many[:, 9:], past_key_values=other)
        return found

    monkeypatch.setattr(NativeStep, "fits", meanwhile)
    assert_same([model(few[:, 9:], past_key_values=cache).logits], [want])


@torch.no_grad()
def test_a_model_may_change_its_precision_between_two_tokens():
    model, ids = awake(tiny_model(torch.float32)), tokens(2, 9)
    want = model(ids).logits[:, 7:]
    # of float32; of bfloat16, whose last bit is 2^-8 of logits up to 2, over two layers. Without a memory: 1.5
    for dtype, close in ((torch.float64, 1e-5), (torch.bfloat16, 0.06)):
        cache = model.float()(ids[:, :7]).past_key_values
        got = [model.to(dtype)(ids[:, t : t + 1], past_key_values=cache).logits for t in (7, 8)]
        assert got[1].dtype == dtype
        torch.testing.assert_close(torch.cat(got, 1).float(), want, rtol=0, atol=close)


def test_a_hook_on_a_convolution_takes_effect(calls):
    model = awake(tiny_model())
    model.model.layers[0].memory.k_conv.register_forward_hook(lambda module, args, y: -y)
    got, want = decode(model, "native"), decode(model, "chunk")
    assert len(calls) == 2 * STEPS
    assert_same(got, want)


@pytest.mark.parametrize("how", ["chunk", "no compiler", "gradients", "W_init in half precision"])
def test_where_torch_computes_the_token(calls, monkeypatch, how):
    model = awake(tiny_model(torch.float32))
    if how == "no compiler":
        monkeypatch.setattr(native_step_tnt, "runs_native", lambda *args: False)
    if how == "W_init in half precision":
        model.bfloat16()
    if how == "gradients":
        cache = model(tokens(1, 5)).past_key_values
        model(tokens(1, 1), past_key_values=cache).logits.sum().backward()
    else:
        decode(model, "chunk" if how == "chunk" else "auto")
    assert not calls


def test_the_layer_s_call_is_made_once(monkeypatch):
    made, build = [], NativeStep.__init__
    monkeypatch.setattr(NativeStep, "__init__", lambda self, *args: made.append(1) or build(self, *args))
    model = awake(tiny_model())
    decode(model, "native")
    decode(model, "native")
    assert len(made) == len(model.model.layers)


@torch.no_grad()
def test_a_tail_that_autocast_left_in_half_precision(calls):
    """The prompt under autocast, the next tokens without: C must not write its numbers into the tail."""
    found = {}
    for how in ("chunk", "native"):
        model = awake(tiny_model(torch.float32, memory_implementation=how))
        with torch.autocast("cpu", torch.bfloat16):
            cache = model(tokens(2, 9)).past_key_values
        assert cache.layers[0].conv_states[0].dtype == torch.bfloat16
        found[how] = [model(tokens(2, 1, seed=t), past_key_values=cache).logits for t in range(5)]
    assert calls
    assert_same(found["native"], found["chunk"], 1e-4)  # rounding of float32, and of the tail where it is between


@torch.no_grad()
@pytest.mark.parametrize("slot", ["weights", "chunk_weights", "momentum", "projection", "tail", "time"])
def test_a_state_of_another_size_is_refused(slot):
    """C writes into it: nothing is written, and no memory beside it."""
    model = awake(tiny_model(memory_momentum=True))
    memory, layout = model.model.layers[0].memory, StateLayout.of(model.config)
    cache = model(tokens(2, 9)).past_key_values
    state = LayerState.read(cache, 0, layout)
    holder, name = {
        "projection": (state.projections, layout.intervals[0]),
        "tail": (vars(state), "conv"),
        "time": (vars(state), "time"),
    }.get(slot) or (getattr(state.memories[1], slot), 0)
    holder[name] = short = holder[name][:1].clone()
    before, x = short.clone(), torch.zeros(2, 1, model.config.hidden_size, dtype=torch.float64)
    shared = [f(x) for f in (memory.q_proj, memory.k_proj, memory.v_proj)]
    parameters = native_parameters(memory, "f", "native", shared, torch.float64)
    with pytest.raises(ValueError, match=r"state must hold \d+ numbers of .*, got \d+"):
        NativeStep(memory, layout, StepSettings.of(model.config), (2, 1), False)(
            memory, parameters, x, shared, state, None, False
        )
    assert torch.equal(short, before)
