"""A snippet under emulation."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from flashwright.emulate import emulate
from flashwright.emulate.machine import library
from flashwright.emulate.structs import Region
from flashwright.emulate.tensor_map import encode_tensor_map
from tests.hardware.snippet import MORE, Operands, Prepared, Snippet

__all__ = ["library", "run"]
_FROM, _INTO = 1 << 24, 1 << 32


def run(prepared: Prepared, schedule: str = "eager") -> tuple[Operands, list[Any]]:
    """Results, and what the emulator has to say; Failed with FW831 where it knows no such thing."""
    snippet = prepared.snippet
    program = emulate.prepare(prepared.ptx, snippet.entry)
    given = np.frombuffer(prepared.data, np.uint8)
    taken = np.zeros(max(prepared.size, 1), np.uint8)
    regions = [
        Region(_FROM, given.nbytes, given.ctypes.data, False),
        Region(_INTO, taken.nbytes, taken.ctypes.data, True),
    ]
    parameters = struct.pack("<QQ", _FROM, _INTO).ljust(MORE, b"\0") + _more(snippet)
    grid, block = [prepared.trials], [snippet.threads]
    told = emulate.launch(program, regions, parameters, grid, block, 0, schedule)
    return prepared.results(taken.tobytes()), list(told.findings)


def _more(snippet: Snippet) -> bytes:
    tensor = snippet.tensor
    if tensor is None:
        return snippet.parameters
    base = _INTO if tensor.of_results else _FROM
    shape = (tensor.sizes, tensor.strides, tensor.box, tensor.element_bytes)
    return encode_tensor_map(base, *shape, tensor.swizzle, tensor.fill)
