"""The digests of a benchmark's file: a hash chain over its lines.

A line's digest covers its content and the digest of the line before. The run comes first
(toolchain, versions of the peers), then the kernels (TL, source, cubin), then the numbers. The
digest of a number thus covers all that it depends on, and no line can be changed, removed or moved
without breaking the chain. There is no key: a forger can recompute the whole chain. Only measuring
again finds wrong numbers then (receipt.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashwright.files import sha256

FIELD = "digest"


def digest(before: str, content: Mapping[str, Any]) -> str:
    """The digest of a line that follows a line with the digest `before` (empty: the first line)."""
    unsealed = {name: value for name, value in content.items() if name != FIELD}
    return sha256(before + json.dumps(unsealed, sort_keys=True, ensure_ascii=True))


@dataclass(frozen=True)
class Link:
    """The digest of one line: the recorded and the computed one."""

    recorded: str
    found: str

    @property
    def missing(self) -> bool:
        """The line has no digest."""
        return not self.recorded

    @property
    def broken(self) -> bool:
        """The line has a digest, and it does not match."""
        return bool(self.recorded) and self.recorded != self.found

    @property
    def value(self) -> str:
        """The digest that the next line is chained to."""
        return self.recorded or self.found


def chain(lines: Iterable[Mapping[str, Any]], before: str = "") -> Iterator[Link]:
    """A link for each line. A changed line breaks only its own link."""
    for content in lines:
        link = Link(str(content.get(FIELD, "")), digest(before, content))
        before = link.value
        yield link
