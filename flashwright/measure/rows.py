"""A benchmark as table rows: each contestant's figure, our ratio to it, and the paper's figures."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.measure import tables
from flashwright.measure.peers import registry
from flashwright.measure.records import OURS, NumberRecord
from flashwright.measure.results import Results
from flashwright.spec import AttentionSpec, BadSpec


@dataclass(frozen=True)
class RowEntry:
    """One contestant in one row."""

    who: str
    value: float | None = None
    """In the unit of the row."""
    ratio: float | None = None
    """Our speed over that of the contestant."""
    paper: float | None = None
    paper_ratio: float | None = None


@dataclass(frozen=True)
class BenchRow:
    """One cell."""

    kernel: str
    size: str
    """The length, or the name of the sequences."""
    unit: str
    """TFLOPS; s, if the table is in seconds; GB/s of a decode."""
    entries: tuple[RowEntry, ...]
    """Ours first."""
    spread: float | None = None
    """Of our time."""

    @property
    def name(self) -> str:
        """The name of its cell."""
        return f"{self.kernel} {self.size}"


def rows(results: Results, gpu: str | None = None) -> list[BenchRow]:
    """A row for each cell that has a record, with the paper's figures for `gpu` or its main GPU."""
    table = table_of(results)
    seconds = table is not None and tables.TABLES[table].unit == "s"
    names = {peer.name: peer.stands_for for peer in registry.known().values()}
    return [_row(results, cell, table, gpu, names, seconds) for cell in results.cells]


def table_of(results: Results) -> int | None:
    """The number of the paper's table that was run; None if it was another benchmark."""
    table = results.run.table if results.run else None
    return table if table in tables.TABLES else None


def _split(cell: str) -> tuple[str, str]:
    """A cell's kernel and its size."""
    kernel, _, size = cell.rpartition(" ")
    return kernel, size


def _row(
    results: Results,
    cell: str,
    table: int | None,
    gpu: str | None,
    names: dict[str, tuple[str, ...]],
    seconds: bool,
) -> BenchRow:
    kernel, size = _split(cell)
    unit = "s" if seconds else _unit(results, cell)
    figures = _figures(results, cell, int(size), table, gpu) if size.isdecimal() else None
    entries = []
    for who in results.contestants:
        number = results.numbers.get((cell, who))
        value = None if number is None else _value(number, unit)
        ratio = None if who == OURS else results.ratio(cell, who)
        entries.append(_entry(who, value, ratio, figures, names))
    ours = results.numbers.get((cell, OURS))
    return BenchRow(
        kernel,
        size,
        unit,
        tuple(entries),
        ours.spread if ours else None,
    )


def _unit(results: Results, cell: str) -> str:
    """A decode reads keys: its figure is the bandwidth."""
    kernel = results.kernel_of(cell)
    decode = kernel is not None and kernel.spec.get("decode") is not None
    return "GB/s" if decode else "TFLOPS"


def _value(number: NumberRecord, unit: str) -> float | None:
    return {"s": number.seconds, "GB/s": number.gbs}.get(unit, number.tflops)


def _entry(
    who: str,
    value: float | None,
    ratio: float | None,
    figures: tables.PaperCell | None,
    names: dict[str, tuple[str, ...]],
) -> RowEntry:
    if figures is None:
        return RowEntry(who, value, ratio)
    if who == OURS:
        return RowEntry(who, value, ratio, figures.ours)
    for system in names.get(who, ()):
        found = figures.by_system.get(system), figures.ratio(system)
        if found != (None, None):
            return RowEntry(who, value, ratio, *found)
    return RowEntry(who, value, ratio)


def _figures(
    results: Results, cell: str, length: int, table: int | None, gpu: str | None
) -> tables.PaperCell | None:
    kernel = results.kernel_of(cell)
    if table is None or kernel is None:
        return None
    try:
        spec = AttentionSpec.make(**kernel.spec)
    except BadSpec:
        return None
    wanted = gpu or tables.TABLES[table].gpus[0]
    every = tables.figures(table, spec, length)
    return next((one for one in every if one.gpu == wanted), None)


# --- words ------------------------------------------------------------------------------------


def value_in_words(value: float | None, unit: str) -> str:
    """A measured figure as text; a dash if there is none."""
    if value is None:
        return "-"
    if unit == "s":
        return f"{value * 1e3:.3g} ms"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def paper_in_words(value: float | None, unit: str) -> str:
    """A figure of the paper as text; empty if there is none."""
    if value is None:
        return ""
    return f"{value:g} s" if unit == "s" else f"{value:g}"


def ratio_in_words(ratio: float | None) -> str:
    """A ratio as text; empty if there is none."""
    return "" if ratio is None else f"{ratio:.2f}x"


def development_in_words(results: Results) -> list[str]:
    """Table 4: the time from the spec to the verdict, for our kernels and in the paper."""
    found = []
    for name, kernel in results.kernels.items():
        if kernel.seconds and not kernel.why:
            parts = ", ".join(f"{what} {s:.3g} s" for what, s in kernel.seconds.items())
            found.append(f"{name}: {sum(kernel.seconds.values()):.3g} s ({parts})")
    for system in (tables.OURS, "human expert"):
        found.append(f"the paper's {system}: {tables.development(system)}")
    return found
