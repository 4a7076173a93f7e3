"""Kernels for the tests: made once for each program and kept."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.build import driver
from flashwright.build.load import Kernel
from flashwright.build.make import make
from flashwright.build.package import compiled, translated
from flashwright.check.check import check
from flashwright.lang.parse import parse
from flashwright.sandbox.candidate import Candidate
from flashwright.spec import AttentionSpec


def code_of(spec: AttentionSpec, gpu: str) -> str:
    """The built-in program; a skip where none fits the GPU, or the card at hand cannot run it."""
    arch, card = gpus.find(gpu).arch, driver.cards()[0]
    if not card.takes(arch):
        pytest.skip(f"a kernel for {arch} does not run on {card.arch}")
    try:
        return write_code(write_sketch(spec), spec, gpus.find(gpu)).code
    except NothingFits as error:
        pytest.skip(str(error))


@functools.cache
def kernel_of(code: str, gpu: str) -> Kernel:
    """The kernel of a program, loaded once."""
    return fresh(code, gpu)


def made_of(code: str, gpu: str) -> tuple[Kernel, str]:
    """The kernel of a program, loaded once, and its PTX."""
    return kernel_of(code, gpu), str(_made(code, gpu)[1].ptx)


def fresh(code: str, gpu: str) -> Kernel:
    """A kernel whose code is not on the device yet.

    Its cubin is for the GPU of that name; a newer one takes its PTX.
    """
    made, built = _made(code, gpu)
    return Kernel(made.plan, built.cubin, built.ptx.encode())


def built_for(code: str, gpu: str) -> None:
    """Compile the kernel of a program, so that it is in the cache."""
    _made(code, gpu)


def _made(code: str, gpu: str) -> Any:
    card = gpus.find(gpu)
    checked = check(parse(code), card)
    assert checked.program is not None
    assert not checked.errors
    return make(checked.program, card)


@functools.cache
def package_of(code: str, gpu: str) -> Candidate:
    """The kernel of a program as a package, in a folder that lasts as long as the tests."""
    made, built = _made(code, gpu)
    folder = Path(_FOLDERS.name, str(len(list(Path(_FOLDERS.name).iterdir()))))
    folder.mkdir()
    for name, data in {**translated(made), **compiled(built)}.items():
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return Candidate.package(folder)


_FOLDERS = tempfile.TemporaryDirectory(prefix="flashwright-tests-")


def example(path: Path, gpu: str) -> tuple[Candidate, AttentionSpec]:
    """A program under examples/ and its spec."""
    return package_of(path.read_text(), gpu), specs.load(path.with_suffix(".toml"))
