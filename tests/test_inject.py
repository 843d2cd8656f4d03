"""Memory inside live causal LMs: silent when closed, the operator it says it is when open, no trace after unload."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import tokens
from tiny_hosts import CLOSED, HOSTS, MODES, OPEN_LIZA, OPEN_TNT, OPENED, attentions, hosts, layouts, padded, tiny_host
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from tnt_hf import TNTConfig, TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint, inject, unload
from tnt_hf.conversion.architectures import ARCHITECTURES, Heads
from tnt_hf.conversion.inject import set_max_self_attn_length
from tnt_hf.conversion.injected_attention import narrow
from tnt_hf.conversion.injection_config import LiZAConfig, TNTInjectionConfig, injection_from_dict
from tnt_hf.conversion.linear_attention import feature_map, linear_attention
from tnt_hf.conversion.liza import LiZAMemory
from tnt_hf.conversion.schedules import mag_modules


# float64 models, but the hosts' norms, RoPE and softmax round to float32 on the way.
CLOSE = {"rtol": 0, "atol": 1e-5}
EXACT = {"rtol": 0, "atol": 1e-12}  # float64 throughout: the same sums, in another order
closed = pytest.mark.parametrize("config", CLOSED.values(), ids=CLOSED.keys())
opened = pytest.mark.parametrize("config", OPENED.values(), ids=OPENED.keys())
learned = pytest.mark.parametrize("config", [MODES["gated"], OPEN_TNT], ids=["liza", "tnt"])
modes = pytest.mark.parametrize("config", MODES.values(), ids=MODES.keys())


@torch.no_grad()
def logits(model, input_ids, **kwargs):
    return model(input_ids, **kwargs).logits


def attention_modules(model) -> dict[int, torch.nn.Module]:
    row = ARCHITECTURES[model.config.model_type]
    return row.attention_modules(row.base_of(model))


def double(kind="llama", **changes):
    return tiny_host(kind, torch.float64, **changes)


# --- closed: the source, bit for bit --------------------------------------------------------------------------------


@hosts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_closed_memory_is_the_source_bit_for_bit(kind, dtype):
    calls = [{"input_ids": tokens(2, T)} for T in (1, 7, 33)] + [padded([tokens(13), tokens(4, seed=2)])]
    for attn in attentions(kind) if dtype == torch.float32 else attentions(kind)[:1]:
        model = tiny_host(kind, dtype, attn)
        expected = [logits(model, **call) for call in calls]
        for config in CLOSED.values():
            inject(model, config)
            assert all(torch.equal(logits(model, **call), wanted) for call, wanted in zip(calls, expected))
            unload(model)


GATED = LiZAConfig(operator="gated_delta_rule", gate="learned", weight=0.0)
NAN = {**CLOSED, "gated": GATED, "mix": TNTInjectionConfig(memory_gate="mix")}


@pytest.mark.parametrize("config", NAN.values(), ids=NAN.keys())
def test_nan_behind_a_closed_gate_is_silent(config):
    model, ids = tiny_host("llama"), tokens(2, 9)
    expected = logits(model, ids)
    inject(model, config)
    with torch.no_grad():
        for attention in attention_modules(model).values():
            for parameter in attention.memory.parameters():
                if not torch.equal(parameter, torch.zeros_like(parameter)):
                    parameter.fill_(float("nan"))
    if config.kind == "liza":
        model.model.layers[0].self_attn.memory.register_forward_pre_hook(
            lambda _, args: (*args[:3], args[3] * float("nan"), *args[4:])
        )
    assert torch.equal(logits(model, ids), expected)


@closed
def test_a_closed_memory_leaves_the_gradients_of_the_source(config):
    model, ids = tiny_host("llama"), tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    inject(model, config)(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if ".memory." not in name:
            assert torch.equal(parameter.grad, expected[name]), name


# --- open: the operator it says it is -------------------------------------------------------------------------------


def captured(module, model, ids):
    """The arguments `module` gets, and what it returns."""
    seen = []
    handle = module.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args, output)), with_kwargs=True
    )
    logits(model, ids)
    handle.remove()
    return seen[0]


@hosts
def test_liza_mixes_the_operator_on_attentions_own_q_k_v(kind):
    model, ids = double(kind), tokens(2, 7)
    plain = logits(model, ids)
    inject(model, LiZAConfig(weight=0.3, layers=[1], gate="pooled"))
    (attn, query, key, value, _), output = captured(attention_modules(model)[1].memory, model, ids)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q_map, k_map = (feature_map(x, "silu-l2") for x in (q, k))
    o, _ = linear_attention(q_map, k_map, v, beta=torch.sigmoid(k.mean(-1)), implementation="recurrent")
    w = float(torch.tensor(0.3))  # as float32 has it
    torch.testing.assert_close(output, w * o + (1 - w) * attn, **EXACT)
    assert (logits(model, ids) - plain).abs().max() > 0.1


@hosts
def test_own_projections_are_copies_of_the_layers_q_k_v(kind):
    """Position 0 is not rotated, and heads are compared without bias and up to a norm's factor."""
    model = double(kind)
    if kind == "gpt2":
        torch.nn.init.zeros_(model.transformer.wpe.weight)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.constant_(parameter, 0.0 if "bias" in name or kind == "gemma3_text" else 1.0)
    if kind in ("phi", "persimmon"):  # their LayerNorm on q and k removes their mean
        for attention in attention_modules(model).values():
            attention.qk_layernorm = False
    if kind == "olmo":
        model.config.clip_qkv = None
    inject(model, TNTInjectionConfig(layers=[1]))
    memory = attention_modules(model)[1].memory
    (_, query, key, value, hidden_states), _ = captured(memory, model, tokens(3, 1))
    heads = Heads.of(model.config, 1)
    assert query.shape[1:] == (heads.query, 1, heads.head_dim) and key.shape[1] == heads.key_value
    for proj, expected in ((memory.q_proj, query), (memory.k_proj, key), (memory.v_proj, value)):
        projected = proj(hidden_states).view(3, 1, -1, heads.head_dim).transpose(1, 2)
        # float32 inside the hosts' norms
        torch.testing.assert_close(F.normalize(projected, dim=-1), F.normalize(expected, dim=-1), rtol=0, atol=1e-6)


def test_an_injected_llama_is_the_standalone_tnt_model():
    """The weights under `self_attn.memory` are those under `memory` of a TNT model, and so are the logits."""
    model = double(attention_bias=False)
    fields = {name: getattr(model.config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    inject(model, OPEN_TNT)
    memory = model.model.layers[0].self_attn.memory.config
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "global_chunk_size")
    fields |= {name: getattr(memory, name) for name in (*names, "local_chunk_sizes", "local_reset_interval")}
    fields |= {name: getattr(memory, name) for name in vars(OPEN_TNT) if name.startswith(("memory_", "qk_"))}
    tnt = TNTForCausalLM(TNTConfig(**fields, sliding_window=None)).double().eval()
    tnt.load_state_dict({name.replace("self_attn.memory", "memory"): x for name, x in model.state_dict().items()})
    kwargs = padded([tokens(33), tokens(20, seed=2)])
    valid = kwargs["attention_mask"].bool()
    torch.testing.assert_close(logits(model, **kwargs)[valid], logits(tnt, **kwargs)[valid], **CLOSE)


def test_a_memory_starts_as_in_a_conversion(tmp_path):
    """Same seed, same tensors: injecting and exporting, or converting, is the same start."""
    model = tiny_host("llama", attention_bias=False)
    model.save_pretrained(tmp_path / "source")
    sizes = {"global_chunk_size": 8, "local_chunk_sizes": [4]}
    convert_checkpoint(tmp_path / "source", tmp_path / "out", seed=3, progress=False, **sizes)
    converted = {}
    for shard in (tmp_path / "out").glob("*.safetensors"):
        converted |= {name: x for name, x in load_file(shard).items() if ".memory." in name}
    inject(model, TNTInjectionConfig(**sizes), seed=3)
    injected = {n.replace("self_attn.", ""): x for n, x in model.state_dict().items() if ".memory." in n}
    assert injected.keys() == converted.keys() and all(torch.equal(injected[n], converted[n]) for n in injected)


# --- a window for the base attention --------------------------------------------------------------------------------


def window_mask(valid, window, attn, dtype):
    """`[B, 1, T, T]`, entry by entry: key j is one of the last `window` tokens up to query i, and no padding."""
    B, T = valid.shape
    mask = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for b in range(B):
        for i in range(T):
            for j in range(T):
                mask[b, 0, i, j] = bool(valid[b, j]) and 0 <= i - j < window
    return mask if attn == "sdpa" else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@hosts
def test_the_base_attention_can_be_narrowed(kind):
    cases = [padded([tokens(T), tokens(T - T // 3, seed=2)]) for T in (1, 3, 11)]
    cases += [{"input_ids": tokens(2, 11), "position_ids": torch.arange(11)[None].expand(2, -1)}]
    valid = [case.get("attention_mask", torch.ones_like(case["input_ids"])).bool() for case in cases]
    for attn in attentions(kind):
        model = tiny_host(kind, attn=attn, **({"sliding_window": 64} if "sliding_window" in HOSTS[kind] else {}))
        masks = [window_mask(x, 4, attn, torch.float32) for x in valid]
        if others := set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}:
            masks = [{"full_attention": m, **dict.fromkeys(others, x.long())} for m, x in zip(masks, valid)]
        expected = [logits(model, **{**case, "attention_mask": mask}) for case, mask in zip(cases, masks)]
        inject(model, LiZAConfig(weight=0.0, max_self_attn_length=4))
        for case, seen, wanted in zip(cases, valid, expected):
            # float32, as eager attention in float64 has no lowest number for its float32 softmax
            torch.testing.assert_close(logits(model, **case)[seen], wanted[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("T, L", [(1, 1), (1, 9), (4, 9), (9, 9), (5, 5)])
def test_narrowing_without_a_mask(T, L, additive):
    """Against a loop over queries, for calls that bring T new tokens after L - T earlier ones."""
    query, key, value = torch.randn(3, 2, 1, L, 4, dtype=torch.float64)
    k, v, mask = narrow(query[:, :, L - T :], key, value, None, window=4, additive=additive)
    scores = query[:, :, L - T :] @ k.mT
    if mask is not None:
        assert (mask.dtype == torch.bool) != additive
        scores = scores + mask if additive else scores.masked_fill(~mask, -torch.inf)
    for i in range(T):
        end = L - T + i + 1
        first = max(0, end - 4)
        weights = torch.softmax(query[:, :, end - 1, None] @ key[:, :, first:end].mT, -1)
        found = torch.softmax(scores[:, :, i, None], -1) @ v
        torch.testing.assert_close(found, weights @ value[:, :, first:end], **EXACT)


def test_the_window_can_be_scheduled():
    model, ids = tiny_host("llama"), tokens(2, 12)
    source = logits(model, ids)
    inject(model, LiZAConfig(weight=0.0, max_self_attn_length=4))
    narrow = logits(model, ids)
    set_max_self_attn_length(model, None)
    assert torch.equal(logits(model, ids), source) and not torch.equal(narrow, source)
    set_max_self_attn_length(model, 4)
    assert torch.equal(logits(model, ids), narrow) and model.config.tnt_injection["max_self_attn_length"] == 4
    with pytest.raises(ValueError, match="max_self_attn_length=0"):
        set_max_self_attn_length(model, 0)


def test_attention_drops_out_in_blocks_and_where_the_host_trains():
    """A row that is long enough for a window in blocks; memory is injected in the mode that the host is in."""
    ids, window = tokens(1, 1200), LiZAConfig(weight=0.0, max_self_attn_length=64)
    model = inject(tiny_host("llama", attention_dropout=0.5, num_hidden_layers=1), window)
    assert not any(module.training for module in model.modules())
    for training in (False, True):
        torch.manual_seed(0)
        first, second = (logits(model.train(training), ids, use_cache=False) for _ in range(2))
        assert torch.equal(first, second) is not training


# --- training -------------------------------------------------------------------------------------------------------


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@layouts
@learned
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_gradient_checkpointing_changes_nothing(kind, config, reentrant):
    model, ids = inject(double(kind), config).train(), tokens(2, 17)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss, expected = gradients(model, ids)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again, found = gradients(model, ids)
    torch.testing.assert_close(again, loss, **EXACT)
    assert found.keys() == expected.keys() and any(".memory." in name for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **EXACT)


@learned
def test_what_the_memory_learns_from(config):
    model = inject(tiny_host("llama"), config)
    frozen = inject(tiny_host("llama").requires_grad_(False), config)
    _, found = gradients(model, tokens(2, 17))
    parameters = {name: p for name, p in model.named_parameters() if ".memory." in name}
    assert all(found[name].abs().max() > 0 for name in parameters if ".memories.0.weights" not in name)
    assert [name for name, p in frozen.named_parameters() if p.requires_grad] == list(parameters)


def test_gradient_accumulation_scales_the_loss_right(tmp_path):
    """Four batches of one are one batch of four: the ratio of the reported losses and gradient norms is 1."""
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 9)]
    records = []
    for batch in (4, 1):
        arguments = TrainingArguments(
            tmp_path / str(batch),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=4 // batch,
            max_steps=1,
            logging_steps=1,
            learning_rate=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(inject(tiny_host("llama"), OPEN_LIZA), arguments, train_dataset=data)
        trainer.train()
        records.append(trainer.state.log_history[0])
    for name in ("loss", "grad_norm"):  # logged with rounding to four digits
        assert records[1][name] / records[0][name] == pytest.approx(1.0, abs=1e-3)


@opened
def test_low_precision(config):
    """bf16 weights and autocast stay near float32, and what has to be float32 is."""
    ids, exact = tokens(2, 33), inject(tiny_host("llama"), config)
    expected = logits(exact, ids)
    half = inject(tiny_host("llama", torch.bfloat16), config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = logits(exact, ids)
    for found in (logits(half, ids), under_autocast):
        # 8 bits of mantissa through two layers of weights as large as these
        assert (found.float() - expected).abs().mean() < 0.05 * expected.abs().mean() + 0.02
    kept = {name.rpartition("memory.")[2]: x.dtype for name, x in half.state_dict().items() if ".memory." in name}
    wide = {name for name, dtype in kept.items() if dtype == torch.float32}
    assert wide == {name for name in kept if name in ("weight", "gate.scale") or name.startswith("memories")}
    assert all(module.weight.dtype == torch.float32 for module in mag_modules(exact.to(torch.bfloat16)))


@pytest.mark.slow
@opened
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile_of_forward_gives_the_same(config, backend):
    model, ids = inject(tiny_host("llama"), config), tokens(2, 17)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        found = compiled(ids, use_cache=False).logits
    # another order of float32 sums
    torch.testing.assert_close(found, logits(model, ids), rtol=0, atol=1e-4)


# --- no state on modules, no trace ----------------------------------------------------------------------------------


@hosts
@opened
def test_unload_leaves_no_trace(kind, config):
    model, ids = tiny_host(kind), tokens(2, 9)
    expected, keys, before = logits(model, ids), list(model.state_dict()), model.config.to_dict()
    stateful = model._is_stateful  # as hybrids are
    inject(model, config)
    assert model.config.tnt_injection == config.to_dict() and not torch.equal(logits(model, ids), expected)
    assert unload(model) is model
    assert torch.equal(logits(model, ids), expected) and list(model.state_dict()) == keys
    assert model.config._attn_implementation == attentions(kind)[0] and model.config.to_dict() == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model._is_stateful is stateful and "_is_stateful" not in vars(model)
    logits(inject(model, config), ids)


def test_attention_that_was_compiled_since_is_unloaded():
    model, ids = tiny_host("llama"), tokens(2, 9)
    expected, first = logits(model, ids), inject(model, OPEN_LIZA).model.layers[0]
    first.self_attn = torch.compile(first.self_attn, backend="eager")
    assert not torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(unload(model), ids), expected)


@opened
def test_copies_and_neighbours_are_independent(config):
    ids, shared = tokens(2, 9), tiny_host("llama").config
    neighbour = tiny_host("llama")
    for module in neighbour.modules():
        if hasattr(module, "config"):
            module.config = shared
    model = LlamaForCausalLM(shared).eval()
    model.load_state_dict(neighbour.state_dict())
    source = logits(model, ids)
    expected = logits(inject(model, config), ids)
    assert not hasattr(shared, "tnt_injection") and torch.equal(logits(neighbour, ids), source)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied, ids), expected)
        assert torch.equal(logits(unload(copied), ids), source) and torch.equal(logits(model, ids), expected)
    other = inject(neighbour, OPEN_TNT if config is OPEN_LIZA else OPEN_LIZA)
    logits(other, ids)
    assert torch.equal(logits(model, ids), expected)


def test_an_exception_leaves_no_stale_state():
    model, ids = inject(tiny_host("llama"), OPEN_LIZA), tokens(2, 9)
    expected = logits(model, ids)

    def fail(*_):
        raise RuntimeError("in the middle")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="middle"):
        logits(model, tokens(1, 5), attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))
    handle.remove()
    assert torch.equal(logits(model, ids), expected)


def test_a_saved_memory_is_not_dropped_silently(tmp_path):
    model, ids = tiny_host("llama"), tokens(2, 9)
    expected = logits(model, ids)
    inject(model, OPEN_LIZA).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation='tnt_inject_sdpa'.*was not loaded"):
        AutoModelForCausalLM.from_pretrained(tmp_path)(ids)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert torch.equal(logits(base, ids), expected)


def test_disabled_adapters_are_the_source():
    model, ids = tiny_host("llama"), tokens(2, 9)
    expected = logits(model, ids)
    config = LoraConfig(target_modules=ARCHITECTURES["llama"].lora_targets, modules_to_save=["memory"])
    wrapped = get_peft_model(inject(model, LiZAConfig(max_self_attn_length=4)), config).eval()
    out = wrapped(ids, use_cache=True)
    assert not torch.equal(out.logits, expected)
    with wrapped.disable_adapter():
        assert torch.equal(logits(wrapped, ids), expected)
        with pytest.raises(ValueError, match="memory on"):
            wrapped(ids[:, :1], past_key_values=out.past_key_values)
        plain = wrapped(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="no memory of them"):
        wrapped(ids[:, :1], past_key_values=plain)


@opened
def test_save_and_reload_is_exact(config, tmp_path):
    model, ids = inject(tiny_host("llama"), config), tokens(2, 9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        for module in mag_modules(model):
            module.weight.fill_(0.37)
    model.save_pretrained(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path).tnt_injection
    assert json.loads((tmp_path / "config.json").read_text())["tnt_injection"] == config.to_dict()
    again = inject(AutoModelForCausalLM.from_pretrained(tmp_path), injection_from_dict(saved))
    missing = again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    assert torch.equal(logits(again.eval(), ids), logits(model, ids))


def test_seeds_count_and_the_random_state_is_left_alone():
    model, name = tiny_host("llama"), "lr_proj.weight"
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    starts = [inject(copy.deepcopy(model), OPEN_TNT, seed=seed).state_dict() for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(1), expected)
    first, second, third = ([x for key, x in start.items() if key.endswith(name)] for start in starts)
    assert len(first) == 6 and all(map(torch.equal, first, second)) and not any(map(torch.equal, first, third))


def test_a_bare_base_model_takes_a_memory_too():
    model = tiny_host("llama")
    inject(model, OPEN_LIZA)
    base = AutoModel.from_config(AutoConfig.for_model("llama", **{"vocab_size": 64, **_small()})).eval()
    before = base(tokens(1, 7)).last_hidden_state
    inject(base, LiZAConfig(weight=0.0))
    assert torch.equal(base(tokens(1, 7)).last_hidden_state, before)
    assert torch.equal(base(tokens(1, 7), torch.ones(1, 7), torch.arange(7)[None]).last_hidden_state, before)
    assert unload(base) is base


def _small():
    return {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_attention_weights_are_still_returned():
    model, ids = tiny_host("llama", attn="eager"), tokens(2, 7)
    expected = model(ids, output_attentions=True).attentions
    found = inject(model, CLOSED["liza"])(ids, output_attentions=True).attentions
    assert len(found) == 2 and all(torch.equal(a, b) for a, b in zip(found, expected))


# --- settings and errors --------------------------------------------------------------------------------------------


@modes
def test_settings_survive_json(config):
    assert injection_from_dict(json.loads(json.dumps(config.to_dict()))) == config


WHOLE = tiny_host("llama")  # before conftest.py freezes what is there, which the garbage collector then finds no more


def inject_a_part():
    whole = tiny_host("llama")
    inject(whole.model, OPEN_LIZA)


BAD = [
    (lambda: LiZAConfig(operator="delta"), "operator='delta'"),
    (lambda: LiZAConfig(feature_map="relu"), "feature_map='relu'"),
    (lambda: LiZAConfig(gate="none"), "gate='none'"),
    (lambda: LiZAConfig(weight=1.5), "weight=1.5"),
    (lambda: LiZAConfig(weight="0.5"), "weight='0.5'"),
    (lambda: inject(tiny_host("llama"), OPEN_LIZA, seed=True), "seed=True"),
    (lambda: inject(tiny_host("llama", is_causal=False), OPEN_LIZA), "bidirectional"),
    (lambda: unload("llama"), "model='llama'"),
    (lambda: LiZAConfig(weight=float("nan")), "weight=nan"),
    (lambda: LiZAConfig(weight=True), "weight=True"),
    (lambda: LiZAConfig(chunk_size=0), "chunk_size=0"),
    (lambda: LiZAConfig(num_writes=1.0), "num_writes=1.0"),
    (lambda: LiZAConfig(max_self_attn_length=0), "max_self_attn_length=0"),
    (lambda: LiZAConfig(layers=[]), r"layers=\[\]"),
    (lambda: LiZAConfig(layers=[-1]), r"layers=\[-1\]"),
    (lambda: LiZAConfig(layers=[0, 0]), r"layers=\[0, 0\]"),
    (lambda: LiZAConfig.from_dict({"kind": "tnt"}), "kind='tnt'"),
    (lambda: LiZAConfig.from_dict({"wieght": 0.5}), "wieght=0.5"),
    (lambda: injection_from_dict({"weight": 0.5}), "kind=None"),
    (lambda: inject(tiny_host("llama"), {"weight": 0.5}), "config.*dict"),
    (lambda: LiZAMemory(tiny_host("llama"), 0, None), r"config=LlamaForCausalLM.*inject\(model, config\)"),
    (lambda: inject(tiny_host("llama"), LiZAConfig(layers=[0, 2])), r"layers=\[0, 2\]: 2 is out of range"),
    (lambda: inject(tiny_host("llama"), TNTInjectionConfig(layers=[7])), r"layers=\[7\]"),
    (lambda: inject(tiny_host("llama"), TNTInjectionConfig(memory_depth=0)), "memory_depth=0"),
    (lambda: inject(tiny_host("llama"), TNTInjectionConfig(memory_gate="product", memory_gate_init=0.0)), "gate_init"),
    (lambda: inject(tiny_host("llama"), TNTInjectionConfig(memory_num_heads=3)), "memory_num_heads=3"),
    (lambda: inject(inject(tiny_host("llama"), OPEN_LIZA), OPEN_TNT), "already"),
    (lambda: inject(torch.nn.Linear(2, 2), OPEN_LIZA), "Linear"),
    (lambda: inject(tiny_host("gpt2", attn="eager", reorder_and_upcast_attn=True), OPEN_LIZA), "reorder_and_upcast"),
    (
        lambda: inject(tiny_host("qwen3_next"), LiZAConfig(layers=[0])),
        r"layers=\[0\].*0 has no attention of its own, layers \[1\]",
    ),
    (lambda: inject(tiny_host("lfm2", layer_types=["conv", "conv"]), OPEN_LIZA), "none of its layers has attention"),
    (lambda: inject(tiny_host("gpt2", add_cross_attention=True), OPEN_LIZA), "add_cross_attention"),
    (lambda: inject(tiny_host("gpt_bigcode", multi_query=False), OPEN_LIZA), "multi_query=False"),
    (lambda: inject(tiny_host("gemma3_text", use_bidirectional_attention=True), OPEN_LIZA), "bidirectional"),
    (lambda: inject(tiny_host("llama", attn="flex_attention"), OPEN_LIZA), "attn_implementation='flex_attention'"),
    (lambda: inject(WHOLE.model, OPEN_LIZA), "model=LlamaModel: is a part of a model that would be saved without"),
    (inject_a_part, "model=LlamaModel: is a part of a model that would be saved without"),
    (lambda: unload(tiny_host("llama")), "no injected memory"),
    (lambda: set_max_self_attn_length(tiny_host("llama"), 3), "no injected memory"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        bad()


def test_a_delta_rule_that_can_diverge_warns():
    with pytest.warns(UserWarning, match=r"feature_map='elu\+1'.*operator='delta_rule' diverges"):
        LiZAConfig(feature_map="elu+1")


UNSUPPORTED = {
    "falcon": ({}, "attention interface"),
    "deepseek_v3": ({"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}, "latent"),
    "stablelm": ({}, "has not been checked"),
    "jamba": ({"use_mamba_kernels": False}, "recurrent or linear already"),
    "tnt": ({}, "own memory"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_other_architectures_are_refused_with_the_reason(kind):
    changes, reason = UNSUPPORTED[kind]
    sizes = {"vocab_size": 64, "num_key_value_heads": 2, **_small(), **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    with pytest.raises(ValueError, match=f"model_type='{kind}'.*{reason}.*gpt_oss, granite, granite_swa, granitemoe"):
        inject(model, OPEN_LIZA)


def test_a_failed_injection_changes_nothing():
    model, ids = tiny_host("llama"), tokens(2, 7)
    keys, expected = list(model.state_dict()), logits(model, ids)
    with pytest.raises(ValueError):
        inject(model, TNTInjectionConfig(memory_num_heads=3))
    assert list(model.state_dict()) == keys and torch.equal(logits(model, ids), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())
    inject(model, OPEN_TNT)


def test_what_would_switch_the_memory_off_is_refused():
    model = inject(tiny_host("llama"), OPEN_LIZA)
    x, layer, rotary = torch.zeros(1, 3, 32), model.model.layers[0], model.model.rotary_emb
    with pytest.raises(ValueError, match="call the injected model"):
        layer(x, position_embeddings=rotary(x, torch.arange(3)[None]))
    with pytest.raises(ValueError, match="2-D mask.*dict"):
        model(tokens(1, 3), attention_mask={"full_attention": None})
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation='eager': was changed"):
        model(tokens(1, 3))
