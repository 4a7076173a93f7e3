"""Programs that once were translated wrongly, or might be (tests/cases): the interpreter and the
emulated kernel agree on every GPU that a program fits. All are compiled in one run of nvcc for each
architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashwright.fuzz.case import Case, load
from flashwright.fuzz.oracle import evaluate_cases

FOLDER = Path(__file__).parents[1] / "cases"
CASES = {path.stem: load(path) for path in sorted(FOLDER.glob("*.tl"))}
GPUS = ("h200", "a100", "l40s", "t4")
ELSEWHERE = {"agree", "refused", "untranslated"}
"""On a GPU that a program was not written for, the checker may say that it does not fit."""


@pytest.mark.parametrize(
    "gpu", [GPUS[0], *(pytest.param(gpu, marks=pytest.mark.slow) for gpu in GPUS[1:])]
)
def test_kernel_and_interpreter_agree(gpu: str) -> None:
    outcomes = evaluate_cases([replace(case, gpu=gpu) for case in CASES.values()])
    wrong = {
        name: f"{found.kind}: {found.detail}"
        for (name, case), found in zip(CASES.items(), outcomes, strict=True)
        if found.kind not in _expected(case, gpu)
    }
    assert not wrong


def _expected(case: Case, gpu: str) -> set[str]:
    tags = {t.removeprefix("expected:") for t in case.tags if t.startswith("expected:")}
    expected = tags or {"agree"}
    return expected if gpu == case.gpu else expected | ELSEWHERE
