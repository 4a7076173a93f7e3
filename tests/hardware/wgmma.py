"""Snippets: wgmma.

A and B are images of shared memory: all bytes are numbers of the format, and the descriptor says
which of them are taken. So a descriptor that is read otherwise gives other numbers. The bounds are
those of mma.sync (matrix.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tests.hardware.formats import Array
from tests.hardware.matrix import (
    ELEMENTS,
    RESULTS,
    WHOLE,
    G,
    Product,
    T,
    cut_off,
    elements,
    fragment_a,
    product,
    rounded,
)
from tests.hardware.snippet import WARP, WARPGROUP, Operands, Snippet

ROWS = 64
TRIALS = (0, 2)  # whole numbers, any numbers (matrix.py)
ATOM = 1024  # bytes: what the widest swizzle repeats after
_STEP = 32  # bytes along k of an instruction


@dataclass(frozen=True)
class Tile:
    """How an operand lies in shared memory: `width` chunks of 16 bytes to a swizzled row."""

    width: int = 8
    """1, 2, 4, 8: no swizzle, 32, 64, 128 bytes."""
    k_major: bool = True
    start: int = 0
    """Bytes from the beginning of the tile."""
    leading: int = 0
    stride: int = 0
    base: int = 0
    """The descriptor's base offset: in which row of its pattern the tile begins."""

    def places(self, rows: int, k: int, size: int) -> Array:
        """The byte where each number of a rows x k matrix begins."""
        row, column = np.mgrid[0:rows, 0:k]
        if self.k_major:
            at = column * size
            line = 16 if self.width == 1 else 16 * self.width
            step = self.leading if self.width == 1 else 16
            place = row % 8 * line + row // 8 * self.stride + at // 16 * step + at % 16
        else:
            at = row * size
            chunk, inside = at // 16, at % 16
            across = (chunk % self.width) * 16 + chunk // self.width * self._apart
            down = column % 8 * 16 * self.width + column // 8 * self._deep
            place = across + down + inside
        return self._swizzled(place + self.start)

    @property
    def _apart(self) -> int:
        """Between two swizzled rows that are neighbours along the rows of the matrix."""
        return self.stride if self.width == 1 else self.leading

    @property
    def _deep(self) -> int:
        """Between eights along k."""
        return self.leading if self.width == 1 else self.stride

    def _swizzled(self, place: Array) -> Array:
        found: Array = place ^ (((place >> 7) - self.base & (self.width - 1)) << 4)
        return found

    @property
    def bits(self) -> int:
        """The descriptor without the tile's address."""
        layout = {1: 0, 8: 1, 4: 2, 2: 3}[self.width]
        start, leading, stride = self.start >> 4, self.leading >> 4, self.stride >> 4
        return start | leading << 16 | stride << 32 | self.base << 49 | layout << 62


def k_tile(width: int, step: int = 0) -> Tile:
    """Rows of k, one below the other; `step` instructions into them."""
    if width == 1:  # cores of 8 rows: two along k, then the next rows
        return Tile(1, True, 0, leading=128, stride=256)
    return Tile(width, True, _STEP * step, leading=16, stride=8 * 16 * width)


def mn_tile(width: int, rows: int, size: int = 2) -> Tile:
    """Columns of the matrix, one behind the other."""
    if width == 1:
        return Tile(1, False, 0, leading=128 * rows * size // 16, stride=128)
    atom = 8 * 16 * width
    across = max(1, rows * size // (16 * width))
    return Tile(width, False, 0, leading=atom, stride=atom * across)


def own_k_tile(rows: int) -> Tile:
    """The second step along the columns of a tile of ours; swizzled, `leading` means nothing."""
    return replace(k_tile(8, 1), leading=128 * rows)


def own_n_tile(columns: int, rows: int = 32) -> Tile:
    """The second step along the rows of a tile of ours: columns of atoms, the widest that fit."""
    width = next(w for w in (8, 4, 2) if columns * 2 % (16 * w) == 0)
    line = 16 * width
    return Tile(width, False, 16 * line, leading=rows * line, stride=8 * line)


def _moved(tile: Tile, step: int) -> Tile:
    return replace(tile, start=tile.start + _STEP * step)


@dataclass(frozen=True)
class Wgmma:
    """One instruction, with all that it can be told."""

    n: int
    a: str
    b: str
    d: str = "f32"
    a_tile: Tile | None = field(default_factory=lambda: k_tile(8))
    """None: A is in registers."""
    b_tile: Tile = field(default_factory=lambda: k_tile(8))
    scale_d: bool = True
    scale_a: int = 1
    scale_b: int = 1
    sat: bool = False
    steps: int = 1
    """Products that are added up one after the other, 32 bytes further along k each time."""
    note: str = ""
    trials: tuple[int, ...] = TRIALS

    @property
    def k(self) -> int:
        return 32 // ELEMENTS[self.a][0]

    @property
    def opcode(self) -> str:
        sat = ".satfinite" if self.sat else ""
        shape = f"m64n{self.n}k{self.k}"
        return f"wgmma.mma_async.sync.aligned.{shape}{sat}.{self.d}.{self.a}.{self.b}"

    @property
    def name(self) -> str:
        return f"{self.opcode} {self.note}".strip()

    # --- memory ---------------------------------------------------------------------------------

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the two images, whole atoms each."""
        size = ELEMENTS[self.a][0]
        tiles = ((self.a_tile, ROWS), (self.b_tile, self.n))
        last = [0 if t is None else int(self._places(t, r).max()) + size for t, r in tiles]
        a, b = (-(-x // ATOM) * ATOM for x in last)
        return a, b

    def _places(self, tile: Tile, rows: int) -> Array:
        """Of all steps, one beside the other."""
        size = ELEMENTS[self.a][0]
        tiles = [_moved(tile, step) for step in range(self.steps)]
        return np.concatenate([t.places(rows, self.k, size) for t in tiles], axis=1)

    def images(self, trial: int) -> tuple[Array, Array]:
        size = ELEMENTS[self.a][0]
        a, b = self.sizes
        return (
            elements(self.a, self.name + "a", trial, (a // size,)),
            elements(self.b, self.name + "b", trial, (b // size,)),
        )

    def matrices(self, trial: int) -> tuple[Array, Array, Array]:
        """A, B and C as the instruction sees them."""
        size = ELEMENTS[self.a][0]
        a_image, b_image = self.images(trial)
        if self.a_tile is None:
            a = elements(self.a, self.name + "r", trial, (ROWS, self.k))
        else:
            a = a_image[self._places(self.a_tile, ROWS) // size]
        b = b_image[self._places(self.b_tile, self.n) // size].T
        c = elements(self.d, self.name + "c", trial, (ROWS, self.n))
        return a, np.ascontiguousarray(b), c

    # --- operands and results -------------------------------------------------------------------

    def operands(self) -> Operands:
        trials = []
        for trial in self.trials:
            words = [i.view(np.uint32).reshape(-1, WARPGROUP) for i in self.images(trial)]
            a, _, c = self.matrices(trial)
            given = [*np.concatenate(words)]
            if self.a_tile is None:
                warps = [fragment_a(a[16 * w : 16 * w + 16]) for w in range(4)]
                given += [np.concatenate(parts) for parts in zip(*warps, strict=True)]
            trials.append([*given, *self._registers(c)])
        return [np.concatenate(parts) for parts in zip(*trials, strict=True)]

    def _spread(self, matrix: Array) -> list[Array]:
        """Each thread's numbers of a 64 x n matrix, in order."""
        numbers = []
        warps = np.repeat(np.arange(4), WARP) * 16
        rows, columns = warps + np.tile(G, 4), 2 * np.tile(T, 4)
        for block in range(self.n // 8):
            for i in range(4):
                numbers.append(matrix[rows + 8 * (i // 2), columns + 8 * block + i % 2])
        return numbers

    def _registers(self, matrix: Array) -> list[Array]:
        per = 4 // matrix.dtype.itemsize
        numbers = self._spread(matrix)
        return [
            np.ascontiguousarray(np.stack(numbers[at : at + per], axis=1)).view(np.uint32)[:, 0]
            for at in range(0, len(numbers), per)
        ]

    @property
    def cuts_off(self) -> bool:
        """Whether little is kept of the sum, and every bit of it known."""
        return self.a in ("e4m3", "e5m2") and self.d == "f32"

    def products(self) -> list[Product]:
        found = []
        kinds = (self.a, self.b, self.d)
        sign = self.scale_a * self.scale_b
        for trial in self.trials:
            a, b, c = self.matrices(trial)
            c = c if self.scale_d else np.zeros_like(c)
            if self.cuts_off:
                found.append(cut_off(a, b, c, kinds, sign))
                continue
            more = {"sat": self.sat, "sign": sign, "steps": self.steps}
            found.append(product(a, b, c, kinds, trial in WHOLE, **more))
        return found

    def model(self, *_: Array) -> Operands:
        trials = [self._registers(rounded(p.d, self.d)) for p in self.products()]
        return [np.concatenate(parts) for parts in zip(*trials, strict=True)]

    def bound(self, *_: Operands) -> Operands:
        per = 2 if self.d == "f16" else 1
        trials = []
        for found in self.products():
            rooms = self._spread(found.room)
            trials.append(
                [np.stack(rooms[at : at + per], axis=-1) for at in range(0, len(rooms), per)]
            )
        rooms = [np.concatenate(parts) for parts in zip(*trials, strict=True)]
        return rooms if per == 2 else [room[:, 0] for room in rooms]

    # --- text -----------------------------------------------------------------------------------

    def snippet(self) -> Snippet:
        a, b = (size // (4 * WARPGROUP) for size in self.sizes)
        registers = 0 if self.a_tile else 4
        results = self.n // 2 // (2 if self.d == "f16" else 1)
        lines = ["mov.u32 %tile, tile;", "mad.lo.s32 %at, %t, 4, %tile;"]
        lines += [f"st.shared.b32 [%at+{512 * n}], %i{n};" for n in range(a + b)]
        first = a + b + registers
        lines += [f"mov.b32 %o{n}, %i{first + n};" for n in range(results)]
        lines += ["fence.proxy.async.shared::cta;", "bar.sync 0;"]
        if self.a_tile:
            lines += self._descriptor("%da", "%tile", self.a_tile)
        lines += [f"add.s32 %at, %tile, {self.sizes[0]};"]
        lines += self._descriptor("%db", "%at", self.b_tile)
        lines += [f"setp.ne.b32 %scale, {int(self.scale_d)}, 0;", "wgmma.fence.sync.aligned;"]
        # Of two whose operands are all the same ptxas keeps one: they must not be.
        further = [f"add.s64 {d}, {d}, {_STEP >> 4};" for d in ("%da", "%db")]
        for step in range(self.steps):
            lines += [*(further if step else []), self._instruction(results, a + b)]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
        bound = None if self.d == "s32" or self.cuts_off else self.bound
        return Snippet(
            self.name,
            "wgmma",
            "\n".join(lines),
            ("b32",) * (first + results),
            (RESULTS[self.d],) * results,
            self.operands,
            arch="sm_90a",
            threads=WARPGROUP,
            declares=f".shared .align {ATOM} .b8 tile[{sum(self.sizes)}];\n"
            ".reg .b32 %tile, %at;\n.reg .b64 %da, %db;\n.reg .pred %scale;",
            bound=bound,
            model=self.model,
        )

    def _descriptor(self, target: str, address: str, tile: Tile) -> list[str]:
        # The address in its 14 bits of 16 bytes; the tile's own start has been added to it.
        rest = tile.bits - (tile.start >> 4)
        lines = [f"add.s32 %at, {address}, {tile.start};", f"cvt.u64.u32 {target}, %at;"]
        lines += [f"shr.u64 {target}, {target}, 4;", f"and.b64 {target}, {target}, 0x3fff;"]
        return [*lines, f"or.b64 {target}, {target}, {rest:#x};"]

    def _instruction(self, results: int, first: int) -> str:
        d = ", ".join(f"%o{n}" for n in range(results))
        held = ", ".join(f"%i{first + n}" for n in range(4))
        a = "%da" if self.a_tile else f"{{{held}}}"
        tail = ["%scale"]
        if self.d != "s32":
            tail += [str(self.scale_a), str(self.scale_b)]
        if ELEMENTS[self.a][0] == 2:
            tiles = [t for t in (self.a_tile, self.b_tile) if t]
            tail += [str(int(not tile.k_major)) for tile in tiles]
        return f"{self.opcode} {{{d}}}, {a}, %db, {', '.join(tail)};"


# --- which --------------------------------------------------------------------------------------

_WIDTHS = {1: "plain", 2: "32B", 4: "64B", 8: "128B"}


def wgmmas() -> Iterator[Snippet]:
    """Swizzles, majors, types, widths, A in registers, signs."""
    many = [*_layouts(), *_types(), *_others(), *_ours()]
    for one in many:
        yield one.snippet()


def _layouts() -> Iterator[Wgmma]:
    for width, name in _WIDTHS.items():
        for step in range(max(1, width // 2)):
            tile = k_tile(width, step)
            note = f"{name} step {step}"
            yield Wgmma(16, "f16", "f16", a_tile=tile, b_tile=tile, note=note)
        n = max(16, 16 * width)  # two atoms of B
        for a_k, b_k in ((False, True), (True, False), (False, False)):
            yield Wgmma(
                n if not b_k else 16,
                "bf16",
                "bf16",
                a_tile=k_tile(width) if a_k else mn_tile(width, ROWS),
                b_tile=k_tile(width) if b_k else mn_tile(width, n),
                note=f"{name} A by {'k' if a_k else 'm'}, B by {'k' if b_k else 'n'}",
            )
        if width > 1:
            yield Wgmma(16, "e4m3", "e4m3", a_tile=k_tile(width), b_tile=k_tile(width), note=name)
            yield Wgmma(16, "tf32", "tf32", a_tile=k_tile(width), b_tile=k_tile(width), note=name)


def _types() -> Iterator[Wgmma]:
    for d in ("f32", "f16"):
        yield Wgmma(32, "f16", "f16", d)
        for a, b in itertools.product(("e4m3", "e5m2"), ("e4m3", "e5m2")):
            yield Wgmma(24, a, b, d)
    yield Wgmma(32, "bf16", "bf16")
    yield Wgmma(24, "tf32", "tf32")
    for a, b in itertools.product(("s8", "u8"), ("s8", "u8")):
        yield Wgmma(16, a, b, "s32")
    yield Wgmma(16, "s8", "s8", "s32", sat=True)
    for kind in ("f16", "bf16", "tf32", "e4m3", "e5m2"):
        yield Wgmma(16, kind, kind, a_tile=None, note="A in registers")
    yield Wgmma(
        64, "bf16", "bf16", a_tile=None, b_tile=mn_tile(8, 64), note="A in registers, B by n"
    )
    yield Wgmma(16, "f16", "f16", "f16", a_tile=None, note="A in registers")


def _others() -> Iterator[Wgmma]:
    for n in (8, 40, 96):
        yield Wgmma(n, "f16", "f16")
    yield Wgmma(176, "bf16", "bf16")
    yield Wgmma(256, "f16", "f16", "f16")
    for base in (0, 2):  # a tile that begins with the third row of a pattern
        tile = Tile(8, True, 256, leading=16, stride=1024, base=base)
        yield Wgmma(16, "f16", "f16", a_tile=tile, b_tile=tile, note=f"128B at 256, base {base}")
    far = Tile(8, True, 0, leading=16, stride=2048)
    yield Wgmma(16, "f16", "f16", a_tile=far, b_tile=far, note="128B every other atom")
    wide = Tile(1, True, 0, leading=1024, stride=128)
    yield Wgmma(16, "f16", "f16", a_tile=wide, b_tile=wide, note="plain, k far apart")
    yield Wgmma(16, "f16", "f16", scale_d=False, note="without C")
    yield Wgmma(16, "f16", "f16", scale_a=-1, note="minus A")
    yield Wgmma(16, "bf16", "bf16", scale_a=-1, scale_b=-1, note="minus A and B")
    yield Wgmma(16, "bf16", "bf16", steps=2, note="two steps")
    yield Wgmma(16, "f16", "f16", steps=4, note="four steps")


def _ours() -> Iterator[Wgmma]:
    """The widths of our kernels, with descriptors as fw/wgmma.cuh makes them; those of fp8 too."""
    widths = {64: "f16", 96: "f16", 112: "bf16", 128: "f16", 192: "bf16", 256: "bf16"}
    for n, kind in widths.items():
        for a_tile, b_k in itertools.product((None, own_k_tile(ROWS)), (True, False)):
            where = "shared memory" if a_tile else "registers"
            note = f"A in {where}, B by {'k' if b_k else 'n'}"
            b_tile = own_k_tile(n) if b_k else own_n_tile(n)
            # Q K and P V; of the two others whole numbers, which take less room, show the layout.
            trials = TRIALS if bool(a_tile) == b_k else WHOLE[:1]
            yield Wgmma(n, kind, kind, a_tile=a_tile, b_tile=b_tile, note=note, trials=trials)
    for n, a_tile in itertools.product((64, 128, 256), (None, own_k_tile(ROWS))):
        note = f"A in {'shared memory' if a_tile else 'registers'}"
        yield Wgmma(n, "e4m3", "e4m3", a_tile=a_tile, b_tile=own_k_tile(n), note=note)
