"""Lanes that have their own bytes of a word of shared memory do not race with each other."""

from __future__ import annotations

import numpy as np
import pytest

import flashwright.emulate
from flashwright.emulate.own import EmulatedKernel
from tests.unit.emulated import needs_compilers
from tests.unit.ptx_kernels import SCHEDULES, kinds

pytestmark = needs_compilers
# PLACE is where a thread has its byte: neighbours have the four bytes of a word, or four lanes and
# warps apart do.
SOURCE = """
extern "C" __global__ void own(unsigned char* y) {
  __shared__ volatile unsigned char bytes[128];
  int place = PLACE;
  bytes[place] = 1;
  for (int i = 0; i < 3; ++i) bytes[place] += y[threadIdx.x];
  y[threadIdx.x] = bytes[place OTHER];
}
"""
PLACES = {
    "neighbours": "threadIdx.x",
    "lanes apart": "(threadIdx.x & 7) * 4 + (threadIdx.x >> 3 & 3) + (threadIdx.x & ~31)",
    "warps apart": "(threadIdx.x & 31) * 4 + (threadIdx.x >> 5)",
}


def byte_counters(place: str, other: str = "") -> EmulatedKernel:
    return flashwright.emulate.kernel(SOURCE.replace("PLACE", place).replace("OTHER", other))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("place", PLACES)
def test_bytes_of_their_own_do_not_race(place: str, schedule: str) -> None:
    y = np.arange(128, dtype=np.uint8) // 2
    wanted = 1 + 3 * y
    done = byte_counters(PLACES[place])(1, 128, y, schedule=schedule)
    assert done.ok, done
    np.testing.assert_array_equal(y, wanted)


def test_the_byte_of_another_lane_is_a_race() -> None:
    y = np.zeros(128, np.uint8)
    assert kinds(byte_counters(PLACES["neighbours"], "^ 1")(1, 128, y)) == {"race"}
    assert kinds(byte_counters(PLACES["lanes apart"], "^ 2")(1, 128, y)) == {"race"}
