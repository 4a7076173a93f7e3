"""A benchmark run: every cell of a grid, our kernel and the peers in turns, and what came out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwright.build.load import Kernel
from flashwright.judge.flash import relative_rms
from flashwright.measure.grid import Cell
from flashwright.measure.kernels import Made
from flashwright.measure.peers import PEERS, Sdpa, Unable
from flashwright.measure.timing import Timing, measure

OURS = "flashwright"
WRONG = 0.03  # relative RMS between two right kernels in bf16 is a tenth of it


@dataclass(frozen=True)
class Measured:
    """One cell: the timings by name, and for those that have none the reason."""

    cell: Cell
    timings: Mapping[str, Timing] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def tflops(self, name: str) -> float | None:
        """A candidate's rate."""
        found = self.timings.get(name)
        return self.cell.tflops(found.median) if found else None

    def ratio(self, peer: str) -> float | None:
        """How many times faster than the peer we are."""
        ours, other = self.timings.get(OURS), self.timings.get(peer)
        return other.median / ours.median if ours and other else None


@dataclass(frozen=True)
class Summary:
    """Our ratios to one peer over all cells that both have done."""

    peer: str
    cells: int
    mean: float
    """Geometric."""
    worst: float
    where: str


def bench(
    cells: Iterable[Cell],
    kernels: Mapping[Any, Made],
    peers: Sequence[Sdpa] = PEERS,
    layout: str = "bshd",
    done: Callable[[Measured], None] = lambda measured: None,
) -> None:
    """Measure the cells; `done` gets each as soon as it is finished."""
    loaded: dict[Any, Kernel] = {}
    for cell in cells:
        made = kernels[cell.spec]
        if made.plan is not None and cell.spec not in loaded:
            loaded[cell.spec] = Kernel(made.plan, made.cubin, made.ptx)
        done(_measured(cell, loaded.get(cell.spec), made.why, peers, layout))


def _measured(
    cell: Cell, kernel: Kernel | None, why: str, peers: Sequence[Sdpa], layout: str
) -> Measured:
    q, k, v = _inputs(cell, layout)
    calls: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        try:
            calls[peer.name] = peer.prepare(cell, q, k, v)
        except Unable as error:
            reasons[peer.name] = str(error)
    if kernel is None:
        reasons[OURS] = why
    else:
        wrong = _wrong(kernel(q, k, v), calls)
        if wrong:
            reasons[OURS] = wrong
        else:
            calls[OURS] = lambda: kernel(q, k, v)
    return Measured(cell, measure(calls), reasons)


def _wrong(ours: Any, calls: Mapping[str, Callable[[], Any]]) -> str:
    """A fast wrong kernel is no fast kernel; whether it is right is for `verify` to say in full."""
    if not bool(ours.isfinite().all()):
        return "it gives NaN or infinity"
    peer = next(iter(calls), None)
    error = relative_rms(ours, calls[peer]().double()) if peer else 0.0
    return "" if error is not None and error < WRONG else f"it differs from {peer} by {error}"


def _inputs(cell: Cell, layout: str) -> tuple[Any, Any, Any]:
    """Q, K, V as (batch, heads, length, dim), in memory as models have them."""
    import torch

    spec = cell.spec
    torch.manual_seed(0)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[spec.output_dtype]

    def make(heads: int, width: int) -> Any:
        inner = (cell.length, heads) if layout == "bshd" else (heads, cell.length)
        made = torch.randn(cell.batch, *inner, width, device="cuda", dtype=dtype)
        return made.transpose(1, 2) if layout == "bshd" else made

    return (
        make(spec.heads, spec.head_dim),
        make(spec.kv_heads, spec.head_dim),
        make(spec.kv_heads, spec.value_dim),
    )


def summarise(measured: Sequence[Measured], peer: str) -> Summary | None:
    """Our speed relative to a peer: geometric mean and the worst cell."""
    ratios = [(r, m.cell.name) for m in measured if (r := m.ratio(peer)) is not None]
    if not ratios:
        return None
    mean = math.exp(sum(math.log(r) for r, _ in ratios) / len(ratios))
    worst, where = min(ratios)
    return Summary(peer, len(ratios), mean, worst, where)


def record(measured: Measured) -> dict[str, Any]:
    """A cell as plain data."""
    cell = measured.cell
    return {
        "cell": cell.name,
        "variant": cell.spec.variant,
        "head_dim": cell.spec.head_dim,
        "heads": cell.spec.heads,
        "kv_heads": cell.spec.kv_heads,
        "causal": cell.spec.causal,
        "dtype": cell.spec.dtype,
        "length": cell.length,
        "batch": cell.batch,
        "seconds": {name: t.median for name, t in measured.timings.items()},
        "spread": {name: round(t.spread, 4) for name, t in measured.timings.items()},
        "tflops": {name: round(cell.tflops(t.median), 1) for name, t in measured.timings.items()},
        "reasons": dict(measured.reasons),
    }
