"""A score and a mask of the caller's own, as TL expressions, in the built-in author's sketch.

`score` is an expression of the scaled score `S`, `mask` a condition. Both may use `q_idx`,
`kv_idx`, `head_idx`, `batch_idx`, the dims, and elements of tensors (`Slopes[head_idx]`). How a
tensor is read follows from its index:

- by head, batch or a constant: a scalar, read once for each block;
- by `q_idx` alone: a vector of rows, copied to registers before the loop;
- by `kv_idx` alone: a vector of columns, copied in every iteration;
- by `q_idx` and `kv_idx`: a tile, copied in every iteration;
- by anything else (`Table[q_idx - kv_idx + 512]`): each element reads its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flashwright.author.builtin.bounds import Range, bounds
from flashwright.lang.format import format_expr
from flashwright.lang.nodes import (
    Binary,
    Call,
    Compute,
    Copy,
    Expr,
    Index,
    Let,
    Name,
    Statement,
    Unary,
    expressions,
)
from flashwright.lang.parse import parse

POSITION_DIMS = {"q_idx": "q_len", "kv_idx": "kv_len"}
_NOTHING = Unary("-", Name("inf"))


@dataclass(frozen=True)
class Operand:
    """A tensor that score or mask read: its name, the size of each axis, its TL type."""

    name: str
    sizes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class BlockLists:
    """Lists of the blocks of keys that each block of queries visits, in tensors: `Counts` says how
    many, `Blocks` which. They have one batch, or one head, if these share the lists. With `full`,
    a tensor `Full` says how many of them, the first ones, need no mask."""

    rows: int
    columns: int
    batched: bool
    per_head: bool
    full: bool

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors."""
        shared = ("batch" if self.batched else "1", "heads" if self.per_head else "1")
        rows = (*shared, f"ceil(q_len / {ROW_BLOCK})")
        counts = [Operand(name, rows, "int32") for name in ("Counts", "Full")[: 1 + self.full]]
        return *counts, Operand("Blocks", (*rows, f"ceil(kv_len / {KEY_BLOCK})"), "int32")

    def before_loop(self) -> tuple[Statement, ...]:
        """The block of queries, how many blocks it visits, and the end of those without a mask."""
        made = [
            _let("RowBlockHere", f"floor(block_idx * BM / {ROW_BLOCK})"),
            _let("Visited", f"Counts[{self._place}]"),
        ]
        if self.full:
            made.append(_let("FullEnd", f"Full[{self._place}] * ({KEY_BLOCK} / BN)"))
        return tuple(made)

    def masked(self, mask: str) -> str:
        """The condition of a mask, which holds in full blocks."""
        return f"i < FullEnd or ({mask})" if self.full else mask

    def in_loop(self) -> Statement:
        """The tile of keys of an iteration."""
        tiles = f"{KEY_BLOCK} / BN"
        block = f"Blocks[{self._place}, floor(i * BN / {KEY_BLOCK})]"
        return _let(KEY_TILE, f"{block} * ({tiles}) + i % ({tiles})")

    @property
    def end(self) -> str:
        """The number of iterations."""
        return f"Visited * ({KEY_BLOCK} / BN)"

    @property
    def _place(self) -> str:
        shared = ("batch_idx" if self.batched else "0", "head_idx" if self.per_head else "0")
        return ", ".join((*shared, "RowBlockHere"))


ROW_BLOCK, KEY_BLOCK, KEY_TILE = "RowBlock", "KeyBlock", "KeyTile"


def _let(name: str, text: str) -> Statement:
    return parse(f"let {name} = {text}").body[0]


@dataclass(frozen=True)
class Mods:
    """A score, a mask, the tensors that they read, and lists of blocks to visit."""

    score: Expr | None = None
    mask: Expr | None = None
    operands: tuple[Operand, ...] = ()
    lists: BlockLists | None = None

    def hoisted(self) -> Mods:
        """The same with a mask instead of scores of -inf, which bounds the loop."""
        score, mask = self.score, self.mask
        while True:
            match score:
                case Call(Name("where"), (seen, inner, hidden)) if hidden == _NOTHING:
                    condition: Expr = seen
                case Call(Name("where"), (unseen, hidden, inner)) if hidden == _NOTHING:
                    condition = Unary("not", unseen)
                case _:
                    break
            mask = condition if mask is None else Binary("and", mask, condition)
            score = inner
        return replace(self, score=None if score == Name("S") else score, mask=mask)

    @property
    def own_dims(self) -> tuple[str, ...]:
        """The run-time dims that only these tensors have."""
        known = {"batch", "heads", "kv_heads", "q_len", "kv_len"}
        sizes = dict.fromkeys(s for o in self.operands for s in o.sizes)
        return tuple(s for s in sizes if s not in known and s.isidentifier())

    @property
    def tensors(self) -> tuple[Operand, ...]:
        """All tensors beside Q, K and V."""
        return (*self.operands, *(self.lists.operands if self.lists is not None else ()))


@dataclass(frozen=True)
class Placed:
    """The statements of the mods, by their place in the sketch."""

    before_loop: tuple[Statement, ...]
    in_loop: tuple[Statement, ...]
    """Before the first GEMM."""
    score: Statement | None
    mask: Expr | None
    keys: Range
    """The keys that the mask can show to a block."""
    ways: Mapping[str, tuple[str, ...]]
    """How each tensor is read: scalar, row, column, tile or gather."""

    @property
    def tiles(self) -> frozenset[str]:
        """The tensors that are copied as tiles."""
        return frozenset(name for name, ways in self.ways.items() if "tile" in ways)


def placed(mods: Mods) -> Placed:
    """The mods as statements: reads become Copies, and the expressions use what was copied."""
    reader = _Reader({o.name: o for o in mods.operands})
    score = mapped(mods.score, reader.read) if mods.score is not None else None
    mask, keys = None, Range()
    if mods.mask is not None:
        keys = bounds(mapped(mods.mask, reader.read_scalar))
        mask = mapped(mods.mask, reader.read)
    made = None
    if score is not None:
        made = parse(f"Compute {format_expr(score)} and get new S").body[0]
        assert isinstance(made, Compute)
    return Placed(tuple(reader.before), tuple(reader.inside), made, mask, keys, reader.ways)


class _Reader:
    """Replaces reads by the names of what is copied or bound before."""

    def __init__(self, operands: dict[str, Operand]) -> None:
        self.operands = operands
        self.before: list[Statement] = []
        self.inside: list[Statement] = []
        self.known: dict[str, Expr] = {}
        self.ways: dict[str, tuple[str, ...]] = {}

    def read_scalar(self, expr: Expr) -> Expr:
        """The same for reads that do not depend on the element; the others stay."""
        return expr if depends_on_element(expr) else self.read(expr)

    def read(self, expr: Expr) -> Expr:
        """A read as what stands for it."""
        if not isinstance(expr, Index):
            return expr
        text = format_expr(expr)
        if text not in self.known:
            self.known[text] = self._placed(expr)
        return self.known[text]

    def _placed(self, expr: Index) -> Expr:
        operand = self.operands[expr.tensor.id]
        way = self._way(expr, operand)
        ways = self.ways.get(operand.name, ())
        self.ways[operand.name] = ways if way in ways else (*ways, way)
        if way == "scalar":
            return self._scalar(expr, operand)
        if way in ("row", "column", "tile"):
            copy = parse(f"Copy {operand.name} from global to register").body[0]
            assert isinstance(copy, Copy)
            (self.before if way == "row" else self.inside).append(copy)
            return Name(operand.name)
        return expr

    def _way(self, expr: Index, operand: Operand) -> str:
        moving = [depends_on_element(a) for a in expr.args]
        if not any(moving):
            return "scalar"
        places = list(zip(expr.args, operand.sizes, strict=True))
        whole = [
            isinstance(a, Name) and POSITION_DIMS.get(a.id) == s for a, s in places
        ]  # read at its own position
        if operand.dtype == "int32" and sum(moving) > 1:
            return "gather"
        if sum(moving) == 1 and moving[-1] and whole[-1]:
            return "row" if expr.args[-1] == Name("q_idx") else "column"
        ends = expr.args[-2:] == (Name("q_idx"), Name("kv_idx"))
        return "tile" if sum(moving) == 2 and ends and all(whole[-2:]) else "gather"

    def _scalar(self, expr: Index, operand: Operand) -> Expr:
        """A name for it: it is read once, before the loop, and a mask can use it as a bound."""
        name = f"{operand.name}Here"
        taken = sum(1 for found in self.known.values() if isinstance(found, Name))
        name = name if Name(name) not in self.known.values() else f"{name}{taken}"
        bound = parse(f"let {name} = {format_expr(expr)}").body[0]
        assert isinstance(bound, Let)
        self.before.append(bound)
        return Name(name)


def depends_on_element(expr: Expr) -> bool:
    """Whether a value differs from element to element of a tile."""
    return any(isinstance(e, Name) and e.id in ("S", *POSITION_DIMS) for e in expressions(expr))


def mapped(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """An expression with every part changed, from the inside out."""
    changes: dict[str, Any] = {}
    for part in fields(expr):
        value = getattr(expr, part.name)
        if isinstance(value, Expr):
            changes[part.name] = mapped(value, change)
        elif isinstance(value, tuple):
            changes[part.name] = tuple(mapped(v, change) for v in value)
    return change(replace(expr, **changes) if changes else expr)
