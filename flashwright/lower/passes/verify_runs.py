"""The verifier on small problems: the schedule is carried out event by event, without numbers.

On Hopper the roles run greedily against each other: each goes on as far as it can. If none can, it
is a deadlock; and every product must read the tiles that the program means, in its order. Copies
without roles are in verify_copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from flashwright.lower import ir
from flashwright.lower.names import cpp
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.fp8_transpose import landing
from flashwright.lower.term import Term
from flashwright.lower.term_value import value
from flashwright.program.program import Key, Program

Body = tuple[ir.Statement, ...]
Event = tuple[str, Any, ir.Statement]
STAGE = "warp specialization"
MADE = "made"  # of another tile
MOST = 60  # iterations of a loop; problems with more are left out
_UNKNOWN = (KeyError, AssertionError, ZeroDivisionError, TypeError, OverflowError)


class LeftOut(Exception):
    """A problem that cannot be carried out here."""


@dataclass(frozen=True)
class Problem:
    """Two blocks of the grid, one after the other, each with the values of all names."""

    blocks: tuple[dict[str, Any], ...]
    text: str


def problems(program: Program, grid: tuple[ir.GridAxis, ...]) -> Iterator[Problem]:
    """Problems with 1, 2 and as many iterations as a ring is deep, one less and one more. (Kernels
    may take a dimension to be at least 1; loops that end with the block may still have none.)"""
    shared = [b for k, b in program.buffers.items() if k[1] == "shared"]
    rows = sorted({b.shape[0] for b in shared}) or [1]
    depth = max((b.stages for b in shared), default=1)
    sizes = {n * rows[0] for n in {1, 2, depth - 1, depth, depth + 1} if n} | {1}
    params = {cpp(n): _number(v) for n, v in program.params.items()}
    for size in sorted(sizes):
        for longer in (None, 0, 1):  # every other dimension three times as long
            lengths = {
                cpp(d): size * (3 if n % 2 == longer else 1) for n, d in enumerate(program.dims)
            }
            env = {**params, **lengths}
            first = {axis.name: _known(axis.low, env, 0) for axis in grid}
            last = dict(first)
            if grid:
                last[grid[0].name] += max(0, -(-size // rows[-1]) - 1)
            yield Problem(({**env, **last}, {**env, **first}), f"{lengths}")


def _number(x: object) -> Any:
    return float(x) if isinstance(x, Fraction) and x.denominator != 1 else x


def _known(x: Term, env: Mapping[str, Any], otherwise: int) -> Any:
    try:
        return value(x, env)
    except _UNKNOWN:
        return otherwise


# --- one role's events ------------------------------------------------------------------------


@dataclass
class Trace:
    """Goes through a role's statements and notes what happens."""

    env: dict[str, Any]
    note: Callable[[ir.Statement, dict[str, Any]], None]
    relevant: Callable[[ir.Statement], bool]
    inside: dict[int, bool] = field(default_factory=dict)

    def run(self, body: Body) -> None:
        """Note what these statements do, and the values of the names that they define."""
        for node in body:
            match node:
                case ir.Define():
                    try:
                        self.env[node.name] = value(node.value, self.env)
                    except _UNKNOWN:
                        self.env.pop(node.name, None)
                case ir.Loop() if self._matters(node):
                    self._loop(node)
                case ir.Branch() if self._matters(node):
                    self.run(node.then if self._value(node.condition) else node.orelse)
                case ir.Loop() | ir.Branch():
                    pass
                case _:
                    self.note(node, self.env)

    def _loop(self, node: ir.Loop) -> None:
        if node.number != "resumes":
            self.env[node.var] = self._value(node.low)
        iterations = 0
        while self._value(node.condition):
            if node.where is None or self._value(node.where):
                self.run(node.body)
            self.env[node.var] += 1
            iterations += 1
            if iterations > MOST:
                raise LeftOut

    def _matters(self, node: ir.Loop | ir.Branch) -> bool:
        if isinstance(node, ir.Loop) and node.number != "own":  # others go on with its number
            return True
        if id(node) not in self.inside:
            self.inside[id(node)] = any(map(self.relevant, ir.flat((node,))))
        return self.inside[id(node)]

    def _value(self, x: Term) -> Any:
        try:
            return value(x, self.env)
        except _UNKNOWN:
            raise LeftOut from None


def content(window: ir.Window, env: Mapping[str, Any]) -> object:
    """What a tile is filled with."""
    return window.tensor.name, *(_known(c, env, -1) for c in window.coordinates)


Place = tuple[ir.Lines | None, Key]
Reads = dict[Place, list[object]]
"""By statement and tile, what was read, in order."""


def shared_reads(node: ir.Gemm | ir.Move) -> tuple[Key, ...]:
    """The shared tiles that a statement reads."""
    if isinstance(node, ir.Move):
        return (node.source,) if node.source[1] == "shared" else ()
    return tuple(k for k in (node.left, node.right) if k[1] == "shared")


def reads_meant(body: Body, env: Mapping[str, Any]) -> Reads:
    """What every product, move and store reads, each copy done at once."""
    held: dict[Key, object] = {}
    found: Reads = {}

    def note(node: ir.Statement, now: dict[str, Any]) -> None:
        if isinstance(node, ir.Load):
            held[node.dest] = content(node.window, now)
        elif isinstance(node, (ir.Gemm, ir.Move, ir.Store)):
            keys = (node.source,) if isinstance(node, ir.Store) else shared_reads(node)
            for key in keys:
                if key[1] == "shared":
                    found.setdefault((node.origin.lines, key), []).append(held.get(key))
            if isinstance(node, ir.Move):
                before = held.get(node.source)
                held[node.dest] = before if node.dest[1] == "register" else (MADE, before)

    kinds = (ir.Load, ir.Gemm, ir.Move, ir.Store)
    Trace(dict(env), note, lambda n: isinstance(n, kinds)).run(body)
    return found


# --- Hopper: roles against each other ---------------------------------------------------------


def _events(body: Body, env: Mapping[str, Any]) -> list[Event]:
    found: list[Event] = []

    def note(node: ir.Statement, now: dict[str, Any]) -> None:
        match node:
            case ir.Load(dest, window):
                found.append(("fill", (dest, content(window, now)), node))
            case ir.Restage(source, dest, helped=True):
                found.append(("make", (dest, source), node))
            case ir.Transpose(key):
                found.append(("await", landing(key), node))
                found.append(("fill", (key, None), node))
                found.append(("release", landing(key), node))
            case ir.Await(key, ahead):
                found.append(("await ahead" if ahead else "await", key, node))
            case ir.Release(key):
                found.append(("release", key, node))
            case ir.Refill(key) | ir.Drain(key):
                found.append(("refill" if isinstance(node, ir.Refill) else "drain", key, node))
            case ir.PingPong(step):
                found.append((f"ping-pong {step}", None, node))
            case ir.Sync():
                found.append((node.step, None, node))
            case ir.Start(gemm):
                found.append(("read", gemm, node))
            case ir.Move() if node.source[1] == "shared":
                found.append(("read", node, node))

    kinds = (
        ir.Load,
        ir.Restage,
        ir.Transpose,
        ir.Await,
        ir.Release,
        ir.Refill,
        ir.Drain,
        ir.PingPong,
        ir.Sync,
    )
    kinds_read = (ir.Start, ir.Move)
    Trace(dict(env), note, lambda n: isinstance(n, (*kinds, *kinds_read))).run(body)
    return found


def _both(body: Body, blocks: list[dict[str, Any]]) -> list[Event]:
    return [event for env in blocks for event in _events(body, env)]


@dataclass
class _Actor:
    """A role, or a warpgroup of one, on its way through its events."""

    name: str
    events: list[Event]
    number: int = 0  # of a warpgroup
    at: int = 0
    taken: dict[Key, int] = field(default_factory=dict)
    """How many values of a tile it has handed back."""
    held: set[Key] = field(default_factory=set)
    meets: int = 0
    told: int = 0
    heard: int = 0
    read: Reads = field(default_factory=dict)


class _Run:
    """All roles. A ring holds as many values as it has stages."""

    def __init__(self, program: Program, actors: list[_Actor], consumers: list[_Actor]) -> None:
        self.buffers = program.buffers
        self.actors, self.consumers = actors, consumers
        self.filled: dict[Key, list[object]] = {}
        self.users: dict[Key, list[_Actor]] = {}
        for actor in actors:
            for kind, key, _ in actor.events:
                if kind in ("await", "await ahead", "release", "refill", "drain"):
                    users = self.users.setdefault(key, [])
                    if actor not in users:
                        users.append(actor)
        self.signals = [1] + [0] * (len(consumers) - 1)  # of ping-pong, to each warpgroup

    def run(self, problem: Problem) -> None:
        going = True
        while going:
            going = False
            for actor in self.actors:
                while actor.at < len(actor.events) and self._step(actor):
                    actor.at += 1
                    going = True
        for actor in self.actors:
            if actor.at < len(actor.events):
                kind, what, node = actor.events[actor.at]
                text = f"deadlock: the {actor.name} cannot go on with `{kind}` {_named(what)}"
                raise BadIR(STAGE, node, f"{text}; {problem.text}")
        if self.signals[0] != 1:
            raise BadIR(STAGE, None, f"a tile ends with a ping-pong signal missing; {problem.text}")
        for key, values in self.filled.items():
            for user in self.users.get(key, []):
                if user.taken.get(key, 0) != len(values):
                    text = f"{key[0]} is filled {len(values)} times, the {user.name} hands back"
                    text += f" {user.taken.get(key, 0)}; {problem.text}"
                    raise BadIR(STAGE, None, text)

    def _step(self, actor: _Actor) -> bool:
        kind, what, node = actor.events[actor.at]
        match kind:
            case "fill":
                return self._fill(*what)
            case "make":
                dest, source = what
                values, n = self.filled.get(source, []), actor.taken.get(source, 0)
                return n < len(values) and self._fill(dest, (MADE, values[n]))
            case "await" | "await ahead":
                return self._is_full(actor, what, ahead=kind == "await ahead")
            case "release":
                return self._hand_back(actor, what)
            case "refill" | "drain":
                if what in actor.held and not self._hand_back(actor, what):
                    return False
                actor.held.discard(what)
                if kind == "refill":
                    actor.held.add(what)
            case "ping-pong wait":
                if not self.signals[actor.number]:
                    return False
                self.signals[actor.number] = 0
            case "ping-pong signal":
                following = (actor.number + 1) % len(self.consumers)
                self.signals[following] += 1
                if sum(self.signals) > 1:
                    raise BadIR(STAGE, node, "a ping-pong signal without a wait before it")
            case "meet":
                return self._meet(actor)
            case "tell":
                actor.told += 1
            case "hear":
                if any(other.told <= actor.heard for other in self.consumers):
                    return False
                actor.heard += 1
            case "read":
                self._read(actor, what, node)
        return True

    def _fill(self, key: Key, content: object) -> bool:
        values = self.filled.setdefault(key, [])
        done = min((u.taken.get(key, 0) for u in self.users.get(key, [])), default=len(values))
        if len(values) - done >= self.buffers[key].stages:
            return False
        if content is None:  # of what has landed
            landed = self.filled[landing(key)]
            content = landed[len(values)]
        values.append(content)
        return True

    def _is_full(self, actor: _Actor, key: Key, ahead: bool = False) -> bool:
        return len(self.filled.get(key, [])) > actor.taken.get(key, 0) + ahead

    def _hand_back(self, actor: _Actor, key: Key) -> bool:
        if not self._is_full(actor, key):
            return False
        actor.taken[key] = actor.taken.get(key, 0) + 1
        return True

    def _meet(self, actor: _Actor) -> bool:
        """Whether all are there: each notes once that it has come."""
        before = sum(kind == "meet" for kind, _, _ in actor.events[: actor.at]) + 1
        actor.meets = max(actor.meets, before)
        return all(other.meets >= before for other in self.consumers)

    def _read(self, actor: _Actor, what: ir.Gemm | ir.Move, node: ir.Statement) -> None:
        for key in shared_reads(what):
            if key in self.users:
                values, n = self.filled.get(key, []), actor.taken.get(key, 0)
                n += isinstance(what, ir.Gemm) and what.ahead and key == what.right
                if n >= len(values):
                    raise BadIR(STAGE, node, f"{key[0]} is read before it is filled")
                actor.read.setdefault((what.origin.lines, key), []).append(values[n])


def _named(what: Any) -> str:
    if isinstance(what, tuple) and what and isinstance(what[0], tuple):
        what = what[0]
    return str(what[0]) if isinstance(what, tuple) else ""


def verify_roles(roles: ir.Roles, meant: Body, program: Program, problem: Problem) -> None:
    """Raise BadIR for a deadlock, a tile left in a ring, or a product of other tiles than meant."""
    groups = max(1, program.warps // 4)
    bodies = [("producer", roles.producer, 0)]
    bodies += [("helper warps", roles.helpers, 0)] if roles.helpers else []
    bodies += [(f"consumer {g}", roles.consumers, g) for g in range(groups)]
    try:
        actors = [
            _Actor(
                name, [e for env in problem.blocks for e in _events(body, {**env, "group": g})], g
            )
            for name, body, g in bodies
        ]
        wanted: dict[Place, list[list[object]]] = {}
        for env in problem.blocks:
            for place, values in reads_meant(meant, env).items():
                wanted.setdefault(place, []).append(values)
    except LeftOut:
        return
    consumers = actors[-groups:]
    run = _Run(program, actors, consumers)
    run.run(problem)
    for actor in consumers:
        for place, found in actor.read.items():
            if not _in_order(found, wanted.get(place, [])):
                lines, key = place
                node = ir.Await(key, origin=ir.Origin(lines))
                text = f"{key[0]} is not what the program multiplies here; {problem.text}"
                raise BadIR(STAGE, node, text)


def _in_order(found: list[object], blocks: list[list[object]]) -> bool:
    """Whether what was read is that of each block, one after the other. Some of it may be left out,
    where a warpgroup exits a loop early."""
    meant = iter(value for values in blocks for value in values)
    return all(any(value == wanted for wanted in meant) for value in found)
