"""The mutation test: every small mistake in a built-in program is found, at the right line.

A mutant is killed when the checker gives an error or the CPU run finds a wrong output, and when one
of the diagnostics names the right line, that is, when its primary span or one of its secondary
spans lies on

- the changed statement itself (a changed `param` or `let` counts only by its own line, a changed
  loop, branch or grid only by its header), or,
- for a statement removed or moved: the statement at its new place; the header of a loop or branch
  that it stood in; or a statement of the loop that it stood in (of the whole program, if it stood
  in none) that reads, writes or allocates a tile which the removed statement read from or wrote
  to (Copy) or wrote to (all others).

Mutants that mean the same are named by a rule of mutants.EQUIVALENT when they are made, from the
program and not from the outcome; any other survivor, and any mutant named at a wrong line, fails.

The suite tries all mutants of the programs in trial.SUITE, and in every sixth built-in program
(all variants, masks and options, but one head dim) one mutant, drawn by the program's name, of each
class in mutants.STATED;
`python -m tests.mutation.report` tries more (docs/mutation.md).
"""

from __future__ import annotations

from functools import cache

import pytest

from flashwright.author.builtin.variants import VARIANTS
from flashwright.check.check import check
from flashwright.gpu import find
from flashwright.judge.cpu import judge
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from tests.mutation.mutants import EQUIVALENT, KINDS, OPERATORS, STATED, Mutant
from tests.mutation.report import described, sampled
from tests.mutation.trial import (
    SUITE,
    Case,
    backward_suite,
    every,
    problems,
    stress,
    suite,
    try_mutant,
)
from tests.share import some

# The checker does not know how the tokens follow from the number of compressed keys, and asks for
# the condition that the spec makes needless.
REJECTED_THOUGH_EQUAL = {"same condition"}

PARTS = 3
"""Tests that the programs of a variant are spread over, for the sake of parallel runs."""

QUICK = {"mha full t4", "nsa-window h200"}
"""Programs of the suite whose mutants are tried in every run: both schedules, with and without a
window. Those of the others are among the slow tests."""

# Classes that every program has: the others need a mask, a loop bound or a head to go wrong in.
ALWAYS = STATED - {"offset dropped"}


@cache
def made(name: str, operator: str) -> list[Mutant]:
    subject = suite()[name].subject
    mutants = next(o for o in OPERATORS if o.__name__ == operator)(subject)
    return [m for m in mutants if m.tree != subject.tree]


def test_every_program_of_the_suite_exists() -> None:
    assert len(suite()) == len(SUITE)
    assert set(suite()) >= QUICK


@pytest.mark.parametrize("name", some(suite(), 3))
def test_unmutated_programs_are_right(name: str) -> None:
    case = suite()[name]
    verdict = check(parse(case.code), find(case.gpu))
    assert not verdict.diagnostics, described(verdict.diagnostics)
    assert verdict.program is not None
    found = judge(verdict.program, case.spec, cases=problems(case))
    assert found.ok, described(found.diagnostics)
    assert stress(case) or case.spec.sink


def test_no_class_is_empty() -> None:
    found = {m.kind for name in suite() for o in OPERATORS for m in made(name, o.__name__)}
    assert found == set(KINDS)


@pytest.mark.parametrize("operator", some((o.__name__ for o in OPERATORS), 9))
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in suite()],
)
def test_mutants_are_killed(name: str, operator: str) -> None:
    case = suite()[name]
    assert format_tree(parse(case.code)) == case.code
    wrong = [fault(case, mutant) for mutant in made(name, operator)]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_mutants_of_a_backward_pass_are_killed() -> None:
    """Two of each class, drawn by the program's name; the slow tests try more."""
    case = next(iter(backward_suite().values()))
    wrong = [fault(case, mutant) for mutant in sampled(case, 2)]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("operator", [o.__name__ for o in OPERATORS])
@pytest.mark.parametrize("name", backward_suite())
def test_a_tenth_of_the_mutants_of_backward_passes_is_killed(name: str, operator: str) -> None:
    """Another tenth for each program: all of them take ten minutes."""
    case, tenth = backward_suite()[name], list(backward_suite()).index(name) % 10
    assert judge(case.kernels, case.spec, cases=problems(case)).ok
    mutants = list(next(o for o in OPERATORS if o.__name__ == operator)(case.subject))[tenth::10]
    wrong = [fault(case, mutant) for mutant in mutants if mutant.tree != case.subject.tree]
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "mqa"])  # a gqa of one KV head
def test_every_sixth_program_is_guarded(variant: str, part: int) -> None:
    wrong = []
    for case in every(variants=[variant])[part :: 6 * PARTS]:
        drawn = [m for m in sampled(case, 1) if m.kind in STATED]
        assert {m.kind for m in drawn} >= ALWAYS, case.name
        wrong += [fault(case, mutant) for mutant in drawn]
    assert not any(wrong), "\n".join(filter(None, wrong))


def fault(case: Case, mutant: Mutant) -> str:
    """What went wrong with a mutant; nothing if it was killed, or is equal and was let live."""
    outcome = try_mutant(mutant, case)
    found = ""
    if mutant.equal:
        assert mutant.equal in EQUIVALENT
        if outcome.by and not (outcome.named and mutant.equal in REJECTED_THOUGH_EQUAL):
            found = f"equal ({mutant.equal}) but rejected"
    elif not outcome.by:
        found = "survived"
    elif not outcome.named:
        found = "named wrongly"
    if not found:
        return ""
    return f"{case.name}: {found}: {mutant.what}\n{described(outcome.diagnostics)}"
