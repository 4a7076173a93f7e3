"""How shared tiles are swizzled."""

from __future__ import annotations


def swizzle_bytes(row: int) -> int:
    """How wide the swizzle of a tile is whose rows have so many bytes (device/fw/shared.cuh)."""
    return next((b for b in (128, 64) if row % b == 0), 32)
