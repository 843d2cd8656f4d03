"""A model on its Triton kernels, run by the interpreter, is the model in torch: training, prefill and decoding."""

import json
from copy import deepcopy

import pytest
import torch
from interpreter import run_cases
from test_memory import assert_same, make_inputs
from tiny import later, tiny_model
from torch.autograd.graph import saved_tensors_hooks
from torch.export import Dim
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter

from tnt_hf import kernels_decode_tnt
from tnt_hf.cache_name_tnt import CACHE_NAME
from tnt_hf.kernels_features_tnt import TritonFeatures
from tnt_hf.kernels_global_tnt import TritonGlobal
from tnt_hf.kernels_projection_tnt import TritonProjection
from tnt_hf.kernels_tnt import TritonScan
from tnt_hf.memory_tnt import memory_chunkwise
from tnt_hf.recipes.benchmarks import kernels_gpu


SHAPE = {"head_dim": 16, "global_chunk_size": 8, "local_chunk_sizes": [4], "local_reset_interval": 16}
SHAPE |= {"num_hidden_layers": 1}
VARIANTS = {
    "deep": {"memory_depth": 2},
    "linear, bounded, two local memories": {
        "memory_depth": 1, "memory_grad_bound": 0.5, "local_chunk_sizes": [4, 8], "local_reset_interval": [16, 8],
    },
    "Titans": {
        "local_chunk_sizes": [], "global_chunk_size": 4, "global_read": "current", "memory_momentum": True,
        "memory_decay": True,
    },
}  # fmt: skip
USUAL, *others = VARIANTS
REST = [pytest.param(name, marks=pytest.mark.slow) for name in others]
CLOSE = 1e-5  # two float32 forms of a model, each with its own rounding


@pytest.mark.long
def test_in_the_interpreter():
    run_cases(__file__, "not slow and not long")


@pytest.mark.long
def test_in_the_interpreter_under_checkpointing_and_hooks():
    run_cases(__file__, "long and not slow")


@pytest.mark.slow
def test_in_the_interpreter_with_every_variant():
    run_cases(__file__, "slow")


def both(name: str, measure):
    results = []
    for implementation in ("chunk", "triton"):
        model = tiny_model(torch.float32, **{**SHAPE, **VARIANTS[name]}, memory_implementation=implementation)
        results.append(measure(model))
    assert_same(results[1], results[0], CLOSE)


@pytest.mark.parametrize("name", [USUAL, *REST])
def case_loss_and_gradients(name):
    ids = torch.arange(20)[None] % 13

    def measure(model):
        loss = model(ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    both(name, measure)


@pytest.mark.long
def case_hooks_on_saved_tensors():
    """They may lay numbers out in another way."""
    ids = torch.arange(20)[None] % 13

    def measure(model):
        model.set_attn_implementation("eager")  # SDPA's own backward does not bear them
        with saved_tensors_hooks(lambda x: x.detach().mT.contiguous().mT if x.dim() > 1 else x.detach(), lambda x: x):
            loss = model(ids, labels=ids).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    both(USUAL, measure)


@pytest.mark.long
def case_gradient_checkpointing():
    """It recomputes what a backward looks at, and lets it be looked at once."""
    ids = torch.arange(20)[None] % 13

    def measure(model):
        model.activation_checkpointing_enable()
        loss = model.train()(ids, labels=ids, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    both(USUAL, measure)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def case_the_compiler_goes_around_the_kernels():
    ids = torch.arange(20)[None] % 13

    def measure(model):
        step = torch.compile(model, backend="aot_eager") if model.config.memory_implementation == "triton" else model
        loss = step(ids, labels=ids, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    torch._dynamo.reset()
    both(USUAL, measure)


@pytest.mark.parametrize("name", [*later(USUAL), *REST])
def case_pieces_of_a_prompt_then_token_by_token(name):
    """Rows at different memory times: the second one is padded on the left."""
    ids = torch.arange(48).view(2, 24) % 13
    mask = torch.ones_like(ids)
    mask[1, :5] = 0

    def measure(model):
        steps, cache = [], None
        with torch.no_grad():
            for begin, end in ((0, 7), (7, 18), *((t, t + 1) for t in range(18, 24))):
                out = model(
                    ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, output_surprise=True
                )
                cache = out.past_key_values
                steps += [out.logits[mask[:, begin:end].bool()], *out.surprise]
        return steps

    both(name, measure)


@pytest.mark.slow
def case_a_program_has_the_kernels_behind_its_operators(monkeypatch):
    model = tiny_model(torch.float32, **SHAPE, **VARIANTS[USUAL], memory_implementation="triton")
    ids = torch.arange(40).view(2, 20) % 13
    with torch.no_grad():
        out = model(ids)
        shapes = {"input_ids": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "use_cache": None}
        program = torch.export.export(
            model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=shapes
        ).module()
        step = {"input_ids": ids[:, -1:], "position_ids": ids.new_full((2, 1), 20), CACHE_NAME: out[CACHE_NAME]}
        exported = DynamoExporter().export_program(model, deepcopy(step), DynamoConfig())[0].module()
        assert_same([exported(**deepcopy(step)).logits], [model(**deepcopy(step)).logits], CLOSE)
    used, kernel = [], TritonScan.apply
    monkeypatch.setattr(TritonScan, "apply", lambda *args: used.append(1) or kernel(*args))
    with torch.no_grad():
        assert_same([program(input_ids=ids[:1, :9], use_cache=False).logits], [model(ids[:1, :9]).logits], CLOSE)
    assert len(used) == 2, "a local memory, in the program and in the model"


def case_each_kernel_is_used(monkeypatch):
    """A prompt and a token of a TNT go through all five."""
    used = set()

    def follow(holder, name: str):
        kernel = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *args: used.add((holder, name)) or kernel(*args))

    kernels = [(scan, "apply") for scan in (TritonFeatures, TritonGlobal, TritonScan, TritonProjection)]
    kernels.append((kernels_decode_tnt, "token_step"))
    for kernel in kernels:
        follow(*kernel)
    model = tiny_model(torch.float32, **SHAPE, memory_implementation="triton")
    with torch.no_grad():
        cache = model(torch.ones(1, 9, dtype=torch.long)).past_key_values
        assert used == set(kernels[:4])
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert used == set(kernels)


def case_a_bfloat16_model_has_float32_gates_and_states():
    """The interpreter computes in float32, so what is left is how tokens are rounded on their way into a kernel."""
    ids, results = torch.arange(20)[None] % 13, []
    for implementation in ("chunk", "triton"):
        model = tiny_model(torch.bfloat16, **SHAPE, memory_implementation=implementation)
        with torch.no_grad():
            out = model(ids, use_cache=True)
        dtypes = {x.dtype for layer in out.past_key_values.layers for x in layer.recurrent_states.values()}
        assert dtypes == {torch.float32, torch.int64}
        results.append(out.logits.float())
    # bfloat16 rounds at 4e-3, a few times on the way to logits of order 1
    assert (results[1] - results[0]).norm() < 2e-2 * results[0].norm()


def case_the_op_projects_with_its_kernel_too(monkeypatch):
    tensors, weights, options = make_inputs(T=12, H=1, K=16, V=16, hidden=16, dtype=torch.float32)
    used, kernel = [], TritonProjection.apply
    monkeypatch.setattr(TritonProjection, "apply", lambda *args: used.append(1) or kernel(*args))
    options |= {"chunk_size": 4, "reset_interval": 8, "query_projection": "shard"}
    o = [memory_chunkwise(*tensors, weights, **options, implementation=x)[0] for x in ("chunk", "triton")]
    assert used == [1]
    assert_same([o[1]], [o[0]], CLOSE)


@pytest.mark.slow
def case_the_script_for_a_gpu_finds_them_right(tmp_path):
    """Everything it checks there but the times, on small shapes; a case that cannot run is a result too."""
    shapes = ["--check-tokens", "48", "--width", "16", "--heads", "2"]
    cases = ["model", "C=16 m=1 masked", "global", "C=16 m=1 nonsense"]
    kernels_gpu.main(["--out", str(tmp_path / "new" / "found.json"), "--cases", ",".join(cases), *shapes])
    found = json.loads((tmp_path / "new" / "found.json").read_text())["cases"]
    assert list(found) == cases and "KeyError" in found.pop(cases[-1])["float32"]["failed"]
    for entry in (entry for by_kind in found.values() for entry in by_kind.values()):
        errors = entry["error"].values()
        for pair in errors if "training" in entry["error"] else [errors]:
            assert all(error <= limit for error, limit in zip(pair, entry["limits"], strict=True)), entry
