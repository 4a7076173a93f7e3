"""What a launch is for the machine: the structures of launch.cpp.

The process that executes untrusted kernels (server.py) imports little besides this module.
"""

from __future__ import annotations

import ctypes
import struct

READ, READ_WRITE, OUTPUT, EMPTY, UNSET, HEAP = range(6)
"""The uses of a region. An output is unset, and a kernel may add to it: an earlier kernel may have
set it to 0. An empty region is unset. UNSET is one that a kernel cannot set, such as a constant.
HEAP is the memory of malloc: its bytes, as many marks of those that are written, and a table."""


class Region(ctypes.Structure):
    """Global memory that a launch may use."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("use", ctypes.c_int32),
        ("marks", ctypes.c_void_p),
    )


class FindingRecord(ctypes.Structure):
    """One finding, as the machine writes it."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("kind", "instruction", "block", "warp", "lane", "other")),
        ("address", ctypes.c_uint64),
        ("detail", ctypes.c_int64 * 2),
        ("callers", ctypes.c_int32 * 4),
    )


class Launch(ctypes.Structure):
    """The struct fw_launch of launch.cpp."""

    kept: object = None
    """Keeps the names alive as long as the struct has their address."""
    _fields_ = (
        ("names", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("instructions", ctypes.c_int32),
        ("operands", ctypes.c_void_p),
        ("operand_count", ctypes.c_int32),
        ("touched", ctypes.c_void_p),
        ("touched_count", ctypes.c_int32),
        ("registers", ctypes.c_void_p),
        ("register_bytes", ctypes.c_int32),
        ("specials", ctypes.c_void_p),
        ("special_count", ctypes.c_int32),
        ("regions", ctypes.c_void_p),
        ("region_count", ctypes.c_int32),
        ("parameters", ctypes.c_void_p),
        ("parameter_bytes", ctypes.c_int32),
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("cluster", ctypes.c_int32 * 3),
        ("order", ctypes.c_int32),
        ("resident", ctypes.c_int64),
        ("order_seed", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("races", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("schedule", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("findings", ctypes.c_void_p),
        ("finding_room", ctypes.c_int32),
        ("counts", ctypes.c_void_p),
        ("printed", ctypes.c_void_p),
        ("printed_room", ctypes.c_int32),
    )


NUMBER = struct.Struct("<q")
"""The format of all messages between the server and its caller."""
ROOM = 1 << 34
"""Bytes of address space that the server reserves for launches."""
