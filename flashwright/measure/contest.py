"""The contestants' processes: started side by side, kept as long as they live, started again.

Each has a thread of its own that starts its processes: Linux ends a child with the thread that
started it, and all can get ready at the same time.
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

LIVES = 3
"""Cells of one kernel in which a contestant may end before it is left out of the others."""

T = TypeVar("T")


class Process(Protocol):
    """A contestant's process; sandbox/process.py has the real one."""

    def start(self) -> None:
        """Load the candidate; Unable or Ended where that fails."""

    def switch(self, candidate: Candidate, spec: AttentionSpec) -> None:
        """Load another candidate instead; as start."""

    def prepare(self, problem: TimedProblem) -> None:
        """Get ready for a problem; Unable with the reason where it cannot do it."""

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """Seconds of that many calls."""

    def fetch(self, call: int, batch: int, head: int) -> Array:
        """O of one head of a call of the last turn or burst."""

    def burst(self, calls: int, seed: int) -> Burst:
        """Calls that each need the one before, by our own clock."""

    def close(self) -> None:
        """End it."""


Make = Callable[[Candidate, AttentionSpec], Process]
"""A process that is not started yet: `Sandbox`, or a test's own."""


@dataclass(frozen=True)
class Missing:
    """Why a contestant has nothing to run for a kernel."""

    why: str
    offence: str | None = None


@dataclass(frozen=True)
class Contestant:
    """One who is measured: ours, which has a candidate for each kernel, or a peer."""

    name: str
    candidates: Mapping[str, Candidate | Missing] | Candidate
    """By kernel; a peer has one for all."""
    slack: float = 1.0
    """How many times the usual error it may have."""
    watched: bool = False
    """Whether its event times are held against the wall clock."""

    def candidate(self, kernel: str) -> Candidate | Missing:
        """What it runs for a kernel."""
        if isinstance(self.candidates, Candidate):
            return self.candidates
        return self.candidates.get(kernel, Missing("there is no kernel"))


class Hand:
    """A thread that does one thing after the other. It does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def give(self, work: Callable[[], T]) -> Future[T]:
        """Do this next; the future has what comes of it."""
        future: Future[T] = Future()
        self._work.put((future, work))
        return future

    def rest(self) -> None:
        """There is no more to do."""
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            future, work = given
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class Seat:
    """A contestant and its process, if one is running."""

    def __init__(self, contestant: Contestant, make: Make) -> None:
        self.contestant = contestant
        self._make = make
        self._hand = Hand(contestant.name)
        self._kernel = ""
        self._process: Process | None = None
        self._runs: tuple[Candidate, AttentionSpec] | None = None
        self._unable: dict[str, str] = {}
        self._ends: dict[str, list[Ended]] = {}

    def prepare(self, kernel: str, problem: TimedProblem) -> Future[None]:
        """Get ready, in its own thread: the future has Unable or Ended where that fails."""
        return self._hand.give(lambda: self._ready(kernel, problem))

    def _ready(self, kernel: str, problem: TimedProblem) -> None:
        self._kernel = kernel
        ended = self._ends.get(kernel, [])
        if len(ended) >= LIVES:
            text = f"not tried again: it ended in {len(ended)} cells of this kernel"
            raise Ended(ended[-1].offence, text)
        candidate = self.contestant.candidate(kernel)
        if isinstance(candidate, Missing):
            raise Unable(candidate.why)
        if kernel in self._unable:
            raise Unable(self._unable[kernel])
        with self._counted():
            if self._process is None or self._runs != (candidate, problem.spec):
                self._load(candidate, problem.spec)
            self._asked().prepare(problem)

    def _load(self, candidate: Candidate, spec: AttentionSpec) -> None:
        """Another kernel; who cannot do it is not asked for it again."""
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
    def _counted(self) -> Iterator[None]:
        """Whoever ends in here loses its process and a life."""
        try:
            yield
        except (Ended, OSError) as error:
            ended = error
            if not isinstance(ended, Ended):  # no room for its files, or for one more process
                ended = Ended("crash", f"its process cannot be used: {error}")
            self._ends.setdefault(self._kernel, []).append(ended)
            self.drop()
            raise ended from None

    def _asked(self) -> Process:
        if self._process is None:
            raise Ended("crash", "its process is gone")
        return self._process

    def turn(self, calls: int, seed: int, cold: bool = True) -> list[float]:
        """See Process."""
        with self._counted():
            return self._asked().turn(calls, seed, cold)

    def fetch(self, call: int, batch: int, head: int) -> Array:
        """See Process."""
        with self._counted():
            return self._asked().fetch(call, batch, head)

    def burst(self, calls: int, seed: int) -> Burst:
        """See Process."""
        with self._counted():
            return self._asked().burst(calls, seed)

    def drop(self) -> None:
        """End the process; the next cell starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """End the process for good, also one that is just being started."""
        self.drop()
        self._hand.rest()
