"""Loops of the consumers, scheduled: overlapped iterations (overlap.py) between a prologue and an
epilogue, unmasked iterations split off, early exit for warpgroups whose rows are all masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from flashwright.lower import ir
from flashwright.lower.element import Element, Leaf, Op
from flashwright.lower.names import Names, tile_name
from flashwright.lower.passes.early_exit import defined, exit_iteration
from flashwright.lower.passes.effects import Resource, effects, live_before
from flashwright.lower.passes.overlap import Pipelined, Reason, pipelined
from flashwright.lower.report import (
    NOT_OVERLAPPED,
    NOT_SPLIT,
    LoopReport,
    ParamEdit,
    Report,
    param_lines,
)
from flashwright.lower.term import (
    Term,
    Var,
    binary,
    negated,
    plus,
    reads_memory,
    substitute,
    variables,
)
from flashwright.program.program import Key, Program


@dataclass
class SoftwarePipeline:
    """Schedules the loops of a body; `late` gathers by the loop's variable the tiles that are read
    one iteration late."""

    program: Program
    names: Names
    report: Report
    overlap: bool
    ping_pong: bool
    split: bool
    exits: bool = True
    """Warpgroups may exit a loop early, each by itself."""
    meeting: bool = False
    """Warpgroups have the same rows, so that they meet in each iteration."""
    late: dict[str, frozenset[Key]] = field(default_factory=dict)
    whole: tuple[ir.Statement, ...] = ()

    def run(self, body: tuple[ir.Statement, ...]) -> tuple[ir.Statement, ...]:
        """The consumers' statements with every loop that multiplies scheduled."""
        self.whole = body
        return self._body(body, frozenset(), frozenset())

    def _body(
        self, body: tuple[ir.Statement, ...], scope: frozenset[str], live: frozenset[Resource]
    ) -> tuple[ir.Statement, ...]:
        """`scope` are the names that inner bodies know, `live` what is needed behind this one."""
        out: list[ir.Statement] = []
        rows = _stored_rows(self.whole, body, scope)
        for position, node in enumerate(body):
            if isinstance(node, ir.Loop):
                behind = live_before(body[position + 1 :], live)
                out.append(self._loop(node, out, behind, rows, scope))
            elif isinstance(node, ir.Branch):
                behind = live_before(body[position + 1 :], live)
                then, orelse = (
                    self._body(part, scope, behind) for part in (node.then, node.orelse)
                )
                out.append(replace(node, then=then, orelse=orelse))
            elif isinstance(node, ir.Release) and out and _done_early(out[-1], node):
                out.append(_released(out.pop(), node))
            else:
                out.append(node)
                scope |= {node.name} if isinstance(node, ir.Define) else set()
        return tuple(out)

    def _loop(
        self,
        loop: ir.Loop,
        before: list[ir.Statement],
        live: frozenset[Resource],
        rows: Term | None,
        scope: frozenset[str],
    ) -> ir.Statement:
        gemms = [n for n in ir.flat(loop.body) if isinstance(n, ir.Gemm)]
        if not gemms:
            return loop
        off = ir.Origin(param_lines(self.program.tree, "Overlap"))
        found: Pipelined | Reason = Reason("`param Overlap = 0`", off)
        taken = _over_taken_iterations(loop)
        if not self.split:
            taken = _masked_throughout(taken)
        if self.overlap:
            buffers = self.program.buffers.items() if self.meeting else ()
            staged = {key: buffer.stages for key, buffer in buffers if buffer.stages > 1}
            zero = partial(_is_zero, before)
            how = (zero, self.names, self.ping_pong, staged, self.meeting)
            found = pipelined(taken, *how)
        line = loop.origin.lines[0] if loop.origin.lines else 0
        if isinstance(found, Reason):
            again = live_before(loop.body, frozenset()) | live
            inner = replace(loop, body=self._body(loop.body, scope | {loop.var}, again))
            if any(isinstance(n, ir.Gemm) for n in loop.body):
                where = found.origin.lines or loop.origin.lines
                text = f"{self._consequences(loop)}: {found.text}"
                edit = None if self.overlap else ParamEdit("Overlap")
                self.report.remark(NOT_OVERLAPPED, text, where, found.help, edit)
                self.report.loops.append(LoopReport(line, False))
            return inner
        self.late[loop.var] = found.late_tiles
        return self._written(taken, found, live, rows, line)

    def _written(
        self,
        loop: ir.Loop,
        found: Pipelined,
        live: frozenset[Resource],
        rows: Term | None,
        line: int,
    ) -> ir.Branch:
        exit = exit_iteration(loop, rows, live) if self.exits else None
        begin: tuple[ir.Statement, ...] = (ir.Define(loop.var, loop.low, varies=True),)
        before: tuple[ir.Statement, ...] = found.first
        following = plus(loop.low if loop.where is None else Var(loop.var), 1)
        again = replace(loop, low=following, body=found.steady, number="defined")
        passing: tuple[ir.Statement, ...] = ()
        if exit is not None:
            end = self.names.fresh(f"{loop.var}_exit")
            before_exit = binary("<", Var(loop.var), Var(end))
            again = replace(again, condition=binary("&&", loop.condition, before_exit))
            untitled = loop.origin.untitled
            passed = _passing(loop.body, self.ping_pong)
            passing = (replace(loop, body=passed, number="resumes", origin=untitled),)
            before = (ir.Define(end, exit), *before)
        loops = split_masked(again, live) if self.split else (again,)
        if len(loops) == 1:
            self._not_split(loop)
        self.report.loops.append(LoopReport(line, True, len(loops) > 1, exit is not None))
        condition = substitute(loop.condition, {loop.var: loop.low})
        then = (*before, *loops, *found.last, *passing)
        if loop.where is not None:
            going = binary("&&", loop.condition, negated(loop.where))
            seek = replace(loop, condition=going, body=(), number="resumes", where=None)
            begin = (*begin, replace(seek, origin=loop.origin.untitled))
            then = (ir.Branch(loop.condition, then, origin=loop.origin.untitled),)
        return ir.Branch(condition, (*begin, *then), origin=loop.origin.untitled)

    def _consequences(self, loop: ir.Loop) -> str:
        """What is not done with a loop that is not overlapped."""
        lost = ["the loop is not overlapped"]
        lost += ["its masked iterations are not split"] if self.split and _masks(loop) else []
        lost += ["its warpgroups do not run in ping-pong"] if self.ping_pong else []
        return " and ".join(filter(None, (", ".join(lost[:-1]), lost[-1])))

    def _not_split(self, loop: ir.Loop) -> None:
        """Report why masked and unmasked iterations share a loop, where there is a mask."""
        masks = _masks(loop)
        untested = [n for n in loop.body if n.origin.title.startswith("Compute Mask")]
        text = "masked iterations are not split: "
        if not self.split and (masks or untested):
            where, edit = param_lines(self.program.tree, "SplitMasked"), ParamEdit("SplitMasked")
            self.report.remark(NOT_SPLIT, f"{text}`param SplitMasked = 0`", where, edit=edit)
        elif not masks and untested:
            text += "the translator finds no test that the mask leaves a whole tile as it is"
            help = "compare positions: `kv_idx < kv_len`, `kv_idx <= q_idx + kv_len - q_len`"
            self.report.remark(NOT_SPLIT, text, untested[0].origin.lines, help)


def split_masked(loop: ir.Loop, live: frozenset[Resource]) -> tuple[ir.Loop, ...]:
    """The iterations in which no mask changes anything, without masks and what is loaded to
    registers for these alone, for as long as there are such; then the others. `live` is what is
    needed behind the loop."""
    masks = _masks(loop)
    if not masks:
        return (loop,)
    lets = defined(loop.body)
    clear = loop.condition
    for mask in masks:
        assert mask.unless is not None
        clear = binary("&&", clear, substitute(mask.unless, lets))
    plain = tuple(n for n in loop.body if n not in masks)
    read = live.union(*(effects(n).reads for n in plain))
    plain = tuple(n for n in plain if not isinstance(n, ir.Fill) or tile_name(n.dest) in read)
    then = replace(loop, number="resumes", origin=loop.origin.untitled)
    return replace(loop, condition=clear, body=plain), then


def _over_taken_iterations(loop: ir.Loop) -> ir.Loop:
    """A loop all of whose work stands in one `if`: the same without it, over the numbers for which
    its condition holds. Names that the condition needs are looked through."""
    *lets, last = loop.body
    if not isinstance(last, ir.Branch) or last.orelse or loop.where is not None:
        return loop
    if not all(isinstance(n, ir.Define) for n in lets):
        return loop
    where = substitute(last.condition, defined(lets))
    return replace(loop, body=(*lets, *last.then), where=where)


def _masked_throughout(loop: ir.Loop) -> ir.Loop:
    """A loop over blocks that the caller lists: their masks without a test, which would ask the
    list in every iteration, and those that follow each other on a tile as one."""
    lets = defined(loop.body)
    body: list[ir.Statement] = []
    last: ir.Compute | None = None  # a mask whose test is gone, if it is the last statement
    for node in loop.body:
        mask = _without_test(node, lets)
        if (
            mask is not None
            and last is not None
            and mask.assigns[0].target == last.assigns[0].target
        ):
            body.pop()
            mask = _both(last, mask)
        body.append(node if mask is None else mask)
        last = mask
    return replace(loop, body=tuple(body))


def _without_test(node: ir.Statement, lets: Mapping[str, Term]) -> ir.Compute | None:
    """A mask whose test reads memory, without it; None for other statements."""
    if not isinstance(node, ir.Compute) or node.unless is None:
        return None
    return replace(node, unless=None) if reads_memory(substitute(node.unless, lets)) else None


def _both(first: ir.Compute, second: ir.Compute) -> ir.Compute:
    """Two masks of a tile as one."""
    condition = Op("and", (_where(first)[0], _where(second)[0]))
    (assign,) = first.assigns
    whole = replace(assign, value=Op("where", (condition, *_where(first)[1:])))
    return replace(first, assigns=(whole,))


def _where(mask: ir.Compute) -> tuple[Element, ...]:
    """The condition of a mask, the scores and what hidden ones become."""
    (assign,) = mask.assigns
    assert isinstance(assign.value, Op)
    return assign.value.args


def _masks(loop: ir.Loop) -> list[ir.Compute]:
    """The masks of which a test tells whether they change a tile."""
    return [n for n in loop.body if isinstance(n, ir.Compute) and n.unless is not None]


def _passing(body: Sequence[ir.Statement], ping_pong: bool) -> tuple[ir.Statement, ...]:
    """An iteration of a warpgroup that only lets the tiles pass."""
    kept = [n for n in body if isinstance(n, (ir.Await, ir.Release, ir.Define))]
    first = next((n for n, node in enumerate(kept) if isinstance(node, ir.Release)), len(kept))
    pair = (ir.PingPong("wait"), ir.PingPong("signal")) if ping_pong else ()
    return (*kept[:first], *pair, *kept[first:])


def _is_zero(before: Sequence[ir.Statement], key: Key) -> bool:
    """Whether a tile is 0 behind these statements."""
    name = tile_name(key)
    last = next((n for n in reversed(before) if name in effects(n).all), None)
    values = [a.value for a in last.assigns] if isinstance(last, ir.Compute) else []
    return len(values) == 1 and isinstance(values[0], Leaf) and values[0].value == 0


def _stored_rows(
    whole: Sequence[ir.Statement], body: Sequence[ir.Statement], scope: frozenset[str]
) -> Term | None:
    """How many rows of a block's tiles are stored, where it is the same for all of them, and known
    throughout a body. Rows that go to shared memory are needed by others."""
    nodes = list(ir.flat(tuple(whole)))
    if any(isinstance(n, ir.Move) and n.dest[1] == "shared" for n in nodes):
        return None
    found = {n.window.rows for n in nodes if isinstance(n, ir.Store)}
    if len(found) != 1:
        return None
    (rows,) = found
    local = {n.name for n in ir.flat(tuple(body)) if isinstance(n, ir.Define)}
    local |= {n.var for n in ir.flat(tuple(body)) if isinstance(n, ir.Loop)}
    return rows if rows is not None and not variables(rows) & (local - scope) else None


def _done_early(before: ir.Statement, node: ir.Release) -> bool:
    """Whether an overlapped loop is done with a tile before its epilogue."""
    place = _epilogue(before)
    if place is None:
        return False
    assert isinstance(before, ir.Branch)
    return not any(node.key in effects(n).reads for n in before.then[place:])


def _epilogue(node: ir.Statement) -> int | None:
    """Where in an overlapped loop the last of its loops ends that multiplies."""
    if not isinstance(node, ir.Branch) or not all(isinstance(n, ir.Release) for n in node.orelse):
        return None
    loops = [
        n
        for n, part in enumerate(node.then, 1)
        if isinstance(part, ir.Loop)
        and part.number != "own"
        and any(isinstance(s, ir.Gemm) for s in part.body)
    ]
    return loops[-1] if loops else None


def _released(loop: ir.Statement, node: ir.Release) -> ir.Branch:
    """The tile handed back right behind the loop, so that the next one can come."""
    assert isinstance(loop, ir.Branch)
    place = _epilogue(loop)
    then = (*loop.then[:place], node, *loop.then[place:])
    return replace(loop, then=then, orelse=(*loop.orelse, node))
