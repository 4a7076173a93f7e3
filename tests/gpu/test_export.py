"""Exported kernels on a GPU: the bits of `flashwright.load`. `python -m tests.gpu.test_export`
prints what a call costs the host: the compiled launcher, and the exported one."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flashwright
from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.build.classes import SPEC as SPEC_FILE
from flashwright.build.reading import read_plan
from flashwright.export import flashinfer, header, hub, package, write
from tests.gpu.made import code_of, package_of

torch = pytest.importorskip("torch")

SPEC = make_spec("gqa", heads=4, kv_heads=2, head_dim=64, dtype="bf16", causal=True)
GPUS = ("a100", "h200")  # cp.async with a plain grid; TMA with tensor maps, persistent


@functools.cache
def folder(gpu: str) -> Path:
    """A copy of the package, with its spec."""
    found = Path(tempfile.mkdtemp(prefix="flashwright-tests-"), "package")
    shutil.copytree(package_of(code_of(SPEC, gpu), gpu).where, found)
    (found / SPEC_FILE).write_text(specs.dump(SPEC))
    atexit.register(shutil.rmtree, found.parent, ignore_errors=True)
    return found


@functools.cache
def hub_module(gpu: str) -> ModuleType:
    """The hub form, imported as `kernels` does it."""
    out = folder(gpu).parent / "hub"
    write.write(out, hub.files(package.read(folder(gpu))))
    name = json.loads((out / hub.VARIANT / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, out / hub.VARIANT / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def problem(length: int = 130, seed: int = 0) -> list[Any]:
    """Q, K and V as views of one packed projection."""
    torch.manual_seed(seed)
    packed = torch.randn(2, length, 8, 64, device="cuda", dtype=torch.bfloat16)
    return [x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2)]


def expected(gpu: str, given: list[Any]) -> tuple[Any, Any]:
    kernel = flashwright.load(folder(gpu))
    found: tuple[Any, Any] = kernel(*given, outputs=("O", "LSE"))
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("length", [1, 130, 700])
def test_the_hub_form_gives_the_same_bits(gpu: str, length: int) -> None:
    given = problem(length)
    out, lse = hub_module(gpu).attention(*given, return_lse=True)
    wanted = expected(gpu, given)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.parametrize("gpu", GPUS)
def test_the_hub_form_is_compiled_and_captured(gpu: str) -> None:
    attention, given = hub_module(gpu).attention, problem()
    wanted = expected(gpu, given)[0]
    compiled = torch.compile(attention, fullgraph=True)
    assert torch.equal(compiled(*given), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*given)
    other = problem(seed=1)
    for old, new in zip(given, other, strict=True):
        old.copy_(new)
    graph.replay()
    assert torch.equal(out, expected(gpu, other)[0])


@pytest.mark.parametrize("gpu", GPUS)
def test_the_hub_form_goes_to_the_current_stream(gpu: str) -> None:
    given = problem()
    wanted = expected(gpu, given)[0]
    later = [torch.zeros_like(x) for x in given]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for old, new in zip(later, given, strict=True):
            old.copy_(new)
        out = hub_module(gpu).attention(*later)
    stream.synchronize()
    assert torch.equal(out, wanted)


def test_kernels_loads_the_hub_form() -> None:
    kernels = pytest.importorskip("kernels", reason="Hugging Face's kernels is not installed")
    out = folder(GPUS[0]).parent / "by-kernels"
    write.write(out, hub.files(package.read(folder(GPUS[0]))))
    given = problem()
    found = kernels.get_local_kernel(out).attention(*given)
    assert torch.equal(found, expected(GPUS[0], given)[0])


@pytest.mark.parametrize("gpu", GPUS)
def test_the_flashinfer_form_gives_the_same_bits(
    gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = flashinfer.files(package.read(folder(gpu)))
    solution, definition = (
        json.loads(next(text for name, text in files.items() if name.startswith(kind)))
        for kind in ("solutions", "definitions")
    )
    place = tmp_path / f"solution_{gpu}"
    place.mkdir()
    for source in solution["sources"]:
        (place / source["path"]).write_text(source["content"])
    monkeypatch.syspath_prepend(tmp_path)
    given = problem()
    wanted = expected(gpu, given)
    found = [torch.empty_like(x) for x in wanted]
    importlib.import_module(f"{place.name}.main").run(*given, *found)
    assert all(map(torch.equal, found, wanted))
    names: dict[str, Any] = {}
    exec(definition["reference"], names)
    torch.testing.assert_close(found[0], names["run"](*given)[0], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("gpu", GPUS)
def test_the_header_form_gives_the_same_bits(gpu: str, tmp_path: Path) -> None:
    out, data = tmp_path / "header", tmp_path / "data"
    write.write(out, header.files(package.read(folder(gpu))))
    data.mkdir()
    tools, plan = toolchain.find(), read_plan(folder(gpu))
    command = header.compile_line(plan, str(tools.nvcc), str(tools.cutlass)).split()
    subprocess.run(command, cwd=out, check=True)
    given = [x.contiguous() for x in problem()]
    for name, tensor in zip("QKV", given, strict=True):
        raw = tensor.cpu().view(torch.int16).numpy()
        (data / f"{name}.bin").write_bytes(raw.tobytes())
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 130, "kv_len": 130}
    asked = [f"{name}={size}" for name, size in sizes.items()]
    subprocess.run([str(out / "example"), *asked, f"folder={data}"], cwd=out, check=True)
    for name, wanted in zip(("O", "LSE"), expected(gpu, given), strict=True):
        raw = bytearray((data / f"{name}.bin").read_bytes())
        found = torch.frombuffer(raw, dtype=wanted.dtype).view(wanted.shape)
        assert torch.equal(found, wanted.cpu()), name


def _cost(call: Any, rounds: int = 2000) -> float:
    """Microseconds that a call takes the host."""
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took / rounds * 1e6


if __name__ == "__main__":
    one = problem(16)
    for card in GPUS:
        kernel, module = flashwright.load(folder(card)), hub_module(card)
        with torch.inference_mode():
            costs = _cost(lambda: kernel(*one)), _cost(lambda: module.attention(*one))  # noqa: B023
        print(f"{card}: compiled launcher {costs[0]:.1f} us, hub form {costs[1]:.1f} us")
