"""What a function is apart from the tensors that it sees.

    form = form_of(causal_documents(ids))

Two functions with one `key` compute the same from their tensors: they have the same code, and the
same numbers and functions in their closures. A model makes new functions with new tensors for every
batch; their kernel is made once, and takes the tensors of each call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flashwright.flex.closure import is_constant, variables


@dataclass(frozen=True)
class Form:
    """A function's key, and the tensors that it sees, in the order of the key."""

    key: Hashable
    tensors: tuple[Any, ...]

    @property
    def device(self) -> Any:
        """Where the function's arguments must be."""
        return self.tensors[0].device if self.tensors else torch.device("cpu")


def form_of(function: Callable[..., Any]) -> Form | None:
    """The form of a function; None if it sees an object that may change unseen."""
    tensors: list[Any] = []
    functions: dict[types.FunctionType, int] = {}
    key: list[Hashable] = []
    for name, value, _, level in variables(function):
        if isinstance(value, torch.Tensor):
            number = next((n for n, known in enumerate(tensors) if known is value), len(tensors))
            if number == len(tensors):
                tensors.append(value)
            described: Hashable = (number, value.dtype, value.dim())
        elif isinstance(value, types.FunctionType):
            described = (value.__code__, functions.setdefault(value, len(functions)))
        elif is_constant(value):
            described = value
        elif not isinstance(value, types.MethodType | functools.partial | tuple | list):
            return None
        else:  # its parts are variables that follow
            described = None
        key.append((level, name, type(value), described))
    return Form(tuple(key), tuple(tensors))
