"""What a loop carries from one iteration to the next: running softmaxes, sums, tiles that it loads
ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flashwright.lang import nodes as tl
from flashwright.lang.diagnostic import Diagnostic, Failed, Label
from flashwright.program.program import Key, Program

BY_HAND = "write an online softmax as `Compute Softmax S with Smax and Ssum and rescale O`"


@dataclass(frozen=True)
class Softmax:
    """A running softmax: its maximum, its sum, and the sums that are relative to the maximum."""

    maximum: Key
    total: Key
    rescaled: tuple[Key, ...]

    @property
    def tiles(self) -> tuple[Key, ...]:
        """All of its tiles, the maximum first."""
        return self.maximum, self.total, *self.rescaled


@dataclass(frozen=True)
class Carried:
    """The tiles that pass from one iteration of a loop to the next."""

    softmaxes: tuple[Softmax, ...]
    sums: tuple[Key, ...]
    """Those that are added to and belong to no softmax."""
    ahead: tuple[Key, ...]
    """Those that an iteration loads for the next one."""

    @property
    def tiles(self) -> tuple[Key, ...]:
        """All tiles of softmaxes and sums."""
        return (*(key for one in self.softmaxes for key in one.tiles), *self.sums)

    def shared(self, program: Program, stmt: tl.Statement) -> set[Key]:
        """The tiles of softmaxes and sums that a statement reads or writes."""
        return (program.reads(stmt) | program.writes(stmt)) & {*self.tiles}

    def updates(self, program: Program, stmt: tl.Statement) -> bool:
        """Whether a statement is one step of a softmax, or adds to one sum."""
        shared = self.shared(program, stmt)
        if not isinstance(stmt, tl.Compute):
            return False
        if _keeps_state(stmt):
            mine = _softmax(program, stmt)
            return any({*mine.tiles} <= {*one.tiles} for one in self.softmaxes) and (
                shared == {*mine.tiles}
            )
        maxima = [one.maximum for one in self.softmaxes]
        return any(
            shared == {key} and _adds(program, stmt, key) for key in shared.difference(maxima)
        )


def carried_by(program: Program, loop: tl.For) -> Carried:
    """What a loop carries. Raises Failed with FW910 if a tile that it carries is none of these."""
    own = list(tl.statements(loop.body))
    read = read_first(program, loop.body)
    softmaxes = _softmaxes(program, own)
    members = {key for one in softmaxes for key in one.tiles}
    ahead = tuple(k for k in read if k not in members and _loaded(program, own, k))
    sums = tuple(k for k in read if k not in (*members, *ahead) and k[1] == "register")
    found = Carried(softmaxes, sums, ahead)
    for key, stmt in read.items():
        if key not in (*found.tiles, *ahead):
            raise refused(f"`{key[0]}` passes from one iteration to the next", stmt)
    for stmt in own:
        shared = found.shared(program, stmt)
        if shared and not found.updates(program, stmt):
            name, _ = min(shared)
            text = f"`{name}` passes from one iteration to the next, and this does not add to it"
            raise refused(text, stmt, help=BY_HAND)
    return found


def accumulating(program: Program, loop: tl.For) -> bool:
    """Whether a loop carries tiles in registers."""
    return any(space == "register" for _, space in read_first(program, loop.body))


def read_first(program: Program, body: Sequence[tl.Statement]) -> dict[Key, tl.Statement]:
    """The tiles that statements read before they write them, though they write them as well, each
    with the first statement that reads it."""
    written = {key for s in tl.statements(tuple(body)) for key in program.writes(s)}
    return {k: s for k, s in read_before(program, body).items() if k in written}


def read_before(program: Program, body: Sequence[tl.Statement]) -> dict[Key, tl.Statement]:
    """The tiles that statements need from above, each with the first statement that reads it."""
    found: dict[Key, tl.Statement] = {}
    _walk(program, body, set(), found)
    return found


def _walk(
    program: Program,
    body: Iterable[tl.Statement],
    known: set[Key],
    found: dict[Key, tl.Statement],
) -> set[Key]:
    """Adds what is read while it is not known. Returns what is known afterwards for sure."""
    for stmt in body:
        if isinstance(stmt, tl.If):
            arms = [_walk(program, arm, {*known}, found) for arm in (stmt.then, stmt.orelse)]
            known = arms[0] & arms[1]
        elif isinstance(stmt, tl.For):
            _walk(program, stmt.body, {*known}, found)
        else:
            for key in program.reads(stmt) - known:
                found.setdefault(key, stmt)
            known |= program.writes(stmt)
    return known


# --- updates --------------------------------------------------------------------------------------


def _keeps_state(stmt: tl.Statement) -> bool:
    return isinstance(stmt, tl.Compute) and stmt.operation == "softmax" and len(stmt.state) == 2


def _softmaxes(program: Program, own: Iterable[tl.Statement]) -> tuple[Softmax, ...]:
    """The running softmaxes of a loop, by their maxima."""
    found: dict[Key, Softmax] = {}
    for stmt in own:
        if isinstance(stmt, tl.Compute) and _keeps_state(stmt):
            one = _softmax(program, stmt)
            before = found.get(one.maximum, one)
            if before.total != one.total:
                raise refused(f"`{one.maximum[0]}` is the maximum of two softmaxes", stmt)
            rescaled = tuple(dict.fromkeys((*before.rescaled, *one.rescaled)))
            found[one.maximum] = Softmax(one.maximum, one.total, rescaled)
            others = (two.tiles for key, two in found.items() if key != one.maximum)
            if {*one.tiles} & {key for tiles in others for key in tiles}:
                raise refused("two softmaxes share a tile of sums", stmt)
    return tuple(found.values())


def _softmax(program: Program, stmt: tl.Compute) -> Softmax:
    maximum, total, *rescaled = (_tile(program, n) for n in (*stmt.state, *stmt.rescale))
    return Softmax(maximum, total, tuple(rescaled))


def _tile(program: Program, name: tl.Name) -> Key:
    key = program.tile(name)
    assert key is not None  # the checker has resolved it
    return key


def _adds(program: Program, stmt: tl.Compute, key: Key) -> bool:
    """Whether a Compute adds to a tile something that does not depend on the tile."""
    if stmt.target is None or program.tile(stmt.target) != key:
        return False
    names = [e for arg in stmt.args for e in tl.expressions(arg) if isinstance(e, tl.Name)]
    times = sum(program.tile(name) == key for name in names)
    if stmt.mode == "accumulate":
        return times == 0
    terms = [t for arg in stmt.args for t in _terms(arg)] if stmt.operation in ("", "add") else []
    own = (t for t in terms if isinstance(t, tl.Name) and program.tile(t) == key)
    return times == 1 and any(own)


def _terms(expr: tl.Expr) -> Iterator[tl.Expr]:
    """What is added up, without what is subtracted."""
    if isinstance(expr, tl.Binary) and expr.op in "+-":
        yield from _terms(expr.left)
        if expr.op == "+":
            yield from _terms(expr.right)
    else:
        yield expr


def _loaded(program: Program, own: Iterable[tl.Statement], key: Key) -> bool:
    """Whether only Copies from global memory write a tile."""
    writers = [s for s in own if key in program.writes(s)]
    return all(isinstance(s, tl.Copy) and s.source == "global" for s in writers)


def refused(text: str, stmt: tl.Statement, *labels: Label, help: str | None = None) -> Failed:
    """What is raised where a program cannot be split."""
    return Failed(Diagnostic("FW910", text, stmt.span, secondary=labels, help=help))
