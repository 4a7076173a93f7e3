"""The verdict on NSA as a whole: calls on a few lengths, whose outputs are compared as those of
timed calls are."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from flashwright.build import driver
from flashwright.judge import nsa, oracle
from flashwright.judge.offences import offence
from flashwright.judge.verdict import Case, Check, Offence, Verdict
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import spot
from flashwright.measure.bench import cell_seed, problem_of
from flashwright.measure.contest import ContestantProcess, ProcessFactory
from flashwright.measure.grid import Cell
from flashwright.sandbox.candidate import Candidate, Unable
from flashwright.sandbox.problem import TimedProblem
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

LENGTHS = (63, 64, 1000, 2049)
"""Tokens: a last block that is not whole, whole ones, and more blocks than a query reads."""
QUESTION = (
    "O agrees with the three branches in fp64, and no block that a call chose is lighter than one "
    "that it left, but for rounding"
)


def judged(
    candidate: Candidate,
    spec: AttentionSpec,
    seed: int | None = None,
    make: ProcessFactory = Sandbox,
    expected: spot.Expected = spot.expected,
) -> Verdict:
    """The verdict on two heads of each group, on the first GPU. Raises Failed if the candidate
    declines."""
    card = driver.cards()[0]
    seed = secrets.randbits(30) if seed is None else seed
    cases: list[Case] = []
    found: tuple[Offence, ...] = ()
    process = make(candidate, spec)
    try:
        process.start()
        for length in LENGTHS:
            cell = Cell(spec, length, 1)
            problem = problem_of(cell, "bshd", cell_seed(seed, cell))
            process.prepare(problem)
            process.turn(1, seed)
            cases += _cases(process, problem, seed, expected)
    except Ended as error:
        found = (offence(error.offence, error.message),)
    except Unable as error:
        raise Failed(Diagnostic("FW851", f"{candidate.name} is not judged: {error}")) from None
    finally:
        process.close()
    wrong = [f"{case.dims}: {case.comparison.reason}" for case in cases if not case.comparison.ok]
    if wrong and not found:
        found = (offence("wrong", wrong[0]),)
    check = Check("fp64", QUESTION, not found, len(cases))
    return Verdict(candidate.name, card.name, card.arch, spec, seed, tuple(cases), (check,), found)


def _cases(
    process: ContestantProcess, problem: TimedProblem, seed: int, expected: spot.Expected
) -> Iterator[Case]:
    """The outputs of the first call of a turn, compared."""
    spec, group = problem.spec, problem.spec.group
    firsts = range(0, spec.heads, group)
    for head in sorted({*firsts, *(first + group - 1 for first in firsts)}):
        output, blocks = (
            process.fetch(0, 0, n, name) for n, name in ((head, "O"), (head // group, "Idx"))
        )
        try:
            right = expected(problem, seed, 0, head, None, blocks, 1.0)
            result = oracle.compare(output, right, spec.dtype)
        except nsa.WrongChoice as error:
            result = oracle.Comparison(ok=False, reason=str(error))
        yield Case({"tokens": problem.length, "head": head}, "normal", "O", result)
