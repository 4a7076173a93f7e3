"""Kernels whose programs are written here, not by an author: each made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashwright.files import sha256
from flashwright.generate.backward import built
from flashwright.generate.folder import write_package
from flashwright.gpu import Gpu
from flashwright.lang.parse import parse
from flashwright.measure.machine import translator


@dataclass(frozen=True)
class OwnProgram:
    """A program that is written here, and its package."""

    gpu: Gpu

    @property
    def code(self) -> str:
        """The program."""
        raise NotImplementedError

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        return sha256("\0".join((self.code, self.gpu.name, translator())))

    @property
    def name(self) -> str:
        """The name of its package."""
        return f"{self.gpu.name}-{type(self).__name__.lower()}-{self.key[:16]}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package. Raises Failed if a kernel cannot be made."""
        write_package(folder, built(parse(self.code), self.gpu), self.gpu.name)
