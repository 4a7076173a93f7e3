"""Software pipelining of a loop that multiplies: while the tensor cores work on the last products
of one iteration, the consumers compute the softmax of the next one.

The body of a loop is a graph of what depends on what. Its products fall into two stages. The
*early* ones need nothing that the iteration computes (scores, S = Q K^T). The *late* ones are at
the end of it: nothing in the iteration uses their results (O += P V). The late ones of iteration
i - 1 run in iteration i, right behind the early ones, and the rest of it is computed under them:

    S(0), P(0);  for i = 1..: { start S(i); start O += P(i-1) V(i-1); wait for S; the row's maximum;
                                wait for O; rescale O; exponentials; P(i) };  O += P(n) V(n)

What the iteration does with a late product's accumulator (a softmax rescales it) stands behind the
wait for it, as soon as its factors are known: the exponentials, which the special function unit is
slow with, leave room for it. For that a statement is taken apart into its assignments; names local
to a row that both parts use become vectors.

A tile that early and late products read (keys that are values as well) is held in two stages: the
early ones read its younger value while the late ones still read the older one. If it has no third
stage, the late products start first, since the next value can come only when they are done.

A change of order is legal if it keeps every two statements in order that touch the same thing, one
of them writing. `reason` says why a loop stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashwright.lower import ir
from flashwright.lower.element import (
    ROW,
    TILE,
    Leaf,
    Op,
    element,
    leaves,
    variable,
    with_leaves,
)
from flashwright.lower.names import Names, tile_name
from flashwright.lower.passes.effects import Effects, assign_effects, effects
from flashwright.lower.passes.fp8_sums import total
from flashwright.lower.term import At, Term, Var, walk
from flashwright.program.program import Key


@dataclass(frozen=True)
class Item:
    """A statement, or one assignment of it, with what it touches."""

    node: ir.Statement
    number: int  # in program order
    statement: int  # of the statement that it is a part of
    effects: Effects

    @property
    def gemm(self) -> ir.Gemm | None:
        """The product that it is."""
        return self.node if isinstance(self.node, ir.Gemm) else None


@dataclass(frozen=True)
class Pipelined:
    """A loop in two stages; each part is a list of statements in the order in which they run."""

    first: tuple[ir.Statement, ...]
    """The first iteration without its late products."""
    steady: tuple[ir.Statement, ...]
    """An iteration's early stage, with the late stage of the one before in it."""
    last: tuple[ir.Statement, ...]
    """The late stage of the last iteration."""
    late_tiles: frozenset[Key]
    """Shared tiles that are read one iteration late."""


@dataclass(frozen=True)
class Reason:
    """Why a loop is not overlapped, and where that shows."""

    text: str
    origin: ir.Origin
    help: str = ""


# --- the graph --------------------------------------------------------------------------------


def items(body: Sequence[ir.Statement]) -> list[Item]:
    """The statements of a body, elementwise ones taken apart into their assignments."""
    found: list[Item] = []
    for statement, node in enumerate(body):
        if not isinstance(node, ir.Compute) or node.unless is not None or len(node.assigns) < 2:
            found.append(Item(node, len(found), statement, effects(node)))
            continue
        local = {variable(a.target) for a in node.assigns if a.buffer is None and not a.kept}
        for n, assign in enumerate(node.assigns):
            origin = node.origin if n == 0 else node.origin.untitled
            part = replace(node, assigns=(assign,), origin=origin)
            own = _scoped(assign_effects(node, assign), local, statement)
            found.append(Item(part, len(found), statement, own))
    return found


def _scoped(found: Effects, local: set[str], statement: int) -> Effects:
    """Names local to the row are another statement's too: told apart by its number."""

    def named(resources: frozenset[str | Key]) -> frozenset[str | Key]:
        return frozenset(f"{r}@{statement}" if r in local else r for r in resources)

    return Effects(named(found.reads), named(found.writes))


@dataclass
class Graph:
    """Items in program order, and which of them depend on which."""

    items: list[Item]
    staged: Mapping[Key, int]
    """Shared tiles of which two stages may be held: how many they have."""
    before: list[set[int]] = field(default_factory=list)
    """For each item the numbers of all items that it depends on, directly or not."""

    def __post_init__(self) -> None:
        for item in self.items:
            direct = {
                other.number
                for other in self.items[: item.number]
                if other.effects.conflicts(item.effects)
            }
            self.before.append(direct.union(*(self.before[n] for n in direct)))

    def twice(self, late: set[int]) -> frozenset[Key]:
        """The tiles that early products and one late product read, the early ones as right
        operands, and that are held in two stages for that."""
        if sum(self.items[n].gemm is not None for n in late) != 1:
            return frozenset()
        tiles = _tiles(self, late) & self.staged.keys()
        others = [item for item in self.items if item.number not in late]
        found = {k for k in tiles for item in others if k in item.effects.reads}
        readers = [(k, i) for k in found for i in others if k in i.effects.reads]
        bad = {k for k, i in readers if not i.gemm or i.gemm.right != k or i.gemm.left == k}
        return frozenset(found - bad)

    def after(self, numbers: set[int]) -> set[int]:
        """The items that depend on one of these."""
        return {n for n, before in enumerate(self.before) if before & numbers}


# --- the stages -------------------------------------------------------------------------------


def pipelined(
    loop: ir.Loop,
    zero: Callable[[Key], bool],
    names: Names,
    ping_pong: bool,
    staged: Mapping[Key, int],
    meeting: bool = False,
) -> Pipelined | Reason:
    """The loop in two stages. `zero` tells whether an accumulator is 0 before it. With `ping_pong`
    warpgroups start their products one after the other. `staged` are the stages of shared tiles
    of which two may be held. Where warpgroups are `meeting` in each iteration, the rescale is put
    off as well: to the next iteration's first products, which it does not hold up."""
    graph = Graph(items(loop.body), staged)
    stages = _stages(graph)
    if isinstance(stages, Reason):
        return stages
    order = _order(graph, *stages)
    if isinstance(order, _Order):
        if any(staged[key] == 2 for key in graph.twice(stages[1])):
            order = _with_late_first(graph, order, stages[1])
        elif meeting:
            order = _with_late_rescale(graph, order, stages[1])
    if isinstance(order, Reason):
        return order
    return _Writer(graph, order, zero, names, ping_pong).write(loop)


def _stages(graph: Graph) -> tuple[set[int], set[int]] | Reason:
    """The early products, and all that is deferred by an iteration."""
    gemms = {item.number for item in graph.items if item.gemm}
    inside = [i for i in graph.items if not i.gemm and _multiplies(i.node)]
    if inside:
        why = "a GEMM stands in a branch or a loop inside of this one"
        return Reason(why, inside[0].node.origin)
    if len(gemms) < 2:
        return Reason("it has one GEMM only: there is nothing to overlap it with", ir.Origin())
    early = {n for n in gemms if _from_outside(graph, n)}
    if not early:
        node = graph.items[min(gemms)].node
        return Reason("its first GEMM needs what the same iteration computes", node.origin)
    late: set[int] = set()
    for n in sorted(gemms - early):
        if _only_leaves(graph, n):
            late |= {n} | graph.after({n})
    if not late:
        node = graph.items[max(gemms)].node
        text = "the result of its last GEMM is used in the same iteration"
        return Reason(text, node.origin)
    both = graph.twice(late)
    tiles = _tiles(graph, late) - both
    for item in graph.items:
        twice = [k for k in tiles if k in item.effects.reads and item.number not in late]
        if twice:
            text = f"`{twice[0][0]}` is read by its last GEMM and before that"
            help = "copy it a second time, under another name, for the last GEMM"
            return Reason(text, item.node.origin, help)
    late |= {i.number for i in graph.items if isinstance(i.node, ir.Await) and i.node.key in tiles}
    return early, late


def _tiles(graph: Graph, numbers: set[int]) -> set[Key]:
    """The shared tiles that products read."""
    gemms = (g for n in numbers if (g := graph.items[n].gemm))
    return {key for g in gemms for key in (g.left, g.right) if key[1] == "shared"}


def _multiplies(node: ir.Statement) -> bool:
    return any(isinstance(n, ir.Gemm) for n in ir.flat((node,)))


def _from_outside(graph: Graph, n: int) -> bool:
    """Whether a product needs no other product of the iteration but sums into its accumulator."""
    target = graph.items[n].gemm.target  # type: ignore[union-attr]
    before = (graph.items[k].gemm for k in graph.before[n])
    return all(gemm is None or gemm.target == target for gemm in before)


def _only_leaves(graph: Graph, n: int) -> bool:
    """Whether nothing in the iteration uses a product's result but sums of the same kind."""
    return all(
        isinstance(item.node, (ir.Release, ir.Gemm, ir.Drain))
        or (isinstance(item.node, ir.Compute) and _adds_step(item.node, graph.items[n]))
        for item in (graph.items[k] for k in graph.after({n}))
    )


def _adds_step(node: ir.Compute, item: Item) -> bool:
    return item.gemm is not None and total(node, item.gemm.target) is not None


# --- the order --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """Numbers of items, part by part, in the order in which they run in the steady state."""

    head: list[int]
    early: list[int]
    late: list[int]
    middle: list[int]
    """Until the factors of the late products' accumulators are known."""
    give: list[int]
    """The early products' tiles are released."""
    settle: list[int]
    """What is left of the late stage: releases, steps that are added."""
    rescale: list[int]
    """What is done with the late products' accumulators."""
    rest: list[int]
    rescale_late: bool = False
    """The rescale stands before the late products, in the next iteration."""
    late_first: bool = False
    """The late products stand before the early ones."""

    def steady(self) -> list[int]:
        """The numbers of all items, as they follow each other in the loop."""
        early, moved = [*self.head, *self.early], [*self.middle, *self.give]
        if self.late_first:
            return [*self.late, *early, *self.settle, *moved, *self.rescale, *self.rest]
        if self.rescale_late:
            return [*early, *self.rescale, *self.late, *moved, *self.settle, *self.rest]
        return [*early, *self.late, *moved, *self.settle, *self.rescale, *self.rest]


def _with_late_first(graph: Graph, order: _Order, late: set[int]) -> _Order | Reason:
    """The order for a tile that is held in two stages and has no third: the late products are done
    first, so that the next value of the tile comes while the early ones and the softmax run."""
    found = replace(order, late_first=True)
    return found if _legal(graph, found, late) else _unordered(graph)


def _with_late_rescale(graph: Graph, order: _Order, late: set[int]) -> _Order:
    """The order with the rescale right before the late products, if nothing else needs it."""
    moved = {*order.rescale}
    found = replace(order, rescale_late=True)
    alone = moved and graph.after(moved) <= late | moved
    plain = not any(isinstance(graph.items[n].node, ir.Compute) for n in order.settle)
    return found if alone and plain and _legal(graph, found, late | moved) else order


def _order(graph: Graph, early: set[int], late: set[int]) -> _Order | Reason:
    everything = range(len(graph.items))
    stage0 = [n for n in everything if n not in late]
    last_late = max(n for n in late if graph.items[n].gemm)
    start = [n for n in sorted(late) if n <= last_late]
    settle = [n for n in sorted(late) if n > last_late]
    both = graph.twice(late)

    def held(n: int) -> bool:
        """Whether an item has to wait for the late stage of the iteration before."""
        return any(_across(graph, k, n, both) for k in late)

    bound = [n for n in stage0 if held(n)]
    head = _head(graph, stage0, early, set(bound))
    for n in (*head, *sorted(early)):
        if n in bound:
            text = "its first GEMM has to wait for the last one of the iteration before"
            return Reason(text, graph.items[n].node.origin)
    placed = {*head, *early}
    sums = {tile_name(g.target) for n in late if (g := graph.items[n].gemm)}
    sums |= {r for n in settle for r in graph.items[n].effects.writes if isinstance(r, str)}
    operands = [n for n in bound if not graph.items[n].effects.all & sums]
    rescale = [n for n in bound if n not in operands and not graph.before[n] & set(operands)]
    give = [n for n in stage0 if n not in placed and _ring_only(graph.items[n].node)]
    give = [n for n in give if graph.before[n] <= placed]
    ready = set().union(*(graph.before[n] for n in rescale)) if rescale else set(stage0)
    if not rescale:
        after = graph.after(set(bound)) | set(bound)
        ready -= after
    middle = [n for n in stage0 if n in ready and n not in placed and n not in give]
    middle = [n for n in middle if n not in bound]
    middle = _with_cheap(graph, stage0, middle, {*placed, *give, *bound})
    rest = [n for n in stage0 if n not in {*placed, *give, *middle, *rescale}]
    order = _Order(head, sorted(early), start, middle, give, settle, rescale, rest)
    return order if _legal(graph, order, late) else _unordered(graph)


def _across(graph: Graph, late: int, n: int, both: frozenset[Key]) -> bool:
    """Whether an item has to stay behind a late one of the iteration before, which has another
    stage of the tiles in `both`."""
    one, other = (graph.items[k].effects.without(both) for k in (late, n))
    return one.conflicts(other)


def _unordered(graph: Graph) -> Reason:
    return Reason("its statements depend on each other in a circle", graph.items[0].node.origin)


def _head(graph: Graph, stage0: list[int], early: set[int], bound: set[int]) -> list[int]:
    """What stands before the first product or is needed by the early ones, and loads to registers
    that need nothing computed: these are under way meanwhile. What has to wait for the late stage
    of the iteration before is not hurried."""
    needed = set().union(*(graph.before[n] for n in early)) - early
    waits = bound | graph.after(bound)
    light = (ir.Define, ir.Fill)
    above = {n for n in stage0 if n < min(early) and isinstance(graph.items[n].node, light)} - waits
    fills = {
        n
        for n in stage0
        if isinstance(graph.items[n].node, ir.Fill)
        and all(isinstance(graph.items[k].node, (*light, ir.Await)) for k in graph.before[n])
    }
    closed = needed | above | fills
    closed |= set().union(*(graph.before[n] for n in closed)) if closed else set()
    return sorted(closed - early)


def _ring_only(node: ir.Statement) -> bool:
    """Whether a statement only hands tiles back."""
    if isinstance(node, ir.Branch):
        return all(_ring_only(n) or isinstance(n, ir.Define) for n in (*node.then, *node.orelse))
    return isinstance(node, (ir.Release, ir.Refill))


def _with_cheap(graph: Graph, stage0: list[int], middle: list[int], done: set[int]) -> list[int]:
    """With the assignments to vectors that need nothing more: a name local to the row that one of
    them keeps need not be kept otherwise."""
    found = set(middle)
    for n in stage0:
        if n in found or n in done:
            continue
        node = graph.items[n].node
        if isinstance(node, ir.Compute) and not node.assigns and n < max(found, default=0):
            found.add(n)
        vector = (
            isinstance(node, ir.Compute)
            and node.assigns
            and all(a.target.axes == ROW and isinstance(a.value, Leaf) for a in node.assigns)
        )
        if vector and graph.before[n] <= found | done:
            found.add(n)
    return sorted(found)


def _legal(graph: Graph, order: _Order, late: set[int]) -> bool:
    """Whether every item stands behind what it depends on, in this iteration or the one before."""
    steady = order.steady()
    place = {n: position for position, n in enumerate(steady)}
    if sorted(steady) != list(range(len(graph.items))):
        return False
    for item in graph.items:
        for n in graph.before[item.number]:
            same_stage = (n in late) == (item.number in late)
            if (same_stage or n in late) and place[n] > place[item.number]:
                return False
    both = graph.twice(late)
    return all(
        place[n] < place[m]
        for n in late
        for m in place
        if m not in late and _across(graph, n, m, both)
    )


# --- the statements ---------------------------------------------------------------------------


@dataclass
class _Writer:
    """Puts the items of an order back together as statements."""

    graph: Graph
    order: _Order
    zero: Callable[[Key], bool]
    names: Names
    ping_pong: bool

    def write(self, loop: ir.Loop) -> Pipelined | Reason:
        order, late = self.order, {*self.order.late, *self.order.settle}
        reads = {
            loop.var,
            *(i.node.name for i in self.graph.items if isinstance(i.node, ir.Define)),
        }
        for n in sorted(late):
            if self.graph.items[n].effects.reads & reads:
                text = "what is deferred to the next iteration depends on the loop's variable"
                return Reason(text, self.graph.items[n].node.origin)
        middle, rescale, rest = self._together(order.middle, order.rescale, order.rest)
        settle, started = self._nodes(order.settle), self._nodes(order.late)
        anew = () if self._stays_zero(rescale) else rescale
        again: tuple[ir.Statement, ...] = rescale
        last: tuple[ir.Statement, ...] = ()
        if any(isinstance(n, ir.Compute) for n in settle):
            stepped = _stepped(rescale, settle, reads, self.names)
            if stepped is None:
                return Reason("an fp8 sum is changed in more than one way", rescale[0].origin)
            anew, again, last = stepped
            settle = tuple(n for n in settle if not isinstance(n, ir.Compute))
        if order.rescale_late:
            started, anew, again = (*rescale, *started), (), ()
        wait, signal = (
            ((ir.PingPong(step),) for step in ("wait", "signal")) if self.ping_pong else ((), ())
        )
        head, early = (self._nodes(part) for part in (order.head, order.early))
        released = self._nodes(order.give)
        known = _known(middle)
        held = tuple(replace(n, known=known) if isinstance(n, ir.Release) else n for n in released)
        first = (*head, *early, *released, *middle, *anew, *rest)
        both = self.graph.twice(late)
        above, first_products = (_ahead(part, both) for part in (head, early))
        steady = (
            *(*above, *wait, *first_products, *started, *signal, *middle, *held),
            *(*settle, *again, *rest),
        )
        if order.late_first:
            products = (*wait, *started, *above, *first_products, *signal)
            steady = (*products, *settle, *middle, *held, *again, *rest)
        tiles = frozenset(_tiles(self.graph, late)) - both
        return Pipelined(first, steady, (*started, *settle, *last), tiles)

    def _nodes(self, numbers: Sequence[int]) -> tuple[ir.Statement, ...]:
        return self._together(numbers)[0]

    def _stays_zero(self, rescale: tuple[ir.Statement, ...]) -> bool:
        """Whether what is done with the accumulators changes nothing in the first iteration."""
        assigns = [a for n in rescale if isinstance(n, ir.Compute) for a in n.assigns]
        return all(isinstance(n, ir.Compute) for n in rescale) and all(
            isinstance(a.value, Op)
            and a.value.op == "*"
            and a.target in a.value.args
            and a.buffer is not None
            and self.zero((a.buffer.name, "register"))
            for a in assigns
        )

    def _together(self, *parts: Sequence[int]) -> tuple[tuple[ir.Statement, ...], ...]:
        """Items of one statement that follow each other are one statement again."""
        pieces: list[list[list[Item]]] = []
        for numbers in parts:
            pieces.append([])
            for n in numbers:
                item = self.graph.items[n]
                if pieces[-1] and _follows(pieces[-1][-1][-1], item):
                    pieces[-1][-1].append(item)
                else:
                    pieces[-1].append([item])
        flat = [piece for part in pieces for piece in part]
        made = iter(self._lasting(flat))
        return tuple(tuple(next(made) for _ in part) for part in pieces)

    def _lasting(self, pieces: list[list[Item]]) -> list[ir.Statement]:
        """The pieces as statements. A name local to the row that a later piece uses is read from
        a vector that has its value, or becomes a vector."""
        nodes = [_joined(piece) for piece in pieces]
        for number, piece in enumerate(pieces):
            node = nodes[number]
            if not isinstance(node, ir.Compute):
                continue
            own = [n for n, p in enumerate(pieces) if p[0].statement == piece[0].statement]
            later = [n for n in own if n > number]
            for assign in node.assigns:
                if assign.buffer is None and not assign.kept:
                    self._carry(nodes, number, later, assign.target)
        return nodes

    def _carry(self, nodes: list[ir.Statement], number: int, later: list[int], name: Leaf) -> None:
        node = nodes[number]
        assert isinstance(node, ir.Compute)
        users = [n for n in later if _uses(nodes[n], name)]
        if not users:
            return
        same = [a for a in node.assigns if a.value == name and _exact_vector(a)]
        vector = same[-1].target if same else None
        between = [n for k in range(number + 1, users[-1]) for n in (nodes[k],)]
        if vector and not any(variable(vector) in effects(n).writes for n in between):
            for n in users:
                nodes[n] = _renamed(nodes[n], {name.term: vector})
            return
        assert isinstance(name.term, Var)
        kept = element(self.names.fresh(f"{name.term.name}s"), ROW)
        made = _renamed(node, {name.term: kept})
        assert isinstance(made, ir.Compute)
        nodes[number] = replace(made, kept=(*made.kept, variable(kept)))
        for n in users:
            nodes[n] = _renamed(nodes[n], {name.term: kept})


def _ahead(nodes: Sequence[ir.Statement], keys: frozenset[Key]) -> tuple[ir.Statement, ...]:
    """Waits for the younger values of these tiles, and products that read them."""

    def change(node: ir.Statement) -> ir.Statement:
        if isinstance(node, ir.Await):
            return replace(node, ahead=node.key in keys)
        return replace(node, ahead=node.right in keys) if isinstance(node, ir.Gemm) else node

    return tuple(map(change, nodes))


def _exact_vector(assign: ir.Assign) -> bool:
    """Whether a vector has just the value that it is given."""
    fp32 = assign.buffer is not None and assign.buffer.dtype == "fp32"
    return fp32 and assign.target.axes == ROW


def _follows(before: Item, item: Item) -> bool:
    return (
        before.statement == item.statement
        and isinstance(item.node, ir.Compute)
        and item.number > before.number
    )


def _joined(piece: list[Item]) -> ir.Statement:
    first = piece[0].node
    if len(piece) == 1 or not isinstance(first, ir.Compute):
        return first
    assigns = tuple(
        a for item in piece if isinstance(item.node, ir.Compute) for a in item.node.assigns
    )
    return replace(first, assigns=assigns)


def _uses(node: ir.Statement, name: Leaf) -> bool:
    return isinstance(node, ir.Compute) and any(name in leaves(a.value) for a in node.assigns)


def _renamed(node: ir.Statement, new: Mapping[Term, Leaf]) -> ir.Statement:
    assert isinstance(node, ir.Compute)
    return replace(node, assigns=tuple(ir.renamed(assign, new) for assign in node.assigns))


def _known(middle: Sequence[ir.Statement]) -> str:
    """The last vector that is made before the wait for the late products: a tile that is released
    between them is released when its value is there, which holds the wait in its place."""
    vectors = [
        variable(a.target)
        for node in middle
        if isinstance(node, ir.Compute)
        for a in node.assigns
        if a.buffer and len(a.buffer.shape) == 1
    ]
    return vectors[-1] if vectors else ""


def _stepped(
    rescale: Sequence[ir.Statement],
    settle: Sequence[ir.Statement],
    varying: set[str],
    fresh: Names,
) -> tuple[tuple[ir.Statement, ...], tuple[ir.Statement, ...], tuple[ir.Statement, ...]] | None:
    """A late product that is a step (fp8_sums.py): the sum is rescaled where the step is added, by
    what the iteration before knew. What this one knows is noted for that: in the first iteration,
    in the others, and behind the loop. `varying` are names with another value in each."""
    adds = [n for n in settle if isinstance(n, ir.Compute)]
    if len(adds) != 1:
        return None
    (add,) = adds
    if not rescale:
        return (), (add,), (add,)
    assigns = [a for node in rescale if isinstance(node, ir.Compute) for a in node.assigns]
    if len(assigns) != 1 or assigns[0].target != add.assigns[0].target:
        return None
    others = [leaf for leaf in leaves(assigns[0].value) if leaf != assigns[0].target]
    parts = {part for leaf in others for part in walk(leaf.term)}
    if any(leaf.axes == TILE for leaf in others):
        return None
    if any(isinstance(part, Var) and part.name in varying for part in parts):
        return None
    names = sorted({part.name for part in parts if isinstance(part, At)})
    before = {
        element(name, ROW).term: element(fresh.fresh(f"{name}_before"), ROW) for name in names
    }
    scaled = {assigns[0].target.term: with_leaves(assigns[0].value, before)}
    added = replace(add.assigns[0], value=with_leaves(add.assigns[0].value, scaled))
    joint = replace(add, assigns=(added,))
    noted = replace(
        add,
        assigns=tuple(
            ir.Assign(target, Leaf(name, ROW), kept=True) for name, target in before.items()
        ),
        kept=tuple(variable(target) for target in before.values()),
    )
    return (noted,), (joint, noted), (joint,)


def kept_vectors(body: tuple[ir.Statement, ...]) -> dict[str, int]:
    """The vectors that passes made, and the rows of their tiles."""
    return {
        name: node.shape[0]
        for node in ir.flat(body)
        if isinstance(node, ir.Compute)
        for name in node.kept
    }
