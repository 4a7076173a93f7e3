"""The candidate's side of the benchmark: turns of timed calls, each with its own inputs.

This runs in the candidate's process, which may lie. The judge checks its times against the
roofline, against the outputs, which it copies to the judge's memory, and against the judge's clock
over a burst. In a burst, each call needs the output of the one before: none can be skipped, merged
with another or made in advance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from flashwright.sandbox.device import NoTensor
from flashwright.sandbox.problem import TimedProblem, draw
from flashwright.sandbox.tensors import torch_dtype

RING = 3
"""Sets of inputs, each at its own addresses. A set is drawn again before every call."""
FLUSH_BYTES = 512 << 20
"""Bytes written before a call: ten times an H200's L2. This also keeps the GPU busy (0.1 ms there)
while the call is launched, so that no launch overhead is measured."""
_LINKS = 10
SMALL_GPU = 16  # at most this part of a GPU's memory is flushed


class Timed:
    """A candidate prepared for one problem."""

    def __init__(
        self,
        call: Callable[..., Any],
        problem: TimedProblem,
        places: Sequence[Sequence[Any]],
        plain: Callable[[str, Any], Any],
    ) -> None:
        import torch

        self.torch, self.call, self.problem = torch, call, problem
        self.places, self.plain = places, plain
        """Tensors in the judge's memory. The outputs of call i go to number i, modulo their
        count."""
        self.ring = [problem.empty() for _ in range(RING)]
        self.given = [[problem.passed(n, x) for n, x in drawn.items()] for drawn in self.ring]
        self.extra = [torch.from_numpy(x).cuda() for x in problem.extra.values()]
        whole = torch.cuda.get_device_properties(0).total_memory
        size = min(FLUSH_BYTES, whole // SMALL_GPU)
        self.flush = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.at = 0
        self.flushes = 1
        for drawn in self.ring:
            draw(problem, drawn, 0)
        self._once()
        torch.cuda.synchronize()
        self.flushes = self._enough()

    def _once(self) -> Any:
        with self.torch.no_grad():
            return self.call(*self.given[self.at], *self.extra)

    def _enough(self) -> int:
        """The number of flushes that keeps the GPU busy for longer than a launch takes."""
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
        self._once()  # warm up: another process used the GPU since
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
            result = self._once()
            after.record()
            self._keep(number, result)
            pairs.append((before, after))
        self.torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    def ready(self, seed: int) -> None:
        """Draw the inputs of a burst."""
        draw(self.problem, self.ring[self.at], seed)
        self.first = self.ring[self.at]["Q"].clone()
        self._once()  # warm up: another process used the GPU
        self.torch.cuda.synchronize()

    def burst(self, calls: int) -> None:
        """Make `calls` calls, each with the signs of the previous output on Q, and wait."""
        for number in range(calls):
            kept = self._keep(number, self._once())
            if number + 1 < calls:
                sign(self.torch, self.ring[self.at]["Q"], self.first, kept)
        self.torch.cuda.synchronize()

    def _keep(self, number: int, found: Any) -> Any:
        """Copy the outputs to the judge's memory, on the candidate's stream. Returns O.

        A library that does not return the blocks that it chose gives a function that finds them
        again, outside of the time: an O of other blocks would be wrong.
        """
        several = (*found,) if isinstance(found, tuple | list) else (found,)
        several += (None,) * len(self.problem.outputs)
        places = self.places[number % len(self.places)]
        for name, one, place in zip(self.problem.outputs, several, places, strict=False):
            out = self.plain(name, one() if name != "O" and callable(one) else one)
            out = self.problem.returned(out) if name == "O" else out.to(place.dtype)
            if out.shape != place.shape or out.dtype != place.dtype:
                shapes = f"{tuple(out.shape)} of {out.dtype}, not {tuple(place.shape)}"
                raise NoTensor(f"{name} is {shapes}")
            place.copy_(out)
        return places[0]


def linking(problem: TimedProblem) -> float:
    """The overhead of a burst per call in seconds, measured in this process."""
    import torch

    with torch.no_grad():
        first = problem.empty()["Q"]
        query = torch.empty_like(first)
        shape = (*first.shape[:3], problem.spec.value_dim)
        kept, out = (
            torch.zeros(shape, dtype=torch_dtype(problem.spec.output_dtype), device="cuda")
            for _ in range(2)
        )
        best = math.inf
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_LINKS):
                sign(torch, query, first, kept.copy_(out))
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / _LINKS)
    return best


def sign(torch: Any, into: Any, values: Any, signs: Any) -> None:
    """Write `values` with the signs of another tensor of as many rows. Further columns keep
    theirs."""
    width = min(values.shape[-1], signs.shape[-1])
    values, signs, into = values[..., :width], signs[..., :width], into[..., :width]
    if values.dtype == signs.dtype:
        torch.copysign(values, signs, out=into)
    else:  # fp8 has neither signs nor arithmetic
        into.copy_(torch.copysign(values.to(signs.dtype), signs))
