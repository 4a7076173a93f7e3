"""Tensor maps, without a GPU: what a plan says of them, and what the driver is asked for."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright.build.encode import encode
from flashwright.lang.diagnostic import Failed
from flashwright.lower.launch_plan import LaunchPlan, PlanMap
from tests.unit.fake_gpu import (
    ATTENTION,
    FORMAT,
    MAP_SETTINGS,
    Driver,
    Map,
    Tensor,
    inputs,
    kernel,
    make_plan,
    on_fake_gpu,
    outputs,
    plan_tensor,
    process,
    refused,
    tensor,
)

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler here"
)

MAPS = tuple(
    PlanMap(tensor=name, box=(1, 1, rows, 64), swizzle=128)
    for name, rows in (("Q", 128), ("K", 96), ("V", 80))
)
TYPES = {"fp16": 6, "bf16": 9, "fp32": 7, "int32": 3, "e4m3": 0, "e5m2": 0, "int8": 0}  # of cuda.h


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


def shape(one: Map) -> tuple[list[int], list[int]]:
    """Sizes, and strides in bytes without that of the last axis: in the order of the axes."""
    rank = one.rank
    return list(one.sizes[:rank])[::-1], list(one.strides[: rank - 1])[::-1]


def small(*tensors: Any, maps: Any, **settings: Any) -> Any:
    """A kernel of few tensors; batch and length are its dimensions."""
    grid = (("length", 1, "+"),)
    shared: dict[str, Any] = {"dims": ("batch", "length"), "grid": grid, **settings}
    return kernel(tensors=tensors, maps=maps, **shared)


# --- what the driver is asked for -------------------------------------------------------------


@on_fake_gpu
def test_the_struct_begins_with_the_maps() -> None:
    driver, given, out = Driver(), inputs(), outputs()
    driver.set("size", 3 * 128 + 248)
    kernel(maps=MAPS)(*given, out=out)
    expected: list[int] = []
    for array in (*given, out["O"], out["LSE"]):
        expected += [array.address, *array.strides]
    found = driver.parameters("128s128s128s" + FORMAT)
    assert found[:3] == tuple(bytes([0xC0 + n]) * 128 for n in range(3))
    assert found[3:] == (*expected, 2, 6, 3, 300, 77)


@on_fake_gpu
def test_the_struct_is_padded_as_far_as_any_compiler_has_it() -> None:
    driver = Driver()
    driver.set("size", 640)  # of 632; that it is there, and zeros
    kernel(maps=MAPS)(*inputs(), out=outputs())
    assert driver.parameters("628x12s") == (bytes(12),)


@on_fake_gpu
def test_a_map_has_the_address_sizes_strides_and_box() -> None:
    driver, given = Driver(), inputs()
    kernel(maps=MAPS)(*given, out=outputs())
    for number, rows in enumerate((128, 96, 80)):
        one, array = driver.map(number), given[number].array
        assert one.address == array.ctypes.data
        assert shape(one) == (list(array.shape), list(array.strides[:-1]))
        assert list(one.box[:4]) == [64, rows, 1, 1]
        assert list(one.steps[:4]) == [1, 1, 1, 1]
        assert [getattr(one, name) for name in MAP_SETTINGS] == [6, 0, 3, 2, 0]


@on_fake_gpu
def test_a_bound_launch_is_the_same_at_other_addresses() -> None:
    """The kernel finds the later tensors as those that were bound; only addresses differ."""
    driver, run, given, out = Driver(), kernel(maps=MAPS), inputs(), outputs()
    driver.set("size", 3 * 128 + 248)
    layout = "128s128s128s" + FORMAT
    run(*given, out=out)
    expected = driver.parameters(layout)
    piece = tensor(1 << 20)
    later, places = [*inputs(), piece], [(0, 0), (1, 0), (2, 32), (3, 0), (4, 512), (-1, 0)]
    bound = run.bound([*given, out["O"], None], [None] * 5, places)
    launches = driver.count("launches")
    bound(*later)
    assert driver.count("launches") == launches + 1
    found = driver.parameters(layout)
    addresses = [x.address + n for x, (_, n) in zip(later, places, strict=False)]
    assert [found[n] for n in (3, 8, 13, 18, 20)] == addresses
    assert [driver.map(n).address for n in range(3)] == addresses[:3]
    changed = {3, 8, 13, 18, 20, *range(25, 29)}  # no LSE: neither address nor strides
    same = [n for n in range(len(found)) if n not in changed]
    assert [found[n] for n in same] == [expected[n] for n in same]
    for bad, words in (((2, 8), "`V` must begin at a multiple of 16"), ((9, 0), "is missing")):
        wrong = run.bound([*given, out["O"], None], [None] * 5, [*places[:2], bad, *places[3:]])
        with refused((ValueError, TypeError), words):
            wrong(*later)
    with refused(TypeError, "`K` must be fp16"):
        wide = tensor(2, 3, 77, 64, dtype="float32")
        run.bound([given[0], wide, *given[2:], out["O"], None], [None] * 5, places)


@on_fake_gpu
def test_strided_and_turned_inputs() -> None:
    """Q, K and V as slices of one packed projection, in both layouts."""
    driver, run = Driver(), kernel(maps=MAPS)
    packed = np.zeros((2, 50, 3, 6, 64), np.float16)
    q, k, v = (packed[:, :, i] for i in range(3))
    slopes, out = tensor(6, dtype="float32"), tensor(2, 6, 50, 64)
    turned = [Tensor(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    other = Tensor(out.array.transpose(0, 2, 1, 3))
    for layout, arrays, to in (
        ("bhsd", turned, out),
        ("bshd", [Tensor(x) for x in (q, k, v)], other),
    ):
        run(*arrays, slopes, out=to, layout=layout)
        for number in range(3):
            one = driver.map(number)
            assert one.address == packed.ctypes.data + number * 6 * 64 * 2
            assert shape(one) == ([2, 6, 50, 64], [50 * 3 * 6 * 128, 128, 3 * 6 * 128]), layout


@on_fake_gpu
def test_broadcast_inputs_have_a_stride_of_nothing() -> None:
    driver, given = Driver(), inputs()
    given[1] = Tensor(np.broadcast_to(np.zeros((1, 1, 77, 64), np.float16), (2, 3, 77, 64)))
    kernel(maps=MAPS)(*given, out=outputs())
    assert shape(driver.map(1)) == ([2, 3, 77, 64], [0, 0, 128])


@on_fake_gpu
def test_the_stride_of_an_axis_with_one_position_is_one_that_the_driver_takes() -> None:
    q = tensor(1, 6, 1, 64)
    for odd in (6, 10, 1 << 45):
        strided = np.lib.stride_tricks.as_strided(q.array, strides=(odd, 128, odd, 2))
        kernel(maps=MAPS)(Tensor(strided), *inputs(batch=1, q=1)[1:], out=outputs(batch=1, q=1))
        assert shape(Driver().map(0)) == ([1, 6, 1, 64], [16, 128, 16])


@on_fake_gpu
def test_split_heads_and_sizes_that_are_worked_out() -> None:
    driver = Driver()
    tensors = (
        plan_tensor("Q", "B:batch L:length H:kv_heads G:4 D:64", vector=8),
        plan_tensor("P", "T:length,16,ceil_div D:64", vector=8),
        plan_tensor("O", "B:batch L:length D:64"),
    )
    maps = (
        PlanMap(tensor="P", box=(16, 32), swizzle=64),
        PlanMap(tensor="Q", box=(1, 16, 1, 4, 64), swizzle=0),
    )
    run = small(*tensors, maps=maps, dims=("batch", "length", "kv_heads"))
    run(tensor(2, 12, 40, 64), tensor(3, 64), out=tensor(2, 40, 64))
    first, second = driver.map(0), driver.map(1)
    assert shape(first) == ([3, 64], [128])
    assert (list(first.box[:2]), first.swizzle) == ([32, 16], 2)
    row = 128
    assert shape(second) == ([2, 40, 3, 4, 64], [480 * row, row, 160 * row, 40 * row])
    assert (list(second.box), second.swizzle) == ([64, 4, 1, 16, 1], 0)


@on_fake_gpu
def test_a_flat_tensor_is_views_back_to_back() -> None:
    driver = Driver()
    views = plan_tensor("X", "L:length D:24", vector=8).model_copy(update={"flat": True})
    tensors = (views, plan_tensor("O", "B:batch L:length"))
    run = small(*tensors, maps=(PlanMap(tensor="X", box=(1, 8, 16), swizzle=32),))
    memory = tensor(7 * 5 * 24 + 8)  # what is no whole view is not reached
    run(memory, batch=1, length=5, out=tensor(1, 5))
    one = driver.map(0)
    assert one.address == memory.address
    assert shape(one) == ([7, 5, 24], [5 * 48, 48])
    assert list(one.box[:3]) == [16, 8, 1]
    run(tensor(5 * 24), batch=1, length=5, out=tensor(1, 5))
    assert shape(driver.map(0)) == ([1, 5, 24], [16, 48])
    run(tensor(100), batch=1, length=5, out=tensor(1, 5))  # not even one
    assert shape(driver.map(0))[0] == [1, 1, 1]


@on_fake_gpu
def test_a_map_for_ranges_ends_where_they_do() -> None:
    """With `n` rows left of a range that ends at row `last`: no row past it, and the address wraps
    around to that of the first."""
    driver = Driver()
    tensors = (plan_tensor("X", "H:batch L:length D:64", vector=8), plan_tensor("O", "B:batch"))
    run = small(
        *tensors, maps=(PlanMap(tensor="X", box=(1, 1, 1, 8, 64), swizzle=128, ranges=True),)
    )
    packed = np.zeros((50, 3, 64), np.float16)
    for array in (packed.transpose(1, 0, 2), np.zeros((3, 1, 64), np.float16)):
        run(Tensor(array), out=tensor(3))
        sizes, strides = shape(driver.map(0))
        assert sizes == [2**31 - 2**16, 2**31 - 2**16, 3, 2**30, 64]
        row, last, left = strides[3], 37, 5
        at = 2**30 * strides[0] + last * strides[1] + 2 * strides[2] + (2**30 - left) * strides[3]
        head = array.strides[0]
        assert at % 2**64 == (last - left) * row + 2 * head
        assert row == (packed.strides[0] if array.shape[1] > 1 else 16)  # of one row any will do
    assert list(driver.map(0).box) == [64, 8, 1, 1, 1]


@on_fake_gpu
def test_a_map_for_pages_counts_the_rows_of_all_pages_together() -> None:
    """With `n` rows left, from row `first` of a page on: the address is that of its first row."""
    driver = Driver()
    tensors = (plan_tensor("X", "P:batch H:3 L:length D:64", vector=8), plan_tensor("O", "B:batch"))
    run = small(
        *tensors, maps=(PlanMap(tensor="X", box=(1, 1, 1, 16, 64), swizzle=128, pages=True),)
    )
    for turned in (False, True):
        memory = np.zeros((5, 48, 3, 64) if turned else (5, 3, 48, 64), np.float16)
        array = memory.transpose(0, 2, 1, 3) if turned else memory
        run(Tensor(array), out=tensor(5))
        one = driver.map(0)
        sizes, strides = shape(one)
        assert sizes == [2**31 - 2**16, 2**31 - 2**16, 3, 2**30, 64]
        first, left = 32, 5
        row = 4 * array.strides[0] // array.strides[2] + first
        places = (2**30, row + left, 2, 2**30 - left)
        at = one.address + sum(x * step for x, step in zip(places, strides, strict=True))
        assert at % 2**64 == array[4, 2, first:].ctypes.data
        assert list(one.box) == [64, 16, 1, 1, 1]
    run(Tensor(np.zeros((0, 3, 48, 64), np.float16)), out=tensor(0))  # no page at all
    memory = np.zeros((5, 3 * 48 * 64 + 8), np.float16)[:, :-8]
    with pytest.raises(ValueError, match="`X` must have pages that are whole rows apart"):
        run(Tensor(memory.reshape(5, 3, 48, 64)), out=tensor(5))


@on_fake_gpu
def test_one_axis_and_every_type() -> None:
    driver = Driver()
    for dtype, number in TYPES.items():
        if dtype.startswith("e"):
            continue  # NumPy memory of these cannot be had; the number is encode.py's all the same
        wide = 128 // int(re.sub(r"\D", "", dtype))
        tensors = (
            plan_tensor("X", "T:length", dtype, vector=wide),
            plan_tensor("O", "B:batch L:length"),
        )
        run = small(*tensors, maps=(PlanMap(tensor="X", box=(32,), swizzle=0),))
        names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
        run(tensor(100, dtype=names.get(dtype, dtype)), batch=1, out=tensor(1, 100))
        assert shape(driver.map(0)) == ([100], [])
        assert driver.map(0).type == number


def test_the_numbers_of_the_types() -> None:
    """As the launcher gets them: a map's are the last, its type behind the tensor's number."""
    for dtype, number in TYPES.items():
        changes = {"dtype": dtype, "vector": 16}
        tensors = tuple(t.model_copy(update=changes) for t in ATTENTION)
        box = PlanMap(tensor="K", box=(1, 1, 64, 16), swizzle=64)
        assert encode(make_plan(tensors=tensors, maps=(box,))).numbers[-11:] == (
            *(1, 1, number, 2, False, False, False),
            *(1, 1, 64, 16),
        )


# --- maps that there may not be ---------------------------------------------------------------


def _rows_of(length: int, apart: int, begin: int = 0) -> Tensor:
    """Three rows of so many elements, so far apart in memory, from an element on."""
    memory = np.zeros(begin + 3 * apart + 8, np.float16)
    memory = memory[(-(memory.ctypes.data // 2) % 8) :]  # from a multiple of 16 bytes on
    strided = np.lib.stride_tricks.as_strided(memory[begin:], (3, length), (2 * apart, 2))
    return Tensor(strided)


@on_fake_gpu
def test_an_optional_map_is_zeros_where_tma_cannot_load_the_tensor() -> None:
    driver = Driver()
    tensors = (plan_tensor("X", "B:batch L:length"), plan_tensor("O", "B:batch L:length"))
    run = small(*tensors, maps=(PlanMap(tensor="X", box=(16, 8), swizzle=0, optional=True),))
    for what, given, fits in (
        ("even", _rows_of(40, 40), True),
        ("padded", _rows_of(33, 40), True),
        ("broadcast", _rows_of(40, 0), True),
        ("odd rows", _rows_of(33, 33), False),
        ("odd stride", _rows_of(40, 44), False),
        ("odd address", _rows_of(40, 40, begin=4), False),
        ("turned", Tensor(np.zeros((40, 3), np.float16).T), False),
    ):
        run(given, out=tensor(*given.array.shape))
        (found,) = driver.parameters("128s")
        assert found == (bytes([0xC0]) * 128 if fits else bytes(128)), what


# --- tensors without elements -----------------------------------------------------------------


@on_fake_gpu
def test_without_keys_the_map_is_of_a_zero() -> None:
    """The kernel runs, and whatever it loads of K is 0. PyTorch's empty tensors lie at null."""
    driver, loads = Driver(), Driver().count("loads")
    given = inputs(k=0)
    given[2] = _at_null(2, 3, 0, 64)
    run = kernel(maps=MAPS)
    for _ in range(2):
        run(*given, out=outputs())
        assert driver.map(0).address == given[0].address
        for number in (1, 2):
            one = driver.map(number)
            assert (one.address, one.rank) == (driver.zeros, 4)
            assert shape(one) == ([1, 1, 1, 1], [16, 16, 16])
            assert list(one.box[:4]) == [64, (96, 80)[number - 1], 1, 1]
    assert driver.count("loads") == loads + 2  # the kernel, and the zeros once
    assert driver.count("mode") == 0  # the capture mode is put back


def _at_null(*sizes: int) -> Tensor:
    class Null(Tensor):
        address = 0  # type: ignore[assignment]

    return Null(np.zeros(sizes, np.float16))


@on_fake_gpu
def test_a_problem_without_blocks_encodes_nothing() -> None:
    driver, run = Driver(), kernel(maps=MAPS)
    before = driver.count("launches")
    driver.set("fail_map", 1)
    run(*inputs(batch=0), out=outputs(batch=0))
    assert driver.count("launches") == before


# --- what is refused --------------------------------------------------------------------------


@on_fake_gpu
def test_a_refusal_of_the_driver_names_the_tensor() -> None:
    driver, run, given = Driver(), kernel(maps=MAPS), inputs()
    before = driver.count("launches")
    far = np.lib.stride_tricks.as_strided(given[2].array, strides=(1 << 40, 9856, 128, 2))
    with refused(
        RuntimeError,
        "the tensor map of `V`, whose shape is (2, 3, 77, 64) and whose strides are (549755813888,",
        "CUDA_ERROR_INVALID_VALUE",
    ):
        run(*given[:2], Tensor(far), given[3], out=outputs())
    driver.set("fail_map", 1)
    with refused(RuntimeError, "the tensor map of `Q`", "CUDA_ERROR_INVALID_VALUE"):
        run(*given, out=outputs())
    assert driver.count("launches") == before
    driver.set("fail_map", 0)
    run(*given, out=outputs())


@on_fake_gpu
def test_what_tma_cannot_take_is_said_before_the_driver_is_asked() -> None:
    run, given = kernel(maps=MAPS), inputs()
    tight = Tensor(np.zeros((2, 3, 77, 65), np.float16)[..., :64])
    with refused(ValueError, "`K` must have strides that are multiples of 8 elements"):
        run(given[0], tight, *given[2:], out=outputs())
    odd = Tensor(np.zeros(2 * 3 * 77 * 64 + 1, np.float16)[1:].reshape(2, 3, 77, 64))
    with refused(ValueError, "`K` must begin at a multiple of 16 bytes"):
        run(given[0], odd, *given[2:], out=outputs())


def _without() -> str:
    kernel()(*inputs(), out=outputs())  # has no maps
    try:
        kernel(maps=MAPS)
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_older_driver_is_told_of_when_the_kernel_is_loaded(tmp_path: Path) -> None:
    with process(tmp_path, "-DWITHOUT_MAPS") as pool:
        said = pool.submit(_without).result()
    assert "has no cuTensorMapEncodeTiled" in said
    assert "CUDA 12.0 or newer" in said


K = {t.name: t for t in ATTENTION}["K"]
FLAT = K.model_copy(update={"name": "P", "flat": True})
UNEVEN = plan_tensor("F", "L:kv_len D:60", vector=8).model_copy(update={"flat": True})
UNKNOWN = plan_tensor("G", "L:64 D:kv_len", vector=8).model_copy(update={"flat": True})
MANY = plan_tensor("M", " ".join(["T:1"] * 6), vector=8)
NARROW = K.model_copy(update={"name": "N", "vector": 4})
NONE = K.model_copy(update={"name": "X", "vector": 0})
STRANGE = K.model_copy(update={"name": "S", "dtype": "fp64"})
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tensor": "W"}, "a map of `W`, which is no tensor"),
    ({"tensor": "O"}, "the map of `O` is for loads, of a tensor that is read"),
    ({"tensor": "P"}, "the map of `P` has a box of 4 axes, the tensor has 5"),
    ({"tensor": "F", "box": (1, 8, 32)}, "whose rows are not a multiple of 16 bytes long"),
    ({"tensor": "G", "box": (1, 8, 32)}, "whose rows are not a multiple of 16 bytes long"),
    ({"tensor": "M", "box": (1, 1, 1, 1, 1, 8)}, "has 6 axes; TMA knows 1 to 5"),
    ({"box": (64, 64)}, "the map of `K` has a box of 2 axes, the tensor has 4"),
    ({"box": ()}, "a box of 0 axes"),
    ({"box": (1, 1, 257, 64)}, "has the box [1, 1, 257, 64]; on each axis there can be 1 to 256"),
    ({"box": (1, 0, 64, 64)}, "the box [1, 0, 64, 64]"),
    ({"swizzle": 16}, "swizzles over 16 bytes: it can be 0, 32, 64, 128"),
    ({"box": (1, 1, 64, 12), "swizzle": 0}, "24 bytes in a row of its box: not a multiple of 16"),
    ({"swizzle": 64}, "128 bytes in a row of its box, more than its swizzle, 64"),
    ({"tensor": "N"}, "the map of `N` needs a vector of 8, not 4"),
    ({"tensor": "X"}, "the map of `X` needs a vector of 8, not 0"),
    ({"tensor": "S"}, "element type fp64"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG, ids=[words for _, words in WRONG])
def test_a_map_that_cannot_be_made_is_refused(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"tensor": "K", "box": (1, 1, 64, 64), "swizzle": 128}
    tensors = (*ATTENTION, FLAT, MANY, NARROW)
    others = (NONE, STRANGE, UNEVEN, UNKNOWN)
    tensors += tuple(t for t in others if t.name == changes.get("tensor"))
    encode(make_plan(tensors=tensors[: len(ATTENTION) + 3], maps=(PlanMap(**usual),)))
    with pytest.raises(Failed, match=re.escape(words)) as failed:
        encode(make_plan(tensors=tensors, maps=(PlanMap(**{**usual, **changes}),)))
    assert {d.code for d in failed.value.diagnostics} == {"FW852"}


def test_maps_are_told_only_where_there_are_some() -> None:
    assert "maps" not in make_plan().dump()
    plan = make_plan(maps=MAPS)
    assert LaunchPlan.model_validate_json(plan.dump()) == plan
    assert plan.model_copy(update={"maps": ()}) == make_plan()
    assert plan.dump().startswith(make_plan().dump().removesuffix("\n}\n"))
