"""Numbers that a computation reads from a tensor, such as a slope for each head, are read before
the loop if their place does not change in it. The compiler does not do this by itself, since
barriers and copies may change memory as far as it knows. (What a loop reads by its own number, such
as the next block of a list, could be read an iteration ahead. That was not faster.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from flashwright.lower import ir
from flashwright.lower.element import leaves
from flashwright.lower.names import Names
from flashwright.lower.term import (
    ZERO,
    Read,
    Select,
    Term,
    Var,
    parts,
    real,
    rebuilt,
    substitute,
    variables,
    walk,
)


def read_before_loops(
    body: tuple[ir.Statement, ...], names: Names, written: frozenset[str]
) -> tuple[ir.Statement, ...]:
    """The statements with such reads before the loops; `written` are tensors that may change."""
    out: list[ir.Statement] = []
    for node in body:
        if isinstance(node, ir.Loop):
            reads = list(dict.fromkeys(_steady(node, written)))
            found = {read: names.fresh(f"{read.tensor}_here") for read in reads}
            out += [_define(read, name, node) for read, name in found.items()]
            node = replace(node, body=ir.changed(node.body, partial(_renamed, found=found)))
        out.append(node)
    return tuple(out)


def _define(read: Read, name: str, loop: ir.Loop) -> ir.Define:
    """The read before the loop. One without iterations may have no such place."""
    once = substitute(loop.condition, {loop.var: loop.low})
    nothing = ZERO if read.type == "int" else real(0.0)
    return ir.Define(name, Select(once, read, nothing), origin=loop.origin.untitled)


def _steady(loop: ir.Loop, written: frozenset[str]) -> Iterator[Read]:
    """The reads in a loop's computations whose places do not change in it."""
    inside = ir.defined_names((loop,))
    for node in loop.body:
        for assign in node.assigns if isinstance(node, ir.Compute) else ():
            for term in (part for leaf in leaves(assign.value) for part in walk(leaf.term)):
                if isinstance(term, Read) and not (variables(term) & inside):
                    yield from [term] if term.tensor not in written else []


def _renamed(node: ir.Statement, found: dict[Read, str]) -> ir.Statement:
    """A computation with names in the place of reads."""
    if not isinstance(node, ir.Compute):
        return node
    each = (leaf for assign in node.assigns for leaf in leaves(assign.value))
    new = {leaf.term: replace(leaf, term=_named(leaf.term, found)) for leaf in each}
    return replace(node, assigns=tuple(ir.renamed(assign, new) for assign in node.assigns))


def _named(term: Term, found: dict[Read, str]) -> Term:
    if isinstance(term, Read) and term in found:
        return Var(found[term], term.type)
    return rebuilt(term, tuple(_named(part, found) for part in parts(term)))
