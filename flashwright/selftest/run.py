"""Run the cases: each by the judge as users have it, in processes that a case may not take along.

A judge that is stopped or does not end is a row like any other. Cases run side by side, each in a
child process that lives as long as its judge does. Cases that are timed, or that end badly on a
GPU, run alone and last.
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
from flashwright.selftest.case import Case
from flashwright.selftest.needs import missing
from flashwright.selftest.ways import Outcome, outcome

Status = Literal["ok", "HOLE", "FALSE ALARM", "not tried"]
LONGEST = 900.0  # seconds of one case, after which its judge counts as stopped
MOST_JOBS = 4
CORES_OF_A_GPU_CASE = 4  # torch, Triton's compiler and the oracle keep several busy


@dataclass(frozen=True)
class Row:
    """One case and what came of it."""

    case: Case
    status: Status
    happened: str
    """In words: `rejected as zeros`, `accepted`, or the reason why it was not tried."""
    seconds: float = 0.0
    message: str = ""
    seed: int | None = None


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
    named = bool(set(found.names) & set(case.expected)) and case.says in found.message
    status: Status = "ok"
    if case.honest and found.names:
        status = "FALSE ALARM"
    elif not case.honest and not named:
        status = "HOLE"
    return Row(case, status, happened, seconds, found.message, found.seed)


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
        """End the judge's process, if it runs."""
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
            codes = tuple(dict.fromkeys(d.code for d in failed.diagnostics))
            unable = "FW851" in codes and "FW851" not in case.expected
            answer = f"{_UNABLE}{failed}" if unable else Outcome(codes, str(failed))
        except Exception as error:
            answer = f"the judge failed: {type(error).__name__}: {error}"
        pipe.send(answer)
