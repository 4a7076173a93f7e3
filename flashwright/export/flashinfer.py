"""FlashInfer-Bench: the operator as a Definition, the kernel as a Solution.

Both are JSON of text only. The Solution is in Python: launch.py, the launch plan, and the compiled
kernels in base64.
"""

from __future__ import annotations

import ast
import base64
import inspect
import json
import math
import textwrap
import zlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from flashwright.build.arrays import NAMES
from flashwright.build.plan_rules import LAYOUTS, caller_order, cards_of
from flashwright.export.package import ExportedPackage, arguments_of
from flashwright.export.signature import dims_text, signature_of
from flashwright.export.write import Files
from flashwright.formats import task as tasks
from flashwright.formats.task import Task
from flashwright.generate.folder import TASK
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan, PlanTensor
from flashwright.spec import AttentionSpec
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.pytorch.signature import Signature

OP_TYPE = "attention"
AUTHOR = "flashwright"
_LINE = 96  # characters of base64
_FIELDS = ("causal", "window", "sink_tokens", "softcap", "alibi", "softmax_scale")
"""The parts of a spec that pytorch/reference.py reads."""
_OF_SEQUENCES = {"StartsQ", "StartsK", "LengthsK", "Table", "KDescale", "VDescale"}
"""Tensors that say where sequences lie, or have a scale for each."""

_MAIN = '''\
"""A kernel for {arch}, exported by Flashwright {version}."""

import base64
import zlib

from .code import FILES
from .launch import Kernels
from .plan import PLAN

_KERNELS = Kernels(PLAN, lambda name: zlib.decompress(base64.b64decode(FILES[name])))


def run({arguments}):
    """Writes {outputs}. Tensors are on a CUDA device."""
    _KERNELS.launch([{inputs}], [{outputs}], {dims})
'''

_MAIN_OF_TASK = '''\
"""{name}: a kernel for {arch}, exported by Flashwright {version}."""

import base64
import math
import zlib

import torch

from .code import FILES
from .flashinfer_inputs import arranged, splits_for
from .launch import Kernels
from .plan import PLAN

SCALE = {scale!r}
_KERNELS = Kernels(PLAN, lambda name: zlib.decompress(base64.b64decode(FILES[name])))


def run({arguments}):
    """Writes output, and lse in base 2. Tensors are on a CUDA device."""
    if not math.isclose(float(sm_scale), SCALE, rel_tol=1e-4):
        raise ValueError(f"this kernel has the scale {{SCALE:g}}, not sm_scale = {{sm_scale}}")
    found, queries, keys = arranged({{{given}}})
    packed = "startsq" in found
    rows = output.transpose(0, 1) if packed else output[:, :, None]
    logs = lse.new_empty(rows.shape[:-1])
    sizes = {{"batch": {batch}, "q_len": queries, "kv_len": keys}}
    if not packed:
        cores = torch.cuda.get_device_properties(output.device).multi_processor_count
        sizes["splits"] = splits_for(sizes["batch"] * {kv_heads}, keys, cores)
    _KERNELS.launch(
        [found[name] for name in {inputs}], [rows, logs], {{name: sizes[name] for name in {dims}}}
    )
    torch.mul(logs.transpose(0, 1) if packed else logs[:, :, 0], 1 / math.log(2), out=lse)
'''

_BY_SPEC = '''\
"""Attention in plain PyTorch and fp32: {title}."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

SPEC: Any = SimpleNamespace(
{fields}
)


def run({arguments}):
{compute}    return {results}


{functions}
'''

_BY_SEQUENCES = """\
    given = {{{given}}}
    for name in ("q", "k", "v"):  # heads and rows change places
        given[name] = given[name].transpose(-3, -2)
    o, lse = attention_of_sequences(SPEC, given)
    o = o.transpose(-3, -2)
"""

_BY_FILE = '''\
{text}

import torch  # noqa: E402


def run({arguments}):
    """The function above, in fp64 on the CPU; the results go to the inputs' device."""
    given = {{{named}}}
    numbers = {{n: t.double() if t.is_floating_point() else t for n, t in given.items()}}
    inputs = {{n: t.cpu().numpy() for n, t in numbers.items()}}
    found = reference(inputs, {sizes})
    device = {first}.device
    return {results}
'''


def files(package: ExportedPackage) -> Files:
    """The two JSON files, as a FlashInfer Trace dataset has them.

    Raises Failed with FW852 if the operator has no reference in PyTorch or NumPy, or if its tensors
    cannot be written as a Definition.
    """
    signature = signature_of(package.plan)
    if signature.changed:
        text = f"{package.folder}: `{signature.changed[0]}` is changed in place"
        raise _refused(text, "a Definition has inputs and outputs apart: use --as hub")
    if (package.folder / TASK).is_file():
        return _for_task(package, signature, tasks.load(package.folder, tasks.FLASHINFER))
    definition = _definition(package, signature)
    named = arguments_of(signature.inputs, package.plan)
    outputs = [named[t.name] for t in signature.written]
    main = _MAIN.format(
        arch=package.plan.arch,
        version=__version__,
        arguments=", ".join([*signature.arguments, *outputs]),
        inputs=", ".join(signature.inputs),
        outputs=", ".join(outputs),
        dims=dims_text(signature),
    )
    solution = _solution(package, signature, definition["name"], {"main.py": main})
    return _dataset(OP_TYPE, definition["name"], json.dumps(definition, indent=2) + "\n", solution)


def _for_task(package: ExportedPackage, signature: Signature, task: Task) -> Files:
    """The Definition that the package was generated from, and a Solution for it."""
    assert package.spec is not None
    definition = json.loads(task.source)
    given = ", ".join(f'"{name}": {name}' for name in definition["inputs"])
    packed = "qo_indptr" in definition["inputs"]
    main = _MAIN_OF_TASK.format(
        name=task.name,
        arch=package.plan.arch,
        version=__version__,
        scale=package.spec.softmax_scale,
        arguments=", ".join(task.arguments),
        given=given,
        batch="len(qo_indptr) - 1" if packed else "output.shape[0]",
        kv_heads=package.spec.kv_heads,
        inputs=json.dumps(signature.inputs),
        dims=json.dumps(signature.dims),
    )
    arranging = resources.files("flashwright.formats").joinpath("flashinfer_inputs.py")
    sources = {"main.py": main, "flashinfer_inputs.py": arranging.read_text("utf-8")}
    solution = _solution(package, signature, task.name, sources)
    return _dataset(definition["op_type"], task.name, task.source, solution)


def _dataset(kind: str, name: str, definition: str, solution: Mapping[str, Any]) -> Files:
    """The two files, where a FlashInfer Trace dataset has them."""
    place = f"solutions/{AUTHOR}/{kind}/{name}/{solution['name']}.json"
    return {
        f"definitions/{kind}/{name}.json": definition,
        place: json.dumps(solution, indent=2) + "\n",
    }


def summary(package: ExportedPackage, target: Path) -> str:
    """How to load the export, in one line."""
    return f"flashinfer_bench.TraceSet.from_path({str(target)!r})"


# --- Definition -------------------------------------------------------------------------------


def _definition(package: ExportedPackage, signature: Signature) -> dict[str, Any]:
    axes = _Axes(package)
    named = arguments_of(signature.inputs, package.plan)
    inputs: dict[str, Any] = {
        named[t.name]: {"shape": axes.of(t), "dtype": NAMES[t.dtype]} for t in signature.read
    }
    inputs |= {name: {"shape": None, "dtype": "int32"} for name in signature.dims}
    known = set(axes.found)
    outputs = {
        named[t.name]: {"shape": axes.of(t), "dtype": NAMES[t.dtype]} for t in signature.written
    }
    unknown = [n for n in axes.found if n not in known and axes.found[n]["type"] == "var"]
    if unknown:
        text = f"{package.folder}: an output has the axis {unknown[0]}, which no input has"
        raise _refused(text, "a Definition takes all sizes from inputs: use --as hub")
    return {
        "name": package.name.replace("-", "_"),
        "op_type": OP_TYPE,
        "description": f"Attention: {package.title}.",
        "tags": [f"author:{AUTHOR}"],
        "axes": axes.found,
        "inputs": inputs,
        "outputs": outputs,
        "constraints": ["heads % kv_heads == 0"] if {"heads", "kv_heads"} <= known else [],
        "reference": _reference(package, signature),
    }


class _Axes:
    """The axes of a Definition, filled by asking for the tensors' shapes."""

    def __init__(self, package: ExportedPackage) -> None:
        self.spec, self.dims = package.spec, package.plan.dims
        self.found: dict[str, dict[str, Any]] = {}

    def of(self, tensor: PlanTensor) -> list[str]:
        """The names of a tensor's axes, in the callers' order."""
        if tensor.flat:
            return [self._variable(f"{tensor.name.lower()}_size")]
        return [self._axis(tensor, parts) for parts in caller_order(tensor, LAYOUTS[0])]

    def _axis(self, tensor: PlanTensor, parts: tuple[int, ...]) -> str:
        sizes = [tensor.axes[p].size for p in parts]
        numbers = [size[0] for size in sizes if len(size) == 1 and isinstance(size[0], int)]
        if len(numbers) == len(sizes):
            value = math.prod(int(n) for n in numbers)
            name = self._constant(tensor.axes[parts[0]].label, value)
            self.found.setdefault(name, {"type": "const", "value": value})
            return name
        if len(sizes) == 1 and len(sizes[0]) == 1:
            return self._variable(str(sizes[0][0]))
        if ("kv_heads",) in sizes and "heads" in self.dims:
            return self._variable("heads")
        return self._variable("_".join(str(token) for size in sizes for token in size))

    def _constant(self, label: str, value: int) -> str:
        if self.spec is not None and label == "D":
            if value == self.spec.head_dim:
                return "head_dim"
            if value == self.spec.value_dim:
                return "v_dim"
        return f"{label.lower()}_{value}"

    def _variable(self, name: str) -> str:
        plain = "".join(c if c.isalnum() else "_" for c in name)
        self.found.setdefault(plain, {"type": "var"})
        return plain


def _reference(package: ExportedPackage, signature: Signature) -> str:
    """Python text with a function `run`, which computes the outputs."""
    from flashwright.pytorch import reference

    spec = package.spec
    if spec is not None and spec.reference is not None:
        return _by_file(package, signature, spec.reference)
    obstacle = reference.obstacle(*_each(spec, package.plan))
    if obstacle or spec is None:
        hint = "a Definition needs its reference in Python: use --as hub, or give the spec one"
        raise _refused(f"{package.folder}: {obstacle}", hint)
    named = dict(zip((t.name.lower() for t in signature.read), signature.inputs, strict=True))
    kinds = {tensor.name: NAMES[tensor.dtype] for tensor in signature.written}
    return _BY_SPEC.format(
        title=package.title,
        fields="\n".join(f"    {name}={getattr(spec, name)!r}," for name in _FIELDS),
        arguments=", ".join(signature.arguments),
        compute=_compute(spec, named),
        results=_results([f"{n.lower()}.to(torch.{kinds[n]})" for n in signature.outputs]),
        functions="\n\n".join(_functions(reference, spec)).rstrip(),
    )


def _each(spec: AttentionSpec | None, plan: LaunchPlan) -> tuple[AttentionSpec | None, LaunchPlan]:
    """The spec and the plan of one sequence alone: without what says where the sequences lie."""
    if spec is None or spec.batch is None:
        return spec, plan
    tensors = tuple(t for t in plan.tensors if t.name not in _OF_SEQUENCES)
    one = spec.each.model_copy(update={"kv_dtype": None})  # the scales are applied before
    return one, plan.model_copy(update={"tensors": tensors})


def _compute(spec: AttentionSpec, named: Mapping[str, str]) -> str:
    """The lines of a reference that compute O and LSE of the inputs with these names."""
    if spec.batch is None:
        inputs = ", ".join(f"{name}={argument}" for name, argument in named.items())
        return f"    o, lse = attention(SPEC, {inputs})\n"
    given = ", ".join(f'"{name}": {argument}' for name, argument in named.items())
    return _BY_SEQUENCES.format(given=given)


def _functions(module: Any, spec: AttentionSpec) -> list[str]:
    """The text of the functions of pytorch/reference.py that compute, and of those of
    serving/reference.py that call them for each sequence."""
    own = [f for f in vars(module).values() if isinstance(f, FunctionType)]
    own = [f for f in own if f.__module__ == module.__name__ and f is not module.obstacle]
    texts = [inspect.getsource(f) for f in own]
    if spec.batch is not None:
        from flashwright.serving import reference

        found = [inspect.getsource(f) for f in reference.COMPUTING]
        texts += [
            text.replace("def attention(", "def attention_of_sequences(")
            .replace("reference.attention(", "attention(")
            .replace("given: Tensors", "given: Any")
            for text in found
        ]
    return [text.replace("spec: AttentionSpec", "spec: Any") for text in texts]


def _by_file(package: ExportedPackage, signature: Signature, name: str) -> str:
    """The package's own reference, a function of a dict of arrays, with a `run` around it."""
    path, text = package.folder / name.partition(":")[0], package.reference
    fit = "def reference(inputs, dims)"
    try:
        defined = [n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        defined = []
    asked = name.partition(":")[2] or "reference"
    own_order = all(
        not t.flat and caller_order(t, LAYOUTS[0]) == tuple((i,) for i in range(len(t.axes)))
        for t in package.plan.tensors
    )
    if asked != "reference" or "reference" not in defined or "run" in defined or not own_order:
        raise _refused(
            f"{path}: this reference cannot stand in a Definition",
            f"it must be `{fit}` on tensors as they are passed, without a function `run`; "
            "or use --as hub",
        )
    named = arguments_of(signature.inputs, package.plan)
    sources = signature_sources(signature)
    results = [
        f'torch.as_tensor(found["{t.name}"]).to(device, torch.{NAMES[t.dtype]})'
        for t in signature.written
    ]
    return _BY_FILE.format(
        text=text.rstrip(),
        arguments=", ".join(signature.arguments),
        named=", ".join(f'"{t.name}": {named[t.name]}' for t in signature.read),
        sizes="{" + ", ".join(f'"{n}": {s}' for n, s in sources.items()) + "}",
        first=signature.inputs[0],
        results=_results(results),
    )


def signature_sources(signature: Signature) -> dict[str, str]:
    """For each dim, the Python expression of the arguments that is its size."""
    from flashwright.build.load import dim_sources

    plan = signature.plan
    read = {t.name: a for t, a in zip(signature.read, signature.inputs, strict=True)}
    found = {name: name for name in signature.dims}
    for name, (tensor, axis, part) in dim_sources(plan, LAYOUTS[0]).items():
        text = f"{read[plan.tensors[tensor].name]}.shape[{axis}]"
        found[name] = f"{text} // {part}" if part > 1 else text
    if "kv_heads" in plan.dims and "heads" in found:
        found.setdefault("kv_heads", found["heads"])
    return found


def _results(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _refused(text: str, hint: str) -> Failed:
    return Failed(Diagnostic("FW852", text, help=hint))


# --- Solution ---------------------------------------------------------------------------------


def _solution(
    package: ExportedPackage, signature: Signature, definition: str, own: Mapping[str, str]
) -> dict[str, Any]:
    """The Solution, with these sources besides the launcher, the plan and the kernels."""
    named = arguments_of(signature.inputs, package.plan)
    launch = resources.files("flashwright.export").joinpath("launch.py").read_text("utf-8")
    sources = {
        **own,
        "launch.py": launch,
        "plan.py": f'"""The launch plan."""\n\nPLAN = {package.launch_data(named)!r}\n',
        "code.py": _code(package),
    }
    return {
        "name": f"{AUTHOR}_{definition}_{package.plan.arch}_{package.digest}",
        "definition": definition,
        "author": AUTHOR,
        "description": f"A compiled kernel for {package.plan.arch}, launched through the driver.",
        "spec": {
            "language": "python",
            "target_hardware": [f"NVIDIA_{g.name.upper()}" for g in cards_of(package.plan.arch)],
            "entry_point": "main.py::run",
            "dependencies": ["torch"],
            "destination_passing_style": True,
        },
        "sources": [{"path": path, "content": text} for path, text in sources.items()],
    }


def _code(package: ExportedPackage) -> str:
    """The kernels as Python: base64 of the compressed bytes."""
    parts = []
    for name, data in package.files().items():
        text = base64.b64encode(zlib.compress(data, 9)).decode()
        lines = "\n".join(textwrap.wrap(text, _LINE))
        parts.append(f'    "{name}": """\n{lines}\n""",\n')
    return '"""The compiled kernels."""\n\nFILES = {\n' + "".join(parts) + "}\n"
