"""Additions to global memory by index: the clause, its checks, its meaning, its translation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.variants import make_spec
from flashwright.build import toolchain
from flashwright.check.check import Checked, check
from flashwright.emulate.emulate import run
from flashwright.lang.format import format_stmt, format_tree
from flashwright.lang.nodes import Copy, Name, Tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret_all
from tests.unit.together import SCHEDULES, kernels

INDEX = "kv_idx - q_idx + Reach"
ADD = f"Copy S from register to global and accumulate Sums[head_idx, {INDEX}]"
SOURCE = f"""param BM = 32
param BN = 32
param Warps = 2
param Reach = 20
param HeadDim = 32
Allocate Q in global (H: heads, L: q_len, D: HeadDim) as fp16
Allocate K in global (H: heads, L: kv_len, D: HeadDim) as fp16
Allocate Doc in global (L: q_len) as int32
Allocate Sums in global (H: heads, R: 2 * Reach + 1) as fp32
Allocate Rows in global (H: heads, R: Reach) as fp32
grid block_idx = 0:q_len / BM, column_idx = 0:kv_len / BN, head_idx = 0:heads
Allocate S in register (BM, BN) as fp32
Allocate Row in register (BM) as fp32
Copy Q (BM, HeadDim) in coordinate [H = head_idx, L = block_idx] from global to shared
Copy K (BN, HeadDim) in coordinate [H = head_idx, L = column_idx] from global to shared
Copy Doc (BM) in coordinate [L = block_idx] from global to register
Compute GEMM Q_shared, K_shared.T and get S
Compute Mask S where q_idx < q_len and kv_idx < kv_len
Compute exp(S) and get new S
Compute rowsum(S) and get Row
{ADD}
Copy Row from register to global and accumulate Rows[head_idx, Doc - 3]
"""


def checked(*changes: tuple[str, str]) -> Checked:
    source = SOURCE
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return check(parse(source))


def test_the_clause_is_read_and_written() -> None:
    line = "Copy S from register to global and accumulate T[a, floor(kv_idx / 2) - q_idx]"
    (stmt,) = parse(line).body
    assert isinstance(stmt, Copy)
    assert stmt.adds
    assert stmt.target == Name("T")
    assert len(stmt.index) == 2
    assert format_stmt(stmt) == line
    assert parse(format_tree(Tree((stmt,)))).body == (stmt,)


ERRORS = {
    "coordinate": ("Copy S from", "Copy S (BM, BN) in coordinate [H = 0] from", "FW305"),
    "rank": (f"[head_idx, {INDEX}]", f"[{INDEX}]", "FW305"),
    "turn": (ADD, f"{ADD} at turn 0", "FW613"),
    "fraction": (INDEX, "kv_idx / 2", "FW306"),
    "outside": ("Sums[head_idx", "Sums[head_idx + 1", "FW605"),
    "type": ("2 * Reach + 1) as fp32", "2 * Reach + 1) as bf16", "FW205"),
    "unknown": (INDEX, "distance", "FW201"),
    "no tensor": ("accumulate Sums[", "accumulate Totals[", "FW404"),
    "a tile in shared memory": (INDEX, "floor(Q_shared)", "FW402"),
    "rows past the end": ("q_idx < q_len and ", "", "FW609"),
    "columns past the end": (" and kv_idx < kv_len", "", "FW609"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    old, new, code = ERRORS[case]
    found = checked((old, new)).diagnostics
    assert code in {d.code for d in found}, found
    assert all(d.span is not None for d in found)


def test_an_addition_from_shared_memory_is_an_error() -> None:
    staged = f"Copy S from register to shared\n{ADD.replace('from register', 'from shared')}"
    (found,) = (d for d in checked((ADD, staged)).errors if d.code == "FW402")
    assert found.help == "`Copy S from shared to register` first"


DIMS = {"heads": 2, "q_len": 45, "kv_len": 30, "batch": 1, "kv_heads": 1}


def drawn() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, 32)).astype(np.float16) / 4 for n in (45, 30))
    return {"Q": q, "K": k, "Doc": rng.integers(-5, 40, 45).astype(np.int32)}


def test_every_element_is_added_to_the_nearest_element_of_the_axis() -> None:
    found = checked()
    assert found.diagnostics == ()
    given = drawn()
    q, k, doc = given.values()
    made = interpret_all(Kernels(found.kernels), given, DIMS)
    weights = np.exp(q.astype(float) @ k.astype(float).transpose(0, 2, 1))
    distance = np.arange(30) - np.arange(45)[:, None]
    sums, rows = np.zeros((2, 41)), np.zeros((2, 20))
    for head in range(2):
        np.add.at(sums[head], np.clip(distance + 20, 0, 40), weights[head])
        np.add.at(rows[head], np.clip(doc - 3, 0, 19), weights[head].sum(1))
    np.testing.assert_allclose(made["Sums"], sums, rtol=1e-4)
    np.testing.assert_allclose(made["Rows"], rows, rtol=1e-4)


@pytest.mark.parametrize("gpu", ["t4", "a100", "h200"])
def test_the_translation(gpu: str) -> None:
    (program,) = checked().kernels
    source = translate(program, gpus.find(gpu)).source
    index = "fw::min(fw::max(kv_idx - q_idx + Reach, 0), 40), p.Sums.step<1>());"
    assert f"fw::add_by_index(S(m, n), p.Sums.at(head_idx), {index}" in " ".join(source.split())
    assert "if (p.Rows.data != nullptr && fw::writes_rows<Warps>()) {" in source


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler here")
@pytest.mark.parametrize("gpu", ["t4", "a100", "h200"])
def test_the_kernel(gpu: str) -> None:
    """Under emulation it adds what the interpreter adds: a tile, and a vector once for each row."""
    (program,) = checked().kernels
    spec = make_spec("mha", heads=2, head_dim=64, dtype="fp16")
    (kernel,) = kernels([(format_tree(program.tree), spec)], gpu)
    given = drawn()
    expected = interpret_all(Kernels((program,)), given, DIMS)
    found = {**given, **{name: np.zeros_like(sums) for name, sums in expected.items()}}
    sizes = {name: DIMS[name] for name in kernel.plan.dims}
    own = {tensor.name: found[tensor.name] for tensor in kernel.plan.tensors}
    assert not run(kernel.program, kernel.plan, own, sizes, SCHEDULES[0]).findings
    for name, sums in expected.items():
        np.testing.assert_allclose(found[name], sums, rtol=1e-3)
