"""Numbers as bits: the types of PTX's registers, in plain NumPy (the GPU's machine may be bare)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Float:
    """A floating-point format; E4M3 alone has no infinity, and one NaN."""

    exponent: int
    mantissa: int
    finite: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def largest(self) -> int:
        """The bits of the largest number."""
        top = (1 << (self.exponent + self.mantissa)) - 1
        return top - 1 if self.finite else top - (1 << self.mantissa)

    @property
    def infinity(self) -> int:
        return self.largest + 1

    @property
    def one(self) -> int:
        return self.bias << self.mantissa

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)


F16, BF16, F32, F64 = Float(5, 10), Float(8, 7), Float(8, 23), Float(11, 52)
E4M3, E5M2 = Float(4, 3, finite=True), Float(5, 2)


@dataclass(frozen=True)
class Kind:
    """What a register of so many bytes holds: `per` numbers of a format, or an integer."""

    bytes: int
    float: Float | None = None
    per: int = 1
    signed: bool = False

    @property
    def word(self) -> Any:
        return WORDS[self.bytes]

    @property
    def register(self) -> str:
        return f"b{max(16, 8 * self.bytes)}"


KINDS = {
    **{f"{sign}{8 * n}": Kind(n, signed=sign == "s") for sign in "bus" for n in (1, 2, 4, 8)},
    "pred": Kind(4),
    "f16": Kind(2, F16),
    "bf16": Kind(2, BF16),
    "f32": Kind(4, F32),
    "tf32": Kind(4, F32),
    "f64": Kind(8, F64),
    "f16x2": Kind(4, F16, 2),
    "bf16x2": Kind(4, BF16, 2),
    "e4m3x2": Kind(2, E4M3, 2),
    "e5m2x2": Kind(2, E5M2, 2),
    "u16x2": Kind(4),
    "s16x2": Kind(4),
}


@functools.cache
def _table(form: Float) -> Array:
    """The value of every number of a narrow format."""
    bits = np.arange(1 << form.bits, dtype=np.int64)
    exponent = bits >> form.mantissa & ((1 << form.exponent) - 1)
    fraction = (bits & ((1 << form.mantissa) - 1)).astype(np.float64)
    least = 1 - form.bias
    small = np.ldexp(fraction, least - form.mantissa)
    large = np.ldexp(
        fraction + (1 << form.mantissa), exponent.astype(int) - form.bias - form.mantissa
    )
    value = np.where(exponent == 0, small, large)
    magnitude = bits & (form.sign - 1)
    value[magnitude > form.largest] = np.nan
    if not form.finite:
        value[magnitude == form.infinity] = np.inf
    return np.where(bits & form.sign, -value, value)


def value(bits: Array, form: Float) -> Array:
    """Numbers as fp64, exactly."""
    if form is F32:
        with np.errstate(invalid="ignore"):  # of NaNs
            return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if form is F64:
        return bits.view(np.float64)
    found: Array = _table(form)[bits]
    return found


def nearest(x: Array, form: Float) -> Array:
    """The bits of the nearest number of a narrow format; of two, the even one."""
    table = _table(form)[: form.infinity]
    at = np.clip(np.searchsorted(table, np.abs(x)), 1, len(table) - 1)
    below, above = np.abs(x) - table[at - 1], table[at] - np.abs(x)
    bits = np.where((below < above) | ((below == above) & (at % 2 == 1)), at - 1, at)
    return (bits | np.where(np.signbit(x), form.sign, 0)).astype(WORDS[max(1, form.bits // 8)])


def apart(words: Array, kind: Kind) -> Array:
    """The numbers of registers, one after the other; each as its bits."""
    if kind.per == 1:
        return words
    half = WORDS[kind.bytes // kind.per]
    return np.ascontiguousarray(words).view(half).reshape(*words.shape, kind.per)


def together(numbers: Sequence[Array], kind: Kind) -> Array:
    """Registers of these numbers, the first in the low bits."""
    half = WORDS[kind.bytes // kind.per]
    stacked = np.stack([n.astype(half) for n in numbers], axis=-1)
    return np.ascontiguousarray(stacked).view(kind.word)[..., 0]


def spacing(x: Array, form: Float) -> Array:
    """An ulp: the distance of two numbers of this size."""
    _, exponent = np.frexp(np.abs(x))
    least = 1 - form.bias
    ulp: Array = np.ldexp(1.0, np.maximum(exponent - 1, least) - form.mantissa)
    return ulp
