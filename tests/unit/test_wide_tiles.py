"""Tiles wider than their tensors, views back to back, and several tensors for one tile: by TMA
where the rows are whole chunks of 16 bytes, and right in any case."""

from __future__ import annotations

import re

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.needs import Workload, tile_width
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.build.encode import encode
from flashwright.check.check import check
from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.oracle import evaluate_cases
from flashwright.lang.nodes import Expr, Let
from flashwright.lang.parse import parse
from flashwright.lower.frontend.positions import Positions
from flashwright.lower.translate import Translation, translate
from tests.example_programs import EXAMPLES

PAPER = (EXAMPLES / "paper.tl").read_text(encoding="utf-8")
SIDE_BY_SIDE = (EXAMPLES / "side_by_side.tl").read_text(encoding="utf-8")

# K and V come one after the other in one tile.
TWO = """
param HeadDim = 64
param BM = 64
param BN = 64
param Stages = 2
param Warps = 4
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
Allocate Q in global (batch, heads, q_len, HeadDim) as fp16
Allocate K in global (batch, heads, kv_len, HeadDim) as fp16
Allocate V in global (batch, heads, kv_len, HeadDim) as fp16
Allocate O in global (batch, heads, q_len, HeadDim) as fp16
Allocate Tile in shared (BN, HeadDim) as fp16 with stages Stages
Allocate S in register (BM, BN) as fp32
Allocate O in register (BM, HeadDim) as fp32
Allocate Smax in register (BM) as fp32
Allocate Ssum in register (BM) as fp32
Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from global to shared
Compute -1e30 and get Smax
Compute 0 and get Ssum
Compute 0 and get O_register
for i = 0:kv_len / BN
  Copy K (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared and get Tile
  Compute GEMM Q_shared, Tile_shared.T and get S
  Compute Multiply S, 0.125 and get new S
  Compute Mask S where kv_idx < kv_len
  Compute Softmax S with Smax and Ssum and rescale O_register
  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared and get Tile
  Compute GEMM S, Tile_shared and accumulate O_register
end
Compute Divide O_register, Ssum and get new O_register
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""  # noqa: E501


def written(gpu: str, head_dim: int, small: bool = False, **settings: object) -> str:
    """The built-in author's program; a small one is emulated sooner."""
    spec = make_spec("mha", **{"head_dim": head_dim, **settings})
    code = write_code(write_sketch(spec), spec, gpus.find(gpu)).code
    for name, value in {"BM": 64, "BN": 48, "Warps": 4}.items() if small else ():
        code = re.sub(rf"param {name} = \d+", f"param {name} = {value}", code)
    return code


def translated(code: str, gpu: str = "h200") -> Translation:
    card = gpus.find(gpu)
    checked = check(parse(code), card)
    assert checked.program is not None, checked.diagnostics
    return translate(checked.program, card)


# --- widths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "dtype", "columns", "width"),
    [
        *(("h200", "fp16", c, w) for c, w in ((40, 64), (72, 96), (80, 96), (112, 128))),
        *(("h200", "fp16", c, c) for c in (32, 64, 96, 128, 160, 192, 256)),
        *(("a100", "bf16", c, w) for c, w in ((40, 48), (72, 80), (80, 80), (112, 112))),
        ("h200", "e4m3", 80, 96),
        ("l40s", "e4m3", 72, 96),
    ],
)
def test_the_width_of_tiles(gpu: str, dtype: str, columns: int, width: int) -> None:
    work = Workload(columns, columns, dtype=dtype)
    assert tile_width(columns, work, gpus.find(gpu)) == width


@pytest.mark.parametrize(("head_dim", "depth"), [(40, 48), (72, 80), (80, 80), (112, 112)])
def test_odd_head_dims_go_by_wgmma_and_tma(head_dim: int, depth: int) -> None:
    made = translated(written("h200", head_dim))
    assert (made.report.products, made.report.copies) == ("wgmma", "TMA")
    width = -(-head_dim // 32) * 32
    swizzle = 64 if width % 64 else 128
    assert {(m.swizzle, m.box[-1]) for m in made.plan.maps} == {(swizzle, swizzle // 2)}
    assert f"_product<true, true, {depth}>(group, S" in made.source  # steps of zeros are left out
    assert "fw::store_epilogue<Warps>(" in made.source
    assert "store_elements" not in made.source
    # The launcher sees to it that rows begin at multiples of 16 bytes.
    assert {t.vector for t in made.plan.tensors if t.name != "LSE"} == {8}
    encode(made.plan)


def test_usual_head_dims_have_no_width_of_their_own() -> None:
    for gpu in ("h200", "a100"):
        for head_dim in (64, 128, 192, 256):
            assert "HeadTile" not in written(gpu, head_dim)


def test_few_keys_go_by_wgmma_and_tma() -> None:
    code = written("h200", 64, lse=False)
    fixed = re.sub(r"(Allocate [KV] in global.*)kv_len", r"\g<1>77", code)
    fixed = fixed.replace("kv_len", "77")
    for text in (code, fixed):
        made = translated(text)
        assert (made.report.products, made.report.copies) == ("wgmma", "TMA")


def test_rows_that_may_be_odd_are_copied_element_by_element() -> None:
    code = written("h200", 72).replace("param HeadDim = 72", "param HeadDim = 68")
    made = translated(code)
    assert made.report.products == "wgmma"
    assert "fw::copy_elements<32 * fw::helpers" in made.source
    assert "store_elements" in made.source
    assert {t.vector for t in made.plan.tensors} == {1}


# --- views ------------------------------------------------------------------------------------


def test_views_back_to_back_are_an_axis_of_their_map() -> None:
    made = translated(PAPER)
    assert made.report.copies == "TMA"
    assert "p.K_map, batch_idx * heads + head_idx, 0, 0)" in made.source
    assert {m.box for m in made.plan.maps} == {(1, 64, 64)}
    assert {t.flat for t in made.plan.tensors} == {True}
    encode(made.plan)


@pytest.mark.parametrize(
    ("offset", "copy"),
    [
        ("(batch_idx * heads + head_idx) * kv_len", "copy_elements"),
        ("head_idx * kv_len * HeadDim + HeadDim", "copy_columns_async"),
    ],
)
def test_other_offsets_are_copied_by_threads(offset: str, copy: str) -> None:
    made = translated(re.sub(r"let kv_offset = .*", f"let kv_offset = {offset}", PAPER))
    assert made.report.products == "wgmma"
    assert f"fw::{copy}<32 * fw::helpers" in made.source
    assert any("no multiple of the view's size" in str(r) for r in made.report.remarks)


@pytest.mark.parametrize(
    ("expr", "by", "found"),
    [
        ("(b * heads + h) * n * 64", "n * D", "b * heads + h"),
        ("2 * b * n * D", "64 * n", "2 * b"),
        ("floor(h * groups / heads) * n", "n", "floor(h * groups / heads)"),
        ("b * n - n", "n", "b - 1"),
        ("0", "n * D", "0"),
        ("b * 32", "D", None),
        ("b * n", "n * D", None),
        ("b * n + 1", "n", None),
        ("b * n / heads", "n", None),
        ("b * n", "n + 1", None),
        ("Scale * n", "n", None),
    ],
)
def test_a_quotient_is_one_of_whole_numbers(expr: str, by: str, found: str | None) -> None:
    positions = Positions({"D": 64, "Scale": 0.5})
    result = positions.quotient(_expr(expr), _expr(by))
    if found is None:
        assert result is None
    else:
        assert result is not None
        assert positions.same(result, _expr(found))


def _expr(text: str) -> Expr:
    stmt = parse(f"let x = {text}").body[0]
    assert isinstance(stmt, Let)
    return stmt.value


# --- several tensors for one tile -------------------------------------------------------------


def test_each_tensor_of_a_tile_has_a_map() -> None:
    made = translated(TWO)
    assert made.report.copies == "TMA"
    assert re.findall(r"fw::Map (\w+);", made.source) == ["Tile_map", "Tile_map_of_V", "Q_map"]
    assert [m.tensor for m in made.plan.maps] == ["K", "V", "Q"]
    assert "Tile_ring, p.Tile_map, batch_idx, head_idx, i * BN, 0)" in made.source
    assert "Tile_ring, p.Tile_map_of_V, batch_idx, head_idx, i * BN, 0)" in made.source
    encode(made.plan)


# --- all of it --------------------------------------------------------------------------------


def side_by_side(views: bool = False) -> str:
    """Pieces of a tile that are wider than their tensors; by request, one is a view."""
    text = SIDE_BY_SIDE.replace("HeadDim = 128", "HeadDim = 64")
    text = text.replace("RopeDim = 64", "RopeDim = 40\nparam RopeTile = 64")
    text = text.replace("HeadDim + RopeDim) as", "HeadDim + RopeTile) as")
    text = re.sub(r"(Copy \w+rope \(B[MN]), RopeDim", r"\1, RopeTile", text)
    if views:
        text = text.replace(
            "(B: batch, L: kv_len, D: RopeDim) as bf16",
            "(L: kv_len, D: RopeDim) as bf16 with offset batch_idx * kv_len * RopeDim",
        )
        text = text.replace("(BN, RopeTile) in coordinate [B = batch_idx, L = i]",
                            "(BN, RopeTile) in coordinate [L = i]")  # fmt: skip
    return text


def in_turn() -> str:
    """The tile of K's pieces has V's columns, and zeros, afterwards."""
    text = side_by_side().replace("GEMM S, V_shared", "GEMM S, K_shared")
    text = re.sub(r"  Copy V .*\n", "", text)
    copies = """\
  Copy V (BN, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = i] from global to shared and get K at column 0
  Copy Krope (BN, RopeTile) in coordinate [B = batch_idx, L = i] from global to shared and get K at column HeadDim
"""  # noqa: E501
    text = text.replace("  Compute GEMM S, K_shared", f"{copies}  Compute GEMM S, K_shared")
    for tile in ("in register (BM, HeadDim)", "in global (batch, heads, q_len, HeadDim) as bf16\n"
                 "Allocate Q in shared"):  # fmt: skip
        text = text.replace(tile, tile.replace("HeadDim)", "HeadDim + RopeTile)"))
    return text.replace("Copy O (BM, HeadDim)", "Copy O (BM, HeadDim + RopeTile)")


def from_the_end() -> str:
    """The last block of keys of a view may begin before its first key: in the view before it."""
    text = PAPER
    for old, blocks in (("[L = 0]", "1"), ("[L = i]", "(i + 1)"), ("[L = i + 1]", "(i + 2)")):
        text = text.replace(old, f"[L at kv_len - {blocks} * BN]")
    return re.sub(r"Mask S where .*", "Mask S where kv_idx >= 0 and kv_idx < kv_len", text)


@pytest.mark.parametrize("views", [False, True])
def test_pieces_may_be_wider_than_their_tensors(views: bool) -> None:
    made = translated(side_by_side(views))
    assert made.report.copies == "TMA"
    source = " ".join(made.source.split())
    assert "(K_shared, K_ring, p.K_map_64, batch_idx, i * BN, 0)" in source
    assert "_product<true, true, 112>(group, S" in source
    maps = {(m.tensor, m.box) for m in made.plan.maps}
    assert maps >= {("K", (1, 1, 64, 64)), ("Krope", (1, 64, 64))}
    encode(made.plan)
    plain = " ".join(translated(side_by_side(views), "a100").source.split())
    assert "fw::copy_columns_async<Threads, 64, 64>(K_shared, p.Krope" in plain
    assert "kv_len - i * BN, RopeDim)" in plain


def test_a_map_is_of_a_tile_a_column_and_a_tensor() -> None:
    made = translated(in_turn())
    names = re.findall(r"fw::Map (\w+);", made.source)
    assert names == ["Q_map", "Q_map_64", "K_map", "K_map_64", "K_map_of_V"]
    assert [m.tensor for m in made.plan.maps] == ["Q", "Qrope", "K", "Krope", "V"]
    encode(made.plan)


@pytest.mark.parametrize(("column", "copy"), [(8, "copy_async"), (4, "copy_elements")])
def test_columns_at_any_place_may_not_be_whole_chunks(column: int, copy: str) -> None:
    text = written("a100", 72)
    moved = re.sub(r"(Copy [QK] .*L = [^\]]*)\]", rf"\1, D at {column}]", text)
    assert f"fw::{copy}<Threads>(K_shared" in translated(moved, "a100").source


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")
def test_they_are_right_under_emulation() -> None:
    problems = tuple(
        {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": q, "kv_len": k}
        for q, k in ((70, 77), (33, 130))
    )
    programs = {
        "h200 40": ("h200", written("h200", 40, small=True)),
        "h200 72": ("h200", written("h200", 72, small=True)),
        "h200 80 in 80": ("h200", written("h200", 80, True).replace("Tile = 96", "Tile = 80")),
        "a100 72": ("a100", written("a100", 72, small=True)),
        "t4 40": ("t4", written("t4", 40, small=True)),
        "views": ("h200", PAPER),
        "two tensors": ("h200", TWO),
        "side by side": ("h200", side_by_side()),
        "side by side on a100": ("a100", side_by_side()),
        "side by side on t4": ("t4", side_by_side().replace("bf16", "fp16")),
        "a view beside": ("h200", side_by_side(views=True)),
        "in turn": ("h200", in_turn()),
        "in turn on a100": ("a100", in_turn()),
        "from the end of a view": ("h200", from_the_end()),
    }
    cases = [FuzzCase(gpu, code, problems, spread=1.2) for gpu, code in programs.values()]
    found = {
        name: (o.kind, o.detail) for name, o in zip(programs, evaluate_cases(cases), strict=True)
    }
    assert found == dict.fromkeys(programs, ("agree", ""))
