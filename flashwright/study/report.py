"""A study's figures as files: study.json for programs, study.md and study.html for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.files import write
from flashwright.generate.state import KINDS
from flashwright.study import page
from flashwright.study.funnel import SPEEDS, Row, rows
from flashwright.study.settings import Settings, read
from flashwright.study.ways import LEVELS
from flashwright.version import __version__

SCHEMA = 1
FILES = ("study.json", "study.md", "study.html")
ABSENT, UNTOLD = "–", "not judged"
SPEED = "speed over the best peer's"


@dataclass(frozen=True)
class Report:
    """The figures of a study, ready for its three files."""

    settings: Settings
    rows: tuple[Row, ...]

    @property
    def open(self) -> int:
        """Samples that have not come to their end."""
        own = [
            row for row in self.rows if row.operator in {o.name for o in self.settings.operators}
        ]
        return sum(row.planned - len(row.outcomes) for row in own)


def make(root: Path) -> Report:
    """Read a study's records and write its three files."""
    settings = read(root)
    report = Report(settings, tuple(rows(settings, root)))
    table = lines(report.rows)
    told = [as_json(report), markdown(report, table), page.html(*_page(report), table, report.rows)]
    for name, text in zip(FILES, told, strict=True):
        write(root / name, text)
    return report


def _page(report: Report) -> tuple[str, list[str]]:
    return title(report), notes(report)


# --- for people -------------------------------------------------------------------------------


def title(report: Report) -> str:
    """The title of the study: the model and the GPU."""
    return f"{report.settings.model} on {report.settings.gpu}"


def notes(report: Report) -> list[str]:
    """What a reader has to know to read the table."""
    ways = "; ".join(f"{way.name}: {way.title}" for way in report.settings.ways)
    budget = report.settings.terms["budget"]
    by = (
        "the built-in translator"
        if report.settings.terms["translation"] == "builtin"
        else "the model"
    )
    found = [
        f"Ways: {ways}. Where a way has TL, {by} translates it to CUDA.",
        f"Attempts at each stage, at most: {budget['attempts']}. One that fails is sent back with "
        "what was found.",
        "A count is of the samples that reached a level, over all that came to their end; "
        f"{ABSENT}: there is none; {UNTOLD}: nobody could tell on this machine.",
        "pass@k is the chance that one of k samples is right; of all operators, the mean.",
        "fast_p is the part of the samples that is right and more than p times as fast as the best "
        "peer; the speed, over the best peer's, is the geometric mean of those that were timed. "
        "Attempts, tokens and minutes (waiting for the model) are means of a sample.",
    ]
    if any(o.usage.total and not o.usage.counted for row in report.rows for o in row.outcomes):
        found.append("Some tokens are estimates: the server did not count them.")
    if report.open:
        found.append(f"Samples that are open: {report.open}. The same command goes on with them.")
    return found


def lines(every: Sequence[Row]) -> list[list[str]]:
    """The table: a heading, and a line for each row."""
    most = max((len(row.levels["right"].at) for row in every), default=1)
    ks = sorted({1, most} if most else {1})
    head = ["operator", "way", "samples", *LEVELS.values(), *(f"pass@{k}" for k in ks)]
    head += [*(f"fast_{p:g}" for p in SPEEDS), SPEED, "attempts", "tokens", "minutes"]
    return [head, *(_line(row, ks) for row in every)]


def _line(row: Row, ks: Sequence[int]) -> list[str]:
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


def _count(row: Row, level: str) -> str:
    if level not in row.levels:
        return ABSENT
    found = row.levels[level]
    if not found.total:
        return ABSENT
    if found.unknown == found.total:
        return UNTOLD
    kinds = {"gpu": "GPU", "emulated": "emulated"}
    how = [f"{n} {kinds[kind]}" for kind, n in sorted(row.kinds.items()) if kind in kinds]
    how = how if level == "right" else []
    how += [f"{found.unknown} {UNTOLD}"] if found.unknown else []
    return f"{found.passed}/{found.total}" + (f" ({', '.join(how)})" if how else "")


def brief(every: Sequence[Row]) -> list[list[str]]:
    """The same as narrow as a terminal: without what is in brackets, and the last columns."""
    head, *body = lines(every)
    left_out = (*(f"fast_{p:g}" for p in SPEEDS[1:]), "attempts", "tokens", "minutes")
    kept = [n for n, name in enumerate(head) if name not in left_out]
    names = {title: name for name, title in LEVELS.items()}
    names |= {"samples": "n", LEVELS["cpu"]: "CPU", SPEED: "speed"}
    unknown = (UNTOLD, "not measured")
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


def markdown(report: Report, table: Sequence[Sequence[str]]) -> str:
    """The text of study.md."""
    head, *body = table
    cells = [head, ["---", "---", *["--:"] * (len(head) - 2)], *body]
    listed = [f"| {' | '.join(_cell(c) for c in line)} |" for line in cells]
    said = [f"- {note}" for note in notes(report)]
    return "\n".join([f"# Study: {_cell(title(report))}", "", *listed, "", *said]) + "\n"


def _cell(text: str) -> str:
    """A model's name is the user's own words."""
    seen = "".join(c if c.isprintable() else " " for c in text)
    return seen.replace("\\", "\\\\").replace("|", "\\|")


# --- for programs -----------------------------------------------------------------------------


def as_json(report: Report) -> str:
    """The text of study.json."""
    told = {
        "schema": SCHEMA,
        "flashwright": __version__,
        "settings": report.settings.record(),
        "open": report.open,
        "rows": [_record(row) for row in report.rows],
    }
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def _record(row: Row) -> dict[str, Any]:
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
