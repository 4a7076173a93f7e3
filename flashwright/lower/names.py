"""Names of TL in C++: as they are, unless C++ or the printed kernel has the word already."""

from __future__ import annotations

from flashwright.check.program import Key

_TAKEN = frozenset(
    ["alignas", "alignof", "and", "asm", "auto", "bool", "break", "case", "catch", "char", "class", "const", "constexpr", "continue", "decltype", "default", "delete", "do", "double", "else", "enum", "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "not", "operator", "or", "private", "protected", "public", "register", "return", "short", "signed", "sizeof", "static", "struct", "switch", "template", "this", "throw", "true", "try", "typedef", "typename", "union", "unsigned", "using", "virtual", "void", "volatile", "while", "xor", "fw", "cute", "p", "m", "n", "at", "shared", "attention", "Params", "Threads", "Mma", "now", "drop", "top", "total", "INFINITY", "min", "max", "abs", "exp", "log", "sqrt", "floor", "ceil", "tanh"]
)


def cpp(name: str) -> str:
    """A TL name as a C++ one."""
    return f"{name}_" if name in _TAKEN else name


def tile_name(key: Key) -> str:
    """The C++ name of a tile: registers have the plain one."""
    return cpp(key[0]) if key[1] == "register" else f"{key[0]}_{key[1]}"
