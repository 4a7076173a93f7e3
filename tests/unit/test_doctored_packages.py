"""Packages that were doctored so that less is compared than the spec asks for: each is rejected by
name, or what it says is not taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flashwright.judge.emulated import judge_emulated
from flashwright.lang.diagnostic import Failed
from flashwright.selftest import packages
from flashwright.spec import AttentionSpec
from tests.unit import emulated
from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome

SPEC = emulated.SPEC
LENGTHS = [(70, 70)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.write(tmp_path_factory.mktemp("package"))


@pytest.fixture
def folder(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to doctor; judged without many launches of one problem at the end."""
    monkeypatch.setattr("flashwright.judge.emulated.ROUNDS", 1)
    return Path(shutil.copytree(honest, tmp_path / "package"))


@needs_compilers
def test_an_output_that_is_named_otherwise_is_not_left_out(folder: Path) -> None:
    packages.output_renamed(folder)
    found = judge_emulated(folder, SPEC, seed=1, lengths=LENGTHS)
    assert [o.name for o in found.offences] == ["wrong_form"]
    assert "gives no O" in found.offences[0].message


@needs_compilers
@pytest.mark.parametrize("by", ["batch", "heads", "q_len"])
def test_kernels_are_chosen_by_keys_only(folder: Path, by: str) -> None:
    packages.chosen_by_queries(folder, by)
    with pytest.raises(Failed, match="by: Input should be 'kv_len'"):
        judge_emulated(folder, SPEC, seed=1, lengths=LENGTHS)


@needs_compilers
def test_a_kernel_that_did_no_problem_is_not_accepted(folder: Path) -> None:
    packages.kernel_without_problems(folder)
    found = judge_emulated(folder, SPEC, seed=1, seconds=1.0)
    assert not found.ok
    assert "untried" in {o.name for o in found.offences}


@needs_compilers
def test_a_package_does_not_say_how_wrong_it_may_be(folder: Path) -> None:
    spec = SPEC.model_copy(update={"tolerance": 0.999, "repeatable": False})
    lines = [f"{k} = {json.dumps(v)}" for k, v in spec.model_dump(exclude_defaults=True).items()]
    (folder / "spec.toml").write_text("\n".join(lines) + "\n")
    outcome = Outcome("verify", str(folder), "--on", "cpu", "--q-len", "70", "--json")
    told = json.loads(outcome.out)
    assert told["own_spec"] is True
    assert told["spec"]["tolerance"] is None
    assert any("tolerance of 0.999 is ignored" in note for note in told["notes"])
    assert AttentionSpec.make(**told["spec"]).repeatable
    assert any("repeatable = false is ignored" in note for note in told["notes"])
