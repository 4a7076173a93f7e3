"""Which lines of a model's kernel.cu implement which lines of TL, by the comments it carries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flashwright.lower.source_map import SourceMap, source_map
from flashwright.untrusted.tokens import read

_TITLE = re.compile(r"//\s*(\d{1,6}) \|.*")


def commented(source: str, statements: Mapping[int, int]) -> SourceMap:
    """From a file's own comments, such as `//  12 | Copy ...`; an empty map where it has none.

    `statements` are the first and the last line of each statement of TL. What stands under a
    comment belongs to it, up to the next one or to the end of the block that it stands in.
    """
    titles: dict[int, int | None] = {}
    for comment in read(source).comments:
        match = _TITLE.fullmatch(comment.text)
        if match:
            number = int(match[1])
            titles[comment.span.line] = number if number in statements else None
    lines: list[tuple[int, int] | None] = []
    now: int | None = None
    margin = 0
    for n, text in enumerate(source.split("\n"), 1):
        column = len(text) - len(text.lstrip())
        if n in titles:
            now, margin = titles[n], column
        elif text.strip() and column < margin:
            now = None
        lines.append((now, statements[now]) if now is not None and text.strip() else None)
    return source_map(lines)
