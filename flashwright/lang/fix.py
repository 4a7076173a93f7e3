"""Apply the fixes that diagnostics carry."""

from __future__ import annotations

from collections.abc import Iterable

from flashwright.lang.diagnostic import Diagnostic, Edit


def apply(source: str, diagnostics: Iterable[Diagnostic]) -> tuple[str, int]:
    """The source with the fixes applied, and their number; of two that overlap, the first."""
    taken: list[Edit] = []
    count = 0
    for diagnostic in diagnostics:
        edits = diagnostic.fix.edits if diagnostic.fix else ()
        if edits and not any(_overlap(new, old) for new in edits for old in taken):
            taken += edits
            count += 1
    # From the end, so that earlier offsets stay valid; an insertion goes before a replacement.
    for edit in sorted(taken, key=lambda e: (e.start, e.end), reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source, count


def _overlap(a: Edit, b: Edit) -> bool:
    if a.start == a.end and b.start == b.end:
        return a.start == b.start  # two insertions at one place: their order would be a guess
    return a.start < b.end and b.start < a.end
