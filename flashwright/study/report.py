"""The report of a study: study.json for programs, study.md and study.html for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.files import write
from flashwright.generate.state import KINDS
from flashwright.study import page
from flashwright.study.funnel import SPEEDS, FunnelRow, rows
from flashwright.study.settings import Settings, read
from flashwright.study.ways import LEVELS
from flashwright.version import __version__

SCHEMA = 1
FILES = ("study.json", "study.md", "study.html")
ABSENT, NOT_JUDGED = "–", "not judged"
SPEED = "speed over the best peer's"


@dataclass(frozen=True)
class StudyReport:
    """The figures of a study, ready for its three files."""

    settings: Settings
    rows: tuple[FunnelRow, ...]

    @property
    def open(self) -> int:
        """The number of unfinished samples."""
        own = [
            row for row in self.rows if row.operator in {o.name for o in self.settings.operators}
        ]
        return sum(row.planned - len(row.outcomes) for row in own)


def make(root: Path) -> StudyReport:
    """Read a study's records and write its three files."""
    settings = read(root)
    report = StudyReport(settings, tuple(rows(settings, root)))
    table = lines(report.rows)
    texts = [
        as_json(report),
        markdown(report, table),
        page.html(*_page(report), table, report.rows),
    ]
    for name, text in zip(FILES, texts, strict=True):
        write(root / name, text)
    return report


def _page(report: StudyReport) -> tuple[str, list[str]]:
    return title(report), notes(report)


# --- for people -------------------------------------------------------------------------------


def title(report: StudyReport) -> str:
    """The title of the study: the model and the GPU."""
    return f"{report.settings.model} on {report.settings.gpu}"


def notes(report: StudyReport) -> list[str]:
    """The notes that explain the table."""
    ways = "; ".join(f"{way.name}: {way.title}" for way in report.settings.ways)
    budget = report.settings.terms["budget"]
    by = (
        "the built-in translator"
        if report.settings.terms["translation"] == "builtin"
        else "the model"
    )
    found = [
        f"Ways: {ways}. Where a way has TL, {by} translates it to CUDA.",
        f"Attempts at each stage, at most: {budget['attempts']}. A failed one is sent back with "
        "the findings.",
        "A count is the samples that reached a level over all finished samples; "
        f"{ABSENT}: not applicable; {NOT_JUDGED}: this machine could not judge it.",
        "pass@k is the probability that one of k samples is right; over all operators, the mean.",
        "fast_p is the fraction of samples that are right and over p times as fast as the best "
        "peer; the speed, over the best peer's, is the geometric mean of those that were timed. "
        "Attempts, tokens and minutes (waiting for the model) are means of a sample.",
    ]
    if any(o.usage.total and not o.usage.counted for row in report.rows for o in row.outcomes):
        found.append("Some tokens are estimates: the server did not count them.")
    if report.open:
        found.append(f"Unfinished samples: {report.open}. The same command continues them.")
    return found


def lines(every: Sequence[FunnelRow]) -> list[list[str]]:
    """The table: a heading, and a line for each row."""
    most = max((len(row.levels["right"].at) for row in every), default=1)
    ks = sorted({1, most} if most else {1})
    head = ["operator", "way", "samples", *LEVELS.values(), *(f"pass@{k}" for k in ks)]
    head += [*(f"fast_{p:g}" for p in SPEEDS), SPEED, "attempts", "tokens", "minutes"]
    return [head, *(_line(row, ks) for row in every)]


def _line(row: FunnelRow, ks: Sequence[int]) -> list[str]:
    ended = len(row.outcomes)
    at = row.levels["right"].at
    unmeasured = "not measured" if ended else ABSENT
    fast = [unmeasured if row.fast is None else f"{row.fast[p]:.0%}" for p in SPEEDS]
    return [
        row.operator,
        row.way.name,
        str(ended) if ended == row.planned else f"{ended} of {row.planned}",
        *(_count(row, level) for level in LEVELS),
        *(f"{at[k - 1]:.2f}" if k <= len(at) else ABSENT for k in ks),
        *fast,
        *(ABSENT if row.speed is None else f"{row.speed:.2f}",),
        *(ABSENT if row.attempts is None else f"{row.attempts:.1f}",),
        *(ABSENT if row.tokens is None else f"{row.tokens:.0f}",),
        *(ABSENT if row.minutes is None else f"{row.minutes:.1f}",),
    ]


def _count(row: FunnelRow, level: str) -> str:
    if level not in row.levels:
        return ABSENT
    found = row.levels[level]
    if not found.total:
        return ABSENT
    if found.unknown == found.total:
        return NOT_JUDGED
    kinds = {"gpu": "GPU", "emulated": "emulated"}
    how = [f"{n} {kinds[kind]}" for kind, n in sorted(row.kinds.items()) if kind in kinds]
    how = how if level == "right" else []
    how += [f"{found.unknown} {NOT_JUDGED}"] if found.unknown else []
    return f"{found.passed}/{found.total}" + (f" ({', '.join(how)})" if how else "")


def brief(every: Sequence[FunnelRow]) -> list[list[str]]:
    """The table for a terminal: without text in brackets and the last columns."""
    head, *body = lines(every)
    left_out = (*(f"fast_{p:g}" for p in SPEEDS[1:]), "attempts", "tokens", "minutes")
    kept = [n for n, name in enumerate(head) if name not in left_out]
    names = {title: name for name, title in LEVELS.items()}
    names |= {"samples": "n", LEVELS["cpu"]: "CPU", SPEED: "speed"}
    unknown = (NOT_JUDGED, "not measured")
    return [
        [names.get(head[n], head[n]) for n in kept],
        *(
            [
                "?" if (c := line[n]) in unknown else c.partition(" (")[0].replace(" of ", "/")
                for n in kept
            ]
            for line in body
        ),
    ]


def markdown(report: StudyReport, table: Sequence[Sequence[str]]) -> str:
    """The text of study.md."""
    head, *body = table
    cells = [head, ["---", "---", *["--:"] * (len(head) - 2)], *body]
    listed = [f"| {' | '.join(_cell(c) for c in line)} |" for line in cells]
    said = [f"- {note}" for note in notes(report)]
    return "\n".join([f"# Study: {_cell(title(report))}", "", *listed, "", *said]) + "\n"


def _cell(text: str) -> str:
    """Text for a Markdown table cell; a model's name may contain anything."""
    seen = "".join(c if c.isprintable() else " " for c in text)
    return seen.replace("\\", "\\\\").replace("|", "\\|")


# --- for programs -----------------------------------------------------------------------------


def as_json(report: StudyReport) -> str:
    """The text of study.json."""
    texts = {
        "schema": SCHEMA,
        "flashwright": __version__,
        "settings": report.settings.record(),
        "open": report.open,
        "rows": [_record(row) for row in report.rows],
    }
    return json.dumps(texts, indent=1, ensure_ascii=False) + "\n"


def _record(row: FunnelRow) -> dict[str, Any]:
    return {
        "operator": row.operator,
        "way": row.way.name,
        "planned": row.planned,
        "samples": len(row.outcomes),
        "levels": {
            name: {
                "passed": level.passed,
                "failed": level.failed,
                "unknown": level.unknown,
                "pass_at": list(level.at),
            }
            for name, level in row.levels.items()
        },
        "right": {kind: row.kinds.get(kind, 0) for kind in KINDS if kind != "checked"},
        "fast": None if row.fast is None else {f"{p:g}": part for p, part in row.fast.items()},
        "speed": row.speed,
        "ratios": [o.ratio for o in row.outcomes],
        "attempts": row.attempts,
        "tokens": row.tokens,
        "minutes": row.minutes,
        "dollars": sum(o.dollars for o in row.outcomes),
    }
