"""`translate` and `build`, and the stages of `generate` that do the same: files, words, exit codes.

The compiler is a fake one, and so is the translation: what both do is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashwright.files import sha256
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan
from tests.unit.fake_nvcc import PTXAS, FakeNvcc, nvcc
from tests.unit.test_cli import GOOD, NO_TRANSPOSE, SKETCH, Outcome

__all__ = ["nvcc"]  # a fixture

SOURCE = "// one\n// two\n// three\n"
GENERATE = ("generate", "mha", "--gpu", "a100", "--head-dim", "64")
BEFORE = ["code.tl", "reasoning.md", "result.json", "sketch.tl", "spec.toml"]
KERNEL = ["kernel.cu", "kernel.map.json", "launch.json"]
BINARY = ["build.json", "kernel.cubin", "kernel.ptx"]


class Map:
    """Line 3 of the kernel came from line 5 of the TL."""

    def tl_line(self, cu_line: int) -> int | None:
        return 5 if cu_line == 3 else None

    def dump(self) -> str:
        return '{"tl": "code.tl", "lines": []}\n'


def translation(program: object, gpu: Gpu, sparing: bool = False, blocks: int | None = None) -> Any:
    plan = LaunchPlan(
        entry="k", arch=gpu.arch, threads=128, shared=49152, grid=(), dims=(), tensors=()
    )
    return SimpleNamespace(source=SOURCE, map=Map(), plan=plan, report=None)


Translate = Callable[..., Any]


@pytest.fixture
def translator(monkeypatch: pytest.MonkeyPatch) -> Callable[[Translate], None]:
    """Put another translator in the place of the real one."""

    def use(translate: Translate) -> None:
        monkeypatch.setattr("flashwright.lower.translate.translate", translate)
        monkeypatch.setattr("flashwright.build.make.translate", translate)

    use(translation)
    return use


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake compiler's cubin must not reach a real GPU."""

    def none() -> Any:
        raise Failed(Diagnostic("FW851", "no GPU can be used here"))

    monkeypatch.setattr("flashwright.build.driver.cards", none)


@pytest.fixture
def program(tmp_path: Path, translator: object) -> Path:
    path = tmp_path / "causal.tl"
    path.write_text(GOOD)
    return path


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHWRIGHT_NVCC", "/nowhere/nvcc")


# --- translate --------------------------------------------------------------------------------


def test_translate_to_stdout(program: Path) -> None:
    done = Outcome("translate", str(program), "--gpu", "a100")
    assert (done.code, done.out) == (0, SOURCE)
    assert os.listdir(program.parent) == ["causal.tl"]


def test_translate_to_files(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernel.cu"
    done = Outcome("translate", str(program), "--gpu", "a100", "-o", str(out))
    assert done.code == 0
    assert "kernel.cu: 3 lines for sm_80" in done.out
    assert sorted(os.listdir(tmp_path)) == ["causal.tl", *KERNEL]
    assert json.loads((tmp_path / "launch.json").read_text())["arch"] == "sm_80"
    (tmp_path / "made").mkdir()
    Outcome("translate", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"))
    assert sorted(os.listdir(tmp_path / "made")) == KERNEL


def test_translate_reads_stdin(translator: object) -> None:
    assert Outcome("translate", "-", "--gpu", "a100", input=GOOD).out == SOURCE


@pytest.mark.parametrize("command", ["translate", "build"])
def test_what_is_not_right_is_not_translated(
    command: str, nvcc: FakeNvcc, program: Path, translator: Callable[[Translate], None]
) -> None:
    def never(program: object, gpu: Gpu) -> Any:
        raise AssertionError("translated without being right")

    translator(never)
    for text, code, exits in ((NO_TRANSPOSE, "FW503", 1), (SKETCH, "FW207", 1), ("", "FW005", 2)):
        program.write_text(text)
        done = Outcome(command, str(program), "--gpu", "a100")
        assert done.code == exits
        assert f"error[{code}]" in done.err
    program.write_text(GOOD.replace("BN = 64", "BN = 512"))
    assert "error[FW70" in Outcome(command, str(program), "--gpu", "t4").err
    assert Outcome(command, str(program), "--gpu", "t5").code == 2
    assert Outcome(command, str(program.parent / "no.tl"), "--gpu", "a100").code == 2
    assert not nvcc.runs


def test_what_the_translator_says_stands_under_its_line(
    program: Path, translator: Callable[[Translate], None]
) -> None:
    def refuse(program: object, gpu: Gpu) -> Any:
        raise Failed(Diagnostic("FW705", "no translation for this GPU yet"))

    translator(refuse)
    done = Outcome("translate", str(program), "--gpu", "h200")
    assert done.code == 2
    assert "no translation for this GPU yet" in done.err
    assert "causal.tl" in done.err


# --- build ------------------------------------------------------------------------------------


def test_build_a_file(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    (tmp_path / "causal.toml").write_text('variant = "own"\nreference = "right.py"\n')
    (tmp_path / "right.py").write_text("def reference(inputs, dims): ...\n")
    folder = tmp_path / "made"
    done = Outcome("build", str(program), "--gpu", "a100", "-o", str(folder))
    assert done.code == 0, done.err
    assert "3 lines; 128 threads and 48 KB of shared memory" in done.out
    assert "168 registers a thread, no spills" in done.out
    assert "compiled in" in done.out
    made = [*BINARY, "code.tl", *KERNEL, "right.py", "spec.toml"]
    assert sorted(os.listdir(folder)) == sorted(made)
    assert (folder / "code.tl").read_text() == GOOD
    record = json.loads((folder / "build.json").read_text())
    assert (record["gpu"], record["arch"], record["registers"]) == ("a100", "sm_80", 168)
    for name, digest in record["artefacts"].items():
        assert sha256((folder / name).read_bytes()) == digest
    assert {"code.tl", "kernel.cu", "kernel.cubin", "launch.json"} <= set(record["artefacts"])
    assert "from the cache" in Outcome("build", str(folder)).out  # the folder knows its GPU
    assert len(nvcc.runs) == 1
    assert sorted(os.listdir(folder)) == sorted(made)


def test_build_goes_to_out(
    nvcc: FakeNvcc, program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Outcome("build", "causal.tl", "--gpu", "a100", "--no-ptx").code == 0
    assert sorted(os.listdir("out/causal-a100")) == sorted(
        ["code.tl", *KERNEL, "build.json", "kernel.cubin"]
    )
    assert Outcome("build", "-", "--gpu", "a100", input=GOOD).code == 0
    assert "kernel.ptx" in os.listdir("out/kernel-a100")


def test_build_keeps_what_somebody_changed(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    build = ("build", str(program), "--gpu", "a100", "-o", str(folder))
    Outcome(*build)
    (folder / "kernel.cu").write_text("// mine\n")
    done = Outcome(*build)
    assert "your changed kernel.cu is kept as kernel.cu.bak" in done.out
    assert (folder / "kernel.cu.bak").read_text() == "// mine\n"
    assert (folder / "kernel.cu").read_text() == SOURCE
    (folder / "code.tl").write_text(GOOD + "// changed\n")  # one's own program, built in its place
    assert Outcome("build", str(folder)).code == 0
    assert "code.tl.bak" not in os.listdir(folder)


def test_a_build_from_the_cache_starts_no_compiler(
    nvcc: FakeNvcc, program: Path, tmp_path: Path
) -> None:
    build = ("build", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"))
    assert "from the cache" not in Outcome(*build).out
    nvcc.set(body="exit 1", says="must not run\n")
    again = Outcome(*build)
    assert again.code == 0
    assert "from the cache" in again.out
    assert len(nvcc.runs) == 1


def test_build_for_a_newer_gpu(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    build = ("build", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"), "--real")
    assert Outcome(*build, "sm_90").code == 0
    assert "arch=compute_80,code=sm_90" in nvcc.runs[0]
    assert json.loads((tmp_path / "made" / "build.json").read_text())["real"] == "sm_90"
    for wrong in ("sm_75", "h200"):
        assert Outcome(*build, wrong).code == 2


def test_a_failed_build_leaves_no_old_cubin(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    build = ("build", str(program), "--gpu", "a100", "-o", str(folder))
    Outcome(*build)
    nvcc.set(body="exit 1", says="kernel.cu(3): error: identifier is undefined\n")
    program.write_text(GOOD)
    for entry in (nvcc.folder / "cache" / "kernels").glob("*/*"):
        entry.unlink()
    done = Outcome(*build)
    assert done.code == 1
    assert "error[FW822]: nvcc: identifier is undefined (kernel.cu:3)" in done.err
    assert "causal.tl:5:" in done.err
    assert sorted(os.listdir(folder)) == ["code.tl", *KERNEL]


def test_a_build_without_a_compiler_is_2_and_touches_nothing(
    nvcc: FakeNvcc, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made"
    build = ("build", str(program), "--gpu", "a100", "-o", str(folder))
    Outcome(*build)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    no_compiler(monkeypatch)
    done = Outcome(*build)
    assert done.code == 2
    assert "error[FW821]: FLASHWRIGHT_NVCC is /nowhere/nvcc" in done.err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_without_cutlass_a_build_says_what_to_install(
    nvcc: FakeNvcc, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASHWRIGHT_CUTLASS", "CUTLASS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("flashwright.build.toolchain.find_spec", lambda name: None)
    assert Outcome("check", str(program)).code == 0
    done = Outcome("build", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"))
    assert done.code == 2
    assert "error[FW821]: the headers of CUTLASS (CuTe) are not there" in done.err
    assert "pip install --no-deps nvidia-cutlass==4.2.0.0" in done.err
    assert not (tmp_path / "made").exists()


def test_a_compiler_on_path_that_does_not_run_is_named_once(
    nvcc: FakeNvcc, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bin" / "nvcc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexec /opt/gone/bin/nvcc\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent), prepend=os.pathsep)
    monkeypatch.delenv("FLASHWRIGHT_NVCC")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("flashwright.build.toolchain.USUAL", nvcc.path.parent)
    done = Outcome("build", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"))
    assert done.code == 0
    assert done.err.count("warning[FW830]") == 1
    assert f"{nvcc.path} is used instead" in done.err
    assert len(nvcc.runs) == 1


def test_a_killed_compiler_touches_nothing(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    Outcome("build", str(program), "--gpu", "a100", "-o", str(folder))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    nvcc.set(body="kill -9 $$")
    done = Outcome("build", str(program), "--gpu", "l40s", "-o", str(folder))
    assert done.code == 2
    assert "error[FW825]" in done.err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_build_without_a_cache_works_and_says_so(
    nvcc: FakeNvcc, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", "/dev/null/cache")
    done = Outcome("build", str(program), "--gpu", "a100", "-o", str(tmp_path / "made"))
    assert done.code == 0
    assert "warning[FW826]" in done.err
    assert "kernel.cubin" in os.listdir(tmp_path / "made")


def test_usage_errors_of_build_are_2(nvcc: FakeNvcc, program: Path, tmp_path: Path) -> None:
    assert Outcome("build", str(program)).code == 2
    assert Outcome("build", str(tmp_path), "--gpu", "a100").code == 2  # no code.tl in it
    (tmp_path / "file").touch()
    into = str(tmp_path / "file" / "made")
    assert Outcome("build", str(program), "--gpu", "a100", "-o", into).code == 2


# --- the stages of generate -------------------------------------------------------------------


def stages(folder: Path) -> dict[str, str]:
    result = json.loads((folder / "result.json").read_text())
    return {stage["stage"]: stage["status"] for stage in result["stages"]}


def test_generate_goes_on_to_the_cubin(nvcc: FakeNvcc, translator: object, tmp_path: Path) -> None:
    done = Outcome(*GENERATE, "--out", str(tmp_path))
    assert done.code == 1  # the fake compiler's PTX cannot be judged
    assert done.err.splitlines()[-1].startswith("not reached: verdict: no GPU can be used here")
    assert done.err.splitlines()[-1].endswith("or ask for less: --until build")
    assert Outcome(*GENERATE, "--until", "build", "--out", str(tmp_path / "less"), "-q").code == 0
    shutil.rmtree(tmp_path / "less")
    assert sorted(os.listdir(tmp_path)) == sorted([*BEFORE, *KERNEL, *BINARY])
    for words in (
        "5/7  Translation",
        "kernel.cu: 3 lines for sm_80; 128 threads and 48 KB of shared memory a block",
        "6/7  Build",
        "168 registers a thread, no spills",
        "it compiles for this GPU without spilling a register",
        "not run on a GPU",
    ):
        assert words in done.out
    assert "not compiled" not in done.out
    assert max(map(len, done.out.replace(str(tmp_path), "DIR").splitlines())) <= 100
    result = json.loads((tmp_path / "result.json").read_text())
    assert {n for n, status in stages(tmp_path).items() if status != "ok"} == {"verdict"}
    assert result["build"]["registers"] == 168
    for name, digest in result["artefacts"].items():
        assert sha256((tmp_path / name).read_bytes()) == digest
    assert sorted(result["artefacts"]) == sorted({*BEFORE, *KERNEL, *BINARY} - {"result.json"})
    again = Outcome(*GENERATE, "--out", str(tmp_path))
    assert "from the cache" in again.out
    assert ".bak" not in again.out


def test_generate_without_a_compiler(
    nvcc: FakeNvcc, translator: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outcome(*GENERATE, "--out", str(tmp_path))
    no_compiler(monkeypatch)
    done = Outcome(*GENERATE, "--out", str(tmp_path))
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("not reached: build: FLASHWRIGHT_NVCC is /nowhere/nvcc")
    assert last.endswith("or ask for less: --until translate")
    assert "not run: FLASHWRIGHT_NVCC is /nowhere/nvcc" in done.out
    assert "name the file nvcc itself, or unset it" in done.out
    assert "SKIPPED" in done.out
    assert "· not compiled" in done.out
    assert "it compiles" not in done.out
    assert sorted(os.listdir(tmp_path)) == sorted([*BEFORE, *KERNEL])  # no cubin of another day
    assert (stages(tmp_path)["translate"], stages(tmp_path)["build"]) == ("ok", "skipped")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ok"] is True
    assert result["build"] is None
    assert [s["why"][0]["code"] for s in result["stages"][-2:]] == ["FW821", "FW851"]
    assert "not compiled" in result["not_claimed"]
    quiet = Outcome(*GENERATE, "--out", str(tmp_path), "--quiet")
    assert quiet.out.strip().endswith("; not compiled")


def test_generate_for_a_gpu_without_translation(
    nvcc: FakeNvcc, translator: Callable[[Translate], None], tmp_path: Path
) -> None:
    def refuse(program: object, gpu: Gpu) -> Any:
        raise Failed(Diagnostic("FW811", "no translation for sm_80 yet", help="another GPU"))

    translator(refuse)
    done = Outcome(*GENERATE, "--out", str(tmp_path))
    assert done.code == 1
    assert (
        done.err.splitlines()[-1] == "not reached: translate: no translation for sm_80 yet (FW811)"
    )
    assert sorted(os.listdir(tmp_path)) == BEFORE
    assert stages(tmp_path)["translate"] == "failed"
    assert "not translated to CUDA" in done.out
    assert not nvcc.runs


def test_generate_a_kernel_that_spills(nvcc: FakeNvcc, translator: object, tmp_path: Path) -> None:
    nvcc.set(says=PTXAS.format(stack=8, stores=16, loads=16, registers=255))
    done = Outcome(*GENERATE, "--out", str(tmp_path))
    assert done.code == 1
    assert "error[FW823]" in done.err
    assert stages(tmp_path)["build"] == "failed"
    assert json.loads((tmp_path / "result.json").read_text())["ok"] is False
    assert sorted(os.listdir(tmp_path)) == sorted([*BEFORE, *KERNEL])
