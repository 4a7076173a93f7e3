"""The verifier: what every pass must leave true of the IR.

A broken rule is a mistake of the translator, never of the program: BadIR names the pass behind
which it shows, the statement and its line of TL. The translator then takes a simpler schedule and
says so; with FLASHWRIGHT_VERIFY=1, as in the tests, it stops. With 0 nothing is verified. The rules
of asynchronous work are in verify_rings.py; verify_runs.py carries out small problems event by
event.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from flashwright.lower import ir
from flashwright.lower.element import LN_2, LOG2_E, Leaf, leaves, variable
from flashwright.lower.frontend.masks import GROUP
from flashwright.lower.names import cpp, page_name, tile_name
from flashwright.lower.passes.bad_ir import BadIR
from flashwright.lower.passes.effects import effects
from flashwright.lower.passes.verify_copies import verify_copies
from flashwright.lower.passes.verify_rings import verify_groups, verify_rings
from flashwright.lower.passes.verify_runs import Problem, problems, verify_roles
from flashwright.lower.targets.tensor_maps import tma_optional_tiles
from flashwright.lower.term import At, Position, Term, Var, walk
from flashwright.program.program import Buffer, Key, Program
from flashwright.program.vocabulary import CONSTANTS

VARIABLE = "FLASHWRIGHT_VERIFY"
Body = tuple[ir.Statement, ...]


def enabled() -> bool:
    """Whether the verifier is on."""
    return os.environ.get(VARIABLE) != "0"


def strict() -> bool:
    """Whether what it finds ends the translation."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


@dataclass
class Verifier:
    """Checks the IR of one program behind each pass."""

    program: Program
    grid: tuple[ir.GridAxis, ...]
    meant: Body = ()
    """The program as the front end has it: what reads what is compared with this."""
    on: bool = field(default_factory=enabled)

    def __call__(self, body: Body, stage: str, program: Program | None = None) -> Body:
        """The body itself, if it keeps the rules of all stages."""
        if self.on:
            names = outer_names(program or self.program, self.grid)
            verify(body, stage, (program or self.program).buffers, names)
        return body

    def front_end(self, body: Body) -> Body:
        """Raise BadIR where the front end has left a name undefined or a position unknown."""
        self.meant = body
        return self(body, "the front end")

    def consumers(self, body: Body, stage: str, program: Program) -> Body:
        """One side of the rings: waits and releases in their places."""
        if self.on:
            self(body, stage, program)
            verify_rings(body, stage, {k for k, b in program.buffers.items() if k[1] == "shared"})
        return body

    def products(self, body: Body, stage: str, program: Program) -> Body:
        """The same, with products started and waited for."""
        if self.on:
            self.consumers(body, stage, program)
            verify_stages(body, stage)
            verify_groups(body, stage)
        return body

    def roles(self, roles: ir.Roles, program: Program) -> None:
        """All roles, on small problems."""
        if self.on:
            self((roles,), "warp specialization", program)
            ways = (True, False) if tma_optional_tiles((roles,)) else (True,)
            shown = [resolved(roles, by_tma) for by_tma in ways]
            for problem in self._problems(program):
                for one in shown:
                    verify_roles(one, self.meant, program, problem)

    def scheduled(self, body: Body, asynchronous: bool) -> Body:
        """A body with its waits and barriers, on small problems."""
        if self.on:
            self(body, "the placing of barriers")
            for problem in self._problems(self.program):
                verify_copies(body, self.meant, asynchronous, problem)
        return body

    def _problems(self, program: Program) -> Iterator[Problem]:
        return problems(program, self.grid)


def resolved(roles: ir.Roles, by_tma: bool) -> ir.Roles:
    """The roles where the call has shown which warps copy the tiles that TMA may not be able to
    load."""

    def kept(body: Body, fills: bool) -> Body:
        return ir.changed(
            body, lambda n: n if fills or not (isinstance(n, ir.Load) and n.tma_optional) else None
        )

    producer, helpers = kept(roles.producer, by_tma), kept(roles.helpers, not by_tma)
    return replace(roles, producer=producer, helpers=helpers)


def outer_names(program: Program, grid: tuple[ir.GridAxis, ...]) -> frozenset[str]:
    """The scalars that a kernel has before its statements."""
    names = {cpp(n) for n in (*CONSTANTS, *program.params, *program.dims)}
    names |= {axis.name for axis in grid} | {variable(LOG2_E), variable(LN_2), GROUP.name}
    names |= {ir.RANGE_END.name, ir.PAGE_IDX.name}
    names |= set(map(page_name, program.tensors))
    return frozenset(names)


def verify(body: Body, stage: str, buffers: Mapping[Key, Buffer], names: frozenset[str]) -> None:
    """Raise BadIR where a name is used that is not defined by then, a tile that there is not, or a
    position that is not known."""
    _Scopes(stage, buffers).body(body, _Scope(names))


def verify_stages(body: Body, stage: str) -> None:
    """Raise BadIR where a tile is written at one of its stages and read as if it had one."""
    nodes = [
        n for n in ir.flat(body) if not isinstance(n, ir.Loop | ir.Branch | ir.Start | ir.Sync)
    ]
    staged = {n.dest for n in nodes if isinstance(n, ir.Move) and n.stage and n.dest[1] == "shared"}
    for node in nodes:
        match node:
            case ir.Gemm():
                operands = ((node.left, node.left_stage), (node.right, node.right_stage))
                named = {key for key, at in operands if at is None}
            case ir.Move(_, dest, stage=at) if dest in staged:
                named = {dest} if at is None else set()
            case _:
                named = {k for k in effects(node).all if not isinstance(k, str)}
        if named & staged:
            raise BadIR(stage, node, f"{min(named & staged)[0]} has stages, and none is named")


@dataclass
class _Scope:
    """Names that are known: those of the bodies around, and this body's own."""

    outer: frozenset[str]
    own: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    again: frozenset[str] = frozenset()
    """Names of the body around that this one may define anew: iterations of the same loop."""

    @property
    def known(self) -> frozenset[str]:
        return self.outer | self.own

    def inner(self, again: bool = False) -> _Scope:
        """A body inside of this one."""
        own = frozenset(self.own) if again else frozenset()
        return _Scope(self.known, varying=set(self.varying), again=own)


class _Scopes:
    def __init__(self, stage: str, buffers: Mapping[Key, Buffer]) -> None:
        self.stage = stage
        self.buffers = buffers
        self.tiles = {tile_name(k) for k in buffers if k[1] == "register"}
        self.kept: set[str] = set()

    def body(self, body: Body, scope: _Scope) -> None:
        for node in body:
            self._node(node, scope)

    def _node(self, node: ir.Statement, scope: _Scope) -> None:
        for term in terms(node):
            self._term(term, node, scope.known)
        match node:
            case ir.Define():
                self._define(node, scope)
            case ir.Loop():
                self._loop(node, scope)
            case ir.Branch():
                self.body(node.then, scope.inner())
                self.body(node.orelse, scope.inner())
            case ir.Roles():
                for part in (node.producer, node.helpers, node.consumers):
                    self.body(part, scope.inner())
            case ir.Compute():
                self._compute(node, scope.known)
            case ir.Scatter(_, held, place):
                for leaf in (held, *leaves(place)):
                    self._term(leaf.term, node, scope.known)
                    self._position(leaf, node)
            case ir.Start(gemm):
                self._node(gemm, scope)
        for key in keys(node):
            if key not in self.buffers:
                raise BadIR(self.stage, node, f"there is no tile {tile_name(key)}")

    def _define(self, node: ir.Define, scope: _Scope) -> None:
        if node.again:
            if node.name not in scope.varying:
                raise BadIR(self.stage, node, f"{node.name} gets another value, but never varies")
            return
        if node.name in scope.own or node.name in scope.outer - scope.again:
            raise BadIR(self.stage, node, f"{node.name} is defined already")
        scope.own.add(node.name)
        if node.varies:
            scope.varying.add(node.name)

    def _loop(self, node: ir.Loop, scope: _Scope) -> None:
        if node.number == "own":
            if node.var in scope.known:
                raise BadIR(self.stage, node, f"the loop's variable {node.var} is defined already")
        elif node.var not in scope.varying:
            raise BadIR(self.stage, node, f"the loop goes on with {node.var}, which never varies")
        inner = scope.inner(again=node.number != "own")
        inner.own.add(node.var)
        inner.again -= {node.var}
        self._term(node.low, node, scope.known)
        self._term(node.condition, node, inner.known)
        if node.where is not None:
            self._term(node.where, node, inner.known)
        self.body(node.body, inner)

    def _compute(self, node: ir.Compute, known: frozenset[str]) -> None:
        self.kept |= set(node.kept)
        local: set[str] = set()
        for assign in node.assigns:
            for leaf in leaves(assign.value):
                self._term(leaf.term, node, known | local)
                self._position(leaf, node)
            name = variable(assign.target)
            if assign.buffer is not None:
                key: Key = (assign.buffer.name, assign.buffer.space)
                if key not in self.buffers or tile_name(key) != name:
                    raise BadIR(self.stage, node, f"{name} is assigned to, and has no buffer")
            elif assign.kept or isinstance(assign.target.term, At):
                if name not in self.kept:
                    raise BadIR(self.stage, node, f"{name} is to last, and is no vector")
            else:
                local.add(name)

    def _term(self, term: Term, node: ir.Statement, known: frozenset[str]) -> None:
        for part in walk(term):
            if isinstance(part, At) and part.name not in self.tiles | self.kept:
                raise BadIR(self.stage, node, f"there is no tile or vector {part.name}")
            if isinstance(part, Var) and part.name not in known | self.tiles | self.kept:
                raise BadIR(self.stage, node, f"{part.name} is not defined here")

    def _position(self, leaf: Leaf, node: ir.Compute | ir.Scatter) -> None:
        if isinstance(leaf.term, Position) and node.begin(leaf.axes) is None:
            raise BadIR(self.stage, node, f"{leaf.term.name} is not known")


def terms(node: ir.Statement) -> Iterator[Term]:
    """The scalars that a statement speaks of (a loop's and an assignment's aside)."""
    match node:
        case ir.Define(_, value, _, below):
            yield from (value, below)
        case ir.Load(_, _, stage):
            for window in node.windows:
                yield from window.terms
            if stage is not None:
                yield stage
        case ir.Fill(_, window) | ir.Store(_, window):
            yield from window.terms
        case ir.TakeTurn(counters, turn):
            yield from (*counters.terms, turn)
        case ir.Scatter():
            yield from (t for t in (node.rows, node.cols) if t is not None)
        case ir.Compute():
            # An early exit's end is read only where software_pipeline.py makes a name of it.
            yield from (t for t in (node.rows, node.cols, node.unless) if t is not None)
        case ir.Branch(condition):
            yield condition
        case ir.Move(stage=stage) | ir.Put(stage=stage) if stage is not None:
            yield stage
        case ir.Gemm():
            yield from (t for t in (node.left_stage, node.right_stage) if t is not None)


def keys(node: ir.Statement) -> tuple[Key, ...]:
    """The tiles that a statement names."""
    match node:
        case ir.Load(dest) | ir.Put(dest) | ir.Fill(dest):
            return (dest,)
        case ir.Store(source) | ir.Scatter(source):
            return (source,)
        case ir.Move(source, dest):
            return source, dest
        case ir.Gemm(target, left, right):
            return target, left, right
        case ir.Operand(target, source):
            return target, source
        case ir.Await(key) | ir.Release(key) | ir.Refill(key) | ir.Drain(key):
            return (key,)
        case ir.Sync(named):
            return named
        case ir.Transpose(key):
            return (key,)
        case ir.Open(targets) | ir.Finish(_, targets):
            return targets
    return ()
