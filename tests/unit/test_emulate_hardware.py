"""The emulator against what an H200 answered (tests/hardware), one instruction at a time."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.build import toolchain
from flashwright.build.compile import build
from tests.golden.cases import CASES, Case
from tests.golden.cases import HERE as GOLDEN
from tests.hardware import emitted, emulated, record, recording
from tests.hardware.compare import compare
from tests.hardware.formats import KINDS, apart, value
from tests.hardware.gpu import Gpu, GpuError
from tests.hardware.recording import Recording
from tests.hardware.snippet import Operands, Prepared
from tests.hardware.snippets import assemble, covered, modules, prepared

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
needs_nvcc = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

# What has no result of its own: kernels under emulation show whether it is right.
CONTROL = {
    *("bra", "bra.uni", "ret", "bar.sync", "cp.async.commit_group", "cp.async.wait_group"),
    *("nanosleep.u32", "setmaxnreg.dec.sync.aligned.u32", "setmaxnreg.inc.sync.aligned.u32"),
}
# Prologues of the snippets are made of these, and kernels load several parameters at once.
LOADED = {"ld.param.u64", "ld.param.v2.u64", "mul.wide.u32"}
# What ended with an illegal instruction on the recording GPU, and what the emulator finds there.
REFUSED = {
    **{
        f"cp.async.bulk.tensor.2d {what}": "misaligned"
        for what in (
            "load none 16 at an odd place",
            "load none 16 before the start at an odd place",
            "load 128B 64 at an odd place",
            "load 128B 64 before the start at an odd place",
            "store none at 5 1",
        )
    },
    "cp.async.bulk.tensor.2d store 128B at -8 0": "out_of_bounds",
    "cp.async.bulk.tensor.2d store 128B at 0 -2": "out_of_bounds",
}
# What was added or changed since, and why. `python -m tests.hardware.record --missing` on a GPU
# records it; then these go, and what the GPU refused goes above.
AWAITED: dict[str, str] = {}  # a pattern of names, and the reason
ASYNCHRONOUS = ("memory", "barriers", "wgmma", "tma")
GROUPS = sorted({one.snippet.group for one in prepared()})


def of_group(group: str) -> list[Prepared]:
    return [one for one in prepared() if one.snippet.group == group]


@functools.cache
def eagerly(name: str) -> tuple[Operands, list[Any]]:
    """What the emulator leaves and finds where asynchronous work is done at once."""
    return emulated.run(by_name(name))


def awaited(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in AWAITED)


def expected(name: str) -> list[str]:
    """The kinds of what the emulator finds in a snippet."""
    return [REFUSED[name]] if name in REFUSED else []


def modelled(one: Prepared) -> Operands | None:
    if one.snippet.model is None:
        return None
    with np.errstate(all="ignore"):
        results = one.snippet.model(*one.operands)
    return results if isinstance(results, list) else [results]


# --- without a GPU ------------------------------------------------------------------------------


def test_every_instruction_of_our_kernels_has_a_snippet() -> None:
    assert emitted.listed() - covered() - CONTROL - LOADED == set()


@needs_nvcc
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c.gpu == "l40s" else pytest.mark.slow) for c in CASES],
    ids=lambda c: c.name,
)
def test_emitted_txt_is_up_to_date(case: Case) -> None:
    """Where it is not: `python -m tests.hardware.emitted`."""
    built = build((GOLDEN / f"{case.name}.cu").read_text("utf-8"), gpus.find(case.gpu).arch)
    assert emitted.opcodes(built.ptx) <= emitted.listed()


@needs_nvcc
@pytest.mark.slow
def test_snippets_assemble() -> None:
    """A mistake in one would be found on the GPU's machine only."""
    ptxas = toolchain.find().nvcc.resolve().with_name("ptxas")
    if not ptxas.is_file():
        pytest.skip("there is no ptxas beside nvcc")
    for (arch, version), many in modules(prepared()).items():
        assert assemble(ptxas, arch, version, many) == ""


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
def test_snippets_run_and_are_what_numpy_says(group: str) -> None:
    wrong = {}
    for one in of_group(group):
        name = one.snippet.name
        found, findings = eagerly(name)
        assert [f.kind for f in findings] == expected(name), (name, findings)
        wanted = modelled(one)
        if wanted is not None:
            verdict = compare(one.snippet, one.operands, wanted, found)
            if not verdict.ok:
                wrong[name] = str(verdict)
    assert not wrong


@needs_compiler
@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
@pytest.mark.parametrize(
    "group",
    [g if g != "wgmma" else pytest.param(g, marks=pytest.mark.slow) for g in ASYNCHRONOUS],
)
def test_when_asynchronous_work_is_done_makes_no_difference(group: str, schedule: str) -> None:
    for one in of_group(group):
        name = one.snippet.name
        first, _ = eagerly(name)
        second, findings = emulated.run(one, schedule)
        assert [f.kind for f in findings] == expected(name), (name, findings)
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b, name)


# --- against the recording ----------------------------------------------------------------------


@functools.cache
def recorded() -> Recording:
    found = recording.load()
    if found is None:
        pytest.skip("nothing has been recorded on a GPU yet: python -m tests.hardware.record")
    return found


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
def test_the_emulator_does_what_the_hardware_did(group: str) -> None:
    """Bit for bit, or within the bound of the snippet."""
    hardware, wrong, stale = recorded(), {}, []
    for one in of_group(group):
        name = one.snippet.name
        verdict = record.verdict(one, hardware)
        if verdict is None:
            stale.append(name)
        elif not verdict.ok:
            wrong[name] = verdict.note
    assert not wrong
    stale = [name for name in stale if name not in REFUSED and not awaited(name)]
    assert not stale, "these have changed since: python -m tests.hardware.record --missing"


def test_the_recording_is_small_and_of_hopper() -> None:
    assert "sm_90" in recorded().machine
    assert set(recorded().failed) == set(REFUSED), recorded().failed
    assert all("ILLEGAL_INSTRUCTION" in why for why in recorded().failed.values())
    missing = {one.snippet.name for one in prepared() if recorded().of(one) is None}
    assert {name for name in missing if not awaited(name)} == set(REFUSED)
    known = {one.snippet.name for one in prepared() if awaited(one.snippet.name)} - missing
    assert not known, "these have results: they are no longer AWAITED"
    assert recording.FILE.stat().st_size < 3 << 20


# --- comparing ----------------------------------------------------------------------------------


def by_name(name: str) -> Prepared:
    return next(one for one in prepared() if one.snippet.name == name)


@pytest.mark.parametrize("group", GROUPS)
def test_another_bit_is_a_difference(group: str) -> None:
    """The sign of one number: no bound has room for that."""
    for one in of_group(group)[:: 7 if group == "cvt" else 1]:
        wanted = modelled(one)
        if wanted is None:
            continue
        kind, last = KINDS[one.snippet.gives[-1]], wanted[-1].copy()
        numbers = apart(last, kind)
        size = abs(value(numbers, kind.float)) if kind.float else np.ones(numbers.shape)
        large = size > 0.1 if group in ("approximate", "matrix", "wgmma") else ~np.isnan(size)
        at = np.argwhere(large)[-1]
        numbers[tuple(at)] ^= numbers.dtype.type(1 << (8 * numbers.itemsize - 1))
        verdict = compare(one.snippet, one.operands, wanted, [*wanted[:-1], last])
        assert verdict.what == "differs", one.snippet.name
        assert f"thread {at[0] % one.snippet.threads}," in verdict.note


def test_nan_is_nan_and_zeros_have_signs() -> None:
    one = by_name("add.f32")
    hardware = [np.array([0x7FFFFFFF, 0x3F800000], np.uint32)]
    other = [np.array([0xFFC00001, 0x3F800000], np.uint32)]
    operands = [np.zeros(2, np.uint32)] * 2
    assert compare(one.snippet, operands, hardware, other).what == "nan"
    other[0][1] += 1
    assert compare(one.snippet, operands, hardware, other).what == "differs"
    bits = by_name("selp.f32").snippet
    operands = [*operands, operands[0]]
    assert compare(bits, operands, hardware, [hardware[0] ^ np.uint32(1)]).what == "differs"
    near = by_name("ex2.approx.ftz.f32").snippet
    x = [np.array([0x3F800000, 0x00000000], np.uint32)]
    for change, what in (
        ((2, 0), "within"),
        ((5, 0), "differs"),
        ((0, 0x00800000), "within"),  # one was flushed
        ((0, 0x80000000), "differs"),
    ):
        moved = [x[0] + np.array(change, np.uint32)]
        assert compare(near, [x[0]], x, moved).what == what, change


def test_infinity_is_no_number_unless_it_nearly_is() -> None:
    near = by_name("rcp.approx.f32").snippet
    top = [np.array([0x7F7FFFFF], np.uint32)]
    assert compare(near, top, top, [np.array([0x7F800000], np.uint32)]).what == "within"
    one = [np.array([0x3F800000], np.uint32)]
    assert compare(near, one, one, [np.array([0x7F800000], np.uint32)]).what == "differs"


# --- recording ----------------------------------------------------------------------------------


def test_a_recording_is_kept_and_knows_what_it_is_of(tmp_path: Path) -> None:
    one, other = by_name("add.f32"), by_name("sub.f32")
    data = bytes(range(256)) * (one.size // 256)
    made = Recording("a GPU", {"add.f32": (one.digest, data)}, {"sub.f32": "no"})
    recording.save(tmp_path / "some.npz", made)
    found = recording.load(tmp_path / "some.npz")
    assert found == made
    assert found.of(other) is None
    results = found.of(one)
    assert results is not None
    assert results[0].tobytes() == data
    changed = replace(one, data=one.data + b"?")
    assert found.of(changed) is None


def test_what_has_results_is_not_recorded_again(tmp_path: Path) -> None:
    one, other = by_name("add.f32"), by_name("sub.f32")
    data = bytes(range(256)) * (one.size // 256)
    old = {"add.f32": (one.digest, data), "sub.f32": ("of another", b"?"), "gone": ("", b"")}
    told: list[int] = []

    def collect(todo: list[int], place: Path, _: list[str]) -> tuple[str, dict[int, str]]:
        told.extend(todo)
        failed = dict.fromkeys(todo[1:], "no")
        (place / f"{todo[0]}.bin").write_bytes(b"new")
        return "a GPU", failed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "prepared", lambda: (one, other, by_name("mul.f32")))
        patch.setattr(record, "collect", collect)
        made = record.record(tmp_path / "some.npz", "", Recording("a GPU", old, {"gone": "no"}))
    assert told == [1, 2]
    results = {"add.f32": (one.digest, data), "sub.f32": (other.digest, b"new")}
    assert made == Recording("a GPU", results, {"mul.f32": "no"})
    assert recording.load(tmp_path / "some.npz") == made


CHILD = """
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1])
print("machine", "a test", flush=True)
for n in json.loads((place / "todo.json").read_text()):
    if n == 2:
        print("failed", n, "the driver says no", flush=True)
        sys.exit(3)
    print("start", n, flush=True)
    if n == 4:
        os.abort()
    if n == 5:
        time.sleep(60)
    (place / f"{n}.bin").write_bytes(b"x")
    print("done", n, flush=True)
"""


def test_one_snippet_that_fails_crashes_or_hangs_costs_only_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD]
    machine, failed = record.collect(range(8), tmp_path, command, patience=1.5)
    assert machine == "a test"
    assert set(failed) == {2, 4, 5}
    assert failed[2] == "the driver says no"
    assert "nothing was heard" in failed[5]
    assert sorted(int(p.stem) for p in tmp_path.glob("*.bin")) == [0, 1, 3, 6, 7]


def test_without_a_gpu_recording_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no GPU to be used here: .*no driver"):
        record.collect([0], tmp_path, [sys.executable, "-c", "raise OSError('no driver')"])


# A driver that copies operands to results: what it is given must be in its place for that.
DRIVER = """
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
static int kernel;
int cuInit(unsigned f) { return f; }
int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
int cuDeviceGet(int* d, int n) { return *d = n, 0; }
int cuDeviceGetName(char* name, int size, int d) { return strcpy(name, "Fake"), size < 5 || d; }
int cuDeviceGetAttribute(int* v, int a, int d) { return *v = a == 75 ? 9 : 0, d; }
int cuDevicePrimaryCtxRetain(void** c, int d) { return *c = &kernel, d; }
int cuCtxSetCurrent(void* c) { return c != &kernel; }
int cuCtxSynchronize(void) { return 0; }
int cuModuleLoadDataEx(void** m, const char* text, unsigned n, int* options, void** values) {
  if (n != 2 || options[0] != 5 || options[1] != 6 || (u64)values[1] < 1000) return 1;
  if (strstr(text, "sub.f32")) return strcpy(values[0], "line 3: no"), 218;
  return *m = &kernel, strncmp(text, ".version 8", 10) != 0;
}
int cuModuleGetFunction(void** f, void* m, const char* name) {
  return *f = &kernel, m != &kernel || strncmp(name, "fw_", 3) != 0;
}
int cuMemAlloc_v2(u64* p, size_t n) { return *p = (u64)malloc(n), 0; }
int cuMemFree_v2(u64 p) { return free((void*)p), 0; }
int cuMemsetD8_v2(u64 p, unsigned char v, size_t n) { return memset((void*)p, v, n), 0; }
int cuMemcpyHtoD_v2(u64 p, const void* from, size_t n) { return memcpy((void*)p, from, n), 0; }
int cuMemcpyDtoH_v2(void* to, u64 p, size_t n) { return memcpy(to, (void*)p, n), 0; }
int cuTensorMapEncodeTiled(char* map, int type, unsigned rank, u64 base, u64* sizes, u64* strides,
                           unsigned* box, unsigned* steps, int a, int swizzle, int b, int fill) {
  if ((u64)map % 64 || type != 6 || rank != 2 || sizes[0] != 72 || sizes[1] != 10) return 1;
  if (strides[0] != 160 || box[0] != 64 || box[1] != 8 || steps[0] != 1 || a || b || fill) return 2;
  return memset(map, swizzle, 128), base % 16 != 0;
}
int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** p, void** extra) {
  if (f != &kernel || gy * gz * by * bz != 1 || shared || stream || extra) return 400;
  memcpy(*(void**)p[1], *(void**)p[0], gx * bx * 4);
  memcpy(*(char**)p[1] + gx * bx * 4 - 4, p[2], 4);
  return 0;
}
int cuGetErrorName(int r, const char** name) { return *name = r == 218 ? "BAD_PTX" : "BAD", 0; }
"""


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "driver.c").write_text(DRIVER)
    made = tmp_path / "driver.so"
    command = [compiler, "-shared", "-fPIC", "-w", str(tmp_path / "driver.c"), "-o", str(made)]
    subprocess.run(command, check=True)
    return Gpu(str(made))


def test_the_driver_is_told_what_it_must_be(gpu: Gpu) -> None:
    assert gpu.description == "Fake (sm_90), driver of CUDA 13.0"
    one = by_name("add.f32")
    found = gpu.run(gpu.load([one]), one)
    assert found[:-4] == one.operands[0].tobytes()[:-4]
    assert len(found) == one.size
    with pytest.raises(GpuError, match="cuModuleLoadDataEx: BAD_PTX line 3: no"):
        gpu.load([by_name("sub.f32")])
    tensor = by_name("cp.async.bulk.tensor.2d load 128B 64")
    found = gpu.run(gpu.load([tensor]), tensor)
    end = 4 * tensor.trials * tensor.snippet.threads
    assert found[end - 4 : end] == b"\3\3\3\3"


def test_there_is_no_gpu_without_a_driver() -> None:
    with pytest.raises(OSError, match="no such"):
        Gpu("/no such library.so")
    assert ctypes.sizeof(ctypes.c_void_p) == 8  # which all of this takes for granted
