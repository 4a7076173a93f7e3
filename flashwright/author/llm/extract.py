"""The program in a model's reply: TL, CUDA or Python, among whatever else the model said.

A reply is untrusted text. What is taken from it is one block, cleaned of characters that nobody
sees; where there is none, NoCode says why in a sentence that the model can act on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from flashwright.author.llm.model import Reply

LIMIT = 256 * 1024
"""Bytes of a reply at most; a kernel has some ten thousand."""
Level = Literal["sketch", "code"]


class NoCode(Exception):
    """A reply without a program in it; `why` is a sentence for whoever wrote it."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True)
class _Kind:
    """What a block of one language is called, and how one is known that is not called anything."""

    name: str
    labels: tuple[str, ...]
    likely: Callable[[str], bool]
    bare: Callable[[str], str]


@dataclass(frozen=True)
class _Block:
    label: str
    text: str
    closed: bool


def tl(reply: Reply | str, level: Level | None = None) -> str:
    """The TL in a reply: the last block of it; of a sketch and a code the one asked for."""
    fits: Callable[[str], bool] = bool
    if level is not None:

        def fits(text: str) -> bool:
            return (level == "code") == bool(_GRID.search(text))

    return _program(reply, _TL, fits)


def cuda(reply: Reply | str) -> str:
    """The CUDA in a reply: the last block with a kernel in it."""
    return _program(reply, _CUDA, lambda text: "__global__" in text)


def python(reply: Reply | str) -> str:
    """The Python in a reply: the last block with a function in it."""
    return _program(reply, _PYTHON, lambda text: bool(_DEF.search(text)))


def _program(reply: Reply | str, kind: _Kind, fits: Callable[[str], bool]) -> str:
    text = reply if isinstance(reply, str) else reply.text
    cut = not isinstance(reply, str) and reply.finish in ("length", "cut")
    if len(text) > LIMIT or len(text.encode("utf-8", "replace")) > LIMIT:
        raise NoCode(f"The answer is longer than {LIMIT // 1024} KB. Write the program only.")
    said = without_thoughts(_clean(text))
    if not said.strip():
        raise NoCode(_nothing(text, kind, cut))
    blocks = _blocks(said)
    found = _chosen(blocks, kind, fits, cut)
    if found is None and not blocks and not cut:
        found = kind.bare(said)
    if not found:
        raise NoCode(_missing(blocks, kind, cut))
    return found


# --- which block ------------------------------------------------------------------------------


def _chosen(
    blocks: list[_Block], kind: _Kind, fits: Callable[[str], bool], cut: bool
) -> str | None:
    """The last block that fits; else, where the reply is whole, the last of the kind."""
    usable = [b for b in blocks if (b.closed or not cut) and b.text.strip()]
    named = [b.text for b in usable if b.label in kind.labels]
    unnamed = [b.text for b in usable if b.label not in _KNOWN and kind.likely(b.text)]
    for texts in (named, unnamed):
        fitting = [text for text in texts if fits(text)]
        if fitting:
            return fitting[-1]
    if cut:  # what fits may have been in the part that did not come
        return None
    every = named or unnamed
    return every[-1] if every else None


def _nothing(text: str, kind: _Kind, cut: bool) -> str:
    if not text.strip():
        return "The answer was empty." + (_TOO_LONG if cut else "")
    if cut:
        return "The answer ended before the program began." + _TOO_LONG
    return f"The answer was nothing but thoughts. Write the program behind them, in a {kind.name}."


def _missing(blocks: list[_Block], kind: _Kind, cut: bool) -> str:
    if cut:
        return "The answer was cut off before the program was complete." + _TOO_LONG
    if any(b.label in kind.labels for b in blocks):
        return f"The {kind.name} is empty."
    if blocks:
        labels = ", ".join(sorted({f"`{b.label}`" if b.label else "no name" for b in blocks}))
        return f"The answer has no {kind.name}; its blocks are of {labels}."
    return f"The answer has no {kind.name}."


_TOO_LONG = " It reached its limit of tokens: think less, and write the program sooner."


# --- what a reply is made of ------------------------------------------------------------------


def _clean(text: str) -> str:
    """Plain line ends, no byte order mark, nothing that cannot be seen."""
    text = re.sub(r"\r\n?|[\u2028\u2029\x0b\x0c\x85]", "\n", text)
    text = text.replace("\u00a0", " ")
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _UNSEEN)


_UNSEEN = ("Cc", "Cf", "Cs", "Cn", "Co")
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def without_thoughts(text: str) -> str:
    """Without <think>...</think>. An end without a beginning ends what the server began."""
    kept: list[str] = []
    place, thinking = 0, False
    for mark in _THOUGHT.finditer(text):
        if mark[1]:  # an end
            thinking, place = False, mark.end()
        elif not thinking:
            kept.append(text[place : mark.start()])
            thinking = True
    return "".join(kept) if thinking else "".join([*kept, text[place:]])


# `++` gives nothing back: else a long line of one character takes the square of its length.
_FENCE = re.compile(r"^([ \t]*+(?:>[ \t]?)*+)(`{3,}+|~{3,}+)[ \t]*+([^`\n]*+)$")


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks, in their order; one that another begins in, or the end, is not closed."""
    found: list[_Block] = []
    fence, label, margin, lines = "", "", "", list[str]()

    def put(closed: bool) -> None:
        found.append(_Block(label, _dedented(lines, margin), closed))

    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if not fence:
            if mark:
                fence, label, margin, lines = mark[2], _label(mark[3]), mark[1], []
        elif mark and mark[2][0] == fence[0] and len(mark[2]) >= len(fence) and not mark[3].strip():
            put(closed=True)
            fence = ""
        elif mark and _label(mark[3]) in _KNOWN:
            put(closed=False)
            fence, label, margin, lines = mark[2], _label(mark[3]), mark[1], []
        elif line.rstrip().endswith(fence) and fence not in line.rstrip()[: -len(fence)]:
            lines.append(line.rstrip()[: -len(fence)])  # "end```"
            put(closed=True)
            fence = ""
        else:
            lines.append(line)
    if fence:
        put(closed=False)
    return found


def _label(info: str) -> str:
    """The language that a fence names: of `tl title="x"` and `{.tl}` it is tl."""
    word = re.match(r"[{.\s]*([\w+#-]*)", info)
    return word[1].lower() if word else ""


def _dedented(lines: list[str], margin: str) -> str:
    """Without the margin that the fence had (in a list, or quoted), and blank lines around."""
    bare = [line[len(margin) :] if line.startswith(margin) else line for line in lines]
    return _trimmed("\n".join(bare))


def _trimmed(text: str) -> str:
    text = re.sub(r"\A(?:[ \t]*\n)+", "", text).rstrip()
    return text + "\n" if text else ""


# --- the languages ----------------------------------------------------------------------------

_STATEMENT = re.compile(
    r"^[ \t]*+(?:copy[ \t]++\w++[^\n]*\bfrom\b|compute[ \t]++\S|param[ \t]++\w++[ \t]*+=|"
    r"grid[ \t]++\w++[ \t]*+=|allocate[ \t]++\w++[ \t]++in\b|let[ \t]++\w++[ \t]*+=|"
    r"dim[ \t]++\w++[ \t]*+(?:,|$)|for[ \t]++\w++[ \t]*+(?:=|in\b)[^\n]*:|"
    r"reshape[ \t]++\w++[ \t]++from\b|if[ \t]++[^\n]*[<>=]|end[ \t]*+$)",
    re.IGNORECASE,
)
_GRID = re.compile(r"^[ \t]*+grid[ \t]++\w++[ \t]*+=", re.IGNORECASE | re.MULTILINE)
_DEF = re.compile(r"^def \w+\(", re.MULTILINE)


def _is_tl(text: str) -> bool:
    """Whether its first line that is no comment is a statement."""
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("//"):
            return bool(_STATEMENT.match(line))
    return False


def _bare_tl(text: str) -> str:
    """TL without a fence: from its first statement to the end of the paragraph of its last."""
    lines = text.split("\n")
    numbers = [n for n, line in enumerate(lines) if _STATEMENT.match(line)]
    if len(numbers) < 2 and not _is_tl(text):
        return ""
    if not numbers:
        return ""
    first, last = numbers[0], numbers[-1]
    while first > 0 and lines[first - 1].lstrip().startswith("//"):
        first -= 1
    while last + 1 < len(lines) and lines[last + 1].strip():
        last += 1
    return _trimmed("\n".join(lines[first : last + 1]))


def _is_cuda(text: str) -> bool:
    return "__global__" in text or "#include" in text


def _bare_cuda(text: str) -> str:
    """CUDA without a fence: from its first include or constant to its last brace."""
    if "__global__" not in text:
        return ""
    lines = text.split("\n")
    begin = re.compile(
        r"(?:#include|#pragma|constexpr|using|struct|template|namespace|extern|//)\b|//"
    )
    starts = [n for n, line in enumerate(lines) if begin.match(line)]
    ends = [n for n, line in enumerate(lines) if line.startswith("}")]
    if not starts or not ends or starts[0] > ends[-1]:
        return ""
    return _trimmed("\n".join(lines[starts[0] : ends[-1] + 1]))


def _bare_python(text: str) -> str:
    """Python without a fence: only where the whole reply is it."""
    return _trimmed(text) if re.match(r"\s*(?:import|from|def|#)\b", text) else ""


_TL = _Kind("block of ```tl", ("tl",), _is_tl, _bare_tl)
_CUDA = _Kind(
    "block of ```cuda",
    ("cuda", "cu", "cuh", "cpp", "c++", "cxx", "cc", "c", "h", "hpp"),
    _is_cuda,
    _bare_cuda,
)
_PYTHON = _Kind(
    "block of ```python", ("python", "py", "python3"), lambda t: bool(_DEF.search(t)), _bare_python
)
_KNOWN = frozenset((*_TL.labels, *_CUDA.labels, *_PYTHON.labels))
