"""`flashwright generate`: the folder it writes, what it claims, and how it fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashwright import __version__
from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.retile import name_of, tiling_of
from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes
from flashwright.build.package import CLASSES, OWN
from flashwright.check.check import check
from flashwright.generate import pipeline
from flashwright.generate.folder import LOCK
from flashwright.generate.state import Run
from flashwright.gpu import H200, find
from flashwright.judge.verdict import EMULATION, Verdict
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.spec import BadSpec
from flashwright.spec import parse as parse_spec
from tests.unit.test_cli import Outcome

# For few keys other tiles were measured to be faster: a kernel of their own, in this folder.
SHORT = "128x128-s2-w8-q2-noSplitMasked"
BEFORE = [SHORT, "code.tl", "reasoning.md", "result.json", "sketch.tl", "spec.toml"]
KERNEL = ["kernel.cu", "kernel.map.json", "launch.json"]
MADE = sorted([*BEFORE, *KERNEL, CLASSES])
ALL = ("generate", "gqa", "--gpu", "h200", "--causal", "--head-dim", "64", "--dtype", "bf16")
GQA = (*ALL, "--until", "translate")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the CPU run is tested in test_kernel.py; here it would only take time."""
    monkeypatch.setenv("FLASHWRIGHT_NVCC", "/nowhere/nvcc")


def test_generate(tmp_path: Path) -> None:
    done = Outcome(*ALL, "--out", str(tmp_path))
    assert done.code == 1  # without a compiler
    assert sorted(os.listdir(tmp_path)) == MADE
    for words in (
        "Grouped-query attention",
        "causal, 32 query heads on 8 KV heads, head dim 64, bf16",
        "NVIDIA H200",
        "1/7  Sketch",
        "Compute GEMM Q_shared, K_shared.T and get S",
        "clean: 0 errors, 0 warnings; shared memory",
        "agrees",
        "6/7  Build",
        "7/7  Verdict",
        "SKIPPED",
        "not compiled",
        "not run on a GPU",
        "flashwright run",
    ):
        assert words in done.out
    assert max(map(len, done.out.replace(str(tmp_path), "DIR").splitlines())) <= 100
    assert "\x1b" not in done.out


def test_generated_files_work_with_the_other_commands(tmp_path: Path) -> None:
    assert Outcome(*GQA, "--out", str(tmp_path), "--quiet").code == 0
    code = str(tmp_path / "code.tl")
    assert Outcome("check", code, "--gpu", "h200").code == 0
    assert Outcome("check", str(tmp_path / "sketch.tl")).code == 0
    assert Outcome("fmt", code, "--check").code == 0
    assert Outcome("run", code, "--q-len", "30", "--kv-len", "50").code == 0


def test_result_json(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    Outcome(*ALL, "--out", str(folder), "--quiet")
    text = (folder / "result.json").read_text()
    result = json.loads(text)
    assert result["schema"] == pipeline.SCHEMA
    assert result["flashwright"] == __version__
    assert result["ok"] is True
    assert result["gpu"] == "h200"
    assert result["spec"]["head_dim"] == 64
    first, later = ["sketch", "parameters", "check", "cpu", "translate"], ["build", "verdict"]
    assert [s["stage"] for s in result["stages"]] == first + later
    assert all(s["status"] == "ok" and s["seconds"] >= 0 for s in result["stages"][:5])
    assert all(s["status"] == "skipped" for s in result["stages"][5:])
    assert result["findings"] == []
    assert {c["output"] for c in result["cpu"]} == {"O", "LSE"}
    assert all(c["ok"] and c["relative_rms"] < 1e-2 for c in result["cpu"])
    assert "not compiled" in result["not_claimed"]
    assert "not run on a GPU" in result["not_claimed"]
    assert str(tmp_path) not in text
    short = [f"{SHORT}/{name}" for name in ("code.tl", "spec.toml", *KERNEL)]
    assert sorted(result["artefacts"]) == sorted({*MADE, *short} - {"result.json", SHORT})
    assert list(result["others"]) == [SHORT]
    assert all(c["ok"] for c in result["others"][SHORT]["cpu"])
    for name, digest in result["artefacts"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_quiet_is_one_line(tmp_path: Path) -> None:
    done = Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    assert done.out.count("\n") == 1
    assert "agrees with fp64" in done.out


def test_generate_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "result.json").write_text("old")
    Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "result.json").read_text())["ok"]


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Outcome(*GQA, "--quiet").code == 0
    assert sorted(os.listdir("out/gqa-causal-h32x8-d64-bf16-h200")) == MADE


def test_changed_files_are_kept(tmp_path: Path) -> None:
    Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    (tmp_path / "code.tl").write_text("// mine\n")
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert "your changed code.tl is kept as code.tl.bak" in done.out
    assert (tmp_path / "code.tl.bak").read_text() == "// mine\n"
    assert sorted(os.listdir(tmp_path)) == sorted([*MADE, "code.tl.bak"])


# --- several kernels --------------------------------------------------------------------------


def test_tiles_that_are_faster_for_few_keys_are_a_kernel_beside(tmp_path: Path) -> None:
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert done.code == 0, done.err
    assert f"up to 1024 keys `{SHORT}` is called: measured on the H200" in done.out
    rules = classes.read(tmp_path)
    assert [rules.pick(n) for n in (1, 1024, 1025)] == [SHORT, SHORT, OWN]
    sizes = {}
    for kernel, place in classes.folders(tmp_path).items():
        assert {"code.tl", "spec.toml", *KERNEL} <= set(os.listdir(place))
        program = check(parse((place / "code.tl").read_text()), H200).program
        assert program is not None
        sizes[kernel] = name_of(tiling_of(program))  # type: ignore[arg-type]
    assert sizes == {OWN: "192x128-s2-w12-q2-noSplitMasked", SHORT: SHORT}
    assert "up to 1024 keys" in (tmp_path / SHORT / "code.tl").read_text(), "it says why"
    assert f"- up to 1024 keys `{SHORT}`" in (tmp_path / "reasoning.md").read_text()


def test_a_further_kernel_goes_where_it_is_no_longer_made(tmp_path: Path) -> None:
    Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    assert Outcome(*GQA, "--window", "64", "--out", str(tmp_path), "--quiet").code == 0
    assert sorted(os.listdir(tmp_path)) == sorted({*MADE} - {SHORT, CLASSES})
    assert classes.read(tmp_path) == classes.ALONE


def test_a_changed_further_kernel_is_kept(tmp_path: Path) -> None:
    Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    (tmp_path / SHORT / "code.tl").write_text("// mine\n")
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert f"{SHORT}/code.tl.bak" in done.out
    assert (tmp_path / SHORT / "code.tl.bak").read_text() == "// mine\n"
    assert (tmp_path / SHORT / "code.tl").read_text() != "// mine\n"
    Outcome(*GQA, "--window", "64", "--out", str(tmp_path), "--quiet")
    assert os.listdir(tmp_path / SHORT) == ["code.tl.bak"], "and nothing else"


def test_a_folder_that_nobody_recorded_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / SHORT).mkdir()
    (tmp_path / SHORT / "kernel.cubin").write_bytes(b"an old one")
    Outcome(*GQA, "--out", str(tmp_path), "--quiet")
    assert not (tmp_path / SHORT / "kernel.cubin").exists(), "it would pass as the new one"
    assert (tmp_path / SHORT / "kernel.cubin.bak").read_bytes() == b"an old one"


def test_a_wrong_further_kernel_fails_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tuned._shipped()
    bad = [c if c.up_to is None else c.model_copy(update={"warps": 5}) for c in real]
    monkeypatch.setattr(tuned, "_shipped", lambda: tuple(bad))
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert done.code == 1
    assert "128x128-s2-w5-q2-noSplitMasked/code.tl:" in done.err
    assert not (tmp_path / CLASSES).exists()


# --- what is amiss ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("gqa", "--gpu", "h2"), "FW705", "Did you mean h20 or h200?"),
        (("gqua", "--gpu", "h200"), "FW902", "did you mean gqa?"),
        (("gqa", "--gpu", "h200", "--head-dim", "0"), "FW901", "head_dim: must be at least 8"),
        (("gqa", "--gpu", "h200", "--heads", "32", "--kv-heads", "5"), "FW901", "must divide"),
        (("mha", "--gpu", "h200", "--kv-heads", "4"), "FW901", "use gqa"),
        (("mha", "--gpu", "h200", "--window", "-3"), "FW901", "window"),
        (("mha", "--gpu", "h200", "--softcap", "nan"), "FW901", "softcap"),
        (("mha", "--gpu", "t4", "--dtype", "bf16"), "FW905", "bf16"),
        (("mha", "--gpu", "a100", "--dtype", "fp8"), "FW905", "e4m3"),
    ],
)
def test_impossible_requests_are_2(
    tmp_path: Path, options: tuple[str, ...], code: str, says: str
) -> None:
    done = Outcome("generate", *options, "--out", str(tmp_path / "made"))
    assert done.code == 2
    assert f"error[{code}]" in done.err
    assert says in done.err


def test_a_failed_stage_is_in_the_record(tmp_path: Path) -> None:
    Outcome("generate", "mha", "--gpu", "t4", "--dtype", "bf16", "--out", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is False
    assert result["stages"][-1]["stage"] == "parameters"
    assert result["stages"][-1]["status"] == "failed"
    assert result["findings"][0]["code"] == "FW905"
    assert "not checked" in result["not_claimed"]
    assert "code.tl" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        ("gqa",),
        ("gqa", "--gpu", "h200", "--dtype", "int4"),
        ("gqa", "--gpu", "h200", "--head-dim", "x"),
    ],
)
def test_usage_errors_are_2(options: tuple[str, ...]) -> None:
    assert Outcome("generate", *options).code == 2


def test_a_folder_that_cannot_be_made_is_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = Outcome(*GQA, "--out", str(tmp_path / "file" / "out"))
    assert done.code == 2
    assert "error[FW001]: cannot use" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_2(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert done.code == 2
    assert "error[FW001]: cannot write" in done.err


def test_a_disk_that_fills_up_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def full(old: str, new: Path) -> None:
        if new.name != "spec.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(old, new)

    monkeypatch.setattr(os, "replace", full)
    done = Outcome(*GQA, "--out", str(tmp_path))
    assert done.code == 2
    assert "error[FW001]: cannot write" in done.err
    assert sorted(os.listdir(tmp_path)) == [LOCK, "spec.toml"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "flashwright", *GQA, "--out", str(tmp_path)]
    child = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "reasoning.md").exists() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert err.strip() == "Interrupted. What was finished is kept."
    assert sorted(os.listdir(tmp_path)) == sorted({*BEFORE, LOCK} - {"result.json"})


def test_what_was_not_reached_is_exit_1_and_the_last_line(tmp_path: Path) -> None:
    done = Outcome(*ALL, "--out", str(tmp_path), "--quiet")
    last = done.err.splitlines()[-1]
    assert done.code == 1
    assert last.startswith("not reached: build: FLASHWRIGHT_NVCC is /nowhere/nvcc")
    assert last.endswith("or ask for less: --until translate")
    assert json.loads((tmp_path / "result.json").read_bytes())["reached"] is False
    for stage, made in (("sketch", "sketch.tl"), ("code", "code.tl"), ("cpu", "reasoning.md")):
        folder = tmp_path / stage
        assert Outcome(*ALL, "--until", stage, "--out", str(folder), "--quiet").code == 0
        assert (folder / made).is_file()
        assert not (folder / "kernel.cu").exists()


def test_the_headline_counts_the_problems() -> None:
    run = Run(make_spec("mha"), find("a100"), Path())
    emulated = Verdict("k", EMULATION, "sm_80", run.spec, 1, (), share=(2, 23))
    said = replace(run, emulated=emulated).headline
    assert said.startswith("right under emulation: 2 of 23 problems (--all-problems")
    assert replace(run, emulated=replace(emulated, share=None)).headline == "right under emulation"


REFERENCE = """
import numpy as np
def attention(q, k, v):
    s = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(-1, keepdims=True)){more}
    return np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v)
"""


@pytest.mark.parametrize(("more", "code"), [("", 0), (" ** 2", 1)])
def test_a_reference_without_a_model(more: str, code: int, tmp_path: Path) -> None:
    """It judges what the built-in author writes; where that is something else, a model is named."""
    (tmp_path / "mine.py").write_text(REFERENCE.format(more=more))
    options = ("--no-lse", "--head-dim", "64", "--until", "cpu", "--out", str(tmp_path / "out"))
    done = Outcome("generate", "--gpu", "a100", "--reference", str(tmp_path / "mine.py"), *options)
    assert done.code == code, done.err
    assert "judged by mine.py, no log-sum-exp, 16 heads" in done.out
    assert "every key visible" not in done.out
    assert ("the built-in author wrote mha, and mine.py says" in done.err) == bool(code)
    assert ("--model NAME" in done.err) == bool(code)


def test_a_reference_needs_no_variant() -> None:
    assert parse_spec('reference = "mine.py"\n').variant == "custom"


@pytest.mark.parametrize(("gpu", "dtype"), [("t4", "fp16"), ("h200", "bf16"), ("l40s", "fp8")])
def test_the_advised_head_dim_has_a_translation(gpu: str, dtype: str) -> None:
    with pytest.raises(BadSpec, match="must be a multiple of 8, not 7: use 8"):
        make_spec("mha", head_dim=7)
    spec, card = make_spec("mha", head_dim=8, dtype=dtype), find(gpu)
    program = check(parse(write_code(write_sketch(spec), spec, card).code), card).program
    assert program is not None
    assert translate(program, card).plan.arch == card.arch
