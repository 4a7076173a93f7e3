"""What the mutation operators must know of a program: places, reads and writes, sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashwright.check.names import Names
from flashwright.gpu import Gpu
from flashwright.lang.nodes import (
    Allocate,
    Comment,
    Compute,
    Copy,
    Expr,
    For,
    If,
    Index,
    Let,
    Name,
    Num,
    Reshape,
    Statement,
    Transpose,
    Tree,
    Unary,
    expressions,
    statements,
)
from flashwright.program.kernels import sections
from flashwright.program.vocabulary import split

Path = tuple[Any, ...]
"""Indices and, between them, the part of the loop or branch entered: (12, "body", 3)."""


@dataclass(frozen=True)
class Site:
    """A statement and where it stands."""

    path: Path
    stmt: Statement
    body: tuple[Statement, ...]
    owners: tuple[For | If, ...]

    @property
    def index(self) -> int:
        return self.path[-1]


def sites(tree: Tree) -> Iterator[Site]:
    """Every statement, in program order."""
    yield from _sites(tree.body, (), ())


def _sites(body: tuple[Statement, ...], path: Path, owners: tuple[Any, ...]) -> Iterator[Site]:
    for i, stmt in enumerate(body):
        here = (*path, i)
        yield Site(here, stmt, body, owners)
        for part in _parts(stmt):
            yield from _sites(getattr(stmt, part), (*here, part), (*owners, stmt))


def _parts(stmt: Statement) -> tuple[str, ...]:
    if isinstance(stmt, For):
        return ("body",)
    return ("then", "orelse") if isinstance(stmt, If) else ()


def put(tree: Tree, path: Path, new: tuple[Statement, ...]) -> Tree:
    """The tree with the statement at the path replaced by others, or by none."""
    return Tree(_put(tree.body, path, new, 1))


def insert(tree: Tree, path: Path, stmt: Statement) -> Tree:
    """The tree with a statement put before what stands at the path."""
    return Tree(_put(tree.body, path, (stmt,), 0))


def _put(
    body: tuple[Statement, ...], path: Path, new: tuple[Statement, ...], drop: int
) -> tuple[Statement, ...]:
    at = path[0]
    if len(path) == 1:
        return (*body[:at], *new, *body[at + drop :])
    inner = _put(getattr(body[at], path[1]), path[2:], new, drop)
    return (*body[:at], replace(body[at], **{path[1]: inner}), *body[at + 1 :])


# --- what a statement touches -----------------------------------------------------------------


def is_verb(stmt: Statement, verb: str) -> bool:
    return isinstance(stmt, Compute) and stmt.verb is not None and stmt.verb.id.lower() == verb


def is_start(stmt: Statement, site: Site) -> bool:
    """A tile set, before the loop, to a number or to an element of a tensor."""
    if not isinstance(stmt, Compute) or stmt.verb is not None or len(site.path) > 1:
        return False
    value = stmt.args[0]
    if isinstance(value, Unary):
        value = value.operand
    return isinstance(value, (Num, Index))


def name_of(arg: Expr) -> str:
    name = arg.operand if isinstance(arg, Transpose) else arg
    return name.id if isinstance(name, Name) else ""


def names(expr: Expr) -> Iterator[Name]:
    return (e for e in expressions(expr) if isinstance(e, Name))


def _key(name: str) -> str:
    """A buffer's key: `Q in shared`; a plain name is a tile in registers, or a scalar."""
    base, space = split(name)
    return f"{base} in {space or 'register'}"


def reads(stmt: Statement) -> set[str]:
    """Buffers and scalars whose values a statement (with all inside it) uses."""
    found: set[str] = set()
    for part in statements((stmt,)):
        if isinstance(part, Copy):
            found.add(f"{split(part.name.id)[0]} in {part.source}")
            for coord in part.coords or ():
                found |= {_key(n.id) for n in names(coord.value)}
        elif isinstance(part, (Compute, Let, For, If, Reshape)):
            found |= {_key(e.id) for e in expressions(part) if isinstance(e, Name)}
            if isinstance(part, Compute) and part.mode == "get" and part.target is not None:
                used = {_key(n.id) for a in part.args for n in names(a)}
                found -= {_key(part.target.id)} - used
    return found


def writes(stmt: Statement) -> set[str]:
    """Buffers and scalars that a statement (with all inside it) changes."""
    found: set[str] = set()
    for part in statements((stmt,)):
        if isinstance(part, Copy):
            found.add(f"{split((part.target or part.name).id)[0]} in {part.dest}")
        elif isinstance(part, Compute):
            held = [*part.state, *part.rescale, *([part.target] if part.target else [])]
            if is_verb(part, "mask") or is_verb(part, "softmax"):
                held.append(part.args[0])
            found |= {_key(n.id) for n in held}
        elif isinstance(part, Reshape):
            found.add(_key((part.target or part.name).id))
        elif isinstance(part, (Let, For)):
            found.add(_key(part.name.id if isinstance(part, Let) else part.var.id))
    return found


def commutes(stmt: Statement, others: Sequence[Statement]) -> bool:
    """Whether a statement may go past others without a change of meaning."""
    mine, uses = writes(stmt), reads(stmt)
    return all(not mine & (reads(s) | writes(s)) and not uses & writes(s) for s in others)


def touches(stmt: Statement, other: Statement) -> bool:
    """Whether a statement reads or writes a tile that the other writes."""
    return bool((reads(stmt) | writes(stmt)) & writes(other))


def related(tree: Tree, site: Site) -> frozenset[int]:
    """Where the lack of a statement may show: its loop and branch, and, in the loop it stood in
    (or in the whole program, if in none), what reads or writes or allocates its tiles."""
    loops = [o for o in site.owners if isinstance(o, For)]
    around = loops[-1].body if loops else tree.body
    tiles = writes(site.stmt)
    for part in statements((site.stmt,)):
        if isinstance(part, Copy) and part.source != "global":
            tiles.add(f"{split(part.name.id)[0]} in {part.source}")
    lines = {o.span.line for o in site.owners} | _header(tree, site)
    for stmt in statements(around):
        if isinstance(stmt, Allocate):
            hit = f"{split(stmt.name.id)[0]} in {stmt.space}" in tiles
        elif isinstance(stmt, (For, If)):
            hit = False
        else:
            hit = bool((reads(stmt) | writes(stmt)) & tiles)
        if hit and stmt is not site.stmt:
            lines.add(stmt.span.line)
    return frozenset(lines)


def _header(tree: Tree, site: Site) -> set[int]:
    """In a program of several kernels: the grid of the one that a statement stood in, and, if it
    was the last there, the statement before it."""
    _, *kernels = sections(tree)
    own = next((k for k in kernels if site.stmt in k), ()) if len(kernels) > 1 else ()
    acts = [s for s in own if not isinstance(s, Comment)]
    last = [acts[-2].span.line] if acts and acts[-1] is site.stmt else []
    return {*(s.span.line for s in acts[:1]), *last}


def first_action(tree: Tree) -> int:
    """Where the declarations end: the place of the first Copy or Compute."""
    return next(i for i, s in enumerate(tree.body) if isinstance(s, (Copy, Compute)))


def over_budget(tree: Tree, gpu: Gpu) -> bool:
    """Whether the tiles of a kernel alone need more shared memory or registers than there are."""
    shared, *kernels = sections(tree)
    return any(_too_large(Tree((*shared, *own)), gpu, len(kernels) > 1) for own in kernels)


def _too_large(tree: Tree, gpu: Gpu, backward: bool) -> bool:
    """Of a backward pass the sums count: other tiles take turns in the registers."""
    found = Names(tree)
    sums = {s.target.id for s in statements(tree.body) if getattr(s, "mode", "") == "accumulate"}
    warps = int(found.params.get("Warps", 4))
    need = {"shared": 0, "register": 0}
    for buffer in found.buffers.values():
        if buffer.space == "shared" or not backward or f"{buffer.name}_register" in sums:
            need[buffer.space] += buffer.bytes * buffer.stages
    registers = 4 * 32 * warps * gpu.register_limit(warps)
    return need["shared"] > gpu.shared_per_block or need["register"] > registers
