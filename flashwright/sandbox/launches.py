"""The kernels that a process launches, and whether the candidate brought them, from the driver.

CUPTI calls back at every launch, by PyTorch, a library, Triton or a graph capture. A kernel is the
candidate's own if its code was loaded from a file of the candidate's, or from memory by a caller
that is no library. All other kernels are libraries', whatever their names.

This runs in the candidate's process, which could switch it off. Then it reports no launches, and
the judge rejects a candidate that answers without one.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_EXIT = 1
_DRIVER_API = 1
_LAST = 2000  # the driver has fewer functions
_LAUNCHES = ("cuLaunchKernel", "cuLaunchCooperativeKernel", "cuLaunchGrid")
_NODES = ("cuGraphAddKernelNode", "cuGraphKernelNodeSetParams", "cuGraphExecKernelNodeSetParams")
_LOADS = ("cuModuleLoad", "cuLibraryLoad")
_LOOKUPS = (  # each gives a handle (its first parameter) out of another (its second)
    *("cuModuleGetFunction", "cuLibraryGetKernel", "cuLibraryGetModule", "cuKernelGetFunction"),
)
_UNPACK = re.compile(r"lib(cublas|cudnn|cusparse|cusolver|cufft|curand|cutensor|nvfuser)")
_DEPTH = 64  # frames
_MOST = 300
"""The most names in a report."""


class _CallbackData(ctypes.Structure):
    """CUPTI's struct CUpti_CallbackData."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("function", ctypes.c_char_p),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("result", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("context", ctypes.c_void_p),
        ("context_id", ctypes.c_uint32),
        ("data", ctypes.c_void_p),
        ("number", ctypes.c_uint32),
    )


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_CallbackData)
)


class Launches:
    """Counts the launches of this process from now on. Raises OSError without CUPTI."""

    def __init__(self) -> None:
        self.own: tuple[str, ...] = ()
        """The folders of the candidate's files."""
        self.counts: Counter[tuple[str, bool]] = Counter()
        """Launches by the kernel's name and whether it is the candidate's own."""
        self._handles: set[int] = set()
        self._kinds: dict[int, str] = {}
        self._callback = _Callback(self._on_callback)  # CUPTI keeps no reference
        self._subscribe(ctypes.CDLL(_library()))

    def begin(self, own: Sequence[str]) -> None:
        """Reset the counts, for a candidate whose files are in these folders."""
        self.own = tuple(str(Path(folder).resolve()) for folder in own)
        self.counts.clear()

    def told(self) -> list[tuple[str, bool, int]]:
        """Name, whether it is the candidate's own, and count; the most frequent first."""
        return [(name, own, n) for (name, own), n in self.counts.most_common(_MOST)]

    def _subscribe(self, cupti: ctypes.CDLL) -> None:
        subscriber = ctypes.c_void_p()
        if result := cupti.cuptiSubscribe(ctypes.byref(subscriber), self._callback, None):
            raise OSError(f"cuptiSubscribe: error {result}")
        name = ctypes.c_char_p()
        for number in range(1, _LAST):
            if cupti.cuptiGetCallbackName(_DRIVER_API, number, ctypes.byref(name)):
                continue
            if kind := _kind((name.value or b"").decode()):
                self._kinds[number] = kind
                cupti.cuptiEnableCallback(1, subscriber, _DRIVER_API, ctypes.c_uint32(number))

    def _on_callback(self, user: int, domain: int, number: int, told: Any) -> None:
        """CUPTI's callback. It must not raise: its caller is C code."""
        try:
            data, kind = told.contents, self._kinds[number]
            if kind == _GRAPH:
                self.counts[GRAPH, True] += data.site != _EXIT
            elif kind in (_LAUNCH, _EX_LAUNCH, _NODE):
                if data.site != _EXIT:
                    self._count_launch(data, kind)
            elif data.site == _EXIT:
                self._note_module(data, kind)
        except Exception as error:
            self.counts[f"{type(error).__name__} in the count of launches", False] += 1

    def _count_launch(self, data: Any, kind: str) -> None:
        place = {_LAUNCH: 0, _EX_LAUNCH: 1}.get(kind)
        if place is not None:
            handle = data.parameters[place] or 0
        else:  # a node's parameters begin with the function
            at = data.parameters[_NODE_PLACE.get(_stem(data.function), 1)] or 0
            handle = ctypes.c_void_p.from_address(at).value or 0
        name = (data.symbol or b"?").decode(errors="replace")
        self.counts[name, handle in self._handles] += 1

    def _note_module(self, data: Any, kind: str) -> None:
        made = ctypes.c_void_p.from_address(data.parameters[0] or 0).value or 0
        source = data.parameters[1] or 0
        if kind == _LOAD:
            own = self._is_own(mapped_file(source)) and not _from_a_library()
        elif kind == _FILE:
            own = self._is_own(ctypes.string_at(source).decode(errors="replace"))
        else:
            own = source in self._handles
        # A handle of a module that was unloaded may come again.
        (self._handles.add if own else self._handles.discard)(made)

    def _is_own(self, path: str) -> bool:
        """Whether code from this file is the candidate's; an empty path is plain memory."""
        return not path.startswith("/") or str(Path(path).resolve()).startswith(self.own)


_LAUNCH, _EX_LAUNCH, _NODE, _GRAPH = "launch", "launch ex", "node", "graph"
_LOAD, _FILE, _LOOKUP = "load", "file", "lookup"
GRAPH = "a graph"
"""The launch of a graph. Its kernels were counted at capture."""
_NODE_PLACE = {"cuGraphAddKernelNode": 4, "cuGraphExecKernelNodeSetParams": 2}


def _stem(function: bytes | None) -> str:
    return (function or b"").decode().partition("_")[0]


def _kind(name: str) -> str:
    """The role of a driver function: launch, load, lookup or none."""
    stem = name.partition("_")[0]
    if stem == "cuLaunchKernelEx":
        return _EX_LAUNCH
    if stem in _LAUNCHES or stem == "cuLaunch":
        return _LAUNCH
    if stem in _NODES:
        return _NODE
    if stem == "cuGraphLaunch":
        return _GRAPH
    if stem in _LOOKUPS:
        return _LOOKUP
    if stem.startswith(_LOADS):
        return _FILE if stem in ("cuModuleLoad", "cuLibraryLoadFromFile") else _LOAD
    return ""


def _from_a_library() -> bool:
    """Whether a library that unpacks its kernels in memory, as cuBLAS and cuDNN do, is calling."""
    frames = (ctypes.c_void_p * _DEPTH)()
    found = ctypes.CDLL(None).backtrace(frames, _DEPTH)
    places = list(_maps())
    for address in frames[:found]:
        path = next((p for low, high, p in places if low <= (address or 0) < high), "")
        if _UNPACK.match(Path(path).name):
            return True
    return False


def mapped_file(address: int) -> str:
    """The file that an address of this process is mapped from; empty where it is plain memory."""
    for low, high, path in _maps():
        if low <= address < high:
            return path
    return ""


def _maps() -> Iterator[tuple[int, int, str]]:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        low, _, high = fields[0].partition("-")
        yield int(low, 16), int(high, 16), fields[5] if len(fields) > 5 else ""


def _library() -> str:
    """The path of PyTorch's CUPTI. Raises OSError if it has none."""
    for _, _, path in _maps():
        if Path(path).name.startswith("libcupti.so"):
            return path
    return "libcupti.so"
