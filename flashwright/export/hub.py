"""A package of Hugging Face's `kernels`: the noarch variant for CUDA, its kernels as data.

The variant is pure Python, so one folder serves all versions of Python and PyTorch, and all hosts.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from flashwright.export import package as packages
from flashwright.export.package import ExportedPackage
from flashwright.export.signature import dims_text, signature_of
from flashwright.export.write import Files
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.pytorch.signature import Signature

VARIANT = "build/torch-cuda"
LAUNCH = "launch.py"
VERSION = 1
LICENSE = "Apache-2.0"
"""That of launch.py and of the headers in the kernel; `kernels` asks for one."""

_INIT = '''\
"""Attention: {title}.

A kernel for {arch}, exported by Flashwright {version}. `launch.py` launches it through the CUDA
driver; nothing is compiled here, and Flashwright is not needed.
"""

import json
from pathlib import Path

import torch

from .launch import Kernels

__all__ = ["attention"]

_FOLDER = Path(__file__).parent
_KERNELS = Kernels(
    json.loads((_FOLDER / "kernels.json").read_text()), lambda name: (_FOLDER / name).read_bytes()
)


@torch.library.custom_op(
    "{namespace}::attention",
    mutates_args=({changed}),
    schema="{schema}",
)
def _attention({arguments}):
    outputs = _KERNELS.empty([{inputs}], {dims})
    _KERNELS.launch([{inputs}], outputs, {dims})
    return {result}


@_attention.register_fake
def _empty({arguments}):
    outputs = _KERNELS.empty([{inputs}], {dims})
    return {result}


def attention({arguments}{options}):
    """{summary}

    Tensors are on a CUDA device. README.md lists their axes; any strides will do whose last one
    is 1. Runs on the current stream. torch.compile keeps it whole. There is no backward: a
    gradient through it is an error.
    """
    found = _attention({arguments})
    return {returned}
'''

_CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# {name}

Attention: {title}. A kernel for {arch}, exported by
Flashwright {version}.

```python
from pathlib import Path

from kernels import get_local_kernel

kernel = get_local_kernel(Path("FOLDER"))  # on the Hub: get_kernel("USER/{name}", version=1)
out = kernel.attention({arguments})
```

| argument | is | type | axes |
|---|---|---|---|
{table}

The kernel runs on GPUs of compute capability {capability}. The folder holds all that a call needs:
`launch.py` launches the compiled kernel through the CUDA driver (libcuda.so.1) with ctypes, by the
launch plan in `kernels.json`. It depends on PyTorch alone, and not on Flashwright.

There is no backward. The launch is written in Python, which costs the host more than a compiled
launcher does: it shows where kernels are short. A CUDA graph removes that cost.

License: Apache 2.0 is that of `launch.py` and of Flashwright's headers in the kernel. Change the
card and `metadata.json` if your kernel has another.
"""


def files(package: ExportedPackage) -> Files:
    """All files of the export. Raises Failed with FW852 if the kernel is no function."""
    signature = signature_of(package.plan)
    named = packages.arguments_of(signature.inputs, package.plan)
    python: dict[str, str | bytes] = {
        "__init__.py": _init(package, signature),
        LAUNCH: resources.files("flashwright.export").joinpath(LAUNCH).read_text("utf-8"),
        "kernels.json": json.dumps(package.launch_data(named), indent=1) + "\n",
        "metadata.json": _metadata(package),
        **package.files(),
    }
    inside = {f"{VARIANT}/{name}": data for name, data in python.items()}
    return {"README.md": _card(package, signature), **inside}


def summary(package: ExportedPackage, target: Path) -> str:
    """How to load the export, in one line."""
    return f"kernels.get_local_kernel(pathlib.Path({str(target)!r})).attention(...)"


def _init(package: ExportedPackage, signature: Signature) -> str:
    outputs, changed = signature.outputs, signature.changed
    lse = len(outputs) == 2 and outputs[1] == "LSE"
    result = {0: "None", 1: "outputs[0]"}.get(len(outputs), "tuple(outputs)")
    summary = ", ".join(outputs) or f"Changes {' and '.join(changed)}"
    if lse:
        summary = f"{outputs[0]}, or {outputs[0]} and LSE with `return_lse`"
    return _INIT.format(
        title=package.title,
        arch=package.plan.arch,
        version=__version__,
        namespace=f"flashwright_{package.digest}",
        schema=signature.schema(""),
        arguments=", ".join(signature.arguments),
        inputs=", ".join(signature.inputs),
        dims=dims_text(signature),
        changed="".join(f'"{name}", ' for name in changed).rstrip(),
        result=result,
        options=", *, return_lse=False" if lse else "",
        summary=f"{summary}.",
        returned="found if return_lse else found[0]" if lse else "found",
    )


def _metadata(package: ExportedPackage) -> str:
    told = {
        "id": f"_{package.name.replace('-', '_')}_cuda_{package.digest}",
        "name": package.name,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [packages.capability(package)]},
    }
    return json.dumps(told, indent=2) + "\n"


def _card(package: ExportedPackage, signature: Signature) -> str:
    plan = package.plan
    named = packages.arguments_of(signature.inputs, plan)
    tensors = [t for t in package.launch_data(named)["tensors"] if not t["scratch"]]
    rows = []
    for tensor in sorted(tensors, key=lambda t: not t["read"]):
        axes = [
            " * ".join(" ".join(map(str, tensor["axes"][p]["size"])) for p in parts)
            for parts in tensor["order"]
        ]
        kind = "input" if tensor["read"] else "output"
        kind += ", changed in place" if tensor["read"] and tensor["written"] else ""
        rows.append(f"| `{tensor['argument']}` | {kind} | {tensor['dtype']} | {', '.join(axes)} |")
    rows += [f"| `{name}` | size | int | |" for name in signature.dims]
    return _CARD.format(
        name=package.name,
        title=package.title,
        arch=plan.arch,
        version=__version__,
        arguments=", ".join(signature.arguments),
        table="\n".join(rows),
        capability=packages.capability(package),
    )
