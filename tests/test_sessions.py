"""A session on disk goes on where the cache stopped; one that is damaged or does not fit is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cache import filled, go_on, modes
from test_memory import everything, make_inputs, run
from tiny import left_padded, tiny_config, tiny_model, tokens, undigested

from tnt_hf import TNTCache
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.cache_tnt import FINGERPRINT
from tnt_hf.memory_tnt import MemoryState, memory_chunkwise


@modes
def test_session_round_trip(changes, tmp_path):
    model, rest = tiny_model(**changes), tokens(2, 9, seed=2)
    ids, mask = left_padded([tokens(21), tokens(10)])
    cache = filled(model, ids, attention_mask=mask)
    cache.save(tmp_path / "session.safetensors")
    again = TNTCache.load(tmp_path / "session.safetensors", model.config)
    assert again.nbytes() == cache.nbytes() and again.get_seq_length() == 21
    mask = torch.cat([mask, mask.new_ones(2, 9)], 1)
    with torch.no_grad():
        a, b = (model(rest, attention_mask=mask, past_key_values=past).logits for past in (cache, again))
    assert torch.equal(a, b)


@pytest.mark.parametrize("stored, goes_on", [(torch.float32, torch.bfloat16), (torch.float32, torch.float64)])
@modes
def test_a_session_goes_on_in_the_models_precision(changes, stored, goes_on, tmp_path):
    model, ids, rest = tiny_model(stored, **changes), tokens(2, 9), tokens(2, 7, seed=2)
    filled(model, ids).save(tmp_path / "session.safetensors")
    model = model.to(goes_on)
    cache = TNTCache.load(tmp_path / "session.safetensors", model.config)
    found = go_on(model, cache, rest)
    assert found.dtype == goes_on and not cache.unplaced
    native = filled(model, ids)
    expected = go_on(model, native, rest)
    kinds = [{name: x.dtype for name, x in c._tensors().items()} for c in (cache, native)]
    assert kinds[0] == kinds[1]
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < (0.1 if goes_on == torch.bfloat16 else 1e-3)  # what the stored half was rounded to, in a few layers


def test_a_session_follows_its_model_to_a_device():
    cache = filled(tiny_model(), tokens(2, 9))
    cache.unplaced = {0, 1}
    cache.place(1, torch.empty(2, 1, 32, device="meta", dtype=torch.float64))
    devices = {name: x.device.type for name, x in cache._tensors().items()}
    assert {devices[name] for name in devices if name.startswith("layers.1.")} == {"meta"}
    assert {devices[name] for name in devices if name.startswith("layers.0.")} == {"cpu"} and cache.unplaced == {0}


def test_a_session_remembers_that_it_holds_padding(tmp_path):
    model = tiny_model()
    ids, mask = left_padded([tokens(21), tokens(10)])
    filled(model, ids, attention_mask=mask).save(tmp_path / "session.safetensors")
    cache = TNTCache.load(tmp_path / "session.safetensors", model.config)
    with pytest.raises(ValueError, match=f"some of the 21 tokens in {CACHE_NAME} are padding"):
        model(tokens(2, 1), past_key_values=cache)


RESUME = """
import sys, torch
from transformers import AutoModelForCausalLM
from tnt_hf import TNTCache
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder).eval()
cache = TNTCache.load(folder + "/session.safetensors", model.config)
ids = torch.load(folder + "/ids.pt")
torch.save(model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False), folder + "/out.pt")
"""


@pytest.mark.long
def test_session_resumes_in_another_process(tmp_path):
    model, cache = tiny_model(torch.float32), TNTCache(tiny_config())
    turn = model.generate(tokens(1, 13), past_key_values=cache, max_new_tokens=9, do_sample=False)
    ids = torch.cat([turn, tokens(1, 4, seed=3)], 1)
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    cache.save(tmp_path / "session.safetensors")
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", RESUME, str(tmp_path)], check=True, cwd=root, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "out.pt"), expected)


# Of every field that says what a stored state means, another value.
OTHERWISE = {
    "variant": "mal",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window": 8,
    "num_persistent_tokens": 1,
    "global_chunk_size": 4,
    "local_reset_interval": 8,
    "global_read": "current",
    "qk_projection": "none",
    "qk_projection_norm": False,
    "memory_num_heads": 1,
    "memory_head_dim": 16,
    "memory_projections": "shared",
    "memory_conv_kernel": 2,
    "memory_value_norm": False,
    "memory_feature_map": "identity",
    "memory_depth": 1,
    "memory_expansion": 2,
    "memory_activation": "gelu",
    "memory_residual": True,
    "memory_layernorm": True,
    "memory_momentum": True,
    "memory_decay": True,
    "memory_decay_target": "zero",
    "qk_norm": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_session_of_another_architecture_is_refused_by_the_field(tmp_path):
    path, model = tmp_path / "session.safetensors", tiny_model()
    filled(model, tokens(2, 21)).save(path)
    assert OTHERWISE.keys() == {*FINGERPRINT} - {"local_chunk_sizes"}
    for field, value in OTHERWISE.items():
        with pytest.raises(ValueError, match=f"{field}: the cache was filled with"):
            TNTCache.load(path, tiny_config(**{field: value}))


def test_sessions_that_do_not_fit(tmp_path):
    path, model = tmp_path / "session.safetensors", tiny_model()
    filled(model, tokens(2, 21)).save(path)
    with pytest.raises(FileNotFoundError):
        TNTCache.load(tmp_path / "nothing", model.config)
    tensors = load_file(path)
    save_file(tensors, tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="not a TNT session"):
        TNTCache.load(tmp_path / "plain.safetensors", model.config)
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="not a safetensors file"):
        TNTCache.load(tmp_path / "text", model.config)
    with pytest.raises(ValueError, match="config=TNTForCausalLM: must be the TNTConfig"):
        TNTCache.load(path, model)


@pytest.mark.parametrize(
    "damage",
    [
        lambda x: x.pop("layers.0.state.3"),
        lambda x: x.pop("layers.1.conv.0"),
        lambda x: x.pop("layers.1.keys"),
        lambda x: x.pop("layers.1.values"),
        lambda x: [x.pop(f"layers.1.{name}") for name in ("keys", "values")],
        lambda x: x.update({f"layers.1.{name}": x[f"layers.1.{name}"][0] for name in ("keys", "values")}),
        lambda x: x.update({f"layers.1.{name}": x[f"layers.1.{name}"][:, :, :-1] for name in ("keys", "values")}),
        lambda x: x.update({f"layers.1.{name}": x[f"layers.1.{name}"][:1] for name in ("keys", "values")}),
        lambda x: [x.pop(name) for name in [*x] if ".state." in name or ".conv." in name],
        lambda x: [x.pop(name) for name in [*x] if ".state." in name],
        lambda x: x.update({name: y[:1] for name, y in x.items() if ".state." in name or ".conv." in name}),
        lambda x: x.update({name: y + 1 for name, y in x.items() if y.dtype == torch.int64}),
        lambda x: x.update({k: y - 1 for k, y in x.items() if y.dtype == torch.int64 and k.startswith("layers.1.")}),
        lambda x: x.update({name: -y for name, y in x.items() if y.dtype == torch.int64}),
        lambda x: x.update({name: y.double() for name, y in x.items()}),
        lambda x: x.update({name: y.long() for name, y in x.items()}),
        lambda x: x.update({"layers.7.keys": torch.zeros(1)}),
        lambda x: x.update({"layers.0.state.0": torch.zeros(2, 3)}),
        lambda x: x.update({"layers.0.state.2": x["layers.0.state.2"][:1]}),
    ],
)
def test_damaged_sessions_are_refused(damage, tmp_path):
    path, model = tmp_path / "session.safetensors", tiny_model()
    filled(model, tokens(2, 21)).save(path)
    metadata = undigested(path)
    tensors = load_file(path)
    damage(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata=metadata)
    with pytest.raises(ValueError, match="session: "):
        TNTCache.load(path, model.config)


HEADERS = {
    "config": (None, "{", "[]", "{}", "[" * 100000),
    "cumulative_lengths": (
        None,
        "[]",
        "[21]",
        '["21", "21"]',
        "[21, null]",
        "[20, 21]",
        "[21, 0]",
        '["x", 21]',
        "[[1], 21]",
    ),
    "own_positions": ("0",),
    "tokens_noted": ("0", "[]", "[21]", '["21", ["x"]]', "[21, 2]", "[21, []]", "[21, [2]]"),
}


@pytest.mark.parametrize("name, said", [(name, said) for name, values in HEADERS.items() for said in values])
def test_sessions_with_a_damaged_header_are_refused(name, said, tmp_path):
    path, model = tmp_path / "session.safetensors", tiny_model()
    filled(model, tokens(2, 21)).save(path)
    metadata = undigested(path) | ({} if said is None else {name: said})
    if said is None:
        del metadata[name]
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(ValueError, match="session: "):
        TNTCache.load(path, model.config)


@torch.no_grad()
def test_an_empty_cache_is_a_session(tmp_path):
    model, ids = tiny_model(), tokens(2, 9)
    TNTCache(model.config).save(tmp_path / "session")
    cache = TNTCache.load(tmp_path / "session", model.config)
    assert model(ids, past_key_values=cache).logits.equal(model(ids).logits)


@pytest.mark.parametrize("length", [1, 3])
def test_a_cache_goes_on_after_its_model_was_cast(length):
    model, ids, rest = tiny_model(torch.float32), tokens(2, 9), tokens(2, length, seed=2)
    cache, expected = filled(model, ids), go_on(model, filled(model, ids), rest)
    found = go_on(model.to(torch.bfloat16), cache, rest)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.1 * expected.norm()  # 8 bits, rounded a dozen times


def test_the_state_of_one_memory_is_stored_as_tensors_are(tmp_path):
    """`torch.load` opens it as it stands, without being told to run what a file says."""
    tensors, weights, options = make_inputs(T=6, momentum=True)
    state = run(memory_chunkwise, tensors, weights, options, chunk_size=4, query_projection="shard")[1]
    torch.save(state, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(found) is MemoryState and all(map(torch.equal, everything(found), everything(state)))
    assert torch.equal(found.time, state.time)
