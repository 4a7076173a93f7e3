"""What a study was asked for, kept in its folder: the same command goes on, another is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashwright.files import cannot, write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec
from flashwright.study.operators import Operator
from flashwright.study.sample import Sample, Terms
from flashwright.study.ways import WAYS, Way
from flashwright.version import __version__

FILE = "settings.json"
SCHEMA = 1


class OtherStudy(Exception):
    """A folder with a study under other terms; the message says what differs."""


@dataclass(frozen=True)
class Settings:
    """Who is studied, under which terms, and the samples that are asked for."""

    model: str
    gpu: str
    terms: Mapping[str, Any]
    """What else must be the same for samples to be counted together."""
    operators: tuple[Operator, ...]
    ways: tuple[Way, ...]
    samples: int

    @classmethod
    def of(
        cls,
        model: str,
        terms: Terms,
        operators: Sequence[Operator],
        ways: Sequence[Way],
        samples: int,
    ) -> Settings:
        """From what is asked for now."""
        told = {
            "budget": asdict(terms.budget),
            "translation": "builtin" if terms.builtin_translation else "model",
            "last": terms.last,
        }
        return cls(model, terms.gpu.name, told, tuple(operators), tuple(ways), samples)

    @property
    def every(self) -> list[Sample]:
        """All samples, the first of each kind first: a study that is cut off has some of all."""
        return [
            Sample(operator, way, number)
            for number in range(1, self.samples + 1)
            for operator in self.operators
            for way in self.ways
        ]

    def record(self) -> dict[str, Any]:
        """The settings as JSON-compatible data."""
        return {
            "schema": SCHEMA,
            "flashwright": __version__,
            "model": self.model,
            "gpu": self.gpu,
            "terms": dict(self.terms),
            "operators": {o.name: o.spec.model_dump(mode="json") for o in self.operators},
            "ways": [way.name for way in self.ways],
            "samples": self.samples,
        }

    def keep(self, root: Path) -> Settings:
        """Write them, together with those of an earlier part of the same study.

        OtherStudy where the folder has another one. What is returned is all that there is.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot("use", root, error) from None
        whole = self._with(read(root)) if (root / FILE).exists() else self
        write(root / FILE, json.dumps(whole.record(), indent=1) + "\n")
        return whole

    @property
    def _fixed(self) -> dict[str, Any]:
        """All that has to be the same for samples to be counted together, by the options' names."""
        terms = dict(self.terms)
        budget = terms.pop("budget", {})
        return {"model": self.model, "gpu": self.gpu, **terms, **budget}

    def _with(self, before: Settings) -> Settings:
        mine, other = self._fixed, before._fixed
        for name in dict.fromkeys((*mine, *other)):
            if mine.get(name) != other.get(name):
                was, now = (f[name] if f.get(name) is not None else "none" for f in (other, mine))
                raise OtherStudy(f"its {name} was {was} and is {now}")
        operators = {o.name: o for o in before.operators}
        for operator in self.operators:
            if operators.setdefault(operator.name, operator).spec != operator.spec:
                raise OtherStudy(f"{operator.name} was another operator")
        ways = tuple(dict.fromkeys((*before.ways, *self.ways)))
        samples = max(before.samples, self.samples)
        every = tuple(operators.values())
        return Settings(self.model, self.gpu, self.terms, every, ways, samples)


def read(root: Path) -> Settings:
    """Those of a study's folder; Failed with FW903 where it has none."""
    if not (root / FILE).exists():
        text = f"{root} is no study: it has no {FILE}"
        hint = "give the folder that `flashwright study --out DIR` made"
        raise Failed(Diagnostic("FW903", text, help=hint))
    try:
        told = json.loads((root / FILE).read_bytes())
        operators = [
            Operator(name, AttentionSpec.model_validate(spec))
            for name, spec in told["operators"].items()
        ]
        ways = [WAYS[name] for name in told["ways"]]
        known = (str(told["model"]), str(told["gpu"]), dict(told["terms"]))
        return Settings(*known, tuple(operators), tuple(ways), int(told["samples"]))
    except OSError as error:
        raise cannot("read", root / FILE, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"{root / FILE} is not one that this version can read"
        raise Failed(Diagnostic("FW903", text)) from None
