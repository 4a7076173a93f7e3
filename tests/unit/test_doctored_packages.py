"""Packages that were doctored so that less is compared than the spec asks for: each is rejected by
name, or what it says is not taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashwright.judge.emulated import judge_emulated
from flashwright.lang.diagnostic import Failed
from flashwright.spec import AttentionSpec
from tests.unit import emulated
from tests.unit.emulated import needs_compilers
from tests.unit.test_cli import Outcome

SPEC = emulated.SPEC
LENGTHS = [(70, 70)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated.write(tmp_path_factory.mktemp("package"))


def doctored(folder: Path, to: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a package with one of its files changed."""
    shutil.copytree(folder, to)
    told = json.loads((to / name).read_text())
    change(told)
    (to / name).write_text(json.dumps(told))
    return to


def rename(old: str, new: str) -> Callable[[Any], None]:
    def change(plan: Any) -> None:
        for tensor in plan["tensors"]:
            if tensor["name"] == old:
                tensor["name"] = new

    return change


@needs_compilers
def test_an_output_that_is_named_otherwise_is_not_left_out(honest: Path, tmp_path: Path) -> None:
    folder = doctored(honest, tmp_path / "p", "launch.json", rename("O", "Other"))
    found = judge_emulated(folder, SPEC, seed=1, lengths=LENGTHS)
    assert [o.name for o in found.offences] == ["wrong_form"]
    assert "gives no O" in found.offences[0].message


@needs_compilers
@pytest.mark.parametrize("by", ["batch", "heads", "q_len"])
def test_kernels_are_chosen_by_keys_only(honest: Path, tmp_path: Path, by: str) -> None:
    folder = tmp_path / "p"
    shutil.copytree(honest, folder)
    shutil.copytree(honest, folder / "bad")
    rules = [{"up_to": 5, "kernel": "."}, {"kernel": "bad"}]
    (folder / "classes.json").write_text(json.dumps({"by": by, "rules": rules}))
    with pytest.raises(Failed, match="by: Input should be 'kv_len'"):
        judge_emulated(folder, SPEC, seed=1, lengths=LENGTHS)


@needs_compilers
def test_a_kernel_that_did_no_problem_is_not_accepted(honest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    shutil.copytree(honest, folder)
    shutil.copytree(honest, folder / "bad")
    rules = [{"up_to": 10**6, "kernel": "."}, {"kernel": "bad"}]
    (folder / "classes.json").write_text(json.dumps({"rules": rules}))
    found = judge_emulated(folder, SPEC, seed=1, seconds=1.0)
    assert not found.ok
    assert "untried" in {o.name for o in found.offences}


@needs_compilers
def test_a_package_does_not_say_how_wrong_it_may_be(honest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    shutil.copytree(honest, folder)
    spec = SPEC.model_copy(update={"tolerance": 0.999, "repeatable": False})
    lines = [f"{k} = {json.dumps(v)}" for k, v in spec.model_dump(exclude_defaults=True).items()]
    (folder / "spec.toml").write_text("\n".join(lines) + "\n")
    outcome = Outcome("verify", str(folder), "--on", "cpu", "--q-len", "70", "--json")
    told = json.loads(outcome.out)
    assert told["own_spec"] is True
    assert told["spec"]["tolerance"] is None
    assert any("tolerance of 0.999 is not taken" in note for note in told["notes"])
    assert AttentionSpec.make(**told["spec"]).repeatable
    assert any("repeatable = false is not taken" in note for note in told["notes"])
