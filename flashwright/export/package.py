"""A kernel package as the exports need it: its kernels, their code, and its spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright import spec as specs
from flashwright.build import classes
from flashwright.build.arrays import NAMES
from flashwright.build.classes import Classes
from flashwright.build.encode import MAP_TYPES
from flashwright.build.package import CLASSES, OWN
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
from flashwright.files import content, sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan
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
    """The package: its spec, its kernels by name, and the rules that choose among them."""

    folder: Path
    spec: AttentionSpec | None
    rules: Classes
    kernels: Mapping[str, ExportedKernel]

    @property
    def plan(self) -> LaunchPlan:
        """The launch plan of the kernel for the largest sizes; a caller sees the same of all."""
        return self.kernels[self.rules.rules[-1].kernel].plan

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
        return sha256(self.rules.dump() + "".join(parts))[:_SHORT]

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
        rules = [
            {"up_to": rule.up_to, "kernel": names.index(rule.kernel)} for rule in self.rules.rules
        ]
        kernels = [
            _launch_data(one, number, arguments) for number, one in enumerate(self.kernels.values())
        ]
        return {"by": self.rules.by, "rules": rules, "kernels": kernels}


def read(folder: Path, kernel: str | None = None) -> ExportedPackage:
    """The package in a folder, or one of its kernels (`.`: its own) as a package.

    Raises Failed with FW852 if it cannot be used, or if it was changed since it was built.
    """
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


def one_kernel(package: ExportedPackage) -> ExportedKernel:
    """The kernel of a package that has one. Raises Failed with FW852 if it has several."""
    if len(package.kernels) > 1:
        place = package.folder / CLASSES
        text = f"{place}: the package has {len(package.kernels)} kernels, this form holds one"
        hint = f"add --kernel NAME; its kernels are {', '.join(package.kernels)}"
        raise Failed(Diagnostic("FW852", text, help=hint))
    (found,) = package.kernels.values()
    return found


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
    for entry, tensor in zip(data["tensors"], plan.tensors, strict=True):
        entry["argument"] = arguments[tensor.name]
        entry["dtype"] = NAMES[tensor.dtype]
        entry["bytes"] = DTYPES[tensor.dtype][1] // 8
        entry["order"] = caller_order(tensor, LAYOUTS[0])
    for entry, one_map in zip(data["maps"], plan.maps, strict=True):
        index = names.index(one_map.tensor)
        entry["tensor"] = index
        entry["type"] = MAP_TYPES[plan.tensors[index].dtype]
        entry["swizzle"] = SWIZZLES.index(one_map.swizzle)
    return data


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
        if tensor.written:
            lower = tensor.name.lower()
            found[tensor.name] = tensor.name if lower in inputs else lower
    return found
