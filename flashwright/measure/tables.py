"""The paper's tables: the cells of each, and the paper's figures.

The figures are data (paper.json). The paper does not name the type of its half-precision inputs.
We take fp16, because its Turing GPUs have no bf16.
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
"""The paper's own system."""
_SPEEDUP = "speedup over "


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables, to be run on the GPU here."""

    number: int
    title: str
    gpus: tuple[str, ...]
    """The paper's GPUs; the first is the main one, whose figures stand beside ours."""
    unit: str
    make: Callable[[str], Iterator[Cell]]
    """Makes the cells for a dtype."""
    dtype: str = "fp16"
    peers: tuple[str, ...] = ()
    """Peers that take part even where they are not installed, so that the table says so."""

    def cells(self, dtype: str | None = None) -> tuple[Cell, ...]:
        """The cells of the table, in `dtype` or the table's own."""
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
    """NSA as a whole, then each branch alone. One sequence: the paper's times grow with the length,
    so its batch does not shrink."""
    branches = ("compressed", "selected", "window")
    alone = [make_spec(f"nsa-{branch}", head_dim=128, dtype=dtype) for branch in branches]
    for spec in (whole_nsa(dtype), *alone):
        for length in grid.LENGTHS:
            yield Cell(spec, length, 1)


def whole_nsa(dtype: str) -> AttentionSpec:
    """NSA as a whole, with the sizes of its branches: blocks are chosen by their own means, so they
    do not overlap."""
    return AttentionSpec.make(
        variant="nsa",
        heads=64,
        kv_heads=4,
        head_dim=128,
        dtype=dtype,
        causal=True,
        branch="all",
        window=512,
        block=64,
        stride=64,
    )


TABLES: Mapping[int, PaperTable] = {
    t.number: t
    for t in (
        PaperTable(1, "MHA, GQA and MQA", ("A100", "RTX8000"), "TFLOPS", _grid),
        PaperTable(2, "MLA, causal, 192/128", ("A100",), "TFLOPS", _mla),
        PaperTable(4, "cost of development, MHA d64 full 1024", ("A100",), "TFLOPS", _effort),
        PaperTable(6, "fp8 MHA d128 causal", ("L40S",), "TFLOPS", _fp8, "fp8"),
        PaperTable(7, "MHA, GQA and MQA on a T4", ("T4",), "TFLOPS", _grid),
        PaperTable(
            8, "heads of Llama2 7B, Qwen2.5 72B, Llama3.1 405B", ("A100",), "TFLOPS", _models
        ),
        PaperTable(9, "NSA, seconds", ("A100",), "s", _nsa, peers=("fla",)),
    )
}


# --- the paper's figures ----------------------------------------------------------------------


@functools.cache
def rows() -> tuple[dict[str, Any], ...]:
    """The rows of paper.json: one for each system and kernel."""
    text = (resources.files("flashwright.measure") / "paper.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["rows"])


@dataclass(frozen=True)
class PaperCell:
    """The paper's figures for one cell, on one GPU."""

    gpu: str
    unit: str
    by_system: Mapping[str, float]

    @property
    def ours(self) -> float | None:
        """The figure of the paper's own system; None if it has none."""
        return self.by_system.get(OURS)

    def ratio(self, system: str) -> float | None:
        """How many times as fast as `system` the paper's own is; None if unknown."""
        own, other = self.ours, self.by_system.get(system)
        if own is not None and other:
            return other / own if self.unit == "s" else own / other
        return self.by_system.get(_SPEEDUP + system)


def figures(table: int, spec: AttentionSpec, length: int) -> tuple[PaperCell, ...]:
    """The paper's figures for one of our cells, its main GPU first; empty if it has none."""
    found: dict[str, dict[str, float]] = {gpu: {} for gpu in TABLES[table].gpus}
    for row in rows():
        value = row["by_length"].get(str(length))
        if row["table"] == table and value is not None and _same(row, spec):
            found[row["gpu"]][row["system"]] = value
    unit = TABLES[table].unit
    return tuple(PaperCell(gpu, unit, values) for gpu, values in found.items() if values)


def _same(row: Mapping[str, Any], spec: AttentionSpec) -> bool:
    """Whether a row of paper.json is about this kernel."""
    if "heads" in row:
        return (row["heads"], row["kv_heads"]) == (spec.heads, spec.kv_heads)
    theirs = (str(row["variant"]).lower(), row["head_dim"], row.get("causal", False))
    return theirs == (spec.variant, spec.value_dim, spec.causal)


def development(system: str) -> str | None:
    """The development time of table 4's kernel with a system, as the paper words it."""
    found = (r for r in rows() if r["table"] == 4 and r["system"] == system)
    return next((str(r["development_time"]) for r in found), None)
