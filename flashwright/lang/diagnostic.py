"""Diagnostics as data: what is wrong, where, and how to mend it. Renderers are in render.py."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.lang import html
from flashwright.lang.codes import CODES, Severity
from flashwright.lang.nodes import Span


@dataclass(frozen=True)
class Label:
    """A further place in the source that explains a finding, with its text."""

    span: Span
    text: str


@dataclass(frozen=True)
class Edit:
    """A text replacement: source[start:end] becomes `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """A change that mends the program and is safe to apply automatically.

    The fix of a note usually makes the kernel faster; `check --fix` does not apply it.
    """

    title: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Diagnostic:
    """One finding. The code is stable: scripts and prompts may rely on it."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""
    secondary: tuple[Label, ...] = ()
    help: str | None = None
    fix: Fix | None = None

    @property
    def severity(self) -> Severity:
        """error: the program is wrong; warning: it is suspicious; note: how it was translated."""
        return CODES[self.code].severity

    @property
    def bad_input(self) -> bool:
        """Whether the input cannot be used at all (exit code 2); a wrong program is exit code 1."""
        return CODES[self.code].bad_input

    def _repr_html_(self) -> str:
        """For notebooks."""
        tone = {"error": "bad", "warning": "open", "note": "plain"}[self.severity]
        where = f"line {self.span.line}: " if self.span else ""
        parts = [html.heading(f"{where}{self.severity}[{self.code}]: {self.message}", tone)]
        parts += [html.paragraph("here:", self.label)] if self.label else []
        parts += [html.paragraph(f"line {s.span.line}:", s.text) for s in self.secondary]
        parts += [html.paragraph("help:", self.help)] if self.help else []
        parts += [html.paragraph("fix:", self.fix.title)] if self.fix else []
        return "".join(parts)


class Failed(Exception):
    """The operation failed with diagnostics; the command line shows them and sets the exit code.

    Its text has a line for each finding, and its help.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "\n".join(
            f"{d.code}: {d.message}" + (f"\n  help: {d.help}" if d.help else "")
            for d in self.diagnostics
        )
