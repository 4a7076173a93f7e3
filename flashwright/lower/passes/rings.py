"""Rings of shared tiles between the producer and the consumers.

The producer keeps the copies and what leads to them; the consumers keep everything else, wait for
a tile where they first need it and release its stage where they last do. Both go through the same
loops and branches, so neither counts: each fills or empties the next stage (device/fw/ring.cuh).

A tile is *structured* if each copy of it, or each branch that copies it in every arm, is followed
in its own body by all that reads it. Then the wait and the release stand around these readers. Any
other tile (a copy in one arm only, a prefetch for the next iteration) is handed back where its next
copy stands, if it is held then, and at the end of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from flashwright.lower import ir
from flashwright.lower.element import leaves
from flashwright.lower.names import tile_name
from flashwright.lower.passes.effects import effects
from flashwright.lower.term import At, Term, Var, walk
from flashwright.program.program import Key

# --- the producer -----------------------------------------------------------------------------


def producing(body: tuple[ir.Statement, ...], keys: Set[Key]) -> tuple[ir.Statement, ...]:
    """What fills these tiles, and the loops, branches, names and vectors that it needs."""
    out: list[ir.Statement] = []
    for node in reversed(body):
        if isinstance(node, ir.Define):
            if node.name in _names(out):
                out.append(node)
        elif isinstance(node, ir.Fill):
            if tile_name(node.dest) in _names(out):
                out.append(replace(node, helped=True))
        elif not _filled(node) & keys:
            continue
        elif isinstance(node, ir.Loop):
            out.append(replace(node, body=producing(node.body, keys)))
        elif isinstance(node, ir.Branch):
            then, orelse = (producing(part, keys) for part in (node.then, node.orelse))
            out.append(replace(node, then=then, orelse=orelse))
        else:
            out.append(node)
    return tuple(reversed(out))


def needed_last(body: tuple[ir.Statement, ...], late: Set[Key]) -> tuple[ir.Statement, ...]:
    """A loop's copies in the order in which overlapped consumers need them: those of the tiles that
    they read one iteration late behind the others. Otherwise the producer would wait for a stage
    that is handed back only after a tile which it has not copied yet."""
    nodes = [part for n in body for part in _split_branch(n, late)]
    tied = {k for n in nodes if not _filled(n) <= late for k in _filled(n)}
    behind = [n for n in nodes if _filled(n) and _filled(n) <= late - tied]
    behind = [n for k, n in enumerate(nodes) if any(n is b for b in behind) and _free(nodes, k)]
    return (*(n for n in nodes if not any(n is b for b in behind)), *behind)


def _split_branch(node: ir.Statement, late: Set[Key]) -> tuple[ir.Statement, ...]:
    """A branch that copies tiles of both kinds as two, one for each."""
    if not isinstance(node, ir.Branch):
        return (node,)
    keys = _filled(node)
    if not keys & late or keys <= late:
        return (node,)
    return (*producing((node,), keys - late), *producing((node,), keys & late))


def _free(nodes: list[ir.Statement], position: int) -> bool:
    """Whether a statement may move behind all that follow it."""
    own = effects(nodes[position])
    return not any(own.conflicts(effects(n)) for n in nodes[position + 1 :])


def _names(nodes: Iterable[ir.Statement]) -> set[str]:
    """The names that copies, and what leads to them, speak of."""
    used: list[Term] = []
    for node in ir.flat(tuple(nodes)):
        match node:
            case ir.Load():
                windows = node.windows  # by TMA, the tensor map knows the bounds
                used += [t for w in windows for t in (w.terms if node.helped else w.coordinates)]
            case ir.Fill(_, window):
                used += window.terms
            case ir.Restage(_, value=value):
                used += [leaf.term for leaf in leaves(value)]
            case ir.Define(_, value):
                used.append(value)
            case ir.Loop(_, low, condition):
                used += [low, condition]
            case ir.Branch(condition):
                used.append(condition)
    parts = (part for term in used for part in walk(term))
    return {part.name for part in parts if isinstance(part, (Var, At))}


def _filled(node: ir.Statement) -> set[Key]:
    """The rings that a role fills with a statement."""
    found: set[Key] = set()
    for inner in ir.flat((node,)):
        match inner:
            case ir.Load(key) | ir.Transpose(key) | ir.Restage(dest=key, helped=True):
                found.add(key)
    return found


# --- the consumers ----------------------------------------------------------------------------


def consuming(body: tuple[ir.Statement, ...], keys: Set[Key]) -> tuple[ir.Statement, ...]:
    """Everything but the copies, with waits and releases for the tiles that the producer fills."""
    structured = {key for key in keys if _structured(body, key, False)}
    loose = keys - structured
    out = _around(body, structured)
    out = _wait_before_each_reader(out, loose)
    return (*_without_loads(out, keys), *(ir.Drain(key) for key in sorted(loose)))


def _structured(body: tuple[ir.Statement, ...], key: Key, held: bool) -> bool:
    """Whether each value of a tile is read only behind the copy in the body that the copy is in."""
    for node in body:
        if _fills_once(node, key):
            held = True
        elif key in _filled(node):
            inner = _bodies(node)
            if held or not all(_structured(part, key, False) for part in inner):
                return False
        elif not held and key in effects(node).reads:
            return False
    return True


def _fills_once(node: ir.Statement, key: Key) -> bool:
    """Whether a statement copies the tile once, whichever way is taken, and does not read it."""
    if isinstance(node, ir.Load):
        return node.dest == key
    if not isinstance(node, ir.Branch):
        return False
    return all(
        sum(_fills_once(n, key) for n in part) == 1
        and all(_fills_once(n, key) or key not in effects(n).all for n in part)
        for part in (node.then, node.orelse)
    )


def _bodies(node: ir.Statement) -> list[tuple[ir.Statement, ...]]:
    if isinstance(node, ir.Loop):
        return [node.body]
    return [node.then, node.orelse] if isinstance(node, ir.Branch) else []


def _around(body: tuple[ir.Statement, ...], keys: Set[Key]) -> tuple[ir.Statement, ...]:
    """Waits before the first reader of each copy and releases behind the last one."""
    before: dict[int, list[ir.Statement]] = {}
    after: dict[int, list[ir.Statement]] = {}
    whole: set[int] = set()  # statements that stand for one copy as a whole
    for position, node in enumerate(body):
        for key in sorted(k for k in keys if _fills_once(node, k)):
            whole.add(position)
            uses = _readers(body, position, key)
            first, last = (uses[0], uses[-1]) if uses else (position, position)
            before.setdefault(first, []).append(ir.Await(key, origin=_copy(node, key).origin))
            after.setdefault(last, []).append(ir.Release(key))
    out: list[ir.Statement] = []
    for position, node in enumerate(body):
        out += before.get(position, [])
        out.append(node if position in whole else _inside(node, keys))
        out += after.get(position, [])
    return tuple(out)


def _readers(body: tuple[ir.Statement, ...], position: int, key: Key) -> list[int]:
    """The statements that read the value of a copy: up to the next copy."""
    found = []
    for n in range(position + 1, len(body)):
        if _fills_once(body[n], key):
            break
        if key in effects(body[n]).reads:
            found.append(n)
    return found


def _copy(node: ir.Statement, key: Key) -> ir.Statement:
    return next(n for n in ir.flat((node,)) if isinstance(n, ir.Load) and n.dest == key)


def _inside(node: ir.Statement, keys: Set[Key]) -> ir.Statement:
    if isinstance(node, ir.Loop):
        return replace(node, body=_around(node.body, keys))
    if isinstance(node, ir.Branch):
        return replace(node, then=_around(node.then, keys), orelse=_around(node.orelse, keys))
    return node


def _wait_before_each_reader(
    body: tuple[ir.Statement, ...], keys: Set[Key]
) -> tuple[ir.Statement, ...]:
    """A wait before every reader, which is over at once where the tile has been waited for, and the
    present stage handed back where the next copy stands."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=_wait_before_each_reader(node.body, keys)))
        elif isinstance(node, ir.Branch):
            then, orelse = (
                _wait_before_each_reader(part, keys) for part in (node.then, node.orelse)
            )
            out.append(replace(node, then=then, orelse=orelse))
        elif isinstance(node, ir.Load) and node.dest in keys:
            out += [ir.Refill(node.dest, origin=node.origin), node]
        else:
            read = sorted(k for k in effects(node).reads if k in keys and not isinstance(k, str))
            out += [ir.Await(key, origin=node.origin.untitled) for key in read]
            out.append(node)
    return tuple(out)


def _without_loads(body: tuple[ir.Statement, ...], keys: Set[Key]) -> tuple[ir.Statement, ...]:
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            out.append(replace(node, body=_without_loads(node.body, keys)))
        elif isinstance(node, ir.Branch):
            then, orelse = _without_loads(node.then, keys), _without_loads(node.orelse, keys)
            if then or orelse:
                out.append(replace(node, then=then, orelse=orelse))
        elif not isinstance(node, ir.Load) or node.dest not in keys:
            out.append(node)
    return tuple(out)
