"""A user's reference: a function in a Python file that computes the expected outputs.

It is one of two kinds:

    def reference(inputs, dims): ...    float64 arrays by name, and the sizes by name
    def attention(q, k, v): ...         any of the inputs, by the names of the parameters

With the second kind, a file that imports torch gets float64 tensors on the CPU. Any other gets
NumPy arrays. The file runs in a separate process (reference_process.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashwright.spec import BadSpec

Array = NDArray[Any]
Floats = NDArray[np.float64]
Inputs = Mapping[str, Array]
Dims = Mapping[str, int]

MEMORY = 1 << 40
"""Address space for the reference's process, in bytes. What a library reserves counts as well."""
NOISE, DELTA = "noise of d", "error of Delta"
DRAWS = 16
"""Random errors of Delta that the noise of gradients is the RMS of."""
_NAMES = {"query": "Q", "key": "K", "value": "V"}
_OUTPUTS = {"o": "O", "out": "O", "output": "O", "lse": "LSE"}
_ORDER = ("O", "LSE")  # the outputs in a tuple
_USUAL = ("reference", "attention")


@dataclass(frozen=True)
class UserReference:
    """A loaded reference: called with inputs in fp64 (integers stay) and the dims."""

    path: Path
    function: Callable[..., Any]
    inputs_function: Callable[..., Any] | None
    parameters: tuple[inspect.Parameter, ...] | None = None
    """The parameters of a function that takes inputs by name; None if it takes a dict."""
    torch: bool = False
    """Whether it takes torch tensors."""
    subscripts: tuple[str, ...] = ()
    """The keys that a function of a dict looks up in it, read from its text."""

    @property
    def by_name(self) -> bool:
        """Whether its parameters are inputs by name, with axes in the callers' order."""
        return self.parameters is not None

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that it asks for, as far as its text shows them; sizes may be among them."""
        if self.parameters is None:
            return self.subscripts
        usual = {**_NAMES, "q": "Q", "k": "K", "v": "V"}
        return tuple(usual.get(p.name.lower(), p.name) for p in self.parameters)

    def __call__(self, inputs: Inputs, dims: Dims) -> dict[str, Floats]:
        """The outputs by name; a single array is O. Raises BadSpec if the user's code fails."""
        given = {name: _user_copy(array) for name, array in inputs.items()}
        if self.parameters is None:
            result = _run_user_code(self.path, lambda: self.function(given, dict(dims)))
        else:
            values = self._values(self.parameters, given, dims)
            call = _call_torch if self.torch else lambda function, named: function(**named)
            result = _run_user_code(self.path, lambda: call(self.function, values))
        found = {k: v.astype(np.float64) for k, v in self._arrays(result, "reference").items()}
        return _clear_rows_without_keys(found, dims) if self.by_name else found

    def gradients(self, inputs: Inputs, dims: Dims) -> dict[str, Floats]:
        """The gradients of the inputs by name (dQ), for the gradient dO among `inputs`.

        If the function returns LSE, there is also the error of each (NOISE + its name) if every
        Delta, the sum over a row of dO * O, has the standard deviation that `inputs` gives under
        DELTA. Raises BadSpec if the user's code fails, or is not in PyTorch. (NumPy has no
        derivatives. Differences take two calls for each element, and along random directions they
        hide a wrong element among the roundings of all others.)
        """
        if self.parameters is None or not self.torch:
            hint = "write it in PyTorch, as in def attention(q, k, v)"
            raise BadSpec(f"{self.path}: a reference in NumPy has no gradients: {hint}")
        given = {n: _user_copy(x) for n, x in inputs.items() if n not in ("dO", DELTA)}
        values = self._values(self.parameters, given, dims)
        lower = {name.lower(): name for name in given} | _NAMES
        named = {name: lower.get(name.lower(), name) for name in values}
        work = (self.function, values, inputs["dO"].astype(np.float64), inputs[DELTA])
        found: Any = _run_user_code(self.path, lambda: _differentiate(*work))
        return {f"{prefix}{named[name]}": x for (prefix, name), x in found.items()}

    def _values(
        self, parameters: tuple[inspect.Parameter, ...], given: dict[str, Array], dims: Dims
    ) -> dict[str, Any]:
        """The values of the parameters. Raises BadSpec for a parameter without one."""
        every: dict[str, Any] = {name.lower(): size for name, size in dims.items()}
        every |= {name.lower(): array for name, array in given.items()}
        every |= {alias: given[name] for alias, name in _NAMES.items() if name in given}
        wanted = {p.name: p.name.lower() for p in parameters}
        lacking = [
            p.name for p in parameters if wanted[p.name] not in every and not _is_optional(p)
        ]
        if lacking:
            raise BadSpec(
                f"{self.path}: the reference takes {', '.join(lacking)}, which is no input: "
                f"there are {', '.join(sorted(given))}, and the sizes {', '.join(sorted(dims))}; "
                "define make_inputs(rng, dims) to add others"
            )
        return {name: every[key] for name, key in wanted.items() if key in every}

    def make_inputs(self, rng: np.random.Generator, dims: Dims) -> dict[str, Array] | None:
        """The user's inputs by name, or None if the file has no make_inputs."""
        make = self.inputs_function
        if make is None:
            return None
        return self._arrays(_run_user_code(self.path, lambda: make(rng, dict(dims))), "make_inputs")

    def _arrays(self, result: object, what: str) -> dict[str, Array]:
        named = result if isinstance(result, dict) else {"O": result}
        if self.by_name and what == "reference":
            named = _outputs(result)
        arrays = {str(name): _array(value) for name, value in named.items()}
        for name, array in arrays.items():
            if array is None:
                raise BadSpec(f"{self.path}: {what} returned no array of numbers for {name}")
        return {name: array for name, array in arrays.items() if array is not None}


# --- loading ----------------------------------------------------------------------------------


def split(text: str) -> tuple[str, str]:
    """The file and the function of `mine.py:mine`; `mine.py` names no function."""
    found = re.fullmatch(r"(.*\.py):([A-Za-z_]\w*)", text, re.DOTALL)
    return (found[1], found[2]) if found else (text, "")


def user_reference(path: str | Path) -> UserReference:
    """Load the function of `FILE.py` or `FILE.py:function`, and `make_inputs(rng, dims)` if any.

    Raises BadSpec with file and line for an error of the file.
    """
    file, wanted = split(str(path))
    path = Path(file)
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadSpec(f"{path}: the reference cannot be read: {why}") from None
    module = ModuleType(f"flashwright_reference_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look the module up there
    _run_user_code(path, lambda: exec(compile(source, str(path), "exec"), module.__dict__))
    function = _function(path, module, wanted)
    inputs = getattr(module, "make_inputs", None)
    if inputs is not None and not callable(inputs):
        raise BadSpec(f"{path}: make_inputs is no function: write def make_inputs(rng, dims)")
    takes, torch = _parameters(path, function), _imports_torch(source)
    return UserReference(path, function, inputs, takes, torch, _subscripts(source, function))


def _function(path: Path, module: ModuleType, wanted: str) -> Callable[..., Any]:
    """The function named by the user, else `reference` or `attention`, else the only one."""
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, FunctionType)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and name != "make_inputs"
    ]
    usual = [name for name in _USUAL if callable(getattr(module, name, None))]
    name = wanted or (usual[0] if usual else own[0] if len(own) == 1 else "")
    function = getattr(module, name, None) if name else None
    if callable(function):
        return function  # type: ignore[no-any-return]
    if wanted:
        there = f"there are {', '.join(own)}" if own else "there is none"
        raise BadSpec(f"{path}: defines no function {wanted}: {there}")
    if own:
        raise BadSpec(f"{path}: defines no reference: say which, as in {path.name}:{own[0]}")
    hint = "add def reference(inputs, dims) or def attention(q, k, v)"
    raise BadSpec(f"{path}: defines no reference: {hint}")


def _parameters(path: Path, function: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    """The parameters of a function that takes inputs by name; None if it takes a dict."""
    try:
        found = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return None
    names = {p.name.lower() for p in found}
    if names & {"q", "k", "v", *_NAMES}:
        wrong = [p.name for p in found if p.kind is p.POSITIONAL_ONLY]
        if wrong:
            raise BadSpec(f"{path}: inputs come by name: take the / out of the parameters")
        return found
    return None


def _subscripts(source: bytes, function: Callable[..., Any]) -> tuple[str, ...]:
    """The names by which a function looks things up in its first parameter: inputs["Q"]."""
    found: dict[str, None] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name != getattr(function, "__name__", ""):
            continue
        given = node.args.args[0].arg if node.args.args else ""
        for part in ast.walk(node):
            if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name):
                key = part.slice.value if isinstance(part.slice, ast.Constant) else None
                if part.value.id == given and isinstance(key, str):
                    found[key] = None
    return tuple(found)


def _is_optional(parameter: inspect.Parameter) -> bool:
    """Whether a call may leave the parameter out."""
    several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return several or parameter.default is not parameter.empty


def _imports_torch(source: bytes) -> bool:
    """Whether the file imports torch, at its top or in a function."""
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "torch" for name in names):
            return True
    return False


# --- calling ----------------------------------------------------------------------------------


def _call_torch(function: Callable[..., Any], values: Mapping[str, Any]) -> object:
    """Call a function with tensors. New tensors in it are float64 too, unless it says otherwise."""
    import torch

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            tensors = {
                name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
                for name, value in values.items()
            }
            return function(**tensors)
    finally:
        torch.set_default_dtype(usual)


def _differentiate(
    function: Callable[..., Any], values: Mapping[str, Any], do: Floats, delta: Floats
) -> dict[tuple[str, str], Floats]:
    """The gradients of a function of tensors, by prefix and parameter: see `gradients`.

    A NaN that autograd keeps for the backward pass is taken for a 0: PyTorch's softmax gives NaN in
    a row without keys, and with it every gradient would be NaN.
    """
    import torch

    def keep(tensor: Any) -> Any:
        known = tensor.detach()
        return torch.where(known.isnan(), 0, known) if known.is_floating_point() else known

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            tensors = {
                name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
                for name, value in values.items()
            }
            leaves = {n: t for n, t in tensors.items() if getattr(t, "is_floating_point", bool)()}
            for leaf in leaves.values():
                leaf.requires_grad_()
            outputs: Any = _outputs(function(**tensors))

            def vjp(name: str, given: Floats) -> list[Floats]:
                parts = torch.autograd.grad(
                    *(outputs[name], [*leaves.values()], torch.from_numpy(given)),
                    retain_graph=True,
                    allow_unused=True,
                )
                return [
                    np.zeros(tuple(leaf.shape)) if part is None else part.numpy()
                    for leaf, part in zip(leaves.values(), parts, strict=True)
                ]

            found = {("d", n): x for n, x in zip(leaves, vjp("O", do), strict=True)}
            if "LSE" in outputs:
                signs = np.random.default_rng(0).choice([-1.0, 1.0], (DRAWS, *delta.shape))
                drawn = [vjp("LSE", delta * sign) for sign in signs]
                spread = [np.sqrt(np.mean(np.square(x), axis=0)) for x in zip(*drawn, strict=True)]
                found |= {(NOISE, n): np.nan_to_num(x) for n, x in zip(leaves, spread, strict=True)}
            return found
    finally:
        torch.set_default_dtype(usual)


def _outputs(result: object) -> dict[str, object]:
    """The outputs by name, from O alone, (O, LSE) or a dict; names in upper or lower case."""
    if isinstance(result, tuple):
        named = dict(zip(_ORDER, result, strict=False))
        return {name: value for name, value in named.items() if value is not None}
    if isinstance(result, dict):
        return {_OUTPUTS.get(str(k).lower(), str(k)): v for k, v in result.items()}
    return {"O": result}


def _clear_rows_without_keys(found: dict[str, Floats], dims: Dims) -> dict[str, Floats]:
    """Set queries before the first key to O = 0 and LSE = -inf. With a causal mask they see no key,
    and PyTorch's softmax gives NaN there."""
    many = max(0, dims.get("q_len", 0) - dims.get("kv_len", 0))
    for name, empty in zip(_ORDER, (0.0, -np.inf), strict=True):
        if many and name in found and found[name].ndim >= 3:
            rows = found[name][:, :, :many]
            rows[np.isnan(rows)] = empty
    return found


def _run_user_code(path: Path, work: Callable[[], object]) -> object:
    try:
        return work()
    except BadSpec:
        raise
    except (Exception, SystemExit) as error:
        frames = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f[0] == str(path)]
        line = frames[-1] if frames else None
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno
        where = f"{path}:{line}" if line else str(path)
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            hint = "install it, or write the reference in NumPy"
            raise BadSpec(f"{where}: PyTorch is not installed here: {hint}") from None
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BadSpec(f"{where}: {type(error).__name__}: {why}".rstrip(": ")) from None


def _user_copy(array: Array) -> Array:
    """A copy, so that the user's code cannot change what the kernel gets."""
    kept = array.dtype if array.dtype.kind in "iub" else np.dtype(np.float64)
    return array.astype(kept)


def _array(value: object) -> Array | None:
    if hasattr(value, "detach"):  # a tensor; NumPy takes none with a gradient, or in bf16
        value = value.detach().cpu().double().numpy()
    try:
        array = np.asarray(value)
        array.astype(np.float64)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind not in "cOSUMm" else None
