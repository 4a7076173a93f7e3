"""The terminal recording of the README: the checker finds a mistake, the emulator finds a race.

    python -m docs.make.terminal

Every command is run in a terminal of 120 columns, and what it prints is what the picture shows; a
line of dots stands for what is left out. Needs nvcc and a C++ compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "terminal.svg"
COLUMNS, SECONDS = 120, 18.0
FORGOTTEN = " and rescale O_register"
OPERATOR = ("gqa", "--gpu", "a100", "--causal", "--head-dim", "128", "--dtype", "bf16")
LEFT_OUT = "..."


@dataclass(frozen=True)
class Scene:
    """A command as it is typed, and what is shown of its output, with its colours."""

    typed: str
    output: str

    @property
    def plain(self) -> str:
        """The output without colours."""
        return Text.from_ansi(self.output).plain


def record() -> list[Scene]:
    """Run the commands in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        return [check(here), *emulate(here)]


def check(here: Path) -> Scene:
    """A program in which the running sum is not rescaled."""
    source = (ROOT / "examples" / "paper.tl").read_text(encoding="utf-8")
    (here / "mine.tl").write_text(source.replace(FORGOTTEN, ""), encoding="utf-8")
    return Scene("flashwright check mine.tl", _run(here, "check", "mine.tl"))


def emulate(here: Path) -> list[Scene]:
    """A kernel that has lost one barrier."""
    _run(here, "generate", *OPERATOR, "--out", "gqa")
    lines = (here / "gqa" / "kernel.cu").read_text(encoding="utf-8").splitlines()
    barrier = max(n for n, line in enumerate(lines, 1) if line.strip() == "__syncthreads();")
    delete = ["sed", "-i", f"{barrier}d", "gqa/kernel.cu"]
    subprocess.run(delete, cwd=here, check=True)
    told = _run(here, "emulate", "gqa/kernel.cu")
    return [
        Scene(f"flashwright generate {' '.join(OPERATOR)} --out gqa", LEFT_OUT),
        Scene(f"{' '.join(delete)}   # a __syncthreads()", ""),
        Scene("flashwright emulate gqa/kernel.cu", _first_race(told)),
    ]


def _first_race(told: str) -> str:
    """The first finding of a race; the others are left out."""
    findings = told.split("\n\n")
    race = next(f for f in findings if "FW837" in f)
    return f"{LEFT_OUT}\n{race}\n{LEFT_OUT}"


def _run(here: Path, *arguments: str) -> str:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    env.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "flashwright", *arguments]
    with subprocess.Popen(
        command, cwd=here, env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        read = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while part := os.read(ours, 1 << 16):
                read += part
        process.wait()
    os.close(ours)
    return read.decode().replace("\r\n", "\n").rstrip()


# --- the picture ------------------------------------------------------------------------------

FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>Flashwright in a terminal</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, "SF Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(scenes: list[Scene]) -> str:
    """An SVG in which lines appear as in a terminal; all stand there where nothing moves."""
    screen = Console(
        record=True, width=COLUMNS, file=io.StringIO(), highlight=False, markup=False, emoji=False
    )
    starts, row = [], 0
    for scene in scenes:
        starts.append(row)
        screen.print(Text.assemble(("$ ", "green"), (scene.typed, "bold")))
        if scene.output:
            screen.print(Text.from_ansi(scene.output))
        screen.print()
        shown = screen.export_text(clear=False)
        row = shown.count("\n")
    drawn = screen.export_svg(title="flashwright", code_format=FRAME, unique_id="fw")
    return _moving(drawn, starts, row)


def _moving(svg: str, starts: list[int], rows: int) -> str:
    """Each line with the moment at which it appears: a pause before a command, one behind it."""
    pause, between = 1.6, 0.07
    length = rows * between + 2 * len(starts) * pause
    scale, clock, rules = SECONDS / (length + 4), 0.3, []
    for row in range(rows):
        clock += pause if row in starts and row else between
        at = 100 * clock * scale / SECONDS
        hidden = f"0%, {at:.2f}% {{ opacity: 0 }}"
        rules.append(f"@keyframes k{row} {{ {hidden} {at + 0.01:.2f}% {{ opacity: 1 }} }}")
        rules.append(f".k{row} {{ animation: k{row} {SECONDS:g}s infinite }}")
        clock += pause if row in starts else 0.0
    moved = re.sub(
        r'<text class="([\w-]+)"([^>]*clip-path="url\(#fw-line-(\d+)\)")',
        r'<text class="\1 k\3"\2',
        svg,
    )
    css = "\n".join(["@media (prefers-reduced-motion: no-preference) {", *rules, "}", "</style>"])
    return re.sub(r"[ \t]+$", "", moved.replace("</style>", css, 1), flags=re.MULTILINE)


if __name__ == "__main__":
    PICTURE.write_text(draw(record()), encoding="utf-8")
