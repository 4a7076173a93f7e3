"""Builds untrusted CUDA: screens it first, then compiles it in confinement."""

from __future__ import annotations

from flashwright.build.compile import Built, build
from flashwright.build.toolchain import Toolchain
from flashwright.untrusted.screen import screen


def build_untrusted(
    source: str, arch: str, *, real: str | None = None, toolchain: Toolchain | None = None
) -> Built:
    """Screen and compile it with line information; the arguments are those of `build`.

    Raises Failed with FW828 for code that is not allowed, with FW821 if the system cannot confine
    the compiler, and as `build` does.
    """
    screen(source)
    return build(
        source,
        arch,
        real=real,
        toolchain=toolchain,
        may_spill=True,
        line_info=True,
        untrusted=True,
    )
