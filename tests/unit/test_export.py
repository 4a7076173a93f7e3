"""`flashwright export`: each form as its consumer loads it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes, toolchain
from flashwright.build.load import CUBIN, PLAN
from flashwright.build.package import translated
from flashwright.build.reading import read_plan
from flashwright.check.check import check
from flashwright.cli.main import app
from flashwright.export import header, hub, write
from flashwright.judge import oracle
from flashwright.lang.diagnostic import Failed
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.translate import translate
from tests.unit.fake_gpu import cubin

torch = pytest.importorskip("torch")

NO_NVCC = "" if toolchain.has_nvcc() else "nvcc is not here"
HEADS, KV_HEADS, DIM = 4, 2, 64
NSA = {"heads": 64, "head_dim": 128}
Package = Callable[..., Path]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """A package whose kernel is translated but not compiled: its cubin is a header alone."""

    def made(
        variant: str = "gqa", gpu: str = "a100", name: str = "package", **options: Any
    ) -> Path:
        sizes = {"heads": HEADS, "head_dim": DIM, "causal": True}
        if variant == "gqa":
            sizes["kv_heads"] = KV_HEADS
        spec = make_spec(variant, **{**sizes, **options})
        card = gpus.find(gpu)
        program = check(parse(write_code(write_sketch(spec), spec, card).code), card).program
        assert program is not None
        folder = tmp_path / name
        folder.mkdir()
        for file, text in translated(translate(program, card)).items():
            (folder / file).write_text(text)
        (folder / CUBIN).write_bytes(cubin(card.capability))
        (folder / classes.SPEC).write_text(specs.dump(spec))
        return folder

    return made


def several(folder: Path) -> None:
    """Give a package a second kernel, for short problems."""
    shutil.copytree(folder, folder / "short")
    rules = classes.Classes.of([(1024, "short"), (None, "")])
    (folder / "classes.json").write_text(rules.dump())


def export(folder: Path, form: str, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["export", str(folder), "--as", form, "-o", str(out), *more])


def exported(folder: Path, form: str, *more: str) -> Path:
    out = folder.parent / f"{folder.name}-{form}"
    done = export(folder, form, out, *more)
    assert done.exit_code == 0, done.output
    return out


def problem(device: str = "cpu", length: int = 9) -> list[Any]:
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    made = [torch.randn(2, n, length, DIM, dtype=torch.float16) for n in heads]
    return [x.to(device) for x in made]


# --- hub --------------------------------------------------------------------------------------


def by_path(variant: Path) -> ModuleType:
    """As `kernels` imports a variant."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def by_kernels(variant: Path) -> ModuleType:
    kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
    found: ModuleType = kernels.get_local_kernel(variant)
    return found


@pytest.fixture(params=[by_path, by_kernels])
def load(request: pytest.FixtureRequest) -> Callable[[Path], ModuleType]:
    def loaded(folder: Path) -> ModuleType:
        found: ModuleType = request.param(folder / hub.VARIANT)
        return found

    return loaded


Load = Callable[[Path], ModuleType]


def test_a_hub_package_is_a_function_of_its_tensors(package: Package, load: Load) -> None:
    folder = package()
    several(folder)
    module = load(exported(folder, "hub"))
    assert module.__all__ == ["attention"]
    assert str(inspect.signature(module.attention)) == "(q, k, v, *, return_lse=False)"
    with pytest.raises(ValueError, match="`q` must be on a CUDA device; it is on cpu"):
        module.attention(*problem())


def test_torch_traces_a_hub_package(package: Package, load: Load) -> None:
    module = load(exported(package(), "hub"))
    compiled = torch.compile(module.attention, fullgraph=True, backend="eager", dynamic=True)
    for length in (9, 12):
        out, lse = compiled(*problem("meta", length), return_lse=True)
        assert (out.shape, out.dtype) == ((2, HEADS, length, DIM), torch.float16)
        assert (lse.shape, lse.dtype) == ((2, HEADS, length), torch.float32)
    q, k, v = problem("meta")
    with pytest.raises(ValueError, match="`v` has kv_heads = 1, but another input has kv_heads = "):
        module.attention(q, k, v[:, :1])


def test_a_gradient_through_a_hub_package_is_an_error(package: Package, load: Load) -> None:
    module = load(exported(package(), "hub"))
    q, k, v = (x.requires_grad_() for x in problem("meta"))
    with pytest.raises(RuntimeError, match="autograd"):
        module.attention(q, k, v).sum().backward()


def test_the_metadata_of_a_hub_package(package: Package) -> None:
    hopper = exported(package(gpu="h200", name="h"), "hub", "--kernel", ".")
    ampere = exported(package(name="a"), "hub")
    told = [json.loads((f / hub.VARIANT / "metadata.json").read_text()) for f in (hopper, ampere)]
    assert told[0]["name"] == "gqa-causal-h4x2-d64-fp16" == told[1]["name"]
    assert told[0]["id"] != told[1]["id"]
    assert [one["backend"] for one in told] == [
        {"type": "cuda", "archs": ["9.0a"]},
        {"type": "cuda", "archs": ["8.0"]},
    ]
    assert told[0]["python-depends"] == []


def test_hostile_words_in_a_spec_stay_words(package: Package) -> None:
    folder = package()
    spec = specs.load(folder / classes.SPEC)
    text = 'x"""\nimport os\n*/ .py'
    (folder / classes.SPEC).write_text(specs.dump(spec.model_copy(update={"reference": text})))
    init = (exported(folder, "hub") / hub.VARIANT / "__init__.py").read_text()
    assert "import os" not in [ast.unparse(n) for n in ast.walk(ast.parse(init)) if
                               isinstance(n, ast.Import)]  # fmt: skip
    example = (exported(folder, "header") / header.EXAMPLE).read_text()
    assert "import os\n" not in example


# --- FlashInfer-Bench -------------------------------------------------------------------------


def definition_and_solution(out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    (one,), (other,) = out.glob("definitions/**/*.json"), out.glob("solutions/**/*.json")
    return json.loads(one.read_text()), json.loads(other.read_text())


def run_reference(definition: dict[str, Any], *tensors: Any) -> Any:
    names: dict[str, Any] = {}
    exec(definition["reference"], names)
    return names["run"](*tensors)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 4, "softcap": 5.0, "alibi": True, "sink": True},
        {"causal": False, "v_dim": 32},
    ],
)
def test_a_definition_says_what_the_kernel_computes(
    package: Package, options: dict[str, Any]
) -> None:
    folder = package(**options)
    definition, solution = definition_and_solution(exported(folder, "flashinfer"))
    spec, length = specs.load(folder / classes.SPEC), 9
    q, k, v = problem(length=length)
    v = v[..., : spec.value_dim]
    more = {"Slopes": spec.alibi, "Sink": spec.sink}
    extra = {n: torch.rand(HEADS) for n, there in more.items() if there}
    assert list(definition["inputs"]) == ["q", "k", "v", *(n.lower() for n in extra)]
    assert definition["inputs"]["k"]["shape"] == ["batch", "kv_heads", "kv_len", "head_dim"]
    assert definition["axes"]["head_dim"] == {"type": "const", "value": DIM}
    assert solution["definition"] == definition["name"]
    out, lse = run_reference(definition, q, k, v, *extra.values())
    given = {"Q": q, "K": k, "V": v, **extra}
    arrays = {name: np.asarray(t, np.float64) for name, t in given.items()}
    wanted = oracle.attention(spec, arrays)
    np.testing.assert_allclose(out.double(), wanted["O"], atol=2e-3)
    np.testing.assert_allclose(lse, wanted["LSE"], atol=1e-4)


def test_a_packages_own_reference_is_the_definitions(package: Package) -> None:
    folder = package()
    spec = specs.load(folder / classes.SPEC).model_copy(update={"reference": "reference.py"})
    (folder / classes.SPEC).write_text(specs.dump(spec))
    text = """
import numpy as np
def reference(inputs, dims):
    assert inputs["Q"].dtype == np.float64
    O = inputs["Q"] * dims["kv_len"] + dims["kv_heads"]
    return {"O": O, "LSE": O.sum(-1)}
"""
    (folder / "reference.py").write_text(text)
    definition, _ = definition_and_solution(exported(folder, "flashinfer"))
    q, k, v = problem()
    out, lse = run_reference(definition, q, k, v)
    torch.testing.assert_close(out, (q.double() * 9 + KV_HEADS).half())
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert re.fullmatch(r"gqa_causal_h4x2_d64_fp16_own_\w{12}", definition["name"])
    (folder / "reference.py").write_text("def attention(q, k, v): return q")
    done = export(folder, "flashinfer", folder.parent / "again")
    assert done.exit_code == 2
    assert "reference.py: this reference cannot stand in a Definition" in done.output


def test_a_solution_is_text_that_holds_the_kernels(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package()
    several(folder)
    _, solution = definition_and_solution(exported(folder, "flashinfer"))
    place = tmp_path / f"solution_{folder.parent.name}"
    place.mkdir()
    for source in solution["sources"]:
        (place / source["path"]).write_text(source["content"])
    monkeypatch.syspath_prepend(tmp_path)
    main = importlib.import_module(f"{place.name}.main")
    assert solution["spec"]["entry_point"] == "main.py::run"
    assert str(inspect.signature(main.run)) == "(q, k, v, o, lse)"
    images = [kernel._images for ((kernel, _),) in main._KERNELS._served]
    assert images == [[("cubin", (folder / CUBIN).read_bytes())]] * 2
    with pytest.raises(ValueError, match="`q` must be on a CUDA device; it is on cpu"):
        main.run(*problem(), *problem()[:2])


def test_flashinfer_bench_builds_the_solution(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path / "cache"))
    bench = pytest.importorskip("flashinfer_bench", reason="flashinfer-bench is not installed")
    from flashinfer_bench.compile.builders.python_builder import PythonBuilder

    found = bench.TraceSet.from_path(str(exported(package(), "flashinfer")))
    (definition,) = found.definitions.values()
    (solution,) = found.solutions[definition.name]
    runnable = PythonBuilder().build(definition, solution)
    try:
        with pytest.raises(ValueError, match="`q` must be on a CUDA device"):
            runnable.call_value_returning(*problem())
    finally:
        runnable.cleanup()


# --- header -----------------------------------------------------------------------------------


def test_a_header_export_has_every_header_of_ours(package: Package) -> None:
    out = exported(package(gpu="h200"), "header", "--kernel", ".")
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert {"kernel.cu", "launch.json", "example.cu", "README.md", "fw/wgmma.cuh"} <= found
    for name in found:
        included = re.findall(r"#include <(fw/.*)>", (out / name).read_text())
        assert set(included) <= found, name


def test_the_example_shows_the_launch(package: Package) -> None:
    folder = package(gpu="h200")
    plan = LaunchPlan.model_validate_json((folder / PLAN).read_text())
    text = (exported(folder, "header", "--kernel", ".") / header.EXAMPLE).read_text()
    assert f"constexpr int threads = {plan.threads}, shared = {plan.shared};" in text
    assert "host::launch(attention, blocks, threads, shared, p);" in text
    assert 'int const heads = host::dim(given, "heads", 4);' in text
    boxes = [", ".join(map(str, one.box)) for one in plan.maps]
    assert boxes
    for one, box in zip(plan.maps, boxes, strict=True):
        assert f"host::encode(p.{one.tensor}_map, p.{one.tensor}, {one.tensor}, {{{box}}}" in text


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_NVCC), reason=NO_NVCC)
@pytest.mark.parametrize(
    ("variant", "gpu", "options"),
    [("gqa", "h200", {}), ("gqa", "a100", {"alibi": True}), ("nsa-selected", "a100", NSA)],
)
def test_the_example_compiles(
    package: Package, variant: str, gpu: str, options: dict[str, Any]
) -> None:
    out = exported(package(variant, gpu, **options), "header", "--kernel", ".")
    tools = toolchain.find()
    (line,) = re.findall(r"^\$ (nvcc .*)$", (out / "README.md").read_text(), re.MULTILINE)
    plan = read_plan(out)
    assert line == header.compile_line(plan)
    command = header.compile_line(plan, str(tools.nvcc), str(tools.cutlass)).split()
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (out / "example").is_file()


# --- bad input --------------------------------------------------------------------------------


def refused(folder: Path, form: str, out: Path, *words: str) -> None:
    before = sorted(out.parent.rglob("*"))
    done = export(folder, form, out)
    assert done.exit_code == 2
    for word in words:
        assert word in done.output
    assert sorted(out.parent.rglob("*")) == before


def test_bad_input_writes_nothing(package: Package, tmp_path: Path) -> None:
    folder, out = package(), tmp_path / "out"
    refused(tmp_path, "hub", out, "is no kernel package: it has no launch.json")
    refused(folder, "tar", out, "'tar' is not one of", "hub", "flashinfer", "header")
    refused(folder, "hub", folder, "is there already", "--out")
    several(folder)
    refused(folder, "header", out, "classes.json: the package has 2 kernels", "--kernel NAME")
    (folder / CUBIN).unlink()
    refused(folder, "hub", out, "has no kernel.cubin and no kernel.ptx", f"build {folder}")


def test_an_operator_without_a_reference_is_no_definition(package: Package, tmp_path: Path) -> None:
    folder = package("nsa-selected", **NSA)
    refused(folder, "flashinfer", tmp_path / "out", "NSA's branch 'selected'", "use --as hub")


def test_a_killed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if self.name == "b":
            raise OSError(28, "No space left on device")
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Failed, match="No space left"):
        write.write(tmp_path / "out", {"a": "1", "b": "2"})
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch_it_says_how_to_get_it(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package()
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(folder, "hub", tmp_path / "out", "flashwright[torch]")
    assert export(folder, "header", tmp_path / "out").exit_code == 0


def test_arguments_that_python_cannot_have_are_refused(package: Package, tmp_path: Path) -> None:
    folder = package()
    plan = (folder / PLAN).read_text().replace('"K"', '"Lambda"')
    (folder / PLAN).write_text(plan)
    refused(folder, "hub", tmp_path / "out", "`lambda` cannot be the name of an argument")
