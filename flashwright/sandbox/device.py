"""Where a candidate's tensors are: guarded buffers on the GPU (PyTorch) or on the CPU (NumPy).

Every tensor lies alone in memory that is filled with 0xFF, which is NaN in each of our types and -1
in int32: what is read beside it poisons the output, what is written beside it shows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flashwright.sandbox.limits import Limits
from flashwright.sandbox.tensors import DTYPES, Array, torch_dtype

GUARD = 1 << 16
"""Bytes before and behind: a tile's overhang is less."""
POISON = 0xFF
_SLEEP_CYCLES = 40_000_000  # about 20 ms: longer than any launch takes
_SCRATCH = (1 << 29, 1 << 19, 1 << 19, 1 << 19)  # large and small blocks come from different pools


@dataclass(frozen=True)
class Buffer:
    """One tensor and what is around it."""

    base: Any
    """All bytes, guards included."""
    view: Any
    """The tensor itself."""
    start: int
    size: int

    @property
    def payload(self) -> Any:
        """The tensor's bytes."""
        return self.base[self.start : self.start + self.size]


class Device(Protocol):
    """What differs between the GPU and the CPU."""

    def buffer(
        self, shape: Sequence[int], dtype: str, shift: int = 0, around: int = POISON
    ) -> Buffer:
        """A poisoned tensor; `shift` moves it to another address, `around` is beside it."""

    def empty(self, buffer: Buffer, around: int = POISON) -> None:
        """Poison a tensor again."""

    def fill(self, buffer: Buffer, bits: Array) -> None:
        """Give the tensor its bytes."""

    def read(self, buffer: Buffer) -> Array:
        """All bytes of a buffer, in host memory."""

    def host(self, tensor: Any) -> Array:
        """A tensor that the candidate returned, as bytes."""

    def ahead(self, work: Sequence[tuple[Buffer, Array]]) -> Any:
        """A context whose queue is busy, with the inputs still to come in it."""

    def arrived(self) -> None:
        """Wait for the queue that the candidate was called in, and for no other."""

    def finish(self, patience: float) -> None:
        """Wait for everything, also for a thread that goes on behind the caller's back."""

    def poison(self) -> None:
        """Leave NaN in the memory that the candidate's next allocations get."""

    def owns(self, tensor: Any) -> bool:
        """Whether it is a tensor of this device."""

    def span(self, tensor: Any) -> tuple[int, int]:
        """First and last address of a tensor's memory."""


class Cpu:
    """NumPy arrays."""

    def __init__(self, guard: int = GUARD) -> None:
        self.guard = guard

    def buffer(
        self, shape: Sequence[int], dtype: str, shift: int = 0, around: int = POISON
    ) -> Buffer:
        """See Device."""
        kind = DTYPES[dtype]
        size = int(np.prod(shape)) * kind.itemsize
        base = np.full(2 * self.guard + size + shift, around, np.uint8)
        start = self.guard + shift
        base[start : start + size] = POISON
        view = base[start : start + size].view(kind).reshape(tuple(shape))
        return Buffer(base, view, start, size)

    def empty(self, buffer: Buffer, around: int = POISON) -> None:
        """See Device."""
        buffer.base[:] = around
        buffer.payload[:] = POISON

    def fill(self, buffer: Buffer, bits: Array) -> None:
        """See Device."""
        buffer.payload[:] = bits

    def read(self, buffer: Buffer) -> Array:
        """See Device."""
        copy: Array = buffer.base.copy()
        return copy

    def host(self, tensor: Any) -> Array:
        """See Device."""
        flat: Array = np.ascontiguousarray(tensor).reshape(-1)
        return flat.view(np.uint8).copy() if flat.size else np.empty(0, np.uint8)

    @contextlib.contextmanager
    def ahead(self, work: Sequence[tuple[Buffer, Array]]) -> Iterator[None]:
        """See Device. There is no queue here."""
        for buffer, bits in work:
            self.fill(buffer, bits)
        yield

    def arrived(self) -> None:
        """See Device."""

    def finish(self, patience: float) -> None:
        """See Device."""
        time.sleep(patience)

    def poison(self) -> None:
        """See Device."""
        for size in _SCRATCH[1:]:
            np.full(size, POISON, np.uint8)

    def owns(self, tensor: Any) -> bool:
        """See Device."""
        return isinstance(tensor, np.ndarray)

    def span(self, tensor: Any) -> tuple[int, int]:
        """See Device."""
        low, high = np.lib.array_utils.byte_bounds(tensor)
        return low, high


class Cuda:
    """PyTorch tensors on the current GPU."""

    def __init__(self, limits: Limits, guard: int = GUARD) -> None:
        import torch

        self.torch, self.guard = torch, guard
        _, whole = torch.cuda.mem_get_info()
        most = limits.gpu_memory or int(0.9 * whole)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / whole))

    def buffer(
        self, shape: Sequence[int], dtype: str, shift: int = 0, around: int = POISON
    ) -> Buffer:
        """See Device."""
        size = int(np.prod(shape)) * DTYPES[dtype].itemsize
        total = 2 * self.guard + size + shift
        base = self.torch.full((total,), around, dtype=self.torch.uint8, device="cuda")
        start = self.guard + shift
        base[start : start + size] = POISON
        view = base[start : start + size].view(torch_dtype(dtype)).view(tuple(shape))
        return Buffer(base, view, start, size)

    def empty(self, buffer: Buffer, around: int = POISON) -> None:
        """See Device."""
        buffer.base.fill_(around)
        buffer.payload.fill_(POISON)

    def fill(self, buffer: Buffer, bits: Array) -> None:
        """See Device."""
        buffer.payload.copy_(self.torch.from_numpy(bits))

    def read(self, buffer: Buffer) -> Array:
        """See Device."""
        found: Array = buffer.base.cpu().numpy()
        return found

    def host(self, tensor: Any) -> Array:
        """See Device."""
        flat = tensor.detach().contiguous().reshape(-1)
        if not flat.numel():
            return np.empty(0, np.uint8)
        found: Array = flat.view(self.torch.uint8).cpu().numpy()
        return found

    @contextlib.contextmanager
    def ahead(self, work: Sequence[tuple[Buffer, Array]]) -> Iterator[None]:
        """See Device.

        A stream of its own sleeps, and gets the inputs only then: whoever works on another stream
        reads poison.
        """
        staged = [(b.payload, self.torch.from_numpy(bits).cuda()) for b, bits in work]
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.torch.cuda.Stream()):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
            for payload, bits in staged:
                payload.copy_(bits)
            yield

    def arrived(self) -> None:
        """See Device."""
        self.torch.cuda.current_stream().synchronize()

    def finish(self, patience: float) -> None:
        """See Device."""
        self.torch.cuda.synchronize()
        if patience:
            time.sleep(patience)
            self.torch.cuda.synchronize()

    def poison(self) -> None:
        """See Device."""
        free, _ = self.torch.cuda.mem_get_info()
        kept = [
            self.torch.full((size,), POISON, dtype=self.torch.uint8, device="cuda")
            for size in _SCRATCH
            if size < free // 4
        ]
        self.torch.cuda.synchronize()
        del kept  # back to the allocator, NaN and all

    def owns(self, tensor: Any) -> bool:
        """See Device."""
        return isinstance(tensor, self.torch.Tensor) and tensor.is_cuda

    def span(self, tensor: Any) -> tuple[int, int]:
        """See Device."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
