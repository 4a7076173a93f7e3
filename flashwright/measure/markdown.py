"""table.md: a benchmark's figures as Markdown, with the method and the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashwright.measure import tables
from flashwright.measure.records import OURS, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.rows import (
    BenchRow,
    development_in_words,
    paper_in_words,
    ratio_in_words,
    rows,
    table_of,
    value_in_words,
)

FILE = "table.md"


def page(results: Results) -> str:
    """The whole page as Markdown text."""
    return "\n".join(_page(results)).rstrip() + "\n"


def _page(results: Results) -> Iterator[str]:
    run, number = results.run, table_of(results)
    if run is None:
        yield "Nothing was measured."
        return
    yield f"# {run.title} on {run.card}"
    yield ""
    yield from _method(run, results)
    yield ""
    yield from _table(rows(results), results, number)
    yield ""
    if number == 4:
        yield from ("## From the spec to the verdict", "")
        yield from (f"- {line}" for line in development_in_words(results))
        yield ""
    for gpu in tables.TABLES[number].gpus[1:] if number else ():
        yield from (f"## The paper on its {gpu}", "")
        yield from (
            "Each system under its peer; in brackets, how many times as fast the paper's own is.",
            "",
        )
        yield from _paper_table(rows(results, gpu), results)
        yield ""
    yield from _ratios(results)
    yield from _reasons(results)


def _method(run: RunRecord, results: Results) -> Iterator[str]:
    done = sum(results.complete(cell) for cell in run.cells)
    dtype = run.settings.get("dtype", "")
    yield (
        f"{run.started}, {run.card} ({run.arch}), kernels translated for {run.translated_for}, "
        f"{dtype}, inputs laid out {run.layout}; {done} of {len(run.cells)} cells."
    )
    yield ""
    versions = ", ".join(f"{name} {version}" for name, version in run.environment.items())
    yield f"- With {versions}."
    if run.clocks:
        yield "- Before the run: " + ", ".join(f"{n} {v:g}" for n, v in run.clocks.items()) + "."
    for name, rate in run.matmul.items():
        yield f"- A large {name} matrix product reaches {rate:.0f} TFLOPS here."
    if run.copy_gbs is not None:
        yield f"- A copy in its memory moves {run.copy_gbs:.0f} GB/s, read and written."
    yield (
        f"- Medians over interleaved rounds, L2 {run.settings.get('l2', 'cold')}, fresh inputs in "
        f"every call, outputs of timed calls compared with fp64; seed {run.seed}."
    )
    yield "- A ratio above 1 means that ours takes less time. In brackets: the paper's."


def _table(found: Sequence[BenchRow], results: Results, number: int | None) -> Iterator[str]:
    units = " or ".join(dict.fromkeys(row.unit for row in found))
    unit = "time" if number and tables.TABLES[number].unit == "s" else units or "TFLOPS"
    paper = bool(number)
    ours = f"{OURS}, {unit}"
    heads = [f"paper ({tables.TABLES[number].gpus[0]})"] if number else []
    for peer in results.peers:
        heads += [peer, "ratio"]
    yield "| kernel | length | " + " | ".join([ours, *heads, "spread"]) + " |"
    yield "|---|---:|" + "---:|" * (len(heads) + 2)
    before = ""
    for row in found:
        first, *others = row.entries
        cells = [value_in_words(first.value, row.unit)]
        cells += [paper_in_words(first.paper, row.unit)] if paper else []
        for entry in others:
            theirs = paper_in_words(entry.paper, row.unit)
            value = value_in_words(entry.value, row.unit)
            cells.append(f"{value} ({theirs})" if theirs else value)
            cells.append(_both(ratio_in_words(entry.ratio), ratio_in_words(entry.paper_ratio)))
        cells.append("" if row.spread is None else f"{row.spread:.1%}")
        kernel = "" if row.kernel == before else row.kernel
        yield f"| {kernel} | {row.size} | " + " | ".join(cells) + " |"
        before = row.kernel


def _both(ours: str, paper: str) -> str:
    return f"{ours} ({paper})".strip() if paper else ours


def _paper_table(found: Sequence[BenchRow], results: Results) -> Iterator[str]:
    """The paper's figures on its other GPUs, without ours."""
    yield "| kernel | length | " + " | ".join([tables.OURS, *results.peers]) + " |"
    yield "|---|---:|" + "---:|" * (len(results.peers) + 1)
    for row in found:
        first, *others = row.entries
        if all(entry.paper is None for entry in row.entries):
            continue
        cells = [paper_in_words(first.paper, row.unit)]
        for entry in others:
            theirs = paper_in_words(entry.paper, row.unit)
            cells.append(_both(theirs, ratio_in_words(entry.paper_ratio)))
        yield f"| {row.kernel} | {row.size} | " + " | ".join(cells) + " |"


def _ratios(results: Results) -> Iterator[str]:
    lines = [s for peer in results.peers if (s := results.summary(peer)) is not None]
    if not lines:
        return
    yield from ("## Ratios", "", "| against | cells | geometric mean | worst | where |")
    yield "|---|---:|---:|---:|---|"
    for one in lines:
        yield f"| {one.peer} | {one.cells} | {one.mean:.3f} | {one.worst:.3f} | {one.where} |"
    yield ""


def _reasons(results: Results) -> Iterator[str]:
    found = results.reasons()
    if not found:
        return
    yield from ("## Contestants without a number, and why", "")
    for who, why, cells in found:
        where = cells[0] if len(cells) == 1 else f"{len(cells)} cells, such as {cells[0]}"
        yield f"- {who}: {why} ({where})"
