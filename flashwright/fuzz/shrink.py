"""Smaller programs with the same failure.

First the recorded choices: spans are deleted and numbers lowered, and the generator makes a
program of what is left. Then the text: lines are deleted. A step tries many candidates at once,
because kernels that are compiled together cost a fraction of one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from flashwright.fuzz.case import Case
from flashwright.fuzz.generate import generate
from flashwright.fuzz.oracle import Outcome, evaluate_cases

Evaluate = Callable[[Sequence[Case]], list[Outcome]]
AT_ONCE = 16
STEPS = 14
PINNED = 1  # the first choice is the GPU


def shrink(
    case: Case, outcome: Outcome, evaluate: Evaluate = evaluate_cases, steps: int = STEPS
) -> tuple[Case, Outcome]:
    """The smallest case found that fails as this one does, and how it fails."""
    search = _Search(case, outcome, evaluate, steps)
    if not case.spoilt and case.choices:
        search.passes(_fewer_choices)
    search.passes(_fewer_problems)
    search.passes(_fewer_lines)
    return search.best, search.outcome


class _Search:
    def __init__(self, case: Case, outcome: Outcome, evaluate: Evaluate, steps: int) -> None:
        self.best, self.outcome = case, outcome
        self.evaluate, self.left = evaluate, steps
        self.seen: set[tuple[str, str]] = {_identity(case)}

    def passes(self, candidates: Callable[[Case], Iterator[Case]]) -> None:
        """Take improvements of one kind until there is none, or the steps are used up."""
        while self.left > 0:
            batch: list[Case] = []
            for one in candidates(self.best):
                key = _identity(one)
                if key not in self.seen and size(one) < size(self.best):
                    self.seen.add(key)
                    batch.append(one)
                if len(batch) == AT_ONCE:
                    break
            if not batch:
                return
            self.left -= 1
            found = [
                (size(one), number, one, outcome)
                for number, (one, outcome) in enumerate(
                    zip(batch, self.evaluate(batch), strict=True)
                )
                if outcome.bucket == self.outcome.bucket
            ]
            if found:
                _, _, self.best, self.outcome = min(found, key=lambda f: f[:2])


def size(case: Case) -> tuple[int, int, int]:
    """What is made smaller: lines, then characters, then the problems."""
    lines = [line for line in case.text.splitlines() if line.strip() and line[:2] != "//"]
    total = sum(sum(p.values()) for p in case.problems)
    return len(lines), sum(map(len, lines)) + sum(case.choices[PINNED:]), total


def _identity(case: Case) -> tuple[str, str]:
    return case.text, str(case.problems)


def _fewer_choices(case: Case) -> Iterator[Case]:
    """Programs of shorter and lower lists of choices."""
    taken = list(case.choices)
    count = len(taken)
    set_ones = [n for n in range(PINNED, count) if taken[n]]

    def made(choices: list[int]) -> Case:
        fresh = generate(case.seed, (case.gpu,), [0, *choices[PINNED:]])
        return replace(fresh, choices=(taken[0], *fresh.choices[PINNED:]))

    for width in (len(set_ones), len(set_ones) // 2, len(set_ones) // 4, 4, 2, 1):
        if width < 1:
            continue
        for start in range(0, len(set_ones), width):
            changed = list(taken)
            for place in set_ones[start : start + width]:
                changed[place] = 0
            yield made(changed)
    for width in (8, 4, 2, 1):
        for start in range(PINNED, count, width):
            yield made(taken[:start] + taken[start + width :])
    for place in set_ones:
        if taken[place] > 1:
            yield made([*taken[:place], taken[place] - 1, *taken[place + 1 :]])


def _fewer_problems(case: Case) -> Iterator[Case]:
    """One problem instead of two, and smaller sizes in it."""
    if len(case.problems) > 1:
        for one in case.problems:
            yield replace(case, problems=(one,))
        return
    first = dict(case.problems[0])
    for name in ("batch", "heads", "kv_heads", "q_len", "kv_len"):
        for value in (1, first.get(name, 1) // 2, first.get(name, 1) - 1):
            if name in first and 0 < value < first[name]:
                yield replace(case, problems=({**first, name: value},))
    low = {"batch": 1, "heads": 1, "kv_heads": 1}
    yield replace(case, problems=({**first, **low},))


def _fewer_lines(case: Case) -> Iterator[Case]:
    """The text without some of its lines; blocks go with their ends."""
    lines = case.text.splitlines()
    bare = replace(case, choices=case.choices[:PINNED])
    for width in (6, 3, 1):
        for start in range(0, len(lines), width):
            rest = lines[:start] + lines[start + width :]
            yield replace(bare, text="\n".join(rest) + "\n")
    for start, line in enumerate(lines):
        if line.strip().startswith(("if ", "for ")):
            end = _end_of(lines, start)
            inner = [text[2:] if text.startswith("  ") else text for text in lines[start + 1 : end]]
            if not any(text.strip() == "else" for text in inner):
                yield replace(bare, text="\n".join(lines[:start] + inner + lines[end + 1 :]) + "\n")
            yield replace(bare, text="\n".join(lines[:start] + lines[end + 1 :]) + "\n")
        if " and " in line and " where " in line:
            head, _, conditions = line.partition(" where ")
            for one in conditions.split(" and "):
                text = f"{head} where {one}"
                yield replace(
                    bare, text="\n".join([*lines[:start], text, *lines[start + 1 :]]) + "\n"
                )


def _end_of(lines: Sequence[str], start: int) -> int:
    depth = 0
    for number in range(start, len(lines)):
        word = lines[number].strip()
        if word.startswith(("if ", "for ")):
            depth += 1
        elif word == "end":
            depth -= 1
            if depth == 0:
                return number
    return len(lines) - 1
