"""The parser: text to tree, or to every diagnostic that one pass can find.

Statements begin with reserved words, so the parser works statement by statement: it queries the
LALR machine before each token, and after an error it drops the statement and continues at the next
line that begins with a reserved word. Blocks are matched here, because indentation closes some of
them, and because the opener is needed to report a missing `end`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from flashwright.lang import recover
from flashwright.lang.build import Machine, Tok, tokens
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import NOWHERE, Span, Tree
from flashwright.lang.recover import STATEMENTS

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_TOKENS = 400
MAX_DIAGNOSTICS = 20

# Words that are keywords in one clause and names elsewhere; `where` is a clause after an operand.
_CLAUSE_WORDS = (
    *("OFFSET", "STAGES", "MEMORY", "COORDINATE"),
    *("AT", "ALONG", "ROWS", "COLUMN", "COLUMNS", "FRAGMENTS", "TURN"),
    *("PLACE", "STRIDED"),
)
SOFT = ("WHERE", *_CLAUSE_WORDS)
_OPERANDS = ("NAME", "NUMBER", "NOT", *_CLAUSE_WORDS)


def read(path: Path | str) -> str:
    """The text of a TL file, with `\\n` as line ends. Raises Failed with FW001, FW002 or FW003."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)  # no more than that: a device file has no size to check
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Failed(Diagnostic("FW001", f"cannot read {path}: {reason}")) from None
    return decode(data, str(path))


def decode(data: bytes, name: str) -> str:
    """The text of a file's bytes, with `\\n` as line ends. Raises Failed if they are not text."""
    if len(data) > MAX_BYTES:
        raise Failed(_too_large(f"{name} "))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Failed(_not_text(name, f"byte 0x{data[error.start]:02x} on line {line}")) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise Failed(_not_text(name, f"a NUL byte on line {line}"))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _too_large(what: str) -> Diagnostic:
    message = f"{what}has more than {MAX_BYTES // 1024} KB; a TL program has a few"
    return Diagnostic("FW003", message)


def _not_text(name: str, what: str) -> Diagnostic:
    message = f"{name} is not UTF-8 text: {what}"
    return Diagnostic("FW002", message, help="save the file as UTF-8")


def parse(source: str) -> Tree:
    """The tree of a TL program. Raises Failed with all syntax errors."""
    if len(source) > MAX_BYTES:
        raise Failed(_too_large("the program "))
    return _Reader(source).run()


def retype(tok: Tok, following: Tok | None, machine: Machine) -> None:
    """Set the type of a word whose meaning depends on context: verbs, and keywords as names."""
    if tok.type in SOFT and not machine.accepts(tok.type):
        tok.type = "NAME"
    operand = following is not None and following.type in _OPERANDS
    if tok.type == "NAME" and operand and machine.accepts("VERB"):
        tok.type = "VERB"


@dataclass
class _Block:
    """An open block (the first one is the file)."""

    opener: Tok
    colon: bool = False
    has_else: bool = False
    filled: bool = False  # the body has a statement


class _Stop(Exception):
    """The limit of diagnostics is reached: stop parsing."""


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source
        self.machine = Machine()
        self.items, found = recover.mend(list(tokens(source)), source)
        self.found: list[Diagnostic] = found
        self.blocks = [_Block(Tok("FILE", "", NOWHERE))]
        self.pending: list[Tok] = []  # own-line comments whose block is not known yet
        self.closed: Tok | None = None  # the opener that indentation closed last
        self.suspects: list[Tok] = []  # openers whose `end` stands in another block's column
        self.lines = [t for t in self.items if t.first and t.type in STATEMENTS]
        self.attempts = 0  # statements that look like TL
        self.unsure = False  # a `for`, `if` or `end` was skipped: the balance is not known

    def run(self) -> Tree:
        at = 0
        try:
            while at < len(self.items):
                tok = self.items[at]
                if tok.type == "COMMENT":
                    self.pending.append(tok)
                    at += 1
                elif tok.type in STATEMENTS:
                    at = self._statement(at)
                else:
                    at = self._unknown(at)
            self._close_file()
        except _Stop:
            pass
        if not self.attempts:
            raise Failed(self._no_tl())
        if self.found:
            order = sorted(self.found, key=lambda d: d.span.start if d.span else 0)
            raise Failed(*order[:MAX_DIAGNOSTICS])
        return self.machine.finish()

    # --- statements ---------------------------------------------------------------------------

    def _statement(self, at: int) -> int:
        """Parse the statement that begins at items[at]; returns the index after it."""
        keyword = self.items[at]
        last = stop = at
        while stop < len(self.items) and (stop == at or self.items[stop].type not in STATEMENTS):
            if self.items[stop].type != "COMMENT":
                last = stop
            stop += 1
        after = last + 1
        if after < stop and self.items[after].span.line == self.items[last].span.end_line:
            after += 1  # the comment behind the last word is the statement's own
        words = [n for n in range(at, last + 1) if self.items[n].type != "COMMENT"]
        comments = _comments(self.items[at:after])
        if keyword.first:
            self._dedent(keyword)
        self._flush()
        if keyword.type in ("END", "ELSE"):
            return self._end_or_else(words, after, comments)
        self._place(keyword)
        keyword.comment = " ".join(filter(None, comments)) if comments else None
        keyword.whole = keyword.span.to(self.items[last].span)
        self.machine.feed(keyword)
        mark, before = self.machine.mark(), len(self.found)
        go_on = self._words(words, after)
        stopped = len(self.found) > before and go_on != after
        if stopped or not self.machine.between_statements():
            self._abandon(keyword, mark)
        if keyword.type in ("FOR", "IF"):
            self._open(keyword, colon=self.items[last].type == "COLON")
        return go_on

    def _words(self, words: list[int], after: int) -> int:
        """Feed the words after the keyword; returns where to continue (`after` without errors)."""
        keyword, fed, depth, prefixes = self.items[words[0]], 1, 0, 0
        for n in words[1:]:
            tok = self.items[n]
            following = next((t for t in self.items[n + 1 : n + 9] if t.type != "COMMENT"), None)
            retype(tok, following, self.machine)
            if not self.machine.accepts(tok.type):
                if tok.first and self.machine.between_statements():
                    self._attempt(keyword)
                    return self._unknown(n)
                self.attempts += fed > 2 and keyword.type not in ("FOR", "IF")
                found, kind = recover.unexpected(tok, keyword, self.machine.accepts)
                self._report(found)
                if kind is None:
                    return self._resume(n)
                tok.type, tok.text = kind, "==" if kind == "COMPARE" else tok.text
            self.machine.feed(tok)
            fed += 1
            depth += (tok.type in ("LPAR", "LSQB")) - (tok.type in ("RPAR", "RSQB"))
            prefixes = prefixes + 1 if tok.type in ("MINUS", "NOT") else 0
            if depth + prefixes > MAX_DEPTH:
                self._too_much(tok.span, f"more than {MAX_DEPTH} nested brackets or signs")
            if fed > MAX_TOKENS:
                self._too_much(keyword.span, f"a statement has more than {MAX_TOKENS} words")
        if not self.machine.between_statements():
            return self._incomplete(words, after)
        self._attempt(keyword)
        twice = recover.repeated_clause([self.items[n] for n in words])
        if twice:
            self._report(twice)
        return after

    def _attempt(self, keyword: Tok) -> None:
        """Count statements that only TL has: other languages have `for` and `if` too."""
        self.attempts += keyword.type not in ("FOR", "IF") or not self.found

    def _incomplete(self, words: list[int], after: int) -> int:
        keyword, last = self.items[words[0]], self.items[words[-1]]
        self.attempts += len(words) > 2 and keyword.type not in ("FOR", "IF")
        following = self.items[after] if after < len(self.items) else None
        if following is None or following.first:
            self._report(recover.ends_early(last, keyword, self.machine.accepts))
            return after
        self._report(recover.unexpected(following, keyword, self.machine.accepts)[0])
        return self._resume(after - 1)

    def _abandon(self, keyword: Tok, mark: int) -> None:
        """Roll a wrong statement back. A block keeps a header, so that its `end` matches."""
        self.machine.rollback(mark)
        header = {"FOR": ("FOR", "NAME", "IN", "NUMBER", "COLON", "NUMBER"), "IF": ("IF", "NUMBER")}
        for kind in header.get(keyword.type, ()):
            self.machine.feed(Tok(kind, "0", keyword.span))

    # --- blocks -------------------------------------------------------------------------------

    def _open(self, keyword: Tok, colon: bool) -> None:
        self.blocks.append(_Block(keyword, colon))
        if len(self.blocks) - 1 > MAX_DEPTH:
            self._too_much(keyword.span, f"more than {MAX_DEPTH} nested blocks")

    def _end_or_else(self, words: list[int], after: int, comments: list[str]) -> int:
        tok, block = self.items[words[0]], self.blocks[-1]
        fits = block.opener.type == "IF" and not block.has_else
        if len(self.blocks) == 1 or (tok.type == "ELSE" and not fits):
            self._report(recover.stray_end(tok, self.closed))
            return after if len(words) == 1 else self._resume(words[0])
        self.machine.feed(tok)
        if tok.type == "ELSE":
            block.has_else, block.filled = True, False
        else:
            self._pop(tok)
        for text in comments:  # `end` has no comment field: the next statement gets it
            self.pending.append(replace(tok, type="COMMENT", text="//" + text, blank=False))
        rest = words[1:]
        if tok.type == "ELSE" and rest and self.items[rest[0]].type == "COLON":
            self.machine.feed(self.items[rest.pop(0)])
        if rest:
            return self._after_end(rest[0], tok)
        return self._named_end(tok, after)

    def _after_end(self, n: int, keyword: Tok) -> int:
        if self.items[n].first:
            return self._unknown(n)
        self._report(recover.unexpected(self.items[n], keyword, self.machine.accepts)[0])
        return self._resume(n)

    def _named_end(self, end: Tok, after: int) -> int:
        """`end for` and `end if`, as other languages have it."""
        two = self.items[after : after + 2]
        named = bool(two) and two[0].type in ("FOR", "IF") and not two[0].first
        if end.type == "END" and named and (len(two) == 1 or two[1].first):
            self._report(recover.slip(two[0], "`end` stands alone in TL", ""))
            return after + 1
        return after

    def _pop(self, end: Tok) -> None:
        opener, column = self.blocks.pop().opener, end.span.column
        outer = [b.opener.span.column for b in self.blocks[1:]]
        if end.first and opener.span.column > column and column in outer:
            self.suspects.append(opener)

    def _dedent(self, tok: Tok) -> None:
        """Close the colon blocks that a line at this column ends."""
        while self.blocks[-1].colon:
            block = self.blocks[-1]
            column = block.opener.span.column
            own = tok.type == "END" or (tok.type == "ELSE" and block.opener.type == "IF")
            if tok.span.column > column or (own and tok.span.column == column):
                return
            while self.pending and self.pending[0].span.column > column:
                self._comment(self.pending.pop(0))
            self.machine.feed(Tok("END", "end", tok.span))
            self.closed = self.blocks.pop().opener

    def _close_file(self) -> None:
        edge = Tok("FILE", "", replace(NOWHERE, column=0))
        self._dedent(edge)
        self._flush()
        left = [b.opener for b in self.blocks[1:]]
        if left and not self.unsure:
            # A line that was skipped may have been the `end`: offer no fix.
            certain = all(d.fix for d in self.found)
            for opener in (self.suspects[::-1] + left[::-1])[: len(left)]:
                d = recover.missing_end(opener, self.lines, self.items[-1], self.source)
                self._report(d if certain else replace(d, fix=None))

    # --- comments and blank lines -------------------------------------------------------------

    def _place(self, tok: Tok) -> None:
        tok.gap = tok.blank and self.blocks[-1].filled
        self.blocks[-1].filled = True

    def _comment(self, tok: Tok) -> None:
        self._place(tok)
        self.machine.feed(tok)

    def _flush(self) -> None:
        for tok in self.pending:
            self._comment(tok)
        self.pending.clear()

    # --- errors -------------------------------------------------------------------------------

    def _report(self, diagnostic: Diagnostic) -> None:
        self.found.append(diagnostic)
        if len(self.found) >= MAX_DIAGNOSTICS:
            raise _Stop

    def _too_much(self, span: Span, message: str) -> None:
        help_text = "a TL program stays far below this limit"
        raise Failed(*self.found, Diagnostic("FW004", message, span, "", (), help_text))

    def _unknown(self, at: int) -> int:
        """Handle a line without a keyword: parse it as the suggested keyword, or skip it."""
        tok = self.items[at]
        after = self.items[at + 1] if at + 1 < len(self.items) else None
        found, kind = recover.unknown_line(tok, after)
        self._report(found)
        if kind is None:
            return self._resume(at)
        tok.type, tok.first = kind, True
        self.lines.append(tok)
        self.lines.sort(key=lambda t: t.span.start)
        return at

    def _resume(self, at: int) -> int:
        """The index of the next line that begins with a keyword."""
        for n in range(at + 1, len(self.items)):
            tok = self.items[n]
            if tok.type in STATEMENTS and tok.first:
                return n
            self.unsure |= tok.type in ("FOR", "IF", "ELSE", "END")
        return len(self.items)

    def _no_tl(self) -> Diagnostic:
        first = self.items[0].span if self.items else NOWHERE
        listed = ", ".join(list(STATEMENTS.values())[:-2])
        message = "the file contains no TL" if self.items else "the file is empty"
        help_text = f"a TL program is made of lines that begin with one of: {listed}"
        return Diagnostic("FW005", message, first, "TL would start here", (), help_text)


def _comments(items: list[Tok]) -> list[str]:
    """The comments inside a statement, those between `and` and `get` included."""
    texts: list[str] = []
    for tok in items:
        if tok.type == "COMMENT":
            texts.append(tok.text[2:].strip())
        elif "//" in tok.text:
            texts += [text.strip() for text in re.findall(r"//([^\n]*)", tok.text)]
    return texts
