"""Rows in pages (`P = Table[batch_idx, page_idx]`), and sums whose parts one kernel stores and
another puts together: the language, the checker, the kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.check.check import check, checked_program
from flashwright.emulate.emulate import run
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret_all
from flashwright.spec import AttentionSpec, load
from tests.example_programs import EXAMPLES
from tests.unit.together import kernels

DECODE = (EXAMPLES / "decode.tl").read_text()
PAGES = "P = Table[batch_idx, page_idx]"
KEYS = f"Copy K (BN, HeadDim) in coordinate [{PAGES}, H = kv_head, L = i in 0:length]"
VALUES = KEYS.replace("Copy K", "Copy V")
TILES = "let tiles = ceil(length / BN)"
LOOP = "for i = floor(tiles * split_idx / splits):floor(tiles * (split_idx + 1) / splits)"


def first_kernel(page: int, dtype: str = "bf16", keys: int = 64) -> str:
    """The kernel that stores the parts, by itself, with tiles of so many keys."""
    text = DECODE.split("// the parts of a row")[0].replace("bf16", dtype)
    text = text.replace("param BN = 64", f"param BN = {keys}")
    text = text.replace("param Rows = 16\n", "").replace("PageSize = 16", f"PageSize = {page}")
    lines = text.splitlines(keepends=True)
    return "".join(x for x in lines if not x.startswith(("Allocate O in global", "Allocate LSE")))


# --- the checker --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        ((KEYS, KEYS.replace(" in 0:length", "")), "FW305", "does not say how many there are"),
        ((KEYS, KEYS.replace("L = i", "L = page_idx")), "FW305", "along L lies the tile"),
        (("L: PageSize", "L: pages"), "FW306", "the length of a page is a number"),
        (("let tiles", "let more = page_idx\nlet tiles"), "FW201", "undefined name `page_idx`"),
        (("dim group", "dim page_idx, group"), "FW202", "`page_idx` is a reserved name"),
        (("for i =", "for page_idx ="), "FW202", "the loop variable `page_idx`"),
        ((VALUES, VALUES.replace("[batch_idx,", "[0,")), "FW603", "on the pages along P"),
        ((VALUES, VALUES.replace("page_idx", "page_idx + 1")), "FW603", "on the pages along P"),
        ((VALUES, VALUES.replace("L = i", "L = 0")), "FW603", "positions kv_len"),
        (("kv_idx < length", "kv_idx < length + 9"), "FW609", "are not masked"),
        ((TILES, TILES.replace("ceil", "floor")), "FW604", "is never added in"),
        (
            (LOOP, LOOP.replace("tiles * (split_idx + 1)", "(tiles - 1) * (split_idx + 1)")),
            "FW604",
            "",
        ),
        ((LOOP, LOOP.replace("(tiles * split_idx /", "(0 * split_idx /")), "FW60", ""),
        (("N = n, B = batch_idx, H", "N = n, B = 0, H"), "FW603", "index 0 on batch"),
    ],
)
def test_the_checker_knows_pages_and_parts(edit: tuple[str, str], code: str, message: str) -> None:
    assert edit[0] in DECODE
    found = check(parse(DECODE.replace(*edit, 1)), gpus.find("h200")).diagnostics
    first = next(d for d in found if d.code.startswith("FW2" if code[2] == "2" else "FW"))
    assert first.code.startswith(code), found
    assert message in first.message


def test_pages_that_a_table_names_are_written_in_place_alone() -> None:
    stored = "Copy O (BM, HeadDim) in coordinate [N = split_idx, B = batch_idx, H = kv_head, R = "
    text = stored.replace("split_idx", "Table[0, page_idx]") + "block_idx in 0:group"
    text = DECODE.replace(f"{stored}block_idx", text)
    assert any("keeps what others hold" in d.message for d in check(parse(text)).diagnostics)


def test_a_dim_that_one_kernel_does_not_need() -> None:
    """A line `dim a, b` is not all or nothing: each kernel has those it uses."""
    assert not check(parse(DECODE)).diagnostics
    unused = check(parse(DECODE.replace("dim group", "dim nothing, group"))).diagnostics
    assert [(d.code, d.message) for d in unused] == [
        ("FW203", "`nothing` is not used by any kernel")
    ]


# --- the kernel ---------------------------------------------------------------------------------


def test_a_page_of_whole_tiles_is_one_place() -> None:
    whole = translate(checked_program(parse(first_kernel(128))), gpus.find("a100")).source
    assert "fw::paged" not in whole
    assert "p.K.tile(*p.Table.at(batch_idx, fw::floor_div<128>(i_first * 64)), kv_head" in whole
    other = translate(checked_program(parse(first_kernel(48))), gpus.find("a100")).source
    assert "fw::paged<48>(" in other


@pytest.mark.parametrize(
    ("page", "rows"), [(8, 8), (16, 16), (32, 32), (48, 16), (64, 64), (128, 64), (256, 64)]
)
def test_tma_loads_what_lies_in_one_page(page: int, rows: int) -> None:
    made = translate(checked_program(parse(first_kernel(page))), gpus.find("h200"))
    boxes = {m.tensor: m.box for m in made.plan.maps if m.pages}
    assert boxes == dict.fromkeys("KV", (1, 1, 1, rows, 64))
    assert "is_helper" not in made.source
    assert (f"fw::page_boxes<{page}, {rows}>(" in made.source) == (page % 64 != 0 or page < 64)


def test_a_cache_without_an_axis_of_heads() -> None:
    text = first_kernel(64).replace("(P: pages, H: kv_heads, L:", "(P: pages, L:")
    text = text.replace("page_idx], H = kv_head, L", "page_idx], L")
    made = translate(checked_program(parse(text)), gpus.find("h200"))
    assert {m.tensor: (m.pages, len(m.box)) for m in made.plan.maps} == {
        "Q": (False, 4),
        "K": (True, 4),
        "V": (True, 4),
    }


@pytest.mark.parametrize(
    ("page", "edit", "why"),
    [
        (1, ("", ""), "pages of 1 cut a tile of `K` into 64 boxes of 1 rows, no multiple of 8"),
        (12, ("", ""), "pages of 12 cut a tile of `K` into 16 boxes of 4 rows"),
        (16, ("L = i in", "L at i * BN in"), "a tile of `K` may lie in several pages"),
    ],
)
def test_helper_warps_copy_other_pages(page: int, edit: tuple[str, str], why: str) -> None:
    made = translate(checked_program(parse(first_kernel(page).replace(*edit))), gpus.find("h200"))
    assert made.report is not None
    assert any(why in r.text for r in made.report.remarks), made.report.remarks
    assert [m.tensor for m in made.plan.maps] == ["Q"]


def cache(page: int, lengths: list[int], dtype: Any) -> dict[str, Any]:
    """Pages in any order. What no sequence holds is NaN, and the table's tail names no page."""
    drawn = np.random.default_rng(page)
    counts = [-(-n // page) for n in lengths]
    pages = drawn.permutation(sum(counts) + 2)
    table = np.full((len(lengths), max(counts) + 1), 2**31 - 1, np.int32)
    made = {"Table": table, "Lengths": np.array(lengths, np.int32)}
    for name in "KV":
        made[name] = np.full((len(pages), 2, page, 64), np.nan, np.float32).astype(dtype)
    taken = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        table[row, :count] = pages[taken : taken + count]
        taken += count
        for at in range(length):
            for name in "KV":
                made[name][table[row, at // page], :, at % page] = drawn.standard_normal((2, 64))
    return made


def together(parts: dict[str, Any]) -> Any:
    """O, from its parts."""
    weights = np.exp(parts["PartMax"] - parts["PartMax"].max(axis=0))
    total = (parts["PartSum"] * weights).sum(axis=0)
    summed = (parts["PartO"] * weights[..., None]).sum(axis=0)
    return summed / np.where(total == 0, 1, total)[..., None]


def expected(given: dict[str, Any], page: int) -> Any:
    outputs = np.zeros(given["Q"].shape)
    for row, length in enumerate(given["Lengths"]):
        held = given["Table"][row, : -(-length // page)]
        k, v = (
            given[n][held].astype(np.float64).swapaxes(0, 1).reshape(2, -1, 64)[:, :length]
            for n in "KV"
        )
        scores = given["Q"][row].astype(np.float64) @ k.swapaxes(1, 2) / 8
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
        outputs[row] = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ v
    return outputs


@pytest.mark.parametrize(
    ("gpu", "keys", "sizes"),
    [
        ("h200", 96, (16, 128)),
        pytest.param("h200", 64, (1, 8, 16, 48, 32, 64, 128), marks=pytest.mark.slow),
        pytest.param("a100", 64, (1, 16, 48, 64, 256), marks=pytest.mark.slow),
        pytest.param("t4", 64, (16, 64), marks=pytest.mark.slow),
    ],
)
def test_pages_of_any_size(gpu: str, keys: int, sizes: tuple[int, ...]) -> None:
    """Sequences of very different lengths, more splits than tiles; what lies past the end of a
    sequence is NaN, in its last page and in its table. Tiles of 64 keys are 1 to 8 boxes of TMA,
    those of 96 are 3 and 6, which is no whole number of fours."""
    dtype = "fp16" if gpu == "t4" else "bf16"
    kind = np.float16 if gpu == "t4" else ml_dtypes.bfloat16
    spec = load(EXAMPLES / "decode.toml")
    made = kernels([(first_kernel(page, dtype, keys), spec) for page in sizes], gpu)
    for page, kernel in zip(sizes, made, strict=True):
        given = cache(page, [0, 1, 200, 65, 64], kind)
        given["Q"] = np.random.default_rng(7).standard_normal((5, 2, 3, 64)).astype(kind)
        for splits in (1, 5):
            shape = (splits, 5, 2, 3)
            parts = {n: np.full(shape, np.nan, np.float32) for n in ("PartMax", "PartSum")}
            parts["PartO"] = np.full((*shape, 64), np.nan, np.float32)
            dims = {"batch": 5, "heads": 6, "kv_heads": 2, "group": 3, "splits": splits}
            dims |= {"pages": len(given["K"]), "max_pages": given["Table"].shape[1]}
            dims |= {"q_len": 1, "kv_len": 200}
            assert not run(kernel.program, kernel.plan, {**given, **parts}, dims).findings
            error = np.abs(together(parts) - expected(given, page)).max()
            assert error < 0.02, (page, splits)


def test_the_example_is_one_query_a_sequence() -> None:
    spec: AttentionSpec = load(EXAMPLES / "decode.toml")
    assert spec.dims == {"splits": 3}


GATHERED = """\
dim slots, entries
Allocate X in global (P: slots, L: 4, D: 32) as bf16
Allocate List in global (N: entries) as int32
Allocate Sum in global (P: slots, L: 4, D: 32) as fp32
Allocate O in global (P: slots, L: 4, D: 32) as bf16

grid i = 0:entries * 4 / 16
Copy X (16, 32) in coordinate [P = List[page_idx], L = i in 0:entries * 4] from global to register
Copy X (16, 32) in coordinate [P = List[page_idx], L = i in 0:entries * 4]
  from register to global and accumulate Sum

grid p = 0:slots * 4 / 16
Copy Sum (16, 32) in coordinate [P = page_idx, L = p in 0:slots * 4] from global to register
Copy Sum (16, 32) in coordinate [P = page_idx, L = p in 0:slots * 4]
  from register to global and get O
"""


@pytest.mark.parametrize("entries", [1, 7, 12])
def test_rows_are_gathered_and_added_to_pages(entries: int) -> None:
    """A page that the list names twice has both added; one that it does not name is 0."""
    rng = np.random.default_rng(entries)
    x = rng.integers(-8, 8, (9, 4, 32)).astype(ml_dtypes.bfloat16)
    named = rng.integers(0, 8, entries).astype(np.int32)
    verdict = check(parse(GATHERED), gpus.find("h200"))
    assert not verdict.errors, verdict.errors
    sizes = {"slots": 9, "entries": entries}
    found = interpret_all(Kernels(verdict.kernels), {"X": x, "List": named}, sizes)["O"]
    wanted = np.zeros(x.shape)
    np.add.at(wanted, named, x[named].astype(float))
    assert np.array_equal(found.astype(float), wanted)
