"""Run the cases: each by the judge as users have it, in processes that a case may not take along.

A judge that is stopped or does not end is a row like any other. Cases run side by side, each in a
child process that lives as long as its judge does. Cases that are timed, or that end badly on a
GPU, run alone and last.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashwright.lang.diagnostic import Failed
from flashwright.selftest.case import Case
from flashwright.selftest.needs import missing

if TYPE_CHECKING:
    from flashwright.judge.verdict import Verdict

Status = Literal["ok", "HOLE", "FALSE ALARM", "not tried"]
LONGEST = 900.0  # seconds of one case, after which its judge counts as stopped
MOST_JOBS = 4
A_MOMENT = 1.0  # seconds of emulation, where the offence is what was not tried
CORES_OF_A_GPU_CASE = 4  # torch, Triton's compiler and the oracle keep several busy


@dataclass(frozen=True)
class Outcome:
    """What the judge said of one case."""

    names: tuple[str, ...]
    """Of the offences, or codes of diagnostics; empty where it was accepted."""
    message: str = ""
    """Of all offences."""


@dataclass(frozen=True)
class Row:
    """One case and what came of it."""

    case: Case
    status: Status
    happened: str
    """In words: `rejected as zeros`, `accepted`, or the reason why it was not tried."""
    seconds: float = 0.0
    message: str = ""


def run(
    cases: Sequence[Case], jobs: int | None = None, told: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """A row for each case, in their order; `told` gets each as soon as it is known."""
    rows: dict[str, Row] = {}
    lock = threading.Lock()

    def keep(row: Row) -> None:
        with lock:
            rows[row.case.name] = row
            told(row)

    for case in cases:
        if why := missing(case):
            keep(Row(case, "not tried", why))
    ready = [case for case in cases if case.name not in rows]
    on_cpu = [case for case in ready if case.on == "cpu"]
    on_gpu = [case for case in ready if case.on == "gpu" and not case.alone]
    _all(on_cpu, jobs or default_jobs("cpu"), keep)
    _all(on_gpu, jobs or default_jobs("gpu"), keep)
    _all([case for case in ready if case.alone], 1, keep)
    return [rows[case.name] for case in cases]


def default_jobs(on: str) -> int:
    """How many cases run side by side on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(MOST_JOBS, cores // (CORES_OF_A_GPU_CASE if on == "gpu" else 1)))


def _all(cases: Sequence[Case], jobs: int, keep: Callable[[Row], None]) -> None:
    if not cases:
        return
    with _one_thread_each(), _children() as mine, ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(lambda case: keep(_row(case, mine())), case) for case in cases]:
            future.result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Judges that are started meanwhile leave the cores to each other: NumPy would take all."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _row(case: Case, child: Child) -> Row:
    begun = time.monotonic()
    found = child.outcome(case)
    taken = time.monotonic() - begun
    if isinstance(found, Outcome):
        return judged(case, found, taken)
    if found.startswith(_UNABLE):
        return Row(case, "not tried", found.removeprefix(_UNABLE), taken)
    return Row(case, "FALSE ALARM" if case.honest else "HOLE", found, taken)


def judged(case: Case, found: Outcome, seconds: float = 0.0) -> Row:
    """Whether that is what a case must come to."""
    happened = f"rejected as {', '.join(found.names)}" if found.names else "accepted"
    row = Row(case, "ok", happened, seconds, found.message)
    if case.honest:
        return row if not found.names else Row(case, "FALSE ALARM", *_rest(row))
    if set(found.names) & set(case.expected) and case.says in found.message:
        return row
    return Row(case, "HOLE", *_rest(row))


def _rest(row: Row) -> tuple[str, float, str]:
    return row.happened, row.seconds, row.message


# --- in a process of its own ------------------------------------------------------------------

_UNABLE = "unable: "


class Child:
    """A process that judges; started again where a case has stopped it."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self._pipe = here
        return here

    def outcome(self, case: Case) -> Outcome | str:
        """What the judge says, or how it failed, in words."""
        pipe = self._pipe or self._start()
        try:
            pipe.send(case)
            if pipe.poll(LONGEST):
                answer: Outcome | str = pipe.recv()
                return answer
            why = f"the judge did not end in {LONGEST:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            why = f"the judge was stopped (exit code {self._process.exitcode})"
        self.close()
        return why

    def close(self) -> None:
        """End the process."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._pipe = None


@contextmanager
def _children() -> Iterator[Callable[[], Child]]:
    """A child for each thread that asks."""
    own, all_of_them = threading.local(), []

    def mine() -> Child:
        if not hasattr(own, "child"):
            own.child = Child()
            all_of_them.append(own.child)
        child: Child = own.child
        return child

    try:
        yield mine
    finally:
        for child in all_of_them:
            child.close()


def _serve(pipe: Connection) -> None:
    """Judge what comes, until nothing more does."""
    while True:
        try:
            case: Case = pipe.recv()
        except EOFError:
            return
        try:
            answer: Outcome | str = outcome(case)
        except Failed as failed:
            codes = tuple(d.code for d in failed.diagnostics)
            unable = "FW851" in codes and "FW851" not in case.expected
            answer = f"{_UNABLE}{failed}" if unable else Outcome(codes, str(failed))
        except Exception as error:
            answer = f"the judge failed: {type(error).__name__}: {error}"
        pipe.send(answer)


# --- the ways to judge ------------------------------------------------------------------------


def outcome(case: Case) -> Outcome:
    """Judge one case in this process; Failed where the judge refuses its files."""
    return _WAYS[case.how](case)


def _of(verdict: Verdict) -> Outcome:
    """The offences of a verdict, with the messages of all of them."""
    lacking = ("not enough",) if verdict.missing else ()
    names = (*(o.name for o in verdict.offences), *lacking)
    return Outcome(names, "; ".join((*(o.message for o in verdict.offences), verdict.missing)))


def _judge(case: Case) -> Outcome:
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


def _emulated(case: Case) -> Outcome:
    from flashwright.judge.emulated import SECONDS, judge_emulated
    from flashwright.selftest.packages import doctored

    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder:
        package, spec = doctored(case.function, Path(folder, "package"))
        seconds = SECONDS if case.lengths else A_MOMENT
        found = judge_emulated(package, spec, lengths=case.lengths, seconds=seconds)
    return _of(found)


def _own(case: Case) -> Outcome:
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


def _timed(case: Case) -> Outcome:
    from flashwright.measure.records import AbsentRecord
    from flashwright.selftest.timed import measured

    line = measured(case.candidate, case.limits)
    if isinstance(line, AbsentRecord):
        return Outcome((line.offence or "no number",), line.why)
    return Outcome(())


def _screen(case: Case) -> Outcome:
    from flashwright.build.screen import screen
    from flashwright.selftest.sources import REFUSED, TAKEN

    screen({**REFUSED, **TAKEN}[case.function])
    return Outcome(())


def _receipt(case: Case) -> Outcome:
    from flashwright.selftest.receipts import differing

    with tempfile.TemporaryDirectory(prefix="flashwright-") as folder:
        return Outcome(tuple(differing(case.function, Path(folder))))


_WAYS: dict[str, Callable[[Case], Outcome]] = {
    "judge": _judge,
    "emulated": _emulated,
    "own": _own,
    "timed": _timed,
    "screen": _screen,
    "receipt": _receipt,
}
