"""The differential fuzzer: its generator, its shrinker, and a share of its programs."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from flashwright.fuzz import campaign
from flashwright.fuzz.case import FuzzCase, load, save
from flashwright.fuzz.choices import Choices
from flashwright.fuzz.compare import difference
from flashwright.fuzz.generate import generate
from flashwright.fuzz.oracle import Prepared, ProgramOutcome, evaluate_cases, prepare
from flashwright.fuzz.shrink import shrink, size
from flashwright.fuzz.sizes import GPUS
from tests.fuzz.faults import FAULTS, ROOT, programs_until_found
from tests.unit.emulated import needs_compilers

# --- the generator ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_always_gives_the_same_program(seed: int) -> None:
    assert generate(seed) == generate(seed)


@pytest.mark.parametrize("seed", range(40))
def test_the_recorded_choices_give_the_program_again(seed: int) -> None:
    first = generate(seed)
    again = generate(seed, choices=first.choices)
    assert (again.text, again.problems, again.gpu) == (first.text, first.problems, first.gpu)


def test_every_list_of_choices_gives_a_program() -> None:
    rng = np.random.default_rng(0)
    for length in range(0, 120, 3):
        text = generate(1, choices=rng.integers(0, 50, length).tolist()).text
        assert "grid " in text
        assert "Copy O " in text


def test_zeros_are_the_simplest_program() -> None:
    simple = generate(0, choices=[])
    assert simple.gpu == "h200"
    assert len(simple.text.splitlines()) < 40
    assert isinstance(prepare(simple), Prepared)


@pytest.mark.slow
def test_most_programs_are_legal_and_the_others_are_refused() -> None:
    found = Counter()
    for seed in range(0, 40, 2):
        case = generate(seed)
        outcome = prepare(case)
        kind = "ready" if isinstance(outcome, Prepared) else outcome.kind
        assert kind != "crash" or case.spoilt, outcome
        found[case.spoilt, kind] += 1
    assert found[False, "ready"] > 0.7 * sum(n for (spoilt, _), n in found.items() if not spoilt)


def test_choices_wrap_and_go_on_with_zeros() -> None:
    c = Choices(replay=[7, 1])
    assert c.pick("abc") == "b"
    assert c.chance(0.5)
    assert c.shuffled([1, 2, 3]) == [1, 2, 3]
    assert c.taken == [1, 1, 0, 0, 0]


# --- the comparison ---------------------------------------------------------------------------


def test_a_difference_beyond_rounding_is_told() -> None:
    want = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    moved = [want + 1e-5]
    assert difference(want + 2e-5, want, moved, "fp32") is None
    text = difference(want + 2e-4, want, moved, "fp32")
    assert text is not None
    assert text.startswith("64 of 64")
    nan = want.copy()
    nan[3, 4] = np.nan
    assert "(3, 4)" in str(difference(nan, want, moved, "fp32"))
    assert difference(nan, nan, [nan], "fp32") is None


# --- the shrinker -----------------------------------------------------------------------------


def fails_with_softmax(cases: list[FuzzCase]) -> list[ProgramOutcome]:
    """A failure that needs one line and nothing else; everything else is fine."""
    return [
        ProgramOutcome("wrong", "", "O")
        if "Compute Softmax S with" in c.text
        else ProgramOutcome("agree")
        for c in cases
    ]


def test_the_shrinker_keeps_the_failure_and_drops_the_rest() -> None:
    seed = next(s for s in range(99) if "Compute Softmax S with" in generate(s).text)
    case = generate(seed)
    best, outcome = shrink(case, ProgramOutcome("wrong", "", "O"), fails_with_softmax, steps=40)
    assert outcome.kind == "wrong"
    assert "Compute Softmax S with" in best.text
    assert size(best) < size(case)
    assert size(best)[0] < 10
    assert len(best.problems) == 1


def test_the_shrinker_gives_back_what_it_cannot_make_smaller() -> None:
    case = generate(3)
    outcome = ProgramOutcome("hang", "", "deadlock")
    best, found = shrink(case, outcome, lambda cases: [ProgramOutcome("agree") for _ in cases])
    assert (best, found) == (case, outcome)


# --- the record -------------------------------------------------------------------------------


def test_a_case_survives_its_file(tmp_path: Path) -> None:
    case = generate(5)
    save(case, tmp_path / "a.tl", "wrong h200, seed 5")
    again = load(tmp_path / "a.tl")
    assert again == case


def test_a_campaign_goes_on_where_its_record_ends(tmp_path: Path) -> None:
    lines = [campaign.line_of(generate(s), ProgramOutcome("agree")) for s in range(3)]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"seed": 9'
    (tmp_path / campaign.RECORD).write_text(text)
    told: list[object] = []
    campaign.Campaign(range(3), tmp_path).run(told.append)
    assert not told
    assert len(campaign.read(tmp_path)) == 3
    assert "3 programs ran, 0 failed" in campaign.summary(campaign.read(tmp_path))


# --- programs ---------------------------------------------------------------------------------

# Seeds that agree; a change of the generator makes other programs of them.
AGREE = dict.fromkeys(GPUS, (320, 321, 323, 354, 355, 356))


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_programs_of_fixed_seeds_agree(gpu: str) -> None:
    """Of the quick tests, test_cases.py has many programs for another GPU."""
    cases = [generate(seed, (gpu,)) for seed in AGREE[gpu]]
    wrong = {c.seed: o for c, o in zip(cases, evaluate_cases(cases), strict=True) if o.failed}
    assert not wrong


@needs_compilers
@pytest.mark.slow
def test_a_planted_fault_is_found() -> None:
    fault = next(f for f in FAULTS if f.name == "row maximum over two of four threads")
    assert programs_until_found(fault, programs=3, first=AGREE["t4"][0], chunk=3) is not None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_faults_still_fit_the_files(fault: object) -> None:
    text = (ROOT / "flashwright" / fault.file).read_text()  # type: ignore[attr-defined]
    assert fault.old in text  # type: ignore[attr-defined]


@needs_compilers
@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_programs_of_fresh_seeds_agree(gpu: str) -> None:
    """Others in every run: what fails here is found again with `flashwright fuzz --repro SEED`."""
    first = secrets.randbelow(10**9)
    agreed = 0
    for portion in range(first, first + 96, 16):  # on a T4 two programs of three do not fit
        cases = [generate(seed, (gpu,)) for seed in range(portion, portion + 16)]
        outcomes = evaluate_cases(cases)
        wrong = {c.seed: o for c, o in zip(cases, outcomes, strict=True) if o.failed}
        assert not wrong
        agreed += Counter(o.kind for o in outcomes)["agree"]
        if agreed > 6:
            return
    pytest.fail(f"only {agreed} of 96 programs ran and agreed")
