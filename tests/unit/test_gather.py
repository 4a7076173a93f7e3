"""Indices that depend on the element: each element reads its own element of the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.share import some
from tests.unit.interpreted import agrees, errors, mended, only_error
from tests.unit.tl_attention import attention

REACH = "param Reach = 20"
TABLE = "Allocate Table in global (H: heads, R: 2 * Reach + 1) as fp32"
SHIFT = "kv_idx - q_idx - (kv_len - q_len)"


def biased(index: str, params: str = REACH, allocate: str = TABLE, **more: str) -> str:
    scale = f"Compute S * Scale + {index} and get new S"
    return attention(params=params, allocate=allocate, scale=scale, **more)


def table(width: int) -> Any:
    return lambda rng, dims: {"Table": rng.standard_normal((2, width)).astype(np.float32)}


def distance(dims: dict[str, int]) -> Any:
    position = np.arange(dims["q_len"])[:, None] + dims["kv_len"] - dims["q_len"]
    return np.arange(dims["kv_len"]) - position


@pytest.mark.parametrize(
    "index",
    some(
        [
            f"{SHIFT} + Reach",  # the language clamps
            f"max(0, min(2 * Reach, {SHIFT} + Reach))",
            f"floor(({SHIFT} + Reach) * 2 / 2)",
            f"where({SHIFT} < 0 - Reach, 0, min({SHIFT} + Reach, 2 * Reach))",
        ],
        3,
    ),
)
def test_relative_position_bias(index: str) -> None:
    agrees(
        biased(f"Table[head, {index}]"),
        table(41),
        lambda s, x, d: s + x["Table"][:, np.clip(distance(d) + 20, 0, 40)],
    )


def test_buckets_of_t5() -> None:
    """16 buckets for distances below 16, 16 more that grow logarithmically up to 128."""
    far = "16 + floor(log(max(-(D), 1) / 16) / log(8) * 16)"
    bucket = f"where(-(D) < 16, max(-(D), 0), min({far}, 31))".replace("D", SHIFT)
    params, allocate = "", "Allocate Table in global (H: heads, R: 32) as fp32"

    def scores(plain: Any, given: Any, dims: Any) -> Any:
        back = np.maximum(-distance(dims), 0)
        large = 16 + np.floor(np.log(np.maximum(back, 1) / 16) / np.log(8) * 16)
        return (
            plain + given["Table"][:, np.where(back < 16, back, np.minimum(large, 31)).astype(int)]
        )

    agrees(biased(f"Table[head, {bucket}]", params, allocate), table(32), scores)


def test_vectors_in_registers_and_other_tables_are_indices() -> None:
    allocate = """\
Allocate Kind in global (B: batch, L: kv_len) as int32
Allocate Row in global (T: 5) as int32
Allocate Table in global (A: 7, L: q_len) as fp16"""
    copy_v = "Copy V (BN, HeadDim) in coordinate [B = item, H = head, L = i] from global to shared"
    copy_kind = "Copy Kind (BN) in coordinate [B = item, L = i] from global to register"

    def inputs(rng: Any, dims: Any) -> Any:
        return {
            "Kind": rng.integers(0, 5, (2, dims["kv_len"])).astype(np.int32),
            "Row": rng.integers(0, 7, 5).astype(np.int32),
            "Table": rng.standard_normal((7, dims["q_len"])).astype(np.float16),
        }

    def scores(plain: Any, given: Any, dims: Any) -> Any:
        kinds = given["Row"][given["Kind"]][:, None, None, :]
        return plain + given["Table"].astype(float)[kinds, np.arange(dims["q_len"])[:, None]]

    text = biased("Table[Row[Kind], q_idx]", "", allocate, copy_v=f"{copy_v}\n  {copy_kind}")
    agrees(text, inputs, scores)


def test_a_mask_may_ask_a_table() -> None:
    allocate = "Allocate Seen in global (A: 3, L: kv_len) as int32"
    mask = "kv_idx < kv_len and Seen[q_idx % 3, kv_idx] > 0"

    def scores(plain: Any, given: Any, dims: Any) -> Any:
        seen = given["Seen"][np.arange(dims["q_len"]) % 3] > 0
        return np.where(seen, plain, -np.inf)

    agrees(
        attention(allocate=allocate, mask=mask),
        lambda rng, dims: {"Seen": rng.integers(0, 2, (3, dims["kv_len"])).astype(np.int32)},
        scores,
    )


def test_an_index_is_a_whole_number_for_every_element() -> None:
    text = biased(f"Table[head, ({SHIFT}) / 2 + Reach]")
    found = only_error(text, "FW306")
    assert not errors(mended(text, found))


@pytest.mark.parametrize(
    ("index", "code"),
    [
        ("Table[head, sqrt(q_idx)]", "FW306"),
        ("Table[head, Smax]", "FW306"),
        ("Table[head, q_idx * Scale]", "FW306"),
        ("Table[head + 1, q_idx]", "FW605"),  # a scalar index is not clamped
        ("Table[q_idx]", "FW305"),
        ("Table[head, K_shared]", "FW402"),
        ("Table[head, floor(V_shared)]", "FW402"),
    ],
)
def test_what_is_no_index(index: str, code: str) -> None:
    assert code in {d.code for d in errors(biased(index))}


def test_an_index_lines_up_with_its_tile() -> None:
    allocate = f"{TABLE}\nAllocate Wrong in register (16) as int32"
    found = only_error(biased("Table[head, Wrong]", allocate=allocate), "FW303")
    assert "Wrong" in found.message


def test_a_let_has_no_elements() -> None:
    assert {d.code for d in errors("let x = T[q_idx]\n" + biased("Table[head, q_idx]"))} >= {
        "FW201"
    }
