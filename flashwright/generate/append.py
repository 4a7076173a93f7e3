"""Kernels that write new keys and values into a cache, and that rotate them and queries, each made
once. Their programs are TL, of copies and elementwise work alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.generate.own_program import OwnProgram

ROWS = 16
"""Tokens of a thread block, which is one warp."""
COLUMNS = 8
"""The columns of a tile are a multiple."""


@dataclass(frozen=True)
class Rotation:
    """Which columns are rotated: twice `half` of them, the first ones."""

    half: int
    dtype: str
    """Of the cosines and sines."""
    pairs: bool = False
    """Whether neighbouring columns are rotated, else the first half with the second."""
    by_first: bool = False
    """Whether all tokens of a sequence are rotated as its first one is."""

    def lines(self, source: str, head: str) -> Iterator[str]:
        """Both halves of new tokens, rotated, in the tiles Left and Right."""
        for half, tile in enumerate(("First", "Second")):
            yield f"{_load(source, 'Half', head, half)} and get {tile}"
        for name in ("Cos", "Sin"):
            tile, place = "(Rows, Half)", "L = block_idx in first:first + q_len"
            if self.by_first:
                tile, place = "(Half)", "L = first"
            yield f"Copy {name} {tile} in coordinate [{place}] from global to register"
        yield "Compute First * Cos - Second * Sin and get Left"
        yield "Compute Second * Cos + First * Sin and get Right"

    def tensors(self) -> Iterator[str]:
        """Cosines, sines, and the tiles."""
        for name in ("Cos", "Sin"):
            yield f"Allocate {name} in global (L: positions, D: Half) as {self.dtype}"
        if self.by_first:
            for name in ("Cos", "Sin"):
                yield f"Allocate {name} in register (Half) as {self.dtype} along columns"
        for name in ("Left", "Right"):
            yield f"Allocate {name} in register (Rows, Half) as fp32"


@dataclass(frozen=True)
class Append(OwnProgram):
    """New keys and values, written behind those of each sequence.

    `K` and `V` are changed in place. With a rotation `NewK` and `K` are its two halves, along an
    axis of their own, and `RestK` and `NewRestK` the columns that are not rotated.
    """

    types: tuple[str, str]
    """Of the new keys, and of the new values."""
    kept: str
    """The type in the cache."""
    widths: tuple[int, int]
    page: int | None = None
    entries: bool = False
    """Whether a tensor says which entry of the cache a sequence has; else they are in order."""
    rotation: Rotation | None = None

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        where = f"pages of {self.page}" if self.page else "a cache"
        turned = ", rotated" if self.rotation else ""
        return f"new keys and values for {where}{turned}; {self.gpu.title}"

    @property
    def code(self) -> str:
        """The program."""
        return "\n".join([*self._sizes(), *self._tensors(), *self._body()]) + "\n"

    def parts(self) -> Iterator[tuple[str, str, int, str]]:
        """The tensors that are written: the name, the name of its columns, how many, and the type
        of new ones."""
        rotated = 2 * self.rotation.half if self.rotation else 0
        if self.rotation:
            yield "K", "Half", self.rotation.half, self.types[0]
        if self.widths[0] > rotated:
            name = "RestK" if self.rotation else "K"
            yield name, name + "Dim", self.widths[0] - rotated, self.types[0]
        yield "V", "VDim", self.widths[1], self.types[1]

    def _sizes(self) -> Iterator[str]:
        yield "// New keys and values, written behind those of each sequence."
        yield from (f"param {label} = {columns}" for _, label, columns, _ in self.parts())
        yield from (f"param Rows = {ROWS}", "param Warps = 1")
        if self.page:
            yield f"param PageSize = {self.page}"
        dims = ["pages", "max_pages"] if self.page else ["entries"] * self.entries + ["room"]
        yield "dim " + ", ".join(dims + ["positions"] * bool(self.rotation))
        yield "grid block_idx = 0:q_len / Rows, kv_head = 0:kv_heads, batch_idx = 0:batch"

    def _tensors(self) -> Iterator[str]:
        outer, length = ("P: pages", "PageSize") if self.page else ("B: batch", "room")
        if self.entries:
            outer = "B: entries"
            yield "Allocate Entry in global (B: batch) as int32"
        if self.page:
            yield "Allocate Table in global (B: batch, T: max_pages) as int32"
        yield "Allocate LengthsK in global (B: batch) as int32"
        for name, label, _, dtype in self.parts():
            rotation = self.rotation if label == "Half" else None
            halves = ", E: 2" if rotation else ""
            strides = " strided" if rotation and rotation.pairs else ""
            for new, first, rows, kind in (
                ("New", "B: batch", "q_len", dtype),
                ("", outer, length, f"{self.kept} in place"),
            ):
                axes = f"{first}, H: kv_heads{halves}, L: {rows}, D: {label}"
                yield f"Allocate {new}{name} in global ({axes}) as {kind}{strides}"
            if self._scaled(dtype) and label != "Half":
                yield f"Allocate {name} in register (Rows, {label}) as fp32"
        for name, dtype in zip("KV", self.types, strict=True):
            if self._scaled(dtype):
                yield f"Allocate {name}Descale in global (B: batch, H: kv_heads) as fp32"
        if self.rotation:
            yield from self.rotation.tensors()

    def _body(self) -> Iterator[str]:
        yield "let first = LengthsK[batch_idx]"
        for name, label, _, dtype in self.parts():
            scale = f"{name[-1]}Descale[batch_idx, kv_head]" if self._scaled(dtype) else None
            if self.rotation and label == "Half":
                yield from self.rotation.lines("NewK", "kv_head")
                for half, tile in enumerate(("Left", "Right")):
                    if scale:
                        yield f"Compute {tile} / {scale} and get new {tile}"
                    yield self._store(tile, label, half, name)
                continue
            yield _load(f"New{name}", label, "kv_head")
            if scale:
                yield f"Compute New{name} / {scale} and get {name}_register"
            yield self._store(name if scale else f"New{name}", label, None, name)

    def _scaled(self, dtype: str) -> bool:
        return dtype != self.kept

    def _store(self, tile: str, label: str, half: int | None, target: str) -> str:
        where = "B = Entry[batch_idx]" if self.entries else "B = batch_idx"
        if self.page:
            where = "P = Table[batch_idx, page_idx]"
        part = f", E = {half}" if half is not None else ""
        place = f"[{where}, H = kv_head{part}, L = block_idx in first:first + q_len]"
        text = f"Copy {tile} (Rows, {label}) in coordinate {place} from register to global"
        return f"{text} and get {target}"


@dataclass(frozen=True)
class Rotate(OwnProgram):
    """Queries, rotated by their positions: `Q` to `Turned`, `RestQ` to `RestTurned`."""

    dtype: str
    width: int
    rotation: Rotation

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"rotated queries; {self.gpu.title}"

    @property
    def code(self) -> str:
        """The program."""
        half, rest = self.rotation.half, self.width - 2 * self.rotation.half
        parts = [("Q", "Turned", "E: 2, ", "Half")]
        parts += [("RestQ", "RestTurned", "", "Rest")] if rest else []
        lines = ["// Queries, rotated by their positions.", f"param Half = {half}"]
        lines += [f"param Rest = {rest}"] if rest else []
        lines += [f"param Rows = {ROWS}", "param Warps = 1", "dim positions"]
        lines += ["grid block_idx = 0:q_len / Rows, head_idx = 0:heads, batch_idx = 0:batch"]
        lines += ["Allocate LengthsK in global (B: batch) as int32"]
        for source, target, halves, label in parts:
            axes = f"(B: batch, H: heads, {halves}L: q_len, D: {label}) as {self.dtype}"
            axes += " strided" if halves and self.rotation.pairs else ""
            lines += [f"Allocate {name} in global {axes}" for name in (source, target)]
        lines += self.rotation.tensors()
        lines += ["let first = LengthsK[batch_idx]", *self.rotation.lines("Q", "head_idx")]
        for half, tile in enumerate(("Left", "Right")):
            lines.append(_store(tile, "Half", f"E = {half}, ", "Turned"))
        if rest:
            lines += [_load("RestQ", "Rest", "head_idx")]
            lines += [_store("RestQ", "Rest", "", "RestTurned")]
        return "\n".join(lines) + "\n"


def _load(source: str, label: str, head: str, half: int | None = None) -> str:
    part = f"E = {half}, " if half is not None else ""
    place = f"[B = batch_idx, H = {head}, {part}L = block_idx]"
    return f"Copy {source} (Rows, {label}) in coordinate {place} from global to register"


def _store(tile: str, label: str, part: str, target: str) -> str:
    place = f"[B = batch_idx, H = head_idx, {part}L = block_idx]"
    text = f"Copy {tile} (Rows, {label}) in coordinate {place} from register to global"
    return f"{text} and get {target}"
