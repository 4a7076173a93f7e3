"""The words of device/fw for a prompt: each signature with its comment, read off the headers.

Nothing is written twice: what a header says is what the model is told, so that the two cannot
drift apart. The headers are formatted by one tool, and that is relied upon here: a declaration at
the outermost level begins in the first column and ends with a `}` or a `;` of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources

# What the words of a kernel are themselves made of; a kernel has no use for them.
INTERNAL = frozenset(
    {
        *("times", "log2_of", "swizzle_bytes", "transpose_quad", "pack", "pack4", "each_element"),
        *("Chunks", "ldmatrix", "ldmatrix_transposed", "mma", "stmatrix", "copy_line", "hold"),
        *("keep_in_loop", "chunk_of", "RowsOfA", "RowsOfB", "ColumnsOfB", "Fp8ColumnsOfB"),
        *("gemm_step", "mbarrier_init", "mbarrier_arrive", "mbarrier_expect"),
        *("mbarrier_wait", "Descriptor", "LeftRows", "LeftRegisters", "left_steps"),
        *("WideAccumulator", "LeftColumns", "chunk_bytes", "unpack", "each_pair"),
        *("load_pair", "load_line", "in_pairs", "has_pairs"),
        *("writes_rows", "writes_cols", "place_of", "place_along"),
        *("PageBoxes", "page_boxes", "fetch_page", "coordinates", "fetch_box", "all_ones"),
        *("keep_steps_in_loop", "convert_stage", "convert_rounds", "helper_again"),
    }
)
# The words of mma.sync, where a kernel multiplies with wgmma.
MMA_SYNC = frozenset(
    {
        *("left", "left_transposed", "right", "right_transposed", "ColumnsOfA", "Staged"),
        *("gemm", "gemm_rolled", "gemm_in_turn"),
    }
)
# Structs whose members are told with their bodies: what they compute is what a kernel must know.
WHOLE = frozenset({"Place"})
# One instruction in sixteen widths; names that new kernels do not use; sequences, which models do
# not write yet.
_UNTOLD = ("wgmma_atom.cuh", "earlier_names.cuh", "tile_queue.cuh")
_BYTES = ("transpose.cuh", "convert.cuh")  # for elements of 8 bits only
_INCLUDE = re.compile(r"^#include <fw/(\w+\.cuh)>", re.MULTILINE)
_NAME = re.compile(r"(?:struct|using|constexpr (?:int|float)) (\w+)|([\w]+)\(")


@cache
def vocabulary(header: str, *, bytes_too: bool = False) -> str:
    """All that a header offers with what it includes, as C++ declarations with comments."""
    names = [n for n in _closure(header) if n not in _UNTOLD and (bytes_too or n not in _BYTES)]
    hidden = INTERNAL | (MMA_SYNC if "wgmma.cuh" in names else frozenset())
    parts = [(name, _declarations(_text(name), hidden)) for name in names]
    return "\n".join(f"// --- <fw/{name}>\n{told}\n" for name, told in parts if told)


def included(source: str) -> str:
    """The header of ours that a kernel's source includes; attention.cuh where it names none."""
    found = _INCLUDE.search(source)
    return found[1] if found else "attention.cuh"


@cache
def headers() -> tuple[str, ...]:
    """The names of all headers."""
    return tuple(sorted(path.name for path in _folder().iterdir() if path.name.endswith(".cuh")))


def _folder() -> resources.abc.Traversable:
    return resources.files("flashwright") / "device" / "fw"


def _text(name: str) -> str:
    return (_folder() / name).read_text(encoding="utf-8")


def _closure(header: str) -> list[str]:
    """The header's own includes before itself, each once."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name not in found and name in headers():
            for inner in _INCLUDE.findall(_text(name)):
                visit(inner)
            if name not in found:
                found.append(name)

    visit(header)
    return found


def _declarations(text: str, hidden: frozenset[str] = INTERNAL) -> str:
    told = []
    opening = _opening(text)
    for comment, blocks in _groups(text):
        heads = [_head(block, hidden) for block in blocks]
        if any(heads):
            about = comment if heads[0] else []  # it speaks of the first of them
            told.append("\n".join([*about, *filter(None, heads)]))
    return "\n".join([*opening, *told]) if told else ""


def _opening(text: str) -> list[str]:
    lines = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line)
    return lines


def _groups(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """A comment, and the declarations that follow it up to the next comment."""
    inside = text.partition("namespace fw {\n")[2].partition("\n}  // namespace fw")[0]
    comment: list[str] = []
    blocks: list[list[str]] = []
    lines = iter(inside.splitlines())
    for line in lines:
        if line.startswith("//"):
            if blocks:
                yield comment, blocks
                comment, blocks = [], []
            comment.append(line)
        elif line and not line.startswith("#"):
            blocks.append(_block(line, lines))
    yield comment, blocks


def _block(first: str, rest: Iterator[str]) -> list[str]:
    """One declaration: up to the line that closes what it opened."""
    block = [first]
    depth = _depth(first)
    while not (depth == 0 and _code(block[-1]).rstrip().endswith((";", "}"))):
        line = next(rest, None)
        if line is None:
            break
        block.append(line)
        depth += _depth(line)
    return block


def _depth(line: str) -> int:
    code = _code(line)
    return sum(code.count(c) for c in "({") - sum(code.count(c) for c in ")}")


def _code(line: str) -> str:
    """Without strings and comments."""
    return re.sub(r'"(\\.|[^"\\])*"|//.*', "", line)


def _head(block: list[str], hidden: frozenset[str]) -> str:
    """The declaration without its body; of a struct, its members without theirs."""
    text = "\n".join(block)
    named = _NAME.search(re.sub(r"template <[^\n]*>\n", "", text))
    if named is None or (named[1] or named[2]) in hidden:
        return ""
    if re.search(r"^struct ", text, re.MULTILINE):
        return _struct(block)
    if re.match(r"using|constexpr (int|float) \w+ =|template <[^\n]*>\nusing", text):
        return re.sub(r"\s+", " ", text)
    return _signature(text)


def _signature(text: str) -> str:
    """From `template` to the closing parenthesis, on one line."""
    open_at = text.index("(")
    depth, end = 0, open_at
    for end in range(open_at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            break
    const = " const" if text[end + 1 :].startswith(" const") else ""
    flat = re.sub(r"\s+", " ", text[: end + 1])
    return re.sub(r"__device__ (inline |constexpr )?", "", flat) + const + ";"


def _struct(block: list[str]) -> str:
    """Its head, its data, and the signatures of its members with their comments."""
    start = next(n for n, line in enumerate(block) if line.startswith("struct "))
    if len(block) == start + 1:
        return " ".join(block)
    whole = any(re.match(rf"struct {name}\b", block[start]) for name in WHOLE)
    told = [" ".join([*block[:start], block[start]])]
    lines = iter(block[start + 1 : -1])
    for line in lines:
        bare = line.strip()
        if bare.startswith("//"):
            told.append(line)
        elif bare:
            member = _block(line, lines)
            text = "\n".join(part.strip() for part in member)
            if "__device__" in text:
                flat = re.sub(r"\s+", " ", text).replace("__device__ ", "")
                told.append("  " + (flat if whole else _signature(text)))
            elif not text.startswith(("static_assert", "using Atom", "using Layout")):
                told.append("  " + re.sub(r"\s+", " ", text))
    return "\n".join([*told, "};"])
