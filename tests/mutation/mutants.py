"""Mutations of TL programs: each class a function from a program to its mutants.

A mutant carries the lines (of the program before the change) that a diagnostic may name, and, where
the change leaves the meaning as it was, the rule in EQUIVALENT that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any

from flashwright.gpu import Gpu
from flashwright.lang.format import format_stmt
from flashwright.lang.nodes import (
    Allocate,
    Binary,
    Call,
    Compute,
    Coord,
    Copy,
    Expr,
    For,
    Grid,
    If,
    Index,
    Let,
    Name,
    Num,
    Param,
    Reshape,
    Statement,
    Transpose,
    Tree,
    Unary,
    statements,
)
from flashwright.program.vocabulary import DTYPES
from tests.mutation import effects
from tests.mutation.effects import Site, is_verb, put, sites

EQUIVALENT: dict[str, str] = {
    "independent": "a Copy moves past statements that neither read nor write its buffer, nor set "
    "its coordinates",
    "rounded already": "a tile is copied to 16 bits after its Reshape, which has rounded it to the "
    "same type",
    "masked scores": "a mask moves above a product with a positive number or the addition of a "
    "finite bias: -inf stays -inf",
    "hidden blocks": "the bounds include more blocks, all inside the tensor, that the mask hides "
    "completely: their weights are 0 (otherwise the original, which skips them, would be wrong)",
    "unread block": "the first block is also fetched if no iteration reads it: it lies inside the "
    "tensor for all lengths",
    "same condition": "the changed condition holds for the same queries and keys, on every "
    "problem that the spec allows (compared on all problems up to two tiles long)",
    "forgotten start": "the first Softmax multiplies the initial value by exp(-1e30 - maximum) = "
    "0, so it counts only in rows that see no key: for O the division sets those rows to 0, and "
    "for the sum there are none if every query sees a key",
    "bounded scores": "the maximum starts at 0 instead of -1e30, and a softcap of at most 5 "
    "bounds the scores so that no weight is lost",
    "no empty row": "the test for rows without a weight is dropped, and there are no such rows",
    "one block of heads": "a tile of heads has room for all of the spec's: the only block is 0",
    "below the rounding": "a weight becomes 257 instead of 256 times itself in e4m3, which has a "
    "precision of one part in 16",
}


@dataclass(frozen=True)
class Mutant:
    """A changed program, what was changed, and the lines that may rightly be named."""

    kind: str
    what: str
    tree: Tree
    right: frozenset[int]
    rule: str | Callable[[], str] = ""

    @cached_property
    def equal(self) -> str:
        """The rule of EQUIVALENT by which it means the same, or nothing. Found when asked for:
        most of the mutants that are made are not tried."""
        return self.rule if isinstance(self.rule, str) else self.rule()


@dataclass(frozen=True)
class Subject:
    """A program to be changed: its tree as parsed, and what it is made for."""

    tree: Tree
    gpu: Gpu
    every_row_sees: bool  # a key, whatever the lengths
    no_empty_sum: bool  # every row sees a key or has a sink
    near_zero: bool  # a softcap keeps the scores within 5 of 0
    same_condition: Callable[[Expr, Expr, Site], bool] = lambda a, b, s: False
    more_blocks: Callable[[Tree], bool] = lambda t: False
    # Whether the first block of the loop lies inside the keys, visited or not.
    first_inside: Callable[[], bool] = lambda: False
    heads: int = 0


Changes = Iterator[Mutant]


# --- helpers ----------------------------------------------------------------------------------


def rewrites(node: Any, change: Callable[[Expr], Iterable[Expr]]) -> Iterator[Any]:
    """The node with one expression below it replaced, for each replacement `change` knows."""
    if isinstance(node, (Num, Name, Unary, Binary, Call, Index, Transpose)):
        yield from change(node)
    for part in fields(node):
        if part.name in ("span", "body", "then", "orelse", "name", "func", "tensor", "axis"):
            continue
        value = getattr(node, part.name)
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                if is_dataclass(item):
                    for new in rewrites(item, change):
                        yield replace(node, **{part.name: (*value[:i], new, *value[i + 1 :])})
        elif is_dataclass(value):
            for new in rewrites(value, change):
                yield replace(node, **{part.name: new})


Rule = str | Callable[[], str]


def _changed(subject: Subject, kind: str, site: Site, new: Statement, equal: Rule = "") -> Mutant:
    what = f"`{format_stmt(site.stmt)}` becomes `{format_stmt(new)}`"
    tree = put(subject.tree, site.path, (new,))
    return Mutant(kind, what, tree, frozenset({site.stmt.span.line}), equal)


def _removed(subject: Subject, kind: str, site: Site) -> Mutant:
    tree = put(subject.tree, site.path, ())
    right = effects.related(subject.tree, site)
    return Mutant(kind, f"`{format_stmt(site.stmt)}` removed", tree, right)


def _moved(
    subject: Subject, kind: str, site: Site, path: tuple[Any, ...], where: str, equal: Rule = ""
) -> Mutant:
    """The statement taken out and put before what stands at `path` once it is gone."""
    tree = effects.insert(put(subject.tree, site.path, ()), path, site.stmt)
    right = effects.related(subject.tree, site) | {site.stmt.span.line}
    return Mutant(kind, f"`{format_stmt(site.stmt)}` moved {where}", tree, right, equal)


def _num(value: int) -> Num:
    return Num(str(value))


def _shifted(expr: Expr, by: int) -> Expr:
    return Binary("+" if by > 0 else "-", expr, _num(abs(by)))


# --- the classes ------------------------------------------------------------------------------


def reshape_removed(subject: Subject) -> Changes:
    for site in sites(subject.tree):
        if isinstance(site.stmt, Reshape):
            yield _removed(subject, "Reshape removed", site)


def transpose(subject: Subject) -> Changes:
    for site in sites(subject.tree):
        stmt = site.stmt
        if not is_verb(stmt, "gemm"):
            continue
        for i, arg in enumerate(stmt.args):
            if isinstance(arg, Transpose):
                new = arg.operand
            elif i == 1 and isinstance(arg, Name):
                new = Transpose(arg)
            else:
                continue
            args = (*stmt.args[:i], new, *stmt.args[i + 1 :])
            yield _changed(subject, "`.T` removed or added", site, replace(stmt, args=args))


def copy_removed(subject: Subject) -> Changes:
    for site in sites(subject.tree):
        if isinstance(site.stmt, Copy):
            yield _removed(subject, "Copy removed", site)


def copy_moved(subject: Subject) -> Changes:
    """Down and up through its body to both ends, and out of its loop or branch on both sides.

    A branch that holds nothing but a Copy is a guarded Copy, and moves whole as well.
    """
    kind = "Copy moved"
    for site in sites(subject.tree):
        stmt = site.stmt
        guarded = isinstance(stmt, If) and all(isinstance(s, Copy) for s in stmt.then)
        if not isinstance(stmt, Copy) and not guarded:
            continue
        first = effects.first_action(subject.tree) if len(site.path) == 1 else 0
        for at in range(first, len(site.body)):
            if at == site.index:
                continue
            down = at > site.index
            between = site.body[site.index + 1 : at + 1] if down else site.body[at : site.index]
            alike = effects.commutes(stmt, between) and not _other_kernel(between)
            equal = "independent" if alike else ""
            equal = equal or ("rounded already" if down and _rounded(stmt, between) else "")
            side = "below" if down else "above"
            where = f"{side} `{format_stmt(site.body[at])}`"
            yield _moved(subject, kind, site, (*site.path[:-1], at), where, equal)
        if site.owners:
            outer = site.path[:-2]
            header = f"`{format_stmt(site.owners[-1])}`"
            equal = partial(_unread, subject, site.owners[-1])
            yield _moved(subject, kind, site, outer, f"out, before {header}", equal)
            after = (*outer[:-1], outer[-1] + 1)
            yield _moved(subject, kind, site, after, f"out, behind {header}", equal)


def _other_kernel(passed: Sequence[Statement]) -> bool:
    """Whether another kernel begins among these statements."""
    return any(isinstance(s, Grid) for s in passed)


def _rounded(copy: Statement, passed: Sequence[Statement]) -> bool:
    """Whether a Copy to shared memory passes nothing that it depends on but a Reshape of its tile,
    and what only reads that."""
    if not isinstance(copy, Copy) or (copy.source, copy.dest) != ("register", "shared"):
        return False
    others = [s for s in passed if not (isinstance(s, Reshape) and s.name == copy.name)]
    return effects.commutes(copy, others)


def coordinates(subject: Subject) -> Changes:
    kind = "coordinate off by one"
    for site in sites(subject.tree):
        stmt = site.stmt
        if isinstance(stmt, Copy):
            for i, coord in enumerate(stmt.coords or ()):
                for by in (1, -1):
                    new = _with_coord(stmt, i, replace(coord, value=_shifted(coord.value, by)))
                    yield _changed(subject, kind, site, new)
        elif not isinstance(stmt, (For, If)):
            for by in (1, -1):
                for new in rewrites(stmt, lambda e, by=by: _index_shifted(e, by)):
                    yield _changed(subject, kind, site, new)


def _index_shifted(expr: Expr, by: int) -> Iterator[Expr]:
    if isinstance(expr, Index):
        for i, arg in enumerate(expr.args):
            yield replace(expr, args=(*expr.args[:i], _shifted(arg, by), *expr.args[i + 1 :]))


def _with_coord(copy: Copy, i: int, coord: Coord | None) -> Copy:
    coords = copy.coords or ()
    left = (*coords[:i], *([coord] if coord else []), *coords[i + 1 :])
    return replace(copy, coords=left or None)


_ENDS = {"low": ("First", "Start"), "high": ("Last", "Steps")}
"""The names of the blocks that a loop begins and ends with."""


def bounds(subject: Subject) -> Changes:
    """Loops and grid axes that begin or end one too early or too late."""
    short, long = "loop short by one", "loop long by one"
    changes = (("low", 1, short), ("high", -1, short), ("low", -1, long), ("high", 1, long))
    for site in sites(subject.tree):
        stmt = site.stmt
        for end, by, kind in changes:
            if isinstance(stmt, For):
                new = replace(stmt, **{end: _shifted(getattr(stmt, end), by)})
                yield _changed(subject, kind, site, new)
            elif isinstance(stmt, Let) and stmt.name.id in _ENDS[end]:
                yield _changed(subject, kind, site, replace(stmt, value=_shifted(stmt.value, by)))
            elif isinstance(stmt, Grid):
                for i, axis in enumerate(stmt.axes):
                    moved = replace(axis, **{end: _shifted(getattr(axis, end), by)})
                    axes = (*stmt.axes[:i], moved, *stmt.axes[i + 1 :])
                    yield _changed(subject, kind, site, replace(stmt, axes=axes))


def modes(subject: Subject) -> Changes:
    kind = "accumulate and get exchanged"
    for site in sites(subject.tree):
        stmt = site.stmt
        if isinstance(stmt, Compute) and stmt.mode is not None:
            other = "get" if stmt.mode == "accumulate" else "accumulate"
            weight = is_verb(stmt, "multiply") and stmt.args[1] == Name("WeightScale")
            equal = "below the rounding" if weight else ""
            yield _changed(subject, kind, site, replace(stmt, mode=other), equal)


def masks(subject: Subject) -> Changes:
    for site in sites(subject.tree):
        if not is_verb(site.stmt, "mask"):
            continue
        yield _removed(subject, "mask removed", site)
        for at in range(len(site.body)):
            if at == site.index:
                continue
            other = site.body[at]
            low, high = sorted((at, site.index))
            between = [s for s in site.body[low : high + 1] if s is not site.stmt]
            if not any(effects.touches(s, site.stmt) for s in between):
                continue  # no statement on the same tile lies between
            if not effects.touches(other, site.stmt):
                continue  # the same order on the tile as one place nearer
            kept = at < site.index and all(_keeps_minus_infinity(s, site.stmt) for s in between)
            where = f"{'above' if at < site.index else 'below'} `{format_stmt(other)}`"
            path = (*site.path[:-1], at)
            equal = "masked scores" if kept else ""
            yield _moved(subject, "mask moved", site, path, where, equal)


def _keeps_minus_infinity(stmt: Statement, mask: Statement) -> bool:
    if not effects.touches(stmt, mask):
        return True
    scaled = is_verb(stmt, "multiply") and stmt.args[1] == Name("Scale")
    if isinstance(stmt, Compute) and stmt.args == (Binary("*", mask.args[0], Name("Scale")),):
        scaled = stmt.verb is None
    biased = (
        isinstance(stmt, Compute)
        and stmt.verb is None
        and isinstance(stmt.args[0], Binary)
        and stmt.args[0].op == "+"
        and stmt.args[0].left == mask.args[0]
    )
    return scaled or biased


def conditions(subject: Subject) -> Changes:
    """Strictness of every comparison of a mask or a branch, every part of an `and` alone."""
    strict = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}

    def weaker(expr: Expr) -> Iterator[Expr]:
        if isinstance(expr, Binary) and expr.op in strict:
            yield replace(expr, op=strict[expr.op])
        if isinstance(expr, Binary) and expr.op == "and":
            yield expr.left
            yield expr.right

    for site in sites(subject.tree):
        stmt = site.stmt
        if is_verb(stmt, "mask"):
            for where in rewrites(stmt.where, weaker):
                new = replace(stmt, where=where)
                equal = partial(_same_condition, subject, site, new)
                yield _changed(subject, "mask condition changed", site, new, equal)


def _same_condition(subject: Subject, site: Site, new: Compute) -> str:
    same = subject.same_condition(site.stmt.where, new.where, site)
    return "same condition" if same else ""


def softmax_state(subject: Subject) -> Changes:
    for site in sites(subject.tree):
        stmt = site.stmt
        if not is_verb(stmt, "softmax"):
            continue
        for i in range(len(stmt.rescale)):
            rest = (*stmt.rescale[:i], *stmt.rescale[i + 1 :])
            yield _changed(subject, "rescale removed", site, replace(stmt, rescale=rest))
        swapped = replace(stmt, state=stmt.state[::-1])
        yield _changed(subject, "softmax state swapped", site, swapped)


_OFFSETS = ("kv_len", "q_len", "tokens", "Window", "Block")


def _offsets_dropped(expr: Expr) -> Iterator[Expr]:
    """`x + kv_len - q_len` without one of its terms, and without both."""
    if not isinstance(expr, Binary) or expr.op not in ("+", "-"):
        return
    names = {e.id for e in effects.names(expr.right)}
    if isinstance(expr.right, Num) or (names and names <= set(_OFFSETS)):
        yield expr.left
        inner = expr.left
        if isinstance(inner, Binary) and inner.op in ("+", "-") and inner.right == Name("kv_len"):
            yield inner.left


def offset_dropped(subject: Subject) -> Changes:
    kind = "offset dropped"
    for site in sites(subject.tree):
        stmt = site.stmt
        bound = isinstance(stmt, For) or (
            isinstance(stmt, Let) and stmt.name.id in (*_ENDS["low"], *_ENDS["high"])
        )
        biased = isinstance(stmt, Compute) and any(
            n.id in ("q_idx", "kv_idx") for a in stmt.args for n in effects.names(a)
        )
        if not (bound or biased or is_verb(stmt, "mask")):
            continue
        for new in rewrites(stmt, _offsets_dropped):
            equal: Rule = ""
            if bound:
                equal = partial(_hidden_blocks, subject, site, new)
            elif is_verb(stmt, "mask"):
                equal = partial(_same_condition, subject, site, new)
            yield _changed(subject, kind, site, new, equal)


def _one_block_of_heads(subject: Subject, copy: Copy, coord: Coord) -> str:
    """The rule, for a coordinate that counts tiles of heads."""
    if coord.axis.id != "H" or coord.value != Name("block_idx") or not copy.shape:
        return ""
    sizes = {
        s.name.id: float(s.value.text)
        for s in statements(subject.tree.body)
        if isinstance(s, Param) and isinstance(s.value, Num)
    }
    first = copy.shape[0]
    room = sizes.get(first.id, 0) if isinstance(first, Name) else 0
    return "one block of heads" if 0 < subject.heads <= room else ""


def _hidden_blocks(subject: Subject, site: Site, new: Statement) -> str:
    more = subject.more_blocks(put(subject.tree, site.path, (new,)))
    return "hidden blocks" if more else ""


def place_dropped(subject: Subject) -> Changes:
    """Batch and head of a Copy left out or fixed at 0; the kv head not found from the head."""
    kind = "head or batch dropped"
    grid = next(s for s in subject.tree.body if isinstance(s, Grid))
    heads = [a.name.id for a in grid.axes if a.name.id == "head_idx"]
    for site in sites(subject.tree):
        stmt = site.stmt
        if isinstance(stmt, Copy):
            for i, coord in enumerate(stmt.coords or ()):
                if coord.axis.id not in ("B", "H"):
                    continue
                yield _changed(subject, kind, site, _with_coord(stmt, i, None))
                for other in (_num(0), *map(Name, heads)):
                    if coord.value != other:
                        new = _with_coord(stmt, i, replace(coord, value=other))
                        one = _one_block_of_heads(subject, stmt, coord) if other == _num(0) else ""
                        yield _changed(subject, kind, site, new, one)
        elif isinstance(stmt, Let) and stmt.name.id == "kv_head":
            for other in (_num(0), Name("head_idx")):
                yield _changed(subject, kind, site, replace(stmt, value=other))


def tile_doubled(subject: Subject) -> Changes:
    """Each tile size doubled until the tiles alone are more than the GPU has."""
    for site in sites(subject.tree):
        stmt = site.stmt
        if not isinstance(stmt, Param) or stmt.name.id not in ("BM", "BN"):
            continue
        assert isinstance(stmt.value, Num)
        size = int(stmt.value.text)
        while True:
            size *= 2
            tree = put(subject.tree, site.path, (replace(stmt, value=_num(size)),))
            if effects.over_budget(tree, subject.gpu):
                break
        new = replace(stmt, value=_num(size))
        yield _changed(subject, "tile doubled past the budget", site, new)


def starts(subject: Subject) -> Changes:
    kind = "start value removed or changed"
    for site in sites(subject.tree):
        stmt = site.stmt
        if not effects.is_start(stmt, site):
            continue
        yield _removed(subject, kind, site)
        zero = stmt.args[0] == Num("0")
        new = replace(stmt, args=(_num(1) if zero else _num(0),))
        equal = _forgotten(subject, stmt) if zero else ""
        if stmt.args[0] == Unary("-", Num("1e30")) and subject.near_zero:
            equal = "bounded scores"
        yield _changed(subject, kind, site, new, equal)


def _forgotten(subject: Subject, start: Compute) -> str:
    low = Unary("-", Num("1e30"))
    before = [s for s in subject.tree.body if isinstance(s, Compute) and s.args == (low,)]
    softmax = next((s for s in statements(subject.tree.body) if is_verb(s, "softmax")), None)
    if softmax is None or not any(s.target == softmax.state[0] for s in before):
        return ""
    held = start.target in softmax.rescale
    summed = start.target == softmax.state[1] and subject.every_row_sees
    return "forgotten start" if held or summed else ""


def scales(subject: Subject) -> Changes:
    kind = "scale dropped or doubled"
    for site in sites(subject.tree):
        stmt = site.stmt
        if isinstance(stmt, Param) and stmt.name.id == "Scale":
            new = replace(stmt, value=Binary("*", Num("2"), stmt.value))
            yield _changed(subject, kind, site, new)
        elif isinstance(stmt, Compute) and any(
            n.id in ("Scale", "Softcap", "WeightScale", "Slopes")
            for a in stmt.args
            for n in effects.names(a)
        ):
            yield _removed(subject, kind, site)
            for new in rewrites(stmt, _doubled):
                yield _changed(subject, kind, site, new)


def _doubled(expr: Expr) -> Iterator[Expr]:
    factor = isinstance(expr, Name) and expr.id in ("Scale", "Softcap", "WeightScale")
    if factor or (isinstance(expr, Index) and expr.tensor.id == "Slopes"):
        yield Binary("*", Num("2"), expr)


def normalisation(subject: Subject) -> Changes:
    """The division by the sum, its guard, and both parts of the log-sum-exp."""
    kind = "normalisation dropped"
    last = max(i for i, s in enumerate(subject.tree.body) if isinstance(s, For))
    for site in sites(subject.tree):
        stmt = site.stmt
        if len(site.path) > 1 or site.index < last or not isinstance(stmt, Compute):
            continue
        yield _removed(subject, kind, site)
        for arg in rewrites(stmt.args[0], _parts):
            guard = isinstance(stmt.args[0], Call) and arg == stmt.args[0].args[1]
            equal = "no empty row" if guard and subject.no_empty_sum else ""
            yield _changed(subject, kind, site, replace(stmt, args=(arg,)), equal)


def _parts(expr: Expr) -> Iterator[Expr]:
    if isinstance(expr, Binary) and expr.op == "/":
        yield expr.left
    if isinstance(expr, Binary) and expr.op == "+":
        yield expr.left
        yield expr.right
    if isinstance(expr, Call) and expr.func.id == "where":
        yield expr.args[1]


def guards(subject: Subject) -> Changes:
    """Conditions of branches: one more, one less, the other strictness, none."""
    kind = "guard off by one"
    strict = {"<": "<=", ">=": ">"}
    for site in sites(subject.tree):
        stmt = site.stmt
        if not isinstance(stmt, If) or not isinstance(stmt.cond, Binary):
            continue
        cond = stmt.cond
        unread = partial(_unread, subject, stmt)
        for by in (1, -1):
            new = replace(stmt, cond=replace(cond, right=_shifted(cond.right, by)))
            yield _changed(subject, kind, site, new, unread if by > 0 else "")
        new = replace(stmt, cond=replace(cond, op=strict[cond.op]))
        yield _changed(subject, kind, site, new, unread)
        tree = put(subject.tree, site.path, stmt.then)
        right = {stmt.span.line} | {s.span.line for s in stmt.then}
        what = f"`{format_stmt(stmt)}` removed, its body kept"
        yield Mutant(kind, what, tree, frozenset(right), unread)


def _unread(subject: Subject, guard: Statement) -> str:
    """For a weaker guard of the fetch of the first block."""
    first = Binary("<", Name("First"), Name("Last"))
    harmless = isinstance(guard, If) and guard.cond == first and subject.first_inside()
    return "unread block" if harmless else ""


def dtypes(subject: Subject) -> Changes:
    """The operands' element type, everywhere, changed to each that the GPU does not multiply."""
    allocated = [s for s in subject.tree.body if isinstance(s, Allocate) and s.dtype is not None]
    operands = {s.name.id for s in allocated if s.space == "shared"}
    for dtype in DTYPES:
        if subject.gpu.takes(dtype) or dtype == "int32":
            continue
        tree, right = subject.tree, set()
        for site in sites(subject.tree):
            stmt = site.stmt
            if isinstance(stmt, Allocate) and stmt.name.id in operands and stmt.space != "register":
                tree = put(tree, site.path, (replace(stmt, dtype=Name(dtype)),))
                right.add(stmt.span.line)
        what = f"{', '.join(sorted(operands))} as {dtype}"
        yield Mutant("dtype the GPU lacks", what, tree, frozenset(right))


OPERATORS: tuple[Callable[[Subject], Changes], ...] = (
    reshape_removed,
    transpose,
    copy_removed,
    copy_moved,
    coordinates,
    bounds,
    modes,
    masks,
    conditions,
    softmax_state,
    offset_dropped,
    place_dropped,
    tile_doubled,
    starts,
    scales,
    normalisation,
    guards,
    dtypes,
)


KINDS: tuple[str, ...] = (
    "Reshape removed",
    "`.T` removed or added",
    "Copy removed",
    "Copy moved",
    "coordinate off by one",
    "loop short by one",
    "loop long by one",
    "accumulate and get exchanged",
    "mask removed",
    "mask moved",
    "mask condition changed",
    "rescale removed",
    "softmax state swapped",
    "offset dropped",
    "head or batch dropped",
    "tile doubled past the budget",
    "start value removed or changed",
    "scale dropped or doubled",
    "normalisation dropped",
    "guard off by one",
    "dtype the GPU lacks",
)
"""The classes, as the report lists them."""

STATED: frozenset[str] = frozenset(
    {
        "Reshape removed",
        "`.T` removed or added",
        "Copy removed",
        "Copy moved",
        "coordinate off by one",
        "loop short by one",
        "accumulate and get exchanged",
        "mask removed",
        "mask moved",
        "rescale removed",
        "offset dropped",
        "tile doubled past the budget",
    }
)
"""The classes that the suite tries in every program; the others it tries in trial.SUITE."""


def mutants(subject: Subject) -> Iterator[Mutant]:
    """All mutants of a program, those that say the same as it (after formatting) left out."""
    for operator in OPERATORS:
        for mutant in operator(subject):
            if mutant.tree != subject.tree:
                yield mutant
