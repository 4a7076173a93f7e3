"""How the command line looks: headers, highlighted TL, tables, the stages of a run as they pass."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from flashwright.author.builtin.reasoning import classes_in_words
from flashwright.build.package import OWN, inside
from flashwright.check.budget import in_words as budget_in_words
from flashwright.cli.kernel import build_in_words, launch_in_words
from flashwright.lang import render
from flashwright.lang.recover import STATEMENTS
from flashwright.lower.report import SPARING
from flashwright.pipeline import Stage, claimed, not_claimed
from flashwright.run import KINDS, Finding, Run

if TYPE_CHECKING:
    from flashwright.author.builtin.complete import Choice
    from flashwright.gpu import Gpu
    from flashwright.judge.cpu import Verdict
    from flashwright.lang.diagnostic import Diagnostic
    from flashwright.lower.report import Remark
    from flashwright.spec import AttentionSpec

WIDTH = 100
KB = 1024

_CLAUSES = (
    "and|get|new|accumulate|rescale|with|where|in|from|to|as|at|along|coordinate"
    "|stages|offset|memory|or|not"
)
_TOKEN = re.compile(
    rf"(?P<comment>//.*)"
    rf"|(?P<keyword>\b(?:{'|'.join(STATEMENTS.values())})\b)"
    rf"|(?P<space>\b(?:global|shared|register)\b)"
    rf"|(?P<clause>\b(?:{_CLAUSES})\b)"
    rf"|(?P<number>\b\d+(?:\.\d+)?(?:[eE][+-]?\d+)?\b)",
    re.IGNORECASE,
)
_STYLES = {
    "comment": "italic bright_black",
    "keyword": "bold cyan",
    "space": "magenta",
    "clause": "cyan",
    "number": "green",
}


def called() -> str:
    """How this command can be typed again: by its name, or by the path it was called by."""
    typed = Path(sys.argv[0])
    found = shutil.which("flashwright")
    if typed.name != "flashwright" or (found and Path(found).resolve() == typed.resolve()):
        return "flashwright"
    here = Path.cwd()
    return str(typed.relative_to(here) if typed.is_relative_to(here) else typed)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command's own end; rich would exit with 1, which says "wrong" here."""
        raise BrokenPipeError


def console(quiet: bool = False, most: int = WIDTH) -> Console:
    """A console no wider than 100 columns, exactly that wide where there is no terminal.

    A table of many columns may take more, where there is more.
    """
    plain = _Console(quiet=quiet, highlight=False, markup=False, emoji=False)
    plain.width = min(most, plain.width) if plain.is_terminal else most
    return plain


def tl(source: str) -> Text:
    """TL with its keywords, numbers and comments coloured."""
    text = Text(source, no_wrap=True, overflow="ignore")
    for match in _TOKEN.finditer(source):
        text.stylize(_STYLES[match.lastgroup or "clause"], match.start(), match.end())
    return text


def listing(source: str, width: int = WIDTH) -> Text:
    """TL with line numbers, because diagnostics speak of lines; long lines are folded."""
    lines = source.rstrip("\n").split("\n")
    pad = len(str(len(lines)))
    whole = Text(no_wrap=True, overflow="ignore")
    for number, line in enumerate(lines, 1):
        for part, piece in enumerate(folded(line, width - pad - 5)):
            shown = number if part == 0 else ""
            whole.append("\n" if whole else "")
            whole.append(f"  {shown:>{pad}} │ ", "bright_black").append(tl(piece))
    return whole


def folded(line: str, width: int) -> list[str]:
    """A line in pieces of at most `width` where words allow it. The pieces are still TL."""
    if len(line) <= width:
        return [line]
    code, slashes, comment = line.partition("//")
    if not slashes or width - len(code) < 24:  # no room to hang the comment under itself
        room = " " * (len(line) - len(line.lstrip()) + 4)
        lead = room + "// " if line.lstrip().startswith("//") else room
        return textwrap.wrap(line, width, subsequent_indent=lead, break_long_words=False)
    words = textwrap.wrap(comment.strip(), width - len(code) - 3, break_long_words=False)
    return [f"{code if n == 0 else ' ' * len(code)}// {text}" for n, text in enumerate(words)]


def table(*columns: str, right: Sequence[str] = (), gap: int = 3) -> Table:
    """An empty table in the house style; `right` names the columns of numbers."""
    padding = (0, gap - 1, 0, 0)  # beside the box, whose lines between columns are blank
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=padding)
    for name in columns:
        if name in right:
            empty.add_column(name, justify="right", no_wrap=True)
        else:
            empty.add_column(name, overflow="fold")
    return empty


# --- words ------------------------------------------------------------------------------------


def gpu_in_words(gpu: Gpu) -> str:
    """The facts of a GPU that decide a kernel's shape."""
    return (
        f"{gpu.generation} ({gpu.arch}): {gpu.sms} SMs, {gpu.shared_per_block // KB} KB of shared "
        f"memory per block, {gpu.bandwidth / 1e12:g} TB/s"
    )


# --- tables -----------------------------------------------------------------------------------


def choices_table(choices: Iterable[Choice]) -> Table:
    """Every chosen number with its reason."""
    shown = table("parameter", "value", "why", right=("value",))
    for choice in choices:
        shown.add_row(Text(choice.name, "bold"), str(choice.value), choice.reason)
    return shown


def cases_table(verdict: Verdict) -> Table:
    """Each problem that was run, and how far each output is from fp64."""
    numbers = ("q_len", "kv_len", "batch", "heads", "kv heads", "rms error", "max error")
    shown = table(*numbers[:5], "output", *numbers[5:], "verdict", right=numbers)
    before: object = None
    for case in verdict.cases:
        found, dims = case.comparison, case.dims
        sizes = ["" if dims is before else str(dims.get(n.replace(" ", "_"), "")) for n in numbers]
        before = dims
        reason = f"{found.bad} of {found.size} wrong" if found.bad else found.reason
        good, bad = Text("agrees", "green"), Text(reason, "bold red")
        errors = (f"{found.relative_rms:.1e}", f"{found.relative_max:.1e}")
        shown.add_row(*sizes[:5], case.output, *errors, good if found.ok else bad)
    return shown


def errors_in_words(verdict: Verdict) -> str:
    """The line under the table of cases."""
    return (
        "errors are relative to the rms of the right answer; "
        f"the largest rms error of O is {verdict.worst:.1e}"
    )


SHOWN = 8  # goals that are named in a terminal; the record has them all


def not_reached(goals: Sequence[str]) -> list[Text]:
    """The lengths that no problem had, a line each."""
    lines = [f"  not reached: {goal}" for goal in goals[:SHOWN]]
    if len(goals) > SHOWN:
        lines.append(f"  not reached: {len(goals) - SHOWN} more, named in the record (--json)")
    return [Text(line, "yellow") for line in lines]


def gpus_table(gpus: Iterable[Gpu]) -> Table:
    """The GPUs that Flashwright knows."""
    numbers = ("SMs", "shared/block", "TB/s", "fp16 TFLOPS")
    shown = table("name", "GPU", "arch", *numbers, "MMA", right=numbers)
    for gpu in gpus:
        shown.add_row(
            Text(gpu.name, "bold cyan"),
            gpu.title.removeprefix("NVIDIA "),
            gpu.arch,
            str(gpu.sms),
            f"{gpu.shared_per_block // KB} KB",
            f"{gpu.bandwidth / 1e12:.2f}",
            f"{gpu.tensor_flops['fp16'] / 1e12:.0f}",
            " ".join(gpu.mma),
        )
    return shown


def pairs_table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what they mean."""
    shown = table(*columns)
    for name, text in rows:
        shown.add_row(Text(name, "bold cyan"), text)
    return shown


def markdown(text: str) -> Markdown:
    """Markdown for a terminal."""
    return Markdown(text)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr while something runs; nothing where there is no terminal."""
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        yield lambda done, total, text: None
        return
    with _bar(err) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, what=text)


def _bar(out: Console) -> Progress:
    """What it shows may be the words of a user or of a server: no markup."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", style="bright_black", markup=False),
        console=out,
        transient=True,
    )


# --- a run, as it passes ----------------------------------------------------------------------


class Screen:
    """Shows `generate` in the terminal, or as plain lines where there is none."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.tick, self.cross = ("✓", "✗") if out.encoding.startswith("utf") else ("ok", "--")
        self.number = ""
        self.bar: Progress | None = None

    def header(self, summary: str, spec: AttentionSpec, gpu: Gpu) -> None:
        """What is about to be made."""
        body = Text.assemble(
            (summary[:1].upper() + summary[1:], "bold"),
            f"\n{spec.in_words}\n",
            ("for ", "bright_black"),
            (gpu.title, "bold"),
            f"\n{gpu_in_words(gpu)}",
        )
        self.out.print(
            Panel(
                body, title="Flashwright", title_align="left", border_style="cyan", padding=(0, 2)
            )
        )

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """A stage starts: a moving line in a terminal, a heading elsewhere."""
        self.number = f"{number}/{total}"
        if not self.out.is_terminal:
            self.out.print(f"\n{self.number}  {stage.title}")
            return
        self.bar = _bar(self.out)
        self.bar.add_task(f"{self.number}  {stage.title}", total=None, what="")
        self.bar.start()

    def progress(self, done: int, total: int, text: str) -> None:
        """It is this far."""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, what=text)

    def close(self) -> None:
        """Take the moving line away, whatever happened."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def end(self, stage: Stage, run: Run) -> None:
        """A stage has ended: its heading, its time and what it made."""
        self.close()
        timing = run.timings[-1]
        good, skipped = timing.status == "ok", timing.status == "skipped"
        if self.out.is_terminal:
            mark = (self.tick, "bold green") if good else (self.cross, "bold red")
            mark = ("·", "bold yellow") if skipped else mark
            line = Text.assemble("\n", mark, (f" {self.number}  {stage.title}", "bold"))
            line.append(f"   {timing.seconds:.2f} s", "bright_black")
            self.out.print(line)
        for reason in timing.why:
            self.out.print(Padding(_skipped(reason), (0, 0, 0, 2)))
        for part in _made(stage.name, run, self.out.width) if good else ():
            self.out.print(Padding(part, (0, 0, 0, 2)) if not isinstance(part, Text) else part)
        if not self.out.is_terminal:
            ended = {"ok": "done in", "failed": "FAILED in", "skipped": "SKIPPED after"}
            self.out.print(f"  {ended[timing.status]} {timing.seconds:.2f} s")

    def closing(self, run: Run, folder: str) -> None:
        """What is proved, what is not, and where to go from here."""
        files = textwrap.fill("  ".join([*run.files, "result.json"]), 90, subsequent_indent="  ")
        files += "".join(f"\n  your changed {name} is kept as {name}.bak" for name in run.kept)
        code = Path(folder, "code.tl")
        parts: list[RenderableType] = [
            _bullets("Shown", claimed(run), self.tick, "green"),
            _bullets("Not shown (yet)", not_claimed(run), "·", "yellow"),
            Text.assemble(("Files  ", "bold"), f"in {folder}\n  {files}"),
        ]
        if run.asked:
            parts.insert(2, _bullets("Asked", [*asked_in_words(run)], "·", "cyan"))
        if run.ok:
            steps = [
                (f"{called()} run {code} --q-len 300 --kv-len 500", "another problem, on the CPU"),
                (f"{called()} check {code} --gpu {run.gpu.name}", "after you have changed a line"),
                ("docs/tutorial.md", "write an operator of your own"),
            ]
            if run.built is not None:
                counts = "the kernel itself, on the CPU, and what it does by line of TL"
                steps.insert(1, (f"{called()} emulate {folder} --profile", counts))
            following = Text.assemble(("Next", "bold"))
            for command, why in steps:
                following.append(f"\n  {command}", "cyan").append(f"\n      {why}", "bright_black")
            parts.append(following)
        spaced = [piece for part in parts for piece in (part, Text())][:-1]
        color = "green" if run.ok else "red"
        title = f"Done: {KINDS[run.kind]}" if run.ok else "Stopped"
        panel = Panel(
            Group(*spaced), title=title, title_align="left", border_style=color, padding=(0, 2)
        )
        self.out.print()
        self.out.print(panel)


def _bullets(title: str, lines: Sequence[str], mark: str, color: str) -> Text:
    text = Text.assemble((title, "bold"))
    for line in lines:
        text.append(f"\n  {mark} ", color).append(line)
    return text


def asked_in_words(run: Run) -> Iterator[str]:
    """Which model did which stage, and what it took."""
    for stage, told in run.asked.items():
        count = sum(told.get("attempts", ()))
        attempts = f"{count} attempt{'' if count == 1 else 's'}"
        price = f", {told['dollars']:.2f} dollars" if told.get("dollars") else ""
        yield f"{stage}: {told['model']}, {attempts}, {told.get('tokens', 0):,} tokens{price}"


def _made(stage: str, run: Run, width: int) -> list[RenderableType]:
    """What a stage has to show when it has passed."""
    if stage == "sketch":
        return [listing(run.artefacts["sketch.tl"], width)]
    if stage == "parameters" and run.written is not None:
        further = [Text(f"  {line}") for line in classes_in_words(run.written)]
        listed = listing(run.artefacts["code.tl"], width)
        table = [choices_table(run.written.choices)] if run.written.choices else []
        return [listed, *table, *further]
    if stage == "check":
        warnings = [_rendered(f, run, color=False) for f in run.findings]
        count = f"0 errors, {len(warnings)} warning{'' if len(warnings) == 1 else 's'}"
        verdict = "clean" if not warnings else "passes"
        budget = budget_in_words(run.program, run.gpu) if run.program else ""
        line = f"  {verdict}: {count}; {budget}"
        return [Text(line), *map(Text, warnings)]
    if stage == "cpu":
        return [part for kernel in run.verdicts for part in _agreement(kernel, run)]
    if stage == "translate":
        return [line for kernel in run.translations for line in _source(kernel, run)]
    judged = run.gpu_verdict or run.emulated
    if stage == "verdict" and judged is not None:
        from flashwright.cli import verify

        return [verify.table(judged), *verify.in_words(judged)]
    if stage == "improve":
        return _rounds(run)
    if stage == "build":
        return [line for kernel in run.builds for line in _compiled(kernel, run)]
    return []


def _agreement(kernel: str, run: Run) -> list[RenderableType]:
    """The table is the package's own; a further kernel, which has the same cases, gets a line."""
    verdict = run.verdicts[kernel]
    if kernel != OWN:
        return [Text(f"  {kernel} agrees too: the largest is {verdict.worst:.1e}")]
    words = Text(f"  {errors_in_words(verdict)}")
    return [cases_table(verdict), words, *not_reached(verdict.unreached)]


def _source(kernel: str, run: Run) -> list[Text]:
    made, name = run.translations[kernel], inside(kernel, "kernel.cu")
    lines = made.source.count("\n")
    told = [f"{name}: {lines} lines for {made.plan.arch}; {launch_in_words(made.plan)}"]
    if made.report is not None:
        told.append(made.report.in_words())
        told += [_remark(remark) for remark in made.report.remarks]
    return [Text(f"  {line}") for line in told]


def _remark(remark: Remark) -> str:
    """Something that was not done, in a line."""
    where = f", line {remark.lines[0]}" if remark.lines else ""
    advice = f" ({remark.advice})" if remark.advice else ""
    return f"note {remark.code}{where}: {remark.text}{advice}"


def _compiled(kernel: str, run: Run) -> list[Text]:
    whose = [] if kernel == OWN else [f"{kernel}:"]
    made = run.translations.get(kernel)
    report = made.report if made else None
    said = build_in_words(run.builds[kernel], report)
    sparing = [r for r in report.remarks if r.code == SPARING] if report else []
    lines = [f"  {line}" for line in (*whose, *said, *map(_remark, sparing))]
    found = [f for f in run.findings if f.file == inside(kernel, "kernel.cu")]
    return [Text(line) for line in (*lines, *(_rendered(f, run, color=False) for f in found))]


def _rounds(run: Run) -> list[RenderableType]:
    """What became of each round, and how fast the kernel is now."""
    told = run.asked.get("improve", {})
    marks = {True: "kept", False: "not kept"}
    lines = [f"  {r['attempt']}: {marks[r['kept']]}; {r['why']}" for r in told.get("rounds", ())]
    for length, now in told.get("after", {}).get("times", {}).items():
        before = told["before"]["times"][length]["tflops"]
        lines.append(f"  with {length} keys: {before:.0f} TFLOPS before, {now['tflops']:.0f} now")
    return [Text(line) for line in lines]


def _skipped(reason: Diagnostic) -> Text:
    """Why a stage did not run, and how to get what it needs."""
    text = Text.assemble(("not run: ", "yellow"), f"{reason.message} ", (f"({reason.code})", "dim"))
    return text.append(f"\n{reason.help}", "bright_black") if reason.help else text


def _rendered(finding: Finding, run: Run, color: bool) -> str:
    source = run.artefacts.get(finding.file, "")
    name = finding.file or "spec.toml"
    return render.terminal([finding.diagnostic], source, name, color).rstrip("\n")
