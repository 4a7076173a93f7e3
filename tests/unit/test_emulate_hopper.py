"""A GEMM with TMA, mbarriers and wgmma, made of CUTLASS's headers, under emulation."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from flashwright.build import toolchain
from flashwright.emulate.emulate import LaunchResult, launch
from flashwright.emulate.encode import EncodedKernel
from flashwright.emulate.places import Origin, locate
from flashwright.emulate.structs import Region
from flashwright.emulate.tensor_map import encode_tensor_map
from tests.share import some, wanted
from tests.unit.together import SCHEDULES, compiled

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

SOURCE = (Path(__file__).parents[1] / "device" / "hopper_gemm.cu").read_text()
TILE, SHARED = 128, 128 * 1024 + 1024
STAGE = "shared.B.data() + at.index()"
RELEASE = "    if (k > 0) {\n      pipeline.consumer_release(done);\n      ++done;\n    }\n"
# What is planted: the code, what stands there instead, what is found (any of these kinds), and the
# line of the source that is named, or that the finding says it collides with.
PLANTED: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "no wait for the data": (
        *("pipeline.consumer_wait(at);", "", ("race", "unwritten")),
        "gemm(mma",
    ),
    "no wait before the release": ("warpgroup_wait<1>();", "", ("race",), "SM90_TMA_LOAD"),
    "no wait before the result": ("warpgroup_wait<0>();", "", ("register",), "own(n) = T(sum(n))"),
    "no fence before wgmma": ("warpgroup_arrive();", "", ("fence",), "gemm(mma"),
    "too many bytes expected": (
        *("(BM + BN) * BK * 2", "(BM + BN) * BK * 2 + 64", ("deadlock",)),
        "pipeline.consumer_wait(at)",
    ),
    "too few bytes expected": (
        *("(BM + BN) * BK * 2", "(BM + BN) * BK * 2 - 64", ("transaction",)),
        "SM90_TMA_LOAD",
    ),
    "a dropped arrive": (
        *("      pipeline.consumer_release(done);\n", "", ("deadlock",)),
        "pipeline.producer_acquire(at)",
    ),
    "an early release": (
        *(RELEASE, "    pipeline.consumer_release(at);\n", ("race",)),
        "SM90_TMA_LOAD",
    ),
    "a buffer overwritten while it is read": (
        *("pipeline.producer_acquire(at);", "", ("race",)),
        "SM90_TMA_LOAD",
    ),
    "a swapped stage": (
        *(STAGE, "shared.B.data() + (at.index() + 1) % Stages", ("race", "unwritten")),
        "SM90_TMA_LOAD|gemm(mma",
    ),
    "no barrier behind the mbarriers' initialisation": (
        *("Shape<_1, _1, _1>{});\n  __syncthreads();", "Shape<_1, _1, _1>{});"),
        *(("race", "barrier"), "pipeline.consumer_wait(at)|pipeline.producer_acquire(at)|SM90_TMA"),
    ),
    "a missing proxy fence": ("tma_store_fence();", "", ("proxy",), "SM90_TMA_STORE_2D"),
    "no barrier before the store": (
        *("cutlass::arch::NamedBarrier::sync(256, 1);", "", ("race", "unwritten", "proxy")),
        "SM90_TMA_STORE_2D",
    ),
}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, EncodedKernel]:
    """The kernel as it is, and with each bug that is looked for."""
    for old, *_ in PLANTED.values():
        assert old in SOURCE, old
    bugs = [bug for bug in PLANTED if bug in wanted(request, "bug")]
    sources = [SOURCE, *(SOURCE.replace(*PLANTED[bug][:2], 1) for bug in bugs)]
    return dict(zip(["right", *bugs], compiled(sources, "gemm", "sm_90a", True), strict=True))


def multiply(
    program: EncodedKernel, rows: int, columns: int, depth: int, schedule: str
) -> tuple[LaunchResult, float]:
    """What is found, and the largest error of A B^T."""
    rng = np.random.default_rng(0)
    shapes = ((rows, depth), (columns, depth), (rows, columns))
    a, b, c = (rng.standard_normal(s).astype(ml_dtypes.bfloat16) for s in shapes)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    c[:] = np.nan
    regions, maps = [], b""
    for number, (array, box) in enumerate(((a, 64), (b, 64), (c, TILE))):
        base = (1 + number) << 24
        regions.append(Region(base, array.nbytes, array.ctypes.data, 2 * (number == 2)))
        sizes, swizzle = array.shape[::-1], "128B" if number < 2 else "none"
        maps += encode_tensor_map(base, sizes, [2 * sizes[0]], (box, TILE), 2, swizzle)
    grid = [-(-rows // TILE), -(-columns // TILE)]
    given = maps + struct.pack("<i", depth)
    result = launch(program, regions, given, grid, [384], SHARED, schedule)
    return result, float(np.abs(c.astype(np.float64) - expected).max())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", [(128, 128, 64), (256, 128, 512), (100, 200, 320)], ids=str)
def test_the_gemm_is_right(
    made: dict[str, EncodedKernel], shape: tuple[int, int, int], schedule: str
) -> None:
    """Boxes over the end of a tensor are filled and cut off; depths are multiples of a step."""
    result, error = multiply(made["right"], *shape, schedule)
    assert not result.findings
    assert error < 0.3  # bf16 near 64


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("bug", some(PLANTED, 6))
def test_a_planted_bug_is_found_at_its_line(
    made: dict[str, EncodedKernel], bug: str, schedule: str
) -> None:
    _, _, kinds, statement = PLANTED[bug]
    findings = multiply(made[bug], 256, 128, 512, schedule)[0].findings
    named = [f for f in findings if f.kind in kinds]
    assert named, [f.kind for f in findings]
    lines = SOURCE.replace(*PLANTED[bug][:2], 1).splitlines()
    places = [locate(f.instruction, Origin()).source for f in named]
    told = {lines[line - 1].strip() for line in places if line is not None}
    assert any(part in line for part in statement.split("|") for line in told), told


@pytest.mark.parametrize("bug", ["too many bytes expected"])
def test_a_deadlock_says_how_many_bytes_are_missing(
    made: dict[str, EncodedKernel], bug: str
) -> None:
    findings = multiply(made[bug], 128, 128, 64, "eager")[0].findings
    assert {f.detail for f in findings if f.kind == "deadlock"} == {(0, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a dropped arrive"])
def test_a_deadlock_says_which_arrival_is_missing(made: dict[str, EncodedKernel], bug: str) -> None:
    findings = multiply(made[bug], 128, 128, 512, "lazy")[0].findings
    producer = next(f for f in findings if f.warp == 0)
    assert producer.detail == (256, 0)
