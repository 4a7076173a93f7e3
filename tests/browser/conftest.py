"""One browser for all tests of this folder, and the pages they look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flashwright.report.gather import gather
from flashwright.report.page import html
from tests.browser.browser import NAMES, Browser, Page, binary
from tests.unit import report_example as example


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = binary()
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(NAMES)} (apt install chromium)")
    with Browser(program) as started:
        yield started


@pytest.fixture(scope="session")
def bench_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the made-up benchmark."""
    folder = tmp_path_factory.mktemp("bench")
    path = folder / "report.html"
    records = example.write_records(folder / "records.jsonl", example.records(example.FEW))
    path.write_text(html(gather([records])))
    return path


@pytest.fixture(scope="session")
def opened(browser: Browser, bench_page: Path) -> Page:
    """The report in a window: loading it takes longer than any test of it."""
    page = browser.page(1280, 900)
    page.open(bench_page)
    return page


@pytest.fixture
def page(opened: Page, bench_page: Path) -> Iterator[Page]:
    """The report as if it had just been loaded, in a light window; it stays silent."""
    opened.resize(1280, 900)
    opened.scheme("light")
    opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
    opened.run(
        """(() => {
        delete document.documentElement.dataset.theme;
        document.activeElement.blur();
        for (const one of document.querySelectorAll(".kernel details")) one.open = false;
        for (const [id, value, event] of [["[data-filter]", "", "input"], ["#which", "kernel-0", "change"]]) {
            const control = document.querySelector(id);
            control.value = value;
            control.dispatchEvent(new Event(event));
        }
        scrollTo(0, 0); })()"""  # noqa: E501
    )
    yield opened
    assert opened.complaints() == []
    assert set(opened.requests()) <= {bench_page.as_uri()}
