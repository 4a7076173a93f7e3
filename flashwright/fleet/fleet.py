"""Runs jobs on workers: as many at a time as there are machines, results as they come.

A worker has one job at a time, so one GPU's jobs run one after another. If a worker is lost, its
job runs once more elsewhere; lost again, it fails with the reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from flashwright.build.driver import Card
from flashwright.fleet.job import (
    FleetWorker,
    Job,
    JobEnd,
    JobPart,
    Lost,
    Machines,
    Need,
    WorkerPlace,
    unusable,
)
from flashwright.lang.diagnostic import Failed
from flashwright.version import __version__

TRIES = 2
"""How often a job is started, if its worker is lost."""
STARTS = 3
"""How many workers may fail to start, one after another."""
_LOOK = 1.0  # seconds between two looks at the machines
Event = JobPart | JobEnd


class Fleet:
    """Runs jobs on the machines it is given."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self._idle: dict[Need, list[FleetWorker]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        self._keep_only(None)
        self.machines.close()

    def card(self, gpu: str) -> Card:
        """The kind of card for kernels of a GPU (see Machines)."""
        return self.machines.card(gpu)

    def run(self, need: Need, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run the jobs; yields their parts and ends as they come.

        Closing the iterator ends what still runs. Raises Failed with FW859 if no worker can be had.
        """
        self._keep_only(need)
        run = _FleetRun(self.machines, need, jobs, self._idle.setdefault(need, []))
        try:
            yield from run.events()
        finally:
            run.close()

    def parts(self, need: Need, jobs: Sequence[Job]) -> Iterator[JobPart]:
        """The parts of jobs that return nothing. Raises what a job raised, once it has ended."""
        for event in self.run(need, jobs):
            if isinstance(event, JobPart):
                yield event
            else:
                event.result()

    def ends(self, need: Need, jobs: Sequence[Job]) -> Iterator[JobEnd]:
        """The ends of jobs that send no parts."""
        return (event for event in self.run(need, jobs) if isinstance(event, JobEnd))

    def _keep_only(self, need: Need | None) -> None:
        """End idle workers with another need: what they hold may be what this one waits for."""
        for other in [other for other in self._idle if other != need]:
            for worker in self._idle.pop(other):
                worker.close()


@dataclass
class _Lane:
    """A thread and its worker. The thread lives as long as the worker has jobs."""

    worker: FleetWorker | None = None


@dataclass
class _FleetRun:
    """One call of `Fleet.run`."""

    machines: Machines
    need: Need
    jobs: Sequence[Job]
    idle: list[FleetWorker]
    _waiting: deque[tuple[Job, int]] = field(default_factory=deque)
    _lanes: list[_Lane] = field(default_factory=list)
    _events: queue.SimpleQueue[Event | Failed | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _closed: bool = False
    _failed_starts: int = 0

    def events(self) -> Iterator[Event]:
        self._waiting.extend((job, 1) for job in self.jobs)
        left, since = len(self.jobs), time.monotonic()
        while left:
            self._start_lanes(left)
            try:
                event = self._events.get(timeout=_LOOK)
            except queue.Empty:
                event = None
            if isinstance(event, Failed):
                raise event
            if event is not None:
                left -= isinstance(event, JobEnd)
                yield event
            working = any(lane.worker is not None for lane in self._lanes)
            if working or not self._waiting or self.machines.slots(self.need):
                since = time.monotonic()
            elif time.monotonic() - since > self.machines.patience:
                raise unusable(f"no machine has a {self.need} any more")

    def close(self) -> None:
        """End the workers that still run a job."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            busy = [lane.worker for lane in self._lanes if lane.worker is not None]
        for worker in busy:
            worker.close()

    def _start_lanes(self, left: int) -> None:
        with self._lock:
            most = min(left, self.need.jobs or left)
            wanted = min(most, self.machines.slots(self.need)) - len(self._lanes)
            lanes = [_Lane() for _ in range(min(wanted, len(self._waiting)))]
            self._lanes += lanes
        for lane in lanes:
            name = f"{self.need} worker"
            threading.Thread(target=self._work, args=(lane,), name=name, daemon=True).start()

    def _work(self, lane: _Lane) -> None:
        """Run waiting jobs on one worker, until there are none or the worker is lost."""
        try:
            self._get_worker(lane)
            while lane.worker is not None and (next_job := self._next()) is not None:
                self._run_job(lane, lane.worker, *next_job)
        except Lost as lost:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                self._events.put(unusable(f"no worker can be started: {lost}"))
        except Failed as failed:
            self._events.put(failed)
        except BaseException as error:
            self._events.put(unusable(f"no worker can be started: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._lanes.remove(lane)
                worker, closed = lane.worker, self._closed
                if worker is not None and not closed:
                    self.idle.append(worker)
            if worker is not None and closed:
                worker.close()
            self._events.put(None)  # look at the machines again

    def _get_worker(self, lane: _Lane) -> None:
        with self._lock:
            worker = self.idle.pop() if self.idle else None
        if worker is None:
            worker = self.machines.start(self.need)
            if worker.place.version != __version__:
                worker.close()
                text = f"{worker.place.host} has flashwright {worker.place.version}"
                raise unusable(f"{text}, this is {__version__}", "install the same version")
        with self._lock:
            lane.worker, self._failed_starts = worker, 0

    def _next(self) -> tuple[Job, int] | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _run_job(self, lane: _Lane, worker: FleetWorker, job: Job, attempt: int) -> None:
        place = worker.place
        try:
            value = worker.run(job.work, lambda part: self._put(JobPart(job.name, place, part)))
        except Lost as lost:
            lane.worker = None
            with contextlib.suppress(Lost):
                worker.close()
            self._again(job, attempt, place, lost)
        except BaseException as error:
            self._put(JobEnd(job.name, place, error=error))
        else:
            self._put(JobEnd(job.name, place, value))

    def _again(self, job: Job, attempt: int, place: WorkerPlace, lost: Lost) -> None:
        with self._lock:
            if self._closed:
                return
            if attempt < TRIES:
                self._waiting.appendleft((job, attempt + 1))
                return
        error = unusable(f"{job.name}: lost {attempt} times, the last on {place.host}: {lost}")
        self._put(JobEnd(job.name, None, error=error))

    def _put(self, event: Event) -> None:
        if not self._closed:
            self._events.put(event)
