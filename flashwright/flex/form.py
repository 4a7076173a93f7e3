"""What a function is apart from the tensors that it sees.

    form = form_of(causal_documents(ids))

Two functions with one `key` compute the same from their tensors: they have the same code, and the
same numbers and functions in their closures. A model makes new functions with new tensors for every
batch; their kernel is made once, and takes the tensors of each call.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_MODULES = (torch, math, operator)
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_DEPTH = 8


@dataclass(frozen=True)
class Form:
    """A function's key, and the tensors that it sees, in the order of the key."""

    key: Hashable
    tensors: tuple[Any, ...]

    @property
    def device(self) -> Any:
        """Where the function's arguments must be."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")


class _Unknown(Exception):
    """Something whose value a key cannot hold."""


def form_of(function: Callable[..., Any]) -> Form | None:
    """The form of a function; None if it sees an object that may change unseen."""
    tensors: list[Any] = []
    try:
        return Form(_described(function, tensors, _DEPTH), tuple(tensors))
    except _Unknown:
        return None


def _described(value: Any, tensors: list[Any], depth: int) -> Hashable:
    if not depth:
        raise _Unknown
    if isinstance(value, torch.Tensor):
        number = next((n for n, known in enumerate(tensors) if known is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return ("tensor", number, value.dtype, value.dim())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, types.FunctionType):
        return _of_function(value, tensors, depth - 1)
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *(x for pair in value.keywords.items() for x in pair))
        return ("partial", len(value.args), _each(parts, tensors, depth - 1))
    if isinstance(value, tuple | list):
        return (type(value), _each(value, tensors, depth - 1))
    if isinstance(value, types.BuiltinFunctionType | type) or any(value is m for m in _MODULES):
        return ("object", value)
    raise _Unknown


def _each(values: Any, tensors: list[Any], depth: int) -> tuple[Hashable, ...]:
    return tuple(_described(value, tensors, depth) for value in values)


def _of_function(function: types.FunctionType, tensors: list[Any], depth: int) -> Hashable:
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        raise _Unknown from None
    known = function.__globals__
    seen = [known[name] for name in _names(function.__code__) if name in known]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (function.__code__, _each((*cells, *defaults, *seen), tensors, depth))


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that code may look up outside, also in functions that it defines."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
