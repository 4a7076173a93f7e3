"""Whole CUDA programs without a GPU: built by nvcc as they are, their kernels in the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from flashwright.build import toolchain
from flashwright.emulate.fatbin import of_lz4, read_image
from flashwright.lang.diagnostic import Failed

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the library is for Linux"),
    pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no nvcc"),
]
SHARED = ("-cudart", "shared")


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Builder = Callable[..., Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Compiles programs, each once."""
    folder = tmp_path_factory.mktemp("programs")
    made: dict[tuple[str, ...], Path] = {}

    def build(*sources: str, flags: tuple[str, ...] = SHARED, suffix: str = "") -> Path:
        key = (*sources, *flags)
        if key not in made:
            path = folder / f"program{len(made)}{suffix}"
            files = [str(PROGRAMS / name) for name in sources]
            command = [str(toolchain.find().nvcc), "-lineinfo", *flags, *files, "-o", str(path)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode and "-lcudart" in done.stderr:
                pytest.skip("there is no CUDA runtime to link with")
            assert done.returncode == 0, done.stderr
            made[key] = path
        return made[key]

    return build


def run(*command: str | Path, options: tuple[str, ...] = ()) -> Ran:
    own = [sys.executable, "-m", "flashwright", "emulate-program", *options, "--"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*own, *map(str, command)], capture_output=True, text=True, timeout=300, env=env
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def line_of(source: str, text: str) -> int:
    lines = (PROGRAMS / source).read_text("utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if text in line)


# --- programs that are right ------------------------------------------------------------------


RIGHT = """\
saxpy 0 wrong
elapsed 1
constant, dynamic shared memory: 0 wrong, counter 6
managed 42 17
graph 0 wrong
pitched 700
host function 1
occupancy 1
freed 1
"""


@pytest.mark.parametrize(
    "flags", [SHARED, pytest.param(("-cudart", "static"), marks=pytest.mark.slow)]
)
def test_a_program_runs_as_it_is(built: Builder, flags: tuple[str, ...]) -> None:
    done = run(built("features.cu", flags=(*flags, "-arch=sm_90")), "one", "two")
    assert done.out == "3 arguments, compute capability 9.0\n" + RIGHT
    assert (done.status, done.err.count("\n")) == (0, 1)
    assert "11 launches of 4 kernels, no findings" in done.err


@pytest.mark.slow
def test_the_program_finds_the_gpu_that_was_asked_for(built: Builder) -> None:
    program = built("features.cu", flags=(*SHARED, "-arch=sm_75"))
    done = run(program, options=("--gpu", "l40s", "--sms", "3"))
    assert "compute capability 8.9" in done.out
    assert done.status == 0
    assert RIGHT in done.out


def test_the_exit_status_is_the_program_s(built: Builder) -> None:
    done = run(built("bugs.cu"), "status")
    assert done.status == 7
    assert "no launches, no findings; it ended with exit status 7" in done.err


@pytest.mark.slow
def test_files_that_nvcc_links(built: Builder) -> None:
    done = run(built("linked.cu", "linked_too.cu", flags=(*SHARED, "-rdc=true", "-arch=sm_80")))
    assert done.out == "0.5 62.5, counter 4\n"
    assert done.status == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["shared", "static"])
def test_a_library_that_python_loads(built: Builder, runtime: str) -> None:
    flags = ("-cudart", runtime, "-shared", "-Xcompiler", "-fPIC")
    library = built("library.cu", flags=flags, suffix=".so")
    done = run(sys.executable, PROGRAMS / "library.py", library)
    assert done.out == "0 4950 5250\n"
    assert done.status == 0, done.err


@pytest.mark.slow
def test_the_functions_of_the_driver(built: Builder, tmp_path: Path) -> None:
    ptx = built("driver_kernel.cu", flags=("-ptx", "-arch=sm_90"), suffix=".ptx")
    # dlopen finds the stand-in by the driver's name.
    done = run(built("driver.cu", flags=(*SHARED, "-ldl")), ptx)
    assert done.out == "no kernel 500\n3.5 102.5, level 4\nmap 0, then 1\n"
    assert done.status == 1  # for the wrong map
    assert "the stride of dimension 1, 100 bytes, is not a multiple of 16" in done.err


# --- programs that are wrong ------------------------------------------------------------------


FOUND = {
    "race": ("tile[threadIdx.x] += tile[threadIdx.x + 32]", "error[FW837]: race"),
    "past": ("x[threadIdx.x] = 1;", "behind the end of `allocation 4 (1024 bytes)`"),
    "freed": ("x[0] = 2;", "byte 0 of `freed allocation 7 (1024 bytes)`"),
    "unset": ("out[threadIdx.x] = x[threadIdx.x];", "byte 1020 of `allocation 10 (1024 bytes)`"),
    "constant": ("x[1] = unset_constant;", "of `unset_constant`, which nothing has written"),
}


def test_bugs_are_found_at_their_lines(built: Builder) -> None:
    done = run(built("bugs.cu"), *FOUND)
    told = done.err.split("error[")
    assert len(told) == 1 + len(FOUND)
    for (line, said), text in zip(FOUND.values(), told[1:], strict=True):
        assert f"bugs.cu:{line_of('bugs.cu', line)}" in text
        assert said in "error[" + text
    assert "6 launches of 5 kernels, 5 findings" in done.err
    assert done.status == 1


def test_a_copy_of_what_is_not_set_is_not_set(built: Builder) -> None:
    done = run(built("bugs.cu"), "copied")
    assert "byte 1020 of `allocation 3 (1024 bytes)`, which nothing has written" in done.err
    assert done.status == 1


MISUSED = {
    "copy": "cudaMemcpy reads 2000 bytes from byte 0 of allocation 1 of 1024 bytes",
    "direction": "cudaMemcpy names a direction that its pointers do not have",
    "twice": "cudaFree frees allocation 7 of 1024 bytes a second time",
    "threads": "a block of 2048, 1, 1, which no GPU takes (cudaErrorInvalidConfiguration)",
    "shared": "50000 bytes of dynamic shared memory, and may have 49152 without cudaFunc",
}


def test_wrong_uses_of_cuda_are_told(built: Builder) -> None:
    done = run(built("bugs.cu"), *MISUSED)
    told = done.err.splitlines()
    assert [
        said for said, text in zip(MISUSED.values(), told, strict=False) if said not in text
    ] == []
    assert "no launches, no findings, 5 wrong calls" in told[-1]
    assert done.status == 1


def test_the_host_cannot_read_what_is_the_device_s(built: Builder) -> None:
    done = run(built("bugs.cu"), "deref")
    assert "the program's host code accesses device memory at" in done.err
    assert done.status == 128 + 11


def test_a_kernel_that_stops_is_an_error_from_then_on(built: Builder) -> None:
    done = run(built("bugs.cu"), "trap")
    assert done.out == "cudaSuccess, cudaErrorLaunchFailure, cudaErrorLaunchFailure\n"
    assert "error[FW845]: trap" in done.err


def test_a_function_that_is_not_emulated_says_its_name(built: Builder) -> None:
    done = run(built("bugs.cu"), "refused")
    assert done.out == "cudaErrorNotSupported\n"
    assert "cudaMallocArray is not emulated: the call returns cudaErrorNotSupported" in done.err
    assert "not emulated: cudaMallocArray, 2 times" in done.err
    assert done.status == 2


@pytest.mark.slow
def test_a_program_without_ptx_is_told_how_to_build_it(built: Builder) -> None:
    done = run(built("bugs.cu", flags=(*SHARED, "-gencode", "arch=compute_80,code=sm_80")), "past")
    assert "machine code of sm_80, and no PTX for the emulator" in done.err
    assert "code=[sm_90,compute_90]" in done.err
    assert done.status == 2


def test_a_program_that_is_not_there() -> None:
    done = run("./no_such_program")
    assert (done.status, "cannot run ./no_such_program" in done.err) == (2, True)


# --- fat binaries -----------------------------------------------------------------------------


def test_lz4() -> None:
    # Three literals, a copy that overlaps itself, then five literals: as the format's page has it.
    packed = bytes([0x3F, *b"abc", 3, 0, 1, 0x50, *b"12345"])
    assert of_lz4(packed) == b"abc" + (b"abc" * 7)[:20] + b"12345"
    with pytest.raises(Failed):
        of_lz4(bytes([0x10, *b"a", 9, 0]))


def test_a_module_that_is_nothing() -> None:
    with pytest.raises(Failed, match="neither PTX nor a fat binary"):
        read_image(b"something else\0")
