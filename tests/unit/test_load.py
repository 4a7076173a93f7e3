"""The launcher, without a GPU: the real one, before a driver that only remembers.

Each test runs in a process whose libcuda.so.1 is the fake one, so that no other test meets it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright.build.arrays import framework_of
from flashwright.build.driver import while_capturing
from flashwright.build.encode import encode
from flashwright.build.load import (
    CUBIN,
    PLAN,
    PTX,
    Kernel,
    dim_sources,
    load,
    read_plan,
    unshown,
)
from flashwright.build.native import launcher
from flashwright.build.plan_rules import caller_order
from flashwright.build.steps import Steps, StepsKernel
from flashwright.lang.diagnostic import Failed
from tests.unit.fake_gpu import (
    ATTENTION,
    CPU,
    CUDA,
    DIMS,
    FORMAT,
    SHARED,
    THREADS,
    Driver,
    Tensor,
    cubin,
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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


# --- what is launched -------------------------------------------------------------------------


@on_fake_gpu
def test_a_launch_has_the_grid_the_block_and_the_parameters_of_the_plan() -> None:
    driver, given, out = Driver(), inputs(), outputs()
    driver.set("size", 248)
    assert kernel()(*given, out=out) is out["O"]
    assert list(driver.last.grid) == [3, 6, 2]
    assert list(driver.last.block) == [THREADS, 1, 1]
    assert driver.last.shared == SHARED == driver.count("shared_set")
    expected: list[int] = []
    for array in (*given, out["O"], out["LSE"]):
        expected += [array.address, *array.strides]
    assert driver.parameters(FORMAT) == (*expected, 2, 6, 3, 300, 77)


@on_fake_gpu
def test_a_launch_has_a_counter_of_its_own() -> None:
    """Before the dimensions: cleared for the launch, and given back behind it."""
    driver, run, given, out = Driver(), kernel(counter=True), inputs(), outputs()
    driver.set("size", 256)
    layout = FORMAT.replace("5i4x", "Q5i4x")
    had, places = driver.count("had"), set()
    run(*given, out=out)
    bound = run.bound([*given, out["O"], None], [None] * 5, [(n, 0) for n in range(5)] + [(-1, 0)])
    for launch in (lambda: run(*given, out=out), lambda: bound(*given, out["O"])):
        launch()
        assert driver.count("counted_at_launch") == 0
        *_, address, batch, heads, kv_heads, q_len, kv_len = driver.parameters(layout)
        assert (batch, heads, kv_heads, q_len, kv_len) == (2, 6, 3, 300, 77)
        places.add(address)
    assert len(places) == 2
    assert driver.count("had") - had == 3 == driver.count("freed") - had
    driver.set("fail_pool", 1)
    with pytest.raises(RuntimeError, match="getting memory for the kernel's counter failed"):
        run(*given, out=out)
    kernel()(*given, out=out)  # which needs none


@on_fake_gpu
def test_a_notebook_shows_what_a_kernel_is_called_with() -> None:
    page = kernel()._repr_html_()
    assert "<td>Q</td><td>input</td>" in page
    assert "<td>O</td><td>output</td>" in page


@on_fake_gpu
def test_an_output_that_is_not_asked_for_is_a_null_pointer() -> None:
    driver, out = Driver(), outputs()
    kernel()(*inputs(), out=out["O"])
    found = driver.parameters(FORMAT)
    assert found[17] == out["O"].address
    assert found[22:26] == (0, 0, 0, 0)


@on_fake_gpu
def test_the_same_memory_in_the_other_layout_gives_the_same_strides() -> None:
    driver, run = Driver(), kernel()
    q, k, v, slopes = inputs()
    out = outputs()
    run(q, k, v, slopes, out=out)
    expected = driver.parameters(FORMAT)
    turned = [Tensor(x.array.swapaxes(1, 2)) for x in (q, k, v, out["O"])]
    run(*turned[:3], slopes, out={"O": turned[3], "LSE": out["LSE"]}, layout="bshd")
    assert driver.parameters(FORMAT) == expected


@on_fake_gpu
def test_strides_are_passed_on_as_they_are() -> None:
    """Q, K and V as slices of one packed projection."""
    driver = Driver()
    packed = np.zeros((2, 50, 3, 6, 64), np.float16)
    q, k, v = (Tensor(packed[:, :, i].transpose(0, 2, 1, 3)) for i in range(3))
    kernel()(q, k, v, tensor(6, dtype="float32"), out=tensor(2, 6, 50, 64))
    found = driver.parameters(FORMAT)
    assert found[1:5] == (50 * 3 * 6 * 64, 64, 3 * 6 * 64, 1)
    assert found[5] == packed.ctypes.data + 6 * 64 * 2


@on_fake_gpu
def test_axes_in_another_order_and_split_heads() -> None:
    """A plan whose heads are in groups: the caller's one head axis becomes two."""
    driver = Driver()
    grouped = (
        plan_tensor("Q", "B:batch L:q_len H:kv_heads G:4 D:64", vector=8),
        plan_tensor("K", "B:batch H:kv_heads L:kv_len D:64", vector=8),
        plan_tensor("O", "B:batch L:q_len H:kv_heads G:4 D:64", vector=8),
    )
    dims = ("batch", "kv_heads", "q_len", "kv_len")
    run = kernel(tensors=grouped, dims=dims, grid=(("q_len",), ("kv_heads",)))
    q, k, o = tensor(2, 12, 10, 64), tensor(2, 3, 20, 64), tensor(2, 12, 10, 64)
    driver.set("size", 8 * 19)
    run(q, k, out=o)
    found = driver.parameters("Q5qQ4qQ5q4i")
    assert found[1:6] == (12 * 640, 64, 4 * 640, 640, 1)
    assert found[-4:] == (2, 3, 10, 20)
    with refused(ValueError, "`Q`", "13", "multiple of 4"):
        run(tensor(2, 13, 10, 64), k, out=o)


@on_fake_gpu
def test_heads_that_are_split_into_groups_are_read_off_the_split_axis() -> None:
    """NSA's selected branch: the plan has the dim `heads`, and no axis is as long."""
    driver = Driver()
    grouped = (
        plan_tensor("Q", "B:batch L:q_len H:kv_heads G:4 D:64", vector=8),
        plan_tensor("K", "B:batch H:kv_heads L:kv_len D:64", vector=8),
        plan_tensor("O", "B:batch L:q_len H:kv_heads G:4 D:64", vector=8),
        plan_tensor("LSE", "B:batch H:heads L:q_len", dtype="fp32"),
    )
    run = kernel(tensors=grouped, dims=DIMS, grid=(("q_len",), ("heads",)))
    q, k, o = tensor(2, 12, 10, 64), tensor(2, 3, 20, 64), tensor(2, 12, 10, 64)
    driver.set("size", 8 * 26)
    run(q, k, out=o)
    assert list(driver.last.grid) == [10, 12, 1]
    assert driver.parameters("Q5qQ4qQ5qQ3q5i4x")[-5:] == (2, 12, 3, 10, 20)
    run(q, k, out=o, heads=12)
    assert list(driver.last.grid) == [10, 12, 1]
    with refused(ValueError, "`heads` is given as 16", "`Q` has 12"):
        run(q, k, out=o, heads=16)
    assert dim_sources(run.plan, "bhsd")["heads"] == (0, 1, 1)
    assert unshown(run.plan) == ()
    assert unshown(kernel(dims=(*DIMS, "tokens")).plan) == ("tokens",)


@on_fake_gpu
def test_views_into_memory_are_contiguous_and_have_no_shape_to_check() -> None:
    driver = Driver()
    views = (
        plan_tensor("Q", "B:batch L:q_len D:64"),
        plan_tensor("Pool", "L:q_len D:64", flat=True),
        plan_tensor("O", "B:batch L:q_len D:64"),
    )
    run = kernel(tensors=views, dims=("batch", "q_len"), grid=(("q_len",),))
    q, pool, o = tensor(2, 10, 64), tensor(7, 100), tensor(2, 10, 64)
    driver.set("size", 8 * 12)
    run(q, pool, out=o)
    assert driver.parameters("Q3qQ2qQ3q2i")[4:7] == (pool.address, 64, 1)
    with refused(TypeError, "`O` is a view into memory that only you can size: give it, out="):
        kernel(
            tensors=(*views[:2], views[2].model_copy(update={"flat": True})),
            dims=("batch", "q_len"),
            grid=(("q_len",),),
        )(q, pool)
    with refused(ValueError, "`Pool` must be contiguous", "strides are (100, 2)"):
        run(q, Tensor(np.zeros((7, 100), np.float16)[:, ::2]), out=o)


@on_fake_gpu
def test_kv_heads_that_no_tensor_has_are_as_many_as_the_heads() -> None:
    driver = Driver()
    plain = tuple(t for t in ATTENTION if t.name not in ("K", "V", "Slopes"))
    run = kernel(tensors=plain, dims=DIMS[:4])
    driver.set("size", 8 * 16)
    run(tensor(2, 6, 300, 64), out=tensor(2, 6, 300, 64))
    assert driver.parameters("Q4qQ4qQ3q4i")[-4:] == (2, 6, 6, 300)


@on_fake_gpu
def test_dimensions_that_no_tensor_has_are_given_by_name() -> None:
    driver = Driver()
    run = kernel(dims=(*DIMS, "tokens"), grid=(("tokens", 10, "floor_div"),))
    run(*inputs(), out=outputs(), tokens=95)
    assert list(driver.last.grid) == [9, 1, 1]
    assert driver.parameters(FORMAT.removesuffix("4x") + "i")[-1] == 95
    with refused(TypeError, "no tensor says what `tokens` is", "tokens=..."):
        run(*inputs(), out=outputs())
    with refused(TypeError, "`tokens`", "whole number", "float"):
        run(*inputs(), out=outputs(), tokens=1.5)
    with refused(ValueError, "`tokens`", "-1"):
        run(*inputs(), out=outputs(), tokens=-1)
    with refused(ValueError, "`q_len` is given as 7", "`Q` has 300"):
        run(*inputs(), out=outputs(), tokens=1, q_len=7)


@on_fake_gpu
def test_several_kernels_are_one_function_of_tensors() -> None:
    """The last kernel has neither K, whose sizes it needs, nor Q: its scratch has whole tiles of
    rows, and O says how many count."""
    import tvm_ffi

    driver, (q, k, *_), out = Driver(), inputs(), outputs()["O"]
    scratch = plan_tensor("Sum", "B:batch H:heads L:q_len D:64", "fp32", fragments=True)
    first = (*ATTENTION[:2], scratch.model_copy(update={"read": False, "written": True}))
    steps = Steps(steps=("1", "2"), scratch=("Sum",), zeroed=("Sum",))
    last = kernel(tensors=(scratch, ATTENTION[4]))
    run = StepsKernel([kernel(tensors=first), last], steps)
    memory = run.memory([q, k])
    assert memory == {"O": ((2, 6, 300, 64), "fp16"), "Sum": ((2, 6, 384, 64), "fp32")}
    padded = tensor(*memory["Sum"][0], dtype="float32")
    before = driver.count("launches")
    driver.set("size", 104)
    given = [tvm_ffi.from_dlpack(t) for t in (q, k, padded, out)]
    run.of_tensors(("Q", "K", "Sum", "O"))(*given)
    assert driver.count("launches") == before + 2
    assert list(driver.last.grid) == [3, 6, 2]
    assert driver.parameters("Q4qQ4q5i") == (
        *(padded.address, *padded.strides, out.address, *out.strides),
        *(2, 6, 3, 300, 77),
    )
    short = tensor(2, 6, 320, 64, dtype="float32")
    with refused(ValueError, "`Sum` must be 300 wide on axis L, not 320"):
        run.of_tensors(("Q", "K", "Sum", "O"))(*given[:2], tvm_ffi.from_dlpack(short), given[3])


@on_fake_gpu
def test_several_kernels_are_bound_as_one_function() -> None:
    """One call launches both; the second one reads scratch inside of another piece of memory, and
    knows from the bound tensors the sizes that none of its own has."""
    driver, (q, k, *_), out = Driver(), inputs(), outputs()["O"]
    scratch = plan_tensor("Sum", "B:batch H:heads L:q_len D:64", "fp32")
    first = (*ATTENTION[:2], scratch.model_copy(update={"read": False, "written": True}))
    steps = Steps(steps=("1", "2"), scratch=("Sum",))
    run = StepsKernel([kernel(tensors=first), kernel(tensors=(scratch, ATTENTION[4]))], steps)
    assert run.needed(["O"]) == {"Sum": False}
    middle = tensor(2, 6, 300, 64, dtype="float32")
    bound = run.bound([q, k, out, middle], [None] * 5, [(0, 0), (1, 0), (2, 0), (3, 512)])
    later, piece = outputs()["O"], tensor(1 << 21, dtype="float32")
    driver.set("size", 104)
    before = driver.count("launches")
    bound(*inputs()[:2], later, piece)
    assert driver.count("launches") == before + 2
    assert driver.parameters("Q4qQ4q5i") == (
        *(piece.address + 512, *middle.strides, later.address, *out.strides),
        *(2, 6, 3, 300, 77),
    )


@on_fake_gpu
def test_forms_differ_if_anything_but_the_memory_does() -> None:
    look = launcher().form()
    form = look(tensor(2, 3), tensor(4))
    assert look(tensor(2, 3), tensor(4)) == form
    wide = Tensor(np.zeros((2, 8), np.float16)[:, :3])
    others = [
        (tensor(2, 3), tensor(5)),
        (tensor(3, 2), tensor(4)),
        (tensor(2, 3),),
        (tensor(4), tensor(2, 3)),
        (wide, tensor(4)),
        (tensor(2, 3, dtype="bfloat16"), tensor(4)),
        (tensor(2, 3), tensor(4, device=(CUDA, 1))),
        (tensor(2, 3), tensor(4, device=(CPU, 0))),
    ]
    assert len({form, *(look(*given) for given in others)}) == 1 + len(others)


@on_fake_gpu
def test_every_operator_of_a_size() -> None:
    sizes = {
        ("q_len", 128, "ceil_div"): 3,
        ("q_len", 128, "floor_div"): 2,
        ("q_len", 128, "mod"): 44,
        ("q_len", "kv_len", "min"): 77,
        ("q_len", "kv_len", "max"): 300,
        ("q_len", "kv_len", "-"): 223,
        ("q_len", 2, "*", "kv_len", "+"): 677,
        ("kv_len", "q_len", "-", 10, "floor_div", 24, "+"): 1,  # rounds down below 0 too
        ("kv_len", "q_len", "-", 10, "ceil_div", 24, "+"): 2,
        ("kv_len", "q_len", "-", 10, "mod"): 7,
    }
    for size, expected in sizes.items():
        kernel(grid=(size,))(*inputs(), out=outputs())
        assert Driver().last.grid[0] == expected, size


@on_fake_gpu
def test_a_problem_without_blocks_launches_nothing() -> None:
    before = Driver().count("launches")
    kernel()(*inputs(batch=0), out=outputs(batch=0))
    assert Driver().count("launches") == before


@on_fake_gpu
def test_strides_of_axes_with_one_position_do_not_matter() -> None:
    q = tensor(1, 6, 1, 64)
    odd = Tensor(np.lib.stride_tricks.as_strided(q.array, strides=(6, 128, 10, 2)))
    kernel()(odd, *inputs(batch=1, q=1)[1:], out=outputs(batch=1, q=1))
    assert Driver().parameters(FORMAT)[1:5] == (0, 64, 0, 1)


@on_fake_gpu
def test_it_goes_to_the_device_and_stream_of_the_caller() -> None:
    import tvm_ffi

    driver, run = Driver(), kernel()
    first, loads = driver.last.kernel, driver.count("loads")
    where = {"device": (CUDA, 1)}
    tensors = [tensor(*x.shape, **where) for x in inputs()[:3]]
    slopes = tensor(6, dtype="float32", **where)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 1), 0x1234):
        run(*tensors, slopes, out=tensor(2, 6, 300, 64, **where))
    assert driver.last.stream == 0x1234
    assert driver.last.kernel != first
    run(*tensors, slopes, out=tensor(2, 6, 300, 64, **where))
    assert not driver.last.stream
    assert driver.count("loads") == loads + 1  # once for each device
    assert driver.count("mode") == 0  # the capture mode is put back
    with while_capturing():
        assert driver.count("mode") == 2  # relaxed, as the first call of a process needs it
    assert driver.count("mode") == 0


# --- which code is loaded ---------------------------------------------------------------------


@on_fake_gpu
def test_the_cubin_is_used_where_the_driver_takes_it_and_else_the_ptx() -> None:
    driver = Driver()
    kernel()(*inputs(), out=outputs())
    assert driver.count("ptx") == 0
    driver.set("refuse_cubin", 1)
    kernel()(*inputs(), out=outputs())
    assert driver.count("ptx") == 1
    with refused(RuntimeError, "compiled for sm_80", "sm_90 cannot run", "--ptx"):
        Kernel(make_plan(), b"\x7fELF")(*inputs(), out=outputs())
    driver.set("fail_ptx", 1)
    with refused(RuntimeError, "cannot compile kernel.ptx for sm_90", "line 7"):
        kernel()(*inputs(), out=outputs())


@on_fake_gpu
def test_what_the_driver_refuses_is_told_in_its_words() -> None:
    driver = Driver()
    with refused(RuntimeError, "finding the kernel other", "CUDA_ERROR"):
        kernel(entry="other")(*inputs(), out=outputs())
    with refused(RuntimeError, "150000 bytes of shared memory", "cuda:0 has 102400"):
        kernel(shared=150_000)(*inputs(), out=outputs())
    driver.set("max_threads", 64)
    with refused(RuntimeError, "128 threads", "allow 64"):
        kernel()(*inputs(), out=outputs())
    driver.set("max_threads", 1024)
    driver.set("fail_launch", 1)
    with refused(RuntimeError, "launching the kernel", "CUDA_ERROR_INVALID_VALUE"):
        kernel()(*inputs(), out=outputs())


# --- what is refused --------------------------------------------------------------------------


def test_a_gradient_is_never_lost_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = SimpleNamespace(is_grad_enabled=lambda: True)
    idle = SimpleNamespace(is_grad_enabled=lambda: False)
    leaf = type("Parameter", (), {"__module__": "torch.nn", "requires_grad": True})()
    detached = type("Tensor", (), {"__module__": "torch", "requires_grad": False})()
    launched: list[Any] = []

    def launch(torch: Any, *tensors: Any) -> None:
        monkeypatch.setitem(sys.modules, "torch", torch)
        framework_of(tensors[0]).launch(lambda *given: launched.append(given), 0, tensors, [])

    with pytest.raises(RuntimeError, match=r"requires a gradient.*torch\.no_grad"):
        launch(recording, detached, leaf, None)
    assert not launched
    launch(recording, detached, None)
    launch(idle, leaf)
    assert launched == [(0, detached, None), (0, leaf)]


@on_fake_gpu
def test_wrong_arguments_are_named_before_anything_runs() -> None:
    run, before = kernel(), Driver().count("launches")
    q, k, v, slopes = inputs()
    o = tensor(2, 6, 300, 64)
    odd = Tensor(np.zeros(2 * 3 * 77 * 64 + 1, np.float16)[1:].reshape(2, 3, 77, 64))
    wide = Tensor(np.zeros((2, 3, 77, 128), np.float16)[..., ::2])
    tight = Tensor(np.zeros((2, 3, 77, 65), np.float16)[..., :64])
    shared = Tensor(np.broadcast_to(np.zeros((1, 1, 300, 64), np.float16), (2, 6, 300, 64)))
    wrong: list[tuple[Any, ...]] = [
        (
            ValueError,
            "`K` must be on a CUDA device; it is on the CPU",
            {"K": tensor(2, 3, 77, 64, device=(CPU, 0))},
        ),
        (
            ValueError,
            "`V` is on cuda:1, but `Q` is on cuda:0",
            {"V": tensor(2, 3, 77, 64, device=(CUDA, 1))},
        ),
        (
            TypeError,
            "`K` must be fp16; it is bfloat16",
            {"K": tensor(2, 3, 77, 64, dtype="bfloat16")},
        ),
        (
            TypeError,
            "`O` must be fp16; it is float32",
            {"out": tensor(2, 6, 300, 64, dtype="float32")},
        ),
        (
            ValueError,
            "`Q` must have 4 axes (B, H, L, D); its shape is (6, 300, 64)",
            {"Q": tensor(6, 300, 64)},
        ),
        (
            ValueError,
            "`V` has kv_len = 78 (axis L of (2, 3, 78, 64)), but `K` has kv_len = 77",
            {"V": tensor(2, 3, 78, 64)},
        ),
        (ValueError, "`V` has kv_heads = 2", {"V": tensor(2, 2, 77, 64)}),
        (
            ValueError,
            "`K` must be 64 wide on axis D, not 72; its shape is (2, 3, 77, 72)",
            {"K": tensor(2, 3, 77, 72)},
        ),
        (ValueError, "`Slopes` has heads = 5", {"Slopes": tensor(5, dtype="float32")}),
        (ValueError, "`O` has q_len = 299", {"out": tensor(2, 6, 299, 64)}),
        (
            ValueError,
            "kv_heads = 4 must divide heads = 6",
            {"K": tensor(2, 4, 77, 64), "V": tensor(2, 4, 77, 64)},
        ),
        (
            ValueError,
            "`K` must be contiguous along its last axis; its strides are (29568, 9856, 128, 2)",
            {"K": wide},
        ),
        (
            ValueError,
            "`K` must have strides that are multiples of 8 elements; they are (15015, 5005, 65, 1)",
            {"K": tight},
        ),
        (ValueError, "`K` must begin at a multiple of 16 bytes", {"K": odd}),
        (ValueError, "`O` is written, but its elements share memory", {"out": shared}),
        (TypeError, "`K` must be a tensor, not int", {"K": 7}),
        (TypeError, "the input `Slopes` is missing; needed: Q, K, V, Slopes", {"Slopes": None}),
        (TypeError, "there is no input `Slope`: did you mean Slopes?", {"Slope": slopes}),
        (TypeError, "`LSE` is an output: give it as out={'LSE': tensor}", {"LSE": o}),
        (TypeError, "there is no output `P`: there are O, LSE", {"outputs": ["P"]}),
        (TypeError, "out names `P`, which is no output", {"out": {"P": o}}),
        (ValueError, "layout must be 'bhsd' or 'bshd', not 'sbhd'", {"layout": "sbhd"}),
        (
            ValueError,
            "this problem needs 70000 blocks along axis 2",
            {
                "Q": tensor(70000, 6, 0, 64),
                "K": tensor(70000, 3, 0, 64),
                "V": tensor(70000, 3, 0, 64),
                "out": tensor(70000, 6, 0, 64),
            },
        ),
    ]
    for kind, words, changes in wrong:
        arguments = {"Q": q, "K": k, "V": v, "Slopes": slopes, "out": o, **changes}
        with refused(kind, words):
            run(**arguments)
    with refused(TypeError, "5 tensors are given, but the kernel has 4 inputs"):
        run(q, k, v, slopes, o)
    with refused(TypeError, "`Q` is given twice"):
        run(q, k, v, slopes, Q=q, out=o)
    with refused(TypeError, "no way is known to make a tests.unit.fake_gpu.Tensor", "out="):
        run(q, k, v, slopes)
    with refused(ValueError, "`Q` must have 4 axes"):  # found while the output is being made
        run(tensor(3, 77), k, v, slopes)
    with refused(ValueError, "`Q` must be on a CUDA device; it is on the CPU"):
        run(q.array, k, v, slopes)
    with refused(TypeError, "`Q` must be a tensor, not"):
        run([1, 2], k, v, slopes)
    assert Driver().count("launches") == before


# --- plans and packages -----------------------------------------------------------------------


WRONG_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"grid": ()}, "a grid has 1 to 3 axes, not 0"),
    ({"threads": 2000}, "1 to 1024 threads"),
    ({"shared": -1}, "-1 bytes"),
    ({"grid": (("length",),)}, "speaks of `length`, which is no dimension"),
    ({"grid": (("q_len", "+"),)}, "is no expression"),
    ({"grid": (("q_len", 2),)}, "is no expression"),
    ({"grid": ((1,) * 30 + ("+",) * 29,)}, "is no expression"),
    ({"dims": (*DIMS, "batch")}, "given twice"),
    ({"tensors": ATTENTION[:3]}, "reads a tensor and writes one"),
    ({"tensors": (plan_tensor("Q", "B:batch", "fp64"),)}, "element type fp64"),
    ({"tensors": (plan_tensor("Q", " ".join(["T:1"] * 9)),)}, "9 axes"),
    ({"tensors": (plan_tensor("Q", "B:batch", vector=0),)}, "0 elements at once"),
    ({"tensors": (plan_tensor("Q", "H:heads G:kv_heads"),)}, "split by something"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_PLANS)
def test_a_plan_that_cannot_be_launched_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Failed, match=re.escape(words)) as failed:
        encode(make_plan(**changes))
    assert {d.code for d in failed.value.diagnostics} == {"FW852"}


@pytest.mark.parametrize(
    ("axes", "bhsd", "bshd"),
    [
        ("B:batch H:heads L:q_len D:64", [(0,), (1,), (2,), (3,)], [(0,), (2,), (1,), (3,)]),
        ("B:batch L:q_len H:heads D:64", [(0,), (2,), (1,), (3,)], [(0,), (1,), (2,), (3,)]),
        ("B:batch H:heads L:q_len", [(0,), (1,), (2,)], [(0,), (1,), (2,)]),
        ("P:pages H:kv_heads L:64 D:64", [(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)]),
        (
            "B:batch L:q_len H:kv_heads G:4 D:64",
            [(0,), (2, 3), (1,), (4,)],
            [(0,), (1,), (2, 3), (4,)],
        ),
        ("H:heads L:q_len M:kv_len", [(0,), (1,), (2,)], [(0,), (1,), (2,)]),
    ],
)
def test_the_callers_order_of_axes(axes: str, bhsd: Any, bshd: Any) -> None:
    assert list(caller_order(plan_tensor("Q", axes), "bhsd")) == bhsd
    assert list(caller_order(plan_tensor("Q", axes), "bshd")) == bshd


def test_a_folder_that_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"no kernel package.*launch.json"):
        load(tmp_path)
    (tmp_path / PLAN).write_text('{"entry": "attention"}')
    with pytest.raises(Failed, match=r"launch\.json: arch: Field required"):
        read_plan(tmp_path)
    (tmp_path / PLAN).write_text(make_plan().dump())
    assert read_plan(tmp_path) == make_plan()
    with pytest.raises(Failed, match=rf"has no {CUBIN} and no {PTX}"):
        load(tmp_path)


def test_without_a_driver_it_says_so(tmp_path: Path) -> None:
    """In a process of its own, whose driver is hidden where there is one."""
    (tmp_path / PLAN).write_text(make_plan().dump())
    (tmp_path / CUBIN).write_bytes(cubin())
    code = (
        "import flashwright, sys\n"
        "from flashwright.build import driver\n"
        "driver.LIBRARY = 'libcuda-that-is-not-there.so.1'\n"
        f"try: flashwright.load({str(tmp_path)!r})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print('tvm_ffi' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, *_, imported = done.stdout.splitlines()
    assert said.startswith("Failed FW851: no GPU can be used here: there is no NVIDIA driver")
    assert imported == "False"


def test_the_launcher_compiles_without_a_warning(tmp_path: Path) -> None:
    from tvm_ffi import libinfo

    from flashwright.build.native import FLAGS, SOURCE

    command = [
        "c++",
        *FLAGS,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        libinfo.find_include_path(),
    ]
    command += ["-fsyntax-only", str(SOURCE / "launcher.cpp"), "-Wno-unused-parameter"]
    subprocess.run(command, check=True)


LOAD_BUILT_IN = """\
import sys
from pathlib import Path
from flashwright.build import native
native.BUILT_IN = Path(sys.argv[1])
print(native.launcher().make)
"""


def test_the_launcher_of_a_wheel_needs_no_compiler(tmp_path: Path) -> None:
    from flashwright.build import native

    built_in = tmp_path / "launcher.so"
    shutil.copy(native.library(), built_in)
    env = {**os.environ, "FLASHWRIGHT_CACHE": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    command = [sys.executable, "-c", LOAD_BUILT_IN, str(built_in)]
    subprocess.run(command, env=env, check=True)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_a_wheels_launcher_that_cannot_be_loaded_here_is_compiled(tmp_path: Path) -> None:
    built_in = tmp_path / "launcher.so"
    built_in.write_bytes(b"for another machine")
    command = [sys.executable, "-c", LOAD_BUILT_IN, str(built_in)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "the wheel's launcher cannot be loaded, so this machine compiles one" in done.stderr
    env = {**os.environ, "FLASHWRIGHT_CACHE": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert "the launcher cannot be made: CXX names no-such-compiler" in done.stderr


def test_without_a_compiler_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashwright.build import native

    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Failed, match="CXX names no-such-compiler") as failed:
        native.library()
    assert "apt install g++" in (failed.value.diagnostics[0].help or "")


def test_a_compiler_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashwright.build import native

    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\necho 'x.h: error: no' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(Failed, match=r"cannot compile it: x\.h: error: no"):
        native.library()
    assert not list((tmp_path / "cache" / "launcher").iterdir())


@pytest.mark.slow
def test_processes_that_build_the_launcher_at_once_both_have_it(tmp_path: Path) -> None:
    code = "from flashwright.build.native import launcher, library; launcher(); print(library())"
    env = {**os.environ, "FLASHWRIGHT_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {Path(child.communicate()[0].strip()) for child in both}
    assert [child.returncode for child in both] == [0, 0]
    assert found == set((tmp_path / "launcher").iterdir())
    assert len(found) == 1
