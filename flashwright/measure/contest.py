"""The contestants' processes: started in parallel, reused between cells, restarted on a crash.

Each contestant has a thread that starts its processes, so that all of them prepare in parallel.
The thread must live as long as the process: Linux ends a child with the thread that started it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Burst, Ended
from flashwright.sandbox.tensors import Array
from flashwright.spec import AttentionSpec

MAX_FAILURES = 3
"""After a crash in this many cells of a kernel, a contestant skips its other cells."""

T = TypeVar("T")


class ContestantProcess(Protocol):
    """A contestant's process; sandbox/process.py implements it."""

    def start(self) -> None:
        """Load the candidate. Raises Unable or Ended."""

    def switch(self, candidate: Candidate, spec: AttentionSpec) -> None:
        """Load another candidate instead. Raises Unable or Ended."""

    def prepare(self, problem: TimedProblem) -> None:
        """Prepare for a problem. Raises Unable if the candidate does not support it."""

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Time this many calls; returns the seconds of each."""

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Array:
        """One head of an output, from a call of the last turn or burst."""

    def burst(self, calls: int, seed: int) -> Burst:
        """Time back-to-back calls, each dependent on the one before, by the wall clock."""

    def close(self) -> None:
        """End the process."""


ProcessFactory = Callable[[Candidate, AttentionSpec], ContestantProcess]
"""Makes a process that is not started yet: `Sandbox`, or a fake in tests."""


@dataclass(frozen=True)
class Missing:
    """The reason why a contestant has no candidate for a kernel."""

    why: str
    offence: str | None = None


@dataclass(frozen=True)
class Contestant:
    """One side of the comparison: ours, with a candidate for each kernel, or a peer."""

    name: str
    candidates: Mapping[str, Candidate | Missing] | Candidate
    """By kernel; a peer has one candidate for all kernels."""
    slack: float = 1.0
    """Factor on the usual error limit."""
    watched: bool = False
    """Whether its event times are checked against the wall clock."""

    def candidate(self, kernel: str) -> Candidate | Missing:
        """The candidate for a kernel, or why there is none."""
        if isinstance(self.candidates, Candidate):
            return self.candidates
        return self.candidates.get(kernel, Missing("there is no kernel"))


class WorkerThread:
    """A daemon thread that runs submitted work in order. It does not block the program's exit."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a function; the future gets its result or exception."""
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def shutdown(self) -> None:
        """End the thread once its queue is empty."""
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            future, work = given
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class ContestantRunner:
    """A contestant and its process: loads candidates, restarts after crashes, counts failures."""

    def __init__(self, contestant: Contestant, make: ProcessFactory) -> None:
        self.contestant = contestant
        self._make = make
        self._thread = WorkerThread(contestant.name)
        self._kernel = ""
        self._process: ContestantProcess | None = None
        self._runs: tuple[Candidate, AttentionSpec] | None = None
        self._unable: dict[str, str] = {}
        self._failures: dict[str, list[Ended]] = {}

    def prepare(self, kernel: str, problem: TimedProblem) -> Future[None]:
        """Prepare in the contestant's thread; the future raises Unable or Ended if that fails."""
        return self._thread.submit(lambda: self._get_ready(kernel, problem))

    def _get_ready(self, kernel: str, problem: TimedProblem) -> None:
        self._kernel = kernel
        ended = self._failures.get(kernel, [])
        if len(ended) >= MAX_FAILURES:
            text = f"not tried again: it ended in {len(ended)} cells of this kernel"
            raise Ended(ended[-1].offence, text)
        candidate = self.contestant.candidate(kernel)
        if isinstance(candidate, Missing):
            raise Unable(candidate.why)
        if kernel in self._unable:
            raise Unable(self._unable[kernel])
        with self._counting_failures():
            if self._process is None or self._runs != (candidate, problem.spec):
                self._load(candidate, problem.spec)
            self._running_process().prepare(problem)

    def _load(self, candidate: Candidate, spec: AttentionSpec) -> None:
        """Load a candidate, and remember if the contestant does not support this kernel."""
        self._runs = (candidate, spec)
        try:
            if self._process is None:
                self._process = self._make(candidate, spec)
                self._process.start()
            else:
                self._process.switch(candidate, spec)
        except Unable as error:
            self._unable[self._kernel] = str(error)
            self.drop()
            raise

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """If the process ends in this context, drop it and count a failure of the kernel."""
        try:
            yield
        except (Ended, OSError) as error:
            ended = error
            if not isinstance(ended, Ended):  # no room for its files, or for one more process
                ended = Ended("crash", f"its process cannot be used: {error}")
            self._failures.setdefault(self._kernel, []).append(ended)
            self.drop()
            raise ended from None

    def _running_process(self) -> ContestantProcess:
        if self._process is None:
            raise Ended("crash", "its process is gone")
        return self._process

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """See ContestantProcess."""
        with self._counting_failures():
            return self._running_process().turn(calls, seed, cold)

    def fetch(self, call: int, batch: int, head: int, name: str = "O") -> Array:
        """See ContestantProcess."""
        with self._counting_failures():
            return self._running_process().fetch(call, batch, head, name)

    def burst(self, calls: int, seed: int) -> Burst:
        """See ContestantProcess."""
        with self._counting_failures():
            return self._running_process().burst(calls, seed)

    def drop(self) -> None:
        """End the process; the next cell starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process and the thread, also while the process is starting."""
        self.drop()
        self._thread.shutdown()
