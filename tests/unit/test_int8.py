"""Tiles of int8: exact as 16-bit numbers, rounded and saturated where they are stored."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check, checked_program
from flashwright.emulate.emulate import run
from flashwright.lang.parse import parse
from flashwright.semantics.interpret import interpret
from tests.unit.emulated import needs_compilers
from tests.unit.together import kernels as kernels_of

CONVERTED = """\
param Rows = 16
param Columns = 256
param Warps = 1
grid block_idx = 0:q_len / Rows
Allocate X in global (L: q_len, D: Columns) as int8
Allocate Wide in global (L: q_len, D: Columns) as TYPE
Allocate X in shared (Rows, Columns) as int8
Allocate X in register (Rows, Columns) as int8
Allocate Wide in shared (Rows, Columns) as TYPE
Allocate Wide in register (Rows, Columns) as TYPE
Copy X (Rows, Columns) in coordinate [L = block_idx] from global to shared
Copy X from shared to register
Copy X from register to shared and get Wide
Copy Wide from shared to register
Copy Wide (Rows, Columns) in coordinate [L = block_idx] from register to global
"""
"""As a cache is converted: through registers from one shared tile to another."""

STORED = """\
param Rows = 16
param Columns = 32
param Warps = 1
grid block_idx = 0:q_len / Rows
Allocate X in global (L: q_len, D: Columns) as fp32
Allocate Narrow in global (L: q_len, D: Columns) as int8
Allocate Again in global (L: q_len, D: Columns) as int8
Allocate Doubled in global (L: q_len, D: Columns) as fp32
Allocate X in register (Rows, Columns) as fp32
Allocate Twice in register (Rows, Columns) as fp32
Allocate Narrow in shared (Rows, Columns) as int8
Copy X (Rows, Columns) in coordinate [L = block_idx] from global to register
Copy X (Rows, Columns) in coordinate [L = block_idx] from register to global and get Narrow
Copy X from register to shared and get Narrow
Copy Narrow from shared to register
Copy Narrow (Rows, Columns) in coordinate [L = block_idx] from register to global and get Again
Compute Narrow + Narrow and get Twice
Copy Twice (Rows, Columns) in coordinate [L = block_idx] from register to global and get Doubled
"""
ROUNDED = {
    **dict.fromkeys((0.5, -0.5, 0.49, np.nan), 0),
    **dict.fromkeys((1.5, 2.5), 2),
    **dict.fromkeys((-1.5, -2.5), -2),
    126.5: 126,
    **dict.fromkeys((126.51, 127.5, 200.0, 3e9, np.inf), 127),
    **dict.fromkeys((-127.5, -128.5, -129.0, -3e9, -np.inf), -128),
}
WIDE: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def every_number() -> Any:
    """Rows of all numbers, each in another order."""
    numbers = np.arange(-128, 128)
    return np.stack([np.roll(numbers, 3 * row) for row in range(21)]).astype(np.int8)


def given_to_store() -> tuple[Any, Any]:
    """Numbers, and what is left of them."""
    rng = np.random.default_rng(0)
    given = rng.uniform(-140, 140, (21, 32)).astype(np.float32)
    given[3, : len(ROUNDED)] = list(ROUNDED)
    wanted = np.rint(np.clip(given, -128, 127))
    wanted[3, : len(ROUNDED)] = list(ROUNDED.values())
    return given, wanted


def tensors(program: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a program and its outputs."""
    if program == "stored":
        given, wanted = given_to_store()
        narrow = wanted.astype(np.int8)
        return {"X": given}, {"Narrow": narrow, "Again": narrow, "Doubled": np.float32(2 * wanted)}
    numbers = every_number()
    return {"X": numbers}, {"Wide": numbers.astype(WIDE[program])}


def text_of(program: str) -> str:
    return STORED if program == "stored" else CONVERTED.replace("TYPE", program)


@pytest.mark.parametrize("program", ["fp16", "bf16", "stored"])
def test_the_interpreter(program: str) -> None:
    given, wanted = tensors(program)
    found = interpret(checked_program(parse(text_of(program))), given)
    for name, right in wanted.items():
        assert found[name].dtype == right.dtype
        np.testing.assert_array_equal(found[name], right, name)


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "a100", "t4"])
def test_the_kernels_under_emulation(gpu: str) -> None:
    """The same bits; a T4 has no bf16."""
    programs = [name for name in ("fp16", "bf16", "stored") if (gpu, name) != ("t4", "bf16")]
    made = kernels_of([(text_of(name), make_spec("mha")) for name in programs], gpu)
    for kernel, program in zip(made, programs, strict=True):
        assert ("fw::convert_tile<" in kernel.source) == (program != "stored")
        given, wanted = tensors(program)
        arrays = dict(given)
        for name, right in wanted.items():
            arrays[name] = np.full(right.shape, 77).astype(right.dtype)
        dims = {name: 21 if name == "q_len" else 1 for name in kernel.plan.dims}
        found = run(kernel.program, kernel.plan, arrays, dims, "eager").findings
        assert not found, [(f.kind, f.instruction.opcode, f.instruction.line) for f in found]
        for name, right in wanted.items():
            np.testing.assert_array_equal(arrays[name], right, f"{program}: {name}")


PRODUCT = """\
param BM = 64
param HeadDim = 64
grid block_idx = 0:q_len / BM
Allocate Q in global (q_len, HeadDim) as int8
Allocate S in global (L: q_len, N: q_len) as fp32
Allocate S in register (BM, BM)
Copy Q (BM, HeadDim) in coordinate [L = block_idx] from global to shared
Compute GEMM Q_shared, Q_shared.T and get S
Copy S (BM, BM) in coordinate [L = block_idx, N = block_idx] from register to global
"""


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_no_gemm_multiplies_them(gpu: str) -> None:
    [wrong] = [d for d in check(parse(PRODUCT), gpus.find(gpu)).errors if d.code == "FW703"]
    assert "has no MMA for int8" in wrong.message
