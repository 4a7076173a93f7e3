"""The words of TL that are not grammar: operations, element types, reserved names, spellings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from flashwright.lang.nodes import Space

DTYPES: dict[str, int] = {
    **dict.fromkeys(("fp16", "bf16"), 2),
    **dict.fromkeys(("e4m3", "e5m2", "int8"), 1),
    **dict.fromkeys(("fp32", "int32"), 4),
}
# The names of the same types in other languages.
DTYPE_ALIASES = {
    **dict.fromkeys(("float16", "f16", "half", "float16_t"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16_t", "bfloat"), "bf16"),
    **dict.fromkeys(("float32", "f32", "float", "single"), "fp32"),
    **dict.fromkeys(("fp8", "float8", "float8_e4m3", "float8_e4m3fn", "fp8_e4m3", "f8"), "e4m3"),
    **dict.fromkeys(("float8_e5m2", "fp8_e5m2"), "e5m2"),
    **dict.fromkeys(("int", "i32", "int32_t", "int64"), "int32"),
    **dict.fromkeys(("i8", "s8", "int8_t"), "int8"),
}
DEFAULT_DTYPE: dict[Space, str] = {"global": "fp16", "shared": "fp16", "register": "fp32"}

PREDEFINED_DIMS = ("batch", "heads", "kv_heads", "q_len", "kv_len")
POSITIONS = ("q_idx", "kv_idx")
PAGE = "page_idx"
"""In coordinates of a Copy: the page that a row of the tile lies in, counted in its sequence."""
CONSTANTS = {"inf": float("inf")}
SCHEDULE_PARAMS = ("Overlap", "PingPong", "SplitMasked", "Persistent")
RESERVED_PARAMS = ("Warps", *SCHEDULE_PARAMS)

DEFAULT_LABELS: dict[int, tuple[str, ...]] = {
    1: ("L",),
    2: ("L", "D"),
    3: ("B", "H", "L"),
    4: ("B", "H", "L", "D"),
}


@dataclass(frozen=True)
class Operation:
    """How many operands an operation takes, and what it does to shapes."""

    arity: tuple[int, ...]
    reduces: bool = False


FUNCTIONS: dict[str, Operation] = {
    **{f: Operation((1,)) for f in ("exp", "exp2", "log", "log2", "tanh", "sigmoid", "sqrt")},
    **{f: Operation((1,)) for f in ("abs", "floor", "ceil")},
    **{f: Operation(tuple(range(2, 9))) for f in ("min", "max")},
    "where": Operation((3,)),
    "rowmax": Operation((1,), reduces=True),
    "rowsum": Operation((1,), reduces=True),
}
ARITHMETIC = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
STATEMENT_VERBS: dict[str, Operation] = {
    "gemm": Operation((2,)),
    "softmax": Operation((1,)),
    "mask": Operation((1,)),
}
VERBS: dict[str, Operation] = {
    **FUNCTIONS,
    **{v: Operation((2,)) for v in ARITHMETIC},
    **STATEMENT_VERBS,
}

_SUFFIXES: dict[str, Space] = {
    "global": "global",
    "gmem": "global",
    "shared": "shared",
    "smem": "shared",
    "register": "register",
    "registers": "register",
    "reg": "register",
    "rmem": "register",
}
_PREFIXES: dict[str, Space] = {"g": "global", "s": "shared", "r": "register"}


@cache
def split(name: str) -> tuple[str, Space | None]:
    """The base name and the space of a name: `Q_shared` and `sQ` are Q in shared memory."""
    base, _, suffix = name.rpartition("_")
    if base and suffix.lower() in _SUFFIXES:
        return base, _SUFFIXES[suffix.lower()]
    if re.match(r"[gsr][A-Z]", name):
        return name[1:], _PREFIXES[name[0]]
    return name, None
