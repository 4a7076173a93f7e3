"""SVG elements, axes and marks as text. Colours come from the page's classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

STYLES = 9
"""Number of distinct line styles: the page has as many colours, dashes and marks."""


def tag(name: str, *inside: str, **attributes: object) -> Markup:
    """An element. Text and attributes are escaped; a trailing underscore of a name is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None and value != ""
    )
    body = Markup("").join(inside)
    return Markup(f"<{name}{written}>{body}</{name}>")  # every part is already escaped


def _plain(value: object) -> object:
    """An attribute value; floats are rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def text(x: float, y: float, said: str, class_: str = "", anchor: str = "start") -> Markup:
    """An SVG text element."""
    return tag("text", said, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """An SVG line between two points."""
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """An SVG path through points."""
    steps = " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))
    return tag("path", d=steps, class_=class_, fill="none")


_SHAPES = (
    "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0 -{d} 0z",  # circle
    "M-{r} -{r}h{d}v{d}h-{d}z",  # square
    "M0 -{r}L{r} {r}L-{r} {r}z",  # triangle
    "M0 -{r}L{r} 0L0 {r}L-{r} 0z",  # diamond
    "M0 {r}L{r} -{r}L-{r} -{r}z",  # triangle, down
    "M-{r} 0h{d}M0 -{r}v{d}",  # plus
    "M-{r} -{r}l{d} {d}M-{r} {r}l{d} -{d}",  # cross
    "M-{r} -{r}v{d}M{r} -{r}v{d}M-{r} 0h{d}",  # H
    "M-{r} 0L0 -{r}L{r} 0",  # roof
)


def mark(x: float, y: float, style: int, radius: float, class_: str = "mark") -> Markup:
    """A mark whose shape depends on the style."""
    shape = _SHAPES[style % len(_SHAPES)].format(r=f"{radius:g}", d=f"{2 * radius:g}")
    return tag("path", d=shape, class_=class_, transform=f"translate({x:.1f} {y:.1f})")


def picture(width: float, height: float, title: str, about: str, *inside: str) -> Markup:
    """A whole drawing with a title and description for screen readers."""
    head = (tag("title", title), tag("desc", about))
    named = f"{title}. {about}"
    return tag(
        "svg",
        *head,
        *inside,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=named,
    )


# --- axes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel position of a value."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        if high <= low:
            return (self.start + self.end) / 2
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def nice(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 up to at least `most`, about `count` steps."""
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def around(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a log scale that holds all positive values with a margin."""
    found = [v for v in values if v > 0 and math.isfinite(v)]
    low, high = (min(found), max(found)) if found else (1e-4, 1e-2)
    middle = math.sqrt(low * high)
    return min(low / 1.3, middle / 2.2), max(high * 1.3, middle * 2.2)


def steps(low: float, high: float) -> list[float]:
    """Ticks of a log scale: 1, 2, 5 times powers of ten, or only powers of ten if too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [f * 10.0**p for p in powers for f in (1, 2, 5)]
    inside = [v for v in fine if low <= v <= high]
    if len(inside) <= 6:
        return inside
    return [10.0**p for p in powers if low <= 10.0**p <= high]


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Label positions near the wanted ones, at least `gap` apart."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    floor = low
    for i in order:
        placed[i] = max(wanted[i], floor)
        floor = placed[i] + gap
    ceiling = high
    for i in reversed(order):  # those pushed past the end move back up, and push the others
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
