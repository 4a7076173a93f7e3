"""TL's reference for a prompt: the sections that a stage needs.

prompts/language.md is the part of docs/language.md that a model may be shown; a test holds the two
together, section by section.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

_HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)
# Codes mean nothing to somebody who has not been told them; findings explain themselves.
_ERRORS = re.compile(r"[ \n]\*Errors:\*.*?(?=\n\n|\Z)", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(#[\w-]+\)")


@cache
def sections() -> dict[str, str]:
    """All sections by heading, without their subsections and as they are written."""
    text = (resources.files(__package__) / "prompts" / "language.md").read_text(encoding="utf-8")
    return split(text)


def split(text: str) -> dict[str, str]:
    """A page cut at its headings of the second and third level."""
    found = list(_HEADING.finditer(text))
    ends = [*(m.start() for m in found[1:]), len(text)]
    return {m[1]: text[m.start() : end].strip() for m, end in zip(found, ends, strict=True)}


def chosen(*names: str) -> str:
    """The sections of these names, or all, one level down, without codes and links."""
    every = sections()
    return "\n\n".join(_plain(every[name]) for name in names or every)


def _plain(text: str) -> str:
    text = _LINK.sub(r"\1", _ERRORS.sub("", text))
    return re.sub(r"^##(#?) ", r"###\1 ", text)
