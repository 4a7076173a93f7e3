"""Start-up matters: a command that answers at once is used. What takes the time is counted here:
the modules that are imported, and the functions that are called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.gpu import find
from tests.unit.call_count import calls
from tests.unit.test_cli import GOOD, Outcome

HEAVY = (
    "lark",
    "numpy",
    "rich",
    "flashwright.spec",
    "flashwright.semantics.interpret",
    "flashwright.author",
)
HEAVY_TO_HELP = ("jinja2", "lark", "numpy", "pydantic", "tvm_ffi", "flashwright.spec")
NOT_TO_LOAD = ("jinja2", "lark", "rich", "typer", "flashwright.lang.parse")


def imported(code: str, among: tuple[str, ...]) -> str:
    """Those modules that a new process has imported at the end of some code, as a list's text."""
    code += f"\nprint([m for m in {among} if m in sys.modules])"
    command = [sys.executable, "-c", "import sys\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def running(*args: str) -> str:
    """The code that runs a command and comes back."""
    words = "from flashwright.cli.main import app\n"
    return f"{words}try: app({list(args)!r})\nexcept SystemExit: pass"


def test_the_command_itself_imports_nothing_heavy() -> None:
    assert imported("import flashwright.cli.main", HEAVY) == "[]"


def test_help_imports_nothing_but_what_prints_it() -> None:
    assert imported(running("--help"), HEAVY_TO_HELP) == "[]"


def test_check_leaves_the_author_the_spec_and_rich_alone(tmp_path: Path) -> None:
    file = tmp_path / "program.tl"
    file.write_text(GOOD)
    code = running("check", str(file), "--gpu", "h200")
    assert imported(code, ("rich", "flashwright.spec", "flashwright.author")) == "[]"


def test_load_leaves_the_checker_the_translator_and_the_command_line_alone() -> None:
    """All that a serving machine imports before its first kernel."""
    code = "from flashwright.build import classes, native; native._ffi()"
    assert imported(code, NOT_TO_LOAD) == "[]"


@pytest.mark.parametrize(
    ("variant", "gpu", "options"),
    [
        ("gqa", "t4", {"window": 100, "softcap": 30.0, "alibi": True, "sink": True}),
        ("nsa-selected", "h200", {}),  # the slowest to check of those the author writes
    ],
)
def test_a_check_of_60_lines_stays_cheap(
    tmp_path: Path, variant: str, gpu: str, options: dict[str, object]
) -> None:
    """Programs of 50 to 60 lines, all of them statements: comments would cost nothing. The check
    includes a translation, which tells the path that the kernel takes. It calls some million
    functions, which takes about half a second."""
    spec = make_spec(variant, **options)
    file = tmp_path / "program.tl"
    file.write_text(write_code(write_sketch(spec), spec, find(gpu)).code)
    assert 50 <= file.read_text().count("\n") <= 60
    assert calls(lambda: Outcome("check", str(file), "--gpu", gpu)) < 2_500_000
