"""Tiles that an iteration loads for the next one. The first ones are loaded before the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flashwright.lang import nodes as tl
from flashwright.program.program import Key, Program
from flashwright.rewrite.carried import refused
from flashwright.rewrite.tree import Body, substituted

ONE = tl.Num("1")


class Ahead:
    """The Copies of a loop that load tiles ahead, and those before it that load the first ones."""

    def __init__(
        self, program: Program, loop: tl.For, tiles: Sequence[Key], fresh: Callable[[str], str]
    ) -> None:
        self.program, self.whole, self.tiles = program, loop, {*tiles}
        self.first = fresh("first") if tiles else ""
        self.last = fresh("last") if tiles else ""
        self.copies = [s for s in tl.statements(loop.body) if program.writes(s) & self.tiles]

    def loop(self) -> tl.For:
        """The loop over a share. Raises Failed with FW910 unless the Copies are left out in its
        last iteration, and only in that one."""
        loop, body = self.whole, list(self.whole.body)
        ends = {
            tl.Binary("<", loop.var, tl.Binary("-", loop.high, ONE)): self._minus_one(),
            tl.Binary("<", tl.Binary("+", loop.var, ONE), loop.high): self._plus_one(),
        }
        guarded: list[tl.Statement] = []
        for n, stmt in enumerate(body):
            if isinstance(stmt, tl.If) and stmt.cond in ends and not stmt.orelse:
                body[n] = replace(stmt, cond=ends[stmt.cond])
                guarded += stmt.then
        for copy in self.copies:
            if not any(copy is s for s in guarded):
                i = loop.var.id
                text = f"this loads ahead, but not under `if {i} < ... - 1` with the loop's end"
                raise refused(text, copy)
        bounds = tl.Name(self.first), tl.Name(self.last)
        return replace(loop, low=bounds[0], high=bounds[1], body=tuple(body))

    def _minus_one(self) -> tl.Expr:
        return tl.Binary("<", self.whole.var, tl.Binary("-", tl.Name(self.last), ONE))

    def _plus_one(self) -> tl.Expr:
        return tl.Binary("<", tl.Binary("+", self.whole.var, ONE), tl.Name(self.last))

    def prologue(self, before: Body, lets: Body) -> dict[int, Body]:
        """Changes to what stands before the loop: `lets` come before the first Copy, and the Copies
        load the first tiles of the share. Raises Failed with FW910 if they loaded other tiles."""
        loads = [s for s in tl.statements(before) if self.program.writes(s) & self.tiles]
        wanted = {_plain(self._at(copy, self.whole.low)): copy for copy in self.copies}
        new: dict[int, tl.Statement] = {}
        for copy in loads:
            same = wanted.pop(_plain(copy), None)
            if same is None:
                text = "this does not load what the loop would load for its first iteration"
                raise refused(text, copy)
            made = self._at(same, tl.Name(self.first))
            new[id(copy)] = replace(made, span=copy.span, comment=copy.comment, gap=copy.gap)
        if wanted:
            text = "this loads ahead, and no Copy before the loop loads the first tile"
            raise refused(text, next(iter(wanted.values())))
        changes: dict[int, Body] = {}
        for stmt in before:
            if (loaded := self._with(stmt, new)) is not None:
                changes[id(stmt)] = (loaded,) if changes else (*lets, loaded)
        return changes

    def _at(self, copy: tl.Statement, iteration: tl.Expr) -> tl.Copy:
        """A Copy for the next iteration as one for a certain iteration."""
        assert isinstance(copy, tl.Copy)
        return substituted(copy, {tl.Binary("+", self.whole.var, ONE): iteration})

    def _with(self, stmt: tl.Statement, new: dict[int, tl.Statement]) -> tl.Statement | None:
        """A statement with new Copies; None if it has none of the old ones."""
        if id(stmt) in new:
            return new[id(stmt)]
        if not isinstance(stmt, tl.If) or not any(id(s) in new for s in stmt.then):
            return None
        some = tl.Binary("<", self.whole.low, self.whole.high)
        ours = tl.Binary("<", tl.Name(self.first), tl.Name(self.last))
        then = tuple(new.get(id(s), s) for s in stmt.then)
        return replace(stmt, cond=substituted(stmt.cond, {some: ours}), then=then)


def _plain(copy: tl.Statement) -> tl.Statement:
    return replace(copy, comment=None, gap=False)
