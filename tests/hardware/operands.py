"""Operands: edges and random numbers. Always the same ones, whichever NumPy draws them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from tests.hardware.formats import E4M3, E5M2, F32, KINDS, Array, Float, Kind, together

CASES = 1024


def draw(key: str, count: int) -> Array:
    """Random 64-bit words (splitmix64), by the key alone."""
    with np.errstate(over="ignore"):
        x: Array = np.arange(1, count + 1, dtype=np.uint64)
        x = (x + np.uint64(zlib.crc32(key.encode()))) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def below(key: str, count: int, bound: int) -> Array:
    """Random whole numbers from 0 up to a bound."""
    found: Array = (draw(key, count) >> np.uint64(11)) % np.uint64(bound)
    return found.astype(np.int64)


def uniform(key: str, shape: tuple[int, ...], low: float = -1.0, high: float = 1.0) -> Array:
    """Random fp64 numbers."""
    unit = (draw(key, int(np.prod(shape))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (low + (high - low) * unit).reshape(shape)


# --- edges --------------------------------------------------------------------------------------

_TIES = (  # f32 halfway between two numbers of a narrower format, and beside that
    *(1 + 2.0**-n for n in (3, 4, 8, 11)),
    *(1 + 3 * 2.0**-n for n in (3, 4, 8, 11)),
    *(1 + 2.0**-11 + 2.0**-23, 1 + 2.0**-8 + 2.0**-23, 1 + 2.0**-4 + 2.0**-23),
    *(1 + 2.0**-11 - 2.0**-23, 1 + 2.0**-8 - 2.0**-23, 1 + 2.0**-4 - 2.0**-23),
)
_LIMITS = (  # the largest of f16, e4m3 and e5m2, and where overflow begins
    *(65504.0, 65519.996, 65520.0, 65536.0, 448.0, 448.00003, 463.99997, 464.0, 464.00003, 480.0),
    *(57344.0, 61439.996, 61440.0, 61440.004, 65535.0, 3.3895314e38, 3.3961775e38, 3.3961776e38),
)
_TINY = (  # the subnormal numbers of f16, e4m3, e5m2
    *(2.0**-n for n in (6, 7, 9, 10, 11, 14, 15, 16, 17, 18, 24, 25, 26, 133, 134)),
    *(1.5 * 2.0**-n for n in (10, 17, 25, 134)),
    *(2.0**-14 - 2.0**-26, 2.0**-6 - 2.0**-11, 2.0**-25 + 2.0**-40, 2.0**-10 + 2.0**-30),
)
_WHOLE = (  # and their halves; the limits of the integers
    *(0.25, 0.49999997, 0.5, 0.50000006, 0.75, 1.5, 2.5, 3.5, 7.0, 100.25),
    *(127.0, 127.5, 128.0, 128.5, 255.0, 255.5, 256.0, 32767.0, 32767.5, 32768.0, 65535.5),
    *(2.0**31 - 128, 2.0**31, 2.0**32 - 256, 2.0**32, 2.0**63, 2.0**64, 8388607.5, 16777216.0),
)


def float_edges(form: Float) -> list[int]:
    """The bits that a format is known by."""
    tiny = 1 << form.mantissa
    magnitudes = [0, 1, tiny - 1, tiny, tiny + 1, form.one - 1, form.one, form.one + 1]
    magnitudes += [form.one + tiny // 2, form.one + tiny, form.largest]
    nan = form.infinity if form.finite else form.infinity + tiny // 2
    magnitudes += [nan] if form.finite else [form.infinity, nan]
    magnitudes += [] if form.finite or form.mantissa < 3 else [form.infinity + 1]
    return [m | s for m in magnitudes for s in (0, form.sign)]


def integer_edges(bits: int) -> list[int]:
    """Where signs change and carries run through."""
    top = 1 << (bits - 1)
    values = [0, 1, 2, 3, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 7, 0x55, 1 << bits // 2]
    return [*values, (1 << bits // 2) - 1]


_SHIFTS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 255, 256, 1 << 31, 2**32 - 1)


def edges(name: str) -> list[int]:
    """For a kind of operand: what it must be tried with."""
    if name == "amount":
        return list(_SHIFTS)
    if name == "field":  # where bits start and how many: one byte each
        return [*range(0, 72, 3), 31, 32, 33, 63, 64, 65, 128, 255]
    kind = KINDS[name]
    if name == "pred":
        return [0, 1]
    if kind.float is None:
        return integer_edges(8 * kind.bytes)
    return float_edges(kind.float)


def more_edges(name: str) -> list[int]:
    """Those that matter to whoever converts."""
    kind = KINDS.get(name)
    if kind is None or kind.float is not F32:
        return []
    values = np.array([*_TIES, *_LIMITS, *_TINY, *_WHOLE], dtype=np.float32)
    return [int(b) for b in np.concatenate([values, -values]).view(np.uint32)]


# --- operands -----------------------------------------------------------------------------------


def single(name: str, key: str, count: int) -> Array:
    """One operand: a third edges, a third any bits, a third numbers of middling size."""
    if name in ("amount", "field"):
        any_of = below(key + "any", count, 80).astype(np.uint32)
        return _some_edges(any_of, edges(name), key)
    kind = KINDS[name]
    if kind.per > 1:
        inner = _inner(name)
        parts = [_numbers(inner, f"{key}.{n}", count) for n in range(kind.per)]
        return together(parts, kind)
    return _numbers(name, key, count)


def _inner(name: str) -> str:
    """The kind of one of two numbers; fp8 stands for itself."""
    return name.removesuffix("x2")


def _numbers(name: str, key: str, count: int) -> Array:
    eight = {"e4m3": Kind(1, E4M3), "e5m2": Kind(1, E5M2)}
    kind = eight.get(name) or KINDS[name]
    bits = draw(key, count).astype(kind.word)
    if name == "pred":
        return (bits & 1).astype(np.uint32)
    form = kind.float
    if form is None:
        small = below(key + "small", count, 40).astype(np.int64) - 20
        chosen = np.where(below(key + "which", count, 3) == 0, small.astype(kind.word), bits)
        return _some_edges(chosen, integer_edges(8 * kind.bytes), key)
    near = (form.bias - 4 + below(key + "near", count, 9)).astype(kind.word) << kind.word(
        form.mantissa
    )
    middling = (bits & kind.word(form.sign | ((1 << form.mantissa) - 1))) | near
    chosen = np.where(below(key + "which", count, 2) == 0, middling.astype(kind.word), bits)
    return _some_edges(chosen, float_edges(form), key)


def _some_edges(numbers: Array, listed: Sequence[int], key: str) -> Array:
    at = below(key + "edge", len(numbers), len(listed))
    chosen = np.array(listed, dtype=np.uint64).astype(numbers.dtype)[at]
    return np.where(below(key + "take", len(numbers), 3) == 0, chosen, numbers)


def operands(names: Sequence[str], key: str, count: int = CASES) -> list[Array]:
    """Operands of an instruction: first every pair of edges, as far as there is room."""
    found = [single(name, f"{key}/{n}", count) for n, name in enumerate(names)]
    whole = [n for n, name in enumerate(names) if name in KINDS and KINDS[name].per > 1]
    if whole or not names:
        return found
    lists = [edges(name) for name in names]
    if len(names) == 1:
        lists = [[*lists[0], *more_edges(names[0])]]
    if len(names) <= 2:
        room = list(itertools.islice(itertools.product(*lists), count * 3 // 4))
        for n, operand in enumerate(found):
            operand[: len(room)] = np.array([r[n] for r in room], np.uint64).astype(operand.dtype)
    elif names[0] == names[-1]:
        _cancel(found, names[0])
    return found


def _cancel(found: list[Array], name: str) -> None:
    """In some cases the last operand is (nearly) minus the product of the others."""
    kind = KINDS[name]
    if kind.float is not F32:
        return
    some = np.arange(len(found[0])) % 8 == 7
    x, y = (operand.view(np.float32) for operand in found[:2])
    with np.errstate(all="ignore"):
        product = (x * y).view(np.uint32)
    # Which NaN comes out differs between hosts: it is the first one here, made quiet.
    first = np.where(np.isnan(x), found[0], np.where(np.isnan(y), found[1], np.uint32(0xFF800000)))
    nan = np.isnan(product.view(np.float32))
    minus = np.where(nan, first | np.uint32(0x00400000), product) ^ np.uint32(0x80000000)
    found[-1][some] = minus[some]
