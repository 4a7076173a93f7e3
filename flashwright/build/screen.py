"""What CUDA that a model wrote may contain: device code and nothing that reaches outside of it.

This is read before the compiler sees it. It is one fence of two: whatever got past it would still
meet the confined process (process.py), and no host code is ever made of it, let alone run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Span
from flashwright.lower.cuda_text import Token, Unreadable, read

MOST_BYTES = 256 * 1024
MOST = 10
HEADERS = (
    *("array", "cassert", "cfloat", "climits", "cmath", "cstddef", "cstdint", "limits", "tuple"),
    *("type_traits", "utility", "assert.h", "float.h", "limits.h", "math.h", "mma.h", "stddef.h"),
    *("stdint.h", "cooperative_groups.h", "vector_types.h"),
)
FOLDERS = ("fw", "cute", "cutlass", "cuda", "cooperative_groups")
_INCLUDE = re.compile(r"include\s*<([\w.+/-]+)>")
_DIRECTIVES = (
    *("", "define", "undef", "if", "ifdef", "ifndef", "elif", "else", "endif", "error", "include"),
)
_PRAGMAS = re.compile(r"pragma\s+(?:once|(?:nv_)?(?:no)?unroll\b[\w\s()*+/-]*)")
# Controls, half characters, and signs that change how the text around them is shown.
_CONTROL = re.compile(
    r"[^\t\n\r -~\u00a0-\U0010ffff]|\r(?!\n)"
    r"|[\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
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
    **dict.fromkeys(("_Pragma", "__pragma"), _PRAGMA),
    "__managed__": "is memory that the host shares",
    "<<<": "launches a kernel, which is the caller's part",
}
# Functions of the host: refused where they are called or defined.
_CALLS = frozenset(
    (
        *("main", "system", "popen", "fork", "vfork", "execl", "execle", "execlp", "execv"),
        *("execve", "execvp", "posix_spawn", "dlopen", "dlsym", "fopen", "freopen", "tmpfile"),
        *("getenv", "secure_getenv", "setenv", "putenv", "syscall", "atexit"),
    )
)
_ATTRIBUTES = frozenset(("constructor", "destructor", "section", "alias", "ifunc", "weakref"))
_NEAR = 64  # tokens: more attributes than anybody has
_ASM = frozenset(("asm", "__asm", "__asm__"))
_FILES_IN_ASM = re.compile(r"\.(?:incbin|include)\b", re.IGNORECASE)


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
    match = re.search(r"\?\?/[ \t]*\r?\n", source)
    if match:
        line = source.count("\n", 0, match.start()) + 1
        yield _refused(f"`??/` at the end of line {line}, which may join it with the next")


def _tokens(source: str) -> Iterator[Diagnostic]:
    tokens = read(source).tokens
    for token in tokens:
        if token.kind == "directive":
            yield from _directive(token)
    code = [t for t in tokens if t.kind != "directive"]
    yield from _words(code)
    yield from _blocks(code)


# --- directives -------------------------------------------------------------------------------


def _directive(token: Token) -> Iterator[Diagnostic]:
    text = token.text
    name = re.match(r"\w*", text)
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
    if word != "include":
        yield from _in_directive(token, text)


def _may_include(text: str) -> bool:
    match = _INCLUDE.fullmatch(text)
    if match is None:
        return False
    path, parts = match[1], match[1].split("/")
    if not all(parts) or any(part.startswith(".") for part in parts):  # `/x`, `a//b`, `..`
        return False
    if len(parts) > 1:
        return parts[0] in FOLDERS
    return path in HEADERS or re.fullmatch(r"cuda\w*\.h", path) is not None


def _in_directive(token: Token, text: str) -> Iterator[Diagnostic]:
    """What a macro may stand for is code as well."""
    tokens = read(f"({text})").tokens
    for part in tokens:
        if part.text == "##":
            hint = "write the name out: what a macro glues together cannot be read beforehand"
            yield _refused("`##` makes new words", token.span, hint)
    for found in (*_words(tokens), *_in_asm(tokens)):
        yield _refused(found.message, token.span, found.help)


# --- words ------------------------------------------------------------------------------------


def _words(tokens: Sequence[Token]) -> Iterator[Diagnostic]:
    for n, token in enumerate(tokens):
        if token.kind == "string":
            continue
        word = token.text
        after = tokens[n + 1].text if n + 1 < len(tokens) else ""
        if word in _WORDS:
            yield _refused(f"`{word}` {_WORDS[word]}", token.span)
        elif word in _CALLS and after == "(":
            yield _refused(f"`{word}` is the host's: there is only device code here", token.span)
        elif word == "__host__" and not _beside_device(tokens, n):
            hint = "write `__device__`, or `__host__ __device__`"
            yield _refused("`__host__` alone: there is only device code here", token.span, hint)
        elif word == "?" and _trigraph(tokens[n : n + 3]):
            yield _refused("a trigraph", token.span)
        elif word == "\\":
            yield _refused("a backslash outside of a string", token.span)
        elif word in ("__attribute__", "[") and _dangerous(tokens, n):
            yield _refused(f"an attribute of the host's linker at `{word}`", token.span)


def _trigraph(tokens: Sequence[Token]) -> bool:
    near = all(a.end == b.start for a, b in pairwise(tokens))
    return near and _TRIGRAPH.fullmatch("".join(t.text for t in tokens)) is not None


def _beside_device(tokens: Sequence[Token], n: int) -> bool:
    near = (*tokens[max(0, n - 2) : n], *tokens[n + 1 : n + 3])
    return any(t.text == "__device__" for t in near)


def _dangerous(tokens: Sequence[Token], n: int) -> bool:
    """Whether an attribute, `__attribute__((...))` or `[[...]]`, names what the linker does."""
    if tokens[n].text == "[" and (n + 1 >= len(tokens) or tokens[n + 1].text != "["):
        return False
    for token in tokens[n + 1 : n + _NEAR]:
        if token.text in (";", "{"):
            break
        if token.kind == "name" and token.text.strip("_") in _ATTRIBUTES:
            return True
    return False


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
    yield from _in_asm(code)


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


def _in_asm(code: Sequence[Token]) -> Iterator[Diagnostic]:
    """PTX is welcome; what reads files is not."""
    begin: Token | None = None
    said = ""
    for token in (*code, None):
        if token is None or (token.text == ";" and token.kind == "sign"):
            if begin is not None and _FILES_IN_ASM.search(said):
                yield _refused("asm that takes in a file", begin.span)
            begin, said = None, ""
        elif token.kind == "string":
            said += token.text[1:-1] if begin is not None else ""
        elif token.text in _ASM:
            begin = begin or token
