"""Read a benchmark's records as a run and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from flashwright.lower.source_map import SourceMap
from flashwright.measure import journal
from flashwright.measure.records import OURS, AbsentRecord, KernelRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.report.model import Bench, CellResults, PaperFigure, RecordedVerdict, ReportKernel
from flashwright.report.reading import bad, spec_of, validated
from flashwright.report.words import listed
from flashwright.spec import AttentionSpec

FILES = {"tl": "code.tl", "source": "kernel.cu", "cubin": "kernel.cubin"}

PaperLookup = Callable[[int, AttentionSpec, int], PaperFigure | None]
"""Looks up the paper's figure by table, spec and length."""


def read(path: Path, paper: PaperLookup) -> tuple[Bench, list[ReportKernel]]:
    """The run and the kernels of a file. Raises Failed if a record is invalid."""
    results = Results.of(journal.read(path))
    run = results.run
    if run is None:
        raise bad(path, "there is no run in it")
    caught = _caught(results)
    kernels = {n: _kernel(path, run, record, caught) for n, record in results.kernels.items()}
    cells = tuple(_cells(results, run, kernels, paper))
    bench = Bench(
        record=run,
        source=str(path),
        cells=cells,
        kernels=dict.fromkeys((c.kernel for c in cells), ""),
        dtypes={n: str(record.spec.get("dtype", "")) for n, record in results.kernels.items()},
    )
    return bench, list(kernels.values())


def _cells(
    results: Results, run: RunRecord, kernels: Mapping[str, ReportKernel], paper: PaperLookup
) -> Iterator[CellResults]:
    """The cells that have a record."""
    for name in results.cells:
        kernel, _, length = name.rpartition(" ")
        size = int(length) if length.isdecimal() else None
        known = kernels.get(kernel)
        figure = None
        if run.table is not None and known is not None and known.spec is not None and size:
            figure = paper(run.table, known.spec, size)
        yield CellResults(
            name=name,
            kernel=kernel if size is not None else name,
            length=size,
            numbers={w: n for (c, w), n in results.numbers.items() if c == name},
            absent={w: n for (c, w), n in results.absent.items() if c == name},
            counts=known is None or known.state != "rejected",
            paper=figure,
        )


def _caught(results: Results) -> dict[str, list[AbsentRecord]]:
    """By kernel: the offences of ours that were found while it was measured."""
    found: dict[str, list[AbsentRecord]] = {}
    for (cell, who), record in results.absent.items():
        if who == OURS and record.offence:
            found.setdefault(cell.rpartition(" ")[0], []).append(record)
    return found


def _failures(caught: Sequence[AbsentRecord], verdict: RecordedVerdict | None) -> tuple[str, ...]:
    """A line for each offence that is not in the kernel's verdict."""
    known = {o.name for o in verdict.offences} if verdict else set()
    where: dict[str, list[str]] = {}
    for one in caught:
        if one.offence not in known:
            where.setdefault(f"{one.offence}: {one.why}", []).append(one.cell)
    return tuple(f"{line} ({listed(cells)})" for line, cells in where.items())


def _kernel(
    path: Path, run: RunRecord, record: KernelRecord, caught: Mapping[str, list[AbsentRecord]]
) -> ReportKernel:
    within = f"kernel {record.name!r}"
    verdict = None
    if record.verdict:
        data = {"device": run.card, "arch": run.arch, **record.verdict}
        verdict = validated(RecordedVerdict, data, path, within)
    source_map = validated(SourceMap, record.map, path, within)
    return ReportKernel(
        name=record.name,
        spec=spec_of(record.spec, path, within) if record.spec else None,
        gpu=record.gpu,
        tl=record.tl,
        source=record.source,
        map=source_map.lines,
        reasoning=record.reasoning,
        hashes={FILES.get(name, name): digest for name, digest in record.hashes.items()},
        ptxas=_ptxas(record.ptxas),
        seconds=record.seconds,
        verdict=verdict,
        failures=_failures(caught.get(record.name, ()), verdict),
        why=record.why,
    )


def _ptxas(ptxas: Mapping[str, int]) -> dict[str, int]:
    """ptxas figures, with spill stores and loads summed."""
    spills = [ptxas[n] for n in ("spill_stores", "spill_loads") if n in ptxas]
    kept = {n: v for n, v in ptxas.items() if n not in ("spill_stores", "spill_loads")}
    return {**kept, "spills": sum(spills)} if spills else kept
