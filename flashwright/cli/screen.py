"""Shows a run of `generate` on the terminal, stage by stage."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import Progress
from rich.text import Text

from flashwright.author.builtin.reasoning import classes_in_words
from flashwright.build.package import OWN, inside
from flashwright.check.budget import in_words as budget_in_words
from flashwright.cli.command import messages_as_json, send
from flashwright.cli.kernel import build_in_words, launch_in_words
from flashwright.generate.folder import DERIVED
from flashwright.generate.pipeline import Stage, claimed, not_claimed
from flashwright.generate.state import Finding, Run
from flashwright.lang import render
from flashwright.lower.report import SPARING

if TYPE_CHECKING:
    from flashwright.gpu import Gpu
    from flashwright.lang.diagnostic import Diagnostic
    from flashwright.lower.report import Remark
    from flashwright.spec import AttentionSpec

from flashwright.cli.show import (
    called,
    cases_table,
    choices_table,
    errors_in_words,
    gpu_in_words,
    listing,
    not_reached,
    progress_bar,
)

LOAD = "call it from PyTorch: flashwright.load(folder)(q, k, v)"


class GenerateScreen:
    """Shows a run of `generate`: with a bar in a terminal, else as plain lines."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.tick, self.cross = ("✓", "✗") if out.encoding.startswith("utf") else ("ok", "--")
        self.number, self.title = "", ""
        self.bar: Progress | None = None

    def header(self, summary: str, spec: AttentionSpec, gpu: Gpu) -> None:
        """Print the operator and the GPU."""
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
        """Begin a stage: a bar in a terminal, else a heading."""
        self.number = f"{number}/{total}"
        self.title = stage.title
        if messages_as_json():
            send(progress=f"{self.number} {stage.title}")
        if not self.out.is_terminal:
            self.out.print(f"\n{self.number}  {stage.title}")
            return
        self.bar = progress_bar(self.out)
        self.bar.add_task(f"{self.number}  {stage.title}", total=None, what="")
        self.bar.start()

    def progress(self, done: int, total: int, text: str) -> None:
        """Update the bar of the present stage, or send a message to a program."""
        if messages_as_json():
            count = f" ({done} of {total})" if total else ""
            send(progress=f"{self.number} {self.title}: {text}{count}")
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total or None, what=text)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def end(self, stage: Stage, run: Run) -> None:
        """End a stage: print its heading, its time and its result."""
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
        """Print what the run has shown, what it has not, its files, and commands to try next."""
        files = textwrap.fill("  ".join([*run.files, "result.json"]), 90, subsequent_indent="  ")
        files += "".join(f"\n  your changed {name} is kept as {name}.bak" for name in run.kept)
        parts: list[RenderableType] = [
            _bullets("Shown", claimed(run), self.tick, "green"),
            _bullets("Not shown (yet)", not_claimed(run), "·", "yellow"),
            Text.assemble(("Files  ", "bold"), f"in {folder}\n  {files}"),
        ]
        if run.asked:
            parts.insert(2, _bullets("Asked", [*asked_in_words(run)], "·", "cyan"))
        if run.ok:
            following = Text.assemble(("Next", "bold"))
            for command, why in _next(run, folder):
                following.append(f"\n  {command}", "cyan").append(f"\n      {why}", "bright_black")
            parts.append(following)
        spaced = [piece for part in parts for piece in (part, Text())][:-1]
        color = "red" if not run.ok else "yellow" if run.unreached else "green"
        title = f"Done: {run.headline}" if run.ok else "Stopped"
        if run.ok and run.unreached:
            title = f"Not reached: {run.unreached.stage}"
        panel = Panel(
            Group(*spaced), title=title, title_align="left", border_style=color, padding=(0, 2)
        )
        self.out.print()
        self.out.print(panel)


def _next(run: Run, folder: str) -> list[tuple[str, str]]:
    """Commands to try next, each with its purpose."""
    code = Path(folder, "code.tl")
    steps = []
    if run.built is not None:
        steps += [
            (f'python -c "import flashwright; print(flashwright.load({folder!r}))"', LOAD),
            (f"{called()} verify {folder}", "judge it: on the GPU, or --on cpu by emulation"),
            (f"{called()} report {folder}", "a report as one HTML page"),
            (
                f"{called()} emulate {Path(folder, _longest(run))} --profile",
                "count its instructions by line of TL, on the CPU",
            ),
        ]
    if "code.tl" in run.artefacts:
        steps += [
            (f"{called()} run {code} --q-len 300 --kv-len 500", "another problem, on the CPU"),
            (f"{called()} check {code} --gpu {run.gpu.name}", "after you have changed a line"),
        ]
    return [*steps, ("docs/tutorial.md", "write an operator of your own")]


def _longest(run: Run) -> str:
    """The name of the package's kernel, of several the one with the longest program."""
    if run.steps is None:
        return OWN
    return max(run.steps.steps, key=lambda name: len(run.artefacts[f"{name}/code.tl"]))


def _bullets(title: str, lines: Sequence[str], mark: str, color: str) -> Text:
    text = Text.assemble((title, "bold"))
    for line in lines:
        text.append(f"\n  {mark} ", color).append(line)
    return text


def asked_in_words(run: Run) -> Iterator[str]:
    """The model of each stage, with its attempts, tokens and cost."""
    for stage, told in run.asked.items():
        count = sum(told.get("attempts", ()))
        attempts = f"{count} attempt{'' if count == 1 else 's'}"
        price = f", {told['dollars']:.2f} dollars" if told.get("dollars") else ""
        yield f"{stage}: {told['model']}, {attempts}, {told.get('tokens', 0):,} tokens{price}"


def _made(stage: str, run: Run, width: int) -> list[RenderableType]:
    """The result of a passed stage for the terminal."""
    if stage == "sketch":
        return [listing(run.artefacts[DERIVED if run.spec.backward else "sketch.tl"], width)]
    if stage == "parameters" and run.written is not None:
        further = [Text(f"  {line}") for line in classes_in_words(run.written)]
        listed = listing(run.artefacts["code.tl"], width)
        table = [choices_table(run.written.choices)] if run.written.choices else []
        return [listed, *table, *further]
    if stage == "check":
        warnings = [_rendered(f, run, color=False) for f in run.findings]
        count = f"0 errors, {len(warnings)} warning{'' if len(warnings) == 1 else 's'}"
        verdict = "clean" if not warnings else "passes"
        named = {"" if n == OWN else f"{n}: ": p for n, p in run.programs.items()}
        budgets = [f"{name}{budget_in_words(p, run.gpu)}" for name, p in named.items()]
        return [Text(f"  {verdict}: {count}; {'; '.join(budgets)}"), *map(Text, warnings)]
    if stage == "cpu":
        return [part for kernel in run.verdicts for part in _agreement(kernel, run)]
    if stage == "translate":
        return [line for kernel in run.translations for line in _source(kernel, run)]
    judged = run.gpu_verdict or run.emulated
    if stage == "verdict" and judged is not None:
        from flashwright.cli import verify

        return [verify.table(judged), *verify.in_words(judged)]
    if stage == "improve":
        return _iterations(run)
    if stage == "build":
        return [line for kernel in run.builds for line in _compiled(kernel, run)]
    return []


def _agreement(kernel: str, run: Run) -> list[RenderableType]:
    """The table of the package's own kernel; one line for a further kernel with the same cases."""
    verdict = run.verdicts[kernel]
    if kernel != OWN:
        return [Text(f"  {kernel} agrees too: its largest rms error is {verdict.worst:.1e}")]
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
    """A missed optimization in one line."""
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


def _iterations(run: Run) -> list[RenderableType]:
    """The outcome of each iteration of `--improve`, and the speed before and after."""
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
