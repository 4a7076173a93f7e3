"""CUDA that anybody may have written is screened and compiled in confinement, or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashwright.build import compile as compiling
from flashwright.build import process
from flashwright.build.compile import build
from flashwright.build.toolchain import Toolchain
from flashwright.confine import landlock
from flashwright.confine.start import FILES, UNCONFINED, Policy, confined
from flashwright.emulate.own import kernel
from flashwright.emulate.package import Package, compile_package, read_package
from flashwright.judge import sanitize
from flashwright.lang.diagnostic import Failed
from flashwright.sandbox.candidate import Candidate
from flashwright.untrusted.build import build_untrusted
from tests.unit import emulated
from tests.unit.emulated import needs_compilers
from tests.unit.fake_nvcc import WORKS, FakeNvcc, nvcc

__all__ = ["nvcc"]  # a fixture

needs_landlock = pytest.mark.skipif(not landlock.available(), reason="there is no Landlock here")
OUTSIDE = '#include "/etc/passwd"\n'
PLAIN = 'extern "C" __global__ void attention(float* x) { x[0] = 1; }\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return emulated.write(tmp_path / "package")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may come as far as a compiler."""

    def run(*arguments: object) -> tuple[int, str]:
        raise AssertionError("it was compiled")

    for name in ("run", "run_confined"):
        monkeypatch.setattr(compiling, name, run)


def by_sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """What `verify --sanitize` compiles, as far as that."""
    from tests.unit.measure_fakes import H200

    monkeypatch.setattr("flashwright.build.driver.cards", lambda: (H200,))
    return sanitize._rebuild_with_lines(Candidate.package(folder), folder)


COMPILED: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "build": lambda f, _: build(f.joinpath("kernel.cu").read_text(), "sm_80", untrusted=True),
    "emulate kernel.cu": lambda f, _: compile_package(f / "kernel.cu"),
    "emulate.kernel": lambda f, _: kernel(f / "kernel.cu", untrusted=True),
    "sanitize": by_sanitizer,
}


@needs_compilers
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("way", COMPILED)
def test_without_landlock_nobodys_code_is_compiled(
    way: str, package: Path, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "available", lambda: False)
    monkeypatch.delenv(UNCONFINED, raising=False)
    with pytest.raises(Failed, match=r"FW821.*no Landlock") as caught:
        COMPILED[way](package, monkeypatch)
    assert UNCONFINED in (caught.value.diagnostics[0].help or "")


@needs_compilers
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("way", [way for way in COMPILED if way != "build"])
def test_code_that_reaches_outside_is_not_compiled(
    way: str, package: Path, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = package / "kernel.cu"
    source.write_text(source.read_text() + OUTSIDE)
    with pytest.raises(Failed, match="FW828"):
        COMPILED[way](package, monkeypatch)


@needs_compilers
@pytest.mark.usefixtures("no_compiler")
def test_lines_are_looked_for_only_where_that_is_safe(
    package: Path, nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = read_package(package)
    doctored = Package(read.name, read.plan, read.ptx, read.source + OUTSIDE)
    assert doctored.with_lines() is doctored
    monkeypatch.setattr(landlock, "available", lambda: False)
    assert read.with_lines() is read


@needs_compilers
@needs_landlock
def test_our_own_kernels_pass_and_have_their_lines(package: Path) -> None:
    found = read_package(package).with_lines()
    assert any(found.source_lines.values())


# --- what the compiler can open ---------------------------------------------------------------


@pytest.fixture(params=["/usr/share", "/usr/src", "/opt", "/usr/local/share"])
def canary(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file that others have put where programs are installed."""
    place = Path(request.param)
    if not (place.is_dir() and os.access(place, os.W_OK)):
        pytest.skip(f"{place} cannot be written here")
    with tempfile.TemporaryDirectory(dir=place, prefix=".canary") as folder:
        path = Path(folder, "canary.h")
        path.write_text("hush-hush")
        yield path


@needs_landlock
def test_the_compiler_opens_no_file_that_is_installed_beside_it(
    canary: Path, nvcc: FakeNvcc
) -> None:
    nvcc.set(f"{WORKS}; cat {canary} > kernel.ptx 2>&1; exit 0")
    told = build("x", "sm_80", toolchain=nvcc.tools, untrusted=True).ptx
    assert "hush" not in told
    assert "Permission denied" in told


def test_a_compiler_among_other_programs_opens_no_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/usr")
    monkeypatch.delenv(process.READS, raising=False)
    for folder in ("/usr/bin", "/usr/local/bin", "/opt/bin"):
        tools = Toolchain(Path(folder, "nvcc"), "13.0.88", tmp_path, tmp_path)
        policy = process._policy(tmp_path, tools, process.CompilerLimits(), {})
        assert folder in policy.readable
        assert not {"/", "/usr", "/usr/local", "/opt", "/usr/share"} & {*policy.readable}
    tools = Toolchain(Path("/opt/cuda-13/bin/nvcc"), "13.0.88", tmp_path, tmp_path)
    assert "/opt/cuda-13" in process._policy(tmp_path, tools, process.CompilerLimits(), {}).readable


# --- a system that does not do what it says ---------------------------------------------------

BROKEN = """
import sys
from flashwright.confine import start
start.restrict = lambda *a, **k: False
sys.argv = ["start", *sys.argv[1:]]
start.main()
"""


@needs_landlock
@pytest.mark.skipif(sys.platform != "linux", reason="confined on Linux only")
def test_a_compiler_that_must_be_confined_is_not_run_where_that_fails(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(policy: Policy, command: list[str]) -> tuple[list[str], dict[str, str]]:
        line, env = confined(policy, command)
        at = line.index("flashwright.confine.start")
        return [sys.executable, "-P", "-S", "-s", "-c", BROKEN, *line[at + 1 :]], env

    monkeypatch.setattr(process, "confined", broken)
    monkeypatch.delenv(UNCONFINED, raising=False)
    with pytest.raises(Failed, match=r"FW821.*Landlock or seccomp"):
        build("x", "sm_80", toolchain=nvcc.tools, untrusted=True)
    assert nvcc.runs == []
    monkeypatch.setenv(UNCONFINED, "1")
    build("x", "sm_80", toolchain=nvcc.tools, untrusted=True)
    assert len(nvcc.runs) == 1


def test_what_the_compiler_must_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNCONFINED, raising=False)
    assert FILES in process._must()
    monkeypatch.setenv(UNCONFINED, "1")
    assert process._must() == ()


@needs_compilers
@needs_landlock
def test_the_screen_and_the_compiler_take_honest_code(tmp_path: Path) -> None:
    assert ".loc" in build_untrusted(PLAIN, "sm_80").ptx
