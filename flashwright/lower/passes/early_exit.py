"""Whether a round of a loop changes nothing when every score in it is masked.

The statements are carried out on one row of numbers, of which the mask makes -inf. A softmax then
leaves its state alone, and its weights are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flashwright.lower import ir
from flashwright.lower.element import Element, Leaf, Op, Reduce, leaves, variable

_KNOWN: dict[str, Callable[..., float]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1 / x,
    "max": max,
    "min": min,
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "tanh": math.tanh,
    "tanh2": lambda x: math.tanh(x * math.log(2) / 2),
    "abs": abs,
}
_MANY = 16  # elements of the row


def idle(work: Sequence[ir.Compute], mask: ir.Compute) -> bool:
    """Whether all vectors and tiles stay as they are if the mask hides a whole tile of scores, but
    for these: they must become 0.

    A vector that is made for later is a factor, and must be 1.
    """
    (scores,) = (variable(a.target) for a in mask.assigns)
    known, state = dict[str, float](), dict[str, float]()
    try:
        for node in work:
            for assign in node.assigns:
                name = variable(assign.target)
                for leaf in (assign.target, *leaves(assign.value)):
                    known.setdefault(variable(leaf), 1.25 + 0.5 * len(known))  # no two alike
                hidden = node is mask
                state[name] = -math.inf if hidden else _value(assign.value, known | state)
                if assign.kept and state[name] != 1:
                    return False
    except (ArithmeticError, KeyError, ValueError):
        return False
    made = {variable(a.target) for node in work for a in node.assigns if a.buffer}
    return state[scores] == 0 and all(state[n] == known[n] for n in made - {scores})


def _value(x: Element, state: dict[str, float]) -> float:
    match x:
        case Leaf(value=float(value)):
            return value
        case Leaf():
            return state[variable(x)]
        case Reduce("max", arg):
            return _value(arg, state)
        case Reduce(_, arg):
            return _MANY * _value(arg, state)
        case Op("where", (_, yes, no)):
            a, b = _value(yes, state), _value(no, state)
            if a != b:
                raise ValueError(x.op)
            return a
        case Op(op, args):
            return _KNOWN[op](*(_value(a, state) for a in args))
