"""The golden kernels through the real compiler, each for its own architecture: none spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.build import toolchain
from flashwright.build.compile import build
from tests.golden.cases import CASES, HERE, Case

pytestmark = pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")

REGISTERS_OF_AN_SM = 65536


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler says now, not what it said once."""
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path))


ONE_OF_EACH = {c.gpu: c.name for c in reversed(CASES)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in ONE_OF_EACH.values() else pytest.mark.slow)
        for c in CASES
    ],
)
def test_the_golden_kernel_compiles(case: Case) -> None:
    source = (HERE / f"{case.name}.cu").read_text("utf-8")
    built = build(source, gpus.find(case.gpu).arch)
    assert built.spill_stores == built.spill_loads == built.stack == 0
    assert not built.cached
    assert not built.warnings, built.warnings
    threads = case.translate().plan.threads
    assert built.registers * threads <= REGISTERS_OF_AN_SM
