"""The candidate's side of the benchmark: turns of timed calls, each with inputs of its own.

This runs in the candidate's process, which may lie. What it says is held against the wall clock,
the roofline and the outputs, by the process that asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from flashwright.sandbox.problem import TimedProblem, draw
from flashwright.sandbox.tensors import Array

RING = 3
"""Sets of inputs, each at addresses of its own; a set is drawn anew before every call."""
FLUSH_BYTES = 512 << 20
"""Written before a call: ten times an H200's L2. It also keeps the GPU busy (0.1 ms there) while
the call is being launched, so that no launch is part of a measurement."""
SMALL_GPU = 16  # at most this part of a GPU's memory is flushed


class Timed:
    """A candidate prepared for one problem."""

    def __init__(self, call: Callable[..., Any], problem: TimedProblem) -> None:
        import torch

        self.torch, self.call, self.problem = torch, call, problem
        self.ring = [problem.empty() for _ in range(RING)]
        self.extra = [torch.from_numpy(x).cuda() for x in problem.extra.values()]
        whole = torch.cuda.get_device_properties(0).total_memory
        size = min(FLUSH_BYTES, whole // SMALL_GPU)
        self.flush = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.outputs: list[Any] = []
        self.at = 0
        self.flushes = 1
        for drawn in self.ring:
            draw(problem, drawn, 0)
        self._once()
        torch.cuda.synchronize()
        self.flushes = self._enough()

    def _once(self) -> Any:
        with self.torch.no_grad():
            return self.call(*self.ring[self.at].values(), *self.extra)

    def _enough(self) -> int:
        """How often to flush so that the GPU is busy for longer than the call takes to launch."""
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        self._once()
        launch = time.perf_counter() - start
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        self.flush.zero_()
        self.torch.cuda.synchronize()
        return min(20, max(1, math.ceil(1.5 * launch / (time.perf_counter() - start))))

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Seconds of each call, by events."""
        pairs = []
        self.outputs = []
        self._once()  # another process had the GPU: its clocks and page tables are not ours
        for number in range(calls):
            self.at = (self.at + 1) % RING
            draw(self.problem, self.ring[self.at], seed + number)
            if cold:
                for _ in range(self.flushes):
                    self.flush.zero_()
            else:
                self._once()
            before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            self.outputs.append(self._once())
            after.record()
            pairs.append((before, after))
        self.torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    def burst(self, calls: int) -> None:
        """That many calls, one behind the other, and all their work done."""
        for _ in range(calls):
            self._once()
        self.torch.cuda.synchronize()

    def fetch(self, call: int, batch: int, head: int) -> Array:
        """O of one head of a call of the last turn, in fp32."""
        found = self.outputs[call]
        out = found[0] if isinstance(found, tuple | list) else found
        values: Array = out[batch, head].float().cpu().numpy()
        return np.ascontiguousarray(values)


def kernels(work: Callable[[], Any]) -> list[tuple[str, float]]:
    """The device kernels that some work launches, with the seconds each takes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name] = total.get(event.name, 0.0) + event.device_time_total / 1e6
    return sorted(total.items(), key=lambda item: -item[1])
