"""The request of `generate`: the spec from a variant or a description, options and a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwright.cli.command import variant_spec
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.formats.task import Task
    from flashwright.spec import AttentionSpec

SECONDS = 60.0


@dataclass(frozen=True)
class Request:
    """A spec, the description it comes from, and the file of its reference."""

    spec: AttentionSpec
    summary: str
    """One line that describes the variant."""
    description: str = ""
    """The user's description, or empty. It is data for a prompt, never an instruction."""
    reference: bytes | None = None
    """The content of the file that the spec's `reference` names."""
    task: Task | None = None
    """The task of a benchmark that it comes from."""


def read_request(variant: str, options: Mapping[str, Any], reference: str | None = None) -> Request:
    """The request of a command line. Raises Failed if the spec is invalid or ambiguous.

    `variant` is a name or a description. `reference` is `FILE.py` or `FILE.py:function`; with it a
    description may go beyond the settings of a spec, because the function defines the result.
    """
    from flashwright.author.llm.words import (
        combined,
        is_description,
        refuse_unknown,
        understand,
    )

    if not is_description(variant):
        return _with_reference(Request(*variant_spec(variant, options)), reference)
    found = combined(understand(variant), options)
    if reference is None:
        refuse_unknown(found)
    spec, summary = variant_spec(found.variant, found.spec_settings)
    return _with_reference(Request(spec, summary, variant), reference)


def request_of_task(file: Path, options: Mapping[str, Any]) -> Request:
    """The request of a benchmark's task. Of the options only types may be given, where the task
    leaves them open. Raises Failed if the task becomes no kernel."""
    from flashwright.formats.read import read

    task = read(file)
    given = {name: value for name, value in options.items() if value is not None}
    wrong = sorted(given.keys() - ({"dtype"} - task.options.keys()))
    if wrong:
        text = f"{file} says what to make: leave out {', '.join(wrong)}"
        raise Failed(Diagnostic("FW901", text))
    request = _with_own_reference(Request(*variant_spec(task.variant, {**task.options, **given})))
    return replace(
        request, summary=f"{request.summary}, for {task.name} of {task.format}", task=task
    )


def _with_reference(request: Request, reference: str | None) -> Request:
    """The request with a reference, tried on a small problem; else with the one that the variant
    needs, if it is no softmax."""
    if reference is None:
        return _with_own_reference(request)
    from flashwright.spec import BadSpec

    try:
        _try_out(reference, request.spec)
        return with_reference(request, reference)
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW903", line) for line in error.lines)) from None


def with_reference(request: Request, reference: str) -> Request:
    """The request with a reference, `FILE.py` or `FILE.py:function`: the package has it beside its
    spec. Raises BadSpec."""
    from flashwright.judge.reference import split
    from flashwright.spec import AttentionSpec

    file, function = split(reference)
    name = Path(file).name + (f":{function}" if function else "")
    spec = AttentionSpec.make(**{**request.spec.model_dump(), "reference": name})
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise cannot("read", Path(file), error) from None
    return replace(request, spec=spec, reference=text)


def _with_own_reference(request: Request) -> Request:
    from flashwright.author.builtin.variants import reference_of
    from flashwright.spec import BadSpec

    spec = request.spec
    try:
        text = reference_of(spec)
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", line) for line in error.lines)) from None
    if text is None:
        return request
    named = spec.model_copy(update={"reference": f"{spec.variant}.py"})
    return replace(request, spec=named, reference=text)


def _try_out(reference: str, spec: AttentionSpec) -> None:
    """Call the function on a small problem, in a separate process with a time limit."""
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
