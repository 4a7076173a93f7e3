"""The measured ceilings of this GPU: a large matrix product, and a copy in device memory.

They run like contestants: each in its own process, timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flashwright import gpu as gpus
from flashwright.measure.contest import Contestant, ContestantRunner, ProcessFactory
from flashwright.measure.work import Ceiling
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

SIDE = 8192
"""Rows and columns of the matrices: large enough for the peak rate of every GPU, 0.4 GB in all."""
ROWS = 64
"""Rows and columns of the output that is copied to the parent process."""
COPIED = 1 << 30
"""Bytes of the copy: many times any L2."""
TURNS, CALLS = 3, 8
MARGIN = 1.2
"""Factor on the measured rates if the peak is unknown: a product reaches 75 to 95 % of the peak."""
UNKNOWN_L2 = 128 << 20  # bytes: no current GPU has more


@dataclass(frozen=True)
class Ceilings:
    """The measured rates; `missing` names those that could not be measured."""

    matmul: Mapping[str, float] = field(default_factory=dict)
    """TFLOPS by dtype."""
    copy_gbs: float | None = None
    """GB/s, read and written."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """By name (`bf16 matmul`, `copy`): why a rate could not be measured."""


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

    # A corner of the product, in the shape of the problem's output, which is what gets copied.
    return lambda q, k, v: multiply()[:ROWS, :ROWS].expand(1, 1, ROWS, ROWS)


def copy(spec: AttentionSpec) -> Callable[..., Any]:
    """A factory: a copy within device memory."""
    import torch

    source = torch.randint(0, 255, (COPIED,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)

    def call(q: Any, k: Any, v: Any) -> Any:
        target.copy_(source)
        return target[: ROWS * ROWS * 2].view(q.dtype).view(1, 1, ROWS, ROWS)

    return call


def measure(dtypes: Iterable[str], make: ProcessFactory = Sandbox) -> Ceilings:
    """Measure the product in each dtype and the copy, one after the other, each in a process."""
    wanted = {dtype: _runner("matmul", make) for dtype in dict.fromkeys(dtypes)}
    runners = {**wanted, "": _runner("copy", make)}
    try:
        ready = {n: s.prepare(n, _problem(n or "fp16")) for n, s in runners.items()}
        found, missing = {}, {}
        for name, runner in runners.items():
            try:
                ready[name].result()
                found[name] = _best(runner)
            except (Unable, Ended) as error:
                missing[f"{name} {runner.contestant.name}".strip()] = str(error)
    finally:
        for runner in runners.values():
            runner.close()
    rates = {name: 2 * SIDE**3 / s / 1e12 for name, s in found.items() if name}
    return Ceilings(rates, 2 * COPIED / found[""] / 1e9 if "" in found else None, missing)


def _runner(function: str, make: ProcessFactory) -> ContestantRunner:
    where = Candidate("python", __name__, function, factory=True, title=function)
    return ContestantRunner(Contestant(function, where), make)


def _problem(dtype: str) -> TimedProblem:
    """A small problem: these contestants ignore it."""
    spec = AttentionSpec.make(variant="ceiling", heads=1, head_dim=ROWS, dtype=dtype)
    return TimedProblem(spec, 1, ROWS)


def _best(runner: ContestantRunner) -> float:
    """The smallest median of several turns: a ceiling is the best rate that can be reached."""
    return min(median(runner.turn(CALLS, number * CALLS)) for number in range(TURNS))


def ceiling_of(card: str, spec: AttentionSpec, measured: Ceilings) -> Ceiling | None:
    """The roofline of a card; None if the card is unknown and its rates were not measured."""
    try:
        gpu = gpus.find(card)
        return Ceiling(gpu.tensor_flops[spec.input_dtype], gpu.bandwidth, gpu.l2_bytes, gpu.title)
    except (gpus.UnknownGpu, KeyError):
        rate = measured.matmul.get(spec.dtype)
    if rate is None or measured.copy_gbs is None:
        return None
    source = f"{MARGIN} times what was measured"
    return Ceiling(MARGIN * rate * 1e12, MARGIN * measured.copy_gbs * 1e9, UNKNOWN_L2, source)
