"""A function in a process of its own: how that ends is told as it is."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashwright.confine import isolate
from flashwright.confine.limit import limit
from flashwright.lang.diagnostic import Diagnostic, Failed

ROOT = Path(__file__).parents[2]
GB = 1 << 30


def says(text: str) -> str:
    return text


def fails() -> None:
    raise Failed(Diagnostic("FW207", "not so"))


def raises(error: type[Exception]) -> None:
    raise error("so it is")


def ends(code: int) -> None:
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def told(function: Any, *arguments: Any, seconds: float = 30.0) -> Diagnostic:
    with pytest.raises(Failed) as failed:
        isolate.call(function, *arguments, seconds=seconds, memory=6 * GB)
    (found,) = failed.value.diagnostics
    return found


def test_what_comes_back() -> None:
    assert isolate.call(says, "hello", seconds=30.0, memory=6 * GB) == "hello"
    assert told(fails).code == "FW207"


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (raises, MemoryError, "the program needs more memory than 6 GB"),
        (ends, -signal.SIGKILL, "the program needs more memory than there is"),
        (ends, -signal.SIGSEGV, "the program could not be run (its process ended with signal 11)"),
        (ends, 3, "the program could not be run (its process ended with exit code 3)"),
        (raises, RecursionError, "the program could not be run (RecursionError: so it is)"),
        (raises, OSError, "the program could not be run (OSError: so it is)"),
    ],
)
def test_only_memory_is_called_memory(function: Any, given: Any, words: str) -> None:
    found = told(function, given)
    assert (found.code, found.message) == ("FW806", words)


def test_no_room_for_a_process_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(isolate.resource_tracker, "ensure_running", none)
    assert "Resource temporarily unavailable" in told(says, "hello").message


def test_an_answer_that_breaks_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(connection: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(isolate.Connection, "recv", reset)
    assert "its process ended with exit code 0" in told(says, "hello").message


LOWER = """
import resource
from flashwright.confine import isolate
from flashwright.lang.diagnostic import Failed
from tests.unit.test_isolate import raises, says
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
    print(isolate.call(says, "hello", seconds=30.0, memory=6 << 30))
    try:
        isolate.call(raises, MemoryError, seconds=30.0, memory=6 << 30)
    except Failed as failed:
        print(failed.diagnostics[0].message)
"""


def test_where_the_user_has_less_that_is_the_limit(tmp_path: Path) -> None:
    """A hard limit of the user's own cannot be raised, and need not be."""
    (tmp_path / "lower.py").write_text(LOWER)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "lower.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.stdout == "hello\nthe program needs more memory than 3 GB\n", done.stderr


@pytest.mark.parametrize(("allowed", "expected"), [(resource.RLIM_INFINITY, 5), (3, 3), (7, 5)])
def test_a_limit_is_never_raised(
    allowed: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1, allowed))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: asked.append(both))
    assert limit(resource.RLIMIT_AS, 5) == expected
    assert asked == [(expected, expected)]
