"""The results of the self-test as a table, a summary and data; the list in docs/judge.md."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashwright.selftest.case import CLASSES, SelftestCase
from flashwright.selftest.cases import CASES
from flashwright.selftest.run import SelftestResult

COLUMNS = ("case", "class", "expected", "what happened", "")
FINE, WRONG, NOTHING = 0, 1, 2
BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
"""The markers of the generated part of docs/judge.md."""
STAR = """A case with a star runs all problems of a trial, other kernels one or a few lengths. A
timing case is one measured time. Source and receipt cases are files that are only read."""


def expected(case: SelftestCase) -> str:
    """The expected verdict on a case, in words."""
    names = " or ".join(case.expected) or "accepted"
    return f"{names} ({case.says})" if case.says else names


def trial(case: SelftestCase) -> str:
    """How much of the trial a case has."""
    if case.how == "timed":
        return "one timed cell"
    if case.how in ("screen", "receipt"):
        return "reading"
    return "whole trial" if case.whole else f"{len(case.lengths or ())} lengths"


def cells(row: SelftestResult) -> tuple[str, ...]:
    """The cells of COLUMNS; a whole trial is marked after the case's name."""
    name = f"{row.case.name} *" if row.case.whole else row.case.name
    if row.status == "not tried":
        return name, row.case.kind, expected(row.case), f"not tried here: {row.happened}", "-"
    return name, row.case.kind, expected(row.case), row.happened, row.status


def details(row: SelftestResult) -> str:
    """The judge's message on a case with a wrong verdict."""
    seed = f" (seed {row.seed})" if row.seed is not None else ""
    return f"{row.status}: {row.case.name}: {row.message[:300] or row.happened}{seed}"


def summary(rows: Sequence[SelftestResult]) -> str:
    """Counts in a line: what was tried, and what is wrong."""
    count = Counter(row.status for row in rows)
    tried = [row for row in rows if row.status != "not tried"]
    if not tried:
        return f"nothing could be tried here: {_number(len(rows), 'case')}"
    bad = sum(not row.case.honest for row in tried)
    text = f"{bad} adversarial and {len(tried) - bad} honest cases tried: "
    text += f"{_number(count['HOLE'], 'hole')}, {_number(count['FALSE ALARM'], 'false alarm')}"
    return text + (f"; {count['not tried']} not tried here" if count["not tried"] else "")


def _number(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'' if n == 1 else 's'}"


def exit_code(rows: Sequence[SelftestResult]) -> int:
    """0: all is as it should be; 1: a hole or a false alarm; 2: nothing could be tried."""
    if any(row.status in ("HOLE", "FALSE ALARM") for row in rows):
        return WRONG
    return FINE if any(row.status == "ok" for row in rows) else NOTHING


def record(rows: Sequence[SelftestResult]) -> dict[str, Any]:
    """The results as JSON-compatible data."""
    return {
        "schema": 1,
        "summary": summary(rows),
        "ok": exit_code(rows) == FINE,
        "rows": [
            {
                "case": row.case.name,
                "class": row.case.kind,
                "expected": list(row.case.expected),
                "trial": trial(row.case),
                "status": row.status,
                "happened": row.happened,
                "message": row.message,
                "seed": row.seed,
                "seconds": round(row.seconds, 2),
            }
            for row in rows
        ],
    }


# --- the page ---------------------------------------------------------------------------------


def markdown() -> str:
    """All cases for docs/judge.md, by class and what they must be; a test holds the page to it."""
    lines = ["| class | must be | cases |", "|---|---|---|"]
    for kind, words in CLASSES.items():
        mine = [case for case in CASES if case.kind == kind]
        first = f"**{kind}**: {words}"
        for meant in dict.fromkeys(expected(case) for case in mine):
            same = [_listed(case) for case in mine if expected(case) == meant]
            lines.append(f"| {first} | {meant} | {', '.join(same)} |")
            first = ""
    bad = sum(not case.honest for case in CASES)
    count = f"{bad} adversarial and {len(CASES) - bad} honest cases."
    return "\n".join((*lines, "", count, STAR, ""))


def _listed(case: SelftestCase) -> str:
    return f"`{case.name}`{'*' if case.whole else ''}"


def with_cases(page: str) -> str:
    """The page with the part between its markers replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, behind = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{behind}"


if __name__ == "__main__":  # python -m flashwright.selftest.table docs/judge.md
    page = Path(sys.argv[1])
    page.write_text(with_cases(page.read_text(encoding="utf-8")), encoding="utf-8")
