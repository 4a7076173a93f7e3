"""What the sums of a loop begin with: in every share with nothing, and once with the program's own
initial values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flashwright.lang import nodes as tl
from flashwright.program.program import Key, Program
from flashwright.program.scalars import number
from flashwright.rewrite.carried import Carried, read_before, refused
from flashwright.rewrite.tree import Body, written

LOWEST = "-1e30"
"""A maximum of nothing: below every score, but finite."""


@dataclass(frozen=True)
class Begin:
    """The statements before a loop that concern its sums."""

    program: Program
    maxima: tuple[Key, ...]
    initial: dict[Key, tl.Statement]
    """Those that give the sums their first values."""
    early: Body
    """Those from the first to the last that adds to the sums, such as a tile of sink tokens."""

    @staticmethod
    def of(program: Program, before: Body, loop: tl.For, behind: Body, carried: Carried) -> Begin:
        """Finds them. Raises Failed with FW910 where sums are used in another way."""
        initial: dict[Key, tl.Statement] = {}
        places: list[int] = []
        for n, stmt in enumerate(before):
            if key := _given(program, stmt, carried):
                if key in initial or places:
                    raise refused(f"`{key[0]}` begins a second time", stmt)
                initial[key] = stmt
                continue
            touching = [s for s in tl.statements((stmt,)) if carried.shared(program, s)]
            for inner in touching:
                if not carried.updates(program, inner):
                    text = "this uses sums of the loop before the loop and does not add to them"
                    raise refused(text, inner)
            places += [n] if touching else []
        first = _first_early(program, before, places, (loop, *behind), carried)
        early = before[first : places[-1] + 1] if places else ()
        _check_early(program, early, (loop, *behind), carried)
        return Begin(program, tuple(s.maximum for s in carried.softmaxes), initial, early)

    def neutral(self) -> dict[int, Body]:
        """By the id of an initial value that counts, a statement that sets nothing in its place."""
        made: dict[int, Body] = {}
        for key, stmt in self.initial.items():
            if not self._is_neutral(key, stmt):
                value = LOWEST if key in self.maxima else "0"
                named = stmt.target if isinstance(stmt, tl.Compute) else None
                name = key[0] if named is None else named.id
                made[id(stmt)] = written(f"Compute {value} and get {name}\n")
        return made

    def _is_neutral(self, key: Key, stmt: tl.Statement) -> bool:
        if not isinstance(stmt, tl.Compute) or stmt.verb is not None:
            return False
        (value,) = stmt.args
        if key in self.maxima:  # any finite constant will do: the sums are relative to it
            return {n.id for n in tl.value_names(value)} <= {*self.program.params} and not any(
                isinstance(e, tl.Index) for e in tl.expressions(value)
            )
        return isinstance(value, tl.Num) and number(value.text) == 0

    def once(self, split_idx: str) -> dict[int, Body]:
        """Changes that let only the first share add what is added before the loop."""
        if not self.early:
            return {}
        first, *others = self.early
        condition = tl.Binary("==", tl.Name(split_idx), tl.Num("0"))
        body = (replace(first, gap=False), *others)
        branch = tl.If(condition, body, gap=first.gap)
        return {id(first): (branch,)} | {id(s): () for s in others}

    def left_out(self) -> dict[int, Body]:
        """Changes that leave out what is added before the loop."""
        return {id(s): () for s in self.early}


def _given(program: Program, stmt: tl.Statement, carried: Carried) -> Key | None:
    """The sum that a statement gives a value that does not depend on sums."""
    if not isinstance(stmt, tl.Compute | tl.Copy) or program.reads(stmt) & {*carried.tiles}:
        return None
    return next((key for key in program.writes(stmt) if key in carried.tiles), None)


def _first_early(
    program: Program, before: Body, places: Sequence[int], later: Body, carried: Carried
) -> int:
    """Where the statements begin that add to sums: with what only these statements need."""
    used = {*read_before(program, later), *carried.tiles}
    first = min(places, default=0)
    while first and isinstance(before[first - 1], tl.Compute | tl.Reshape):
        if program.writes(before[first - 1]) & used:
            break
        first -= 1
    return first


def _check_early(program: Program, early: Body, later: Body, carried: Carried) -> None:
    """Statements that only the first share executes serve no other statement."""
    used = read_before(program, later)
    for stmt in tl.statements(early):
        if isinstance(stmt, tl.Let | tl.Allocate):
            raise refused("this stands between statements that add to the sums", stmt)
        for key in program.writes(stmt):
            if key in used and key not in carried.tiles:
                text = f"`{key[0]}` of the loop is set between statements that add to the sums"
                raise refused(text, stmt)


def adjacent(body: Body, some: Body) -> bool:
    """Whether statements stand in one body, not partly in a branch."""
    return any({id(s) for s in some} <= {id(s) for s in one} for one in _bodies(body))


def _bodies(body: Body) -> Iterator[Sequence[tl.Statement]]:
    yield body
    for stmt in body:
        for inner in (stmt.then, stmt.orelse) if isinstance(stmt, tl.If) else ():
            yield from _bodies(inner)
