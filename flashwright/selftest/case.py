"""What one case of the self-test is: a kernel, what is asked of it, and what the judge must say."""

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
class Case:
    """One kernel or file that the judge must reject under a name, or accept."""

    on: Place
    function: str
    """Of its module, or of the module that makes what is judged."""
    kind: str
    """Its class: a key of CLASSES."""
    module: str
    """Under kernels/; for other ways of running, where the function is looked up."""
    spec: AttentionSpec | None
    expected: tuple[str, ...] = ()
    """Offences or codes of which one must be named; empty: it must be accepted."""
    says: str = ""
    """Words that the offence's message must have."""
    label: str = ""
    """Its name, where the function's is not enough."""
    lengths: Sequence[tuple[int, int]] | None = None
    """Queries and keys of its problems; None: the whole trial."""
    limits: Limits = field(default_factory=Limits)
    libraries: bool = False
    factory: bool = False
    how: How = "judge"
    needs: tuple[str, ...] = ()
    """What has to be there, beside a GPU for those that run on one: needs.py has the names."""

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
        """Whether nothing may run beside it: it is timed, or it takes all of the GPU."""
        return self.how == "timed" or (self.on == "gpu" and self.kind == "end")

    @property
    def candidate(self) -> Candidate:
        """The candidate of this case, for the judge."""
        where = f"{KERNELS}.{self.module}"
        return Candidate("python", where, self.function, factory=self.factory, title=self.name)
