"""Checks of a sketch, which has an order of statements but no sizes.

The sketch is executed like code, each loop twice, so that the second iteration sees the state that
the first one leaves. A sketch gets the errors that its code would get for any sizes. It need not
have what only code has: initial values, Reshapes, the mask of the tail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flashwright.check.operations import is_elementwise
from flashwright.check.spaces import in_registers
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.nodes import (
    Call,
    Compute,
    Copy,
    Expr,
    For,
    If,
    Name,
    Space,
    Statement,
    Transpose,
    Tree,
    Unary,
    expressions,
    statements,
)
from flashwright.program.program import Key
from flashwright.program.vocabulary import split
from flashwright.semantics.compute import expression
from flashwright.semantics.expressions import unrescaled
from flashwright.semantics.sums import stateless


def check_sketch(tree: Tree) -> list[Diagnostic]:
    """Findings about the order of statements in a sketch: values missing, lost or used too late."""
    walk = _Walk()
    walk.body(tree.body)
    every = list(statements(tree.body))
    whole = any(isinstance(stmt, For) for stmt in every)  # not only a fragment of a sketch
    if not walk.findings and whole and not any(_stores(stmt) for stmt in every):
        text = "the kernel has no output: no Copy stores to global memory"
        hint = "end with `Copy O from register to global`"
        return [Diagnostic("FW610", text, tree.body[-1].span, help=hint)]
    codes = {d.code for d in walk.findings.values()}
    if codes & {"FW402", "FW403"}:  # the tile that is not read there is then overwritten unread
        return [d for d in walk.findings.values() if d.code != "FW602"]
    return list(walk.findings.values())


def _stores(stmt: Statement) -> bool:
    return isinstance(stmt, Copy) and stmt.dest == "global"


@dataclass(frozen=True)
class _Value:
    """What a tile holds: the statement that wrote it, whether it has been read, and the Softmax
    that it has been through."""

    writer: Statement
    read: bool = False
    weighed: Compute | None = None
    served: bool = False
    """Whether this value, or one that it updates, was used for another tile."""


@dataclass
class _Walk:
    values: dict[Key, _Value] = field(default_factory=dict)
    walked: list[set[str]] = field(default_factory=list)
    """For each enclosing loop, the tensors that it copies from."""
    findings: dict[tuple[str, int], Diagnostic] = field(default_factory=dict)

    def report(self, found: Diagnostic) -> None:
        assert found.span is not None
        self.findings.setdefault((found.code, found.span.start), found)

    def body(self, body: tuple[Statement, ...]) -> None:
        for stmt in body:
            match stmt:
                case Copy():
                    self._copy(stmt)
                case Compute():
                    self._compute(stmt)
                case For():
                    self.walked.append(set())
                    self.body(stmt.body)
                    self.body(stmt.body)
                    self.walked.pop()
                case If():
                    self._if(stmt)

    def _if(self, stmt: If) -> None:
        """Either branch may run: a tile counts as read if one of them reads it."""
        before = dict(self.values)
        self.body(stmt.then)
        then, self.values = self.values, before
        self.body(stmt.orelse)
        for key, value in then.items():
            other = self.values.get(key, value)
            self.values[key] = replace(value, read=value.read or other.read)

    # --- tiles --------------------------------------------------------------------------------

    def _key(self, name: Name) -> Key | None:
        """The tile that a name means, if it has a value."""
        base, space = split(name.id)
        spaces: tuple[Space, ...] = (space,) if space else ("register", "shared")
        return next(((base, s) for s in spaces if (base, s) in self.values), None)

    def _read(self, key: Key, elsewhere: bool = True) -> _Value:
        value = replace(self.values[key], read=True)
        value = replace(value, served=value.served or elsewhere)
        self.values[key] = value
        return value

    def _write(self, key: Key, stmt: Statement, weighed: Compute | None, start: bool) -> None:
        old = self.values.get(key)
        if old is not None and not old.read and not (start and old.served):
            text = f"`{key[0]}` in {key[1]} is overwritten before its value is used"
            where = (Label(old.writer.span, "this value was never read"),)
            hint = "move this statement below the last use of the value, or accumulate"
            self.report(Diagnostic("FW602", text, stmt.span, secondary=where, help=hint))
        served = old is not None and old.served and isinstance(stmt, Compute) and not start
        self.values[key] = _Value(stmt, weighed=weighed, served=served)

    def _missing(self, name: Name) -> None:
        base, space = split(name.id)
        where = f"in {space} " if space else ""
        text = f"no statement writes `{base}` {where}before this line"
        hint = f"`Copy {base} from global to {space or 'shared'}`"
        self.report(Diagnostic("FW403", text, name.span, help=hint))

    # --- statements ---------------------------------------------------------------------------

    def _copy(self, stmt: Copy) -> None:
        source = split(stmt.name.id)[0]
        dest: Key = (split((stmt.target or stmt.name).id)[0], stmt.dest)
        weighed = None
        if stmt.source != "global":
            if (source, stmt.source) not in self.values:
                text = f"no statement writes `{source}` in {stmt.source} before this Copy"
                self.report(Diagnostic("FW403", text, stmt.name.span))
            else:
                weighed = self._read((source, stmt.source)).weighed
        elif self.walked:
            self.walked[-1].add(dest[0])
        if stmt.dest != "global":
            self._write(dest, stmt, weighed, start=False)

    def _compute(self, stmt: Compute) -> None:
        verb = stmt.operation
        if verb == "gemm" and len(stmt.args) == 2:
            self._gemm(stmt)
        elif is_elementwise(stmt):
            self._elementwise(stmt)
        elif stmt.args and isinstance(stmt.args[0], Name):
            self._in_place(stmt, stmt.args[0])

    def _operand(self, name: Name) -> Key | None:
        """The tile of an elementwise operand; a finding unless it has a value in registers."""
        key = self._key(name)
        if key is None:
            self._missing(name)
        elif key[1] != "register":
            self.report(in_registers("Compute", name))
        return key

    def _in_place(self, stmt: Compute, name: Name) -> None:
        key = self._operand(name)
        if key is None:
            return
        value = self._read(key)
        if stmt.operation == "mask":
            if value.weighed is not None:
                self._report_late_mask(name.id, stmt)
            self.values[key] = replace(value, read=False, writer=stmt)
            self._read_in(stmt.where)
            return
        hint = stateless(stmt)
        made = [a for a in getattr(value.writer, "args", ()) if isinstance(a, Transpose)]
        if hint and self.walked and any(split(a.operand.id)[0] in self.walked[-1] for a in made):
            text = f"`{name.id}` holds one block of the keys, and the others are never added in"
            self.report(Diagnostic("FW604", text, stmt.span, help=hint))
        self.values[key] = replace(value, read=False, writer=stmt, weighed=stmt)
        for held in (*stmt.state, *stmt.rescale):
            kept: Key = (split(held.id)[0], "register")
            self.values[kept] = _Value(stmt, served=held is stmt.state[0])

    def _read_in(self, condition: Expr | None) -> None:
        """The tiles that a mask's condition reads have served."""
        names = expressions(condition) if condition is not None else ()
        for key in (self._key(e) for e in names if isinstance(e, Name)):
            if key is not None:
                self._read(key)

    def _elementwise(self, stmt: Compute) -> None:
        if stmt.target is None or not stmt.args:
            return
        target: Key = (split(stmt.target.id)[0], split(stmt.target.id)[1] or "register")
        weighed, tiles = None, 0
        for name in (e for arg in stmt.args for e in expressions(arg) if isinstance(e, Name)):
            key = self._key(name)
            if key is None and split(name.id)[1] in ("shared", "register"):
                self._missing(name)
            elif key is not None:
                tiles += 1
                weighed = self._operand_weighed(name, key, target) or weighed
        if weighed is not None and hides(expression(stmt)):
            self._report_late_mask(stmt.target.id, stmt)
        if stmt.mode != "get" and target in self.values:
            self._read(target, elsewhere=False)
        self._write(target, stmt, weighed, start=tiles == 0 and stmt.mode == "get")

    def _operand_weighed(self, name: Name, key: Key, target: Key) -> Compute | None:
        if key[1] != "register":
            self.report(in_registers("Compute", name))
        return self._read(key, elsewhere=key != target).weighed

    def _report_late_mask(self, name: str, stmt: Compute) -> None:
        text = f"`{name}` has already been through the exponential, so a mask comes too late"
        hint = "move the Mask up, between the GEMM and the Softmax"
        self.report(Diagnostic("FW608", text, stmt.span, help=hint))

    def _gemm(self, stmt: Compute) -> None:
        names = [a.operand if isinstance(a, Transpose) else a for a in stmt.args]
        weighed = None
        for position, name in enumerate(names):
            if not isinstance(name, Name):
                continue
            key = self._key(name)
            if key is None:
                self._missing(name)
                continue
            if position == 1 and key[1] == "register":
                text = "the second operand of a GEMM is read from shared memory"
                hint = "Copy it from register to shared first"
                self.report(Diagnostic("FW402", text, name.span, help=hint))
            softmax = self._read(key).weighed
            weighed = softmax if position == 0 else weighed
        if weighed is None and self.walked:
            for found in _contraction(stmt, self.walked[-1]):
                self.report(found)
        if stmt.target is None:
            return
        target: Key = (split(stmt.target.id)[0], "register")
        if stmt.mode == "accumulate":
            rescaled = [split(n.id)[0] for n in weighed.rescale] if weighed else []
            if weighed and weighed.state and self.walked and target[0] not in rescaled:
                self.report(unrescaled(weighed, stmt))
            self.values[target] = _Value(stmt)
            return
        self._write(target, stmt, None, start=False)


def hides(expr: Expr) -> bool:
    """Whether an expression replaces some elements by -inf."""
    minus = Unary("-", Name("inf"))
    calls = (e for e in expressions(expr) if isinstance(e, Call) and e.func.id.lower() == "where")
    return any(minus in call.args for call in calls)


def _contraction(stmt: Compute, walked: set[str]) -> Iterator[Diagnostic]:
    """FW503 for a `get` that sums over the rows of a block that the loop copies."""
    left, right = stmt.args
    if stmt.mode == "accumulate" or not isinstance(right, Name) or not isinstance(left, Name):
        return
    if split(right.id)[0] in walked and split(left.id)[0] not in walked:
        text = (
            f"this sums over the rows of `{right.id}`, which are the positions of the loop, "
            "and the next iteration overwrites the sum"
        )
        fix = Fix(f"transpose it: `{right.id}.T`", (Edit(right.span.end, right.span.end, ".T"),))
        yield Diagnostic("FW503", text, stmt.span, fix=fix)
