"""What CUDA that a model wrote may contain: device code and nothing that reaches outside of it.

This is read before the compiler sees it. It does not guess how a compiler reads an odd text, it
refuses the odd text: characters beyond ASCII outside of comments, trigraphs, `#` within a line
(nvcc preprocesses once more what gcc has preprocessed), macros that a header could meet.
Directives, headers, pragmas and attributes are those of a list.

It is one fence of three. Whatever got past it would still meet the confined process (process.py)
and the list of files that the compiler has read (compile.py). No host code is ever made of it, let
alone run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Span
from flashwright.untrusted.tokens import Token, Unreadable, read

MOST_BYTES = 256 * 1024
MOST = 10
HEADERS = (
    *("array", "cassert", "cfloat", "climits", "cmath", "cstddef", "cstdint", "limits", "tuple"),
    *("type_traits", "utility", "assert.h", "float.h", "limits.h", "math.h", "mma.h", "stddef.h"),
    *("stdint.h", "cooperative_groups.h", "vector_types.h"),
)
FOLDERS = ("fw", "cute", "cutlass", "cuda", "cooperative_groups")
_INCLUDE = re.compile(r"include[ \t]*<([A-Za-z0-9_.+/-]+)>")
_CUDA_HEADER = re.compile(r"cuda[A-Za-z0-9_]*\.h")
_DIRECTIVES = (
    *("", "define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "error", "include"),
)
_PRAGMAS = re.compile(
    r"pragma[ \t]+(?:once|(?:nv_)?(?:no)?unroll\b[A-Za-z0-9_ \t()*+/-]*)", re.ASCII
)
_DEFINE = re.compile(r"define[ \t]+([A-Za-z_][A-Za-z0-9_]*)(?:\(([^()]*)\))?(.*)", re.DOTALL)
_UNDEF = re.compile(r"undef[ \t]+([A-Za-z_][A-Za-z0-9_]*)")
# Controls, half characters, and signs that change how the text around them is shown.
_CONTROL = re.compile(
    r"[^\t\n\r -~\u00a0-\U0010ffff]|\r(?!\n)"
    r"|[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
# What compilers join or do not join with the next line, by their version and their flags.
_LINE_ENDS = {
    re.compile(r"\?\?/[ \t]*\r?\n"): "`??/` at the end of line {}, which may join it with the next",
    re.compile(r"\\[ \t]+\r?\n"): "blanks behind the backslash at the end of line {}",
}
_TRIGRAPH = re.compile(r"\?\?[=/'()!<>-]")

# Words that are refused wherever they stand in the code, and what is wrong with them.
_LOOKS = "asks for a file or for where and when this is compiled"
_PRAGMA = "gives the compiler orders"
_WORDS = {
    **dict.fromkeys(
        ("__has_include", "__has_include_next", "__has_embed", "__FILE__", "__BASE_FILE__"), _LOOKS
    ),
    **dict.fromkeys(
        ("__FILE_NAME__", "__DATE__", "__TIME__", "__TIMESTAMP__", "__builtin_FILE"), _LOOKS
    ),
    **dict.fromkeys(("__has_include__", "__has_include_next__", "import"), _LOOKS),
    **dict.fromkeys(("_Pragma", "__pragma"), _PRAGMA),
    "__declspec": "is the host's",
    "__managed__": "is memory that the host shares",
    "<<<": "launches a kernel, which is the caller's part",
    "#": "within a line may become a directive once macros are expanded",
    "##": "makes new words",
    "\\": "outside of a string writes a character in another way",
    **dict.fromkeys("$@`", "is no sign of C++"),
}
# Names of the compiler's and its libraries' macros: some glue words, or make pragmas of strings.
_RESERVED = re.compile(
    r"__[A-Z]|__glibc_|_(?:CCCL|CG|CUB|CUDA|GLIBCXX|LIBCUDACXX|LIBCPP|NV|NVHPC|THRUST)_"
)
_RESERVED_TAKEN = re.compile(
    r"__CUDA\w*|__(?:NVCC|VA_ARGS|LINE|FUNCTION|PRETTY_FUNCTION|CHAR_BIT)__"
    r"|__(?:FLT|DBL|SCHAR|SHRT|INT|LONG|SIZE|UINT)\d*_?\w*_MAX__|__FLT_\w+__|__SM_\w+",
    re.ASCII,
)
# Names that a header tests or uses, and words of the language: no macro is called so.
_OTHERS_MACROS = re.compile(r"_|.*__|(?:CUDA|CUTE|CUTLASS|CCCL|CUB|THRUST|NV|FW)_", re.ASCII)
_LANGUAGE_TEXT = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
class compl const const_cast constexpr continue decltype default defined delete do double
dynamic_cast else enum explicit export extern false final float for friend goto if inline int
long mutable namespace new noexcept not not_eq nullptr operator or or_eq override private
protected public register reinterpret_cast return short signed sizeof static static_assert
static_cast struct switch template this thread_local throw true try typedef typeid typename
union unsigned using virtual void volatile wchar_t while xor xor_eq
define elif endif error ifdef ifndef include line once pragma undef unroll nounroll
"""
_LANGUAGE = frozenset(_LANGUAGE_TEXT.split())
# Functions of the host: refused where they are called or defined.
_CALLS = frozenset(
    (
        *("main", "system", "popen", "fork", "vfork", "execl", "execle", "execlp", "execv"),
        *("execve", "execvp", "posix_spawn", "dlopen", "dlsym", "fopen", "freopen", "tmpfile"),
        *("getenv", "secure_getenv", "setenv", "putenv", "syscall", "atexit"),
    )
)
_ATTRIBUTES_TEXT = """
aligned always_inline noinline flatten hot cold unused used maybe_unused nodiscard deprecated
fallthrough likely unlikely noreturn packed may_alias const pure nothrow device global host
shared constant grid_constant no_unique_address assume vector_size nv_pure gnu nv
"""
_ATTRIBUTES = frozenset(_ATTRIBUTES_TEXT.split())
_LONGEST = 64  # tokens: more attributes than anybody has
_DEEPEST = 16  # macros of macros
_OPEN, _CLOSE = {"(": ")", "[": "]"}, frozenset(")]")

_ASM = frozenset(("asm", "__asm", "__asm__"))
_VOLATILE = frozenset(("volatile", "__volatile__", "__volatile"))
_FILES_IN_ASM = re.compile(r"\.(?:incbin|include|file|section|import)\b", re.IGNORECASE)
# A file's name needs quotes, and a directive `#`; PTX needs neither.
_ODD_IN_ASM = re.compile(r"\\[^ntr]|#")
_CONSTRAINT = re.compile(r"[=+&]*[hrlqfdbn]|memory|cc")


def screen(source: str | bytes) -> None:
    """Failed with FW828, with every place of the first few that is refused."""
    if isinstance(source, bytes):
        try:
            source = source.decode("utf-8")
        except UnicodeDecodeError:
            raise Failed(_refused("the code is not UTF-8 text")) from None
    size = len(source.encode("utf-8", errors="replace"))
    if size > MOST_BYTES:
        text = f"the code has {size} bytes; a kernel has {MOST_BYTES} at most"
        raise Failed(_refused(text))
    try:
        found = [*islice(chain(_characters(source), _tokens(source)), MOST)]
    except Unreadable as error:
        raise Failed(
            _refused(f"{error.what} hides what is code and what is not", error.span)
        ) from None
    if found:
        raise Failed(*found)


def _refused(text: str, span: Span | None = None, hint: str | None = None) -> Diagnostic:
    return Diagnostic("FW828", text, span, help=hint)


def _characters(source: str) -> Iterator[Diagnostic]:
    match = _CONTROL.search(source)
    if match:
        line = source.count("\n", 0, match.start()) + 1
        text = f"a character that does not show, U+{ord(match[0][0]):04X}, on line {line}"
        yield _refused(text, hint="write plain text, in comments too")
    for pattern, text in _LINE_ENDS.items():
        match = pattern.search(source + "\n")
        if match:
            yield _refused(text.format(source.count("\n", 0, match.start()) + 1))


def _tokens(source: str) -> Iterator[Diagnostic]:
    tokens = read(source).tokens
    for token in tokens:
        yield from _plain(token)
    directives = [t for t in tokens if t.kind == "directive"]
    macros = _Macros(directives)
    yield from _order(directives)
    for token in directives:
        yield from _directive(token, macros)
    code = [t for t in tokens if t.kind != "directive"]
    yield from _words(code)
    yield from _blocks(code)
    yield from _in_asm(code, macros)


def _plain(token: Token) -> Iterator[Diagnostic]:
    """A token is ASCII without trigraphs, whatever it is: then all lexers take it for the same.

    Up to the first other character every lexer reads what we read, and there it is refused.
    """
    if not token.text.isascii():
        other = next(c for c in token.text if not c.isascii())
        text = f"U+{ord(other):04X} outside of a comment: code is plain ASCII"
        yield _refused(text, token.span)
    if token.kind in ("string", "directive") and _TRIGRAPH.search(token.text):
        yield _refused("a trigraph", token.span)


# --- directives -------------------------------------------------------------------------------


def _order(directives: Sequence[Token]) -> Iterator[Diagnostic]:
    """Headers first: then no macro of this text can change what a header is, or includes."""
    first = next((t for t in directives if t.text.startswith(("define", "undef"))), None)
    for token in directives:
        if first is not None and token.start > first.start and token.text.startswith("include"):
            hint = "put all `#include` lines above the first `#define` or `#undef`"
            yield _refused("`#include` behind a `#define`", token.span, hint)


def _directive(token: Token, macros: _Macros) -> Iterator[Diagnostic]:
    text = token.text
    name = re.match(r"[A-Za-z0-9_]*", text)
    word = name[0] if name else ""
    if word == "include":
        if not _may_include(text):
            known = ", ".join(f"<{f}/...>" for f in FOLDERS)
            hint = f"headers in angle brackets: {known}, <cuda_*.h>, <{'>, <'.join(HEADERS)}>"
            yield _refused(f"`#{text[:80]}` is no header that may be included", token.span, hint)
    elif word == "pragma":
        if not _PRAGMAS.fullmatch(text):
            hint = "`#pragma unroll`, `#pragma nounroll` and `#pragma once` are taken"
            yield _refused(f"`#{text[:80]}` {_PRAGMA}", token.span, hint)
    elif word not in _DIRECTIVES or (not word and text):
        yield _refused(f"`#{text[:80]}` is no directive that a kernel needs", token.span)
    if word in ("define", "undef"):
        yield from _definition(token, word)
    if word != "include":
        yield from _in_directive(token, macros)


def _may_include(text: str) -> bool:
    match = _INCLUDE.fullmatch(text)
    if match is None:
        return False
    path, parts = match[1], match[1].split("/")
    if not all(parts) or any(part.startswith(".") for part in parts):  # `/x`, `a//b`, `..`
        return False
    if len(parts) > 1:
        return parts[0] in FOLDERS
    return path in HEADERS or _CUDA_HEADER.fullmatch(path) is not None


def _definition(token: Token, word: str) -> Iterator[Diagnostic]:
    """A macro has a name of its own, and is whole: what it opens it closes."""
    match = (_DEFINE if word == "define" else _UNDEF).match(token.text)
    name = match[1] if match else ""
    if not name or name in _LANGUAGE or _OTHERS_MACROS.match(name):
        hint = "give the macro a name of your own, without underscores in front"
        yield _refused(f"`#{token.text[:40]}` takes a name that is not free", token.span, hint)
    if word == "define" and not _balanced(_body(token.text)):
        yield _refused("a macro that opens or closes a bracket of another", token.span)


def _body(text: str) -> Sequence[Token]:
    """What a macro stands for, or what a directive says: code as well."""
    match = _DEFINE.match(text)
    # In brackets, that no `#` begins a line.
    return read(f"({match[3] if match else text})").tokens[1:-1]


def _balanced(tokens: Sequence[Token]) -> bool:
    wanted: list[str] = []
    for token in tokens:
        if token.kind == "string":
            continue
        if token.text in _OPEN:
            wanted.append(_OPEN[token.text])
        elif token.text in _CLOSE and (not wanted or wanted.pop() != token.text):
            return False
    return not wanted


def _in_directive(token: Token, macros: _Macros) -> Iterator[Diagnostic]:
    tokens = _body(token.text)
    match = _DEFINE.match(token.text)
    taken = (match[2] if match else None) or ""
    parameters = {*re.findall(r"[A-Za-z_]\w*", taken), *(["__VA_ARGS__"] if "..." in taken else ())}
    for found in (*_words(tokens, parameters), *_in_asm(tokens, macros)):
        yield _refused(found.message, token.span, found.help)


class _Macros:
    """The macros of a text that stand for strings and nothing else: asm may be made of them."""

    def __init__(self, directives: Sequence[Token]) -> None:
        self.bodies: dict[str, list[Token]] = {}
        spoiled = set()
        for token in directives:
            match = _DEFINE.match(token.text)
            if match:
                self.bodies.setdefault(match[1], []).extend(_body(token.text))
                if match[2] is not None or "(" in token.text[: match.end(1) + 1]:
                    spoiled.add(match[1])
        self.strings = {*self.bodies} - spoiled
        for _ in range(_DEEPEST):
            wrong = {n for n in self.strings if not all(map(self.is_text, self.bodies[n]))}
            self.strings -= wrong
            if not wrong:
                return
        self.strings = set()

    def is_text(self, token: Token) -> bool:
        """Whether it is a string, or a macro that stands for strings."""
        return token.kind == "string" or token.text in self.strings


# --- words ------------------------------------------------------------------------------------


def _words(tokens: Sequence[Token], parameters: Collection[str] = ()) -> Iterator[Diagnostic]:
    for n, token in enumerate(tokens):
        if token.kind == "string":
            continue
        word = token.text
        after = tokens[n + 1].text if n + 1 < len(tokens) else ""
        if word == "#" and after in parameters:  # makes a string, whatever the argument is
            continue
        if word in _WORDS:
            yield _refused(f"`{word}` {_WORDS[word]}", token.span)
        elif _RESERVED.match(word) and not _RESERVED_TAKEN.fullmatch(word):
            hint = "such names are the compiler's and its libraries'; take one of your own"
            yield _refused(f"`{word}` is reserved", token.span, hint)
        elif word in _CALLS and after == "(":
            yield _refused(f"`{word}` is the host's: there is only device code here", token.span)
        elif word == "__host__" and not _beside_device(tokens, n):
            hint = "write `__device__`, or `__host__ __device__`"
            yield _refused("`__host__` alone: there is only device code here", token.span, hint)
        elif word == "?" and _trigraph(tokens[n : n + 3]):
            yield _refused("a trigraph", token.span)
        elif word in ("__attribute__", "__attribute") or (word == "[" and after == "["):
            yield from _attributes(tokens, n)


def _trigraph(tokens: Sequence[Token]) -> bool:
    """`? ?` and one more; where that is a quote it begins a longer token."""
    return _TRIGRAPH.match("".join(t.text for t in tokens)) is not None and (
        tokens[0].end == tokens[1].start and tokens[1].end == tokens[2].start
    )


def _beside_device(tokens: Sequence[Token], n: int) -> bool:
    near = (*tokens[max(0, n - 2) : n], *tokens[n + 1 : n + 3])
    return any(t.text == "__device__" for t in near)


def _attributes(tokens: Sequence[Token], n: int) -> Iterator[Diagnostic]:
    """The names of `__attribute__((...))` or `[[...]]` that are not on the list."""
    depth, start = 0, n if tokens[n].text == "[" else n + 1
    for token in tokens[start : start + _LONGEST]:
        if token.kind == "string":
            continue
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        if depth <= 0:
            return
        word = token.text
        if depth <= 2 and token.kind == "name" and word.strip("_") not in _ATTRIBUTES:
            yield _refused(f"`{word}` is no attribute that a kernel needs", token.span)
            return
    yield _refused("attributes without an end", tokens[n].span)


# --- where a word stands ----------------------------------------------------------------------


def _blocks(code: Sequence[Token]) -> Iterator[Diagnostic]:
    """asm belongs into functions: outside of them it is the host's assembler that reads it."""
    inside: list[bool] = []
    functions = 0
    for n, token in enumerate(code):
        if token.kind == "string":
            continue
        if token.text == "{":
            inside.append(not _namespace(code, n))
            functions += inside[-1]
        elif token.text == "}" and inside:
            functions -= inside.pop()
        elif token.text in _ASM and not functions:
            yield _refused("asm outside of a function is for the host", token.span)


def _namespace(code: Sequence[Token], n: int) -> bool:
    """Whether a brace opens a namespace or a block of `extern "C"`."""
    before = code[max(0, n - 12) : n]
    for back in range(len(before) - 1, -1, -1):
        token = before[back]
        if token.text == "namespace":
            return True
        if token.kind == "string":
            return back > 0 and before[back - 1].text == "extern"
        if token.kind != "name" and token.text != "::":
            return False
    return False


# --- asm --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Statement:
    """`asm volatile("text" : "=r"(operand))`, as far as it can be read."""

    text: Sequence[Token]
    """Strings, and names of macros."""
    rest: Sequence[Token]
    """Up to the bracket that closes it."""


def _in_asm(code: Sequence[Token], macros: _Macros) -> Iterator[Diagnostic]:
    """PTX is welcome that stands there to be read; what names files is not."""
    for n, token in enumerate(code):
        if token.kind == "string" or token.text not in _ASM:
            continue
        found = _statement(code, n)
        if found is None or not all(map(macros.is_text, found.text)):
            hint = 'write asm volatile("..." : ...), of strings or of macros that are strings'
            yield _refused("asm whose text cannot be read here", token.span, hint)
            continue
        said = "".join(_said(found.text, macros.bodies))
        if _FILES_IN_ASM.search(said):
            yield _refused("asm that takes in a file", token.span)
        elif _ODD_IN_ASM.search(said):
            hint = "`\\n`, `\\t` and `\\r` are all the escapes that PTX needs"
            yield _refused("a quote, a backslash or `#` in asm", token.span, hint)
        yield from _constraints(found.rest)


def _statement(code: Sequence[Token], n: int) -> _Statement | None:
    start = n + 1
    while start < len(code) and code[start].text in _VOLATILE:
        start += 1
    if start >= len(code) or code[start].text != "(":
        return None
    start += 1
    end = start
    while end < len(code) and code[end].kind in ("string", "name"):
        end += 1
    if end >= len(code) or code[end].text not in (":", "::", ")"):
        return None
    close = _closed(code, end)
    return _Statement(code[start:end], code[end:close]) if close else None


def _closed(code: Sequence[Token], start: int) -> int | None:
    """Where the bracket of asm is closed; there is no other asm before that."""
    depth = 1
    for n in range(start, len(code)):
        token = code[n]
        if token.kind != "string":
            depth += (token.text == "(") - (token.text == ")")
            if token.text in _ASM or token.text == ";":
                return None
        if not depth:
            return n
    return None


def _said(tokens: Sequence[Token], bodies: Mapping[str, Sequence[Token]]) -> Iterator[str]:
    """The strings, each without its quotes, those of macros too; every macro once."""
    todo, seen = [*reversed(tokens)], set[str]()
    while todo:
        token = todo.pop()
        if token.kind == "string":
            plain = token.text.startswith('"')
            yield token.text[1:-1] if plain else "#"  # L"..." and 'x' are no text of asm
        elif token.text not in seen:
            seen.add(token.text)
            todo += reversed(bodies[token.text])


def _constraints(tokens: Sequence[Token]) -> Iterator[Diagnostic]:
    """A constraint such as "C" makes asm of an array of characters."""
    depth = 0
    for token in tokens:
        if token.kind != "string":
            depth += (token.text == "(") - (token.text == ")")
        elif depth == 0 and not _CONSTRAINT.fullmatch(token.text[1:-1]):
            yield _refused(f"{token.text[:20]} is no constraint of asm that is taken", token.span)
