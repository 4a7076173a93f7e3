"""The main kernel of a backward pass on Hopper: which products are under way while others end."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.backward import tilings
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.grad.grad import backward
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.names import Names
from flashwright.lower.passes.double_buffer import alternating
from flashwright.lower.term import ZERO
from flashwright.lower.translate import translate
from tests.unit.lowered import printed
from tests.unit.tl_attention import attention

CASES = Path(__file__).parents[1] / "cases"


def test_dq_is_added_while_dk_is_under_way() -> None:
    program = checked_program(parse((CASES / "backward_wide.tl").read_text()))
    source = translate(program, gpus.find("h200")).source
    order = re.findall(
        r"start_product<[^(]*\(group, (\w+)|(finish_products<\d>)|(add_tile)", source
    )
    found = [next(filter(None, one)) for one in order]
    assert found == [
        *("S", "dP", "finish_products<1>", "finish_products<0>"),
        *("dV", "dQ", "dK", "finish_products<1>", "add_tile", "finish_products<0>"),
    ]


@functools.cache
def derived(causal: bool, head_dim: int = 128, **options: Any) -> str:
    """The author's main kernel, on an H200."""
    card = gpus.find("h200")
    spec = make_spec("mha", head_dim=head_dim, dtype="bf16", causal=causal, **options)
    forward = checked_program(parse(write_code(write_sketch(spec), spec, card).code))
    _, sized = next(tilings(backward(forward).tree, card))
    (main,) = (p for p in check(sized, card).kernels if "GEMM" in format_tree(p.tree))
    return translate(main, card).source


def in_loop(source: str) -> str:
    """The consumers' loop."""
    begin = source.rindex("CUTE_NO_UNROLL")
    return source[begin : source.index("K_ring.release", begin)]


def test_accumulators_that_a_step_fills_anew_are_declared_in_it() -> None:
    loop = in_loop(derived(False))
    for name in ("S", "dP", "dQ"):
        assert f"auto {name} = fw::accumulator" in loop
    for name in ("dK", "dV"):
        assert f"auto {name} = fw::accumulator" not in loop


def test_a_factor_that_nobody_reads_is_not_made_up_for() -> None:
    assert "S(m, n) = S(m, n) * Scale" not in derived(False)


def test_vectors_are_read_where_they_lie_and_handed_back_behind_that() -> None:
    loop = in_loop(derived(False))
    for name in ("Shift", "Delta"):
        made, used = loop.index(f"auto const {name} = fw::cols_in_shared"), loop.index(f"{name}(n)")
        assert made < used < loop.index(f"__syncwarp();\n      {name}_ring.release")


def test_warpgroups_meet_once_in_a_step() -> None:
    source = derived(False)
    assert source.count("consumers_meet") == 2  # once behind the loop
    assert source.index("consumers_meet<Warps>()") > source.index("dS_shared_stage = 1 -")
    assert source.count("fw::to_shared<Warps>(dS_shared.stage(dS_shared_stage), dP)") == 1
    assert "dS_shared_stage = 1 - dS_shared_stage" in source


def test_warpgroups_tell_each_other_of_ds_before_dv_and_hear_behind_it() -> None:
    source = derived(False, head_dim=64)
    steps = (
        r"(to_shared|consumers_\w+)<Warps>\((?:group, dS_shared_stage|dS)|product<.*group, (d\w)"
    )
    found = [left or right for left, right in re.findall(steps, in_loop(source))]
    assert found == ["dP", "to_shared", "consumers_tell", "dV", "consumers_hear", "dQ", "dK"]
    assert source.count("consumers_meet") == 1  # behind the loop


def test_a_meeting_for_another_tile_as_well_stays_one() -> None:
    """They meet before P and for dS: whoever overwrites P would not wait for its readers."""
    ds, other = ("dS", "shared"), ("P", "shared")
    product = ir.Gemm(("dV", "register"), ("S", "register"), ("dO", "shared"), False, False)
    body: tuple[ir.Statement, ...] = (
        ir.Sync((ds,)),
        ir.Move(("dP", "register"), ds),
        ir.Sync((ds, other), publish=True),
        ir.Move(("S", "register"), other),
        ir.Sync((other,), publish=True),
        product,
        ir.Gemm(("dQ", "register"), ds, ("K", "shared"), False, True, left_transposed=True),
        ir.Gemm(("dX", "register"), other, ("K", "shared"), False, True),
    )
    loop = ir.Loop("i", ZERO, ZERO, body)
    for keys, steps in (((ds,), []), ((other,), ["tell", "hear"])):
        made = alternating((loop,), frozenset(keys), Names(()), groups=2)
        syncs = [n for n in ir.flat(made) if isinstance(n, ir.Sync)]
        assert [n.step for n in syncs if n.step != "meet"] == steps
        for sync in syncs:
            assert sync.step == "meet" or sync.keys == keys


def test_dq_is_added_in_fragments_without_a_test() -> None:
    (line,) = (x for x in derived(True).splitlines() if "add_fragments" in x)
    assert line.strip().startswith("fw::add_fragments<RowWarps, Beside>(p.dQsum.tile(")


def test_the_longest_tiles_come_first() -> None:
    assert "fw::TileScheduler<2, true>" in derived(True)
    assert "fw::TileScheduler<-1>" in derived(True, window=512)  # shorter at the end alone
    assert "fw::TileScheduler<0>" in derived(False)


def test_the_longest_tiles_come_first_behind_a_prefix_that_all_see() -> None:
    """The first blocks have as many iterations; a window's have, but for those at the end."""

    def scheduler(high: str) -> str:
        program = checked_program(parse(attention(high=high, k_stages=2, v_stages=2)))
        found = re.search(r"TileScheduler<.*?>", translate(program, gpus.find("h200")).source)
        assert found is not None
        return found[0]

    assert scheduler("min(kv_len, max((block + 1) * BM, 2048)) / BN") == "TileScheduler<10>"
    assert (
        scheduler("min(kv_len, max(kv_len - block * BM, 2048)) / BN") == "TileScheduler<10, true>"
    )
    assert scheduler("min(kv_len, 512 + (block % 7) * BM) / BN") == "TileScheduler<0>"


def test_a_number_for_each_head_is_read_before_the_loop() -> None:
    """A load in the loop would wait for the additions to dQ."""
    source = derived(True, alibi=True)
    assert source.count("*p.Slopes.at(head_idx)") == 1
    assert "Slopes.at" not in in_loop(source)


def test_a_tile_that_not_only_products_read_has_one_stage() -> None:
    """A copy to global memory would read the first stage each time."""
    source = printed((CASES / "stored_in_a_loop.tl").read_text(), "h200", strict=False)
    assert "to_shared" in source
    assert "_shared_stage" not in source


def test_a_tile_that_a_product_reads_one_iteration_late_has_one_stage() -> None:
    """P through shared memory, in a loop that is overlapped."""
    text = attention().replace(
        "  Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)\n", ""
    )
    text = text.replace(
        "Compute GEMM S, V", "Copy S from register to shared\n  Compute GEMM S_shared, V"
    )
    assert "S_shared, V" in text
    source = printed(text, "h200", strict=False)
    assert "consumers_meet" in source
    assert "S_shared_stage" not in source
