"""Finding nvcc and the headers in every way there is, and what is said where one is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from flashwright.build import toolchain
from flashwright.lang.diagnostic import Diagnostic, Failed

VARIABLES = ("FLASHWRIGHT_NVCC", "CUDA_HOME", "CUDA_PATH", "FLASHWRIGHT_CUTLASS", "CUTLASS_PATH")


def program(path: Path, says: str = "release 13.0, V13.0.88") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {says}'\n")
    path.chmod(0o755)
    return path


def headers(folder: Path) -> Path:
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "tensor.hpp").touch()
    return folder


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a host compiler and nothing else; what the test puts there is all there is."""
    for name in (*VARIABLES, "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    program(tmp_path / "host" / "gcc")
    monkeypatch.setenv("PATH", str(tmp_path / "host"))
    os.symlink("/bin/sh", tmp_path / "host" / "sh")
    monkeypatch.setattr(toolchain, "USUAL", tmp_path / "usual")
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    return tmp_path


def packages(monkeypatch: pytest.MonkeyPatch, **folders: Path) -> None:
    """Python packages of these names, in these folders."""

    def spec(name: str) -> ModuleSpec | None:
        if name not in folders:
            return None
        found = ModuleSpec(name, None, is_package=True)
        found.submodule_search_locations = [str(folders[name])]
        return found

    monkeypatch.setattr(toolchain, "find_spec", spec)


def missing() -> tuple[Diagnostic, ...]:
    with pytest.raises(Failed) as caught:
        toolchain.find()
    found = caught.value.diagnostics
    assert all(d.code == "FW821" and d.bad_input and d.help for d in found)
    return found


def test_each_place_of_nvcc_in_its_order(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last to the first: each new one goes before those that are there."""
    monkeypatch.setenv("CUTLASS_PATH", str(headers(bare / "cutlass")))
    packages(monkeypatch, nvidia=bare / "nvidia")
    assert "no nvcc in CUDA_HOME, on PATH" in missing()[0].message
    wheel = program(bare / "nvidia" / "cu13" / "bin" / "nvcc")
    assert toolchain.find().nvcc == wheel
    usual = program(bare / "usual" / "nvcc")
    assert toolchain.find().nvcc == usual
    on_path = program(bare / "host" / "nvcc")
    assert toolchain.find().nvcc == on_path
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda"))
    assert toolchain.find().nvcc == on_path  # a CUDA_HOME without a compiler is no obstacle
    home = program(bare / "cuda" / "bin" / "nvcc")
    assert toolchain.find().nvcc == home
    named = program(bare / "mine", "release 12.9, V12.9.41")
    monkeypatch.setenv("FLASHWRIGHT_NVCC", str(named))
    found = toolchain.find()
    assert (found.nvcc, found.version) == (named, "12.9.41")


def test_each_place_of_the_headers(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "host" / "nvcc")
    (found,) = missing()
    assert "CUTLASS" in found.message
    assert f"pip install --no-deps {toolchain.CUTLASS} " in (found.help or "")
    inside = headers(bare / "package" / "source" / "include")
    packages(monkeypatch, cutlass_library=bare / "package")
    assert toolchain.find().cutlass == inside
    checkout = headers(bare / "checkout" / "include")
    monkeypatch.setenv("CUTLASS_PATH", str(bare / "checkout"))
    assert toolchain.find().cutlass == checkout
    other = headers(bare / "other")
    monkeypatch.setenv("FLASHWRIGHT_CUTLASS", str(other))
    assert toolchain.find().cutlass == other
    monkeypatch.setenv("FLASHWRIGHT_CUTLASS", str(bare))
    assert "FLASHWRIGHT_CUTLASS is" in missing()[0].message


def test_all_that_is_missing_is_said_at_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(bare / "nowhere"))
    said = " ".join(d.message for d in missing())
    assert "no CUDA compiler" in said
    assert "CUTLASS" in said
    assert "no C++ compiler for nvcc: gcc is not there" in said
    monkeypatch.setenv("NVCC_CCBIN", "clang-99")
    assert "NVCC_CCBIN is clang-99" in missing()[-1].message


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("release 11.8, V11.8.89", "is of CUDA 11.8; 12.0 or newer is needed"),
        ("who knows", "does not say its version; it says: Cuda compilation tools, who knows"),
    ],
)
def test_an_nvcc_that_cannot_be_used(
    bare: Path, monkeypatch: pytest.MonkeyPatch, says: str, words: str
) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(headers(bare / "cutlass")))
    program(bare / "host" / "nvcc", says)
    assert words in missing()[0].message


def test_a_named_nvcc_that_is_none_is_not_passed_over(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bare / "host" / "nvcc")
    monkeypatch.setenv("FLASHWRIGHT_NVCC", str(bare))
    assert "FLASHWRIGHT_NVCC is" in missing()[0].message
    broken = program(bare / "broken")
    broken.write_bytes(b"\x7fELF of another machine")
    monkeypatch.setenv("FLASHWRIGHT_NVCC", str(broken))
    monkeypatch.setenv("CUTLASS_PATH", str(headers(bare / "cutlass")))
    assert "cannot be run" in missing()[0].message


def wrapper(path: Path) -> Path:
    """A script that starts an nvcc which is gone."""
    program(path).write_text('#!/bin/sh\nexec /opt/gone/bin/nvcc "$@"\n')
    return path


def test_a_compiler_that_does_not_run_is_passed_over_with_a_warning(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTLASS_PATH", str(headers(bare / "cutlass")))
    packages(monkeypatch, nvidia=bare / "nvidia")
    broken = wrapper(bare / "host" / "nvcc")
    old = program(bare / "usual" / "nvcc", "release 11.8, V11.8.89")
    (alone,) = missing()  # nothing else is there: both reasons, and how to get a compiler
    assert f"{broken} --version fails with exit status 127" in alone.message
    assert "/opt/gone/bin/nvcc" in alone.message
    assert f"{old} is of CUDA 11.8" in alone.message
    assert "pip install 'flashwright[nvcc]'" in (alone.help or "")
    wheel = program(bare / "nvidia" / "cu13" / "bin" / "nvcc")
    found = toolchain.find()
    assert (found.nvcc, found.version) == (wheel, "13.0.88")
    assert [(w.code, w.severity) for w in found.warnings] == [("FW830", "warning")] * 2
    assert f"{broken} --version fails" in found.warnings[0].message
    assert all(w.message.endswith(f"; {wheel} is used instead") for w in found.warnings)
    monkeypatch.setenv("FLASHWRIGHT_NVCC", str(broken))  # what is named is not passed over
    assert "fails with exit status 127" in missing()[0].message


def test_has_nvcc(bare: Path) -> None:
    assert not toolchain.has_nvcc()
    path = wrapper(bare / "host" / "nvcc")
    assert not toolchain.has_nvcc()
    program(path)
    assert toolchain.has_nvcc()


def test_the_headers_are_the_version_that_the_extra_installs() -> None:
    pyproject = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())
    assert pyproject["project"]["optional-dependencies"]["cutlass"] == [toolchain.CUTLASS]


def test_the_headers_are_found_without_importing_their_package() -> None:
    if importlib.util.find_spec("cutlass_library") is None:
        pytest.skip("nvidia-cutlass is not installed")
    toolchain._cutlass()
    assert "cutlass_library" not in sys.modules
