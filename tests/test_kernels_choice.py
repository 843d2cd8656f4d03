"""Where the Triton kernels run: "triton" there or an error with the reason, "auto" wherever they can on CUDA."""

import subprocess
import sys

import pytest
import torch
from test_memory import make_inputs
from tiny import tiny_model, tokens

from tnt_hf import TNTCache, kernels_choice_tnt
from tnt_hf.kernels_choice_tnt import choose, unsupported_projection, unsupported_scan, unsupported_step
from tnt_hf.memory_tnt import memory_chunkwise


pytest.importorskip("triton")

CUDA = torch.device("cuda")  # a name: nothing here computes on it


def weights_of(*widths):
    return [torch.ones(1, a, b) for a, b in zip(widths, widths[1:])]


@pytest.mark.parametrize(
    "reason, arguments",
    [
        ("no Triton on 'meta'", (torch.device("meta"), torch.float32, "current", weights_of(16, 16))),
        ("float64", (CUDA, torch.float64, "current", weights_of(16, 16))),
        ("3 layers", (CUDA, torch.float32, "current", weights_of(16, 16, 16, 16))),
        ("[16, 48, 16]", (CUDA, torch.float32, "current", weights_of(16, 48, 16))),
        ("[8, 16]", (CUDA, torch.float32, "current", weights_of(8, 16))),
        ("65536", (CUDA, torch.float32, "current", weights_of(256, 256))),
        ("(256, 64)", (CUDA, torch.float32, "chunk_start", weights_of(64, 256, 64))),
        ("329984 bytes", (CUDA, torch.float32, "chunk_start", weights_of(64, 128, 64))),
    ],
)
def test_what_no_kernel_covers_has_a_reason(reason, arguments):
    device, *memory = *arguments, torch.float32, False
    assert reason in unsupported_scan(device, *memory)
    with pytest.raises(ValueError, match="implementation='triton' cannot run here"):
        choose("implementation", "triton", device, unsupported_scan, *memory)


def test_what_the_kernels_cover():
    for widths in ((16, 16), (64, 64, 64), (64, 128, 64), (64, 256, 64), (128, 128, 128), (32, 64, 16)):
        assert unsupported_scan(CUDA, torch.float32, "current", weights_of(*widths), torch.float32, False) is None
        assert unsupported_step(CUDA, torch.float32, weights_of(*widths)) is None
    for widths, operands in (
        ((64, 64, 64), torch.float32),
        ((64, 128, 64), torch.bfloat16),
        ((128, 128), torch.bfloat16),
    ):
        assert unsupported_scan(CUDA, torch.float32, "chunk_start", weights_of(*widths), operands, True) is None


@pytest.mark.parametrize(
    "read, kilobytes, operands, momentum, widths, fits",
    [  # compiled for sm_90, sm_80 and sm_86: bytes of shared memory of the backward kernel, the larger one
        ("current", 227, torch.float32, True, (256, 128), False),  # 278,528
        ("current", 227, torch.bfloat16, True, (256, 128), True),  # 196,608
        ("current", 227, torch.bfloat16, True, (128, 128, 128), True),  # 147,456
        ("current", 163, torch.bfloat16, True, (128, 128), True),  # 131,072
        ("current", 99, torch.bfloat16, True, (128, 128), False),  # 131,072
        ("current", 99, torch.bfloat16, False, (128, 128), True),  # 73,728
        ("current", 99, torch.bfloat16, True, (64, 64, 64), True),  # 36,864
        ("current", 99, torch.float32, False, (32, 256, 32), False),  # 131,072
        ("current", 99, torch.bfloat16, False, (32, 256, 32), True),  # 65,536
        ("chunk_start", 227, torch.bfloat16, False, (64, 128, 64), True),  # 147,584
        ("chunk_start", 227, torch.bfloat16, True, (128, 128), True),  # 213,248
        ("chunk_start", 163, torch.bfloat16, True, (128, 128), False),  # 213,248
        ("chunk_start", 163, torch.float32, False, (64, 64, 64), True),  # 147,712
        ("chunk_start", 99, torch.bfloat16, False, (64, 64, 64), True),  # 82,176
        ("chunk_start", 99, torch.bfloat16, True, (64, 64, 64), False),  # 107,776
    ],
)
def test_a_memory_has_to_fit_into_shared_memory(monkeypatch, read, kilobytes, operands, momentum, widths, fits):
    monkeypatch.setattr(kernels_choice_tnt, "shared_memory", lambda device: kilobytes << 10)
    reason = unsupported_scan(CUDA, torch.float32, read, weights_of(*widths), operands, momentum)
    assert (reason is None) == fits and (fits or "on this GPU" in reason)


@pytest.mark.parametrize(
    "kilobytes, operands, widths, fits",
    [  # compiled for sm_90, sm_80 and sm_89: bytes of shared memory of the larger kernel with 4 query heads
        (99, torch.float32, (64, 64, 64), False),  # 114,688
        (99, torch.float32, (128, 128), False),  # 131,072
        (99, torch.float32, (64, 64), True),  # 32,768
        (99, torch.bfloat16, (128, 128), False),  # 131,072
        (99, torch.bfloat16, (64, 128, 64), True),  # 65,536
        (163, torch.bfloat16, (128, 128, 128), True),  # 131,072
        (227, torch.float32, (128, 128), True),  # 163,840
        (227, torch.float32, (128, 128, 128), True),  # 163,840
    ],
)
def test_query_heads_that_share_a_memory_take_shared_memory(monkeypatch, kilobytes, operands, widths, fits):
    monkeypatch.setattr(kernels_choice_tnt, "shared_memory", lambda device: kilobytes << 10)
    reason = unsupported_scan(CUDA, torch.float32, "current", weights_of(*widths), operands, False, 4)
    assert (reason is None) == fits and (fits or "on this GPU" in reason)


@pytest.mark.parametrize(
    "operands, momentum, widths, fits",
    [  # compiled for sm_100: columns of tensor memory of the backward kernel, of which there are 512
        (torch.bfloat16, True, (64, 64, 64), True),  # 512
        (torch.bfloat16, False, (64, 128, 64), True),  # 512
        (torch.bfloat16, True, (64, 128, 64), False),  # 576
        (torch.bfloat16, False, (128, 128, 128), False),  # 576
        (torch.float32, False, (64, 64, 64), True),  # 512
        (torch.float32, True, (64, 64, 64), False),  # 640
    ],
)
def test_a_memory_has_to_fit_into_tensor_memory(monkeypatch, operands, momentum, widths, fits):
    memory = CUDA, torch.float32, "current", weights_of(*widths), operands, momentum
    monkeypatch.setattr(kernels_choice_tnt, "generation", lambda device: 10)
    reason = unsupported_scan(*memory)
    assert (reason is None) == fits and (fits or "tensor memory" in reason)
    monkeypatch.setattr(kernels_choice_tnt, "generation", lambda device: 9)
    assert unsupported_scan(*memory) is None


def test_the_projection_has_its_reasons():
    assert unsupported_projection(CUDA, torch.float32, 64, torch.float32, 1) is None
    assert "width 24" in unsupported_projection(CUDA, torch.float32, 24, torch.float32, 1)
    assert "float64" in unsupported_projection(CUDA, torch.float64, 64, torch.float64, 1)


@pytest.mark.parametrize(
    "kilobytes, operands, width, groups, fits",
    [  # compiled for sm_90, sm_80 and sm_89: bytes of shared memory of the kernel that takes most
        (227, torch.float32, 128, 1, True),  # 196,608
        (227, torch.float32, 128, 4, False),  # 327,680
        (227, torch.float32, 64, 4, True),  # 131,072
        (227, torch.bfloat16, 128, 4, True),  # 163,840
        (163, torch.float32, 128, 4, False),  # 360,448
        (163, torch.float32, 64, 4, True),  # 147,456
        (99, torch.float32, 128, 1, True),  # 65,536
        (99, torch.float32, 64, 2, False),  # 147,456
        (99, torch.float32, 32, 2, True),  # 73,728
        (99, torch.bfloat16, 128, 2, True),  # 81,920, with loads ahead of their use 122,880
    ],
)
def test_a_projection_has_to_fit_into_shared_memory(monkeypatch, kilobytes, operands, width, groups, fits):
    monkeypatch.setattr(kernels_choice_tnt, "shared_memory", lambda device: kilobytes << 10)
    reason = unsupported_projection(CUDA, torch.float32, width, operands, groups)
    assert (reason is None) == fits and (fits or "on this GPU" in reason)


def test_auto_on_cuda_says_once_why_it_does_not_use_them(caplog):
    def auto(*widths):
        memory = torch.float32, "current", weights_of(*widths), torch.float32, False
        return choose("memory_implementation", "auto", CUDA, unsupported_scan, *memory)

    assert auto(64, 64) == "triton"
    assert not caplog.records
    assert [auto(64, 24, 64) for _ in range(3)] == ["chunk"] * 3
    assert len(caplog.records) == 1 and "[64, 24, 64]" in caplog.text


def test_auto_leaves_narrow_keys_to_torch(caplog):
    weights = weights_of(32, 64, 64)
    scan, step = (torch.float32, "current", weights, torch.float32, False), (torch.float32, weights)
    for value, found in (("auto", "chunk"), ("triton", "triton")):
        assert choose("implementation", value, CUDA, unsupported_scan, *scan) == found
        assert choose("implementation", value, CUDA, unsupported_step, *step) == found
        projection = torch.float32, 32, torch.bfloat16, 1
        assert choose("implementation", value, CUDA, unsupported_projection, *projection) == found
    assert "keys have 32 channels" in caplog.text
    projection = torch.float32, 64, torch.bfloat16, 1
    assert choose("implementation", "auto", CUDA, unsupported_projection, *projection) == "triton"


def test_auto_on_the_cpu_is_torch_without_a_word(caplog):
    """Also where a kernel could run, as it can in the interpreter."""
    for possible in (lambda device: None, lambda device: "there is none"):
        assert choose("memory_implementation", "auto", torch.device("cpu"), possible) == "chunk"
    assert not caplog.records


@pytest.mark.parametrize("width, found", [(64, "triton"), (32, "chunk"), (96, "chunk")])
def test_a_compiled_step_chooses_without_breaking_its_graph(width, found):
    """A message would break it, and what the library compiles for a static cache is one graph."""

    def step(x):
        how = choose("implementation", "auto", CUDA, unsupported_step, torch.float32, weights_of(width, width))
        return x + (how == "triton")

    assert torch.compile(step, fullgraph=True, backend="eager")(torch.zeros(())) == (found == "triton")


def test_the_op_refuses_on_the_cpu():
    tensors, weights, options = make_inputs(K=16, V=16, hidden=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="implementation='triton' cannot run here: there is no Triton on 'cpu'"):
        memory_chunkwise(*tensors, weights, **options, chunk_size=4, implementation="triton")


def test_the_model_refuses_on_the_cpu():
    model = tiny_model(memory_implementation="triton")
    with pytest.raises(ValueError, match="memory_implementation='triton' cannot run here"):
        model(torch.ones(1, 4, dtype=torch.long))


@pytest.mark.long
def test_everything_else_works_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None  # what `import triton` finds where it is not installed
import torch
from tnt_hf.memory_tnt import memory_chunkwise
x = torch.nn.functional.normalize(torch.randn(1, 4, 1, 16), dim=-1)  # steps of longer keys blow rounding up
weights = [torch.randn(1, 16, 16)]
run = lambda how: memory_chunkwise(x, x, x, torch.ones(1, 4, 1), weights, chunk_size=2, implementation=how)
assert torch.allclose(run("auto")[0], run("chunk")[0], atol=1e-5)
try:
    run("triton")
except ValueError as error:
    assert "implementation='triton' cannot run here: Triton is not installed" in str(error)
else:
    raise AssertionError("it ran")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
def test_the_implementation_can_be_changed_later():
    """As `attn_implementation` can: the configuration is asked at every call, while decoding as well."""
    model, naive, ids = tiny_model(), tiny_model(memory_implementation="naive"), tokens(2, 31)

    def read_and_decode(model):
        cache = TNTCache(model.config)
        return torch.cat([model(ids[:, part], past_key_values=cache).logits for part in (slice(30), slice(30, 31))], 1)

    chunk, expected = read_and_decode(model), read_and_decode(naive)
    for part in (slice(30), slice(30, 31)):
        assert not torch.equal(chunk[:, part], expected[:, part]), "equal to the bit: this test would see nothing"
    model.config.memory_implementation = "naive"
    assert torch.equal(read_and_decode(model), expected)
    model.config.memory_implementation = "triton"
    with pytest.raises(ValueError, match="memory_implementation='triton' cannot run here"):
        model(ids)
    model.config.memory_implementation = "fast"
    with pytest.raises(ValueError, match="implementation must be one of .* got 'fast'"):
        model(ids)
