"""The Triton kernels of the local memory, run by Triton's interpreter, are `memory_naive` in float32.

The interpreter must be chosen before Triton is imported, so these tests run in a pytest process of their own: without
TRITON_INTERPRET this file holds one test that starts it, and those of what is refused.

The reference is the token-by-token form in float64, on the same rounded numbers. Errors, relative or against 1 where
a tensor is smaller, stay below 1e-6: float32 rounds at 6e-8, and sums over a chunk and its products cost a few of
those; a wrong term is at 1e-3 or beyond. A LayerNorm comes with a gradient bound or few tokens: without, the
recurrence multiplies float32's rounding by more than that in any form.
"""

import os
import subprocess
import sys

import pytest
import torch
from test_memory import assert_same, everything, leaves, make_inputs, run
from tiny import tiny_model

from tnt_hf.kernels_tnt import choose, unsupported_scan
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive


pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CLOSE = 1e-6


def cast(x, dtype):
    """A copy of all tensors of lists, tuples and dicts in `dtype`."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(dtype, copy=True)
    if isinstance(x, dict):
        return {name: cast(y, dtype) for name, y in x.items()}
    return type(x)(cast(y, dtype) for y in x) if isinstance(x, list | tuple) else x


def outcome(op, tensors, weights, options, **settings) -> dict[str, torch.Tensor]:
    """Outputs, surprise, final state, and the gradients of a random combination of them, by name."""
    wanted = leaves(tensors, weights, options)
    for x in wanted:
        x.requires_grad_()
    o, state, surprise = run(op, tensors, weights, options, **settings)
    results = [o, *everything(state)]
    g = torch.Generator().manual_seed(7)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64)).sum() for x in results)
    gradients = torch.autograd.grad(loss, wanted)
    named = {f"state {i}": x for i, x in enumerate(results[1:])} | {"o": o, "surprise": surprise}
    named |= {f"gradient {i}": x for i, x in enumerate(gradients)}
    return {name: x.detach().double() for name, x in named.items()}


def triton(*args, **options):
    return memory_chunkwise(*args, implementation="triton", **options)


def assert_is_naive(inputs: dict, settings: dict):
    rounded = make_inputs(**{"H": 1, "K": 16, "V": 16, "hidden": 16} | inputs, dtype=torch.float32)
    want = outcome(memory_naive, *cast(rounded, torch.float64), **settings)
    got = outcome(triton, *rounded, **settings)
    assert list(got) == list(want)
    for name in want:
        assert_same([got[name]], [want[name]], CLOSE, name)


GATES = {"momentum": True, "decay": True}
HALF = torch.rand(2, 24, generator=torch.Generator().manual_seed(3)) > 0.4
ALL = {"residual": True, "activation": "gelu", "grad_bound": 0.3, "reset_interval": 12}
CASES = {
    "a deep memory": ({"H": 2, "T": 24}, {"chunk_size": 16}),
    "a linear memory": ({"T": 12, "depth": 1}, {"chunk_size": 4}),
    "a residual": ({"T": 12}, {"chunk_size": 4, "residual": True}),
    "gelu, twice as wide": ({"T": 12, "hidden": 32}, {"chunk_size": 4, "activation": "gelu"}),
    "keys wider than values": ({"T": 12, "K": 32, "V": 16, "hidden": 64}, {"chunk_size": 4}),
    "a LayerNorm": ({"T": 12, "layernorm": True}, {"chunk_size": 6, "residual": True}),
    "a linear one with a LayerNorm": ({"T": 8, "layernorm": True, "depth": 1}, {"chunk_size": 4, "grad_bound": 0.3}),
    "momentum": ({"T": 12, "momentum": True}, {"chunk_size": 4}),
    "forgetting to W_init": ({"T": 12, "decay": True}, {"chunk_size": 4}),
    "forgetting to 0": ({"T": 12, "decay": True}, {"chunk_size": 4, "decay_target": "zero"}),
    "a gradient bound": ({"T": 12, **GATES}, {"chunk_size": 4, "grad_bound": 0.3}),
    "three queries per key": ({"T": 12, "H": 2, "G": 3}, {"chunk_size": 6}),
    "single-token chunks": ({"T": 6}, {"chunk_size": 1, "reset_interval": 3}),
    "a chunk of several blocks": ({"T": 100}, {"chunk_size": 64}),
    "128-token chunks in odd pieces": ({"T": 130, **GATES}, {"chunk_size": 128, "split": [70, 60]}),
    "a chunk entered in its middle": ({"T": 24}, {"chunk_size": 8, "split": [5, 6, 13]}),
    "padding, documents and resets": (
        {"B": 2, "T": 24, "momentum": True},
        {
            "chunk_size": 5, "reset_interval": 10, "mask": HALF,
            "segment_ids": (torch.arange(24) // 9).expand(2, 24),
        },
    ),
    "everything": (
        {"B": 2, "T": 24, "G": 2, "layernorm": True, "hidden": 32, **GATES},
        {"chunk_size": 6, "split": [9, 15], "mask": HALF, **ALL},
    ),
}  # fmt: skip

if INTERPRETED:

    @pytest.mark.parametrize("name", CASES)
    def test_the_recurrence(name):
        assert_is_naive(*CASES[name])

    @pytest.mark.slow
    @pytest.mark.parametrize("chunk_size", [1, 4, 16, 64, 128])
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("momentum", [False, True])
    @pytest.mark.parametrize("decay", [False, True])
    @pytest.mark.parametrize("bound", [None, 0.3])
    def test_every_option_at_every_chunk(chunk_size, depth, momentum, decay, bound):
        length = {1: 8, 4: 16, 16: 40, 64: 70, 128: 130}[chunk_size]
        inputs = {"T": length, "depth": depth, "G": 2, "momentum": momentum, "decay": decay}
        pieces = [length // 3, length - length // 3]
        assert_is_naive(inputs, {"chunk_size": chunk_size, "grad_bound": bound, "split": pieces})

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [32, 64])
    def test_wider_heads(width):
        inputs = {"T": 40, "K": width, "V": width, "hidden": 2 * width, **GATES}
        assert_is_naive(inputs, {"chunk_size": 16, "reset_interval": 32, "residual": True})

    def test_bfloat16_operands(monkeypatch):
        """What a GPU makes of bfloat16: operands rounded, sums and state in float32. The interpreter cannot multiply
        bfloat16, so its operands are rounded here. 2^-9 per operand, through a recurrence of 8 chunks: 1e-2 of the
        largest output and 2e-2 of the largest gradient."""
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def rounded(x):
            return TensorHandle(torch.from_numpy(x.data.copy()).bfloat16().float().numpy(), x.dtype)

        def dot(builder, x, y, *rest):
            return exact(builder, rounded(x), rounded(y), *rest)

        exact = InterpreterBuilder.create_dot
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
        inputs = make_inputs(T=128, H=1, K=32, V=32, hidden=32, momentum=True, dtype=torch.float32)
        settings = {"chunk_size": 16, "grad_bound": 1.0}
        want = outcome(memory_naive, *cast(inputs, torch.float64), **settings)
        got = outcome(triton, *inputs, **settings)
        for name, x in want.items():
            error = ((got[name] - x).abs().max() / x.abs().max()).item()
            assert 1e-5 < error <= (2e-2 if "gradient" in name else 1e-2), f"{name}: {error:.1e}"

    def test_it_learns_without_autograd_too():
        """The same outputs bit for bit in inference_mode() and where nothing is kept for a backward."""
        tensors, weights, options = make_inputs(T=12, H=1, K=16, V=16, hidden=16, dtype=torch.float32)
        with torch.inference_mode():
            quiet, none = triton(*tensors, weights, **options, chunk_size=4)
        tensors[0].requires_grad_()
        trained, state = triton(*tensors, weights, **options, chunk_size=4, output_final_state=True)
        assert none is None and not quiet.requires_grad and trained.requires_grad
        assert torch.equal(quiet, trained)

    def test_gradients_without_a_final_state():
        rounded = make_inputs(T=10, H=1, K=16, V=16, hidden=16, **GATES, dtype=torch.float32)
        gradients = []
        for op, inputs in ((memory_naive, cast(rounded, torch.float64)), (triton, rounded)):
            wanted = leaves(*inputs)
            for x in wanted:
                x.requires_grad_()
            tensors, weights, options = inputs
            gradients.append(torch.autograd.grad(op(*tensors, weights, **options, chunk_size=4)[0].sum(), wanted))
        assert_same([x.double() for x in gradients[1]], gradients[0], CLOSE)

    def test_auto_does_not_choose_the_interpreter():
        cpu, weights = torch.device("cpu"), weights_of(16, 16)
        memory = torch.float32, "current", weights, torch.float32
        assert unsupported_scan(cpu, *memory) is None
        assert choose("implementation", "auto", cpu, unsupported_scan, *memory) == "chunk"

else:

    def in_the_interpreter(marker: str):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marker, "-p", "no:cacheprovider", __file__]
        done = subprocess.run(
            command, env=environment | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=os.getcwd()
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    def test_in_the_interpreter():
        in_the_interpreter("not slow")

    @pytest.mark.slow
    def test_in_the_interpreter_slow_ones():
        in_the_interpreter("slow")


# ------------------------------------------------------------------------------------------------- what is refused

CUDA = torch.device("cuda")  # a name: nothing here computes on it


def weights_of(*widths):
    return [torch.ones(1, a, b) for a, b in zip(widths, widths[1:])]


@pytest.mark.parametrize(
    "reason, arguments",
    [
        ("no Triton on 'meta'", (torch.device("meta"), torch.float32, "current", weights_of(16, 16))),
        ("16384 numbers", (CUDA, torch.float32, "chunk_start", weights_of(64, 128, 64))),
        ("float64", (CUDA, torch.float64, "current", weights_of(16, 16))),
        ("3 layers", (CUDA, torch.float32, "current", weights_of(16, 16, 16, 16))),
        ("[16, 48, 16]", (CUDA, torch.float32, "current", weights_of(16, 48, 16))),
        ("[8, 16]", (CUDA, torch.float32, "current", weights_of(8, 16))),
        ("65536", (CUDA, torch.float32, "current", weights_of(256, 256))),
    ],
)
def test_what_no_kernel_covers_has_a_reason(reason, arguments):
    device, *memory = *arguments, torch.float32
    assert reason in unsupported_scan(device, *memory)
    with pytest.raises(ValueError, match="implementation='triton' cannot run here"):
        choose("implementation", "triton", device, unsupported_scan, *memory)


def test_what_the_kernels_cover():
    for widths in ((16, 16), (64, 64, 64), (64, 128, 64), (64, 256, 64), (128, 128, 128), (32, 64, 16)):
        assert unsupported_scan(CUDA, torch.float32, "current", weights_of(*widths), torch.float32) is None


def test_auto_on_cuda_says_once_why_it_does_not_use_them(caplog):
    def auto(*widths):
        memory = torch.float32, "current", weights_of(*widths), torch.float32
        return choose("memory_implementation", "auto", CUDA, unsupported_scan, *memory)

    assert auto(16, 16) == "triton"
    assert not caplog.records
    assert [auto(16, 24, 16) for _ in range(3)] == ["chunk"] * 3
    assert len(caplog.records) == 1 and "[16, 24, 16]" in caplog.text


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on the CPU")
def test_the_op_refuses_on_the_cpu():
    tensors, weights, options = make_inputs(K=16, V=16, hidden=16, dtype=torch.float32)
    with pytest.raises(ValueError, match="implementation='triton' cannot run here: there is no Triton on 'cpu'"):
        triton(*tensors, weights, **options, chunk_size=4)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs on the CPU")
def test_the_model_refuses_on_the_cpu():
    model = tiny_model(memory_implementation="triton")
    with pytest.raises(ValueError, match="memory_implementation='triton' cannot run here"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_everything_else_works_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None  # what `import triton` finds where it is not installed
import torch
from tnt_hf.memory_tnt import memory_chunkwise
x = torch.randn(1, 4, 1, 16)
weights = [torch.randn(1, 16, 16)]
run = lambda how: memory_chunkwise(x, x, x, torch.ones(1, 4, 1), weights, chunk_size=2, implementation=how)
assert torch.equal(run("auto")[0], run("chunk")[0])
try:
    run("triton")
except ValueError as error:
    assert "implementation='triton' cannot run here: Triton is not installed" in str(error)
else:
    raise AssertionError("it ran")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
