"""Smaller programs with the same failure.

First the recorded choices: numbers become 0, the simplest option, and the generator makes a program
of the list. Then the problems, then the lines of the text. Each is a search for the largest set of
items that can go. Many sets are tried at once, because kernels that are compiled together cost a
fraction of one alone; those that can go one by one are then tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.generate import generate
from flashwright.fuzz.oracle import ProgramOutcome, evaluate_cases

Evaluate = Callable[[Sequence[FuzzCase]], list[ProgramOutcome]]
AT_ONCE = 14
STEPS = 24
PINNED = 1  # the first choice is the GPU


def shrink(
    case: FuzzCase, outcome: ProgramOutcome, evaluate: Evaluate = evaluate_cases, steps: int = STEPS
) -> tuple[FuzzCase, ProgramOutcome]:
    """The smallest case found that fails as this one does, and how it fails.

    `steps` bounds how often programs are compiled and run.
    """
    search = _Search(case, outcome, evaluate, steps)
    if not case.spoilt and case.choices:
        search.choices()
    search.problems()
    search.lines()
    return search.best, search.outcome


class _Search:
    def __init__(
        self, case: FuzzCase, outcome: ProgramOutcome, evaluate: Evaluate, steps: int
    ) -> None:
        self.best, self.outcome = case, outcome
        self.evaluate, self.left = evaluate, steps

    def choices(self) -> None:
        """Set choices to 0 if the failure remains."""
        taken = list(self.best.choices)
        case = self.best

        def without(places: frozenset[int]) -> FuzzCase:
            kept = [0 if n in places else value for n, value in enumerate(taken)]
            made = generate(case.seed, (case.gpu,), [0, *kept[1:]])
            return replace(made, choices=(taken[0], *made.choices[1:]))

        self._minimise([n for n in range(PINNED, len(taken)) if taken[n]], without)

    def problems(self) -> None:
        """One problem, with small sizes."""
        if len(self.best.problems) > 1:
            self._first([replace(self.best, problems=(p,)) for p in self.best.problems])
        sizes = dict(self.best.problems[0])
        low = {"batch": 1, "heads": sizes["heads"] // max(1, sizes["kv_heads"]), "kv_heads": 1}
        self._first([replace(self.best, problems=({**sizes, **low},))])
        for name in ("q_len", "kv_len"):
            sizes = dict(self.best.problems[0])
            lower = sorted({1, 17, 64, 65, sizes[name] // 2, 3 * sizes[name] // 4, sizes[name] - 1})
            options = [{**sizes, name: n} for n in lower if 0 < n < sizes[name]]
            self._first([replace(self.best, problems=(p,)) for p in options])

    def lines(self) -> None:
        """Remove lines; an `if` or `for` with its end, with or without its body."""
        for _ in range(2):
            case, lines = self.best, self.best.text.splitlines()
            ends = {n: _end_of(lines, n) for n, text in enumerate(lines) if _opens(text)}

            def without(
                places: frozenset[int],
                case: FuzzCase = case,
                lines: list[str] = lines,
                ends: dict[int, int] = ends,
            ) -> FuzzCase:
                gone = places | {ends[n] for n in places if n in ends}
                text = "\n".join(line for n, line in enumerate(lines) if n not in gone)
                return replace(case, text=text + "\n", choices=())

            items = [n for n, text in enumerate(lines) if text.strip() not in ("", "end", "else")]
            if not self._minimise(items, without):
                return

    # --- the search -----------------------------------------------------------------------

    def _minimise(self, items: list[int], without: Callable[[frozenset[int]], FuzzCase]) -> bool:
        """Remove as many items as possible. Returns whether any could be removed."""
        gone: frozenset[int] = frozenset()
        width = max(1, -(-len(items) // AT_ONCE))
        while items and self.left > 0:
            groups = [frozenset(items[n : n + width]) for n in range(0, len(items), width)]
            free = [
                g for g, ok in zip(groups, self._tried(gone, groups, without), strict=True) if ok
            ]
            if free:
                gone = self._together(gone, free, without)
                items = [n for n in items if n not in gone]
            if width == 1:
                break
            width = max(1, width // 2)
        return bool(gone)

    def _together(
        self,
        gone: frozenset[int],
        free: list[frozenset[int]],
        without: Callable[[frozenset[int]], FuzzCase],
    ) -> frozenset[int]:
        """Remove as many of the sets as possible at the same time."""
        half = len(free) // 2
        unions = [free, free[:half], free[half:], free[::2], free[1::2], free[:1]]
        sets = [frozenset().union(*u) for u in unions if u]
        works = self._tried(gone, sets, without)
        found = [s for s, ok in zip(sets, works, strict=True) if ok]
        return gone | max(found, key=len) if found else gone

    def _tried(
        self,
        gone: frozenset[int],
        sets: Sequence[frozenset[int]],
        without: Callable[[frozenset[int]], FuzzCase],
    ) -> list[bool]:
        """Whether the failure is still there without each of the sets."""
        works: list[bool] = []
        for start in range(0, len(sets), AT_ONCE):
            part = [without(gone | one) for one in sets[start : start + AT_ONCE]]
            works += self._same(part)
        return works

    def _same(self, cases: Sequence[FuzzCase]) -> list[bool]:
        """Which cases fail as the first did; the smallest of them becomes the best."""
        if self.left <= 0:
            return [False] * len(cases)
        self.left -= 1
        outcomes = self.evaluate(cases)
        works = [one.bucket == self.outcome.bucket for one in outcomes]
        for case, outcome, ok in zip(cases, outcomes, works, strict=True):
            if ok and size(case) < size(self.best):
                self.best, self.outcome = case, outcome
        return works

    def _first(self, cases: Sequence[FuzzCase]) -> None:
        """The first of the cases that fails alike."""
        if not cases or self.left <= 0:
            return
        self.left -= 1
        for case, outcome in zip(cases, self.evaluate(cases), strict=True):
            if outcome.bucket == self.outcome.bucket:
                self.best, self.outcome = case, outcome
                return


def size(case: FuzzCase) -> tuple[int, int, int]:
    """The size that shrinking reduces: lines, then characters, then problems."""
    lines = [line for line in case.text.splitlines() if line.strip() and line[:2] != "//"]
    return len(lines), sum(map(len, lines)), sum(sum(p.values()) for p in case.problems)


def _opens(line: str) -> bool:
    return line.strip().startswith(("if ", "for "))


def _end_of(lines: Sequence[str], start: int) -> int:
    depth = 0
    for number in range(start, len(lines)):
        if _opens(lines[number]):
            depth += 1
        elif lines[number].strip() == "end":
            depth -= 1
            if depth == 0:
                return number
    return start
