"""Kernel packages for the emulator's tests: made once, copied for each test that changes one."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import package, toolchain
from flashwright.build.compile import build
from flashwright.build.make import make
from flashwright.check.check import check
from flashwright.emulate.package import read_served_kernels
from flashwright.judge.emulated import launch, poisoned
from flashwright.judge.form import planned_shape
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec

needs_compilers = pytest.mark.skipif(
    not (toolchain.has_nvcc() and (shutil.which("c++") or shutil.which("g++"))),
    reason="there is no CUDA compiler or no C++ compiler here",
)
SPEC = make_spec("gqa", causal=True, head_dim=64, dtype="bf16")
GPU = "a100"


@functools.cache
def files() -> Mapping[str, str | bytes]:
    """A package of grouped-query attention, d64, as `generate` writes it."""
    card = gpus.find(GPU)
    code = write_code(write_sketch(SPEC), SPEC, card).code
    program = check(parse(code), card).program
    assert program is not None
    made, built = make(program, card)
    texts = {"code.tl": code, "spec.toml": specs.dump(SPEC)}
    return {**texts, **package.translated(made), **package.compiled(built)}


def write(folder: Path, edit: Callable[[str], str] | None = None) -> Path:
    """The package in a folder; `edit` changes kernel.cu, which is then compiled again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files().items():
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    if edit is not None:
        source = str(files()["kernel.cu"])
        changed = edit(source)
        assert changed != source, "the edit has to fit the kernel"
        built = build(changed, gpus.find(GPU).arch, may_spill=True)
        (folder / "kernel.cu").write_text(changed)
        (folder / "kernel.ptx").write_text(built.ptx)
        (folder / "kernel.cubin").write_bytes(built.cubin)
    return folder


def tl_line(start: str) -> int:
    """The line of the program that begins so."""
    lines = str(files()["code.tl"]).splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(start))


def without_second_barrier(source: str) -> str:
    """The barrier behind the first GEMM goes: K is overwritten while others still read it."""
    lines = source.splitlines(keepends=True)
    found = [n for n, line in enumerate(lines) if line.strip() == "__syncthreads();"]
    return "".join(lines[: found[1]] + lines[found[1] + 1 :])


def without_bound(source: str) -> str:
    """Rows past the end of O are stored as well."""
    return source.replace("O, q_len - block_idx * BM);", "O, BM);")


def spec() -> AttentionSpec:
    """What the package should compute."""
    return SPEC


def launched_in_order(folder: Path, given: dict[str, Any], dims: dict[str, int]) -> dict[str, Any]:
    """All tensors after the kernels of a package have run under emulation."""
    served, tensors = read_served_kernels(folder), dict(given)
    for kernel in served.packages.values():
        for tensor in kernel.plan.tensors:
            if tensor.name not in tensors:
                new = poisoned(tensor.padded(planned_shape(tensor, dims)), tensor.dtype)
                tensors[tensor.name] = np.zeros_like(new) if tensor.name in served.zeroed else new
        used = {t.name: tensors[t.name] for t in kernel.plan.tensors}
        assert not launch(kernel, used, dims, "eager", 600.0).findings
    return tensors
