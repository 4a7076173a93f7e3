"""compute-sanitizer: our kernels are clean, and what it finds in others is told by its TL line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.judge.sanitize import TOOLS, sanitize
from flashwright.sandbox.candidate import Candidate
from tests.gpu.made import code_of, package_of

pytestmark = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)
KERNELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a100": ("gqa", "a100", {"causal": True, "head_dim": 128, "dtype": "bf16"}),
    "a100-window": ("mha", "a100", {"window": 100, "head_dim": 64}),
    "t4": ("mha", "t4", {"causal": True, "head_dim": 64, "dtype": "fp16"}),
    "t4-wide": ("mha", "t4", {"head_dim": 256, "dtype": "fp16"}),
    "l40s-fp8": ("mha", "l40s", {"causal": True, "head_dim": 64, "dtype": "fp8"}),
    "h200": ("gqa", "h200", {"causal": True, "head_dim": 128, "dtype": "bf16"}),
    "h200-three": ("mha", "h200", {"causal": True, "head_dim": 64, "dtype": "bf16"}),
}


def package(name: str) -> tuple[Candidate, Any, str]:
    variant, gpu, options = KERNELS[name]
    spec = make_spec(variant, **options)
    code = code_of(spec, gpu)
    return package_of(code, gpu), spec, code


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("name", KERNELS)
def test_clean(name: str, tool: str) -> None:
    made, spec, _ = package(name)
    assert sanitize(made, spec, tools=(tool,)) == ()


BROKEN = {
    # the store of O takes rows that are not there
    "memcheck": ("out_of_bounds", "O, q_len - block_idx * BM);", "O, BM);", "Copy O (BM, HeadDim)"),
    # K's next block is copied while others still multiply with this one
    "racecheck": (
        "race",
        "fw::wait<0>();\n    __syncthreads();\n\n    //  37",
        "fw::wait<0>();\n\n    //  37",
        "",
    ),
}


@pytest.mark.parametrize("tool", BROKEN)
def test_broken(tool: str, tmp_path: Path) -> None:
    made, spec, code = package("a100")
    offence, old, new, statement = BROKEN[tool]
    for file in Path(made.where).iterdir():
        shutil.copy(file, tmp_path)
    source = (tmp_path / "kernel.cu").read_text()
    assert old in source
    (tmp_path / "kernel.cu").write_text(source.replace(old, new))
    (tmp_path / "code.tl").write_text(code)
    (found,) = sanitize(Candidate.package(tmp_path), spec, tools=(tool,))
    assert found.name == offence
    assert "kernel.cu:" in found.message
    span = found.diagnostic.span
    assert span is not None, found.message
    line = code.splitlines()[span.line - 1]
    assert statement in line or not statement, found.message
