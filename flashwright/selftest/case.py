"""A case of the self-test: a kernel, its spec, and the verdict that the judge must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from flashwright.sandbox.candidate import Candidate
from flashwright.sandbox.limits import Limits
from flashwright.spec import AttentionSpec

KERNELS = "flashwright.selftest.kernels"
HONEST = "honest"
CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "output": "an output that is wrong, incomplete or in another form",
        "precision": "arithmetic in a narrower type than asked for",
        "inputs": "right for the usual inputs only",
        "shapes": "right for the usual shapes only",
        "mask": "another mask, other heads or other batches",
        "sequences": "takes a sequence to begin, end or lie elsewhere",
        "replay": "an earlier answer given again",
        "library": "a library does the work",
        "memory": "touches memory that is not its own",
        "hidden": "work that is not done when the call ends",
        "end": "no regular end of a call",
        "forgery": "forged answers and files between worker and judge",
        "search": "looks for the answer instead of computing it",
        "process": "reaches for the judge's process",
        "system": "reaches for the network or the system",
        "files": "reaches for files that are not its own",
        "package": "a kernel package that is not what it says",
        "source": "CUDA source that reaches beyond its kernel",
        "receipt": "a benchmark's file with changed numbers",
        "timing": "fast only because the timer is misled",
        HONEST: "an honest kernel, which must be accepted",
    }
)
"""Classes of cases by the name that `--class` takes."""

Place = Literal["cpu", "gpu"]
How = Literal["judge", "emulated", "timed", "screen", "receipt", "own"]


@dataclass(frozen=True)
class SelftestCase:
    """One kernel or file that the judge must reject under a name, or accept."""

    on: Place
    function: str
    """The function that is judged, or that makes the package, source or receipt."""
    kind: str
    """Its class: a key of CLASSES."""
    module: str
    """The module under kernels/, or the module that has the function."""
    spec: AttentionSpec | None
    expected: tuple[str, ...] = ()
    """Offences or codes, one of which the judge must report; empty: it must accept the case."""
    says: str = ""
    """A text that the offence's message must contain."""
    label: str = ""
    """Its name, if the function's name is not unique."""
    lengths: Sequence[tuple[int, int]] | None = None
    """Queries and keys of its problems; None: the whole trial."""
    limits: Limits = field(default_factory=Limits)
    libraries: bool = False
    factory: bool = False
    how: How = "judge"
    needs: tuple[str, ...] = ()
    """Requirements besides a GPU, by their names in needs.py."""

    @property
    def name(self) -> str:
        """Such as `cpu/zeros`; no two cases share one."""
        return f"{self.on}/{self.label or self.function}"

    @property
    def honest(self) -> bool:
        """Whether it must be accepted."""
        return not self.expected

    @property
    def whole(self) -> bool:
        """Whether it has the whole trial."""
        return self.how in ("judge", "own", "emulated") and self.lengths is None

    @property
    def alone(self) -> bool:
        """Whether no other case may run at the same time: it is timed, or it uses the whole GPU."""
        return self.how == "timed" or (self.on == "gpu" and self.kind == "end")

    @property
    def candidate(self) -> Candidate:
        """The candidate of this case, for the judge."""
        where = f"{KERNELS}.{self.module}"
        return Candidate("python", where, self.function, factory=self.factory, title=self.name)
