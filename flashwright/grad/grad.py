"""The backward pass of a program, derived and written as TL."""

from __future__ import annotations

from dataclasses import dataclass

from flashwright.grad.derive import derive
from flashwright.grad.emit import emit
from flashwright.lang.nodes import Tree
from flashwright.program.program import Program


@dataclass(frozen=True)
class Gradients:
    """A backward pass: its kernels, and the names of the gradients that it computes."""

    tree: Tree
    gradients: tuple[str, ...]


def backward(program: Program) -> Gradients:
    """The backward pass of a checked program. Raises Failed with FW908 if it has none."""
    return Gradients(*emit(derive(program)))
