"""The wheel as a user has it: built from the sdist, installed outside the checkout, and used there.

No package is downloaded: the new environment takes everything but Flashwright from this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from flashwright.build import toolchain
from tests.unit import fake_gpu

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCHER = "flashwright/build/launcher/launcher.so"
MACHINE = re.compile(r"flashwright/emulate/prebuilt/machine-[0-9a-f]{32}\.so")
HOST = re.compile(r"flashwright/emulate/prebuilt/host-[0-9a-f]{32}/\S+\.so[.0-9]*")
BARE = {"PATH": "", "CXX": "no-such-compiler", "CUDA_HOME": "/nowhere"}


def tracked() -> set[str]:
    """The files of the package that git knows."""
    command = ["git", "ls-files", "flashwright"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return set(done.stdout.splitlines())


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist, and the wheel that was built from it."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", str(folder)]
    subprocess.run([sys.executable, "-m", "build", *options, str(ROOT)], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


class Installed:
    """An environment of its own with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        venv.create(folder / "env", with_pip=False, symlinks=True)
        self.folder, self.bin = folder, folder / "env" / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python")]
        options = ["--no-deps", "--no-index", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *options, str(wheel)], check=True)
        # A path in a .pth file is not searched for further .pth files: an editable install of
        # this checkout is not seen.
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        others = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (site / "others.pth").write_text("\n".join(others) + "\n")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in a folder that is no checkout."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"FLASHWRIGHT_CACHE": str(self.folder / "cache"), **variables}
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(program, cwd=self.folder, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_all_files_of_the_package_are_in_the_wheel_and_the_sdist(dist: Path, wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("flashwright/")}
    sources = {n for n in names if not MACHINE.fullmatch(n) and not HOST.fullmatch(n)}
    assert sources - {LAUNCHER} == tracked()
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() | {"hatch_build.py", "LICENSE", "README.md"} <= inside


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are for Linux")
def test_the_wheel_has_its_libraries_and_the_tag_of_its_platform(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert LAUNCHER in names
    assert sum(1 for name in names if MACHINE.fullmatch(name)) == 1
    assert sum(1 for name in names if HOST.fullmatch(name)) == 5
    tag = "py3-none-" + sysconfig.get_platform().replace("-", "_")
    assert wheel.name.endswith(f"-{tag}.whl")


def test_the_package_that_runs_is_the_wheels(installed: Installed) -> None:
    done = installed.run("python", "-c", "import flashwright; print(flashwright.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed.folder), done.stderr


def test_it_checks_without_cutlass_and_refuses_to_build(installed: Installed) -> None:
    program = ROOT / "examples" / "sigmoid.tl"
    checked = installed.run("flashwright", "check", str(program))
    assert checked.returncode == 0, checked.stderr
    nothing = {"FLASHWRIGHT_CUTLASS": str(installed.folder), "FLASHWRIGHT_NVCC": ""}
    built = installed.run("flashwright", "build", str(program), "--gpu", "a100", **nothing)
    assert built.returncode == 2
    assert "error[FW821]" in built.stderr


@pytest.fixture(scope="module")
def package(installed: Installed) -> Path:
    if not toolchain.has_nvcc():
        pytest.skip("there is no CUDA compiler here")
    asked = ("mha", "--gpu", "a100", "--causal", "--head-dim", "64", "--out", "made", "--quiet")
    done = installed.run("flashwright", "generate", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    return installed.folder / "made"


def test_what_it_generates_is_judged_under_emulation(installed: Installed, package: Path) -> None:
    one = ("--on", "cpu", "--q-len", "64", "--kv-len", "100")
    done = installed.run("flashwright", "verify", str(package), *one)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted under emulation" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are for Linux")
def test_it_emulates_without_a_compiler(installed: Installed) -> None:
    """The wheel's machine is used: nothing can be compiled, and the cache stays empty."""
    ptx = installed.folder / "one.ptx"
    lines = (".version 8.4", ".target sm_80", ".address_size 64", ".entry k(.param .u64 p)")
    ptx.write_text(
        "\n".join(lines) + "\n{\n.reg .b64 %rd<2>; .reg .b32 %r<2>;\n"
        "ld.param.u64 %rd1, [p]; mov.u32 %r1, 7; st.global.u32 [%rd1], %r1; ret;\n}\n"
    )
    words = ("--kernel", "k", "--grid", "1", "--block", "1", "--arg", "uint32[1]")
    command = ("flashwright", "emulate", str(ptx), *words, "--compare", "0=7")
    cache = installed.folder / "none"
    done = installed.run(*command, **BARE, FLASHWRIGHT_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert not list(cache.glob("machine-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries are for Linux")
def test_it_emulates_programs_without_a_compiler(installed: Installed) -> None:
    """The wheel's library stands in for CUDA: a program without kernels sees a GPU."""
    code = "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    cache = installed.folder / "none"
    words = ("flashwright", "emulate-program", "--", str(installed.bin / "python"), "-c", code)
    done = installed.run(*words, **BARE, FLASHWRIGHT_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0\n"
    assert not list(cache.glob("host-*"))


def test_it_loads_where_there_is_no_compiler(
    installed: Installed, package: Path, tmp_path: Path
) -> None:
    fake_gpu.build(tmp_path)
    cache = tmp_path / "cache"
    env = {**BARE, "LD_LIBRARY_PATH": str(tmp_path), "FLASHWRIGHT_CACHE": str(cache)}
    code = f"import flashwright; print(flashwright.load({str(package)!r}))"
    done = installed.run("python", "-c", code, **env)
    assert done.returncode == 0, done.stderr
    assert "(Q, K, V) for sm_80" in done.stdout
    assert not cache.exists()  # nothing was compiled
