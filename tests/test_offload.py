"""Weights that do not fit are fetched when they are needed, from the CPU's memory or from disk: no number changes. The
hooks that move inputs to weights which stay where they are cost no fast path."""

import copy

import pytest
import torch
from tiny import few_modes, later, tiny_model, tokens
from tiny_hosts import OPEN_LIZA, OPEN_TNT, tiny_host

from tnt_hf import TNTCache, TNTForCausalLM, memory_tnt
from tnt_hf.branch_tnt import TNTMemory
from tnt_hf.conversion import inject
from tnt_hf.convolution_tnt import TNTCausalConv, is_plain
from tnt_hf.gate_tnt import TNTGateLinear
from tnt_hf.native_step_tnt import NativeStep
from tnt_hf.state_tnt import LayerState, StateLayout
from tnt_hf.step_settings_tnt import StepSettings


accelerate = pytest.importorskip("accelerate", reason="pip install 'tnt-hf[train]'")

PLACES = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
PLACES |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


def same(offloaded, model):
    ids = tokens(2, 21)
    with torch.no_grad():
        assert torch.equal(offloaded(ids).logits, model(ids).logits)
    settings = {"max_new_tokens": 16, "do_sample": False}  # beyond a reset, which takes W_init anew
    assert torch.equal(offloaded.generate(ids, **settings), model.generate(ids, **settings))


@pytest.mark.filterwarnings("ignore::UserWarning")
@few_modes
def test_a_layer_on_disk(changes, tmp_path):
    model = tiny_model(torch.float32, **changes)
    model.save_pretrained(tmp_path / "model")
    offloaded = TNTForCausalLM.from_pretrained(
        tmp_path / "model", device_map=PLACES, offload_folder=tmp_path / "weights", attn_implementation="sdpa"
    )
    assert any(p.is_meta for p in offloaded.model.layers[1].parameters())
    same(offloaded.eval(), TNTForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa").eval())


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model(torch.float32),
        lambda: inject(tiny_host("llama", torch.float32), OPEN_TNT),
        lambda: inject(tiny_host("llama", torch.float32), OPEN_LIZA),
    ],
    ids=["TNT", "injected TNT", "injected LiZA"],
)
def test_every_weight_is_fetched(make):
    model = make().eval()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in offloaded.parameters())
    same(offloaded, model)


@pytest.fixture
def calls(monkeypatch):
    """How often a layer's step in place and its C ran, and the recurrence token by token."""
    found = {"_step": 0, "__call__": 0, "token": 0}

    def counted(own, name):
        def call(*args):
            found[name] += 1
            return own(*args)

        return call

    for owner, name in ((TNTMemory, "_step"), (NativeStep, "__call__"), (memory_tnt, "token")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name))
    return found


@torch.no_grad()
def decode(model, calls):
    """Logits of a prompt and 18 tokens behind it, over a reset, and how many of which calls they took."""
    ids, before = tokens(2, 24), dict(calls)
    cache = TNTCache(model.config)
    logits = [model(piece, past_key_values=cache).logits for piece in ids.split([6, *[1] * 18], 1)]
    return torch.cat(logits, 1), {name: n - before[name] for name, n in calls.items()}


def dispatched(model, append: int = 0):
    """A copy as on several GPUs: a hook around every module, and as many again behind each."""
    hooked = accelerate.dispatch_model(copy.deepcopy(model), dict.fromkeys(PLACES, "cpu"), force_hooks=True)
    modules = [module for module in hooked.modules() if hasattr(module, "_hf_hook")]
    for _ in range(append):
        for module in modules:
            hook = accelerate.hooks.AlignDevicesHook(torch.device("cpu"))
            accelerate.hooks.add_hook_to_module(module, hook, append=True)
    return hooked


@pytest.mark.parametrize("append", [*later(0), 2], ids=["one hook", "hooks in a row"])
@pytest.mark.parametrize("how", ["auto", *later("chunk")])
@few_modes
def test_hooks_that_leave_weights_where_they_are_cost_no_fast_path(calls, changes, how, append):
    """The same calls and the same bits; the step in place takes every token, and the recurrence none."""
    model = tiny_model(torch.float32, memory_implementation=how, **changes)
    hooked = dispatched(model, append)
    unit = hooked.model.layers[1].memory.memories[0]
    assert all("forward" in vars(module) for module in (unit, unit.weights, unit.lr_proj))
    (want, plain), (got, found) = decode(model, calls), decode(hooked, calls)
    assert torch.equal(got, want)
    assert found == plain and found["token"] == 0
    assert found["_step"] >= 18 * len(model.config.memory_layer_indices)


def offload(module, **_):
    accelerate.hooks.remove_hook_from_module(module)
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(torch.device("cpu"), offload=True))


def offload_too(module, **_):
    hook = accelerate.hooks.AlignDevicesHook(torch.device("cpu"), offload=True)
    accelerate.hooks.add_hook_to_module(module, hook, append=True)


def replace(module, note):
    forward = module.forward
    module.forward = lambda *args, **kwargs: note() or forward(*args, **kwargs)


def replace_inside(module, note):
    accelerate.hooks.remove_hook_from_module(module)
    replace(module, note)
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(torch.device("cpu")))


def hook_of_torch(module, note):
    module.register_forward_hook(lambda *_: note())


def pre_hook_of_torch(module, note):
    module.register_forward_pre_hook(lambda *_: note())


def hook_of_somebody(module, note):
    class Hook(accelerate.hooks.AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            note()
            return super().pre_forward(module, *args, **kwargs)

    accelerate.hooks.add_hook_to_module(module, Hook(torch.device("cpu")), append=True)


AROUND = [offload, offload_too, replace, replace_inside, hook_of_torch, pre_hook_of_torch, hook_of_somebody]


@pytest.mark.parametrize("part", ["memories.0", "memories.0.weights", *later("memories.0.lr_proj", "q_conv")])
@pytest.mark.parametrize("around", AROUND)
def test_anything_else_around_a_module_is_called_for_every_token(calls, around, part):
    """Also beside hooks that could be passed over: what fetches weights, and what somebody put there."""
    model, noted = tiny_model(torch.float32), []
    hooked = dispatched(model)
    module = hooked.model.layers[1].memory.get_submodule(part)
    around(module, note=lambda: noted.append(part))
    want, _ = decode(model, calls)
    got, found = decode(hooked, calls)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)  # C and torch differ by rounding
    if fetched := around in (offload, offload_too):
        assert all(x.is_meta for x in module.parameters(recurse=False))
    else:
        assert len(noted) == 19
    # C and the step go on in the other layer; in this one, where what is changed is called by them
    by_token = fetched or part in ("memories.0", "memories.0.weights")
    assert found["token"] == (18 * 3 if by_token else 0) and found["_step"] == (18 if by_token else 36)
    assert found["__call__"] == (36 if part == "q_conv" and not fetched else 18)


def test_inputs_that_a_hook_would_move_are_left_to_it():
    """Also a mask, which the step in place reads beside the tokens."""
    memory = dispatched(tiny_model()).model.layers[0].memory
    conv, gate = memory.q_conv, memory.memories[0].lr_proj
    here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
    for module, kind in ((conv, TNTCausalConv), (gate, TNTGateLinear)):
        assert is_plain(module, kind, here) and not is_plain(module, kind, here, elsewhere)
    x, cache = torch.randn(2, 1, 32, dtype=torch.float64), TNTCache(memory.config)
    with torch.no_grad():
        memory(x, None, cache)
        state = LayerState.read(cache, 0, StateLayout.of(memory.config))
        settings = StepSettings.of(memory.config)
        assert memory._steps_in_place(state, x.dtype, (x, None), settings)
        assert not memory._steps_in_place(state, x.dtype, (x, elsewhere), settings)
