"""The judge's memory as tensors in the candidate's process: PyTorch on a GPU, NumPy on the CPU.

No code of the candidate runs while its output is copied: a subclass of tensors could compute only
then. A result counts only if it is in memory when the stream is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flashwright.sandbox.layout import POISON
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.tensors import DTYPES, Array, torch_dtype

_SLEEP_CYCLES = 40_000_000  # about 20 ms: longer than any launch takes
_SCRATCH = (1 << 29, 1 << 19, 1 << 19, 1 << 19)  # large and small blocks come from different pools

Copies = Sequence[tuple[int, int, int]]
"""Source and target offset in the judge's memory, and a number of bytes."""


class NoTensor(TypeError):
    """A candidate returned something that is no tensor in memory."""


class Device(Protocol):
    """The operations that differ between the GPU and the CPU."""

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """A tensor in the judge's memory; `alone`: a copy in a separate allocation."""

    def plain(self, name: str, found: Any) -> Any:
        """A candidate's result as a plain tensor. Raises NoTensor if it has no memory."""

    def store(self, memory: Any, at: int, found: Any) -> None:
        """Copy a plain tensor to the judge's memory, on the candidate's stream."""

    def late(self, memory: Any, copies: Copies) -> Any:
        """A context whose stream is busy, with the copies of the inputs queued behind."""

    def arrived(self) -> None:
        """Wait for the stream that the candidate was called on, and for no other."""

    def finish(self) -> None:
        """Wait for all streams of the device."""

    def poison(self) -> None:
        """Leave NaN in the memory that the candidate's next allocations get."""

    def span(self, tensor: Any) -> tuple[int, int]:
        """First and last address of a tensor's memory."""


class Cpu:
    """The CPU: tensors are NumPy arrays, and there are no streams."""

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """A view of the judge's memory, or a copy of it."""
        kind = DTYPES[told["dtype"]]
        steps = tuple(step * kind.itemsize for step in told["steps"])
        found: Array = np.ndarray(tuple(told["shape"]), kind, memory, told["at"], steps)
        return found.copy() if alone else found

    def plain(self, name: str, found: Any) -> Any:
        """The result as a plain ndarray. Raises NoTensor if it is no array."""
        if not isinstance(found, np.ndarray):
            raise NoTensor(f"{name} is no array, but {type(found).__name__}")
        return np.ndarray.view(found, np.ndarray)

    def store(self, memory: Any, at: int, found: Any) -> None:
        """Copy the array's bytes."""
        flat = np.ascontiguousarray(found).reshape(-1)
        if flat.size:
            memory[at : at + flat.nbytes] = flat.view(np.uint8)

    @contextlib.contextmanager
    def late(self, memory: Any, copies: Copies) -> Iterator[None]:
        """Copy the inputs at once, as the CPU has no streams."""
        for source, target, size in copies:
            memory[target : target + size] = memory[source : source + size]
        yield

    def arrived(self) -> None:
        """Nothing: a call on the CPU returns when its work is done."""

    def finish(self) -> None:
        """Nothing: the CPU has no streams."""

    def poison(self) -> None:
        """Fill and free blocks with NaN bits."""
        for size in _SCRATCH[1:]:
            np.full(size, POISON, np.uint8)

    def span(self, tensor: Any) -> tuple[int, int]:
        """First and last address of an array's memory."""
        low, high = np.lib.array_utils.byte_bounds(tensor)
        return low, high


def _has_memory(tensor: Any) -> bool:
    """Whether there is something behind it; some versions of torch raise for a bare wrapper."""
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return False


class Cuda:
    """PyTorch tensors on the current GPU."""

    def __init__(self, limits: Limits) -> None:
        import torch

        self.torch = torch
        _, whole = torch.cuda.mem_get_info()
        most = limits.gpu_memory or int(0.9 * whole)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / whole))

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """A strided view of the judge's memory, or a copy of it."""
        part = memory[told["at"] : told["at"] + told["span"]].view(torch_dtype(told["dtype"]))
        if not told["span"]:
            return part.new_empty(tuple(told["shape"]))
        found = part.as_strided(tuple(told["shape"]), tuple(told["steps"]))
        return found.clone() if alone else found

    def plain(self, name: str, found: Any) -> Any:
        """The result as a plain torch.Tensor. Raises NoTensor if it is none on the GPU."""
        torch = self.torch
        if not isinstance(found, torch.Tensor):
            raise NoTensor(f"{name} is no tensor, but {type(found).__name__}")
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            if not found.is_cuda:
                raise NoTensor(f"{name} is no tensor on the device, but on {found.device}")
            bare = found.detach().as_subclass(torch.Tensor)
            if bare.numel() and not _has_memory(bare):
                raise NoTensor(f"{name} is a {type(found).__name__} without memory of its own")
            return bare

    def store(self, memory: Any, at: int, found: Any) -> None:
        """Queue a copy on the current stream."""
        size = found.numel() * found.element_size()
        if size:
            into = memory[at : at + size].view(found.dtype).view(found.shape)
            into.copy_(found)

    @contextlib.contextmanager
    def late(self, memory: Any, copies: Copies) -> Iterator[None]:
        """A stream that sleeps and then copies the inputs.

        A candidate that works on another stream reads poison.
        """
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.torch.cuda.Stream()):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
            for source, target, size in copies:
                memory[target : target + size].copy_(memory[source : source + size])
            yield

    def arrived(self) -> None:
        """Wait for the current stream."""
        self.torch.cuda.current_stream().synchronize()

    def finish(self) -> None:
        """Wait for the whole GPU."""
        self.torch.cuda.synchronize()

    def poison(self) -> None:
        """Fill blocks with NaN bits and give them back to torch's allocator."""
        free, _ = self.torch.cuda.mem_get_info()
        kept = [
            self.torch.full((size,), POISON, dtype=self.torch.uint8, device="cuda")
            for size in _SCRATCH
            if size < free // 4
        ]
        self.torch.cuda.synchronize()
        del kept  # back to the allocator, NaN and all

    def span(self, tensor: Any) -> tuple[int, int]:
        """First and last address of a tensor's memory; (0, 0) for an empty one."""
        if not tensor.numel():
            return 0, 0
        ends = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in ends)
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
