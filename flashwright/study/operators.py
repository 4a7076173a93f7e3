"""The operators of a study: variants by name, or the tables of a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.author.builtin.variants import UnknownVariant, make_spec
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.spec import AttentionSpec, BadSpec

USUAL = "mha,gqa,mqa,mla"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


@dataclass(frozen=True)
class Operator:
    """One operator, and the name of its folder in the study."""

    name: str
    spec: AttentionSpec


def chosen(text: str) -> tuple[Operator, ...]:
    """`mha,gqa`, or the tables of a TOML file, each an operator with the settings of its spec:

        [gqa-causal]
        variant = "gqa"
        causal = true

    Raises Failed if an operator is invalid.
    """
    if text.endswith(".toml"):
        return _different(_of_file(Path(text)))
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Failed(Diagnostic("FW902", "a study needs an operator", help=f"such as {USUAL}"))
    return _different(_made(name.lower(), {"variant": name}) for name in names)


def _of_file(path: Path) -> Iterable[Operator]:
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise cannot("read", path, error) from None
    except (ValueError, RecursionError) as error:
        raise Failed(Diagnostic("FW903", f"{path}: not valid TOML: {error}")) from None
    tables = {name: value for name, value in data.items() if isinstance(value, dict)}
    if not tables or len(tables) < len(data):
        hint = 'such as [gqa-causal], then variant = "gqa" and causal = true'
        raise Failed(Diagnostic("FW903", f"{path}: give each operator a table", help=hint))
    return [_made(name, settings) for name, settings in tables.items()]


def _made(name: str, settings: Mapping[str, Any]) -> Operator:
    if not _NAME.fullmatch(name):  # it becomes a folder name
        text = f"{name[:64]!r} is not a name: use letters, digits, '_', '-', '.' or '+'"
        raise Failed(Diagnostic("FW903", text))
    unknown = sorted(set(settings) - set(AttentionSpec.model_fields))
    if "reference" in settings or unknown:
        which = unknown[0] if unknown else "reference"
        raise Failed(Diagnostic("FW903", f"{name}: an operator of a study has no {which!r}"))
    try:
        return Operator(name, make_spec(**{"variant": name, **settings}))
    except UnknownVariant as error:
        raise Failed(Diagnostic("FW902", str(error), help="see `flashwright variants`")) from None
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", f"{name}: {line}") for line in error.lines)) from None


def _different(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Refuse duplicate names, ignoring case as some file systems do."""
    found: dict[str, Operator] = {}
    for operator in operators:
        if operator.name.lower() in found:
            raise Failed(Diagnostic("FW903", f"the operator {operator.name} is there twice"))
        found[operator.name.lower()] = operator
    return tuple(found.values())
