"""A task of a benchmark: the attention that it asks for, and what its submission is made of.

A package that is generated from a task has it as `task.json` (generate/folder.py), where `export`
reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashwright.files import content
from flashwright.generate.folder import TASK
from flashwright.lang.diagnostic import Diagnostic, Failed

KERNELBENCH, ROBUST_KBENCH, FLASHINFER = "kernelbench", "robust-kbench", "flashinfer"
FORMATS = (KERNELBENCH, ROBUST_KBENCH, FLASHINFER)


@dataclass(frozen=True)
class Task:
    """What a task's file says."""

    format: str
    name: str
    variant: str
    options: dict[str, Any]
    """Settings of the spec, as options of `generate` give them."""
    source: str
    """The text of the task's file."""
    keys: int = 0
    """The most keys of a call, if the task says it; 0 if calls have any lengths."""
    arguments: tuple[str, ...] = ()
    """The tensors and numbers that the submission is called with."""
    steps: tuple[dict[str, Any], ...] = field(default=())
    """The operators of the task in order, with calls of the kernel among them."""
    result: str = ""
    """The step that is the task's result."""
    rms: float = 0.0
    """How far the attention of the spec was off the task's own, relative to the RMS."""

    def dump(self) -> str:
        """The task as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def load(folder: Path, form: str) -> Task:
    """The task of a package. Raises Failed with FW852 if it has none of this format."""
    data = content(folder / TASK)
    text = f"{folder} was not generated from a task of {form}"
    hint = "generate it with `flashwright generate --from FILE`"
    try:
        told = json.loads(data or b"{}")
        found = Task(**{**told, "arguments": tuple(told["arguments"])})
    except (ValueError, KeyError, TypeError):
        raise Failed(Diagnostic("FW852", text, help=hint)) from None
    if found.format != form:
        raise Failed(Diagnostic("FW852", f"{text}, but of {found.format}", help=hint))
    return found
