"""The kill rate per class of mutations: python -m tests.mutation.report [--every|--all] [--write].

Mutates as many built-in programs as it takes for every line of them to occur beside each of its
neighbours; with --every all that differ in more than numbers, with --all those of every GPU and
head dim; with --sample N only N mutants of a class in each. Prints a Markdown page with every
survivor; --write puts it into docs/mutation.md, with fewer examples.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import Pool
from pathlib import Path

from flashwright.lang.diagnostic import Diagnostic
from tests.mutation.mutants import EQUIVALENT, KINDS, Mutant, mutants
from tests.mutation.trial import Case, covering, every, try_mutant

PAGE = Path(__file__).parents[2] / "docs" / "mutation.md"

EXAMPLES = 3
"""Mutants of an equivalence rule that docs/mutation.md shows."""
INTRODUCTION = """# Mutation test

The mutation test measures whether Flashwright finds mistakes in TL programs. It makes one small
change to a built-in program and runs the checker (`flashwright check`), then the comparison with
fp64 on the CPU (`flashwright run`):

```console
$ python -m tests.mutation.report --only gqa --sample 1   # prints such a page, in half a minute
$ python -m tests.mutation.report --write                 # writes this page
```

A mutant is killed only if a diagnostic names the right line (`tests/mutation/test_mutants.py` has
the rule). `make test` tries all mutants of two programs, and `make test-slow` those of five more.
`make test-slow` also takes every sixth built-in program (of all variants, masks and options for
three GPUs, with one head dim) and tries one mutant of each of the twelve classes in `STATED`
(`tests/mutation/mutants.py`).

Derived [backward passes](gradients.md) are mutated too (`BACKWARD` in `tests/mutation/trial.py`):
`make test` tries two mutants of each class in one of them, and `make test-slow` a tenth of all
mutants of four, another tenth in each. Their run names the gradient that is wrong, and no
line is asked of it.
"""
Row = tuple[str, str, str, str, str]
"""Program, class, outcome (check, run, equal, misnamed, survived), what changed, why."""


def described(diagnostics: Iterable[Diagnostic]) -> str:
    """Diagnostics in one line each, with the lines they name."""
    texts = []
    for d in diagnostics:
        lines = [s.line for s in (d.span, *(w.span for w in d.secondary)) if s is not None]
        texts.append(f"{d.code} (lines {', '.join(map(str, lines))}): {d.message}")
    return "\n".join(texts)


def sampled(case: Case, most: int) -> Iterator[Mutant]:
    """At most so many mutants of each class, others for each program (0: all)."""
    classes: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants(case.subject):
        classes[mutant.kind].append(mutant)
    draw = random.Random(case.name)
    for found in classes.values():
        yield from draw.sample(found, most) if 0 < most < len(found) else found


def tried(case: Case, most: int = 0) -> list[Row]:
    """The outcome of the mutants of a program."""
    rows: list[Row] = []
    for mutant in sampled(case, most):
        outcome = try_mutant(mutant, case)
        if outcome.killed:
            result, note = outcome.by, ""
        elif mutant.equal and not outcome.by:
            result, note = "equal", mutant.equal
        else:
            result = "misnamed" if outcome.by else "survived"
            note = described(outcome.diagnostics)
        rows.append((case.name, mutant.kind, result, mutant.what, note))
    return rows


def page(rows: list[Row], programs: int, chosen: str, most: int | None = None) -> Iterator[str]:
    """The report in Markdown, with at most so many examples of each equivalence rule."""
    yield INTRODUCTION
    yield f"This page covers {len(rows)} mutants of {programs} programs ({chosen})."
    yield ""
    yield "| class | mutants | equivalent | killed by check | killed by run | kill rate |"
    yield "|---|---:|---:|---:|---:|---:|"
    count = Counter((r[1], r[2]) for r in rows)
    for kind in (*KINDS, "all"):
        kinds = KINDS if kind == "all" else (kind,)
        n = {o: sum(count[k, o] for k in kinds) for o in ("check", "run", "equal")}
        total = sum(v for (k, _), v in count.items() if k in kinds)
        real = total - n["equal"]
        rate = f"{100 * (n['check'] + n['run']) / real:.1f} %" if real else "none made"
        yield f"| {kind} | {total} | {n['equal']} | {n['check']} | {n['run']} | {rate} |"
    yield ""
    yield "## Equivalent mutants"
    yield ""
    yield "These mutants mean the same as the program. Each falls under one of these rules, which"
    yield "are decided from the program, before the mutant runs."
    if most is not None:
        yield f"At most {most} examples of a rule are shown; the command prints all of them."
    yield ""
    by_rule = defaultdict(list)
    for row in rows:
        if row[2] == "equal":
            by_rule[row[4]].append(row)
    for rule, reason in EQUIVALENT.items():
        found = by_rule.get(rule, [])
        yield f"- **{rule}** ({len(found)}): {reason}."
        examples = sorted(Counter((r[1], r[3]) for r in found).items(), key=lambda e: (-e[1], e[0]))
        for (kind, what), times in examples[:most]:
            yield f"  - {kind}: {what}" + (f" (in {times} programs)" if times > 1 else "")
    yield ""
    yield "## Survivors"
    yield ""
    bad = [r for r in rows if r[2] in ("survived", "misnamed")]
    for program, kind, result, what, note in bad:
        yield f"- {program}, {kind}, {result}: {what}"
        for line in note.splitlines():
            yield f"  - {line}"
    if not bad:
        yield "None."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every GPU and head dim")
    parser.add_argument("--write", action="store_true", help="write docs/mutation.md")
    parser.add_argument("--every", action="store_true", help="every program that differs")
    parser.add_argument("--sample", type=int, default=0, help="mutants of a class in a program")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    cases = every(thorough=asked.all)
    cases = cases if asked.all or asked.every else covering(cases)
    cases = [c for c in cases if asked.only in c.name]
    rows: list[Row] = []
    start = time.time()
    with Pool(asked.jobs) as pool:
        results = pool.imap(partial(tried, most=asked.sample), cases)
        for number, (case, found) in enumerate(zip(cases, results, strict=True), 1):
            rows += found
            bad = sum(r[2] in ("survived", "misnamed") for r in found)
            took = f"{time.time() - start:.0f} s"
            print(
                f"{number}/{len(cases)} {case.name}: {len(found)}, {bad} bad, {took}",
                file=sys.stderr,
            )
    chosen = (
        "chosen so that each pair of adjacent lines of any built-in program occurs in one of them"
    )
    chosen = "all that differ in more than numbers" if asked.every else chosen
    chosen = "all variants, masks, options, GPUs and head dims" if asked.all else chosen
    if asked.sample:
        chosen += f"; {asked.sample} random mutants of each class per program"
    print("\n".join(page(rows, len(cases), chosen)))
    if asked.write:
        text = "\n".join(page(rows, len(cases), chosen, EXAMPLES)) + "\n"
        PAGE.write_text(text, encoding="utf-8")
    return int(any(r[2] in ("survived", "misnamed") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
