"""What `generate` is asked for: a variant or a description, its options, and a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwright.cli.command import variant_spec
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.spec import AttentionSpec

SECONDS = 60.0


@dataclass(frozen=True)
class Asked:
    """A spec, and what came with it."""

    spec: AttentionSpec
    summary: str
    """What the variant is in words."""
    description: str = ""
    """The user's own words, where there are any: data, never an instruction."""
    reference: bytes | None = None
    """The file that the spec's `reference` names."""


def asked(variant: str, options: Mapping[str, Any], reference: str | None = None) -> Asked:
    """The spec that is meant; Failed where it cannot be told for certain.

    `variant` is a name or a description. `reference` is `FILE.py` or `FILE.py:function`; with it a
    description may say what no setting does, because the function says what is right.
    """
    from flashwright.author.llm.words import (
        combined,
        is_description,
        refuse_unknown,
        understand,
    )

    if not is_description(variant):
        return _with_reference(Asked(*variant_spec(variant, options)), reference)
    found = combined(understand(variant), options)
    if reference is None:
        refuse_unknown(found)
    spec, summary = variant_spec(found.variant, found.spec_settings)
    return _with_reference(Asked(spec, summary, variant), reference)


def _with_reference(meant: Asked, reference: str | None) -> Asked:
    """The spec names the file as it will lie beside it. It is called now, to fail early."""
    if reference is None:
        return meant
    from flashwright.judge.reference import split
    from flashwright.spec import AttentionSpec, BadSpec

    file, function = split(reference)
    name = Path(file).name + (f":{function}" if function else "")
    try:
        spec = AttentionSpec.make(**{**meant.spec.model_dump(), "reference": name})
        _try_out(reference, meant.spec)
        text = Path(file).read_bytes()
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None
    return replace(meant, spec=spec, reference=text)


def _try_out(reference: str, spec: AttentionSpec) -> None:
    """One small call, in a process of its own: a function may come to no end."""
    from flashwright.confine import isolate
    from flashwright.judge.reference import MEMORY
    from flashwright.judge.reference_process import try_out

    try:
        isolate.call(try_out, reference, spec, seconds=SECONDS, memory=MEMORY)
    except Failed as failed:
        if all(d.code != "FW806" for d in failed.diagnostics):
            raise
        text = f"{reference}, on a small problem: {failed.diagnostics[0].message}"
        raise Failed(Diagnostic("FW903", text)) from None
