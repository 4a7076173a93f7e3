"""The files of a kernel package: names and contents.

build.json is written last and has the digests of the others: if it exists, the package is complete.
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
"""The name of the package's own kernel; further kernels have the names of their subfolders."""
CLASSES = "classes.json"
"""The lengths that each of several kernels serves (classes.py)."""
STEPS = "steps.json"
"""The kernels of a program that has several, in order (steps.py)."""
TUNING = "tuning.json"
"""The record of `flashwright tune` (measure/tune)."""
TRANSLATED = ("kernel.cu", "kernel.map.json", "launch.json")
COMPILED = ("kernel.cubin", "kernel.ptx")
IN_RECORD = ("code.tl", "spec.toml", *TRANSLATED, *COMPILED)


def inside(kernel: str, name: str) -> str:
    """The path of a kernel's file in the package."""
    return name if kernel == OWN else f"{kernel}/{name}"


def translated(translation: Translation) -> dict[str, str]:
    """The files of a translation: source, source map, launch plan."""
    texts = (translation.source, translation.map.dump(), translation.plan.dump())
    return dict(zip(TRANSLATED, texts, strict=True))


def compiled(built: Built, ptx: bool = True) -> dict[str, str | bytes]:
    """The files of a build: the cubin, and the PTX for newer GPUs."""
    return {"kernel.cubin": built.cubin, **({"kernel.ptx": built.ptx} if ptx else {})}


def record_of_steps(gpu: Gpu, files: Mapping[str, str | bytes]) -> str:
    """build.json of a package whose program has several kernels: each has its own record."""
    told = {"schema": SCHEMA, "flashwright": __version__, "gpu": gpu.name}
    digests = {name: sha256(data) for name, data in files.items()}
    return json.dumps({**told, "artefacts": digests}, indent=2) + "\n"


def record(
    built: Built, gpu: Gpu, files: Mapping[str, str | bytes], report: Report | None = None
) -> str:
    """build.json: compiler, resource usage, schedule, and the digest of every file.

    `report` is the translator's; a kernel that a model wrote has none. For a further kernel the
    digest is that of its own build.json, which has the digests of its files.
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
