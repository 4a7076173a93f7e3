"""Apply the fixes that diagnostics carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from flashwright.lang.diagnostic import Diagnostic, Edit

ROUNDS = 10
"""A fix may uncover the next error; more rounds than this are a bug."""


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


def apply_all(
    source: str,
    diagnostics: Sequence[Diagnostic],
    check: Callable[[str], Sequence[Diagnostic]],
) -> tuple[str, int]:
    """The source with fixes applied until its findings have none, and their number. `check` gives
    the findings of a new text: a fix may uncover the next error."""
    total = 0
    for _ in range(ROUNDS):
        mended, count = apply(source, diagnostics)
        if not count or mended == source:
            break
        source, total = mended, total + count
        diagnostics = check(source)
    return source, total


def _overlap(a: Edit, b: Edit) -> bool:
    if a.start == a.end and b.start == b.end:
        return a.start == b.start  # two insertions at one place: their order would be a guess
    return a.start < b.end and b.start < a.end
