"""Programs of `torch.export` compute what the model does, for batches, lengths and padding unlike their sample's."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from tiny import MODES, tiny_model, tokens
from tiny_hosts import tiny_host
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.utils import decompose_for_generation, get_leaf_tensors

from tnt_hf import TNTCache, TNTForSequenceClassification
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.conversion import TNTInjectionConfig, inject
from tnt_hf.operators_tnt import _pack


EXACT = {"rtol": 0, "atol": 1e-12}  # float64: a program adds up in another order where it masks a window
ROWS, LENGTH = Dim.DYNAMIC(max=64), Dim.DYNAMIC(max=4096)


def often(first: str, *modes: str) -> list:
    """All modes: the first by default, further ones in long tests, the rest in slow ones. A program takes seconds."""
    marks = {first: (), **dict.fromkeys(modes, pytest.mark.long)}
    return [pytest.param(mode, marks=marks.get(mode, pytest.mark.slow)) for mode in MODES]


def batch(rows: int, length: int, padding: slice | None = None) -> dict[str, torch.Tensor]:
    """Random ids whose first row has `padding`."""
    mask = torch.ones(rows, length, dtype=torch.long)
    if padding is not None:
        mask[0, padding] = 0
    return {"input_ids": tokens(rows, length, seed=rows * length), "attention_mask": mask}


# Shorter and longer than the windows, the chunks and the shards that the sample crosses.
SAMPLE = batch(2, 13, slice(0, 3))
OTHERS = {
    "short": batch(3, 3),
    "long, padding behind": batch(5, 70, slice(50, None)),
    "padding between": batch(3, 41, slice(7, 12)),
    "a row of padding": batch(4, 6, slice(None)),
}


def program(model: torch.nn.Module, inputs: dict, dynamic: bool = True) -> torch.nn.Module:
    """The module of what the library's exporter makes; what of inputs it wants no more it takes out."""
    return DynamoExporter().export_program(model, inputs, DynamoConfig(dynamic=dynamic))[0].module()


def results(model: torch.nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """All tensors of an output, those of its cache included; `inputs` stay as they are."""
    with torch.no_grad():
        return get_leaf_tensors(model(**copy.deepcopy(inputs)))


@pytest.mark.parametrize("mode", often("default", "momentum and forgetting", "stage 2"))
def test_one_program_serves_every_batch(mode):
    model = tiny_model(**MODES[mode])
    exported = program(model, dict(SAMPLE))
    for name, other in ({"sample": SAMPLE} | OTHERS).items():
        expected = results(model, other)
        assert any("recurrent_states" in x for x in expected), "the cache has the memory's state"
        torch.testing.assert_close(results(exported, other), expected, **EXACT, msg=f"{name}: {{}}".format)


@pytest.mark.long
@pytest.mark.parametrize("mode", often("default"))
def test_without_padding_and_with_fixed_sizes(mode):
    model = tiny_model(**MODES[mode])
    exported = program(model, {"input_ids": SAMPLE["input_ids"]})
    for other in OTHERS.values():
        plain = {"input_ids": other["input_ids"]}
        torch.testing.assert_close(results(exported, plain), results(model, plain), **EXACT)
    fixed = program(model, dict(SAMPLE), dynamic=False)
    torch.testing.assert_close(results(fixed, SAMPLE), results(model, SAMPLE), **EXACT)


@pytest.mark.long
@pytest.mark.parametrize("mode", often("default"))
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
def test_prefill_and_decode_step_of_generate(mode, dynamic):
    model = tiny_model(**MODES[mode])
    for name, (part, inputs) in decompose_for_generation(model, dict(SAMPLE)).items():
        expected = results(part, inputs)
        exported = program(part, inputs, dynamic)
        torch.testing.assert_close(results(exported, inputs), expected, **EXACT, msg=f"{name}: {{}}".format)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "window and full attention"])
def test_two_programs_generate_what_generate_does(mode):
    model, new = tiny_model(**MODES[mode]), 30
    positions = {"position_ids": (SAMPLE["attention_mask"].cumsum(1) - 1).clamp_min(0)}
    prefill = program(model, SAMPLE | positions)
    with torch.no_grad():
        cache = prefill(**SAMPLE, **positions)[CACHE_NAME]
    step = {
        "input_ids": SAMPLE["input_ids"][:, -1:],
        "attention_mask": torch.nn.functional.pad(SAMPLE["attention_mask"], (0, 1), value=1),
        "position_ids": positions["position_ids"][:, -1:] + 1,
        CACHE_NAME: cache,
    }
    decode = program(model, copy.deepcopy(step))

    start = OTHERS["padding between"]  # neither the rows nor the length of the sample
    expected = model.generate(**start, max_new_tokens=new, do_sample=False)
    ids, mask = start["input_ids"], start["attention_mask"]
    # as `generate` counts: positions pass over padding
    place = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    sizes = []
    with torch.no_grad():
        out = prefill(**start, position_ids=place)
        place = place[:, -1:]
        for _ in range(new - 1):
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
            mask, place = torch.nn.functional.pad(mask, (0, 1), value=1), place + 1
            given = {"attention_mask": mask, "position_ids": place, CACHE_NAME: out[CACHE_NAME]}
            out = decode(input_ids=ids[:, -1:], **given)
            sizes.append(out[CACHE_NAME].nbytes())
    assert torch.equal(torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1), expected)
    if mode == "default":
        assert len(set(sizes)) == 1, "the cache has one size"


@pytest.mark.long
def test_the_surprise_and_other_heads():
    model = tiny_model(num_hidden_layers=1)
    inputs = SAMPLE | {"output_surprise": True}
    found, expected = results(program(model, dict(inputs)), inputs), results(model, inputs)
    assert any("surprise" in name for name in expected)
    torch.testing.assert_close(found, expected, **EXACT)
    classifier = TNTForSequenceClassification(model.config).double().eval()
    exported = program(classifier, dict(SAMPLE))
    for other in OTHERS.values():
        torch.testing.assert_close(results(exported, other), results(classifier, other), **EXACT)


@pytest.mark.long
def test_of_torch_alone():
    """Without the library's exporter, which switches parts of its code off for the time of tracing."""
    model = tiny_model()
    shapes = {"input_ids": {0: ROWS, 1: LENGTH}, "use_cache": None}
    with torch.no_grad():
        sample = {"input_ids": SAMPLE["input_ids"], "use_cache": False}
        found = torch.export.export(model, (), sample, dynamic_shapes=shapes)
    operators = [str(node.target) for node in found.graph.nodes if "tnt_hf" in str(node.target)]
    assert operators == ["tnt_hf.project_queries.default", *["tnt_hf.memory.default"] * 3] * 2
    for other in OTHERS.values():
        inputs = {"input_ids": other["input_ids"], "use_cache": False}
        torch.testing.assert_close(results(found.module(), inputs), results(model, inputs), **EXACT)


@pytest.mark.long
def test_an_injected_model():
    model = tiny_host("llama").double().eval()
    inject(model, TNTInjectionConfig(global_chunk_size=8, local_chunk_sizes=[2], local_reset_interval=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    exported = program(model, dict(SAMPLE) | {"use_cache": False})
    for other in OTHERS.values():
        inputs = other | {"use_cache": False}
        torch.testing.assert_close(results(exported, other)["logits"], results(model, inputs)["logits"], **EXACT)


@pytest.mark.slow
def test_a_saved_program_runs_where_the_package_is_imported(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    made = DynamoExporter().export_program(model, dict(SAMPLE), DynamoConfig(dynamic=True))[0]
    torch.export.save(made, tmp_path / "model.pt2")
    other = OTHERS["long, padding behind"]
    torch.save(other, tmp_path / "inputs.pt")
    script = (
        "import sys, torch\n"
        "from tnt_hf import TNTCache\n"
        "from transformers.exporters.exporter_dynamo import register_pytree_node\n"
        "register_pytree_node(TNTCache)\n"
        "program = torch.export.load(sys.argv[1] + '/model.pt2').module()\n"
        "logits = program(**torch.load(sys.argv[1] + '/inputs.pt')).logits.detach()\n"
        "torch.save(logits, sys.argv[1] + '/logits.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), results(model, other)["logits"], **EXACT)


@pytest.mark.long
def test_what_a_program_cannot_do_is_refused():
    model = tiny_model(num_hidden_layers=1)
    positions = torch.arange(13).expand(2, 13)
    inputs = {"input_ids": SAMPLE["input_ids"], "position_ids": positions}
    packed = inputs | {"position_ids": torch.cat([torch.arange(6), torch.arange(7)]).expand(2, 13)}
    for cache in ({}, {CACHE_NAME: TNTCache(model.config)}):
        exported = program(model, inputs | copy.deepcopy(cache))
        assert results(exported, inputs | cache)
        with pytest.raises(RuntimeError, match="one document per row"):
            results(exported, packed | cache)
    with torch.no_grad():
        cache = model(**SAMPLE)[CACHE_NAME]
    mask = torch.nn.functional.pad(SAMPLE["attention_mask"], (0, 1), value=1)
    step = {"input_ids": SAMPLE["input_ids"][:, -1:], "attention_mask": mask, CACHE_NAME: cache}
    with pytest.raises(ValueError, match="position_ids=None"):
        program(model, step)
    logits = program(model, dict(SAMPLE))(**SAMPLE).logits
    with pytest.raises(RuntimeError, match="tnt_hf"):
        logits.sum().backward()


@pytest.mark.parametrize("T", [8, 40])  # a chunk that is not full, and several
@pytest.mark.parametrize("form", ["chunk", "auto"])
def test_an_operators_results_lie_in_memory_as_a_program_was_told(T, form):
    """What compiles a program plans with the strides of tensors that hold nothing."""
    q, k, v = torch.randn(3, 2, T, 2, 16).softmax(-1)
    weights, lr = [torch.randn(2, 16, 16)], torch.rand(2, T, 2)
    calls = {
        "memory": ((q, k, v, lr, weights), {"chunk_size": 16, "output_surprise": True, "output_final_state": True}),
        "project_queries": ((q, k), {"reset_interval": 32, "output_final_state": True}),
    }
    for name, (args, options) in calls.items():
        tensors = []
        call = json.dumps(_pack((args, options | {"implementation": form}), tensors))
        operator = getattr(torch.ops.tnt_hf, name).default
        with FakeTensorMode() as mode:
            planned = operator([mode.from_tensor(x) for x in tensors], call)
        found = operator(tensors, call)
        assert len(found) > 1
        assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in planned], name
