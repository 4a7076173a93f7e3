"""Products of bytes on Hopper: tiles that are turned, sums in steps, weights in 8 bits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import workload, write_code, write_sketch
from flashwright.author.builtin.needs import uses_wgmma
from flashwright.author.builtin.variants import make_spec
from flashwright.build.encode import encode
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import translate
from tests.unit.tl_attention import program

CARD = gpus.find("h200")


def written(**settings: Any) -> str:
    """The built-in author's program."""
    spec = make_spec("gqa", **{"head_dim": 128, "dtype": "fp8", **settings})
    return write_code(write_sketch(spec), spec, CARD).code


def translated(text: str, strict: bool = True) -> tuple[str, LaunchPlan]:
    made = translate(program(text, strict), CARD)
    return made.source, made.plan


def roles(source: str) -> tuple[str, str, str]:
    """What the loader does, those who turn tiles, and the readers."""
    _, _, rest = source.partition("if (fw::is_producer<Warps>()) {")
    loader, _, rest = rest.partition("} else if (fw::is_helper<Warps>()) {")
    turner, _, readers = rest.partition("    return;\n  }\n")
    return loader, turner, readers


def test_a_tile_of_bytes_lands_is_turned_and_is_read_the_other_way() -> None:
    source, plan = translated(written())
    loader, turner, readers = roles(source)
    assert re.findall(r"fw::fetch\((\w+),", loader) == ["Q_shared", "K_shared", "V_landed_shared"]
    assert re.findall(r"fw::\w+<Warps>\((.*)\);", turner) == [
        "V_landed_shared, V_landed_ring, V_shared, V_ring"
    ]
    assert "int const kv_head" not in turner
    assert "V_landed" not in readers
    assert "fw::start_product<true, true>(group, O_step, S_operand, V_shared.stage" in readers
    assert "fw::shared_tile<fw::e4m3, HeadDim, BN>" in source
    assert "fw::shared_tile<fw::e4m3, BN, HeadDim>" in source
    assert "fw::accumulator<BM, HeadDim, Warps, true>()" in readers
    assert [(m.tensor, m.box, m.swizzle) for m in plan.maps] == [
        (name, (1, 1, 128, 128), 128) for name in "QKV"
    ]
    encode(plan)  # the launcher takes it


def test_each_ring_counts_those_who_use_it() -> None:
    source, _ = translated(written())
    assert dict(re.findall(r"(\w+)_ring\.init\((.*)\);", source)) == {
        "Q": "Warps",
        "K": "Warps",
        "V": "Warps, fw::helpers",
        "V_landed": "fw::helpers",
    }


def test_16_bits_need_none_of_it() -> None:
    source, _ = translated(written(dtype="bf16"))
    assert not re.search("helper|landed|step|power of two", source)


def test_a_step_is_added_where_the_sum_is_rescaled() -> None:
    _, _, readers = roles(translated(written(causal=True))[0])
    added = "O(m, n) = O(m, n) * drops_before(m) + O_step(m, n);"
    assert re.findall(r"(?<!\w)O\(m, n\) = O\(m, n\).*;", readers)[:2] == [added, added]
    assert readers.count("drops_before(m) = drops(m);") == 2  # before the loop, and in it
    assert "auto drops_before = fw::row_vector<128, Warps>();" in readers
    wait = readers.index("fw::finish_products<0>(O_step);")
    assert wait < readers.index("V_ring.release();") < readers.index(added)


def test_without_overlap_it_is_added_behind_the_product() -> None:
    text = written(causal=True).replace("param Scale", "param Overlap = 0\nparam Scale")
    _, _, readers = roles(translated(text)[0])
    product = readers.index("fw::start_product<true, true>(group, O_step, S_operand")
    assert product < readers.index("O(m, n) = O(m, n) + O_step(m, n);")
    assert "drops_before" not in readers


@pytest.mark.parametrize(("width", "stages"), [(64, 2), (128, 3)])
def test_tiles_land_in_the_room_there_is(width: int, stages: int) -> None:
    source, plan = translated(written(head_dim=width))
    assert f"fw::Ring<{stages}> V_landed_ring(" in source
    assert plan.shared <= CARD.shared_per_block


def test_a_sum_without_registers_for_its_steps_goes_the_other_way() -> None:
    source, plan = translated(written(head_dim=256))
    assert plan.maps == ()
    assert "fw::gemm<" in source


def test_where_registers_are_few_no_operand_is_fetched_ahead() -> None:
    made = translate(program(written(head_dim=256)), CARD, sparing=True)
    assert "fw::gemm_rolled<Mma>(S, fw::left<Warps>(Q_shared)" in made.source
    assert "fw::gemm_in_order<Mma>(O, S_operand" in made.source


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_the_author_knows_which_way_a_program_goes(width: int, dtype: str) -> None:
    spec = make_spec("mha", head_dim=width, dtype=dtype)
    made = write_code(write_sketch(spec), spec, CARD)
    by_wgmma = uses_wgmma(workload(spec), made.decision.tiling, CARD)
    assert bool(translated(made.code)[1].maps) == by_wgmma


def test_so_does_a_program_without_room_to_land_in() -> None:
    text = re.sub(r"param Stages = \d+", "param Stages = 4", written())
    text = re.sub(r"param BN = \d+", "param BN = 192", text)
    assert translated(text)[1].maps == ()


def test_whatever_else_the_loop_does_with_a_sum_it_can_do() -> None:
    line = "  Compute Softmax S"
    other = "  Compute O_register + Smax and get new O_register\n"
    source, plan = translated(written().replace(line, other + line), strict=False)
    assert plan.maps
    assert "O(m, n) = O(m, n) + O_step(m, n);" in source


def test_a_power_of_two_goes_into_the_exponent_and_out_of_the_sum() -> None:
    _, _, readers = roles(translated(written())[0])
    assert "float const row_0 = Smax(m) * fw::log2_e - 8.f;" in readers
    assert "Ssum(m) = Ssum(m) * drops(m) + sum * 0.00390625f;" in readers
    assert "S(m, n) * float(WeightScale)" not in readers


def test_no_other_factor_does() -> None:
    text = re.sub(r"param WeightScale = 256", "param WeightScale = 200", written())
    _, _, readers = roles(translated(text)[0])
    assert "- 8.f" not in readers
    assert "S(m, n) * float(WeightScale)" in readers
