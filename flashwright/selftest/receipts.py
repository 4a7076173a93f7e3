"""The records of a benchmark, and forged copies that contradict themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashwright.author.builtin.variants import make_spec
from flashwright.measure import journal, seal
from flashwright.measure.bench import cell_seed
from flashwright.measure.consistent import RecordFile
from flashwright.measure.grid import Cell
from flashwright.measure.journal import RECORDS, Journal
from flashwright.measure.records import OURS, KernelRecord, NumberRecord, RunRecord

SECONDS = 1e-3
Lines = list[dict[str, Any]]


def differing(function: str, folder: Path) -> list[str]:
    """The differing fields of the honest file, or of the forged file of that name."""
    path = _honest(folder)
    if function in RECEIPTS:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        changed = RECEIPTS[function](lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    record = RecordFile(journal.read_lines(path), folder)
    (name,) = {cell for cell, _ in record.results.numbers}
    number = record.results.numbers[name, OURS]
    return [field.name for field in record.of_number(number, name) if field.status == "differs"]


def _honest(folder: Path) -> Path:
    """A run with one kernel and one number."""
    spec = make_spec("mha", heads=32, head_dim=64, dtype="bf16", causal=True)
    cell = Cell(spec, 1024, 16)
    run = RunRecord(
        id="selftest", started="2026-01-01T00:00:00+00:00", title="grid", card="NVIDIA H200",
        arch="sm_90", translated_for="h200", layout="bshd", seed=3, contestants=(OURS,),
        cells=(cell.name,), environment={},
    )  # fmt: skip
    kernel = KernelRecord(name=cell.kernel, spec=spec.model_dump(mode="json"), gpu="h200")
    number = NumberRecord(
        run=run.id, cell=cell.name, kernel=cell.kernel, length=cell.length, batch=cell.batch,
        who=OURS, seconds=SECONDS, spread=0.01, samples=20, checked=3, relative_rms=1e-3,
        tflops=cell.tflops(SECONDS, cell.work()), seed=cell_seed(run.seed, cell),
    )  # fmt: skip
    book, _ = Journal.begin(folder)
    for record in (run, kernel, number):
        book.add(record)
    return folder / RECORDS


# --- forgeries --------------------------------------------------------------------------------


def _sealed(lines: Lines) -> Lines:
    """The lines with new digests, as a competent forger would write them."""
    before = ""
    for line in lines:
        before = line["digest"] = seal.digest(before, line)
    return lines


def _faster(lines: Lines) -> Lines:
    lines[-1]["seconds"] /= 2
    return lines


def _fewer_flops(lines: Lines) -> Lines:
    lines[-1]["tflops"] *= 2
    return _sealed(lines)


def _chosen_seed(lines: Lines) -> Lines:
    lines[-1]["seed"] += 1
    return _sealed(lines)


def _of_another_run(lines: Lines) -> Lines:
    lines[-1]["run"] = "another"
    return _sealed(lines)


def _without_its_kernel(lines: Lines) -> Lines:
    """Remove a line, which breaks the chain of digests."""
    lines[0]["environment"] = {"torch": "9"}
    lines[0]["digest"] = seal.digest("", lines[0])
    return lines[:1] + lines[2:]


RECEIPTS: Mapping[str, Callable[[Lines], Lines]] = {
    "faster_number": _faster,
    "more_flops": _fewer_flops,
    "chosen_seed": _chosen_seed,
    "number_of_another_run": _of_another_run,
    "line_taken_out": _without_its_kernel,
}
