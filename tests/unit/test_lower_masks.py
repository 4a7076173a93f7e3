"""Tiles that a mask does not touch: the test is right on every tile, and not more careful than it
must be."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Expr
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.element import COLUMN, TILE, Leaf, Op, element, leaves, literal, variable
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.passes.software_pipeline import _masked_throughout
from flashwright.lower.printing.column_bits import ColumnBits
from flashwright.lower.printing.cpp import text as in_cpp
from flashwright.lower.term import Position, Read, Var, binary, integer
from flashwright.lower.term_value import value
from flashwright.program.scalars import evaluate
from tests.unit.lowered import printed
from tests.unit.tl_attention import COPY, attention, program

HIDDEN = literal(float("-inf"))
CAUSAL = "kv_idx <= q_idx + kv_len - q_len"
WINDOW = "kv_idx > q_idx + kv_len - q_len - Window"
PARAMS = "param Window = 120\nparam Prefix = 50\nparam Stride = 4\nparam Block = 8\nparam Down = -2"
MASKS = {
    "ragged": "kv_idx < kv_len",
    "causal": CAUSAL,
    "both": f"kv_idx < kv_len and {CAUSAL}",
    "window": f"{CAUSAL} and {WINDOW}",
    "around": f"kv_idx < kv_len and {WINDOW} and kv_idx < q_idx + kv_len - q_len + Window",
    "prefix": f"kv_idx < kv_len and (kv_idx < Prefix or {CAUSAL})",
    "compressed": "kv_idx < kv_len and kv_idx * Stride + Block <= q_idx + kv_len * Stride",
    "turned": "kv_idx < kv_len and q_idx + kv_len - q_len >= kv_idx",
    "negative": "kv_idx < kv_len and -kv_idx >= -q_idx - (kv_len - q_len)",
    "halved": "kv_idx < kv_len and kv_idx / 2 <= q_idx / 2 + (kv_len - q_len) / 2",
    "blocks": "kv_idx < kv_len and floor(kv_idx / 8) <= floor(q_idx / 8)",
    "falling": "kv_idx < kv_len and kv_idx * Down >= (q_idx + kv_len - q_len) * Down",
    "min": f"kv_idx < min(kv_len, 999) and {CAUSAL}",
}


def hiding(text: str) -> list[ir.Compute]:
    """The statements of a program that hide elements."""
    nodes = [n for n in ir.flat(lower(program(text)).body) if isinstance(n, ir.Compute)]
    return [n for n in nodes if any(HIDDEN in leaves(a.value) for a in n.assigns)]


def masks(mask: str) -> list[ir.Compute]:
    """What a mask becomes."""
    return hiding(attention(params=PARAMS, mask=mask))


def condition(mask: str) -> Expr:
    (stmt,) = parse(f"Compute Mask S where {mask}\n").body
    found = stmt.where  # type: ignore[union-attr]
    assert found is not None
    return found


def holds(mask: Expr, env: dict[str, Any], rows: range, cols: range) -> bool:
    """Told by the edges of a tile: each comparison of the masks here goes one way along an axis."""
    edges = [[*part[:2], *part[-2:]] for part in (rows, cols)]
    return all(evaluate(mask, {**env, "q_idx": q, "kv_idx": k}) for q, k in product(*edges))


@pytest.mark.parametrize("name", MASKS)
def test_left_out_where_it_holds_everywhere_and_only_there(name: str) -> None:
    (node,) = masks(MASKS[name])
    assert node.unless is not None
    mask, seen = condition(MASKS[name]), set()
    params = {"BM": 64, "BN": 32, "Window": 120, "Prefix": 50, "Stride": 4, "Block": 8, "Down": -2}
    for q_len, kv_len in ((128, 128), (64, 300), (300, 100)):
        for block, i in product(range(-(-q_len // 64)), range(-(-kv_len // 32))):
            env = {**params, "q_len": q_len, "kv_len": kv_len, "block": block, "i": i}
            rows, cols = range(64 * block, 64 * block + 64), range(32 * i, 32 * i + 32)
            left_out, true = value(node.unless, env), holds(mask, env, rows, cols)
            assert left_out == true, (q_len, kv_len, block, i)
            seen.add(left_out)
    assert seen == {True, False}


def test_prefix_is_told_from_either_side() -> None:
    (node,) = masks(MASKS["prefix"])
    assert node.unless is not None
    assert "||" in in_cpp(node.unless)


def documents(mask: str) -> str:
    """A program whose mask compares numbers from memory."""
    docs = """\
Allocate DocQ in global (B: batch, L: q_len) as int32
Allocate DocK in global (B: batch, L: kv_len) as int32
Allocate DocQ in register (BM) as int32
Allocate DocK in register (BN) as int32
Copy DocQ (BM) in coordinate [B = item, L = block] from global to register"""
    copy = "Copy DocK (BN) in coordinate [B = item, L = i] from global to register"
    return attention(
        params="param Whole = 2",
        allocate=docs,
        softmax="Compute Softmax S with Smax and Ssum and rescale O_register",
        scale=f"{copy}\n  Compute Multiply S, Scale * (Whole / 2) and get new S",
        mask=mask,
    )


def test_an_or_with_a_scalar_is_left_out_where_that_holds() -> None:
    """The scalar is not asked again for each element, and other parts keep their own test."""
    known, scalar = hiding(documents("(i < Whole or DocQ == DocK) and kv_idx < kv_len"))
    assert known.unless is not None
    assert scalar.unless is not None
    assert "kv_len" in in_cpp(known.unless)
    assert in_cpp(scalar.unless) == "i < Whole"
    source = printed(documents("(i < Whole or DocQ == DocK) and kv_idx < kv_len"), "h200")
    assert "S(m, n) = DocQ(m) == DocK(n) ? S(m, n) : -INFINITY;" in source
    prologue, plain, masked = re.split(r"for \(i = 1|for \(; i", source.split("setmaxnreg")[-1])
    assert "i < Whole" in plain.split("{")[0]
    assert ["load_cols" in part for part in (prologue, plain, masked)] == [True, False, True]


def test_an_or_with_a_scalar_that_is_not_tested_keeps_it() -> None:
    (_, mask) = hiding(documents("(i == Whole or i < 1 or DocQ == DocK) and kv_idx < kv_len"))
    assert mask.unless is not None
    assert "Whole" in str(mask.assigns)


def test_elements_are_masked_without_branches_unless_they_read_memory() -> None:
    """nvcc makes a divergent branch of each && and ||."""
    source = printed(
        documents("(DocQ == DocK or kv_idx < Whole and q_idx > 3) and kv_idx < kv_len")
    )
    assert "DocQ(m) == DocK(n) | kv_idx < Whole & q_idx > 3 ?" in source
    table = "Allocate Table in global (L: kv_len) as int32"
    text = documents("(DocQ == DocK or Table[abs(q_idx - kv_idx)] > 0) and kv_idx < kv_len")
    source = printed(text.replace("Allocate DocQ in g", f"{table}\nAllocate DocQ in g"))
    assert "DocQ(m) == DocK(n) || fw::gather(" in " ".join(source.split())


def test_a_mask_from_memory_is_always_applied() -> None:
    text = documents("DocQ == DocK and kv_idx < kv_len")
    known, unknown = hiding(text)
    assert known.unless is not None
    assert "Doc" not in str(known.assigns), "the part that can be told is applied by itself"
    assert unknown.unless is None
    source = printed(text)
    assert "S(m, n) = DocQ(m) == DocK(n) ? S(m, n) : -INFINITY;" in source
    assert "fw::row_vector<BM, Warps, int>()" in source
    assert "fw::col_vector<BN, int>()" in source
    assert re.search(r"fw::load_rows<Warps>\(DocQ", source)
    assert re.search(r"fw::load_cols<Warps>\(DocK", source)


def test_a_tile_whose_place_cannot_be_told_is_refused() -> None:
    """It was masked as if it lay at position 0."""
    late = COPY.format("K").replace("L = i", "L = min(i + 1, n - 1)")
    text = attention(params="dim n", copy_k="", scale=f"{late}\n  Compute S * 1 and get S")
    with pytest.raises(Failed, match="where this tile lies cannot be told") as caught:
        lower(program(text, strict=False))
    assert caught.value.diagnostics[0].code == "FW811"


# --- as sets of columns ------------------------------------------------------------------------


class Columns:
    """What `at` gives in C++, for all columns of a tile; a thread has some of them."""

    def __init__(self, seen: list[bool]) -> None:
        self.seen = seen

    def __invert__(self) -> Columns:
        return Columns([not one for one in self.seen])

    def __and__(self, other: Columns) -> Columns:
        return Columns([a and b for a, b in zip(self.seen, other.seen, strict=True)])

    def __or__(self, other: Columns) -> Columns:
        return ~(~self & ~other)


class Place:
    def before(self, _: object, x: int) -> Columns:
        return Columns([column < x for column in range(32)])

    def all(self, _: object, condition: bool) -> Columns:
        return Columns([condition] * 32)


class Device:
    def near(self, x: int) -> int:
        return max(min(x, 2**30), -(2**30))

    def shifted(self, by: int, x: int) -> int:
        return x // by


SETS = (
    "kv_idx <= q_idx",
    "kv_idx < q_idx",
    "kv_idx > q_idx",
    "q_idx <= kv_idx",
    "kv_idx == q_idx",
    "kv_idx != q_idx",
    "not kv_idx >= q_idx - 3",
    "q_idx - kv_idx < 40 and kv_idx + 2 > q_idx or kv_idx < 5",
    "abs(q_idx - kv_idx) <= 9",
    "-kv_idx >= -q_idx - (kv_len - q_len)",
    "floor(kv_idx / 8) == floor(q_idx / 8)",
    "floor(q_idx / 4) - floor(kv_idx / 4) < 3",
    "block < 1 and kv_idx < 40 or block >= 1 and kv_idx > q_idx - Window",
)


@pytest.mark.parametrize("mask", SETS)
def test_a_condition_on_positions_is_a_set_of_columns(mask: str) -> None:
    mask = f"kv_idx < kv_len and ({mask})"
    sets = []
    for node in masks(mask):
        chosen = node.assigns[0].value
        assert isinstance(chosen, Op)
        found = ColumnBits("at", "S", node.cols, node.rows).set(chosen.args[0])
        assert found is not None
        sets.append(re.sub(r"floor_div<(\d+)>\(", r"shifted(\1, ", found).replace("::", "."))
    code = compile(" & ".join(sets), "<set>", "eval")
    names = {"at": Place(), "fw": Device(), "S": None, "BM": 64, "BN": 32, "Window": 120}
    for block, i, q_len, kv_len in product((0, 1), (0, 1, 2), (128, 90), (96,)):
        env = {**names, "block": block, "i": i, "q_len": q_len, "kv_len": kv_len}
        for q in (64 * block, 64 * block + 31, 64 * block + 63):
            told = eval(code, {**env, "q_idx": q}).seen
            columns = range(32 * i, 32 * i + 32)
            values = {"q_idx": q, "q_len": q_len, "kv_len": kv_len, "block": block, "Window": 120}
            wanted = [evaluate(condition(mask), {**values, "kv_idx": k}) for k in columns]
            assert told == wanted, (block, i, q)


def test_numbers_of_the_callers_own_do_not_wrap() -> None:
    """A row's own limit may be the least or the greatest int."""
    own = "DocQ == DocK and kv_idx < DocQ and q_idx - kv_idx < DocQ"
    text = documents(f"kv_idx < kv_len and {own}")
    assert "at.before(S, fw::near(DocQ(m)) - i * BN)" in printed(text)
    assert "q_idx - fw::near(DocQ(m)) + 1 - i * BN" in printed(text)


def test_what_repeats_along_the_keys_is_computed_for_one_period() -> None:
    source = " ".join(
        printed(attention(mask="kv_idx < kv_len and (q_idx - kv_idx) % 4 == 0")).split()
    )
    assert "at.every<4>(S, [&](int n) { int const kv_idx = i * BN + at.col(n);" in source
    assert "at.every" not in printed(attention(mask="kv_idx < kv_len and kv_idx % 5 == q_idx % 5"))


def test_two_tiles_of_listed_blocks_keep_their_own_masks() -> None:
    """Masks of one tile become one, without the test that reads the list; those of another stay."""
    chosen = Read("Blocks", (Var("i"),), "int")

    def mask(name: str, column: int) -> ir.Compute:
        tile = element(name, TILE)
        shown = Op("<", (Leaf(Position("kv_idx"), COLUMN), literal(column)))
        assign = ir.Assign(tile, Op("where", (shown, tile, HIDDEN)))
        return ir.Compute((64, 32), (assign,), unless=binary("<", chosen, integer(3)))

    body = (mask("S", 1), mask("S", 2), mask("T", 3))
    loop = ir.Loop("i", integer(0), binary("<", Var("i"), integer(9)), body)
    one, other = _masked_throughout(loop).body
    assert isinstance(one, ir.Compute)
    assert isinstance(other, ir.Compute)
    assert [n.unless for n in (one, other)] == [None, None]
    assert [variable(n.assigns[0].target) for n in (one, other)] == ["S", "T"]
    assert {leaf.value for leaf in leaves(one.assigns[0].value)} >= {1.0, 2.0}
    assert {leaf.value for leaf in leaves(other.assigns[0].value)} >= {3.0}
