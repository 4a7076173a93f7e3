"""Tensors between kernels that lie in fragments (docs/language.md, "Several kernels")."""

from __future__ import annotations

import pytest

from flashwright import gpu as gpus
from flashwright.check.check import check, checked_program
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate

TEXT = """
param BM = 64
param HeadDim = 64
Allocate X in global (batch, heads, q_len, HeadDim) as fp32
Allocate Sum in global (batch, heads, q_len, HeadDim) as fp32 in fragments
Allocate Y in global (batch, heads, q_len, HeadDim) as bf16

grid i = 0:q_len / BM, h = 0:heads, b = 0:batch
param Warps = 4
Copy X (BM, HeadDim) in coordinate [B = b, H = h, L = i] from global to register
Copy X (BM, HeadDim) in coordinate [B = b, H = h, L = i] from register to global and accumulate Sum

grid i = 0:q_len / BM, h = 0:heads, b = 0:batch
param Warps = 4
Copy Sum (BM, HeadDim) in coordinate [B = b, H = h, L = i] from global to register
Copy Sum (BM, HeadDim) in coordinate [B = b, H = h, L = i] from register to global and get Y
"""


def errors(text: str) -> list[str]:
    return [d.code for d in check(parse(text)).errors]


def test_scratch_may_lie_in_fragments() -> None:
    assert not errors(TEXT)
    assert "as fp32 in fragments" in format_tree(parse(TEXT))
    assert format_tree(parse(format_tree(parse(TEXT)))) == format_tree(parse(TEXT))


@pytest.mark.parametrize("name", ["X", "Y"])
def test_what_the_caller_passes_does_not(name: str) -> None:
    text = TEXT.replace("as bf16", "as fp32")
    old = f"Allocate {name} in global (batch, heads, q_len, HeadDim) as fp32"
    assert errors(text.replace(old, f"{old} in fragments")) == ["FW612"]


def test_nor_does_a_tensor_of_one_kernel() -> None:
    one = TEXT.replace("in fragments", "").split("grid", 2)
    text = "grid".join(one[:2]).replace("as fp32 \n", "as fp32 in fragments\n")
    assert "in fragments" in text
    assert "FW612" in errors(text)


def test_other_types_and_tiles_do_not() -> None:
    assert "FW205" in errors(TEXT.replace("as fp32 in fragments", "as bf16 in fragments"))
    tile = "grid i = 0:q_len / BM"
    assert "FW205" in errors(
        TEXT.replace(tile, f"Allocate T in register (BM, BM) in fragments\n{tile}")
    )


def parts(text: str) -> list[str]:
    return [format_tree(p.tree) for p in check(parse(text)).kernels]


def test_kernels_of_a_program_add_and_load_fragments() -> None:
    first, second = (
        translate(checked_program(parse(part), part=True), gpus.find("h200"))
        for part in parts(TEXT)
    )
    assert "fw::add_fragments<Warps>(p.Sum.tile(b, h, i * BM), X);" in first.source
    assert "fw::load_fragments<Warps>(Sum, p.Sum.tile(b, h, i * BM));" in second.source
    (tensor,) = (t for t in second.plan.tensors if t.name == "Sum")
    assert tensor.padded((2, 3, 130, 64)) == (2, 3, 256, 64)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" and accumulate Sum", " and get Sum"),
        ("param BM = 64", "param BM = 48"),
        ("L = i] from register to global and acc", "L at i * BM] from register to global and acc"),
    ],
)
def test_what_cannot_be_in_fragments_is_refused(old: str, new: str) -> None:
    part = parts(TEXT.replace(old, new))[0]
    with pytest.raises(Failed) as failed:
        translate(checked_program(parse(part), part=True), gpus.find("h200"))
    assert failed.value.diagnostics[0].code == "FW811"
    assert "in fragments" in failed.value.diagnostics[0].message
