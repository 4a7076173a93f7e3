"""What the documentation shows is true: its TL parses, its programs check, its codes exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashwright.check.check import check
from flashwright.lang.codes import CODES
from flashwright.lang.parse import parse
from flashwright.program.vocabulary import DTYPES, FUNCTIONS, VERBS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted([*DOCS.glob("*.md"), *DOCS.glob("howto/*.md"), *DOCS.glob("reference/*.md")]),
    DOCS / "results" / "README.md",
    *sorted((ROOT / "flashwright" / "agents" / "skills").glob("*/*.md")),
]
FENCE = re.compile(r"^```tl\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    found = [(p.name, text) for p in PAGES for text in FENCE.findall(p.read_text())]
    return [(f"{name}:{i}", text) for i, (name, text) in enumerate(found)]


@pytest.mark.parametrize(("place", "text"), blocks(), ids=[place for place, _ in blocks()])
def test_tl_in_the_docs(place: str, text: str) -> None:
    tree = parse(text)
    if "\ngrid " in text and "Copy O" in text:
        assert not check(tree).diagnostics, place


def test_the_reference_names_every_word() -> None:
    page = (ROOT / "docs" / "language.md").read_text()
    for word in (*FUNCTIONS, *DTYPES):
        assert re.search(rf"\b{word}\b", page), word
    for verb in VERBS:
        assert re.search(rf"\b{verb}\b", page, re.IGNORECASE), verb


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_codes_that_are_mentioned_exist(page: Path) -> None:
    assert set(re.findall(r"\bFW\d{3}\b", page.read_text())) <= set(CODES)


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text()
        headings = {
            re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
            for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("#"):
                assert target[1:] in headings, (page.name, target)
            elif not target.startswith("http"):
                path = page.parent / target.split("#")[0]
                assert path.exists(), (page.name, target)
