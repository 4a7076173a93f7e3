"""Programs on their way through the translator, for its tests."""

from __future__ import annotations

from flashwright import gpu as gpus
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower import ir
from flashwright.lower.frontend.lowering import lower
from flashwright.lower.translate import schedule, translate
from tests.unit.tl_attention import program


def printed(text: str, gpu: str = "a100", strict: bool = True) -> str:
    """The kernel of a program."""
    return translate(program(text, strict), gpus.find(gpu)).source


def scheduled(text: str, gpu: str = "a100", strict: bool = True) -> tuple[ir.Statement, ...]:
    """The body of a kernel as it is printed."""
    made = program(text, strict)
    return schedule(made, gpus.find(gpu), lower(made).body)


def refusal(text: str, gpu: str = "a100") -> Diagnostic:
    """Why a program is not translated."""
    try:
        printed(text, gpu, strict=False)
    except Failed as failed:
        (found,) = failed.diagnostics
        return found
    raise AssertionError("it is translated")
