"""Maxima as integers: which kernels find them so, and what stands where."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.gpu import Gpu
from flashwright.lower.translate import translate
from flashwright.program.program import Program
from tests.unit.tl_attention import attention, program

CARD = gpus.find("h200")
THREES = "fw::most_as_integers(S, m)"
VOTE = "fw::none_negative("


def written(variant: str = "mha", card: Gpu = CARD, **settings: Any) -> Program:
    """The built-in author's program."""
    spec = make_spec(variant, **{"head_dim": 64, "dtype": "bf16", **settings})
    return program(write_code(write_sketch(spec), spec, card).code)


def own(**parts: object) -> Program:
    """A program by hand, which need not be attention any more."""
    return program(attention(dtype="bf16", **parts), strict=False)


def readers(made: Program, card: Gpu = CARD, sparing: bool = False) -> str:
    return translate(made, card, sparing).source.partition("    return;\n  }\n")[2]


@pytest.mark.parametrize(
    ("gpu", "settings"),
    [
        ("h200", {}),
        ("h100", {"causal": True}),
        ("h200", {"dtype": "fp16", "causal": True}),
        ("h200", {"head_dim": 32}),
        ("h200", {"causal": True, "window": 100}),
        ("h200", {"softcap": 50.0}),
        ("h200", {"sink": True}),
    ],
)
def test_where_products_take_no_longer_than_exponentials(
    gpu: str, settings: dict[str, Any]
) -> None:
    card = gpus.find(gpu)
    assert THREES in readers(written(card=card, **settings), card)


@pytest.mark.parametrize(
    ("variant", "gpu", "settings"),
    [
        ("mha", "h200", {"head_dim": 96}),
        ("mha", "h200", {"head_dim": 128}),
        ("mla", "h200", {"head_dim": 128}),
        ("mha", "h200", {"dtype": "fp8"}),
        ("mha", "h200", {"alibi": True}),  # for most of a row the bias is all that counts
        ("mha", "a100", {}),
        ("mha", "l40s", {}),
    ],
)
def test_where_they_take_longer_or_scores_may_be_negative_for_long(
    variant: str, gpu: str, settings: dict[str, Any]
) -> None:
    card = gpus.find(gpu)
    source = translate(written(variant, card, **settings), card).source
    assert not re.search("as_integers|negative|reached", source)


def test_it_is_the_rates_of_the_gpu_that_decide() -> None:
    """A GPU with twice or half the special function units."""
    for exponentials, width, taken in ((32, 64, False), (8, 128, True), (8, 256, False)):
        made = written(head_dim=width)
        card = replace(CARD, exp_per_clock_per_sm=exponentials)
        assert (THREES in readers(made, card)) == taken


@pytest.mark.parametrize("apart", [0, 1])
def test_the_first_round_counts_in_floats_and_the_others_only_until_all_rows_are_above(
    apart: int,
) -> None:
    spec = make_spec("mha", head_dim=64, dtype="bf16", causal=True)
    code = re.sub(r"param SplitMasked = .*\n", "", write_code(write_sketch(spec), spec, CARD).code)
    first, *loops = re.split(
        r"\n +for \((?:i = 1)?; .*[^{]*\{\n",
        readers(program(f"param SplitMasked = {apart}\n{code}")),
    )[: 2 + apart]
    assert THREES not in first
    places = [first.index(t) for t in ("fw::max(most, S(m, n))", "int above =", "fw::exp2(S(m, n)")]
    assert places == sorted(places)
    assert len(loops) == 1 + apart
    for loop in loops:
        order = (
            *("reached(m) = Smax(m);", "if (!above) {", "most = fw::max(most, S(m, n));"),
            *(
                "reached(m) = fw::max(Smax(m), most * Scale);",
                "above = fw::none_negative(reached);",
            ),
            *(f"float const most = fw::row_max({THREES});", "fw::max(reached(m), most * Scale);"),
            *("Smax(m) = now;", "K_ring.release(Smax(0));"),
        )
        places = [loop.index(text) for text in order]
        assert places == sorted(places)
        assert loop.count(VOTE) == loop.count(THREES) == 1


def test_a_kernel_that_is_short_of_registers_has_its_maxima_in_floats() -> None:
    assert THREES in readers(written())
    assert not re.search("as_integers|negative|reached", readers(written(), sparing=True))


def test_without_overlap_there_is_nothing_to_gain() -> None:
    assert THREES in readers(own())
    assert THREES not in readers(own(params="param Overlap = 0"))


@pytest.mark.parametrize("scale", ["Multiply S, 0 - Scale", "-S"])
def test_a_negative_factor_is_not_taken_along(scale: str) -> None:
    """The scores have it already where bits are compared."""
    source = readers(own(scale=f"Compute {scale} and get new S"))
    assert THREES in source
    assert "fw::max(reached(m), most);" in source
    assert re.search(r"S\(m, n\) = (-S\(m, n\)|S\(m, n\) \* \(0.f - Scale\));", source)


@pytest.mark.parametrize(
    "more",
    [
        "Compute Smax - 1 and get new Smax",
        "Compute S - Smax and get new S\n  Compute S + Smax and get new S",
        "Compute S + kv_idx and get new S",
    ],
)
def test_a_maximum_that_does_more_than_to_grow_and_scores_with_a_bias_keep_floats(
    more: str,
) -> None:
    assert THREES not in readers(own(scale=f"Compute Multiply S, Scale and get new S\n  {more}"))
