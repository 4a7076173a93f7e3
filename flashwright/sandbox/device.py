"""What a candidate's process does with the judge's memory: PyTorch on a GPU, NumPy on the CPU.

Nothing of a candidate's own runs when its output is taken: not the code of a subclass of tensors,
which could compute only then. What is not in memory when its stream is done is not there.
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
"""From where to where in the judge's memory, and how many bytes."""


class NoTensor(TypeError):
    """What a candidate returned is nothing that can be compared."""


class Device(Protocol):
    """What differs between the GPU and the CPU."""

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """A tensor in the judge's memory; `alone`: a copy in an allocation of its own."""

    def plain(self, name: str, found: Any) -> Any:
        """What a candidate returned, as memory: NoTensor where it is none."""

    def store(self, memory: Any, at: int, found: Any) -> None:
        """Copy a plain tensor to the judge's memory, in the queue that the candidate had."""

    def late(self, memory: Any, copies: Copies) -> Any:
        """A context whose queue is busy, with the inputs still to come in it."""

    def arrived(self) -> None:
        """Wait for the queue that the candidate was called in, and for no other."""

    def finish(self) -> None:
        """Wait for everything."""

    def poison(self) -> None:
        """Leave NaN in the memory that the candidate's next allocations get."""

    def span(self, tensor: Any) -> tuple[int, int]:
        """First and last address of a tensor's memory."""


class Cpu:
    """NumPy arrays."""

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """See Device."""
        kind = DTYPES[told["dtype"]]
        steps = tuple(step * kind.itemsize for step in told["steps"])
        found: Array = np.ndarray(tuple(told["shape"]), kind, memory, told["at"], steps)
        return found.copy() if alone else found

    def plain(self, name: str, found: Any) -> Any:
        """See Device."""
        if not isinstance(found, np.ndarray):
            raise NoTensor(f"{name} is no array, but {type(found).__name__}")
        return np.ndarray.view(found, np.ndarray)

    def store(self, memory: Any, at: int, found: Any) -> None:
        """See Device."""
        flat = np.ascontiguousarray(found).reshape(-1)
        if flat.size:
            memory[at : at + flat.nbytes] = flat.view(np.uint8)

    @contextlib.contextmanager
    def late(self, memory: Any, copies: Copies) -> Iterator[None]:
        """See Device. There is no queue here."""
        for source, target, size in copies:
            memory[target : target + size] = memory[source : source + size]
        yield

    def arrived(self) -> None:
        """See Device."""

    def finish(self) -> None:
        """See Device."""

    def poison(self) -> None:
        """See Device."""
        for size in _SCRATCH[1:]:
            np.full(size, POISON, np.uint8)

    def span(self, tensor: Any) -> tuple[int, int]:
        """See Device."""
        low, high = np.lib.array_utils.byte_bounds(tensor)
        return low, high


class Cuda:
    """PyTorch tensors on the current GPU."""

    def __init__(self, limits: Limits) -> None:
        import torch

        self.torch = torch
        _, whole = torch.cuda.mem_get_info()
        most = limits.gpu_memory or int(0.9 * whole)
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / whole))

    def tensor(self, memory: Any, told: Mapping[str, Any], alone: bool = False) -> Any:
        """See Device."""
        part = memory[told["at"] : told["at"] + told["span"]].view(torch_dtype(told["dtype"]))
        if not told["span"]:
            return part.new_empty(tuple(told["shape"]))
        found = part.as_strided(tuple(told["shape"]), tuple(told["steps"]))
        return found.clone() if alone else found

    def plain(self, name: str, found: Any) -> Any:
        """See Device."""
        torch = self.torch
        if not isinstance(found, torch.Tensor):
            raise NoTensor(f"{name} is no tensor, but {type(found).__name__}")
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            if not found.is_cuda:
                raise NoTensor(f"{name} is no tensor on the device, but on {found.device}")
            bare = found.detach().as_subclass(torch.Tensor)
            if bare.numel() and not bare.untyped_storage().data_ptr():
                raise NoTensor(f"{name} is a {type(found).__name__} without memory of its own")
            return bare

    def store(self, memory: Any, at: int, found: Any) -> None:
        """See Device."""
        size = found.numel() * found.element_size()
        if size:
            into = memory[at : at + size].view(found.dtype).view(found.shape)
            into.copy_(found)

    @contextlib.contextmanager
    def late(self, memory: Any, copies: Copies) -> Iterator[None]:
        """See Device.

        A stream of its own sleeps, and gets the inputs only then: whoever works on another stream
        reads poison.
        """
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.torch.cuda.Stream()):
            self.torch.cuda._sleep(_SLEEP_CYCLES)
            for source, target, size in copies:
                memory[target : target + size].copy_(memory[source : source + size])
            yield

    def arrived(self) -> None:
        """See Device."""
        self.torch.cuda.current_stream().synchronize()

    def finish(self) -> None:
        """See Device."""
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

    def span(self, tensor: Any) -> tuple[int, int]:
        """See Device."""
        if not tensor.numel():
            return 0, 0
        ends = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in ends)
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
