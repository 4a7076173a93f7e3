"""Compiling: what is cached, what is refused and under which line, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flashwright.build import compile as compiler
from flashwright.build import toolchain
from flashwright.build.cache import Cache
from flashwright.build.compile import Built, build, read_resource_usage
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.unit.fake_nvcc import GOOD, PTXAS, WORKS, FakeNvcc, nvcc

__all__ = ["nvcc"]  # a fixture

SOURCE = """\
#include <cute/tensor.hpp>
extern "C" __global__ void k(float* x, int n) {
  cute::Tensor t = cute::make_tensor(cute::make_gmem_ptr(x), cute::make_shape(n));
  __shared__ float s[64];
  s[threadIdx.x] = t(threadIdx.x);
  __syncthreads();
  t(threadIdx.x) = s[63 - threadIdx.x];
}
"""
TL = "param BM = 64\n\n  Compute GEMM Q, K.T and get S\nend\n"
BUILD = "from flashwright.build.compile import build; print(build('x', 'sm_80').cached)"


class Map:
    """Every line of the kernel came from line 3 of the TL, but for the first two."""

    def tl_line(self, cu_line: int) -> int | None:
        return 3 if cu_line > 2 else None


def made(nvcc: FakeNvcc, source: str = "x", arch: str = "sm_80", real: str | None = None) -> Built:
    return build(source, arch, real=real, map=Map(), tl=TL, toolchain=nvcc.tools)


def refused(nvcc: FakeNvcc) -> tuple[Diagnostic, ...]:
    with pytest.raises(Failed) as caught:
        made(nvcc)
    assert not list(Cache().root.glob("kernels/*/*")), "a failed build is not kept"
    assert not list(Cache().root.glob("work/*")), "nothing is left behind"
    return caught.value.diagnostics


# --- building and not building again ----------------------------------------------------------


def test_build(nvcc: FakeNvcc) -> None:
    built = made(nvcc)
    assert (built.cubin, built.ptx) == (b"CUBIN\n", "PTX\n")
    assert (built.registers, built.stack, built.shared) == (168, 0, 256)
    assert (built.spill_stores, built.spill_loads) == (0, 0)
    assert (built.arch, built.real, built.nvcc) == ("sm_80", "sm_80", "13.0.88")
    assert built.seconds >= 0
    assert not built.cached
    assert not built.warnings
    (line,) = nvcc.runs
    assert "-gencode arch=compute_80,code=sm_80" in line
    assert "fast" not in line  # no fast-math
    assert not list(Cache().root.glob("work/*"))


def test_the_second_build_is_from_the_cache(nvcc: FakeNvcc) -> None:
    first, second = made(nvcc), made(nvcc)
    assert (first.cached, second.cached) == (False, True)
    assert len(nvcc.runs) == 1
    assert second.record() == first.record()
    assert (second.cubin, second.ptx) == (first.cubin, first.ptx)


def test_whatever_changes_is_built_again(nvcc: FakeNvcc) -> None:
    tools = nvcc.tools
    made(nvcc)
    made(nvcc, source="y")
    made(nvcc, arch="sm_89")
    made(nvcc, real="sm_90")
    (tools.device / "attention.cuh").write_text("new")
    made(nvcc)
    (tools.cutlass / "tensor.hpp").write_text("new")
    made(nvcc)
    newer = toolchain.Toolchain(tools.nvcc, "13.1.0", tools.cutlass, tools.device)
    build("x", "sm_80", toolchain=newer)
    assert len(nvcc.runs) == 7


def test_a_damaged_entry_is_built_again(nvcc: FakeNvcc) -> None:
    made(nvcc)
    (entry,) = Cache().root.glob("kernels/*/*")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert not made(nvcc).cached
    assert made(nvcc).cached


def test_the_ptx_of_an_older_gpu_for_a_newer_one(nvcc: FakeNvcc) -> None:
    assert made(nvcc, real="sm_90").real == "sm_90"
    assert "arch=compute_80,code=sm_90" in nvcc.runs[0]


@pytest.mark.parametrize(
    ("arch", "real"), [("sm_80", "sm_75"), ("a100", "a100"), ("sm_80", "sm_80 -x"), ("sm_8", "")]
)
def test_targets_that_are_none(arch: str, real: str) -> None:
    with pytest.raises(ValueError, match="sm_"):
        compiler.target(arch, real)


def test_flags_from_outside_do_not_come_in(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    nvcc.set(body=f"env > {nvcc.folder}/env; {WORKS}")
    made(nvcc)
    seen = (nvcc.folder / "env").read_text()
    assert "fast_math" not in seen
    assert "LC_ALL=C\n" in seen


def test_a_cache_that_cannot_be_written_is_a_warning(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", "/dev/null/cache")
    built = made(nvcc)
    assert built.cubin == b"CUBIN\n"
    (warning,) = built.warnings
    assert (warning.code, warning.severity) == ("FW826", "warning")
    assert "/dev/null/cache: Not a directory" in warning.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_still_gives_what_is_in_it(nvcc: FakeNvcc) -> None:
    made(nvcc)
    for path in [Cache().root, *Cache().root.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert made(nvcc).cached
    assert made(nvcc, source="y").warnings


# --- what is refused --------------------------------------------------------------------------


def test_spills_are_errors_without_compiling_again(nvcc: FakeNvcc) -> None:
    nvcc.set(says=PTXAS.format(stack=904, stores=1184, loads=1208, registers=255))
    for _ in range(2):
        with pytest.raises(Failed) as caught:
            made(nvcc)
    assert len(nvcc.runs) == 1
    (found,) = caught.value.diagnostics
    assert found.code == "FW823"
    assert "1184 bytes stored to and 1208 bytes loaded" in found.message
    assert "255 registers" in found.message


@pytest.mark.parametrize("code", ["C7508", "C7510", "C7511", "C7514", "C7515"])
def test_lost_speed_is_an_error(nvcc: FakeNvcc, code: str) -> None:
    line = f"ptxas info    : ({code}) Potential Performance Loss: wgmma is serialized in 'k'\n"
    nvcc.set(says=line + line + GOOD)
    (found,) = refused(nvcc)
    assert found.code == "FW824"
    assert found.message.startswith(f"ptxas ({code}): Potential Performance Loss")


def test_silence_is_not_taken_for_no_spills(nvcc: FakeNvcc) -> None:
    nvcc.set(says="ptxas info    : 0 bytes gmem\n")
    (found,) = refused(nvcc)
    assert (found.code, found.message) == (
        "FW822",
        "ptxas tells of no kernel in the generated code",
    )


def test_facts_of_several_functions() -> None:
    log = PTXAS.format(stack=8, stores=4, loads=2, registers=40) + PTXAS.format(
        stack=16, stores=1, loads=0, registers=32
    )
    facts = read_resource_usage(log, 1.234)
    assert (facts.registers, facts.stack, facts.spill_stores, facts.spill_loads) == (40, 16, 5, 2)


@pytest.mark.parametrize(
    ("log", "message", "line"),
    [
        (
            'kernel.cu(7): error: identifier "S" is undefined\n  x = S;\n      ^\n',
            'nvcc: identifier "S" is undefined (kernel.cu:7)',
            3,
        ),
        (
            "/a/fw/mma.cuh(33): error: no suitable conversion\n"
            '          detected during instantiation of "f<T>" at line 80 of /a/fw/gemm.cuh\n'
            '          instantiation of "g<T>" at line 9 of kernel.cu\n',
            "nvcc: no suitable conversion (fw/mma.cuh:33, from kernel.cu:9)",
            3,
        ),
        ("kernel.cu(1): error: expected a ;\n", "nvcc: expected a ; (kernel.cu:1)", None),
        ("kernel.cu:5:9: error: missing ')'\n", "nvcc: missing ')' (kernel.cu:5)", 3),
        (
            "kernel.cu:4:10: fatal error: fw/gone.cuh: No such file or directory\n",
            "nvcc: fw/gone.cuh: No such file or directory (kernel.cu:4)",
            3,
        ),
        ("kernel.cu(5): error #20: wrong\n", "nvcc: wrong (kernel.cu:5)", 3),
        (
            "ptxas kernel.ptx, line 26; error   : Not a name of any known instruction: 'bogus'\n"
            "ptxas fatal   : Ptx assembly aborted due to errors\n",
            "nvcc: Not a name of any known instruction: 'bogus' (line 26 of the PTX)",
            None,
        ),
        ("something else\n", "nvcc failed with 1: something else", None),
        ("", "nvcc failed with 1: it said nothing", None),
    ],
)
def test_errors_stand_under_their_line(
    nvcc: FakeNvcc, log: str, message: str, line: int | None
) -> None:
    nvcc.set(body="exit 1", says=log)
    (found,) = refused(nvcc)
    assert (found.code, found.message) == ("FW822", message)
    assert (found.span.line if found.span else None) == line
    if found.span:
        assert TL[found.span.start : found.span.end] == "Compute GEMM Q, K.T and get S"


def test_not_more_than_a_few_errors(nvcc: FakeNvcc) -> None:
    nvcc.set(body="exit 1", says="".join(f"kernel.cu({n}): error: e{n}\n" for n in range(3, 60)))
    assert [d.message for d in refused(nvcc)] == [
        f"nvcc: e{n} (kernel.cu:{n})" for n in range(3, 8)
    ]


@pytest.mark.parametrize(
    ("log", "code", "words"),
    [
        (
            "nvcc fatal   : Failed to preprocess host compiler properties.\n",
            "FW821",
            "host compiler",
        ),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_75'\n", "FW821", "compute_75"),
        ("a.h:1:2: error: #error -- unsupported GNU version! gcc 99\n", "FW821", "GNU version"),
        ("x.h:4:3: fatal error: cuda/std/a: No such file or directory\n", "FW821", "cuda/std/a"),
        ("cicc: error: No space left on device\n", "FW001", "no space left on the disk"),
    ],
)
def test_what_is_wrong_with_the_machine(nvcc: FakeNvcc, log: str, code: str, words: str) -> None:
    nvcc.set(body="exit 1", says=log)
    (found,) = refused(nvcc)
    assert found.code == code
    assert words in found.message
    assert found.help


# --- processes --------------------------------------------------------------------------------


def start(nvcc: FakeNvcc) -> subprocess.Popen[str]:
    for name in ("cutlass/cute", "device"):
        (nvcc.folder / name).mkdir(parents=True, exist_ok=True)
    (nvcc.folder / "cutlass" / "cute" / "tensor.hpp").touch()
    env = {**os.environ, "FLASHWRIGHT_CUTLASS": str(nvcc.folder / "cutlass")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", BUILD], env=env, stdout=pipe, text=True)


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text().strip()


def alive(pid: str) -> bool:
    """Whether a process still runs; one that is dead and not yet buried does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: str) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


SLOW = "sleep 60 & echo $! > {folder}/child; echo $$ > {folder}/pid; wait"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


def test_two_processes_at_once_build_it_once(nvcc: FakeNvcc) -> None:
    nvcc.set(body=f"sleep 0.5; {WORKS}")
    both = [start(nvcc), start(nvcc)]
    said = sorted(child.communicate(timeout=60)[0].strip() for child in both)
    assert [child.returncode for child in both] == [0, 0]
    assert said == ["False", "True"]
    assert len(nvcc.runs) == 1


@needs_proc
def test_ctrl_c_ends_the_compiler_and_its_children(nvcc: FakeNvcc) -> None:
    nvcc.set(body=SLOW.format(folder=nvcc.folder))
    child = start(nvcc)
    pids = [wait_for(nvcc.folder / name) for name in ("pid", "child")]
    time.sleep(0.3)  # the parent has to come back from starting it
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode != 0
    assert all(map(gone, pids))
    assert not list(Cache().root.glob("work/*"))


@needs_proc
def test_the_clock_ends_the_compiler(nvcc: FakeNvcc) -> None:
    nvcc.set(body=SLOW.format(folder=nvcc.folder))
    with pytest.raises(Failed, match=r"FW825: nvcc was stopped after 0\.3 seconds"):
        build("x", "sm_80", toolchain=nvcc.tools, time_limit=0.3)
    assert all(gone(wait_for(nvcc.folder / name)) for name in ("pid", "child"))


def test_a_killed_compiler(nvcc: FakeNvcc) -> None:
    nvcc.set(body="echo half > kernel.cubin; kill -9 $$")
    (found,) = refused(nvcc)
    assert found.code == "FW825"
    assert "signal 9" in found.message
    nvcc.set()
    assert made(nvcc).cubin == b"CUBIN\n"


@needs_proc
def test_a_killed_build_leaves_nothing_broken(nvcc: FakeNvcc) -> None:
    nvcc.set(body=f"echo half > kernel.cubin; {SLOW.format(folder=nvcc.folder)}")
    child = start(nvcc)
    pid = wait_for(nvcc.folder / "pid")
    child.kill()
    child.communicate(timeout=30)
    nvcc.set()
    again = start(nvcc)
    assert again.communicate(timeout=30)[0].strip() == "False"
    assert again.returncode == 0
    os.killpg(int(pid), signal.SIGKILL)  # the orphan of the one that was killed


# --- the real compiler ------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolchain:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    try:
        return toolchain.find()
    except Failed as failed:
        pytest.skip(f"no compiler: {failed}")


def test_a_cute_kernel_compiles(real: toolchain.Toolchain) -> None:
    built = build(SOURCE, "sm_80", toolchain=real)
    assert built.cubin.startswith(b"\x7fELF")
    assert ".target sm_80" in built.ptx
    assert built.registers > 0
    assert built.shared == 256
    gone = replace(real, nvcc=Path("/nowhere/nvcc"))  # the cache starts no compiler
    again = build(SOURCE, "sm_80", toolchain=gone)
    assert again.cached
    assert again.cubin == built.cubin


def test_real_errors_and_real_spills(real: toolchain.Toolchain) -> None:
    wrong = "\n\n__global__ void k(float* x) { x[0] = nothing; }\n"
    with pytest.raises(Failed) as caught:
        build(wrong, "sm_80", map=Map(), tl=TL, toolchain=real)
    (found,) = caught.value.diagnostics
    assert found.message == 'nvcc: identifier "nothing" is undefined (kernel.cu:3)'
    assert found.span is not None
    assert found.span.line == 3
    spills = """
__global__ __launch_bounds__(1024, 2) void k(float* x, int n) {
  float a[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) a[i] = x[i * n + threadIdx.x];
  for (int j = 0; j < n; j++)
    #pragma unroll
    for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 1) % 64] + j;
  #pragma unroll
  for (int i = 0; i < 64; i++) x[i * n + threadIdx.x] = a[i];
}
"""
    with pytest.raises(Failed, match="FW823"):
        build(spills, "sm_80", toolchain=real)
