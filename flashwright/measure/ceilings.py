"""What this GPU does at best, measured: a large matrix product, and a copy in its memory.

They run as contestants do, in processes of their own and with the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flashwright import gpu as gpus
from flashwright.measure.contest import Contestant, Make, Seat
from flashwright.measure.work import Ceiling
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

SIDE = 8192
"""Of the matrices: large enough for every GPU's best rate, and 0.4 GB in all."""
ROWS = 64
"""Of the output that the judge gets a copy of."""
COPIED = 1 << 30
"""Bytes: many times any L2."""
TURNS, CALLS = 3, 8
MARGIN = 1.2
"""Over what was measured, where a peak is not known: a product reaches 75 to 95 % of it."""
UNKNOWN_L2 = 128 << 20  # bytes: no card of today has more


@dataclass(frozen=True)
class Ceilings:
    """The measured rates, as far as they could be measured."""

    matmul: Mapping[str, float] = field(default_factory=dict)
    """TFLOPS by dtype."""
    copy_gbs: float | None = None
    """GB/s, read and written."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, and why: `bf16 matmul`, `copy`."""


def matmul(spec: AttentionSpec) -> Callable[..., Any]:
    """A factory: a square product in the spec's dtype, of random numbers; zeros draw less power."""
    import torch

    if spec.dtype == "fp8":
        if not hasattr(torch, "_scaled_mm"):
            raise Unable("this torch has no product of fp8 matrices")
        a, b = (torch.randn(SIDE, SIDE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")

        def multiply() -> Any:
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16
        a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=dtype) for _ in range(2))

        def multiply() -> Any:
            return a @ b

    # A corner of it, in the problem's form: that is what the judge gets a copy of.
    return lambda q, k, v: multiply()[:ROWS, :ROWS].expand(1, 1, ROWS, ROWS)


def copy(spec: AttentionSpec) -> Callable[..., Any]:
    """A factory: a copy from one place in the GPU's memory to another."""
    import torch

    source = torch.randint(0, 255, (COPIED,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def call(q: Any, k: Any, v: Any) -> Any:
        target.copy_(source)
        return target[: ROWS * ROWS * 2].view(q.dtype).view(1, 1, ROWS, ROWS)

    return call


def measure(dtypes: Iterable[str], make: Make = Sandbox) -> Ceilings:
    """Measure both, one after the other, each in its own process."""
    wanted = {dtype: _seat("matmul", make) for dtype in dict.fromkeys(dtypes)}
    seats = {**wanted, "": _seat("copy", make)}
    try:
        ready = {n: s.prepare(n, _problem(n or "fp16")) for n, s in seats.items()}
        found, missing = {}, {}
        for name, seat in seats.items():
            try:
                ready[name].result()
                found[name] = _best(seat)
            except (Unable, Ended) as error:
                missing[f"{name} {seat.contestant.name}".strip()] = str(error)
    finally:
        for seat in seats.values():
            seat.close()
    rates = {name: 2 * SIDE**3 / s / 1e12 for name, s in found.items() if name}
    return Ceilings(rates, 2 * COPIED / found[""] / 1e9 if "" in found else None, missing)


def _seat(function: str, make: Make) -> Seat:
    where = Candidate("python", __name__, function, factory=True, title=function)
    return Seat(Contestant(function, where), make)


def _problem(dtype: str) -> TimedProblem:
    """Something small: these contestants do not look at it."""
    spec = AttentionSpec.make(variant="ceiling", heads=1, head_dim=ROWS, dtype=dtype)
    return TimedProblem(spec, 1, ROWS)


def _best(seat: Seat) -> float:
    """The least of some medians: a ceiling is what can be reached."""
    return min(median(seat.turn(CALLS, number * CALLS)) for number in range(TURNS))


def ceiling_of(card: str, spec: AttentionSpec, measured: Ceilings) -> Ceiling | None:
    """What nothing may be faster than; None where neither the card is known nor was measured."""
    try:
        gpu = gpus.find(card)
        return Ceiling(gpu.tensor_flops[spec.input_dtype], gpu.bandwidth, gpu.l2_bytes, gpu.title)
    except (gpus.UnknownGpu, KeyError):
        rate = measured.matmul.get(spec.dtype)
    if rate is None or measured.copy_gbs is None:
        return None
    source = f"{MARGIN} times what was measured"
    return Ceiling(MARGIN * rate * 1e12, MARGIN * measured.copy_gbs * 1e9, UNKNOWN_L2, source)
