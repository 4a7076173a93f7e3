"""Calls the kernel of a library, as a test of a Python extension does."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

library = ctypes.CDLL(sys.argv[1])
library.add_host.argtypes = (ctypes.c_void_p, ctypes.c_float, ctypes.c_int)
x = np.arange(100, dtype=np.float32)
before = x.sum()
print(library.add_host(x.ctypes.data, 3.0, x.size), int(before), int(x.sum()))
