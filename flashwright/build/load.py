"""A kernel package as a function: `load(folder)(q, k, v)`."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from flashwright.build import driver
from flashwright.build.arrays import Framework, framework_of
from flashwright.build.encode import encode
from flashwright.build.native import launcher
from flashwright.build.plan_rules import LAYOUTS, caller_order
from flashwright.build.reading import CUBIN, PLAN, PTX, read_cubin, read_plan, read_ptx
from flashwright.lang import html
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor, Postfix, evaluate

__all__ = [
    "CUBIN",
    "PLAN",
    "PTX",
    "Kernel",
    "OutputShapes",
    "dim_sources",
    "load",
    "read_plan",
    "tensors_as_html",
    "unshown",
]
CHECK_ONLY, BIND = 2, 4

# The source of the size of an output's axis: a number, the axis of an input, or an expression.
Source = int | tuple[int, int] | Postfix
DimSource = tuple[int, int, int]
"""Where a dimension is read off: which tensor, its axis, and the divisor of the axis."""
NO_DIMS: Mapping[str, DimSource] = {}
Places = Sequence[tuple[int, int]]
"""For each tensor of a plan: the argument whose memory it is in, and how many bytes from its start.
A negative argument: the tensor is not given."""


def load(folder: str | Path) -> Kernel:
    """The kernel in a folder made by `flashwright build` or `generate`.

    Raises Failed if the folder has no kernel, or if no GPU can be used.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    cubin, ptx = read_cubin(folder, plan), (read_ptx(folder / PTX, plan) or "").encode()
    if not (cubin or ptx):
        hint = f"flashwright build {folder}"
        raise Failed(Diagnostic("FW852", f"{folder} has no {CUBIN} and no {PTX}", help=hint))
    return Kernel(plan, cubin, ptx)


def tensors_as_html(plan: LaunchPlan) -> str:
    """The tensors of a kernel as a table, for notebooks."""
    rows = [
        (t.name, "output" if t.written else "input", t.dtype, ", ".join(a.label for a in t.axes))
        for t in plan.tensors
    ]
    return html.table(("tensor", "is", "type", "axes"), rows)


class Kernel:
    """A compiled kernel. Call it with tensors of PyTorch, CuPy or JAX on a CUDA device."""

    def __init__(self, plan: LaunchPlan, cubin: bytes, ptx: bytes = b"") -> None:
        driver.cards()  # raises Failed with FW851 without a GPU
        code = encode(plan)
        # The driver takes PTX as a null-terminated string.
        text = ptx + b"\0" if ptx else b""
        made = launcher().make(cubin, text, list(code.numbers), list(code.words))
        self._describe(plan, made)

    def _describe(
        self,
        plan: LaunchPlan,
        run: Callable[..., None],
        scratch: tuple[str, ...] = (),
        zeroed: tuple[str, ...] = (),
    ) -> None:
        """Set what a call needs. `run` takes the mode, and all tensors and dimensions in the plan's
        order; `scratch` is allocated at each call, `zeroed` begins at 0."""
        self.plan, self.run, self.scratch, self.zeroed = plan, run, scratch, zeroed
        self.inputs = tuple(t.name for t in plan.tensors if t.read)
        written = (t.name for t in plan.tensors if t.written)
        self.outputs = tuple(name for name in written if name not in scratch)
        self._index = {t.name: i for i, t in enumerate(plan.tensors)}
        self._positions = [self._index[name] for name in self.inputs]
        self._dim_index = {name: i for i, name in enumerate(plan.dims)}
        self._shapes = [OutputShapes(plan, layout) for layout in LAYOUTS]

    def __repr__(self) -> str:
        return (
            f"<flashwright kernel {self.plan.entry}({', '.join(self.inputs)}) for {self.plan.arch}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: a table of the tensors."""
        return html.heading(repr(self).strip("<>")) + tensors_as_html(self.plan)

    def __call__(
        self,
        *tensors: Any,
        out: Any = None,
        outputs: Iterable[str] | None = None,
        layout: str = "bhsd",
        **named: Any,
    ) -> Any:
        """Launch on the current stream. Returns the first output, or a tuple of `outputs`.

        Inputs come in the order of `inputs`, or by name. `out` is a tensor for the first output, or
        a mapping of names to tensors. A dimension that no tensor has as an axis is given by name,
        as in `kernel(q, k, v, tokens=4096)`.
        """
        mode = _mode(layout)
        given, dims = self._arguments(tensors, named)
        wanted = self._wanted(out, outputs)
        self._put(given, out)
        framework = framework_of(given[self._positions[0]])
        self._allocate(framework, mode, (*wanted, *self.scratch), given, dims)
        framework.launch(self.run, mode, given, dims)
        found = tuple(given[self._index[name]] for name in wanted)
        return found if outputs is not None else found[0]

    def launch(self, tensors: Sequence[Any], dims: Sequence[Any], check_only: bool = False) -> None:
        """Launch on PyTorch's current stream. All tensors and dimensions are in the plan's order,
        None if not given."""
        self.run(CHECK_ONLY if check_only else 0, *tensors, *dims)

    def bound(self, tensors: Sequence[Any], dims: Sequence[Any], places: Places) -> Any:
        """The launch for tensors of these shapes and strides, as a function of the arguments that
        `places` names, on PyTorch's current stream. It checks addresses; all else is checked here.
        """
        numbers = [*itertools.chain(*places)]
        return launcher().at_places(self.run(BIND, *tensors, *dims), numbers)

    def serving(self, tensors: Sequence[Any], dims: Sequence[Any]) -> Kernel:
        """The kernel that a launch of these, in the plan's order, takes."""
        return self

    def needed(self, wanted: Sequence[str]) -> dict[str, bool]:
        """The tensors that a call takes beside its inputs and the outputs that the caller wants,
        and whether they begin at 0."""
        return {}

    def of_tensors(self, names: Sequence[str], dims: Mapping[str, DimSource] = NO_DIMS) -> Any:
        """The launch as a tvm-ffi function of these tensors in this order, on tvm-ffi's current
        stream. Outputs that are not named are not stored. It runs no Python.

        `dims` are the dimensions that no tensor of the kernel has: which of the tensors has them.
        """
        places = [names.index(t.name) if t.name in names else -1 for t in self.plan.tensors]
        sources = (dims.get(name, (-1, 0, 1)) for name in self.plan.dims)
        return launcher().of_tensors(self.run, places, [*itertools.chain(*sources)])

    def memory(self, inputs: Sequence[Any]) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and the type of each output and of scratch, for inputs of these shapes."""
        given, dims = self._arguments(inputs, {})
        return self.shapes((*self.outputs, *self.scratch), given, dims)

    def shapes(
        self, names: Iterable[str], given: Sequence[Any], dims: Sequence[Any]
    ) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shape and the type of what is written, for a call's tensors and dimensions in the
        plan's order."""
        places = {name: self._index[name] for name in names}
        shapes = {n: self._shapes[0].of(i, given, dims) for n, i in places.items()}
        plans = {n: self.plan.tensors[i] for n, i in places.items()}
        return {n: (plans[n].padded(shape), plans[n].dtype) for n, shape in shapes.items()}

    def _arguments(
        self, tensors: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """All tensors and dimensions in the plan's order, None if not given."""
        given: list[Any] = [None] * len(self.plan.tensors)
        dims: list[Any] = [None] * len(self.plan.dims)
        if len(tensors) > len(self._positions):
            raise TypeError(
                f"{len(tensors)} tensors are given, but the kernel has {len(self._positions)} "
                f"inputs: {', '.join(self.inputs)} (outputs are given as out=)"
            )
        for index, tensor in zip(self._positions, tensors, strict=False):
            given[index] = tensor
        for name, value in named.items():
            if name in self._dim_index:
                dims[self._dim_index[name]] = _whole(name, value)
            elif name not in self.inputs:
                raise TypeError(self._unknown(name))
            elif given[self._index[name]] is not None:
                raise TypeError(f"`{name}` is given twice, by its place and by its name")
            else:
                given[self._index[name]] = value
        missing = [n for n in self.inputs if given[self._index[n]] is None]
        if missing:
            raise TypeError(
                f"the input `{missing[0]}` is missing; needed: {', '.join(self.inputs)}"
            )
        return given, dims

    def _unknown(self, name: str) -> str:
        if name in self.outputs:
            return f"`{name}` is an output: give it as out={{{name!r}: tensor}}"
        known = [*self.inputs, *self.plan.dims]
        folded = {k.lower(): k for k in known}  # PyTorch uses the names q, k, v
        near = [folded[n] for n in difflib.get_close_matches(name.lower(), folded, 1, cutoff=0.4)]
        return f"there is no input `{name}`: " + (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        )

    def _wanted(self, out: Any, outputs: Iterable[str] | None) -> tuple[str, ...]:
        if outputs is None:
            return self.outputs[:1]
        wanted = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        for name in wanted:
            if name not in self.outputs:
                raise TypeError(f"there is no output `{name}`: there are {', '.join(self.outputs)}")
        return wanted

    def _put(self, given: list[Any], out: Any) -> None:
        """Put the caller's output tensors among the arguments."""
        if out is None:
            return
        for name, tensor in (out if isinstance(out, dict) else {self.outputs[0]: out}).items():
            if name not in self.outputs:
                raise TypeError(
                    f"out names `{name}`, which is no output: there are {', '.join(self.outputs)}"
                )
            given[self._index[name]] = tensor

    def _allocate(
        self,
        framework: Framework,
        mode: int,
        names: Iterable[str],
        given: list[Any],
        dims: Sequence[Any],
    ) -> None:
        """Allocate outputs and scratch that the caller has not given."""
        for name in names:
            index = self._index[name]
            if given[index] is None:
                given[index] = self._empty(framework, mode, index, given, dims)

    def _empty(
        self, framework: Framework, mode: int, index: int, given: list[Any], dims: Sequence[Any]
    ) -> Any:
        """A new tensor from the framework of the first input."""
        first, tensor = given[self._positions[0]], self.plan.tensors[index]
        try:
            if tensor.flat:
                text = f"`{tensor.name}` is a view into memory that only you can size"
                raise TypeError(f"{text}: give it, out=...")
            shape = self._shapes[mode].of(index, given, dims)
            zero = tensor.name in self.zeroed
            made = framework.new(first, tensor.padded(shape), tensor.dtype, zero)
            return made[..., : shape[-2], :] if tensor.fragments else made
        except Exception:
            # If the tensors do not fit the plan, the launcher reports it.
            framework.launch(self.run, mode | CHECK_ONLY, given, dims)
            raise


class OutputShapes:
    """The shapes of the outputs, with everything that is known before a call precomputed."""

    def __init__(self, plan: LaunchPlan, layout: str) -> None:
        self.plan = plan
        self.sources = dim_sources(plan, layout)
        self.axes = {i: self._axes(t, layout) for i, t in enumerate(plan.tensors) if t.written}
        self._picked = {i: self._picker(axes, layout) for i, axes in self.axes.items()}

    def of(self, index: int, given: Sequence[Any], dims: Sequence[Any]) -> Sequence[int]:
        """One output's shape, for these inputs."""
        picked = self._picked[index]
        if picked is not None:
            tensor, numbers, pick = picked
            return pick((*given[tensor].shape, *numbers))
        shape = []
        for axis in self.axes[index]:
            size = 1
            for source in axis:
                if isinstance(source, int):
                    size *= source
                elif isinstance(source[0], int) and len(source) == 2:
                    size *= given[source[0]].shape[source[1]]
                else:
                    size *= evaluate(source, self.dims(given, dims))
            shape.append(size)
        return shape

    def _picker(
        self, axes: list[list[Source]], layout: str
    ) -> tuple[int, list[int], Callable[[Any], Sequence[int]]] | None:
        """An input, numbers, and which of both are the sizes of an output; None if that is not all
        there is to it."""
        sources = [axis[0] if len(axis) == 1 else () for axis in axes]
        inputs = {s[0] if len(s) == 2 else None for s in sources if not isinstance(s, int)}
        tensor = inputs.pop() if len(inputs) == 1 else None
        if not isinstance(tensor, int) or len(sources) < 2:  # itemgetter(0) gives no tuple
            return None
        numbers = [s for s in sources if isinstance(s, int)]
        places = itertools.count(len(caller_order(self.plan.tensors[tensor], layout)))
        which = [next(places) if isinstance(s, int) else int(s[1]) for s in sources]
        return tensor, numbers, itemgetter(*which)

    def _axes(self, tensor: PlanTensor, layout: str) -> list[list[Source]]:
        order = caller_order(tensor, layout)
        return [[self._source(tensor.axes[p].size) for p in parts] for parts in order]

    def _source(self, size: Postfix) -> Source:
        if len(size) > 1:
            return size
        (token,) = size
        if isinstance(token, int):
            return token
        found = self.sources.get(token)
        return found[:2] if found and found[2] == 1 else size

    def dims(self, given: Sequence[Any], dims: Sequence[Any]) -> dict[str, int]:
        """All dimensions by name: as the inputs show them, else as the caller gives them."""
        found = {d: v for d, v in zip(self.plan.dims, dims, strict=True) if v is not None}
        for name, (tensor, axis, part) in self.sources.items():
            found[name] = given[tensor].shape[axis] // part
        return found


def shown_dims(plan: LaunchPlan, arrays: Mapping[str, Any]) -> dict[str, int]:
    """The dims that the shapes of inputs, in the caller's order of axes, show."""
    found = {}
    for dim, (index, axis, divisor) in dim_sources(plan, LAYOUTS[0]).items():
        array = arrays.get(plan.tensors[index].name)
        if array is not None and axis < len(array.shape):
            found[dim] = array.shape[axis] // divisor
    return found


def dim_sources(plan: LaunchPlan, layout: str) -> dict[str, DimSource]:
    """For each dimension an input that has it: its index, the axis, and the divisor of the axis."""
    sources: dict[str, DimSource] = {}
    split: DimSource | None = None
    for index, tensor in enumerate(plan.tensors):
        if not tensor.read or tensor.flat:
            continue
        for axis, parts in enumerate(caller_order(tensor, layout)):
            sizes = [tensor.axes[p].size for p in parts]
            numbers = [s[0] for s in sizes if len(s) == 1 and isinstance(s[0], int)]
            for size in sizes:
                if len(size) == 1 and isinstance(size[0], str):
                    divisor = 1
                    for number in numbers:
                        divisor *= int(number)
                    sources.setdefault(size[0], (index, axis, divisor))
                    if size[0] == "kv_heads" and len(sizes) > 1:
                        split = split or (index, axis, 1)
    if split is not None and "heads" in plan.dims:  # heads split into kv heads and groups
        sources.setdefault("heads", split)
    return sources


def unshown(plan: LaunchPlan) -> tuple[str, ...]:
    """The dimensions that no input has as an axis; the caller gives them by name."""
    shown = dim_sources(plan, LAYOUTS[0])
    return tuple(name for name in plan.dims if name not in shown)


def _mode(layout: str) -> int:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {' or '.join(map(repr, LAYOUTS))}, not {layout!r}")
    return LAYOUTS.index(layout)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"`{name}` is a dimension: give a whole number, not {type(value).__name__}")
    return int(value)
