"""The launcher that exports carry, without a GPU: held against the compiled one.

Both meet the fake driver of fake_gpu.py, which remembers what it is asked for.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright.build import classes
from flashwright.build.load import Kernel
from flashwright.build.package import OWN
from flashwright.export import launch
from flashwright.export.package import ExportedKernel, ExportedPackage
from flashwright.lower import launch_plan
from flashwright.lower.launch_plan import LaunchPlan, PlanMap
from tests.unit import fake_gpu
from tests.unit.fake_gpu import Driver, Tensor, inputs, on_fake_gpu, outputs, plan_tensor


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("no C and C++ compiler here")
    with fake_gpu.process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


def launcher(plan: LaunchPlan) -> launch.Kernels:
    kernel = ExportedKernel(Path(), plan, b"\x7fELF", 90, "")
    names = {tensor.name: tensor.name for tensor in plan.tensors}
    data = ExportedPackage(Path(), None, classes.ALONE, {OWN: kernel}).launch_data(names)
    return launch.Kernels(json.loads(json.dumps(data)), lambda name: kernel.cubin)


def as_torch(tensor: Tensor | None) -> Any:
    """What launch.py takes of a torch.Tensor."""
    if tensor is None:
        return None
    return SimpleNamespace(
        shape=tensor.shape, stride=lambda: tensor.strides, data_ptr=lambda: tensor.address
    )


def launched(driver: Driver, maps: int) -> tuple[Any, ...]:
    """Everything that the driver was asked for."""
    last = driver.last
    asked = (list(last.grid), list(last.block), last.shared, last.stream, bytes(last.parameters))
    return (*asked, [bytes(driver.map(n)) for n in range(maps)])


def strided() -> list[Tensor]:
    packed = np.zeros((2, 50, 3, 6, 64), np.float16)
    turned = [Tensor(packed[:, :, i].transpose(0, 2, 1, 3)) for i in range(3)]
    return [*turned, fake_gpu.tensor(6, dtype="float32")]


MAPS = tuple(PlanMap(tensor=n, box=(1, 1, 64, 64), swizzle=128) for n in "QKV")
GROUPED = (
    plan_tensor("Q", "B:batch L:q_len H:kv_heads G:2 D:64", vector=8),
    *fake_gpu.ATTENTION[1:4],
    plan_tensor("O", "B:batch L:q_len H:kv_heads G:2 D:64", vector=8),
    fake_gpu.ATTENTION[5],
)
FLAT = (
    plan_tensor("Q", "B:batch L:q_len D:64", vector=8),
    plan_tensor("Pages", "T:16 D:64", vector=8, flat=True),
    plan_tensor("O", "B:batch L:q_len D:64", vector=8),
)
SHORT = {"dims": ("batch", "q_len", "tokens"), "grid": (("q_len", 64, "ceil_div"), ("batch",))}
PAGES = (PlanMap(tensor="Pages", box=(1, 16, 64), swizzle=128),)
RANGES = (PlanMap(tensor="Q", box=(1, 1, 1, 16, 64), swizzle=128, ranges=True),)
IN_PAGES = (PlanMap(tensor="Q", box=(1, 1, 16, 64), swizzle=128, pages=True),)
ODD = PlanMap(tensor="Q", box=(1, 1, 64), swizzle=0, optional=True)


def flat_call(shift: int = 0) -> tuple[list[Tensor], dict[str, Tensor]]:
    wide = np.zeros((2, 33, 64 + shift), np.float16)
    given = [Tensor(wide[:, :, :64]), fake_gpu.tensor(5, 16, 64)]
    return given, {"O": fake_gpu.tensor(2, 33, 64)}


def cases() -> dict[str, tuple[dict[str, Any], Any, Any, dict[str, int]]]:
    """Changes to the plan, the inputs, the outputs, and the dims given by name."""
    some = outputs(q=50)
    loose = {"tensors": (FLAT[0].model_copy(update={"vector": 1}), *FLAT[1:]), **SHORT}
    return {
        "plain": ({}, inputs(), outputs(), {}),
        "maps": ({"maps": MAPS}, inputs(), outputs(), {}),
        "strided": ({"maps": MAPS}, strided(), some, {}),
        "single": ({"maps": MAPS}, inputs(batch=1, q=1, k=1), outputs(batch=1, q=1), {}),
        "no LSE": ({}, inputs(), {"O": outputs()["O"]}, {}),
        "persistent": ({"maps": MAPS, "stays": True}, inputs(), outputs(), {}),
        "no keys": ({"maps": MAPS}, inputs(k=0), outputs(), {}),
        "ranges": ({"tensors": FLAT, "maps": RANGES, **SHORT}, *flat_call(), {"tokens": 7}),
        "pages": ({"tensors": FLAT, "maps": IN_PAGES, **SHORT}, *flat_call(), {"tokens": 7}),
        "grouped": ({"tensors": GROUPED}, inputs(), outputs(), {}),
        "flat": ({"tensors": FLAT, "maps": PAGES, **SHORT}, *flat_call(), {"tokens": 7}),
        "optional map": ({**loose, "maps": (ODD,)}, *flat_call(), {"tokens": 7}),
        "no map": ({**loose, "maps": (ODD,)}, *flat_call(3), {"tokens": 7}),
    }


@pytest.mark.slow
@on_fake_gpu
def test_a_launch_is_that_of_the_compiled_launcher() -> None:
    driver = Driver()
    driver.set("size", 1024)
    for name, (changes, given, out, dims) in cases().items():
        plan = fake_gpu.make_plan(**changes)
        Kernel(plan, b"\x7fELF")(*given, out=out, **dims)
        wanted, before = launched(driver, len(plan.maps)), driver.count("launches")
        tensors = iter(given)
        all_of = [next(tensors) if t.read else out.get(t.name) for t in plan.tensors]
        launcher(plan).launch_on([as_torch(t) for t in all_of], dims, 0, 0)
        assert driver.count("launches") == before + 1, name
        used = struct_size(plan)
        found = launched(driver, len(plan.maps))
        assert (*found[:4], found[4][:used], found[5]) == (
            *wanted[:4],
            wanted[4][:used],
            wanted[5],
        ), name


def struct_size(plan: LaunchPlan) -> int:
    """The bytes of the parameter; what lies behind it is not read."""
    tensors = sum(8 * (1 + len(t.axes)) for t in plan.tensors)
    return 128 * len(plan.maps) + tensors + 4 * len(plan.dims)


@on_fake_gpu
def test_a_launch_has_a_counter_of_its_own() -> None:
    driver, plan = Driver(), fake_gpu.make_plan(counter=True, maps=MAPS)
    driver.set("size", 1024)
    given = [as_torch(t) for t in (*inputs(), outputs()["O"], None)]
    run, found, had = launcher(plan), [], driver.count("had")
    for _ in range(2):
        run.launch_on(given, {}, 0, 0)
        assert driver.count("counted_at_launch") == 0
        layout = "384s" + fake_gpu.FORMAT.replace("5i4x", "Q5i")
        *_, address, batch, heads, kv_heads, q_len, kv_len = driver.parameters(layout)
        assert (batch, heads, kv_heads, q_len, kv_len) == (2, 6, 3, 300, 77)
        found.append(address)
    assert found[0] != found[1]
    assert driver.count("had") - had == 2 == driver.count("freed") - had
    driver.set("fail_pool", 1)
    with pytest.raises(RuntimeError, match="getting memory for the kernel's counter failed"):
        run.launch_on(given, {}, 0, 0)
    driver.set("fail_pool", 0)


@on_fake_gpu
def test_what_the_compiled_launcher_refuses_is_refused() -> None:
    plan = fake_gpu.make_plan(maps=MAPS)
    compiled, ours = Kernel(plan, b"\x7fELF"), launcher(plan)
    q, k, v, slopes = inputs()
    wide = Tensor(np.zeros((2, 6, 300, 65), np.float16)[..., :64])
    late = Tensor(np.zeros((2, 6, 300, 72), np.float16)[..., 1:65])
    wrong = {
        "rank": ([Tensor(q.array[0]), k, v, slopes], outputs()),
        "width": ([fake_gpu.tensor(2, 6, 300, 32), k, v, slopes], outputs()),
        "lengths": ([q, k, fake_gpu.tensor(2, 3, 78, 64), slopes], outputs()),
        "heads": ([q, *(fake_gpu.tensor(2, 4, 77, 64) for _ in "kv"), slopes], outputs()),
        "strides": ([wide, k, v, slopes], outputs()),
        "address": ([late, k, v, slopes], outputs()),
        "last axis": ([Tensor(np.zeros((2, 6, 64, 300), np.float16).swapaxes(2, 3)), k, v, slopes],
                      outputs()),
        "shared memory": ([q, k, v, slopes],
                          {"O": Tensor(np.broadcast_to(q.array[:1], (2, 6, 300, 64)))}),
        "output": ([q, k, v, slopes], {"O": fake_gpu.tensor(2, 6, 299, 64)}),
    }  # fmt: skip
    before = Driver().count("launches")
    for name, (given, out) in wrong.items():
        with pytest.raises(ValueError) as theirs:  # noqa: PT011
            compiled(*given, out=out)
        with pytest.raises(ValueError, match=r"`|kv_heads") as found:
            ours.launch_on([as_torch(t) for t in (*given, out["O"], out.get("LSE"))], {}, 0, 0)
        subject = re.match(r"(?:ValueError: )?(`\w+`|kv_heads)", str(theirs.value))
        assert subject is not None, name
        assert str(found.value).startswith(subject[1]), name
    assert Driver().count("launches") == before


@on_fake_gpu
def test_the_kernel_for_a_length_is_the_one_that_the_rules_name() -> None:
    driver = Driver()
    plans = [fake_gpu.make_plan(shared=shared) for shared in (10, 20)]
    kernels = {
        n: ExportedKernel(Path(), p, b"\x7fELF", 90, "") for n, p in zip("ab", plans, strict=True)
    }
    rules = classes.Classes.of([(100, "a"), (None, "b")])
    names = {tensor.name: tensor.name for tensor in plans[0].tensors}
    data = ExportedPackage(Path(), None, rules, kernels).launch_data(names)
    run = launch.Kernels(data, lambda name: b"\x7fELF")
    for keys, shared in ((100, 10), (101, 20)):
        out = outputs()
        run.launch_on([as_torch(t) for t in (*inputs(k=keys), out["O"], None)], {}, 0, 0)
        assert driver.last.shared == shared


@on_fake_gpu
def test_the_ptx_is_used_where_the_cubin_does_not_fit() -> None:
    driver, given = Driver(), [as_torch(t) for t in (*inputs(), outputs()["O"], None)]
    plan = fake_gpu.make_plan()
    names = {tensor.name: tensor.name for tensor in plan.tensors}
    files = {"kernel_0.cubin": b"\x7fELF", "kernel_0.ptx": b".version 8.0"}
    for version, ptx, taken in ((90, ".version 8.0", 0), (80, ".version 8.0", 1), (80, "", None)):
        kernel = ExportedKernel(Path(), plan, b"\x7fELF", version, ptx)
        data = ExportedPackage(Path(), None, classes.ALONE, {OWN: kernel}).launch_data(names)
        run = launch.Kernels(data, files.__getitem__)
        if taken is None:
            with pytest.raises(RuntimeError, match="compiled for sm_80, which a GPU of sm_90 cann"):
                run.launch_on(given, {}, 0, 0)
        else:
            run.launch_on(given, {}, 0, 0)
            assert driver.count("ptx") == taken


@on_fake_gpu
def test_what_the_driver_says_is_told() -> None:
    driver, given = Driver(), [as_torch(t) for t in (*inputs(), outputs()["O"], None)]
    driver.set("fail_launch", 1)
    with pytest.raises(RuntimeError, match="launching the kernel failed: CUDA_ERROR_INVALID_VALUE"):
        launcher(fake_gpu.make_plan()).launch_on(given, {}, 0, 0)
    driver.set("fail_launch", 0)


def test_sizes_are_what_the_launch_plan_says() -> None:
    assert launch.OPERATORS.keys() == launch_plan.OPERATORS.keys()
    for operator in launch.OPERATORS:
        for a, b in ((7, 3), (6, 3), (0, 5), (-7, 3)):
            size = (a, "n", operator, 2, "*")
            assert launch.evaluate(size, {"n": b}) == launch_plan.evaluate(size, {"n": b})


def test_the_launcher_imports_nothing_of_ours() -> None:
    source = inspect.getsource(launch)
    assert "import flashwright" not in source
    assert "from flashwright" not in source
