"""A TL program under construction: declarations and statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from flashwright.fuzz.choices import Choices


class Draft:
    """Collects the lines of a program; `text` puts them in order and drops what is unused."""

    def __init__(self, choices: Choices) -> None:
        self.c = choices
        self.params: dict[str, str] = {}
        self.dims: list[str] = []
        self.grid: list[tuple[str, str]] = []
        self.lets: list[str] = []
        self.tensors: dict[str, str] = {}
        self.shared: dict[str, str] = {}
        self.registers: dict[str, str] = {}
        self.lines: list[str] = []
        self.tags: set[str] = set()
        self._depth = 0

    def tag(self, *names: str) -> None:
        """Record features that were chosen."""
        self.tags.update(names)

    def chance(self, probability: float, tag: str) -> bool:
        """Choose a feature with this probability; record the tag if it is chosen."""
        chosen = self.c.chance(probability)
        if chosen:
            self.tag(tag)
        return chosen

    def line(self, text: str) -> None:
        """Add a statement at the current depth."""
        self.lines.append("  " * self._depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """A block of statements in `for` or `if`; its end is added automatically."""
        self.line(head)
        self._depth += 1
        yield
        self._depth -= 1
        self.line("end")

    def else_arm(self) -> None:
        """Continue in the `else` arm of the current `if`."""
        self._depth -= 1
        self.line("else")
        self._depth += 1

    def text(self) -> str:
        """The TL text of the program."""
        body = "\n".join(self.lines)
        declared = [
            *(f"Allocate {n} in global {r}" for n, r in self.tensors.items() if _used(n, body)),
            *(f"Allocate {n} in shared {r}" for n, r in self.shared.items() if _used(n, body)),
            *(f"Allocate {n} in register {r}" for n, r in self.registers.items() if _used(n, body)),
        ]
        lets = self._needed(self.lets, "\n".join([body, *declared]))
        grid = "grid " + ", ".join(f"{name} = 0:{end}" for name, end in self.grid)
        rest = "\n".join([grid, *lets, *declared, body])
        dims = [d for d in self.dims if _used(d, rest)]
        params = [f"param {name} = {value}" for name, value in self.params.items()]
        always = {"Warps", "Overlap", "PingPong", "SplitMasked", "Persistent"}
        kept = self._needed(params, rest, always)
        head = [*kept, *([f"dim {', '.join(dims)}"] if dims else [])]
        return "\n".join([*head, "", grid, *lets, "", *declared, "", body]) + "\n"

    @staticmethod
    def _needed(lines: list[str], rest: str, always: set[str] | None = None) -> list[str]:
        """The definitions that a later line uses."""
        kept: list[str] = []
        for line in reversed(lines):
            name = line.split()[1]
            if (always and name in always) or _used(name, "\n".join([rest, *kept])):
                kept.insert(0, line)
        return kept


def _used(name: str, text: str) -> bool:
    return re.search(rf"\b{name}(_shared|_register)?\b", text) is not None
