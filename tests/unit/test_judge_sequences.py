"""Sequences of any lengths: how the judge lays them out, and which wrong programs it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from flashwright.author.builtin.variants import make_spec
from flashwright.check.check import check
from flashwright.generate.packed import PackedOrder
from flashwright.gpu import H200
from flashwright.judge import oracle, sequences
from flashwright.judge.answer import compare
from flashwright.judge.cpu import judge
from flashwright.judge.expected import Expected
from flashwright.judge.inputs import make_inputs
from flashwright.lang.parse import parse
from flashwright.program.kernels import Kernels
from flashwright.spec import AttentionSpec
from tests.share import some

SPECS = {
    "packed": {"packed": True, "causal": True},
    "packed queries, keys in a cache": {"packed": True, "cache": True},
    "packed queries, keys in pages": {"packed": True, "page": 16},
    "decode": {"decode": 2, "causal": True},
    "decode over pages": {"decode": 1, "page": 48},
    "decode over pages, fp8": {"decode": 1, "page": 16, "kv_dtype": "fp8"},
    "decode, int8": {"decode": 1, "kv_dtype": "int8"},
}


def spec_of(name: str, **more: Any) -> AttentionSpec:
    given: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "bf16", **more}
    return make_spec("gqa", **given, **SPECS[name])


def problem(spec: AttentionSpec, seed: int = 3) -> tuple[dict[str, Any], dict[str, int]]:
    dims = {"batch": 5, "heads": 4, "kv_heads": 2, "q_len": 70, "kv_len": 130}
    dims = sequences.sized(spec, dims)
    return make_inputs(spec, dims, seed), dims


def wide(array: Any) -> Any:
    return array.astype(np.float64)


@pytest.mark.parametrize("name", SPECS)
def test_each_sequence_is_that_of_a_rectangular_batch(name: str) -> None:
    """The longest one, empty ones and ones of a ragged length are among them."""
    spec = spec_of(name)
    made, dims = problem(spec)
    whole = make_inputs(spec.each, dims, 3)
    pairs = sequences.lengths(spec, dims, 3)
    assert {0, 1, 130} <= {keys for _, keys in pairs}
    assert sequences.count(made) == len(pairs) == 5
    for b, (queries, keys) in enumerate(pairs):
        one = sequences.one(made, b)
        assert sequences.keys(made, b) == keys
        assert np.array_equal(wide(one["Q"][0]), wide(whole["Q"][b, :, :queries]))
        for tensor in "KV":
            assert np.array_equal(wide(one[tensor][0]), wide(whole[tensor][b, :, :keys]))
        if spec.kv_dtype is not None:
            assert np.array_equal(one["KDescale"], whole["KDescale"][b : b + 1])
        for key in range(keys):
            at = sequences.key(made, b, 1, key)
            assert np.array_equal(wide(made["V"][at]), wide(whole["V"][b, 1, key]))


@pytest.mark.parametrize("name", SPECS)
def test_what_no_sequence_owns_is_poisoned(name: str) -> None:
    spec = spec_of(name)
    made, _ = problem(spec)
    taken = sum(sequences.keys(made, b) for b in range(5))
    for tensor in "KV":
        spare = made[tensor] == 127 if spec.kv_dtype == "int8" else np.isnan(wide(made[tensor]))
        numbers = (~spare).sum()
        highest = 10 if spec.kv_dtype == "int8" else 0  # that of a head may be one of them
        assert taken * 2 * 16 - highest <= numbers <= taken * 2 * 16  # of heads and columns
        assert numbers < made[tensor].size
    if "Table" in made:
        counts = -(-made["LengthsK"] // made["K"].shape[2])
        there = np.arange(made["Table"].shape[1]) < counts[:, None]
        assert (made["Table"][~there] == sequences.NO_PAGE).all()
        assert len(set(made["Table"][there])) == there.sum() < len(made["K"])


@pytest.mark.parametrize("name", SPECS)
def test_the_reverse_order_is_another_problem_with_the_same_sequences(name: str) -> None:
    made, _ = problem(spec_of(name))
    other = sequences.reordered(made)
    assert {n: x.shape for n, x in other.items()} == {n: x.shape for n, x in made.items()}
    counts = [sequences.keys(made, b) for b in range(5)]
    assert [sequences.keys(other, b) for b in range(5)] == counts[::-1]
    if "Table" in made or "LengthsK" in made:
        ours, theirs = (sequences.one(x, b) for x, b in ((made, 0), (other, 4)))
        assert np.array_equal(wide(ours["K"]), wide(theirs["K"]))


@pytest.mark.parametrize("name", SPECS)
def test_answers_are_those_of_each_sequence(name: str) -> None:
    spec = spec_of(name)
    made, dims = problem(spec)
    answer = Expected(spec, "cpu", None).outputs(made, dims)
    for b in range(5):
        alone = oracle.attention(spec.each, sequences.one(made, b), {})
        rows = sequences.rows(made, b)
        np.testing.assert_allclose(answer["O"][rows], alone["O"][0], atol=1e-6)
        assert np.array_equal(np.isinf(answer["LSE"][rows]), np.isinf(alone["LSE"][0]))
    found = answer["O"].astype(np.float32)
    assert compare(spec, "O", found, answer).ok
    if spec.packed:
        found[:, -1] = 0
        result = compare(spec, "O", found, answer)
        assert (result.ok, result.stray) == (False, 64)
        assert "belong to no sequence" in result.reason


# --- programs -----------------------------------------------------------------------------------


@cache
def code(name: str) -> str:
    return PackedOrder(spec_of(name, head_dim=64), H200).code()


def findings(name: str, *edits: tuple[str, str]) -> list[str]:
    """The codes of what the checker finds, or else the CPU run."""
    text = code(name)
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    verdict = check(parse(text), H200)
    if verdict.errors:
        return [found.code for found in verdict.errors]
    found = judge(Kernels(verdict.kernels), spec_of(name, head_dim=64))
    assert found.ok == (not found.diagnostics)
    return [found.code for found in found.diagnostics]


@pytest.mark.parametrize("name", ["packed", "decode", "decode over pages, fp8"])
def test_the_authors_programs_are_right(name: str) -> None:
    assert findings(name) == []


OLD_SUMS = "O * exp(Smax - NewSmax) + PartO * exp(PartSmax - NewSmax)", "O + PartO"
OLD_TOTALS = (
    "Ssum * exp(Smax - NewSmax) + PartSsum * exp(PartSmax - NewSmax)",
    "Ssum + PartSsum",
)
PAGES, RANGE = "decode over pages", "L = i in 0:kv_length]"
WRONG: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "all start at the first": ("packed", (("= StartsK[batch_idx]", "= StartsK[0]"),), "FW801"),
    "a row beyond the end": (
        "packed",
        (("q_last] from register", "q_last + 1] from register"),),
        "FW605",
    ),
    "the table is not read": (
        PAGES,
        (("P = Table[batch_idx, page_idx]", "P = page_idx"),),
        "FW801",
    ),
    "one table for all": (PAGES, (("Table[batch_idx,", "Table[0,"),), "FW801"),
    "pages beyond the end": (PAGES, ((RANGE, "L = i in 0:max_pages * PageSize]"),), "FW605"),
    "a key too many": (
        PAGES,
        ((RANGE, RANGE.replace("]", " + 1]")), ("< kv_length", "< kv_length + 1")),
        "FW604",
    ),
    "parts without a common maximum": (PAGES, (OLD_SUMS, OLD_TOTALS), "FW801"),
    "values without their scale": (
        "decode over pages, fp8",
        ((" * VDescale[batch_idx, kv_head]", ""),),
        "FW801",
    ),
}


@pytest.mark.parametrize("name", some(WRONG))
def test_wrong_programs_are_refused(name: str) -> None:
    of, edits, expected = WRONG[name]
    assert findings(of, *edits)[0] == expected
