"""Every command that a page shows is run, and prints what the page shows.

A page's `console` blocks are run in their order, in one folder. A line of dots stands for any
lines, dots within a line for any text. `<!-- save: NAME -->` before a block saves it as a file
first; `<!-- run: COMMAND -->` is run without being shown. A block behind `<!-- with a GPU -->` or
`<!-- without a GPU -->` is run on such a machine only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashwright.build import driver, toolchain

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    DOCS / "getting-started.md",
    DOCS / "flex.md",
    DOCS / "jax.md",
    DOCS / "pytorch.md",
    DOCS / "export.md",
    DOCS / "wgmma.md",
    DOCS / "tutorial.md",
    *sorted((DOCS / "howto").glob("*.md")),
]
PART = re.compile(
    r"<!-- save: (?P<name>\S+) -->\n+```\w*\n(?P<text>.*?)^```"
    r"|<!-- run: (?P<hidden>.*?) -->"
    r"|(?:<!-- (?P<where>with|without) a GPU -->\n+)?^```console\n(?P<console>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
COMPILING = ("generate", "build", "verify", "emulate", "explain-mod")


@dataclass(frozen=True)
class Step:
    """A command, and what the page says that it prints; None where the page says nothing of it."""

    command: str
    printed: str | None


def steps(page: Path, folder: Path) -> Iterator[Step]:
    """The commands of a page that this machine can run; its files are saved on the way."""
    here = "without" if driver.missing() else "with"
    for part in PART.finditer(page.read_text()):
        if part["name"]:
            (folder / part["name"]).write_text(part["text"])
        elif part["hidden"]:
            yield Step(part["hidden"], None)
        elif not part["where"] or part["where"] == here:
            for one in re.split(r"^\$ ", part["console"], flags=re.MULTILINE)[1:]:
                command, _, printed = one.partition("\n")
                yield Step(command, printed)


def run(command: str, folder: Path) -> tuple[int, str]:
    """What a shell makes of a command, `flashwright` being this checkout's."""
    python = f'"{sys.executable}"'
    ours = re.sub(r"^flashwright\b", f"{python} -m flashwright", command)
    ours = re.sub(r"^python\b", python, ours)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    env["CHECKOUT"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-c", f"{ours} 2>&1"], cwd=folder, env=env, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def pattern(printed: str) -> str:
    """What a page shows as a regular expression; the end of each line is as it may."""
    lines = printed.rstrip().split("\n")
    found = [
        r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line.rstrip()) + r"[ ]*\n"
        for line in lines
    ]
    return "".join(found).replace(re.escape("..."), ".*")


def lines(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n"))


def cases() -> Iterator[object]:
    for page in PAGES:
        slow = re.search(rf"^\$ flashwright ({'|'.join(COMPILING)})\b", page.read_text(), re.M)
        marks = (
            pytest.mark.slow,
            pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler"),
        )
        needs = [*marks] if slow else []
        if re.search(r"^import torch$|explain-mod", page.read_text(), re.MULTILINE):
            found = importlib.util.find_spec("torch")
            needs.append(pytest.mark.skipif(found is None, reason="PyTorch is not installed"))
        if re.search(r"^import jax$", page.read_text(), re.MULTILINE):
            found = importlib.util.find_spec("jax_tvm_ffi")
            needs.append(pytest.mark.skipif(found is None, reason="JAX is not installed"))
        yield pytest.param(page, id=page.stem, marks=needs)


@pytest.mark.parametrize("page", [*cases()])
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    done = 0
    for step in steps(page, tmp_path):
        code, printed = run(step.command, tmp_path)
        failing = re.search(r"^error\[", step.printed or "", re.MULTILINE) is not None
        assert (code != 0) == failing, f"{step.command}: exit code {code}\n{printed}"
        if step.printed is not None:
            assert re.fullmatch(pattern(step.printed), lines(printed)), (
                f"{step.command} prints\n{printed}\nand the page shows\n{step.printed}"
            )
            done += 1
    assert done, f"{page.name} shows no command"
