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
from flashwright.lower.launch_plan import LaunchPlan, PlanAxis, PlanMap, PlanTensor
from flashwright.lower.targets.atoms import ALIGNMENT, CPP_TYPES

NAN = float("nan")
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
    maps: tuple[PlanMap, ...] = (),
    **dims: Any,  # whole numbers
) -> None:
    """Launch with maps, tensors and numbers in the order of the struct."""
    mapped = {one.tensor for one in maps}
    tensors = [_tensor(name, x, False, name in mapped) for name, x in inputs.items()]
    tensors += [_tensor(name, x, True) for name, x in outputs.items()]
    plan = LaunchPlan(
        entry="attention",
        arch=code.arch,
        threads=threads,
        shared=-(-shared // ALIGNMENT) * ALIGNMENT,
        grid=((blocks,),),
        dims=tuple(dims),
        tensors=tuple(tensors),
        maps=maps,
    )
    kernel(code, plan)(*inputs.values(), out=dict(outputs), **dims)


def _tensor(name: str, x: Any, written: bool, mapped: bool = False) -> PlanTensor:
    """TMA wants strides and addresses that are multiples of 16 bytes."""
    dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
    axes = tuple(PlanAxis(label="X", size=(size,)) for size in x.shape)
    vector = 16 // x.dtype.itemsize if mapped else 1
    use = {"read": not written, "written": written}
    return PlanTensor(name=name, dtype=dtype, axes=axes, vector=vector, **use)


# --- matrices to give and to compare ----------------------------------------------------------


def dtype_of(name: str) -> Any:
    import torch

    return getattr(torch, arrays.NAMES[name])


def size_of(name: str) -> int:
    return int(dtype_of(name).itemsize)


def normal(*shape: int, dtype: str = "fp32") -> Any:
    import torch

    return torch.randn(shape, device="cuda").to(dtype_of(dtype))


def framed(rows: int, cols: int, dtype: str = "fp32", *, turned: bool = False) -> tuple[Any, Any]:
    """A matrix of NaN, and its inner part: strided, and where `turned`, column by column."""
    import torch

    if turned:
        whole, inner = framed(cols, rows, dtype)
        return whole, inner.T
    whole = torch.full((rows + 4, cols + 32), NAN, device="cuda").to(dtype_of(dtype))
    return whole, whole[2 : 2 + rows, 16 : 16 + cols]  # rows begin at multiples of 16 bytes


def same(found: Any, expected: Any) -> bool:
    """Equal, and NaN where that is expected."""
    found, expected = found.double(), expected.double()
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def inside(x: Any, rows: int, cols: int, other: float) -> Any:
    """The first rows and columns of a matrix; elsewhere another value."""
    import torch

    out = torch.full(x.shape, other, device=x.device, dtype=torch.float64)
    out[:rows, :cols] = x[:rows, :cols].double()
    return out
