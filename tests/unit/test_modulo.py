"""`a % b` is floor-mod everywhere: of scalars, of elements, and where a mask is asked."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from flashwright.check.check import check, checked_program
from flashwright.lang.nodes import Binary, Num, Unary
from flashwright.lang.parse import parse
from flashwright.program.scalars import evaluate
from flashwright.semantics.interpret import interpret

VALUES = ["7", "-7", "0", "2.5", "-2.5", "0.25", "-0.5"]
DIVISORS = ["3", "-3", "1.5", "-1.5", "1"]
PROGRAM = """\
param BM = 16
grid block_idx = 0:q_len / BM
Allocate X in global (L: q_len) as fp32
Allocate Y in global (L: q_len) as fp32
Copy X (BM) in coordinate [L = block_idx] from global to register
Compute {} and get Y_register
Copy Y (BM) in coordinate [L = block_idx] from register to global
"""


def number(text: str) -> Num | Unary:
    return Unary("-", Num(text[1:])) if text.startswith("-") else Num(text)


def run(expression: str, x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    source = PROGRAM.format(expression).replace(
        "Copy X", "Allocate Y in register (BM) as fp32\nCopy X", 1
    )
    return interpret(checked_program(parse(source)), {"X": x})["Y"]


@pytest.mark.parametrize("a", VALUES)
@pytest.mark.parametrize("b", DIVISORS)
def test_scalars_and_elements_agree(a: str, b: str) -> None:
    exact = Fraction(a) - Fraction(b) * math.floor(Fraction(a) / Fraction(b))
    assert evaluate(Binary("%", number(a), number(b)), {}) == exact
    assert exact == 0 or (exact > 0) == (Fraction(b) > 0)
    x = np.full(16, float(Fraction(a)), dtype=np.float32)
    assert (run(f"X % ({b})", x) == float(exact)).all()


def test_positions_and_their_differences() -> None:
    x = np.zeros(48, dtype=np.float32)
    place = np.arange(48)
    assert (run("X + q_idx % 3", x) == place % 3).all()
    assert (run("X + (q_idx - 20) % 7", x) == (place - 20) % 7).all()
    assert (run("X + (20 - q_idx) % -7", x) == (20 - place) % -7).all()
    assert (run("X + q_idx / 2 % 1", x) == place / 2 % 1).all()


def test_a_remainder_by_zero_is_a_finding() -> None:
    source = PROGRAM.format("X % 0").replace("Copy X", "Allocate Y in register (BM)\nCopy X", 1)
    assert [d.code for d in check(parse(source)).diagnostics] == ["FW306"]


def test_the_page_says_so() -> None:
    page = (Path(__file__).parents[2] / "docs" / "language.md").read_text()
    assert "`a % b` is `a - b * floor(a / b)`" in page
