"""The static check of a receipt: fields that follow from other fields of the same file, or from the
files beside it. It builds and measures nothing, so it needs no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.build.package import CLASSES
from flashwright.files import cannot, sha256
from flashwright.measure import kernels
from flashwright.measure.bench import cell_seed, gbs_of, problem_of
from flashwright.measure.ceilings import Ceilings
from flashwright.measure.fields import CLOSE, RULES, Field, exact, near, unchecked
from flashwright.measure.grid import Cell, kernel_name
from flashwright.measure.journal import JournalLine
from flashwright.measure.records import OURS, AbsentRecord, KernelRecord, NumberRecord, RunRecord
from flashwright.measure.results import Results
from flashwright.measure.session import KERNELS, run_id, settings_of
from flashwright.measure.tables import TABLES
from flashwright.measure.work import Work
from flashwright.spec import AttentionSpec, BadSpec

SELECTED = 0.05
"""Relative tolerance for the work of a selected branch, whose blocks are drawn at random."""
NO_DIGEST = "the file has no digests: an older version wrote it, or they were removed"
_JUDGED = ("ok", "candidate", "device", "arch")
"""Fields of a verdict that are compared; the others were observed once."""
ALONE = "it was observed once; only the digest of its line protects it"


class RecordFile:
    """A file of records; its methods check the fields against each other."""

    def __init__(self, lines: Sequence[JournalLine], folder: Path) -> None:
        self.results = Results.of(line.record for line in lines)
        assert self.results.run is not None  # `receipt.numbers` has checked it
        self.run: RunRecord = self.results.run
        self.folder = folder
        self._lines = {id(line.record): line for line in lines}
        self._runs = sum(isinstance(line.record, RunRecord) for line in lines)
        self.specs = {name: spec_of(one) for name, one in self.results.kernels.items()}

    # --- digests, and the fields that only digests protect -----------------------------------

    def sealed(
        self, record: RunRecord | KernelRecord | NumberRecord | AbsentRecord, who: str = ""
    ) -> Iterator[Field]:
        """The digest of a record's line, and the fields that only the digest protects."""
        line, kind, end = self._lines[id(record)], record.record, f" ({who})" if who else ""
        link = line.link
        if link.missing:
            yield unchecked(f"{kind}.digest{end}", None, NO_DIGEST)
        else:
            why = f"line {line.number} was changed, or does not follow its original predecessor"
            yield exact(f"{kind}.digest{end}", link.recorded, link.found, why)
        unverifiable = {n: getattr(record, n) for n, rule in RULES[kind].items() if rule == "told"}
        if isinstance(record, KernelRecord):
            unverifiable |= {
                f"verdict.{n}": v for n, v in record.verdict.items() if n not in _JUDGED
            }
        for name, value in unverifiable.items():
            one = unchecked(f"{kind}.{name}{end}", value, NO_DIGEST)
            yield one if link.missing else replace(one, status="told", why=ALONE)
        # The reader refuses lines in which these are wrong.
        for name in ("record", "schema_version"):
            if name in RULES[kind]:
                value = getattr(record, name)
                yield exact(f"{kind}.{name}{end}", value, value)

    # --- the run ------------------------------------------------------------------------------

    def of_run(self) -> Iterator[Field]:
        """The fields of the run's record, checked against the other records."""
        run = self.run
        yield from self.sealed(run)
        if self._runs > 1:
            yield Field("run.record", "differs", self._runs, 1, "a file is of one run")
        yield exact("run.id", run.id, run_id(run), "the digest of the run's settings and machine")
        yield from self._title()
        yield from self._names()
        yield from self._settings()
        yield from self._dtypes()
        yield self._architecture()
        yield self._translated_for()
        numbers = self.results.numbers.values()
        follow = not numbers or any(n.seed == self._seed(n) for n in numbers)
        yield exact(
            "run.seed", run.seed, run.seed if follow else None, "no number's inputs follow from it"
        )

    def _title(self) -> Iterator[Field]:
        """A run of a table of the paper has the table's title, and only cells of the table."""
        run = self.run
        if run.table is not None:
            yield exact("run.title", run.title, f"table {run.table}", "the table's")
        else:
            named = run.title.removeprefix("table ")
            found = int(named) if run.title != named and named in map(str, TABLES) else None
            yield exact("run.table", None, found, "from the run's title")
            return
        if run.table not in TABLES:
            yield unchecked("run.table", run.table, "this version does not know the table")
            return
        dtypes = {spec.dtype for spec in self.specs.values() if isinstance(spec, AttentionSpec)}
        own_cells = {c.name for dtype in dtypes for c in TABLES[run.table].cells(dtype)}
        strange = [cell for cell in run.cells if cell not in own_cells]
        found = None if strange else run.table
        yield exact("run.table", run.table, found, f"{strange[:1]} is no cell of it")

    def _names(self) -> Iterator[Field]:
        """The run's lists of contestants and cells must include those of all other records."""
        run, every = self.run, {**self.results.numbers, **self.results.absent}
        who = tuple(dict.fromkeys((OURS, *run.contestants, *(w for _, w in every))))
        yield exact(
            "run.contestants", run.contestants, who, "all contestants that have records, ours first"
        )
        cells = tuple(dict.fromkeys((*run.cells, *(c for c, _ in every))))
        yield exact("run.cells", run.cells, cells, "all cells that have records")
        lacking = [cell for cell in self.results.cells if (cell, OURS) not in every]
        if lacking:
            why = "other contestants have records there"
            yield Field(
                "number.who", "differs", None, OURS, f"no record of ours in {lacking[0]}: {why}"
            )

    def _settings(self) -> Iterator[Field]:
        """The digests of specs and sizes, the dtypes, and whether a warm L2 was measured."""
        run = self.run
        warm = any(n.warm_seconds is not None for n in self.results.numbers.values())
        cells = [self._any_cell(name) for name in run.cells]
        whole = [cell for cell in cells if cell is not None]
        found = settings_of(whole, warm)
        for name in dict.fromkeys((*run.settings, *found)):
            recorded, label = run.settings.get(name), f"run.settings.{name}"
            if len(whole) < len(cells) and name != "l2":
                yield unchecked(label, recorded, "not every cell of the run has a number")
            else:
                yield exact(label, recorded, found.get(name), "from the kernels and numbers")

    def _dtypes(self) -> Iterator[Field]:
        """The matrix product is measured only in the dtypes of the kernels."""
        dtypes = {spec.dtype for spec in self.specs.values() if isinstance(spec, AttentionSpec)}
        for dtype, rate in self.run.matmul.items():
            if dtype not in dtypes:
                yield Field(
                    f"run.matmul.{dtype}", "differs", rate, None, "no kernel has this dtype"
                )

    def _any_cell(self, name: str) -> Cell | None:
        """A cell of the run, by the first number in it."""
        spec = self.specs.get(name.rpartition(" ")[0])
        for who in self.results.contestants:
            number = self.results.numbers.get((name, who))
            if number is not None and isinstance(spec, AttentionSpec):
                return _cell(spec, number)
        return None

    def _architecture(self) -> Field:
        try:
            own = gpus.find(self.run.card).arch.rstrip("af")
        except gpus.UnknownGpu:
            return unchecked(
                "run.arch", self.run.arch, f"this version does not know {self.run.card}"
            )
        return exact("run.arch", self.run.arch, own, f"that of {self.run.card}")

    def _translated_for(self) -> Field:
        """The GPU of a kernel, or the card if all kernels came as packages."""
        recorded = self.run.translated_for
        own = [kernel.gpu for kernel in self.results.kernels.values()]
        with contextlib.suppress(gpus.UnknownGpu):
            own.append(gpus.find(self.run.card).name)
        found = recorded if recorded in own else next(iter(own), None)
        return exact("run.translated_for", recorded, found, "from the kernels")

    # --- a kernel -----------------------------------------------------------------------------

    def of_kernel(self, kernel: KernelRecord) -> Iterator[Field]:
        """A kernel's name, spec, texts with digests, the files of its package, and its verdict."""
        yield from self.sealed(kernel)
        spec = self.specs[kernel.name]
        if isinstance(spec, str):
            yield Field("kernel.spec", "differs", None, None, spec)
            yield unchecked("kernel.name", kernel.name, "its spec cannot be read")
        else:
            named = kernel_name(spec)
            yield exact("kernel.name", kernel.name, named, "the name of its spec")
            yield exact("kernel.spec", named, kernel.name, "the name of its kernel")
        yield exact(
            "kernel.why",
            kernel.why,
            "",
            "a kernel with a number must have no reason for a missing one",
        )
        yield from self._texts(kernel)
        yield from self._beside(kernel)
        yield from self._verdict(kernel)

    def _texts(self, kernel: KernelRecord) -> Iterator[Field]:
        texts = {"tl": kernel.tl, "source": kernel.source, **kernel.others}
        for name, text in texts.items():
            label = f"kernel.{name if name in ('tl', 'source') else f'others.{name}'}"
            if text or name in kernel.hashes:
                recorded, found = kernel.hashes.get(name), sha256(text)
                yield exact(f"kernel.hashes.{name}", recorded, found, "the digest of the text")
                yield exact(label, found, recorded, "the digest that the record has of it")
        known = {*texts, "cubin", *(_cubin_of(name) for name in kernel.others)}
        for name in kernel.hashes:
            if name not in known:
                recorded = kernel.hashes[name]
                yield Field(
                    f"kernel.hashes.{name}", "differs", recorded, None, "it has no such file"
                )
        if not kernel.others:
            yield exact("kernel.others", {}, {})

    def _beside(self, kernel: KernelRecord) -> Iterator[Field]:
        """The digests of the files of the package beside the record, if it exists."""
        place = kernels.place_of(self.folder / KERNELS, kernel.name)
        own = {"tl": kernels.CODE, "source": "kernel.cu", "cubin": "kernel.cubin"}
        for name, recorded in kernel.hashes.items():
            path = place / own.get(name, name)
            if path.is_file() and place.resolve() in path.resolve().parents:
                yield exact(f"kernel.hashes.{name}", recorded, _digest(path), f"of {path}")

    def _verdict(self, kernel: KernelRecord) -> Iterator[Field]:
        verdict, run = kernel.verdict, self.run
        expected = {"candidate": kernel.name, "device": run.card, "arch": run.arch}
        for name, value in expected.items():
            if name in verdict:
                yield exact(
                    f"kernel.verdict.{name}", verdict[name], value, "the kernel's and run's"
                )
        fine = not verdict.get("offences")
        yield exact("kernel.verdict.ok", verdict.get("ok", False), fine, "from its offences")
        yield exact("kernel.verdict", bool(verdict.get("ok")), True, "only right kernels are timed")

    # --- a number -----------------------------------------------------------------------------

    def cell_of(self, number: NumberRecord) -> Cell | None:
        """The cell of a number; None if its kernel has no valid spec."""
        spec = self.specs.get(number.kernel)
        if not isinstance(spec, AttentionSpec):
            return None
        return _cell(spec, number)

    def _seed(self, number: NumberRecord) -> int | None:
        cell = self.cell_of(number)
        return None if cell is None else cell_seed(self.run.seed, cell)

    def of_number(self, number: NumberRecord, name: str) -> Iterator[Field]:
        """The fields of a number that follow from other fields and from the cell's name."""
        end = "" if number.who == OURS else f" ({number.who})"
        yield from self.sealed(number, "" if number.who == OURS else number.who)
        yield exact(f"number.run{end}", number.run, self.run.id, "the run of the file")
        cell = self.cell_of(number)
        known = f"{number.kernel} {number.length}" if cell is None else cell.name
        yield exact(f"number.cell{end}", number.cell, known)
        kernel, _, size = name.rpartition(" ")
        yield exact(f"number.kernel{end}", number.kernel, kernel, "the cell's")
        of = str(number.length) if cell is None else cell.size
        yield exact(f"number.length{end}", of, size, "the cell's")
        who = number.who if number.who in self.run.contestants else None
        yield exact(f"number.who{end}", number.who, who, "no contestant")
        if cell is None:
            return
        seed = cell_seed(self.run.seed, cell)
        yield exact(f"number.seed{end}", number.seed, seed, "from the run's seed and the cell")
        yield from self._rates(number, cell, end)
        warm = number.warm_seconds is not None
        both = self.run.settings.get("l2") == "both"
        yield exact(
            f"number.warm_seconds{end}", warm, both, "present only if run.settings.l2 is both"
        )

    def _rates(self, number: NumberRecord, cell: Cell, end: str) -> Iterator[Field]:
        """The fields computed from the time: TFLOPS, share of the matrix product, GB/s."""
        work = self._work(cell)
        close = SELECTED if cell.spec.branch == "selected" else CLOSE
        rate = cell.tflops(number.seconds, work)
        why = "the work of the cell over the time"
        yield near(f"number.tflops{end}", number.tflops, rate, close, why)
        fits = abs(number.tflops / rate - 1) <= close
        batch = number.batch if fits else None
        yield exact(
            f"number.batch{end}", number.batch, batch, "time and TFLOPS imply another batch size"
        )
        ceilings = Ceilings(self.run.matmul, self.run.copy_gbs)
        matmul = ceilings.matmul.get(cell.spec.dtype)
        share = number.tflops / matmul if matmul else None
        yield near(f"number.share{end}", number.share, share, CLOSE, "TFLOPS over run.matmul")
        moved = gbs_of(cell.spec, work, number.seconds, ceilings)
        yield near(f"number.gbs{end}", number.gbs, moved, close, "bytes of the cell over the time")

    def _work(self, cell: Cell) -> Work:
        if cell.spec.branch != "selected":
            return cell.work()
        problem = problem_of(cell, self.run.layout, cell_seed(self.run.seed, cell))
        return cell.work(problem.extra.get("Idx"))

    def of_absent(self, absent: AbsentRecord) -> Iterator[Field]:
        """The record of a peer that has no number in a cell."""
        end = f" ({absent.who})"
        yield from self.sealed(absent, absent.who)
        yield exact(f"absent.run{end}", absent.run, self.run.id, "the run of the file")
        known = absent.cell if absent.cell in self.run.cells else None
        yield exact(f"absent.cell{end}", absent.cell, known, "no cell of the run")
        who = absent.who if absent.who in self.run.contestants else None
        yield exact(f"absent.who{end}", absent.who, who, "no contestant")


def _cell(spec: AttentionSpec, number: NumberRecord) -> Cell | None:
    """The cell of a number; None if there is none of its name."""
    try:
        return Cell.recorded(spec, number.cell, number.length, number.batch)
    except BadSpec:
        return None


def spec_of(kernel: KernelRecord) -> AttentionSpec | str:
    """The spec of a kernel's record, or why it is invalid."""
    try:
        return AttentionSpec.make(**kernel.spec)
    except BadSpec as error:
        return error.lines[0]


def _cubin_of(name: str) -> str:
    """The name of the cubin that belongs to a file of a further kernel."""
    return name if name == CLASSES else f"{name.rpartition('/')[0]}/kernel.cubin"


def _digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes())
    except OSError as error:
        raise cannot("read", path, error) from None
