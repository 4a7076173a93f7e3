"""Ask, try, tell what was wrong, ask again: how a model comes from a task to something right.

What is right is not decided here: a task brings the function that tries an attempt.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from flashwright.author.llm import prompt
from flashwright.author.llm.budget import Meter, Spent, diagnosis
from flashwright.author.llm.extract import NoCode
from flashwright.author.llm.model import NoAnswer, Question, Reply
from flashwright.author.llm.prompt import Facts, Stage
from flashwright.author.llm.transcript import Lane
from flashwright.lang.diagnostic import Diagnostic

T = TypeVar("T")


@dataclass(frozen=True)
class Tried(Generic[T]):
    """An attempt that was looked at: what it became where it is right, else what is wrong."""

    value: T | None
    findings: str = ""
    """For the model."""
    diagnostics: tuple[Diagnostic, ...] = ()
    """For the user, where it is the last one."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """What was made of it, for the record."""


@dataclass(frozen=True)
class Task(Generic[T]):
    """One stage for a model."""

    stage: Stage
    facts: Facts
    extract: Callable[[Reply], str]
    attempt: Callable[[str, Lane], Tried[T]]
    grammar: str | None = None


@dataclass(eq=False)
class GaveUp(Exception):
    """No attempt was right; why it ended, and what was wrong with the last one."""

    end: Diagnostic
    last: tuple[Diagnostic, ...] = ()
    source: str = ""


def work(task: Task[T], lane: Lane, meter: Meter, stopped: Callable[[], bool] = lambda: False) -> T:
    """One candidate: attempts until one is right, the budget is used up, or it is stopped."""
    first = messages = prompt.first(task.stage, task.facts)
    source, tried = "", Tried[T](None)
    while True:
        if stopped():
            end = Diagnostic("FW913", "another candidate could not go on")
            raise GaveUp(end, tried.diagnostics, source)
        grammar = task.grammar if lane.grammars else None
        try:
            reply = meter.ask(lane, Question(messages, grammar=grammar))
        except (Spent, NoAnswer) as end:
            raise GaveUp(diagnosis(end), tried.diagnostics, source) from None
        try:
            source = task.extract(reply)
        except NoCode as none:
            found = Diagnostic("FW912", none.why)
            source, tried = "", Tried(None, f"{none.why}\n", (found,))
        else:
            tried = task.attempt(source, lane)
        lane.outcome(tried.value is not None, tried.findings, tried.files)
        if tried.value is not None:
            return tried.value
        refused = reply.finish == "refusal"
        history = () if refused else messages
        messages = (
            prompt.repair(task.stage, task.facts, history, tried.findings, source)
            if not refused
            else first
        )


def best(
    task: Task[T], lanes: list[Lane], meters: list[Meter], rank: Callable[[T], float]
) -> tuple[T, Lane]:
    """Several candidates side by side; of those that are right the one that ranks lowest.

    Where none is right, the reason is that of the first.
    """
    done: list[tuple[float, int, T]] = []
    failures: dict[int, GaveUp] = {}
    ended: queue.Queue[tuple[int, T | BaseException]] = queue.Queue()
    stop = threading.Event()

    def one(number: int) -> None:
        try:
            ended.put((number, work(task, lanes[number], meters[number], stop.is_set)))
        except BaseException as error:  # for the one who waits
            ended.put((number, error))

    # Daemons, unlike a pool's: where the user interrupts, nobody waits for a model that is silent.
    for number in range(len(lanes)):
        threading.Thread(target=one, args=(number,), name="candidate", daemon=True).start()
    try:
        for _ in lanes:
            number, result = ended.get()
            if isinstance(result, GaveUp):
                failures[number] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                done.append((rank(result), number, result))
    finally:
        stop.set()  # no further question, whatever it is that ends this
    if not done:
        raise failures[min(failures)]
    _, number, value = min(done, key=lambda entry: entry[:2])
    return value, lanes[number]
