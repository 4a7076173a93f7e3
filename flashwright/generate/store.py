"""Kernels by what they compute: made once for each operator and GPU, kept in the user's cache.

Processes that ask for the same kernel at once wait for the one that makes it. A package appears in
the store whole or not at all, so a killed process leaves nothing broken. If the cache cannot be
written, the package is kept for this process only, and that is said.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flashwright import spec as specs
from flashwright.author.builtin.choose import HEADROOMS
from flashwright.build.cache import Cache
from flashwright.files import sha256
from flashwright.generate.folder import finished
from flashwright.generate.pipeline import STAGES, Stage, generate
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.machine import translator

if TYPE_CHECKING:
    from flashwright.author.builtin.mods import Mods
    from flashwright.generate.state import Run
    from flashwright.gpu import Gpu
    from flashwright.spec import AttentionSpec

PACKAGES = "packages"
PATIENCE = 600.0
"""Seconds to wait for another process that makes the same kernel; then it is made twice."""
Tell = Callable[[str], None]


def tell(text: str) -> None:
    """A line of progress on stderr."""
    print(f"flashwright: {text}", file=sys.stderr, flush=True)


class Ordered(Protocol):
    """A package to find or to make."""

    @property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""

    @property
    def name(self) -> str:
        """The name of its package."""

    def in_words(self) -> str:
        """What it computes, for a line of progress."""

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package. Raises Failed if none can be made."""


@dataclass(frozen=True)
class Order:
    """A kernel to find or to make."""

    spec: AttentionSpec
    gpu: Gpu
    mods: Mods | None = None
    reference: str | None = None
    """The text of the file that the spec's `reference` names."""

    @cached_property
    def key(self) -> str:
        """A digest of what is computed, for which GPU, and of the translator."""
        spec = self.spec.model_copy(update={"dims": {}})  # sizes of the caller's own tensors
        parts = (specs.dump(spec), self.gpu.name, repr(self.mods), translator())
        return sha256("\0".join(parts))

    @property
    def name(self) -> str:
        """The name of its package."""
        plain = self.spec.model_copy(update={"dims": {}, "reference": None})
        own = "-own" if self.mods is not None else ""
        return f"{self.gpu.name}-{plain.slug}{own}-{self.key[:16]}"

    def in_words(self) -> str:
        """What it computes, for a line of progress."""
        own = " and ".join(
            what for what in ("score", "mask") if self.mods and getattr(self.mods, what) is not None
        )
        spec = self.spec.model_copy(update={"reference": None})
        return (f"a {own} of your own, " if own else "") + f"{spec.in_words}; {self.gpu.title}"

    def make(self, folder: Path, verified: bool) -> None:
        """Write the package, as `generate` makes it."""
        _make(self, folder, verified)


_NOTED: list[dict[Path, None]] = []


@contextlib.contextmanager
def noted() -> Iterator[Mapping[Path, None]]:
    """The packages that are found or made in this context, in their order."""
    used: dict[Path, None] = {}
    _NOTED.append(used)
    try:
        yield used
    finally:
        _NOTED.remove(used)


def find(order: Ordered) -> Path | None:
    """The package in the store; None if it was not made yet."""
    place = Cache().root / PACKAGES / order.name
    return place if finished(place) else None


def find_or_make(order: Ordered, tell: Tell, verified: bool = False) -> Path:
    """The package of a kernel. It is made if the store does not have it: `tell` gets a line then.

    `verified` runs the judge as well, on the GPU or under emulation, and makes kernels for short
    lengths where such are known to be faster: this takes minutes. Raises Failed if no kernel can be
    made.
    """
    found = find(order) or _made(order, tell, verified)
    for used in _NOTED:
        used[found] = None
    return found


def _made(order: Ordered, tell: Tell, verified: bool) -> Path:
    cache = Cache()
    with cache.locked(order.key, PATIENCE):
        found = find(order)
        if found is not None:
            return found
        with cache.workplace() as work:
            tell(f"making a kernel, once: {order.in_words()}")
            order.make(work / "kernel", verified)
            return _published(work / "kernel", cache.root / PACKAGES / order.name, tell)


def _make(order: Order, folder: Path, verified: bool) -> None:
    """Make the package. If it spills, again with more registers free."""
    last = "verdict" if verified else "build"
    plan = [s for s in STAGES if verified or s.name not in ("cpu", "verdict")]
    told: tuple[Diagnostic, ...] = ()
    for headroom in HEADROOMS:
        shutil.rmtree(folder, ignore_errors=True)
        run = generate(
            order.spec,
            order.gpu,
            folder,
            _Quiet(),
            last=last,
            reference=order.reference.encode() if order.reference is not None else None,
            plan=plan,
            mods=order.mods,
            headroom=headroom,
            one_tiling=not verified,
        )
        told = _errors(run)
        if not any(d.code == "FW823" for d in told):
            break
    if told:
        raise Failed(*told)


def _errors(run: Run) -> tuple[Diagnostic, ...]:
    """Why a run made no kernel; empty if it did."""
    if run.built is not None and run.ok:
        return ()
    skipped = [d for timing in run.timings for d in timing.why]
    return (*(f.diagnostic for f in run.findings if f.diagnostic.severity == "error"), *skipped)


class _Quiet:
    """A run without a display."""

    def begin(self, stage: Stage, number: int, total: int) -> None:
        """Nothing is shown."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Nothing is shown."""

    def end(self, stage: Stage, run: Run) -> None:
        """Nothing is shown."""


def _published(made: Path, place: Path, tell: Tell) -> Path:
    """Move a package into the store, or keep it for this process if the store takes none."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            if not finished(place):
                shutil.rmtree(place, ignore_errors=True)
        os.rename(made, place)
    except OSError as error:
        if finished(place):  # another process was faster
            return place
        kept = Path(tempfile.mkdtemp(prefix="flashwright-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        shutil.copytree(made, kept / place.name)
        why = error.strerror or type(error).__name__
        tell(
            f"the kernel is kept for this process only: {place.parent} cannot be written ({why}). "
            "FLASHWRIGHT_CACHE names another folder"
        )
        return kept / place.name
    return place
