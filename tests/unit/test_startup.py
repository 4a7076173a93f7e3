"""Start-up matters: a command that answers at once is used. Times are the process's own CPU time,
which a busy machine changes little; one of three has to be short enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.gpu import find
from tests.unit.test_cli import GOOD

HEAVY = (
    "lark",
    "numpy",
    "rich",
    "flashwright.spec",
    "flashwright.semantics.interpret",
    "flashwright.author",
)


def cpu_seconds(*args: str) -> float:
    """User and system time of one command."""
    child = subprocess.Popen(
        [sys.executable, "-m", "flashwright", *args], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def takes_less_than(limit: float, *args: str) -> bool:
    return any(cpu_seconds(*args) < limit for _ in range(3))


needs_wait4 = pytest.mark.skipif(not hasattr(os, "wait4"), reason="no wait4 on this system")


@needs_wait4
def test_help_is_under_half_a_second() -> None:
    assert takes_less_than(0.5, "--help")


@needs_wait4
@pytest.mark.parametrize(
    ("variant", "gpu", "options"),
    [
        ("gqa", "t4", {"window": 100, "softcap": 30.0, "alibi": True, "sink": True}),
        ("nsa-selected", "h200", {}),  # the slowest to check of those the author writes
    ],
)
def test_check_of_60_lines_is_under_two_seconds(
    tmp_path: Path, variant: str, gpu: str, options: dict[str, object]
) -> None:
    """Programs of 50 to 60 lines, all of them statements: comments would cost nothing. The check
    includes a translation, which tells the path that the kernel takes."""
    spec = make_spec(variant, **options)
    file = tmp_path / "program.tl"
    file.write_text(write_code(write_sketch(spec), spec, find(gpu)).code)
    assert 50 <= file.read_text().count("\n") <= 60
    assert takes_less_than(2.0, "check", str(file), "--gpu", gpu)


def test_the_command_itself_imports_nothing_heavy() -> None:
    code = f"import sys, flashwright.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_check_leaves_the_author_the_spec_and_rich_alone(tmp_path: Path) -> None:
    file = tmp_path / "program.tl"
    file.write_text(GOOD)
    code = (
        "import sys\nfrom flashwright.cli.main import app\n"
        f"try: app(['check', {str(file)!r}, '--gpu', 'h200'])\nexcept SystemExit: pass\n"
        "print([m for m in ('rich', 'flashwright.spec', 'flashwright.author') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
