"""When a round whose scores are all masked changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.element import Op, literal, variable
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.passes.early_exit import idle


def work(**settings: Any) -> list[ir.Compute]:
    """What the loop of a built-in program computes."""
    spec, card = make_spec("gqa", **settings), gpus.find("h200")
    program = check(parse(write_code(write_sketch(spec), spec, card).code), card).program
    assert program is not None
    (loop,) = (n for n in lower(program).body if isinstance(n, ir.Loop))
    return [n for n in loop.body if isinstance(n, ir.Compute)]


def mask(computes: list[ir.Compute]) -> ir.Compute:
    (found,) = (n for n in computes if n.end is not None)
    return found


OPTIONS = ({}, {"alibi": True}, {"window": 100}, {"softcap": 30.0}, {"head_dim": 256})


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_a_softmax_of_nothing_changes_nothing(settings: dict[str, Any]) -> None:
    computes = work(causal=True, **settings)
    assert idle(computes, mask(computes))


@pytest.mark.parametrize("target", ["S", "Smax", "Ssum", "O", "drop"])
def test_what_changes_something_does(target: str) -> None:
    *before, softmax = work(causal=True)
    assigns = tuple(
        replace(a, value=Op("+", (a.value, literal(1.0)))) if variable(a.target) == target else a
        for a in softmax.assigns
    )
    assert assigns != softmax.assigns
    assert not idle([*before, replace(softmax, assigns=assigns)], mask(before))


def test_what_a_mask_hides_must_stay_hidden() -> None:
    *before, softmax = work(causal=True)
    hiding = mask(before)
    shown = tuple(replace(a, value=literal(3.0)) for a in hiding.assigns)
    assert not idle([*before, replace(hiding, assigns=shown), softmax], hiding)


def test_a_function_that_nobody_knows_may_do_anything() -> None:
    *before, softmax = work(causal=True)
    first = softmax.assigns[0]
    odd = replace(first, value=Op("riddle", (first.value,)))
    assert not idle([*before, replace(softmax, assigns=(odd, *softmax.assigns[1:]))], mask(before))
