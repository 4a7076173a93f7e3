"""How wide the operands of an instruction are."""

from __future__ import annotations

import re
import struct

from flashwright.emulate.ptx import Immediate, Operand, Pair, Vector

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_COMBINED = frozenset(("and", "or", "xor"))  # comparisons with a predicate as their last operand
_TYPE = re.compile(r"\.(?:[usb](8|16|32|64|128)|(?:b?f|tf)(16|32|64))(?:x2)?\b")


def flat(operand: Operand) -> list[Operand]:
    """The operands of a vector or a pair, one after the other."""
    if isinstance(operand, Vector):
        return [inner for item in operand.items for inner in flat(item)]
    if isinstance(operand, Pair):
        return [*flat(operand.first), *flat(operand.second)]
    return [operand]


def narrowed(operand: Immediate, size: int) -> int:
    """The operand with `size` bytes; an fp64 constant may stand for an fp32 one."""
    if operand.bits == 64 and size == 4:
        value = struct.unpack("<d", struct.pack("<Q", operand.value))[0]
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return operand.value


def width_of(name: str) -> int:
    """Bytes of an instruction's operands: those of its last type."""
    found = _TYPE.findall(name)
    if not found:
        return 4
    whole, real = found[-1]
    size = BYTES[whole or real]
    return 4 if "x2" in name.rpartition(".")[2] else size


def operand_width(name: str, number: int, count: int, size: int) -> int:
    """The width of an operand whose type is not the instruction's; 0 for a predicate."""
    first, *parts = name.split(".")
    if parts[-1:] == ["pred"] and first != "vote":
        return 0
    if first == "selp" or (first in ("set", "setp") and _COMBINED.intersection(parts)):
        return 0 if number == count - 1 else size
    if first == "vote" and number == 1:
        return 0
    if first in ("shl", "shr") and number == 2:
        return 4
    if first in ("bfe", "bfi") and number >= count - 2:
        return 4
    if first in ("match", "mapa") and number == count - 1:
        return 4
    if name.startswith("mad.wide") and number == 3:
        return 2 * size
    return size
