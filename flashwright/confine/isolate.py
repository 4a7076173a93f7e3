"""Runs a Python function in a separate process with limits, for programs that a model wrote.

TL that passes the grammar may still need more steps or memory than there are. A process that takes
too long is killed. Whatever happens to it, the caller continues.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from flashwright.confine.limit import limit
from flashwright.lang.diagnostic import Diagnostic, Failed

GB = 1 << 30
T = TypeVar("T")
Answer = tuple[str, Any]
_LATE: Answer = ("late", None)
_DYING = 5.0  # seconds for a process that has closed its end of the pipe


def call(function: Callable[..., T], *arguments: Any, seconds: float, memory: int) -> T:
    """The function's result. Raises Failed if it raises Failed or exceeds a limit.

    The function must be at the top level of a module; arguments and result must be picklable.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads and their locks
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, memory, function, arguments), daemon=True)
    try:
        with uninterrupted():
            process.start()
    except OSError as error:  # the system has no room for one more
        raise Failed(_ended(*_broken(error), seconds)) from None
    there.close()
    try:
        answered = here.poll(seconds)
        kind: str
        value: Any
        kind, value = here.recv() if answered else _LATE
    except (EOFError, OSError):
        kind, value = _died(process)
    finally:
        here.close()
        _end(process)
    if kind == "done":
        done: T = value
        return done
    if kind == "failed":
        raise Failed(*value)
    raise Failed(_ended(kind, value, seconds))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Block Ctrl-C for processes started here. A terminal sends it to all of them; the caller ends
    them itself, without a traceback of theirs."""
    resource_tracker.ensure_running()  # else the first start of a process would unblock it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """End this process if its caller is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(answer: Connection, memory: int, function: Callable[..., Any], arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    limit(resource.RLIMIT_CORE, 0)
    allowed = limit(resource.RLIMIT_AS, memory)
    try:
        answer.send(("done", function(*arguments)))
    except Failed as failed:
        answer.send(("failed", failed.diagnostics))
    except MemoryError:
        answer.send(("memory", allowed))
    except Exception as error:  # a bug of ours, not of the program: a message, no traceback
        answer.send(_broken(error))


def _broken(error: Exception) -> Answer:
    return "broken", f"{type(error).__name__}: {error}"


def _died(process: multiprocessing.process.BaseProcess) -> Answer:
    """The answer for a process that ended without one. The system kills it if memory runs out."""
    process.join(_DYING)
    code = process.exitcode or 0
    if code == -signal.SIGKILL:
        return "memory", None
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return "broken", f"its process ended with {how}"


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(0.2)
    if process.is_alive():
        process.kill()
    with contextlib.suppress(OSError, ValueError):
        process.join()


def _ended(kind: str, value: Any, seconds: float) -> Diagnostic:
    if kind == "late":
        text = f"the program does not come to an end: {seconds:g} s were not enough"
        return Diagnostic("FW806", text, help="use shorter loops, or fewer and larger tiles")
    if kind == "memory":
        most = "there is" if value is None else f"{value / GB:.3g} GB"
        text = f"the program needs more memory than {most}"
        return Diagnostic("FW806", text, help="use smaller and fewer tiles")
    return Diagnostic("FW806", f"the program could not be run ({value})")
