"""Two products under way at a time: while the tensor cores multiply, the softmax is computed.

A loop of attention multiplies twice in a round: scores S = Q K^T, then O += P V with the P that is
made of S. In each round but the first, the scores of this round are started together with the
second product of the round before, whose operands are long there; then this round's softmax is
computed under the second product. The loop is written out once before itself for the first scores,
and once behind for the last product:

    S(0), P(0);  for i = 1..: { start S(i); start O += P(i-1) V(i-1); wait for S; the row's maximum;
                                wait for O; rescale O; exponentials; P(i) };  O += P(n) V(n)

Whatever the loop does with O besides (the softmax rescales it) stands behind the wait for it, as
soon as its factors are known: the exponentials, which the special function unit is slow with, leave
room for it. That is possible where nothing else reads O, and where it needs no value that changes
in between.

Where the product of a step goes into a tile of its own and is added then (steps.py), what O is
multiplied with is kept for one more round: O = O * (the factor of the round before) + step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from flashwright.check.program import Key
from flashwright.lower import ir
from flashwright.lower.element import (
    ROW,
    TILE,
    Element,
    Leaf,
    Op,
    Reduce,
    element,
    leaves,
    variable,
)
from flashwright.lower.frontend.masks import GROUP, GROUP_ROWS
from flashwright.lower.names import tile_name
from flashwright.lower.passes.early_exit import idle
from flashwright.lower.passes.fp8_sums import total
from flashwright.lower.term import (
    Binary,
    Select,
    Term,
    Var,
    binary,
    call,
    integer,
    plus,
    substitute,
    variables,
)


def overlapped(
    body: tuple[ir.Statement, ...], turns: bool, apart: bool
) -> tuple[ir.Statement, ...]:
    """Every loop that multiplies twice in a round, rewritten.

    With `turns` the warpgroups start their products one after the other, so that one computes its
    softmax while another multiplies. With `apart` the rounds that need no mask have a loop of their
    own.
    """
    out: list[ir.Statement] = []
    rows = _rows(body)
    for node in body:
        parts = _parts(node) if isinstance(node, ir.Loop) else None
        if isinstance(node, ir.Loop) and parts:
            cleared = not parts.last and _cleared(out, parts.second.target)
            if cleared and _scales(parts.rescale):
                parts = replace(parts, anew=())
            own = _own_end(node, parts, rows)
            out.append(_rewritten(node, parts, own, turns, apart))
        elif isinstance(node, ir.Release) and out and _early(out[-1], node):
            out.append(_released(out.pop(), node))
        else:
            out.append(node)
    return tuple(out)


@dataclass(frozen=True)
class _Parts:
    """A round of the loop, taken apart."""

    head: tuple[ir.Statement, ...]
    """Waits for what the first product reads, and names."""
    first: ir.Gemm
    after: tuple[ir.Release, ...]
    """What the first product has read is handed back."""
    middle: tuple[ir.Statement, ...]
    """The softmax until the factors of O are known."""
    rescale: tuple[ir.Compute, ...]
    later: tuple[ir.Statement, ...]
    """The rest of the softmax."""
    operand: ir.Operand
    ready: tuple[ir.Statement, ...]
    """Waits for what the second product reads."""
    second: ir.Gemm
    tail: tuple[ir.Statement, ...]
    anew: tuple[ir.Compute, ...]
    """What is done with O in the first round."""
    again: tuple[ir.Compute, ...]
    """What is done with O in the others: it is rescaled, and a step is added to it."""
    last: tuple[ir.Compute, ...] = ()
    """What is done with it behind the last product, where that is a step."""


def _rewritten(
    loop: ir.Loop, parts: _Parts, own: ir.Define | None, turns: bool, apart: bool
) -> ir.Branch:
    scores, out = parts.first.target, parts.second.target
    first, second = (ir.Start(g, origin=g.origin) for g in (parts.first, parts.second))
    take, give = ((ir.Turn("take"),), (ir.Turn("pass"),)) if turns else ((), ())
    known = _known(parts.middle)
    before = (
        *(ir.Define(loop.var, loop.low, varies=True), *parts.head, ir.Open((scores,)), first),
        *(ir.Finish(0, (scores,)), *parts.after, *parts.middle),
        *(*parts.anew, *parts.later, parts.operand),
    )
    body = (
        *(*parts.head, *take, ir.Open((scores, out)), first),
        *(*parts.ready, second, *give, ir.Finish(1, (scores,)), *parts.middle),
        *(*(replace(n, known=known) for n in parts.after), ir.Finish(0, (out,)), *parts.tail),
        *(*parts.again, *parts.later, replace(parts.operand, again=True)),
    )
    again = replace(loop, low=plus(loop.low, 1), body=body, number="defined")
    finish = (ir.Finish(0, (out,)), *parts.tail, *parts.last)
    behind = (*parts.ready, ir.Open((out,)), second, *finish)
    rest: tuple[ir.Statement, ...] = ()
    if own:
        mine = binary("<", Var(loop.var), Var(own.name))
        again = replace(again, condition=binary("&&", loop.condition, mine))
        passing = (*parts.head, *take, *give, *parts.after, *parts.ready, *parts.tail)
        rest = (replace(loop, body=passing, number="resumes", origin=loop.origin.untitled),)
        before = (own, *before)
    condition = substitute(loop.condition, {loop.var: loop.low})
    then = (*before, *(_apart(again) if apart else (again,)), *behind, *rest)
    return ir.Branch(condition, then, origin=loop.origin.untitled)


def _apart(loop: ir.Loop) -> tuple[ir.Loop, ...]:
    """The rounds of a loop in which its mask changes nothing, without it, for as long as there are
    such; then the others."""
    masks = [n for n in loop.body if isinstance(n, ir.Compute) and n.unless is not None]
    if len(masks) != 1 or masks[0].unless is None:
        return (loop,)
    clear = binary("&&", loop.condition, masks[0].unless)
    plain = tuple(n for n in loop.body if n is not masks[0])
    then = replace(loop, number="resumes", origin=loop.origin.untitled)
    return replace(loop, condition=clear, body=plain), then


def _known(middle: tuple[ir.Statement, ...]) -> str:
    """The last vector that is made before the wait for O: what is handed back between them is
    handed back when its value is there, which holds the wait in its place."""
    vectors = [
        variable(a.target)
        for node in middle
        if isinstance(node, ir.Compute)
        for a in node.assigns
        if a.buffer and len(a.buffer.shape) == 1
    ]
    return vectors[-1] if vectors else ""


def _cleared(before: list[ir.Statement], key: Key) -> bool:
    """Whether a tile is 0 behind these statements."""
    last = next((n for n in reversed(before) if _speaks(n, key)), None)
    values = [a.value for a in last.assigns] if isinstance(last, ir.Compute) else []
    return len(values) == 1 and isinstance(values[0], Leaf) and values[0].value == 0


def _scales(rescale: tuple[ir.Compute, ...]) -> bool:
    """Whether a tile that is 0 stays so."""
    return all(
        isinstance(a.value, Op) and a.value.op == "*" and a.target in a.value.args
        for node in rescale
        for a in node.assigns
    )


# --- a warpgroup's own end --------------------------------------------------------------------


def _own_end(loop: ir.Loop, parts: _Parts, rows: Term | None) -> ir.Define | None:
    """The round from which on a mask leaves nothing of a warpgroup's rows, at least the second: it
    then only lets the tiles pass, while others go on with them. So does one whose rows are not
    stored."""
    own = _masked(loop, parts)
    if own is None:
        return None
    if rows is not None:
        first = binary("*", GROUP, integer(GROUP_ROWS))
        own = Select(binary("<", first, rows), own, integer(0))
    return ir.Define(f"{loop.var}_own", call("max", plus(loop.low, 1), own, type="int"))


def _masked(loop: ir.Loop, parts: _Parts) -> Term | None:
    done = (*parts.middle, *parts.later)
    work = [n for n in done if isinstance(n, ir.Compute)]
    if len(work) < len(done):
        return None
    for node in work:
        match node.cols:
            case Binary("*", Var(loop.var), step) if node.end and loop.var not in variables(
                node.end
            ):
                if idle([*work, *parts.rescale], node):
                    return call("ceil_div", node.end, step, type="int")
    return None


def _rows(body: tuple[ir.Statement, ...]) -> Term | None:
    """How many rows of a block's tiles are stored, where it is the same for all of them."""
    found = {n.window.rows for n in ir.flat(body) if isinstance(n, ir.Store)}
    return found.pop() if len(found) == 1 else None


def _early(before: ir.Statement, node: ir.Release) -> bool:
    """Whether a rewritten loop is done with a tile before its last product."""
    place = _behind(before)
    if place is None:
        return False
    assert isinstance(before, ir.Branch)
    reads = (n.gemm for n in before.then[place:] if isinstance(n, ir.Start))
    return not any(node.key in (g.left, g.right) for g in reads)


def _behind(node: ir.Statement) -> int | None:
    """Where in a rewritten loop the last of its loops ends that multiplies."""
    if not isinstance(node, ir.Branch):
        return None
    loops = [
        n
        for n, part in enumerate(node.then, 1)
        if isinstance(part, ir.Loop) and any(isinstance(s, ir.Start) for s in part.body)
    ]
    return loops[-1] if loops else None


def _released(loop: ir.Statement, node: ir.Release) -> ir.Branch:
    """The tile handed back right behind the loop, so that the next one can come."""
    assert isinstance(loop, ir.Branch)
    place = _behind(loop)
    then = (*loop.then[:place], node, *loop.then[place:])
    return replace(loop, then=then, orelse=(*loop.orelse, node))


# --- taking a round apart ---------------------------------------------------------------------


def _parts(loop: ir.Loop) -> _Parts | None:
    body = loop.body
    gemms = [n for n, node in enumerate(body) if isinstance(node, ir.Gemm)]
    if len(gemms) != 2 or sum(isinstance(n, ir.Gemm) for n in ir.flat(body)) != 2:
        return None
    first, second = (body[n] for n in gemms)
    assert isinstance(first, ir.Gemm)
    assert isinstance(second, ir.Gemm)
    head, between, tail = body[: gemms[0]], body[gemms[0] + 1 : gemms[1]], body[gemms[1] + 1 :]
    operands = [n for n in between if isinstance(n, ir.Operand)]
    adds = [n for n in tail if isinstance(n, ir.Compute)]
    fits = (
        first.fresh
        and second.fresh == bool(adds)
        and first.left[1] == first.right[1] == "shared"
        and len(operands) == 1
        and (operands[0].target, operands[0].source) == (second.left, first.target)
        and all(isinstance(n, (ir.Await, ir.Define)) for n in head)
        and all(isinstance(n, ir.Release) for n in tail if n not in adds)
        and len(adds) <= 1
    )
    if not fits:
        return None
    if not adds:
        return _sorted(head, first, between, operands[0], second, tail, second.target)
    key, rest = total(adds[0], second.target), tuple(n for n in tail if n not in adds)
    found = key and _sorted(head, first, between, operands[0], second, rest, key)
    return _stepped(found, adds[0]) if found else None


def _sorted(
    head: tuple[ir.Statement, ...],
    first: ir.Gemm,
    between: tuple[ir.Statement, ...],
    operand: ir.Operand,
    second: ir.Gemm,
    tail: tuple[ir.Statement, ...],
    out: Key,
) -> _Parts | None:
    after = tuple(n for n in between if isinstance(n, ir.Release))
    ready = tuple(n for n in between if isinstance(n, ir.Await))
    work = [n for n in between if not isinstance(n, (ir.Release, ir.Await, ir.Operand))]
    if {n.key for n in ready} & {first.left, first.right}:
        return None
    middle: list[ir.Statement] = []
    later: list[ir.Statement] = []
    rescale: list[ir.Compute] = []
    for node in work:
        if not _speaks(node, out):
            (later if rescale else middle).append(node)
            continue
        parted = _parted(node, out)
        if parted is None:
            return None
        soon, rest = _soon(parted[0])
        (later if rescale else middle).append(soon)
        later += rest
        rescale.append(parted[1])
    if len(rescale) > 1:  # the factors of a further one are known only at the end
        middle, later = middle + later, []
    found = tuple(rescale)
    return _Parts(
        *(head, first, after, tuple(middle), found, tuple(later)),
        *(operand, ready, second, tail, found, found),
    )


def _stepped(parts: _Parts, add: ir.Compute) -> _Parts | None:
    """A round whose product is a step: the sum is rescaled where the step is added, by what the
    round before knew. What this round knows is noted for that."""
    if not parts.rescale:
        return replace(parts, again=(add,), last=(add,))
    assigns = [a for node in parts.rescale for a in node.assigns]
    if len(assigns) != 1 or assigns[0].target != add.assigns[0].target:
        return None
    names = sorted(kept_vectors(parts.middle))
    before = {element(name, ROW).term: element(f"{name}_before", ROW) for name in names}
    scaled = {assigns[0].target.term: _with(assigns[0].value, before)}
    added = replace(add.assigns[0], value=_with(add.assigns[0].value, scaled))
    joint = replace(add, assigns=(added,))
    noted = replace(
        add,
        assigns=tuple(
            ir.Assign(target, Leaf(name, ROW), kept=True) for name, target in before.items()
        ),
        kept=tuple(f"{name}_before" for name in names),
    )
    return replace(parts, anew=(noted,), again=(joint, noted), last=(joint,))


def _soon(node: ir.Compute) -> tuple[ir.Compute, tuple[ir.Compute, ...]]:
    """A statement until the vectors that it makes for others are there, and what is left of it.

    Of the names of a row that both parts use the second knows those that a vector has as well.
    """
    made = max((n for n, a in enumerate(node.assigns) if a.kept), default=-1)
    rows = takewhile(lambda a: a.target.axes == ROW, node.assigns[made + 1 :])
    place = made + 1 + sum(1 for _ in rows)
    soon, rest = node.assigns[:place], node.assigns[place:]
    local = {a.target.term for a in soon if a.buffer is None and not a.kept}
    held = {a.value.term: a.target for a in soon if a.buffer and isinstance(a.value, Leaf)}
    used = {leaf.term for a in rest for leaf in leaves(a.value)} & local
    if not rest or not used <= held.keys():
        return node, ()
    named = tuple(replace(a, value=_with(a.value, held)) for a in rest)
    later = replace(node, assigns=named, kept=(), origin=node.origin.untitled)
    return replace(node, assigns=soon), (later,)


def _speaks(node: ir.Statement, key: Key) -> bool:
    """Whether a statement has to do with a tile in registers."""
    if isinstance(node, ir.Compute):
        return any(_names(a, key) for a in node.assigns)
    return any(
        (isinstance(n, ir.Fill) and n.dest == key)
        or (isinstance(n, ir.Store) and n.source == key)
        or (isinstance(n, ir.Compute) and any(_names(a, key) for a in n.assigns))
        for n in ir.flat((node,))
    )


def _names(assign: ir.Assign, key: Key) -> bool:
    name = tile_name(key)
    return any(variable(leaf) == name for leaf in (assign.target, *leaves(assign.value)))


def _parted(node: ir.Statement, key: Key) -> tuple[ir.Compute, ir.Compute] | None:
    """A statement without what it does with the tile, and that alone. Names of a row that both use
    become vectors, which last from one to the other."""
    if not isinstance(node, ir.Compute) or node.unless is not None:
        return None
    own = [a for a in node.assigns if _names(a, key)]
    rest = [a for a in node.assigns if not _names(a, key)]
    local = {a.target.term for a in rest if a.buffer is None}
    used = {leaf.term for a in own for leaf in leaves(a.value)} & local
    stable = all(
        variable(leaf) == tile_name(key) or leaf.term in used or leaf.value is not None
        for a in own
        for leaf in leaves(a.value)
    )
    if not stable or any(a.target.axes != TILE for a in own):
        return None
    kept: dict[Term, Leaf] = {
        name: element(f"{name.name}s", ROW) for name in used if isinstance(name, Var)
    }
    first, second = (tuple(_renamed(a, kept) for a in part) for part in (rest, own))
    return (
        replace(node, assigns=first, kept=tuple(sorted(map(variable, kept.values())))),
        replace(node, assigns=second, origin=node.origin.untitled),
    )


def _renamed(assign: ir.Assign, kept: Mapping[Term, Leaf]) -> ir.Assign:
    target = kept.get(assign.target.term, assign.target)
    return replace(
        assign, target=target, value=_with(assign.value, kept), kept=target is not assign.target
    )


def _with(x: Element, kept: Mapping[Term, Element]) -> Element:
    match x:
        case Leaf():
            return kept.get(x.term, x)
        case Op(op, args):
            return Op(op, tuple(_with(a, kept) for a in args))
        case Reduce(op, arg):
            return Reduce(op, _with(arg, kept))


def kept_vectors(body: tuple[ir.Statement, ...]) -> dict[str, int]:
    """The vectors that were made, and the rows of their tiles."""
    return {
        name: node.shape[0]
        for node in ir.flat(body)
        if isinstance(node, ir.Compute)
        for name in node.kept
    }
