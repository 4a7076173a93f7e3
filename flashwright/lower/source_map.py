"""Which lines of the kernel implement which lines of TL: kernel.map.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from flashwright.files import content
from flashwright.lang.diagnostic import Diagnostic, Failed

NAME = "kernel.map.json"


class Stretch(BaseModel):
    """Lines of the kernel (first and last) that implement lines of TL."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    cu: tuple[int, int]
    tl: tuple[int, int]


class SourceMap(BaseModel):
    """All stretches, in the order of the kernel."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    tl: str = "code.tl"
    lines: tuple[Stretch, ...] = ()

    def dump(self) -> str:
        """As JSON, one stretch a line."""
        rows = ",\n  ".join(s.model_dump_json() for s in self.lines)
        return f'{{"tl": "{self.tl}", "lines": [\n  {rows}\n]}}\n'

    def tl_line(self, cu_line: int) -> int | None:
        """The first line of TL that a line of the kernel implements."""
        for stretch in self.lines:
            if stretch.cu[0] <= cu_line <= stretch.cu[1]:
                return stretch.tl[0]
        return None

    def tl_before(self, cu_line: int) -> int | None:
        """The same for a line that implements none, such as a barrier: of the last one before."""
        ended = [stretch for stretch in self.lines if stretch.cu[1] <= cu_line]
        return max(ended, key=lambda s: s.cu[1]).tl[0] if ended else None


def read(folder: Path) -> SourceMap:
    """The map in a kernel package; an empty one where it has none.

    Failed with FW852 for a file that is no map.
    """
    path = folder / NAME
    data = content(path)
    if data is None:
        return SourceMap()
    try:
        return SourceMap.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200] or "the file"
        hint = "build the package again"
        raise Failed(Diagnostic("FW852", f"{path}: {where}: {first['msg']}", help=hint)) from None


def source_map(lines: Sequence[tuple[int, int] | None]) -> SourceMap:
    """From the TL lines of each line of the kernel."""
    found: list[Stretch] = []
    for number, tl in enumerate(lines, 1):
        if tl is None:
            continue
        last = found[-1] if found else None
        if last is not None and last.tl == tl and last.cu[1] == number - 1:
            found[-1] = Stretch(cu=(last.cu[0], number), tl=tl)
        else:
            found.append(Stretch(cu=(number, number), tl=tl))
    return SourceMap(lines=tuple(found))
