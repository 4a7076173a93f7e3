"""Loops over the blocks of keys: one, two in a row, nested, unrolled, peeled, with a prefetch."""

from __future__ import annotations

from dataclasses import replace

from flashwright.fuzz.body import LoopBody
from flashwright.fuzz.draft import Draft
from flashwright.fuzz.plan import ProgramPlan


def write_loop(draft: Draft, plan: ProgramPlan, body: LoopBody) -> None:
    """Write the loop of the plan's kind."""
    low, high = body.masks.low, body.masks.high
    writers = {
        "plain": _plain,
        "let": _let,
        "split": _split,
        "prefetch": _prefetch,
        "prefetch where": _prefetch_where,
        "unrolled": _unrolled,
        "reversed": _reversed,
        "peeled": _peeled,
        "nested keys": _nested,
        "nested queries": _plain,
        "skipped": _skipped,
        "sink": _sink,
    }
    writers[plan.loop](draft, body, low, high)


def _plain(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    with draft.block(f"for i = {low}:{high}"):
        body.write("i")


def _let(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Name the block by a `let`."""
    c = draft.c
    if c.chance(0.3):
        draft.tag("let bounds")
        draft.line(f"let Low = {low}")
        draft.line(f"let High = {high}")
        low, high = "Low", "High"
    with draft.block(f"for i = {low}:{high}"):
        draft.line(f"let place = {c.pick(['i', 'i + 0', 'floor(i * BN / BN)', '2 * i - i'])}")
        if c.chance(0.2):
            draft.line("let where_ = place")
            body.write("where_")
        else:
            body.write("place")


def _split(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Two loops in a row: the first half of the blocks, then the rest."""
    c = draft.c
    draft.line(f"let First = {low}")
    draft.line(f"let Last = {high}")
    middle = c.pick(["floor((First + Last) / 2)", "First + 1", "floor(Last * 2 / 3)", "2"])
    draft.line(f"let Middle = {middle}")
    other = "i" if draft.chance(0.5, "same variable") else "j"
    again = body
    if draft.chance(0.3, "tiles of its own"):
        again = replace(body, tail="b", order=[])
    with draft.block("for i = First:min(Middle, Last)"):
        body.write("i")
    with draft.block(f"for {other} = max(First, Middle):Last"):
        again.write(other)


def _bounds(draft: Draft, low: str, high: str) -> None:
    draft.line(f"let First = {low}")
    draft.line(f"let Last = {high}")


def _prefetch(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """K of the next block is copied behind the scores of this one."""
    _bounds(draft, low, high)
    ahead = replace(body, ahead=("K",))
    with draft.block("if First < Last"):
        draft.line(ahead.copy("K", "First"))
    with draft.block("for i = First:Last"):
        ahead.copies("i")

        def between() -> None:
            with draft.block(draft.c.pick(["if i < Last - 1", "if i + 1 < Last"])):
                draft.line(ahead.copy("K", "i + 1"))

        ahead.compute("i", None if body.plan.shared_kv else between)
        if body.plan.shared_kv:
            between()


def _prefetch_where(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """A prefetch without a branch: the last one fetches the first block again."""
    draft.line(f"let First = {low}")
    draft.line(f"let Last = max(First + 1, ceil({high}))")
    ahead = replace(body, ahead=("K",))
    draft.line(ahead.copy("K", "First"))
    with draft.block("for i = First:Last"):
        ahead.copies("i")
        line = ahead.copy("K", "where(i + 1 < Last, i + 1, First)")
        ahead.compute("i", None if body.plan.shared_kv else lambda: draft.line(line))
        if body.plan.shared_kv:
            draft.line(line)


def _unrolled(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Two blocks in an iteration, the second one under an `if`."""
    _bounds(draft, low, high)
    again = replace(body, tail="b", order=[]) if draft.chance(0.4, "tiles of its own") else body
    with draft.block("for j = 0:(Last - First) / 2"):
        body.write("(First + 2 * j)")
        with draft.block("if First + 2 * j + 1 < Last"):
            if draft.c.chance(0.5):
                draft.line("let second = First + 2 * j + 1")
                again.write("second")
            else:
                again.write("(First + 2 * j + 1)")


def _reversed(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """The last block first."""
    draft.line(f"let First = {low}")
    draft.line(f"let Last = ceil({high})")
    with draft.block("for i = First:Last"):
        if draft.c.chance(0.5):
            draft.line("let back = First + Last - 1 - i")
            body.write("back")
        else:
            body.write("(First + Last - 1 - i)")


def _peeled(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """The first block before the loop."""
    _bounds(draft, low, high)
    again = replace(body, tail="b", order=[]) if draft.chance(0.4, "tiles of its own") else body
    with draft.block("if First < Last"):
        body.write("First")
    with draft.block("for i = First + 1:Last"):
        again.write("i")


def _nested(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Groups of two blocks."""
    _bounds(draft, low, high)
    with (
        draft.block("for j = 0:(Last - First) / 2"),
        draft.block("for i = First + 2 * j:min(First + 2 * j + 2, Last)"),
    ):
        body.write("i")


def _skipped(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Blocks past the ends are left out by an `if`."""
    _bounds(draft, low, high)
    with draft.block("for i = 0:kv_len / BN"), draft.block("if i >= First and i < Last"):
        body.write("i")


def _sink(draft: Draft, body: LoopBody, low: str, high: str) -> None:
    """Copy K and V in both arms of an `if`, with different expressions for the coordinates."""
    _bounds(draft, low, high)
    with draft.block("for i = First:Last"):
        names = body.loads()
        with draft.block("if i < First + 1"):
            for name in names:
                draft.line(body.copy(name, "First"))
            draft.else_arm()
            for name in names:
                draft.line(body.copy(name, "i"))
        rest = replace(body, ahead=tuple(names))
        rest.copies("i")
        rest.compute("i")
