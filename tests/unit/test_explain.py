"""The long form of every code: the wrong program is wrong just so, the right one is clean."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple

import pytest

from flashwright import gpu
from flashwright.check.check import check
from flashwright.lang.codes import CODES
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse
from flashwright.lower.report import notes
from flashwright.lower.translate import translate

FOLDER = files("flashwright.lang") / "explain"
PAGES = {p.name.removesuffix(".md"): p.read_text("utf-8") for p in FOLDER.iterdir()}
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_IN_A_PROGRAM = ("FW0", "FW705", "FW8", "FW9")


class Fence(NamedTuple):
    """A program on a page: under which heading, for which GPU."""

    heading: str
    gpu: str | None
    text: str


def fences(code: str) -> list[Fence]:
    found = []
    for match in FENCE.finditer(PAGES[code]):
        language, info, text = match.groups()
        heading = re.findall(r"^## (.+)$", PAGES[code][: match.start()], re.MULTILINE)[-1]
        options = dict(word.split("=") for word in info.split())
        if language == "tl":
            found.append(Fence(heading, options.get("gpu"), text))
    return found


def findings(code: str, fence: Fence) -> tuple[Diagnostic, ...]:
    """What the checker finds; on the page of a note also what the translator says."""
    card = gpu.find(fence.gpu) if fence.gpu else None
    try:
        checked = check(parse(fence.text), card)
    except Failed as failed:
        return failed.diagnostics
    if CODES[code].severity != "note":
        return checked.diagnostics
    assert card is not None
    assert checked.program is not None
    report = translate(checked.program, card).report
    assert report is not None
    return (*checked.diagnostics, *notes(report, fence.text, checked.program.tree))


PROGRAMS = [(code, fence) for code in sorted(PAGES) for fence in fences(code)]
WRONG = [pytest.param(c, f, id=c) for c, f in PROGRAMS if f.heading == "Wrong"]
RIGHT = [pytest.param(c, f, id=c) for c, f in PROGRAMS if f.heading == "Right"]


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    assert set(PAGES) == set(CODES)


@pytest.mark.parametrize("code", sorted(CODES))
def test_page_has_its_parts(code: str) -> None:
    page = PAGES[code]
    assert page.startswith(f"# {code}: {CODES[code].title}\n\n")
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == ["Wrong", "Right"]
    assert page.endswith("\n")
    assert max(map(len, page.splitlines())) <= 110
    if not code.startswith(NOT_IN_A_PROGRAM):
        assert {f.heading for f in fences(code)} == {"Wrong", "Right"}


@pytest.mark.parametrize(("code", "fence"), WRONG)
def test_the_wrong_program_shows_this_error_alone(code: str, fence: Fence) -> None:
    found = findings(code, fence)
    assert [d.code for d in found] == [code] * max(1, len(found))
    assert all(d.span is not None and d.message for d in found)


@pytest.mark.parametrize(("code", "fence"), RIGHT)
def test_the_right_program_is_clean(code: str, fence: Fence) -> None:
    assert [(d.code, d.message) for d in findings(code, fence)] == []


@pytest.mark.parametrize(("code", "fence"), WRONG)
def test_the_wrong_program_is_nearly_the_right_one(code: str, fence: Fence) -> None:
    """A reader should see at a glance what changed: a few lines, not another program."""
    (right,) = [f for f in fences(code) if f.heading == "Right"]
    wrong_lines, right_lines = set(fence.text.splitlines()), set(right.text.splitlines())
    assert len(wrong_lines ^ right_lines) <= 6


def test_codes_in_the_text_exist() -> None:
    for code, page in PAGES.items():
        assert set(re.findall(r"FW\d{3}", page)) <= set(CODES), code
