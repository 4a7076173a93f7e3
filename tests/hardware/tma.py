"""Snippets: TMA with tensor maps: boxes inside, partly and wholly outside, under every swizzle.

An H200 ends two of them with an illegal instruction: a box that begins at no multiple of 16 bytes
along a row, and a store that begins before the tensor. The emulator finds both. Each such place has
a snippet of its own, since nothing comes of what else is in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.hardware.barriers import DECLARES, READY, START, WAIT
from tests.hardware.formats import Array
from tests.hardware.operands import draw
from tests.hardware.snippet import WARP, Model, Operands, Snippet, Tensor

COLUMNS, ROWS, PITCH = 72, 10, 160  # of the tensor: elements of two bytes, rows, bytes of a row
ELSEWHERE = {
    "at an odd place": (5, 5),
    "before the start": (-8, -3),
    "before the start at an odd place": (-3, 1),
    "from the end of a row": (COLUMNS, 0),
    "far beyond a row": (1000, 0),
    "below the last row": (0, ROWS),
    "far below": (0, 1000),
    "above the first row": (0, -9),
}
HINT = ", 0x14F0000000000000"  # to keep it in the second cache
MAP = "mov.b64 %wide, more;\ncvta.param.u64 %wide, %wide;\n"


def _declares(size: int) -> str:
    return f"{DECLARES}.shared .align 1024 .b8 tile[{size}];"


def _places(tensor: Tensor) -> list[tuple[int, ...]]:
    """Inside, and over the ends; along a row in steps of 16 bytes."""
    step = 16 // tensor.element_bytes
    last = (tensor.sizes[0] - 1) // step * step
    rows = tensor.sizes[1] if len(tensor.sizes) > 1 else 1
    columns = (0, step, last, 0, last, step, 2 * step, last)
    down = (0, 2, 0, rows - 2, rows - 2, rows - 1, 1, rows - 1)
    back = (0, 1, 0, 0, 1, 1, 0, 0)
    further = (0, 1, 0, -1, 1, 0, 2, 1), (0, 0, 1, 0, 1, 1, -1, 0)
    axes = (columns, down, back, *further)
    return [place[: len(tensor.sizes)] for place in zip(*axes, strict=True)]


def loads() -> Iterator[Snippet]:
    """Two dimensions, every swizzle; one to five; NaN for what is outside."""
    for swizzle, width in (
        *(("none", 16), ("none", 64), ("32B", 16), ("64B", 32), ("128B", 64)),
        *(("128B", 32), ("64B", 16), ("128B", 8)),  # rows narrower than the swizzle
    ):
        tensor = Tensor((COLUMNS, ROWS), (PITCH,), (width, 8), swizzle)
        yield _load(tensor, f"cp.async.bulk.tensor.2d load {swizzle} {width}")
    nan = Tensor((COLUMNS, ROWS), (PITCH,), (64, 8), "128B", fill="nan")
    yield _load(nan, "cp.async.bulk.tensor.2d load with NaN")
    bytes_ = Tensor((144, ROWS), (PITCH,), (128, 8), "128B", element_bytes=1)
    yield _load(bytes_, "cp.async.bulk.tensor.2d load of bytes")
    words = Tensor((36, ROWS), (PITCH,), (32, 8), "128B", element_bytes=4)
    yield _load(words, "cp.async.bulk.tensor.2d load of words")
    yield _load(Tensor((700,), (), (128,)), "cp.async.bulk.tensor.1d load")
    hinted = Tensor((COLUMNS, ROWS), (PITCH,), (16, 8))
    yield _load(hinted, "cp.async.bulk.tensor.2d load with a hint", HINT, tile="")
    cube = Tensor((COLUMNS, 5, 2), (PITCH, 5 * PITCH), (32, 3, 2), "64B")
    yield _load(cube, "cp.async.bulk.tensor.3d load")
    yield from _heads()
    for swizzle, width in (("none", 16), ("128B", 64)):
        tensor = Tensor((COLUMNS, ROWS), (PITCH,), (width, 8), swizzle)
        for where, place in ELSEWHERE.items():
            name = f"cp.async.bulk.tensor.2d load {swizzle} {width} {where}"
            yield _load(tensor, name, places=[place])


def _heads() -> Iterator[Snippet]:
    """Spelled as in our kernels: rows of one head, and boxes that are deep in every dimension."""
    five = (32, 3, 2, 2, 2), (64, 192, 384, 768)
    for what, tensor in (
        ("2d load of one head", Tensor((64, 9), (128,), (64, 8), "128B")),
        ("3d load of one head", Tensor((64, 5, 2), (128, 640), (64, 4, 1), "128B")),
        # Heads within a row.
        ("4d load of one head", Tensor((64, 3, 2, 2), (256, 128, 768), (64, 2, 1, 1), "128B")),
        ("4d load", Tensor((64, 3, 2, 2), (128, 384, 768), (32, 2, 2, 2), "64B")),
        ("5d load of one head", Tensor(*five, (32, 2, 1, 1, 1), "64B")),
        ("5d load", Tensor(*five, (16, 2, 2, 2, 2), "32B")),
    ):
        yield _load(tensor, f"cp.async.bulk.tensor.{what}", tile="")


def _box(tensor: Tensor) -> int:
    return int(np.prod(tensor.box)) * tensor.element_bytes


def _room(tensor: Tensor) -> int:
    """Bytes for the box, whatever a row takes: in whole words of all lanes."""
    span = {"none": 0, "32B": 32, "64B": 64, "128B": 128}[tensor.swizzle]
    row = max(tensor.box[0] * tensor.element_bytes, span)
    return -(-row * int(np.prod(tensor.box[1:])) // 128) * 128


def _load(
    tensor: Tensor,
    name: str,
    hint: str = "",
    places: list[tuple[int, ...]] | None = None,
    tile: str = ".tile",
) -> Snippet:
    """`tile` goes without saying."""
    places = places or _places(tensor)
    rank, room = len(tensor.sizes), _room(tensor)
    words = room // 128
    size = ROWS * PITCH  # of every tensor, at most: each trial has a word of each lane of it
    held = -(-size // (4 * WARP * len(places)))
    copy = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global{tile}"
    copy += ".mbarrier::complete_tx::bytes" + (".L2::cache_hint" if hint else "")
    at = ", ".join(f"%i{held + n}" for n in range(rank))
    lines = [START, MAP, "mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"st.shared.b32 [%at+{128 * n}], 0xabababab;" for n in range(words)]
    lines += ["@%first mbarrier.init.shared::cta.b64 [%barrier], 1;", READY]
    lines += [f"@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%barrier], {_box(tensor)};"]
    lines += [f"@%first {copy} [%tile], [%wide, {{{at}}}], [%barrier]{hint};", WAIT]
    lines += [f"ld.shared.b32 %o{n}, [%at+{128 * n}];" for n in range(words)]

    def given() -> Operands:
        data = [draw(f"tma {n}", len(places) * WARP).astype(np.uint32) for n in range(held)]
        starts = [np.array(axis, np.int32).view(np.uint32) for axis in zip(*places, strict=True)]
        return [*data, *(np.repeat(start, WARP) for start in starts)]

    narrow = _room(tensor) != _box(tensor)
    return Snippet(
        name,
        "tma",
        "\n".join(lines),
        ("b32",) * held + ("s32",) * rank,
        ("b32",) * words,
        given,
        arch="sm_90",
        declares=_declares(room),
        tensor=tensor,
        model=None if narrow or tensor.fill == "nan" else _loaded(tensor, held),
    )


def _loaded(tensor: Tensor, held: int) -> Model:
    """The box in shared memory, by elements."""
    size = tensor.element_bytes
    bits = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[tensor.swizzle]

    def model(*ops: Array) -> Operands:
        data = np.concatenate(ops[:held]).view(np.uint8)
        starts = [o.view(np.int32)[::WARP] for o in ops[held:]]
        boxes = np.zeros((len(starts[0]), _room(tensor)), np.uint8)
        for trial, box in enumerate(boxes):
            for n, index in enumerate(np.ndindex(*reversed(tensor.box))):
                at = [int(s[trial]) + i for s, i in zip(starts, reversed(index), strict=True)]
                if any(not 0 <= a < s for a, s in zip(at, tensor.sizes, strict=True)):
                    continue
                strides = (size, *tensor.strides)
                source = sum(a * s for a, s in zip(at, strides, strict=True))
                place = n * size ^ ((n * size >> 7 & bits) << 4)
                box[place : place + size] = data[source : source + size]
        table = boxes.view(np.uint32).reshape(len(boxes), -1, WARP)
        return [np.ascontiguousarray(table[:, n]).reshape(-1) for n in range(table.shape[1])]

    return model


def stores() -> Iterator[Snippet]:
    """A box into the results' place; what is outside of the tensor is left out."""
    for swizzle, width, place in (
        *(("none", 16, (8, 1)), ("32B", 16, (8, 1)), ("64B", 32, (24, 2)), ("128B", 64, (8, 0))),
        ("128B", 64, (16, 3)),
        *(("none", 16, place) for place in ((64, 4), (5, 1), (COLUMNS, 0), (96, 0), (0, 6))),
        *(("128B", 64, (-8, 0)), ("128B", 64, (0, -2))),  # CUDA's guide forbids both
    ):
        yield _store(Tensor((COLUMNS, 6), (PITCH,), (width, 4), swizzle, of_results=True), place)


def _store(tensor: Tensor, place: tuple[int, int]) -> Snippet:
    room = _room(tensor)
    words = -(-6 * PITCH // 128)
    lines = [START, MAP, "mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
    lines += [f"st.shared.b32 [%at+{128 * n}], %i{n};" for n in range(room // 128)]
    lines += [f"st.global.b32 [%out4+{128 * n}], 0xabababab;" for n in range(words)]
    lines += ["fence.proxy.async;", "bar.sync 0;"]
    at = ", ".join(map(str, place))
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    lines += [f"@%first {opcode} [%wide, {{{at}}}], [%tile];"]
    lines += ["cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;"]
    lines += ["fence.proxy.async;", "bar.sync 0;"]
    lines += [f"ld.global.b32 %o{n}, [%out4+{128 * n}];" for n in range(words)]
    return Snippet(
        f"cp.async.bulk.tensor.2d store {tensor.swizzle} at {place[0]} {place[1]}",
        "tma",
        "\n".join([*lines, "bar.sync 0;"]),
        ("b32",) * (room // 128),
        ("b32",) * words,
        lambda: [draw(f"tma store {n}", WARP).astype(np.uint32) for n in range(room // 128)],
        arch="sm_90",
        declares=_declares(room),
        tensor=tensor,
    )
