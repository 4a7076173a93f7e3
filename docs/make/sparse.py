"""The picture of sparse attention: time against length, and against the blocks that are visited.

    python -m docs.make.sparse

Both charts are of what `tests/gpu/nsa_speed.py` and `tests/gpu/block_speed.py` printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from docs.make.speed import CAPTION, EDGE, GAP, paper, standing_alone, style
from flashwright.report import words
from flashwright.report.plots import BOTTOM, LEFT, RIGHT, TOP, H, W
from flashwright.report.svg import Scale, apart, around, line, mark, nice, path, steps, tag, text

DOCS = Path(__file__).parents[1]
PRINTED = DOCS / "results" / "sparse-h200"
PICTURE = DOCS / "pictures" / "sparse.svg"
TITLE = "Sparse attention on an NVIDIA H200, bf16"
LENGTH = re.compile(r"^(.+?), (\d+) tokens +([\d.]+)(?: +([\d.]+))?", re.MULTILINE)
BLOCKS = re.compile(r"^ *(\d+) blocks: +([\d.]+) ms.*? ([\d.]+) ms", re.MULTILINE)
HEAD = 48.0
Lines = Mapping[str, Sequence[tuple[float, float]]]
"""The points of each line by its name: what they are over, and milliseconds."""


def by_length() -> Lines:
    """NSA, compressed and selected blocks together, beside fla and our causal attention."""
    found: dict[str, list[tuple[float, float]]] = {"NSA": [], "NSA, fla": [], "causal": []}
    for name, tokens, ours, theirs in LENGTH.findall((PRINTED / "nsa.txt").read_text()):
        if name == "whole":
            found["NSA"].append((int(tokens), float(ours)))
            found["NSA, fla"].append((int(tokens), float(theirs)))
        elif name == "causal attention":
            found["causal"].append((int(tokens), float(ours)))
    return found


def by_blocks() -> Lines:
    """32k tokens with some of the blocks of keys, chosen at random."""
    rows = BLOCKS.findall((PRINTED / "blocks.txt").read_text())
    each = [tuple(map(float, row)) for row in rows]
    return {
        "backward": [(blocks, ms) for blocks, _, ms in each],
        "forward": [(blocks, ms) for blocks, ms, _ in each],
    }


def draw() -> str:
    """The whole SVG file."""
    width, height = 2 * W + GAP + 2 * EDGE, HEAD + H + CAPTION + GAP
    parts = [tag("style", Markup(style())), paper(width, height), text(EDGE, 24, TITLE, "title")]
    panels = (
        ("64 query heads on 4: ms against tokens", by_length(), True),
        ("16 heads, 32k tokens: ms against blocks visited", by_blocks(), False),
    )
    for number, (caption, lines, log) in enumerate(panels):
        x = EDGE + number * (W + GAP)
        parts.append(text(x, HEAD + 12, caption, "caption"))
        inside = _chart(lines, log)
        parts.append(tag("svg", *inside, x=x, y=HEAD + CAPTION, width=W, height=H))
    return standing_alone(width, height, TITLE, _in_words(), *parts)


def _in_words() -> str:
    last = {name: points[-1] for name, points in by_length().items()}
    times = ", ".join(f"{name} {ms:g} ms" for name, (_, ms) in last.items())
    return f"At {words.size(int(last['NSA'][0]))} tokens: {times}"


def _chart(lines: Lines, log: bool) -> list[Markup]:
    """Lines over one pair of scales, with their names at the right end."""
    along = [at for points in lines.values() for at, _ in points]
    every = [ms for points in lines.values() for _, ms in points]
    ticks = steps(*around(every)) if log else nice(max(every))
    low, high = around(every) if log else (0.0, ticks[-1])
    x = Scale(min(along) if log else 0.0, max(along), LEFT + 8, W - RIGHT - 6, log=log)
    y = Scale(low, high, H - BOTTOM, TOP, log=log)
    parts = [line(LEFT, H - BOTTOM, W - RIGHT, H - BOTTOM, "axis")]
    for tick in ticks:
        parts.append(line(LEFT, y(tick), W - RIGHT, y(tick), "grid"))
        parts.append(text(LEFT - 5, y(tick) + 3.5, f"{tick:g}", "tick", "end"))
    for at in sorted(set(along)) if log else nice(max(along))[:-1]:
        parts.append(line(x(at), H - BOTTOM, x(at), H - BOTTOM + 3, "axis"))
        parts.append(text(x(at), H - BOTTOM + 14, words.size(int(at)), "tick", "middle"))
    ends = apart([y(points[-1][1]) for points in lines.values()], 12, TOP, H - BOTTOM)
    for number, ((name, points), end) in enumerate(zip(lines.items(), ends, strict=True)):
        placed = [(x(at), y(ms)) for at, ms in points]
        marks = [mark(*at, number, 2.8) for at in placed]
        label = text(W - RIGHT + 4, end + 3.5, name, "name")
        parts.append(tag("g", path(placed, "curve"), *marks, label, class_=f"s{number}"))
    return parts


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
