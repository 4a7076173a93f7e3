"""Several tiles side by side in one shared tile: `at column N`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashwright.check.check import check
from flashwright.gpu import find
from flashwright.lang.nodes import Copy, Num
from flashwright.lang.parse import parse
from tests.unit.interpreted import agrees, errors, only_error
from tests.unit.tl_attention import COPY, attention

ALLOCATE = """\
Allocate Qr in global (batch, heads, q_len, 32) as fp16
Allocate Kr in global (B: batch, L: kv_len, D: 32) as fp16
Allocate Q in shared (BM, HeadDim + 32) as fp16
Allocate X in shared (BN, HeadDim + 32) as fp16"""
COPY_Q = "Copy Qr (BM, 32) in coordinate [B = item, H = head, L = block] from global to shared "
COPY_Q += "and get Q at column HeadDim"
NOPE = COPY.format("K") + " and get X at column 0"
ROPE = (
    "Copy Kr (BN, 32) in coordinate [B = item, L = i] from global to shared and get X at column 64"
)


def latent(copies: str = f"{NOPE}\n  {ROPE}", **more: str) -> str:
    parts = {"allocate": ALLOCATE, "copy_q": COPY_Q, **more}
    text = attention(copy_k=copies, **parts)
    old = "[B = item, H = head, L = block] from global to shared\n"
    text = text.replace(old, old.replace("shared\n", "shared at column 0\n"), 1)
    text = text.replace("K_shared.T", "X_shared.T")
    return text.replace("Allocate K in shared (BN, HeadDim) as fp16 with stages 1\n", "")


def inputs(rng: Any, dims: Any) -> Any:
    return {
        "Qr": rng.standard_normal((2, 2, dims["q_len"], 32)).astype(np.float16),
        "Kr": rng.standard_normal((2, dims["kv_len"], 32)).astype(np.float16),
    }


def both(plain: Any, given: Any, dims: Any) -> Any:
    rope = given["Kr"].astype(float)[:, None].swapaxes(-1, -2)
    return plain + given["Qr"].astype(float) @ rope / 8


def test_the_tree() -> None:
    (copy,) = parse(
        "Copy K (BN, 64) in coordinate [L = i] from global to shared at column 128"
    ).body
    assert isinstance(copy, Copy)
    assert copy.column == Num("128")
    assert copy.target is None


def test_one_gemm_over_both_parts() -> None:
    agrees(latent(), inputs, both)


def test_the_order_of_the_copies_does_not_matter() -> None:
    agrees(latent(f"{ROPE}\n  {NOPE}"), inputs, both)


def test_each_part_may_be_fetched_ahead() -> None:
    first = f"{NOPE}\n{ROPE}".replace("L = i", "L = 0")
    text = latent("", copy_q=f"{COPY_Q}\n{first}")
    ahead = f"  if i + 1 < kv_len / BN\n    {NOPE}\n    {ROPE}\n  end\n".replace(
        "L = i]", "L = i + 1]"
    )
    gemm = "  Compute GEMM Q_shared, X_shared.T and get S\n"
    agrees(text.replace(gemm, gemm + ahead), inputs, both)


def test_halves_of_one_tensor_are_that_tensor() -> None:
    """Their columns have the positions they had, so that they meet the whole Q."""
    half = (
        "Copy K (BN, 32) in coordinate [B = item, H = head, L = i, D = {0}] from global to shared "
    )
    half += "at column 32 * {1}"
    right = "\n  ".join(half.format(n, n) for n in (0, 1))
    agrees(attention(copy_k=right), lambda rng, dims: {}, lambda s, x, d: s)
    swapped = "\n  ".join(half.format(n, 1 - n) for n in (0, 1))
    assert not errors(attention(copy_k=swapped)), "what they mean then is for the CPU run to judge"


@pytest.mark.parametrize("copies", [NOPE, ROPE])
def test_a_part_is_missing(copies: str) -> None:
    found = only_error(latent(copies), "FW403")
    assert "columns" in found.message


def test_the_parts_are_the_same_rows() -> None:
    found = only_error(latent(f"{NOPE}\n  {ROPE.replace('L = i', 'L = 0')}"), "FW603")
    assert "Kr" in found.message


def test_the_parts_are_of_the_same_batch() -> None:
    text = latent(f"{NOPE}\n  {ROPE.replace('B = item', 'B = 0')}")
    assert "FW603" in {d.code for d in errors(text)}


def test_parts_in_another_order_on_the_other_side() -> None:
    other = NOPE.replace("column 0", "column 32") + "\n  " + ROPE.replace("column 64", "column 0")
    found = only_error(latent(other), "FW603")
    assert "64 + 32" in found.message
    assert "32 + 64" in found.message


def test_a_part_that_is_overwritten_before_it_is_read() -> None:
    text = latent(f"{NOPE}\n  {ROPE}\n  {NOPE.replace('L = i', 'L = 0')}")
    assert {d.code for d in errors(text)} == {"FW602"}


def test_parts_that_overlap() -> None:
    text = latent(f"{NOPE}\n  {ROPE.replace('column 64', 'column 40')}")
    assert "FW602" in {d.code for d in errors(text)}


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("column 64", "column 65", "FW304"),
        ("column 64", "column HeadDim / 3", "FW306"),
        ("column 64", "column kv_len", "FW306"),
        ("column 64", "column -32", "FW306"),
        ("Kr (BN, 32)", "Kr (16, 32)", "FW304"),
        ("Kr (BN, 32)", "Kr", "FW304"),
        ("global to shared and get X", "global to register and get X", "FW304"),
        ("X at column 64", "X", "FW304"),
        ("X at column 64", "Y at column 64", "FW304"),
    ],
)
def test_what_does_not_fit(old: str, new: str, code: str) -> None:
    text = latent(f"{NOPE}\n  {ROPE.replace(old, new)}")
    assert code in {d.code for d in errors(text)}


def test_a_copy_of_some_columns_is_told_how_to_say_so() -> None:
    found = next(
        d
        for d in errors(latent(f"{NOPE}\n  {ROPE.replace(' at column 64', '')}"))
        if d.code == "FW304"
    )
    assert "at column" in (found.help or "")


def test_the_budget_counts_the_tile_once() -> None:
    assert not check(parse(latent()), find("t4")).errors
