"""The settings of a study, kept in its folder: the same settings resume it, others are refused."""

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
from flashwright.study.sample import Sample, StudyTerms
from flashwright.study.ways import WAYS, Way
from flashwright.version import __version__

FILE = "settings.json"
SCHEMA = 1


class OtherStudy(Exception):
    """The folder has a study with other settings; the message says what differs."""


@dataclass(frozen=True)
class Settings:
    """The model, the terms and the samples of a study."""

    model: str
    gpu: str
    terms: Mapping[str, Any]
    """Other settings that must be equal for samples to be counted together."""
    operators: tuple[Operator, ...]
    ways: tuple[Way, ...]
    samples: int

    @classmethod
    def of(
        cls,
        model: str,
        terms: StudyTerms,
        operators: Sequence[Operator],
        ways: Sequence[Way],
        samples: int,
    ) -> Settings:
        """The settings from the command's arguments."""
        data = {
            "budget": asdict(terms.budget),
            "translation": "builtin" if terms.builtin_translation else "model",
            "last": terms.last,
        }
        return cls(model, terms.gpu.name, data, tuple(operators), tuple(ways), samples)

    @property
    def every(self) -> list[Sample]:
        """All samples, round-robin over operators and ways, so a partial study has some of each."""
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
        """Merge with the settings in the folder, write them, and return the merged settings.

        Raises OtherStudy if the folder has a study with other settings.
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
        """All settings that must be equal for samples to be counted together, by option name."""
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
    """The settings of a study's folder. Raises Failed with FW903 if it has none."""
    if not (root / FILE).exists():
        text = f"{root} is not a study: it has no {FILE}"
        hint = "give the folder that `flashwright study --out DIR` made"
        raise Failed(Diagnostic("FW903", text, help=hint))
    try:
        data = json.loads((root / FILE).read_bytes())
        operators = [
            Operator(name, AttentionSpec.model_validate(spec))
            for name, spec in data["operators"].items()
        ]
        ways = [WAYS[name] for name in data["ways"]]
        known = (str(data["model"]), str(data["gpu"]), dict(data["terms"]))
        return Settings(*known, tuple(operators), tuple(ways), int(data["samples"]))
    except OSError as error:
        raise cannot("read", root / FILE, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        text = f"{root / FILE} cannot be read by this version"
        raise Failed(Diagnostic("FW903", text)) from None
