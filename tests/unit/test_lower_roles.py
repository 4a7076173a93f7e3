"""Hopper's roles and overlap: what stands where in the kernel, and which programs get them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build.encode import encode
from flashwright.check.check import check
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import translate
from tests.share import some


def translated(
    variant: str = "gqa", schedule: Mapping[str, int] | None = None, **settings: Any
) -> tuple[str, LaunchPlan]:
    spec = make_spec(variant, **{"head_dim": 128, "dtype": "bf16", **settings})
    card = gpus.find("h200")
    code = write_code(write_sketch(spec), spec, card).code
    for name, value in (schedule or {}).items():
        code = f"param {name} = {value}\n" + re.sub(rf"param {name} = .*\n", "", code)
    checked = check(parse(code), card)
    assert checked.program is not None
    assert not checked.diagnostics
    made = translate(checked.program, card)
    return made.source, made.plan


def parts(source: str) -> tuple[str, str]:
    """What the producer does, and what the consumers do."""
    producer, _, consumers = source.partition("    return;\n  }\n")
    return producer.partition("fw::rings_ready();")[2], consumers


def test_one_thread_loads_and_the_others_do_everything_else() -> None:
    source, plan = translated(causal=True, schedule={"BN": 128})
    producer, consumers = parts(source)
    assert re.findall(r"fw::fetch\((\w)_shared", producer) == ["Q", "K", "V"]
    assert "product" not in producer
    assert "fw::fetch" not in consumers
    assert plan.threads == 32 * 8 + 128
    assert [m.tensor for m in plan.maps] == ["Q", "K", "V"]
    assert {m.box for m in plan.maps} == {(1, 1, 128, 64)}
    encode(plan)  # the launcher takes it


def test_every_tile_is_waited_for_and_handed_back_as_often_as_it_is_filled() -> None:
    _, consumers = parts(translated(schedule={"SplitMasked": 0})[0])
    first, _, rest = consumers.partition("      for (i = 1;")
    loop, _, last = rest.partition("\n      }\n")
    for text, waits in ((first, ["Q", "K"]), (loop, ["K", "V"]), (last, ["V"])):
        assert re.findall(r"(\w)_ring\.wait\(\)", text) == waits
    # Q is done with before the last product; where there is no key at all, too.
    for text, releases in ((first, ["K"]), (loop, ["K", "V"]), (last, ["Q", "V", "Q"])):
        assert re.findall(r"(\w)_ring\.release\(", text) == releases
    assert re.search(r"\} else \{\s+Q_ring\.release\(\);", last)


def in_order(consumers: str, *texts: str) -> bool:
    loop = consumers[consumers.index("for (i = 1;") :]
    places = [loop.index(text) for text in texts]
    return places == sorted(places)


def test_the_softmax_is_computed_under_the_second_product() -> None:
    _, consumers = parts(translated(causal=True)[0])
    assert in_order(
        consumers,
        *(
            "fw::ping_pong_wait",
            "fw::open_products(S, O)",
            "fw::start_product<true, true>(group, S",
        ),
        *(
            "fw::start_product<false, false>(group, O",
            "fw::ping_pong_signal",
            "fw::finish_products<1>(S)",
        ),
        *("Smax(m) = now", "K_ring.release(Smax(0))", "fw::finish_products<0>(O)"),
        *("V_ring.release", "O(m, n) = O(m, n) * drops(m)", "fw::exp2(S(m, n)"),
        "S_operand = fw::operand",
    )


@pytest.mark.parametrize(
    ("work", "line", "rounds"),
    [("", "O(m, n) * drops(m)", 1), ("O_register * 2", "* 2.f", 1), ("O_register + 1", "+ 1.f", 2)],
)
def test_what_is_done_with_o_is_done_in_the_first_round_where_it_matters(
    work: str, line: str, rounds: int
) -> None:
    spec, card = make_spec("mha", head_dim=64, dtype="bf16"), gpus.find("h200")
    code = write_code(write_sketch(spec), spec, card).code
    more = f"  Compute {work} and get new O_register\n" if work else ""
    code = re.sub(r"(.*Softmax.*\n)", rf"\1{more}", code)
    checked = check(parse(code), card)
    assert checked.program is not None
    assert not checked.errors
    _, consumers = parts(translate(checked.program, card).source)
    assert "fw::finish_products<1>(S)" in consumers
    assert consumers.count(line) == rounds


def test_a_warpgroup_ends_where_its_mask_does_and_lets_the_tiles_of_the_others_pass() -> None:
    _, consumers = parts(translated(causal=True, schedule={"SplitMasked": 0})[0])
    assert "for (i = 1; i * BN < i_end && i < i_exit; ++i)" in consumers
    passing = consumers[consumers.index("for (; i * BN < i_end; ++i)") :]
    passing = passing[: passing.index("\n      }\n")]
    steps = ("K_ring.wait", "ping_pong_wait", "ping_pong_signal", "K_ring.release", "V_ring.wait")
    places = [passing.index(step) for step in (*steps, "V_ring.release")]
    assert places == sorted(places)
    assert "product" not in passing
    for settings in ({}, {"window": 100}):  # nobody ends before the others
        assert "i_exit" not in translated(**settings)[0]


def test_iterations_that_need_no_mask_have_a_loop_of_their_own() -> None:
    _, consumers = parts(translated(causal=True, schedule={"SplitMasked": 1})[0])
    start = consumers.index("for (i = 1; i * BN < i_end && i < i_exit\n")
    plain, masked, last = consumers[start:].split("\n      }\n")[:3]
    assert "i * BN + BN - 1 <= block_idx * BM + kv_len - q_len; ++i)" in plain
    assert "for (; i * BN < i_end && i < i_exit; ++i)" in masked
    assert "-INFINITY" not in plain
    assert "-INFINITY" in masked
    for loop in (plain, masked):
        assert re.findall(r"(\w)_ring\.(wait|release)", loop) == [
            *(("K", "wait"), ("V", "wait"), ("K", "release"), ("V", "release"))
        ]
    assert "Q_ring.release()" in last


def test_results_go_out_through_shared_memory_where_there_is_room() -> None:
    source, plan = translated(causal=True, schedule={"BN": 128})
    place = int(re.findall(r"fw::store_epilogue<Warps>\(shared \+ (\d+),", source)[0])
    rings = [int(n) for n in re.findall(r"_ring\(shared \+ (\d+)\)", source)]
    assert max(rings) + 16 * 2 <= place
    assert plan.shared == place + 8 * 2048
    full, other = translated(causal=True, schedule={"BN": 160})
    assert "fw::store<Warps>(p.O.tile(" in full
    assert other.shared + 8 * 2048 > gpus.find("h200").shared_per_block


def test_sections_of_the_grid_are_smaller_where_memory_is_slow() -> None:
    spec = make_spec("mha", head_dim=64, dtype="bf16", causal=True)
    card = gpus.find("h200")
    program = check(parse(write_code(write_sketch(spec), spec, card).code), card).program
    assert program is not None

    def rounds(bandwidth: float) -> list[int]:
        source = translate(program, replace(card, bandwidth=bandwidth)).source
        return [int(n) for n in re.findall(r"fw::TileScheduler<(\d+)> tile", source)]

    assert rounds(card.bandwidth) == [8, 8], "192 rows share what is read"
    assert rounds(gpus.find("h100").bandwidth) == [4, 4], "producer and consumers agree"


@pytest.mark.parametrize(
    ("param", "without"),
    [
        ("Overlap", "fw::finish_products<1>"),
        ("PingPong", "fw::ping_pong_"),
        ("SplitMasked", "for (; i * BN < i_end && i < i_exit; ++i)"),
        ("Persistent", ""),
    ],
)
def test_the_schedule_is_the_programs_choice(param: str, without: str) -> None:
    source, plan = translated(causal=True, schedule={"SplitMasked": 1})
    other, launch = translated(causal=True, schedule={"SplitMasked": 1, param: 0})
    same, again = translated(causal=True, schedule={"SplitMasked": 1, param: 1})
    assert re.sub(r"// +\d+ \|", "", same) == re.sub(r"// +\d+ \|", "", source)
    assert again == plan
    if without:
        assert without in source
        assert without not in other
    assert launch.stays == (param != "Persistent")
    assert plan.stays
    dims = {"q_len": 1000, "kv_len": 1000, "heads": 16, "kv_heads": 4, "batch": 3}
    assert plan.blocks(dims, sms=132) == (132,)
    assert launch.model_copy(update={"stays": False}).blocks(dims, sms=132) == (8 * 16 * 3,)


@pytest.mark.parametrize("dtype", some(["bf16", "fp8"]))
def test_what_wgmma_cannot_do_goes_the_other_way(dtype: str) -> None:
    source, plan = translated("nsa-selected", dtype=dtype)
    assert plan.maps == ()
    assert "fw::gemm<" in source


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        *(("bf16", width) for width in (64, 96, 128, 256)),
        *(("fp8", width) for width in (64, 96, 128)),
    ],
)
def test_boxes_are_as_wide_as_the_swizzle(width: int, dtype: str) -> None:
    _, plan = translated(head_dim=width, dtype=dtype)
    size = 1 if dtype == "fp8" else 2
    swizzle = next(b for b in (128, 64, 32) if width * size % b == 0)
    assert {(m.swizzle, m.box[-1]) for m in plan.maps} == {(swizzle, swizzle // size)}
