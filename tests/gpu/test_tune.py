"""A tuning on a GPU: it ends, what it keeps is right, and the package calls the right kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import flashwright
from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.variants import make_spec
from flashwright.build import classes, driver
from flashwright.build.classes import OWN, Classes, Rule
from flashwright.cli.main import app
from flashwright.judge.judge import judge
from flashwright.measure.tune.state import read
from flashwright.sandbox.candidate import Candidate
from tests.gpu.made import code_of

SPEC = make_spec("mha", heads=32, head_dim=64, causal=True, dtype="bf16")


@pytest.fixture
def gpu() -> str:
    """The card's own kernels, or those of an A100 where it is none that we know."""
    try:
        return gpus.find(driver.cards()[0].name).name
    except gpus.UnknownGpu:
        return "a100"


def test_a_package_is_tuned_and_stays_right(tmp_path: Path, gpu: str) -> None:
    (tmp_path / "code.tl").write_text(code_of(SPEC, gpu))
    (tmp_path / "spec.toml").write_text(specs.dump(SPEC))
    options = ["--gpu", gpu, "--lengths", "512,4096", "--candidates", "4"]
    done = CliRunner().invoke(app, ["tune", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    found = read(tmp_path)
    assert found is not None
    assert found.complete
    assert all(one.first or one.failure for one in found.tried)
    again = CliRunner().invoke(app, ["tune", str(tmp_path), *options, "--resume"])
    assert again.exit_code == 0, again.output
    # Whatever was chosen: the same package with two kernels by force, on both sides of the bound.
    other = next((k.kernel for k in found.kept if k.kernel != OWN), None)
    if other is None:
        pytest.skip("its own kernel is the best everywhere: there is no second one")
    rules = Classes(rules=(Rule(up_to=300, kernel=other), Rule(kernel=OWN)))
    (tmp_path / classes.CLASSES).write_text(rules.dump())
    assert isinstance(flashwright.load(tmp_path), classes.Kernels)
    verdict = judge(Candidate.package(tmp_path), SPEC, seed=1)
    assert verdict.ok, verdict
    lengths = {case.dims["kv_len"] for case in verdict.cases}
    assert {300, 301} <= lengths
