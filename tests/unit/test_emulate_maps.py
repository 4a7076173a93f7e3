"""Launch plans with tensor maps under emulation: tiles by TMA are what slicing gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from flashwright.build import toolchain
from flashwright.emulate.emulate import prepare, run
from flashwright.emulate.encode import EncodedKernel
from flashwright.lower.launch_plan import LaunchPlan, PlanAxis, PlanMap, PlanTensor
from tests.gpu.tiles import NUMPY, TILES, Tile
from tests.unit.fake_gpu import plan_tensor
from tests.unit.together import compiled

# One warp: 8 rows of 16 elements of X into O. Behind the map, X takes 32 bytes and O 24.
PTX = """
.version 8.4
.target sm_90
.address_size 64
.visible .entry attention(.param .align 64 .b8 p[256])
{
.shared .align 128 .b8 tile[256];
.shared .align 8 .b64 barrier;
.reg .b32 %t, %tile, %barrier, %b, %l, %d, %at;
.reg .b64 %map, %out, %row, %state, %wide, %value;
.reg .pred %first, %done;
mov.u32 %t, %tid.x;
mov.u32 %tile, tile;
mov.u32 %barrier, barrier;
setp.eq.u32 %first, %t, 0;
mov.b64 %map, p;
cvta.param.u64 %map, %map;
ld.param.b64 %out, [p+160];
ld.param.b64 %row, [p+168];
ld.param.b32 %b, [p+192];
ld.param.b32 %l, [p+196];
ld.param.b32 %d, [p+200];
@%first mbarrier.init.shared::cta.b64 [%barrier], 1;
fence.mbarrier_init.release.cluster;
fence.proxy.async.shared::cta;
bar.sync 0;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 %state, [%barrier], 256;
@%first cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%tile], [%map, {%d, %l, %b}], [%barrier];
again:
mbarrier.try_wait.parity.shared::cta.b64 %done, [%barrier], 0;
@!%done bra again;
mad.lo.u32 %at, %t, 8, %tile;
ld.shared.b64 %value, [%at];
shr.u32 %at, %t, 2;
cvt.u64.u32 %wide, %at;
mul.lo.u64 %wide, %wide, %row;
and.b32 %at, %t, 3;
shl.b64 %wide, %wide, 1;
add.u64 %out, %out, %wide;
mul.wide.u32 %wide, %at, 8;
add.u64 %out, %out, %wide;
st.global.b64 [%out], %value;
ret;
}
"""
PLAN = LaunchPlan(
    entry="attention",
    arch="sm_90",
    threads=32,
    shared=0,
    grid=((1,),),
    dims=("batch", "length", "b", "l", "d"),
    tensors=(
        plan_tensor("X", "B:batch L:length D:24", vector=8),
        plan_tensor("O", "L:8 D:16"),
    ),
    maps=(PlanMap(tensor="X", box=(1, 8, 16), swizzle=0),),
)


@pytest.fixture(scope="module")
def program() -> EncodedKernel:
    return prepare(PTX, "attention")


def load(
    program: EncodedKernel, x: np.ndarray, at: tuple[int, int, int], **settings: Any
) -> np.ndarray:
    out = np.full((8, 16), np.nan, np.float16)
    sizes = dict(zip(PLAN.dims, (*x.shape[:2], *at), strict=True))
    result = run(program, PLAN, {"X": x, "O": out}, sizes, **settings)
    assert not result.findings
    return out


def filled(*shape: int) -> np.ndarray:
    return (np.arange(np.prod(shape)) + 1).reshape(shape).astype(np.float16)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:1"])
def test_a_tile_over_both_ends_is_filled_with_zeros(program: EncodedKernel, schedule: str) -> None:
    x = filled(2, 13, 24)
    expected = np.zeros((8, 16), np.float16)
    expected[:5, :8] = x[1, 8:, 16:]
    assert np.array_equal(load(program, x, (1, 8, 16), schedule=schedule), expected)


def test_a_view_ends_where_the_next_one_begins(program: EncodedKernel) -> None:
    """Of a flat tensor the first axis counts views: NaN in the next one is not read."""
    tensors = (plan_tensor("X", "L:length D:24", vector=8), PLAN.tensors[1])
    flat = tensors[0].model_copy(update={"flat": True})
    plan = PLAN.model_copy(update={"tensors": (flat, tensors[1])})
    x = filled(3, 5, 24)
    x[2] = np.nan
    out = np.full((8, 16), np.nan, np.float16)
    dims = {"batch": 1, "length": 5, "b": 1, "l": 2, "d": 16}
    # X has one stride less in the struct, so that all that follows is 8 bytes nearer.
    nearer = re.sub(r"p\+(\d+)", lambda match: f"p+{int(match[1]) - 8}", PTX)
    result = run(prepare(nearer, "attention"), plan, {"X": x.reshape(-1), "O": out}, dims)
    assert not result.findings
    expected = np.zeros((8, 16), np.float16)
    expected[:3, :8] = x[1, 2:, 16:]
    assert np.array_equal(out, expected)


def test_memory_in_another_order(program: EncodedKernel) -> None:
    x = filled(13, 2, 24).transpose(1, 0, 2)
    assert np.array_equal(load(program, x, (1, 3, 8)), x[1, 3:11, 8:])


def test_the_stride_of_one_position_does_not_matter(program: EncodedKernel) -> None:
    x = filled(1, 8, 24)
    odd = np.lib.stride_tricks.as_strided(x, strides=(6, 48, 2))
    assert np.array_equal(load(program, odd, (0, 0, 0)), x[0, :, :16])


def test_of_a_tensor_without_elements_everything_is_zero(program: EncodedKernel) -> None:
    for shape in ((2, 0, 24), (0, 9, 24)):
        assert not load(program, np.zeros(shape, np.float16), (0, 0, 0)).any()


def test_what_the_driver_refuses_is_refused(program: EncodedKernel) -> None:
    with pytest.raises(ValueError, match="`X` must be contiguous along its last axis"):
        load(program, np.zeros((2, 24, 13), np.float16).transpose(0, 2, 1), (0, 0, 0))
    tight = np.zeros((2, 13, 25), np.float16)[..., :24]
    with pytest.raises(ValueError, match=r"the tensor map of `X`: .* not a multiple of 16"):
        load(program, tight, (0, 0, 0))


def test_an_optional_map_is_zeros_there() -> None:
    """A kernel that asks whether it has one goes on without."""
    plan = PLAN.model_copy(update={"maps": (PLAN.maps[0].model_copy(update={"optional": True}),)})
    asks = """
    ld.param.b64 %value, [p];
    ld.param.b64 %out, [p+160];
    setp.ne.b64 %done, %value, 0;
    selp.b64 %value, 1, 2, %done;
    st.global.b64 [%out], %value;
    ret;
    """
    program = prepare(PTX.replace("mov.u32 %t, %tid.x;", asks), "attention")
    even, odd = np.zeros((2, 13, 24), np.float16), np.zeros((2, 13, 25), np.float16)[..., :24]
    for x, said in ((even, 1), (odd, 2)):
        out = np.zeros((8, 16), np.float16)
        run(program, plan, {"X": x, "O": out}, {"batch": 2, "length": 13, "b": 0, "l": 0, "d": 0})
        assert out.view(np.int64)[0, 0] == said


# --- the kernel of tests/gpu, so that it is right before it meets a GPU -----------------------


@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")
@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(TILES[::4], id="a-few"),
        pytest.param([t for n, t in enumerate(TILES) if n % 4], id="more", marks=pytest.mark.slow),
    ],
)
def test_the_tiles_that_a_gpu_is_asked_for(tiles: Sequence[Tile]) -> None:
    programs = compiled([_apart(tile) for tile in tiles], "attention", "sm_90")
    for tile, program in zip(tiles, programs, strict=True):
        src = tile.values().astype(NUMPY[tile.dtype]).transpose(tile.axes)
        out = np.full(tile.elements, 55, NUMPY[tile.dtype])
        plan = LaunchPlan(
            entry="attention",
            arch="sm_90",
            threads=128,
            shared=tile.shared,
            grid=((1,),),
            dims=tuple(tile.starts),
            tensors=(_tensor("src", src, tile.dtype), _tensor("out", out, tile.dtype)),
            maps=(tile.map,),
        )
        result = run(program, plan, {"src": src, "out": out}, tile.starts)
        assert not result.findings, tile.name
        expected = tile.expected().astype(NUMPY[tile.dtype])
        assert np.array_equal(out.view(np.uint8), expected.view(np.uint8)), tile.name


def _apart(tile: Tile) -> str:
    """Its includes stand before what is given to it."""
    source = tile.code.source
    includes = re.findall(r"^#include .*$", source, re.MULTILINE)
    return "\n".join([*includes, re.sub(r"^#include .*$", "", source, flags=re.MULTILINE)])


def _tensor(name: str, x: np.ndarray, dtype: str) -> PlanTensor:
    axes = tuple(PlanAxis(label="X", size=(size,)) for size in x.shape)
    read = name == "src"
    vector = 16 // x.itemsize if read else 1
    use = {"read": read, "written": not read, "vector": vector}
    return PlanTensor(name=name, dtype=dtype, axes=axes, **use)
