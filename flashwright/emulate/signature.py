"""Signatures of kernels: readable names, and the C++ types and names of their parameters.

The types come from the mangled name, which the C++ runtime's own demangler reads. A kernel that is
`extern "C"` has no types in its name: they are taken from the source, where they are simple enough.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

_RUNTIMES = ("libstdc++.so.6", "libc++abi.so.1", "libc++abi.so", "libc++abi.dylib")
_OPENING, _CLOSING = "<([{", ">)]}"
_LONGEST_NAME = 80  # characters of a kernel's name in a message
_LONGEST_TEMPLATE = 2000  # characters of a template's parameters
_WORD = re.compile(r"\w+")
_BEFORE_NAME = ("__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__attribute__")
_QUALIFIERS = re.compile(
    r"\b(?:__restrict__|__restrict|__grid_constant__|volatile|struct|register|typename)\b"
)
_SYNONYMS = {
    "unsigned": "unsigned int",
    "uint": "unsigned int",
    "size_t": "unsigned long",
    "long int": "long",
    "long long int": "long long",
    "short int": "short",
    "ushort": "unsigned short",
    "unsigned short int": "unsigned short",
    "unsigned long int": "unsigned long",
    "unsigned long long int": "unsigned long long",
    "uchar": "unsigned char",
    "half": "__half",
    "half2": "__half2",
    "nv_bfloat16": "__nv_bfloat16",
    "nv_bfloat162": "__nv_bfloat162",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
}


@dataclass(frozen=True)
class ParameterType:
    """The C++ type of a parameter."""

    text: str
    """As the demangler writes it: `float const*`."""

    @property
    def pointee(self) -> str | None:
        """What it points to, without const; None for a value, and for a pointer to a function."""
        found = re.fullmatch(r"(.*?)(?: \(\*\) (?:\[\d*\])+|\*)", self.text)
        return None if found is None else found[1].removesuffix(" const")

    @property
    def reads_only(self) -> bool:
        """Whether it points to const."""
        return bool(re.fullmatch(r".* const(?: \(\*\) (?:\[\d*\])+|\*)", self.text))


@dataclass(frozen=True)
class ParameterSignature:
    """A parameter, as far as it is known."""

    name: str = ""
    type: ParameterType | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.type.text if self.type else "?", self.name)))


@dataclass(frozen=True)
class KernelSignature:
    """A kernel as a reader of its source knows it."""

    symbol: str
    """The name in the PTX."""
    name: str
    """With its namespaces and the arguments of its template: `ns::reduce<float, 256>`."""
    parameters: tuple[ParameterSignature, ...] | None = None
    """None if neither the name nor the source has them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it goes by, without spaces: the most precise first."""
        bare, template = _without_arguments(self.name)
        found = [str(self), self.name, _unqualified(bare) + template, bare, _unqualified(bare)]
        return tuple(_plain(one) for one in found)

    @property
    def shown(self) -> str:
        """The same for messages, with long names cut."""
        types = (p.type.text if p.type else "?" for p in self.parameters or ())
        listed = f"({', '.join(map(cut, types))})" if self.parameters is not None else ""
        return cut(self.name) + listed

    def __str__(self) -> str:
        if self.parameters is None:
            return self.name
        return f"{self.name}({', '.join(p.type.text if p.type else '?' for p in self.parameters)})"


def cut(text: str) -> str:
    """A long text by both ends: the type of a parameter begins it, its name ends it."""
    half = _LONGEST_NAME // 2
    return text if len(text) <= _LONGEST_NAME else f"{text[:half]} ... {text[-half:]}"


# --- from the name ----------------------------------------------------------------------------


def signatures(counts: Mapping[str, int], source: str = "") -> dict[str, KernelSignature]:
    """The signatures of kernels, by their names in the PTX. `counts`: how many parameters each
    has."""
    return {name: _signature(name, count, source) for name, count in counts.items()}


def without_types(counts: Mapping[str, int]) -> dict[str, KernelSignature]:
    """Kernels by their names in the PTX alone: names of untrusted code are not demangled."""
    return {name: KernelSignature(name, name) for name in counts}


def _signature(symbol: str, count: int, source: str) -> KernelSignature:
    readable = demangled(symbol)
    if readable is None or not readable.endswith(")"):
        written = _written(source, symbol, count)
        return KernelSignature(symbol, symbol, written)
    start = _opening(readable, len(readable) - 1)
    name = readable[:start].removeprefix("void ")
    types = split(readable[start + 1 : -1])
    written = _written(source, _unqualified(_without_arguments(name)[0]), count)
    names = [one.name for one in written] if written else [""] * count
    if len(types) != count:  # such as a parameter pack that the name writes in its own way
        return KernelSignature(symbol, name, None)
    known = (ParameterSignature(n, _of_name(t)) for n, t in zip(names, types, strict=True))
    return KernelSignature(symbol, name, tuple(known))


def _of_name(text: str) -> ParameterType:
    return ParameterType(re.sub(r" (?:volatile|__restrict)\b", "", text))


def demangled(symbol: str) -> str | None:
    """The C++ declaration of a mangled name; None for other names, or without a C++ runtime."""
    call = _demangler()
    if call is None or not symbol.startswith("_Z"):
        return None
    status = ctypes.c_int()
    found = call(symbol.encode(), None, None, ctypes.byref(status))
    if not found:
        return None
    text = ctypes.string_at(found).decode()
    _free()(found)
    return text


@cache
def _demangler() -> Callable[..., int | None] | None:
    for name in _RUNTIMES:
        try:
            call = ctypes.CDLL(name).__cxa_demangle
        except (OSError, AttributeError):
            continue
        call.restype = ctypes.c_void_p
        status = ctypes.POINTER(ctypes.c_int)
        call.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, status)
        return call
    return None


@cache
def _free() -> Callable[[int], None]:
    call = ctypes.CDLL(None).free
    call.restype, call.argtypes = None, (ctypes.c_void_p,)
    return call


def _opening(text: str, end: int) -> int:
    """The bracket that the one at `end` closes."""
    depth = 0
    for at in range(end, -1, -1):
        depth += (text[at] in _CLOSING) - (text[at] in _OPENING)
        if not depth:
            return at
    return 0


def _without_arguments(name: str) -> tuple[str, str]:
    """`reduce`, `<float, 256>` for `reduce<float, 256>`."""
    start = _opening(name, len(name) - 1) if name.endswith(">") else len(name)
    return name[:start], name[start:]


def _unqualified(name: str) -> str:
    return name.rpartition("::")[2]


def _plain(name: str) -> str:
    """A name without spaces, and numbers without the suffixes of their types."""
    return re.sub(r"(?<=[<,])(-?\d+)(?:u|l|ul|ll|ull)(?=[,>])", r"\1", re.sub(r"\s", "", name))


def chosen(known: Mapping[str, KernelSignature], wanted: str) -> list[str]:
    """The kernels of that name: a symbol, or a readable name with as much of it as is unique.

    `gemm#2` is the second one that `gemm` names.
    """
    if wanted in known:
        return [wanted]
    name, sign, number = wanted.rpartition("#")
    if sign and number.isdecimal() and int(number):
        return chosen(known, name)[int(number) - 1 : int(number)]
    plain = _plain(wanted)
    for level in range(5):
        found = [symbol for symbol, one in known.items() if one.names[level] == plain]
        if found:
            return found
    # Without a demangler. C++ puts the length before a name: _Z5saxpyPf is saxpy.
    return [symbol for symbol in known if f"{len(wanted)}{wanted}" in symbol]


def shown_names(known: Mapping[str, KernelSignature]) -> list[str]:
    """The shortest readable names that tell kernels apart, long ones as numbered instances."""
    names = [one.name for one in known.values()]
    found = [str(s) if names.count(s.name) > 1 else s.name for s in known.values()]
    return [
        name if len(name) <= _LONGEST_NAME else numbered(known, symbol)
        for symbol, name in zip(known, found, strict=True)
    ]


def numbered(known: Mapping[str, KernelSignature], symbol: str) -> str:
    """A short name of an instance, `gemm#2`; `gemm` if there is one."""
    name = _unqualified(_without_arguments(known[symbol].name)[0])
    same = chosen(known, name)
    return name if same == [symbol] else f"{name}#{same.index(symbol) + 1}"


def of_source(known: Mapping[str, KernelSignature], source: str) -> dict[str, KernelSignature]:
    """The kernels that the source itself declares, or all if it declares none: libraries that it
    includes may have their own."""
    written = {one.name for one in _cached_kernels(source)}
    found = {
        symbol: one
        for symbol, one in known.items()
        if _unqualified(_without_arguments(one.name)[0]) in written
    }
    return found or dict(known)


# --- from the source --------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenKernel:
    """A kernel as the source declares it."""

    name: str
    template: str
    """The parameters of its template, `class T, int N`; empty if it is none."""
    parameters: tuple[str, ...]


def written_kernels(source: str) -> list[WrittenKernel]:
    """The kernels that a text of CUDA declares, as far as its macros show them."""
    return list(_written_kernels(_without_comments(source)))


def _written_kernels(text: str) -> Iterator[WrittenKernel]:
    for place in re.finditer(r"\b__global__\b", text):
        at = place.end()
        while (opening := text.find("(", at)) >= 0:
            words = _WORD.findall(text[at:opening])
            end = _closing(text, opening)
            if not words or end < 0 or re.search(r"[;{}]", text[at:opening]):
                break
            at = end + 1
            if words[-1] not in _BEFORE_NAME:
                given = tuple(split(text[opening + 1 : end]))
                yield WrittenKernel(words[-1], _template(text[: place.start()]), given)
                break


def _template(before: str) -> str:
    """The template parameters that end right before a declaration."""
    before = before[-_LONGEST_TEMPLATE:]
    before = re.sub(r"(?:\s|\b(?:static|inline|extern|__forceinline__|void)\b)*$", "", before)
    if not before.endswith(">"):
        return ""
    start = _opening(before, len(before) - 1)
    return before[start + 1 : -1].strip() if before[:start].rstrip().endswith("template") else ""


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return -1


def split(text: str) -> list[str]:
    """The parts of a list between its commas, of which brackets hide theirs."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if sign == "," and not depth:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part and part != "void"]


def _written(source: str, name: str, count: int) -> tuple[ParameterSignature, ...] | None:
    """The parameters of a kernel by its source, if all declarations with as many agree."""
    found = {
        tuple(_parameter(text) for text in one.parameters)
        for one in _cached_kernels(source)
        if one.name == name and len(one.parameters) == count
    }
    named = {one for one in found if all(p.name for p in one)} or found
    return named.pop() if len(named) == 1 else None


@lru_cache(8)
def _cached_kernels(source: str) -> tuple[WrittenKernel, ...]:
    return tuple(written_kernels(source))


def _parameter(text: str) -> ParameterSignature:
    text = _QUALIFIERS.sub(" ", text.partition("=")[0])
    found = re.fullmatch(r"(.*?[\s*&>])(\w+)\s*((?:\[[^\]]*\])*)\s*", text.strip(), re.DOTALL)
    if found is None or "(" in text:
        return ParameterSignature()
    return ParameterSignature(found[2], _type(found[1] + ("*" if found[3] else "")))


def _type(text: str) -> ParameterType | None:
    """The type of a declaration in the demangler's words; None for what is not simple."""
    base, *stars = text.split("*")
    if any(part.replace("const", "").strip() for part in stars) or "&" in text or "[" in text:
        return None
    words = base.replace("std::", "").split()
    kind = " ".join(word for word in words if word != "const")
    const = " const" if "const" in words and stars else ""
    return ParameterType(_SYNONYMS.get(kind, kind) + const + "*" * len(stars))


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", " ", text, flags=re.DOTALL)


def templates(source: str, known: Sequence[KernelSignature]) -> list[str]:
    """The kernel templates of a source that have no instance, as it declares them."""
    made = {_unqualified(_without_arguments(one.name)[0]) for one in known}
    found = (one for one in written_kernels(source) if one.template and one.name not in made)
    return list(dict.fromkeys(f"{one.name}<{one.template}>" for one in found))


def as_instance(name: str) -> str | None:
    """The name of an instance, `reduce<float, 256>`, if it is one that C++ can take."""
    return name if re.fullmatch(r"[\w:]+\s*<.*>", name, re.DOTALL) else None
