"""The grid, the figures and the table of the benchmark; timing itself needs a GPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flashwright.build import driver
from flashwright.cli.bench import table
from flashwright.cli.main import app
from flashwright.measure.bench import OURS, Measured, record, summarise
from flashwright.measure.grid import LENGTHS, Cell, cells
from flashwright.measure.peers import YARDSTICK
from flashwright.measure.timing import Timing

GRID = list(cells())


def test_the_grid_is_the_papers() -> None:
    assert len(GRID) == 3 * 2 * 2 * 6
    assert {c.length * c.batch for c in GRID} == {16_384}
    assert {c.spec.heads * c.spec.head_dim for c in GRID} == {2048}
    assert {c.length for c in GRID} == set(LENGTHS)
    assert {c.spec.dtype for c in GRID} == {"bf16"}
    sharing = {(c.spec.variant, c.spec.heads // c.spec.kv_heads) for c in GRID}
    assert sharing == {("mha", 1), ("gqa", 4), ("mqa", 16), ("mqa", 32)}
    assert len({c.name for c in GRID}) == len(GRID)
    assert len({c.spec for c in GRID}) == 12


def test_the_work_is_counted_by_the_papers_formula() -> None:
    full = next(c for c in GRID if c.name == "mha d128 full 4096")
    assert full.flops == 4 * 4096**2 * 128 * 16 * 4
    causal = next(c for c in GRID if c.name == "mha d128 causal 4096")
    assert causal.flops == full.flops / 2
    assert full.tflops(1e-3) == pytest.approx(full.flops / 1e9)


def test_timings_are_medians_and_quartiles() -> None:
    found = Timing.of([5.0, 1.0, 2.0, 3.0, 100.0])
    assert found.median == 3.0
    assert found.spread == pytest.approx((5.0 - 2.0) / 2 / 3.0)
    assert found.rounds == 5


def measured(cell: Cell, ours: float | None, peer: float | None) -> Measured:
    times = {OURS: ours, YARDSTICK: peer}
    timings = {name: Timing(t, 0.01, 12) for name, t in times.items() if t is not None}
    return Measured(cell, timings, {n: "cannot" for n, t in times.items() if t is None})


def test_the_summary_is_the_geometric_mean_and_the_worst_cell() -> None:
    found = [
        measured(GRID[0], 1.0, 2.0),
        measured(GRID[1], 1.0, 0.5),
        measured(GRID[2], 1.0, 4.0),
        measured(GRID[3], None, 1.0),
        measured(GRID[4], 1.0, None),
    ]
    summary = summarise(found, YARDSTICK)
    assert summary is not None
    assert summary.cells == 3
    assert summary.mean == pytest.approx(math.prod([2.0, 0.5, 4.0]) ** (1 / 3))
    assert (summary.worst, summary.where) == (0.5, GRID[1].name)
    assert summarise(found, "another") is None


def test_the_table_has_a_row_for_each_cell_and_a_dash_for_what_is_missing() -> None:
    out = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    out.print(table([measured(GRID[0], 1e-3, 2e-3), measured(GRID[1], None, 1e-3)]))
    rows: list[Any] = [line.split() for line in out.export_text().splitlines() if line.strip()]
    first, second = rows[-2:]
    rate = f"{GRID[0].tflops(1e-3):.0f}"
    assert first[:5] == ["mha", "d64", "full", "512", rate]
    assert first[-2:] == ["2.00", "1.0%"]
    assert second[:2] == ["1024", "-"]
    assert second[-2:] == ["-", "-"]


class Stopped:
    """A benchmark that is interrupted after its first cell."""

    def __call__(self, grid: Any, made: Any, *, layout: str, done: Any) -> None:
        done(measured(grid[0], 1e-3, 2e-3))
        raise KeyboardInterrupt


def test_an_interruption_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = driver.Card(0, "NVIDIA H200", (9, 0))
    monkeypatch.setattr(driver, "cards", lambda: (card,))
    monkeypatch.setattr("flashwright.judge.gpu.need_torch", lambda: None)
    monkeypatch.setattr("flashwright.cli.bench._torch_version", lambda: "none")
    monkeypatch.setattr("flashwright.measure.kernels.make_all", lambda *a: iter(()))
    monkeypatch.setattr("flashwright.measure.bench.bench", Stopped())
    out = tmp_path / "deep" / "bench.json"
    done = CliRunner().invoke(app, ["bench", "--as", "a100", "--out", str(out)])
    assert done.exit_code == 130
    assert "1 of 72 cells" in done.output
    told = json.loads(out.read_text())
    assert [c["cell"] for c in told["cells"]] == [GRID[0].name]
    assert told["translated_for"] == "a100"


@pytest.mark.parametrize(
    ("option", "code"), [(["--variant", "flash"], "FW902"), (["--head-dim", "7"], "FW901")]
)
def test_a_grid_that_cannot_be_is_refused(
    option: list[str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = driver.Card(0, "NVIDIA H200", (9, 0))
    monkeypatch.setattr(driver, "cards", lambda: (card,))
    monkeypatch.setattr("flashwright.judge.gpu.need_torch", lambda: None)
    done = CliRunner().invoke(app, ["bench", *option])
    assert done.exit_code == 2
    assert code in done.stderr


def test_a_record_has_the_figures_and_the_reasons() -> None:
    told = record(measured(GRID[0], 1e-3, None))
    assert told["seconds"] == {OURS: 1e-3}
    assert told["reasons"] == {YARDSTICK: "cannot"}
    assert told["tflops"][OURS] == pytest.approx(GRID[0].tflops(1e-3), abs=0.1)
