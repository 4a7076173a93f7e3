"""Snippets: mma.sync.

Of the trials some have whole numbers so small that every order of adding is exact: there the bits
must be the same. Of the others the emulator sums in fp64 and rounds once; what the hardware does is
not documented, but was measured by others: products are exact, the K + 1 terms are cut off at a
fixed distance below the largest, and the sum is cut off once more. So, with S = |C| + the sum of
|products|, a result may be away from the hardware's by what was seen on an H200, and about as much
again:

    4 2^-23 S    (1.8 was seen)  mma.sync and wgmma of f16, bf16, tf32 added up in f32; also
                                 mma.sync of e4m3, e5m2 on Hopper, where ptxas makes f16 of them
    1 2^-10 S    (0.02)          f16 added up in f16: an ulp
    2 2^-10 S    (0.93)          e4m3, e5m2 added up in f16

whatever K is, and integers by nothing. Nor may wgmma of e4m3, e5m2 added up in f32, of which so
little is kept that all of the rule shows: see `cut_off`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.hardware.formats import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    Array,
    Float,
    nearest,
    value,
)
from tests.hardware.operands import below, draw, uniform
from tests.hardware.snippet import WARP, Bound, Operands, Snippet

ELEMENTS: dict[str, tuple[int, Float | None]] = {
    "f16": (2, F16),
    "bf16": (2, BF16),
    "tf32": (4, F32),
    "e4m3": (1, E4M3),
    "e5m2": (1, E5M2),
    "s8": (1, None),
    "u8": (1, None),
    "f32": (4, F32),
    "s32": (4, None),
}
TRIALS = 8
WHOLE = (0, 1)  # the trials of small whole numbers
TINY, SPECIAL = 6, 7


# --- numbers ------------------------------------------------------------------------------------


def elements(kind: str, key: str, trial: int, shape: tuple[int, ...]) -> Array:
    """A matrix for a trial, as bits."""
    size, form = ELEMENTS[kind]
    count = int(np.prod(shape))
    if form is None:
        return draw(f"{key} {trial}", count).astype(f"u{size}").reshape(shape)
    if trial in WHOLE:
        x = below(f"{key} {trial}", count, 9).astype(np.float64).reshape(shape) - 4
    else:
        scale = np.ldexp(1.0, below(f"{key} scale {trial}", count, 9) - 6)
        x = uniform(f"{key} {trial}", shape) * scale.reshape(shape) * 4
    if trial == TINY and kind != "f32":
        bits = draw(f"{key} {trial}", count).reshape(shape)
        mantissa = np.uint64((1 << form.mantissa + 1) - 1)  # subnormal numbers, and the next
        tiny = (bits & mantissa) | (bits >> np.uint64(40) & np.uint64(1)) * np.uint64(form.sign)
        return _cut(tiny.astype(f"u{size}"), kind)
    bits = encoded(x, kind)
    if trial == SPECIAL:
        _put_specials(bits, form, key)
    return bits


def _cut(bits: Array, kind: str) -> Array:
    return bits & np.uint32(0xFFFFE000) if kind == "tf32" else bits


def encoded(x: Array, kind: str) -> Array:
    """The nearest numbers of a format."""
    _, form = ELEMENTS[kind]
    if form is F32:
        return _cut(x.astype(np.float32).view(np.uint32), kind)
    assert form is not None
    return nearest(x, form)


def _put_specials(bits: Array, form: Float, key: str) -> None:
    """Two rows and columns with an infinity or NaN in them: the rest stays as it is."""
    flat = bits.reshape(-1)
    places = below(f"{key} places", 3, len(flat))
    chosen = [form.infinity, form.infinity | form.sign, form.infinity + 1]
    if form.finite:
        chosen = [form.largest, form.largest | form.sign, form.infinity]
    flat[places] = np.array(chosen, np.uint64).astype(bits.dtype)


def decoded(bits: Array, kind: str) -> Array:
    """Values as fp64."""
    _, form = ELEMENTS[kind]
    if form is not None:
        return value(_cut(bits, kind), form)
    return bits.view({"s8": np.int8, "u8": np.uint8, "s32": np.int32}[kind]).astype(np.float64)


# --- fragments ----------------------------------------------------------------------------------

G, T = np.arange(WARP) // 4, np.arange(WARP) % 4


def fragment_a(a: Array) -> list[Array]:
    """16 rows of K numbers, as registers of 32 lanes."""
    per = 4 // a.dtype.itemsize
    registers = []
    for r in range(a.shape[1] // (2 * per)):
        rows, first = G + 8 * (r % 2), T * per + 4 * per * (r // 2)
        registers.append(_register([a[rows, first + e] for e in range(per)]))
    return registers


def fragment_b(b: Array) -> list[Array]:
    """K rows of 8 numbers."""
    per = 4 // b.dtype.itemsize
    return [
        _register([b[T * per + e + 4 * per * r, G] for e in range(per)])
        for r in range(b.shape[0] // (4 * per))
    ]


def fragment_c(c: Array) -> list[Array]:
    """16 rows of numbers: of 8 columns, or of any multiple of that."""
    per = 4 // c.dtype.itemsize
    numbers = [
        c[G + 8 * (i // 2), 8 * block + 2 * T + i % 2]
        for block in range(c.shape[1] // 8)
        for i in range(4)
    ]
    return [_register(numbers[at : at + per]) for at in range(0, len(numbers), per)]


def _register(numbers: list[Array]) -> Array:
    return np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint32)[:, 0]


# --- bounds -------------------------------------------------------------------------------------


def part_of_sum(element: str, accumulator: str) -> float:
    """The bound, as a part of S."""
    if accumulator == "f16":
        return (1 if element == "f16" else 2) * 2.0**-10
    return 4 * 2.0**-23


@dataclass(frozen=True)
class Product:
    """D = A B + C of a trial, in fp64, and what it may be off by; 0 where it is exact."""

    d: Array
    room: Array


def product(
    a: Array,
    b: Array,
    c: Array,
    kinds: tuple[str, str, str],
    whole: bool,
    *,
    sat: bool = False,
    sign: int = 1,
    steps: int = 1,
) -> Product:
    """From bits; `sign` is that of A B, `steps` are instructions."""
    x, y, z = (decoded(m, kind) for m, kind in zip((a, b, c), kinds, strict=True))
    with np.errstate(all="ignore"):
        terms = x[:, :, None] * y[None]
        d = z + sign * terms.sum(axis=1)
        total = np.abs(z) + np.abs(terms).sum(axis=1)
    if kinds[2] == "s32":
        d = np.clip(d, -(2.0**31), 2.0**31 - 1) if sat else d
        return Product(d, np.zeros_like(d))
    smallest = 2.0**-24 if kinds[2] == "f16" else 2.0**-149
    total = np.where(np.isfinite(total), total, 0.0)
    room = steps * part_of_sum(kinds[0], kinds[2]) * total + smallest
    return Product(d, np.zeros_like(room) if whole else room)


def cut_off(a: Array, b: Array, c: Array, kinds: tuple[str, str, str], sign: int = 1) -> Product:
    """D of bytes as Hopper's wgmma adds them up in f32: all terms are cut off toward zero 13 bits
    below the largest exponent (a product's is the sum of its factors'), and so is D below its own.
    """
    x, y, z = (decoded(m, kind) for m, kind in zip((a, b, c), kinds, strict=True))
    terms = x[:, :, None] * y[None]
    factors = _exponent(x)[:, :, None] + _exponent(y)[None]
    top = np.maximum(factors.max(axis=1), _exponent(z))
    d = sign * _cut_at(terms, top[:, None] - 13).sum(axis=1) + _cut_at(z, top - 13)
    d = _cut_at(d, _exponent(d) - 13)
    return Product(d, np.zeros_like(d))


def _exponent(x: Array) -> Array:
    """Of 0 one below all others."""
    return np.where(x == 0, -300, np.frexp(x)[1] - 1)


def _cut_at(x: Array, exponent: Array) -> Array:
    found: Array = np.ldexp(np.trunc(np.ldexp(x, -exponent)), exponent)
    return found


def rounded(d: Array, kind: str) -> Array:
    """To the accumulator's type, as bits."""
    with np.errstate(all="ignore"):
        if kind == "s32":
            return d.astype(np.int64).astype(np.int32).view(np.uint32)
        to = np.float16 if kind == "f16" else np.float32
        return d.astype(to).view(np.uint16 if kind == "f16" else np.uint32)


# --- mma ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mma:
    """One spelling."""

    k: int
    a: str
    b: str
    c: str
    sat: bool = False

    @property
    def opcode(self) -> str:
        how = "satfinite." if self.sat else ""
        types = f"{self.c}.{self.a}.{self.b}.{self.c}"
        return f"mma.sync.aligned.m16n8k{self.k}.row.col.{how}{types}"

    def matrices(self, trial: int) -> tuple[Array, Array, Array]:
        key = self.opcode
        return (
            elements(self.a, key + "a", trial, (16, self.k)),
            elements(self.b, key + "b", trial, (self.k, 8)),
            elements(self.c, key + "c", trial, (16, 8)),
        )

    def operands(self) -> Operands:
        trials = []
        for trial in range(TRIALS):
            a, b, c = self.matrices(trial)
            trials.append([*fragment_a(a), *fragment_b(b), *fragment_c(c)])
        return [np.concatenate(parts) for parts in zip(*trials, strict=True)]

    def products(self) -> list[Product]:
        kinds = (self.a, self.b, self.c)
        return [product(*self.matrices(t), kinds, t in WHOLE, sat=self.sat) for t in range(TRIALS)]

    def model(self, *_: Array) -> Operands:
        trials = [fragment_c(rounded(p.d, self.c)) for p in self.products()]
        return [np.concatenate(parts) for parts in zip(*trials, strict=True)]

    def bound(self, *_: Operands) -> Operands:
        """The room of each number, in the order of the registers."""
        per = 2 if self.c == "f16" else 1
        trials = []
        for found in self.products():
            numbers = [found.room[G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)]
            trials.append([np.stack(numbers[at : at + per], axis=-1) for at in range(0, 4, per)])
        rooms = [np.concatenate(parts) for parts in zip(*trials, strict=True)]
        return rooms if per == 2 else [room[:, 0] for room in rooms]


RESULTS = {"f32": "f32", "f16": "f16x2", "s32": "s32"}


def mmas() -> Iterator[Snippet]:
    """Every shape of mma.sync that a GPU of ours has."""
    shapes = [Mma(8, "f16", "f16", c) for c in ("f32", "f16")]
    shapes += [Mma(16, "f16", "f16", c) for c in ("f32", "f16")]
    shapes += [Mma(k, "bf16", "bf16", "f32") for k in (8, 16)]
    shapes += [Mma(k, "tf32", "tf32", "f32") for k in (4, 8)]
    eights = itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2"))
    shapes += [Mma(32, a, b, "f32") for a, b in eights]
    for k, a, b, sat in itertools.product((16, 32), ("s8", "u8"), ("s8", "u8"), (False, True)):
        shapes.append(Mma(k, a, b, "s32", sat))
    for shape in shapes:
        yield _snippet(shape)


def _snippet(shape: Mma) -> Snippet:
    per = 4 // ELEMENTS[shape.a][0]
    counts = [2 if shape.c == "f16" else 4, shape.k // (2 * per), shape.k // (4 * per)]
    counts.append(counts[0])
    lists, at = [f"{{{', '.join(f'%o{n}' for n in range(counts[0]))}}}"], 0
    for count in counts[1:]:
        names = ", ".join(f"%i{n}" for n in range(at, at + count))
        lists.append(f"{{{names}}}")
        at += count
    eight = shape.a in ("e4m3", "e5m2")
    bound: Bound | None = None if shape.c == "s32" else shape.bound
    return Snippet(
        shape.opcode,
        "matrix",
        f"{shape.opcode} {', '.join(lists)};",
        ("b32",) * at,
        (RESULTS[shape.c],) * counts[0],
        shape.operands,
        arch="sm_89" if eight else "sm_80",
        bound=bound,
        model=shape.model,
    )
