"""The trial of a candidate on one problem: several calls, and what each shows from outside.

first     the inputs in guarded memory, outputs and free memory full of NaN
again     the same at other addresses, on a busy stream that gets its inputs late: the same bits,
          or with repeatable = false, the same up to a part of the allowed error
alone     a package without its optional outputs: the same bits
viewed    inputs that are not contiguous: the right answer
fresh     other inputs at the first addresses: their own right answer
many      many calls on one problem: the right answer after the last
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flashwright.judge import oracle, sequences
from flashwright.judge.answer import Answer, compare, placeholders, variation
from flashwright.judge.expected import Expected, error_map
from flashwright.judge.form import Form, Shapes
from flashwright.judge.gradients import stored_as
from flashwright.judge.problems import Problem
from flashwright.judge.verdict import Case, Picture
from flashwright.sandbox.candidate import Unable
from flashwright.sandbox.layout import FAR, VIEWED
from flashwright.sandbox.process import Called, Ended, Output, Sandbox
from flashwright.sandbox.tensors import Array, bits
from flashwright.spec import AttentionSpec

MOST = 1.5  # the largest allowed ratio of a candidate's error to the library's
SLACK = 0.05  # allowed units of roundoff beside it: at length 1 the library's error is 0
SLACK_OTHER = 1.0  # where the library computes another attention: without sinks it weighs by 1 at
# length 1, and without slopes other gradients cancel than with them
CLOSE = 0.1  # up to this relative RMS error an output counts as inexact, above it as wrong
MAY_BE_LEFT_OUT = ("LSE", "dSlopes", "dSink")
"""Expected outputs that a candidate need not give. The verdict's notes report a missing one."""
PATIENCE = 0.2  # seconds to wait for writes by a thread that outlives the call
FEW_CALLS, MANY_CALLS, MANY_SECONDS = 20, 1000, 0.5
"""Back-to-back calls: at least FEW_CALLS, then as many as fit in MANY_SECONDS."""
VIEWS = "views"
FAR_BATCHES = 3
FAR_BYTES = FAR_BATCHES * FAR * 2
"""Memory of the batches with offsets past 2^31, for 16-bit elements."""
COMPARED = ("O", "dQ", "dK", "dV")
"""The outputs that the library has."""
PICTURE = 64  # the least number of queries for an error map


@dataclass(frozen=True)
class Symptom:
    """One thing found wrong, by an offence's name, or `inexact`, which judge.py names later."""

    name: str
    message: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.message} ({self.problem})"


@dataclass
class Outcome:
    """The result of one problem."""

    problem: Problem
    cases: list[Case] = field(default_factory=list)
    seen: list[Symptom] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    """How often each question was asked."""
    picture: Picture | None = None
    notes: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    """Questions that failed on this problem, beside those that the offence's name implies."""
    varied: float = 0.0
    """How far two runs with the same inputs differed, if the spec lets them."""

    def blame(self, name: str, message: str) -> None:
        """Record a symptom under an offence's name."""
        self.seen.append(Symptom(name, message, self.problem))

    def ask(self, *names: str) -> None:
        """Count these questions as asked once more."""
        for name in names:
            self.asked[name] = self.asked.get(name, 0) + 1


@dataclass
class Trial:
    """A candidate in its sandbox, its form, its spec and the oracle."""

    sandbox: Sandbox
    form: Form
    spec: AttentionSpec
    expected: Expected
    differs: str = "the same inputs give other bits when run again"
    views: bool = True
    """Whether the sandbox supports inputs that are not contiguous."""

    def run(self, problem: Problem, fresh: bool = False, far: bool = False) -> Outcome:
        """Try one problem. Raises Ended if the candidate gives no answer.

        `fresh` adds calls with other inputs at the same addresses and with views; `far` adds
        batches with offsets past 2^31.
        """
        outcome = Outcome(problem)
        made = self.inputs(problem)
        given, sizes = self.form.taken(made), self.form.dims(problem)
        if self.expected.reference is not None:  # only the reference knows the outputs' shapes
            expected = self.expected.outputs(made, problem.dims)
        else:
            expected = placeholders(self.spec, made)
        shapes = self.form.outputs(problem, expected)
        # The candidate runs before the oracle: no memory, not even freed memory, has the answer.
        first = self.sandbox.call(given, shapes, sizes, patience=PATIENCE if fresh else 0.0)
        self._check_surroundings(outcome, first)
        if self.expected.reference is None:
            expected = self.expected.outputs(made, problem.dims)
        right = self._compare(outcome, first, expected)
        if not first.outputs or not right:
            self._check_reads_beside(outcome, first, given, shapes, sizes)
            return outcome
        again = self.sandbox.call(given, shapes, sizes, place=1, ahead=True)
        right = self.spec.repeatable or self._is_right_by_itself(outcome, again, expected)
        self._run_again(outcome, first, again, given, shapes, sizes, right)
        if self.form.optional and len(shapes) > 1:
            alone = self.sandbox.call(given, dict([next(iter(shapes.items()))]), sizes)
            outcome.ask("repeat")
            if self.varies(outcome, alone, first):
                outcome.blame("not_repeatable", "without its other outputs it gives other bits")
        for names in _viewed_names(problem, given) if fresh and self.views else ():
            if not outcome.seen:
                self._run_viewed(outcome, given, expected, shapes, sizes, names)
        if far and self.views and not outcome.seen:
            self._run_viewed(outcome, given, expected, shapes, sizes, far=True)
        if fresh and not outcome.seen:
            self._run_fresh(outcome, first, shapes, sizes)
        return outcome

    def inputs(self, problem: Problem) -> dict[str, Array]:
        """The inputs of a problem, for the oracle."""
        made = self.form.inputs(problem, self.expected.reference)
        return self.expected.inputs(made, problem.dims, problem.seed)

    def many(self, problem: Problem) -> Outcome:
        """Many calls without a comparison between them: errors that grow from call to call show."""
        outcome = Outcome(problem)
        made = self.inputs(problem)
        expected = self.expected.outputs(made, problem.dims)
        given, sizes = self.form.taken(made), self.form.dims(problem)
        shapes = self.form.outputs(problem, expected)
        one = self.sandbox.call(given, shapes, sizes)
        few = self.sandbox.call(given, shapes, sizes, times=FEW_CALLS)
        each = max(few.seconds - one.seconds, 1e-9) / (FEW_CALLS - 1)
        times = min(MANY_CALLS, max(FEW_CALLS, int(MANY_SECONDS / each)))
        for called in (few, self.sandbox.call(given, shapes, sizes, times=times)):
            outcome.ask("repeat")
            check = Outcome(problem)
            if not self._compare(check, called, expected):
                why = f"it is right at first, but not after many calls: {check.seen[0].message}"
                outcome.blame("not_repeatable", why)
                break
        return outcome

    # --- what is around the tensors -----------------------------------------------------------

    def _check_surroundings(self, outcome: Outcome, called: Called) -> None:
        outcome.ask("inputs", "guards", "stream")
        if called.changed:
            outcome.blame("inputs_changed", f"it changes its input {', '.join(called.changed)}")
        if called.alias:
            text = f"its output lies in the memory of its input {', '.join(called.alias)}"
            outcome.blame("inputs_changed", text)
        if called.spilled:
            outcome.blame("out_of_bounds", f"it writes outside of {', '.join(called.spilled)}")
        if called.late:
            names = ", ".join(called.late)
            outcome.blame("hidden_work", f"{names} is still being written after its stream is done")

    def _check_reads_beside(
        self,
        outcome: Outcome,
        first: Called,
        given: Mapping[str, Array],
        shapes: Shapes,
        sizes: Mapping[str, int],
    ) -> None:
        """If the output has NaN, run again with zeros beside its tensors: if the output changes,
        the candidate reads out of bounds."""
        vague = [s for s in outcome.seen if s.name in ("unwritten", "nonfinite")]
        zeros = self.sandbox.call(given, shapes, sizes, around=0) if vague else first
        if vague and self.varies(outcome, first, zeros):
            outcome.seen = [s for s in outcome.seen if s not in vague]
            text = "its output changes with what lies beside its tensors"
            outcome.blame("out_of_bounds", text)

    # --- what came out ------------------------------------------------------------------------

    def _compare(self, outcome: Outcome, called: Called, expected: Answer) -> bool:
        known = [name for name in called.outputs if name in expected]
        lacking = [n for n in expected if n not in called.outputs and n not in MAY_BE_LEFT_OUT]
        if called.outputs and lacking:
            given = ", ".join(called.outputs)
            text = f"it gives no {', '.join(lacking)}, which is asked for, but {given}"
            outcome.blame("wrong_form", text)
        good, errors = not lacking, None
        for name in known:
            output, wanted = called.outputs[name], expected[name]
            if not self._check_form(outcome, name, output, wanted):
                good = False
                continue
            values = output.array.astype(np.float64 if wanted.dtype == np.float64 else wanted.dtype)
            kind = outcome.problem.kind
            result = compare(self.spec, name, values, expected, kind)
            library = None
            if kind == "spectrum":  # few rows dominate its RMS: no ratio
                outcome.ask(*["weights"] * (name == "O"))
            elif name in COMPARED and result.ok and expected.is_exact(name):
                if errors is None:
                    errors = self.expected.library_errors(expected, outcome.problem.dims)
                library = errors.get(name)
            case = Case(outcome.problem.dims, kind, name, result, library)
            outcome.cases.append(case)
            outcome.ask("fp64", "written")
            good &= self._judge(outcome, name, case, output, wanted)
            if name == "O" and wanted.ndim == 4 and wanted.shape[2] >= PICTURE and wanted.size:
                found = error_map(values, wanted)
                if np.isfinite(found).all():
                    rows = tuple(tuple(float(x) for x in row) for row in found)
                    outcome.picture = Picture(outcome.problem.dims, rows)
        return good

    def _check_form(self, outcome: Outcome, name: str, output: Output, wanted: Array) -> bool:
        if self.expected.reference is None:
            dtype = stored_as(self.spec, name)
            if output.dtype != dtype:
                outcome.blame("wrong_form", f"{name} is {output.dtype}, and should be {dtype}")
                return False
        if output.array.shape != wanted.shape:
            text = f"{name} has the shape {output.array.shape}, and should have {wanted.shape}"
            outcome.blame("wrong_form", text)
            return False
        return True

    def _judge(
        self, outcome: Outcome, name: str, case: Case, output: Output, wanted: Array
    ) -> bool:
        result = case.comparison
        if not result.ok:
            what = _symptom_name(result, output.array, wanted)
            outcome.blame(what, f"{name} is wrong: {result.reason}")
            return False
        if case.library is None:
            return True
        outcome.ask("exactness")
        other = self.spec.sink or (self.spec.backward and self.spec.alibi)
        slack = SLACK_OTHER if other else SLACK
        # If one outlier dominates each row, the ratio is that of a few roundings, so rows count. Of
        # a gradient few rows may be most: the first keys, or those that a large dO reaches.
        rows = oracle.rows_that_count(wanted) if self.spec.backward else wanted[..., 0].size
        few = oracle.scatter(rows)
        limit = MOST * few * case.library + slack * oracle.ROUNDOFF[self.spec.dtype]
        if result.relative_rms > limit:
            text = f"{result.relative_rms:.2e}, torch's flash backend has {case.library:.2e}"
            outcome.blame("low_precision", f"the relative RMS error of {name} is {text}")
        return True

    # --- once more ----------------------------------------------------------------------------

    def _run_again(
        self,
        outcome: Outcome,
        first: Called,
        again: Called,
        given: Mapping[str, Array],
        shapes: Shapes,
        sizes: Mapping[str, int],
        right: bool,
    ) -> None:
        outcome.ask("repeat", "stream")
        differs = self.varies(outcome, first, again)
        # If the bits differ, the cause decides the offence, not the late write.
        self._check_surroundings(outcome, replace(again, late=()) if differs else again)
        if not differs:
            return
        # The bits differ. Only on a stream that gets its inputs late, or always?
        third = self.sandbox.call(given, shapes, sizes, place=1)
        noise = differs if right and not self.spec.repeatable else ""
        if found := self.varies(outcome, first, third) or noise:
            outcome.blame("not_repeatable", found)
        else:
            text = "called while its inputs are still on their way, it does not wait for them"
            outcome.blame("hidden_work", text)

    def _run_fresh(
        self, outcome: Outcome, first: Called, shapes: Shapes, sizes: Mapping[str, int]
    ) -> None:
        problem = replace(outcome.problem, seed=outcome.problem.seed + 7919)
        whole = self.form.inputs(problem, self.expected.reference)
        every = [whole]
        same = self.form.inputs(outcome.problem, self.expected.reference)
        if self.spec.batch is not None:  # elsewhere, and another Q
            every += [sequences.reordered(same), {**same, "Q": -same["Q"]}]
        keys = same["V"].shape[2] if "V" in same and self.expected.reference is None else 0
        if keys >= 8 and self.spec.batch is None:
            # Part of V: a cache that compares only the first and last elements. Q alone: one that
            # compares K and V.
            middle = slice(keys // 4, keys - keys // 4)
            values = same["V"].copy()
            values[:, :, middle] = whole["V"][:, :, middle]
            every += [{**same, "V": values}, {**same, "Q": whole["Q"]}]
            every += [{**same, "dO": whole["dO"]}] if "dO" in same else []
        for drawn in every:
            outcome.ask("fresh")
            made = self.expected.inputs(drawn, problem.dims, problem.seed)
            called = self.sandbox.call(self.form.taken(made), shapes, sizes)
            expected = self.expected.outputs(made, problem.dims)
            some = any(output.array.size for output in first.outputs.values())
            same_bits = some and not self._bits_differ(first, called)
            # Where the weights are flat, another Q may round to the same output.
            if same_bits and not self._compare(Outcome(problem), called, expected):
                text = "it gives the earlier answer to other inputs at the same place"
                outcome.blame("replay", text)
                return
            self._check_surroundings(outcome, called)
            self._compare(outcome, called, expected)

    def _run_viewed(
        self,
        outcome: Outcome,
        given: Mapping[str, Array],
        expected: Answer,
        shapes: Shapes,
        sizes: Mapping[str, int],
        names: Sequence[str] = (),
        far: bool = False,
    ) -> None:
        """Try inputs of these names that are not contiguous; `far`: inputs with offsets that need
        more than 31 bits."""
        if far and not self.sandbox.has_room(FAR_BYTES):
            outcome.notes.append("offsets past 2^31 were not tried: there is too little memory")
            return
        try:
            called = self.sandbox.call(given, shapes, sizes, viewed=names, far=far)
        except (Ended, Unable) as error:  # a candidate may refuse tensors that are not contiguous
            if isinstance(error, Ended) and (error.offence != "raises" or not self.sandbox.alive):
                raise
            outcome.notes.append(f"it takes contiguous inputs only: {error}")
            return
        outcome.ask(VIEWS)
        check = Outcome(outcome.problem)
        self._check_surroundings(check, called)
        if not self._compare(check, called, expected) or check.seen:
            outcome.failed.add(VIEWS)
            why = check.seen[0].message if check.seen else "its outputs are others"
            what = "with offsets past 2^31 elements" if far else "of other strides"
            text = f"it is right for contiguous inputs, but not for views {what}: {why}"
            outcome.blame("special_inputs", text)

    def _is_right_by_itself(self, outcome: Outcome, again: Called, expected: Answer) -> bool:
        """Whether a second run that may differ from the first is right by itself."""
        second = Outcome(outcome.problem)
        right = self._compare(second, again, expected)
        outcome.seen += second.seen
        return right

    def varies(self, outcome: Outcome, one: Called, other: Called) -> str:
        """How two runs with the same inputs differ more than allowed; empty if they do not."""
        for name in [name for name in other.outputs if name in one.outputs]:
            arrays = one.outputs[name].array, other.outputs[name].array
            if self.spec.repeats(name):
                if not np.array_equal(bits(arrays[0]), bits(arrays[1])):
                    return f"{self.differs} ({name})" if self.spec.backward else self.differs
                continue
            found, limit = variation(self.spec, name, *arrays)
            if found > limit:
                text = f"{name} differs by {found:.2e} of its RMS between two runs"
                return f"{text}, and may by {limit:.2e}"
            outcome.varied = max(outcome.varied, found)
        return ""

    def _bits_differ(self, one: Called, other: Called) -> bool:
        return any(
            not np.array_equal(bits(one.outputs[n].array), bits(output.array))
            for n, output in other.outputs.items()
            if n in one.outputs
        )


def _viewed_names(problem: Problem, given: Mapping[str, Array]) -> Iterator[Sequence[str]]:
    """Which inputs are views: one or two that the seed draws, and all for the usual shape.

    Views of all come first: what fails only if some are contiguous is the stranger message.
    """
    every = [name for name in VIEWED if name in given]
    if problem.usual:
        yield every
    chance = np.random.default_rng([problem.seed, 3])
    count = min(int(chance.integers(1, 3)), len(every))
    yield [str(name) for name in chance.choice(every, count, replace=False)] if every else []


def _symptom_name(result: oracle.Comparison, found: Array, wanted: Array) -> str:
    """The name of a wrong output, from the output alone: zeros, nonfinite, inexact or wrong."""
    if result.stray:
        return "out_of_bounds"
    if result.nonfinite:
        untouched = (bits(found).reshape(wanted.shape) == -1) & np.isfinite(wanted)
        return "unwritten" if untouched.any() else "nonfinite"
    if not found.astype(np.float64).any():
        return "zeros"
    return "inexact" if result.relative_rms < CLOSE else "wrong"
