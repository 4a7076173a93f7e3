"""Runs the cases with the judge as users call it, each judge in its own process.

A judge that crashes or hangs is a result like any other. Cases run in parallel; a process judges
case after case until one stops it. Cases that are timed, or that can bring down the GPU, run alone
and last.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from flashwright.lang.diagnostic import Failed
from flashwright.selftest.case import SelftestCase
from flashwright.selftest.needs import missing
from flashwright.selftest.ways import CaseOutcome, outcome

Status = Literal["ok", "HOLE", "FALSE ALARM", "not tried"]
LONGEST = 900.0  # seconds of one case, after which its judge counts as stopped
MOST_JOBS = 4
CORES_OF_A_GPU_CASE = 4  # torch, Triton's compiler and the oracle keep several busy


@dataclass(frozen=True)
class SelftestResult:
    """A case and its result."""

    case: SelftestCase
    status: Status
    happened: str
    """What happened: `rejected as zeros`, `accepted`, or the reason why it was not tried."""
    seconds: float = 0.0
    message: str = ""
    seed: int | None = None


def run(
    cases: Sequence[SelftestCase],
    jobs: int | None = None,
    report: Callable[[SelftestResult], None] = lambda row: None,
) -> list[SelftestResult]:
    """The results of the cases, in their order; `report` is called with each as soon as known."""
    rows: dict[str, SelftestResult] = {}
    lock = threading.Lock()

    def keep(row: SelftestResult) -> None:
        with lock:
            rows[row.case.name] = row
            report(row)

    for case in cases:
        if why := missing(case):
            keep(SelftestResult(case, "not tried", why))
    ready = [case for case in cases if case.name not in rows]
    on_cpu = [case for case in ready if case.on == "cpu"]
    on_gpu = [case for case in ready if case.on == "gpu" and not case.alone]
    _run_all(on_cpu, jobs or default_jobs("cpu"), keep)
    _run_all(on_gpu, jobs or default_jobs("gpu"), keep)
    _run_all([case for case in ready if case.alone], 1, keep)
    return [rows[case.name] for case in cases]


def default_jobs(on: str) -> int:
    """The default number of cases in parallel."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(MOST_JOBS, cores // (CORES_OF_A_GPU_CASE if on == "gpu" else 1)))


def _run_all(
    cases: Sequence[SelftestCase], jobs: int, keep: Callable[[SelftestResult], None]
) -> None:
    if not cases:
        return
    with _one_thread_each(), _judge_processes() as mine, ThreadPoolExecutor(jobs) as pool:
        for future in [
            pool.submit(lambda case: keep(_case_result(case, mine())), case) for case in cases
        ]:
            future.result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limits NumPy to one thread in the processes that start meanwhile."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _case_result(case: SelftestCase, process: JudgeProcess) -> SelftestResult:
    begun = time.monotonic()
    found = process.outcome(case)
    taken = time.monotonic() - begun
    if isinstance(found, CaseOutcome):
        return judged(case, found, taken)
    if found.startswith(_UNABLE):
        return SelftestResult(case, "not tried", found.removeprefix(_UNABLE), taken)
    return SelftestResult(case, "FALSE ALARM" if case.honest else "HOLE", found, taken)


def judged(case: SelftestCase, found: CaseOutcome, seconds: float = 0.0) -> SelftestResult:
    """The result of a case: whether the verdict is the expected one."""
    happened = f"rejected as {', '.join(found.names)}" if found.names else "accepted"
    named = bool(set(found.names) & set(case.expected)) and case.says in found.message
    status: Status = "ok"
    if case.honest and found.names:
        status = "FALSE ALARM"
    elif not case.honest and not named:
        status = "HOLE"
    return SelftestResult(case, status, happened, seconds, found.message, found.seed)


# --- in a process of its own ------------------------------------------------------------------

_UNABLE = "unable: "


class JudgeProcess:
    """A process that judges cases; started again if a case has stopped it."""

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

    def outcome(self, case: SelftestCase) -> CaseOutcome | str:
        """The outcome of a case, or a text that says how the judge failed."""
        pipe = self._pipe or self._start()
        try:
            pipe.send(case)
            if pipe.poll(LONGEST):
                answer: CaseOutcome | str = pipe.recv()
                return answer
            why = f"the judge did not end in {LONGEST:g} s"
        except (EOFError, OSError):
            self._process.join(5)
            why = f"the judge was stopped (exit code {self._process.exitcode})"
        self.close()
        return why

    def close(self) -> None:
        """End the judge's process, if it runs."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._pipe = None


@contextmanager
def _judge_processes() -> Iterator[Callable[[], JudgeProcess]]:
    """A judge process for each thread."""
    own, all_of_them = threading.local(), []

    def mine() -> JudgeProcess:
        if not hasattr(own, "child"):
            own.process = JudgeProcess()
            all_of_them.append(own.process)
        process: JudgeProcess = own.process
        return process

    try:
        yield mine
    finally:
        for process in all_of_them:
            process.close()


def _serve(pipe: Connection) -> None:
    """Judge the cases that arrive in the pipe, until it is closed."""
    while True:
        try:
            case: SelftestCase = pipe.recv()
        except EOFError:
            return
        try:
            answer: CaseOutcome | str = outcome(case)
        except Failed as failed:
            codes = tuple(dict.fromkeys(d.code for d in failed.diagnostics))
            unable = "FW851" in codes and "FW851" not in case.expected
            answer = f"{_UNABLE}{failed}" if unable else CaseOutcome(codes, str(failed))
        except Exception as error:
            answer = f"the judge failed: {type(error).__name__}: {error}"
        pipe.send(answer)
