"""The folder of `generate`: one run at a time, and a finished kernel stays until the next is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.generate import pipeline
from flashwright.generate.folder import LOCK, held
from flashwright.generate.state import Progress, Run
from tests.unit.test_by_model import Nobody
from tests.unit.test_cli import Outcome

SHORT = ("generate", "mha", "--gpu", "a100", "--head-dim", "64", "--until", "check", "-q")
HOLDS = """
import sys
from pathlib import Path
from flashwright.generate.folder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "result.json"}


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        done = Outcome(*SHORT, "--out", str(tmp_path))
        assert done.code == 2
        assert f"is in use: process {other.pid} has been making a kernel in it since 2" in done.err
        assert "give another folder with --out" in done.err
        other.kill()
        other.wait()
    assert Outcome(*SHORT, "--out", str(tmp_path)).code == 0
    assert not (tmp_path / LOCK).exists()


def test_a_lock_whose_process_is_gone_is_none(tmp_path: Path) -> None:
    """A child of the one that held it may keep the file open, and with it the system's lock."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    told = {"pid": gone.pid, "host": socket.gethostname(), "since": "then"}
    (tmp_path / LOCK).write_text(json.dumps(told))
    with (tmp_path / LOCK).open() as child:
        fcntl.flock(child, fcntl.LOCK_EX)
        with held(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_second_run_leaves_the_finished_kernel(
    kind: type[BaseException], tmp_path: Path
) -> None:
    assert Outcome(*SHORT, "--out", str(tmp_path)).code == 0
    before = files(tmp_path)

    def interrupted(run: Run, progress: Progress) -> Run:
        assert run.artefacts["code.tl"]
        raise kind

    plan = [*pipeline.STAGES[:2], pipeline.Stage("check", "", interrupted, "", "")]
    spec = make_spec("mha", head_dim=128, causal=True)
    with pytest.raises(kind):
        pipeline.generate(spec, gpus.find("h200"), tmp_path, Nobody(), plan=plan)
    assert files(tmp_path) == before
    assert json.loads((tmp_path / "result.json").read_bytes())["ok"] is True


def test_a_compiled_kernel_is_not_replaced_by_less_without_a_word(tmp_path: Path) -> None:
    assert Outcome(*SHORT, "--out", str(tmp_path)).code == 0
    (tmp_path / "kernel.cubin").write_bytes(b"as a run to its end leaves it")
    again = Outcome(*SHORT, "--out", str(tmp_path))
    assert "had a compiled kernel, which this run has replaced" in again.err
    assert "had a compiled kernel" not in Outcome(*SHORT, "--out", str(tmp_path)).err


def test_files_of_a_run_that_was_cut_off_are_nobodys_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flashwright.check.check.check", interrupted)
        assert Outcome(*SHORT, "--out", str(tmp_path)).code == 130
    assert (tmp_path / "code.tl").is_file()
    (tmp_path / "sketch.tl").write_text("mine")
    other = [*SHORT[:5], "128", *SHORT[6:]]
    assert Outcome(*other, "--out", str(tmp_path)).code == 0
    assert [p.name for p in tmp_path.glob("*.bak")] == ["sketch.tl.bak"]


def test_two_operators_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Outcome(*SHORT).code == 0
    assert Outcome(*SHORT, "--causal").code == 0
    names = sorted(path.name for path in Path("out").iterdir())
    assert names == ["mha-causal-h16-d64-fp16-a100", "mha-h16-d64-fp16-a100"]
    done = Outcome(*SHORT, "--window", "64", "--out", f"out/{names[0]}")
    assert done.code == 0
    assert "has another operator, which is replaced: mha, causal, 16 heads" in done.err


@pytest.mark.parametrize(
    "options",
    [
        {"window": 64},
        {"softcap": 30.0},
        {"alibi": True},
        {"lse": False},
        {"dtype": "bf16"},
        {"causal": True, "window": 64, "sink_tokens": 4},
        {"reference": "my own.py:f"},
        {"dims": {"n": 4}},
    ],
)
def test_a_folder_is_named_from_the_spec(options: dict[str, object]) -> None:
    plain, other = make_spec("mha").slug, make_spec("mha", **options).slug
    assert plain != other
    assert "/" not in other
    assert " " not in other
