"""Kernels for the tests: made once for each program and kept."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin.author import write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.build.load import Kernel
from flashwright.build.make import make
from flashwright.check.check import check
from flashwright.lang.parse import parse
from flashwright.spec import AttentionSpec


def code_of(spec: AttentionSpec, gpu: str) -> str:
    """The built-in program; a skip where none fits the GPU."""
    try:
        return write_code(write_sketch(spec), spec, gpus.find(gpu)).code
    except NothingFits as error:
        pytest.skip(str(error))


@functools.cache
def kernel_of(code: str, gpu: str) -> Kernel:
    """The kernel of a program, loaded once."""
    return fresh(code, gpu)


def fresh(code: str, gpu: str) -> Kernel:
    """A kernel whose code is not on the device yet.

    Its cubin is for the GPU of that name; a newer one takes its PTX.
    """
    card = gpus.find(gpu)
    checked = check(parse(code), card)
    assert checked.program is not None
    assert not checked.errors
    made, built = make(checked.program, card)
    return Kernel(made.plan, built.cubin, built.ptx.encode())


def example(path: Path, gpu: str) -> tuple[Kernel, AttentionSpec]:
    """A program under examples/ and its spec."""
    return kernel_of(path.read_text(), gpu), specs.load(path.with_suffix(".toml"))
