"""Ask, try, tell what was wrong, ask again: how a model comes from a task to something right.

What is right is not decided here: a task brings the function that tries an attempt.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from flashwright.author.llm import prompt
from flashwright.author.llm.budget import Meter, Spent, diagnosis
from flashwright.author.llm.extract import NoCode
from flashwright.author.llm.model import NoAnswer, Question, Reply
from flashwright.author.llm.prompt import Facts, Stage
from flashwright.author.llm.transcript import Lane, mark_chosen, was_chosen
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
    spare: T | None = None
    """What it became where it is right, and not yet good enough: kept if nothing better comes."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """What a candidate came to."""

    value: T
    attempts: int
    """It took so many."""
    folder: Path
    """Of the attempt that it is, in the record."""


@dataclass(frozen=True)
class Task(Generic[T]):
    """One stage for a model."""

    stage: Stage
    facts: Facts
    extract: Callable[[Reply], str]
    attempt: Callable[[str, Lane], Tried[T]]
    grammar: str | None = None
    rank: Callable[[T], float] = lambda value: 0.0
    """Of what is right and not good enough, the least is kept."""


@dataclass(eq=False)
class GaveUp(Exception):
    """No attempt was right; why it ended, and what was wrong with the last one."""

    end: Diagnostic
    last: tuple[Diagnostic, ...] = ()
    source: str = ""


def work(
    task: Task[T], lane: Lane, meter: Meter, stopped: Callable[[], bool] = lambda: False
) -> Done[T]:
    """One candidate: attempts until one is right, the budget is used up, or it is stopped."""
    first = messages = prompt.first(task.stage, task.facts)
    source, tried = "", Tried[T](None)
    spares: list[Done[T]] = []
    earlier: list[str] = []
    while True:
        if stopped():
            end = Diagnostic("FW913", "another candidate could not go on")
            raise GaveUp(end, tried.diagnostics, source)
        grammar = task.grammar if lane.grammars else None
        try:
            reply = meter.ask(lane, Question(messages, grammar=grammar))
        except (Spent, NoAnswer) as end:
            if spares:
                return min(spares, key=lambda done: task.rank(done.value))
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
            return Done(tried.value, lane.number, lane.here)
        right = tried.spare is not None
        if tried.spare is not None:
            spares.append(Done(tried.spare, lane.number, lane.here))
        messages = first
        if reply.finish != "refusal":
            told = tried.findings
            messages = prompt.repair(
                task.stage, task.facts, first, told, source, right=right, earlier=earlier
            )
        earlier.append(tried.findings)


def fewest(done: Sequence[Done[T]]) -> int:
    """The choice where nothing else is known: who needed the fewest attempts."""
    return min(range(len(done)), key=lambda n: done[n].attempts)


def best(
    task: Task[T],
    lanes: list[Lane],
    meters: list[Meter],
    choose: Callable[[Sequence[Done[T]]], int] = fewest,
) -> T:
    """Several candidates side by side; of those that are right the one that is chosen.

    Which it is stands in the record: a replay takes the same. Where none is right, the reason is
    that of the first.
    """
    done: dict[int, Done[T]] = {}
    failures: dict[int, GaveUp] = {}
    ended: queue.Queue[tuple[int, Done[T] | BaseException]] = queue.Queue()
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
                done[number] = result
    finally:
        stop.set()  # no further question, whatever it is that ends this
    if not done:
        raise failures[min(failures)]
    every = [done[number] for number in sorted(done)]
    recorded = [n for n, one in enumerate(every) if was_chosen(one.folder)]
    again = bool(recorded) and lanes[0].model is None
    taken = every[recorded[0] if again else choose(every) if len(every) > 1 else 0]
    mark_chosen(taken.folder)
    return taken.value
