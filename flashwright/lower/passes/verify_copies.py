"""The verifier on small problems, where all threads copy: one block's copies, waits and barriers
are carried out. A read is behind the wait for its copy and a barrier, a write behind a barrier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwright.lower import ir
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.verify_runs import (
    MADE,
    Body,
    LeftOut,
    Problem,
    Reads,
    Trace,
    content,
    reads_meant,
)
from flashwright.lower.term import Term
from flashwright.lower.term_value import value
from flashwright.program.program import Key

BARRIERS = "the placing of barriers"


@dataclass
class _Written:
    content: object
    kind: str
    done: int  # from which event on the writing thread knows that it is there


@dataclass
class _Copies:
    """One thread block; two threads are in step only at barriers."""

    asynchronous: bool
    clock: int = 0
    barrier: int = -1
    held: dict[tuple[Key, int], _Written] = field(default_factory=dict)
    last_read: dict[tuple[Key, int], int] = field(default_factory=dict)
    staged: dict[Key, object] = field(default_factory=dict)
    registers: dict[Key, object] = field(default_factory=dict)
    open: list[_Written] = field(default_factory=list)
    groups: list[list[_Written]] = field(default_factory=list)
    found: Reads = field(default_factory=dict)

    def note(self, node: ir.Statement, env: dict[str, Any]) -> None:
        self.clock += 1
        match node:
            case ir.Load():
                self._load(node, env)
            case ir.Put(dest, stage):
                self._write(node, _place(dest, stage, env), self.staged.get(dest), "put")
            case ir.Commit():
                self.groups.append(self.open)
                self.open = []
            case ir.Wait(left):
                for written in (w for g in self.groups[: len(self.groups) - left] for w in g):
                    written.done = min(written.done, self.clock)
            case ir.Barrier():
                self.barrier = self.clock
            case ir.Gemm():
                for key, stage in ((node.left, node.left_stage), (node.right, node.right_stage)):
                    self._take(node, key, stage, env)
            case ir.Move(source, dest, stage):
                self._take(node, source, stage, env)
                if dest[1] == "shared":
                    made = (MADE, self.registers.get(source))
                    self._write(node, _place(dest, stage, env), made, "move")
                else:
                    self.registers[dest] = self.held[_place(source, stage, env)].content
            case ir.Restage(source, dest, stage=stage):
                self._take(node, source, stage, env)
                made = (MADE, self.held[_place(source, stage, env)].content)
                self._write(node, _place(dest, None, env), made, "move")
            case ir.Store(source):
                self._take(node, source, None, env)

    def _load(self, node: ir.Load, env: dict[str, Any]) -> None:
        what, place = content(node.window, env), _place(node.dest, node.stage, env)
        if not node.window.chunked:
            self._write(node, place, what, "elements")
        elif self.asynchronous:
            written = self._write(node, place, what, "copy")
            written.done = 1 << 60
            self.open.append(written)
        else:
            self.staged[node.dest] = what

    def _write(
        self, node: ir.Statement, place: tuple[Key, int], what: object, kind: str
    ) -> _Written:
        before, name = self.held.get(place), place[0][0]
        if self.last_read.get(place, -1) > self.barrier:
            raise BadIR(BARRIERS, node, f"{name} is overwritten while others may still read it")
        if before is not None and before.done > self.clock:
            raise BadIR(BARRIERS, node, f"{name} is overwritten while a copy is on its way there")
        if before and before.kind != kind and before.done > self.barrier:
            raise BadIR(BARRIERS, node, f"{name} is overwritten by other threads than wrote it")
        self.held[place] = _Written(what, kind, self.clock)
        return self.held[place]

    def _take(
        self,
        node: ir.Gemm | ir.Move | ir.Restage | ir.Store,
        key: Key,
        stage: Term | None,
        env: dict[str, Any],
    ) -> None:
        if key[1] != "shared":
            return
        place = _place(key, stage, env)
        held = self.held.get(place)
        if held is None:
            raise BadIR(BARRIERS, node, f"{key[0]} is read before anything is there")
        if held.done >= self.barrier:
            raise BadIR(BARRIERS, node, f"{key[0]} is read before all threads know it is there")
        self.last_read[place] = self.clock
        self.found.setdefault((node.origin.lines, key), []).append(held.content)


def _place(key: Key, stage: Term | None, env: Mapping[str, Any]) -> tuple[Key, int]:
    return key, 0 if stage is None else value(stage, env)


def verify_copies(body: Body, meant: Body, asynchronous: bool, problem: Problem) -> None:
    """Raise BadIR for a race in shared memory, or a tile that is not the one meant."""
    waits = (ir.Commit, ir.Wait, ir.Barrier)
    kinds = (ir.Load, ir.Put, *waits, ir.Gemm, ir.Move, ir.Restage, ir.Store)
    for env in problem.blocks:
        copies = _Copies(asynchronous)
        try:
            wanted = reads_meant(meant, env)
            Trace(dict(env), copies.note, lambda n: isinstance(n, kinds)).run(body)
        except LeftOut:
            continue
        for place, values in copies.found.items():
            if values != wanted.get(place):
                lines, key = place
                node = ir.Await(key, origin=ir.Origin(lines))
                text = f"{key[0]} is not what the program reads here; {problem.text}"
                raise BadIR(BARRIERS, node, text)
