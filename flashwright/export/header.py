"""The kernel as source: kernel.cu with its headers, the launch plan, and a C++ host example.

The example shows all that a launch needs: grid, shared memory, the parameter struct and the tensor
maps. It compiles with nvcc and CUTLASS's headers, and needs neither Python nor Flashwright.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from flashwright.build.compile import FLAGS, target
from flashwright.build.encode import MAP_TYPES
from flashwright.build.plan_rules import LAYOUTS, SWIZZLES, caller_order
from flashwright.build.reading import PLAN, SOURCE
from flashwright.build.toolchain import CUTLASS
from flashwright.export.package import ExportedPackage, one_kernel
from flashwright.export.write import Files
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import (
    COUNTER,
    OPERATORS,
    LaunchPlan,
    PlanMap,
    PlanTensor,
    Postfix,
)
from flashwright.spec import AttentionSpec
from flashwright.version import __version__

EXAMPLE = "example.cu"
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](fw/[\w.]+)[>"]', re.MULTILINE)
_DEFAULTS = {"batch": 2, "heads": 8, "kv_heads": 8, "q_len": 1024, "kv_len": 1024}
_OTHER_DIM = 16

_README = """\
# {name}

Attention: {title}. A kernel for {arch}, exported by Flashwright {version}.

| file | what is in it |
|---|---|
| `kernel.cu` | the kernel `{entry}`, its constants and its parameter struct `Params` |
| `fw/` | the headers that it includes; they include CuTe, which is part of CUTLASS |
| `launch.json` | the launch plan as data: grid, threads, shared memory, tensors, tensor maps |
| `example.cu` | a program that launches it |

```console
$ pip install --no-deps {cutlass}  # or a checkout of CUTLASS 4
$ {compile}
$ ./example {sizes}
```

CUTLASS is the folder with `cute/` and `cutlass/` in it. `folder=DIR` makes the example read inputs
from `DIR/NAME.bin` (elements back to back, as (batch, heads, length, dim)) and write outputs there.

The headers in `fw/` are Flashwright's, under the Apache License 2.0.
"""


def files(package: ExportedPackage) -> Files:
    """All files of the export. Raises Failed with FW852 if the package has several kernels."""
    kernel = one_kernel(package)
    source = kernel.source
    values = {"name": package.name, "title": package.title, "version": __version__}
    sizes = " ".join(f"{n}={_default(n, package.spec)}" for n in kernel.plan.dims)
    return {
        "README.md": _README.format(
            **values,
            arch=kernel.plan.arch,
            entry=kernel.plan.entry,
            cutlass=CUTLASS,
            compile=compile_line(kernel.plan),
            sizes=sizes,
        ),
        SOURCE: source,
        PLAN: kernel.plan.dump(),
        EXAMPLE: _example(kernel.plan, package, sizes),
        **_headers(source),
    }


def summary(package: ExportedPackage, target: Path) -> str:
    """How to compile the export, in one line."""
    return f"cd {target} && {compile_line(package.plan)}"


def compile_line(plan: LaunchPlan, nvcc: str = "nvcc", cutlass: str = "CUTLASS") -> str:
    """The command that compiles the example, in its folder."""
    # Of the flags of a build, those that ask for a cubin and for a report are left out. From PTX a
    # newer GPU compiles its own code; that of sm_90a is for Hopper alone.
    flags = [*FLAGS[: FLAGS.index("-Xptxas")], *target(plan.arch, plan.arch)]
    if plan.arch[-1].isdigit():
        virtual = plan.arch.replace("sm_", "compute_")
        flags += ["-gencode", f"arch={virtual},code={virtual}"]
    return f"{nvcc} {' '.join(flags)} -I . -I {cutlass} {EXAMPLE} -o example"


def _headers(source: str) -> dict[str, str]:
    """The headers of fw/ that a source includes, also through others."""
    place = resources.files("flashwright").joinpath("device")
    found: dict[str, str] = {}
    wanted = _INCLUDE.findall(source)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = place.joinpath(name).read_text("utf-8")
        except OSError:
            text = f"{SOURCE} includes <{name}>, which this version of Flashwright does not have"
            raise Failed(Diagnostic("FW852", text, help="build the package again")) from None
        wanted += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _default(dim: str, spec: AttentionSpec | None) -> int:
    if spec is not None and dim in ("heads", "kv_heads"):
        return spec.heads if dim == "heads" else spec.kv_heads
    if spec is not None and dim in spec.dims:
        return spec.dims[dim]
    return _DEFAULTS.get(dim, _OTHER_DIM)


# --- the example ------------------------------------------------------------------------------


def _example(plan: LaunchPlan, package: ExportedPackage, sizes: str) -> str:
    text = resources.files("flashwright.export").joinpath("example.cu.in").read_text("utf-8")
    counter = [f"p.{COUNTER} = host::counter();"] if plan.counter else []
    values = {
        "TITLE": f"{package.title}; {plan.arch}",
        "COMPILE": compile_line(plan),
        "SIZES": sizes,
        "DIMS": _lines(
            f'int const {dim} = host::dim(given, "{dim}", {_default(dim, package.spec)});'
            for dim in plan.dims
        ),
        "TENSORS": _lines(_tensor(tensor) for tensor in plan.tensors),
        "PARAMETERS": _lines((*counter, *(f"p.{dim} = {dim};" for dim in plan.dims))),
        "MAPS": _lines(_map(one, plan) for one in plan.maps)
        or "  // This kernel has none: its threads copy from the addresses.",
        "GRID": _grid(plan),
        "THREADS": str(plan.threads),
        "SHARED": str(plan.shared),
        "ENTRY": plan.entry,
        "OUTPUTS": _lines(
            f"host::finish(p.{t.name}, {t.name}, folder);" for t in plan.tensors if t.written
        ),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _tensor(tensor: PlanTensor) -> str:
    sizes = ", ".join(_cpp(axis.size) for axis in tensor.axes)
    order = [p for parts in caller_order(tensor, LAYOUTS[0]) for p in parts]
    kind = "true" if tensor.read else "false"
    axes = ", ".join(map(str, order))
    made = f'host::tensor("{tensor.name}", {{{sizes}}}, {{{axes}}}, {kind});'
    return f"auto {tensor.name} = {made}\n  host::start(p.{tensor.name}, {tensor.name}, folder);"


def _map(one: PlanMap, plan: LaunchPlan) -> str:
    tensor = next(t for t in plan.tensors if t.name == one.tensor)
    box = ", ".join(map(str, one.box))
    kinds = f"{MAP_TYPES[tensor.dtype]}, {SWIZZLES.index(one.swizzle)}"
    flat = "true" if tensor.flat else "false"
    ranges, pages = ("true" if kind else "false" for kind in (one.ranges, one.pages))
    arguments = f"p.{one.tensor}, {one.tensor}, {{{box}}}, {kinds}, {flat}, {ranges}, {pages}"
    return f"host::encode(p.{one.tensor}_map, {arguments});"


def _grid(plan: LaunchPlan) -> str:
    counts = [_cpp(count) for count in plan.grid]
    if plan.stays:
        tiles = " * ".join(counts)
        return (
            "  // A persistent kernel: at most one block per SM, and they share out the tiles.\n"
            f"  int64_t const tiles = {tiles};\n"
            "  dim3 const blocks(static_cast<unsigned>(std::min<int64_t>(tiles, host::sms())));"
        )
    return f"  dim3 const blocks({', '.join(counts)});"


def _cpp(expr: Postfix) -> str:
    """A size in C++, from its postfix form."""
    stack: list[str] = []
    for token in expr:
        if isinstance(token, int) or token not in OPERATORS:
            stack.append(str(token))
            continue
        right, left = stack.pop(), stack.pop()
        infix = token in ("+", "-", "*")
        stack.append(f"({left} {token} {right})" if infix else f"host::{token}({left}, {right})")
    return stack[0]
