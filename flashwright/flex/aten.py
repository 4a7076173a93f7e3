"""The rules of capture: each operator of PyTorch that a mod may use, as a TL expression.

Values are scalars with a kind: `float` (computed in fp32), `int` or `bool`. TL has no booleans in
memory and no integer arithmetic of its own, so the rules keep the kinds apart: a comparison is
`bool`, `bool` becomes a number by `where(c, 1, 0)`, and a number a `bool` by `x != 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flashwright.lang.nodes import Binary, Call, Expr, Index, Name, Num, Unary

Kind = Literal["float", "int", "bool"]


class Refused(ValueError):
    """An operator, or a use of it, that has no rule."""


@dataclass(frozen=True)
class Typed:
    """An expression and the kind of its value."""

    expr: Expr
    kind: Kind


def binary(op: str, left: Expr, right: Expr) -> Expr:
    """`left op right`."""
    return Binary(op, left, right)


def call(name: str, *args: Expr) -> Expr:
    """`name(args)`."""
    return Call(Name(name), args)


def where(condition: Expr, yes: Expr, no: Expr) -> Expr:
    """`where(condition, yes, no)`, or the arm that a constant condition takes."""
    if condition == _TRUE:
        return yes
    return no if condition == _FALSE else call("where", condition, yes, no)


_ZERO, _ONE = Num("0"), Num("1")
_TRUE, _FALSE = Binary("<", _ZERO, _ONE), Binary("<", _ONE, _ZERO)


def number(value: float | bool) -> Typed:
    """A Python number."""
    if isinstance(value, bool):
        return Typed(_TRUE if value else _FALSE, "bool")
    if isinstance(value, int):
        return Typed(Num(str(value)), "int")
    if math.isnan(value):
        raise Refused("NaN as a constant")
    if math.isinf(value):
        infinity = Name("inf")
        return Typed(infinity if value > 0 else Unary("-", infinity), "float")
    return Typed(Num(repr(value)), "float")


def dtype_of(dtype: Any) -> str:
    """The TL type of a tensor of this torch dtype; integers and booleans travel as int32."""
    name = str(dtype).removeprefix("torch.")
    known = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    if name in known:
        return known[name]
    if name in ("int8", "uint8", "int16", "int32", "int64", "bool"):
        return "int32"
    raise Refused(f"a tensor of {name}: use float32, bfloat16, float16, an integer type or bool")


def loaded(read: Index, dtype: Any) -> Typed:
    """An element of a tensor of this torch dtype."""
    if dtype_of(dtype) != "int32":
        return Typed(read, "float")
    if str(dtype) == "torch.bool":
        return Typed(Binary("!=", read, _ZERO), "bool")
    return Typed(read, "int")


def converted(value: Typed, kind: Kind) -> Typed:
    """A value as another kind, as PyTorch converts it."""
    if value.kind == kind:
        return value
    if kind == "bool":
        return Typed(Binary("!=", value.expr, _ZERO), "bool")
    if value.kind == "bool":
        return Typed(where(value.expr, _ONE, _ZERO), kind)
    if kind == "int":  # toward zero
        if isinstance(value.expr, Call) and value.expr.func.id in ("floor", "ceil"):
            return Typed(value.expr, "int")
        down, up = call("floor", value.expr), call("ceil", value.expr)
        return Typed(where(Binary("<", value.expr, _ZERO), up, down), "int")
    return Typed(value.expr, "float")


def never_negative(expr: Expr) -> bool:
    """Whether an index is at least 0 whatever the element, as far as its text shows."""
    return _range(expr)[0] >= 0


Range = tuple[float, float]
_ANYTHING: Range = (-math.inf, math.inf)
_RISING: dict[str, Callable[[float], float]] = {
    "floor": lambda x: math.floor(x) if math.isfinite(x) else x,
    "ceil": lambda x: math.ceil(x) if math.isfinite(x) else x,
    "log": lambda x: math.log(x) if x > 0 else -math.inf,
    "log2": lambda x: math.log2(x) if x > 0 else -math.inf,
    "sqrt": lambda x: math.sqrt(x) if x > 0 else 0.0,
}


def _range(expr: Expr) -> Range:
    """The least and the greatest value of an expression, as far as its text shows."""
    match expr:
        case Num(text):
            return float(text), float(text)
        case Name(name):
            return (0.0, math.inf) if name.endswith("_idx") else _ANYTHING
        case Unary("-", operand):
            low, high = _range(operand)
            return -high, -low
        case Binary("%", _, Num(text)) if float(text) > 0:
            return 0.0, float(text)
        case Binary("+" | "-" | "*" | "/" as op, left, right):
            return _of_arithmetic(op, _range(left), _range(right))
        case Call(Name("where"), (_, yes, no)):
            (a, b), (c, d) = _range(yes), _range(no)
            return min(a, c), max(b, d)
        case Call(Name("min" | "max" as name), args):
            pick = min if name == "min" else max
            ranges = [_range(a) for a in args]
            return pick(low for low, _ in ranges), pick(high for _, high in ranges)
        case Call(Name(name), (arg,)):
            low, high = _range(arg)
            if name in _RISING:
                return _RISING[name](low), _RISING[name](high)
            floor = {"abs": 0.0, "exp": 0.0, "exp2": 0.0, "sigmoid": 0.0, "tanh": -1.0}
            return floor.get(name, -math.inf), math.inf
    return _ANYTHING


def _of_arithmetic(op: str, left: Range, right: Range) -> Range:
    if op == "-":
        op, right = "+", (-right[1], -right[0])
    if op == "+":
        return left[0] + right[0], left[1] + right[1]
    if op == "/":
        if right[0] <= 0:
            return _ANYTHING
        op, right = "*", (1 / right[1], 1 / right[0])
    ends = [a * b if a and b else 0.0 for a in left for b in right]  # 0 * inf is 0 here
    return min(ends), max(ends)


def apply(target: str, args: Sequence[Any], kwargs: dict[str, Any], value: Any) -> Typed:
    """The result of an operator, named as `aten.add.Tensor`. `value` is a tensor of its type."""
    name = target.removeprefix("aten.").split(".")[0]
    rule = _RULES.get(name)
    if rule is None or not target.startswith("aten."):
        raise Refused(
            f"TL has no counterpart of {target}. It has arithmetic, comparisons, logic, where, "
            "clamp, abs, floor, exp, log, tanh, sigmoid, sqrt"
        )
    if hasattr(value, "dim") and value.dim():
        raise Refused(f"{target} makes a tensor of {value.dim()} axes: a mod computes one number")
    return rule(list(args), kwargs)


# --- the rules ----------------------------------------------------------------------------------

Rule = Callable[[list[Any], dict[str, Any]], Typed]


def _kind(*values: Typed) -> Kind:
    """The kind of an arithmetic result."""
    return "float" if any(v.kind == "float" for v in values) else "int"


def _arithmetic(op: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        a, b = args[:2]
        alpha = kwargs.get("alpha", 1)
        kind = _kind(a, b)
        left, right = converted(a, kind).expr, converted(b, kind).expr
        if alpha != 1:
            right = Binary("*", number(alpha).expr, right)
        return Typed(_simplified(op, left, right), kind)

    return rule


def _simplified(op: str, left: Expr, right: Expr) -> Expr:
    if op in "+-" and right == _ZERO:
        return left
    if op in "*/" and right == _ONE:
        return left
    return Binary(op, left, right)


def _reversed(op: str) -> Rule:
    return lambda args, kwargs: _arithmetic(op)([args[1], args[0]], kwargs)


def _divide(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    a, b = (converted(x, _kind(*args[:2])) for x in args[:2])
    exact = Binary("/", a.expr, b.expr)
    match kwargs.get("rounding_mode"):
        case None:
            return Typed(exact, "float")
        case "floor":
            return Typed(call("floor", exact), a.kind)
        case _:
            return Typed(converted(Typed(exact, "float"), "int").expr, a.kind)


def _floor_divide(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return _divide(args, {"rounding_mode": "floor"})


def _fmod(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    a, b = (converted(x, _kind(*args[:2])) for x in args[:2])
    whole = converted(Typed(Binary("/", a.expr, b.expr), "float"), "int").expr
    return Typed(Binary("-", a.expr, Binary("*", b.expr, whole)), a.kind)


def _compare(op: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        a, b = args[:2]
        if a.kind == b.kind == "bool":
            same = Binary("or", _both(a.expr, b.expr), _both(_not(a.expr), _not(b.expr)))
            if op in ("==", "!="):
                return Typed(same if op == "==" else _not(same), "bool")
        kind = _kind(a, b)
        return Typed(Binary(op, converted(a, kind).expr, converted(b, kind).expr), "bool")

    return rule


def _both(a: Expr, b: Expr) -> Expr:
    if _FALSE in (a, b):
        return _FALSE
    return b if a == _TRUE else a if b == _TRUE else Binary("and", a, b)


def _either(a: Expr, b: Expr) -> Expr:
    if _TRUE in (a, b):
        return _TRUE
    return b if a == _FALSE else a if b == _FALSE else Binary("or", a, b)


_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def _not(a: Expr) -> Expr:
    """The opposite, with the inequalities turned around, which a kernel can bound."""
    match a:
        case Binary(op, left, right) if op in _NEGATED:
            return Binary(_NEGATED[op], left, right)
        case Binary("and", left, right):
            return _either(_not(left), _not(right))
        case Binary("or", left, right):
            return _both(_not(left), _not(right))
        case Unary("not", operand):
            return operand
    return Unary("not", a)


def _logic(join: Callable[[Expr, Expr], Expr], op: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        a, b = args[:2]
        if a.kind == "bool" or b.kind == "bool" or op == "logical":
            return Typed(join(converted(a, "bool").expr, converted(b, "bool").expr), "bool")
        return _bits(op, a, b)

    return rule


def _bits(op: str, a: Typed, b: Typed) -> Typed:
    """`x & 15` of whole numbers is a remainder; other bit patterns have no counterpart."""
    for x, mask in ((a, b), (b, a)):
        if op == "and" and isinstance(mask.expr, Num):
            bits = int(mask.expr.text)
            if bits >= 0 and not bits & (bits + 1):
                return Typed(Binary("%", x.expr, Num(str(bits + 1))), "int")
    raise Refused(f"a bitwise {op} of numbers: only `x & (2**n - 1)` has a counterpart")


def _bitwise_not(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    (a,) = args
    if a.kind == "bool":
        return Typed(_not(a.expr), "bool")
    return Typed(Binary("-", Unary("-", a.expr), _ONE), "int")


def _logical_not(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return Typed(_not(converted(args[0], "bool").expr), "bool")


def _xor(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    if any(a.kind != "bool" for a in args[:2]):
        return _bits("xor", *args[:2])
    return _compare("!=")(args, kwargs)


def _shift(op: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        a, b = args[:2]
        if not isinstance(b.expr, Num):
            raise Refused("a shift by a number that is no constant")
        factor = Num(str(2 ** int(b.expr.text)))
        if op == "<<":
            return Typed(Binary("*", a.expr, factor), "int")
        return Typed(call("floor", Binary("/", a.expr, factor)), "int")

    return rule


def _function(name: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        return Typed(call(name, converted(args[0], "float").expr), "float")

    return rule


def _keeps_kind(make: Callable[[Expr], Expr]) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        kind = _kind(args[0])
        return Typed(make(converted(args[0], kind).expr), kind)

    return rule


def _extreme(name: str) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        kind = _kind(*args[:2])
        return Typed(call(name, *(converted(a, kind).expr for a in args[:2])), kind)

    return rule


def _clamp(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    low, high = ([*args[1:], None, None])[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    found: Typed = args[0]
    for name, bound in (("max", low), ("min", high)):
        if bound is not None:
            limit = bound if isinstance(bound, Typed) else number(bound)
            found = _extreme(name)([found, limit], {})
    return found


def _clamp_one(name: str) -> Rule:
    return lambda args, kwargs: _extreme(name)(args, kwargs)


def _where(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    condition, yes, no = args
    if yes.kind == no.kind == "bool":
        c = converted(condition, "bool").expr
        return Typed(_either(_both(c, yes.expr), _both(_not(c), no.expr)), "bool")
    kind = _kind(yes, no)
    chosen = where(
        converted(condition, "bool").expr, converted(yes, kind).expr, converted(no, kind).expr
    )
    return Typed(chosen, kind)


def _power(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    base, power = args[:2]
    if not isinstance(power.expr, Num):
        if isinstance(base.expr, Num) and float(base.expr.text) > 0:
            bits = Num(repr(math.log2(float(base.expr.text))))
            return Typed(call("exp2", Binary("*", power.expr, bits)), "float")
        raise Refused("a power of two variables: write exp(y * log(x))")
    value = float(power.expr.text)
    x = converted(base, _kind(base))
    if value == 0.5:
        return Typed(call("sqrt", x.expr), "float")
    if value == -1:
        return Typed(Binary("/", _ONE, x.expr), "float")
    if value in (2.0, 3.0, 4.0):
        found = x.expr
        for _ in range(int(value) - 1):
            found = Binary("*", found, x.expr)
        return Typed(found, x.kind)
    raise Refused(f"a power of {value:g}: write exp(y * log(x))")


def _sign(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    x = args[0]
    below = where(Binary("<", x.expr, _ZERO), Num("-1"), _ZERO)
    return Typed(where(Binary(">", x.expr, _ZERO), _ONE, below), _kind(x))


def _relu(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return _extreme("max")([args[0], number(0)], {})


def _silu(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    x = converted(args[0], "float").expr
    return Typed(Binary("*", x, call("sigmoid", x)), "float")


def _gelu(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    if kwargs.get("approximate") != "tanh":
        raise Refused("gelu needs erf, which TL lacks: use approximate='tanh'")
    x = converted(args[0], "float").expr
    cube = Binary("*", Num("0.044715"), Binary("*", x, Binary("*", x, x)))
    inner = Binary("*", Num(repr(math.sqrt(2 / math.pi))), Binary("+", x, cube))
    half = Binary("*", Num("0.5"), x)
    return Typed(Binary("*", half, Binary("+", _ONE, call("tanh", inner))), "float")


def _log1p(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return Typed(call("log", Binary("+", _ONE, converted(args[0], "float").expr)), "float")


def _log_sigmoid(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    x = converted(args[0], "float").expr
    small = call("exp", Unary("-", call("abs", x)))
    return Typed(Binary("-", call("min", x, _ZERO), call("log", Binary("+", _ONE, small))), "float")


def _softplus(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    if len(args) > 1 or kwargs:
        raise Refused("softplus with a beta or a threshold of its own")
    x = converted(args[0], "float").expr
    soft = call("log", Binary("+", _ONE, call("exp", x)))
    return Typed(where(Binary(">", x, Num("20")), x, soft), "float")


def _rsqrt(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return Typed(Binary("/", _ONE, call("sqrt", converted(args[0], "float").expr)), "float")


def _full(value: float) -> Rule:
    def rule(args: list[Any], kwargs: dict[str, Any]) -> Typed:
        return _cast(number(value), kwargs.get("dtype"))

    return rule


def _scalar_tensor(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return _cast(args[0], kwargs.get("dtype"))


def _full_like(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return _cast(args[1], kwargs.get("dtype"))


def _to_copy(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    return _cast(args[0], kwargs.get("dtype"))


def _cast(value: Typed, dtype: Any) -> Typed:
    if dtype is None:
        return value
    if str(dtype) == "torch.bool":
        return converted(value, "bool")
    if dtype.is_floating_point:
        if str(dtype) in ("torch.float16", "torch.bfloat16") and value.kind == "float":
            raise Refused(f"a rounding to {str(dtype)[6:]} inside the mod: TL computes in fp32")
        return converted(value, "float")
    return converted(value, "int")


def _same(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    value: Typed = args[0]
    return value


def _masked_fill(args: list[Any], kwargs: dict[str, Any]) -> Typed:
    x, hidden, value = args
    return _where([hidden, value, x], {})


_RULES: dict[str, Rule] = {
    "add": _arithmetic("+"),
    "sub": _arithmetic("-"),
    "rsub": _reversed("-"),
    "mul": _arithmetic("*"),
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _arithmetic("%"),
    "fmod": _fmod,
    "pow": _power,
    "neg": _keeps_kind(lambda x: Unary("-", x)),
    "abs": _keeps_kind(lambda x: call("abs", x)),
    "sign": _sign,
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "bitwise_and": _logic(_both, "and"),
    "bitwise_or": _logic(_either, "or"),
    "bitwise_xor": _xor,
    "bitwise_not": _bitwise_not,
    "__and__": _logic(_both, "and"),
    "__or__": _logic(_either, "or"),
    "__xor__": _xor,
    "logical_and": _logic(_both, "logical"),
    "logical_or": _logic(_either, "logical"),
    "logical_not": _logical_not,
    "__rshift__": _shift(">>"),
    "__lshift__": _shift("<<"),
    "bitwise_right_shift": _shift(">>"),
    "bitwise_left_shift": _shift("<<"),
    "where": _where,
    "masked_fill": _masked_fill,
    "maximum": _extreme("max"),
    "minimum": _extreme("min"),
    "clamp": _clamp,
    "clamp_min": _clamp_one("max"),
    "clamp_max": _clamp_one("min"),
    "floor": _keeps_kind(lambda x: call("floor", x)),
    "ceil": _keeps_kind(lambda x: call("ceil", x)),
    "trunc": lambda args, kwargs: Typed(converted(args[0], "int").expr, args[0].kind),
    **{name: _function(name) for name in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")},
    "log1p": _log1p,
    "rsqrt": _rsqrt,
    "relu": _relu,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "log_sigmoid_forward": _log_sigmoid,
    "scalar_tensor": _scalar_tensor,
    "full_like": _full_like,
    "new_ones": _full(1),
    "new_zeros": _full(0),
    "ones_like": _full(1),
    "zeros_like": _full(0),
    "_to_copy": _to_copy,
    **dict.fromkeys(("clone", "detach", "alias", "lift_fresh_copy", "expand", "view"), _same),
}
