"""A package with several kernels: which one serves which lengths.

Beside its own kernel a package may have others, each a kernel package in a subfolder, and a file
that says from the number of keys which of them is called:

    {"by": "kv_len", "rules": [{"up_to": 1024, "kernel": "short"}, {"kernel": "."}]}

Rules are in ascending order; the last one has no `up_to` and serves all larger sizes. "." is the
package's own kernel. A package without the file has one kernel for all sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashwright import spec as specs
from flashwright.build import load as one
from flashwright.build import steps
from flashwright.build.load import Kernel, dim_sources, tensors_as_html
from flashwright.build.package import CLASSES, OWN, inside
from flashwright.build.plan_rules import LAYOUTS
from flashwright.build.reading import read_model, read_plan
from flashwright.lang import html
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan

SPEC = "spec.toml"
LONGEST = 1 << 24
"""The largest bound of a rule, in keys: the judge tries no longer problems."""
MOST_RULES = 64
Files = Mapping[str, str | bytes]


class Rule(BaseModel):
    """The largest number of keys that a kernel serves; None in the last rule."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    up_to: int | None = Field(None, ge=0, le=LONGEST)
    kernel: str = Field(max_length=100)


class Classes(BaseModel):
    """The rules of a package, in ascending order."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    by: Literal["kv_len"] = "kv_len"
    rules: tuple[Rule, ...] = Field(max_length=MOST_RULES)

    @classmethod
    def of(cls, rules: Iterable[tuple[int | None, str]]) -> Classes:
        """From pairs of `up_to` and kernel; an empty name is the package's own kernel."""
        return cls(rules=tuple(Rule(up_to=up_to, kernel=name or OWN) for up_to, name in rules))

    @property
    def bounds(self) -> list[int]:
        """The `up_to` of all rules but the last."""
        return [rule.up_to for rule in self.rules if rule.up_to is not None]

    @property
    def others(self) -> tuple[str, ...]:
        """The further kernels, without repetitions."""
        return tuple(dict.fromkeys(r.kernel for r in self.rules if r.kernel != OWN))

    def pick(self, size: int) -> str:
        """The kernel that serves a size."""
        return self.rules[bisect_left(self.bounds, size)].kernel

    def dump(self) -> str:
        """The rules as JSON text, a line per rule."""
        rules = ",\n".join(f"    {r.model_dump_json(exclude_none=True)}" for r in self.rules)
        return f'{{\n  "by": "{self.by}",\n  "rules": [\n{rules}\n  ]\n}}\n'


ALONE = Classes(rules=(Rule(up_to=None, kernel=OWN),))


def load(folder: str | Path) -> Kernel | Kernels:
    """The kernels of a package as one function. Raises Failed as build.load.load does."""
    folder = Path(folder)
    several = steps.read(folder)
    if several is not None:
        return steps.load(folder, several)
    classes = read(folder)
    if classes == ALONE:
        return one.load(folder)
    used = dict.fromkeys(rule.kernel for rule in classes.rules)
    return Kernels(classes, {name: one.load(folder / name) for name in used})


def read(folder: Path) -> Classes:
    """The rules of a package, checked against its kernels. Raises Failed with FW852."""
    path = folder / CLASSES
    found = read_model(Classes, path, _FORM)
    if found is None:
        return ALONE
    _upwards(path, found)
    plan = read_plan(folder)
    if found.by not in plan.dims:
        raise _bad(path, f"the kernel has no {found.by}, by which another is chosen", _FORM)
    for name in found.others:
        _belongs(path, name, plan)
    return found


def packed(kernels: Mapping[str, Files], classes: Classes) -> dict[str, str | bytes]:
    """The files of several kernels in one package. The rules come last, so that a concurrent reader
    never finds rules without their kernels."""
    rules = {CLASSES: classes.dump()} if classes.others else {}
    return {
        **{inside(k, name): data for k, files in kernels.items() for name, data in files.items()},
        **rules,
    }


def plan_of(folder: Path) -> LaunchPlan:
    """The plan by which a package is called."""
    several = steps.read(folder)
    return steps.caller_plan(folder, several) if several is not None else read_plan(folder)


def folders(folder: Path) -> dict[str, Path]:
    """The folders of all kernels of a package, its own first."""
    several = steps.read(folder)
    if several is not None:
        return {name: folder / name for name in several.steps}
    return {OWN: folder, **{name: folder / name for name in read(folder).others}}


def serving(folder: Path, dims: Mapping[str, int]) -> Path:
    """The folder of the kernel that serves a problem of these sizes."""
    classes = read(folder)
    return folder / classes.pick(dims.get(classes.by, 0))


_FORM = 'such as {"rules": [{"up_to": 1024, "kernel": "short"}, {"kernel": "."}]}'


def _bad(path: Path, text: str, hint: str) -> Failed:
    return Failed(Diagnostic("FW852", f"{path}: {text}", help=hint))


def _upwards(path: Path, found: Classes) -> None:
    """Check that the rules ascend and cover all sizes."""
    last, by = len(found.rules), found.by
    if not found.rules:
        raise _bad(path, "it has no rules", _FORM)
    for number, rule in enumerate(found.rules, 1):
        if rule.up_to is None and number < last:
            text = f"rule {number} has no up_to, so those after it are never asked"
            raise _bad(path, text, "give it its up_to, or leave the later rules away")
    if found.rules[-1].up_to is not None:
        text = f"rule {last}, the last, ends at {found.rules[-1].up_to}: beyond that no kernel is"
        raise _bad(path, f"{text} called", f"leave its up_to away: it then serves every other {by}")
    for number, (low, high) in enumerate(zip(found.bounds, found.bounds[1:], strict=False), 2):
        if high <= low:
            text = f"rule {number} serves up to {high}, the one before it up to {low} already"
            raise _bad(path, text, "put the rules in the order of their up_to, each once")


def _from_outside(spec: specs.AttentionSpec) -> specs.AttentionSpec:
    """The spec of a subfolder as the folder above has it: the path of a reference is relative."""
    if spec.reference is None:
        return spec
    return spec.model_copy(update={"reference": spec.reference.removeprefix("../")})


def _belongs(path: Path, name: str, plan: LaunchPlan) -> None:
    """Check that a further kernel is a package in a subfolder for the same spec and GPU."""
    hint = "`flashwright tune` makes such packages; without the file the package's own kernel is"
    hint += " called for everything"
    if Path(name).name != name or name == ".." or not name.isprintable():
        raise _bad(path, f"{name!r} is no name of a subfolder", hint)
    folder = path.parent / name
    if not folder.is_dir():
        raise _bad(path, f"there is no subfolder {name!r}, which a rule names", hint)
    mine, its = path.with_name(SPEC), folder / SPEC
    try:
        if mine.is_file() and its.is_file() and specs.load(mine) != _from_outside(specs.load(its)):
            raise _bad(path, f"{name!r} is a kernel for another spec: {its}", hint)
    except specs.BadSpec as error:
        raise Failed(*(Diagnostic("FW852", line) for line in error.lines)) from None
    other = read_plan(folder)
    if other.arch != plan.arch:
        raise _bad(path, f"{name!r} is for {other.arch}, the package for {plan.arch}", hint)
    if _form(other) != _form(plan):
        raise _bad(path, f"{name!r} is called with other tensors than the package", hint)


def _form(plan: LaunchPlan) -> object:
    """The part of a plan that all kernels of a package share."""
    return plan.dims, [t.model_copy(update={"vector": 1}) for t in plan.tensors]


class Kernels:
    """The kernels of a package as one function: each call goes to the one that serves its size."""

    def __init__(self, classes: Classes, kernels: Mapping[str, Kernel]) -> None:
        self.classes = classes
        self._bounds = classes.bounds
        self._served = [kernels[rule.kernel] for rule in classes.rules]
        first = self._served[0]
        self.plan, self.inputs, self.outputs = first.plan, first.inputs, first.outputs
        self._sources = {layout: self._source(layout) for layout in LAYOUTS}

    def _source(self, layout: str) -> tuple[str, int, int, int] | None:
        """The input that has the size: its name, index, axis, and the divisor of that axis."""
        found = dim_sources(self.plan, layout).get(self.classes.by)
        if found is None:
            return None
        name = self.plan.tensors[found[0]].name
        return name, self.inputs.index(name), found[1], found[2]

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(rule.kernel for rule in self.classes.rules))
        arguments = ", ".join(self.inputs)
        return f"<flashwright kernels {names} ({arguments}) for {self.plan.arch}>"

    def _repr_html_(self) -> str:
        """For notebooks: the tensors, and the sizes that each kernel serves."""
        rules = [
            ("any other" if rule.up_to is None else f"up to {rule.up_to}", rule.kernel)
            for rule in self.classes.rules
        ]
        return (
            html.heading(repr(self).strip("<>"))
            + tensors_as_html(self.plan)
            + html.table((self.classes.by, "kernel"), rules)
        )

    def __call__(self, *tensors: Any, layout: str = "bhsd", **more: Any) -> Any:
        """Call the kernel that serves these lengths, as build.load.Kernel does."""
        return self.pick(tensors, more, layout)(*tensors, layout=layout, **more)

    def launch(self, tensors: Sequence[Any], dims: Sequence[Any], check_only: bool = False) -> None:
        """Launch the kernel that serves these lengths, as build.load.Kernel does."""
        self.serving(tensors, dims).launch(tensors, dims, check_only)

    def serving(self, tensors: Sequence[Any], dims: Sequence[Any]) -> Kernel:
        """The kernel that serves these lengths, of tensors and dimensions in the plan's order."""
        inputs = [t for t, plan in zip(tensors, self.plan.tensors, strict=True) if plan.read]
        named = dict(zip(self.plan.dims, dims, strict=True))
        return self.pick(inputs, named)

    def pick(
        self, tensors: Sequence[Any], named: Mapping[str, Any], layout: str = "bhsd"
    ) -> Kernel:
        """The kernel for these tensors. Wrong tensors give any kernel, whose call reports them."""
        try:
            source = self._sources.get(layout)
            if source is None:
                size = int(named[self.classes.by])
            else:
                name, place, axis, part = source
                tensor = tensors[place] if place < len(tensors) else named[name]
                size = tensor.shape[axis] // part
        except (KeyError, AttributeError, IndexError, TypeError, ValueError):
            return self._served[-1]
        return self._served[bisect_left(self._bounds, size)]
