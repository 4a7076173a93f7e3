"""What a function sees outside of itself: its closure, its defaults, the globals that it names.

    for variable in variables(mask_mod):
        print(variable.name, variable.value)

Functions that it sees are followed, as are partials, methods, tuples and lists, and the attributes
that it may ask of a module or a class.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

Look = Callable[[], Any]
Names = tuple[str, ...]

_DEPTH = 8
_TOO_DEEP = object()
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy"}
_CONSTANT = (type(None), bool, int, float, str, enum.Enum, type, ModuleType, BuiltinFunctionType)
_TORCHS = ("dtype", "device", "OpOverload", "OpOverloadPacket")
"""Types of PyTorch whose objects are constant, too: it is not imported here."""


class _Empty:
    """Stands for the value of a cell that has none."""


class Variable(NamedTuple):
    """A value that a function sees."""

    name: str
    value: Any
    look: Look | None = None
    """Gives another object once the value is replaced; None where it cannot be."""
    level: int = 0
    """How many other values it is reached through."""


def variables(function: Callable[..., Any]) -> Iterator[Variable]:
    """The function, without a name, then each value that it sees, followed by those that are seen
    through it, for a function that comes again only once. What is too deep is an object of which
    nothing is known."""
    return _followed(Variable("", function), (), set())


def is_constant(value: Any) -> bool:
    """Whether a value cannot change (but for attributes that are variables) and can be a key."""
    kind = type(value)
    of_torch = kind.__module__ in ("torch", "torch._ops") and kind.__name__ in _TORCHS
    return of_torch or isinstance(value, _CONSTANT)


def _followed(variable: Variable, names: Names, known: set[FunctionType]) -> Iterator[Variable]:
    """A variable and what is seen through it. `names` are those of the code that sees it."""
    yield variable
    if isinstance(variable.value, FunctionType):
        if variable.value in known:
            return
        known.add(variable.value)
        names = tuple(dict.fromkeys(_names(variable.value.__code__)))
    level = variable.level + 1
    for one in _inside(variable.name, variable.value, names):
        value = one.value if level < _DEPTH else _TOO_DEEP
        yield from _followed(one._replace(value=value, level=level), names, known)


def _inside(name: str, value: Any, names: Names) -> Iterator[Variable]:
    match value:
        case FunctionType():
            yield from _of_function(value, names)
        case partial():
            yield Variable(name, value.func)
            yield from (Variable(name, given) for given in value.args)
            for key, given in value.keywords.items():
                yield Variable(key, given, partial(value.keywords.get, key))
        case MethodType():
            yield Variable(name, value.__func__)
            yield Variable(name, value.__self__)
        case tuple() | list():
            yield from (Variable(name, one) for one in value)
        case ModuleType() | type() if not _is_of_a_library(value):
            for own in names:
                if hasattr(value, own):
                    yield Variable(own, getattr(value, own), partial(getattr, value, own, None))


def _of_function(function: FunctionType, names: Names) -> Iterator[Variable]:
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Variable(name, _contents(cell), partial(_contents, cell))
    defaults = function.__defaults__ or ()
    last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    for name, value in zip(last, defaults, strict=True):
        yield Variable(name, value, partial(getattr, function, "__defaults__"))
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Variable(name, value, partial(_keyword_default, function, name))
    for name in names:
        if name in known:
            yield Variable(name, known[name], partial(known.get, name))


def _names(code: CodeType) -> Iterator[str]:
    """The names that code may look up outside, also in functions that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _Empty


def _keyword_default(function: FunctionType, name: str) -> Any:
    return (function.__kwdefaults__ or {}).get(name)


def _is_of_a_library(value: ModuleType | type) -> bool:
    """Whether a module or a class is Python's, PyTorch's or NumPy's, whose attributes stay."""
    place = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return place.partition(".")[0] in _LIBRARIES
