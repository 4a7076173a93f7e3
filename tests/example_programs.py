"""The programs under examples/, and which of them the translator takes."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.tl"))
UNTRANSLATED = {
    "side_by_side": "tiles side by side in shared memory",
}
"""Programs that are only checked and run on the CPU, with the form that is not translated yet."""
TRANSLATED = [path for path in PROGRAMS if path.stem not in UNTRANSLATED]
