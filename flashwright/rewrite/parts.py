"""The parts of a loop's sums in global memory: one for each thread block that has a share of the
keys, with an axis of their own beside those of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flashwright.lang import nodes as tl
from flashwright.program.program import Key, Program, TensorAxis
from flashwright.rewrite.carried import Carried, Softmax, refused
from flashwright.rewrite.tree import Body, written

LABELS = ("N", "S", "P", "X", "Y", "Z")
Fresh = Callable[[str], str]


@dataclass(frozen=True)
class Place:
    """Where the rows of a sum lie: the axes of a result up to its rows, and their coordinates."""

    axes: tuple[TensorAxis, ...]
    coords: tuple[tl.Coord, ...]
    column: str
    """The letter of a column's axis."""

    @property
    def label(self) -> str:
        """A letter for the axis of parts."""
        taken = {*(axis.label for axis in self.axes), self.column}
        return next(label for label in LABELS if label not in taken)


def place_of(program: Program, loop: tl.For, behind: Body, known: set[str], rows: int) -> Place:
    """Where a result is stored, by scalars that are known before the loop. Raises Failed with FW910
    if there is none."""
    stores = [s for s in tl.statements(behind) if isinstance(s, tl.Copy) and s.dest == "global"]
    for copy in sorted(stores, key=lambda s: -len(s.shape or ())):
        tensor, coords = program.outer(copy), copy.coords or ()
        tiled = len(copy.shape or ())
        if not tiled or program.moved(copy)[0] != rows:
            continue
        axes = tensor.axes[: len(tensor.axes) - tiled + 1]
        labels = [axis.label for axis in axes]
        mine = tuple(c for c in coords if c.axis.id in labels)
        bounds = [e for c in mine for e in (c.value, *(c.within or ()))]
        if {n.id for e in bounds for n in tl.value_names(e)} <= known:
            column = tensor.axes[-1].label if tiled > 1 else "D"
            return Place(axes, mine, column)
    text = "no result is stored at a place that is known before the loop"
    raise refused(text, loop)


@dataclass(frozen=True)
class Parts:
    """The parts of sums as tensors: their declarations, their stores and loads, and the steps that
    put them together."""

    program: Program
    place: Place
    splits: str
    names: dict[Key, str]
    """The tensor of each sum."""
    maxima: dict[Key, str]
    """Of each maximum, the tile of the new one."""

    @staticmethod
    def of(
        program: Program,
        place: Place,
        splits: str,
        keys: Sequence[Key],
        carried: Carried,
        fresh: Fresh,
    ) -> Parts:
        """The parts of some of the tiles that a loop carries, under names that are not taken."""
        names = {key: fresh(f"Part{key[0]}") for key in keys}
        maxima = [one.maximum for one in carried.softmaxes if one.maximum in names]
        return Parts(program, place, splits, names, {k: fresh(f"New{k[0]}") for k in maxima})

    def declarations(self) -> Body:
        """The tensors."""
        made = []
        for key, name in self.names.items():
            splits: tl.Expr = tl.Name(self.splits)
            axes = [(self.place.label, splits)]
            axes += [(axis.label, axis.size) for axis in self.place.axes]
            axes += [(self.place.column, size) for size in self._shape(key)[1:]]
            shape = tuple(tl.Axis(tl.Name(label), size) for label, size in axes)
            made.append(tl.Allocate(tl.Name(name), "global", shape, tl.Name("fp32")))
        return tuple(made)

    def stores(self, index: str) -> Body:
        """Stores a part of every sum."""
        return tuple(
            self._copy(key, index, tl.Name(key[0]), "register", "global", tl.Name(name))
            for key, name in self.names.items()
        )

    def loads(self, index: str) -> Body:
        """Loads a part of every sum."""
        return tuple(
            self._copy(key, index, tl.Name(name), "global", "register", None)
            for key, name in self.names.items()
        )

    def _copy(
        self,
        key: Key,
        index: str,
        name: tl.Name,
        source: tl.Space,
        dest: tl.Space,
        target: tl.Name | None,
    ) -> tl.Copy:
        coords = (tl.Coord(tl.Name(self.place.label), tl.Name(index)), *self.place.coords)
        return tl.Copy(name, self._shape(key), coords, source, dest, target)

    def _shape(self, key: Key) -> tuple[tl.Expr, ...]:
        declared = self.program.buffers[key].declared
        assert isinstance(declared, tl.Allocate)
        return tuple(axis.size for axis in declared.shape)

    def new_maxima(self) -> dict[tl.Span, tl.Allocate]:
        """The tiles of the new maxima, each by the span of the maximum's Allocate."""
        made = {}
        for key, name in self.maxima.items():
            declared = self.program.buffers[key].declared
            assert isinstance(declared, tl.Allocate)
            bare = replace(declared, name=tl.Name(name), comment=None, gap=False)
            made[declared.span] = replace(bare, span=tl.NOWHERE)
        return made

    def put_together(self, softmaxes: Iterable[Softmax]) -> Body:
        """Adds a part of every sum to what the earlier ones gave."""
        text, members = "", set()
        for one in softmaxes:
            members |= {*one.tiles}
            text += self._softmax(one) if one.maximum in self.names else ""
        for key in (k for k in self.names if k not in members):
            text += f"Compute {key[0]} + {self.names[key]} and get new {key[0]}\n"
        return written(text)

    def _softmax(self, one: Softmax) -> str:
        top, part, new = one.maximum[0], self.names[one.maximum], self.maxima[one.maximum]
        text = f"Compute max({top}, {part}) and get {new}\n"
        for key in (k for k in (*one.rescaled, one.total) if k in self.names):
            had = f"{key[0]} * exp({top} - {new})"
            text += f"Compute {had} + {self.names[key]} * exp({part} - {new})"
            text += f" and get new {key[0]}\n"
        return f"{text}Compute {new} and get new {top}\n"
