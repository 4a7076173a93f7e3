"""What is fast by a trick has no number. These measure time: run them with nothing beside them."""

from __future__ import annotations

import pytest

from flashwright.measure.records import AbsentRecord, NumberRecord
from flashwright.selftest.case import SelftestCase
from flashwright.selftest.cases import CASES
from flashwright.selftest.timed import measured

pytest.importorskip("torch")
pytest.importorskip("triton")

TIMED = [case for case in CASES if case.how == "timed"]


@pytest.mark.parametrize("case", [c for c in TIMED if not c.honest], ids=lambda case: case.name)
def test_no_offence_gets_a_number(case: SelftestCase) -> None:
    line = measured(case.candidate, case.limits)
    assert isinstance(line, AbsentRecord), line
    assert line.offence in case.expected, line.why


@pytest.mark.parametrize("case", [c for c in TIMED if c.honest], ids=lambda case: case.name)
def test_an_honest_kernel_gets_one(case: SelftestCase) -> None:
    line = measured(case.candidate, case.limits)
    assert isinstance(line, NumberRecord), line
    assert line.checked >= 1
