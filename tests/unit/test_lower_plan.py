"""The launch plan: sizes and grids are those that exact arithmetic gives."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import gpu as gpus
from flashwright.lang.nodes import Binary, Call, Expr, Let, Name, Num
from flashwright.lang.parse import parse
from flashwright.lower.launch_plan import LaunchPlan, evaluate
from flashwright.lower.plan import _ceiling as ceiling
from flashwright.lower.plan import _postfix as postfix
from flashwright.lower.translate import translate
from flashwright.program.program import Program
from flashwright.program.scalars import evaluate as exact
from tests.unit.lowered import printed
from tests.unit.tl_attention import attention, program

DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len")
PROGRAM = program(attention())
SMALL = st.integers(1, 9).map(lambda n: Num(str(n)))
NAMES = st.sampled_from((*DIMS, "BM", "BN")).map(Name)


def trees(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return (
        st.builds(Binary, st.sampled_from(("+", "-", "*")), inner, inner)
        | st.builds(lambda a, b: Binary("/", a, b), inner, SMALL)
        | st.builds(lambda f, a: Call(Name(f), (a,)), st.sampled_from(("floor", "ceil")), inner)
        | st.builds(
            lambda f, a, b: Call(Name(f), (a, b)), st.sampled_from(("min", "max")), inner, inner
        )
    )


SIZES = st.recursive(SMALL | NAMES, trees, max_leaves=6)
NUMBERS = st.fixed_dictionaries({n: st.integers(1, 400) for n in DIMS})


@given(SIZES, NUMBERS)
def test_sizes(size: Expr, numbers: dict[str, int]) -> None:
    value = exact(size, {**PROGRAM.params, **numbers})
    assert not isinstance(value, str)
    assert evaluate(ceiling(size, PROGRAM), numbers) == math.ceil(value)
    assert evaluate(postfix(size, PROGRAM), numbers) == math.floor(value)


@pytest.mark.parametrize(
    "size",
    [
        "kv_len / BN",
        "ceil(kv_len / BN) + floor(q_len / 7)",
        "q_len / (kv_len / 3)",
        "min(q_len / 3, kv_len / 7)",
        "max(q_len, kv_len / 7) - heads / 2",
        "q_len / 3 + kv_len / 7",
        "heads * q_len / BM",
    ],
)
def test_fractions(size: str) -> None:
    (stmt,) = parse(f"let x = {size}\n").body
    assert isinstance(stmt, Let)
    for q_len, kv_len in ((1, 1), (100, 64), (129, 257), (333, 5)):
        numbers = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": q_len, "kv_len": kv_len}
        value = exact(stmt.value, {**PROGRAM.params, **numbers})
        assert not isinstance(value, str)
        assert evaluate(ceiling(stmt.value, PROGRAM), numbers) == math.ceil(value)
        assert evaluate(postfix(stmt.value, PROGRAM), numbers) == math.floor(value)


def plan(made: Program = PROGRAM, gpu: str = "a100") -> LaunchPlan:
    return translate(made, gpus.find(gpu)).plan


def test_the_grid() -> None:
    numbers = {"batch": 2, "heads": 3, "kv_heads": 1, "q_len": 130, "kv_len": 1}
    assert [evaluate(count, numbers) for count in plan().grid] == [3, 3, 2]
    later = program(attention().replace("block = 0:", "block = 0:2 + 0 * "), strict=False)
    assert evaluate(plan(later).grid[0], numbers) == 2
    shifted = program(attention().replace("block = 0:", "block = 1:"), strict=False)
    assert evaluate(plan(shifted).grid[0], numbers) == 2
    assert "int const block = 1 + blockIdx.x;" in translate(shifted, gpus.find("a100")).source


def test_the_tensors() -> None:
    found = {t.name: t for t in plan().tensors}
    assert list(found) == ["Q", "K", "V", "O"]
    assert [(t.read, t.written) for t in found.values()] == [(True, False)] * 3 + [(False, True)]
    assert {t.vector for t in found.values()} == {8}, "16 bytes at a time"
    assert [a.label for a in found["Q"].axes] == ["B", "H", "L", "D"]
    assert evaluate(found["Q"].axes[3].size, {}) == 64


def test_elements_are_not_vectors() -> None:
    """A vector of fp32 goes element by element, and its strides are free."""
    text = attention(
        allocate="Allocate LSE in global (batch, heads, q_len) as fp32\n"
        "Allocate LSE in register (BM) as fp32",
        end="Compute Smax + log(Ssum) and get LSE_register\n"
        "Copy LSE (BM) in coordinate [B = item, H = head, L = block] from register to global",
    )
    found = {t.name: t.vector for t in plan(program(text)).tensors}
    assert found == {"Q": 8, "K": 8, "V": 8, "O": 8, "LSE": 1}


def test_shared_memory_and_threads() -> None:
    assert plan().threads == 128
    assert plan().shared == (64 * 64 + 2 * 32 * 64) * 2
    staged = program(attention(k_stages=3, v_stages=2))
    assert plan(staged).shared == (64 * 64 + 5 * 32 * 64) * 2
    assert plan(gpu="t4").arch == "sm_75"
    text = plan().dump()
    assert LaunchPlan.model_validate_json(text) == plan()


@pytest.mark.parametrize(
    ("high", "reverse"),
    [
        ("kv_len / BN", False),
        ("min(kv_len, (block + 1) * BM + kv_len - q_len) / BN", True),
        ("max(0, kv_len - block * BM) / BN", False),
    ],
)
def test_the_longest_blocks_start_first(high: str, reverse: bool) -> None:
    source = printed(attention(high=high), strict=False)
    assert ("gridDim.x - 1 - blockIdx.x" in source) == reverse
