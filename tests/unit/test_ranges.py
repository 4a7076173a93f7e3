"""Ranges of a packed tensor's rows (`L = i in first:last`): the language, the checker, the CPU run,
the kernel, its tensor maps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright import gpu as gpus
from flashwright.build.plan_rules import faults
from flashwright.check.check import check, checked_program
from flashwright.emulate.emulate import run
from flashwright.grad.grad import backward
from flashwright.judge.cpu import judge
from flashwright.lang.diagnostic import Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.lower.targets.hopper import mixed_maps
from flashwright.lower.translate import translate
from flashwright.semantics.interpret import interpret
from flashwright.spec import load
from tests.unit.together import kernels

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = Path(__file__).parents[1] / "cases"
PACKED = (EXAMPLES / "packed.tl").read_text()
STORED = "L = block_idx in q_first:q_last] from register"
KEYS = "L = i in k_first:k_last] from global to shared\n    Compute GEMM Q"


def test_the_formatter_writes_ranges_as_they_are_read() -> None:
    assert format_tree(parse(PACKED)) == PACKED
    one = "Copy Q (BM, HeadDim) in coordinate [L at 3 in a + 1:b] from global to shared\n"
    assert format_tree(parse(one.replace(" in a", "  IN   a"))) == one


def stored(where: str) -> tuple[str, str]:
    """Another place for O."""
    return STORED, f"{where}] from register"


@pytest.mark.parametrize(
    ("edit", "code", "message"),
    [
        (stored("L = block_idx in q_first:q_last + 1"), "FW605", "is not inside axis L"),
        (stored("L = block_idx in q_first:q_first + 3"), "FW610", "never written"),
        (stored("L at q_first + block_idx * BM"), "FW603", "the tile holds q_len"),
        (stored("L = block_idx in q_first:q_last / 2"), "FW306", "is not a whole number"),
        (stored("L = block_idx in q_first:nowhere"), "FW201", "undefined name `nowhere`"),
        (stored("L = block_idx in q_first:q_last, D = 0 in 0:64"), "FW305", "the tile's columns"),
        ((KEYS, KEYS.replace("k_first:", "q_first:")), "FW603", "on the range of kv_len"),
        (("kv_idx < k_last - k_first and", "kv_idx < 9999 or"), "FW609", "are not masked"),
        (("min(k_last - k_first,", "min(k_last - k_first - BN,"), "FW604", "is never added in"),
        (("if block_idx * BM < q_last - q_first", "if block_idx < 1"), "FW610", "never written"),
    ],
)
def test_the_checker_knows_ranges(edit: tuple[str, str], code: str, message: str) -> None:
    assert edit[0] in PACKED
    found = check(parse(PACKED.replace(*edit, 1)), gpus.find("h200")).diagnostics
    first = next(d for d in found if d.code.startswith(code))
    assert message in first.message


def test_packed_sequences_are_attention() -> None:
    assert check(parse(PACKED), gpus.find("h200")).program is not None
    spec = load(EXAMPLES / "packed.toml")
    sizes = {"heads": 4, "kv_heads": 2}
    cases = [{"batch": b, "q_len": 70, "kv_len": n, **sizes} for b, n in ((3, 130), (5, 9))]
    verdict = judge(checked_program(parse(PACKED)), spec, cases=cases, base=EXAMPLES)
    assert not verdict.diagnostics
    assert len(verdict.cases) == 4  # O and LSE


def test_tma_ends_where_a_sequence_does() -> None:
    made = translate(checked_program(parse(PACKED)), gpus.find("h200"))
    assert "fw::range_end - (k_last - (k_first + i * BN))" in made.source
    assert [m.ranges for m in made.plan.maps] == [True] * 3
    assert made.plan.maps[0].box == (1, 1, 1, 64, 64)
    assert LaunchPlan.model_validate_json(made.plan.dump()) == made.plan


def test_only_tiles_of_sequences_are_visited() -> None:
    def scheduler(text: str) -> str:
        source = translate(checked_program(parse(text)), gpus.find("h200")).source
        found = re.search(r"fw::((?:SequenceTiles|TileScheduler)<[^>]*>)", source)
        assert found is not None
        return found[1]

    assert scheduler(PACKED) == "SequenceTiles<64, fw::Order::rising>"
    guard = "if block_idx * BM < q_last - q_first"
    named = PACKED.replace(guard, "let length = q_last - q_first\nif block_idx * BM < length")
    assert scheduler(named) == "SequenceTiles<64, fw::Order::rising>"
    full = re.sub(r"min\((k_last - k_first), .*\) / BN", r"(\1) / BN", PACKED)
    assert scheduler(full) == "SequenceTiles<64, fw::Order::even>"
    for other in ("if q_last - q_first > block_idx * BM", "if block_idx * 64 < q_last - q_first"):
        assert scheduler(PACKED.replace(guard, other)) == "TileScheduler<-1>"


def test_a_tensor_with_four_axes_is_copied_by_helper_warps() -> None:
    text = PACKED.replace("Q in global (H:", "Q in global (P: 1, H:")
    text = text.replace(
        "Q (BM, HeadDim) in coordinate [H", "Q (BM, HeadDim) in coordinate [P = 0, H"
    )
    made = translate(checked_program(parse(text)), gpus.find("h200"))
    report = made.report
    assert report is not None
    assert [m.tensor for m in made.plan.maps] == ["K", "V"]
    assert any("a tensor map has 2 to 5 axes, not 6" in r.text for r in report.remarks)


def test_a_tile_with_and_without_a_range_has_no_map() -> None:
    """A tensor map has one form: the coordinates of the other Copy would not be its own."""
    body = lower(checked_program(parse(PACKED))).body
    load = next(n for n in ir.flat(body) if isinstance(n, ir.Load))
    plain = replace(load, window=replace(load.window, last=None))
    assert mixed_maps((load, plain)) == {load.dest}
    assert not mixed_maps((load, load))
    assert not mixed_maps((plain, plain))


def test_turns_count_whole_tiles_or_those_of_ranges() -> None:
    whole = "Copy dX (BM, HeadDim) in coordinate [L = block_idx] from register to global"
    text = "Copy dX (BM, HeadDim) in coordinate [L = block_idx in 0:9] from register to global"
    program = f"""
param BM = 64
param HeadDim = 64
Allocate dX in global (q_len, HeadDim) as fp32
grid block_idx = 0:q_len / BM
Allocate dX in register (BM, HeadDim) as fp32
Compute 0 and get dX
{text} and accumulate at turn 0
{whole} and accumulate at turn 1
"""
    found = check(parse(program)).diagnostics
    assert any("also accumulated in tiles of a range" in d.message for d in found)
    assert not [d for d in check(parse(program.replace(whole, text))).errors if d.code == "FW613"]


COLUMNS = """
param BM = 64
param BH = 16
param Warps = 1
dim tokens
grid head = 0:heads / BH, batch_idx = 0:batch
Allocate First in global (B: batch + 1) as int32
Allocate X in global (H: heads, L: tokens) as fp32
Allocate Sum in global (B: batch, H: heads) as fp32
Allocate Sum in register (BH) as fp32
let first = First[batch_idx]
let last = First[batch_idx + 1]
Compute 0 and get Sum
for i = 0:(last - first) / BM
  Copy X (BH, BM) in coordinate [H = head, L = i in first:last] from global to register
  Compute rowsum(X) and accumulate Sum
end
Copy Sum (BH) in coordinate [B = batch_idx, H = head] from register to global
"""


def test_the_columns_of_a_tile_in_registers_may_be_a_range() -> None:
    x = np.random.default_rng(0).standard_normal((20, 190)).astype(np.float32)
    x[:, 150:] = np.nan  # behind the last sequence
    given = {"X": x, "First": np.array([0, 7, 7, 150], np.int32)}
    dims = {"batch": 3, "heads": 20, "kv_heads": 20, "q_len": 1, "kv_len": 1, "tokens": 190}
    program = checked_program(parse(COLUMNS))
    parts = [x[:, first:last].sum(axis=1) for first, last in ((0, 7), (7, 7), (7, 150))]
    np.testing.assert_allclose(interpret(program, given, dims)["Sum"], parts, atol=1e-4)
    text = COLUMNS.replace("L = i in", "L at i * BM in")
    assert {d.code for d in check(parse(text)).errors} == {"FW305"}
    assert not translate(program, gpus.find("h200")).plan.maps


def test_a_plan_with_ranges_of_a_vector_is_refused() -> None:
    plan = translate(checked_program(parse(PACKED)), gpus.find("h200")).plan
    assert not list(faults(plan))
    one = plan.maps[0].model_copy(update={"box": (1, 64, 64)})
    assert any("a box of 3 axes" in f for f in faults(plan.model_copy(update={"maps": (one,)})))
    q, k, *others = plan.tensors
    line = k.model_copy(update={"axes": k.axes[2:]})
    small = plan.maps[0].model_copy(update={"box": (1, 1, 64)})
    wrong = plan.model_copy(update={"maps": (small,), "tensors": (q, line, *others)})
    assert any("which a flat tensor or a vector has not" in f for f in faults(wrong))
    both = plan.maps[0].model_copy(update={"pages": True})
    assert any("for one of them" in f for f in faults(plan.model_copy(update={"maps": (both,)})))


def test_there_is_no_derived_gradient_of_ranges() -> None:
    text = (CASES / "packed.tl").read_text()
    with pytest.raises(Failed) as failed:
        backward(checked_program(parse(text)), of=("O",))
    assert "is read in ranges" in failed.value.diagnostics[0].message


@pytest.mark.slow
def test_what_a_sequence_holds_is_seen_by_no_other() -> None:
    """NaN and inf past its end, where TMA loads whole tiles, are those of the next sequence."""
    (kernel,) = kernels([(PACKED, load(EXAMPLES / "packed.toml"))], "h200")
    starts = np.array([0, 70, 100, 230], np.int32)
    dims = {"batch": 3, "heads": 2, "kv_heads": 1, "q_len": 130, "kv_len": 130}

    def outputs(poison: float | None) -> dict[str, Any]:
        drawn = np.random.default_rng(1)
        given = {"Q": (2, 230, 64), "K": (1, 230, 64), "V": (1, 230, 64)}
        arrays = {n: drawn.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in given.items()}
        if poison is not None:
            for array in arrays.values():
                array[:, 70:100] = poison
        out = {
            "O": np.full((2, 230, 64), 7.0).astype(ml_dtypes.bfloat16),
            "LSE": np.full((2, 230), 7.0, np.float32),
        }
        sizes = {**dims, "q_tokens": 230, "kv_tokens": 230}
        both = {"StartsQ": starts, "StartsK": starts}
        assert not run(kernel.program, kernel.plan, {**arrays, **both, **out}, sizes).findings
        return out

    right = outputs(None)
    for poison in (np.nan, np.inf):
        found = outputs(poison)
        for name, array in found.items():
            for rows in (slice(0, 70), slice(100, 230)):
                assert array[:, rows].tobytes() == right[name][:, rows].tobytes()
            assert np.isnan(array[:, 70:100].astype(np.float32)).any()
