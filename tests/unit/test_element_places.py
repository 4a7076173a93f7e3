"""Places in elements (`L at E`), and vectors whose Allocate says how they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashwright.lang.diagnostic import Failed
from flashwright.lang.nodes import Allocate, Copy
from flashwright.lang.parse import parse
from tests.unit.interpreted import agrees, errors, mended, only_error
from tests.unit.tl_attention import COPY, attention

CAUSAL = "kv_idx <= q_idx + kv_len - q_len"
GATES = "Allocate Gate in global (B: batch, L: kv_len) as fp32"
ALONG = "Allocate QGate in register (BM) as fp32 along rows"
COPY_GATE = "Copy Gate (BM) in coordinate [B = item, L at block * BM + kv_len - q_len] from global "
COPY_GATE += "to register and get QGate"
DECAY = "Compute S * Scale + QGate and get new S"


def gated(allocate: str = ALONG, copy: str = COPY_GATE, scale: str = DECAY, equal: int = 0) -> str:
    text = attention(allocate=f"{GATES}\n{allocate}", copy_q=copy, scale=scale, mask=CAUSAL)
    return text.replace("param BN = 32", f"param BN = {equal}") if equal else text


def test_the_tree() -> None:
    (copy,) = parse(
        "Copy C (BM) in coordinate [B = 1, L AT i * BN - 1] from global to register"
    ).body
    assert isinstance(copy, Copy)
    assert [c.in_elements for c in copy.coords or ()] == [False, True]
    (allocate,) = parse("Allocate C in register (BM) Along Columns as fp32").body
    assert isinstance(allocate, Allocate)
    assert allocate.along == "columns"


def test_its_words_are_names_elsewhere() -> None:
    parse("param rows = 4\nlet at = rows\nCompute Exp along and get column")
    parse("Compute at + columns and get at")


# --- a vector of a kv-long tensor along the rows ----------------------------------------------


def decayed(plain: Any, given: Any, dims: Any) -> Any:
    position = np.arange(dims["q_len"]) + dims["kv_len"] - dims["q_len"]
    gate = np.where(position >= 0, given["Gate"][:, np.maximum(position, 0)], 0)
    # A factor that is the same for a row would not show in a softmax: it goes with the key's place.
    seen = np.arange(dims["kv_len"]) <= position[:, None]
    scores = plain + gate[:, None, :, None] * np.arange(dims["kv_len"]) / 50
    return np.where(seen, scores, -np.inf)


@pytest.mark.parametrize("columns", [32, 64])
def test_along_the_rows(columns: int) -> None:
    agrees(
        gated(scale="Compute S * Scale + QGate * kv_idx / 50 and get new S", equal=columns),
        lambda rng, dims: {"Gate": rng.standard_normal((2, dims["kv_len"])).astype(np.float32)},
        decayed,
    )


@pytest.mark.parametrize("columns", [32, 64])
@pytest.mark.parametrize("allocate", ["", "Allocate QGate in register (BM) as fp32"])
def test_keys_along_the_rows_must_be_meant(allocate: str, columns: int) -> None:
    text = gated(allocate, equal=columns)
    found = only_error(text, "FW603")
    assert "along rows" in (found.help or "")
    assert not errors(mended(text, found))


def test_in_tiles_it_may_be_a_slip_so_that_there_is_no_fix() -> None:
    copy = COPY_GATE.replace("L at block * BM + kv_len - q_len", "L = floor(block * 0)")
    found = only_error(gated("", copy, equal=64), "FW603")
    assert "along rows" in (found.help or "")
    assert found.fix is None


def test_what_is_neither_the_rows_nor_the_columns() -> None:
    """With as many rows as columns nothing says which are meant."""
    allocate = "dim tokens\nAllocate T in global (L: tokens) as fp32"
    copy = "Copy T (BM) in coordinate [L = 0] from global to register"
    scale = "Compute S * Scale + T and get new S"
    by_size = attention(allocate=allocate, copy_q=copy, scale=scale)
    assert not errors(by_size)
    text = by_size.replace("param BN = 32", "param BN = 64")
    found = only_error(text, "FW603")
    assert "neither" in found.message
    right = mended(text, found)
    assert "Allocate T in register (BM) as fp32 along rows" in right
    assert not errors(right)


def test_what_walks_with_the_columns_is_taken_to_lie_along_them() -> None:
    allocate = "dim tokens\nAllocate T in global (L: tokens) as fp32"
    copy_v = COPY.format("V") + "\n  Copy T (BN) in coordinate [L = i] from global to register"
    text = attention(
        allocate=allocate, copy_v=copy_v, scale="Compute S * Scale + T and get new S"
    ).replace("param BN = 32", "param BN = 64")
    found = next(d for d in errors(text) if d.code == "FW603")
    assert "along columns" in (found.help or "")


def test_along_rows_does_not_excuse_other_queries() -> None:
    allocate = (
        "Allocate T in global (L: q_len) as fp32\nAllocate T in register (BM) as fp32 along rows"
    )
    copy = "Copy T (BM) in coordinate [L at block * BM{}] from global to register"
    scale = "Compute S * Scale + T and get new S"
    assert not errors(attention(allocate=allocate, copy_q=copy.format(""), scale=scale))
    only_error(attention(allocate=allocate, copy_q=copy.format(" - 1"), scale=scale), "FW603")


@pytest.mark.parametrize(
    ("allocate", "code"),
    [
        ("Allocate X in register (BM, BN) as fp32 along rows", "FW205"),
        ("Allocate X in shared (BM) as fp32 along rows", "FW205"),
        ("Allocate QGate in register (BM) as fp32 along columns", "FW303"),
        ("Allocate QGate in register (BM) as fp32 along rows along rows", "FW101"),
    ],
)
def test_where_along_does_not_belong(allocate: str, code: str) -> None:
    try:
        found = {d.code for d in errors(gated(allocate))}
    except Failed as failed:
        found = {d.code for d in failed.diagnostics}
    assert code in found


def test_vectors_of_rows_meet() -> None:
    """One that has the rows' positions gives them to the result."""
    allocate = f"{ALONG}\nAllocate T in global (L: q_len) as fp32"
    allocate += "\nAllocate Sum in register (BM) as fp32"
    copy = f"{COPY_GATE}\nCopy T (BM) in coordinate [L = block] from global to register"
    scale = "Compute S * Scale + Sum and get new S"
    for both in ("QGate + T", "T * QGate"):
        assert not errors(gated(allocate, f"{copy}\nCompute {both} and get Sum", scale))
    unsaid = allocate.replace(" along rows", "")
    assert "FW603" in {
        d.code for d in errors(gated(unsaid, f"{copy}\nCompute QGate + T and get Sum", scale))
    }


# --- any tile ---------------------------------------------------------------------------------


def plain(scores: Any, given: Any, dims: Any) -> Any:
    return scores


def nothing(rng: Any, dims: Any) -> Any:
    return {}


def in_elements(text: str) -> str:
    return text.replace("L = i]", "L at i * BN]").replace("L = block]", "L at block * BM]")


def test_loads_and_stores_in_elements() -> None:
    text = in_elements(attention())
    assert text.count(" at ") == 4
    agrees(text, nothing, plain)


def test_both_ways_of_counting_are_the_same_positions() -> None:
    """K in elements, V in tiles."""
    assert not errors(attention(copy_k=in_elements(COPY.format("K"))))
    text = attention(copy_k=COPY.format("K").replace("L = i", "L at i * BN + 1"))
    assert "FW603" in {d.code for d in errors(text)}


WINDOW = {
    "params": "param Window = 50",
    "copy_k": COPY.format("K").replace("L = i", "L at first + i * BN"),
    "copy_v": COPY.format("V").replace("L = i", "L at first + i * BN"),
    "allocate": "let first = block * BM + kv_len - q_len - Window + 1",
    "high": "min(BM + Window - 1, kv_len - first) / BN",
    "mask": f"kv_idx >= 0 and {CAUSAL} and kv_idx > q_idx + kv_len - q_len - Window",
}


def windowed(scores: Any, given: Any, dims: Any) -> Any:
    position = np.arange(dims["q_len"])[:, None] + dims["kv_len"] - dims["q_len"]
    keys = np.arange(dims["kv_len"])
    return np.where((keys <= position) & (keys > position - 50), scores, -np.inf)


def test_a_window_that_begins_before_the_keys() -> None:
    """Blocks of keys that are no multiples of their size, the first of them before the start."""
    agrees(attention(**WINDOW), nothing, windowed)


def test_keys_before_the_start_are_masked() -> None:
    mask = WINDOW["mask"].removeprefix("kv_idx >= 0 and ")
    found = next(d for d in errors(attention(**{**WINDOW, "mask": mask})) if d.code == "FW609")
    assert "before the start" in found.message
    assert "kv_idx >= 0" in (found.help or "")


def test_a_window_that_is_too_short_misses_keys() -> None:
    text = attention(**{**WINDOW, "high": "Window / BN"})
    assert {d.code for d in errors(text)} == {"FW604"}


def test_blocks_that_overlap_count_twice() -> None:
    copies = {f"copy_{n.lower()}": COPY.format(n).replace("L = i", "L at i * 16") for n in "KV"}
    assert {d.code for d in errors(attention(**copies, high="kv_len / 16"))} == {"FW606"}


def test_a_tile_that_begins_past_the_end_is_refused() -> None:
    copies = {f"copy_{n.lower()}": COPY.format(n).replace("L = i", "L at i * BN") for n in "KV"}
    found = only_error(attention(**copies, high="kv_len / BN + 1"), "FW605")
    assert "kv_len" in found.message


def test_a_place_in_elements_is_whole() -> None:
    copies = {f"copy_{n.lower()}": COPY.format(n).replace("L = i", "L at i * BN / 3") for n in "KV"}
    found = only_error(attention(**copies), "FW306")
    assert found.fix is not None


def test_elements_that_were_counted_as_tiles() -> None:
    copies = {f"copy_{n.lower()}": COPY.format(n).replace("L = i", "L = i * BN") for n in "KV"}
    found = only_error(attention(**copies), "FW605")
    assert "L at i * BN" in (found.help or "")


def test_an_index_is_the_same_either_way() -> None:
    agrees(attention().replace("H = head", "H at head"), nothing, plain)
    text = attention(copy_k=COPY.format("K").replace("H = head", "H at head - 1"))
    assert {d.code for d in errors(text)} == {"FW605"}


def test_what_lies_outside_is_not_stored() -> None:
    text = attention().replace("0:q_len / BM", "0:(q_len + 40) / BM")
    agrees(text.replace("L = block]", "L at block * BM - 40]"), nothing, plain)


def test_sequences_of_their_own_lengths() -> None:
    """The recipe: the place of a vector comes from a tensor, and so does the mask."""
    allocate = f"{GATES}\nAllocate Lengths in global (B: batch) as int32\n{ALONG}\n"
    allocate += "let length = Lengths[item]"
    copy = COPY_GATE.replace("kv_len - q_len", "length - q_len")
    text = attention(
        allocate=allocate,
        copy_q=copy,
        scale="Compute S * Scale + QGate * kv_idx / 50 and get new S",
        mask="kv_idx < kv_len and kv_idx < length and kv_idx <= q_idx + length - q_len",
    )

    def inputs(rng: Any, dims: Any) -> Any:
        lengths = np.array([dims["kv_len"], dims["kv_len"] // 2], dtype=np.int32)
        gate = rng.standard_normal((2, dims["kv_len"])).astype(np.float32)
        return {"Lengths": lengths, "Gate": gate}

    def scores(plain: Any, given: Any, dims: Any) -> Any:
        keys, found = np.arange(dims["kv_len"]), []
        for batch, length in enumerate(given["Lengths"]):
            position = np.arange(dims["q_len"]) + length - dims["q_len"]
            gate = np.where(position >= 0, given["Gate"][batch][np.maximum(position, 0)], 0)
            seen = (keys < length) & (keys <= position[:, None])
            found.append(np.where(seen, plain[batch] + gate[:, None] * keys / 50, -np.inf))
        return np.stack(found)

    agrees(text, inputs, scores)


# --- what rows are reduced to -----------------------------------------------------------------


def by_key(plain: Any, given: Any, dims: Any) -> Any:
    return plain + given["K"].max(-1)[..., None, :]


@pytest.mark.parametrize("columns", [32, 64])
def test_maxima_of_keys_go_along_the_keys(columns: int) -> None:
    """Also where a tile has as many rows as columns."""
    text = attention(
        allocate="Allocate K in register (BN, HeadDim) as fp16\nAllocate Most in register (BN)",
        scale="Copy K from shared to register\nCompute rowmax(K_register) and get Most\n"
        "Compute S * Scale + Most and get new S",
    )
    agrees(text.replace("param BN = 32", f"param BN = {columns}"), lambda *_: {}, by_key)
