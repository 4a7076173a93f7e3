"""Which kernels take tiles from a queue, those with the most to do first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.check.check import checked_program
from flashwright.lang.parse import parse
from flashwright.lower.translate import Translation, translate

LISTS = (Path(__file__).parents[2] / "examples" / "block_list.tl").read_text()
ALIKE = LISTS.replace("(H: heads, Q: ceil", "(Q: ceil").replace("Begin[head_idx, ", "Begin[")
"""The same lists for all heads."""


def translated(text: str) -> Translation:
    return translate(checked_program(parse(text)), gpus.find("h200"))


def test_tiles_are_sorted_by_the_blocks_that_their_lists_have() -> None:
    made = translated(ALIKE)
    assert "fw::TilesToTake tile(fw::SortedTiles(tile_order, fw::ceil_div(q_len, 64)" in made.source
    sorting = made.source.partition("SortedTiles::sort<")[2].partition("});")[0]
    assert "n__first = *p.Begin.at(block_idx);" in sorting
    assert "n__end = *p.Begin.at(block_idx + 1);" in sorting
    assert "return n__end - n__first;" in sorting
    assert made.plan.counter
    assert (
        "fw::TilesToTake" not in translate(checked_program(parse(ALIKE)), gpus.find("a100")).source
    )


def test_lists_that_heads_have_of_their_own_are_not_sorted() -> None:
    made = translated(LISTS)
    assert "fw::TileScheduler<-1>" in made.source
    assert not made.plan.counter


def test_a_kernel_that_is_not_persistent_has_no_queue() -> None:
    made = translated(ALIKE.replace("param Warps = 4", "param Warps = 4\nparam Persistent = 0"))
    assert not made.plan.counter


def test_where_shared_memory_is_full_the_report_says_that_there_is_no_queue() -> None:
    """Tiles of 64 x 64 in bf16: one of Q, two of K and two of V."""
    tiles = 5 * 64 * 64 * 2
    small = replace(gpus.find("h200"), shared_per_block=tiles + 1024)
    made = translate(checked_program(parse(ALIKE)), small)
    assert not made.plan.counter
    assert made.report is not None
    assert any("not taken from a queue" in remark.text for remark in made.report.remarks)
