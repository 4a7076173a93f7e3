"""study.html: speeds, funnels and the table on one page, all inline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flashwright.report.svg import (
    Scale,
    apart,
    around,
    line,
    mark,
    path,
    picture,
    steps,
    tag,
    text,
)
from flashwright.study.funnel import FunnelRow
from flashwright.study.ways import LEVELS, WAYS
from flashwright.version import __version__

W, H = 420.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 72.0, 12.0, 26.0
SHORT = {"sketch": "sketch", "code": "code", "cpu": "CPU", "compiles": "compiles", "right": "right"}


def html(
    title: str, notes: Sequence[str], table: Sequence[Sequence[str]], every: Sequence[FunnelRow]
) -> str:
    """The text of study.html: one self-contained page."""
    css = (resources.files("flashwright.report") / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    template = (resources.files(__package__) / "page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        title=title,
        notes=notes,
        head=table[0],
        body=table[1:],
        speeds=speeds(every),
        ended=any(row.outcomes for row in every),
        drawings=drawings([row for row in every if row.operator in _falling(every)]),
        css=Markup(css),
        policy=f"default-src 'none'; style-src 'sha256-{digest}'",
        version=__version__,
    )


# --- speeds -----------------------------------------------------------------------------------

PITCH, AIR, SPEED_LEFT, SPEED_W = 15.0, 12.0, 190.0, 560.0


def speeds(every: Sequence[FunnelRow]) -> Markup:
    """The speed of each operator by each way over the best peer's, on a log scale around 1."""
    timed = [(row, row.speed) for row in every if row.speed is not None]
    if not timed:
        return Markup("")
    names = list(dict.fromkeys(row.operator for row, _ in timed))
    bottom = TOP + len(timed) * PITCH + len(names) * AIR
    low, high = around([1.0, *(speed for _, speed in timed)])
    x = Scale(low, high, SPEED_LEFT + 26, SPEED_W - 50, log=True)
    parts = [*_ratio_grid(x, bottom)]
    y = TOP
    for name in names:
        mine = [(row, speed) for row, speed in timed if row.operator == name]
        parts.append(text(4, y + PITCH, name, "caption"))
        for row, speed in mine:
            y += PITCH
            parts.append(_stick(row, speed, x, y))
        y += AIR
    description = "; ".join(f"{row.operator}, {row.way.name}: {speed:.2f}" for row, speed in timed)
    title = "Speed over the best peer's"
    return picture(SPEED_W, bottom + BOTTOM, title, description, *parts)


def _stick(row: FunnelRow, speed: float, x: Scale, y: float) -> Markup:
    """A mark at the speed, and a line to it from 1: to the right is faster than the peer."""
    style = [*WAYS].index(row.way.name)
    side = 8 if speed >= 1 else -8
    parts = [
        line(x(1.0), y - 4, x(speed), y - 4, "curve"),
        mark(x(speed), y - 4, style, 3.6),
        text(SPEED_LEFT - 8, y, row.way.name, "name", "end"),
        text(x(speed) + side, y, f"{speed:.2f}", "name", "start" if side > 0 else "end"),
    ]
    return tag("g", *parts, class_=f"series s{style}")


def _ratio_grid(x: Scale, bottom: float) -> list[Markup]:
    parts = []
    for value in sorted({1.0, *steps(x.low, x.high)}):
        kind = "axis" if value == 1 else "grid"
        parts.append(line(x(value), TOP, x(value), bottom, kind))
        parts.append(text(x(value), bottom + 15, f"{value:g}", "tick", "middle"))
    return parts


# --- how far ----------------------------------------------------------------------------------


def _falling(every: Sequence[FunnelRow]) -> set[str]:
    """The operators with a sample that missed a level; the lines of the others would be flat."""
    return {row.operator for row in every if any(share < 1 for _, share in _known(row))}


def drawings(every: Sequence[FunnelRow]) -> list[tuple[str, Markup]]:
    """A funnel for each operator; the one over all operators comes first."""
    if not every:
        return []
    names = list(dict.fromkeys(row.operator for row in reversed(every)))
    order = [names[0], *reversed(names[1:])]
    found = ((name, funnel([row for row in every if row.operator == name])) for name in order)
    return [(name, drawing) for name, drawing in found if drawing]


def funnel(ways: Sequence[FunnelRow]) -> Markup:
    """The fraction of samples that reached each level, a line for each way."""
    shown = [(row, known) for row in ways if (known := _known(row))]
    if not shown:
        return Markup("")
    names = [*LEVELS]
    x = Scale(0, len(names) - 1, LEFT + 14, W - RIGHT - 10)
    y = Scale(0, 1, H - BOTTOM, TOP)
    parts = [*_grid(x, y)]
    ends = apart([y(known[-1][1]) for _, known in shown], 12, TOP, H - BOTTOM)
    for (row, known), label in zip(shown, ends, strict=True):
        style = [*WAYS].index(row.way.name)
        points = [(x(at), y(share)) for at, share in known]
        last = points[-1][0] + 10
        inside = [path(points, "curve"), *(mark(px, py, style, 3.6) for px, py in points)]
        inside.append(text(last, label + 4, row.way.name, "name"))
        parts.append(tag("g", *inside, class_=f"series s{style}"))
    description = "; ".join(
        f"{row.way.name}: " + ", ".join(f"{LEVELS[names[at]]} {share:.0%}" for at, share in known)
        for row, known in shown
    )
    title = f"How far the samples came: {shown[0][0].operator}"
    return picture(W, H, title, description, *parts)


def _known(row: FunnelRow) -> list[tuple[int, float]]:
    """Index and fraction of each level whose results are known."""
    found = ((at, row.levels.get(name)) for at, name in enumerate(LEVELS))
    shares = ((at, level.share) for at, level in found if level)
    return [(at, share) for at, share in shares if share is not None]


def _grid(x: Scale, y: Scale) -> list[Markup]:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(share)
        parts.append(line(LEFT, at, W - RIGHT, at, "axis" if share == 0 else "grid"))
        parts.append(text(LEFT - 5, at + 3.5, f"{share:.0%}", "tick", "end"))
    for number, name in enumerate(LEVELS):
        parts.append(text(x(number), H - BOTTOM + 15, SHORT[name], "tick", "middle"))
    return parts
