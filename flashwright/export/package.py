"""A kernel package as the exports need it: its kernels, their code, and its spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright import spec as specs
from flashwright.build import classes, steps
from flashwright.build.arrays import NAMES
from flashwright.build.classes import Classes
from flashwright.build.encode import MAP_TYPES
from flashwright.build.package import CLASSES, OWN, STEPS
from flashwright.build.plan_rules import DTYPES, LAYOUTS, SWIZZLES, caller_order
from flashwright.build.reading import (
    CUBIN,
    PTX,
    SOURCE,
    cubin_version,
    read_cubin,
    read_plan,
    read_ptx,
    untied,
)
from flashwright.build.steps import Steps
from flashwright.files import content, sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import FRAGMENT_ROWS, LaunchPlan, PlanTensor
from flashwright.spec import AttentionSpec

_SHORT = 12  # characters of a digest in a name


@dataclass(frozen=True)
class ExportedKernel:
    """One kernel of the package."""

    folder: Path
    plan: LaunchPlan
    cubin: bytes
    cubin_version: int
    """The architecture of the cubin, 80 for sm_80; 0 without a cubin."""
    ptx: str
    """Empty if no other GPU could run it than those that take the cubin."""

    @property
    def source(self) -> str:
        """kernel.cu. Raises Failed with FW852 without the file."""
        data = content(self.folder / SOURCE)
        if data is None:
            raise _unusable(f"{self.folder} has no {SOURCE}", self.folder)
        return data.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class ExportedPackage:
    """The package: its spec, its kernels by name, and the rules that choose among them; or the
    steps, if each call launches all kernels."""

    folder: Path
    spec: AttentionSpec | None
    rules: Classes
    kernels: Mapping[str, ExportedKernel]
    steps: Steps | None = None

    @property
    def plan(self) -> LaunchPlan:
        """The launch plan as a caller sees it: of several steps without scratch, else that of the
        kernel for the largest sizes."""
        joined = self.joined
        seen = [t for t in joined.tensors if t.name not in self.scratch]
        return joined.model_copy(update={"tensors": tuple(seen)})

    @property
    def joined(self) -> LaunchPlan:
        """The same with the tensors between the steps, which come last."""
        if self.steps is None:
            return self.kernels[self.rules.rules[-1].kernel].plan
        plans = [self.kernels[name].plan for name in self.steps.steps]
        return steps.joined(plans, self.steps.scratch)

    @property
    def scratch(self) -> tuple[str, ...]:
        """The tensors between the steps."""
        return self.steps.scratch if self.steps is not None else ()

    @property
    def zeroed(self) -> tuple[str, ...]:
        """The tensors that begin at 0."""
        return self.steps.zeroed if self.steps is not None else ()

    @property
    def name(self) -> str:
        """A name in lower-case letters, digits and dashes; another operator has another one."""
        text = self.spec.slug if self.spec is not None else self.plan.entry
        if self.spec is not None and self.spec.reference is not None:
            spec = self.spec.model_copy(update={"reference": None})
            text = f"{spec.slug}-own-{sha256(self.reference)[:_SHORT]}"
        plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
        return plain if re.match(r"[a-z].", plain) else f"attention-{plain}".strip("-")

    @property
    def reference(self) -> str:
        """The text of the spec's reference; empty if it is no file of the package."""
        file = (self.spec.reference or "").partition(":")[0] if self.spec is not None else ""
        if not file or Path(file).name != file:
            return ""
        return (content(self.folder / file) or b"").decode("utf-8", errors="replace")

    @property
    def title(self) -> str:
        """What the package computes, in words that can stand in a comment of any language."""
        text = self.spec.in_words if self.spec is not None else f"the kernel {self.plan.entry}"
        return re.sub(r"[^A-Za-z0-9 .,:_()=+-]", "_", text)

    @property
    def digest(self) -> str:
        """A few characters that another content does not share."""
        parts = [one.plan.dump() + sha256(one.cubin) + one.ptx for one in self.kernels.values()]
        order = self.rules.dump() if self.steps is None else self.steps.dump()
        return sha256(order + "".join(parts))[:_SHORT]

    def files(self) -> dict[str, bytes]:
        """The code of all kernels, by the names that `launch_data` uses."""
        found: dict[str, bytes] = {}
        for number, one in enumerate(self.kernels.values()):
            if one.cubin:
                found[f"kernel_{number}.cubin"] = one.cubin
            if one.ptx:
                found[f"kernel_{number}.ptx"] = one.ptx.encode()
        return found

    def launch_data(self, arguments: Mapping[str, str]) -> dict[str, Any]:
        """kernels.json, which launch.py reads. `arguments` are the callers' names of tensors."""
        names = list(self.kernels)
        arguments = {**{name: name for name in self.scratch}, **arguments}
        kernels = [
            _launch_data(one, number, arguments) for number, one in enumerate(self.kernels.values())
        ]
        if self.steps is None:
            rules = [(rule.up_to, [names.index(rule.kernel)]) for rule in self.rules.rules]
        else:
            rules = [(None, [names.index(name) for name in self.steps.steps])]
        tensors = [_tensor_data(tensor, arguments) for tensor in self.joined.tensors]
        for tensor in tensors:
            tensor["scratch"] = tensor["name"] in self.scratch
            tensor["zeroed"] = tensor["name"] in self.zeroed
        return {
            "by": self.rules.by,
            "rules": [{"up_to": up_to, "kernels": order} for up_to, order in rules],
            "kernels": kernels,
            "tensors": tensors,
            "dims": self.joined.dims,
        }


def read(folder: Path, kernel: str | None = None) -> ExportedPackage:
    """The package in a folder, or one of its kernels (`.`: its own) as a package.

    Raises Failed with FW852 if it cannot be used, or if it was changed since it was built.
    """
    found = steps.read(folder)
    if found is not None:
        return _of_steps(folder, found, kernel)
    rules = classes.read(folder)
    used = list(dict.fromkeys(rule.kernel for rule in rules.rules))
    if kernel is not None:
        if kernel not in used:
            hint = f"its kernels are {', '.join(used)}"
            raise Failed(Diagnostic("FW852", f"{folder} has no kernel {kernel!r}", help=hint))
        rules, used = classes.ALONE, [kernel]
    kernels = {name: _kernel(folder / name) for name in used}
    if kernel is not None:
        kernels = {OWN: kernels[kernel]}
    return ExportedPackage(folder, _spec(folder), rules, kernels)


def _of_steps(folder: Path, found: Steps, kernel: str | None) -> ExportedPackage:
    if kernel is not None:
        text = f"{folder / STEPS}: one call launches all kernels of this package"
        hint = f"export {folder / found.steps[0]} for one of them, or leave --kernel away"
        raise Failed(Diagnostic("FW852", text, help=hint))
    untied(folder)
    kernels = {name: _kernel(folder / name) for name in found.steps}
    return ExportedPackage(folder, _spec(folder), classes.ALONE, kernels, found)


def all_kernels(package: ExportedPackage) -> list[ExportedKernel]:
    """The kernels that a call launches, in order. Raises Failed with FW852 if it chooses one of
    several."""
    if package.steps is None and len(package.kernels) > 1:
        place = package.folder / CLASSES
        text = f"{place}: the package has {len(package.kernels)} kernels, this form holds one"
        hint = f"add --kernel NAME; its kernels are {', '.join(package.kernels)}"
        raise Failed(Diagnostic("FW852", text, help=hint))
    return list(package.kernels.values())


def _kernel(folder: Path) -> ExportedKernel:
    plan = read_plan(folder)
    untied(folder)  # raises Failed if a file is not the one that was built
    cubin = read_cubin(folder, plan)
    version = cubin_version(folder / CUBIN, cubin) if cubin else 0
    ptx = read_ptx(folder / PTX, plan) or ""
    if not (cubin or ptx):
        raise _unusable(f"{folder} has no {CUBIN} and no {PTX}", folder)
    specific = plan.arch[-1] in "af"  # such PTX runs only where the cubin runs
    return ExportedKernel(folder, plan, cubin, version, "" if cubin and specific else ptx)


def _unusable(text: str, folder: Path) -> Failed:
    return Failed(Diagnostic("FW852", text, help=f"flashwright build {folder}"))


def _spec(folder: Path) -> AttentionSpec | None:
    path = folder / classes.SPEC
    try:
        return specs.load(path) if path.is_file() else None
    except specs.BadSpec as error:
        raise Failed(*(Diagnostic("FW852", line) for line in error.lines)) from None


def _launch_data(one: ExportedKernel, number: int, arguments: Mapping[str, str]) -> dict[str, Any]:
    """A launch plan with everything looked up: launch.py has no tables of types and layouts."""
    plan = one.plan
    names = [tensor.name for tensor in plan.tensors]
    data = plan.model_dump(mode="json")
    data["cubin"] = f"kernel_{number}.cubin" if one.cubin else ""
    data["ptx"] = f"kernel_{number}.ptx" if one.ptx else ""
    data["cubin_version"] = one.cubin_version
    data["tensors"] = [_tensor_data(tensor, arguments) for tensor in plan.tensors]
    for entry, one_map in zip(data["maps"], plan.maps, strict=True):
        index = names.index(one_map.tensor)
        entry["tensor"] = index
        entry["type"] = MAP_TYPES[plan.tensors[index].dtype]
        entry["swizzle"] = SWIZZLES.index(one_map.swizzle)
    return data


def _tensor_data(tensor: PlanTensor, arguments: Mapping[str, str]) -> dict[str, Any]:
    return {
        **tensor.model_dump(mode="json", exclude={"fragments"}),
        "argument": arguments[tensor.name],
        "dtype": NAMES[tensor.dtype],
        "bytes": DTYPES[tensor.dtype][1] // 8,
        "order": caller_order(tensor, LAYOUTS[0]),
        "rows": FRAGMENT_ROWS if tensor.fragments else 1,
    }


def capability(package: ExportedPackage) -> str:
    """The compute capability as Hugging Face writes it: 9.0a, or 8.0+PTX with PTX."""
    version = re.fullmatch(r"sm_(\d+)(\d)([af]?)", package.plan.arch)
    assert version is not None  # read_plan accepts known architectures only
    ptx = "+PTX" if all(one.ptx for one in package.kernels.values()) else ""
    return f"{version[1]}.{version[2]}{version[3]}{'' if version[3] else ptx}"


def arguments_of(inputs: Sequence[str], plan: LaunchPlan) -> dict[str, str]:
    """The callers' name of each tensor; outputs are in lower case unless an input has that name."""
    read = [tensor.name for tensor in plan.tensors if tensor.read]
    found = dict(zip(read, inputs, strict=True))
    for tensor in plan.tensors:
        if tensor.written and not tensor.read:
            lower = tensor.name.lower()
            found[tensor.name] = tensor.name if lower in inputs else lower
    return found
