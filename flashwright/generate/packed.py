"""Kernels for sequences that lie packed or in a cache, each made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashwright import spec as specs
from flashwright.author.builtin.author import write_sketch
from flashwright.author.builtin.choose import fitting
from flashwright.author.builtin.mods import Mods
from flashwright.files import sha256
from flashwright.generate.backward import BackwardOrder, built
from flashwright.generate.folder import write_package
from flashwright.generate.packed_sizes import rectangular, rewritten
from flashwright.generate.store import Order
from flashwright.gpu import Gpu
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.measure.machine import translator
from flashwright.rewrite.sequenced import sequenced
from flashwright.spec import AttentionSpec


@dataclass(frozen=True)
class PackedOrder:
    """Attention of sequences of any lengths, as a spec says: a kernel to find or to make."""

    spec: AttentionSpec
    gpu: Gpu
    mods: Mods | None = None
    """A score and a mask on top of the spec's."""

    def code(self) -> str:
        """The program, before it is known whether it spills. Raises Failed with FW905 if no tiling
        fits the GPU."""
        return format_tree(sequenced(parse(self.rectangular()), self.spec))

    def rectangular(self) -> str:
        """The author's program for rectangular batches. Raises Failed with FW905."""
        sketch = write_sketch(self.spec, self.mods)
        with fitting():
            return rectangular(sketch, self.spec, self.gpu, self.mods).code

    def backward(self, inputs: tuple[str, ...], deterministic: bool = False) -> BackwardOrder:
        """The gradients of these inputs, named in lower case."""
        code, each = self.rectangular(), self.spec.each
        return BackwardOrder(code, self.gpu, each, (), inputs, deterministic, packed=True)

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        how = repr(self.mods)
        return sha256("\0".join((how, specs.dump(self.spec), self.gpu.name, translator())))

    @property
    def name(self) -> str:
        """The name of its package."""
        own = "-own" if self.mods is not None else ""
        return f"{self.gpu.name}-{self.spec.slug}{own}-{self.key[:16]}"

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        own = ", a mask or a score on top" if self.mods is not None else ""
        return f"{self.spec.in_words}{own}; {self.gpu.title}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package; `verified` as `generate` makes it, with a verdict."""
        if verified:
            Order(self.spec, self.gpu, self.mods).make(folder, verified)
            return
        sketch = write_sketch(self.spec, self.mods)
        with fitting():
            made = rewritten(sketch, self.spec, self.gpu, self.mods)
        write_package(folder, built(made.tree, self.gpu), self.gpu.name)
