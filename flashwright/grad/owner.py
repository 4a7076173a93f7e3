"""The blocks of the main kernel: each owns keys and loops over the queries of all heads that share
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashwright.grad.algebra import ONE, ZERO, Product, add, call, div, mul, sub
from flashwright.grad.declare import Scope
from flashwright.grad.invert import Visits, find_visits
from flashwright.grad.listed import in_prefix
from flashwright.grad.normalise import KEY, QUERY, Forward, Load, refuse
from flashwright.lang import nodes as tl


@dataclass(frozen=True)
class Owner:
    """The main kernel's grid, lets, loop and lets in the loop; the forward's scalars in it; the
    block of queries of an iteration, and the first block of keys that adds to its gradients."""

    grid: tl.Grid
    lets: tuple[tl.Let, ...]
    loop: tuple[tl.Name, tl.Expr, tl.Expr]
    inner: tuple[tl.Let, ...]
    names: dict[str, tl.Expr]
    query: tl.Name
    first_key: tl.Expr

    @property
    def inside(self) -> set[str]:
        """The scalars that change from one iteration to the next."""
        return {self.loop[0].id, *(let.name.id for let in self.inner)}


@dataclass(frozen=True)
class _Group:
    """Heads that share keys: the grid's axis of heads, the heads of a group, the number of groups,
    and the forward's name of the group's index."""

    head: str
    size: tl.Expr
    count: tl.Expr
    index: str


@dataclass(frozen=True)
class _Steps:
    """The tiles of queries that a block of keys visits for one head: lets before the loop, how many
    tiles, the tile of a step, the first block of keys that visits it, and the forward's scalars
    that depend on the step."""

    lets: tuple[tl.Let, ...]
    count: tl.Expr
    tile: Callable[[tl.Expr], tl.Expr]
    first_key: tl.Expr = ZERO
    names: Callable[[tl.Expr], dict[str, tl.Expr]] = lambda step: {}


def find_owner(scope: Scope) -> Owner:
    """The blocks of the main kernel; Failed if the heads that share keys cannot be found."""
    forward = scope.forward
    key, query = forward.query.name, scope.new_name("i")
    group = _group(forward)
    names: dict[str, tl.Expr] = {forward.loop.var.id: key, key.id: query}
    axes = [a for a in forward.program.grid.axes if a is not forward.query]
    axes.insert(0, tl.GridAxis(key, ZERO, div(scope.key_length, scope.sizes[KEY])))
    grid = tl.Grid(tuple(axes))
    if forward.listed is not None:
        return _looped(scope, group, grid, names, _in_lists(scope, group))
    visits = find_visits(forward, key, query)
    if group is not None or scope.deterministic:
        return _looped(scope, group, grid, names, _descending(scope, visits))
    loop = (query, visits.first, visits.end)
    return Owner(grid, (), loop, (), names, query, visits.first_key)


def _looped(
    scope: Scope, group: _Group | None, grid: tl.Grid, names: dict[str, tl.Expr], steps: _Steps
) -> Owner:
    """The blocks with a loop over steps. All heads of a group see a tile of queries at the same
    time."""
    query = names[grid.axes[0].name.id]
    assert isinstance(query, tl.Name)
    of_group = (group.head, group.index) if group is not None else ()
    kv, head, count = (scope.new_name(name, *of_group) for name in ("kv_head", "head", "n"))
    step, lets, inner, iterations = count, list(steps.lets), [], steps.count
    if group is not None:
        size, step = map(scope.new_name, ("Group", "step"))
        lets.insert(0, tl.Let(size, call("floor", group.size)))  # whole: the launcher has checked
        own = (
            tl.GridAxis(kv, ZERO, group.count) if a.name.id == group.head else a for a in grid.axes
        )
        grid = tl.Grid(tuple(own))
        inner.append(tl.Let(head, add(mul(kv, size), tl.Binary("%", count, size))))
        inner.append(tl.Let(step, call("floor", tl.Binary("/", count, size))))
        names = {**names, group.head: head, group.index: kv}
        iterations = mul(size, steps.count)
    inner.append(tl.Let(query, steps.tile(step)))
    names = {**names, **steps.names(step)}
    loop = (count, ZERO, iterations)
    return Owner(grid, tuple(lets), loop, tuple(inner), names, query, steps.first_key)


def _descending(scope: Scope, visits: Visits) -> _Steps:
    """The tiles within the inverted bounds of the forward's loop, the last one first: what blocks
    read and add to stays in the L2. In causal attention all blocks see that tile, so that those
    that take turns wait at the beginning only."""
    start, steps = map(scope.new_name, ("Start", "Steps"))
    lets = (
        tl.Let(start, visits.first),
        tl.Let(steps, call("max", ZERO, sub(call("ceil", visits.end), start))),
    )
    last = sub(add(start, steps), ONE)
    return _Steps(lets, steps, lambda step: sub(last, step), visits.first_key)


def _in_lists(scope: Scope, group: _Group | None) -> _Steps:
    """The tiles in the lists of the blocks that visit a block of keys."""
    listed, key, size = scope.forward.listed, scope.forward.query.name, scope.sizes[QUERY]
    assert listed is not None
    used = {n.id for e in listed.place for n in tl.value_names(e)}
    if group is not None and group.head in used:
        why = f"heads that share keys have lists of their own in `{listed.blocks}`"
        raise refuse(scope.forward.loop.span, why, "give them the same lists")
    if listed.size != scope.sizes[KEY]:
        why = f"the blocks in `{listed.blocks}` are cut into other tiles than those that are read"
        raise refuse(scope.forward.loop.span, why)
    if scope.deterministic:
        why = f"the blocks in `{listed.blocks}` have no order in which they could be added"
        raise refuse(scope.forward.loop.span, why, "derive it without --deterministic")
    scope.declare_lists(listed)
    block, visited = map(scope.new_name, ("KeyBlockHere", "VisitedBy"))
    tiles = div(listed.rows, size)
    ends = {name: scope.new_name(f"{name}End", f"{name}End") for name in listed.prefixes}
    lets = (
        tl.Let(block, call("floor", div(mul(key, scope.sizes[KEY]), listed.columns))),
        tl.Let(visited, listed.index(listed.counts, block)),
        *(tl.Let(end, mul(listed.index(name, block), tiles)) for name, end in ends.items()),
    )
    return _Steps(
        lets,
        mul(visited, tiles),
        lambda step: listed.query_tile(block, step, size),
        names=lambda step: {in_prefix(n).id: tl.Binary("<", step, end) for n, end in ends.items()},
    )


def _group(forward: Forward) -> _Group | None:
    """The heads that share keys; None if each head has its own."""
    for load in forward.loads.values():
        for coord in load.copy.coords or ():
            if KEY in load.axes and coord.axis.id not in "LMD":
                found = _group_at(forward, load, coord)
                if found is not None:
                    return found
    return None


def _group_at(forward: Forward, load: Load, coord: tl.Coord) -> _Group | None:
    """The heads with the same index along one axis of the keys; None if it is no group's index."""
    place = forward.spelt_out(coord.value)
    heads = {a.name.id for a in forward.program.grid.axes}
    match place:
        case tl.Call(tl.Name("floor"), (inner,)):
            found = Product.of(inner)
            own = [e for e in found.tops if isinstance(e, tl.Name) and e.id in heads]
            if len(own) == 1:
                rest = Product(False, tuple(e for e in found.tops if e not in own), found.bottoms)
                count = next(a.size for a in load.tensor.axes if a.label == coord.axis.id)
                index = coord.value.id if isinstance(coord.value, tl.Name) else ""
                return _Group(own[0].id, div(ONE, rest.expr()), count, index)
        case _ if isinstance(place, tl.Name) or not {n.id for n in tl.value_names(place)} & heads:
            return None
    raise refuse(coord.span, f"which heads share `{load.tensor.name}` cannot be inverted")
