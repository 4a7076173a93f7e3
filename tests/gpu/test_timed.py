"""What is fast by a trick has no number. These measure time: run them with nothing beside them."""

from __future__ import annotations

import datetime

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.measure.bench import Contest, Tools
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.records import AbsentRecord, NumberRecord, RunRecord
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Sandbox

pytest.importorskip("torch")
pytest.importorskip("triton")

LONG = make_spec("mha", heads=32, head_dim=64, dtype="fp16", causal=True)
CELL = Cell(LONG, 4096, 4)
TIMED = [
    ("forges_times", {"too_fast"}),
    ("forges_plausible_times", {"hidden_work"}),
    ("on_another_stream", {"hidden_work", "too_fast", "wrong"}),
    ("in_a_thread", {"hidden_work", "too_fast", "wrong", "replay"}),
    ("replay_when_timed", {"replay", "too_fast"}),
    ("zeros", {"wrong", "too_fast"}),
    ("device_assert", {"device_error"}),
    ("endless", {"hang"}),
]


def measured(function: str) -> AbsentRecord | NumberRecord:
    card = driver.cards()[0]
    run = RunRecord(
        id="test",
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        title="test",
        card=card.name,
        arch=card.arch,
        translated_for="a100",
        layout="bshd",
        contestants=(function,),
        cells=(CELL.name,),
        environment={},
        seed=1,
    )
    limits = Limits(seconds=15, start_seconds=20 if function == "endless" else 120)
    tools = Tools(make=lambda one, spec: Sandbox(one, spec, "cuda", limits))
    one = Candidate("python", "flashwright.selftest.kernels.cuda", function)
    contestants = [Contestant(function, one, watched=True)]
    contest = Contest(run, contestants, Rules(least=3, most=4, seconds=0.5), tools)
    try:
        (line,) = contest.measure(CELL)
        return line
    finally:
        contest.close()


@pytest.mark.parametrize(("function", "offences"), TIMED, ids=[t[0] for t in TIMED])
def test_no_offence_gets_a_number(function: str, offences: set[str]) -> None:
    line = measured(function)
    assert isinstance(line, AbsentRecord), line
    assert line.offence in offences, line.why


def test_an_honest_kernel_gets_one() -> None:
    line = measured("on_a_stream_that_waits")
    assert isinstance(line, NumberRecord), line
    assert line.checked >= 1
