"""The kernel as CUDA source that PyTorch compiles: one file, without its binding."""

from __future__ import annotations

import re
from importlib import resources

from flashwright.build.load import dim_sources
from flashwright.build.plan_rules import LAYOUTS, caller_order
from flashwright.export.header import grid_lines, headers, host_text, indented, map_line
from flashwright.export.package import ExportedKernel, ExportedPackage
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import COUNTER, LaunchPlan
from flashwright.version import __version__

FUNCTION = "attention_of"
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](fw/[\w.]+)[>"][^\n]*$', re.MULTILINE)
_TENSORS = ["Q", "K", "V", "O"]
_TYPES = {"fp16": "kHalf", "bf16": "kBFloat16"}


def kernel_for(package: ExportedPackage, keys: int) -> ExportedKernel:
    """The package's kernel for so many keys. Raises Failed with FW852 for one whose tensors an
    extension does not take."""
    rule = next(r for r in package.rules.rules if r.up_to is None or keys <= r.up_to)
    kernel = package.kernels.get(rule.kernel)
    if kernel is None or package.steps is not None:
        raise _refused(package, "each of its calls launches several kernels")
    plan = kernel.plan
    own = all(
        not t.flat
        and not t.fragments
        and caller_order(t, LAYOUTS[0]) == tuple((i,) for i in range(len(t.axes)))
        for t in plan.tensors
    )
    if [t.name for t in plan.tensors] != _TENSORS or not own:
        found = ", ".join(t.name for t in plan.tensors)
        raise _refused(package, f"its tensors are {found}, and not dense Q, K, V and O")
    if plan.tensors[0].dtype not in _TYPES:
        raise _refused(package, f"its Q is {plan.tensors[0].dtype}")
    return kernel


def source(package: ExportedPackage, kernel: ExportedKernel) -> str:
    """CUDA with `at::Tensor attention_of(q, k, v)`; all of Flashwright's headers are in it."""
    text = resources.files("flashwright.export").joinpath("torch_extension.cu.in")
    plan = kernel.plan
    counter = [f"p.{COUNTER} = counter.data_ptr<int>();"] if plan.counter else []
    q, v = plan.tensors[0], plan.tensors[2]
    values = {
        "TITLE": package.title,
        "ARCH": plan.arch,
        "VERSION": __version__,
        "KERNEL": inlined(kernel.source),
        "HOST": host_text(),
        "QK": str(q.axes[-1].size[0]),
        "VD": str(v.axes[-1].size[0]),
        "TYPE": _TYPES[q.dtype],
        "COUNTER": "  at::Tensor counter = at::zeros({1}, q.options().dtype(at::kInt));"
        if plan.counter
        else "",
        "DIMS": indented((f"int const {n} = {size};" for n, size in _sizes(plan).items()), 2),
        "PARAMETERS": indented(
            (
                *(f"host::start(p.{t.name}, {t.name});" for t in plan.tensors),
                *counter,
                *(f"p.{dim} = {dim};" for dim in plan.dims),
            ),
            2,
        ),
        "MAPS": indented((map_line(one, plan) for one in plan.maps), 2),
        "GRID": indented(grid_lines(plan), 2),
        "THREADS": str(plan.threads),
        "SHARED": str(plan.shared),
    }
    filled = re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text.read_text("utf-8"))
    return re.sub(r"\n{3,}", "\n\n", filled)


def inlined(text: str) -> str:
    """A kernel's source with the headers of fw/ in place of its includes, each once."""
    every, seen = headers(text), set[str]()

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return _INCLUDE.sub(replaced, every[name].replace("#pragma once\n", ""))

    return _INCLUDE.sub(replaced, text).rstrip()


def _sizes(plan: LaunchPlan) -> dict[str, str]:
    """The C++ expression of each size."""
    names = [t.name.lower() for t in plan.tensors]
    found = {
        name: f"{names[tensor]}.size({axis})"
        for name, (tensor, axis, _) in dim_sources(plan, LAYOUTS[0]).items()
    }
    if "heads" in found:
        found.setdefault("kv_heads", found["heads"])
    return {name: f"static_cast<int>({found[name]})" for name in plan.dims}


def _refused(package: ExportedPackage, why: str) -> Failed:
    hint = "--as hub exports it"
    return Failed(Diagnostic("FW852", f"{package.folder}: {why}", help=hint))
