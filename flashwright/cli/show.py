"""The look of the command line: consoles, highlighted TL, tables, progress bars."""

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
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from flashwright.cli.command import messages_as_json, send
from flashwright.lang.recover import STATEMENTS

if TYPE_CHECKING:
    from flashwright.author.builtin.complete import ParamChoice
    from flashwright.gpu import Gpu
    from flashwright.judge.cpu import CpuVerdict
    from flashwright.judge.oracle import Comparison

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
    """How the user can call this command again: by its name, or by its path."""
    typed = Path(sys.argv[0])
    found = shutil.which("flashwright")
    if typed.name != "flashwright" or (found and Path(found).resolve() == typed.resolve()):
        return "flashwright"
    here = Path.cwd()
    return str(typed.relative_to(here) if typed.is_relative_to(here) else typed)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise, so that the command handles it: rich would exit with 1, which means "wrong"."""
        raise BrokenPipeError


def console(quiet: bool = False, most: int = WIDTH) -> Console:
    """A console no wider than 100 columns, exactly that wide where there is no terminal.

    `most` allows more columns in a wide terminal.
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
    if not slashes or width - len(code) < 24:  # no room to indent the comment
        room = " " * (len(line) - len(line.lstrip()) + 4)
        lead = room + "// " if line.lstrip().startswith("//") else room
        return textwrap.wrap(line, width, subsequent_indent=lead, break_long_words=False)
    words = textwrap.wrap(comment.strip(), width - len(code) - 3, break_long_words=False)
    return [f"{code if n == 0 else ' ' * len(code)}// {text}" for n, text in enumerate(words)]


def table(
    *columns: str, right: Sequence[str] = (), whole: Sequence[str] = (), gap: int = 3
) -> Table:
    """An empty table in the house style; `right` names the columns of numbers, `whole` those of
    names that a reader may type, which are never folded."""
    padding = (0, gap - 1, 0, 0)  # beside the box, whose lines between columns are blank
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", padding=padding)
    for name in columns:
        if name in right:
            empty.add_column(name, justify="right", no_wrap=True)
        else:
            empty.add_column(name, overflow="fold", no_wrap=name in whole)
    return empty


# --- words ------------------------------------------------------------------------------------


def gpu_in_words(gpu: Gpu) -> str:
    """The facts of a GPU that decide a kernel's shape."""
    return (
        f"{gpu.generation} ({gpu.arch}): {gpu.sms} SMs, {gpu.shared_per_block // KB} KB of shared "
        f"memory per block, {gpu.bandwidth / 1e12:g} TB/s"
    )


# --- tables -----------------------------------------------------------------------------------


def choices_table(choices: Iterable[ParamChoice]) -> Table:
    """Every chosen number with its reason."""
    shown = table("parameter", "value", "why", right=("value",), whole=("parameter",))
    for choice in choices:
        shown.add_row(Text(choice.name, "bold"), str(choice.value), choice.reason)
    return shown


def cases_table(verdict: CpuVerdict) -> Table:
    """Each problem that was run, and how far each output is from fp64."""
    second = "max error" if verdict.of_limit is None else "of its limit"
    numbers = ("q_len", "kv_len", "batch", "heads", "kv heads", "rms error", second)
    shown = table(*numbers[:5], "output", *numbers[5:], "verdict", right=numbers)
    before: object = None
    for case in verdict.cases:
        found, dims = case.comparison, case.dims
        sizes = ["" if dims is before else str(dims.get(n.replace(" ", "_"), "")) for n in numbers]
        before = dims
        reason = f"{found.bad} of {found.size} wrong" if found.bad else found.reason
        good, bad = Text("agrees", "green"), Text(reason, "bold red")
        shown.add_row(*sizes[:5], case.output, *errors(found), good if found.ok else bad)
    return shown


def errors(found: Comparison) -> tuple[str, str]:
    """The RMS error of an output, and its largest one, of a gradient in units of its limit."""
    vanishes = found.ok and found.relative_rms > 1
    rms, most = ("-" if vanishes else f"{e:.1e}" for e in (found.relative_rms, found.relative_max))
    return rms, most if found.of_limit is None else f"{found.of_limit:.2f}"


def errors_in_words(verdict: CpuVerdict) -> str:
    """The line under the table of cases."""
    if verdict.of_limit is not None:
        return (
            "errors are relative to the gradient's rms (-: it vanishes), "
            f"at most {verdict.of_limit:.2f} of a limit"
        )
    if all(case.output != "O" for case in verdict.cases):
        return "errors are relative to the rms of the right answer (-: it vanishes)"
    return (
        "errors are relative to the rms of the right answer; "
        f"the largest rms error of O is {verdict.worst:.1e}"
    )


SHOWN = 8  # goals that the terminal names; the record has all


def not_reached(goals: Sequence[str]) -> list[Text]:
    """A line for each goal of coverage that no problem reached."""
    lines = [f"  not reached: {goal}" for goal in goals[:SHOWN]]
    if len(goals) > SHOWN:
        lines.append(f"  not reached: {len(goals) - SHOWN} more, named in the record (--json)")
    return [Text(line, "yellow") for line in lines]


_FP8 = {"e4m3": "fp8", "e5m2": "fp8"}


def gpus_table(gpus: Iterable[Gpu]) -> Table:
    """The supported GPUs: SMs, shared memory of a block, fp16 tensor throughput."""
    numbers = ("SMs", "KB/block", "TB/s", "TFLOPS")
    names = ("name", "GPU", "arch")
    shown = table(*names, *numbers, "MMA", right=numbers, whole=names, gap=2)
    for gpu in gpus:
        shown.add_row(
            Text(gpu.name, "bold cyan"),
            gpu.title.removeprefix("NVIDIA "),
            gpu.arch,
            str(gpu.sms),
            str(gpu.shared_per_block // KB),
            f"{gpu.bandwidth / 1e12:.2f}",
            f"{gpu.tensor_flops['fp16'] / 1e12:.0f}",
            " ".join(dict.fromkeys(_FP8.get(dtype, dtype) for dtype in gpu.mma)),
        )
    return shown


def pairs_table(columns: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and their meanings."""
    shown = table(*columns, whole=columns[:1])
    for name, text in rows:
        shown.add_row(Text(name, "bold cyan"), text)
    return shown


def markdown(text: str) -> Markdown:
    """Markdown for a terminal."""
    return Markdown(text)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows a bar on stderr; nothing without a terminal, or messages for a program."""
    if messages_as_json():
        yield lambda done, total, text: send(progress=f"{text} ({done} of {total})")
        return
    err = Console(stderr=True, highlight=False)
    if not err.is_terminal:
        yield lambda done, total, text: None
        return
    with progress_bar(err) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, text: bar.update(task, completed=done, total=total, what=text)


def progress_bar(out: Console) -> Progress:
    """A progress bar. Its text may come from a user or a server, so markup is off."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}", style="bright_black", markup=False),
        console=out,
        transient=True,
    )
