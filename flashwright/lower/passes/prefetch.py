"""Pipelining, where the program allows it: the copies of a buffer with N stages run N - 1
iterations of their loop ahead. `with stages 2` says that this may be done; what the program means
stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.passes.effects import exposed
from flashwright.lower.report import NOT_AHEAD, LoopReport, Report
from flashwright.lower.term import Term, Var, binary, inlined, integer, minus, plus, substitute
from flashwright.program.program import Buffer, Key
from flashwright.program.vocabulary import DTYPES


def run_copies_ahead(
    body: tuple[ir.Statement, ...],
    buffers: Mapping[Key, Buffer],
    ahead: int,
    report: Report | None = None,
) -> tuple[ir.Statement, ...]:
    """Every loop with its copies run ahead, at most so many iterations."""
    report = report or Report()
    early: dict[Key, int] = {}
    out: list[ir.Statement] = []
    for position, node in enumerate(body):
        if isinstance(node, ir.Loop):
            stages = _stages(node, body[position + 1 :], buffers, ahead)
            out += _loop(node, stages) if stages else [node]
            early |= stages
            if any(isinstance(n, ir.Gemm) for n in ir.flat(node.body)):
                line = node.origin.lines[0] if node.origin.lines else 0
                most = max(stages.values(), default=1) - 1
                report.loops.append(LoopReport(line, overlapped=False, ahead=most))
        else:
            out.append(node)
    remark_single_stages(body, buffers, report)
    _remark_elements(body, report)
    _remark(body, [k for k, b in buffers.items() if b.stages > 1 and k not in early], report)
    return tuple(out)


def remark_single_stages(
    body: tuple[ir.Statement, ...], buffers: Mapping[Key, Buffer], report: Report
) -> None:
    """Report the tiles that a loop has to wait for, because they have one stage."""
    loops = [n for n in ir.flat(body) if isinstance(n, ir.Loop)]
    for load in (n for loop in loops for n in loop.body if isinstance(n, ir.Load)):
        name, buffer = load.dest[0], buffers[load.dest]
        if buffer.space == "shared" and buffer.stages == 1:
            text = f"copies to `{name}` do not run ahead: the tile has one stage"
            help = f"`Allocate {name} in shared (...) with stages 2`, if shared memory has room"
            report.remark(NOT_AHEAD, text, load.origin.lines, help)


def _remark_elements(body: tuple[ir.Statement, ...], report: Report) -> None:
    """Report the tiles of a loop that threads copy element by element, and wait for."""
    loops = [n for n in ir.flat(body) if isinstance(n, ir.Loop)]
    for load in (n for loop in loops for n in loop.body if isinstance(n, ir.Load)):
        name, window = load.dest[0], load.window
        if window.chunked or window.line:
            continue
        why = f"the rows of `{window.tensor.name}` may not be a multiple of 16 bytes long"
        help = f"let its last axis be a number, a multiple of {16 // DTYPES[window.tensor.dtype]}"
        if window.converts:
            why = f"they change the type of `{window.tensor.name}`"
            help = f"`Allocate {name} in shared (...) as {window.tensor.dtype}`"
        elif not window.aligned:
            why, help = f"`{name}` may not begin at a multiple of 16 bytes", ""
        text = f"copies to `{name}` go element by element: {why}"
        report.remark(NOT_AHEAD, text, load.origin.lines, help)


def _remark(body: tuple[ir.Statement, ...], keys: list[Key], report: Report) -> None:
    """Report the tiles with stages whose copies do not run ahead."""
    for key in keys:
        load = next((n for n in ir.flat(body) if isinstance(n, ir.Load) and n.dest == key), None)
        if load is not None:
            text = f"copies to `{key[0]}` do not run ahead: {_why_not(body, key)}"
            report.remark(NOT_AHEAD, text, load.origin.lines)


def _why_not(body: tuple[ir.Statement, ...], key: Key) -> str:
    loops = [(n, node) for n, node in enumerate(body) if isinstance(node, ir.Loop)]
    inside = [(n, lp) for n, lp in loops if any(_fills(x, key) for x in ir.flat(lp.body))]
    if not inside:
        return "the Copy is in no loop"
    place, loop = inside[0]
    if not any(node.dest == key for node, _ in _loads(loop)):
        return "the Copy is in a branch or in an inner loop"
    if sum(_fills(n, key) for n in ir.flat(loop.body)) > 1:
        return "the loop fills the tile more than once"
    if _reads_first(loop.body, key):
        return "the loop reads the tile before the Copy fills it"
    if _reads_first(body[place + 1 :], key):
        return "the tile is read after the loop"
    return "a copy of another loop does"


def _loop(loop: ir.Loop, stages: dict[Key, int]) -> list[ir.Statement]:
    prologue: list[ir.Statement] = []
    for early in range(max(stages.values()) - 1):
        now = plus(loop.low, early)
        loads = tuple(
            replace(_moved(node, lets, loop.var, now), stage=integer(early))
            for node, lets in _loads(loop)
            if stages.get(node.dest, 1) - 1 > early
        )
        condition = substitute(loop.condition, {loop.var: now})
        prologue.append(ir.Branch(condition, loads, origin=loop.origin.untitled))
        prologue.append(ir.Commit())
    body = tuple(_in_loop(node, loop, stages, lets) for node, lets in _with_lets(loop.body))
    return [*prologue, replace(loop, body=body)]


def _stages(
    loop: ir.Loop, after: tuple[ir.Statement, ...], buffers: Mapping[Key, Buffer], ahead: int
) -> dict[Key, int]:
    """The buffers whose copies can run ahead, with their stages: one copy at the top of the body
    fills the buffer before anything reads it, and nothing reads it behind the loop."""
    found = {}
    for node, _ in _loads(loop):
        stages = min(buffers[node.dest].stages, ahead + 1)
        only = sum(_fills(n, node.dest) for n in ir.flat(loop.body)) == 1
        only &= not any(_stores(n, node.dest) for n in ir.flat(loop.body))
        stale = _reads_first(loop.body, node.dest) or _reads_first(after, node.dest)
        if stages > 1 and only and not stale:
            found[node.dest] = stages
    return found


def _fills(node: ir.Statement, key: Key) -> bool:
    return isinstance(node, (ir.Load, ir.Move)) and node.dest == key


def _stores(node: ir.Statement, key: Key) -> bool:
    """Whether a tile goes to global memory from here; that knows of no stages."""
    return isinstance(node, ir.Store) and node.source == key


def _reads_first(body: tuple[ir.Statement, ...], key: Key) -> bool:
    """Whether statements may take what was in a buffer before them."""
    return key in exposed(body).reads


def _loads(loop: ir.Loop) -> list[tuple[ir.Load, dict[str, Term]]]:
    return [(n, lets) for n, lets in _with_lets(loop.body) if isinstance(n, ir.Load)]


def _with_lets(body: tuple[ir.Statement, ...]) -> list[tuple[ir.Statement, dict[str, Term]]]:
    """Each statement with the names defined above it in the same body."""
    lets: dict[str, Term] = {}
    found = []
    for node in body:
        found.append((node, dict(lets)))
        if isinstance(node, ir.Define):
            lets[node.name] = node.value
    return found


def _in_loop(
    node: ir.Statement, loop: ir.Loop, stages: dict[Key, int], lets: dict[str, Term]
) -> ir.Statement:
    """A statement of the loop: copies for a later iteration, readers at this iteration's stage."""
    count = minus(Var(loop.var), loop.low)
    if isinstance(node, ir.Load) and node.dest in stages:
        n = stages[node.dest]
        later = plus(Var(loop.var), n - 1)
        load = replace(
            _moved(node, lets, loop.var, later),
            stage=_modulo(plus(count, n - 1), n),
            origin=node.origin.untitled,
        )
        condition = substitute(loop.condition, {loop.var: later})
        return ir.Branch(condition, (load,), origin=node.origin)
    if isinstance(node, ir.Gemm):
        left, right = (
            _modulo(count, stages[key]) if key in stages else None
            for key in (node.left, node.right)
        )
        return replace(node, left_stage=left, right_stage=right)
    if isinstance(node, ir.Move) and node.source in stages:
        return replace(node, stage=_modulo(count, stages[node.source]))
    if isinstance(node, ir.Branch):
        then, orelse = (
            tuple(_in_loop(n, loop, stages, lets) for n in part)
            for part in (node.then, node.orelse)
        )
        return replace(node, then=then, orelse=orelse)
    if isinstance(node, ir.Loop):
        return replace(node, body=tuple(_in_loop(n, loop, stages, lets) for n in node.body))
    return node


def _modulo(x: Term, n: int) -> Term:
    return binary("%", x, integer(n))


def _moved(node: ir.Load, lets: dict[str, Term], var: str, to: Term) -> ir.Load:
    """The copy as another iteration does it."""
    values = inlined(lets, {var: to})
    return node.moved(lambda x: substitute(x, values))
