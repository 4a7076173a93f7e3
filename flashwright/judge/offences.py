"""The offences by name, each with the code that explains it.

The names are stable: tests, receipts and prompts rely on them. A question that cannot be asked on
this machine is no offence; the verdict lists it as not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flashwright.judge.verdict import Offence
from flashwright.lang.diagnostic import Diagnostic

CODES: Mapping[str, str] = MappingProxyType(
    {
        # the outputs
        "wrong": "FW853",
        "zeros": "FW861",
        "nonfinite": "FW862",
        "unwritten": "FW863",
        "wrong_form": "FW864",
        "low_precision": "FW854",
        "approximation": "FW882",
        "not_repeatable": "FW855",
        # special cases: right only on some inputs or shapes
        "special_inputs": "FW865",
        "special_shapes": "FW866",
        "mask_ignored": "FW867",
        "key_ignored": "FW868",
        "replay": "FW869",
        # side effects
        "library_call": "FW870",
        "inputs_changed": "FW871",
        "out_of_bounds": "FW872",
        "race": "FW873",
        "hidden_work": "FW874",
        "tampering": "FW875",
        "too_fast": "FW876",
        # how it ends
        "raises": "FW856",
        "hang": "FW877",
        "crash": "FW878",
        "device_error": "FW879",
        "out_of_memory": "FW880",
        # not tried
        "untried": "FW881",
    }
)


def offence(name: str, message: str, help: str | None = None) -> Offence:
    """An offence and its diagnostic."""
    return Offence(name, message, Diagnostic(CODES[name], f"{name}: {message}", help=help))


def hazard(kind: str, diagnostic: Diagnostic) -> Offence:
    """The offence of an emulator's finding. Its kind `unwritten` becomes `unwritten_read`, as the
    offence `unwritten` is about outputs."""
    name = "unwritten_read" if kind == "unwritten" else kind
    return Offence(name, diagnostic.message.removeprefix(f"{kind}: "), diagnostic)


def once(found: Sequence[Offence]) -> tuple[Offence, ...]:
    """The first offence of each name, in order."""
    return tuple({o.name: o for o in reversed(found)}.values())[::-1]
