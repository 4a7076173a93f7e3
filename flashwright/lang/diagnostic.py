"""Diagnostics as data: what is wrong, where, and how to mend it. Renderers are in render.py."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.lang.codes import CODES, Severity
from flashwright.lang.nodes import Span


@dataclass(frozen=True)
class Label:
    """A further place that explains the first one."""

    span: Span
    text: str


@dataclass(frozen=True)
class Edit:
    """Replace source[start:end] by text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fix:
    """A change that mends the program, safe to apply without thinking.

    A note's is one that makes the kernel faster as a rule; `check --fix` leaves it to the reader.
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
        """Errors make the program wrong; warnings do not. Notes say how it was translated."""
        return CODES[self.code].severity

    @property
    def bad_input(self) -> bool:
        """True when the input itself cannot be taken (exit code 2), not the program wrong (1)."""
        return CODES[self.code].bad_input


class Failed(Exception):
    """Work that ended in diagnostics; the command line renders them and picks the exit code.

    As text it is a line for each finding, and the help that comes with it.
    """

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__(*diagnostics)
        self.diagnostics = diagnostics

    def __str__(self) -> str:
        return "\n".join(
            f"{d.code}: {d.message}" + (f"\n  help: {d.help}" if d.help else "")
            for d in self.diagnostics
        )
