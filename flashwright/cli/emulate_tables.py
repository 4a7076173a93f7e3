"""The tables of an emulated launch's counts, by line and by kind of instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from flashwright.emulate.profile import LineCounts, Profile

_MANY = 1000
_GAP = 2
_NARROWEST, _WIDEST = 8, 25  # characters of a line of TL


def lines_table(counted: Profile, width: int) -> Table:
    """The counts by line; a line that is not executed has no row. The text of the lines is cut to
    what `width` leaves beside the figures."""
    from flashwright.cli import show

    numbers = ("line", "warp instr.", "MMA ops", "global", "shared", "banks", "sectors", "waits")
    shown = show.table(numbers[0], counted.of, *numbers[1:], right=numbers, gap=_GAP)
    rows = []
    for row in (*counted.lines, counted.total):
        whole = row is counted.total
        name = "" if row.line is None else str(row.line)
        text = "in all" if whole else row.text or "(no line)"
        rows.append((name, text, *_cells(row)))
    figures = [row[:1] + row[2:] for row in (("line", "", *numbers[1:]), *rows)]
    taken = sum(max(map(len, column)) + _GAP for column in zip(*figures, strict=True))
    words = shown.columns[1]
    words.no_wrap, words.overflow = True, "ellipsis"
    words.max_width = max(_NARROWEST, min(_WIDEST, width - taken - _GAP))
    for cells in rows:
        shown.add_row(*cells)
    return shown


def _cells(row: LineCounts) -> list[str]:
    moved = [
        (row.bytes.get(f"{level}_read", 0), row.bytes.get(f"{level}_written", 0))
        for level in ("global", "shared")
    ]
    ratios = [row.conflicts, row.sectors_a_request]
    return [
        f"{row.executed:,}",
        _count(row.operations),
        *(_count(sum(both)) for both in moved),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        _count(row.waits),
    ]


def kinds_table(counted: Profile) -> Table:
    """The counts by kind of instruction."""
    from flashwright.cli import show
    from flashwright.emulate.profile import KINDS

    total = max(counted.total.executed, 1)
    shown = show.table("kind", "warp instr.", "share", right=("warp instr.", "share"))
    for kind in KINDS:
        count = counted.total.instructions.get(kind, 0)
        if count:
            shown.add_row(kind, f"{count:,}", f"{100 * count / total:.1f} %")
    return shown


def _count(number: int) -> str:
    """`1.5M`; nothing for 0."""
    if not number:
        return ""
    value, unit = float(number), ""
    units = iter("kMGT")
    while value >= _MANY:
        value, unit = value / _MANY, next(units)
    return f"{value:.3g}{unit}"
