"""Outputs in place, and strided tensors (docs/language.md, "Outputs in place")."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.build.steps import joined
from flashwright.check.check import check, checked_program
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower.translate import translate
from flashwright.program.kernels import Kernels
from flashwright.semantics.interpret import interpret, interpret_all

WRITE = """\
param BM = 16
param HeadDim = 32
param Warps = 1
dim entries
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:batch
Allocate Entry in global (B: batch) as int32
Allocate Q in global (batch, heads, q_len, HeadDim) as fp16
Allocate O in global (B: entries, H: heads, L: q_len, D: HeadDim) as fp16 in place strided
Copy Q (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from global to register
Copy Q (BM, HeadDim) in coordinate [B = Entry[batch_idx], H = head_idx, L = block_idx]
  from register to global and get O
"""
SIGMOID = (Path(__file__).parents[2] / "examples" / "sigmoid.tl").read_text()
READ = """
grid block_idx = 0:q_len / BM, head_idx = 0:heads, batch_idx = 0:entries
Allocate Sum in global (B: entries, H: heads, L: q_len) as fp32
Allocate Sum in register (BM) as fp32
Copy O (BM, HeadDim) in coordinate [B = batch_idx, H = head_idx, L = block_idx]
  from global to register
Compute rowsum(O) and get Sum
Copy Sum (BM) in coordinate [B = batch_idx, H = head_idx, L = block_idx] from register to global
"""


BACK = "Copy O (BM, HeadDim) in coordinate [B = 0, H = 0, L = 0] from global to shared"


def codes(text: str) -> list[str]:
    return [d.code for d in check(parse(text)).errors]


def test_elements_that_are_not_stored_keep_what_they_had() -> None:
    assert not codes(WRITE)
    assert "as fp16 in place strided" in format_tree(parse(WRITE))
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 20, 32)).astype(np.float16)
    before = rng.standard_normal((5, 3, 20, 32)).astype(np.float16)
    given = {"Q": q, "O": before.copy(), "Entry": np.array([4, 1], np.int32)}
    dims = {"batch": 2, "heads": 3, "kv_heads": 3, "q_len": 20, "kv_len": 20, "entries": 5}
    found = interpret(checked_program(parse(WRITE)), given, dims)["O"]
    before[[4, 1]] = q
    np.testing.assert_array_equal(found, before)


def test_the_launcher_asks_for_it_and_moves_its_elements_one_at_a_time() -> None:
    plan = translate(checked_program(parse(WRITE)), gpus.find("h200")).plan
    tensors = {t.name: t for t in plan.tensors}
    assert tensors["O"].read
    assert tensors["O"].written
    assert tensors["O"].vector == 1
    text = WRITE.replace(" strided", "")
    plan = translate(checked_program(parse(text)), gpus.find("h200")).plan
    assert {t.name: t.vector for t in plan.tensors}["O"] == 8


def test_tma_loads_no_strided_tensor() -> None:
    text = SIGMOID.replace("kv_len, HeadDim) as bf16", "kv_len, HeadDim) as bf16 strided", 1)
    made = translate(checked_program(parse(text)), gpus.find("h200"))
    assert "K" not in {m.tensor for m in made.plan.maps}
    assert "`K` is strided" in str(made.report)


def test_a_later_kernel_reads_it() -> None:
    programs = check(parse(WRITE + READ)).kernels
    kernels = Kernels(tuple(programs))
    assert [t.name for t in kernels.inputs] == ["Entry", "Q", "O"]
    assert [t.name for t in kernels.outputs] == ["O", "Sum"]
    assert not kernels.scratch
    plan = joined([translate(p, gpus.find("a100")).plan for p in programs], ())
    assert [(t.name, t.read) for t in plan.tensors if t.written] == [("O", True), ("Sum", False)]
    dims = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 4, "kv_len": 4, "entries": 2}
    given = {
        "Q": np.ones((1, 1, 4, 32), np.float16),
        "O": np.zeros((2, 1, 4, 32), np.float16),
        "Entry": np.array([1], np.int32),
    }
    found = interpret_all(kernels, given, dims)
    np.testing.assert_array_equal(found["Sum"][:, 0, 0], [0, 32])


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (" in place", "", "FW610"),  # entries that nobody writes
        ("Entry[batch_idx], H", "Entry[0], H", "FW610"),
        ("fp16\nAllocate O", "fp16 in place\nAllocate O", "FW205"),  # Q: nothing stores to it
        ("get O", "accumulate O", "FW205"),
        ("and get O", f"and get O\n{BACK}", "FW612"),
        ("int32\n", "int32 with offset 0 strided\n", "FW205"),
    ],
)
def test_what_is_wrong(old: str, new: str, code: str) -> None:
    assert code in codes(WRITE.replace(old, new))


def test_an_index_beside_others_in_the_text_is_a_part() -> None:
    """Halves of rows are combined, each named by a number; heads and batches are not."""
    text = WRITE.replace("B = batch_idx, H = head_idx", "B = batch_idx, H = 0")
    assert "FW603" in codes(text)
