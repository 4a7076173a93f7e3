"""robust-kbench: one .cu file with a function `forward`, which takes what forward_fn takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashwright.export.package import ExportedPackage, capability
from flashwright.export.torch_extension import FUNCTION, kernel_for, source
from flashwright.export.write import Files
from flashwright.formats import task as tasks
from flashwright.lang.diagnostic import Diagnostic, Failed

FILE = "forward.cu"
_BINDING = """\
{source}
// What forward_fn of {name} computes.
at::Tensor forward({arguments}) {{
{steps}
  return {result};
}}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("forward", &forward, "{name}"); }}
"""
_METHODS = {"view": "reshape", "reshape": "reshape", "contiguous": "contiguous"}
_METHODS |= {name: name for name in ("transpose", "permute", "unsqueeze", "squeeze", "select")}
_METHODS |= {name: name for name in ("split", "unbind", "unflatten", "chunk")}
_FUNCTIONS = {"linear", "matmul", "add", "mul", "div"}


def files(package: ExportedPackage) -> Files:
    """forward.cu. Raises Failed with FW852 if the package was not made for such a task, or if an
    operator around its attention has no line in C++."""
    task = tasks.load(package.folder, tasks.ROBUST_KBENCH)
    kernel = kernel_for(package, task.keys)
    steps = [_line(step, package) for step in task.steps]
    text = _BINDING.format(
        source=source(package, kernel),
        name=task.name.replace('"', ""),
        arguments=", ".join(f"at::Tensor {name}" for name in task.arguments),
        steps="\n".join(f"  {step}" for step in steps),
        result=task.result,
    )
    return {FILE: text}


def summary(package: ExportedPackage, target: Path) -> str:
    """How to try the export, in one line."""
    arch = capability(package).partition("+")[0]
    return f"robust-kbench: TORCH_CUDA_ARCH_LIST={arch}, and {target / FILE} as forward.cu"


def _line(step: Mapping[str, Any], package: ExportedPackage) -> str:
    """A step as a line of C++."""
    operator, name = str(step["operator"]), f"auto {step['name']}"
    arguments = [_cpp(x) for x in step["args"]]
    if operator == "getitem":
        return f"{name} = {arguments[0]}[{arguments[1]}];"
    if operator == "attention":
        q, k, v, transposed = arguments
        k = f"{k}.transpose(-2, -1)" if transposed == "true" else k
        return f"{name} = {FUNCTION}({q}, {k}, {v});"
    plain = operator.split(".")[1] if operator.startswith("aten.") else operator
    if not step["kwargs"] and plain in _METHODS:
        return f"{name} = {arguments[0]}.{_METHODS[plain]}({', '.join(arguments[1:])});"
    if not step["kwargs"] and plain in _FUNCTIONS:
        return f"{name} = at::{plain}({', '.join(arguments)});"
    text = f"{package.folder}: forward_fn calls `{operator}`, which has no line in C++ here"
    known = ", ".join(sorted({*_METHODS, *_FUNCTIONS}))
    raise Failed(Diagnostic("FW852", text, help=f"there are {known}"))


def _cpp(x: Any) -> str:
    """An argument of a step as C++."""
    if isinstance(x, list):
        return f"{{{', '.join(map(_cpp, x))}}}"
    if isinstance(x, dict):
        found: Callable[[str], str] = {"step": str}.get(next(iter(x)), lambda _: "at::nullopt")
        return found(str(next(iter(x.values()))))
    if isinstance(x, bool):
        return str(x).lower()
    return "{}" if x is None else repr(x)
