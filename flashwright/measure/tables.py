"""The paper's tables: which cells each has, and what the paper found there.

The figures are data (paper.json). The paper says nothing of the type of its half-precision inputs;
its Turing cards multiply fp16 only, so fp16 it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from flashwright.author.builtin.variants import make_spec
from flashwright.measure import grid
from flashwright.measure.grid import Cell, Shape
from flashwright.spec import AttentionSpec

OURS = "LLM-TL"
"""The paper's own system, which stands beside ours."""
_SPEEDUP = "speedup over "


@dataclass(frozen=True)
class Table:
    """One of the paper's tables, to be run on the GPU at hand."""

    number: int
    title: str
    gpus: tuple[str, ...]
    """The paper's; the first is the one that figures are told for where there is room for one."""
    unit: str
    make: Callable[[str], Iterator[Cell]]
    """From a dtype."""
    dtype: str = "fp16"

    def cells(self, dtype: str | None = None) -> tuple[Cell, ...]:
        """Its cells, in the dtype asked for or the table's own."""
        return tuple(self.make(dtype or self.dtype))


def _grid(dtype: str) -> Iterator[Cell]:
    return grid.cells(Shape(dtype=dtype))


def _mla(dtype: str) -> Iterator[Cell]:
    yield from grid.of_spec(make_spec("mla", causal=True, dtype=dtype), grid.LENGTHS)


def _effort(dtype: str) -> Iterator[Cell]:
    shape = Shape(("mha",), (64,), (1024,), (False,), dtype)
    return grid.cells(shape)


def _fp8(dtype: str) -> Iterator[Cell]:
    return grid.cells(Shape(("mha",), (128,), masks=(True,), dtype=dtype))


def _models(dtype: str) -> Iterator[Cell]:
    for variant, heads, kv_heads in (("mha", 32, 32), ("gqa", 64, 8), ("gqa", 128, 8)):
        spec = make_spec(
            variant, heads=heads, kv_heads=kv_heads, head_dim=128, causal=True, dtype=dtype
        )
        yield from grid.of_spec(spec, grid.LENGTHS)


def _nsa(dtype: str) -> Iterator[Cell]:
    """One sequence: the paper's times grow with the length, so its batch does not shrink."""
    for branch in ("compressed", "selected", "window"):
        spec = make_spec(f"nsa-{branch}", head_dim=128, dtype=dtype)
        for length in grid.LENGTHS:
            yield Cell(spec, length, 1)


TABLES: Mapping[int, Table] = {
    t.number: t
    for t in (
        Table(1, "MHA, GQA and MQA", ("A100", "RTX8000"), "TFLOPS", _grid),
        Table(2, "MLA, causal, 192/128", ("A100",), "TFLOPS", _mla),
        Table(4, "cost of development, MHA d64 full 1024", ("A100",), "TFLOPS", _effort),
        Table(6, "fp8 MHA d128 causal", ("L40S",), "TFLOPS", _fp8, "fp8"),
        Table(7, "MHA, GQA and MQA on a T4", ("T4",), "TFLOPS", _grid),
        Table(8, "heads of Llama2 7B, Qwen2.5 72B, Llama3.1 405B", ("A100",), "TFLOPS", _models),
        Table(9, "NSA, seconds", ("A100",), "s", _nsa),
    )
}


# --- the paper's figures ----------------------------------------------------------------------


@functools.cache
def rows() -> tuple[dict[str, Any], ...]:
    """The paper's figures, a row for each system, as paper.json has them."""
    text = (resources.files("flashwright.measure") / "paper.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["rows"])


@dataclass(frozen=True)
class Figures:
    """What the paper found in one cell, on one GPU."""

    gpu: str
    unit: str
    by_system: Mapping[str, float]

    @property
    def ours(self) -> float | None:
        """The paper's own system."""
        return self.by_system.get(OURS)

    def ratio(self, system: str) -> float | None:
        """How many times as fast as another system the paper's own is."""
        own, other = self.ours, self.by_system.get(system)
        if own is not None and other:
            return other / own if self.unit == "s" else own / other
        return self.by_system.get(_SPEEDUP + system)


def figures(table: int, spec: AttentionSpec, length: int) -> tuple[Figures, ...]:
    """The paper's figures for a cell of ours, its main GPU first; () where it has none."""
    found: dict[str, dict[str, float]] = {gpu: {} for gpu in TABLES[table].gpus}
    for row in rows():
        value = row["by_length"].get(str(length))
        if row["table"] == table and value is not None and _same(row, spec):
            found[row["gpu"]][row["system"]] = value
    unit = TABLES[table].unit
    return tuple(Figures(gpu, unit, told) for gpu, told in found.items() if told)


def nsa_total(length: int) -> Figures | None:
    """The paper's times of all of NSA; ours are those of its branches, which are then added."""
    told = {
        r["system"]: r["by_length"].get(str(length))
        for r in rows()
        if r["table"] == 9 and r["by_length"].get(str(length)) is not None
    }
    return Figures("A100", "s", told) if told else None


def _same(row: Mapping[str, Any], spec: AttentionSpec) -> bool:
    """Whether a row of the paper's is about this kernel."""
    if "heads" in row:
        return (row["heads"], row["kv_heads"]) == (spec.heads, spec.kv_heads)
    theirs = (str(row["variant"]).lower(), row["head_dim"], row.get("causal", False))
    return theirs == (spec.variant, spec.value_dim, spec.causal)


def development(system: str) -> str | None:
    """How long a system took to write table 4's kernel, in the paper's words."""
    found = (r for r in rows() if r["table"] == 4 and r["system"] == system)
    return next((str(r["development_time"]) for r in found), None)
