"""Anybody's kernel on NumPy arrays: what it computes, and what is found wrong with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers

pytestmark = needs_compilers

EXAMPLE = Path(__file__).parents[2] / "examples" / "emulate_your_own.py"
SOURCE = """
__global__ void saxpy(const float* x, float* y, float a, int n, short shift, double b) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i] + shift + (float)b;
}
extern "C" __global__ void reversed(const int* x, int* y) {
  __shared__ int tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[63 - threadIdx.x];
}
extern "C" __global__ void strided(int* y, int by) {
  extern __shared__ int tile[];
  tile[threadIdx.x * by] = threadIdx.x;
  y[threadIdx.x] = tile[threadIdx.x * by];
}
struct Pair { int a; long long b; };
extern "C" __global__ void both(Pair p, long long* y) { y[threadIdx.x] = p.a + p.b; }
"""


@pytest.fixture(scope="module")
def saxpy() -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE, "saxpy")


@pytest.fixture
def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 100)).astype(np.float32)
    return x, y


def test_it_computes(saxpy: EmulatedKernel, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = arrays
    wanted = 2 * x + y - 3 + 0.5
    done = saxpy((4,), 32, x, y, 2, len(x), -3, 0.5)
    assert done.ok, done
    assert str(done) == "kernel.cu: nothing found"
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    again = saxpy(4, (32, 1), x, y, np.float32(0), np.int32(100), np.int16(0), np.float64(0))
    assert again.ok


def test_what_is_out_of_bounds_is_told_with_its_line_and_argument(
    saxpy: EmulatedKernel, arrays: tuple[np.ndarray, np.ndarray]
) -> None:
    x, y = arrays
    done = saxpy(4, 32, x, y, 1.0, 128, 0, 0.0)
    assert not done.ok
    assert {f.kind for f in done.findings} == {"out_of_bounds"}
    assert re.search(r"thread 4 \(warp 0, lane 4\) of block 3 reads 4 bytes at byte 0 ", str(done))
    assert "behind the end of `x`" in str(done)
    assert "4 |   if (i < n) y[i] = a * x[i]" in str(done)


def test_an_array_that_is_read_only_is_not_written(
    saxpy: EmulatedKernel, arrays: tuple[np.ndarray, np.ndarray]
) -> None:
    x, y = arrays
    before = y.copy()
    y.flags.writeable = False
    done = saxpy(4, 32, x, y, 1.0, 100, 0, 0.0)
    assert [f.kind for f in done.findings] == ["read_only"]
    np.testing.assert_array_equal(y, before)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
def test_a_barrier_is_what_orders_two_warps(schedule: str) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    good = flashwright.emulate.kernel(SOURCE, "reversed")
    assert good(1, 64, x, y, schedule=schedule).ok
    np.testing.assert_array_equal(y, x[::-1])
    bad = flashwright.emulate.kernel(SOURCE.replace("__syncthreads();", ""), "reversed")
    found = bad(1, 64, x, y, schedule=schedule).findings
    assert found
    assert {f.kind for f in found} <= {"race", "unwritten"}


def test_banks_and_sectors_are_counted() -> None:
    strided = flashwright.emulate.kernel(SOURCE, "strided")
    y = np.zeros(32, np.int32)
    for by, worst in ((1, 1), (2, 2), (32, 32), (33, 1)):
        done = strided(1, 32, y, by, shared=4 * 33 * 32)
        assert done.ok, done
        assert done.profile is not None
        assert done.profile.total.conflicts == worst
        assert done.profile.total.sectors_a_request == 4, "128 bytes in a row"


def test_a_struct_is_passed_as_its_bytes() -> None:
    both = flashwright.emulate.kernel(SOURCE, "both")
    y = np.zeros(32, np.int64)
    pair = np.array([(5, 1 << 40)], dtype=np.dtype([("a", "<i4"), ("b", "<i8")], align=True))
    assert both(1, 32, pair.tobytes(), y).ok
    assert (y == 5 + (1 << 40)).all()


def test_ptx_of_a_file_is_taken_as_it_is(saxpy: EmulatedKernel, tmp_path: Path) -> None:
    path = tmp_path / "mine.ptx"
    path.write_text(saxpy.ptx)
    x, y = np.ones((2, 32), np.float32)
    assert flashwright.emulate.kernel(path, "saxpy")(1, 32, x, y, 1.0, 32, 0, 0.0).ok
    assert (y == 2).all()


def test_wrong_arguments_are_refused_in_words(saxpy: EmulatedKernel) -> None:
    x, y = np.ones((2, 64), np.float32)
    with pytest.raises(TypeError, match="takes 6 arguments, and 2 are given"):
        saxpy(1, 32, x, y)
    with pytest.raises(ValueError, match=r"argument 0 \(`x`\) must be contiguous"):
        saxpy(1, 32, x[::2], y, 1.0, 32, 0, 0.0)
    with pytest.raises(TypeError, match=r"argument 2 \(`a`\) is an array"):
        saxpy(1, 32, x, y, y, 32, 0, 0.0)
    with pytest.raises(
        TypeError, match=r"argument 4 \(`shift`\) is 2\.5, which is no whole number"
    ):
        saxpy(1, 32, x, y, 1.0, 32, 2.5, 0.0)
    with pytest.raises(
        TypeError, match=r"argument 4 \(`shift`\) is 70000, which is no .* of 2 bytes"
    ):
        saxpy(1, 32, x, y, 1.0, 32, 70000, 0.0)
    with pytest.raises(ValueError, match="grid must be one to three counts"):
        saxpy(0, 32, x, y, 1.0, 32, 0, 0.0)
    with pytest.raises(ValueError, match="no schedule"):
        saxpy(1, 32, x, y, 1.0, 32, 0, 0.0, schedule="soon")


def test_a_kernel_has_to_be_named_where_there_are_several(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"several kernels; the kernels are: .*saxpy"):
        flashwright.emulate.kernel(SOURCE)
    with pytest.raises(Failed, match="there is no kernel softmax"):
        flashwright.emulate.kernel(SOURCE, "softmax")
    with pytest.raises(Failed, match="cannot read"):
        flashwright.emulate.kernel(tmp_path / "none.cu")


def test_cuda_that_nvcc_does_not_take_is_told_as_such() -> None:
    with pytest.raises(Failed, match="FW822"):
        flashwright.emulate.kernel("__global__ void f() { nonsense; }")


def test_the_example_runs_and_finds_the_missing_barrier() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, second = done.stdout.partition("Without the barrier in the loop:")
    assert "nothing found" in first
    assert re.search(r"largest error [\d.]+e-0[789]", first)
    assert "error[FW837]: race at kernel.cu:" in second


STATE = """
__device__ float half = 0.5f;
__device__ double third = 1.0 / 3;
__device__ int count;
__device__ int* pointer = &count;
__constant__ int weights[2];
namespace inner { __constant__ short offset; }
__constant__ struct { long long a; int* b; } both = {5, &count};

extern "C" __global__ void added(int* y) {
  y[0] = atomicAdd(&count, weights[threadIdx.x]);
  y[1] = inner::offset;
}
extern "C" __global__ void shown(float* y) {
  y[0] = half; y[1] = (float)third; y[2] = *pointer; y[3] = both.a; y[4] = *both.b;
}
"""


@pytest.fixture(scope="module")
def state() -> EmulatedKernel:
    return flashwright.emulate.kernel(STATE, "added")


def test_variables_of_a_module_persist_and_can_be_set(state: EmulatedKernel) -> None:
    y, shown = np.zeros(5, np.int32), np.zeros(5, np.float32)
    added = EmulatedKernel(state.ptx, "added")
    added.copy_to_symbol("weights", np.array([3, 4], np.int32))
    added.copy_to_symbol("offset", -7)
    for launch in range(3):
        assert added(1, 1, y).ok
        assert y[:2].tolist() == [3 * launch, -7]
    assert added.copy_from_symbol("count", np.int32).tolist() == [9]
    assert added.other("shown")(1, 1, shown).ok
    np.testing.assert_array_equal(shown, np.float32([0.5, 1 / 3, 9, 5, 9]))
    added.copy_to_symbol("count", 20)
    assert added(1, 1, y).ok
    assert y[0] == 20
    assert state.copy_from_symbol("count", np.int32)[0] == 0, "another module"


def test_a_constant_that_was_never_set_is_found(state: EmulatedKernel) -> None:
    y = np.zeros(2, np.int32)
    added = EmulatedKernel(state.ptx, "added")
    done = added(1, 1, y)
    assert {f.kind for f in done.findings} == {"unwritten"}
    assert "of `weights`, which nothing has written" in str(done)
    assert "of `_ZN5inner6offsetE`, which" in str(done)
    added.copy_to_symbol("weights", bytes(8))
    assert "weights" not in str(added(1, 1, y))


def test_symbols_that_do_not_fit_are_refused(state: EmulatedKernel) -> None:
    with pytest.raises(ValueError, match="weights has 8 bytes, and 4 are given"):
        state.copy_to_symbol("weights", np.int32(1))
    with pytest.raises(TypeError, match=r"count is 1\.5, which is no whole number of 4 bytes"):
        state.copy_to_symbol("count", 1.5)
    with pytest.raises(Failed, match=r"there is no variable wights; the variables are: .*weights"):
        state.copy_from_symbol("wights")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (".global .u32 x = nonsense(y);", "cannot read the initialiser"),
        (".global .u64 x = generic(z);", "x is initialised with the address of z"),
        (".extern .global .u32 x;", "x is defined in another file"),
    ],
)
def test_variables_that_cannot_be_initialised_are_refused(line: str, words: str) -> None:
    text = f".version 8.4\n.target sm_80\n.address_size 64\n{line}\n.entry k()\n{{\nret;\n}}\n"
    with pytest.raises(Failed, match=words):
        flashwright.emulate.kernel(text)
