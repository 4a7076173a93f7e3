"""A kernel that a language model writes for TL code: held to its contract, compiled, judged.

An attempt is a package in its own folder of the record, and is judged there: on the GPU, or under
emulation where there is none. The one that is right then becomes the run's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashwright import stages
from flashwright.author.llm.attempts import Done, Tried, fewest
from flashwright.author.llm.transcript import Lane, was_chosen
from flashwright.build.authored import TranslationByModel, translated_by_model
from flashwright.build.package import OWN
from flashwright.check.budget import in_words as budget_in_words
from flashwright.check.program import Program
from flashwright.folder import keep
from flashwright.gpu import Gpu
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.contract import Contract, contract
from flashwright.measure import race
from flashwright.measure.contest import Contestant
from flashwright.run import Finding, Run, Skipped
from flashwright.speed import KERNEL, Goal, Speed, Stopwatch, in_words

SOURCE = "kernel.cu"


@dataclass(frozen=True)
class Kernel:
    """A kernel that compiles and is not wrong, and the run in which it was judged."""

    made: TranslationByModel
    judged: Run
    slow: Diagnostic | None = None
    """Why it is not as fast as asked for."""
    time: float = 0.0
    """What it takes for what takes the rival 1, where it was timed beside one."""


Pace = Callable[[Run], tuple[float, Diagnostic | None]]
"""The time of a right kernel beside its rival's, and what is to say if that is too long."""


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
) -> Tried[Kernel]:
    """Look at what a model wrote: for the run's TL, or by a contract that knows of none.

    With a `pace` it must be fast as well as right.
    """
    tl = "" if agreed else run.artefacts["code.tl"]
    try:
        made = translated_by_model(program, run.gpu, run.spec, source, tl=tl, agreed=agreed)
    except Failed as failed:
        if all(d.bad_input for d in failed.diagnostics):
            raise  # no compiler, or one that does not work: no attempt can help
        return _wrong(
            [Finding(SOURCE, d) for d in failed.diagnostics], source, tl, {SOURCE: source}
        )
    trial = _trial(run, lane, made)
    if lane.model is None:  # what the judge said is in the record
        taken, told = lane.before["taken"], lane.before["findings"]
        done = Kernel(made, trial)
        spare = done if was_chosen(lane.here) and not taken else None
        return Tried(done if taken else None, told, (), made.files, spare)
    judged = _judged(keep(trial, made.files))
    if not judged.ok:
        return _wrong(judged.failed, source, tl, made.files)
    if pace is None:
        return Tried(Kernel(made, judged), "", (), made.files)
    time, slow = pace(judged)
    done = Kernel(made, judged, slow, time)
    if slow is None:
        return Tried(done, "", (), made.files)
    told = render.for_model([slow], source) + "\n" + in_words(Speed(), judged) + "\n"
    return Tried(None, told, (slow,), made.files, spare=done)


def pace_of(goal: Goal, stopwatch: Stopwatch, rival: Contestant) -> Pace:
    """What a goal comes to."""

    def pace(run: Run) -> tuple[float, Diagnostic | None]:
        raced = stopwatch.against(run, rival)
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


def too_slow(goal: Goal, reached: float, rival: str) -> Diagnostic | None:
    """What is to say of a kernel that is so many times as fast as its rival."""
    if reached >= goal.factor:
        return None
    text = f"right, but {reached:.2f} times as fast as {rival}, and {goal.factor:g} is asked for"
    return Diagnostic("FW829", text)


def fastest(stopwatch: Stopwatch, done: Sequence[Done[Kernel]]) -> int:
    """Of several right kernels: all timed beside each other, where there is a GPU."""
    runs = [one.value.judged for one in done]
    if any(run.gpu_verdict is None for run in runs) or stopwatch.cannot(runs[0]):
        return fewest(done)
    names = [f"candidate {n}" for n in range(1, len(runs) + 1)]
    pairs = zip(names, runs, strict=True)
    raced = stopwatch.race(runs[0].spec, [race.package(n, run.folder) for n, run in pairs])
    if not raced.times:
        return fewest(done)
    first = next(iter(raced.times))
    return names.index(min(raced.times, key=lambda name: raced.ratio(name, first)))


def placed(run: Run, done: Kernel) -> Run:
    """The run with a model's kernel in it, and what was found of it."""
    files = {name: data for name, data in done.made.files.items() if name != "spec.toml"}
    slow = (Finding(SOURCE, done.slow),) if done.slow else ()
    before = tuple(f for f in run.findings if f.file != SOURCE)
    return replace(
        keep(run, files),
        findings=before + done.judged.findings + slow,
        builds={OWN: done.made.built},
        translations={OWN: done.made.translation},
        gpu_verdict=done.judged.gpu_verdict,
        emulated=done.judged.emulated,
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
    )


def _judged(run: Run) -> Run:
    try:
        return stages.verdict(run, _silent)
    except Skipped:  # nobody here can tell: it compiles, and that is all that is known
        return run
    except Failed as failed:
        return run.noting(SOURCE, *failed.diagnostics)


def _silent(done: int, total: int, text: str) -> None:
    """Progress that nobody watches: the attempt has a line of its own."""


def _wrong(findings: Any, source: str, tl: str, files: Any) -> Tried[Kernel]:
    """What is wrong, in the lines of the file that each finding is about."""
    found: tuple[Diagnostic, ...] = tuple(f.diagnostic for f in findings)
    in_tl = [f.diagnostic for f in findings if f.file == "code.tl"]
    in_source = [f.diagnostic for f in findings if f.file != "code.tl"]
    told = render.for_model(in_source, source)
    if in_tl:
        told += "\nIn the lines of the TL:\n" + render.for_model(in_tl, tl)
    return Tried(None, told, found, files)
