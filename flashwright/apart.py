"""A function in a process of its own, with limits: for work on what a model has written.

TL that passes the grammar may still ask for more steps or memory than there is. Where the process
does not come to an end, it is ended; whatever happens to it, the caller goes on.
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

from flashwright.lang.diagnostic import Diagnostic, Failed

GB = 1 << 30
T = TypeVar("T")
Answer = tuple[str, Any]
_LATE: Answer = ("late", None)
_GONE: Answer = ("gone", None)


def call(function: Callable[..., T], *arguments: Any, seconds: float, memory: int) -> T:
    """What the function returns; Failed where it raises that, or takes more than it may.

    The function is a module's own, and what goes in and out can be pickled.
    """
    context = multiprocessing.get_context("spawn")  # a fork would inherit threads and their locks
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, memory, function, arguments), daemon=True)
    with _uninterrupted():
        process.start()
    there.close()
    try:
        answered = here.poll(seconds)
        kind: str
        value: Any
        kind, value = here.recv() if answered else _LATE
    except EOFError:  # ended by the system, most likely for its memory
        kind, value = _GONE
    finally:
        here.close()
        _end(process)
    if kind == "done":
        done: T = value
        return done
    if kind == "failed":
        raise Failed(*value)
    raise Failed(_ended(kind, value, seconds, memory))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """What is started here hears no Ctrl-C, which a terminal sends to all: its end is our matter,
    and a traceback of its own is nobody's."""
    resource_tracker.ensure_running()  # the first start of a process would, and lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Where the caller is killed, nobody is left to end this process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(answer: Connection, memory: int, function: Callable[..., Any], arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        answer.send(("done", function(*arguments)))
    except Failed as failed:
        answer.send(("failed", failed.diagnostics))
    except (MemoryError, RecursionError) as error:
        answer.send(("gone", type(error).__name__))
    except Exception as error:  # ours, not the program's: say so instead of a traceback
        answer.send(("broken", f"{type(error).__name__}: {error}"))


def _end(process: multiprocessing.process.BaseProcess) -> None:
    process.join(0.2)
    if process.is_alive():
        process.kill()
    with contextlib.suppress(OSError, ValueError):
        process.join()


def _ended(kind: str, value: Any, seconds: float, memory: int) -> Diagnostic:
    if kind == "late":
        text = f"the program does not come to an end: {seconds:g} s were not enough"
        return Diagnostic("FW806", text, help="loops over less, or fewer and larger tiles")
    if kind == "gone":
        text = f"the program needs more than {memory / GB:g} GB of memory"
        return Diagnostic("FW806", text, help="use smaller tiles, and fewer of them")
    return Diagnostic("FW806", f"the program could not be run ({value})")
