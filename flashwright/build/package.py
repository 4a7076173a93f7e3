"""The files of a kernel package: their names, and what is in them.

build.json comes last and names the others with their digests: where it stands, they are of a piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashwright.files import sha256
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.build.compile import Built
    from flashwright.gpu import Gpu
    from flashwright.lower.report import Report
    from flashwright.lower.translate import Translation

SCHEMA = 1
RECORD = "build.json"
OWN = "."
"""The package's own kernel, where others go by the names of their subfolders."""
CLASSES = "classes.json"
"""Which of several kernels serves which lengths (classes.py)."""
TUNING = "tuning.json"
"""What was tried to find them (measure/tune)."""
TRANSLATED = ("kernel.cu", "kernel.map.json", "launch.json")
COMPILED = ("kernel.cubin", "kernel.ptx")
IN_RECORD = ("code.tl", "spec.toml", *TRANSLATED, *COMPILED)


def inside(kernel: str, name: str) -> str:
    """A file of a kernel, by the name that it has in the package."""
    return name if kernel == OWN else f"{kernel}/{name}"


def translated(translation: Translation) -> dict[str, str]:
    """The source, where each of its lines came from, and how to launch it."""
    texts = (translation.source, translation.map.dump(), translation.plan.dump())
    return dict(zip(TRANSLATED, texts, strict=True))


def compiled(built: Built, ptx: bool = True) -> dict[str, str | bytes]:
    """The cubin, and the PTX by which newer GPUs can run it."""
    return {"kernel.cubin": built.cubin, **({"kernel.ptx": built.ptx} if ptx else {})}


def record(
    built: Built, gpu: Gpu, files: Mapping[str, str | bytes], report: Report | None = None
) -> str:
    """build.json: with what it was compiled, what ptxas says, and the digest of every file.

    `report` is the translator's: the schedule. A kernel that a model wrote has none.
    Of a further kernel it is the digest of its own build.json, which has those of its files.
    """
    more = [name for name in files if name == CLASSES or name.endswith(f"/{RECORD}")]
    told = {
        "schema": SCHEMA,
        "flashwright": __version__,
        "gpu": gpu.name,
        **built.record(),
        **({"schedule": report.record(built.registers)} if report is not None else {}),
        "artefacts": {name: sha256(files[name]) for name in (*IN_RECORD, *more) if name in files},
    }
    return json.dumps(told, indent=2) + "\n"
