"""The memory in C: what it computes, on how many threads, and what happens where it cannot be compiled or run.

That it is the recurrence, with all options and gradients, is shown by `test_memory` and `test_memory_backward`, which
run with both forms. Here are the widths that fill the processor's vectors or do not, and what is around the code.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import in_a_child
from test_memory import assert_same, leaves, make_inputs, run
from tiny import MODES, later, tiny_model, tokens
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from tnt_hf import native_build_tnt, native_step_tnt, native_tnt
from tnt_hf.memory_tnt import memory_chunkwise, memory_naive


REASON = native_build_tnt.unavailable(torch.float32)
needs_native = pytest.mark.skipif(REASON is not None, reason=f"native code: {REASON}")
# Of float32: rounding of some hundred sums, which a memory's writes carry on; relative to the largest number.
FLOAT32 = 2e-5


def results(op, tensors, weights, gates, **options) -> list[torch.Tensor]:
    """Output, state and all gradients."""
    inputs = [x.detach().requires_grad_() for x in leaves(tensors, weights, gates)]
    x, w = inputs[:4], inputs[4 : 4 + len(weights)]
    rest = iter(inputs[4 + len(weights) :])
    given = {name: y if isinstance(y, tuple) else next(rest) for name, y in gates.items()}
    found, g = op(x, w, given, **options), torch.Generator().manual_seed(7)
    outputs = [found[0], *found[1].weights]
    loss = sum((y.double() * torch.randn(y.shape, generator=g, dtype=torch.float64)).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize(
    "mode",
    ["default", *later("quadratic keys", "momentum and forgetting")],
)
def test_threads_share_a_model(mode):
    """As in a server: what several threads generate and differentiate at once is what one does, to the bit."""
    model = tiny_model(torch.float32, **MODES[mode])
    prompts = [tokens(1 + n % 2, 30 + 9 * n) for n in range(8)]

    def work(prompt):
        grads = torch.autograd.grad(model(prompt, labels=prompt).loss, list(model.parameters()))
        return [model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12), *grads]

    alone = list(map(work, prompts))
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(work, 2 * prompts), 2 * alone, strict=True):
            assert all(map(torch.equal, got, want))


@needs_native
@pytest.mark.parametrize("widths", [(64, 64), (16, 40), (24, 24), (12, 100), (7, 9), (32, 128)], ids=str)
@pytest.mark.parametrize("C", [1, *later(3, 8, 16), 40])
@pytest.mark.parametrize("full", [False, True])
def test_vectors_and_what_is_left_of_them(widths, C, full):
    """float32 against the recurrence in float64."""
    width, hidden = widths
    options = {"T": 80, "G": 2, "K": width, "V": width, "hidden": hidden, "momentum": full, "decay": full}
    single = make_inputs(**options, rate=0.3, dtype=torch.float32)
    double = [[x.double() for x in y] for y in single[:2]] + [{n: x.double() for n, x in single[2].items()}]

    def form(implementation):
        return lambda x, w, gates, **rest: run(memory_chunkwise, x, w, gates, implementation=implementation, **rest)

    settings = {"chunk_size": C, "reset_interval": 2 * C}
    got = results(form("native"), *single, **settings)
    want = results(lambda x, w, gates, **rest: run(memory_naive, x, w, gates, **rest), *double, **settings)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        assert (x - y).abs().max() <= FLOAT32 * y.abs().max(), ((x - y).abs().max() / y.abs().max()).item()


@needs_native
@pytest.mark.parametrize("activation, last_bits, absolute", [("silu", 2, 1e-37), ("gelu", 4, 1e-7)])
def test_activations_over_their_whole_range(activation, last_bits, absolute):
    """f(W, q) = phi(q W_1) W_2 with the identity twice. Of a GELU's lower tail nothing but its size is promised."""
    q = torch.cat([torch.linspace(-30, 30, 64000), torch.tensor([0.0, -0.0, 1e-30, -1e-8, 80.0, -80.0, 1e4, -1e4])])
    q = torch.cat([q, torch.zeros(-len(q) % 16)]).view(1, -1, 1, 16)
    zero, eye = torch.zeros_like(q), [torch.eye(16)[None]] * 2
    options = {"chunk_size": 16, "activation": activation, "implementation": "native"}
    o, _ = memory_chunkwise(q, zero, zero, zero[..., 0], eye, **options)
    phi = torch.nn.functional.silu if activation == "silu" else torch.nn.functional.gelu
    want = phi(q.double())
    assert ((o - want).abs() <= last_bits * torch.finfo(torch.float32).eps * want.abs() + absolute).all()


@needs_native
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_slopes_over_their_whole_range(activation):
    """phi'(z) is what the way back multiplies with, here for reads that nothing is written before."""
    z = torch.cat([torch.linspace(-30, 30, 16000), torch.tensor([80.0, -80.0, 1e4, -1e4, 3e7, -3e7, 1e15, -1e15] * 2)])
    q = z.view(1, -1, 1, 16).requires_grad_()
    zero, eye = torch.zeros_like(q), [torch.eye(16)[None]] * 2
    o, _ = memory_chunkwise(
        q, zero, zero, zero[..., 0], eye, chunk_size=16, activation=activation, implementation="native"
    )
    (slope,) = torch.autograd.grad(o.sum(), q)
    x = z.double().requires_grad_()
    (want,) = torch.autograd.grad(getattr(torch.nn.functional, activation)(x).sum(), x)
    assert (slope.flatten() - want).abs().max() <= 2e-6  # a few bits of float32 at 1, of z up to 17 times more


@needs_native
def test_not_a_number_stays_in_its_row_and_behind_its_chunks_first():
    tensors, weights, gates = make_inputs(B=2, T=24, K=16, V=16, hidden=16, momentum=True, dtype=torch.float32)
    options = {"chunk_size": 4, "implementation": "native", **gates}
    want = memory_chunkwise(*tensors, weights, **options)[0]
    tensors[1][1, 9] = float("nan")
    got = memory_chunkwise(*tensors, weights, **options)[0]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1, :8], want[1, :8]) and got[1, 9:].isnan().all()


@needs_native
def test_neither_threads_nor_other_rows_change_a_bit():
    tensors, weights, gates = make_inputs(B=5, T=40, H=3, G=2, K=24, V=24, hidden=40, momentum=True, decay=True)
    tensors, weights = ([x.float() for x in y] for y in (tensors, weights))
    gates = {name: x.float() for name, x in gates.items()}

    def one(rows):
        found = results(
            lambda x, w, g, **rest: run(memory_chunkwise, x, w, g, chunk_size=8, implementation="native"),
            [x[rows] for x in tensors], weights, {name: x[rows] for name, x in gates.items()},
        )  # fmt: skip
        return found[0], found[1], found[3]  # output, weights and the gradient of q

    threads = torch.get_num_threads()
    try:
        all_rows = {}
        for n in (1, 2, 4):
            torch.set_num_threads(n)
            all_rows[n] = one(slice(None))
    finally:
        torch.set_num_threads(threads)
    for n in (2, 4):
        assert all(map(torch.equal, all_rows[n], all_rows[1]))
    assert torch.equal(one(slice(2, 3))[0], all_rows[1][0][2:3])


@needs_native
def test_a_model_in_c_is_the_model_in_torch():
    """Rounding apart: outputs, gradients and logits of tokens that are decoded one by one."""
    ids, logits, grads, decoded = tokens(2, 40), [], [], []
    for how in ("chunk", "native"):
        model = tiny_model(memory_implementation=how)
        found = model(ids, labels=ids, use_cache=False)
        found.loss.backward()
        logits.append(found.logits)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        settings = {"return_dict_in_generate": True, "output_logits": True, "use_cache": True}
        found = model.eval().generate(ids, do_sample=False, min_new_tokens=9, max_new_tokens=9, **settings)
        decoded.append(torch.stack(found.logits))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(decoded[1], decoded[0], rtol=1e-4, atol=1e-5)
    assert (grads[1] - grads[0]).norm() <= 1e-5 * grads[0].norm()


# ---------------------------------------------------------------------------------------------- where it does not run


class Own(torch.Tensor):
    """A tensor whose numbers need not lie where its address says."""


def small(wrap=lambda x: x, **options):
    tensors, weights, _ = make_inputs(dtype=torch.float32)
    return memory_chunkwise(*map(wrap, tensors), weights, chunk_size=4, **options)[0]


@needs_native
def test_reasons_are_named_by_native_and_found_by_auto(caplog):
    native_build_tnt._report.cache_clear()
    with pytest.raises(ValueError, match="implementation='native' cannot run here: a tensor is of a class of its own"):
        small(lambda x: x.as_subclass(Own), implementation="native")
    with FlopCounterMode(display=False) as counter:
        with pytest.raises(ValueError, match="operations of torch are being recorded"):
            small(implementation="native")
        o = small()
    assert counter.get_total_flops() and torch.equal(o, small(implementation="chunk"))
    assert [x.getMessage() for x in caplog.records] == [
        "implementation='auto' runs 'chunk' on the CPU: operations of torch are being recorded, which C is not."
    ]
    tensors, _, _ = make_inputs(dtype=torch.float32)
    with pytest.raises(ValueError, match="the memory network has 9 layers, more than 8"):
        memory_chunkwise(*tensors, [torch.ones(2, 4, 4)] * 9, chunk_size=4, implementation="native")


def test_a_model_names_its_field(monkeypatch):
    monkeypatch.setattr(native_build_tnt, "unavailable", lambda dtype: "no C compiler was found")
    with pytest.raises(ValueError, match="memory_implementation='native' cannot run here: no C compiler was found"):
        tiny_model(memory_implementation="native")(tokens(1, 8))
    with pytest.raises(ValueError, match="memory_implementation='native' cannot run here: it is for the CPU"):
        tiny_model(memory_implementation="native").to("meta")(tokens(1, 8).to("meta"))


CODE = """
import logging, sys, torch
sys.argv[0] = "tnt"  # as the command line starts, which keeps `tnt_hf` from loading the models: seconds
logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.INFO)
from tnt_hf import native_build_tnt
from tnt_hf.memory_tnt import memory_chunkwise
# first
x = torch.nn.functional.normalize(torch.randn(1, 8, 1, 16), dim=-1)
rest = torch.ones(1, 8, 1), [torch.eye(16)[None]]
run = lambda how: memory_chunkwise(x, x, -x, *rest, chunk_size=2, implementation=how)[0]
print("same", torch.allclose(run("auto"), run("chunk"), atol=1e-5), native_build_tnt.unavailable(torch.float32))
"""


@pytest.fixture
def hasty(tmp_path, monkeypatch):
    """Compilers of other processes do not optimise: a second instead of ten where only the file counts."""
    compiler = tmp_path / "hasty"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC") or "gcc"} "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))


def elsewhere(cache: Path, first: str = "", **environment) -> str:
    """What another process says that finds `cache` in place of the user's. first: what it does after its imports."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), **environment}
    command = [sys.executable, "-c", CODE.replace("# first", first)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "foreign"])
def test_without_a_compiler_it_is_torch_and_says_so_once(tmp_path, compiler):
    (tmp_path / "bin").mkdir()  # where no `cc` is either
    (tmp_path / "bin" / "false").symlink_to("/bin/false")
    foreign = tmp_path / "bin" / "foreign"  # whose message is not UTF-8
    foreign.write_text("#!/bin/sh\nprintf 'r\\351pertoire introuvable\\n' >&2; exit 1\n")
    foreign.chmod(0o755)
    told = elsewhere(tmp_path / "cache", CC=compiler, PATH=str(tmp_path / "bin"))
    assert told.count("implementation='auto' runs 'chunk' on the CPU: ") == 1 and "same True" in told
    assert {"no-such-compiler": "CC names 'no-such-compiler', which was not found"}.get(
        compiler, "compiler failed"
    ) in told
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_the_first_compiler_there_is(tmp_path, monkeypatch):
    """gcc, cc and clang, then the wheel of zig; what CC names alone where it is set, with arguments or without."""

    def installed(name: str) -> str:
        path = tmp_path / name
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(native_build_tnt.Unavailable, match="no C compiler was found: .*`pip install ziglang`"):
        native_build_tnt._compiler()
    wheel = ModuleType("ziglang")
    wheel.__spec__ = ModuleSpec("ziglang", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setitem(sys.modules, "ziglang", wheel)
    assert native_build_tnt._compiler() == [str(tmp_path / "zig"), "cc"]
    for name in ("clang", "cc", "gcc"):
        path = installed(name)
        assert native_build_tnt._compiler() == [path]
    monkeypatch.setenv("CC", "clang -pipe")
    assert native_build_tnt._compiler() == ["clang", "-pipe"]
    monkeypatch.setenv("CC", "clang 'x")
    with pytest.raises(native_build_tnt.Unavailable, match="CC names .*, which was not found"):
        native_build_tnt._compiler()
    monkeypatch.setenv("CC", installed("a compiler"))
    assert native_build_tnt._compiler() == [str(tmp_path / "a compiler")]


@needs_native
@pytest.mark.parametrize(
    "dtype, tolerance",
    [(torch.float32, FLOAT32), pytest.param(torch.float64, 1e-13, marks=pytest.mark.slow)],
)
# zig's is a clang, too
@pytest.mark.parametrize("compiler", [pytest.param("clang", marks=pytest.mark.slow), *later("zig")])
def test_other_compilers(tmp_path, monkeypatch, dtype, tolerance, compiler):
    """What clang makes of the source does what this machine's code does, in one of torch's threads or in several."""
    if compiler == "clang" and shutil.which("clang") is None or compiler == "zig" and find_spec("ziglang") is None:
        pytest.skip(f"{compiler} is not installed")
    first = native_build_tnt.library(dtype)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(native_build_tnt, "COMPILERS", ("clang",) * (compiler == "clang"))
    other = native_build_tnt.library.__wrapped__(dtype)
    assert Path(other._name).parent.parent == tmp_path and compiler in native_build_tnt._compiler()[0]
    tensors, weights, gates = make_inputs(B=3, T=70, G=2, K=24, V=24, dtype=dtype, momentum=True, decay=True)
    model, prompt = tiny_model(dtype, **MODES["momentum and forgetting"]), tokens(3, 30)

    def op(x, w, gates, **rest):
        return run(memory_chunkwise, x, w, gates, chunk_size=16, implementation="native", **rest)

    @torch.no_grad()
    def decoded():
        first = model(prompt[:, :-1], use_cache=True)
        return [first.logits, model(prompt[:, -1:], past_key_values=first.past_key_values).logits]

    threads, found, logits = torch.get_num_threads(), [], []
    try:
        for code, number in ((first, 1), (other, 1), (other, 3)):
            for module in (native_tnt, native_step_tnt):
                monkeypatch.setattr(module, "library", lambda _, code=code: code)
            torch.set_num_threads(number)
            found.append(results(op, tensors, weights, gates))
            logits.append(decoded())
    finally:
        torch.set_num_threads(threads)
    for want, got, in_threads in zip(*found, strict=True):
        assert (got - want).abs().max() <= tolerance * want.abs().max() and torch.equal(in_threads, got)
    for want, *others in zip(*logits, strict=True):
        for got in others:  # torch's own products depend on the number of threads
            assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.long
def test_without_room_for_it_it_is_torch(tmp_path):
    """No file may grow beyond 0 bytes, as on a full disk."""
    told = elsewhere(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert told.count("implementation='auto' runs 'chunk' on the CPU: [Errno 27] File too large") == 1
    assert "same True" in told and not list((tmp_path / "tnt-hf").iterdir())


@pytest.mark.long
@needs_native
def test_it_is_compiled_once_and_again_where_the_file_is_broken(tmp_path, hasty):
    assert "compiling memory-" in elsewhere(tmp_path) and "compiling" not in elsewhere(tmp_path)
    [library] = (tmp_path / "tnt-hf").iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o755  # to be read by all, and written by nobody else
    assert not stat.S_IMODE(library.parent.stat().st_mode) & 0o022
    library.write_bytes(library.read_bytes()[:5000])
    told = elsewhere(tmp_path)
    assert "compiled again" in told and "same True None" in told and "compiling" not in elsewhere(tmp_path)


MAPPED = """
import ctypes, mmap, os, shutil
folder = os.fsencode(sys.executable and FOLDER) + b"/a \\xe9 b"
os.mkdir(folder)
data = open(folder + b"/data", "w+b")
data.write(b"0")
data.flush()
kept = mmap.mmap(data.fileno(), 1)
with open("/proc/self/maps", errors="surrogateescape") as lines:
    paths = {line.rstrip("\\n").split(maxsplit=5)[-1] for line in lines}
for path in [x for x in paths if os.path.basename(x).startswith(("libgomp", "libiomp5"))]:
    os.mkdir(FOLDER + "/with a space")
    ctypes.CDLL(shutil.copy(path, FOLDER + "/with a space"))
"""


def test_what_the_system_refused_is_asked_for_again_after_a_while(monkeypatch):
    """As a file handle, where a server had none left when its first request came."""
    now, answers = [0.0], [OSError("Too many open files"), OSError("Too many open files"), None]

    def library(dtype):
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr(native_build_tnt, "library", library)
    monkeypatch.setattr(native_build_tnt, "_REASONS", {})
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = []
    for now[0] in (0, 59, 61, 119, 122, 1000):
        found.append((native_build_tnt.unavailable(torch.float32), len(answers)))
    refused = "Too many open files"
    assert found == [(refused, 2), (refused, 2), (refused, 1), (refused, 1), (None, 0), (None, 0)]


def test_threads_that_begin_together_compile_once(monkeypatch):
    calls, begun = [], threading.Barrier(4)
    monkeypatch.setattr(native_build_tnt, "library", lambda dtype: (calls.append(dtype), time.sleep(0.2)))
    monkeypatch.setattr(native_build_tnt, "_REASONS", {})

    def first(_):
        begun.wait()
        return native_build_tnt.unavailable(torch.float32)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(first, range(4))) == [None] * 4
    assert calls == [torch.float32]


def test_a_fork_does_not_wait_for_a_thread_that_it_has_not():
    def child():
        assert native_build_tnt._LOCK.acquire(timeout=1)

    with native_build_tnt._LOCK:
        assert in_a_child(child) == 0


@pytest.mark.long
@needs_native
def test_what_another_compiler_made_is_not_loaded_and_arithmetic_stays_exact(tmp_path):
    """Linked with -ffast-math, a library rounds denormals of whatever its process computes to 0."""
    smallest = "print('half of 1e-40 is', torch.tensor(1e-40).mul(0.5).item())"
    denormal = f"native_build_tnt.unavailable(torch.float32); {smallest}"
    for compiler, files in (("gcc", 1), ("gcc -ffast-math", 2)):
        told = elsewhere(tmp_path, denormal, CC=f"{compiler} -O0")
        assert "same True None" in told and "half of 1e-40 is 4.99" in told
        assert len(list((tmp_path / "tnt-hf").iterdir())) == files


def test_a_compiler_that_compiles_nothing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "true --really")
    with pytest.raises(native_build_tnt.Unavailable, match="'true --really' compiles nothing"):
        native_build_tnt._compile((), tmp_path / "memory.so")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_folder_of_a_process_outlives_its_forks(tmp_path):
    """Servers that fork before they serve have children that end before them."""
    code = """
import os, sys
from tnt_hf import native_build_tnt
folder = native_build_tnt._own_folder()
if not os.fork():
    sys.exit(0)
os.wait()
print(folder.is_dir())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.stdout == "True\n" and not list(tmp_path.iterdir()), done.stderr


def test_a_relative_cache_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native_build_tnt._cache() == (tmp_path / ".cache" / "tnt-hf", "")
    monkeypatch.setenv("HOME", "here")
    assert native_build_tnt._cache() == (None, "here/.cache/tnt-hf is no absolute path")


def test_a_cache_of_roots_is_trusted_and_another_users_is_not(tmp_path, monkeypatch):
    """As one made with an image, whose processes are then another user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_build_tnt._cache() == (folder := tmp_path / "tnt-hf", "")
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert native_build_tnt._cache() == ((None, f"others can put code into {folder}") if owner else (folder, ""))


AS_NOBODY = """
import os
os.setgid(65534)
os.setuid(65534)
"""


@needs_native
@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_cache_of_roots_is_read_by_another_user_without_a_compiler(hasty):
    """An image is made by root, and runs as whom it likes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # those of pytest are root's alone
        os.chmod(folder, 0o755)
        cache, compiler = Path(folder), shutil.copy(os.environ["CC"], folder)
        assert "compiling" in elsewhere(cache, CC=compiler)
        told = elsewhere(cache, AS_NOBODY, CC=compiler, PATH="/nowhere")
        assert "same True None" in told and "compiling" not in told
        next(cache.rglob("*.so")).chmod(0o700)
        told = elsewhere(cache, AS_NOBODY, CC=compiler, PATH="/nowhere")
        assert "gcc" in told and "of what was compiled before: [Errno 13] Permission denied" in told


READ_ONLY = "import os; access = os.access; os.access = lambda path, mode: not mode & os.W_OK and access(path, mode)"
# What the loader says of a file on a disk that was mounted with noexec.
NOEXEC = """
import ctypes, os
def load(path, mode, load=ctypes.CDLL):
    if path.startswith(os.environ["XDG_CACHE_HOME"]):
        raise OSError("failed to map segment from shared object")
    return load(path, mode)
ctypes.CDLL = load
"""


@pytest.mark.long
@needs_native
def test_a_cache_that_cannot_be_written_or_executed_is_read(tmp_path, hasty):
    """What is in it is not compiled again; what is not goes to a folder of the process."""
    (temporary := tmp_path / "tmp").mkdir()
    empty, kept = tmp_path / "empty", tmp_path / "kept"
    assert "compiling" in (told := elsewhere(empty, READ_ONLY, TMPDIR=str(temporary))) and "same True None" in told
    assert not list(empty.rglob("*.so")) and "tnt-hf cannot be written" in told
    for first, count in ((NOEXEC, 1), (NOEXEC, 0), (READ_ONLY, 0)):
        told = elsewhere(kept, first, TMPDIR=str(temporary))
        assert told.count("compiling") == count and "same True None" in told
    assert len(list(kept.rglob("*.so"))) == 1 and not list(temporary.iterdir())


@pytest.mark.long
@needs_native
def test_what_the_process_has_loaded_may_have_any_name(tmp_path, hasty):
    """As of an environment whose path has a space, and of a data set in a folder whose name is not UTF-8."""
    assert "same True None" in elsewhere(tmp_path, MAPPED.replace("FOLDER", repr(str(tmp_path))))


@needs_native
def test_another_default_device_is_not_the_memorys():
    model, ids = tiny_model(memory_implementation="native"), tokens(1, 21)
    expected = model(ids, use_cache=False).logits
    with torch.device("meta"):
        assert torch.equal(model(ids, use_cache=False).logits, expected)


@needs_native
@pytest.mark.slow
def test_processes_may_compile_at_once(tmp_path, hasty):
    """None of them loads what another has half written, and nothing is left behind."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert all("same True None" in process.communicate()[0] for process in started)
    assert len(list((tmp_path / "tnt-hf").iterdir())) == 1


@pytest.mark.long
@needs_native
@pytest.mark.parametrize("why", ["a file", "writable by all"])
def test_a_cache_that_is_not_the_users_own_is_not_used(tmp_path, why, hasty):
    """Code is only loaded from where nobody else can put it."""
    folder = tmp_path / "tnt-hf"
    folder.write_text("") if why == "a file" else folder.mkdir()
    if why != "a file":
        folder.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    told = elsewhere(tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert "same True None" in told and told.count("compiled for this process alone") == 1
    assert {"a file": "is no folder"}.get(why, f"others can put code into {folder}") in told
    assert not list(tmp_path.rglob("*.so")), "the folder of the process goes with it"


@needs_native
def test_hooks_on_saved_tensors():
    """They may lay numbers out in another way, as one that moves them elsewhere and back does."""
    (q, k, v, lr), weights, gates = make_inputs(T=21)
    inputs = leaves((q, k, v, lr), weights, gates)
    for x in inputs:
        x.requires_grad_()

    def gradients(pack=None, unpack=lambda x: x):
        hooks = nullcontext() if pack is None else saved_tensors_hooks(pack, unpack)
        with hooks:
            o, _ = memory_chunkwise(q, k, v, lr, weights, **gates, chunk_size=4, implementation="native")
        return torch.autograd.grad(o.square().sum(), inputs)

    def columns(x):
        return x.detach().mT.contiguous().mT if x.dim() > 1 else x.detach()

    assert_same(gradients(columns), gradients(), 0)
    with pytest.raises(RuntimeError, match="hooks on saved tensors returned torch.float32 for what was torch.float64"):
        gradients(lambda x: x.float() if x.is_floating_point() else x)


@needs_native
def test_numbers_negated_by_a_bit():
    (q, k, v, lr), weights, gates = make_inputs(T=21)
    k.requires_grad_()

    def found(v, d):
        o, _ = memory_chunkwise(q, k, v, lr, weights, **gates, chunk_size=4, implementation="native")
        return o, *torch.autograd.grad(o, k, d)

    assert_same(found(torch._neg_view(v), torch._neg_view(v)), found(-v, -v), 0)
