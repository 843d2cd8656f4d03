"""Writing shards as a stream: link, byte copy, or tensor by tensor with a cast, a fraction of a MiB at a time.

A safetensors file is a header that says where everything will be, then the bytes. All shapes are known beforehand, so
the header is written first and no shard, and no tensor, is ever in memory as a whole.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Condition

import numpy
import torch
from torch import Tensor

from tnt_hf.conversion.files import CHUNK, copy_range, naming, write_all
from tnt_hf.conversion.source import ITEMSIZE, StoredTensor


TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED = {dtype: name for name, dtype in TORCH.items()}
# Numbers as little-endian bits, and the bits of their exponents.
EXPONENT = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
ALIGNMENT = 64  # bytes: of torch's own tensors, and more than any BLAS asks for
SERIAL = 32_000  # elements; torch starts threads, which take memory each, for 32768 and more


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: stored bytes, cast where `dtype` differs, or a function that makes it when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    origin: StoredTensor | Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return StoredTensor(self.name, self.dtype, self.shape, Path(), 0).nbytes


def split_by_size(tensors: Iterable[NewTensor], most: int) -> list[list[NewTensor]]:
    """Consecutive groups of at most `most` bytes; a larger tensor gets a group of its own."""
    groups: list[list[NewTensor]] = [[]]
    total = 0
    for tensor in tensors:
        if groups[-1] and total + tensor.nbytes > most:
            groups.append([])
            total = 0
        groups[-1].append(tensor)
        total += tensor.nbytes
    return groups


class Written:
    """How many bytes of a new file are there, for a thread that reads it while another one writes it."""

    def __init__(self):
        self._changed, self._size, self._ended = Condition(), 0, False

    def add(self, count: int) -> None:
        """`count` more."""
        with self._changed:
            self._size += count
            self._changed.notify()

    def close(self) -> None:
        """There will be no more."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def wait(self, size: int) -> None:
        """Return once `size` are there. Raises InterruptedError if they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._size >= size or self._ended)
            if self._size < size:
                raise InterruptedError("the writer stopped")


def write_shard(
    path: Path,
    tensors: list[NewTensor],
    advance: Callable[[int], object],
    begun: Callable[[Written], object] = lambda written: None,
) -> None:
    """
    A new safetensors file.

    Args:
        advance: told the bytes written. begun: called when the header is there and the file has its length.

    Raises:
        OSError: it cannot be written; the error names it.
    """
    # Whole multiples of `ALIGNMENT` first, behind a header that is filled up to one: they lie where tensors cast by
    # torch do, and some BLAS round by that. Then wide items: every tensor starts at a multiple of its item size.
    tensors = sorted(tensors, key=lambda tensor: (tensor.nbytes % ALIGNMENT != 0, -ITEMSIZE[tensor.dtype]))
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = place + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    written = Written()

    def tell(count: int) -> None:
        written.add(count)
        advance(count)

    with path.open("xb", buffering=0) as file, closing(written):
        write_all(file, text := len(text).to_bytes(8, "little") + text)
        with naming(path):
            file.truncate(len(text) + place)
        written.add(len(text))
        begun(written)
        for tensor in tensors:
            origin = tensor.origin
            if not isinstance(origin, StoredTensor):
                write_all(file, to_bytes(by_one_thread(origin), tensor))
                tell(tensor.nbytes)
            elif origin.dtype == tensor.dtype:
                with origin.path.open("rb", buffering=0) as old:
                    copy_range(old, file, origin.start, origin.nbytes, tell)
            else:
                for block in blocks(origin, bytearray(min(CHUNK, origin.nbytes))):
                    write_all(file, converted := cast(block, origin.dtype, tensor.dtype))
                    tell(len(converted))


def by_one_thread(make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns, without the memory that torch's other threads would bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return make()
    finally:
        torch.set_num_threads(threads)


def cast(block: memoryview, old: str, new: str) -> bytearray:
    """The bytes of one dtype as those of another."""
    result = bytearray(len(block) // ITEMSIZE[old] * ITEMSIZE[new])
    pieces = (torch.frombuffer(x, dtype=TORCH[name]).split(SERIAL) for x, name in ((result, new), (block, old)))
    for target, source in zip(*pieces):
        target.copy_(source)
    return result


def to_bytes(value: Tensor, tensor: NewTensor) -> memoryview:
    """The bytes of a tensor of our own making, not copied where its dtype is right. Raises ValueError if it is not
    what was announced."""
    if tuple(value.shape) != tensor.shape:
        raise ValueError(f"{tensor.name}: has shape {list(value.shape)}, announced was {list(tensor.shape)}")
    return memoryview(value.detach().to(TORCH[tensor.dtype]).reshape(-1).view(torch.uint8).numpy())


def blocks(
    tensor: StoredTensor, buffer: bytearray, wait: Callable[[int], object] = lambda size: None
) -> Iterable[memoryview]:
    """
    The bytes of a stored tensor in pieces of the buffer's size, which is used for all of them: a multiple of every
    item size, or that of the tensor. `wait` is told how long the file has to be before each is read.
    """
    view, left = memoryview(buffer), tensor.nbytes
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        while left:
            piece = view[:left]
            wait(file.tell() + len(piece))
            if _fill(file, piece) < len(piece):
                raise ValueError(f"{tensor.path}: ends inside tensor {tensor.name!r}")
            yield piece
            left -= len(piece)


def _fill(file, piece: memoryview) -> int:
    done = 0
    while done < len(piece) and (count := file.readinto(piece[done:])):
        done += count
    return done


def inspect(
    path: Path,
    tensors: list[StoredTensor],
    where: str,
    copy: Path | None = None,
    advance: Callable[[int], object] = lambda count: None,
    wait: Callable[[int], object] = lambda size: None,
) -> str:
    """
    Read a safetensors file once: its SHA-256, and whether all its numbers are finite.

    Args:
        tensors: of this file, all of them, in the order of their bytes.
        where: what an error calls the file.
        copy: a new file for the bytes as they are read, which is on the disk afterwards. advance: told how many.
        wait: for a file that is still being written, see [`Written`].

    Raises:
        ValueError: a tensor holds nan or infinity. OSError: the copy cannot be written.
    """
    digest, buffer = hashlib.sha256(), bytearray(CHUNK)
    with path.open("rb") as file, copy.open("xb", buffering=0) if copy else nullcontext() as new:

        def take(block) -> None:
            digest.update(block)
            if copy:
                write_all(new, block)
                advance(len(block))

        take(file.read(tensors[0].start if tensors else -1))
        for tensor in tensors:
            for block in blocks(tensor, buffer, wait):
                take(block)
                if not is_finite(block, tensor.dtype):
                    raise ValueError(f"{where}: tensor {tensor.name!r} holds nan or infinity ({tensor.dtype})")
        if copy:
            with naming(copy):
                os.fsync(new.fileno())
    return digest.hexdigest()


def is_finite(block: memoryview, dtype: str) -> bool:
    """Whether the stored numbers hold no nan and no infinity: exactly those have an exponent of ones only."""
    kind, exponent = EXPONENT[dtype]
    bits = numpy.frombuffer(block, kind)
    return bool(numpy.max(bits & bits.dtype.type(exponent), initial=0) < exponent)
