"""TMA: the boxes of a tensor map, against NumPy; and what wgmma then reads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashwright.emulate.tensor_map import encode_tensor_map
from tests.unit.hopper_parts import (
    SHARED,
    SWIZZLES,
    Parts,
    Tile,
    build,
    compiled,
    elements,
    name_of,
    swizzle_of,
)

pytestmark = compiled
BASE = 0x7F00_0000_1000
SPAN = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
BF16 = ("f32", "bf16", "bf16")


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return build(tmp_path_factory)


class Tensor:
    """A tensor in global memory, its map, and boxes of it by slicing."""

    def __init__(self, sizes: Any, padding: int, box: Any, element: int, **options: str) -> None:
        self.sizes, self.box, self.element, self.options = sizes, box, element, options
        strides, stride = [], sizes[0] * element
        for size in sizes[1:]:
            strides.append((stride + 15) // 16 * 16 + 16 * padding)
            stride = strides[-1] * size
        self.memory = np.random.default_rng(1).integers(0, 256, stride, np.uint8)
        steps = (*reversed(strides), element, 1)
        self.view = np.lib.stride_tricks.as_strided(
            self.memory, (*reversed(sizes), element), steps
        )  # the innermost dimension last, and the bytes of an element
        self.encoded = encode_tensor_map(BASE, sizes, strides, box, element, **options)

    def inside(self, at: Any) -> tuple[Any, Any]:
        """The part of the box that exists: its slices in the box, and in the tensor."""
        low = [min(max(c, 0), s) for c, s in zip(at, self.sizes, strict=True)]
        high = [min(max(c + b, 0), s) for c, b, s in zip(at, self.box, self.sizes, strict=True)]
        there = [slice(a, b) for a, b in zip(low, high, strict=True)]
        here = [slice(a - c, b - c) for a, b, c in zip(low, high, at, strict=True)]
        empty = any(a >= b for a, b in zip(low, high, strict=True))
        none = tuple(slice(0, 0) for _ in at)
        return (none, none) if empty else (tuple(here[::-1]), tuple(there[::-1]))

    def dense(self, at: Any) -> np.ndarray:
        """The box: rows of bytes."""
        nan = self.options.get("fill") == "nan"
        fill = np.array([0xF7, 0x7F] * 4 if nan else [0] * 8, np.uint8)[: self.element]
        box = np.broadcast_to(fill, (*reversed(self.box), self.element)).copy()
        here, there = self.inside(at)
        box[here] = self.view[there]
        return box.reshape(-1, self.box[0] * self.element)

    def places(self, shared: int) -> np.ndarray:
        """Where each byte of the dense box belongs."""
        swizzle, bytes_ = self.options.get("swizzle", "none"), self.box[0] * self.element
        rows = math.prod(self.box[1:])
        pitch = max(bytes_, SPAN[swizzle])
        return swizzle_of(
            shared + np.add.outer(np.arange(rows) * pitch, np.arange(bytes_)), swizzle
        )


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Tensor, list[int], int]:
    """A tensor of any rank, a box somewhere at its edges, and an address in shared memory."""
    rank, element = draw(st.integers(1, 5)), draw(st.sampled_from((1, 2, 4, 8)))
    swizzle = draw(st.sampled_from(SWIZZLES))
    fill = draw(st.sampled_from(("zeros", "nan") if element > 1 else ("zeros",)))
    widest = min(SPAN[swizzle] or 160, 256 * element)
    inner = draw(st.sampled_from(range(16, widest + 1, 16))) // element
    most = {1: 1, 2: 20, 3: 5, 4: 3, 5: 3}[rank]
    box = [inner, *(draw(st.integers(1, most)) for _ in range(rank - 1))]
    sizes = [draw(st.integers(1, 70)), *(draw(st.integers(1, 6)) for _ in range(rank - 1))]
    at = [draw(st.integers(-b - 1, s + 1)) for b, s in zip(box, sizes, strict=True)]
    tensor = Tensor(sizes, draw(st.integers(0, 2)), box, element, swizzle=swizzle, fill=fill)
    return tensor, at, 128 * draw(st.integers(0, 20))


@settings(max_examples=200, deadline=None)
@given(case=boxes())
def test_load_is_a_slice_with_fill(parts: Parts, case: tuple[Tensor, list[int], int]) -> None:
    tensor, at, shared = case
    found = parts.load(tensor.encoded, tensor.memory, BASE, at, shared)
    wanted = np.full(SHARED, 0xA5, np.uint8)
    wanted[tensor.places(shared)] = tensor.dense(at)
    np.testing.assert_array_equal(found, wanted)


@settings(max_examples=100, deadline=None)
@given(case=boxes())
def test_store_leaves_out_what_is_out_of_range(
    parts: Parts, case: tuple[Tensor, list[int], int]
) -> None:
    tensor, at, shared = case
    window = np.random.default_rng(2).integers(0, 256, SHARED, np.uint8)
    found, wanted = tensor.memory.copy(), tensor.memory.copy()
    for source, target, count, inside in parts.pieces(tensor.encoded, at, shared):
        if inside:
            found[target - BASE :][:count] = window[source : source + count]
    here, there = tensor.inside(at)
    box = window[tensor.places(shared)].reshape(*reversed(tensor.box), tensor.element)
    view = np.lib.stride_tricks.as_strided(wanted, tensor.view.shape, tensor.view.strides)
    view[there] = box[here]
    np.testing.assert_array_equal(found, wanted)


@settings(max_examples=100, deadline=None)
@given(case=boxes())
def test_pieces_cover_the_box_once(parts: Parts, case: tuple[Tensor, list[int], int]) -> None:
    tensor, at, shared = case
    pieces = parts.pieces(tensor.encoded, at, shared)
    touched = [a for start, _, count, _ in pieces for a in range(start, start + count)]
    assert sorted(touched) == sorted(tensor.places(shared).ravel())
    assert len(touched) == parts.library.bytes_of_box(tensor.encoded)
    for start, source, count, inside in pieces:
        assert 1 <= count <= 16
        assert start // 16 == (start + count - 1) // 16
        assert count % tensor.element == start % tensor.element == 0
        assert inside in (0, 1)
        assert inside or source == 0


def test_coordinates_as_far_out_as_they_go(parts: Parts) -> None:
    encoded = encode_tensor_map(BASE, [2**32, 2**32], [2**39], [8, 1], 2)
    most = 2**31 - 1
    for at in ([-(2**31), 0], [0, -(2**31)], [-8, 5]):
        assert parts.pieces(encoded, at, 0) == [(0, 0, 16, 0)]
    assert parts.pieces(encoded, [most, 3], 0) == [(0, BASE + 2 * most + 3 * 2**39, 16, 1)]
    tall = encode_tensor_map(BASE, [8, 2**32], [16], [8, 2], 2)
    rows = [(16 * i, BASE + 16 * (most + i), 16, 1) for i in range(2)]
    assert parts.pieces(tall, [0, most], 0) == rows
    small = encode_tensor_map(BASE, [64, 4], [128], [8, 1], 2)
    for at in ([most, 0], [0, most]):
        assert parts.pieces(small, at, 0) == [(0, 0, 16, 0)]


def test_what_is_no_map(parts: Parts) -> None:
    encoded = encode_tensor_map(BASE, [64, 4], [128], [8, 1], 2)
    assert len(encoded) == 128
    assert parts.library.bytes_of_box(encoded) == 16
    assert parts.library.bytes_of_box(bytes(128)) == -1
    assert parts.library.bytes_of_box(b"\0" + encoded[1:]) == -1
    for rank in (0, 6):
        assert parts.library.bytes_of_box(encoded[:116] + bytes([rank]) + encoded[117:]) == -1


# --- the driver's checks ------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "base": BASE,
    "sizes": [64, 100],
    "strides_bytes": [128],
    "box": [64, 64],
    "element_bytes": 2,
    "swizzle": "128B",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": BASE + 8}, "address 0x7f0000001008 is not a multiple of 16"),
        ({"base": -16}, "no address"),
        ({"base": 2**64}, "no address"),
        ({"sizes": [], "box": [], "strides_bytes": []}, "1 to 5 dimensions, not 0"),
        ({"sizes": [1] * 6, "box": [1] * 6, "strides_bytes": [16] * 5}, "dimensions, not 6"),
        ({"box": [64]}, "the box has 1 dimensions, the tensor 2"),
        ({"strides_bytes": []}, "has 1 strides .*, not 0"),
        ({"strides_bytes": [2, 128]}, "has 1 strides .*, not 2"),
        ({"strides_bytes": [120]}, "stride of dimension 1, 120 bytes, is not a multiple of 16"),
        ({"strides_bytes": [2**40]}, "not in 0 .. 2.40"),
        ({"strides_bytes": [-16]}, "not in 0 .. 2.40"),
        ({"sizes": [64, 0]}, "dimension 1 has 0 elements"),
        ({"sizes": [2**32 + 1, 1]}, "dimension 0 has 4294967297 elements"),
        ({"box": [64, 0]}, "dimension 1 of the box has 0 elements"),
        ({"box": [64, 257]}, "dimension 1 of the box has 257 elements"),
        ({"box": [4, 64]}, "8 bytes: not a multiple of 16"),
        ({"box": [128, 64]}, "256 bytes: the 128B swizzle has room for 128"),
        ({"swizzle": "64B"}, "128 bytes: the 64B swizzle has room for 64"),
        ({"swizzle": "96B"}, "swizzle is one of"),
        ({"fill": "ones"}, "fill is one of"),
        ({"kind": "complex"}, "kind is one of"),
        ({"element_bytes": 3}, "no elements of 3 bytes"),
        ({"fill": "nan", "kind": "integer"}, "only floats"),
        ({"fill": "nan", "element_bytes": 1}, "only floats"),
    ],
)
def test_what_the_driver_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_tensor_map(**{**GOOD, **change})


def test_what_the_driver_accepts() -> None:
    for change in (
        {},
        {"swizzle": "none", "box": [256, 256]},
        {"sizes": [1, 2**32], "strides_bytes": [2**40 - 16]},
        {"fill": "nan"},
        {"element_bytes": 1, "kind": "integer"},
    ):
        assert len(encode_tensor_map(**{**GOOD, **change})) == 128


# --- what TMA writes is what wgmma reads --------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1024, 5 * 128])
@pytest.mark.parametrize("swizzle", SWIZZLES[1:])
def test_k_major_tiles_come_back(parts: Parts, swizzle: str, start: int) -> None:
    """Rows x K in memory, a box as wide as the swizzle; every step along K, 32 bytes each."""
    rows, span = 128, SPAN[swizzle]
    tensor = Tensor([span, 200], 1, [span // 2, rows], 2, swizzle=swizzle)
    at = [span // 4, 90]  # the last rows are out of range
    shared = parts.load(tensor.encoded, tensor.memory, BASE, at, start)
    wanted = tensor.dense(at).view(np.uint16)
    for step in range(span // 32):
        tile = Tile(start + 32 * step, 16, 8 * span, swizzle, mn=False)
        chunks = parts.chunks(name_of(rows, BF16), tile.descriptor, False, rows)
        found = shared.view(np.uint16)[elements(chunks, False, 2) // 2]
        np.testing.assert_array_equal(found, wanted[:, 16 * step :][:, :16])


@pytest.mark.parametrize("start", [0, 1024, 5 * 128])
@pytest.mark.parametrize("swizzle", SWIZZLES[1:])
def test_mn_major_tiles_come_back(parts: Parts, swizzle: str, start: int) -> None:
    """K x rows in memory, boxes as wide as the swizzle one behind the other; 16 of K a step."""
    span, depth, n = SPAN[swizzle], 48, 128
    tensor = Tensor([n, 60], 1, [span // 2, depth], 2, swizzle=swizzle)
    shared = np.full(SHARED, 0xA5, np.uint8)
    for box in range(2 * n // span):
        to = start + box * depth * span
        part = parts.load(tensor.encoded, tensor.memory, BASE, [box * span // 2, 7], to)
        shared[to : to + depth * span] = part[to : to + depth * span]
    wanted = tensor.view[7 : 7 + depth].copy().view(np.uint16)[..., 0].T  # [row, k]
    for step in range(depth // 16):
        tile = Tile(start + 16 * span * step, depth * span, 8 * span, swizzle, mn=True)
        chunks = parts.chunks(name_of(n, BF16), tile.descriptor, True, n)
        found = shared.view(np.uint16)[elements(chunks, True, 2) // 2]
        np.testing.assert_array_equal(found, wanted[:, 16 * step :][:, :16])
