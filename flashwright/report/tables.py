"""The tables of a report as data: the text of each value and its sort key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.measure.records import OURS
from flashwright.report import words
from flashwright.report.headline import MARKS
from flashwright.report.model import Bench, CellResults, RecordedCase, RecordedVerdict, ReportKernel
from flashwright.report.ratios import compared

RATES = "TFLOPS"
RATIOS = "ours, times as fast as"
SECONDS = "seconds"
STATES = {
    "right": "right",
    "rejected": "rejected",
    "missing": "no kernel",
    "cpu": "right on the CPU",
    "emulated": "right under emulation",
    "unjudged": "not judged",
    "changed": "changed since",
}
PTXAS = {
    "registers": "registers",
    "spills": "spills, B",
    "stack": "stack, B",
    "shared": "shared, KB",
    "threads": "threads",
}


@dataclass(frozen=True)
class Value:
    """A value of a table: its text and its sort key."""

    text: str
    key: float | None = None
    note: str = ""
    """Details, shown as a tooltip on the page."""
    tone: str = ""
    """good, bad, none, or faster and slower."""
    link: str = ""
    """The name of a kernel of the report."""


@dataclass(frozen=True)
class Column:
    """A column heading; columns of one group share a group heading."""

    title: str
    group: str = ""
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Columns and rows; each row has a value for each column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def without(self, *groups: str) -> Table:
        """The table without the columns of some groups."""
        kept = [i for i, c in enumerate(self.columns) if c.group not in groups]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return Table(tuple(self.columns[i] for i in kept), rows)


# --- speed ------------------------------------------------------------------------------------


def cells(bench: Bench) -> Table:
    """A row for each cell: all rates, our ratio to each peer, and the spread."""
    ours = [n for c in bench.cells if (n := c.numbers.get(OURS)) is not None]
    has_share = any(n.share is not None for n in ours)
    has_bytes = any(n.gbs is not None for n in ours)
    paper = next((c.paper for c in bench.cells if c.paper), None)
    beside = any(c.paper.ratio is not None for c in bench.cells if c.paper)
    many = len(bench.peers) > 1
    columns = [
        Column("kernel", number=False),
        Column("length"),
        *(Column(words.who(who), RATES) for who in (OURS, *bench.peers)),
        *(Column(peer, RATIOS) for peer in bench.peers),
        *([Column("fastest peer", RATIOS)] if many else []),
        Column("spread"),
        *([Column("of matmul")] if has_share else []),
        *([Column("GB/s")] if has_bytes else []),
        *([Column(paper.unit, f"paper, {paper.gpu}")] if paper else []),
        *([Column("to its fastest", f"paper, {paper.gpu}")] if paper and beside else []),
    ]
    rows = []
    for cell in bench.cells:
        own = cell.numbers.get(OURS)
        rows.append(
            (
                Value(cell.kernel, link=bench.kernels.get(cell.kernel, "")),
                Value(words.size(cell.length), cell.length),
                *(_rate(cell, who) for who in (OURS, *bench.peers)),
                *(_ratio(cell.ratio(peer)) for peer in bench.peers),
                *([_ratio(cell.best_ratio(), cell.best_peer() or "")] if many else []),
                _spread(own.spread if own else None),
                *([_share(own.share if own else None)] if has_share else []),
                *([_plain_rate(own.gbs if own else None)] if has_bytes else []),
                *_paper(cell, (paper is not None) + (paper is not None and beside)),
            )
        )
    return Table(tuple(columns), tuple(rows))


def _rate(cell: CellResults, who: str) -> Value:
    """A rate with its time, or the reason for none."""
    absent = cell.absent.get(who)
    if absent is not None:
        offence = f"{absent.offence}: " if absent.offence else ""
        return Value(
            absent.offence or words.NOTHING,
            note=f"{offence}{absent.why}",
            tone="bad" if absent.offence else "none",
        )
    number = cell.numbers.get(who)
    if number is None:
        return Value(words.NOTHING, note="not measured", tone="none")
    note = f"{words.time(number.seconds)} ± {words.share(number.spread)}, {number.samples} calls"
    if number.wall_seconds is not None:
        note += f"; {words.time(number.wall_seconds)} in a burst by the judge's clock"
    if number.warm_seconds is not None:
        note += f"; {words.time(number.warm_seconds)} with a warm L2"
    if number.checked:
        note += f"; {number.checked} outputs checked, error {words.error(number.relative_rms)}"
    if who == OURS and not cell.counts:
        return Value(words.rate(number.tflops), number.tflops, f"rejected; {note}", "bad")
    return Value(words.rate(number.tflops), number.tflops, note)


def _ratio(ratio: float | None, note: str = "") -> Value:
    tone = {"faster": "faster", "slower": "slower"}.get(compared(ratio), "") if ratio else "none"
    return Value(words.ratio(ratio), ratio, note, tone)


def _spread(spread: float | None) -> Value:
    return Value(words.share(spread), spread, tone="none" if spread is None else "")


def _share(share: float | None) -> Value:
    return Value(words.share(share, 0), share, tone="none" if share is None else "")


def _paper(cell: CellResults, columns: int) -> list[Value]:
    """The paper's figure, and its ratio to the fastest library there."""
    figure = cell.paper
    if figure is None:
        return [Value(words.NOTHING, tone="none")] * columns
    note = f"times as fast as {figure.library}" if figure.library else ""
    both = [
        Value(f"{figure.value:g}", figure.value),
        Value(words.ratio(figure.ratio), figure.ratio, note),
    ]
    return both[:columns]


def _plain_rate(rate: float | None) -> Value:
    return Value(words.rate(rate), rate, tone="none" if rate is None else "")


def absences(bench: Bench) -> list[tuple[str, str, str]]:
    """Contestants without a figure: (contestant, reason, cells)."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in bench.cells:
        for who, record in cell.absent.items():
            why = f"{record.offence}: {record.why}" if record.offence else record.why
            found.setdefault((who, why), []).append(cell.name)
    return [(words.who(w), why, words.listed(names)) for (w, why), names in found.items()]


# --- kernels ----------------------------------------------------------------------------------


def kernels(every: Sequence[ReportKernel]) -> Table:
    """A row for each kernel, with its verdict."""
    titles = ("worst error of O", "to the library's", "outputs", "checks")
    columns = (Column("kernel", number=False), Column("verdict", number=False))
    rows = []
    for kernel in every:
        verdict = kernel.verdict or RecordedVerdict(ok=False)
        asked = [c for c in verdict.checks if c.passed is not None]
        passed = sum(bool(c.passed) for c in asked)
        ratio = verdict.worst_ratio
        rows.append(
            (
                Value(kernel.name, link=kernel.name),
                state(kernel),
                Value(words.error(verdict.worst), verdict.worst),
                Value(f"{words.ratio(ratio)}×" if ratio else words.NOTHING, ratio),
                Value(str(verdict.outputs or words.NOTHING), verdict.outputs),
                Value(f"{passed} of {len(asked)}" if asked else words.NOTHING, passed),
            )
        )
    return Table((*columns, *(Column(t) for t in titles)), tuple(rows))


def state(kernel: ReportKernel) -> Value:
    """The state of a kernel as a table value."""
    tone = {"right": "good", "rejected": "bad", "missing": "bad"}.get(kernel.state, "none")
    return Value(f"{MARKS[kernel.state]} {STATES[kernel.state]}", tone=tone)


def ptxas(every: Sequence[ReportKernel]) -> Table | None:
    """ptxas figures and stage times of each kernel; None if nothing is known."""
    known = [k for k in every if k.ptxas or k.seconds]
    if not known:
        return None
    names = [n for n in PTXAS if any(n in k.ptxas for k in known)]
    names += list(dict.fromkeys(n for k in known for n in k.ptxas if n not in PTXAS))
    stages = list(dict.fromkeys(n for k in known for n in k.seconds))
    columns = [Column("kernel", number=False)]
    columns += [Column(PTXAS.get(n, n.replace("_", " "))) for n in names]
    columns += [Column(s, SECONDS) for s in stages]
    rows = []
    for kernel in known:
        row = [Value(kernel.name, link=kernel.name)]
        row += [_figure(n, kernel.ptxas.get(n)) for n in names]
        row += [_seconds(kernel.seconds.get(s)) for s in stages]
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def _figure(name: str, value: int | None) -> Value:
    if value is None:
        return Value(words.NOTHING, tone="none")
    text = f"{value / words.KB:g}" if name == "shared" else str(value)
    return Value(text, value, tone="bad" if name == "spills" and value else "")


def _seconds(value: float | None) -> Value:
    return Value(words.NOTHING if value is None else f"{value:.2f}", value)


def checks(verdict: RecordedVerdict) -> Table:
    """A row for each check of the judge."""
    rows = []
    for check in verdict.checks:
        answer = {True: Value("✓ passed", tone="good"), False: Value("✗ failed", tone="bad")}
        asked = answer.get(check.passed) if check.passed is not None else None
        rows.append(
            (
                Value(check.name),
                Value(check.question),
                Value(str(check.tried) if check.tried else words.NOTHING, check.tried),
                asked or Value("not asked", tone="none"),
                Value(check.note),
            )
        )
    titles = ("check", "question", "tried", "answer", "note")
    return Table(tuple(Column(t, number=t == "tried") for t in titles), tuple(rows))


def cases(every: Sequence[RecordedCase]) -> Table:
    """A row for each output of each problem."""
    rows = []
    for case in every:
        ratio = case.ratio
        rows.append(
            (
                Value(case.kind or words.NOTHING),
                Value(case.problem),
                Value(case.output),
                Value(words.error(case.relative_rms), case.relative_rms),
                Value(words.error(case.relative_max), case.relative_max),
                Value(words.error(case.library_rms), case.library_rms),
                Value(f"{words.ratio(ratio)}×" if ratio is not None else words.NOTHING, ratio),
                Value("✓ agrees", tone="good")
                if case.ok
                else Value(f"✗ {case.reason}", tone="bad"),
            )
        )
    text = ("inputs", "problem", "output", "verdict")
    titles = ("inputs", "problem", "output", "rms error", "max error", "library's", "ratio")
    return Table(tuple(Column(t, number=t not in text) for t in (*titles, "verdict")), tuple(rows))
