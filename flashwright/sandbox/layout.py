"""The layout of a call's tensors in the judge's memory, with guards around them.

Every tensor lies between guards filled with 0xFF, which is NaN in our floats and -1 in our
integers: a read beside a tensor poisons the output, a write beside it shows. Outputs are full of
0xFF before the call. What a function returns is copied to a separate region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flashwright.sandbox.tensors import DTYPES, Array, bits

GUARD = 1 << 16
"""Bytes before and after each tensor: more than a tile reaches past its end."""
POISON = 0xFF
RETURNED = ("O", "LSE")
"""The outputs that a function returns, in order; all but the first may be missing."""
_SHIFT = 256  # bytes by which a tensor moves from one `place` to the next; all are aligned to them
_WIDEST = 8  # bytes of an element that a function may return
VIEWED = ("Q", "K", "V", "dO", "O")
"""The inputs that may be views; those that a kernel has."""
_GAP = {"Q": 1, "K": 2, "V": 3, "dO": 4, "O": 5}
"""Heads' widths that lie between two rows of a view: no two tensors have the same strides."""
_ALIGNED = 16  # bytes to which a view's first element is aligned
FAR = 1 << 30
"""Elements between two batches of a `far` layout."""


@dataclass(frozen=True)
class Placed:
    """The position, shape and strides of one tensor in the memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """The stride of each axis, in elements."""
    at: int
    """The byte offset of the first element."""
    span: int
    """Bytes from the first element to the end of the last, with the gaps."""
    low: int
    high: int

    def request(self) -> dict[str, Any]:
        """The tensor as the worker's request has it."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "steps": self.steps,
            "at": self.at,
            "span": self.span,
        }

    def elements(self, memory: Array) -> Array:
        """This tensor in an image of the whole memory: a view."""
        kind = DTYPES[self.dtype]
        steps = tuple(step * kind.itemsize for step in self.steps)
        return np.ndarray(self.shape, kind, memory, self.at, steps)


Shaped = Mapping[str, tuple[Sequence[int], str]]


@dataclass
class Layout:
    """The tensors of one call."""

    guard: int = GUARD
    around: int = POISON
    place: int = 0
    """A number; each gives the tensors other addresses."""
    viewed: tuple[str, ...] = ()
    """The inputs that are strided views: heads next to each other, then a gap."""
    far: bool = False
    """Whether the batches of these inputs are also 2^30 elements apart: offsets of the third batch
    exceed a 32-bit integer."""
    inputs: dict[str, Placed] = field(default_factory=dict)
    outputs: dict[str, Placed] = field(default_factory=dict)
    returned: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The region for each returned output: byte offset and size."""
    staged: list[tuple[int, int, int]] = field(default_factory=list)
    """Copies for inputs that come late: source, target, bytes."""
    size: int = 0
    """Bytes of the first batch and of all tensors without batches; each further batch has as
    many."""
    chunks: int = 1
    pitch: int = 0
    """Bytes from one batch to the next."""

    @property
    def end(self) -> int:
        """The total size in bytes."""
        return (self.chunks - 1) * self.pitch + self.size

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, Array],
        outputs: Shaped,
        returns: bool,
        late: bool = False,
        **options: Any,
    ) -> Layout:
        """A layout with the inputs first, then the outputs or the room for returned ones."""
        made = cls(**options)
        names = {dtype: name for name, dtype in DTYPES.items()}
        if made.far:
            apart = [array for name, array in inputs.items() if name in VIEWED]
            made.chunks = max((array.shape[0] for array in apart), default=1)
            made.pitch = FAR * max((array.dtype.itemsize for array in apart), default=1)
        for name, array in inputs.items():
            gap = _GAP.get(name, 0) if made.far or name in made.viewed else 0
            made.inputs[name] = made._put(name, array.shape, names[array.dtype], gap)
        for name, (shape, dtype) in ({} if returns else outputs).items():
            made.outputs[name] = made._put(name, tuple(shape), dtype)
        if returns:
            known = [int(np.prod(shape)) for shape, _ in outputs.values()]
            most = max([*known, *(array.size for array in inputs.values())], default=0)
            made.returned = {n: (made._take(_WIDEST * most), _WIDEST * most) for n in RETURNED}
        if late:
            made.staged = [(made._take(t.span), t.at, t.span) for t in made.inputs.values()]
        return made

    def _take(self, size: int) -> int:
        at, self.size = self.size, -(-(self.size + size) // _SHIFT) * _SHIFT
        return at

    def _put(self, name: str, shape: tuple[int, ...], dtype: str, gap: int = 0) -> Placed:
        """Place a tensor; one with a gap is a view."""
        width = DTYPES[dtype].itemsize
        steps = _steps(shape, gap)
        if gap and self.far:
            return self._put_apart(name, shape, dtype, (self.pitch // width, *steps[1:]))
        last = sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        span = (last + 1) * width if all(shape) else 0
        shift = _SHIFT * self.place + (_ALIGNED if gap else 0)
        low = self._take(2 * self.guard + span + shift)
        at = low + self.guard + shift
        return Placed(name, dtype, shape, steps, at, span, low, at + span + self.guard)

    def _put_apart(
        self, name: str, shape: tuple[int, ...], dtype: str, steps: tuple[int, ...]
    ) -> Placed:
        """Place each batch in its own chunk, at the same offset."""
        width = DTYPES[dtype].itemsize
        last = sum((n - 1) * step for n, step in zip(shape[1:], steps[1:], strict=True))
        low = self._take(2 * self.guard + (last + 1) * width)
        span = (shape[0] - 1) * self.pitch + (last + 1) * width
        at = low + self.guard
        return Placed(name, dtype, shape, steps, at, span, low, low)

    # --- what is written and read -------------------------------------------------------------

    def image(self, inputs: Mapping[str, Array]) -> Array:
        """All bytes before the call; inputs that come late are still in their staging area."""
        made = self.after(inputs)
        for source, target, size in self.staged:
            made[source : source + size] = made[target : target + size]
            made[target : target + size] = POISON
        return made

    def after(self, inputs: Mapping[str, Array]) -> Array:
        """All bytes as they should be after the call, except for the outputs, which are poison.

        The chunks of batches follow each other without gaps.
        """
        made = np.full(self.chunks * self.size, POISON, np.uint8)
        for placed in (*self.inputs.values(), *self.outputs.values()):
            made[placed.low : placed.at] = made[placed.at + placed.span : placed.high] = self.around
        for name, placed in self.inputs.items():
            if placed.span:
                self._elements(placed, made)[...] = inputs[name]
        return made

    def _elements(self, placed: Placed, memory: Array) -> Array:
        if self.chunks == 1 or placed.low != placed.high:
            return placed.elements(memory)
        steps = (self.size // DTYPES[placed.dtype].itemsize, *placed.steps[1:])
        return replace(placed, steps=steps).elements(memory)

    def changed(self, found: Array, right: Array) -> Iterator[str]:
        """The names of inputs that changed."""
        for name, placed in self.inputs.items():
            if not placed.span:
                continue
            if not _same(self._elements(placed, found), self._elements(placed, right)):
                yield name

    def spilled(self, found: Array, right: Array) -> Iterator[str]:
        """The names of tensors beside which, or between whose elements, something was written.

        A `far` layout is not checked.
        """
        for placed in (*self.inputs.values(), *self.outputs.values()):
            if placed.low == placed.high:
                continue
            ours = found[placed.low : placed.high].copy()
            wanted = right[placed.low : placed.high].copy()
            for part in (ours, wanted):
                if placed.span:
                    inside = np.ndarray(
                        placed.shape,
                        DTYPES[placed.dtype],
                        part,
                        placed.at - placed.low,
                        placed.elements(found).strides,
                    )
                    inside[...] = np.zeros((), inside.dtype)
            if not np.array_equal(ours, wanted):
                yield placed.name


def _steps(shape: tuple[int, ...], gap: int) -> tuple[int, ...]:
    """Contiguous strides; with a gap: (..., length, heads + gap, dim) in memory."""
    if gap and len(shape) in (3, 4):
        heads, length, dim = shape[-3:]
        row = (heads + gap) * dim
        return (length * row, dim, row, 1)[-len(shape) :]
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))[: len(shape)] if shape else ()


def _same(one: Array, other: Array) -> bool:
    return np.array_equal(bits(one), bits(other))
