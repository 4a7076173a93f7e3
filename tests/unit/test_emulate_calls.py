"""Device functions that are called, assertions and other things that kernels of others use."""

from __future__ import annotations

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from flashwright.lang.diagnostic import Failed
from tests.unit.emulated import needs_compilers

pytestmark = needs_compilers
SOURCE = """
#include <cassert>
struct Shift { float by[3]; int which; };
__device__ __noinline__ float twice(float x) {
  if (x < 0) { __syncwarp(); return -1; }
  return 2 * x;
}
__device__ __noinline__ float shifted(float x, Shift shift) {
  return twice(twice(x)) + shift.by[shift.which];
}
__device__ __noinline__ void stored(float* y, float x) { y[threadIdx.x] = x; }
__device__ __noinline__ int fibonacci(int n) {
  return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void called(float* y, int which) {
  Shift shift = {{1, 2, 3}, which};
  float x = shifted(y[threadIdx.x], shift);
  if (threadIdx.x != 5) stored(y, x);
}
extern "C" __global__ void recursive(int* y) { y[0] = fibonacci(y[1]); }
extern "C" __global__ void by_pointer(float* y, int which) {
  float (*f)(float) = which ? twice : tanhf;
  y[0] = f(y[1]);
}
extern "C" __global__ void asserted(int* y) {
  assert(y[threadIdx.x] < 9);
  y[threadIdx.x] = 1;
}
"""


@pytest.fixture(scope="module")
def kernel() -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE, "called")


def of(kernel: EmulatedKernel, entry: str) -> EmulatedKernel:
    return EmulatedKernel(kernel.ptx, entry, "own.cu", SOURCE)


def twice(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, -1, 2 * x).astype(np.float32)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
def test_functions_are_called(kernel: EmulatedKernel, schedule: str) -> None:
    y = np.arange(64, dtype=np.float32) - 6
    wanted = twice(twice(y)) + 3
    wanted[5] = y[5]
    assert kernel(1, 64, y, 2, schedule=schedule).ok
    np.testing.assert_array_equal(y, wanted)


def test_calls_that_cannot_be_executed_are_refused(kernel: EmulatedKernel) -> None:
    with pytest.raises(Failed, match="the function _Z9fibonaccii calls itself"):
        of(kernel, "recursive")
    with pytest.raises(Failed, match="a function is called by its address"):
        of(kernel, "by_pointer")


def test_a_function_that_is_not_called_does_not_matter() -> None:
    head = ".version 8.4\n.target sm_80\n.address_size 64\n"
    text = head + "FUNCTION\n.visible .entry k()\n{\nCALL\nret;\n}\n"
    strange = ".func strange()\n{\n.strange .b32 x;\n{\nfrob.u32 ?, x;\n}\nret;\n}\n"
    text = text.replace("FUNCTION", strange)
    assert flashwright.emulate.kernel(text.replace("CALL", ""))(1, 32).ok
    with pytest.raises(Failed, match="PTX line 6: cannot read"):
        flashwright.emulate.kernel(text.replace("CALL", "call strange;"))
    with pytest.raises(Failed, match="the function absent is not in this file"):
        flashwright.emulate.kernel(text.replace("CALL", "call absent;"))


def test_a_failed_assertion_is_found(kernel: EmulatedKernel) -> None:
    y = np.zeros(32, np.int32)
    assert of(kernel, "asserted")(1, 32, y).ok
    y[7] = 9
    done = of(kernel, "asserted")(1, 32, y)
    assert [f.kind for f in done.findings] == ["trap"]
    assert "thread 7 (warp 0, lane 7) of block 0 fails an assertion" in str(done)
    assert "assert(y[threadIdx.x] < 9);" in str(done)
