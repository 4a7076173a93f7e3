"""Where tiles lie: the positions of their rows and columns, as expressions of the program.

Two coordinates are compared in a normal form: a sum of products of what arithmetic does not look
into (names, calls, elements of tensors). Equal forms are equal values, whatever the problem; forms
that differ count as different. Lets are looked through when a position is noted, so that a later
value of the same name does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary, expressions
from flashwright.program.scalars import Value, number
from flashwright.semantics.tiles import KEYS_AS_ROWS, of_heads

ZERO, ONE = Num("0"), Num("1")


@dataclass(frozen=True)
class Where:
    """A tile's extent on one axis: on which dimension, at which coordinate (counted in tiles, or in
    elements)."""

    dim: str
    coord: Expr
    size: int
    label: str
    full: Expr  # the coordinate with lets looked through
    in_elements: bool = False

    @property
    def lost(self) -> bool:
        """Whether the position cannot be told."""
        return self.dim == "?"

    @property
    def counted(self) -> Where:
        """The same position, counted in elements."""
        if self.in_elements or self.lost:
            return self
        coord, full = (Binary("*", x, Num(str(self.size))) for x in (self.coord, self.full))
        return replace(self, coord=coord, full=full, in_elements=True)

    def at(self, coord: Expr) -> Where:
        """The same axis at another coordinate."""
        return replace(self, coord=coord, full=coord)


UNKNOWN = Where("?", ZERO, 0, "?", ZERO)
"""It has a position, which differs with the way that was taken to get here."""
STALE = Where("?", ZERO, 1, "?", ZERO)
"""It holds what the iteration before left, if anything."""

Axes = tuple[Where | None, ...]
Sum = dict[tuple[object, ...], Fraction]
"""For each product of atoms (sorted) its coefficient."""
Form = frozenset[tuple[tuple[object, ...], Fraction]]
"""A sum that can be compared."""


def axis_of(position: str, axes: Axes) -> int | None:
    """The axis of a tile that `q_idx` or `kv_idx` goes along, by the rule of semantics.tiles; None
    where that depends on an axis whose position cannot be told."""
    dims = [w.dim if w is not None else "" for w in axes]
    swapped = [d in (known, "?") for d, known in zip(dims, KEYS_AS_ROWS, strict=False)]
    if len(axes) == 1 or not (swapped[0] and (swapped[1] or of_heads(axes[1]))):
        return min(int(position == "kv_idx"), len(axes) - 1)
    return None if "?" in dims else int(position == "q_idx")


def put(expr: Expr, name: str, value: Expr) -> Expr:
    """The expression with another in the place of a name."""
    match expr:
        case Name(id):
            return value if id == name else expr
        case Unary(_, operand):
            return replace(expr, operand=put(operand, name, value))
        case Binary(_, left, right):
            return _tidy(replace(expr, left=put(left, name, value), right=put(right, name, value)))
        case Call(_, args) | Index(_, args):
            return replace(expr, args=tuple(put(a, name, value) for a in args))
    return expr


def _tidy(expr: Binary) -> Expr:
    """`x - 1 + 1` as `x`."""
    match expr:
        case Binary("+" | "-" as op, Binary("+" | "-" as first, inner, Num(a)), Num(b)) if (
            a.isdigit() and b.isdigit()
        ):
            total = (int(a) if first == "+" else -int(a)) + (int(b) if op == "+" else -int(b))
            if total == 0:
                return inner
            return replace(
                expr, op="+" if total > 0 else "-", left=inner, right=Num(str(abs(total)))
            )
    return expr


def either(condition: Expr, yes: Expr, no: Expr) -> Call:
    """The expression `where(condition, yes, no)`; one of the two where they are the same."""
    return Call(Name("where"), (condition, yes, no))


def condition_of(var: Expr, high: Expr) -> Binary:
    """The condition under which a loop goes on."""
    return Binary("<", var, high)


def alike(a: Where, b: Where) -> tuple[Where, Where]:
    """Two positions counted alike."""
    return (a, b) if a.in_elements == b.in_elements else (a.counted, b.counted)


class Positions:
    """Compares positions and follows them through branches and loops."""

    def __init__(self, known: Mapping[str, Value]) -> None:
        self.known = known
        self.lets: dict[str, Expr] = {}
        self._exprs: dict[object, Expr] = {}  # of atoms

    def let(self, name: str, value: Expr) -> None:
        """Note what a name stands for from here on."""
        self.lets[name] = self.full(value)

    def full(self, expr: Expr) -> Expr:
        """The expression with lets looked through."""
        for name in {e.id for e in expressions(expr) if isinstance(e, Name)} & self.lets.keys():
            expr = put(expr, name, self.lets[name])
        return expr

    def current(self, place: Where) -> Expr:
        """A position's coordinate as one can say it here: with lets that still mean the same."""
        return (
            place.coord
            if self.full(place.coord) == place.full != place.coord
            else self._named(place.full)
        )

    def _named(self, expr: Expr) -> Expr:
        """The expression with lets in the place of what they stand for."""
        for name, value in self.lets.items():
            if expr == value and not isinstance(value, (Name, Num)):
                return Name(name)
        match expr:
            case Unary(_, operand):
                return replace(expr, operand=self._named(operand))
            case Binary(_, left, right):
                return replace(expr, left=self._named(left), right=self._named(right))
            case Call(_, args) | Index(_, args):
                return replace(expr, args=tuple(map(self._named, args)))
        return expr

    def same(self, a: Expr, b: Expr) -> bool:
        """Whether two coordinates always agree."""
        return a == b or self.form(a) == self.form(b)

    def agree(self, a: Where | None, b: Where | None) -> bool:
        """Whether two axes are the same positions."""
        if a is None or b is None or a.lost or b.lost:
            return False
        a, b = alike(a, b)
        return a.dim == b.dim and a.size == b.size and self.same(a.full, b.full)

    # --- control flow ---------------------------------------------------------------------

    def after_if(self, condition: Expr, then: Where | None, orelse: Where | None) -> Where | None:
        """The position behind an `if`, whichever arm was taken."""
        if then is None or orelse is None:
            return None if then is orelse else UNKNOWN
        if self.agree(then, orelse):
            return then
        if then.lost or orelse.lost or (then.dim, then.size) != (orelse.dim, orelse.size):
            return UNKNOWN
        then, orelse = alike(then, orelse)
        coord = either(condition, self.current(then), self.current(orelse))
        return replace(then, coord=coord, full=self.full(coord))

    def at_top(
        self, before: Where | None, after: Where | None, var: str, low: Expr, high: Expr
    ) -> Where | None:
        """The position at the top of a loop's body, from that before the loop and that behind the
        body: where P(i + 1) is known as a form of i, P(i) is that of i - 1, if it fits i = low."""
        if before is None:  # a constant, say, which takes the positions of what is added to it
            return None
        if after is None:
            return UNKNOWN
        if self.agree(before, after):
            return before
        if before.lost or after.lost or (before.dim, before.size) != (after.dim, after.size):
            return UNKNOWN
        before, after = alike(before, after)
        found = put(after.full, var, Binary("-", Name(var), ONE))
        found = self.given(found, condition_of(Name(var), self.full(high)))
        if not self.same(put(found, var, self.full(low)), before.full):
            return UNKNOWN
        return before.at(found)

    def holds(self, top: Where | None, after: Where | None, var: str, high: Expr) -> bool:
        """Whether a position at the top of the body is right in the next iteration too."""
        if top is None or top.lost:
            return True
        if after is None or after.lost:
            return False
        top, after = alike(top, after)
        following = Binary("+", Name(var), ONE)
        goes_on = condition_of(following, self.full(high))
        expected = self.given(put(top.full, var, following), goes_on)
        return self.same(self.given(after.full, goes_on), expected)

    def behind(
        self, top: Where | None, after: Where | None, var: str, low: Expr, high: Expr
    ) -> Where | None:
        """The position behind a loop. `top` is None where the tile had no value before it."""
        if after is None or after.lost or (top is not None and top.lost):
            return after and UNKNOWN
        last = Call(Name("ceil"), (self.full(high),))
        if top is None:
            return after.at(put(after.full, var, Binary("-", last, ONE)))
        top, after = alike(top, after)
        following = put(top.full, var, Binary("+", Name(var), ONE))
        if not self.same(following, after.full):
            return UNKNOWN  # only while the loop goes on
        return top.at(put(top.full, var, Call(Name("max"), (self.full(low), last))))

    def given(self, expr: Expr, true: Binary) -> Expr:
        """The expression where a comparison is known to hold: `where`s that it decides are gone."""
        match expr:
            case Call(func, (condition, yes, no)) if func.id.lower() == "where":
                decided = self._decided(condition, true)
                if decided is not None:
                    return self.given(yes if decided else no, true)
        match expr:
            case Unary(_, operand):
                return replace(expr, operand=self.given(operand, true))
            case Binary(_, left, right):
                return replace(expr, left=self.given(left, true), right=self.given(right, true))
            case Call(_, args):
                return replace(expr, args=tuple(self.given(a, true) for a in args))
        return expr

    def _decided(self, condition: Expr, true: Binary) -> bool | None:
        """Whether a condition holds where a comparison is known to; None if that cannot be told."""
        match condition:
            case Unary("not", operand):
                found = self._decided(operand, true)
                return None if found is None else not found
            case Binary("and" | "or" as op, left, right):
                sides = [self._decided(side, true) for side in (left, right)]
                other = op == "or"  # one such side settles it
                return other if other in sides else None if None in sides else not other
            case Binary("<" | "<=", less, more) | Binary(">" | ">=", more, less):
                if self._negative(Binary("-", less, more), true):
                    return True
                return False if self._negative(Binary("-", more, less), true) else None
        return None

    def _negative(self, expr: Expr, true: Binary) -> bool:
        """Whether `expr < 0` follows from `a < b`: it is at most a positive multiple of a - b."""
        found = self._without_ceil(self._sum(expr))
        known = self._without_ceil(self._sum(Binary("-", true.left, true.right)))
        varying = found.keys() - {()}
        if not varying or varying != known.keys() - {()}:
            return False
        factor = found[min(varying, key=repr)] / known[min(varying, key=repr)]
        more = found.get((), Fraction(0)) - factor * known.get((), Fraction(0))
        return factor > 0 and more <= 0 and all(found[k] == factor * known[k] for k in varying)

    def _without_ceil(self, found: Sum) -> Sum:
        """Of `n - ceil(x)`, `n - x`: for a whole n both are below 0 or neither is."""
        for key, coefficient in found.items():
            match key:
                case (("ceil", tuple(inside)),) if coefficient == -1:
                    rest = {k: c for k, c in found.items() if k != key}
                    if all(self._whole(k, c) for k, c in rest.items()):
                        return _difference(rest, dict(inside))
        return found

    def _whole(self, product: tuple[object, ...], coefficient: Fraction) -> bool:
        """Whether a product is one of whole numbers. A name is one unless its value is known."""
        if coefficient.denominator != 1:
            return False
        return all(
            isinstance(atom, tuple) and atom[0] == "name" and atom[1] not in self.known
            for atom in product
        )

    # --- the normal form ------------------------------------------------------------------

    def form(self, expr: Expr) -> Form:
        """The normal form of an expression."""
        return frozenset(self._sum(expr).items())

    def quotient(self, expr: Expr, by: Expr) -> Expr | None:
        """`expr / by` where that is a whole number in every problem; None if it cannot be told.
        `by` is a single product, and every product of `expr` has its factors."""
        divisor = list(self._sum(by).items())
        if len(divisor) != 1:
            return None
        ((factors, below),) = divisor
        total: Expr | None = None
        for product, above in self._sum(expr).items():
            rest = list(product)
            for factor in factors:
                if factor not in rest:
                    return None
                rest.remove(factor)
            count = above / below
            if not self._counts(rest) or count.denominator != 1:
                return None
            term: Expr | None = None if rest and abs(count) == 1 else Num(str(abs(int(count))))
            for atom in rest:
                term = self._exprs[atom] if term is None else Binary("*", term, self._exprs[atom])
            assert term is not None
            if total is None:
                total = term if count > 0 else Unary("-", term)
            else:
                total = Binary("+" if count > 0 else "-", total, term)
        return total or ZERO

    def multiple(self, expr: Expr, of: int) -> bool:
        """Whether an expression is a multiple of a number, whatever the problem."""
        return all(
            coefficient.denominator == 1 and coefficient % of == 0 and self._counts(list(product))
            for product, coefficient in self._sum(expr).items()
        )

    def _counts(self, product: list[object]) -> bool:
        """Whether a product is one of whole numbers: names, what is rounded to one, elements (those
        that a coordinate is made of are)."""
        return all(
            isinstance(atom, tuple) and atom[0] in ("floor", "ceil", "[]")
            for atom in product
            if not self._whole((atom,), Fraction(1))
        )

    def _sum(self, expr: Expr) -> Sum:
        match expr:
            case Num(text) if (value := number(text)) == value and not isinstance(value, float):
                return _constant(Fraction(value))
            case Name(id) if isinstance(self.known.get(id), (int, Fraction)):
                return _constant(Fraction(self.known[id]))
            case Unary("-", operand):
                return {k: -c for k, c in self._sum(operand).items()}
            case Binary("+" | "-" as op, left, right):
                other = self._sum(right)
                other = {k: -c for k, c in other.items()} if op == "+" else other
                return _difference(self._sum(left), other)
            case Binary("*", left, right):
                return _product(self._sum(left), self._sum(right))
            case Binary("/", left, right):
                below = self._sum(right)
                if set(below) == {()}:
                    return {k: c / below[()] for k, c in self._sum(left).items()}
        plain = self._plain(expr)
        if plain is not None:
            return plain
        atom = self._atom(expr)
        self._exprs.setdefault(atom, expr)
        return {(atom,): Fraction(1)}

    def _plain(self, expr: Expr) -> Sum | None:
        """Calls whose value is one of their arguments."""
        match expr:
            case Call(Name("where"), (_, yes, no)) if self.form(yes) == self.form(no):
                return self._sum(yes)
            case Call(func, args) if func.id.lower() in ("min", "max"):
                if len({self.form(a) for a in args}) == 1:
                    return self._sum(args[0])
            case Call(func, (arg,)) if func.id.lower() in ("floor", "ceil"):
                if set(found := self._sum(arg)) <= {()}:
                    value = found.get((), Fraction(0))
                    whole = value.__floor__() if func.id.lower() == "floor" else value.__ceil__()
                    return _constant(Fraction(whole))
        return None

    def _atom(self, expr: Expr) -> object:
        """What arithmetic does not look into, in a form that can be compared and sorted."""
        match expr:
            case Name(id):
                return ("name", id)
            case Binary(op, left, right):
                return (op, _listed(self.form(left)), _listed(self.form(right)))
            case Unary(op, operand):
                return (op, _listed(self.form(operand)))
            case Call(func, args):
                return (func.id.lower(), *(_listed(self.form(a)) for a in args))
            case Index(tensor, args):
                return ("[]", tensor.id, *(_listed(self.form(a)) for a in args))
            case Num(text):
                return ("number", text)
        raise AssertionError(f"no scalar: {expr}")


def _constant(value: Fraction) -> Sum:
    return {(): value} if value else {}


def _difference(a: Sum, b: Sum) -> Sum:
    found = dict(a)
    for k, c in b.items():
        found[k] = found.get(k, Fraction(0)) - c
    return {k: c for k, c in found.items() if c}


def _product(a: Sum, b: Sum) -> Sum:
    found: Sum = {}
    for k, c in a.items():
        for m, d in b.items():
            key = tuple(sorted((*k, *m), key=repr))
            found[key] = found.get(key, Fraction(0)) + c * d
    return {k: c for k, c in found.items() if c}


def _listed(form: Form) -> tuple[object, ...]:
    return tuple(sorted(form, key=repr))
