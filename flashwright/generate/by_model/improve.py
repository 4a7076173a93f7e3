"""The stage "improve": iterations in which a model makes a right kernel faster.

It gets the kernel (or the TL, where our translator makes the kernel of it), what was measured of
it and what bounds it. What it writes has to pass all that the first one passed, and then to be
faster, timed in turns with the one that it would replace; only then it takes its place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flashwright.author.llm import extract, prompt
from flashwright.author.llm.attempts import Tried
from flashwright.author.llm.budget import Spent, diagnosis
from flashwright.author.llm.extract import NoCode
from flashwright.author.llm.model import Message, NoAnswer, Question, Reply
from flashwright.author.llm.prompt import Facts
from flashwright.author.llm.transcript import IMPROVE, Lane
from flashwright.build.package import OWN
from flashwright.files import sha256, write
from flashwright.generate.by_model.ask import Authors, cost_of, facts_for, meter_for, waits
from flashwright.generate.by_model.kernel import (
    SOURCE,
    attempted,
    facts_of,
    placed,
    timed_once,
    too_slow,
)
from flashwright.generate.by_model.speed import (
    BEFORE,
    KERNEL,
    KernelSpeed,
    SpeedGoal,
    Stopwatch,
    in_words,
    measured,
)
from flashwright.generate.by_model.tl import try_whole
from flashwright.generate.state import Progress, Run, Skipped
from flashwright.lang import render
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.report import notes
from flashwright.measure import race
from flashwright.measure.race import CERTAIN, LEAST, RaceResult

BEGIN = "speed.json"
"""In the record: how fast the kernel was before the first round."""
NO_MORE = "it sees nothing better: it wrote the program that is there"


def improve(authors: Authors, run: Run, progress: Progress) -> Run:
    """Iterate as often as the budget allows. Returns the run with the fastest right kernel."""
    asked = authors.asked[IMPROVE]
    if run.built is None:
        raise Skipped(Diagnostic("FW851", "there is no compiled kernel to make faster"))
    here = run.gpu_verdict is not None and authors.stopwatch.cannot(run) is None
    if asked.model is not None and not here:
        raise Skipped(_not_here(authors.stopwatch, run))
    try:
        begin = _begin(authors, run, progress)
    except Failed as failed:
        raise Skipped(*failed.diagnostics) from None
    lane = authors.transcript.lane(IMPROVE, 1, asked.model)
    meter = meter_for(asked, waits(lane, asked, progress))
    iterations = _Iterations(authors, run, begin, lane)
    while not iterations.ended:
        progress(lane.number, asked.budget.attempts, f"asking {asked.name}")
        try:
            reply = meter.ask(lane, Question(iterations.messages))
        except (Spent, NoAnswer) as end:
            if not iterations.told and asked.model is not None:
                raise Skipped(diagnosis(end)) from None
            iterations.ended = str(end)
            break
        try:
            said = iterations.look(reply)
        except Failed as failed:  # the machine's trouble: what is right stays as it is
            iterations.ended = failed.diagnostics[0].message
            break
        progress(lane.number, asked.budget.attempts, f"round {lane.number}: {said}")
    whole = iterations.ended == NO_MORE or len(iterations.told) >= asked.budget.attempts
    told = {**cost_of(asked, IMPROVE, [lane], [meter]), **iterations.record(begin), "whole": whole}
    run = _still_slow(authors.goal, iterations.speed, iterations.run)
    return replace(run, asked={**run.asked, IMPROVE: told})


def _begin(authors: Authors, run: Run, progress: Progress) -> KernelSpeed:
    """The speed that the rounds begin with, measured once for a kernel, and not in a replay."""
    path, kernel = authors.transcript.folder / BEGIN, sha256(run.artefacts[SOURCE])
    try:
        told = json.loads(path.read_bytes())
        if told["kernel"] == kernel:
            return KernelSpeed.of(race.read(told))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # not measured yet
    if authors.asked[IMPROVE].model is None:
        return KernelSpeed()
    progress(
        0, authors.asked[IMPROVE].budget.attempts, "measuring the kernel, and others beside it"
    )
    raced = measured(authors.stopwatch, run, authors.rival, authors.goal)
    write(path, json.dumps({"kernel": kernel, **raced.record()}, indent=1) + "\n")
    return KernelSpeed.of(raced)


def _still_slow(goal: SpeedGoal | None, speed: KernelSpeed, run: Run) -> Run:
    """The run with what is to say now of a kernel that was to be as fast as another."""
    if goal is None or goal.rival not in speed.others:
        return run
    found = too_slow(goal, speed.others[goal.rival], goal.rival)
    others = tuple(f for f in run.findings if f.diagnostic.code != "FW829")
    return replace(run, findings=others).noting(SOURCE, *([found] if found else []))


def _not_here(stopwatch: Stopwatch, run: Run) -> Diagnostic:
    """Why nothing can be made faster here: what is not measured is not faster."""
    found = stopwatch.cannot(run)
    if found is None:
        return Diagnostic("FW851", "the kernel was not run on a GPU, so nothing was measured")
    return replace(found, message=f"nothing can be measured here: {found.message}")


@dataclass(frozen=True)
class Iteration:
    """The result of one iteration."""

    attempt: str
    kept: bool
    why: str


class _Iterations:
    """The kernel as it is now, what was said of it, and what has been tried."""

    def __init__(self, authors: Authors, run: Run, speed: KernelSpeed, lane: Lane) -> None:
        self.authors, self.run, self.speed, self.lane = authors, run, speed, lane
        self.told: list[Iteration] = []
        self.lines: list[str] = []
        """The same for the model, each with the idea in its own words."""
        self.ended = ""
        self.cuda = "translate" in authors.asked
        self.facts = self._facts()
        self.messages: tuple[Message, ...] = prompt.first("improve", self.facts)

    def _facts(self) -> Facts:
        run = self.run
        more = facts_of(run.programs[OWN], run.gpu)
        if self.cuda:
            more["kernel"] = run.artefacts[SOURCE]
        else:
            more["schedule"] = _schedule(run)
        tried = tuple(self.lines)
        return facts_for(self.authors, run, speed=in_words(self.speed, run), tried=tried, **more)

    @property
    def text(self) -> str:
        """The program that is to become faster."""
        return self.run.artefacts[SOURCE if self.cuda else "code.tl"]

    def look(self, reply: Reply) -> str:
        """Take a reply, or note why not; what became of it, in words."""
        try:
            source = (extract.cuda if self.cuda else extract.tl)(reply)
        except NoCode as none:
            return self._not_kept(none.why, Tried(None, f"{none.why}\n"), "", reply)
        if source.strip() == self.text.strip():
            self.ended = NO_MORE
            return self._not_kept(NO_MORE, Tried(None, f"{NO_MORE}\n"), source, reply)
        look = partial(_cuda, self.run) if self.cuda else partial(_tl, self.run)
        tried = look(source, self.lane)
        if tried.value is None:
            return self._not_kept(f"not right: {_first(tried.findings)}", tried, source, reply)
        return self._measured(tried, source, reply)

    def _measured(self, tried: Tried[Run], source: str, reply: Reply) -> str:
        """A right kernel beside the one that it would replace."""
        run = tried.value
        assert run is not None
        raced = timed_once(self.lane, lambda: self.authors.stopwatch.twice(run, self.run))
        if BEFORE in raced[-1].lost:  # no fault of the new one
            text = f"{BEFORE} cannot be timed any more: {raced[-1].lost[BEFORE]}"
            raise Failed(Diagnostic("FW852", text))
        why = compared(raced)
        won = not raced[-1].lost and len(raced) > 1 and raced[-1].faster(KERNEL, BEFORE)
        if won:
            return self._keep(tried, why, self.speed.after(raced[-1]), reply)
        there = KERNEL in raced[-1].times
        now = in_words(KernelSpeed(raced[-1].times[KERNEL]), run) if there else ""
        told = render.for_model([Diagnostic("FW829", why)], source) + f"\n{now}\n"
        return self._not_kept(why, replace(tried, value=None, findings=told), source, reply, there)

    def _note(self, kept: bool, why: str, reply: Reply) -> None:
        self.told.append(Iteration(self.lane.here.name, kept, why))
        idea = prompt.brief(extract.without_thoughts(reply.text))
        said = f"; the idea was: {idea}" if idea else ""
        self.lines.append(f"{'kept' if kept else 'not kept'}: {prompt.brief(why)}{said}")

    def _keep(self, tried: Tried[Run], why: str, speed: KernelSpeed, reply: Reply) -> str:
        assert tried.value is not None
        self.lane.outcome(True, "", tried.files)
        self._note(True, why, reply)
        self.run, self.speed = placed(self.run, tried.value), speed
        self.facts = self._facts()
        self.messages = prompt.first("improve", self.facts)
        return why

    def _not_kept(
        self, why: str, tried: Tried[Run], source: str, reply: Reply, right: bool = False
    ) -> str:
        self.lane.outcome(False, tried.findings, tried.files)
        self.facts = self._facts()  # with the rounds before this one, which is told in full
        self._note(False, why, reply)
        self.messages = first = prompt.first("improve", self.facts)
        if reply.finish != "refusal":
            told = tried.findings
            self.messages = prompt.repair("improve", self.facts, first, told, source, right=right)
        return why

    def record(self, begin: KernelSpeed) -> dict[str, Any]:
        """The iterations as data for result.json."""
        return {
            "rounds": [vars(one) for one in self.told],
            "ended": self.ended,
            "before": _figures(begin),
            "after": _figures(self.speed),
        }


def _schedule(run: Run) -> str:
    """The path that the translator takes with the program, and its notes, for the model."""
    made, program = run.translation, run.program
    if made is None or made.report is None or program is None:
        return ""
    tl = run.artefacts["code.tl"]
    said = render.for_model(notes(made.report, tl, program.tree), tl)
    return f"{made.report.in_words()}\n{said}"


def _first(findings: str) -> str:
    """The message of the first finding as the model was told it: all that a replay has."""
    found = re.match(r"1\. \w+ FW\d{3}(?: on line \d+)?: (.*)", findings)
    return found[1] if found else prompt.brief(findings)


def _figures(speed: KernelSpeed) -> dict[str, Any]:
    times = {str(n): {"seconds": f.seconds, "tflops": f.tflops} for n, f in speed.times.items()}
    return {"times": times, "times_as_fast_as": dict(speed.others)}


def compared(raced: list[RaceResult]) -> str:
    """What a race, or two, say of a right kernel and the one that it would replace."""
    last = raced[-1]
    if last.lost:
        return "; ".join(f"{who} could not be timed: {why}" for who, why in last.lost.items())
    change = 1 / last.ratio(KERNEL, BEFORE) - 1
    noise = CERTAIN * last.noise(KERNEL, BEFORE)
    if len(raced) > 1 and last.faster(KERNEL, BEFORE):
        return f"right, and {100 * change:.1f} % faster (noise {100 * noise:.1f} %)"
    if change < -LEAST:
        return f"right, but {-100 * change:.1f} % slower than {BEFORE}"
    again = " when timed again" if len(raced) > 1 else ""
    least = f"it takes {100 * max(LEAST, noise):.1f} % to tell"
    return f"right, but not faster than {BEFORE}{again}: {100 * change:+.1f} %, and {least}"


# --- one attempt ------------------------------------------------------------------------------


def _cuda(run: Run, source: str, lane: Lane) -> Tried[Run]:
    """CUDA that a model wrote: screened, held to its contract, compiled and judged."""
    tried = attempted(run, run.programs[OWN], source, lane)
    done = tried.value or tried.spare  # in a replay: right, and not faster
    return Tried(done.trial if done else None, tried.findings, tried.diagnostics, tried.files)


def _tl(run: Run, source: str, lane: Lane) -> Tried[Run]:
    """TL that a model wrote: checked, run on the CPU, translated, compiled and judged."""
    tried = try_whole(run, source, lane)
    if tried.value is not None and tried.value.trial is None:
        return Tried(None, "nobody could compile it here\n", (), tried.files)
    trial = tried.value.trial if tried.value else None
    return Tried(trial, tried.findings, tried.diagnostics, tried.files)
