"""A process that says it is confined tries whether it is, before it becomes somebody's code."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flashwright.confine import landlock, seal
from flashwright.confine.start import (
    CALLS,
    FILES,
    NOT_CONFINED,
    NOT_REFUSED,
    UNCONFINED,
    Policy,
    confined,
)
from flashwright.judge.reference_process import ReferenceProcess
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox import process
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.process import Ended, Sandbox
from flashwright.spec import AttentionSpec

pytestmark = pytest.mark.skipif(
    not (landlock.available() and seal.available()), reason="this system confines no process"
)
SPEC = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp16", causal=True)
HONEST = "def attention(q, k, v):\n    return q.copy()\n"
# A system that says yes and does nothing.
BROKEN = """
import sys
from flashwright.confine import start
start.{part} = lambda *given, **more: True
sys.argv = ["start", *sys.argv[1:]]
start.main()
"""
PARTS = {
    "restrict": ("the folder /", "a new file in /tmp"),
    "seal": ("a socket", "limits of the judge"),
}


def broken(part: str, policy: Policy, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What runs a command where a part of the system does nothing."""
    line, env = confined(policy, command)
    code = BROKEN.format(part=part)
    at = line.index("flashwright.confine.start")
    return [sys.executable, "-P", "-S", "-s", "-c", code, *line[at + 1 :]], env


def policy(folder: Path, **changed: object) -> Policy:
    given = {
        "readable": (*landlock.SYSTEM, sys.prefix, sys.base_prefix),
        "writable": (str(folder), "/dev/null"),
        "file_bytes": 1 << 20,
        "environment": {"PATH": os.defpath},
        "must": (FILES, CALLS),
    }
    return Policy(**{**given, **changed})  # type: ignore[arg-type]


def ran(line: Sequence[str], env: dict[str, str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        line, env=env, cwd=folder, capture_output=True, text=True, start_new_session=True
    )
    return done.returncode, done.stdout + done.stderr


def test_what_is_confined_finds_nothing_open(tmp_path: Path) -> None:
    assert ran(*confined(policy(tmp_path), ["/bin/echo", "runs"]), tmp_path) == (0, "runs\n")


@pytest.mark.parametrize("part", PARTS)
def test_a_system_that_only_says_so_is_found_out(part: str, tmp_path: Path) -> None:
    code, said = ran(*broken(part, policy(tmp_path), ["/bin/echo", "runs"]), tmp_path)
    assert (code, said.startswith(NOT_REFUSED), "runs" in said) == (NOT_CONFINED, True, False)
    for words in PARTS[part]:
        assert words in said
    for other in PARTS:
        assert (PARTS[other][0] in said) == (other == part)


def test_nothing_is_found_that_was_allowed(tmp_path: Path) -> None:
    """Nor what nobody has asked to be refused, nor where the user says so."""
    everything = policy(tmp_path, readable=("/",), writable=("/",))
    assert ran(*confined(everything, ["/bin/echo", "runs"]), tmp_path)[0] == 0
    for given in (
        policy(tmp_path, must=(CALLS,)),
        policy(tmp_path, environment={"PATH": os.defpath, UNCONFINED: "1"}),
    ):
        assert ran(*broken("restrict", given, ["/bin/echo", "runs"]), tmp_path) == (0, "runs\n")


def test_the_parent_goes_on_where_it_could_be_seized(tmp_path: Path) -> None:
    """Without a filter, a system may allow ptrace: the one that is tried is let go again."""
    code = (
        "import os, subprocess, sys\n"
        "tried = 'import os; from flashwright.confine.selftest import open_calls; '\n"
        "tried += 'print(*open_calls(os.getppid()), sep=chr(10))'\n"
        "print(subprocess.run([sys.executable, '-c', tried], capture_output=True, text=True))\n"
        "print('goes on', open('/proc/self/status').read().count('TracerPid:\\t0'))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done, said = ran([sys.executable, "-c", code], env, tmp_path)
    assert done == 0, said
    assert "a socket" in said
    assert "signals to the judge" in said
    assert said.endswith("goes on 1\n")


# --- the judge --------------------------------------------------------------------------------


@pytest.mark.parametrize("untrusted", [True, False])
def test_nothing_is_run_where_it_is_not_confined(
    untrusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no verdict on the candidate."""
    (tmp_path / "candidate.py").write_text(HONEST)
    candidate = Candidate("python", str(tmp_path / "candidate.py"), "attention")
    candidate = Candidate(**{**vars(candidate), "untrusted": untrusted})
    monkeypatch.setattr(process, "confined", lambda p, c: broken("restrict", p, c))
    monkeypatch.delenv(UNCONFINED, raising=False)
    with pytest.raises(Failed, match=rf"FW851: {NOT_REFUSED}: .*the folder /") as caught:
        Sandbox(candidate, SPEC, "cpu").start()
    assert UNCONFINED in (caught.value.diagnostics[0].help or "")


def test_an_exit_of_the_same_number_is_a_crash(tmp_path: Path) -> None:
    (tmp_path / "candidate.py").write_text(
        f"import os\ndef attention(q, k, v):\n    os._exit({NOT_CONFINED})\n"
    )
    candidate = Candidate("python", str(tmp_path / "candidate.py"), "attention")
    x = np.zeros((1, 2, 9, 16), np.float16)
    with Sandbox(candidate, SPEC, "cpu") as sandbox, pytest.raises(Ended, match="crash"):
        sandbox.call({"Q": x, "K": x, "V": x})


def test_the_judge_is_no_open_book_while_a_reference_runs(tmp_path: Path) -> None:
    def dumpable() -> int:
        return int(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))

    (tmp_path / "mine.py").write_text(
        "def reference(inputs, dims):\n    return {'O': inputs['Q']}\n"
    )
    before = dumpable()
    one = ReferenceProcess(tmp_path / "mine.py")
    assert dumpable() == 0
    found = one({"Q": np.ones((1, 1, 2, 2))}, {"q_len": 2})
    assert found["O"].sum() == 4
    del one
    assert dumpable() == before
