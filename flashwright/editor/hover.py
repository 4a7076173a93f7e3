"""What an editor shows of the word under the cursor, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashwright.check.budget import KB
from flashwright.check.names import Names
from flashwright.check.shapes import show
from flashwright.editor.analysis import Analysis, Known
from flashwright.editor.names import Meant, meant
from flashwright.editor.places import span_of, word_at
from flashwright.lang.codes import page_of
from flashwright.lang.format import format_coord, format_expr, format_stmt
from flashwright.lang.nodes import Grid, Num, Param, Span, Statement
from flashwright.lang.recover import FORMS, STATEMENTS
from flashwright.program.program import Buffer, Key, Tensor
from flashwright.program.vocabulary import (
    ARITHMETIC,
    DTYPES,
    PAGE,
    PREDEFINED_DIMS,
    SCHEDULE_PARAMS,
    VERBS,
)
from flashwright.semantics.tiles import Tile, Where

LAYOUTS = {
    "C": "the accumulator of an MMA (MMA_C)",
    "A": "the operand of an MMA (MMA_A)",
}
KINDS = {
    "max": "a running maximum",
    "diff": "the difference of two maxima",
    "factor": "the factor from one maximum to the next",
    "relative": "scores relative to a maximum",
    "weights": "weights of a softmax: exponentials, and sums of them",
}
VERB_FORMS = {
    "gemm": "Compute GEMM Q, K.T and get S",
    "softmax": "Compute Softmax S with Smax and Ssum and rescale O",
    "mask": "Compute Mask S where q_idx >= kv_idx",
    **{verb: f"Compute {verb.capitalize()} S, Scale and get new S" for verb in ARITHMETIC},
}
WORDS = {
    **dict.fromkeys(PREDEFINED_DIMS, "a size that is known when the kernel is called"),
    **dict.fromkeys(SCHEDULE_PARAMS, "a param of the schedule: 1 by default, 0 turns it off"),
    "Warps": "the number of warps that compute, 4 by default",
    "q_idx": "the position of the element's query in its sequence",
    "kv_idx": "the position of the element's key in its sequence",
    PAGE: "the page that a row of the tile lies in, counted in its sequence",
    "inf": "infinity",
    **{name: f"an element type of {size} byte{'s' * (size > 1)}" for name, size in DTYPES.items()},
    "global": "global memory: the tensors of the caller, and scratch between kernels",
    "shared": "shared memory: one copy for each thread block",
    "register": "registers: a tile is spread over the threads that compute",
}


@dataclass(frozen=True)
class Hover:
    """Markdown about a stretch of the text."""

    markdown: str
    span: Span


def hover(analysis: Analysis, text: str, offset: int) -> Hover | None:
    """What is known of the word at a place of the text, and the long form of the findings there;
    None if there is nothing to say."""
    word = word_at(text, offset)
    parts = [_in_words(analysis.known, text, word)] if word is not None else []
    if analysis.text == text:
        at = (d for d in analysis.diagnostics if d.span and d.span.start <= offset <= d.span.end)
        codes = list(dict.fromkeys(d.code for d in at))
        parts += [page_of(code).read_text(encoding="utf-8") for code in codes]
    shown = [part for part in parts if part]
    if not shown or (word is None and not text[offset : offset + 1].strip()):
        return None
    return Hover("\n\n---\n\n".join(shown), word or span_of(text, offset, offset + 1))


def _in_words(known: Known | None, text: str, word: Span) -> str:
    name = text[word.start : word.end]
    found = meant(known, text, word) if known is not None else []
    if found and known is not None:
        return "\n\n".join(_described(name, known, one) for one in found)
    if name.lower() in WORDS or name in WORDS:
        return f"**`{name}`**: {WORDS.get(name) or WORDS[name.lower()]}"
    forms = {word.lower(): FORMS[kind] for kind, word in STATEMENTS.items() if kind in FORMS}
    form = (forms | VERB_FORMS).get(name.lower())
    if form is not None:
        return f"**`{name}`** is written like this:\n\n{_code(form)}"
    if name.lower() in VERBS:
        arity = VERBS[name.lower()].arity
        count = f"{arity[0]}" if len(arity) == 1 else f"{arity[0]} to {arity[-1]}"
        what = "reduces each row of a tile" if VERBS[name.lower()].reduces else "an operation"
        return f"**`{name}`**: {what}, {count} operand{'s' * (count != '1')}"
    return ""


def _described(name: str, known: Known, one: Meant) -> str:
    match one.found:
        case Buffer() as buffer:
            return _tile(buffer, known, one)
        case Tensor() as tensor:
            return _tensor(tensor, known)
        case stmt:
            return _scalar(name, stmt, one.kernel)


def _code(text: str) -> str:
    return f"```tl\n{text}\n```"


def _scalar(name: str, stmt: Statement, kernel: Names) -> str:
    text = format_stmt(stmt)
    if isinstance(stmt, Param):
        plain = isinstance(stmt.value, Num)
        text += "" if plain else f"  // = {float(kernel.params.get(stmt.name.id, 0)):g}"
    said = [_code(text)]
    said += [stmt.comment] if stmt.comment else []
    if isinstance(stmt, Grid):
        said.append(f"`{name}` is a coordinate of the thread block")
    elif name in WORDS:
        said.append(WORDS[name])
    return "\n\n".join(said)


def _tensor(tensor: Tensor, known: Known) -> str:
    axes = ", ".join(f"{a.label}: {format_expr(a.size)}" for a in tensor.axes)
    every = [k.tensors[tensor.name] for k in known.kernels if tensor.name in k.tensors]
    read, written = any(t.read for t in every), any(t.written for t in every)
    role = "scratch between kernels" if read and written else "output" if written else "input"
    if tensor.declared.in_place:
        role = "changed in place"
    form = [f"as `{tensor.dtype}`", role]
    form += ["any stride on its last axis"] if tensor.declared.strided else []
    form += ["stored as MMA fragments"] if tensor.declared.fragments else []
    return f"**`{tensor.name}`** in global memory: `({axes})` {', '.join(form)}"


def _tile(buffer: Buffer, known: Known, one: Meant) -> str:
    space = "shared memory" if buffer.space == "shared" else "registers"
    size = f"{buffer.bytes / KB:g} KB"
    if buffer.stages > 1:
        size = f"{buffer.stages} stages of {size}"
    size += f", along the {buffer.along} of tiles" if buffer.along is not None else ""
    lines = [f"**`{buffer.name}`** in {space}: `{show(buffer)}` as `{buffer.dtype}`, {size}"]
    tile = _at_statement(buffer, known, one.stmt)
    if tile is not None:
        lines += ["\nIn the first thread block:\n", *(f"- {fact}" for fact in _content(tile))]
    return "\n".join(lines)


def _at_statement(buffer: Buffer, known: Known, stmt: Statement | None) -> Tile | None:
    """What is known of a tile behind a statement; else when it is last written."""
    key = (buffer.name, buffer.space)
    line = stmt.span.line if stmt is not None else None
    last: Mapping[Key, Tile] = {}
    for seen, tiles in known.tiles:
        if key in tiles and tiles[key].shape == buffer.shape:
            last = tiles
            if seen.span.line == line:
                break
    return last.get(key)


def _content(tile: Tile) -> Iterator[str]:
    for name, where in zip(("rows", "columns"), tile.axes, strict=False):
        if where is not None:
            yield f"{name}: {_positions(where)}"
    if tile.at:
        yield f"of {', '.join(f'{dim} {place.value}' for dim, place in tile.at.items())}"
    if tile.layout is not None:
        yield f"layout: {LAYOUTS[tile.layout]}"
    if tile.kind is not None:
        yield f"holds {KINDS[tile.kind.name]}"
    if tile.masks:
        yield f"masked: {', '.join(f'`{format_expr(m.where)}`' for m in tile.masks)}"


def _positions(where: Where) -> str:
    """The positions of an axis in the first thread block, and the coordinate they come from."""
    coords = {c.axis.id: c for c in where.copy.coords or ()}
    coord = coords.get(where.label)
    at = f", at `{format_coord(coord)}`" if coord is not None else ""
    return f"{where} of `{where.tensor}`{at}"
