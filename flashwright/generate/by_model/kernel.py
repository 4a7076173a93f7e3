"""A kernel that a language model writes for TL code: held to its contract, compiled, judged.

An attempt is a package in its own folder of the record, and is judged there: on the GPU, or under
emulation where there is none. The one that is right then becomes the run's.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashwright.author.llm import extract
from flashwright.author.llm.attempts import Done, Tried, fewest
from flashwright.author.llm.transcript import Lane
from flashwright.build.package import OWN
from flashwright.check.budget import in_words as budget_in_words
from flashwright.files import write
from flashwright.generate import stages
from flashwright.generate.by_model.ask import NOT_THE_MODELS, Authors, ask
from flashwright.generate.by_model.speed import KERNEL, KernelSpeed, SpeedGoal, Stopwatch, in_words
from flashwright.generate.folder import keep
from flashwright.generate.state import Finding, Progress, Run, Skipped, silent
from flashwright.gpu import Gpu
from flashwright.lang import render
from flashwright.lang.codes import MACHINE
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import race
from flashwright.measure.contest import Contestant
from flashwright.measure.race import RaceResult
from flashwright.program.program import Program
from flashwright.untrusted.contract import Contract, contract
from flashwright.untrusted.translation import TranslationByModel, translated_by_model

SOURCE = "kernel.cu"
MEASURED = "measured.json"
"""In the folder of an attempt: the times of it and of its rival. A run that was cut off goes on
with these: the questions that follow are then the ones that were answered."""
_GPU = threading.Lock()  # candidates are written side by side, and judged and timed one by one


@dataclass(frozen=True)
class JudgedKernel:
    """A kernel that compiles and is not wrong, as a run of its own."""

    trial: Run
    slow: Diagnostic | None = None
    """Why it is not as fast as asked for."""
    time: float = 0.0
    """What it takes for what takes the rival 1, where it was timed beside one."""


Pace = Callable[[Run, Lane], tuple[float, Diagnostic | None]]
"""The time of a right kernel beside its rival's, and what is to say if that is too long."""


def kernel(authors: Authors, run: Run, progress: Progress) -> Run:
    """The code as CUDA, compiled and judged, and as fast as asked for."""
    program = run.programs[OWN]
    pace, unknown = _pace(authors, run, progress)
    attempt = partial(attempted, run, program, pace=pace)
    facts = facts_of(program, run.gpu)
    choose = partial(fastest, authors.stopwatch)
    done: JudgedKernel | None
    run, done = ask(authors, run, "translate", extract.cuda, attempt, progress, choose, **facts)
    return run if done is None else taken(run, done).noting(SOURCE, *unknown)


def _pace(
    authors: Authors, run: Run, progress: Progress
) -> tuple[Pace | None, tuple[Diagnostic, ...]]:
    """What a right kernel's time is held against; without a GPU a note that nobody could."""
    if authors.goal is None or authors.asked["translate"].model is None:
        return None, ()
    try:
        if why := authors.stopwatch.cannot(run):
            raise Failed(why)
        progress(0, 1, "making the kernel that it is timed beside")
        rival = authors.stopwatch.rival(authors.goal, run, authors.rival)
    except Failed as failed:
        text = f"how fast the kernel is was not looked at: {failed.diagnostics[0].message}"
        return None, (Diagnostic("FW829", text),)
    return pace_of(authors.goal, authors.stopwatch, rival), ()


def facts_of(program: Program, gpu: Gpu) -> dict[str, str]:
    """What a model is told of the kernel that it writes."""
    agreed = contract(program, gpu)
    return {
        "header": agreed.header,
        "notes": agreed.notes,
        "program": budget_in_words(program, gpu),
    }


def attempted(
    run: Run,
    program: Program,
    source: str,
    lane: Lane,
    *,
    agreed: Contract | None = None,
    pace: Pace | None = None,
) -> Tried[JudgedKernel]:
    """Look at what a model wrote: for the run's TL, or by a contract that knows of none.

    With a `pace` it must be fast as well as right.
    """
    tl = "" if agreed else run.artefacts["code.tl"]
    try:
        made = translated_by_model(program, run.gpu, run.spec, source, tl=tl, agreed=agreed)
    except Failed as failed:
        if all(d.code in MACHINE for d in failed.diagnostics):
            raise  # no compiler, or no room: no attempt can help
        return _wrong(
            [Finding(SOURCE, d) for d in failed.diagnostics], source, tl, {SOURCE: source}
        )
    trial = keep(_trial(run, lane, made), {**made.files, **run.reference})
    if lane.model is None:
        return _recorded(trial, lane, made)
    trial = judged(trial)
    if not trial.ok:
        return _wrong(trial.failed, source, tl, made.files)
    if pace is None:
        return Tried(JudgedKernel(trial), "", (), made.files)
    with _GPU:
        time, slow = pace(trial, lane)
    done = JudgedKernel(trial, slow, time)
    if slow is None:
        return Tried(done, "", (), made.files)
    told = render.for_model([slow], source) + "\n" + in_words(KernelSpeed(), trial) + "\n"
    return Tried(None, told, (slow,), made.files, spare=done)


def _recorded(trial: Run, lane: Lane, made: TranslationByModel) -> Tried[JudgedKernel]:
    """In a replay: what the judge and the clock said is in the record."""
    was, raced = lane.before, times_of(lane)
    done = JudgedKernel(trial, time=_time(raced[-1]) if raced else 0.0)
    right = was["taken"] or raced
    spare = done if right and not was["taken"] else None
    return Tried(done if was["taken"] else None, was["findings"], (), made.files, spare)


def _time(raced: RaceResult) -> float:
    """Of the kernel beside the other."""
    others = [who for who in raced.times if who != KERNEL]
    timed = KERNEL in raced.times and others
    return raced.ratio(KERNEL, others[0]) if timed else math.inf


def times_of(lane: Lane) -> list[RaceResult]:
    """What was measured of an attempt whose reply is one that was there; else nothing."""
    if not lane.again:
        return []
    try:
        return [race.read(one) for one in json.loads((lane.here / MEASURED).read_bytes())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def timed_once(lane: Lane, timing: Callable[[], list[RaceResult]]) -> list[RaceResult]:
    """The times of an attempt: those that there are, or new ones, which are then kept, unless it is
    the other that could not be timed."""
    raced = times_of(lane)
    if not raced:
        raced = timing()
        if set(raced[-1].lost) - {KERNEL}:
            return raced
        write(lane.here / MEASURED, json.dumps([one.record() for one in raced], indent=1) + "\n")
    return raced


def pace_of(goal: SpeedGoal, stopwatch: Stopwatch, rival: Contestant) -> Pace:
    """What a goal comes to."""

    def pace(run: Run, lane: Lane) -> tuple[float, Diagnostic | None]:
        (raced,) = timed_once(lane, lambda: [stopwatch.against(run, rival)])
        if raced.lost:
            lost = "; ".join(f"{who} {why}" for who, why in raced.lost.items())
            return float("inf"), Diagnostic("FW829", f"right, but it could not be timed: {lost}")
        time = raced.ratio(KERNEL, rival.name)
        found = too_slow(goal, 1 / time, rival.name)
        if found is None:
            return time, None
        each = ", ".join(
            f"{figure.seconds * 1e6:.1f} us against {raced.times[rival.name][n].seconds * 1e6:.1f} "
            f"with {n} keys"
            for n, figure in raced.times[KERNEL].items()
        )
        return time, replace(found, message=f"{found.message} ({each})")

    return pace


def too_slow(goal: SpeedGoal, reached: float, rival: str) -> Diagnostic | None:
    """What is to say of a kernel that is so many times as fast as its rival."""
    if reached >= goal.factor:
        return None
    text = f"right, but {reached:.2f} times as fast as {rival}, and {goal.factor:g} is asked for"
    return Diagnostic("FW829", text)


def fastest(stopwatch: Stopwatch, done: Sequence[Done[JudgedKernel]]) -> int:
    """Of several right kernels: all timed beside each other, where there is a GPU."""
    runs = [one.value.trial for one in done]
    if any(run.gpu_verdict is None for run in runs) or stopwatch.cannot(runs[0]):
        return fewest(done)
    names = [f"candidate {n}" for n in range(1, len(runs) + 1)]
    pairs = zip(names, runs, strict=True)
    raced = stopwatch.race(runs[0].spec, [race.package(n, run.folder) for n, run in pairs])
    if not raced.times:
        return fewest(done)
    first = next(iter(raced.times))
    return names.index(min(raced.times, key=lambda name: raced.ratio(name, first)))


def taken(run: Run, done: JudgedKernel) -> Run:
    """The run with a model's kernel in it, and what was found of it."""
    return placed(run, done.trial).noting(SOURCE, *([done.slow] if done.slow else []))


def placed(run: Run, trial: Run) -> Run:
    """The run with the kernel of a trial in the place of its own, if it has one."""
    files = {name: data for name, data in trial.files.items() if name != "spec.toml"}
    changed = {name for name, data in files.items() if run.files.get(name) != data}
    others = tuple(f for f in run.findings if f.file not in changed)
    return replace(
        keep(run, files),
        findings=others + trial.findings,
        written=trial.written,
        programs=trial.programs,
        steps=trial.steps,
        verdicts=trial.verdicts,
        translations=trial.translations,
        builds=trial.builds,
        gpu_verdict=trial.gpu_verdict,
        emulated=trial.emulated,
    )


def _trial(run: Run, lane: Lane, made: TranslationByModel) -> Run:
    """The attempt as a run of its own, in its folder of the record."""
    return replace(
        run,
        folder=lane.here,
        artefacts={},
        binaries={},
        findings=(),
        translations={OWN: made.translation},
        builds={OWN: made.built},
        gpu_verdict=None,
        emulated=None,
    )


def judged(trial: Run) -> Run:
    """An attempt with what the judge says of it, if anybody here can tell."""
    try:
        with _GPU:
            return stages.verdict(trial, silent)
    except Skipped:  # it compiles, and that is all that is known
        return trial
    except Failed as failed:
        if any(d.code in NOT_THE_MODELS for d in failed.diagnostics):
            raise
        return trial.noting(SOURCE, *failed.diagnostics)


def _wrong(findings: Any, source: str, tl: str, files: Any) -> Tried[JudgedKernel]:
    """What is wrong, in the lines of the file that each finding is about."""
    found: tuple[Diagnostic, ...] = tuple(f.diagnostic for f in findings)
    in_tl = [f.diagnostic for f in findings if f.file == "code.tl"]
    in_source = [f.diagnostic for f in findings if f.file != "code.tl"]
    told = render.for_model(in_source, source)
    if in_tl:
        told += "\nIn the lines of the TL:\n" + render.for_model(in_tl, tl)
    return Tried(None, told, found, files)
