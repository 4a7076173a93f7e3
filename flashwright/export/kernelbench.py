"""KernelBench: the task's file with a class ModelNew, whose attention is the kernel.

The kernel is CUDA source, which PyTorch compiles when the file is imported. What is around the
attention stays as the task has it, operator by operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashwright.build.compile import FLAGS, target
from flashwright.build.toolchain import CUTLASS
from flashwright.export.package import ExportedPackage
from flashwright.export.torch_extension import FUNCTION, kernel_for, source
from flashwright.export.write import Files
from flashwright.formats import task as tasks
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.version import __version__

FILE = "model_new.py"
_FILE = '''\
"""{name} of KernelBench with a kernel by Flashwright {version}: {title}; {arch}.

It is compiled by nvcc when this file is imported. Set CUTLASS_PATH to the folder with `cute/` and
`cutlass/`, or install {cutlass}. The kernel computes in {dtype}, whatever the type of its inputs.
"""

{task}


# --- the kernel -------------------------------------------------------------------------------

import importlib.util  # noqa: E402
import os  # noqa: E402

import torch  # noqa: E402
from torch.utils.cpp_extension import load_inline  # noqa: E402

SOURCE = r"""
{source}
"""


def cutlass_headers():
    """The folder with CuTe's headers."""
    package = importlib.util.find_spec("cutlass_library")
    installed = os.path.join(os.path.dirname(package.origin), "source") if package else ""
    for place in (os.environ.get("CUTLASS_PATH", ""), installed):
        for folder in (place, os.path.join(place, "include")):
            if place and os.path.isdir(os.path.join(folder, "cute")):
                return folder
    text = "CUTLASS's headers are not here: set CUTLASS_PATH, or install"
    raise RuntimeError(f"{{text}} {cutlass}")


KERNEL = load_inline(
    name="flashwright_{digest}",
    cpp_sources="at::Tensor {function}(at::Tensor q, at::Tensor k, at::Tensor v);",
    cuda_sources=SOURCE,
    functions=["{function}"],
    extra_cuda_cflags={flags!r},
    extra_include_paths=[cutlass_headers()],
)


def attention(q, k, v, transposed):
    """O of Q, K and V (batch, heads, length, dim), or of (batch * heads, length, dim)."""
    k = k.transpose(-2, -1) if transposed else k
    if q.dim() == 4:
        return KERNEL.{function}(q, k, v)
    return KERNEL.{function}(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)


class ModelNew(Model):
    """The task's model; its parameters are the same."""

    def forward(self, {arguments}):
{steps}
        return {result}
'''


def files(package: ExportedPackage) -> Files:
    """model_new.py. Raises Failed with FW852 if the package was not made for such a task."""
    task = tasks.load(package.folder, tasks.KERNELBENCH)
    kernel = kernel_for(package, task.keys)
    device = f"{task.arguments[0]}.device"
    build = FLAGS[: FLAGS.index("-Xptxas")]  # PyTorch adds the C++ version that its headers need
    flags = [flag for flag in build if not flag.startswith("-std=")]
    flags += target(kernel.plan.arch, kernel.plan.arch)
    text = _FILE.format(
        name=task.name,
        version=__version__,
        title=package.title,
        arch=kernel.plan.arch,
        cutlass=CUTLASS,
        dtype=kernel.plan.tensors[0].dtype,
        task=task.source.strip(),
        source=source(package, kernel),
        digest=package.digest,
        function=FUNCTION,
        flags=flags,
        arguments=", ".join(task.arguments),
        steps="\n".join(f"        {line(step, device)}" for step in task.steps),
        result=task.result,
    )
    try:
        compile(text, FILE, "exec")
    except SyntaxError as error:
        why = f"{package.folder}: {FILE} would be no Python: line {error.lineno}: {error.msg}"
        raise Failed(Diagnostic("FW852", why, help="generate the package again")) from None
    return {FILE: text}


def summary(package: ExportedPackage, target: Path) -> str:
    """How to try the export, in one line."""
    return (
        f"KernelBench: scripts/run_and_check.py ... kernel_src_path={target / FILE} precision=fp16"
    )


def line(step: Mapping[str, Any], device: str) -> str:
    """A step as a line of Python."""
    operator, arguments = str(step["operator"]), [_python(x, device) for x in step["args"]]
    if operator == "getitem":
        return f"{step['name']} = {arguments[0]}[{arguments[1]}]"
    if operator == "attribute":
        return f"{step['name']} = {_attribute(str(step['args'][0]))}"
    if operator == "constant":
        made = step["args"][0]
        values = json.dumps(made["tensor"])
        return (
            f"{step['name']} = torch.tensor({values}, dtype=torch.{made['dtype']}, device={device})"
        )
    arguments += [f"{name}={_python(x, device)}" for name, x in step["kwargs"].items()]
    if operator == "attention":
        return f"{step['name']} = attention({', '.join(arguments)})"
    # A view of the task's own result may be none of the kernel's, whose strides may differ.
    operator = "aten.reshape.default" if operator == "aten.view.default" else operator
    return f"{step['name']} = torch.ops.{operator}({', '.join(arguments)})"


def _attribute(where: str) -> str:
    """A parameter or buffer, by its path in the module."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", where):
        return f"self.{where}"
    head, _, last = where.rpartition(".")
    return f"getattr(self.get_submodule({head!r}), {last!r})"


def _python(x: Any, device: str) -> str:
    """An argument of a step as Python."""
    if isinstance(x, list):
        return f"[{', '.join(_python(one, device) for one in x)}]"
    if not isinstance(x, dict):
        return repr(x)
    ((kind, value),) = x.items()
    if kind == "float":
        return f'float("{value}")'
    return {"step": str(value), "torch": f"torch.{value}", "device": device}[kind]
