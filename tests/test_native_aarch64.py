"""The memory in C on aarch64: what an emulated processor computes is what this machine's does.

Whole models run here. Each call of the code is written down, with all memory that it may read or write, and is made
again in qemu by a program of the same source, compiled for aarch64. On Debian: `apt install qemu-user-static
gcc-aarch64-linux-gnu`; the other compiler comes with `pip install ziglang`.
"""

import ctypes
import shutil
import subprocess
import sys
from array import array
from bisect import bisect_right
from importlib.util import find_spec
from itertools import accumulate

import pytest
import torch
from tiny import MODES, tiny_model, tokens

from tnt_hf import native_build_tnt, native_step_tnt, native_tnt


QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
COMPILERS = {
    "gcc": ["aarch64-linux-gnu-gcc"],
    "zig": [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"],
}
FUNCTIONS = ["forward", "backward", "token"]
# Of the largest number written in one place: rounding of sums in another order, which a memory's writes carry on.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-12}
pytestmark = [pytest.mark.slow, pytest.mark.skipif(QEMU is None, reason="qemu-aarch64 is not installed")]

# Threads take turns: what each of them is given, and nothing else, is what the code asks OpenMP for.
REPLAY = r"""
#include <stdio.h>
static unsigned threads_, thread_;
int omp_get_num_threads(void) { return threads_; }
int omp_get_thread_num(void) { return thread_; }
void GOMP_parallel(void (*body)(void *), void *given, unsigned threads, unsigned flags) {
    threads_ = threads;
    for (thread_ = 0; thread_ < threads; thread_++) body(given);
}
static void *taken(I bytes) {
    void *x = aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (!x || fread(x, 1, bytes, stdin) != (size_t)bytes) exit(2);
    return x;
}
int main(void) {
    I head[5];
    while (fread(head, sizeof(I), 5, stdin) == 5) {
        void *numbers = taken(head[1] * sizeof(I)), *blocks[64];
        double *scales = taken(head[2] * sizeof(double));
        I *sizes = taken(head[3] * sizeof(I)), *where = taken(2 * head[4] * sizeof(I)), failed;
        void **places = malloc(head[4] * sizeof(void *));
        EACH(i, head[3]) blocks[i] = taken(sizes[i]);
        EACH(i, head[4]) places[i] = where[2 * i] < 0 ? 0 : (char *)blocks[where[2 * i]] + where[2 * i + 1];
        if (head[0] == 2) failed = token(numbers, places, scales);
        else failed = (head[0] ? backward : forward)(numbers, places, scales[0], scales[1]);
        if (failed) return 3;
        EACH(i, head[3]) fwrite(blocks[i], 1, sizes[i], stdout), free(blocks[i]);
        free(numbers), free(scales), free(sizes), free(where), free(places);
    }
    return 0;
}
"""


class Recorder:
    """Stands for the library: calls it, and keeps what memory held before and after.

    `stored` has where the storages begin whose address has been asked for since the last call, and their bytes;
    `arrays` those that the address of is handed on alone.
    """

    def __init__(self, monkeypatch, dtype: torch.dtype):
        self.code, self.calls, self.stored, self.arrays = native_build_tnt.library(dtype), [], {}, {}
        address = torch.Tensor.data_ptr

        def data_ptr(x):
            storage = x.untyped_storage()
            self.stored[storage.data_ptr()] = storage.nbytes()
            return address(x)

        def kept(*given):
            x = array(*given)
            self.arrays[x.buffer_info()[0]] = x
            return x

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
        monkeypatch.setattr(native_step_tnt, "array", kept)
        for module in (native_tnt, native_step_tnt):
            monkeypatch.setattr(module, "library", lambda _: self)

    def forward(self, *given):
        return self._call("forward", given, *map(list, given[:2]), given[2:])

    def backward(self, *given):
        return self._call("backward", given, *map(list, given[:2]), given[2:])

    def token(self, *given):
        return self._call("token", given, *(list(self.arrays[x]) for x in given))

    def _call(self, name: str, given: tuple, numbers: list, places: list, scales) -> int:
        starts = sorted(x for x in self.stored if x)
        sizes, where = [self.stored[x] for x in starts], []
        for x in places:
            i = bisect_right(starts, x or 0) - 1
            inside = x and i >= 0 and x <= starts[i] + sizes[i]
            assert inside or not x
            where += (i, x - starts[i]) if inside else (-1, 0)
        head = array("q", [FUNCTIONS.index(name), len(numbers), len(scales), len(starts), len(places), *numbers])
        head = head.tobytes() + array("d", scales).tobytes() + array("q", [*sizes, *where]).tobytes()

        def content():
            return [ctypes.string_at(x, n) for x, n in zip(starts, sizes)]

        before = content()
        failed = getattr(self.code, name)(*given)
        self.calls.append((name, head, before, content()))
        self.stored.clear()
        return failed


def replay(folder, compiler: str, dtype: torch.dtype, calls: list) -> list[bytes]:
    """What each call leaves in memory on aarch64."""
    (folder / "replay.c").write_text(native_build_tnt.SOURCE + REPLAY)
    size = f"-DREAL_BYTES={native_build_tnt.BYTES[dtype]}"
    command = [*COMPILERS[compiler], *native_build_tnt.FLAGS, size, "-static", "replay.c", "-o", "replay", "-lm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = b"".join(b"".join([head, *before]) for _, head, before, _ in calls)
    return subprocess.run([QEMU, folder / "replay"], input=given, capture_output=True, check=True).stdout


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_models(tmp_path, monkeypatch, compiler, dtype):
    """Every variant: a training step, a prefill and two decoded tokens."""
    if compiler == "zig" and find_spec("ziglang") is None or shutil.which(COMPILERS[compiler][0]) is None:
        pytest.skip(f"{compiler} for aarch64 is not installed")
    recorder, prompt = Recorder(monkeypatch, dtype), tokens(2, 41)
    for mode in MODES.values():
        model = tiny_model(dtype, **mode)
        model(prompt, labels=prompt).loss.backward()
        with torch.no_grad():
            cache = model(prompt[:, :39], use_cache=True).past_key_values
            for t in (39, 40):
                model(prompt[:, t : t + 1], past_key_values=cache)
    assert {name for name, *_ in recorder.calls} == set(FUNCTIONS)
    found = memoryview(replay(tmp_path, compiler, dtype, recorder.calls))
    for name, _, before, after in recorder.calls:
        ends = [0, *accumulate(map(len, before))]
        got, found = found[: ends[-1]], found[ends[-1] :]
        for begin, end, old, want in zip(ends, ends[1:], before, after):
            if got[begin:end] != want:
                assert_close(name, dtype, bytes(got[begin:end]), want, old)
    assert not found


def assert_close(name: str, dtype: torch.dtype, got: bytes, want: bytes, old: bytes) -> None:
    """Memory that holds numbers: those written are close, all others as they were."""
    got, want, old = (torch.frombuffer(bytearray(x), dtype=dtype) for x in (got, want, old))
    untouched = (want == old) | want.isnan() & old.isnan()
    written = want[~untouched & want.isfinite()] if not untouched.all() else want[want.isfinite()]
    error = torch.where((got == want) | got.isnan() & want.isnan(), 0.0, (got - want).abs())
    assert error.max() <= TOLERANCES[dtype] * written.abs().max(), name
