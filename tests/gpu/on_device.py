"""Kernels of the tests' own (device/*.cu), written in the device vocabulary.

Each takes a struct of tensors and then whole numbers, as every kernel does (lower/launch_plan.py):
the plan is made here, from the tensors of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flashwright.build import arrays, driver
from flashwright.build.compile import Built, build
from flashwright.build.load import Kernel
from flashwright.lower.atoms import ALIGNMENT, CPP_TYPES
from flashwright.lower.launch_plan import LaunchPlan, PlanAxis, PlanTensor

FOLDER = Path(__file__).parent / "device"
DTYPES = {name: dtype for dtype, name in arrays.NAMES.items()}


@dataclass(frozen=True)
class Code:
    """One instance of a file: the constants and lists that it speaks of are put before it."""

    file: str
    arch: str
    lines: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        text = (FOLDER / f"{self.file}.cu").read_text()
        return "\n".join(["#include <fw/attention.cuh>", *self.lines, text])


def element(dtype: str) -> str:
    return f"using T = {CPP_TYPES[dtype]};"


def listed(name: str, values: Any) -> str:
    """A list of template arguments."""
    return f"#define {name} {', '.join(map(str, values))}"


@functools.cache
def compiled(code: Code) -> Built:
    """The instance for this machine's GPU; a skip where that is too old."""
    card = driver.cards()[0]
    if not card.takes(code.arch):
        pytest.skip(f"{card.name} ({card.arch}) does not run code for {code.arch}")
    return build(code.source, code.arch, real=card.arch)


@functools.cache
def kernel(code: Code, plan: LaunchPlan) -> Kernel:
    built = compiled(code)
    return Kernel(plan, built.cubin, built.ptx.encode())


def run(
    code: Code,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    threads: int,
    blocks: int = 1,
    shared: int = 0,
    **dims: int,
) -> None:
    """Launch with tensors and numbers in the order of the struct."""
    tensors = [_tensor(name, x, False) for name, x in inputs.items()]
    tensors += [_tensor(name, x, True) for name, x in outputs.items()]
    plan = LaunchPlan(
        entry="attention",
        arch=code.arch,
        threads=threads,
        shared=-(-shared // ALIGNMENT) * ALIGNMENT,
        grid=((blocks,),),
        dims=tuple(dims),
        tensors=tuple(tensors),
    )
    kernel(code, plan)(*inputs.values(), out=dict(outputs), **dims)


def _tensor(name: str, x: Any, written: bool) -> PlanTensor:
    dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
    axes = tuple(PlanAxis(label="X", size=(size,)) for size in x.shape)
    return PlanTensor(name=name, dtype=dtype, axes=axes, read=not written, written=written)
