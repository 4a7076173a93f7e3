"""Every offence that can be committed on a CPU is found, and has its name; honest code passes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashwright.selftest.kernels
from flashwright.confine import landlock
from flashwright.judge.expected import Expected
from flashwright.judge.judge import judge
from flashwright.judge.verdict import Verdict
from flashwright.sandbox.candidate import Candidate
from flashwright.selftest import cpu_cases
from flashwright.selftest.case import SelftestCase
from flashwright.selftest.cases import CASES
from flashwright.selftest.cpu_cases import CALLERS, HONEST_SPECS, SHORT, SPEC
from flashwright.spec import AttentionSpec
from tests.inside import Inside
from tests.share import some, wanted

ROOT = Path(__file__).parents[2]
KERNELS = Path(flashwright.selftest.kernels.__path__[0])
NAMED = {case.name.removeprefix("cpu/"): case for case in CASES if case.on == "cpu"}


def candidate(function: str, module: str = "cpu") -> Candidate:
    return Candidate("python", f"flashwright.selftest.kernels.{module}", function)


def rows(*tables: str) -> list[SelftestCase]:
    """The cases of these tables of selftest/cpu_cases.py."""
    return [NAMED[row[0]] for table in tables for row in getattr(cpu_cases, table)]


def names(found: Verdict) -> tuple[str, ...]:
    return tuple(offence.name for offence in found.offences)


def told(found: Verdict) -> str:
    return "\n".join(f"{o.name}: {o.message}" for o in found.offences)


# --- honest -----------------------------------------------------------------------------------

HONEST = {name: told for name, told in HONEST_SPECS.items() if "dtype" not in told}


@pytest.mark.parametrize("dtype", some(["fp16", "bf16"]))
@pytest.mark.parametrize("name", some(HONEST, 3))
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


@pytest.mark.slow
def test_honest_code_passes_in_a_process_of_its_own() -> None:
    found = judge(candidate("causal", "honest"), SPEC, seed=1, device="cpu")
    assert found.ok, f"seed {found.seed}\n{told(found)}"
    assert found.device == "cpu"
    assert json.loads(json.dumps(found.record()))["ok"] is True


def test_a_nuisance_is_no_offence() -> None:
    one = candidate("prints_a_lot", "cpu_conduct")
    found = judge(one, SPEC, lengths=SHORT, device="cpu")
    assert found.ok, told(found)


# --- found by the whole trial -----------------------------------------------------------------

FOUND = rows("PLAIN", "WHOLE", "CONDUCT", "SPECIAL")
FIRST = {case.expected[0]: case.name for case in reversed(FOUND)}  # of each offence


def by_name(case: SelftestCase) -> str:
    return f"{case.function}-{case.expected[0]}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[] if c.name in FIRST.values() else pytest.mark.slow, id=by_name(c))
        for c in FOUND
    ],
)
def test_found_by_the_whole_trial(case: SelftestCase) -> None:
    """Also those for which the self-test has few lengths."""
    assert case.spec is not None
    found = judge(case.candidate, case.spec, seed=1, device="cpu", sandbox=Inside)
    assert set(case.expected) & set(names(found)), told(found)
    assert not found.ok


VARIED = SPEC.model_copy(update={"repeatable": False})


def test_noise_is_accepted_only_where_the_spec_says_so() -> None:
    found = judge(candidate("noisy"), SPEC, seed=1, device="cpu", sandbox=Inside)
    assert names(found)[0] == "not_repeatable", told(found)
    found = judge(candidate("noisy"), VARIED, seed=1, device="cpu", sandbox=Inside)
    assert found.ok, told(found)
    note = next(n for n in found.notes if "repeatable = false" in n)
    figure = re.search(r"at most (\S+) of an output's RMS", note)
    assert figure is not None
    assert 0 < float(figure[1]) < 2.0**-11
    asked = next(check for check in found.checks if check.name == "repeat")
    assert asked.passed
    assert "same bits" not in asked.question


@pytest.mark.parametrize(
    ("function", "offence"),
    [
        ("far_too_noisy", "low_precision"),
        ("right_once", "not_repeatable"),
        ("noisy_and_one_key_too_many", "mask_ignored"),
        pytest.param("noisy_and_one_key_too_few", "key_ignored", marks=pytest.mark.slow),
        pytest.param("replay_by_shape", "replay", marks=pytest.mark.slow),
        pytest.param("heads_mixed_up", "mask_ignored", marks=pytest.mark.slow),
        pytest.param("reads_behind_v", "out_of_bounds", marks=pytest.mark.slow),
    ],
)
def test_a_spec_that_allows_noise_allows_nothing_else(function: str, offence: str) -> None:
    module = "cpu_conduct" if function == "reads_behind_v" else "cpu"
    found = judge(candidate(function, module), VARIED, seed=1, device="cpu", sandbox=Inside)
    assert offence in names(found), told(found)


def test_a_kernel_with_the_same_bits_is_as_good_where_they_may_differ() -> None:
    one = Candidate("python", "flashwright.selftest.kernels.honest", "honest", factory=True)
    found = judge(one, VARIED, seed=1, device="cpu", sandbox=Inside)
    assert found.ok, told(found)
    assert any("differed by at most 0.0e+00" in note for note in found.notes)


def test_a_dropped_tail_is_also_keys_that_are_not_looked_at() -> None:
    one = candidate("tail_of_keys_dropped")
    assert "key_ignored" in names(judge(one, SPEC, seed=1, device="cpu", sandbox=Inside))


@pytest.mark.parametrize("seed", [27831703, pytest.param(1, marks=pytest.mark.slow)])
def test_keys_of_every_batch_are_changed(seed: int) -> None:
    """Drawn at random, the first seed changed keys of the first batch only."""
    found = judge(candidate("first_batch_only"), SPEC, seed=seed, device="cpu", sandbox=Inside)
    assert {"mask_ignored", "key_ignored"} <= {*names(found)}, told(found)


@pytest.mark.parametrize(
    "function",
    some(["scaled_twice", "maximum_from_zero", "scales_q_in_place", "writes_behind_v"]),
)
def test_only_what_is_wrong_is_told(function: str) -> None:
    """A wrong scale is no wrong mask, a dropped tail no wrong type."""
    case = NAMED[function]
    found = judge(case.candidate, SPEC, seed=1, device="cpu", sandbox=Inside)
    assert set(names(found)) - {"tampering"} <= set(case.expected), told(found)


@pytest.mark.slow
def test_with_another_seed() -> None:
    """Shapes, masks and heads hang on what is drawn."""
    for case in (c for c in rows("WHOLE") if c.kind in ("shapes", "mask")):
        assert case.spec is not None
        found = judge(case.candidate, case.spec, seed=2, device="cpu", sandbox=Inside)
        assert case.expected[0] in names(found), f"{case.name}\n{told(found)}"


# --- found only from outside ------------------------------------------------------------------


@pytest.mark.parametrize("case", some(rows("ENDS"), 3), ids=by_name)
def test_found_from_outside(case: SelftestCase) -> None:
    """test_sandbox.py has every end too, without a judge."""
    found = judge(case.candidate, SPEC, lengths=SHORT, device="cpu", limits=case.limits)
    assert case.expected[0] in names(found), told(found)


# --- libraries --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "as_file"), [*itertools.product(CALLERS, [True]), ("calls_sdpa", False)]
)
def test_a_library_is_found_by_reading(module: str, as_file: bool) -> None:
    """Even where no trial gets to it; in a file, and in a module of a package."""
    one = candidate("attention", module)
    if as_file:
        one = Candidate("python", str(KERNELS / f"{module}.py"), "attention")
    found = judge(one, SPEC, lengths=SHORT, device="cpu", sandbox=Inside)
    assert names(found) == ("library_call",), told(found)
    assert judge(one, SPEC, lengths=SHORT, device="cpu", sandbox=Inside, libraries=True).ok


# --- meddling ---------------------------------------------------------------------------------

MEDDLING = {case.function: case.expected for case in rows("MEDDLING")}
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
def meddled(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The names they are rejected under; those behind one that stops the judge are missing."""
    chosen = [f for f in MEDDLING if f in wanted(request, "function")]
    words = [sys.executable, "-c", PROGRAM, SPEC.model_dump_json(), *chosen]
    try:
        said = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, cwd=ROOT).stdout
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode()
    return {line.split()[0]: line.split()[1:] for line in said.splitlines()}


@pytest.mark.parametrize("function", some(MEDDLING, 7))
def test_meddling_gains_nothing_and_stops_nothing(
    function: str, meddled: dict[str, list[str]]
) -> None:
    assert function in meddled, "the judge was stopped"
    assert set(meddled[function]) & set(MEDDLING[function]), meddled[function]


def test_a_candidate_that_rewrites_itself(tmp_path: Path) -> None:
    """Is refused where the system can do that; where it cannot, the judge sees it."""
    copy = tmp_path / "mine.py"
    shutil.copy(KERNELS / "meddling.py", copy)
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
    monkeypatch.setattr(Expected, "library_errors", lambda *given: {"O": 1e-4})
    one = Candidate("python", str(tmp_path / "off.py"), "attention")
    found = [o.name for o in judge(one, SPEC, seed=1, device="cpu", sandbox=Inside).offences]
    assert found[0] == "wrong"
    assert "low_precision" in found
