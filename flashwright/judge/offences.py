"""The offences by name: what each is, and the code under which it is explained.

The names are stable: tests, receipts and prompts rely on them. An offence that is found is a
verdict on the candidate; what cannot be asked here is none, and is said as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flashwright.judge.verdict import Offence
from flashwright.lang.diagnostic import Diagnostic

CODES: Mapping[str, str] = MappingProxyType(
    {
        # what comes out
        "wrong": "FW853",
        "zeros": "FW861",
        "nonfinite": "FW862",
        "unwritten": "FW863",
        "wrong_form": "FW864",
        "low_precision": "FW854",
        "approximation": "FW882",
        "not_repeatable": "FW855",
        # right only where one would look
        "special_inputs": "FW865",
        "special_shapes": "FW866",
        "mask_ignored": "FW867",
        "key_ignored": "FW868",
        "replay": "FW869",
        # what it does beside its work
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
        # what cannot be said
        "untried": "FW881",
    }
)


def offence(name: str, message: str, help: str | None = None) -> Offence:
    """An offence, with the diagnostic that shows it."""
    return Offence(name, message, Diagnostic(CODES[name], f"{name}: {message}", help=help))


def hazard(kind: str, diagnostic: Diagnostic) -> Offence:
    """What the emulator found, by its kind (emulate.py has them); `unwritten` is an output's."""
    name = "unwritten_read" if kind == "unwritten" else kind
    return Offence(name, diagnostic.message.removeprefix(f"{kind}: "), diagnostic)


def once(found: Sequence[Offence]) -> tuple[Offence, ...]:
    """Each name once, with the first thing seen."""
    return tuple({o.name: o for o in reversed(found)}.values())[::-1]
