"""A kernel in the benchmark: it gets a time, or the offence that prevents one."""

from __future__ import annotations

import datetime

from flashwright.author.builtin.variants import make_spec
from flashwright.build import driver
from flashwright.measure.bench import Contest, ContestDependencies
from flashwright.measure.contest import Contestant
from flashwright.measure.grid import Cell
from flashwright.measure.records import AbsentRecord, NumberRecord, RunRecord
from flashwright.measure.timing import Rules
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Sandbox

CELL = Cell(make_spec("mha", heads=32, head_dim=64, dtype="fp16", causal=True), 4096, 4)
RULES = Rules(least=3, most=4, seconds=0.5)


def measured(candidate: Candidate, limits: Limits) -> AbsentRecord | NumberRecord:
    """Time one kernel in one cell, with no peer beside it."""
    card = driver.cards()[0]
    run = RunRecord(
        id="selftest",
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        title="selftest",
        card=card.name,
        arch=card.arch,
        translated_for="a100",
        layout="bshd",
        contestants=(candidate.name,),
        cells=(CELL.name,),
        environment={},
        seed=1,
    )
    dependencies = ContestDependencies(make=lambda one, spec: Sandbox(one, spec, "cuda", limits))
    contest = Contest(
        run, [Contestant(candidate.name, candidate, watched=True)], RULES, dependencies
    )
    try:
        (line,) = contest.measure(CELL)
        return line
    finally:
        contest.close()
