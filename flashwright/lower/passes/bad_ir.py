"""What the verifier raises."""

from __future__ import annotations

from flashwright.lower import ir


class BadIR(Exception):
    """A mistake of the translator: the pass behind which it shows, the statement, its TL line."""

    def __init__(self, stage: str, node: ir.Statement | None, text: str) -> None:
        lines = node.origin.lines if node is not None else None
        where = f" (line {lines[0]})" if lines else ""
        kind = f"{type(node).__name__}: " if node is not None else ""
        super().__init__(f"behind {stage}: {kind}{text}{where}")
        self.stage = stage
        self.node = node
        self.text = text
        self.lines = lines
        self.line = lines[0] if lines else None
