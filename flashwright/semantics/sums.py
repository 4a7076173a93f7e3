"""Sums: which part of the sequence an accumulator covers, and whether that is all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashwright.lang.diagnostic import Label
from flashwright.lang.nodes import Compute, Copy, For, Span, Statement
from flashwright.program.vocabulary import POSITIONS
from flashwright.semantics.masks import any_visible
from flashwright.semantics.state import State
from flashwright.semantics.tiles import Coverage, Covered, Operand, Tile, axis_of, covering

LINEAR = ("+", "-", "*")


class Sums:
    """Tracks the part of the sequence that each sum covers, for a machine."""

    def __init__(self, machine: State) -> None:
        self.machine = machine
        self.program = machine.program
        self._dims: dict[str, frozenset[str]] = {}

    def covered(self, op: str, args: list[Operand], stmt: Statement) -> Covered:
        """The coverage of a result. Linear operations keep it; any other needs complete sums."""
        tiles = [a for a in args if isinstance(a, Tile)]
        if op == "where":
            tiles = [a for a in args[1:] if isinstance(a, Tile)]
        elif op == "/":
            if isinstance(args[1], Tile):
                self.complete(args[1], stmt)
            tiles = [a for a in args[:1] if isinstance(a, Tile)]
        elif op not in LINEAR:
            for tile in tiles:
                self.complete(tile, stmt)
            return {}
        merged: Covered = {}
        for tile in tiles:
            merged = self._joined(merged, tile.covered, stmt)
        return merged

    def _joined(self, total: Covered, term: Covered, stmt: Statement) -> Covered:
        merged = dict(total)
        for key, part in term.items():
            have = merged.get(key)
            if have is None:
                merged[key] = part
                continue
            if have.ranges != part.ranges:  # else two sums over the same keys, combined
                self.twice(have, part, stmt)
            merged[key] = have.join(part)
        return merged

    def twice(self, total: Coverage, term: Coverage, stmt: Statement) -> None:
        """Report FW606 for keys that are added twice and visible both times."""
        dim = term.dim
        both = (p for p in total.overlaps(term) if any_visible(p.masks, dim, p.low, p.high, True))
        twice = next(both, None)
        if twice is None:
            return
        text = f"{dim} {twice.low}..{twice.high - 1} is added a second time"
        self.machine.report(
            "FW606",
            text,
            self._loop(stmt).span,
            label=self.machine.problem(),
            secondary=(Label(stmt.span, "here"), *self._bounds_of(self._loop(stmt))),
            help="hide it with a Mask one of the two times" if twice.masks else None,
        )

    def _loop(self, stmt: Statement) -> Statement:
        return self.machine.loops[-1] if self.machine.loops else stmt

    def _bounds_of(self, stmt: Statement) -> tuple[Label, ...]:
        """Labels where the bounds of a loop are set, if not in its own line."""
        return self.program.definitions(stmt.low, stmt.high) if isinstance(stmt, For) else ()

    def _blocks_of(self, stmt: Statement) -> tuple[Label, ...]:
        """A label at the grid, if a sum goes over its thread blocks."""
        summed = isinstance(stmt, Copy) and stmt.adds
        return (Label(self.program.grid.span, "these thread blocks add to it"),) if summed else ()

    def complete(self, tile: Tile, stmt: Statement) -> None:
        """Report FW604 for a used sum that lacks keys visible through the masks."""
        for part, low, high in self._missing(tile):
            text = f"{part.axis} {low}..{high - 1} is never added in"
            where = (
                Label(stmt.span, "the sum is used here"),
                *_masks(tile, part.dim, "the mask shows it"),
                *self._bounds_of(part.stmt),
                *self._blocks_of(stmt),
            )
            self.machine.report(
                "FW604",
                text,
                part.stmt.span,
                secondary=where,
                label=self.machine.problem(),
                help=stateless(stmt),
            )

    def is_complete(self, tile: Tile) -> bool:
        """Whether no sum lacks keys that are visible through the masks."""
        return not any(self._missing(tile))

    def _missing(self, tile: Tile) -> Iterator[tuple[Coverage, int, int]]:
        """The first visible keys that each sum of a tile lacks."""
        if self.machine.left_out:  # data-dependent: the expected keys are unknown
            return
        for part in tile.covered.values():
            if not part.demanded:
                continue
            told = [m.sources for m in tile.masks if m.side(part.dim) is not None]
            for low, high in part.missing(frozenset().union(*told)):
                if any_visible(tile.masks, part.dim, low, high):
                    yield part, low, high
                    break

    def summing(self, tile: Tile, stmt: Statement) -> Covered:
        """The coverage of a sum over the columns of a tile."""
        where = tile.axes[1]
        if where is None:
            return {}
        loops, sources = self.machine.loops, self.program.sources
        lows = frozenset(name for loop in loops for name in sources(loop.low))
        highs = frozenset(name for loop in loops for name in sources(loop.high))
        made = covering(where, tile, self._loop(stmt), self._dims_of(where.tensor))
        return {key: replace(part, open=(lows, highs)) for key, part in made.items()}

    def _dims_of(self, name: str) -> frozenset[str]:
        """The identities of a tensor's axes; none of a tile made of several tensors."""
        if name not in self._dims:
            tensor = self.program.tensors.get(name)
            axes = tensor.axes if tensor is not None else ()
            self._dims[name] = frozenset(self.machine.identity(axis.size) for axis in axes)
        return self._dims[name]

    def no_tail(self, tile: Tile, span: Span, axis: int = 1) -> None:
        """Report FW609 for columns (or rows, on axis 0) outside the sequence that are not masked
        before they are added up."""
        line, side = tile.axes[axis], ("rows", "columns")[axis]
        for low, high in line.outside() if line is not None else ():
            assert line is not None
            if not any_visible(tile.masks, line.dim, low, high):
                continue
            end = str(line.extent) if line.dim.isdigit() else f"{line.dim} = {line.extent}"
            position = next(p for p in POSITIONS if axis_of(p, tile.axes) == axis)
            past, bound = f"past {end}", f"{position} < {line.dim}"
            if low < 0:
                past, bound = f"before the start of {line.dim}", f"{position} >= 0"
            text = f"{side} {past} are not masked and count as scores of 0"
            hint = f"`Compute Mask ... where {bound}` before this line"
            where = _masks(tile, line.dim, "this mask lets them through")
            self.machine.report(
                "FW609", text, span, secondary=where, help=hint, label=self.machine.problem()
            )


def _masks(tile: Tile, dim: str, text: str) -> tuple[Label, ...]:
    return tuple(Label(m.stmt.span, text) for m in tile.masks if m.side(dim) is not None)


def stateless(stmt: Statement) -> str | None:
    """The hint for a Softmax without state in a loop; None if it has state."""
    if not isinstance(stmt, Compute) or stmt.operation != "softmax" or stmt.state:
        return None
    return "in a loop a Softmax keeps its state: `with Smax and Ssum and rescale O`"
