"""CUDA out of a folder or from anybody else: read first, then compiled in confinement."""

from __future__ import annotations

from flashwright.build.compile import Built, build
from flashwright.build.toolchain import Toolchain
from flashwright.untrusted.screen import screen


def build_untrusted(
    source: str, arch: str, *, real: str | None = None, toolchain: Toolchain | None = None
) -> Built:
    """Compile it with the source's lines kept; the arguments are those of `build`.

    Failed with FW828 for code that reaches outside, with FW821 where the system cannot confine the
    compiler, and as `build` says.
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
