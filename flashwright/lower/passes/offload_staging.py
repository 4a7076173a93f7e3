"""Elementwise work between two shared tiles is left to the helper warps, where it needs
nothing that the consumers compute (device/fw/helpers.cuh).

`Copy V from shared to register`, `Compute V * Gate and get new V`, `Copy V from register to shared
and get Vg` (one statement by now, fuse_staging.py) would have all consumers meet twice in every
iteration. With the work left to helper warps, V is a ring that these empty, and Vg one that they
fill: consumers wait for Vg as for any tile, and go on with softmax meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import leaves
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import together
from flashwright.lower.passes.rings import consuming, producing
from flashwright.lower.term import At, walk
from flashwright.program.program import Buffer, Key

Body = tuple[ir.Statement, ...]


def offloaded(body: Body, rings: frozenset[Key], buffers: Mapping[Key, Buffer]) -> Body:
    """The body with every statement marked that helper warps can do: it reads one of the rings
    that TMA fills, and besides that scalars and vectors that are read from global memory. A ring
    that consumers read, too, has a stage for what they still hold."""
    nodes = list(ir.flat(body))
    others = together(n for n in nodes if not isinstance(n, (ir.Loop, ir.Branch, ir.Restage)))
    rings = frozenset(k for k in rings if k not in others.reads or buffers[k].stages > 1)
    moved = {n.dest for n in nodes if isinstance(n, ir.Move)}
    computed = {(a.buffer.name, "register") for n in nodes for a in _assigns(n) if a.buffer}
    filled = [n.dest for n in nodes if isinstance(n, ir.Fill) and n.window.line]
    lines = {tile_name(k) for k in filled if filled.count(k) == 1 and k not in computed | moved}
    marked = _marked(body, rings, frozenset(lines), frozenset())
    stay = {n.dest for n in ir.flat(marked) if isinstance(n, ir.Restage) and not n.helped}
    return ir.changed(marked, lambda node: _unmarked(node, stay | moved))


def _assigns(node: ir.Statement) -> tuple[ir.Assign, ...]:
    return node.assigns if isinstance(node, ir.Compute) else ()


def _unmarked(node: ir.Statement, stay: set[Key]) -> ir.Statement:
    """All that goes into one tile is done by the same threads."""
    if isinstance(node, ir.Restage) and node.dest in stay:
        return replace(node, helped=False)
    return node


def _marked(body: Body, rings: frozenset[Key], lines: frozenset[str], seen: frozenset[str]) -> Body:
    """`seen` are the vectors that have been filled in this body or around it."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            node = replace(node, body=_marked(node.body, rings, lines, seen))
        elif isinstance(node, ir.Branch):
            then, orelse = (_marked(p, rings, lines, seen) for p in (node.then, node.orelse))
            node = replace(node, then=then, orelse=orelse)
        elif isinstance(node, ir.Fill):
            seen |= {tile_name(node.dest)} & lines
        elif isinstance(node, ir.Restage):
            node = replace(node, helped=node.source in rings and _vectors(node) <= seen)
        out.append(node)
    return tuple(out)


def _vectors(node: ir.Restage) -> set[str]:
    """The vectors in registers that a statement reads."""
    parts = (p for x in leaves(node.value) if x != node.held for p in walk(x.term))
    return {p.name for p in parts if isinstance(p, At)}


def filled_by_helpers(body: Body) -> frozenset[Key]:
    """The tiles that helper warps fill from other shared tiles."""
    return frozenset(n.dest for n in _restages(body))


def sources(body: Body) -> frozenset[Key]:
    """The tiles that helper warps make others of."""
    return frozenset(n.source for n in _restages(body))


def late_sources(body: Body, consumers: Body, late: frozenset[Key]) -> frozenset[Key]:
    """The tiles that are needed one iteration late, by consumers and by helper warps that make
    others of them."""
    read = together(consumers).reads
    needs = {key: {key} & read for key in sources(body)}
    for node in _restages(body):
        needs[node.source].add(node.dest)
    return frozenset(key for key in late | needs.keys() if needs.get(key, {key}) <= late)


def _restages(body: Iterable[ir.Statement]) -> list[ir.Restage]:
    return [n for n in ir.flat(tuple(body)) if isinstance(n, ir.Restage) and n.helped]


def for_consumers(body: Body) -> Body:
    """The consumers' program: a tile that helper warps fill comes like one that is loaded. What
    only helper warps read is gone."""
    windows = {n.dest: n.window for n in ir.flat(body) if isinstance(n, ir.Load)}

    def seen(node: ir.Statement) -> ir.Statement:
        if isinstance(node, ir.Restage) and node.helped:
            return ir.Load(node.dest, windows[node.source], helped=True, origin=node.origin)
        return node

    changed = ir.changed(body, seen)
    vectors = {name for n in _restages(body) for name in _vectors(n)}
    unread = (sources(body) | vectors) - together(changed).reads

    def needed(node: ir.Statement) -> ir.Statement | None:
        load = isinstance(node, ir.Load) and node.dest in unread
        fill = isinstance(node, ir.Fill) and tile_name(node.dest) in unread
        return None if load or fill else node

    return ir.changed(changed, needed)


def for_helpers(body: Body, filled: frozenset[Key], ordered: Callable[[Body], Body]) -> Body:
    """What the helper warps do: they fill these tiles, and take what they need for it from the
    rings that TMA fills."""
    return consuming(ordered(producing(body, filled | sources(body))), set(sources(body)))
