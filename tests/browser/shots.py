"""Screenshots of reports, for a person to look at: python -m tests.browser.shots FOLDER [WHAT...]

Without WHAT, of the made-up benchmark and of two made-up packages.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from flashwright.report.gather import gather
from flashwright.report.page import html
from tests.browser.browser import Browser, binary
from tests.unit import report_example as example


def made_up(folder: Path) -> dict[str, list[Path]]:
    spec = example.SPECS["gqa d128 causal"]
    return {
        "bench": [example.write_records(folder / "records.jsonl")],
        "judged": [example.write_package(folder / "judged", example.verdict(spec))],
        "not-run": [example.write_package(folder / "not-run")],
    }


def shoot(browser: Browser, page_file: Path, name: str, folder: Path) -> None:
    page = browser.page(1280, 900)
    page.open(page_file)
    for scheme in ("light", "dark"):
        page.scheme(scheme)
        page.shot(folder / f"{name}-{scheme}.png")
    page.scheme("light")
    statement = ".kernel:not([hidden]) .code[data-side=tl] .line.m:nth-last-of-type(8)"
    if page.run(f"document.querySelector({statement!r}) !== null"):
        page.hover(statement)
        page.shot(folder / f"{name}-hover.png", whole=False)
    page.resize(360, 800, mobile=True)
    page.shot(folder / f"{name}-phone.png")
    page.resize(1280, 900)
    page.pdf(folder / f"{name}.pdf")
    page.close()


def main(folder: Path, given: list[Path]) -> None:
    program = binary()
    assert program is not None, "there is no browser here"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, Browser(program) as browser:
        reports = {"report": given} if given else made_up(Path(scratch))
        for name, what in reports.items():
            page_file = Path(scratch, f"{name}.html")
            page_file.write_text(html(gather(what)))
            shoot(browser, page_file, name, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]])
