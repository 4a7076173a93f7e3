"""The paper's tables: each of its figures stands beside the cell of ours that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashwright.cli.bench_show import show_results
from flashwright.cli.bench_show import tables as shown_tables
from flashwright.measure import tables
from flashwright.measure.grid import Cell
from flashwright.measure.markdown import page
from flashwright.measure.peers import registry
from flashwright.measure.records import OURS, AbsentRecord, NumberRecord, Record
from flashwright.measure.results import Results
from flashwright.measure.rows import rows
from flashwright.measure.tables import TABLES, figures
from tests.unit.measure_fakes import made, run_record

PEERS = ("torch flash", "torch cuDNN", "FlexAttention", "naive torch")
PAPER_ROWS = [row for row in tables.rows() if row["table"] in TABLES]


def results_of(
    number: int | None, cells: Sequence[Cell], times: dict[str, float], peers: Sequence[str] = PEERS
) -> Results:
    """A run in which everybody takes its time for a 512th of the length."""
    run = run_record(cells, *peers, table=number, title=f"table {number}")
    records: list[Record] = [run]
    kernels = {cell.kernel: cell.spec for cell in cells}
    records += [made(spec).record({"ok": True}, {"verdict": 4.0}) for spec in kernels.values()]
    for cell in cells:
        for who in run.contestants:
            if who not in times:
                why = "it has no such thing"
                records.append(AbsentRecord(run="run", cell=cell.name, who=who, why=why))
                continue
            seconds = times[who] * cell.length / 512
            records.append(
                NumberRecord(
                    run="run",
                    cell=cell.name,
                    kernel=cell.kernel,
                    length=cell.length,
                    batch=cell.batch,
                    who=who,
                    seconds=seconds,
                    spread=0.01,
                    samples=20,
                    tflops=cell.tflops(seconds),
                    seed=1,
                )
            )
    return Results.of(records)


def test_the_papers_figures_are_all_there() -> None:
    assert len(tables.rows()) == 130
    assert {row["table"] for row in tables.rows()} == set(range(1, 10))


@pytest.mark.parametrize("number", list(TABLES))
def test_every_cell_of_the_paper_is_a_cell_of_ours(number: int) -> None:
    """Each figure is found again, once, at the length and under the system it is printed with."""
    cells = TABLES[number].cells()
    found: list[tuple[Any, ...]] = []
    for cell in cells:
        for told in figures(number, cell.spec, cell.length):
            for system, value in told.by_system.items():
                found.append((told.gpu, system, cell.length, value))
    printed = [
        (row["gpu"], row["system"], int(length), value)
        for row in PAPER_ROWS
        if row["table"] == number
        for length, value in row["by_length"].items()
        if value is not None
    ]
    assert sorted(found) == sorted(printed)
    assert len({cell.name for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("number", "cells", "dtype"),
    [
        (1, 72, "fp16"),
        (2, 6, "fp16"),
        (4, 1, "fp16"),
        (6, 6, "fp8"),
        (7, 72, "fp16"),
        (8, 18, "fp16"),
        (9, 24, "fp16"),
    ],
)
def test_a_table_has_its_cells_and_its_dtype(number: int, cells: int, dtype: str) -> None:
    made = TABLES[number].cells()
    assert (len(made), {cell.spec.dtype for cell in made}) == (cells, {dtype})
    assert {cell.spec.dtype for cell in TABLES[number].cells("bf16")} == {"bf16"}


def test_systems_of_the_paper_have_their_peers() -> None:
    known = {system for peer in registry.BUILT_IN for system in peer.stands_for}
    systems = {row["system"] for row in PAPER_ROWS}
    without = systems - known - {tables.OURS}
    assert without == {"human expert", "speedup over vanilla DeepSeek-V3"}


def test_the_papers_ratio_is_its_own_systems_speed_over_the_peers() -> None:
    cell = next(c for c in TABLES[1].cells() if c.name == "mha d64 causal 4096")
    a100, rtx = figures(1, cell.spec, 4096)
    assert (a100.gpu, rtx.gpu) == ("A100", "RTX8000")
    assert a100.ours == 163.4
    assert a100.ratio("cuDNN") == pytest.approx(163.4 / 152.4)
    assert a100.ratio("vanilla DeepSeek-V3") == 24.39  # the table prints this one itself
    assert rtx.ratio("FlexAttention") == pytest.approx(43.5 / 43.9)
    assert a100.ratio("nothing") is None


def lines(text: str) -> list[list[str]]:
    return [[p.strip() for p in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]


def test_the_page_has_ours_the_peers_and_the_papers() -> None:
    cells = [c for c in TABLES[1].cells() if c.kernel == "mha d64 causal"]
    found = results_of(1, cells, {OURS: 1e-3, "torch flash": 2e-3, "torch cuDNN": 0.5e-3})
    text = page(found)
    row = next(line for line in lines(text) if line[:2] == ["mha d64 causal", "512"])
    rate = cells[0].tflops(1e-3)
    assert row[2:4] == [f"{rate:.1f}", "107.4"]
    assert row[4] == f"{rate / 2:.1f}"  # the source text garbles flash-attention's figure here
    assert row[5] == "2.00x"
    assert row[6:8] == [f"{2 * rate:.1f} (95.3)", f"0.50x ({107.4 / 95.3:.2f}x)"]
    assert row[8:10] == ["- (84.4)", f"({107.4 / 84.4:.2f}x)"]
    assert row[11] == "(14.13x)"  # the vanilla model's own speed is not in the table, the ratio is
    assert "## The paper on its RTX8000" in text
    other = [line for line in lines(text) if line[:2] == ["mha d64 causal", "2048"]][-1]
    assert other[2] == "37.9"
    assert other[4] == f"28.7 ({37.9 / 28.7:.2f}x)"
    assert "- FlexAttention: it has no such thing (6 cells, such as mha d64 causal 512)" in text
    assert "| torch cuDNN | 6 | 0.500 | 0.500 |" in text


def printed(found: Results) -> str:
    out = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in shown_tables(found):
        out.print(table)
    return out.export_text()


def test_the_terminal_shows_the_same_and_is_no_wider_than_it() -> None:
    cells = TABLES[1].cells()
    times = {OURS: 1e-3, "torch flash": 2e-3, "torch cuDNN": 0.5e-3, "naive torch": 9e-3}
    text = printed(results_of(1, cells, times, (*PEERS, "torch efficient", "FlashAttention-3")))
    assert "…" not in text
    part = text[text.index("mha d64 causal") :].split("mha d128")[0]
    line = next(line for line in part.splitlines() if line.split()[:1] == ["4096"])
    under = part.splitlines()[part.splitlines().index(line) + 1]
    assert "(163.4)" in line
    assert "(152.4)" in line
    assert under.split() == [
        *("2.00", f"({163.4 / 158.5:.2f})"),
        *("0.50", f"({163.4 / 152.4:.2f})"),
        *("-", f"({163.4 / 134.7:.2f})"),
        *("9.00", "(24.39)"),
    ]


def test_nsa_as_a_whole_stands_beside_the_papers_seconds() -> None:
    cells = TABLES[9].cells()
    times = {OURS: 1e-3, "naive torch": 3e-3}
    found = results_of(9, cells, times, ("naive torch", "fla, Flex window"))
    ours, naive, fla = rows(found)[1].entries
    assert (ours.value, naive.value, fla.value) == (pytest.approx(2e-3), pytest.approx(6e-3), None)
    assert (ours.paper, naive.paper) == (1.26, 1.68)
    assert naive.paper_ratio == pytest.approx(1.68 / 1.26)
    assert {row.unit for row in rows(found)} == {"s"}
    whole = "| nsa d128 causal window 512 | 512 | 1 ms | 0.67 s | 3 ms (0.84 s) | 3.00x (1.25x) | -"
    assert whole in page(found)
    assert page(found).count("0.67 s") == 1, "a branch has no figure of the paper's"


def test_table_4_tells_what_development_took(capsys: pytest.CaptureFixture[str]) -> None:
    found = results_of(4, TABLES[4].cells(), {OURS: 1e-3})
    text = page(found)
    took = "mha d64 full: 24.8 s (author 0.5 s, translate 0.25 s, build 20 s, verdict 4 s)"
    assert took in text
    assert "the paper's LLM-TL: 10 minutes" in text
    assert "the paper's human expert: months" in text
    show_results(found)
    assert took in capsys.readouterr().out


def test_a_grid_of_ones_own_has_no_figures_of_the_papers() -> None:
    cells = [c for c in TABLES[1].cells() if c.length == 512]
    found = results_of(None, cells, {OURS: 1e-3, "torch flash": 2e-3})
    assert all(e.paper is None for row in rows(found) for e in row.entries)
    assert "(A100)" not in page(found)


def test_nothing_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert page(Results()) == "Nothing was measured.\n"
    show_results(Results())
    assert "Nothing was measured" in capsys.readouterr().out


def test_of_two_lines_the_later_counts() -> None:
    cells = TABLES[4].cells()
    found = results_of(4, cells, {OURS: 1e-3, "torch flash": 2e-3})
    (key,) = [k for k in found.numbers if k[1] == OURS]
    number = found.numbers[key]
    gone = AbsentRecord(run="run", cell=key[0], who=OURS, why="hung", offence="hang")
    assert Results.of([number, gone]).numbers == {}
    assert Results.of([gone, number]).absent == {}


def test_the_summary_is_the_geometric_mean_and_the_worst_cell(tmp_path: Path) -> None:
    cells = [c for c in TABLES[1].cells() if c.kernel == "mha d64 full"][:3]
    found = results_of(1, cells, {OURS: 1e-3, "torch flash": 2e-3})
    slower = found.numbers[cells[1].name, "torch flash"].model_copy(update={"seconds": 1e-3})
    numbers = {**found.numbers, (slower.cell, slower.who): slower}
    summary = Results(found.run, found.kernels, numbers, {}).summary("torch flash")
    assert summary is not None
    assert summary.cells == 3
    assert summary.mean == pytest.approx((2 * 0.5 * 2) ** (1 / 3))
    assert (summary.worst, summary.where) == (0.5, cells[1].name)
    assert found.summary("another") is None
    assert found.fastest_peer(cells[0].name) == "torch flash"
    assert found.fastest_peer(cells[0].name, ["naive torch"]) is None
