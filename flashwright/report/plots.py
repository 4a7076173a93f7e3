"""The plots of a report: speed over length, errors against the library's, error maps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flashwright.judge.trial import MOST
from flashwright.measure.records import OURS
from flashwright.report import words
from flashwright.report.model import Bench, CellResults, ErrorMap, RecordedCase, RecordedVerdict
from flashwright.report.svg import (
    STYLES,
    Scale,
    apart,
    around,
    line,
    mark,
    nice,
    path,
    picture,
    steps,
    tag,
    text,
)

LIMIT = MOST
"""The judge's limit as a multiple of the library's error: the bar in an error plot."""
STEPS = 9  # of the heat map's colours
LONGEST = 16  # characters of a label beside its line


# --- speed ------------------------------------------------------------------------------------

W, H = 350.0, 214.0
LEFT, RIGHT, TOP, BOTTOM = 34.0, 98.0, 12.0, 26.0


@dataclass(frozen=True)
class PlotSeries:
    """A contestant's line in the plots, with its style."""

    name: str
    title: str
    style: int

    @property
    def sample(self) -> Markup:
        """Its line and mark, for the legend."""
        inside = (line(1, 6, 27, 6, "curve"), mark(14, 6, self.style, 3.2))
        return tag(
            "svg", *inside, viewBox="0 0 28 12", class_=f"sample s{self.style}", aria_hidden="true"
        )


def contestants(bench: Bench) -> list[PlotSeries]:
    """Ours first; each keeps its style in every chart of the run."""
    others = [PlotSeries(p, p, 1 + i % (STYLES - 1)) for i, p in enumerate(bench.peers)]
    return [PlotSeries(OURS, "Flashwright", 0), *others]


def speed(bench: Bench, kernel: str) -> Markup:
    """TFLOPS over length for one kernel, a line for each contestant.

    All charts of a run share one scale from 0, so they can be compared by eye.
    """
    cells = [c for c in bench.of(kernel) if c.length]
    lengths = sorted({c.length for c in cells if c.length})
    if not lengths:
        return Markup("")
    ticks = nice(_most(bench))
    x = Scale(lengths[0], lengths[-1], LEFT + 8, W - RIGHT - 6, log=True)
    y = Scale(0, ticks[-1], H - BOTTOM, TOP)
    order = contestants(bench)
    parts = [*_grid(ticks, lengths, x, y)]
    ceiling = bench.ceiling(kernel)
    if ceiling is not None:
        parts.append(line(LEFT, y(ceiling), W - RIGHT, y(ceiling), "ceiling"))
        parts.append(text(LEFT + 4, y(ceiling) - 4, f"matmul {words.rate(ceiling)}", "small"))
    parts += [_series(cells, who, x, y) for who in reversed(order)]  # ours last, on top
    parts += _names(cells, order, y)
    parts += _bands(cells, order, x)
    about = f"TFLOPS against length for {len(order)} contestants; the table below has the figures."
    return picture(W, H, f"Speed of {kernel} on {bench.record.card}", about, *parts)


def _most(bench: Bench) -> float:
    """The top of the scale: the highest rate or ceiling."""
    rates = [n.tflops for c in bench.cells for n in c.numbers.values()]
    ceilings = [found for k in bench.kernels if (found := bench.ceiling(k)) is not None]
    return max([*rates, *ceilings], default=0.0)


def _grid(ticks: Sequence[float], lengths: Sequence[int], x: Scale, y: Scale) -> list[Markup]:
    parts = []
    for tick in ticks:
        parts.append(line(LEFT, y(tick), W - RIGHT, y(tick), "grid" if tick else "axis"))
        parts.append(text(LEFT - 5, y(tick) + 3.5, f"{tick:g}", "tick", "end"))
    places = [x(length) for length in lengths]
    shown = -math.inf
    for length, place in zip(lengths, places, strict=True):
        parts.append(line(place, H - BOTTOM, place, H - BOTTOM + 3, "axis"))
        if place - shown >= 24:
            parts.append(text(place, H - BOTTOM + 14, words.size(length), "tick", "middle"))
            shown = place
    return parts


def _series(cells: Sequence[CellResults], who: PlotSeries, x: Scale, y: Scale) -> Markup:
    """A contestant's line, with gaps for missing figures and the spread as bars."""
    runs: list[list[tuple[float, float]]] = [[]]
    marks: list[Markup] = []
    for cell in cells:
        number = cell.numbers.get(who.name)
        if number is None or not cell.length:
            runs.append([])
            continue
        at = (x(cell.length), y(number.tflops))
        runs[-1].append(at)
        low, high = (y(number.tflops * (1 + s * number.spread)) for s in (-1, 1))
        if abs(low - high) >= 1:
            marks.append(line(at[0], low, at[0], high, "spread"))
        marks.append(mark(*at, who.style, 3.4 if who.name == OURS else 2.6))
    lines = [path(run, "curve") for run in runs if len(run) > 1]
    if not marks:
        return Markup("")
    return tag("g", *lines, *marks, class_=f"series s{who.style}", data_who=str(who.style))


def _names(cells: Sequence[CellResults], order: Sequence[PlotSeries], y: Scale) -> list[Markup]:
    """Each line's name at its right end."""
    ends = []
    for who in order:
        rates = [r for c in cells if (r := c.tflops(who.name)) is not None]
        if rates:
            ends.append((who, y(rates[-1])))
    places = apart([at for _, at in ends], 11.5, TOP + 2, H - BOTTOM)
    return [
        tag(
            "g",
            text(W - RIGHT + 4, place + 3.5, _cut(who.title), "name"),
            class_=f"series s{who.style}",
            data_who=str(who.style),
        )
        for (who, _), place in zip(ends, places, strict=True)
    ]


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _bands(cells: Sequence[CellResults], order: Sequence[PlotSeries], x: Scale) -> list[Markup]:
    """Invisible columns, one for each length, that carry the tooltips."""
    bands = []
    for i, cell in enumerate(cells):
        assert cell.length
        here = x(cell.length)
        low = (x(cells[i - 1].length or 1) + here) / 2 if i else LEFT
        last = i + 1 == len(cells)
        high = W - RIGHT if last else (x(cells[i + 1].length or 1) + here) / 2
        tip = "\n".join([cell.name, *(_tip(cell, who) for who in order)])
        bands.append(
            tag(
                "rect",
                x=low,
                y=TOP,
                width=max(high - low, 1.0),
                height=H - TOP - BOTTOM,
                class_="band",
                data_tip=tip,
                data_x=here,
            )
        )
    return bands


def _tip(cell: CellResults, who: PlotSeries) -> str:
    number, absent = cell.numbers.get(who.name), cell.absent.get(who.name)
    if number is not None:
        line_ = f"{who.title}: {words.rate(number.tflops)} TFLOPS ± {words.share(number.spread)}"
        ratio = cell.ratio(who.name) if who.name != OURS else None
        return line_ if ratio is None else f"{line_}, ours {words.ratio(ratio)} times as fast"
    return f"{who.title}: {absent.why if absent else 'not measured'}"


# --- errors -----------------------------------------------------------------------------------

DOTS_W, DOTS_LEFT, DOTS_TOP = 420.0, 70.0, 8.0
FEW = 24  # cases up to which each has more room


def errors(verdict: RecordedVerdict, output: str = "O") -> Markup:
    """Each case's error and the library's beside it, on a log scale, by kind of inputs."""
    cases = [c for c in verdict.cases if c.output == output]
    if not cases:
        return Markup("")
    pitch = 9.0 if len(cases) <= FEW else 6.0
    kinds = list(dict.fromkeys(c.kind for c in cases))
    bottom = DOTS_TOP + len(cases) * pitch + len(kinds) * 8
    x, parts = _error_axis(cases, bottom)
    place = DOTS_TOP
    for kind in kinds:
        mine = [c for c in cases if c.kind == kind]
        middle = place + (len(mine) + 1) * pitch / 2
        parts.append(text(DOTS_LEFT - 6, middle + 3.5, kind or output, "tick", "end"))
        parts += [_dots(case, place + i * pitch, x) for i, case in enumerate(mine, 1)]
        place += len(mine) * pitch + 8
        parts.append(line(4, place, DOTS_W - 4, place, "grid"))
    about = "A row for each problem: a dot is the kernel, a ring the library, a bar the limit."
    title = f"Error of {output} relative to its RMS"
    return picture(DOTS_W, bottom + 20, title, about, *parts)


def _error_axis(cases: Sequence[RecordedCase], bottom: float) -> tuple[Scale, list[Markup]]:
    """A log scale, with separate positions for 0 (left) and non-finite values (right)."""
    values = [v for c in cases for v in (c.relative_rms, c.library_rms, _limit(c)) if v is not None]
    left, right = DOTS_LEFT + 10, DOTS_W - 14
    parts = []
    if 0 in values:
        parts.append(line(left, DOTS_TOP, left, bottom, "grid"))
        parts.append(text(left, bottom + 14, "0", "tick", "middle"))
        left += 30
    if not all(map(math.isfinite, values)):
        parts.append(text(right, bottom + 14, "not finite", "tick", "end"))
        right -= 50
    low, high = around(values)
    x = Scale(low, high, left, right, log=True)
    for tick in steps(low, high):
        parts.append(line(x(tick), DOTS_TOP, x(tick), bottom, "grid"))
        parts.append(
            text(x(tick), bottom + 14, f"{tick:.0e}".replace("e-0", "e-"), "tick", "middle")
        )
    return x, parts


def _limit(case: RecordedCase) -> float | None:
    return case.library_rms * LIMIT if case.library_rms else None


def _dots(case: RecordedCase, y: float, x: Scale) -> Markup:
    """The marks of one case: our error and the library's."""

    def at(value: float) -> float:
        if not math.isfinite(value):
            return DOTS_W - 14
        return x(value) if value > 0 else DOTS_LEFT + 10

    parts = []
    limit = _limit(case)
    if case.library_rms is not None:
        parts.append(line(at(case.library_rms), y, at(case.relative_rms), y, "link"))
        parts.append(tag("circle", cx=at(case.library_rms), cy=y, r=2.4, class_="ring"))
    if limit is not None:
        parts.append(line(at(limit), y - 2.6, at(limit), y + 2.6, "limit"))
    style = "dot" if case.ok and math.isfinite(case.relative_rms) else "dot bad"
    parts.append(tag("circle", cx=at(case.relative_rms), cy=y, r=2.6, class_=style))
    row = {"x": DOTS_LEFT, "y": y - 3, "width": DOTS_W - DOTS_LEFT, "height": 6}
    parts.append(tag("rect", **row, class_="band", data_tip=_case_tip(case)))
    return tag("g", *parts)


def _case_tip(case: RecordedCase) -> str:
    said = [f"{case.kind} {case.output}: {case.problem}", f"error {words.error(case.relative_rms)}"]
    if case.library_rms is not None:
        said.append(f"library {words.error(case.library_rms)}")
    if case.ratio is not None:
        said.append(f"{words.ratio(case.ratio)} times the library's")
    return "\n".join([*said, case.reason] if case.reason else said)


# --- where the error is -----------------------------------------------------------------------

MAP_W, MAP_HIGH, MAP_LEFT, MAP_TOP = 420.0, 270.0, 24.0, 8.0


def heat(found: ErrorMap) -> Markup:
    """A heat map of the largest error in each part of O, on a log scale."""
    rows = [row for row in found.error if row]
    if not rows:
        return Markup("")
    values = [v for row in rows for v in row if math.isfinite(v) and v > 0]
    low, high = (min(values), max(values)) if values else (1e-4, 1e-2)
    columns = max(len(row) for row in rows)
    across, down = (MAP_W - MAP_LEFT - 8) / columns, MAP_HIGH / len(rows)
    squares: dict[str, list[str]] = {}
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            at = f"M{MAP_LEFT + j * across:.1f} {MAP_TOP + i * down:.1f}"
            shape = f"{at}h{across:.2f}v{down:.2f}h-{across:.2f}z"
            squares.setdefault(_step(value, low, high), []).append(shape)
    parts = [tag("path", d="".join(d), class_=style) for style, d in sorted(squares.items())]
    width, height = columns * across, len(rows) * down
    box = {"x": MAP_LEFT, "y": MAP_TOP, "width": width, "height": height}
    parts.append(tag("rect", **box, class_="frame", data_grid=_grid_values(rows)))
    middle = MAP_TOP + height / 2
    parts.append(
        tag(
            "text",
            "query →",
            class_="tick",
            text_anchor="middle",
            transform=f"translate(14 {middle:.1f}) rotate(90)",
        )
    )
    parts.append(text(MAP_LEFT + width / 2, MAP_TOP + height + 13, "head dim →", "tick", "middle"))
    parts += _heat_scale(low, high, MAP_TOP + height + 24, MAP_LEFT, width)
    return picture(MAP_W, MAP_TOP + height + 48, "Where in O the error is", where(rows), *parts)


def _step(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "heat bad"
    if value <= 0:
        return "heat h0"
    if high <= low:
        return f"heat h{STEPS // 2}"
    share = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return f"heat h{min(STEPS - 1, int(share * STEPS))}"


def _heat_scale(low: float, high: float, y: float, x: float, width: float) -> list[Markup]:
    each = width / STEPS
    parts = [
        tag("rect", x=x + i * each, y=y, width=each, height=8, class_=f"heat h{i}")
        for i in range(STEPS)
    ]
    parts.append(text(x, y + 19, words.error(low), "tick"))
    parts.append(text(x + width, y + 19, words.error(high), "tick", "end"))
    return parts


def _grid_values(rows: Sequence[Sequence[float]]) -> str:
    """The numbers behind the colours, for the tooltip."""
    return json.dumps([[words.error(v) for v in row] for row in rows], separators=(",", ":"))


def where(rows: Sequence[Sequence[float]]) -> str:
    """The part of O with the greatest error, in words."""
    found = [(v, i, j) for i, row in enumerate(rows) for j, v in enumerate(row)]
    bad = sum(not math.isfinite(v) for v, _, _ in found)
    finite = [one for one in found if math.isfinite(one[0])]
    line_ = f"{bad} of {len(found)} parts are not finite. " if bad else ""
    if not finite:
        return line_
    value, i, j = max(finite)
    return (
        f"{line_}The greatest error, {words.error(value)}, is in row {i + 1} of {len(rows)} and "
        f"column {j + 1} of {len(rows[i])}; the least is {words.error(min(finite)[0])}."
    )
