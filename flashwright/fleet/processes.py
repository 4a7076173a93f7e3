"""Workers of this machine: a process for each core, or one for each GPU, which sees no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from flashwright import gpu as gpus
from flashwright.build import driver
from flashwright.build.driver import Card
from flashwright.confine.isolate import uninterrupted
from flashwright.fleet.job import JobBroken, Lost, Need, Send, Work, WorkerPlace
from flashwright.lang.diagnostic import Failed
from flashwright.version import __version__

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDING = 5.0  # seconds that a process has to end its children


@dataclass
class LocalMachine:
    """The cores and the GPUs of this machine."""

    patience: float = 0.0
    look: Callable[[], Sequence[Card]] = driver.cards
    """The GPUs that can be seen."""
    _held: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def slots(self, need: Need) -> int:
        """One for each core, or for each GPU of the kind."""
        return len(self._of_kind(need.card)) if need.card else os.cpu_count() or 1

    def start(self, need: Need) -> ProcessWorker:
        """Start a process; one for a GPU holds a GPU that no other worker of the fleet has."""
        if not need.card:
            return ProcessWorker(None)
        with self._lock:
            free = [card for card in self._of_kind(need.card) if card.number not in self._held]
            if not free:
                raise Lost(f"all GPUs of the kind {need.card} are in use")
            self._held.add(free[0].number)
        return ProcessWorker(free[0], lambda: self._held.discard(free[0].number))

    def card(self, gpu: str) -> Card:
        """A card of that kind, or else the first, which may run its kernels too."""
        every, kind = self.look(), gpus.find(gpu)
        return next((card for card in every if _is_kind(card.name, kind)), every[0])

    def close(self) -> None:
        """Nothing: the fleet closes its workers."""

    def _of_kind(self, name: str) -> list[Card]:
        return [card for card in self.look() if card.name == name]


def _is_kind(card: str, kind: gpus.Gpu) -> bool:
    try:
        return gpus.find(card) == kind
    except gpus.UnknownGpu:
        return False


class ProcessWorker:
    """A process of this machine. It ends with its parent, and Ctrl-C is left to the parent."""

    def __init__(self, card: Card | None, freed: Callable[[], None] = lambda: None) -> None:
        visible = "" if card is None else _visible(card.number)
        self.place = WorkerPlace(socket.gethostname(), __version__, card, visible)
        self._freed = freed
        context = multiprocessing.get_context("spawn")  # a fork would inherit threads and locks
        self._pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(there, visible))
        try:
            with uninterrupted():
                self._process.start()
        except OSError as error:
            freed()
            raise Lost(f"no process can be started: {error}") from None
        there.close()

    def run(self, work: Work, send: Send) -> Any:
        """Run a job there."""
        data = pickle.dumps(work)  # an error of ours is raised here, not as a lost worker
        try:
            self._pipe.send_bytes(data)
            while (answer := self._pipe.recv())[0] == "part":
                send(answer[1])
        except (EOFError, OSError):
            self._process.join(_ENDING)
            raise Lost(f"its process ended with exit code {self._process.exitcode}") from None
        kind, value = answer
        if kind == "failed":
            raise Failed(*value)
        if kind == "broken":
            raise JobBroken(value)
        return value

    def close(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(OSError, ValueError):
            self._process.terminate()
            self._process.join(_ENDING)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._freed()


def _visible(number: int) -> str:
    """One of the visible GPUs, as CUDA_VISIBLE_DEVICES names it."""
    named = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return named[number] if number < len(named) else str(number)


# --- in the process ---------------------------------------------------------------------------


def _serve(pipe: Connection, visible: str) -> None:
    """Run the jobs that come through the pipe, with one GPU or with none."""
    os.environ[VISIBLE] = visible
    signal.signal(signal.SIGTERM, _ended)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            work: Work = pickle.loads(pipe.recv_bytes())
            pipe.send(answer(work, lambda part: pipe.send(("part", part))))


def answer(work: Work, send: Send) -> tuple[str, Any]:
    """A job's end as data: `done` and its result, or `failed` or `broken` and why."""
    try:
        return "done", work(send)
    except Failed as failed:
        return "failed", failed.diagnostics
    except Exception:
        return "broken", traceback.format_exc()


def _ended(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(1)  # what the job started is ended on the way out


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_ENDING)
        os._exit(1)
