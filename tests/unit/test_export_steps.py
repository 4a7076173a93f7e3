"""`flashwright export` of packages whose kernels run one after another, and of outputs in place."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes, package, steps, toolchain
from flashwright.build.load import CUBIN, Kernel
from flashwright.build.package import translated
from flashwright.build.steps import Steps
from flashwright.check.check import check
from flashwright.export import header, hub, launch
from flashwright.export import package as packages
from flashwright.files import write
from flashwright.generate.packed import PackedOrder
from flashwright.judge import oracle, sequences
from flashwright.judge.inputs import make_inputs
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.spec import AttentionSpec
from tests.example_programs import EXAMPLES
from tests.unit import fake_gpu
from tests.unit.fake_gpu import Driver, on_fake_gpu
from tests.unit.test_export import by_path, definition_and_solution, exported, refused
from tests.unit.test_export_launch import as_torch, launched
from tests.unit.test_several_kernels import BACKWARD

torch = pytest.importorskip("torch")

NO_NVCC = "" if toolchain.has_nvcc() else "nvcc is not here"
DIM, GROUP, PAGE = 64, 2, 16
WAYS = {
    "packed": {"packed": True, "causal": True},
    "queries packed, keys in a cache": {"packed": True, "cache": True},
    "decode over pages": {"decode": 2, "page": PAGE, "causal": True},
    "decode in fp8": {"decode": 1, "kv_dtype": "fp8"},
}


def spec_of(name: str) -> AttentionSpec:
    return make_spec("gqa", heads=4, kv_heads=2, head_dim=DIM, dtype="bf16", **WAYS[name])


def made(folder: Path, text: str, gpu: str, spec: AttentionSpec | None = None) -> Path:
    """A package whose kernels are translated and not compiled: each cubin is a header alone."""
    card = gpus.find(gpu)
    kernels = check(parse(text), card).kernels
    record = Steps.of(Kernels(kernels))
    places = [folder / name for name in record.steps] if len(kernels) > 1 else [folder]
    for place, kernel in zip(places, kernels, strict=True):
        place.mkdir(parents=True)
        for file, source in translated(translate(kernel, card)).items():
            write(place / file, source)
        (place / CUBIN).write_bytes(fake_gpu.cubin(card.capability))
    if len(kernels) > 1:
        write(folder / package.STEPS, record.dump())
    if spec is not None:
        write(folder / classes.SPEC, specs.dump(spec))
    return folder


def decode(folder: Path, name: str = "decode over pages", gpu: str = "h200") -> Path:
    spec = spec_of(name)
    return made(folder / "package", PackedOrder(spec, gpus.find(gpu)).code(), gpu, spec)


def append(folder: Path) -> Path:
    return made(folder / "append", (EXAMPLES / "append.tl").read_text(), "a100")


def backward(folder: Path) -> Path:
    return made(folder / "backward", BACKWARD.read_text(), "a100")


# --- launch.py --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    if not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("no C and C++ compiler here")
    with fake_gpu.process(tmp_path_factory.mktemp("driver")) as executor:
        yield executor


@on_fake_gpu
def test_each_kernel_is_launched_as_the_compiled_launcher_does() -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        _same_launches(decode(Path(place)), patch)


def _same_launches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.set("size", 1024)
    found = packages.read(folder)
    names = {tensor.name: tensor.name for tensor in found.joined.tensors}
    files = found.files()
    ours = launch.Kernels(found.launch_data(names), files.__getitem__)
    sizes = {"batch": 3, "q_len": 2, "kv_heads": 2, "pages": 9, "max_pages": 4, "splits": 5}
    tensors = []
    for plan in ours.plan["tensors"]:
        axes = [[plan["axes"][p]["size"] for p in parts] for parts in plan["order"]]
        shape = [int(np.prod([launch.evaluate(s, sizes) for s in axis])) for axis in axes]
        tensors.append(fake_gpu.tensor(*shape, dtype=plan["dtype"]))
    dims = {"splits": 5, "kv_len": 0}
    given = [dims.get(name) for name in found.joined.dims]
    launches: list[Any] = []
    record = steps.read(folder)
    assert record is not None
    theirs = steps.load(folder, record)
    plans = [kernel.plan for kernel in theirs._kernels]
    for kernel in theirs._kernels:

        def run(mode: int, *arguments: Any, own: Any = kernel.run, plan: Any = kernel.plan) -> None:
            own(mode, *arguments)
            launches.append(launched(driver, len(plan.maps)))

        monkeypatch.setattr(kernel, "run", run)
    theirs.run(0, *tensors, *given)
    real = launch.Kernel.launch

    def seen(kernel: launch.Kernel, *arguments: Any) -> None:
        real(kernel, *arguments)
        launches.append(launched(driver, len(kernel.plan["maps"])))

    monkeypatch.setattr(launch.Kernel, "launch", seen)
    ours.launch_on([as_torch(tensor) for tensor in tensors], dims, 0, 0)
    assert len(launches) == 4
    for plan, wanted, own in zip(plans, launches[:2], launches[2:], strict=True):
        used = 128 * len(plan.maps) + sum(8 * (1 + len(t.axes)) for t in plan.tensors)
        used += 4 * len(plan.dims)
        assert (*own[:4], own[4][:used], own[5]) == (*wanted[:4], wanted[4][:used], wanted[5])


def test_scratch_is_allocated_and_sums_begin_at_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = packages.read(backward(tmp_path))
    arguments = {t.name: t.name for t in found.plan.tensors}
    run = launch.Kernels(found.launch_data(arguments), found.files().__getitem__)
    assert (found.scratch, found.zeroed) == (("Delta", "dQsum"), ("dQsum",))
    calls: list[dict[str, Any]] = []
    names = [t["name"] for t in run.plan["tensors"]]
    monkeypatch.setattr(launch.Kernels, "_check_kinds", lambda *_: None)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        launch.Kernels,
        "launch_on",
        lambda self, tensors, *_: calls.append(dict(zip(names, tensors, strict=True))),
    )
    wide = [torch.randn(1, 2, 20, DIM).bfloat16() for _ in range(5)]
    inputs = [*wide, torch.randn(1, 2, 20)]
    outputs = run.empty(inputs)
    run.launch(inputs, outputs)
    (call,) = calls
    assert [call[n] is out for n, out in zip(("dK", "dV", "dQ"), outputs, strict=True)] == [
        True
    ] * 3
    assert call["dQsum"].dtype == torch.float32
    assert not call["dQsum"].any()
    wanted = Kernel.shapes  # what the loader allocates for the same call
    record = steps.read(found.folder)
    assert record is not None
    loaded = object.__new__(steps.StepsKernel)
    loaded._describe(found.joined, lambda *_: None, record.scratch, record.zeroed)
    given = [call[name] if name not in found.scratch else None for name in names]
    shapes = wanted(loaded, found.scratch, given, [None] * len(found.joined.dims))
    for name, (shape, _) in shapes.items():
        memory = call[name].untyped_storage().nbytes() // call[name].itemsize
        assert memory == np.prod(shape), name


# --- hub --------------------------------------------------------------------------------------


def test_a_decode_is_a_function_of_its_tensors_and_splits(tmp_path: Path) -> None:
    module = by_path(exported(decode(tmp_path), "hub") / hub.VARIANT)
    told = "(q, k, v, table, lengthsk, kv_len, splits, *, return_lse=False)"
    assert str(inspect.signature(module.attention)) == told
    q = torch.empty(3, 4, 2, DIM, dtype=torch.bfloat16, device="meta")
    k = torch.empty(9, 2, PAGE, DIM, dtype=torch.bfloat16, device="meta")
    table, lengths = (torch.empty(*s, dtype=torch.int32, device="meta") for s in ((3, 4), (3,)))
    compiled = torch.compile(module.attention, fullgraph=True, backend="eager")
    out, lse = compiled(q, k, k, table, lengths, 64, 5, return_lse=True)
    assert (out.shape, out.dtype) == (q.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    with pytest.raises(ValueError, match="`q` must be on a CUDA device; it is on cpu"):
        module.attention(
            *(torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, k, table, lengths)), 64, 5
        )


def test_what_is_changed_in_place_is_an_input_that_changes(tmp_path: Path) -> None:
    out = exported(append(tmp_path), "hub")
    module = by_path(out / hub.VARIANT)
    told = "(newk, newv, table, lengths, k, v, heads, kv_len)"
    assert str(inspect.signature(module.attention)) == told
    assert "| `k` | input, changed in place | bfloat16 |" in (out / "README.md").read_text()
    name = json.loads((out / hub.VARIANT / "metadata.json").read_text())["id"]
    (operator,) = (x for x in vars(sys.modules[name]).values() if hasattr(x, "_opoverload"))
    changed = [a.name for a in operator._opoverload._schema.arguments if a.alias_info is not None]
    assert changed == ["k", "v"]
    new = torch.empty(2, 2, 3, DIM, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(9, 2, PAGE, DIM, dtype=torch.bfloat16, device="meta")
    table, lengths = (torch.empty(*s, dtype=torch.int32, device="meta") for s in ((2, 4), (2,)))
    assert module.attention(new, new, table, lengths, cache, cache.clone(), 2, 0) is None


def test_all_gradients_are_returned(tmp_path: Path) -> None:
    module = by_path(exported(backward(tmp_path), "hub") / hub.VARIANT)
    wide = torch.empty(1, 2, 20, DIM, dtype=torch.bfloat16, device="meta")
    log = torch.empty(1, 2, 20, device="meta")
    assert str(inspect.signature(module.attention)) == "(o, do, q, k, v, lse)"
    found = module.attention(*[wide] * 5, log)
    assert [x.shape for x in found] == [wide.shape] * 3


# --- FlashInfer-Bench -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAYS)
def test_a_definition_computes_each_sequence(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    definition, solution = definition_and_solution(exported(decode(tmp_path, name), "flashinfer"))
    sizes = {"batch": 5, "heads": 4, "kv_heads": 2, "q_len": 40, "kv_len": 130}
    dims = sequences.sized(spec, sizes)
    arrays = make_inputs(spec, dims, 3)
    lower = {tensor.lower(): tensor for tensor in arrays}
    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    given: list[Any] = []
    for argument, told in definition["inputs"].items():
        if told["shape"] is None:
            given.append(dims.get(argument, 0))
            continue
        array = arrays[lower[argument]]
        made = torch.from_numpy(array.astype(np.float64 if array.dtype.kind != "i" else np.int32))
        given.append(made.to(kinds.get(told["dtype"], made.dtype)))
    names: dict[str, Any] = {}
    exec(definition["reference"], names)
    out, lse = names["run"](*given)
    wide = {n: np.asarray(a, np.float64) if a.dtype.kind != "i" else a for n, a in arrays.items()}
    wanted = oracle.attention(spec, wide)
    owned = ~np.isnan(wanted["LSE"]) if spec.packed else np.ones(wanted["LSE"].shape, bool)
    assert owned.any()
    np.testing.assert_allclose(out.double().numpy()[owned], wanted["O"][owned], atol=2e-2)
    np.testing.assert_allclose(lse.numpy()[owned], wanted["LSE"][owned], atol=1e-3)
    assert solution["definition"] == definition["name"]


def test_what_is_no_definition_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(append(tmp_path), "flashinfer", out, "`k` is changed in place", "use --as hub")
    refused(backward(tmp_path), "flashinfer", out, "the package has no spec.toml", "use --as hub")


# --- header -----------------------------------------------------------------------------------


def test_the_example_launches_all_kernels_in_order(tmp_path: Path) -> None:
    out = exported(decode(tmp_path), "header")
    there = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert {"1/kernel.cu", "2/kernel.cu", "1/launch.json", "example.cu"} <= there
    text = (out / header.EXAMPLE).read_text()
    order = [text.index(f"host::launch(kernel_{n}::attention_{n}, blocks") for n in (1, 2)]
    assert order == sorted(order)
    assert text.count("host::tensor(") == len(packages.read(tmp_path / "package").joined.tensors)
    assert "host::finish<decltype(kernel_2::Params::O)>(O, folder);" in text
    assert "(PartO, folder)" not in text


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_NVCC), reason=NO_NVCC)
@pytest.mark.parametrize("make", [decode, append, backward])
def test_the_example_of_several_kernels_compiles(make: Any, tmp_path: Path) -> None:
    folder = make(tmp_path)
    out, tools = exported(folder, "header"), toolchain.find()
    (line,) = re.findall(r"^\$ (nvcc .*)$", (out / "README.md").read_text(), re.MULTILINE)
    plan = packages.read(folder).plan
    assert line == header.compile_line(plan)
    command = header.compile_line(plan, str(tools.nvcc), str(tools.cutlass)).split()
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- bad input --------------------------------------------------------------------------------


def test_bad_packages_are_refused(tmp_path: Path) -> None:
    folder, out = decode(tmp_path), tmp_path / "out"
    with pytest.raises(Exception, match="one call launches all kernels of this package"):
        packages.read(folder, "1")
    digests = {package.STEPS: "another"}
    write(folder / package.RECORD, json.dumps({"artefacts": digests}))
    refused(folder, "hub", out, f"steps.json in {folder} is not what build.json has the digest of")
    (folder / package.RECORD).unlink()
    (folder / "2" / CUBIN).unlink()
    refused(folder, "hub", out, "2 has no kernel.cubin and no kernel.ptx")
