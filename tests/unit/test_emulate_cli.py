"""`flashwright emulate`, and `verify` without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashwright.build import driver
from tests.unit import emulated
from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome

SMALL = ("--q-len", "70", "--kv-len", "150")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.write(tmp_path_factory.mktemp("package"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_look", lambda: ((), "the test says so"))


@pytest.mark.slow
@needs_compilers
def test_a_right_kernel_under_all_schedules(package: Path) -> None:
    done = Outcome("emulate", str(package), *SMALL, "--schedule", "all")
    assert done.code == 0, done.err
    for words in (
        "by emulation of sm_80",
        "eager",
        "lazy",
        "random:0",
        "agrees with fp64; no access",
    ):
        assert words in done.out
    assert done.err == ""
    assert max(map(len, done.out.replace(str(package), "DIR").splitlines())) <= 100


@needs_compilers
@pytest.mark.slow
def test_the_answer_as_json(package: Path) -> None:
    done = Outcome("emulate", str(package), *SMALL, "--json", "--heads", "2", "--seed", "3")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["ok"] is True
    assert told["dims"]["q_len"] == 70
    assert told["dims"]["heads"] == 2
    (run,) = told["runs"]
    assert run["findings"] == 0
    assert set(run["outputs"]) == {"O", "LSE"}
    assert 0 < run["outputs"]["O"]["relative_rms"] < 1e-2


@needs_compilers
def test_the_profile_counts_the_products_of_the_problem(package: Path) -> None:
    whole = ("--q-len", "128", "--kv-len", "112", "--heads", "2", "--kv-heads", "1", "--batch", "1")
    done = Outcome("emulate", str(package), *whole, "--profile", "--json")
    told = json.loads(done.out)["profile"]
    assert told["of"] == "code.tl"
    lines = {row["line"]: row for row in told["lines"]}
    for start in ("Compute GEMM Q_shared", "Compute GEMM S"):
        row = lines[emulated.tl_line(start)]
        # One tile of queries against one of keys: all of both products, for each of two heads.
        assert row["operations"] == 2 * 2 * 128 * 112 * 64
        assert row["wavefronts"] == row["ideal_wavefronts"] > 0, "the swizzle leaves no conflicts"
    copied = lines[emulated.tl_line("Copy Q")]
    assert copied["bytes"]["global_read"] == copied["bytes"]["shared_written"] == 2 * 128 * 64 * 2
    stored = lines[emulated.tl_line("Copy O")]
    assert stored["bytes"]["global_written"] == 2 * 128 * 64 * 2
    assert told["total"]["operations"] == 2 * 2 * 2 * 128 * 112 * 64
    shown = Outcome("emulate", str(package), *whole, "--profile")
    assert "Compute GEMM S" in shown.out
    assert "mma" in shown.out


@needs_compilers
def test_a_missing_barrier_is_named_at_its_lines_of_tl(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    source = folder / "kernel.cu"
    source.write_text(emulated.without_second_barrier(source.read_text()))
    # kernel.cu is compiled as it is now; kernel.ptx is still that of the right kernel.
    assert Outcome("emulate", str(folder), "--q-len", "300").code == 0
    done = Outcome("emulate", str(source), "--q-len", "300")
    assert done.code == 1
    assert "error[FW837]: race at code.tl:" in done.err
    copy, gemm = emulated.tl_line("Copy K (BN, HeadDim)") + 6, emulated.tl_line("Compute GEMM Q_")
    assert f"race at code.tl:{copy}, kernel.cu:" in done.err
    assert f"{gemm} |   Compute GEMM Q_shared" in done.err
    told = json.loads(Outcome("emulate", str(source), "--q-len", "300", "--json").out)
    assert told["ok"] is False
    assert "FW837" in {d["code"] for d in told["diagnostics"]}


@needs_compilers
@pytest.mark.slow
def test_rows_past_the_end_are_named_with_their_tensor(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    source = folder / "kernel.cu"
    source.write_text(emulated.without_bound(source.read_text()))
    done = Outcome("emulate", str(source), "--q-len", "100", "--heads", "1", "--kv-heads", "1")
    assert done.code == 1
    assert f"error[FW833]: out_of_bounds at code.tl:{emulated.tl_line('Copy O')}" in done.err
    assert "behind the end of `O`" in done.err
    whole = Outcome("emulate", str(source), "--q-len", "128", "--heads", "1", "--kv-heads", "1")
    assert whole.code == 0, "whole tiles have no row too many"


@pytest.mark.slow
@needs_compilers
def test_tl_code_is_compiled_first(package: Path) -> None:
    done = Outcome("emulate", str(package / "code.tl"), "--gpu", "a100", *SMALL)
    assert done.code == 0, done.err
    assert "agrees with fp64" in done.out
    assert Outcome("emulate", str(package / "code.tl")).code == 2, "for which GPU?"


@needs_compilers
def test_without_a_spec_nothing_is_compared_and_that_is_said(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    (folder / "spec.toml").unlink()
    done = Outcome("emulate", str(folder), *SMALL)
    assert done.code == 0, done.err
    assert "NOTHING WAS COMPARED" in done.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "nowhere"),
        (("DIR",), "no kernel package"),
        (("DIR", "--schedule", "soon"), "eager, lazy, random:SEED or all"),
        (("DIR", "--schedule", "random:x"), "random:SEED"),
        (("DIR", "--q-len", "0"), "--q-len"),
    ],
)
def test_bad_input_is_2(arguments: Sequence[str], says: str, tmp_path: Path) -> None:
    done = Outcome("emulate", *(str(tmp_path) if a == "DIR" else a for a in arguments))
    assert done.code == 2
    assert says in " ".join(done.err.replace("│", " ").split()), "however wide the box is"


@needs_compilers
def test_ptx_that_is_not_known_is_2_with_its_line(tmp_path: Path) -> None:
    folder = emulated.write(tmp_path / "package")
    ptx = folder / "kernel.ptx"
    lines = ptx.read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if "mma.sync" in line)
    lines[at] = lines[at].replace("mma.sync", "mma.unheard")
    ptx.write_text("\n".join(lines))
    done = Outcome("emulate", str(ptx), *SMALL)
    assert done.code == 2
    assert f"error[FW831]: PTX line {at + 1}: " in done.err


# --- verify -----------------------------------------------------------------------------------


@needs_compilers
@pytest.mark.usefixtures("no_gpu")
def test_verify_without_a_gpu_offers_the_emulator(package: Path) -> None:
    done = Outcome("verify", str(package))
    assert done.code == 2
    assert "error[FW851]: no GPU can be used here" in done.err
    assert f"flashwright verify {package} --on cpu" in done.err
    for option in ("gpu", "cpu"):
        assert Outcome("verify", str(package), "--on", option, "--device", "cuda").code == 2


@pytest.mark.slow
@needs_compilers
@pytest.mark.usefixtures("no_gpu")
def test_verify_on_the_cpu_is_a_verdict_of_its_own_kind(package: Path) -> None:
    done = Outcome("verify", str(package), "--on", "cpu", *SMALL, "--seed", "1", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["ok"], told["device"], told["arch"]) == (True, "emulation", "sm_80")
    assert {c["name"]: c["passed"] for c in told["checks"]}["hazards"] is True
    shown = Outcome("verify", str(package), "--on", "cpu", *SMALL)
    assert "by emulation of sm_80" in shown.out
    assert "accepted under emulation" in shown.out


def test_on_is_gpu_or_cpu(tmp_path: Path) -> None:
    assert "gpu or cpu" in Outcome("verify", str(tmp_path), "--on", "tpu").err


def test_help_knows_nothing_heavy() -> None:
    """The emulator is loaded when it is used, not when a command line is read."""
    code = "import sys, flashwright.cli.main; print('flashwright.emulate.emulate' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "False"
