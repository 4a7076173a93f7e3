"""The interpreter: a checked program executed with NumPy, block by block, as on the GPU.

Tiles are computed in fp32 and rounded to their element type where the kernel rounds: when they are
written to a buffer of that type, and when a Reshape makes an MMA operand of them.
"""

# ruff: noqa: D102  the methods of the arithmetic are those of check.machine.Arithmetic

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Name
from flashwright.program.kernels import Kernels
from flashwright.program.program import Program, Tensor
from flashwright.program.scalars import NotScalar, Value, evaluate, whole
from flashwright.semantics.machine import Machine, Observer
from flashwright.semantics.masks import ARITHMETIC, COMPARE
from flashwright.semantics.state import Region

Array = NDArray[Any]

NUMPY_DTYPES: dict[str, Any] = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "fp32": np.float32,
    "int32": np.int32,
    "int8": np.int8,
}
_SATURATES = {"e4m3": (-448.0, 448.0), "e5m2": (-57344.0, 57344.0), "int8": (-128.0, 127.0)}
"""The types whose stores saturate, and their range."""


def interpret(
    program: Program,
    inputs: Mapping[str, Array],
    dims: Mapping[str, int] | None = None,
    observe: Observer | None = None,
    blocks: Callable[[Mapping[str, int]], bool] | None = None,
) -> dict[str, Array]:
    """The outputs of a program. Raises Failed if the program does something invalid.

    `dims` gives the sizes that the inputs' shapes do not; `observe` is called after every
    statement; `blocks` picks the thread blocks to run (all of them by default).
    """
    sizes = bind(program, inputs, dims or {})
    numbers = NumPy(program, inputs, sizes)
    machine = Machine(program, sizes, numbers, observe)
    machine.partial = blocks is not None
    with np.errstate(all="ignore"):
        for block in list(machine.blocks()):
            if blocks is None or blocks(block):
                machine.run_block(block)
    if machine.findings:
        raise Failed(*machine.findings.values())
    return {t.name: numbers.result(t) for t in program.outputs}


def interpret_all(
    kernels: Kernels, inputs: Mapping[str, Array], dims: Mapping[str, int] | None = None
) -> dict[str, Array]:
    """The outputs of a program of several kernels, run one after another."""
    sizes = {**axis_sizes(kernels, inputs), **(dims or {})}
    tensors = dict(inputs)
    for program in kernels.programs:
        tensors |= interpret(program, tensors, sizes)
    return {t.name: tensors[t.name] for t in kernels.outputs}


def axis_sizes(kernels: Kernels, inputs: Mapping[str, Array]) -> dict[str, int]:
    """The dims that the inputs' shapes show, if several do that of the first."""
    sizes: dict[str, int] = {}
    for tensor in kernels.inputs:
        if tensor.name in inputs and inputs[tensor.name].ndim == len(tensor.axes):
            sizes = {**_sizes(tensor, inputs[tensor.name].shape, kernels.dims), **sizes}
    return sizes


def bind(program: Program, inputs: Mapping[str, Array], dims: Mapping[str, int]) -> dict[str, int]:
    """The run-time dims, from the shapes of the inputs; Failed if they contradict the program."""
    sizes = dict(dims)
    for tensor in program.inputs:
        if tensor.name not in inputs:
            given = ", ".join(sorted(inputs)) or "nothing"
            raise _mismatch(tensor, f"the program reads `{tensor.name}`; given are {given}")
        if tensor.offset is not None:
            continue
        shape = inputs[tensor.name].shape
        if len(shape) != len(tensor.axes):
            raise _mismatch(tensor, f"`{tensor.name}` has {len(tensor.axes)} axes, given {shape}")
        sizes = {**_sizes(tensor, shape, program.dims), **sizes}
    missing = [d for d in _needed(program) if d not in sizes]
    if missing:
        raise Failed(Diagnostic("FW904", f"no value is given for {', '.join(missing)}"))
    for tensor in program.inputs:
        expected = shape_of(tensor, program, sizes)
        if tensor.offset is None and inputs[tensor.name].shape != expected:
            found = inputs[tensor.name].shape
            raise _mismatch(tensor, f"`{tensor.name}` is {expected} here, but given {found}")
    return sizes


def _sizes(tensor: Tensor, shape: tuple[int, ...], dims: tuple[str, ...]) -> dict[str, int]:
    """The dims that are lengths of a tensor's axes."""
    named = zip((axis.size for axis in tensor.axes), shape, strict=False)
    return {e.id: size for e, size in named if isinstance(e, Name) and e.id in dims}


def _needed(program: Program) -> list[str]:
    from flashwright.lang.nodes import expressions, statements

    used = {
        e.id for s in statements(program.tree.body) for e in expressions(s) if isinstance(e, Name)
    }
    return [d for d in program.dims if d in used]


def _mismatch(tensor: Tensor, text: str) -> Failed:
    return Failed(Diagnostic("FW904", text, tensor.declared.span))


def shape_of(tensor: Tensor, program: Program, dims: Mapping[str, int]) -> tuple[int, ...]:
    """A tensor's shape for one problem."""
    sizes = []
    for axis in tensor.axes:
        try:
            value = evaluate(axis.size, {**dims, **program.params})
        except NotScalar as error:
            text = f"the length of axis {axis.label} of `{tensor.name}` is not known: {error}"
            hint = "give the dim a value in the spec: `[dims]`, or the length in known ones"
            raise Failed(Diagnostic("FW904", text, tensor.declared.span, help=hint)) from None
        size = whole(value)
        if size is None or size < 0:
            raise _mismatch(tensor, f"axis {axis.label} of `{tensor.name}` would be {value} long")
        sizes.append(size)
    return tuple(sizes)


class NumPy:
    """The machine's arithmetic: fp32 arrays, rounded on demand. Outputs start as NaN."""

    def __init__(
        self, program: Program, inputs: Mapping[str, Array], dims: Mapping[str, int]
    ) -> None:
        self.shapes = {t.name: shape_of(t, program, dims) for t in program.tensors.values()}
        self.arrays: dict[str, Array] = {}
        for tensor in program.tensors.values():
            if tensor.added:
                start = inputs.get(tensor.name, np.zeros(self.shapes[tensor.name]))
                self.arrays[tensor.name] = np.array(start, dtype=np.float32)
            elif tensor.read or tensor.kept:
                given = np.asarray(inputs[tensor.name])
                kind = given.dtype if tensor.dtype == "int32" else np.float32
                self.arrays[tensor.name] = np.ascontiguousarray(given.astype(kind))
            else:
                shape = inputs[tensor.name].shape if tensor.name in inputs else None
                shape = shape or self.shapes[tensor.name]
                self.arrays[tensor.name] = np.full(shape, np.nan, dtype=np.float32)

    def result(self, tensor: Tensor) -> Array:
        return self.arrays[tensor.name].astype(NUMPY_DTYPES[tensor.dtype])

    def _view(self, tensor: Tensor, offset: int | None) -> Array:
        array = self.arrays[tensor.name]
        if offset is None:
            return array
        shape = self.shapes[tensor.name]
        length = int(np.prod(shape))
        if offset < 0 or offset + length > array.size:
            text = f"offset {offset} takes `{tensor.name}` outside its {array.size} elements"
            raise Failed(Diagnostic("FW605", text, tensor.declared.span))
        return array.reshape(-1)[offset : offset + length].reshape(shape)

    def load(
        self,
        tensor: Tensor,
        region: Region,
        offset: int | None,
        shape: Sequence[int],
        lead: int = 0,
    ) -> Array:
        view = self._view(tensor, offset)
        part = view[_clip(region, view.shape)]
        pad = []
        outer = len(region) - len(shape)
        sizes = (*(1 for _ in range(outer)), *shape)
        for axis, ((start, _), size, have) in enumerate(
            zip(region, sizes, part.shape, strict=True)
        ):
            before = lead if lead and axis == outer else _before(start, size)
            pad.append((before, size - before - have))
        whole_tile = np.pad(part, pad) if any(map(any, pad)) else part
        return whole_tile.reshape(tuple(shape))

    def store(
        self,
        tensor: Tensor,
        region: Region,
        offset: int | None,
        data: Array,
        shape: Sequence[int],
        adds: bool = False,
        lead: int = 0,
    ) -> None:
        view = self._view(tensor, offset)
        place = _clip(region, view.shape)
        kept = view[place].shape
        tiled = list(zip(region, kept, strict=True))[len(kept) - len(shape) :]
        leads = [lead or _before(*tiled[0][0]), *(_before(*r) for r, _ in tiled[1:])]
        inside = tuple(slice(a, a + n) for a, (_, n) in zip(leads, tiled, strict=True))
        given = self.round(data[inside], tensor.dtype).reshape(kept)
        view[place] = view[place] + given if adds else given

    def element(self, tensor: Tensor, index: Sequence[int], offset: int | None) -> Value:
        found = self._view(tensor, offset)[tuple(index)]
        return int(found) if tensor.dtype == "int32" else float(found)

    def gather(self, tensor: Tensor, index: Sequence[Any], offset: int | None) -> Array:
        view = self._view(tensor, offset)
        found: Array = view[tuple(np.broadcast_arrays(*_clamped(index, view.shape)))]
        return found if tensor.dtype == "int32" else found.astype(np.float32)

    def scatter(
        self, tensor: Tensor, index: Sequence[Any], offset: int | None, data: Array
    ) -> None:
        view = self._view(tensor, offset)
        *places, values = np.broadcast_arrays(*_clamped(index, view.shape), data)
        np.add.at(view, tuple(places), self.round(values, tensor.dtype))

    def apply(self, op: str, args: Sequence[Any]) -> Array:
        plain = [float(a) if isinstance(a, Fraction) else a for a in args]
        result: Array = _UFUNCS[op](*plain)
        return result

    def reduce(self, op: str, data: Array) -> Array:
        if op == "rowmax":
            return np.asarray(data.max(axis=1))
        return np.asarray(data.sum(axis=1, dtype=np.float32))

    def gemm(self, left: Array, right: Array, transposed: tuple[bool, bool]) -> Array:
        a = left.T if transposed[0] else left
        b = right.T if transposed[1] else right
        return np.asarray(a @ b)

    def positions(self, start: int, size: int, axis: int, rank: int) -> Array:
        line = np.arange(start, start + size)
        return line if rank == 1 else self.turn(line, axis)

    def turn(self, data: Array, axis: int) -> Array:
        return data[:, None] if axis == 0 else data[None, :]

    def side_by_side(self, pieces: Sequence[Array]) -> Array:
        return np.concatenate(pieces, axis=1)

    def under_each_other(self, pieces: Sequence[Array], lead: int, shape: Sequence[int]) -> Array:
        found = np.zeros(tuple(shape), dtype=np.float32)
        for piece in pieces:
            found[lead : lead + len(piece)] = piece
            lead += len(piece)
        return found

    def fill(self, data: Any, shape: Sequence[int]) -> Array:
        value = float(data) if isinstance(data, Fraction) else data
        return np.broadcast_to(np.asarray(value, dtype=np.float32), tuple(shape))

    def round(self, data: Array, dtype: str) -> Array:
        if dtype in ("fp32", "int32"):
            return data.astype(np.float32, copy=False)
        if dtype in _SATURATES:
            data = np.clip(data, *_SATURATES[dtype])
        if dtype == "int8":  # what is no number becomes 0
            return np.nan_to_num(np.rint(data)).astype(np.float32)
        return data.astype(NUMPY_DTYPES[dtype]).astype(np.float32)


def _clamped(index: Sequence[Any], shape: tuple[int, ...]) -> list[Array]:
    """Indices by element, on each axis the nearest one inside it."""
    places = []
    for length, given in zip(shape, index, strict=True):
        place = np.nan_to_num(np.asarray(given, dtype=np.float64), nan=0.0)
        places.append(np.clip(np.floor(place), 0, length - 1).astype(np.int64))
    return places


def _clip(region: Region, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of a tensor that lies in the region."""
    return tuple(
        slice(max(start, 0), max(min(start + n, m), 0))
        for (start, n), m in zip(region, shape, strict=True)
    )


def _before(start: int, size: int) -> int:
    """The number of elements of a tile before the start of the tensor, on each axis."""
    return min(max(-start, 0), size)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_UFUNCS: dict[str, Callable[..., Any]] = {
    **ARITHMETIC,
    **COMPARE,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "min": lambda *xs: reduce(np.minimum, xs),
    "max": lambda *xs: reduce(np.maximum, xs),
    "where": np.where,
}
