"""What orders threads besides barriers: flags, locks and fences; and who may miss a barrier."""

from __future__ import annotations

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from tests.unit.emulated import needs_compilers
from tests.unit.ptx_kernels import SCHEDULES, kinds, run

pytestmark = needs_compilers
SOURCE = """
#define FENCE __threadfence_block();
#define KERNEL extern "C" __global__ void

KERNEL by_volatile(int* y) {
  __shared__ volatile int flag;
  __shared__ int data;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 32) { data = y[0]; FENCE flag = 1; }
  if (threadIdx.x < 32) { while (flag == 0) {} FENCE y[1 + threadIdx.x] = data; }
}

__device__ int acquired(int* at) {
  int value;
  asm volatile("ld.acquire.cta.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

KERNEL by_release(int* y) {
  __shared__ int flag, data;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 32) {
    data = y[0];
    FENCE
    asm volatile("st.relaxed.cta.b32 [%0], 1;" :: "l"(&flag) : "memory");
  }
  if (threadIdx.x < 32) { while (acquired(&flag) == 0) {} y[1 + threadIdx.x] = data; }
}

KERNEL by_global_flag(int* y, int* flag) {
  __shared__ int data;
  if (threadIdx.x == 32) { data = y[0]; FENCE atomicExch(flag, 1); }
  if (threadIdx.x < 32) { while (atomicAdd(flag, 0) == 0) {} FENCE y[1 + threadIdx.x] = data; }
}

KERNEL lock_of_threads(int* y) {
  __shared__ int lock, sum;
  if (threadIdx.x == 0) lock = sum = 0;
  __syncthreads();
  while (atomicCAS(&lock, 0, 1) != 0) {}
  FENCE sum += y[0]; FENCE
  atomicExch(&lock, 0);
  __syncthreads();
  if (threadIdx.x == 0) y[1] = sum;
}

KERNEL between_lanes(int* y) {
  __shared__ int flag, data;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 5) { while (atomicAdd(&flag, 0) == 0) {} FENCE y[1] = data; }
  if (threadIdx.x == 3) { data = y[0]; FENCE atomicExch(&flag, 1); }
}
"""
WARP = """
#define SHARED 16
extern "C" __global__ void told(int* y, int* flag, int how) {
  __shared__ int here[32];
  int* data = how & SHARED ? here : y + 33;
  int lane = threadIdx.x % 32, writes = how & SHARED ? threadIdx.x / 32 : blockIdx.x;
  if (writes) {
    data[lane] = y[0];
    if (how & 1) __syncwarp();
    if (how & 2) __threadfence();
    if (how & 32) __syncwarp();
    if (lane == 0) {
      if (how & 4) __threadfence();
      if (how & 8) asm volatile("st.release.gpu.b32 [%0], 1;" :: "l"(flag) : "memory");
      else atomicExch(flag, 1);
    }
  } else {
    while (atomicAdd(flag, 0) == 0) {}
    __threadfence();
    y[1 + lane] = data[lane];
  }
}
"""


@pytest.fixture(scope="module")
def told() -> EmulatedKernel:
    return flashwright.emulate.kernel(WARP, "told")


@pytest.mark.parametrize("shared", [16, 0])
@pytest.mark.parametrize(
    ("how", "ordered"),
    [(1 | 4, True), (4, False), (1 | 8, True), (8, False), (2 | 4, False), (2 | 32, True)],
)
def test_a_lane_tells_only_what_its_warp_has_done_before_it_met(
    told: EmulatedKernel, how: int, ordered: bool, shared: int
) -> None:
    """The bits of `how`: 1 and 32 are a __syncwarp() before and after a fence of all lanes (2), 4
    is a fence of the lane that stores the flag, 8 a release by it. In shared memory between warps,
    in global memory between blocks."""
    y = np.zeros(65, np.int32)
    y[0] = 7
    grid, block = (1, 64) if shared else (2, 32)
    flag = np.zeros(1, np.int32)
    done = told(grid, block, y, flag, how | shared, races="shared" if shared else "global")
    assert kinds(done) == (set() if ordered else {"race"})
    assert (y[1:33] == 7).all()


ORDERED = ("by_volatile", "by_release", "by_global_flag", "lock_of_threads", "between_lanes")


def launched(
    kernel: EmulatedKernel, name: str, schedule: str, data: int = 7
) -> tuple[set[str], np.ndarray]:
    """The kinds of findings of a kernel with 64 threads, and y behind its first element."""
    y = np.zeros(65, np.int32)
    y[0] = data
    given = [y, np.zeros(1, np.int32)] if name == "by_global_flag" else [y]
    one = EmulatedKernel(kernel.ptx, name)
    return kinds(one(1, 64, *given, schedule=schedule)), y[1:]


@pytest.fixture(scope="module")
def fenced() -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE, ORDERED[0])


@pytest.fixture(scope="module")
def unfenced() -> EmulatedKernel:
    return flashwright.emulate.kernel(
        SOURCE.replace("#define FENCE __threadfence_block();", "#define FENCE"), ORDERED[0]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ORDERED)
def test_flags_and_locks_with_fences_order_threads(
    fenced: EmulatedKernel, name: str, schedule: str
) -> None:
    found, y = launched(fenced, name, schedule)
    assert not found
    many = {"between_lanes": 1, "lock_of_threads": 1}.get(name, 32)
    np.testing.assert_array_equal(y[:many], 7 * 64 if name == "lock_of_threads" else 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ORDERED)
def test_without_fences_they_do_not(unfenced: EmulatedKernel, name: str, schedule: str) -> None:
    found, _ = launched(unfenced, name, schedule)
    assert "race" in found


LEAVING = """
    .shared .align 16 .b8 tile[1024];
    setp.ge.u32 %p0, %r0, COUNT;
    @%p0 bra END;
    shl.b32 %r2, %r0, 2;
    st.shared.u32 [%r2], %r0;
    BARRIER
    mov.u32 %r3, COUNT;
    sub.u32 %r3, %r3, %r0;
    sub.u32 %r3, %r3, 1;
    shl.b32 %r3, %r3, 2;
    ld.shared.u32 %r1, [%r3];
    mad.wide.u32 %rd9, %r0, 4, %rd0;
    st.global.u32 [%rd9], %r1;
END:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [33, 40, 64, 70, 96])
def test_barriers_wait_for_threads_that_are_still_there(count: int, schedule: str) -> None:
    out = np.zeros(128, np.uint32)
    body = LEAVING.replace("COUNT", str(count))
    assert not run(body.replace("BARRIER", "bar.sync 0;"), out, 128, schedule).findings
    np.testing.assert_array_equal(out[:count], np.arange(count)[::-1])
    waits = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    assert not run(body.replace("BARRIER", waits), out, 128, schedule).findings
    stuck = run(body.replace("BARRIER", "bar.sync 1, 128;"), out, 128, schedule)
    assert kinds(stuck) == {"deadlock"}


def test_lanes_that_have_parted_meet_at_a_barrier() -> None:
    """The branch to FAR comes back to a line further up."""
    body = """
    setp.eq.u32 %p0, %r0, 3;
    @%p0 bra FAR;
BACK:
    bar.sync 0;
    bra END;
FAR:
    bra BACK;
END:
"""
    assert not run(body, np.zeros(1, np.uint32)).findings
    apart = body.replace("FAR:\n    bra BACK;", "FAR:\n    bar.sync 0;")
    assert kinds(run(apart, np.zeros(1, np.uint32))) == {"divergent"}
