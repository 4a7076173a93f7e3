"""The programs under examples/."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
_EVERY = sorted(EXAMPLES.glob("*.tl"))
SEVERAL = [p for p in _EVERY if p.read_text("utf-8").count("\ngrid ") > 1]
"""Those of several kernels."""
PROGRAMS = [p for p in _EVERY if p not in SEVERAL]
