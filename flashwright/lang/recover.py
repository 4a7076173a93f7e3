"""Messages for syntax errors, and fixes for the obvious ones."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

from flashwright.lang.build import Tok
from flashwright.lang.diagnostic import Diagnostic, Edit, Fix, Label
from flashwright.lang.nodes import Span

# The words that begin a statement (or close a block), as the formatter writes them.
STATEMENTS = {
    "PARAM": "param",
    "DIM": "dim",
    "LET": "let",
    "GRID": "grid",
    "ALLOCATE": "Allocate",
    "COPY": "Copy",
    "COMPUTE": "Compute",
    "RESHAPE": "Reshape",
    "FOR": "for",
    "IF": "if",
    "ELSE": "else",
    "END": "end",
}
# How each of them is written.
FORMS = {
    "PARAM": "param BM = 128",
    "DIM": "dim top_k",
    "LET": "let kv_head = floor(head_idx / 4)",
    "GRID": "grid block_idx = 0:q_len / BM, head_idx = 0:heads",
    "ALLOCATE": "Allocate K in shared (BN, HeadDim) as bf16 with stages 2",
    "COPY": "Copy K (BN, HeadDim) in coordinate [L = i] from global to shared",
    "COMPUTE": "Compute GEMM Q, K.T and get S",
    "RESHAPE": "Reshape S from (MMA_C, MMA_M, MMA_N) to (MMA_A, MMA_M, MMA_N_new)",
    "FOR": "for i = 0:N ... end",
    "IF": "if i < N - 1 ... end",
}
# The other words of the grammar, and the clauses that two words begin.
WORDS = {
    "IN": "in",
    "COORDINATE": "coordinate",
    "AS": "as",
    "WITH": "with",
    "OFFSET": "offset",
    "STAGES": "stages",
    "FROM": "from",
    "TO": "to",
    "GLOBAL": "global",
    "SHARED": "shared",
    "REGISTER": "register",
    "WHERE": "where",
    "AT": "at",
    "ALONG": "along",
    "ROWS": "rows",
    "COLUMN": "column",
    "COLUMNS": "columns",
    "FRAGMENTS": "fragments",
    "PLACE": "place",
    "STRIDED": "strided",
    "TURN": "turn",
}
CLAUSES = {
    "AND_GET": "and get",
    "AND_ACCUMULATE": "and accumulate",
    "AND_RESCALE": "and rescale",
}
_SIGNS = {"EQUAL": "=", "COLON": ":", "COMMA": ",", "RPAR": ")", "LSQB": "[", "RSQB": "]"}
# Words of other languages, for which there is a word in TL.
_FOREIGN = {
    "load": "Copy",
    "store": "Copy",
    "move": "Copy",
    "alloc": "Allocate",
    "declare": "Allocate",
    "endfor": "end",
    "endif": "end",
    "done": "end",
    "while": "for",
}
# Characters that stand for a sign of TL: what the token becomes (None: nothing) and its text.
_STRANGE: dict[str, tuple[str | None, str]] = {
    "\u2264": ("COMPARE", "<="),
    "\u2265": ("COMPARE", ">="),
    "\u2260": ("COMPARE", "!="),
    "\u00d7": ("STAR", "*"),
    "\u2212": ("MINUS", "-"),
    "\u2013": ("MINUS", "-"),
    "&&": ("AND", "and"),
    "||": ("OR", "or"),
    "\u00a0": (None, " "),
    "\u3000": (None, " "),
    "\u200b": (None, ""),
    "\ufeff": (None, ""),
}


def guess(word: str, candidates: Iterable[str]) -> tuple[str, bool] | None:
    """The candidate most similar to the word, and whether it is near-certain; None if none is."""
    by_lower = {c.lower(): c for c in candidates}
    close = difflib.get_close_matches(word.lower(), by_lower, n=2, cutoff=0.6)
    if not close:
        return None
    scores = [difflib.SequenceMatcher(None, word.lower(), c).ratio() for c in close]
    swapped = [sorted(word.lower()) == sorted(c) for c in close]
    if len(close) > 1 and swapped[1] and not swapped[0]:
        close, scores, swapped = close[::-1], scores[::-1], swapped[::-1]
    alone = len(close) == 1 or scores[0] - scores[1] > 0.1 or swapped[0] > swapped[1]
    return by_lower[close[0]], alone and (scores[0] >= 0.75 or swapped[0])


def _edit(span: Span, text: str) -> tuple[Edit, ...]:
    return (Edit(span.start, span.end, text),)


def _one_of(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def shown(tok: Tok) -> str:
    """A token as quoted in messages."""
    text = " ".join(tok.text.split()) or tok.text
    if tok.type == "STRANGE" and not (text.isascii() and text.isprintable()):
        name = unicodedata.name(text[0], "no name").lower()
        return f"the character U+{ord(text[0]):04X} ({name})"
    return f"`{text}`"


def expected(accepts: Callable[[str], bool]) -> str:
    """The tokens that may come next, in words."""
    words: list[str] = []
    value, operator = accepts("NUMBER"), accepts("PLUS")
    if value or accepts("NAME"):
        words.append("a value" if value else "a name")
    if accepts("LPAR") and not value and not operator:
        words.append("`(`")
    for table in (_SIGNS, WORDS, CLAUSES):
        words += [f"`{word}`" for kind, word in table.items() if accepts(kind)]
    if operator:  # after a name, `[` would only make it an index
        words = [word for word in words if word != "`[`"]
    if accepts("COPY"):
        words.append("the end of the statement")
    elif operator and not value:
        words.append("an operator")
    return _one_of(words or ["the end of the file"])


def _form(keyword: Tok) -> str | None:
    form = FORMS.get(keyword.type)
    return f"it is written like this: {form}" if form else None


def unexpected(
    tok: Tok, keyword: Tok, accepts: Callable[[str], bool]
) -> tuple[Diagnostic, str | None]:
    """FW101 for a token out of place; the kind it should have been, when that is near-certain."""
    wanted = expected(accepts)
    message = f"expected {wanted}, found {shown(tok)}"
    plain = Diagnostic("FW101", message, tok.span, "not expected here", (), _form(keyword))
    if tok.type == "EQUAL" and accepts("COMPARE"):
        fix = Fix("write `==` to compare", _edit(tok.span, "=="))
        told = replace(plain, message="`=` does not compare two values", fix=fix)
        return (told, "COMPARE") if keyword.type == "IF" else (plain, None)
    if not re.fullmatch(r"[A-Za-z_]\w*", tok.text):
        return plain, None
    if tok.type not in ("NAME", "VERB"):
        if accepts("NAME"):
            message = f"expected {wanted}, but {shown(tok)} is a word of TL and cannot be a name"
            return replace(plain, message=message), None
        return plain, None
    words = {word: kind for kind, word in WORDS.items() if accepts(kind)}
    found = guess(tok.text, words)
    if found is None:
        return plain, None
    word, certain = found
    told = replace(plain, label=f"did you mean `{word}`?")
    if not certain:
        return told, None
    fix = Fix(f"replace `{tok.text}` by `{word}`", _edit(tok.span, word))
    return replace(told, fix=fix), words[word]


def ends_early(last: Tok, keyword: Tok, accepts: Callable[[str], bool]) -> Diagnostic:
    """FW101 for a statement that stops before it is complete."""
    wanted = expected(accepts)
    message = f"the statement ends too early: expected {wanted} after {shown(last)}"
    return Diagnostic("FW101", message, last.span, f"expected {wanted}", (), _form(keyword))


def unknown_line(tok: Tok, after: Tok | None = None) -> tuple[Diagnostic, str | None]:
    """FW102 for a line that begins no statement; the keyword it was meant to be, if certain."""
    listed = ", ".join(list(STATEMENTS.values())[:-2])
    help_text = f"a statement begins with one of: {listed}"
    if after is not None and after.type == "EQUAL":
        help_text = f"a tile is computed with `Compute ... and get {tok.text}`, a number with "
        help_text += f"`let {tok.text} = ...`"
    if tok.type not in ("NAME", "VERB"):
        message = f"no statement begins with {shown(tok)}"
        return Diagnostic("FW101", message, tok.span, "not expected here", (), help_text), None
    plain = Diagnostic(
        "FW102",
        f"`{tok.text}` does not begin a statement",
        tok.span,
        "not a word of TL",
        (),
        help_text,
    )
    foreign = _FOREIGN.get(tok.text.lower())
    certain = foreign == "end" and tok.text.lower().startswith("end")
    found = (foreign, certain) if foreign else guess(tok.text, STATEMENTS.values())
    if found is None:
        return plain, None
    word, certain = found
    told = replace(plain, label=f"did you mean `{word}`?")
    if not certain:
        return told, None
    fix = Fix(f"replace `{tok.text}` by `{word}`", _edit(tok.span, word))
    return replace(told, fix=fix), word.upper()


def stray_end(tok: Tok, closed: Tok | None) -> Diagnostic:
    """FW103 for an `end` or `else` that has no block."""
    word = tok.text.lower()
    message = f"this `{word}` has no {'block' if word == 'end' else '`if`'}"
    labels: tuple[Label, ...] = ()
    help_text = None
    if closed is not None:
        labels = (Label(closed.span, "the block opened here is closed already"),)
        help_text = (
            "a block opened with a colon closes where the indentation ends: "
            "indent its body, or leave the colon out"
        )
    return Diagnostic("FW103", message, tok.span, "nothing to close here", labels, help_text)


def missing_end(opener: Tok, lines: list[Tok], last: Tok, source: str) -> Diagnostic:
    """FW103 for a block that is never closed; the fix follows the indentation."""
    column = opener.span.column
    after = [t for t in lines if t.span.start > opener.span.start]
    indented = bool(after) and after[0].span.column > column
    place = next((t for t in after if t.span.column <= column), None) if indented else None
    label = Label(opener.span, "this block is not closed")
    message = f"the block opened by `{opener.text}` on line {opener.span.line} has no `end`"
    help_text = "close the block with `end` on a line of its own"
    found = Diagnostic("FW103", message, last.span, "the file ends here", (label,), help_text)
    text = " " * (column - 1) + "end\n"
    if place is not None:
        at = place.span.start - (place.span.column - 1)
        fix = Fix("add `end` before this line", (Edit(at, at, text),))
        return replace(found, span=place.span, label="expected `end` before this", fix=fix)
    if indented:
        text = text if source.endswith("\n") else "\n" + text
        fix = Fix("add `end` at the end", (Edit(len(source), len(source), text),))
        return replace(found, fix=fix)
    return found


def repeated_clause(words: list[Tok]) -> Diagnostic | None:
    """FW101 for a clause that a statement has twice."""
    seen: dict[str, Tok] = {}
    for before, tok in pairwise(words):
        kind = {"AND_ACCUMULATE": "AND_GET"}.get(tok.type, tok.type)
        if words[0].type == "COMPUTE":
            clause = kind in ("WITH", "WHERE", "AND_GET", "AND_RESCALE")
        else:
            clause = kind in ("AS", "ALONG", "FRAGMENTS", "PLACE", "STRIDED") or (
                kind in ("OFFSET", "STAGES") and before.type == "WITH"
            )
        if clause and kind in seen:
            label = Label(seen[kind].span, "the first one")
            message = f"{shown(tok)} appears twice in one statement"
            return Diagnostic("FW101", message, tok.span, "leave one of them out", (label,))
        if clause:
            seen[kind] = tok
    return None


def mend(items: list[Tok], source: str) -> tuple[list[Tok], list[Diagnostic]]:
    """Mend mistakes in single words, so that parsing continues; returns tokens and findings."""
    out: list[Tok] = []
    found: list[Diagnostic] = []
    items = _mend_ranges(items, found)
    strange: dict[str, list[Tok]] = {}
    skip_line = 0
    for n, tok in enumerate(items):
        before = out[-1] if out else None
        after = items[n + 1] if n + 1 < len(items) else None
        if tok.span.line == skip_line:
            continue
        if tok.type == "STRANGE" and tok.text in _STRANGE:
            strange.setdefault(tok.text, []).append(tok)
            kind, text = _STRANGE[tok.text]
            if kind is None:
                if after and tok.first and after.span.line == tok.span.line:
                    after.first = True
            else:
                out.append(replace(tok, type=kind, text=text))
        elif tok.text == "#" and tok.type == "STRANGE":
            found.append(slip(tok, "a comment begins with `//`", "//"))
            end = source.find("\n", tok.span.start)
            text = "//" + source[tok.span.end : end if end >= 0 else len(source)]
            out.append(replace(tok, type="COMMENT", text=text))
            skip_line = tok.span.line
        elif tok.text == ";" and (after is None or after.span.line > tok.span.line):
            found.append(slip(tok, "a statement needs no `;`", ""))
        elif before and tok.type == "NAME" and _joins(before, tok, after):
            out[-1] = _join(before, tok, found)
        else:
            out.append(tok)
    for text, toks in strange.items():
        edits = tuple(e for t in toks for e in _edit(t.span, _STRANGE[text][1]))
        fix = Fix(f"write `{_STRANGE[text][1]}`", edits)
        message = f"{shown(toks[0])} is not TL; write `{_STRANGE[text][1]}`"
        if _STRANGE[text][0] is None:
            message = f"{shown(toks[0])} is not whitespace in TL"
            fix = replace(fix, title="replace it" if _STRANGE[text][1] else "leave it out")
        found.append(Diagnostic("FW101", message, toks[0].span, "not in TL", fix=fix))
    return out, found


def _mend_ranges(items: list[Tok], found: list[Diagnostic]) -> list[Tok]:
    """`for i in range(a, b)`, as Python has it, becomes `for i in a:b`."""
    out = list(items)
    for n in range(len(items) - 2):
        kinds = [t.type for t in items[n : n + 3]]
        if kinds != ["IN", "NAME", "LPAR"] or items[n + 1].text != "range":
            continue
        depth, commas, close = 0, [], n + 2
        for close in range(n + 2, len(items)):
            kind = items[close].type
            depth += (kind in ("LPAR", "LSQB")) - (kind in ("RPAR", "RSQB"))
            if depth == 0 or kind in STATEMENTS:
                break
            commas += [close] if kind == "COMMA" and depth == 1 else []
        if depth or len(commas) > 1 or close == n + 3:
            continue
        changes = {n + 1: ("NUMBER", "0"), n + 2: ("COLON", ":"), close: ("", "")}
        if commas:
            changes |= {n + 1: ("", ""), n + 2: ("", ""), commas[0]: ("COLON", ":")}
        for k, (kind, text) in changes.items():
            out[k] = replace(items[k], type=kind, text=text)
        edits = tuple(e for k in sorted(changes) for e in _edit(items[k].span, changes[k][1]))
        span, fix = items[n + 1].span.to(items[close].span), Fix("write `low:high`", edits)
        message = "a loop's range is written `low:high`"
        found.append(Diagnostic("FW101", message, span, "not in TL", fix=fix))
    return [tok for tok in out if tok.type]


def slip(tok: Tok, message: str, text: str) -> Diagnostic:
    """FW101 for a token, with the fix that replaces it by `text`."""
    title = f"write `{text}`" if text else f"leave `{tok.text}` out"
    return Diagnostic("FW101", message, tok.span, title, fix=Fix(title, _edit(tok.span, text)))


def _joins(before: Tok, tok: Tok, after: Tok | None) -> bool:
    """Whether two tokens are one mistake: `0_register`, `K^T`, `and accumlate O`."""
    if before.type == "NUMBER":
        return before.span.end == tok.span.start
    if before.text == "^":
        return tok.text == "T"
    operand = after is not None and after.type in ("NAME", "NEW", "NUMBER")
    return before.type == "AND" and operand and _clause(tok.text) is not None


def _clause(word: str) -> str | None:
    found = guess(word, ("get", "accumulate", "rescale"))
    return found[0] if found and found[1] else None


def _join(before: Tok, tok: Tok, found: list[Diagnostic]) -> Tok:
    span, text = before.span.to(tok.span), before.text + tok.text
    joined = replace(before, type="NAME", text=text, span=span)
    if before.type == "NUMBER":
        d = Diagnostic("FW101", f"the name `{text}` begins with a digit", span, "not a name")
        if text.startswith("0"):  # printed programs have O_register with a zero
            title = f"write `O{text[1:]}`, with the letter O"
            d = replace(d, fix=Fix(title, _edit(span, "O" + text[1:])))
    elif before.text == "^":
        joined.type, joined.text = "TRANSPOSE", ".T"
        d = replace(slip(joined, "a transpose is written `.T`", ".T"), span=span)
    else:
        word = _clause(tok.text) or ""
        joined.type = f"AND_{word.upper()}"
        message = f"`and {tok.text}` is not a clause of Compute"
        fix = Fix(f"replace `{tok.text}` by `{word}`", _edit(tok.span, word))
        d = Diagnostic("FW101", message, tok.span, f"did you mean `{word}`?", fix=fix)
    found.append(d)
    return joined
