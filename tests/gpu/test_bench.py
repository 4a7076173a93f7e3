"""The benchmark on a GPU: one cell, to see that it measures what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashwright.cli.main import app


def test_one_cell(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    cell = ["--variant", "mha", "--head-dim", "64", "--length", "1024", "--mask", "causal"]
    done = CliRunner().invoke(app, ["bench", "--as", "a100", *cell, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "geometric mean" in done.output
    (found,) = json.loads(out.read_text())["cells"]
    assert {"flashwright", "torch flash"} <= set(found["tflops"])
    assert all(1 < rate < 2000 for rate in found["tflops"].values())


def test_a_candidate_is_timed_by_what_it_takes() -> None:
    """Twice the work takes twice the time, and a busy host is no part of it."""
    import torch

    from flashwright.measure.timing import measure

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    def slow_host() -> None:
        time.sleep(20e-6)
        x @ x

    def twice() -> None:
        x @ x
        x @ x

    found = measure({"once": lambda: x @ x, "twice": twice, "slow": slow_host}, rounds=(20, 20))
    once = found["once"].median
    assert found["twice"].median / once == pytest.approx(2, rel=0.15)
    assert found["slow"].median / once == pytest.approx(1, rel=0.1)
