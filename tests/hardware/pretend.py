"""The emulator in the GPU's place, to try how recording goes; what it records proves nothing.

`python -m tests.hardware.record OUT.npz --device tests.hardware.pretend:Gpu`
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.hardware import emulated
from tests.hardware.snippet import Prepared, packed


class Gpu:
    """What gpu.py's has."""

    description = "the emulator itself"

    def load(self, many: Sequence[Prepared]) -> None:
        """There is nothing to be loaded."""

    def run(self, _: None, one: Prepared) -> bytes:
        results, _findings = emulated.run(one)
        return packed(one.snippet.gives, results)
