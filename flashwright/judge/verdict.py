"""The verdict on a candidate, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashwright.judge.oracle import Comparison
from flashwright.lang import html
from flashwright.lang.diagnostic import Diagnostic
from flashwright.spec import AttentionSpec

SCHEMA = 1
EMULATION = "emulation"
"""The device of a verdict under emulation: the kernel's PTX was executed on the CPU."""
_MARKS = {True: "yes", False: "NO ", None: "-  "}


@dataclass(frozen=True)
class Offence:
    """One reason to reject a candidate. The names are stable."""

    name: str
    """Such as `replay`; offences.py lists them."""
    message: str
    """What was seen, in a sentence."""
    diagnostic: Diagnostic


@dataclass(frozen=True)
class Case:
    """One output of one problem; `library` is the error of a library on the same problem."""

    dims: Mapping[str, int]
    kind: str
    """The kind of inputs, from judge/inputs.py."""
    output: str
    comparison: Comparison
    library: float | None = None

    @property
    def ratio(self) -> float | None:
        """The candidate's error over the library's."""
        return self.comparison.relative_rms / self.library if self.library else None

    def record(self) -> dict[str, Any]:
        """The case as plain data."""
        of_limit = self.comparison.of_limit
        return {
            "dims": dict(self.dims),
            "kind": self.kind,
            "output": self.output,
            "ok": self.comparison.ok,
            "relative_rms": self.comparison.relative_rms,
            "relative_max": self.comparison.relative_max,
            "library_rms": self.library,
            "weight_error": self.comparison.weight_error,
            "reason": self.comparison.reason,
            **({} if of_limit is None else {"of_limit": of_limit}),
        }


@dataclass(frozen=True)
class Check:
    """One question that was asked of the candidate."""

    name: str
    """Such as `repeat`."""
    question: str
    """In words: `the same inputs give the same bits`."""
    passed: bool | None
    """None if it could not be asked; `note` then gives the reason."""
    tried: int = 0
    """How often it was asked."""
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A map of the error of O: the greatest error in each cell of a grid, relative to O's RMS."""

    dims: Mapping[str, int]
    error: tuple[tuple[float, ...], ...]
    """Rows are query positions, columns head dims, in ascending order."""


@dataclass(frozen=True)
class Verdict:
    """Whether a candidate computes its spec's attention, on this machine."""

    candidate: str
    """As the user named it."""
    device: str
    """The GPU's name, `cpu`, or `emulation`."""
    arch: str
    spec: AttentionSpec
    seed: int
    """The seed of the random problems."""
    cases: tuple[Case, ...]
    checks: tuple[Check, ...] = ()
    offences: tuple[Offence, ...] = ()
    library: str | None = None
    """The library whose error the candidate's is compared with."""
    unable: str | None = None
    """Why there is no such library."""
    picture: Picture | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    """Remarks, such as a check that could not be made here."""
    own_spec: bool = False
    """Whether the spec comes from the package itself, not from the user."""
    unreached: tuple[str, ...] = field(default=())
    """Lengths at which the kernel changes path and that no problem had, each with the reason."""
    missing: str = ""
    """What should have been tried and was not. If not empty, the candidate is not accepted."""
    share: tuple[int, int] | None = None
    """How many problems the verdict rests on, and of how many; None if on all."""

    @property
    def ok(self) -> bool:
        """Whether no offence was found and everything was tried."""
        return not self.offences and not self.missing

    @property
    def emulated(self) -> bool:
        """Whether the kernel's PTX was executed on the CPU instead of a GPU."""
        return self.device == EMULATION

    @property
    def where(self) -> str:
        """Where it was judged, in words."""
        if self.emulated:
            return f"the CPU, by emulation of {self.arch}"
        return f"{self.device} ({self.arch})" if self.arch else "the CPU"

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The offences as the command line shows them, or FW858 if too little was tried."""
        if self.missing and not self.offences:
            return (Diagnostic("FW858", f"too little was tried for a verdict: {self.missing}"),)
        return tuple(o.diagnostic for o in self.offences)

    @property
    def worst(self) -> float:
        """The largest error of O, relative to the output's RMS."""
        return max((c.comparison.relative_rms for c in self.cases if c.output == "O"), default=0.0)

    @property
    def of_limit(self) -> float | None:
        """The largest error of a gradient over its limit; None if there are no such limits."""
        found = (c.comparison.of_limit for c in self.cases)
        return max((share for share in found if share is not None), default=None)

    @property
    def worst_ratio(self) -> float | None:
        """The largest ratio of an error to the library's."""
        return max((c.ratio for c in self.cases if c.ratio is not None), default=None)

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        if self.missing and not self.offences:
            return f"not enough: {self.missing} (seed {self.seed})"
        if not self.ok:
            return f"rejected: {', '.join(o.name for o in self.offences)} (seed {self.seed})"
        how = "accepted under emulation" if self.emulated else "accepted"
        line = f"{how}: the largest rms error of O is {self.worst:.1e}"
        if self.of_limit is not None:
            line = f"{how}: the largest error of a gradient is {self.of_limit:.2f} of its limit"
        if self.worst_ratio is not None:
            line += f", at most {self.worst_ratio:.2f} times that of torch's flash backend"
        elif self.unable and not self.emulated:
            line += f" ({self.unable})"
        return f"{line}; seed {self.seed}"

    def __str__(self) -> str:
        asked = [f"  {_MARKS[c.passed]} {c.question}" for c in self.checks]
        offences = [f"  {o.name}: {o.message}" for o in self.offences]
        left = [f"  not reached: {goal}" for goal in self.unreached]
        head = f"{self.candidate} on {self.where}"
        return "\n".join([head, *asked, *left, self.headline, *offences])

    def _repr_html_(self) -> str:
        """For notebooks: the headline, what speaks against it, and every question."""
        tone = "good" if self.ok else "bad" if self.offences else "open"
        answers = {True: "yes", False: "no", None: "not asked"}
        asked = [(answers[c.passed], c.question, c.note or "") for c in self.checks]
        return (
            html.heading(f"{self.candidate} on {self.where}: {self.headline}", tone)
            + html.listed(f"{o.name}: {o.message}" for o in self.offences)
            + html.table(("passed", "question", "note"), asked)
            + html.listed(f"not reached: {goal}" for goal in self.unreached)
        )

    def record(self) -> dict[str, Any]:
        """The verdict as plain data: what `verify --json` prints and result.json holds."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "candidate": self.candidate,
            "device": self.device,
            "arch": self.arch,
            "spec": self.spec.model_dump(mode="json"),
            "own_spec": self.own_spec,
            "seed": self.seed,
            "offences": [
                {"name": o.name, "code": o.diagnostic.code, "message": o.message}
                for o in self.offences
            ],
            "checks": [vars(check) for check in self.checks],
            "cases": [case.record() for case in self.cases],
            "library": self.library,
            "unable": self.unable,
            "worst": self.worst if self.of_limit is None else None,
            **({} if self.of_limit is None else {"of_limit": self.of_limit}),
            "worst_ratio": self.worst_ratio,
            "picture": _picture(self.picture),
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "unreached": list(self.unreached),
            "missing": self.missing,
            **({"share": list(self.share)} if self.share else {}),
        }


def _picture(picture: Picture | None) -> dict[str, Any] | None:
    if picture is None:
        return None
    return {"dims": dict(picture.dims), "error": [list(row) for row in picture.error]}
