"""The kernels behind the functions of this package: made once for each task, and called.

What a call asks for is looked at once for each form: the options, and the shapes, strides, types
and devices of its tensors. Later calls of that form only pass on where their tensors lie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashwright.author.builtin.mods import Mods
from flashwright.build.native import launcher
from flashwright.flex.task import (
    NoKernel,
    Task,
    find_or_make,
    first_results,
)
from flashwright.generate.packed import PackedOrder
from flashwright.generate.store import Order
from flashwright.lang.diagnostic import Failed
from flashwright.pytorch.bound import Bound
from flashwright.pytorch.operator import Operator, torch_operator, undisturbed
from flashwright.spec import Batch

Tensors = Mapping[str, Any]
Check = Callable[[Tensors], None]
"""A look at the first results, by their names."""
Form = tuple[Any, ...]


@dataclass(frozen=True)
class Wanted:
    """A kernel that a call needs."""

    task: Task
    batch: Batch | None
    """How sequences lie; None if they have one length."""
    mods: Mods | None = None
    """A mask on top of the task's."""
    gradients: tuple[str, ...] = ()
    """Of which inputs, if it is the backward."""
    deterministic: bool = False

    @property
    def order(self) -> Any:
        """What the store finds or makes."""
        if self.batch is None:
            return Order(self.task.spec, self.task.card, self.mods)
        order = PackedOrder(self.task.spec.of_sequences(self.batch), self.task.card, self.mods)
        return order.backward(self.gradients, self.deterministic) if self.gradients else order

    def run(self, tensors: Tensors, sizes: Mapping[str, int], check: Check) -> dict[str, Any]:
        """The results by their names, from tensors and sizes that have those of the kernel among
        them. `check` sees the results of a kernel that was made now."""
        entry = self.entry()
        operator = entry.operator
        dims: dict[str, Any] = {name: sizes[name] for name in operator.dims}
        found = operator.compute(*(tensors[name] for name in operator.inputs), **dims)
        results = {n.lower(): x for n, x in zip(operator.outputs, found, strict=True)}
        entry.look(self, results, check)
        return results

    def entry(self) -> Entry:
        """The kernel, made at the first call. Raises NoKernel."""
        entry = _KERNELS.get(self)
        if entry is None:
            try:
                folder, new = find_or_make(self.order)
                entry = _KERNELS[self] = Entry(torch_operator(folder), folder, new)
            except Failed as error:
                raise NoKernel(str(error)) from None
        return entry


@dataclass
class Entry:
    """A kernel that was made for a task."""

    operator: Operator
    folder: Path
    new: bool
    """Whether the kernel was made now, so that its first results are checked."""

    def look(self, wanted: Wanted, results: Tensors, check: Check) -> None:
        """Check the results of a new kernel."""
        if self.new:
            with first_results(self, _KERNELS, wanted):
                check(results)


_KERNELS: dict[Wanted, Entry] = {}


# --- forms of calls -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A call for O and LSE, whose arguments have been checked."""

    wanted: Wanted
    tensors: Tensors
    """As the kernel takes them, by their names."""
    sizes: Mapping[str, int]
    check: Check

    def run(self) -> Sequence[Any]:
        """O, with tokens before heads, and LSE: through PyTorch's dispatcher."""
        found = self.wanted.run(self.tensors, self.sizes, self.check)
        return [*_rows_first([found["o"]]), found["lse"]]


class _Ready:
    """Calls of one form."""

    def __init__(self, asked: Asked, callers: Tensors, count: int) -> None:
        operator = asked.wanted.entry().operator
        tensors = [asked.tensors[name] for name in operator.inputs]
        self._bound: Bound = operator.bound(tensors, asked.sizes, _FORMS[count])
        names = [name for name, tensor in callers.items() if tensor is not None]
        constants = [name for name in operator.inputs if name not in names]
        for name in set(names) & set(operator.inputs):
            assert callers[name].data_ptr() == asked.tensors[name].data_ptr(), name
        self._constants = tuple(asked.tensors[name] for name in constants)
        order = [*callers, *constants]
        self._places = [
            order.index(n) if n in names else order.index(n, len(callers)) for n in operator.inputs
        ]

    def __call__(self, tensors: tuple[Any, ...]) -> list[Any]:
        """The results, from the caller's tensors."""
        every = tensors + self._constants
        return self._bound(*[every[place] for place in self._places])


_LOCK = threading.Lock()
_READY: dict[Form, Any] = {}
_MOST = 1024
"""Forms to remember."""


def form_of(options: Form, tensors: Sequence[Any]) -> Form | None:
    """What decides how a call is done. None if PyTorch's dispatcher has to see the call."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not undisturbed(given):
        return None
    return *options, *[tensor is None for tensor in tensors], _look()(*given)


@cache
def _look() -> Any:
    """The function that has the form of tensors as bytes: in Python it would be half of a call."""
    return launcher().form()


def attend(
    options: Form, callers: Tensors, lse: bool, prepare: Callable[[], Asked]
) -> Sequence[Any]:
    """O of a call, with tokens before heads, and LSE if it is wanted. `prepare` looks at the
    arguments: once for each form. `callers` has the names of the kernel's tensors, and None for
    those that the caller has not given."""
    tensors = (*callers.values(),)
    form = form_of((*options, lse), tensors)
    if form is None:
        return prepare().run()
    ready: _Ready | None = known(form)
    if ready is not None:
        return ready(tensors)
    asked = prepare()
    ready = _Ready(asked, callers, 1 + lse)
    found = ready(tensors)
    asked.wanted.entry().look(asked.wanted, {"o": _rows_first(found)[0]}, asked.check)
    if not captured(found[0]):  # else what was made for the form belongs to the graph
        remember(form, ready)
    return found


def known(form: Form) -> Any:
    """What was remembered for calls of a form; None if there is nothing."""
    return _READY.get(form)


def remember(form: Form, ready: Any) -> None:
    """Keep what does calls of a form, in place of the oldest one if there are many."""
    with _LOCK:
        while len(_READY) >= _MOST:
            del _READY[next(iter(_READY))]
        _READY[form] = ready


def captured(tensor: Any) -> bool:
    """Whether a CUDA graph is being captured."""
    return bool(tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _rows_first(outputs: Sequence[Any]) -> list[Any]:
    """O alone, with heads and tokens exchanged."""
    return [outputs[0].transpose(-3, -2)]


def _with_lse(outputs: Sequence[Any]) -> list[Any]:
    return [*_rows_first(outputs), outputs[1]]


_FORMS = {1: _rows_first, 2: _with_lse}
