"""The picture of the README: our speed beside three libraries, from the records of a benchmark.

    python -m docs.make.speed

Charts, colours and marks are those of `flashwright report`. The records decide everything in it, so
a test draws it again and compares.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from flashwright.report import plots, ratios, words
from flashwright.report.gather import gather
from flashwright.report.model import Bench
from flashwright.report.svg import line, mark, picture, tag, text

DOCS = Path(__file__).parents[1]
RECORDS = DOCS / "results" / "grid-h200" / "records.jsonl"
PICTURE = DOCS / "pictures" / "speed.svg"
PANELS = ("gqa d64 full", "gqa d64 causal", "gqa d128 full", "gqa d128 causal")
EDGE, HEAD, CAPTION, GAP = 16.0, 76.0, 20.0, 8.0
SETTING = re.compile(r"--([\w-]+): light-dark\((.*?), (.*?)\);")
RULES = r"^(?:svg text|svg \.tick|\.(?:grid|axis|ceiling|curve|mark|spread|name|band|s\d)\b).*$"


def draw() -> str:
    """The whole SVG file."""
    (bench,) = gather([RECORDS]).benches
    width = 2 * plots.W + GAP + 2 * EDGE
    height = HEAD + 2 * (plots.H + CAPTION + GAP)
    parts = [tag("style", Markup(style())), paper(width, height), *_heading(bench)]
    for number, kernel in enumerate(PANELS):
        x = EDGE + number % 2 * (plots.W + GAP)
        y = HEAD + number // 2 * (plots.H + CAPTION + GAP)
        parts.append(text(x, y + 12, _caption(kernel), "caption"))
        chart = _still(plots.speed(bench, kernel))
        inside = tag("svg", chart, x=x, y=y + CAPTION, width=plots.W, height=plots.H)
        parts.append(inside)
    return standing_alone(width, height, _title(bench), _in_words(bench), *parts)


def standing_alone(width: float, height: float, title: str, about: str, *inside: str) -> str:
    """The text of an SVG file."""
    drawn = picture(width, height, title, about, *inside)
    return str(drawn).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _title(bench: Bench) -> str:
    return f"Attention forward on {bench.record.card}, bf16, TFLOPS against sequence length"


def _in_words(bench: Bench) -> str:
    """The ratios over every cell of the run, not only the four kernels that are drawn."""
    found = [r for peer in bench.peers if (r := ratios.against(bench, peer)) is not None]
    told = ", ".join(f"{words.ratio(r.mean)}x {r.peer}" for r in found)
    cells = max(r.cells for r in found)
    return f"Over {cells} cells of MHA, GQA and MQA: {told} (geometric means)"


def _heading(bench: Bench) -> list[Markup]:
    parts = [
        text(EDGE, 24, _title(bench), "title"),
        text(EDGE, 43, _in_words(bench), "about"),
    ]
    x = EDGE
    for who in plots.contestants(bench):
        inside = (line(x, 58, x + 26, 58, "curve"), mark(x + 13, 58, who.style, 3.2))
        label = text(x + 32, 62, who.title, "name")
        parts.append(tag("g", *inside, label, class_=f"s{who.style}"))
        x += 56 + 6.2 * len(who.title)
    return parts


def _caption(kernel: str) -> str:
    variant, width, mask = kernel.split()
    return f"{variant.upper()}, head dim {width[1:]}, {mask}"


def _still(chart: Markup) -> Markup:
    """Without the invisible columns that carry the page's tooltips."""
    return Markup(re.sub(r'<rect[^>]*class="band"[^>]*></rect>', "", chart))


def paper(width: float, height: float) -> Markup:
    """The background of a picture."""
    return tag("rect", width=width, height=height, rx=8, class_="paper")


def style() -> str:
    """The page's colours and the rules of its charts, for a picture that stands alone."""
    css = (resources.files("flashwright.report") / "page.css").read_text(encoding="utf-8")
    settings = SETTING.findall(css)
    light = " ".join(f"--{name}: {value};" for name, value, _ in settings)
    dark = " ".join(f"--{name}: {value};" for name, _, value in settings)
    rules = re.findall(RULES, css, re.MULTILINE)
    own = [
        "svg .title { font-size: 15px; font-weight: 650; }",
        "svg .about { font-size: 12px; }",
        "svg .caption { font-size: 12px; font-weight: 600; }",
        ".paper { fill: var(--bg); stroke: var(--line); }",
    ]
    sans = re.search(r"--sans: .*?;", css)
    assert sans is not None
    roots = [
        f":root {{ {light} {sans[0]} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}",
    ]
    return "\n".join(["", *roots, *rules, *own, ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
