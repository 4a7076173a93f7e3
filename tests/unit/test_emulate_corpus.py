"""Kernels after well-known patterns: right without findings; a planted bug is found at its line."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashwright.emulate.own import EmulatedKernel
from tests.unit.corpus import (
    BUGS,
    CASES,
    compiled,
    differences,
    is_found,
    launched,
    planted,
    text_of,
)
from tests.unit.emulated import needs_compilers
from tests.unit.ptx_kernels import SCHEDULES

pytestmark = needs_compilers
EXAMPLE = Path(__file__).parents[2] / "examples" / "published_defects.py"
QUICK = ("transpose", "matmul_cp_async", "bulk_pipeline")


def _marked(keys: Sequence[str]) -> list[object]:
    quick = [key for key in keys if key.partition("-")[0] in QUICK]
    return [key if key in quick else pytest.param(key, marks=pytest.mark.slow) for key in keys]


@functools.cache
def variants(name: str) -> list[EmulatedKernel]:
    """The kernel, and behind it the kernel with each bug."""
    return compiled(name, CASES[name])


@pytest.mark.parametrize("name", _marked(list(CASES)))
def test_a_kernel_is_right_and_has_no_findings(name: str) -> None:
    for schedule in SCHEDULES:
        kernel = variants(name)[0]
        if name == "warp_sum":  # counts its blocks in a variable that persists
            kernel = EmulatedKernel(kernel.ptx, None, kernel.name)
        launch = CASES[name].launch()
        report = launched(kernel, launch, schedule)
        assert report.ok, report
        assert not differences(launch)


@pytest.mark.parametrize("key", _marked(list(BUGS)))
def test_a_planted_bug_is_found_at_its_line(key: str) -> None:
    name, number = BUGS[key]
    bug = CASES[name].bugs[number]
    kernel, text = variants(name)[1 + number], planted(text_of(name), bug)
    reports = [launched(kernel, CASES[name].launch(), way) for way in ("eager", "lazy")]
    assert any(is_found(bug, report, text) for report in reports), "\n".join(map(str, reports))


DEFECTS = {
    "reused": "race",
    "stages": "race",
    "index": "out_of_bounds",
    "store": "proxy",
    "overwritten": "race",
    "zeroed": "race",
    "initialised": "race",
    "mask": "divergent",
    "lockstep": "race",
}


@pytest.mark.slow
def test_the_published_defects_are_found() -> None:
    example = runpy.run_path(str(EXAMPLE))
    assert example["DEFECTS"].keys() == DEFECTS.keys()
    for name, kind in DEFECTS.items():
        assert f": {kind} at kernel.cu:" in example["findings"](name), name
