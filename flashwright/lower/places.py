"""Where the tiles lie: positions of rows and columns, as expressions of the program."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flashwright.check.scalars import NotScalar, Unknown, Value, evaluate
from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary, expressions

ZERO = Num("0")


@dataclass(frozen=True)
class Where:
    """A tile's extent on one axis: on which dimension, at which coordinate (counted in tiles)."""

    dim: str
    coord: Expr
    size: int
    label: str


Axes = tuple[Where | None, ...]


def _put(expr: Expr, old: Expr, new: Expr) -> Expr:
    """The expression with a part of it replaced, wherever it stands."""
    if expr == old:
        return new
    match expr:
        case Unary(_, operand):
            return replace(expr, operand=_put(operand, old, new))
        case Binary(_, left, right):
            return replace(expr, left=_put(left, old, new), right=_put(right, old, new))
        case Call(_, args):
            return replace(expr, args=tuple(_put(a, old, new) for a in args))
    return expr


class Places:
    """Compares coordinates by their values on made-up problems; lets are looked through."""

    def __init__(self, known: Mapping[str, Value]) -> None:
        self.known = known
        self.lets: dict[str, Expr] = {}

    def same(self, a: Expr, b: Expr) -> bool:
        """Whether two coordinates always agree."""
        return a == b or all(self._at(a, trial) == self._at(b, trial) for trial in range(5))

    def agree(self, a: Where | None, b: Where | None) -> bool:
        """Whether two axes are the same positions."""
        if a is None or b is None:
            return False
        return a.dim == b.dim and a.size == b.size and self.same(a.coord, b.coord)

    def joined(
        self, before: Where | None, after: Where | None, low: Expr, var: Name
    ) -> Where | None:
        """The place at the top of a loop's body: as it was, or stepping along with the loop."""
        if before is None or after is None:
            return None
        if self.agree(before, after):
            return before
        ahead = Binary("+", var, Num("1"))
        steps = self.same(after.coord, ahead)
        if before.dim == after.dim and self.same(before.coord, low) and steps:
            return Where(before.dim, var, before.size, before.label)
        # Any other expression of the loop's variable, which the body leaves one round ahead.
        coord = _put(after.coord, ahead, var)
        whole = _put(coord, var, ahead) == after.coord
        if before.dim == after.dim and whole and before.coord == _put(coord, var, low):
            return Where(before.dim, coord, before.size, before.label)
        return None

    def _at(self, expr: Expr, trial: int) -> object:
        env = {n.id: self._value(n.id, trial, 0) for n in expressions(expr) if isinstance(n, Name)}
        try:
            return evaluate(expr, env, lambda e, index: self._element(e, index, trial))
        except NotScalar:
            return None

    def _value(self, name: str, trial: int, depth: int) -> Value:
        if name in self.known:
            return self.known[name]
        if name in self.lets and depth < 20:
            inner = self.lets[name]
            names = {n.id for n in expressions(inner) if isinstance(n, Name)}
            env = {n: self._value(n, trial, depth + 1) for n in names}
            try:
                return evaluate(inner, env, lambda e, index: self._element(e, index, trial))
            except NotScalar:
                return Unknown(name)
        return 100 + zlib.crc32(f"{name} {trial}".encode()) % 900

    def _element(self, expr: Index, index: tuple[Value, ...], trial: int) -> Value:
        return zlib.crc32(f"{expr.tensor.id} {index} {trial}".encode()) % 900
