"""The kernels behind the functions of this package: made once for each task, and called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.flex.task import (
    NoKernel,
    Task,
    find_or_make,
    first_results,
)
from flashwright.generate.packed import PackedOrder
from flashwright.lang.diagnostic import Failed
from flashwright.pytorch.operator import Operator, torch_operator
from flashwright.spec import Batch

Tensors = Mapping[str, Any]
Check = Callable[[Tensors], None]
"""A look at the first results, by their names."""


@dataclass(frozen=True)
class Wanted:
    """A kernel that a call needs."""

    task: Task
    batch: Batch
    backward: bool = False

    @property
    def order(self) -> Any:
        """What the store finds or makes."""
        order = PackedOrder(self.task.spec.of_sequences(self.batch), self.task.card)
        return order.backward if self.backward else order

    def run(self, tensors: Tensors, sizes: Mapping[str, int], check: Check) -> dict[str, Any]:
        """The results by their names, from tensors and sizes that have those of the kernel among
        them. `check` sees the results of a kernel that was made now."""
        entry = _KERNELS.get(self) or self._new_entry()
        operator = entry.operator
        dims: dict[str, Any] = {name: sizes[name] for name in operator.dims}
        found = operator.compute(*(tensors[name] for name in operator.inputs), **dims)
        results = {n.lower(): x for n, x in zip(operator.outputs, found, strict=True)}
        if entry.new:
            with first_results(entry, _KERNELS, self):
                check(results)
        return results

    def _new_entry(self) -> _Entry:
        try:
            folder, new = find_or_make(self.order)
            entry = _KERNELS[self] = _Entry(torch_operator(folder), folder, new)
        except Failed as error:
            raise NoKernel(str(error)) from None
        return entry


@dataclass
class _Entry:
    operator: Operator
    folder: Path
    new: bool
    """Whether the kernel was made now, so that its first results are checked."""


_KERNELS: dict[Wanted, _Entry] = {}
