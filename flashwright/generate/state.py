"""A run of `flashwright generate` as data: what its stages have made so far, and how they went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashwright.build.package import OWN
from flashwright.lang.diagnostic import Diagnostic

if TYPE_CHECKING:
    from flashwright.author.builtin.author import Written
    from flashwright.author.builtin.mods import Mods
    from flashwright.build.compile import Built
    from flashwright.build.steps import Steps
    from flashwright.gpu import Gpu
    from flashwright.judge.cpu import CpuVerdict
    from flashwright.judge.verdict import Verdict
    from flashwright.lower.translate import Translation
    from flashwright.program.kernels import Kernels
    from flashwright.program.program import Program
    from flashwright.spec import AttentionSpec

KINDS: Mapping[str, str] = {
    "gpu": "right on a GPU",
    "emulated": "right under emulation",
    "checked": "only checked",
}
"""The kinds of verdict that a run can end with: each says less than the one before."""

Progress = Callable[[int, int, str], None]


def silent(done: int, total: int, text: str) -> None:
    """Ignores progress, for work inside a stage that has its own display."""


Status = Literal["ok", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """A diagnostic and the artefact it is about."""

    file: str
    diagnostic: Diagnostic


@dataclass(frozen=True)
class StageTiming:
    """The status and duration of a stage. A stage that cannot run here is skipped."""

    stage: str
    status: Status
    seconds: float
    why: tuple[Diagnostic, ...] = ()
    """Why it was skipped, and how to get what is missing."""


class Skipped(Exception):
    """A stage cannot run here, and the kernel is not to blame."""

    def __init__(self, *why: Diagnostic) -> None:
        super().__init__(*why)
        self.why = why


@dataclass(frozen=True)
class Run:
    """Everything known so far. Stages do not change it: they return the next one.

    A package may have several kernels. What each becomes is kept by its name, and under OWN what
    the package's own one does.
    """

    spec: AttentionSpec
    gpu: Gpu
    folder: Path
    artefacts: Mapping[str, str] = field(default_factory=dict)
    """The text of each file written, by its name in the folder."""
    binaries: Mapping[str, bytes] = field(default_factory=dict)
    """The files written that are not text."""
    timings: tuple[StageTiming, ...] = ()
    findings: tuple[Finding, ...] = ()
    written: Written | None = None
    programs: Mapping[str, Program] = field(default_factory=dict)
    steps: Steps | None = None
    """Set if the code has several kernels, which run one after another: each is a program."""
    verdicts: Mapping[str, CpuVerdict] = field(default_factory=dict)
    translations: Mapping[str, Translation] = field(default_factory=dict)
    builds: Mapping[str, Built] = field(default_factory=dict)
    gpu_verdict: Verdict | None = None
    emulated: Verdict | None = None
    """The verdict on the kernels' PTX, executed on the CPU: where no GPU can run it."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What each stage that a language model did has taken."""
    kept: tuple[str, ...] = ()
    """Files that were in the folder, not as we wrote them: they are now NAME.bak."""
    allow_spills: int = 0
    """Bytes that a kernel of ours may spill."""
    mods: Mods | None = None
    """A score and a mask of the caller's own, which the spec does not describe."""
    one_tiling: bool = False
    """The package has one kernel, without further ones for short lengths."""
    headroom: int | None = None
    """Registers that the built-in author leaves free; None: as many as usual."""
    all_problems: bool = False
    """The verdict under emulation rests on all problems, not on the first few."""

    @property
    def files(self) -> dict[str, str | bytes]:
        """All that was written, text or not."""
        return {**self.artefacts, **self.binaries}

    @property
    def reference(self) -> dict[str, bytes]:
        """The user's own function that the spec names, as a file."""
        from flashwright.judge.reference import split

        name = split(self.spec.reference or "")[0]
        return {name: self.binaries[name]} if name in self.binaries else {}

    def files_of(self, kernel: str) -> dict[str, str | bytes]:
        """Those of a kernel, by their names in its own folder."""
        within = "" if kernel == OWN else f"{kernel}/"
        return {n.removeprefix(within): f for n, f in self.files.items() if n.startswith(within)}

    @property
    def codes(self) -> dict[str, str]:
        """The TL of all kernels, the package's own first."""
        written = self.written
        return {OWN: written.code, **written.further} if written else {}

    @property
    def operators(self) -> dict[str, Program | Kernels]:
        """What is judged by itself: each program, or all of them if they run one after another."""
        if self.steps is None:
            return dict(self.programs)
        from flashwright.program.kernels import Kernels

        return {OWN: Kernels(tuple(self.programs.values()))}

    @property
    def program(self) -> Program | None:
        """The package's own."""
        return self.programs.get(OWN)

    @property
    def translation(self) -> Translation | None:
        """The package's own."""
        return self.translations.get(OWN)

    @property
    def built(self) -> Built | None:
        """The package's own; of several that run one after another the last."""
        if self.steps is not None:
            return self.builds.get(self.steps.steps[-1])
        return self.builds.get(OWN)

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(f for f in self.findings if f.diagnostic.severity == "error")

    @property
    def ok(self) -> bool:
        """Nothing is wrong so far."""
        verdicts = (*self.verdicts.values(), self.gpu_verdict, self.emulated)
        return not self.failed and all(v is None or v.ok for v in verdicts)

    @property
    def kind(self) -> str:
        """What its verdict rests on: one of KINDS."""
        if self.gpu_verdict is not None:
            return "gpu"
        return "checked" if self.emulated is None else "emulated"

    @property
    def headline(self) -> str:
        """What its verdict rests on, in words, with the count of problems where not all were tried
        and the option that asks for the others."""
        share = self.emulated.share if self.emulated is not None else None
        if self.gpu_verdict is not None or share is None:
            return KINDS[self.kind]
        more = "--all-problems asks for the others"
        return f"{KINDS[self.kind]}: {share[0]} of {share[1]} problems ({more})"

    @property
    def unreached(self) -> StageTiming | None:
        """The first stage that was asked for and did not come to its end."""
        return next((t for t in self.timings if t.status != "ok"), None)

    def noting(self, file: str, *found: Diagnostic) -> Run:
        """With these findings in a file."""
        return replace(self, findings=(*self.findings, *(Finding(file, d) for d in found)))
