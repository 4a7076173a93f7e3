"""Checks of a fragment that declares too little to be run.

A model often sends the body of a loop alone. Its names are undefined, but two mistakes can still be
found: a missing Reshape between fused GEMMs, and a K without its transpose (listings 1 and 2 of the
paper).
"""

from __future__ import annotations

from collections.abc import Iterator

from flashwright.check.names import Names
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix
from flashwright.lang.nodes import Compute, Copy, Expr, Name, Reshape, expressions, statements
from flashwright.program.fixes import missing_reshape
from flashwright.program.vocabulary import split


def check_fragment(names: Names) -> Iterator[Diagnostic]:
    """Findings about tiles without an Allocate; other checks handle the allocated ones."""
    products: dict[str, Compute] = {}  # tile -> the GEMM it comes from, still in the layout MMA_C
    for stmt in statements(names.tree.body):
        match stmt:
            case Reshape(name):
                products.pop(_base(stmt.target or name), None)
            case Copy(name):
                if stmt.dest == "register":
                    products.pop(_base(stmt.target or name), None)
            case Compute():
                yield from _compute(stmt, products, names)


def _compute(stmt: Compute, products: dict[str, Compute], names: Names) -> Iterator[Diagnostic]:
    verb = stmt.operation
    made = [products[_base(n)] for a in stmt.args for n in _tiles(a) if _base(n) in products]
    if verb == "softmax" and made:
        yield from _transpose(made[0], names)
    if verb == "gemm" and len(stmt.args) == 2:
        left = stmt.args[0]
        if isinstance(left, Name) and _base(left) in products and not _held(left, names):
            yield missing_reshape(stmt, left)
        made = [stmt]
    if stmt.target is not None:
        products.pop(_base(stmt.target), None)
        if made:
            products[_base(stmt.target)] = made[0]


def _transpose(gemm: Compute, names: Names) -> Iterator[Diagnostic]:
    """FW503 if the scores of a Softmax come from a GEMM without a transpose."""
    left, right = gemm.args
    if isinstance(left, Name) and isinstance(right, Name) and not _held(right, names):
        text = f"the scores sum over the head dimension, but `{right.id}` has keys as its rows"
        edit = Edit(right.span.end, right.span.end, ".T")
        fix = Fix(f"transpose it: `{right.id}.T`", (edit,))
        yield Diagnostic("FW503", text, gemm.span, fix=fix)


def _base(name: Name) -> str:
    return split(name.id)[0]


def _tiles(expr: Expr) -> list[Name]:
    """The names that may be register tiles."""
    names = [e for e in expressions(expr) if isinstance(e, Name)]
    return [n for n in names if split(n.id)[1] in (None, "register")]


def _held(name: Name, names: Names) -> bool:
    base = _base(name)
    return base in names.tensors or any(b == base for b, _ in names.buffers)
