"""A text as an editor has it: its findings, and what is known of its names.

A program that is being typed is wrong most of the time. What is known of the last text that could
be parsed stays, and its lines are found again in the text of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from flashwright.check.check import check
from flashwright.check.flow import problems
from flashwright.check.names import Names
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Statement, Tree, statements
from flashwright.lang.parse import parse
from flashwright.lower.report import notes
from flashwright.lower.translate import translate
from flashwright.program.kernels import split_kernels
from flashwright.program.program import Key, Program
from flashwright.program.scalars import NotScalar
from flashwright.semantics.machine import GaveUp, Machine
from flashwright.semantics.tiles import Tile

STEPS = 5_000
"""Statements that the run for `tiles` may execute; one thread block takes some hundreds."""

RUN = ("FW6", "FW7")
"""The findings of flow and of budgets, for which the program is executed."""

Dims = Callable[[Tree], Mapping[str, int]]
"""The sizes that a spec gives to a program's own dims."""


@dataclass(frozen=True)
class Known:
    """What is known of a program that could be parsed."""

    text: str
    tree: Tree
    sound: bool
    """Whether names, shapes and spaces are right, so that the program can be executed."""
    earlier: tuple[Program, ...] = ()
    """The kernels of the last text that was sound, if this one is not."""

    @cached_property
    def kernels(self) -> tuple[Names, ...]:
        """What each kernel declares, with the declarations above the first one that it uses."""
        return tuple(Names(part) for part in split_kernels(self.tree))

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The kernels as programs, of this text or of the last sound one."""
        if not self.sound:
            return self.earlier
        return tuple(program for kernel in self.kernels if (program := kernel.program()))

    @cached_property
    def tiles(self) -> tuple[tuple[Statement, Mapping[Key, Tile]], ...]:
        """Every statement with the tiles behind it, when a thread block executes it first."""
        return tuple(found for program in self.programs for found in _tiles(program))

    def lines(self, text: str) -> Mapping[int, int]:
        """The lines of another text that are in this one, counted from 1, and where."""
        here, there = self.text.split("\n"), text.split("\n")
        if self.text == text:
            return {n: n for n in range(1, len(here) + 1)}
        blocks = SequenceMatcher(None, there, here, autojunk=False).get_matching_blocks()
        return {b.a + n + 1: b.b + n + 1 for b in blocks for n in range(b.size)}

    def statement(self, line: int) -> Statement | None:
        """The statement on a line, as it is written; a part of a split program has others."""
        on_line = (s for s in statements(self.tree.body) if s.span.line <= line <= s.span.end_line)
        return next(on_line, None)


@dataclass(frozen=True)
class Analysis:
    """The findings on a text, and what is known of it, or of an earlier one if it has no tree."""

    text: str
    diagnostics: tuple[Diagnostic, ...]
    known: Known | None = None
    programs: tuple[Program, ...] = field(default=(), repr=False)
    """The kernels of a program without errors."""

    def with_notes(self, gpu: Gpu) -> Analysis:
        """The same with the translator's notes: what the GPU can do and these kernels do not."""
        found: list[Diagnostic] = []
        for program in self.programs:
            try:
                report = translate(program, gpu).report
            except Failed:
                continue  # what does not translate may still be a program of TL
            if report is not None:
                found += notes(report, self.text, program.tree)
        return Analysis(self.text, (*self.diagnostics, *found), self.known, self.programs)


def analyse(
    text: str,
    gpu: Gpu | None = None,
    dims: Dims = lambda tree: {},
    before: Known | None = None,
) -> Analysis:
    """Parse and check a text. `before` is what was known of it as it was before."""
    try:
        tree = parse(text)
    except Failed as failed:
        return Analysis(text, failed.diagnostics, before)
    verdict = check(tree, gpu, dims(tree))
    sound = verdict.level == "code" and all(d.code.startswith(RUN) for d in verdict.errors)
    earlier = before.programs if before is not None and not sound else ()
    return Analysis(text, verdict.diagnostics, Known(text, tree, sound, earlier), verdict.kernels)


def _tiles(program: Program) -> Iterator[tuple[Statement, Mapping[Key, Tile]]]:
    """What a thread block of a small problem has in its tiles behind each statement."""
    seen: dict[int, tuple[Statement, Mapping[Key, Tile]]] = {}

    def observe(stmt: Statement, machine: Machine) -> None:
        if id(stmt) not in seen:
            seen[id(stmt)] = stmt, {key: cell.tile for key, cell in machine.cells.items()}

    dims = next(problems(program, {}))
    machine = Machine(program, dims, observe=observe, steps=STEPS)
    try:
        for block in machine.blocks():
            machine.run_block(block)
            break
    except (GaveUp, NotScalar):
        pass  # what was seen so far is shown
    return iter(seen.values())
