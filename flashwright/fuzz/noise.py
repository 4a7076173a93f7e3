"""How far rounding may move a program's outputs: the interpreter with perturbed operations.

A kernel sums in another order, folds constants into one factor and takes 2^x for e^x. Its results
differ from the interpreter's in the last bits, and where such a value is rounded to 16 bits, by
one unit there. How much that matters depends on the program, so it is measured: the interpreter
runs again with each result slightly perturbed, and the outputs' movement is the unit of tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flashwright.lang.diagnostic import Failed
from flashwright.program.program import Program
from flashwright.semantics.interpret import Array, NumPy, bind
from flashwright.semantics.machine import Machine

RELATIVE = 2.0**-17
"""The relative error of a result: the rounding of fp32, times the size of an exponent."""
ABSOLUTE = 1e-6  # of functions whose error is absolute
GEMM = 2.0**-20  # of the sum of all products' sizes
GEMM_FP8 = 2.0**-11  # wgmma adds products of fp8 with 13 bits
ROUNDED = {"fp16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""The relative error of a value before it is rounded: its last bit may go either way."""
_FUNCTIONS = frozenset({"exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid", "/"})


class PerturbedArithmetic(NumPy):
    """The interpreter's arithmetic with a small random error in every result."""

    def __init__(
        self, program: Program, inputs: Mapping[str, Array], dims: Mapping[str, int], seed: int
    ) -> None:
        super().__init__(program, inputs, dims)
        self._random = np.random.default_rng(seed)
        eight = any(b.dtype in ("e4m3", "e5m2") for b in program.buffers.values())
        self._gemm = GEMM_FP8 if eight else GEMM
        self._storing = False

    def _errors(self, shape: tuple[int, ...]) -> Array:
        return self._random.uniform(-1, 1, shape).astype(np.float32)

    def apply(self, op: str, args: Sequence[Any]) -> Array:
        """See Arithmetic: functions of tiles get an error, tests and positions stay exact."""
        result = super().apply(op, args)
        tile = any(isinstance(a, np.ndarray) and a.dtype == np.float32 for a in args)
        if op not in _FUNCTIONS or not tile:
            return result
        errors = self._errors(result.shape)
        moved = result * (1 + RELATIVE * errors)
        if op in ("log", "log2", "tanh"):
            moved = moved + ABSOLUTE * errors
        return np.where(np.isfinite(result), moved, result)

    def gemm(self, left: Array, right: Array, transposed: tuple[bool, bool]) -> Array:
        """See Arithmetic: the error is relative to the sum of the products' sizes."""
        result = super().gemm(left, right, transposed)
        size = super().gemm(np.abs(left), np.abs(right), transposed)
        return np.asarray(result + self._gemm * size * self._errors(result.shape))

    def reduce(self, op: str, data: Array) -> Array:
        """See Arithmetic: sums get an error, maxima none."""
        result = super().reduce(op, data)
        if op == "rowmax":
            return result
        return np.asarray(result * (1 + RELATIVE * self._errors(result.shape)))

    def round(self, data: Array, dtype: str) -> Array:
        """See Arithmetic: a tile may be rounded to a neighbour; outputs are not rounded at all."""
        if self._storing or dtype not in ROUNDED:
            return data.astype(np.float32, copy=False)
        errors = ROUNDED[dtype] * self._errors(data.shape)
        return super().round(np.asarray(data * (1 + errors)), dtype)

    def store(self, *given: Any, **more: Any) -> None:
        """See Arithmetic: what is stored keeps its fp32 value."""
        self._storing = True
        super().store(*given, **more)
        self._storing = False


def perturbed(
    program: Program, inputs: Mapping[str, Array], dims: Mapping[str, int], seed: int
) -> dict[str, Array]:
    """The outputs of a perturbed run, in fp32 and not rounded. Raises Failed as interpret does."""
    sizes = bind(program, inputs, dims)
    numbers = PerturbedArithmetic(program, inputs, sizes, seed)
    machine = Machine(program, sizes, numbers)
    with np.errstate(all="ignore"):
        for block in list(machine.blocks()):
            machine.run_block(block)
    if machine.findings:
        raise Failed(*machine.findings.values())
    return {t.name: np.asarray(numbers.arrays[t.name], np.float32) for t in program.outputs}
