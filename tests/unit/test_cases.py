"""Programs that once were translated wrongly, or might be (tests/cases): the interpreter and the
emulated kernel agree on every GPU that a program fits. Many are compiled in one run of nvcc, which
takes most of the time: all but two for the first GPU are among the slow tests, and so are the other
GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flashwright.fuzz.case import FuzzCase, load
from flashwright.fuzz.oracle import ProgramOutcome, evaluate_cases, prepare

FOLDER = Path(__file__).parents[1] / "cases"
CASES = {path.stem: load(path) for path in sorted(FOLDER.glob("*.tl"))}
GPUS = ("h200", "a100", "l40s", "t4")
ELSEWHERE = {"agree", "refused", "untranslated"}
"""On a GPU that a program was not written for, the checker may say that it does not fit."""


FP8 = [name for name, case in CASES.items() if "e4m3" in case.text or "e5m2" in case.text]
LATER = [name for n, name in enumerate(CASES) if n % 40]
SHARES = [
    pytest.param(GPUS[0], list(CASES)[::40], id=f"{GPUS[0]}-a-few"),
    pytest.param(GPUS[0], LATER[::3], id=f"{GPUS[0]}-a-third", marks=pytest.mark.slow),
    pytest.param("a100", list(CASES)[::5], id="a100", marks=pytest.mark.slow),
    pytest.param("t4", list(CASES)[1::5], id="t4", marks=pytest.mark.slow),
    pytest.param(
        "l40s", list(dict.fromkeys([*FP8, *list(CASES)[::4]])), id="l40s", marks=pytest.mark.slow
    ),
]
"""Ada differs from Ampere in fp8, and in how much fits. Turing and Ampere get other ones."""


@pytest.mark.parametrize(("gpu", "names"), SHARES)
def test_kernel_and_interpreter_agree(gpu: str, names: list[str]) -> None:
    outcomes = evaluate_cases([replace(CASES[name], gpu=gpu) for name in names])
    found = dict(zip(names, outcomes, strict=True))
    assert not _wrong(found, gpu)


@pytest.mark.slow
def test_the_others_are_translated_and_verified() -> None:
    """The cheap part for all, of which the slow tests run half."""
    gpu = GPUS[0]
    steps = {name: prepare(replace(CASES[name], gpu=gpu)) for name in LATER}
    found = {
        name: step if isinstance(step, ProgramOutcome) else ProgramOutcome("agree")
        for name, step in steps.items()
    }
    assert not _wrong(found, gpu)


def _wrong(found: Mapping[str, ProgramOutcome], gpu: str) -> dict[str, str]:
    return {
        name: f"{outcome.kind}: {outcome.detail}"
        for name, outcome in found.items()
        if outcome.kind not in _expected(CASES[name], gpu)
    }


def _expected(case: FuzzCase, gpu: str) -> set[str]:
    tags = {t.removeprefix("expected:") for t in case.tags if t.startswith("expected:")}
    expected = tags or {"agree"}
    return expected if gpu == case.gpu else expected | ELSEWHERE
