"""The main kernel of a backward pass on Hopper: which products are under way while others end."""

from __future__ import annotations

import re
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.check.check import checked_program
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate

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
