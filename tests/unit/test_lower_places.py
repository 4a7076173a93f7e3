"""Places in elements (`L at E`), declared vectors and tiles side by side, in kernels."""

from __future__ import annotations

import pytest

from flashwright import gpu as gpus
from flashwright.fuzz.case import FuzzCase
from flashwright.fuzz.oracle import evaluate_cases
from flashwright.lower.translate import translate
from tests.example_programs import EXAMPLES
from tests.unit.emulated import needs_compilers
from tests.unit.lowered import printed, refusal
from tests.unit.test_element_places import gated
from tests.unit.test_side_by_side import ALLOCATE, NOPE, ROPE, latent
from tests.unit.tl_attention import COPY, attention, program

LAST = "q_len - (block + 1) * BM"
PROBLEMS = tuple(
    {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": q, "kv_len": k}
    for q, k in ((70, 200), (100, 40))
)


def at(tile: str, place: str) -> str:
    return COPY.format(tile).replace("L = i", f"L at {place}")


def from_the_end() -> str:
    """Keys in blocks that end at the last one: the last block may begin before the first key."""
    place = "kv_len - (i + 1) * BN"
    mask = "kv_idx >= 0 and kv_idx <= q_idx + kv_len - q_len"
    return attention(copy_k=at("K", place), copy_v=at("V", place), mask=mask, k_stages=2)


def queries_from_the_end() -> str:
    allocate = """\
Allocate LSE in global (batch, heads, q_len) as fp32
Allocate LSE in register (BM) as fp32
Allocate Bias in global (B: batch, L: q_len, M: kv_len) as fp16
Allocate Bias in register (BM, BN) as fp32"""
    place = "[B = item, L = block, M at i * BN]"
    scale = f"Copy Bias (BM, BN) in coordinate {place} from global to register\n"
    scale += "  Compute S * Scale + Bias and get new S"
    end = "Compute Smax + log(Ssum) and get LSE_register\n"
    end += "Copy LSE (BM) in coordinate [B = item, H = head, L = block] from register to global"
    text = attention(allocate=allocate, scale=scale, end=end)
    return text.replace("L = block", f"L at {LAST}")


def half(column: int) -> str:
    """The scores are those of a part of the head that begins at a column."""
    text = attention()
    for tile, length in (("Q", "q_len"), ("K", "kv_len")):
        old = f"Allocate {tile} in global (batch, heads, {length}, HeadDim)"
        text = text.replace(old, old.replace("HeadDim", "2 * HeadDim"))
    for place in ("L = block] from global", "L = i] from global"):
        text = text.replace(place, place.replace("]", f", D at {column}]"), 1)
    return text


# --- the text ---------------------------------------------------------------------------------


def test_a_place_that_may_be_negative_has_two_bounds() -> None:
    source = printed(gated())
    place = "block * BM + kv_len - q_len"
    assert f"p.Gate.line(item).moved({place}, 0)" in source
    assert f"fw::Inside{{-({place}), kv_len - ({place})}}" in source


def test_a_place_that_is_not_negative_has_one() -> None:
    text = gated(copy="Copy Gate (BM) in coordinate [B = item, L at block * 2] from global to "
                 "register and get QGate")  # fmt: skip
    assert "fw::load_rows<Warps>(QGate, p.Gate.line(item, block * 2), kv_len - block * 2);" in (
        printed(text)
    )


def test_tiles_and_elements_give_the_same_kernel() -> None:
    plain, counted = attention(), attention(copy_k=at("K", "i * BN"), copy_v=at("V", "i * BN"))

    def code(text: str) -> list[str]:
        return [line for line in printed(text).splitlines() if "// " not in line]

    assert code(plain) == code(counted)


@pytest.mark.parametrize(("column", "copy"), [(40, "copy_async"), (36, "copy_elements")])
def test_columns_are_copied_by_16_bytes_where_they_lie_so(column: int, copy: str) -> None:
    assert f"fw::{copy}<Threads>(K_shared" in printed(half(column))


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_a_declared_vector_lies_as_it_is_said(along: str) -> None:
    text = gated(f"Allocate QGate in register (BM) as fp32 along {along}", equal=64)
    assert f"fw::load_{'rows' if along == 'rows' else 'cols'}<Warps>(QGate" in printed(
        text, strict=False
    )


def test_pieces_of_a_tile_are_one_fill_of_its_ring() -> None:
    made = translate(program(latent()), gpus.find("h200"))
    loader = made.source.split("fw::alloc_registers")[0].split("fw::is_producer")[1]
    words = ("X_ring.acquire(X_shared.bytes)", "fw::fetch_columns<0, 64>(X_shared, X_ring, p.X_map",
             "fw::fetch_columns<64, 32>(X_shared, X_ring, p.X_map_64", "X_ring.next()")  # fmt: skip
    places = [loader.index(word) for word in words]
    assert places == sorted(places)
    maps = [(one.tensor, one.box, one.swizzle) for one in made.plan.maps]
    assert ("K", (1, 1, 32, 32), 64) in maps
    assert ("Kr", (1, 32, 32), 64) in maps


def test_pieces_are_whole_swizzles() -> None:
    allocate = ALLOCATE.replace("32", "64")
    text = latent(f"{NOPE}\n  {ROPE.replace('32', '64')}", allocate=allocate)
    text = text.replace("Qr (BM, 32)", "Qr (BM, 64)")
    text = text.replace("X at column 64", "X at column 80").replace("K (BN, HeadDim)", "K (BN, 80)")
    found = refusal(text)
    assert found.code == "FW811"
    assert found.help is not None
    assert "multiples of 64" in found.help


def test_pieces_stand_in_one_body() -> None:
    text = latent(f"{NOPE}\n  if i < 100000\n  {ROPE}\n  end")
    assert "same body" in (refusal(text).help or "")


# --- emulated ---------------------------------------------------------------------------------

STAGED = ALLOCATE.replace("(BN, HeadDim + 32) as fp16", "(BN, HeadDim + 32) as fp16 with stages 2")
KERNELS = {
    "keys from the end": (from_the_end(), ("a100", "h200")),
    "queries from the end": (queries_from_the_end(), ("a100", "h200")),
    "columns": (half(40), ("a100", "h200")),
    "any columns": (half(36), ("a100",)),
    "forgetting": ((EXAMPLES / "forgetting.tl").read_text("utf-8"), ("a100", "h200")),
    "side by side": (
        latent(f"{ROPE}\n  {COPY.format('V')}\n  {NOPE}", copy_v="", allocate=STAGED),
        ("t4", "a100", "h200"),
    ),
}


@pytest.mark.slow
@needs_compilers
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_do_what_the_program_says(name: str) -> None:
    text, cards = KERNELS[name]
    for found in evaluate_cases([FuzzCase(gpu, text, PROBLEMS, spread=1.2) for gpu in cards]):
        assert found.kind == "agree", found
