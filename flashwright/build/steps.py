"""A package whose program has several kernels: one call launches all of them, in order.

Each kernel is a kernel package in a subfolder. steps.json names them in their order, and the
tensors between them, which the framework allocates at each call:

    {"steps": ["1", "2", "3"], "scratch": ["Delta", "dQsum"], "zeroed": ["dQsum"]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flashwright.build.arrays import Framework, framework_of
from flashwright.build.load import CHECK_ONLY, NO_DIMS, DimSource, Kernel, Places, unshown
from flashwright.build.load import load as load_one
from flashwright.build.native import launcher
from flashwright.build.package import STEPS
from flashwright.build.reading import read_model, read_plan, unusable
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor
from flashwright.program.kernels import Kernels

MOST_STEPS = 16
_HINT = "`flashwright build` makes such packages"


class Steps(BaseModel):
    """The kernels of a package in the order of their launches, and what is between them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    steps: tuple[str, ...] = Field(min_length=1, max_length=MOST_STEPS)
    scratch: tuple[str, ...] = ()
    zeroed: tuple[str, ...] = ()
    """The tensors that begin at 0."""

    @classmethod
    def of(cls, kernels: Kernels) -> Steps:
        """The steps of a program; the subfolders are numbered."""
        return cls(
            steps=tuple(str(n) for n in range(1, len(kernels.programs) + 1)),
            scratch=tuple(t.name for t in (*kernels.scratch, *kernels.counters)),
            zeroed=tuple(t.name for t in (*kernels.zeroed, *kernels.counters)),
        )

    def dump(self) -> str:
        """As JSON text."""
        return self.model_dump_json(indent=1) + "\n"


def read(folder: Path) -> Steps | None:
    """The steps of a package; None if it has no steps.json. Raises Failed with FW852."""
    path = folder / STEPS
    found = read_model(Steps, path, _HINT)
    for name in found.steps if found is not None else ():
        if not name.isdigit() or not (folder / name).is_dir():
            raise unusable(path, f"there is no subfolder {name!r}", _HINT)
    return found


def load(folder: Path, steps: Steps) -> StepsKernel:
    """The kernels of a package as one function. Raises Failed as build.load.load does."""
    kernels = [load_one(folder / name) for name in steps.steps]
    known = {t.name for kernel in kernels for t in kernel.plan.tensors if t.written}
    for name in (*steps.scratch, *steps.zeroed):
        if name not in known:
            raise unusable(folder / STEPS, f"no kernel writes {name!r}", _HINT)
    return StepsKernel(kernels, steps)


class StepsKernel(Kernel):
    """Several kernels as one function, called as a Kernel is."""

    def __init__(self, kernels: Sequence[Kernel], steps: Steps) -> None:
        plan = joined([kernel.plan for kernel in kernels], steps.scratch)
        self._kernels = kernels
        self._describe(plan, self._run, steps.scratch, steps.zeroed)
        order = [*(t.name for t in plan.tensors), *plan.dims]
        self._arguments_of = [
            [order.index(name) for name in (*(t.name for t in k.plan.tensors), *k.plan.dims)]
            for k in kernels
        ]
        self._dims_at = len(plan.tensors)
        hidden = {name for kernel in kernels for name in unshown(kernel.plan)}
        self._hidden = [(n, name) for n, name in enumerate(plan.dims) if name in hidden]

    def _run(self, mode: int, *arguments: Any) -> None:
        told = self._told(mode, list(arguments)) if self._hidden else arguments
        for kernel, places in zip(self._kernels, self._arguments_of, strict=True):
            given = [told[place] for place in places]
            read = (x for x, t in zip(given, kernel.plan.tensors, strict=False) if t.read)
            if mode & CHECK_ONLY and any(x is None for x in read):
                continue  # scratch, which a check does without
            kernel.run(mode, *given)

    def _allocate(
        self,
        framework: Framework,
        mode: int,
        names: Iterable[str],
        given: list[Any],
        dims: Sequence[Any],
    ) -> None:
        """Allocate everything that the caller has not given: no kernel does without an output. What
        the caller gives for a sum begins at 0."""
        for name in self.zeroed:
            if given[self._index[name]] is not None:
                framework.clear(given[self._index[name]])
        super()._allocate(framework, mode, (*self.outputs, *self.scratch), given, dims)

    def _told(self, mode: int, arguments: list[Any]) -> list[Any]:
        """The arguments with the dimensions that only other kernels' tensors have as an axis."""
        sources = self._shapes[mode & ~CHECK_ONLY].sources
        for place, name in self._hidden:
            if name in sources:
                tensor, axis, part = sources[name]
                arguments[self._dims_at + place] = arguments[tensor].shape[axis] // part
        return arguments

    def launch(self, tensors: Sequence[Any], dims: Sequence[Any], check_only: bool = False) -> None:
        """Launch all kernels on PyTorch's current stream, as Kernel.launch does. The tensors are
        those of caller_plan: scratch is none of them."""
        given = [*tensors, *(None for _ in self.scratch)]
        if not check_only:
            self._allocate(framework_of(given[self._positions[0]]), 0, self.scratch, given, dims)
        super().launch(given, dims, check_only)

    def needed(self, wanted: Sequence[str]) -> dict[str, bool]:
        """Scratch, and all outputs: no kernel does without one."""
        names = (name for name in (*self.outputs, *self.scratch) if name not in wanted)
        return {name: name in self.zeroed for name in names}

    def bound(self, tensors: Sequence[Any], dims: Sequence[Any], places: Places) -> Any:
        """All launches as one function, as Kernel.bound."""
        told = self._told(0, [*tensors, *dims])
        made = []
        for kernel, order in zip(self._kernels, self._arguments_of, strict=True):
            count = len(kernel.plan.tensors)
            own, sizes = [told[n] for n in order[:count]], [told[n] for n in order[count:]]
            made.append(kernel.bound(own, sizes, [places[n] for n in order[:count]]))
        return launcher().in_order(made)

    def of_tensors(self, names: Sequence[str], dims: Mapping[str, DimSource] = NO_DIMS) -> Any:
        """All launches as a function of these tensors, as Kernel.of_tensors. Scratch is among them,
        and what is `zeroed` has to be 0."""
        tensors = [t.name for t in self.plan.tensors]
        sources = {
            dim: (names.index(tensors[place]), axis, part)
            for dim, (place, axis, part) in self._shapes[0].sources.items()
        }
        made = []
        for kernel in self._kernels:
            hidden = {dim: sources[dim] for dim in unshown(kernel.plan) if dim in sources}
            made.append(kernel.of_tensors(names, {**hidden, **dims}))
        return launcher().in_order(made)


def caller_plan(folder: Path, steps: Steps) -> LaunchPlan:
    """The plan of a package, as the caller sees it: without scratch."""
    plan = joined([read_plan(folder / name) for name in steps.steps], steps.scratch)
    seen = tuple(t for t in plan.tensors if t.name not in steps.scratch)
    return plan.model_copy(update={"tensors": seen})


def joined(plans: Iterable[LaunchPlan], scratch: Sequence[str]) -> LaunchPlan:
    """The plan of all kernels: inputs, outputs, then scratch. The grid, the threads and the shared
    memory are those of the first."""
    plans = tuple(plans)
    written = {t.name for plan in plans for t in plan.tensors if t.written}
    both = {t.name for plan in plans for t in plan.tensors if t.read and t.written}
    kept = both - {*scratch}  # in place: the caller's, and changed
    found: dict[str, PlanTensor] = {}
    for tensor in (t for plan in plans for t in plan.tensors):
        before = found.get(tensor.name, tensor)
        given = tensor.name not in written or tensor.name in kept
        new = {"read": given, "written": tensor.name in written}
        vector = max(tensor.vector, before.vector)
        found[tensor.name] = tensor.model_copy(update={**new, "vector": vector})
    rank = dict.fromkeys(scratch, 2)
    order = sorted(found.values(), key=lambda t: rank.get(t.name, int(t.written)))
    dims = tuple(dict.fromkeys(d for plan in plans for d in plan.dims))
    return plans[0].model_copy(update={"tensors": tuple(order), "dims": dims, "maps": ()})
