"""The forms of a report: the same numbers in each, and nothing in them that acts."""

from __future__ import annotations

import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from flashwright.measure.records import OURS, AbsentRecord
from flashwright.report import markdown, page, plots, svg, terminal
from flashwright.report.gather import gather
from flashwright.report.model import ErrorMap, RecordedCase, RecordedVerdict, Report
from tests.unit import report_example as example

EVIL = "\"'></script><img src=x onerror=alert(1)>"
NAME = "mha d64 causal"


def on_terminal(report: Report, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    for part in terminal.render(report, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Reader(HTMLParser):
    """The elements of a page, the text of each table, and all text outside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._table = ""
        self._cell = self._raw = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        self._raw = tag in ("script", "style")
        if tag == "table":
            self._table = found.get("id") or ""
            self.tables[self._table] = []
        elif tag == "tr" and self._table:
            self.tables[self._table].append([])
        elif tag in ("td", "th") and self._table:
            self.tables[self._table][-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._raw = False
        if tag == "table":
            self._table = ""
        elif tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text += data
        if self._cell and self._table:
            self.tables[self._table][-1][-1] += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The made-up benchmark."""
    return gather([example.write_records(tmp_path_factory.mktemp("run") / "records.jsonl")])


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    """Its page."""
    return page.html(report)


@pytest.fixture(scope="module")
def reader(html: str) -> Reader:
    """Its page, taken apart."""
    return read(html)


@pytest.fixture(scope="module")
def screen(report: Report) -> str:
    """It in a terminal."""
    return on_terminal(report)


# --- nothing acts -----------------------------------------------------------------------------


def hostile(folder: Path) -> Report:
    """A package and a benchmark with markup wherever text can stand."""
    told = example.rejected(example.SPECS[NAME], EVIL)
    told |= {"candidate": EVIL, "library": EVIL, "notes": [EVIL], "device": EVIL}
    told["checks"][0] |= {"name": EVIL, "question": EVIL, "note": EVIL}
    told["cases"][0] |= {"kind": EVIL, "reason": EVIL, "output": EVIL}
    package = example.write_package(folder / "kernel", told, claimed=[EVIL], not_claimed=[EVIL])
    (package / "code.tl").write_text(f"// {EVIL}\nCopy {EVIL} from global to shared\n")
    (package / "reasoning.md").write_text(
        f"# {EVIL}\n\n{EVIL}\n\n[a](javascript:alert(1)) ![b](http://x.invalid/b.png)\n\n"
        f"| a |\n|--:|\n| {EVIL} |\n"
    )
    run = example.run_record(
        title=EVIL, card=EVIL, environment={EVIL: EVIL}, contestants=(OURS, EVIL)
    )
    kernel = example.kernel_record(NAME, tl=EVIL, source=EVIL, ptxas={EVIL: 1}, verdict=told)
    lines = [
        run,
        kernel,
        example.number(f"{NAME} 512", OURS, 100.0),
        example.number(f"{NAME} 512", EVIL, 100.0),
        AbsentRecord(run=example.RUN, cell=f"{NAME} 1024", who=EVIL, why=EVIL, offence=EVIL),
    ]
    return gather([package, example.write_records(folder / "records.jsonl", lines)])


def test_nothing_in_a_file_becomes_markup(tmp_path: Path) -> None:
    html = page.html(hostile(tmp_path))
    reader = read(html)
    names = {tag for tag, _ in reader.elements}
    assert not names & {"img", "iframe", "object", "embed", "link", "form"}
    assert sum(tag == "script" for tag, _ in reader.elements) == 2
    attributes = [(key, value) for _, attrs in reader.elements for key, value in attrs.items()]
    assert not [key for key, _ in attributes if key.startswith("on") or key == "style"]
    assert not [key for key, _ in attributes if key in ("src", "srcset", "action")]
    assert all(re.match("#|https?:", v or "") for k, v in attributes if k == "href")
    assert reader.text.count(EVIL) > 20  # it is there, as text


def test_the_page_asks_for_nothing_from_anywhere(html: str, reader: Reader) -> None:
    policy = next(a["content"] for _, a in reader.elements if "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:|//)""", html)


def test_data_in_a_script_cannot_end_it() -> None:
    data = page._data([EVIL, "\u2028&"])
    assert "<" not in data
    assert json.loads(data) == [EVIL, "\u2028&"]


def test_hostile_text_stays_text_in_markdown_and_cannot_steer_a_terminal(tmp_path: Path) -> None:
    report = hostile(tmp_path)
    trusting = MarkdownIt("commonmark", {"html": True}).enable("table")
    reader = read(trusting.render(markdown.render(report)))
    assert not {tag for tag, _ in reader.elements} & {"img", "script"}
    assert reader.text.count(EVIL) > 10
    escape = "\x1b]0;mine\x07"
    lines = [
        example.run_record(card=escape, contestants=(OURS, escape)),
        example.kernel_record(NAME, why=escape, reasoning=escape),
        AbsentRecord(run=example.RUN, cell=f"{NAME} 512", who=OURS, why=escape),
    ]
    report = gather([example.write_records(tmp_path / "records.jsonl", lines)])
    for text in (on_terminal(report), markdown.render(report)):
        assert "\x1b" not in text
        assert "\x07" not in text


# --- the same everywhere ----------------------------------------------------------------------


def test_markdown_has_the_numbers_of_the_page(report: Report, reader: Reader) -> None:
    there = reader.tables["cells-0"][2:]
    rows = [line.strip("| ").split(" | ") for line in markdown.render(report).splitlines()]
    found = [row for row in rows if len(row) == len(there[0]) and row[0] in example.SPECS]
    assert found == there
    assert len(there) == len(example.SPECS) * len(example.LENGTHS)


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_has_the_numbers_of_the_page(
    report: Report, reader: Reader, width: int
) -> None:
    table = reader.tables["cells-0"]
    heads = [head.strip() for head in table[1]]
    last = len(heads) - 1 - heads[::-1].index("fastest peer")
    kept = [*range(1, 2 + 1 + len(example.PEERS)), last, heads.index("spread")]
    shown = on_terminal(report, width)
    for row in table[2:]:
        wanted = r"\s+".join(re.escape(row[i]) for i in kept)
        assert re.search(rf"\s{wanted}\s", shown), row


def test_all_forms_say_the_same_headline(report: Report, reader: Reader, screen: str) -> None:
    html, text = reader.text, markdown.render(report)
    screen = re.sub(r"\s+", " ", screen)
    for words in (
        "1 of 12 kernels rejected: replay",
        f"11 of 12 kernels right on {example.CARD}",
        "the outputs of two calls with different inputs are the same",
    ):
        assert words in html
        assert words in text
        assert words in screen
    for mean in re.findall(r"- (\d+\.\d+) times as fast as (.+?) \(", text):
        assert f"{mean[0]} times as fast as {mean[1]}" in screen
        assert re.search(rf"{mean[0]}×\s+{mean[1]}\s", html)


def test_why_somebody_has_no_figure_is_told_in_every_form(
    report: Report, reader: Reader, screen: str
) -> None:
    for text in (reader.text, markdown.render(report), re.sub(r"\s+", " ", screen)):
        assert "it takes no single kv head (made up)" in text


def test_the_page_is_the_same_each_time(report: Report, html: str) -> None:
    assert page.html(report) == html


# --- drawings ---------------------------------------------------------------------------------


def test_a_chart_has_a_line_for_each_and_leaves_out_what_was_not_measured(report: Report) -> None:
    bench = report.benches[0]
    right = plots.speed(bench, "mha d64 full")
    assert right.count('class="curve"') == 1 + len(example.PEERS)
    rejected = plots.speed(bench, example.REJECTED)
    assert 's0"' not in rejected
    assert "the judge rejects it" in rejected  # the tooltip says why
    assert "matmul 690" in right


def test_charts_of_a_run_have_one_scale_from_zero(report: Report) -> None:
    bench = report.benches[0]
    ticks = [
        re.findall(r'text-anchor="end"[^>]*>([\d.]+)<', plots.speed(bench, name))
        for name in bench.kernels
    ]
    assert ticks[0][0] == "0"
    assert all(one == ticks[0] for one in ticks)
    assert float(ticks[0][-1]) >= example.CEILING


def test_errors_that_no_log_scale_has_are_drawn_all_the_same() -> None:
    cases = tuple(
        RecordedCase(ok=value < 1, relative_rms=value, library_rms=library, kind="normal")
        for value, library in ((0.0, 0.0), (1e-3, 2e-3), (float("inf"), 1e-3), (float("nan"), None))
    )
    drawn = plots.errors(RecordedVerdict(ok=False, cases=cases))
    assert drawn.count('class="dot') == 4
    assert drawn.count('class="dot bad"') == 2
    assert ">0</text>" in drawn
    assert "not finite" in drawn
    assert "nan" not in re.sub(r'data-tip="[^"]*"', "", drawn)


def test_the_map_of_errors_is_darkest_where_the_error_is() -> None:
    drawn = plots.heat(ErrorMap(error=((1e-4, 1e-4), (1e-4, 1e-2))))
    assert "row 2 of 2 and column 2 of 2" in drawn
    darkest = re.search(r'<path d="([^"]+)" class="heat h8"', drawn)
    assert darkest is not None
    assert darkest[1].count("M") == 1
    assert "not finite" in plots.heat(ErrorMap(error=((float("nan"),),)))


def test_labels_are_pushed_apart_and_stay_inside() -> None:
    placed = svg.apart([50.0, 51.0, 52.0, 99.0], 10, 0, 100)
    assert all(b - a >= 10 for a, b in itertools.pairwise(placed))
    assert placed[-1] <= 100


def test_a_run_of_one_length_and_one_without_figures_can_be_drawn(tmp_path: Path) -> None:
    lines = [example.run_record(), example.kernel_record(NAME)]
    for more in (
        [example.number(f"{NAME} 512", OURS, 100.0)],
        [AbsentRecord(run=example.RUN, cell=f"{NAME} 512", who=OURS, why="no reason")],
        [],
    ):
        path = example.write_records(tmp_path / "records.jsonl", [*lines, *more])
        assert "<main>" in page.html(gather([path]))
