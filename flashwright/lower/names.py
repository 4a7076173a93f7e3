"""Names of TL in C++: as they are, unless C++ or the printed kernel has the word already."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from flashwright.program.program import Key, Program

_KEYWORDS = (
    *("alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break"),
    *("case", "catch", "char", "char16_t", "char32_t", "char8_t", "class", "co_await", "co_return"),
    *("co_yield", "compl", "concept", "const", "const_cast", "consteval", "constexpr", "constinit"),
    *("continue", "decltype", "default", "delete", "do", "double", "dynamic_cast", "else", "enum"),
    *("explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline"),
    *("int", "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq", "nullptr"),
    *("operator", "or", "or_eq", "private", "protected", "public", "register"),
    *("reinterpret_cast", "requires", "return", "short", "signed", "sizeof", "static"),
    *("static_assert", "static_cast", "struct", "switch", "template", "this", "thread_local"),
    *("throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using"),
    *("virtual", "void", "volatile", "wchar_t", "while", "xor", "xor_eq"),
)
_FUNCTIONS = (  # of the C library, at file scope
    *("abs", "acos", "asin", "atan", "atan2", "ceil", "clock", "cos", "cosh", "div", "erf", "exit"),
    *("exp", "exp2", "fabs", "floor", "fma", "free", "gamma", "hypot", "index", "j0", "j1", "jn"),
    *("log", "log2", "max", "min", "pow", "rand", "remainder", "rindex", "round", "scalb"),
    *("select", "signal", "sin", "sinh", "sqrt", "system", "tan", "tanh", "time", "trunc"),
    *("y0", "y1", "yn"),
)
_CUDA = ("INFINITY", "blockDim", "blockIdx", "cute", "gridDim", "threadIdx", "warpSize")
_KERNEL = (  # what the printer calls things
    *("Beside", "Mma", "Params", "RowWarps", "Threads", "above", "at", "attention", "column"),
    *("drop", "drops", "exchange", "fw", "group", "logistic", "m", "most", "n", "now", "p"),
    *("reached", "shared", "sum", "visible"),
    *("tile", "tile_order", "tile_queue", "tiles_taken", "top", "total", "wide_at"),
)
EXCHANGE: Key = ("fw_exchange", "shared")
"""Where warpgroups that share rows leave values for each other."""
_TAKEN = frozenset((*_KEYWORDS, *_FUNCTIONS, *_CUDA, *_KERNEL))


def cpp(name: str) -> str:
    """A TL name as a C++ one."""
    return f"{name}_" if name in _TAKEN or re.fullmatch(r"at_\d+", name) else name


def tile_name(key: Key) -> str:
    """The C++ name of a tile: registers have the plain one."""
    return cpp(key[0]) if key[1] == "register" else f"{key[0]}_{key[1]}"


def ring_name(key: Key) -> str:
    """The ring of stages of a shared tile."""
    return f"{tile_name(key).removesuffix('_shared')}_ring"


def map_name(key: Key, column: int = 0) -> str:
    """What TMA knows of the tensor that a shared tile is filled from, at a column."""
    return f"{tile_name(key).removesuffix('_shared')}_map" + (f"_{column}" if column else "")


def page_name(tensor: str) -> str:
    """How many rows lie from one page of a tensor to the next."""
    return f"{tensor}_page"


def by_tma(key: Key) -> str:
    """Whether TMA fills a tile of which only the call shows whether it can."""
    return f"{tile_name(key).removesuffix('_shared')}_by_tma"


MapKey = tuple[Key, int, str]  # the tile, the column, the tensor


def map_names(loaded: Iterable[MapKey]) -> dict[MapKey, str]:
    """The tensor maps by tile, column and tensor: `K_map`, `K_map_64` for the columns from 64 on,
    and `K_map_of_Extra` for the further tensors that are copied to the same columns."""
    names: dict[MapKey, str] = {}
    for key, column, tensor in loaded:
        plain = map_name(key, column)
        name = f"{plain}_of_{tensor}" if plain in names.values() else plain
        names[key, column, tensor] = name
    return names


def operand_name(key: Key) -> str:
    """A register tile as the left operand of a GEMM."""
    return f"{tile_name(key)}_operand"


def place_name(columns: int) -> str:
    """What knows the places in a tile of so many columns, of which each warpgroup has some."""
    return f"at_{columns}"


def step_name(key: Key) -> str:
    """What one step adds to an accumulator."""
    return f"{key[0]}_step"


class Names:
    """Makes names that nothing else in the kernel has."""

    def __init__(self, taken: Iterable[str]) -> None:
        self.taken = set(taken)

    def fresh(self, stem: str) -> str:
        """The stem if it is free, else the stem with a number."""
        name, number = stem, 1
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.taken.add(name)
        return name

    def copy(self) -> Names:
        """The same names taken."""
        return Names(self.taken)


def reserved(program: Program) -> Iterator[str]:
    """The names that a kernel has before its statements: constants, dimensions, coordinates, tiles,
    and what passes and the printer derive from these."""
    yield from (cpp(name) for name in (*program.params, *program.dims))
    yield from (cpp(axis.name.id) for axis in program.grid.axes)
    yield from (cpp(tensor.name) for tensor in program.counters.values())
    yield from map(page_name, program.tensors)
    yield tile_name(EXCHANGE)
    rings: list[Key] = [(name, "shared") for name, _ in program.buffers]  # also of register tiles
    for key in dict.fromkeys([*program.buffers, *rings]):
        tile = tile_name(key)
        yield from (tile, f"{tile}_operand", f"{tile}_staged", ring_name(key), map_name(key))
        yield by_tma(key)
        yield step_name(key)
