"""Fleets without processes, and jobs for fleets that have them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwright.build.driver import Card
from flashwright.fleet.fleet import Event, Fleet
from flashwright.fleet.job import Job, JobEnd, JobPart, Need, WorkerPlace
from flashwright.fleet.processes import LocalMachine
from flashwright.version import __version__
from tests.unit.measure_fakes import H200


class _Left(BaseException):
    """Ends a job whose parts nobody takes any more."""


@dataclass
class _Turns:
    """A job that runs only while its caller waits."""

    job: Job
    said: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    go_on: queue.SimpleQueue[bool] = field(default_factory=queue.SimpleQueue)

    def run(self) -> None:
        try:
            self.said.put((None, self.job.work(self.send), None))
        except BaseException as error:
            self.said.put((None, None, error))

    def send(self, part: Any) -> None:
        self.said.put((part,))
        if not self.go_on.get():
            raise _Left


class InLockstep(Fleet):
    """Runs one job at a time in this process, each part when it is asked for."""

    def __init__(self, cards: Sequence[Card] = (H200,)) -> None:
        super().__init__(LocalMachine(look=lambda: cards))
        self.needs: list[Need] = []

    def run(self, need: Need, jobs: Sequence[Job]) -> Iterator[Event]:
        self.needs.append(need)
        place = WorkerPlace("here", __version__)
        for job in jobs:
            turns = _Turns(job)
            thread = threading.Thread(target=turns.run)
            thread.start()
            try:
                while len(said := turns.said.get()) == 1:
                    yield JobPart(job.name, place, said[0])
                    turns.go_on.put(True)
            finally:
                turns.go_on.put(False)
                thread.join()
            yield JobEnd(job.name, place, said[1], said[2])
