"""The digests of a benchmark's file: a chain, in which each line vouches for all before it.

A line's digest is that of what it says and of the digest of the line before. The run comes first
(toolchain, versions of the peers), then the kernels (TL, source, cubin), then the numbers: so the
digest of a number is one over all that it rests on, and a line cannot be changed, taken out or
moved without another digest. There is no key: whoever makes all digests again makes another chain
that is as good. What is then wrong is found by measuring (receipt.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashwright.files import sha256

FIELD = "digest"


def digest(before: str, told: Mapping[str, Any]) -> str:
    """Of a line, behind a line with the digest `before` (empty: it is the first)."""
    content = {name: value for name, value in told.items() if name != FIELD}
    return sha256(before + json.dumps(content, sort_keys=True, ensure_ascii=True))


@dataclass(frozen=True)
class Link:
    """The digest of one line: what the file says, and what it should be."""

    recorded: str
    found: str

    @property
    def missing(self) -> bool:
        """The line has no digest."""
        return not self.recorded

    @property
    def broken(self) -> bool:
        """The line has a digest, and it is not its own."""
        return bool(self.recorded) and self.recorded != self.found

    @property
    def value(self) -> str:
        """What the next line builds on."""
        return self.recorded or self.found


def chain(lines: Iterable[Mapping[str, Any]], before: str = "") -> Iterator[Link]:
    """A link for each line. A line that was changed breaks its own link and no other."""
    for told in lines:
        link = Link(str(told.get(FIELD, "")), digest(before, told))
        before = link.value
        yield link
