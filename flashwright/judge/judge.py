"""The judge: whether a candidate computes the attention of its spec, and if not, what is wrong.

The candidate runs in a separate process (sandbox/). Problems, oracle and comparison stay in this
one. All problems are tried before an offence is named: which of them fail shows what is wrong.
"""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashwright import files
from flashwright.build import classes, driver
from flashwright.judge import gradients, static
from flashwright.judge.coverage import Coverage
from flashwright.judge.cpu import reference_spread
from flashwright.judge.expected import Expected
from flashwright.judge.form import bounds_of, form_of
from flashwright.judge.offences import offence, once
from flashwright.judge.probes import probe, probed
from flashwright.judge.problems import Problem, coverage, problems
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.judge.tiling import Served, served_by
from flashwright.judge.trial import FAR_BATCHES, MAY_BE_LEFT_OUT, Outcome, Symptom, Trial
from flashwright.judge.verdict import Check, Offence, Picture, Verdict
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.limits import Limits
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec, BadSpec

Progress = Callable[[int, int, str], None]

QUESTIONS = {
    "fp64": "every output agrees with attention in fp64",
    "exactness": "its error is at most 1.5 times that of torch's flash backend",
    "weights": "its weights are right in the mean, the smallest ones too",
    "written": "every element is written: outputs and free memory were full of NaN",
    "repeat": "the same inputs give the same bits, wherever they lie",
    "fresh": "other inputs at the same addresses get an answer of their own",
    "views": "Q, K and V may be views of other strides",
    "mask": "a masked key changes nothing, a visible one does",
    "inputs": "its inputs are as they were, and no output lies in them",
    "guards": "nothing is written beside its tensors",
    "stream": "its work is on the caller's stream, and done when that is",
    "libraries": "no library does its work",
    "instructions": "its matrix instructions multiply and add as exactly as asked",
    "files": "it leaves the judge's files and its own as they are",
}
MAY_VARY = "two runs with the same inputs are both right, and differ by half as much as they may"
"""The question `repeat` where the spec says repeatable = false."""
BACKWARD_QUESTIONS = {
    "fp64": "every gradient agrees with that of attention in fp64, and is 0 for what is masked",
    "views": "Q, K, V, O and dO may be views of other strides",
    "repeat": "two runs give the same bits of dK and dV, and a dQ that differs no more than it may",
}
"""Questions that are others for a backward pass."""
SETTLED = {  # the offences that answer a question with no
    "fp64": ("wrong", "zeros", "nonfinite", "wrong_form", "special_inputs", "special_shapes"),
    "exactness": ("low_precision",),
    "weights": ("approximation",),
    "written": ("unwritten",),
    "repeat": ("not_repeatable",),
    "fresh": ("replay",),
    "mask": ("mask_ignored", "key_ignored"),
    "inputs": ("inputs_changed",),
    "guards": ("out_of_bounds",),
    "stream": ("hidden_work",),
    "libraries": ("library_call",),
    "files": ("tampering",),
}
SHOWN = {
    "cancelling": ("low_precision", "it loses the small terms of a score"),
    "spectrum": ("approximation", "its weights are not those that exp gives"),
}
"""The offence if these inputs fail and normal ones pass. The first kind that fails counts: wrong
scores also make wrong weights."""
FRESH = 3  # problems, beginning with the usual one, that get other inputs at the same addresses


def judge(
    candidate: Candidate,
    spec: AttentionSpec,
    *,
    seed: int | None = None,
    device: str | None = None,
    base: Path | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    limits: Limits | None = None,
    libraries: bool = False,
    progress: Progress | None = None,
    sandbox: Callable[..., Sandbox] = Sandbox,
) -> Verdict:
    """Try a candidate on all problems, or on those of the given lengths.

    `seed` is drawn if none is given. `device` is "cuda" if there is a GPU and PyTorch, else "cpu",
    with NumPy arrays. `base` is the folder that the spec's `reference` is relative to. `libraries`
    allows the candidate to call other libraries. Raises Failed if the candidate cannot be judged
    here; that is no verdict.
    """
    place = choose_device(candidate, device)
    name, arch = _card(candidate, place)
    trial = JudgeRun(
        candidate,
        spec,
        secrets.randbits(31) if seed is None else seed,
        place,
        base,
        limits or Limits(),
        libraries,
        sandbox,
    )
    return trial.verdict(name, arch, lengths, progress or (lambda done, total, text: None))


def choose_device(candidate: Candidate, device: str | None = None) -> str:
    """The device to judge a candidate on. Raises Failed with FW851 if it cannot run there."""
    if device == "cpu" and candidate.kind == "package":
        text = "a kernel package runs on a GPU, not on the CPU"
        hint = "the emulator executes its PTX there: flashwright verify --on cpu"
        raise Failed(Diagnostic("FW851", text, help=hint))
    if device is None and candidate.kind != "package":
        try:
            need_torch()
        except Failed:
            return "cpu"
        return "cuda"
    if device == "cpu":
        return "cpu"
    driver.cards()
    need_torch()
    return "cuda"


def need_torch() -> Any:
    """The torch module. Raises Failed with FW851 without PyTorch or without a GPU it can use."""
    try:
        import torch
    except ImportError:
        text = "running kernels beside the libraries needs PyTorch, which is not installed"
        raise Failed(Diagnostic("FW851", text, help="pip install torch")) from None
    if not torch.cuda.is_available():
        text = "the PyTorch that is installed cannot use this machine's GPU"
        raise Failed(Diagnostic("FW851", text))
    return torch


def _card(candidate: Candidate, device: str) -> tuple[str, str]:
    if device == "cpu":
        return "cpu", ""
    card = driver.cards()[0]
    if candidate.kind == "package":
        classes.read(Path(candidate.where))
        arch = classes.plan_of(Path(candidate.where)).arch
        if not card.takes(arch):
            text = f"the kernel is for {arch}, which {card.name} ({card.arch}) cannot run"
            raise Failed(Diagnostic("FW851", text))
    return card.name, card.arch


@dataclass
class JudgeRun:
    """The state of one judgement: what was asked, what was found, what was noted."""

    candidate: Candidate
    spec: AttentionSpec
    seed: int
    device: str
    base: Path | None
    limits: Limits
    libraries: bool
    sandbox: Callable[..., Sandbox]
    outcomes: list[Outcome] = field(default_factory=list)
    found: list[Offence] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    chosen: Coverage | None = None
    """The lengths chosen from the candidate's tile sizes; None for given lengths."""
    far_tried: bool = False
    """Whether batches with offsets past 2^31 were tried."""
    launched: int = 0
    """How many kernels the candidate has launched so far."""
    unasked: dict[str, str] = field(default_factory=dict)
    """Questions that cannot be asked here, each with the reason."""
    questions: Mapping[str, str] = field(default_factory=lambda: QUESTIONS)
    settled: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SETTLED)

    def verdict(
        self,
        name: str,
        arch: str,
        lengths: Sequence[tuple[int, int]] | None,
        progress: Progress,
    ) -> Verdict:
        """Read the candidate, run all problems, name the offences.

        Raises Failed with FW857 if the candidate cannot do a single problem.
        """
        start = time.monotonic()
        expected = Expected(self.spec, self.device, self.base)
        self.unasked["exactness"] = expected.unable or ""
        if self.spec.backward:
            self.unasked["weights"] = "no gradient shows a single weight"
        if self.spec.reference:
            own = "the spec's own reference gives the outputs, and does not say"
            self.unasked["weights"] = f"{own} which weights there are"
            self.unasked["mask"] = f"{own} which keys are masked"
        before = _digests(self.candidate)
        self._read_candidate()
        try:
            self._run(expected, lengths, progress)
        except Unable as error:
            raise Failed(Diagnostic("FW857", f"{self.candidate.name}: {error}")) from None
        except Ended as ended:
            self.found.append(offence(ended.offence, _end_message(ended), help=_help(ended)))
        if not self.found and not any(o.cases or o.seen for o in self.outcomes):
            text = f"{self.candidate.name} does none of the problems"
            raise Failed(Diagnostic("FW857", "; ".join([text, *self.notes[-1:]])))
        self._count_question("files")
        changed = sorted(n for n, d in _digests(self.candidate).items() if before.get(n) != d)
        if changed:
            self.found.append(offence("tampering", f"it changes {', '.join(changed[:3])}"))
        self.found += _name_offences(self.outcomes)
        if lengths is None and not self.found:
            self._check_each_kernel()
        return Verdict(
            candidate=self.candidate.name,
            device=name,
            arch=arch,
            spec=self.spec,
            seed=self.seed,
            cases=tuple(case for outcome in self.outcomes for case in outcome.cases),
            checks=self._checks(),
            offences=once(self.found),
            library=None if expected.unable else "torch flash",
            unable=expected.unable,
            picture=self._picture(),
            seconds=time.monotonic() - start,
            notes=(*self.notes, *self._variation_notes()),
            unreached=self._unreached(),
        )

    # --- before it runs -----------------------------------------------------------------------

    def _read_candidate(self) -> None:
        if self.candidate.kind == "package":
            self.unasked["libraries"] = "a package has no code but its kernel"
            plan = classes.plan_of(Path(self.candidate.where))
            self.notes += _left_out(self.spec, {t.name for t in plan.tensors if t.written})
            for folder in classes.folders(Path(self.candidate.where)).values():
                why, seen = static.instructions(folder, self.spec)
                if seen:
                    self._count_question("instructions", seen)
                if why:
                    self.found.append(offence("low_precision", why))
            return
        self.unasked["instructions"] = "only a package shows them"
        if self.libraries:
            self.unasked["libraries"] = "it may call libraries"
            return
        named = static.libraries(self.candidate)
        self._count_question("libraries")
        if named:
            self.found.append(offence("library_call", f"its source names {', '.join(named)}"))

    # --- while it runs ------------------------------------------------------------------------

    def _run(
        self,
        expected: Expected,
        lengths: Sequence[tuple[int, int]] | None,
        progress: Progress,
    ) -> None:
        listed = self._problems(lengths)
        total = len(listed) + 1
        progress(0, total, "starting")
        with self.sandbox(
            self.candidate, self.spec, self.device, self.limits, gpu_used=_gpu_memory(self.device)
        ) as running:
            self.notes += running.gaps
            trial = self._trial(running, expected)
            for number, problem in enumerate(listed):
                if self._should_stop(running, number, total):
                    return
                progress(number, total, str(problem))
                try:
                    fresh, far = (
                        self._wants_fresh_inputs(number, problem),
                        self._wants_far_batches(problem, lengths),
                    )
                    self._add_outcome(trial.run(problem, fresh, far))
                except Unable as error:
                    self._note_declined(problem, error)
                self._check_launches(running, problem)
            if self._should_stop(running, len(listed), total):
                return
            if lengths is None and not any(o.seen for o in self.outcomes):
                self._repeat_small(trial, listed)
            if self.spec.reference is None and lengths is None:
                progress(len(listed), total, "which keys it looks at")
                problem = probed(self.spec, self.seed, self._whole_groups)
                try:
                    self._add_outcome(probe(trial, self.spec, problem))
                    self._check_launches(running, listed[0])
                except Unable as error:
                    self._note_declined(problem, error)

    def _repeat_small(self, trial: Trial, listed: Sequence[Problem]) -> None:
        """Call the candidate many times on the smallest problem, and on one of the smaller half
        that the seed draws."""
        some = sorted(
            (p for p in listed if all(p.dims.values())), key=lambda p: math.prod(p.dims.values())
        )
        half = some[1 : (len(some) + 1) // 2]
        chance = np.random.default_rng([self.seed, 2])
        for problem in [*some[:1], *([half[chance.integers(len(half))]] if half else [])]:
            try:
                self._add_outcome(trial.many(problem))
                self._check_launches(trial.sandbox, problem)
            except Unable as error:
                self._note_declined(problem, error)

    def _trial(self, running: Sandbox, expected: Expected) -> Trial:
        spread = spread_of(self.kernels, self.spec, expected.reference)
        return Trial(running, form_of(self.candidate, self.spec, spread), self.spec, expected)

    @functools.cached_property
    def kernels(self) -> tuple[Served, ...]:
        """The kernels of a package with their tilings; none for a callable."""
        return served_by(Path(self.candidate.where)) if self.candidate.kind == "package" else ()

    def _problems(self, lengths: Sequence[tuple[int, int]] | None) -> list[Problem]:
        if lengths is None:
            self.chosen = coverage(self.spec, self.device, self.kernels)
        given = (self.spec, self.seed, self.device, lengths, bounds_of(self.candidate))
        return problems(*given, self.chosen, self._whole_groups)

    @property
    def _whole_groups(self) -> bool:
        """Whether the kernels are for one number of heads that share a kv head."""
        return any(kernel.tiling.grouped for kernel in self.kernels)

    def _wants_fresh_inputs(self, number: int, problem: Problem) -> bool:
        """Whether a problem gets other inputs at the same addresses."""
        return number < FRESH

    def _wants_far_batches(self, problem: Problem, lengths: object) -> bool:
        """Whether this problem gets batches with offsets past 2^31: one problem of a trial does."""
        plain = self.spec.reference is None and self.spec.batch is None
        known = plain and self.spec.dtype != "fp8"
        enough = known and problem.dims.get("batch", 1) == FAR_BATCHES
        wanted = lengths is None and enough and not self.far_tried
        self.far_tried |= wanted
        return wanted

    def _check_each_kernel(self) -> None:
        """Report each kernel of a package that ran no problem: an untried one may be wrong."""
        if self.candidate.kind != "package":
            return
        folder = Path(self.candidate.where)
        tried = {classes.serving(folder, o.problem.dims) for o in self.outcomes if o.cases}
        for name, place in classes.folders(folder).items():
            rules = [r for r in classes.read(folder).rules if r.kernel == name]
            if rules and place.resolve() not in {p.resolve() for p in tried}:
                text = f"its kernel {name!r} did none of the problems: nothing is known of it"
                self.found.append(offence("untried", text))

    def _unreached(self) -> tuple[str, ...]:
        """The goals that an accepted candidate was not tried with; none for a rejected one."""
        if self.chosen is None or self.found:
            return ()
        tried = [o.problem.dims for o in self.outcomes if o.cases]
        return tuple(self.chosen.unreached(tried, "not tried before the time was up"))

    def _should_stop(self, running: Sandbox, done: int, total: int) -> bool:
        """Whether to stop before the next problem. On a GPU all problems run."""
        return False

    def _note_declined(self, problem: Problem, error: Unable) -> None:
        """Note a problem that a library does not support; for a kernel it is an offence."""
        if self.libraries:
            self.notes.append(f"it does not take {problem}: {error}")
        else:
            self.found.append(offence("raises", f"it does not take {problem}: {error}"))

    def _add_outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.notes += [note for note in outcome.notes if note not in self.notes]
        for question, times in outcome.asked.items():
            self._count_question(question, times)

    def _count_question(self, question: str, times: int = 1) -> None:
        self.asked[question] = self.asked.get(question, 0) + times

    def _check_launches(self, running: Sandbox, problem: Problem) -> None:
        """Report a library's kernels, if they are not allowed, and calls without any kernel."""
        if self.libraries or self.candidate.kind == "package" or self.found:
            return
        seen = running.ran()
        if isinstance(seen, str):
            note = f"which kernels ran is not known: {seen}"
            self.notes += [note] if note not in self.notes else []
            return
        self._count_question("libraries")
        count = sum(launched.times for launched in seen)
        if count == self.launched and all(problem.dims.values()):
            text = f"it gives outputs, and no kernel was launched ({problem})"
            self.found.append(offence("tampering", text))
        self.launched = count
        theirs = static.of_libraries(seen)
        if theirs:
            text = f"{theirs.name[:200]}, which a library brings, ran {theirs.times} times"
            self.found.append(offence("library_call", f"{text} ({problem})"))

    # --- what is told -------------------------------------------------------------------------

    def _variation_notes(self) -> Iterable[str]:
        """A note on how far two runs differed, if the spec allows it."""
        if not self.spec.repeatable:
            most = max((outcome.varied for outcome in self.outcomes), default=0.0)
            why = "dQ may be summed in any order" if self.spec.backward else "repeatable = false"
            text = f"the spec says {why}: two runs with the same inputs differed"
            yield f"{text} by at most {most:.1e} of an output's RMS"

    def _checks(self) -> tuple[Check, ...]:
        found = {o.name for o in self.found}
        checks = []
        for name, question in self.questions.items():
            times = self.asked.get(name, 0)
            failed = bool(found & set(self.settled.get(name, ())))
            failed |= any(name in o.failed for o in self.outcomes)
            if name == "fp64":
                failed |= any(not c.comparison.ok for o in self.outcomes for c in o.cases)
            passed = False if failed else True if times else None
            note = "" if passed is not None else self.unasked.get(name) or "not asked in this trial"
            checks.append(Check(name, self._in_words(name, question), passed, times, note))
        return tuple(checks)

    def _in_words(self, name: str, question: str) -> str:
        """A question as it is asked for this spec."""
        if name == "repeat" and self.spec.repeatable:
            return question
        if self.spec.backward:
            return BACKWARD_QUESTIONS.get(name, question)
        return MAY_VARY if name == "repeat" else question

    def _picture(self) -> Picture | None:
        drawn = [o.picture for o in self.outcomes if o.picture and o.problem.kind == "normal"]
        return max(drawn, key=lambda p: p.dims["q_len"] * p.dims["kv_len"], default=None)


def _left_out(spec: AttentionSpec, written: set[str]) -> Iterable[str]:
    """A note on each output that the spec has and a package does not write."""
    if spec.reference is not None:
        return
    if not spec.backward and spec.lse and "LSE" not in written:
        yield "it writes no LSE, which the spec has: only O is compared"
    for name in [f"d{name}" for name in gradients.names(spec)] if spec.backward else ():
        if name in MAY_BE_LEFT_OUT and name not in written:
            yield f"it writes no {name}, which the spec has"


def spread_of(
    kernels: Sequence[Served], spec: AttentionSpec, reference: ReferenceProcess | None
) -> float | None:
    """The spread of a package's scores, measured by running its TL, for a spec with a reference."""
    program = next((k.program for k in kernels if k.program is not None), None)
    if reference is None or program is None:
        return None
    try:
        return reference_spread(program, spec, reference)
    except BadSpec as error:  # the user's own reference cannot be used
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None


def _gpu_memory(device: str) -> Callable[[], tuple[int, int]] | None:
    if device == "cpu":
        return None
    found: Callable[[], tuple[int, int]] = need_torch().cuda.mem_get_info
    return found


def _end_message(ended: Ended) -> str:
    return ended.message or "it gave no answer"


def _help(ended: Ended) -> str | None:
    lines = [line for line in ended.log.splitlines() if line.strip()]
    return "the end of its output:\n" + "\n".join(lines[-6:]) if lines else None


def _digests(candidate: Candidate) -> dict[str, str]:
    """Digests of the files that a candidate must not change: the judge's and its own."""
    ours = Path(__file__).parents[1]
    watched = [p for part in ("judge", "sandbox", "measure") for p in (ours / part).rglob("*.py")]
    where = Path(candidate.where)
    if candidate.kind == "package":
        watched += [p for p in where.rglob("*") if p.is_file()] if where.is_dir() else []
    elif where.is_file():
        watched.append(where)
    found = {}
    for path in watched:
        name = (
            path.relative_to(ours.parent)
            if path.is_relative_to(ours)
            else path.relative_to(where.parent)
        )
        try:
            found[str(name)] = files.sha256(path.read_bytes())
        except OSError:
            found[str(name)] = ""
    return found


# --- naming -----------------------------------------------------------------------------------


def _name_offences(outcomes: Sequence[Outcome]) -> Iterable[Offence]:
    """The offences that explain the symptoms, the most specific first."""
    seen = [s for outcome in outcomes for s in outcome.seen]
    vague = [s for s in seen if s.name in ("wrong", "inexact", "nonfinite", "zeros")]
    direct = [s for s in seen if s not in vague]
    explained = [s.problem for s in direct]
    vague = [s for s in vague if s.problem not in explained]
    usual = [s for s in vague if s.problem.usual and s.problem.kind == "normal"]
    fine = any(
        o.problem.usual and o.problem.kind == "normal" and o.cases and _passes(o) for o in outcomes
    )
    # The plainest problem that fails decides the name, whatever other inputs show.
    telling = () if fine else tuple(_plain_offence(usual or vague))
    yield from (o for o in telling if o.name != "wrong")
    yield from (offence(s.name, str(s)) for s in direct if s.name != "low_precision")
    yield from (o for o in telling if o.name == "wrong")
    if fine:
        yield from _special_case_offences(vague)
    # Last: a wrong kernel looks merely inexact on problems where its mistake has little weight.
    yield from (offence(s.name, str(s)) for s in direct if s.name == "low_precision")


def _passes(outcome: Outcome) -> bool:
    """Whether an outcome shows nothing wrong beyond low precision."""
    return all(s.name == "low_precision" for s in outcome.seen)


def _plain_offence(vague: Sequence[Symptom]) -> Iterable[Offence]:
    names = [s.name for s in vague]
    for name in ("zeros", "nonfinite", "wrong", "inexact"):
        if name in names:
            text = str(vague[names.index(name)])
            yield offence("low_precision" if name == "inexact" else name, text)
            return


def _special_case_offences(vague: Sequence[Symptom]) -> Iterable[Offence]:
    """The offences of a candidate that is right on the usual shape with normal inputs."""
    close = [s for s in vague if s.problem.usual and s.name in ("wrong", "inexact")]
    shown = {s.problem.kind: s for s in reversed(close) if s.problem.kind in SHOWN}
    for kind in [kind for kind in SHOWN if kind in shown][:1]:
        yield offence(SHOWN[kind][0], f"{SHOWN[kind][1]}: {shown[kind]}")
    vague = [s for s in vague if s.problem.kind not in shown]
    plain = [s for s in vague if s.problem.kind == "normal"]
    other = [s for s in vague if s.problem.usual and s.problem.kind != "normal"]
    if plain:
        yield offence("special_shapes", f"it is right on the usual shape, but here {plain[0]}")
    if other or (vague and not plain):
        kinds = ", ".join(dict.fromkeys(s.problem.kind for s in other or vague))
        text = f"it is right for normal inputs, but not for {kinds}: {(other or vague)[0]}"
        yield offence("special_inputs", text)
