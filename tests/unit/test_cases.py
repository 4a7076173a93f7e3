"""Programs that once were translated wrongly, or might be (tests/cases): the interpreter and the
emulated kernel agree on every GPU that a program fits. All are compiled in one run of nvcc for each
architecture."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flashwright.fuzz.case import load
from flashwright.fuzz.oracle import Outcome, evaluate_cases

FOLDER = Path(__file__).parents[1] / "cases"
CASES = {path.stem: load(path) for path in sorted(FOLDER.glob("*.tl"))}
GPUS = ("h200", "a100", "l40s", "t4")
ELSEWHERE = {"agree", "refused", "untranslated"}
"""On a GPU that a program was not written for, the checker may say that it does not fit."""
BEING_MENDED = {"checker_crash", "refused_two_q_blocks"}
"""By the checker: what is expected is in their tags."""


@cache
def outcomes(gpu: str) -> dict[str, Outcome]:
    cases = [replace(case, gpu=gpu) for case in CASES.values()]
    return dict(zip(CASES, evaluate_cases(cases), strict=True))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_kernel_and_interpreter_agree(name: str, gpu: str) -> None:
    case, found = CASES[name], outcomes(gpu)[name]
    tags = [t.removeprefix("expected:") for t in case.tags if t.startswith("expected:")]
    expected = set(tags) or ({"agree"} if gpu == case.gpu else ELSEWHERE)
    if name in BEING_MENDED and found.kind not in expected:
        pytest.xfail(f"the checker: {found.kind} {found.where}")
    if gpu != case.gpu:
        expected |= ELSEWHERE
    assert found.kind in expected, f"{found.kind}: {found.detail}"
