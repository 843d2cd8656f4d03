"""A converted checkpoint computes what its source computes, and is complete."""

import itertools
import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from checkpoints import CASES, FUSED, reload, save_source
from safetensors.torch import load_file, save_file
from tiny import later
from transformers import AutoModelForCausalLM

from tnt_hf import TNTForCausalLM
from tnt_hf.conversion import convert_checkpoint, verify_conversion
from tnt_hf.conversion.manifest import read_manifest
from tnt_hf.conversion.shards import NewTensor, blocks, split_by_size, write_shard
from tnt_hf.conversion.source import ITEMSIZE, read_header


W = 7
DTYPES = [torch.float32, torch.bfloat16]


def convert(tmp_path: Path, case: str = "llama", dtype: torch.dtype = torch.float32, **options) -> tuple[Path, Path]:
    """(source folder, result folder) of a case; `source` holds options of `save_source`."""
    source = save_source(tmp_path / "source", case, dtype, **options.pop("source", {}))
    return source, convert_checkpoint(source, tmp_path / "result", progress=False, **options)


def batch(length: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, attention_mask) of three rows: padded on the left, on the right, and not at all."""
    ids = torch.randint(3, 97, (3, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, -4:] = 0, 0
    return ids, mask


@torch.no_grad()
def decoded(model, ids: torch.Tensor, prefill: int) -> torch.Tensor:
    """Logits of a prompt and then of token after token, with the model's own cache."""
    out = model(ids[:, :prefill], use_cache=True)
    logits = [out.logits]
    for t in range(prefill, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, 1)


def greedy(model, ids, mask=None, tokens=12):
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)


# ----------------------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("dtype", [torch.float32, *later(torch.bfloat16)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_bit_equal_with_attention_kept(tmp_path, case, dtype):
    source, result = convert(tmp_path, case, dtype)
    source, result = reload(source), reload(result)
    assert isinstance(result, TNTForCausalLM) and result.config.memory_layer_indices == [0, 1, 2]
    assert result.dtype == dtype
    ids, mask = batch()
    with torch.no_grad():
        assert source(ids).logits.equal(result(ids).logits)
        padded = source(ids, attention_mask=mask).logits, result(ids, attention_mask=mask).logits
    assert padded[0][mask.bool()].equal(padded[1][mask.bool()])
    assert decoded(source, ids, 9).equal(decoded(result, ids, 9))
    left = ids[:1, :9], mask[:1, :9]
    assert greedy(source, *left).equal(greedy(result, *left))


@pytest.mark.parametrize("heads", [1, 2])
def test_eager_attention_with_few_key_heads_is_bit_equal(tmp_path, heads):
    source, result = convert(tmp_path, source={"num_key_value_heads": heads})
    source, result = (reload(folder, attn_implementation="eager") for folder in (source, result))
    ids = batch(9)[0][:2]  # a size at which products of a copied head and of a view of it differ
    with torch.no_grad():
        assert source(ids).logits.equal(result(ids).logits)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_source_names_comes_along(tmp_path, field):
    source = save_source(tmp_path / "source", "llama", torch.float32)
    config = source / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: "eager"}))
    result = reload(convert_checkpoint(source, tmp_path / "result", progress=False))
    source = reload(source)
    assert source.config._attn_implementation == result.config._attn_implementation == "eager"
    ids = batch()[0]
    with torch.no_grad():
        assert source(ids).logits.equal(result(ids).logits)


@pytest.mark.parametrize("case", FUSED)
def test_a_fused_source_is_equal_to_rounding(tmp_path, case):
    """One matrix product of stacked weights rounds differently from three; 1e-5 is some ulps of logits around 4."""
    source, result = convert(tmp_path, case)
    ids, mask = batch()
    with torch.no_grad():
        a, b = (reload(folder)(ids, attention_mask=mask).logits[mask.bool()] for folder in (source, result))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    with torch.no_grad():  # in float64 only RoPE is left of the rounding, which both compute alike
        a, b = (reload(folder, dtype=torch.float64)(ids).logits for folder in (source, result))
    assert not a.equal(torch.zeros_like(a)) and (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2, tied, window in some layers", "qwen3"])
def test_a_window_is_bit_equal_below_it(tmp_path, case, dtype):
    window = 4 if "window in" in case else W  # at most the source's own
    source, result = convert(tmp_path, case, dtype, window=window, keep_full_attention=[1])
    source, result = reload(source), reload(result)
    kept = [kind == "hybrid" for kind in result.config.layer_types]
    assert kept == [False, True, False] and result.config.sliding_window == window
    for length in (window - 1, window, 40):
        ids, _ = batch(length)
        with torch.no_grad():
            a, b = source(ids).logits, result(ids).logits
        assert a[:, :window].equal(b[:, :window])
        assert length <= window or not a[:, window:].equal(b[:, window:]), "the window has no effect"
    # the last of these tokens fills the window, where a source of such a window would get a mask
    assert decoded(source, ids[:, :window], 2).equal(decoded(result, ids[:, :window], 2))


def test_a_window_can_be_set_later(tmp_path):
    source, result = convert(tmp_path)
    now = convert_checkpoint(source, tmp_path / "narrow", window=W, progress=False)
    later, now = reload(result), reload(now)
    later.set_sliding_window(W)
    ids, _ = batch(40)
    with torch.no_grad():
        assert later(ids).logits.equal(now(ids).logits)
    assert decoded(reload(source), ids[:, :W], 2).equal(decoded(later, ids[:, :W], 2))


def test_the_sources_own_window_can_be_narrowed_later(tmp_path):
    source, result = map(reload, convert(tmp_path, "mistral, window"))
    ids, _ = batch(20)
    assert decoded(source, ids, 2).equal(decoded(result, ids, 2))
    result.set_sliding_window(4)
    assert decoded(source, ids[:, :4], 2).equal(decoded(result, ids[:, :4], 2))


def test_every_gate_that_starts_closed_is_exact(tmp_path):
    source = save_source(tmp_path / "source")
    ids, _ = batch()
    with torch.no_grad():
        expected = reload(source)(ids).logits
        for gate in ("add", "product", "mix"):
            options = {"memory_gate": gate, "memory_depth": 2, "memory_conv_kernel": 4, "memory_momentum": True}
            result = convert_checkpoint(source, tmp_path / gate, progress=False, **options)
            assert reload(result)(ids).logits.equal(expected), gate
            assert read_manifest(result)["conversion"]["memory_starts_closed"]
        open_gate = convert_checkpoint(source, tmp_path / "open", progress=False, memory_gate_init=1.0)
        assert not reload(open_gate)(ids).logits.equal(expected)
    card = (open_gate / "README.md").read_text()
    assert "does not start closed" in card and "the memory changes the output" in card and "adds nothing" not in card


def test_a_card_without_a_memory_speaks_of_none(tmp_path):
    _, result = convert(tmp_path, window=4, memory_layers=[])
    card = (result / "README.md").read_text()
    assert "into TNT's form without a memory" in card and "What the window hides is lost." in card
    assert not [word for word in ("untrained", "beside the attention", "The memory") if word in card]


# -------------------------------------------------------------------------------------------------------------- memory


def test_the_memory_starts_from_the_layers_projections(tmp_path):
    _, result = convert(tmp_path, memory_layers=[0, 2])
    state = reload(result).state_dict()
    assert {name.split(".")[2] for name in state if ".memory." in name} == {"0", "2"}
    for layer in (0, 2):
        for x in "qkv":
            own = state[f"model.layers.{layer}.memory.{x}_proj.weight"]
            assert own.equal(state[f"model.layers.{layer}.self_attn.{x}_proj.weight"])
        assert not state[f"model.layers.{layer}.memory.gate.scale"].any()
        assert not state[f"model.layers.{layer}.memory.memories.0.weights.0"].any()


def test_gradients_reach_the_closed_gate(tmp_path):
    model = reload(convert(tmp_path, window=W)[1])
    ids, _ = batch(40)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        assert layer.memory.gate.scale.grad.abs().sum() > 0


def test_the_start_is_that_of_the_model_and_depends_on_the_seed_only(tmp_path):
    options = {
        "memory_depth": 2,
        "memory_conv_kernel": 4,
        "memory_momentum": True,
        "memory_decay": True,
        "memory_layernorm": True,
    }
    source, first = convert(tmp_path, seed=1, **options)
    again = convert_checkpoint(source, tmp_path / "again", seed=1, progress=False, **options)
    other = convert_checkpoint(source, tmp_path / "other", seed=2, progress=False, **options)
    name = "model-memory-00001-of-00001.safetensors"
    assert (first / name).read_bytes() == (again / name).read_bytes() != (other / name).read_bytes()
    fresh, made = TNTForCausalLM(reload(first).config).state_dict(), load_file(first / name)
    for tensor in (tensor for tensor in made if "proj.weight" not in tensor.replace("gate.proj", "")):
        expected, found = fresh[tensor], made[tensor]
        assert found.shape == expected.shape and found.dtype == torch.float32
        # Constants are equal; of random ones the spread is: both are samples, hence a factor of 2.
        if expected.unique().numel() < 3:
            assert found.equal(expected), tensor
        else:
            assert 0.5 < found.std() / expected.std() < 2, tensor
    first, second = (made[f"model.layers.{i}.memory.memories.0.weights.0"] for i in (0, 1))
    assert not first.equal(second), "each layer has numbers of its own"
    taps = made["model.layers.0.memory.k_conv.weight"].mean((0, 1))
    torch.testing.assert_close(taps, torch.tensor([0.0, 0, 0, 1]), rtol=0, atol=0.1)  # the newest token as it is


@pytest.mark.parametrize("case", ["llama", "mistral, window", "qwen2", "qwen3", "phi3"])
def test_a_probe_needs_a_tokenizer(tmp_path, case):
    """For some of them the library makes an empty one where there is none."""
    with pytest.raises(ValueError, match="probe: .*source has no tokenizer to read a text with"):
        convert(tmp_path, case, window=3, probe="a text")


@pytest.mark.parametrize("gate", ["add", "mix"])
def test_the_precision_of_the_memory(tmp_path, gate):
    _, result = convert(tmp_path, dtype=torch.bfloat16, memory_gate=gate)
    memory = load_file(result / "model-memory-00001-of-00001.safetensors")
    for name, tensor in memory.items():
        wide = ".memories." in name or name.endswith(("gate.scale", "gate.weight"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name


# ------------------------------------------------------------------------------------------------------- shards, bytes


@pytest.mark.parametrize("link", ["link", "copy"])
def test_shards_are_linked_or_copied_byte_for_byte(tmp_path, link):
    source, result = convert(tmp_path, link=link, source={"shards": "40KB"})
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 2
    for old, new in zip(shards, sorted(result.glob("model-base-*.safetensors")), strict=True):
        assert old.read_bytes() == new.read_bytes()
        assert old.samefile(new) == (link == "link")
    index = json.loads((result / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in result.glob("*.safetensors")}
    ids, _ = batch()
    with torch.no_grad():
        assert reload(source)(ids).logits.equal(reload(result)(ids).logits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_cast_equals_loading_the_source_in_that_dtype(tmp_path, dtype):
    source, result = convert(tmp_path, dtype=torch.float32, source={"shards": "40KB"})
    cast = convert_checkpoint(source, tmp_path / "cast", progress=False, dtype=dtype, max_shard_size="50KB")
    sizes = [sum(x.nbytes for x in load_file(path).values()) for path in cast.glob("model-base-*.safetensors")]
    assert len(sizes) > 1 and max(sizes) <= 50_000
    expected, found = reload(source, dtype=getattr(torch, dtype)), reload(cast)
    assert found.dtype == getattr(torch, dtype)
    ids, _ = batch()
    with torch.no_grad():
        a, b = expected(ids).logits, found(ids).logits
    # Llama computes RoPE in float32 even in a float64 model, we do not: 1e-5 is what that rounding comes to.
    assert a.equal(b) if dtype != "float64" else (a - b).abs().max() < 1e-5


def test_shards_are_as_full_as_they_may_be():
    tensors = [NewTensor(str(size), "F16", (size,), torch.Tensor) for size in (3, 2, 1, 9, 4, 1)]
    assert [[x.shape[0] for x in group] for group in split_by_size(tensors, 10)] == [[3, 2], [1], [9], [4, 1]]
    assert split_by_size([], 10) == [[]]


def test_a_shard_of_odd_sizes(tmp_path):
    """Every tensor starts at a multiple of its item size, and of 64 bytes if it can, where a cast one lies in memory;
    one of fewer than eight bytes is read and cast as well."""
    few = torch.tensor([1.0, -2.5, 3.0], dtype=torch.bfloat16)
    save_file({"few": few}, tmp_path / "source.safetensors")
    (stored,) = read_header(tmp_path / "source.safetensors")
    assert [len(piece) for piece in islice(blocks(stored, bytearray(6)), 2)] == [6]
    new = [NewTensor("kept", "BF16", (3,), stored), NewTensor("wide", "F32", (3,), stored)]
    new.append(NewTensor("made", "F64", (1,), lambda: torch.ones(1)))
    new += [NewTensor(f"whole {i}", "F32", (4 - i, 16 * i), lambda i=i: torch.ones(4 - i, 16 * i)) for i in (1, 3)]
    write_shard(tmp_path / "new.safetensors", new, lambda count: None)
    tensors = load_file(tmp_path / "new.safetensors")
    assert tensors["kept"].equal(few) and tensors["wide"].equal(few.float()) and tensors["made"].item() == 1
    stored = read_header(tmp_path / "new.safetensors")
    assert not any(x.start % ITEMSIZE[x.dtype] for x in stored)
    assert [x.name for x in stored if x.start % 64 == 0] == ["whole 1", "whole 3", "made"]


def test_saving_into_the_result_leaves_a_linked_source_alone(tmp_path):
    source, result = convert(tmp_path, link="link", source={"shards": "40KB"})
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    model = reload(result)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(result, max_shard_size="40KB")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert not list(result.glob("model-base-*")), "shards of the old state stay behind"
    assert reload(result).model.embed_tokens.weight.equal(model.model.embed_tokens.weight)


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_a_redundant_head_and_stored_frequencies_do_no_harm(tmp_path, tied):
    """Old Llama checkpoints hold `inv_freq`; some tied ones hold the head as well."""
    source = save_source(tmp_path / "source", tie_word_embeddings=tied)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    weights["lm_head.weight"] = weights["lm_head.weight" if not tied else "model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    ids, _ = batch()
    with torch.no_grad():
        assert reload(source)(ids).logits.equal(reload(result)(ids).logits)
    assert read_manifest(result)["conversion"]["parameters"]["base"] == reload(source).num_parameters()
    report = verify_conversion(source, result, tokens=20)
    assert report["passed"], report["verdict"]


@pytest.mark.parametrize("narrow", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_dtype_that_nobody_wrote_down_is_the_one_the_source_loads_with(tmp_path, narrow):
    source = save_source(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    save_file(weights | {narrow: weights[narrow].bfloat16()}, source / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({name: x for name, x in fields.items() if name != "dtype"}))
    result = convert_checkpoint(source, tmp_path / "result", progress=False)
    expected, got = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, result))
    ids, _ = batch()
    with torch.no_grad():
        assert expected.dtype == got.dtype and expected(ids).logits.equal(got(ids).logits)


def test_mixed_precision_stays_what_it_is(tmp_path):
    source = save_source(tmp_path / "source", dtype=torch.bfloat16)
    weights = {n: w.float() if "norm" in n else w for n, w in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    result = convert_checkpoint(source, tmp_path / "result", progress=False, link="link")
    ids, _ = batch()
    with torch.no_grad():
        assert reload(source)(ids).logits.equal(reload(result)(ids).logits)


def test_no_two_tensors_of_a_memory_start_alike(tmp_path):
    _, result = convert(tmp_path, memory_depth=2, memory_conv_kernel=4)
    made = load_file(result / "model-memory-00001-of-00001.safetensors")
    random = {name: x for name, x in made.items() if x.unique().numel() > 2 and "proj.weight" not in name}
    for (name, x), (other, y) in itertools.combinations(random.items(), 2):
        assert not torch.equal(x, y), f"{name} {other}"
