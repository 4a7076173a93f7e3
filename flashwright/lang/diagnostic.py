"""Diagnostics as data: what is wrong, where, and how to mend it. Renderers are in render.py."""

from __future__ import annotations

from dataclasses import dataclass

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


class Failed(Exception):
    """The operation failed with diagnostics; the command line shows them and sets the exit code."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("; ".join(f"{d.code}: {d.message}" for d in diagnostics))
        self.diagnostics = diagnostics
