"""Every offence that can be committed on a CPU is found, and has its name; honest code passes."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashwright.confine import landlock
from flashwright.judge.expected import Expected
from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.spec import AttentionSpec
from tests.inside import Inside

ROOT = Path(__file__).parents[2]
OFFENCES = ROOT / "tests" / "offences"
SPEC = AttentionSpec.make(
    variant="gqa", heads=4, kv_heads=2, head_dim=16, dtype="fp16", causal=True, lse=False
)
SHORT = [(9, 9), (40, 70)]


def candidate(function: str, module: str = "cpu") -> Candidate:
    return Candidate("python", f"flashwright.selftest.kernels.{module}", function)


def names(found: Verdict) -> tuple[str, ...]:
    return tuple(offence.name for offence in found.offences)


def told(found: Verdict) -> str:
    return "\n".join(f"{o.name}: {o.message}" for o in found.offences)


# --- honest -----------------------------------------------------------------------------------

HONEST: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": 40},
    "both sides": {"window": 40},
    "gqa": {"causal": True, "heads": 4, "kv_heads": 2},
    "mqa": {"heads": 4, "kv_heads": 1},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi": True},
    "sink": {"causal": True, "sink": True},
    "wide v": {"causal": True, "v_dim": 24},
    "scale": {"scale": 0.05},
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(name: str, dtype: str) -> None:
    options = {"variant": "any", "heads": 2, "head_dim": 16, "dtype": dtype, **HONEST[name]}
    one = Candidate("python", "flashwright.selftest.kernels.honest", "honest", factory=True)
    found = judge(one, AttentionSpec.make(**options), seed=1, device="cpu", sandbox=Inside)
    assert found.ok, f"seed {found.seed}\n{told(found)}"
    assert {case.output for case in found.cases} == {"O", "LSE"}
    assert {c.name for c in found.checks if c.passed} >= {
        *("fp64", "written", "repeat", "fresh", "mask", "inputs", "guards", "stream", "files"),
    }


def test_honest_fp8_passes() -> None:
    spec = AttentionSpec.make(variant="mha", heads=2, head_dim=16, dtype="fp8", causal=True)
    one = Candidate("python", "flashwright.selftest.kernels.honest", "honest", factory=True)
    found = judge(one, spec, seed=1, device="cpu", sandbox=Inside)
    assert found.ok, f"seed {found.seed}\n{told(found)}"


def test_honest_code_passes_in_a_process_of_its_own() -> None:
    found = judge(candidate("causal", "honest"), SPEC, seed=1, device="cpu")
    assert found.ok, f"seed {found.seed}\n{told(found)}"
    assert found.device == "cpu"
    assert json.loads(json.dumps(found.record()))["ok"] is True


def test_a_nuisance_is_no_offence() -> None:
    found = judge(candidate("prints_a_lot"), SPEC, lengths=SHORT, device="cpu")
    assert found.ok, told(found)


# --- found by the whole trial -----------------------------------------------------------------

FLAT = SPEC.model_copy(update={"scale": 5e-5})  # standard normal inputs have nearly equal weights
SMALL = SPEC.model_copy(update={"scale": 2e-3})  # of scores, whose exponential is nearly 1 + s
WIDE = SPEC.model_copy(update={"head_dim": 128})  # scores near 100 where inputs are shifted

FOUND: list[tuple[str, str, AttentionSpec]] = [
    ("zeros", "zeros", SPEC),
    ("noise", "wrong", SPEC),
    ("scaled_twice", "wrong", SPEC),
    ("some_rows_nan", "nonfinite", SPEC),
    ("last_rows_unwritten", "unwritten", SPEC),
    ("wider_type", "wrong_form", SPEC),
    ("turned", "wrong_form", SPEC),
    ("a_list", "wrong_form", SPEC),
    ("nothing", "wrong_form", SPEC),
    ("no_output", "wrong_form", SPEC),
    ("weights_in_e4m3", "low_precision", SPEC),
    ("sums_in_fp16", "low_precision", SPEC),
    ("inputs_in_e4m3", "low_precision", SPEC),
    ("other_bits", "not_repeatable", SPEC),
    ("mean_of_v", "wrong", FLAT),
    ("first_order", "wrong", SMALL),
    ("no_maximum", "special_inputs", WIDE),
    ("maximum_from_zero", "special_inputs", SPEC),
    ("tail_of_keys_dropped", "special_shapes", SPEC),
    ("tail_of_keys_dropped", "key_ignored", SPEC),
    ("equal_lengths_only", "special_shapes", SPEC),
    ("no_rows_without_keys", "special_shapes", SPEC),
    ("no_mask", "mask_ignored", SPEC),
    ("one_key_too_many", "mask_ignored", SPEC),
    ("one_key_too_few", "key_ignored", SPEC),
    ("heads_mixed_up", "mask_ignored", SPEC),
    ("first_batch_only", "key_ignored", SPEC),
    ("replay_by_shape", "replay", SPEC),
    ("replay_by_address", "replay", SPEC),
    ("replay_by_sample", "replay", SPEC),
    ("leftover", "replay", SPEC),
    ("scales_q_in_place", "inputs_changed", SPEC),
    ("output_over_q", "inputs_changed", SPEC),
    ("writes_behind_v", "out_of_bounds", SPEC),
    ("writes_before_q", "out_of_bounds", SPEC),
    ("reads_behind_v", "out_of_bounds", SPEC),
    ("raises", "raises", SPEC),
    ("raises_for_ragged", "raises", SPEC),
]


@pytest.mark.parametrize(
    ("function", "offence", "spec"), FOUND, ids=[f"{f}-{name}" for f, name, _ in FOUND]
)
def test_found_by_the_whole_trial(function: str, offence: str, spec: AttentionSpec) -> None:
    found = judge(candidate(function), spec, seed=1, device="cpu", sandbox=Inside)
    assert offence in names(found), told(found)
    assert not found.ok


def test_only_what_is_wrong_is_told() -> None:
    """A wrong scale is no wrong mask, a dropped tail no wrong type."""
    for function, only in (
        ("scaled_twice", {"wrong"}),
        ("maximum_from_zero", {"special_inputs"}),
        ("scales_q_in_place", {"inputs_changed"}),
        ("writes_behind_v", {"out_of_bounds"}),
    ):
        found = judge(candidate(function), SPEC, seed=1, device="cpu", sandbox=Inside)
        assert set(names(found)) - {"tampering"} <= only, told(found)


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whatever_the_seed(seed: int) -> None:
    for function, offence, spec in FOUND[18:27]:  # shapes, masks and heads hang on what is drawn
        found = judge(candidate(function), spec, seed=seed, device="cpu", sandbox=Inside)
        assert offence in names(found), f"{function}\n{told(found)}"


# --- found only from outside ------------------------------------------------------------------

ENDS = [
    ("in_a_thread", "hidden_work", Limits()),
    ("hangs", "hang", Limits(seconds=0.5)),
    ("hangs_deaf", "hang", Limits(seconds=0.5)),
    ("crashes", "crash", Limits()),
    ("writes_to_null", "crash", Limits()),
    ("exits", "crash", Limits()),
    ("takes_memory", "out_of_memory", Limits(memory=1 << 29)),
]


@pytest.mark.parametrize(("function", "offence", "limits"), ENDS, ids=[e[0] for e in ENDS])
def test_found_from_outside(function: str, offence: str, limits: Limits) -> None:
    found = judge(candidate(function), SPEC, lengths=SHORT, device="cpu", limits=limits)
    assert offence in names(found), told(found)


# --- libraries --------------------------------------------------------------------------------

CALLERS = ("calls_sdpa", "calls_flash_attn", "calls_by_name")


@pytest.mark.parametrize(
    ("module", "as_file"), [*itertools.product(CALLERS, [True]), ("calls_sdpa", False)]
)
def test_a_library_is_found_by_reading(module: str, as_file: bool) -> None:
    """Even where no trial gets to it; in a file, and in a module of a package."""
    where = str(OFFENCES / f"{module}.py") if as_file else f"flashwright.selftest.kernels.{module}"
    one = Candidate("python", where, "attention")
    found = judge(one, SPEC, lengths=SHORT, device="cpu", sandbox=Inside)
    assert names(found) == ("library_call",), told(found)
    assert judge(one, SPEC, lengths=SHORT, device="cpu", sandbox=Inside, libraries=True).ok


# --- meddling ---------------------------------------------------------------------------------

MEDDLING: dict[str, tuple[str, ...]] = {
    "writes_garbage": ("tampering",),
    "forges_an_answer": ("tampering",),
    "forges_no_output": ("tampering", "wrong_form"),
    "answers_twice": ("tampering",),
    "forges_an_error": ("tampering",),
    "forges_nonsense": ("tampering",),
    "forges_infinity": ("tampering",),
    "nests_deeply": ("tampering",),
    "floods": ("tampering",),
    "closes_the_pipe": ("tampering", "crash"),
    "output_is_a_pipe": ("tampering",),
    "log_is_a_pipe": ("crash",),
    "no_scratch_folder": ("tampering", "raises"),
    "takes_over_the_worker": ("tampering",),
    "patches_the_judge": ("zeros",),
    "hides_its_thread": ("hidden_work", "zeros", "not_repeatable"),
    "looks_in_memory": ("zeros",),
    "looks_in_files": ("zeros",),
    "looks_at_its_parent": ("zeros",),
}
# In a program of its own: a judge that can be stopped would stop the tests too.
PROGRAM = """
import json, sys
from flashwright.judge.expected import Expected
from flashwright.judge.judge import judge
from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.spec import AttentionSpec
spec, limits = AttentionSpec.make(**json.loads(sys.argv[1])), Limits(seconds=4)
for function in sys.argv[2:]:
    one = Candidate("python", "flashwright.selftest.kernels.meddling", function)
    lengths = [(9, 9), (40, 70)]
    try:
        found = judge(one, spec, seed=1, lengths=lengths, device="cpu", limits=limits)
        print(function, *(o.name for o in found.offences), flush=True)
    except Exception as error:
        print(function, "the judge itself:", type(error).__name__, error, flush=True)
"""


@pytest.fixture(scope="module")
def meddled() -> dict[str, list[str]]:
    """The names they are rejected under; those behind one that stops the judge are missing."""
    words = [sys.executable, "-c", PROGRAM, SPEC.model_dump_json(), *MEDDLING]
    try:
        said = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT).stdout
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
    return {line.split()[0]: line.split()[1:] for line in said.splitlines()}


@pytest.mark.parametrize("function", MEDDLING)
def test_meddling_gains_nothing_and_stops_nothing(
    function: str, meddled: dict[str, list[str]]
) -> None:
    assert function in meddled, "the judge was stopped"
    assert set(meddled[function]) & set(MEDDLING[function]), meddled[function]


def test_a_file_overwritten_after_the_answer_does_not_pass() -> None:
    found = judge(candidate("overwrites_the_output", "meddling"), SPEC, lengths=SHORT, device="cpu")
    assert not found.ok


def test_a_candidate_that_rewrites_itself(tmp_path: Path) -> None:
    """Is refused where the system can do that; where it cannot, the judge sees it."""
    copy = tmp_path / "mine.py"
    shutil.copy(OFFENCES / "meddling.py", copy)
    one = Candidate("python", str(copy), "overwrites_itself")
    if landlock.available():
        before = copy.read_bytes()
        found = judge(one, SPEC, lengths=SHORT, device="cpu")
        assert names(found) == ("raises",)
        assert "PermissionError" in told(found)
        assert copy.read_bytes() == before
    found = judge(one, SPEC, lengths=SHORT, device="cpu", sandbox=Inside)
    assert "tampering" in names(found)
    assert "mine.py" in told(found)


def test_wrong_comes_before_inexact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are tiny, a wrong scale looks like a lack of bits."""
    (tmp_path / "off.py").write_text(
        "from flashwright.selftest.kernels.honest import attention as honest\n"
        "def attention(q, k, v):\n"
        "    return honest(q, k, v, causal=True, scale=0.3)\n"
    )
    monkeypatch.setattr(Expected, "library_error", lambda self, dims: 1e-4)
    one = Candidate("python", str(tmp_path / "off.py"), "attention")
    found = [o.name for o in judge(one, SPEC, seed=1, device="cpu", sandbox=Inside).offences]
    assert found[0] == "wrong"
    assert "low_precision" in found
