"""wgmma: where its operands lie, against CuTe's layouts, and its product, against NumPy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.hardware.matrix import cut_off, rounded
from tests.share import some
from tests.unit.hopper_parts import (
    NUMPY,
    SHARED,
    SWIZZLES,
    Parts,
    Tile,
    build,
    canonical,
    compiled,
    elements,
    name_of,
)

pytestmark = compiled
EIGHT = ("e4m3", "e5m2")
TYPES = (
    ("f32", "bf16", "bf16"),
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "tf32", "tf32"),
    *((d, a, b) for d in ("f32", "f16") for a in EIGHT for b in EIGHT),
    *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")),
)


def has_width(n: int, types: tuple[str, str, str]) -> bool:
    """Integers have fewer."""
    return types[0] != "s32" or n <= 32 or n % 16 == 0


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return build(tmp_path_factory)


# --- wgmma: where its operands lie --------------------------------------------------------------

MAJORS = ((1, False), (2, False), (2, True), (4, False))  # bytes of an element, MN-major
OF_SIZE = {1: ("f32", "e4m3", "e5m2"), 2: ("f32", "bf16", "bf16"), 4: ("f32", "tf32", "tf32")}


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("size", "mn"), MAJORS)
def test_chunks_lie_where_the_canonical_layouts_say(
    parts: Parts, size: int, mn: bool, swizzle: str
) -> None:
    rng = np.random.default_rng(7)
    for n, start in itertools.product((8, 24, 64, 128, 256), (0, 32, 1024, 4096 + 128, 64 * 1024)):
        leading, stride = (int(x) * 16 for x in rng.integers(1, 200, 2))
        tile = Tile(start, leading, stride, swizzle, mn)
        found = parts.chunks(name_of(n, OF_SIZE[size]), tile.descriptor, mn, n)
        assert found.shape == (2 * n,)
        np.testing.assert_array_equal(elements(found, mn, size), tile.addresses(n, size))


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("size", "mn"), MAJORS)
def test_a_warp_has_its_16_rows(parts: Parts, size: int, mn: bool, swizzle: str) -> None:
    tile, name = canonical(swizzle, mn, 64, 2048), name_of(8, OF_SIZE[size])
    whole = tile.addresses(64, size)
    for rows in (0, 16, 32, 48):
        found = parts.chunks(name, tile.descriptor, mn, 64, rows)
        np.testing.assert_array_equal(elements(found, mn, size), whole[rows : rows + 16])


@pytest.mark.parametrize("swizzle", SWIZZLES[1:])
def test_base_offset_moves_the_pattern_to_the_tile(parts: Parts, swizzle: str) -> None:
    """A tile written at an aligned place and then moved as a whole, by lines of 128 bytes."""
    aligned = canonical(swizzle, False, 64)
    wanted = aligned.addresses(64, 2)
    for lines in range(8):
        start = 128 * lines
        moved = Tile(start, aligned.leading, aligned.stride, swizzle, False, lines)
        found = parts.chunks(name_of(64, OF_SIZE[2]), moved.descriptor, False, 64)
        np.testing.assert_array_equal(elements(found, False, 2), wanted + start)


def test_base_offset_means_nothing_without_a_swizzle(parts: Parts) -> None:
    tile = canonical("none", False, 64)
    name, odd = name_of(64, OF_SIZE[2]), tile.descriptor | 5 << 49
    found = parts.chunks(name, odd, False, 64)
    np.testing.assert_array_equal(found, parts.chunks(name, tile.descriptor, False, 64))


# --- wgmma: its name ----------------------------------------------------------------------------


@pytest.mark.parametrize("types", TYPES)
def test_names(parts: Parts, types: tuple[str, str, str]) -> None:
    ids = ("f32", "f16", "bf16", "e4m3", "e5m2", "tf32", "s8", "u8", "s32")
    size = np.dtype(NUMPY[types[1]]).itemsize
    for n in range(8, 257, 8):
        wanted = [n, 32 // size, size, *(ids.index(t) for t in types)]
        wanted.append(n // 4 if types[0] == "f16" else n // 2)
        name = name_of(n, types)
        if not has_width(n, types):
            assert parts.shape(name) is None
            continue
        assert parts.shape(name) == wanted
        assert parts.shape(name.replace(".sync.aligned", "")) == wanted
        assert parts.shape(name.replace(".sync", "")) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "",
        "wgmma",
        "wgmma.mma_async.m64n128k16.f32.bf16",
        "wgmma.mma_async.m64n128k16.f32.bf16.bf16.f32",
        "wgmma.mma_async.m64n4k16.f32.bf16.bf16",
        "wgmma.mma_async.m64n0k16.f32.bf16.bf16",
        "wgmma.mma_async.m64n12k16.f32.bf16.bf16",
        "wgmma.mma_async.m64n264k16.f32.bf16.bf16",
        "wgmma.mma_async.m64n128k8.f32.bf16.bf16",
        "wgmma.mma_async.m64n128k32.f32.bf16.bf16",
        "wgmma.mma_async.m64n128k16x.f32.bf16.bf16",
        "wgmma.mma_async.m64n+8k16.f32.bf16.bf16",
        "wgmma.mma_async.m128n128k16.f32.bf16.bf16",
        "wgmma.mma_async.m64n128k16.f16.bf16.bf16",
        "wgmma.mma_async.m64n128k16.bf16.bf16.bf16",
        "wgmma.mma_async.m64n128k16.f32.f16.bf16",
        "wgmma.mma_async.m64n128k8.f16.tf32.tf32",
        "wgmma.mma_async.m64n128k8.f32.f32.f32",
        "wgmma.mma_async.m64n128k32.f32.e4m3.f16",
        "wgmma.mma_async.m64n128k32.f32.s8.s8",
        "wgmma.mma_async.m64n128k32.s32.s8.e4m3",
        "wgmma.mma_async.m64n128k32.satfinite.f32.e4m3.e4m3",
        "wgmma.mma_async.m64n128k32.s32.satfinite.s8.s8",
        "wgmma.mma_async.m64n128k256.s32.b1.b1",
        "wgmma.mma_async.sp.m64n128k32.f32.bf16.bf16",
        "mma.sync.m16n8k16.f32.bf16.bf16",
    ],
)
def test_names_that_are_none(parts: Parts, name: str) -> None:
    assert parts.shape(name) is None


# --- wgmma: what it computes --------------------------------------------------------------------


def numbers(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    if kind in ("s8", "u8", "s32"):
        limits = np.iinfo(NUMPY[kind])
        return rng.integers(limits.min, limits.max, shape, NUMPY[kind], endpoint=True)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 5, shape)
    return np.asarray(values.astype(NUMPY[kind]))


def exactly(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "tf32":
        x = (x.view(np.uint32) & 0xFFFFE000).view(np.float32)
    return np.asarray(x.astype(np.float64))


def product(a: np.ndarray, b: np.ndarray, c: np.ndarray, d_type: str) -> np.ndarray:
    """C + A Bᵀ, summed along k in double."""
    total = c.astype(np.float64)
    for k in range(a.shape[1]):
        total = total + np.outer(a[:, k], b[:, k])
    if d_type == "s32":
        return np.asarray(total.astype(np.int64).astype(np.int32))
    return np.asarray(total.astype(NUMPY[d_type]))


def to_registers(d: np.ndarray) -> np.ndarray:
    """16 x n numbers as a warp has them; f16 in pairs."""
    lane, i = np.mgrid[:32, : d.shape[1] // 2]
    values = d[lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2]
    words = np.ascontiguousarray(values).view(np.uint32)  # [lane, register]
    return np.ascontiguousarray(words.T)


def a_registers(a: np.ndarray) -> np.ndarray:
    per = 4 // a.itemsize
    lane, i = np.mgrid[:32, : 4 * per]
    column = lane % 4 * per + i % per + np.where(i < 2 * per, 0, 4 * per)
    values = a[lane // 4 + np.where(i // per % 2, 8, 0), column]
    return np.ascontiguousarray(np.ascontiguousarray(values).view(np.uint32).T)


def in_shared(matrix: np.ndarray, tile: Tile) -> np.ndarray:
    shared = np.full(SHARED, 0xFF, np.uint8)  # NaN in every format
    size = matrix.itemsize
    where = tile.addresses(len(matrix), size)[..., None] + np.arange(size)
    assert len(np.unique(where)) == where.size
    shared[where] = np.ascontiguousarray(matrix).view(np.uint8).reshape(where.shape)
    return shared


def gathered(shared: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(shared[chunks[:, None] + np.arange(16)])


class Case:
    """One warp's share of one instruction, and what it should leave."""

    def __init__(self, parts: Parts, n: int, types: tuple[str, str, str], seed: int) -> None:
        self.parts, self.n, self.types, self.name = parts, n, types, name_of(n, types)
        rng = np.random.default_rng(seed)
        self.k = 32 // np.dtype(NUMPY[types[1]]).itemsize
        self.a = numbers(rng, (64, self.k), types[1])
        self.b = numbers(rng, (n, self.k), types[2])
        self.d = numbers(rng, (16, n), types[0])

    def wanted(self, warp: int, sign: int = 1, accumulate: bool = True) -> np.ndarray:
        rows, d = self.a[16 * warp :][:16], self.d * accumulate
        if self.types[0] == "f32" and self.types[1] in EIGHT:
            left, right = (np.ascontiguousarray(x).view(np.uint8) for x in (rows, self.b))
            kinds = (*self.types[1:], "f32")
            bits = np.ascontiguousarray(d).view(np.uint32)
            return to_registers(rounded(cut_off(left, right.T, bits, kinds, sign).d, "f32"))
        a, b = exactly(rows, self.types[1]), exactly(self.b, self.types[2])
        return to_registers(product(sign * a, b, d, self.types[0]))

    def found(self, warp: int, a_tile: Tile | None, b_tile: Tile, **options: Any) -> np.ndarray:
        if a_tile is None:
            a = a_registers(self.a[16 * warp :][:16])
        else:
            where = self.parts.chunks(self.name, a_tile.descriptor, a_tile.mn, 64, 16 * warp)
            a = gathered(in_shared(self.a, a_tile), where)
        where = self.parts.chunks(self.name, b_tile.descriptor, b_tile.mn, self.n)
        b = gathered(in_shared(self.b, b_tile), where)
        d = to_registers(self.d)
        majors = {"a_mn": a_tile is not None and a_tile.mn, "b_mn": b_tile.mn}
        self.parts.multiply(self.name, a, b, d, **majors, **options)
        return d


@pytest.mark.parametrize("types", some(TYPES, 4))
def test_product_of_every_width(parts: Parts, types: tuple[str, str, str]) -> None:
    for i, n in enumerate(n for n in range(8, 257, 8) if has_width(n, types)):
        case, swizzle, warp = Case(parts, n, types, n), SWIZZLES[i % 4], i % 4
        a_tile = canonical(SWIZZLES[(i + 1) % 4], False, 64) if i % 3 else None
        found = case.found(warp, a_tile, canonical(swizzle, False, n, 1024 * i))
        np.testing.assert_array_equal(found, case.wanted(warp))


@pytest.mark.parametrize("b_swizzle", SWIZZLES)
@pytest.mark.parametrize("a_swizzle", some(SWIZZLES))
def test_product_of_every_major(parts: Parts, a_swizzle: str, b_swizzle: str) -> None:
    for a_mn, b_mn, n in itertools.product((False, True), (False, True), (8, 72, 128)):
        case = Case(parts, n, TYPES[n % 2], n)
        tiles = canonical(a_swizzle, a_mn, 64), canonical(b_swizzle, b_mn, n)
        for warp in range(4):
            np.testing.assert_array_equal(case.found(warp, *tiles), case.wanted(warp))


@pytest.mark.parametrize("types", [TYPES[0], TYPES[2], TYPES[4]])
def test_signs_and_no_accumulation(parts: Parts, types: tuple[str, str, str]) -> None:
    case, tile = Case(parts, 40, types, 1), canonical("64B", False, 40)
    for a_tile, scales in itertools.product(
        (None, canonical("128B", False, 64)), itertools.product((1, -1), (1, -1))
    ):
        found = case.found(2, a_tile, tile, scales=scales)
        np.testing.assert_array_equal(found, case.wanted(2, math.prod(scales)))
    wanted = case.wanted(1, accumulate=False)
    case.d[:] = np.nan  # and is not read
    found = case.found(1, None, tile, accumulate=False)
    np.testing.assert_array_equal(found, wanted)


def test_integers_wrap_or_stay_at_their_limits(parts: Parts) -> None:
    case, tile = Case(parts, 8, ("s32", "s8", "u8"), 3), canonical("none", False, 8)
    case.a[:], case.b[:], case.d[:] = 127, 255, 2**31 - 5
    case.a[1], case.d[1] = -128, -(2**31) + 5
    more = 32 * 255
    wrapped = np.full((16, 8), 2**31 - 5 + 127 * more - 2**32, np.int64).astype(np.int32)
    wrapped[1] = -(2**31) + 5 - 128 * more + 2**32
    found = case.found(0, canonical("none", False, 64), tile)
    np.testing.assert_array_equal(found, to_registers(wrapped))
    case.name = case.name.replace(".s32", ".satfinite.s32")
    limits = np.full((16, 8), 2**31 - 1, np.int32)
    limits[1] = -(2**31)
    found = case.found(0, canonical("none", False, 64), tile)
    np.testing.assert_array_equal(found, to_registers(limits))


def test_infinity_nan_and_the_smallest_product(parts: Parts) -> None:
    case, tile = Case(parts, 16, TYPES[1], 3), canonical("none", False, 16)
    case.a[:], case.b[:], case.d[:] = 0, 1, 0
    case.a[0, 0], case.a[1, 3] = np.inf, np.nan
    case.a[2, 5], case.b[:, 5] = 2.0**-24, 2.0**-24
    case.a[3, 7], case.a[3, 8] = np.inf, -np.inf
    wanted = np.zeros((16, 16), np.float32)
    wanted[0], wanted[2] = np.inf, 2.0**-48
    wanted.view(np.uint32)[[1, 3]] = 0x7FFFFFFF  # the one NaN that the hardware writes
    found = case.found(0, canonical("none", False, 64), tile)
    np.testing.assert_array_equal(found, to_registers(wanted))


def test_f16_sums_overflow_and_round_to_even(parts: Parts) -> None:
    case, tile = Case(parts, 8, TYPES[2], 3), canonical("none", False, 8)
    case.a[:], case.b[:], case.d[:] = 0, 1, 0
    case.a[0, 0], case.d[0] = 65504, 65504
    case.a[1, 1], case.d[1] = 1, 2048  # 2049 lies between two
    case.a[2, 1], case.d[2] = 3, 2048
    wanted = np.zeros((16, 8), np.float16)
    wanted[0], wanted[1], wanted[2] = np.inf, 2048, 2052
    found = case.found(0, canonical("none", False, 64), tile)
    np.testing.assert_array_equal(found, to_registers(wanted))


def test_tf32_reads_19_bits(parts: Parts) -> None:
    case, tile = Case(parts, 8, TYPES[3], 3), canonical("32B", False, 8)
    wanted = case.wanted(0)
    for operand in (case.a, case.b):
        operand.view(np.uint32)[:] |= 0x1FFF
    for a_tile in (None, canonical("64B", False, 64)):
        np.testing.assert_array_equal(case.found(0, a_tile, tile), wanted)
