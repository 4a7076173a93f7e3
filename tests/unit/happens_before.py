"""Runs the tile IR of one thread block, event by event, and looks for races in shared memory.

All threads go the same way, so one list of events is that of every thread, and two threads are in
step only at barriers: what one does at event k is known to another at event l if a barrier lies
between. An asynchronous copy may write at any time between its start and the wait for its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import zip_longest
from typing import Any

from flashwright.gpu import Gpu
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.launch_plan import RANGE
from flashwright.lower.term import Term
from flashwright.lower.term_value import value
from flashwright.lower.translate import schedule
from flashwright.program.program import Key, Program

Place = tuple[Key, int]  # a shared tile and its stage
NEVER = 1 << 60


class Race(AssertionError):
    """Two threads, or a thread and its copy, meet in shared memory."""


@dataclass
class Written:
    """What was last written to a place."""

    content: object
    kind: str
    start: int
    done: int  # the event from which on the writing thread knows that it is there


@dataclass
class Block:
    """One thread block at work. `seen` is all it read and stored: what the program means."""

    env: dict[str, Any]
    asynchronous: bool
    sequential: bool = False  # as TL says it: every copy is done when the next statement begins
    clock: int = 0
    barriers: int = 0
    last_barrier: int = -1
    held: dict[Place, Written] = field(default_factory=dict)
    read: dict[Place, int] = field(default_factory=dict)  # the last time
    staged: dict[Key, object] = field(default_factory=dict)
    open: list[Written] = field(default_factory=list)
    groups: list[list[Written]] = field(default_factory=list)
    seen: list[object] = field(default_factory=list)

    def run(self, body: tuple[ir.Statement, ...]) -> None:
        for node in body:
            self.clock += 1
            match node:
                case ir.Loop():
                    self.env[node.var] = value(node.low, self.env)
                    while value(node.condition, self.env):
                        self.run(node.body)
                        self.env[node.var] += 1
                case ir.Branch():
                    self.run(node.then if value(node.condition, self.env) else node.orelse)
                case ir.Define():
                    self.env[node.name] = value(node.value, self.env)
                case _:
                    self.step(node)

    def step(self, node: ir.Statement) -> None:
        match node:
            case ir.Load():
                self.load(node)
            case ir.Put(dest, stage):
                self.write(self.place(dest, stage), self.staged.get(dest, "nothing"), "put")
            case ir.Commit():
                self.groups.append(self.open)
                self.open = []
            case ir.Wait(left):
                for group in self.groups[: len(self.groups) - left]:
                    for written in group:
                        written.done = min(written.done, self.clock)
            case ir.Barrier():
                self.last_barrier, self.barriers = self.clock, self.barriers + 1
            case ir.Gemm():
                for key, stage in ((node.left, node.left_stage), (node.right, node.right_stage)):
                    self.take(key, stage)
            case ir.Move(source, dest, stage) if source[1] == "shared":
                self.take(source, stage)
            case ir.Move(source, dest, stage):
                moves = sum(1 for x in self.seen if x == ("move", dest))
                self.seen.append(("move", dest))
                self.write(self.place(dest, stage), (source, moves), "move")
            case ir.Fill(key, window) | ir.Store(key, window):
                if isinstance(node, ir.Store):
                    self.take(key, None)
                self.seen.append(content(window, self.env))

    def load(self, node: ir.Load) -> None:
        what, place = content(node.window, self.env), self.place(node.dest, node.stage)
        if not node.window.chunked:
            self.write(place, what, "elements")
        elif self.sequential or self.asynchronous:
            written = self.write(place, what, "copy")
            if not self.sequential:
                written.done = NEVER
                self.open.append(written)
        else:
            self.staged[node.dest] = what

    def place(self, key: Key, stage: Term | None) -> Place:
        return key, 0 if stage is None else value(stage, self.env)

    def write(self, place: Place, what: object, kind: str) -> Written:
        before = self.held.get(place)
        if not self.sequential:
            if self.read.get(place, -1) > self.last_barrier:
                raise Race(f"{place} is overwritten while others may still read it")
            if before is not None and before.done > self.clock:
                raise Race(f"{place} is overwritten while a copy is on its way there")
            if before and before.kind != kind and before.done > self.last_barrier:
                raise Race(f"{place} is overwritten by other threads than wrote it")
        self.held[place] = Written(what, kind, self.clock, self.clock)
        return self.held[place]

    def take(self, key: Key, stage: Term | None) -> None:
        if key[1] != "shared":
            return
        place = self.place(key, stage)
        held = self.held.get(place)
        if held is None:
            raise Race(f"{place} is read before anything is there")
        if not self.sequential and held.done >= self.last_barrier:
            raise Race(f"{place} is read before all threads know that it is there")
        self.read[place] = self.clock
        self.seen.append((key, held.content))


def content(window: ir.Window, env: Mapping[str, Any]) -> object:
    return window.tensor.name, *(value(c, env) for c in window.terms)


def block(
    program: Program, gpu: Gpu, dims: Mapping[str, int], place: Mapping[str, int], **options: Any
) -> Block:
    """One thread block before it starts."""
    params = {n: v for n, v in program.params.items() if not isinstance(v, Fraction)}
    env: dict[str, Any] = {**params, **dict.fromkeys(program.dims, 2), **dims, **place}
    env |= {ir.RANGE_END.name: RANGE, ir.PAGE_IDX.name: 1}
    return Block(env, gpu.capability >= 80, **options)


@dataclass(frozen=True)
class Checker:
    """A program as it is meant and as it is scheduled for a GPU, to be run on many blocks."""

    program: Program
    gpu: Gpu

    @cached_property
    def meant(self) -> tuple[ir.Statement, ...]:
        return lower(self.program).body

    @cached_property
    def scheduled(self) -> tuple[ir.Statement, ...]:
        return schedule(self.program, self.gpu, self.meant)

    def check(self, dims: Mapping[str, int], place: Mapping[str, int]) -> Block:
        """Raises Race; also if the schedule reads anything else than the program says."""
        meant = block(self.program, self.gpu, dims, place, sequential=True)
        meant.run(self.meant)
        done = block(self.program, self.gpu, dims, place)
        done.run(self.scheduled)
        for said, found in zip_longest(meant.seen, done.seen):
            if said != found:
                raise Race(f"{said} is meant, {found} is there")
        return done
