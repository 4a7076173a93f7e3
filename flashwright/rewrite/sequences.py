"""How the sequences of a batch lie in memory: what a program declares and reads to find one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flashwright.lang import nodes as tl
from flashwright.program.program import TensorAxis
from flashwright.program.vocabulary import PAGE


@dataclass(frozen=True)
class Packed:
    """Sequences that lie behind each other: a tensor has an axis of all tokens."""

    longest: str
    """The dim of the longest one."""
    length: str
    """The name of the length of the one at hand; `first` and `last` bound it."""
    first: str
    last: str
    tokens: str
    starts: str
    lengths: str | None = None
    """The tensor of lengths; None if a sequence ends where the next one begins."""

    @property
    def sizes(self) -> str:
        """The declarations of the sizes of tensors."""
        return f"dim {self.tokens}\n"

    @property
    def names(self) -> frozenset[str]:
        """The scalars that say where the sequence at hand is."""
        return frozenset((self.first, self.last, self.length))

    @property
    def within(self) -> tuple[tl.Expr, tl.Expr]:
        """The range of the sequence's positions."""
        return tl.Name(self.first), tl.Name(self.last)

    def axes(self, axes: Iterable[TensorAxis]) -> Iterator[tl.Axis]:
        """The axes of a packed tensor, from those of the rectangular one."""
        for axis in axes:
            if axis.size != tl.Name("batch"):
                size = tl.Name(self.tokens) if axis.size == tl.Name(self.longest) else axis.size
                yield tl.Axis(tl.Name(axis.label), size)

    def page(self, place: tl.Expr) -> tl.Expr | None:
        """What is in the place of the index of the batch; None where nothing is."""
        return None

    def tensors(self) -> str:
        """The declarations of the tensors that say where sequences are."""
        starts = f"Allocate {self.starts} in global"
        if self.lengths is None:
            return f"{starts} (B: batch + 1) as int32\n"
        lengths = f"Allocate {self.lengths} in global"
        return "".join(f"{tensor} (B: batch) as int32\n" for tensor in (starts, lengths))

    def lets(self, place: str, used: set[str]) -> str:
        """Where the sequence at that index of the batch is; its length only if it is used."""
        text = f"let {self.first} = {self.starts}[{place}]\n"
        if self.lengths:
            text += f"let {self.length} = {self.lengths}[{place}]\n"
            return text + f"let {self.last} = {self.first} + {self.length}\n"
        text += f"let {self.last} = {self.starts}[{place} + 1]\n"
        if self.length in used:
            text += f"let {self.length} = {self.last} - {self.first}\n"
        return text


@dataclass(frozen=True)
class Paged:
    """Sequences in pages, which a table names."""

    longest: str
    length: str
    table: str
    lengths: str
    pages: str
    """The dim of all pages; `most` that of a sequence's entries in the table."""
    most: str
    size: str
    """The param of the positions in a page, which are `positions` many."""
    positions: int

    @property
    def sizes(self) -> str:
        """The declarations of the sizes of tensors."""
        return f"param {self.size} = {self.positions}\ndim {self.pages}, {self.most}\n"

    @property
    def names(self) -> frozenset[str]:
        """The scalars that say where the sequence at hand is."""
        return frozenset((self.length,))

    @property
    def within(self) -> tuple[tl.Expr, tl.Expr]:
        """The range of the sequence's positions, over all its pages."""
        return tl.Num("0"), tl.Name(self.length)

    def axes(self, axes: Iterable[TensorAxis]) -> Iterator[tl.Axis]:
        """The axes of a tensor of pages, from those of the rectangular one."""
        axes = tuple(axes)
        for axis in axes:
            if axis.size == tl.Name("batch"):
                yield tl.Axis(tl.Name(page_label(axes)), tl.Name(self.pages))
            else:
                size = tl.Name(self.size) if axis.size == tl.Name(self.longest) else axis.size
                yield tl.Axis(tl.Name(axis.label), size)

    def page(self, place: tl.Expr) -> tl.Expr:
        """What is in the place of the index of the batch: the page of a row."""
        return tl.Index(tl.Name(self.table), (place, tl.Name(PAGE)))

    def tensors(self) -> str:
        """The declarations of the tensors that say where sequences are."""
        text = f"Allocate {self.table} in global (B: batch, T: {self.most}) as int32\n"
        return text + f"Allocate {self.lengths} in global (B: batch) as int32\n"

    def lets(self, place: str, used: set[str]) -> str:
        """The length of the sequence at that index of the batch."""
        return f"let {self.length} = {self.lengths}[{place}]\n"


Sequences = Packed | Paged


def page_label(axes: Iterable[TensorAxis]) -> str:
    """The letter of a tensor's axis of pages, which was that of the batch: P, if it has none."""
    labels = {axis.size: axis.label for axis in axes}
    return labels[tl.Name("batch")] if "P" in labels.values() else "P"
