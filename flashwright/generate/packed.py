"""Kernels for packed sequences: the built-in author's programs, packed; each is made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.build import package
from flashwright.build.make import make
from flashwright.check.check import checked_program
from flashwright.files import sha256
from flashwright.generate.backward import CODE, BackwardOrder
from flashwright.generate.folder import write_package
from flashwright.generate.store import HEADROOMS
from flashwright.gpu import Gpu
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.format import format_tree
from flashwright.lang.parse import parse
from flashwright.measure.machine import translator
from flashwright.rewrite.packed import packed
from flashwright.spec import AttentionSpec


@dataclass(frozen=True)
class PackedOrder:
    """Attention as a spec defines it, of packed sequences: a kernel to find or to make."""

    spec: AttentionSpec
    """Of each sequence."""
    gpu: Gpu

    def code(self, headroom: int | None = None) -> str:
        """The program. Raises Failed with FW905 if no tiling fits the GPU."""
        return format_tree(packed(parse(self.rectangular(headroom))))

    def rectangular(self, headroom: int | None = None) -> str:
        """The author's program for rectangular batches."""
        try:
            written = write_code(write_sketch(self.spec), self.spec, self.gpu, headroom=headroom)
        except NothingFits as error:
            raise Failed(Diagnostic("FW905", str(error))) from None
        return written.code

    @property
    def backward(self) -> BackwardOrder:
        """The gradients of Q, K and V."""
        wrt = ("q", "k", "v")
        return BackwardOrder(self.rectangular(), self.gpu, self.spec, inputs=wrt, packed=True)

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        return sha256("\0".join(("packed", specs.dump(self.spec), self.gpu.name, translator())))

    @property
    def name(self) -> str:
        """The name of its package."""
        return f"{self.gpu.name}-packed-{self.spec.slug}-{self.key[:16]}"

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        return f"packed sequences, {self.spec.in_words}; {self.gpu.title}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package; if it spills, again with more registers free."""
        for number, headroom in enumerate(HEADROOMS, 1):
            text = self.code(headroom)
            try:
                made, built = make(checked_program(parse(text), self.gpu), self.gpu, tl=text)
            except Failed as failed:
                spills = any(d.code == "FW823" for d in failed.diagnostics)
                if spills and number < len(HEADROOMS):
                    continue
                raise
            files = {CODE: text, **package.translated(made), **package.compiled(built)}
            files[package.RECORD] = package.record(built, self.gpu, files, made.report)
            write_package(folder, files, self.gpu.name)
            return
