"""A job, what it needs, and what comes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flashwright.build.driver import Card
from flashwright.lang.diagnostic import Diagnostic, Failed

Send = Callable[[Any], None]
"""Sends a part of a job's result ahead of its end."""
Work = Callable[[Send], Any]
"""The function of a job; it and its results are pickled, so that it can run anywhere."""


@dataclass(frozen=True)
class Need:
    """What each job of a run needs for itself alone: a CPU, or one whole GPU."""

    card: str = ""
    """The name of the GPU, as its driver gives it; empty: a CPU is enough."""
    jobs: int = 0
    """The most jobs at a time; 0: as many as there are CPUs or GPUs."""

    def __str__(self) -> str:
        return self.card or "CPU"


CPU = Need()


@dataclass(frozen=True)
class Job:
    """A named function to run somewhere."""

    name: str
    work: Work


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker runs."""

    host: str
    version: str
    """The version of flashwright there."""
    card: Card | None = None
    """Its GPU."""
    gpu: str = ""
    """Which GPU of the machine that is, as in CUDA_VISIBLE_DEVICES."""

    def __str__(self) -> str:
        return f"{self.host}, {self.card.name} ({self.gpu})" if self.card else self.host


@dataclass(frozen=True)
class JobPart:
    """A part of a job's result. A job that runs again after a loss sends its parts again."""

    name: str
    place: WorkerPlace
    value: Any


@dataclass(frozen=True)
class JobEnd:
    """The end of a job."""

    name: str
    place: WorkerPlace | None
    """None if it was never run to its end."""
    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """What the job returned. Raises what it raised, or Failed with FW859 if it was lost."""
        if self.error is not None:
            raise self.error
        return self.value


class Lost(Exception):
    """A worker is gone, or could not be started; the message says why."""


class JobBroken(Exception):
    """A job raised an exception that is not Failed; the message has its traceback."""


class FleetWorker(Protocol):
    """A process that runs one job at a time."""

    place: WorkerPlace

    def run(self, work: Work, send: Send) -> Any:
        """The result of a job. Raises Lost if the worker is gone, and what the job raised."""

    def close(self) -> None:
        """End the process, also from another thread while it runs a job."""


class Machines(Protocol):
    """Where workers are started: processes of this machine, or a cluster."""

    patience: float
    """How many seconds a run waits for the first machine that has what it needs."""

    def slots(self, need: Need) -> int:
        """How many workers with this need there can be now."""

    def start(self, need: Need) -> FleetWorker:
        """Start a worker, waiting until it is there. Raises Lost, or Failed if none can be used."""

    def card(self, gpu: str) -> Card:
        """The kind of card for kernels of a GPU (a name of gpu.py). Raises Failed with FW851."""

    def close(self) -> None:
        """Let go of the machines."""


def unusable(text: str, help: str = "") -> Failed:
    """The failure of a machine, not of a kernel."""
    return Failed(Diagnostic("FW859", text, help=help or None))


def plain(function: Callable[..., Any], *arguments: Any) -> Work:
    """A job's work that sends no parts: a call of a function at the top level of a module."""
    return functools.partial(_call, function, *arguments)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments[:-1])  # the last is Send
