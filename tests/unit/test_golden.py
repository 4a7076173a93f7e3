"""The golden kernels: what is translated today is what was reviewed, and it can be reviewed."""

from __future__ import annotations

import json

import pytest

from tests.golden.cases import CASES, HERE, Case

UPDATE = "if this is meant, run `python -m tests.golden.update` and read the difference"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_golden(case: Case) -> None:
    made = case.translate()
    assert made.source == (HERE / f"{case.name}.cu").read_text("utf-8"), UPDATE
    assert made.map.dump() == (HERE / f"{case.name}.map.json").read_text("utf-8"), UPDATE


def test_there_is_nothing_else() -> None:
    names = {case.name for case in CASES}
    assert {p.name.split(".")[0] for p in HERE.iterdir() if p.suffix in (".cu", ".json")} == names
    assert {p.stem for p in HERE.glob("*.tl")} == {c.name for c in CASES if c.variant}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_it_reads_well(case: Case) -> None:
    lines = (HERE / f"{case.name}.cu").read_text("utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        assert len(line) <= 100 or line.lstrip().startswith("//"), f"{number}: {line}"
        assert line == line.rstrip(), f"{number}: {line!r}"
        assert line or lines[number - 2], f"two empty lines at {number}"
        opens = lines[number - 2].endswith("{") if number > 1 else False
        assert not (opens and not line and lines[number - 2].startswith("  ")), number


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_map_covers_the_kernel(case: Case) -> None:
    """Every line of the body but braces, barriers and the like leads to the program."""
    made = case.translate()
    lines = made.source.splitlines()
    first = next(i for i, line in enumerate(lines) if "attention(" in line)
    free = ("fw::commit", "fw::wait", "__syncthreads", "fw::Place", "}")
    for number, line in enumerate(lines[first + 1 :], first + 2):
        if line.strip() and not line.strip().startswith(free):
            assert made.map.tl_line(number) is not None, f"{number}: {line}"
    assert json.loads(made.map.dump())["tl"] == "code.tl"
