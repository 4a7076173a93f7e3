"""The report's page in a real browser: what a reader does with it, and what it must not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashwright.report import page as pages
from flashwright.report.gather import gather
from tests.browser.browser import Browser, Page
from tests.unit import report_example as example
from tests.unit.test_report_page import hostile

TABLE = "#cells-0"
MAP = json.loads(example.GOLDEN.with_suffix(".map.json").read_text())["lines"]
HEADS = f"{TABLE} thead tr:last-child th"
ROWS = f"[...document.querySelectorAll('{TABLE} tbody tr')]"


def head(page: Page, title: str) -> int:
    """The number of a column, from 1."""
    titles = page.run(f"[...document.querySelectorAll('{HEADS}')].map(t => t.textContent.trim())")
    return int(titles.index(title)) + 1


def column(page: Page, number: int) -> list[str]:
    found = page.run(f"{ROWS}.map(r => r.cells[{number - 1}].textContent.trim())")
    return [str(text) for text in found]


def lit(page: Page, side: str) -> list[int]:
    """The lines that are marked in one of the texts of the kernel shown."""
    lines = f".kernel:not([hidden]) .code[data-side={side}] .line.on"
    found = page.run(f"[...document.querySelectorAll('{lines}')].map(l => Number(l.dataset.n))")
    return [int(n) for n in found]


def line(side: str, number: int) -> str:
    return f".kernel:not([hidden]) .code[data-side={side}] .line[data-n='{number}']"


def counterpart(side: str, number: int) -> dict[str, list[int]]:
    """What kernel.map.json says belongs to a line."""
    found: dict[str, set[int]] = {"tl": set(), "cu": set()}
    for stretch in MAP:
        if stretch[side][0] <= number <= stretch[side][1]:
            for name, lines in found.items():
                lines.update(range(stretch[name][0], stretch[name][1] + 1))
    return {name: sorted(lines) for name, lines in found.items()}


# --- it keeps to itself -----------------------------------------------------------------------


def test_it_asks_for_nothing_and_complains_of_nothing(page: Page, bench_page: Path) -> None:
    page.open(bench_page)
    for selector in (f"{HEADS} button", ".chart", ".legend button", ".legend button", "#theme"):
        page.click(selector)
    assert page.requests() == [bench_page.as_uri()]
    assert page.complaints() == []


def test_hostile_text_does_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages.html(hostile(tmp_path)))
    page = browser.page()
    page.open(path)
    assert page.requests() == [path.as_uri()]
    assert page.complaints() == []
    assert page.run("document.querySelectorAll('img, [onerror]').length") == 0
    assert page.run("document.querySelectorAll('main > section').length") == 5
    page.close()


# --- the table --------------------------------------------------------------------------------


def test_a_press_on_a_heading_sorts_and_another_turns_it_round(page: Page) -> None:
    number = head(page, "naive torch")
    button = f"{HEADS}:nth-child({number}) button"
    for order in ("ascending", "descending"):
        page.click(button)
        assert page.run(f"document.querySelector('{HEADS}[aria-sort={order}]').cellIndex") == (
            number - 1
        )
        texts = column(page, number)
        missing = texts.count("–")
        assert missing == len(example.FEW)  # those that ran out of memory stay at the end
        assert texts[-missing:] == ["–"] * missing
        values = [float(text) for text in texts[:-missing]]
        assert values == sorted(values, reverse=order == "descending")
    assert page.run(f"document.querySelectorAll('{HEADS}:not([aria-sort=none])').length") == 1


def test_the_keyboard_sorts_too(page: Page) -> None:
    page.run(f"document.querySelector('{HEADS}:nth-child({head(page, 'length')}) button').focus()")
    page.press("Enter", "\r")
    lengths = column(page, head(page, "length"))
    assert lengths[:4] == ["512"] * 4
    assert lengths[-4:] == ["16k"] * 4


def test_words_filter_the_rows(page: Page) -> None:
    page.click("input[data-filter]")
    page.type("d64 causal")
    shown = page.run(f"{ROWS}.filter(r => r.checkVisibility()).map(r => r.cells[0].textContent)")
    assert {text.strip() for text in shown} == {"gqa d64 causal"}
    assert page.run("document.querySelector('output').textContent") == "6 of 24 rows"


# --- plots ------------------------------------------------------------------------------------


def tip(page: Page) -> str:
    return str(page.run("(t => t.hidden ? '' : t.textContent)(document.getElementById('tip'))"))


def test_pointing_at_a_chart_tells_its_figures(page: Page) -> None:
    assert tip(page) == ""
    page.hover(".chart .band:nth-of-type(3)")
    assert tip(page).startswith("mha d64 full 2048\nFlashwright: 297 TFLOPS")
    assert "naive torch" in tip(page)
    page.hover("h1")
    assert tip(page) == ""


def test_the_arrow_keys_walk_along_a_chart(page: Page) -> None:
    page.run("document.querySelector('.chart').focus()")
    for name in ("mha d64 full 512", "mha d64 full 1024"):
        page.press("ArrowRight")
        assert tip(page).startswith(f"{name}\n")


def test_the_legend_hides_a_contestant_in_every_chart(page: Page) -> None:
    lines = (
        "[...document.querySelectorAll('.chart .s2')]"
        ".filter(l => getComputedStyle(l).display !== 'none').length"
    )
    assert page.run(lines) > 0
    page.click(".legend button[data-who='2']")
    assert page.run(lines) == 0
    page.click(".legend button[data-who='2']")
    assert page.run(lines) > 0


# --- TL beside the source ---------------------------------------------------------------------


@pytest.mark.parametrize("side", ["tl", "cu"])
def test_pointing_at_a_statement_marks_its_block_and_the_other_way_round(
    page: Page, side: str
) -> None:
    other = "cu" if side == "tl" else "tl"
    stretch = max(MAP, key=lambda s: s[side][0])  # the last one: the other pane has to scroll
    number = stretch[side][0]
    page.hover(line(side, number))
    page.until(lambda: lit(page, side) != [], "the mark")
    wanted = counterpart(side, number)
    assert lit(page, "tl") == wanted["tl"]
    assert lit(page, "cu") == wanted["cu"]
    inside = f"""(() => {{
        const line = document.querySelector({json.dumps(line(other, wanted[other][0]))});
        const pane = line.parentElement.getBoundingClientRect(), box = line.getBoundingClientRect();
        return box.top >= pane.top && box.bottom <= pane.bottom + 1; }})()"""
    page.until(lambda: bool(page.run(inside)), "its counterpart to be in view")
    page.hover("#kernels h2")
    assert lit(page, "tl") == []


def test_the_keyboard_walks_from_statement_to_statement(page: Page) -> None:
    first, second = sorted({s["tl"][0] for s in MAP})[:2]
    page.run(f"document.querySelector({json.dumps(line('tl', first))}).focus()")
    assert lit(page, "cu") == counterpart("tl", first)["cu"]
    page.press("ArrowDown")
    assert lit(page, "cu") == counterpart("tl", second)["cu"]
    assert page.run("document.activeElement.dataset.n") == str(second)


def test_another_kernel_can_be_chosen(page: Page) -> None:
    shown = (
        "[...document.querySelectorAll('.kernel')].filter(k => k.checkVisibility())"
        ".map(k => k.querySelector('.name').textContent)"
    )
    assert page.run(shown) == ["mha d64 full"]
    page.run(
        "(s => { s.value = 'kernel-3'; s.dispatchEvent(new Event('change')); })"
        "(document.getElementById('which'))"
    )
    assert page.run(shown) == [example.REJECTED]
    page.click(".chart:nth-of-type(2) figcaption a")
    page.until(lambda: page.run(shown) == ["gqa d64 causal"], "the kernel of the chart")
    assert page.run("document.getElementById('which').selectedOptions[0].textContent") == (
        "✓ gqa d64 causal"
    )


# --- light, dark, small, on paper -------------------------------------------------------------


def brightness(page: Page) -> float:
    color = page.run("getComputedStyle(document.body).backgroundColor")
    numbers = color.removeprefix("rgb(").removesuffix(")").split(",")
    return sum(float(n) for n in numbers) / 3


def test_it_follows_the_system_and_the_button_overrules_it(page: Page) -> None:
    assert brightness(page) > 240
    page.scheme("dark")
    assert brightness(page) < 40
    page.click("#theme")
    assert brightness(page) > 240
    page.scheme("light")
    page.click("#theme")
    assert brightness(page) < 40


def test_a_phone_shows_it_without_scrolling_sideways(page: Page) -> None:
    page.resize(360, 800, mobile=True)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.run("document.documentElement.scrollWidth") == 360
    wide = page.run(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 361"
        " && !e.closest('.scroll, .prose table, .code, .away, [hidden]')).map(e => e.outerHTML)"
    )
    assert wide == []
    tl, cu = page.run(
        "[...document.querySelectorAll('.kernel:not([hidden]) .code')]"
        ".map(c => { const b = c.getBoundingClientRect(); return [b.left, b.top, b.bottom]; })"
    )
    assert tl[0] == cu[0]  # one below the other
    assert cu[1] > tl[2]


def test_a_tap_marks_a_statement(page: Page) -> None:
    page.resize(360, 800, mobile=True)
    number = MAP[0]["tl"][0]
    page.tap(line("tl", number))
    page.until(lambda: lit(page, "cu") == counterpart("tl", number)["cu"], "the mark")


def test_on_paper_everything_is_open_and_light(page: Page, tmp_path: Path) -> None:
    page.scheme("dark")
    page.run(
        "addEventListener('beforeprint', () => "
        "{ window.shut = document.querySelectorAll('details:not([open])').length; })"
    )
    before = page.run("document.querySelectorAll('details:not([open])').length")
    assert before > 0
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.run("window.shut") == 0
    assert page.run("document.querySelectorAll('details:not([open])').length") == before
    page.media("print")
    assert brightness(page) > 240
    style: dict[str, Any] = page.run(
        "(c => ({height: c.maxHeight, over: c.overflowY}))"
        "(getComputedStyle(document.querySelector('.code')))"
    )
    assert style == {"height": "none", "over": "visible"}
    assert page.run("getComputedStyle(document.querySelector('#theme')).display") == "none"


# --- other reports ----------------------------------------------------------------------------


def test_a_package_that_no_gpu_has_run_says_so_first(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages.html(gather([example.write_package(tmp_path / "kernel")])))
    page = browser.page(360, 800)
    page.open(path)
    assert page.run("document.querySelector('main h2').textContent.trim()") == "? Not run on a GPU"
    assert page.run("document.documentElement.scrollWidth") == 360
    assert page.complaints() == []
    page.close()
