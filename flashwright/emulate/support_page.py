"""The page emulator-support.md: the instructions that the emulator executes or refuses.

python -m flashwright.emulate.support_page > docs/emulator-support.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from flashwright.emulate import calls, encode
from flashwright.emulate.machine import known
from flashwright.emulate.support import REFUSED

# Names that only the machine has, and the encoder writes for others.
_INTERNAL = re.compile(
    r"frame\.|mov\.(?:un)?pack|cp\.async\.bulk\.(?:load|store|reduce|copy)$|wmma\.(?:load|store)$"
    r"|(?:enter|video|product|nothing|clock|trap)$"
)
_TYPE = re.compile(r"(?:[usb]|f|bf|tf)\d+(?:x\d)?|e\dm\d(?:x\d)?|pred")
_SHAPE = re.compile(r"m\d+n\d+(?:k\d+)?")


def page() -> str:
    """The page of the documentation. Raises Failed with FW821 without a compiler."""
    own = [n for n in known() if not _INTERNAL.match(n) and n not in calls.BUILT_IN]
    rows = _rows([*own, *encode.spelled()])
    refused = [f"| `{_shown(how)}` | {why} |" for how, why in REFUSED.items()]
    registers = ", ".join(f"`{n}`" for n in sorted({*encode.SPECIALS, *encode.CLOCKS}))
    built_in = ", ".join(f"`{name}`" for name in calls.BUILT_IN)
    return _PAGE.format(
        rows="\n".join(rows), refused="\n".join(refused), registers=registers, built_in=built_in
    )


def _shown(pattern: str) -> str:
    """A pattern in words of PTX: `cp.*.im2col`."""
    text = pattern.replace(r"\b", "").replace(r"\.", ".").replace("..*", ".*").replace("?:", "")
    return text.replace("|", ", ").strip("()")


def _rows(names: Iterable[str]) -> Iterator[str]:
    """A row for each instruction: its modifiers, types and shapes."""
    parts: dict[str, set[str]] = {}
    for name in names:
        first, *rest = name.split(".")
        parts.setdefault(first, set()).update(rest)
    for first, found in sorted(parts.items()):
        types = {part for part in found if _TYPE.fullmatch(part)}
        shapes = {part for part in found if _SHAPE.fullmatch(part)}
        columns = (found - types - shapes, types, shapes)
        yield f"| `{first}` | " + " | ".join(" ".join(sorted(c)) for c in columns) + " |"


_PAGE = """# What the emulator supports

The instructions of PTX that [the emulator](emulator.md) executes, and those that it refuses. A test
compares this page with the emulator; `python -m flashwright.emulate.support_page` writes it.

An instruction that is refused is FW831, with its line of PTX and of CUDA, before anything runs or
when the kernel is launched. A kernel is refused only for what it may reach: other kernels and
functions of the file do not matter.

## Instructions

Not every modifier goes with every type; the PTX ISA says which do. Modifiers that change nothing
here are not listed: `.aligned`, `.uni`, cache operators and cache hints, scopes. `wgmma` has all
shapes and types of Hopper.

| instruction | modifiers | types | shapes |
|---|---|---|---|
{rows}

## Refused

| instruction | why |
|---|---|
{refused}

## Special registers

{registers}

## Functions

Device functions of the file are called, also by address and recursively. The emulator has these of
its own: {built_in}. `new` and `delete` are `malloc` and `free`.
"""

if __name__ == "__main__":
    print(page(), end="")
