"""The signature of an exported function: that of the package's torch operator."""

from __future__ import annotations

import keyword
from typing import TYPE_CHECKING

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan

if TYPE_CHECKING:
    from flashwright.pytorch.signature import Signature

_TAKEN = {"found", "outputs", "return_lse"}  # names in the generated functions


def signature_of(plan: LaunchPlan) -> Signature:
    """The signature. Raises Failed with FW852 without PyTorch, or if the kernel has none."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        text = f"this form is for PyTorch, which cannot be imported ({error})"
        hint = "pip install 'flashwright[torch]'"
        raise Failed(Diagnostic("FW852", text, help=hint)) from None
    from flashwright.pytorch.signature import Signature

    found = Signature(plan, in_place=True)
    for name in found.arguments:
        if keyword.iskeyword(name) or name in _TAKEN:
            text = f"launch.json: `{name}` cannot be the name of an argument in Python"
            hint = "give the tensor or the dim another name in code.tl, and build it again"
            raise Failed(Diagnostic("FW852", text, help=hint))
    return found


def dims_text(signature: Signature) -> str:
    """The dims that a caller gives by name, as a Python dict."""
    return "{" + ", ".join(f'"{name}": {name}' for name in signature.dims) + "}"
