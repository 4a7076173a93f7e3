"""The keys that a mask can show to a block of queries: bounds of the loop from the mask's own text.

A comparison bounds `kv_idx` if it is linear in it, up to parts that have linear bounds themselves:
`floor(kv_idx / 64) == floor(q_idx / 64)` implies q_idx - 63 <= kv_idx <= q_idx + 63, and
`abs(q_idx - kv_idx) < 128` implies two inequalities. `and` takes the tighter bound, `or` the looser
one. Over a block, `q_idx` is replaced by the block's first or last row. What has no bound
(`Doc == Doc2`) leaves the loop as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from flashwright.lang.format import format_expr
from flashwright.lang.nodes import Binary, Call, Expr, Name, Num, Unary, expressions

FIRST_ROW = "block_idx * BM"
END_ROW = "(block_idx + 1) * BM"
_MOST = 16  # linear forms of one comparison
_TURNED = {">": "<", ">=": "<="}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


class _Unbounded(Exception):
    """A part of a comparison without a linear bound."""


@dataclass(frozen=True)
class Range:
    """The keys from `low` up to `high`, as TL text; None: no bound."""

    low: str | None = None
    high: str | None = None

    def both(self, other: Range) -> Range:
        """The keys in both ranges."""
        return Range(
            _joined("max", self.low, other.low, loose=False),
            _joined("min", self.high, other.high, loose=False),
        )

    def either(self, other: Range) -> Range:
        """The keys from the first to the last of either range."""
        return Range(
            _joined("min", self.low, other.low, loose=True),
            _joined("max", self.high, other.high, loose=True),
        )


def _joined(function: str, a: str | None, b: str | None, loose: bool) -> str | None:
    if a is None or b is None:
        return None if loose else a or b
    return a if a == b else f"{function}({a}, {b})"


def bounds(mask: Expr) -> Range:
    """The keys that the mask can show to any row of a block."""
    match mask:
        case Binary("and", left, right):
            return bounds(left).both(bounds(right))
        case Binary("or", left, right):
            return bounds(left).either(bounds(right))
        case Unary("not", operand):
            return _negated(operand)
        case Binary("==", left, right):
            return _inequality("<=", left, right).both(_inequality("<=", right, left))
        case Binary("<" | "<=" as op, left, right):
            return _inequality(op, left, right)
        case Binary(">" | ">=" as op, left, right):
            return _inequality(_TURNED[op], right, left)
    return Range()


def _negated(expr: Expr) -> Range:
    match expr:
        case Binary("and", left, right):
            return _negated(left).either(_negated(right))
        case Binary("or", left, right):
            return _negated(left).both(_negated(right))
        case Unary("not", operand):
            return bounds(operand)
        case Binary(op, left, right) if op in _NEGATED:
            return bounds(Binary(_NEGATED[op], left, right))
    return Range()


def _inequality(op: str, left: Expr, right: Expr) -> Range:
    """Bounds from `left < right` or `left <= right`."""
    try:
        forms = _lower(Binary("-", left, right), 1)
    except _Unbounded:
        return Range()
    found = Range()
    for form in forms:
        found = found.both(_solved(form, strict=op == "<"))
    return found


def _solved(form: _Linear, strict: bool) -> Range:
    """Bounds of kv_idx from form < 0 or form <= 0."""
    factor = form.terms.get("kv_idx", Fraction(0))
    if not factor:
        return Range()
    rest = form.without("kv_idx").times(-1 / factor)
    whole = all(value.denominator == 1 for value in (*rest.terms.values(), rest.constant))
    if factor > 0:
        end = rest if strict else rest.plus(1)
        return Range(high=end.over_block(largest=True))
    begin = rest.plus(1) if strict and whole else rest
    return Range(low=begin.over_block(largest=False))


@dataclass(frozen=True)
class _Linear:
    """A sum of factors times names or scalar expressions, by their text, and a constant."""

    terms: dict[str, Fraction]
    constant: Fraction = Fraction(0)

    def add(self, other: _Linear) -> _Linear:
        """The sum of both."""
        terms = dict(self.terms)
        for name, factor in other.terms.items():
            terms[name] = terms.get(name, Fraction(0)) + factor
        return _Linear({n: f for n, f in terms.items() if f}, self.constant + other.constant)

    def plus(self, number: int | Fraction) -> _Linear:
        """With a number added."""
        return _Linear(self.terms, self.constant + number)

    def times(self, factor: Fraction) -> _Linear:
        """A multiple."""
        return _Linear({n: f * factor for n, f in self.terms.items()}, self.constant * factor)

    def without(self, name: str) -> _Linear:
        """Without one term."""
        return _Linear({n: f for n, f in self.terms.items() if n != name}, self.constant)

    def over_block(self, largest: bool) -> str:
        """The largest or smallest value over the rows of a block, as TL."""
        factor = self.terms.get("q_idx", Fraction(0))
        form = self.without("q_idx")
        if factor:
            last = (factor > 0) == largest
            form = form.add(_Linear({END_ROW if last else FIRST_ROW: factor}, -factor * last))
        return form.text()

    def text(self) -> str:
        """The sum as TL."""
        parts = []
        for name, factor in self.terms.items():
            part = name if abs(factor) == 1 else f"{_text(abs(factor))} * ({name})"
            parts.append((factor < 0, part))
        if self.constant or not parts:
            parts.append((self.constant < 0, _text(abs(self.constant))))
        parts.sort(key=lambda part: part[0])  # one that is added comes first
        first = ("-" if parts[0][0] else "") + parts[0][1]
        return first + "".join(f" {'-' if less else '+'} {part}" for less, part in parts[1:])


def _text(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"({value.numerator} / {value.denominator})"


def _moves(expr: Expr) -> bool:
    return any(isinstance(e, Name) and e.id in ("q_idx", "kv_idx", "S") for e in expressions(expr))


def _lower(expr: Expr, sign: int) -> list[_Linear]:
    """Linear forms that are all at most `sign * expr`."""
    if not _moves(expr):
        return [_scalar(expr).times(Fraction(sign))]
    match expr:
        case Name(name) if name != "S":
            return [_Linear({name: Fraction(sign)})]
        case Unary("-", operand):
            return _lower(operand, -sign)
        case Binary("+", left, right):
            return _sums(_lower(left, sign), _lower(right, sign))
        case Binary("-", left, right):
            return _sums(_lower(left, sign), _lower(right, -sign))
        case Binary("*", left, right):
            factor, other = _factor(left), right
            if factor is None:
                factor, other = _factor(right), left
            return _scaled(other, factor, sign)
        case Binary("/", left, right):
            divisor = _factor(right)
            return _scaled(left, 1 / divisor if divisor else None, sign)
        case Binary("%", _, right):
            divisor = _factor(right)
            if divisor is None or divisor <= 0:
                raise _Unbounded
            return [_Linear({}, Fraction(0) if sign > 0 else -(divisor - 1))]
        case Call(Name(function), args):
            return _of_function(function, args, sign)
    raise _Unbounded


def _of_function(function: str, args: tuple[Expr, ...], sign: int) -> list[_Linear]:
    if function in ("floor", "ceil"):
        # How far rounding moves a whole number over a constant; else by less than 1.
        below = (function == "floor") == (sign > 0)
        moved = 1 - Fraction(1, _denominator(args[0])) if below else Fraction(0)
        return [form.plus(-moved) for form in _lower(args[0], sign)]
    if function == "abs" and sign > 0:
        return [*_lower(args[0], 1), *_lower(args[0], -1)]
    if (function, sign) in (("max", 1), ("min", -1)):
        return [form for arg in args for form in _lower(arg, sign)][:_MOST]
    raise _Unbounded


def _denominator(expr: Expr) -> int:
    match expr:
        case Binary("/", left, Num(text)) if text.isdecimal() and not _has_division(left):
            return int(text)
    return 10**9  # anything: moved by less than 1


def _has_division(expr: Expr) -> bool:
    if isinstance(expr, Num):
        return not expr.text.lstrip("-").isdecimal()
    return any(
        (isinstance(e, Binary) and e.op == "/")
        or (isinstance(e, Num) and not e.text.lstrip("-").isdecimal())
        for e in expressions(expr)
    )


def _sums(left: list[_Linear], right: list[_Linear]) -> list[_Linear]:
    return [a.add(b) for a in left for b in right][:_MOST]


def _scaled(expr: Expr, factor: Fraction | None, sign: int) -> list[_Linear]:
    if not factor:
        raise _Unbounded
    turned = sign if factor > 0 else -sign
    return [form.times(abs(factor)) for form in _lower(expr, turned)]


def _factor(expr: Expr) -> Fraction | None:
    match expr:
        case Num(text):
            return Fraction(text)
        case Unary("-", Num(text)):
            return -Fraction(text)
    return None


def _scalar(expr: Expr) -> _Linear:
    """A scalar as a sum, as far as it is one."""
    factor = _factor(expr)
    if factor is not None:
        return _Linear({}, factor)
    match expr:
        case Unary("-", operand):
            return _scalar(operand).times(Fraction(-1))
        case Binary("+", left, right):
            return _scalar(left).add(_scalar(right))
        case Binary("-", left, right):
            return _scalar(left).add(_scalar(right).times(Fraction(-1)))
    text = format_expr(expr)
    simple = isinstance(expr, Name | Call) or text.endswith("]")
    return _Linear({text if simple else f"({text})": Fraction(1)})
