"""The ways in which a case is judged, as users do it: `verify`, `bench`, the emulator…"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashwright.selftest.case import SelftestCase

if TYPE_CHECKING:
    from flashwright.judge.verdict import Verdict

A_MOMENT = 1.0  # seconds of emulation, where the offence is what was not tried


@dataclass(frozen=True)
class CaseOutcome:
    """The verdict on one case."""

    names: tuple[str, ...]
    """The names of the offences, or codes of diagnostics; empty if it was accepted."""
    message: str = ""
    """The messages of all offences."""
    seed: int | None = None
    """The seed of the problems."""


def outcome(case: SelftestCase) -> CaseOutcome:
    """Judge one case in this process. Raises Failed if the judge refuses its files."""
    return _WAYS[case.how](case)


def _of(verdict: Verdict) -> CaseOutcome:
    """The offences of a verdict, with the messages of all of them."""
    lacking = ("not enough",) if verdict.missing else ()
    names = (*(o.name for o in verdict.offences), *lacking)
    said = [*(o.message for o in verdict.offences), *([verdict.missing] if lacking else [])]
    return CaseOutcome(names, "; ".join(said), verdict.seed)


def _judge(case: SelftestCase) -> CaseOutcome:
    from flashwright.judge.judge import judge

    assert case.spec is not None
    found = judge(
        case.candidate,
        case.spec,
        device="cuda" if case.on == "gpu" else "cpu",
        lengths=case.lengths,
        limits=case.limits,
        libraries=case.libraries,
    )
    return _of(found)


def _emulated(case: SelftestCase) -> CaseOutcome:
    from flashwright.judge.emulated import SECONDS, judge_emulated
    from flashwright.selftest.packages import doctored

    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder:
        package, spec = doctored(case.function, Path(folder, "package"))
        seconds = SECONDS if case.lengths else A_MOMENT
        found = judge_emulated(package, spec, lengths=case.lengths, seconds=seconds)
    return _of(found)


def _own(case: SelftestCase) -> CaseOutcome:
    """A package of ours, compiled for the GPU at hand."""
    from flashwright import gpu as gpus
    from flashwright.build import driver
    from flashwright.judge.judge import judge
    from flashwright.sandbox.candidate import Candidate
    from flashwright.selftest.packages import GPU, spec_of, written

    try:
        card = gpus.find(driver.cards()[0].name)
    except gpus.UnknownGpu:
        card = gpus.find(GPU)
    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder:
        package = written(case.function, Path(folder, "package"), card)
        one = Candidate.package(package, case.name)
        return _of(judge(one, spec_of(case.function), lengths=case.lengths))


def _timed(case: SelftestCase) -> CaseOutcome:
    from flashwright.measure.records import AbsentRecord
    from flashwright.selftest.timed import measured

    line = measured(case.candidate, case.limits)
    if isinstance(line, AbsentRecord):
        return CaseOutcome((line.offence or "no number",), line.why)
    return CaseOutcome(())


def _screen(case: SelftestCase) -> CaseOutcome:
    from flashwright.selftest.sources import REFUSED, TAKEN
    from flashwright.untrusted.screen import screen

    screen({**REFUSED, **TAKEN}[case.function])
    return CaseOutcome(())


def _receipt(case: SelftestCase) -> CaseOutcome:
    from flashwright.selftest.receipts import differing

    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder:
        return CaseOutcome(tuple(differing(case.function, Path(folder))))


_WAYS: dict[str, Callable[[SelftestCase], CaseOutcome]] = {
    "judge": _judge,
    "emulated": _emulated,
    "own": _own,
    "timed": _timed,
    "screen": _screen,
    "receipt": _receipt,
}
