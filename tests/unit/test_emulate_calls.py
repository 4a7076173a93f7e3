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
#include <cstdio>
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
extern "C" __global__ void recursive(int* y) { y[threadIdx.x] = fibonacci(y[threadIdx.x]); }
__device__ int even(int n);
__device__ __noinline__ int odd(int n) { return n == 0 ? 0 : even(n - 1); }
__device__ __noinline__ int even(int n) {
  int kept[4] = {n, n + 1, n + 2, n + 3};
  return n == 0 ? 1 : odd(kept[n & 3] - (n & 3) - 1) + kept[n & 1] - n - (n & 1);
}
extern "C" __global__ void mutual(int* y) { y[threadIdx.x] = odd(threadIdx.x); }
__device__ __noinline__ int endless_sum(int n) {
  return n == 0 ? 0 : endless_sum(n + 1) / n;
}
extern "C" __global__ void endless(int* y) { y[0] = endless_sum(y[0]); }
__device__ float more(float x) { return x + 1.5f; }
__device__ float squared(float x) { return x * x; }
__device__ float (*table[])(float) = {twice, more, squared};
extern "C" __global__ void by_table(float* y, int n) {
  y[threadIdx.x] = table[(threadIdx.x + n) % 3](threadIdx.x);
}
extern "C" __global__ void by_argument(float* y, float (*f)(float)) {
  y[threadIdx.x] = f(threadIdx.x);
}
struct Shape {
  int side;
  __device__ Shape(int side) : side(side) {}
  __device__ virtual int area() const { return 3 * side; }
};
struct Square : Shape {
  __device__ Square(int side) : Shape(side) {}
  __device__ int area() const override { return side * side; }
};
__device__ __noinline__ int area_of(const Shape* shape) { return shape->area() + 100; }
extern "C" __global__ void virtual_area(int* y) {
  Shape triangle(threadIdx.x);
  Square square(threadIdx.x);
  y[threadIdx.x] = area_of(threadIdx.x % 2 ? &square : &triangle);
}
extern "C" __global__ void meeting(int* y) {
  int x = y[threadIdx.x];
  x = x % 2 ? fibonacci(x % 8) : -fibonacci(x % 5);
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(~0u, x, by);
  y[threadIdx.x] = x;
}
extern "C" __global__ void by_pointer(float* y, int which) {
  float (*f)(float) = which ? twice : tanhf;
  y[0] = f(y[1]);
}
extern "C" __global__ void printing(const float* x) {
  if (threadIdx.x % 16 == 3) {
    printf("%d|%5u|%-6s|%+.3f|%c|%llx|%%|%08.2e|%hhd\\n", -int(threadIdx.x), blockIdx.x, "abc",
           x[0], 'q', 0x123456789abcLL, 2.5, 257);
  }
  __syncthreads();
  if (threadIdx.x == 0) printf("block %d is done\\n", blockIdx.x);
}
extern "C" __global__ void printing_much() {
  for (int i = 0; i < 100000; ++i) printf("%d: this is a line of text that is long enough\\n", i);
}
struct Node { int value; Node* next; };
extern "C" __global__ void listed(int* y, int n) {
  Node* first = nullptr;
  for (int i = 0; i < n; ++i) first = new Node{i, first};
  int sum = 0;
  while (first) {
    Node* next = first->next;
    sum += first->value;
    delete first;
    first = next;
  }
  y[threadIdx.x] = sum;
}
__device__ int* kept[64];
extern "C" __global__ void fill(int n) {
  kept[threadIdx.x] = (int*)malloc(4 * n);
  if (kept[threadIdx.x]) for (int i = 0; i < n; ++i) kept[threadIdx.x][i] = threadIdx.x + i;
}
extern "C" __global__ void use(int* y, int i, int frees) {
  y[threadIdx.x] = kept[threadIdx.x] ? kept[threadIdx.x][i] : -1;
  if (frees) free(kept[threadIdx.x]);
}
extern "C" __global__ void wrong(int* y, int which) {
  int* x = (int*)malloc(16);
  if (which == 0) y[0] = x[1];
  x[1] = 7;
  if (which == 1) y[0] = x[1] + (x[4] = 1);
  free(x);
  if (which == 2) y[0] = x[1];
  if (which == 3) free(x);
  if (which == 4) free(y);
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


@pytest.mark.parametrize("schedule", ["eager", "random:3"])
def test_functions_call_themselves(kernel: EmulatedKernel, schedule: str) -> None:
    wanted = [0, 1]
    while len(wanted) < 12:
        wanted.append(wanted[-1] + wanted[-2])
    y = np.arange(64, dtype=np.int32) % 12
    assert of(kernel, "recursive")(1, 64, y, schedule=schedule).ok
    np.testing.assert_array_equal(y, np.array(wanted)[np.arange(64) % 12])
    assert of(kernel, "mutual")(1, 64, y).ok
    np.testing.assert_array_equal(y, np.arange(64) % 2)


def test_a_recursion_without_end_is_found(kernel: EmulatedKernel) -> None:
    done = of(kernel, "endless")(1, 32, np.ones(1, np.int32))
    assert [f.kind for f in done.findings] == ["out_of_bounds"]
    assert "calls a function, and the stack has no room for it" in str(done)
    assert "__device__ __noinline__ int endless_sum(int n) {" in str(done)


def test_functions_are_called_by_address(kernel: EmulatedKernel) -> None:
    y = np.full(2, 3, np.float32)
    assert of(kernel, "by_pointer")(1, 1, y, 1).ok
    assert y[0] == 6
    assert of(kernel, "by_pointer")(1, 1, y, 0).ok
    assert y[0] == pytest.approx(np.tanh(3), rel=1e-6)
    x = np.arange(32, dtype=np.float32)
    assert of(kernel, "by_table")(1, 32, x, 0).ok
    lanes = np.arange(32)
    np.testing.assert_array_equal(x, np.choose(lanes % 3, [2 * lanes, lanes + 1.5, lanes * lanes]))


def test_an_address_without_a_function_is_found(kernel: EmulatedKernel) -> None:
    done = of(kernel, "by_argument")(1, 32, np.zeros(32, np.float32), 64)
    assert [f.kind for f in done.findings] == ["out_of_bounds"]
    assert "calls address 0x40, where there is no function with these parameters" in str(done)


def test_virtual_functions(kernel: EmulatedKernel) -> None:
    y = np.zeros(32, np.int32)
    assert of(kernel, "virtual_area")(1, 32, y).ok
    lanes = np.arange(32)
    np.testing.assert_array_equal(y, np.where(lanes % 2, lanes * lanes, 3 * lanes) + 100)


def test_lanes_meet_again_behind_calls(kernel: EmulatedKernel) -> None:
    y = np.arange(32, dtype=np.int32)
    done = of(kernel, "meeting")(1, 32, y)
    assert done.ok, done
    first = [0, 1, 1, 2, 3, 5, 8, 13]
    wanted = sum(first[n % 8] if n % 2 else -first[n % 5] for n in range(32))
    np.testing.assert_array_equal(y, np.full(32, wanted))


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
    assert "thread 7 (warp 0, lane 7) of block 0 fails the assertion `y[threadIdx.x] < 9`" in str(
        done
    )
    assert "assert(y[threadIdx.x] < 9);" in str(done)


def test_what_a_kernel_prints(kernel: EmulatedKernel) -> None:
    done = of(kernel, "printing")(2, 32, np.full(1, 1.5, np.float32))
    line = "{}|{:5d}|abc   |+1.500|q|123456789abc|%|2.50e+00|1\n"
    wanted = [line.format(-lane, block) for block in (0, 1) for lane in (3, 19)]
    wanted[2:2] = ["block 0 is done\n"]
    assert done.printed == "".join([*wanted, "block 1 is done\n"])
    assert str(done) == done.printed + "own.cu: nothing found"
    much = of(kernel, "printing_much")(1, 1).printed
    assert len(much) < 1_100_000
    assert much.startswith("0: this is")
    assert much.endswith("bytes more were printed)\n")


def test_memory_of_malloc(kernel: EmulatedKernel) -> None:
    y = np.zeros(64, np.int32)
    assert of(kernel, "listed")(1, 64, y, 20).ok
    np.testing.assert_array_equal(y, 190)
    fill = of(kernel, "fill")
    assert fill(1, 64, 10).ok
    use = fill.other("use")
    assert use(1, 64, y, 3, 0).ok
    np.testing.assert_array_equal(y, np.arange(64) + 3)
    assert use(1, 64, y, 9, 1).ok
    assert "was freed by an earlier launch" in str(use(1, 64, y, 9, 0))
    fill.limit_heap(1000)
    assert fill(1, 64, 10).ok
    use.heap = fill.heap
    assert use(1, 64, y, 0, 0).ok
    assert 10 < sum(y >= 0) < 25
    assert set(y[y < 0]) == {-1}


@pytest.mark.parametrize(
    ("which", "said"),
    [
        (
            0,
            "reads byte 4 of memory for which malloc was asked 16 bytes, which nothing has written",
        ),
        (1, "writes byte 16 of memory for which malloc was asked 16 bytes"),
        (
            2,
            "byte 4 of memory for which malloc was asked 16 bytes, which was freed at own.cu:",
        ),
        (3, "frees memory of 16 bytes, which was freed at own.cu:"),
        (4, "which malloc has not given"),
    ],
)
def test_wrong_uses_of_memory_of_malloc(kernel: EmulatedKernel, which: int, said: str) -> None:
    done = of(kernel, "wrong")(1, 1, np.zeros(1, np.int32), which)
    assert len(done.findings) == 1
    assert said in str(done)
