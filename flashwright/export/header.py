"""The kernel as source: kernel.cu with its headers, the launch plan, and a C++ host example.

The example shows all that a launch needs: grid, shared memory, the parameter struct and the tensor
maps. It compiles with nvcc and CUTLASS's headers, and needs neither Python nor Flashwright.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flashwright.build.compile import FLAGS, target
from flashwright.build.encode import MAP_TYPES
from flashwright.build.plan_rules import LAYOUTS, SWIZZLES, caller_order
from flashwright.build.reading import PLAN, SOURCE
from flashwright.build.toolchain import CUTLASS
from flashwright.export.package import ExportedKernel, ExportedPackage, all_kernels
from flashwright.export.write import Files
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import (
    COUNTER,
    FRAGMENT_ROWS,
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

_FILES = """\
| `{folder}kernel.cu` | the kernel `{entry}`, its constants and its parameter struct `Params` |
| `{folder}launch.json` | its launch plan as data: grid, threads, shared memory, tensors, maps |"""
_LAUNCH = """\
  {{  // {title}
    // Its only parameter: tensor maps, then address and strides of each tensor, then the sizes.
    {space}Params p{{}};
{tensors}
{parameters}

    // Tensor maps.
{maps}

    // The grid, the block and the dynamic shared memory.
{grid}
    constexpr int threads = {threads}, shared = {shared};
    host::launch({entry}, blocks, threads, shared, p);
  }}"""
_IN_SPACE = """\
namespace {space} {{
#define {plain} {entry}
#include "{folder}kernel.cu"
#undef {plain}
}}  // namespace {space}"""

_README = """\
# {name}

Attention: {title}. A kernel for {arch}, exported by Flashwright {version}.

| file | what is in it |
|---|---|
{kernels}
| `fw/` | the headers that it includes; they include CuTe, which is part of CUTLASS |
| `example.cu` | a program that launches {what} |

```console
$ pip install --no-deps {cutlass}  # or a checkout of CUTLASS 4
$ {compile}
$ ./example {sizes}
```

CUTLASS is the folder with `cute/` and `cutlass/` in it. `folder=DIR` makes the example read inputs
from `DIR/NAME.bin` (elements back to back, axes as `flashwright.load` takes them) and write outputs
there.

The headers in `fw/` are Flashwright's, under the Apache License 2.0.
"""


def files(package: ExportedPackage) -> Files:
    """All files of the export. Raises Failed with FW852 if the package chooses one of several
    kernels."""
    kernels = all_kernels(package)
    found = [_Placed.of(kernel, number, len(kernels)) for number, kernel in enumerate(kernels, 1)]
    plan = package.joined
    sizes = " ".join(f"{n}={_default(n, package.spec)}" for n in plan.dims)
    made: dict[str, str | bytes] = {
        "README.md": _README.format(
            name=package.name,
            title=package.title,
            version=__version__,
            arch=plan.arch,
            kernels="\n".join(
                _FILES.format(folder=one.folder, entry=one.plan.entry) for one in found
            ),
            what="it" if len(found) == 1 else "them in order",
            cutlass=CUTLASS,
            compile=compile_line(plan),
            sizes=sizes,
        ),
        EXAMPLE: _example(found, package, sizes),
    }
    for one in found:
        made |= {one.folder + SOURCE: one.source, one.folder + PLAN: one.plan.dump()}
    return {**made, **headers("\n".join(one.source for one in found))}


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


def headers(source: str) -> dict[str, str]:
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


def host_text() -> str:
    """C++ that launches a kernel: sizes, tensor maps, the launch."""
    file = resources.files("flashwright.export").joinpath("host.cuh.in")
    return file.read_text("utf-8").rstrip()


def _default(dim: str, spec: AttentionSpec | None) -> int:
    if spec is not None and dim in ("heads", "kv_heads"):
        return spec.heads if dim == "heads" else spec.kv_heads
    if dim == "q_len" and spec is not None and spec.decode is not None:
        return spec.decode
    if spec is not None and dim in spec.dims:
        return spec.dims[dim]
    return _DEFAULTS.get(dim, _OTHER_DIM)


# --- the example ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placed:
    """A kernel of the export: where its files are, and what the example calls it."""

    plan: LaunchPlan
    source: str
    folder: str = ""
    space: str = ""
    """Its namespace: kernels have the same names."""
    entry: str = ""

    @classmethod
    def of(cls, kernel: ExportedKernel, number: int, count: int) -> _Placed:
        plan, source = kernel.plan, kernel.source
        if count == 1:
            return cls(plan, source, entry=plan.entry)
        return cls(plan, source, f"{number}/", f"kernel_{number}", f"{plan.entry}_{number}")

    @property
    def included(self) -> str:
        """The lines of the example that include it."""
        if not self.space:
            return f'#include "{SOURCE}"'
        values = {"space": self.space, "entry": self.entry, "folder": self.folder}
        return _IN_SPACE.format(plain=self.plan.entry, **values)

    @property
    def launch(self) -> str:
        """The lines of the example that launch it."""
        plan, space = self.plan, f"{self.space}::" if self.space else ""
        counter = [f"p.{COUNTER} = host::counter();"] if plan.counter else []
        return _LAUNCH.format(
            title=f"{self.folder}{SOURCE}",
            space=space,
            tensors=indented(f"host::start(p.{t.name}, {t.name}, folder);" for t in plan.tensors),
            parameters=indented((*counter, *(f"p.{dim} = {dim};" for dim in plan.dims))),
            maps=indented(map_line(one, plan) for one in plan.maps)
            or "    // This kernel has none: its threads copy from the addresses.",
            grid=indented(grid_lines(plan)),
            threads=plan.threads,
            shared=plan.shared,
            entry=space + self.entry,
        )


def _example(kernels: Sequence[_Placed], package: ExportedPackage, sizes: str) -> str:
    text = resources.files("flashwright.export").joinpath("example.cu.in").read_text("utf-8")
    plan = package.joined
    included = [] if len(kernels) == 1 else _included(kernels)
    values = {
        "WHAT": f"the kernel of {SOURCE}" if len(kernels) == 1 else f"{len(kernels)} kernels",
        "TITLE": f"{package.title}; {plan.arch}",
        "COMPILE": compile_line(plan),
        "SIZES": sizes,
        "HOST": host_text(),
        "KERNELS": "\n".join((*included, *(one.included for one in kernels))),
        "DIMS": indented(
            (
                f'int const {dim} = host::dim(given, "{dim}", {_default(dim, package.spec)});'
                for dim in plan.dims
            ),
            2,
        ),
        "TENSORS": indented((_tensor(tensor) for tensor in plan.tensors), 2),
        "LAUNCHES": "\n\n".join(one.launch for one in kernels),
        "OUTPUTS": indented((_output(t, kernels) for t in package.plan.tensors if t.written), 2),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], text)


def _included(kernels: Sequence[_Placed]) -> list[str]:
    """The headers of all kernels: inside of a namespace they are there already."""
    found = dict.fromkeys(name for one in kernels for name in _INCLUDE.findall(one.source))
    return [*(f"#include <{name}>" for name in found), ""]


def indented(lines: Iterable[str], indent: int = 4) -> str:
    """Lines as text."""
    return "\n".join(" " * indent + line for line in lines)


def _tensor(tensor: PlanTensor) -> str:
    sizes = ", ".join(_cpp(axis.size) for axis in tensor.axes)
    order = [p for parts in caller_order(tensor, LAYOUTS[0]) for p in parts]
    axes = ", ".join(map(str, order))
    more = "true" if tensor.read else "false"
    more += f", {FRAGMENT_ROWS}" if tensor.fragments else ""
    made = f'host::tensor("{tensor.name}", {{{sizes}}}, {{{axes}}}, {more});'
    return f"auto {tensor.name} = {made}"


def _output(tensor: PlanTensor, kernels: Sequence[_Placed]) -> str:
    writer = next(one for one in kernels if tensor.name in (t.name for t in one.plan.tensors))
    kind = f"{writer.space}::Params" if writer.space else "Params"
    return f"host::finish<decltype({kind}::{tensor.name})>({tensor.name}, folder);"


def map_line(one: PlanMap, plan: LaunchPlan) -> str:
    """The line that encodes a tensor map."""
    tensor = next(t for t in plan.tensors if t.name == one.tensor)
    box = ", ".join(map(str, one.box))
    kinds = f"{MAP_TYPES[tensor.dtype]}, {SWIZZLES.index(one.swizzle)}"
    flat = "true" if tensor.flat else "false"
    ranges, pages = ("true" if kind else "false" for kind in (one.ranges, one.pages))
    arguments = f"p.{one.tensor}, {one.tensor}, {{{box}}}, {kinds}, {flat}, {ranges}, {pages}"
    return f"host::encode(p.{one.tensor}_map, {arguments});"


def grid_lines(plan: LaunchPlan) -> list[str]:
    """The lines that make the grid."""
    counts = [_cpp(count) for count in plan.grid]
    if not plan.stays:
        return [f"dim3 const blocks({', '.join(counts)});"]
    return [
        "// A persistent kernel: at most one block per SM, and they share out the tiles.",
        f"int64_t const tiles = {' * '.join(counts)};",
        "dim3 const blocks(static_cast<unsigned>(std::min<int64_t>(tiles, host::sms())));",
    ]


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
