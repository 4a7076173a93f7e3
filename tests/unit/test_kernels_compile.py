"""The golden kernels through the real compiler, each for its own architecture: none spills."""

from __future__ import annotations

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.build.compile import build
from flashwright.build.make import make
from flashwright.check.check import check
from flashwright.lang.parse import parse
from tests.golden.cases import CASES, HERE, Case

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

REGISTERS_OF_AN_SM = 65536


NEW = ("rtx3090", "rtx4090", "gh200", "rtx5090", "b200")
"""One of each architecture: the others are compiled for the same one, and differ in what fits."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_each_architecture_gets_a_kernel(name: str) -> None:
    """Translated and compiled; Blackwell multiplies with mma.sync and copies with cp.async."""
    gpu = gpus.find(name)
    spec = make_spec("mha", head_dim=64, causal=True)
    program = check(parse(write_code(write_sketch(spec), spec, gpu).code), gpu).program
    assert program is not None
    made, built = make(program, gpu)
    assert (built.arch, built.spills) == (gpu.arch, 0)
    assert f".target {gpu.arch}" in built.ptx
    assert ("wgmma" in built.ptx) == gpu.wgmma
    assert ("mma.sync" in built.ptx and "cp.async.cg" in built.ptx) == (not gpu.wgmma)
    assert made.plan.shared <= gpu.shared_per_block


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_golden_kernel_compiles(case: Case) -> None:
    """From the cache where another test had it compiled: its key is all that the compiler sees."""
    source = (HERE / f"{case.name}.cu").read_text("utf-8")
    built = build(source, gpus.find(case.gpu).arch)
    assert built.spill_stores == built.spill_loads == built.stack == 0
    assert not built.warnings, built.warnings
    threads = case.translate().plan.threads
    assert built.registers * threads <= REGISTERS_OF_AN_SM
