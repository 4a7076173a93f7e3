"""The arguments of a kernel as `flashwright emulate --arg` spells them.

--arg n=1000 --arg x=float32[64,128]:random --arg y=@y.npy --arg z='&x+64'
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashwright.emulate.device_memory import Array
    from flashwright.emulate.own import DeclaredKernel, EmulatedKernel
    from flashwright.emulate.signature import ParameterSignature

FORMS = (
    "an argument is a number (1000, 2.5, true, null), an array (float32[64,128]:random; or zeros, "
    "ones, arange, empty, a number, @FILE), a file (@x.npy), memory of another argument (&x, "
    "&x+64) or the bytes of a struct (hex:0a0b)"
)
_NAMED = re.compile(r"(\w+)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"([A-Za-z]\w*)?\[(\d+(?:,\d+)*)\](?::(.+))?", re.DOTALL)
_ALIAS = re.compile(r"&(\w+)(?:\+(\d+))?")
_WORDS = {"null": None, "true": True, "false": False}
_MOST = 1 << 32  # bytes of an array
_SAMPLE, _SAMPLE_BYTES = 1000, 4096


class BadArgument(ValueError):
    """An argument of the command line that cannot be taken, with the reason."""


@dataclass
class GivenArguments:
    """The arguments of one launch."""

    values: list[Any] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)
    """The arrays among them, by the names of their parameters."""
    written: list[str] = field(default_factory=list)
    """Those that the kernel may write to."""


def names_of(kernel: EmulatedKernel | DeclaredKernel) -> list[str]:
    """The names of the parameters; a number for one that is not known."""
    known = kernel.signature.parameters or ()
    names = [one.name for one in known] or [""] * len(kernel.parameters)
    return [name or str(number) for number, name in enumerate(names)]


def assigned(kernel: EmulatedKernel, texts: Sequence[str], option: str) -> dict[int, str]:
    """The text of each argument, by the number of its parameter: `NAME=TEXT`, or in their order.

    Raises BadArgument for a name that is not a parameter's, and for two of one parameter.
    """
    names, found, unnamed = names_of(kernel), dict[int, str](), list[str]()
    for text in texts:
        named = _NAMED.fullmatch(text)
        if named is None:
            unnamed.append(text)
            continue
        number = int(named[1]) if named[1].isdecimal() else -1
        number = names.index(named[1]) if named[1] in names else number
        if not 0 <= number < len(names):
            known = ", ".join(names) or "none"
            raise BadArgument(
                f"{kernel.signature.shown} has no parameter {named[1]}; they are: {known}"
            )
        if number in found:
            raise BadArgument(f"{option} {named[1]} is given twice")
        found[number] = named[2]
    free = [number for number in range(len(names)) if number not in found]
    if len(unnamed) > len(free):
        raise BadArgument(f"{unnamed[len(free)]!r} is one more than {kernel.signature.shown} takes")
    return found | dict(zip(free, unnamed, strict=False))


def make_arguments(kernel: EmulatedKernel, texts: Sequence[str], seed: int) -> GivenArguments:
    """The arguments of a launch. Raises BadArgument for what is missing or cannot be read."""
    names, given = names_of(kernel), assigned(kernel, texts, "--arg")
    known = kernel.signature.parameters or (None,) * len(names)
    for number, name in enumerate(names):
        if number not in given:
            text = f"argument {number} is missing: {_described(name, known[number])}"
            raise BadArgument(f"{text}, such as --arg {name}={sample(kernel, number)}")
    made, aliases = GivenArguments([None] * len(names)), dict[int, re.Match[str]]()
    for number, text in sorted(given.items()):
        alias = _ALIAS.fullmatch(text)
        if alias is not None:
            aliases[number] = alias
            continue
        try:
            value = _value(text, known[number], (seed, number))
        except BadArgument as error:
            raise BadArgument(f"{names[number]}={text}: {error}") from None
        made.values[number] = value
        _note(made, names[number], known[number], value)
    for number, alias in aliases.items():
        made.values[number] = _aliased(made.arrays, alias)
    return made


def _note(
    made: GivenArguments, name: str, parameter: ParameterSignature | None, value: Any
) -> None:
    """Remember an array by its parameter's name."""
    import numpy as np

    from flashwright.emulate.arguments import Empty

    array = value.array if isinstance(value, Empty) else value
    if isinstance(array, np.ndarray):
        made.arrays[name] = array
        if parameter is None or parameter.type is None or not parameter.type.reads_only:
            made.written.append(name)


def _described(name: str, parameter: ParameterSignature | None) -> str:
    if parameter is None or parameter.type is None:
        return name
    from flashwright.emulate.signature import cut

    return f"{cut(parameter.type.text)} {name}"


# --- one value --------------------------------------------------------------------------------


def _value(text: str, parameter: ParameterSignature | None, seed: tuple[int, int]) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("hex:"):
        return _bytes(text[4:])
    if text.startswith("@"):
        return _loaded(Path(text[1:]), _dtype_of(parameter))
    array = _ARRAY.fullmatch(text)
    if array is not None:
        return _array(array, parameter, seed)
    for kind in (lambda word: int(word, 0), float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise BadArgument(FORMS)


def _bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise BadArgument("bytes are pairs of hexadecimal digits: hex:00ff") from None


def _dtype_of(parameter: ParameterSignature | None) -> str | None:
    """The dtype that the kernel's pointer takes."""
    import numpy as np

    from flashwright.emulate.arguments import dtypes_of

    pointee = parameter.type.pointee if parameter and parameter.type else None
    wanted = dtypes_of(pointee, np.dtype(np.uint8)) if pointee else ()
    return wanted[0] if wanted else None


def _dtype(name: str) -> Any:
    import ml_dtypes
    import numpy as np

    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        text = "float32, float64, float16, bfloat16, float8_e4m3fn, int32, uint8, bool, ..."
        raise BadArgument(f"{name} is no dtype: {text}") from None


def _array(found: re.Match[str], parameter: ParameterSignature | None, seed: Any) -> Any:
    name = found[1] or _dtype_of(parameter)
    if name is None:
        raise BadArgument("name the dtype: float32[1000]; the kernel's type does not tell it")
    dtype, shape = _dtype(name), tuple(int(size) for size in found[2].split(","))
    size = dtype.itemsize
    for count in shape:
        size *= count
    if size > _MOST:
        raise BadArgument(f"an array of {size} bytes is too large to be emulated")
    return _filled(found[3] or "zeros", dtype, shape, seed)


def _filled(how: str, dtype: Any, shape: tuple[int, ...], seed: Any) -> Any:
    import numpy as np

    from flashwright.emulate.arguments import Empty

    if how.startswith("@"):
        return _read_as(Path(how[1:]), dtype, shape)
    if how == "random":
        rng = np.random.default_rng(seed)
        if dtype.kind in "iub":
            return rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)
    if how == "arange":
        return np.arange(np.prod(shape, dtype=np.int64)).astype(dtype).reshape(shape)
    if how == "empty":
        return Empty(np.zeros(shape, dtype))
    try:
        return np.full(shape, {"zeros": 0, "ones": 1}.get(how) or float(how or 0), dtype)
    except ValueError:
        if how in ("zeros", "ones"):
            return np.full(shape, how == "ones", dtype)
        words = "random, zeros, ones, arange, empty, a number or @FILE"
        raise BadArgument(f"an array is filled with {words}, not {how}") from None


def _loaded(path: Path, wanted: str | None) -> Array:
    """The array of a .npy file; of types that NumPy has no names for, the file has the bits."""
    import numpy as np

    if path.suffix != ".npy":
        raise BadArgument(
            f"{path} is no .npy file: give the dtype and the shape, float32[10]:@FILE"
        )
    try:
        array: Array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise BadArgument(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadArgument(f"{path} is no array that can be read: {error}") from None
    if array.dtype.kind == "V" and array.dtype.names is None and wanted:
        dtype = _dtype(wanted)
        array = array.view(dtype) if dtype.itemsize == array.itemsize else array
    return np.ascontiguousarray(array)


def _read_as(path: Path, dtype: Any, shape: tuple[int, ...]) -> Array:
    """The array of a .npy file or of a file of plain bytes."""
    import numpy as np

    if path.suffix == ".npy":
        array = _loaded(path, str(dtype))
        if array.dtype != dtype or array.shape != shape:
            found = f"{array.dtype}[{','.join(map(str, array.shape))}]"
            raise BadArgument(f"{path} is {found}: give @{path} without dtype and shape to take it")
        return array
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadArgument(f"cannot read {path}: {error.strerror}") from None
    wanted = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(data) != wanted:
        raise BadArgument(f"{path} has {len(data)} bytes, and the array {wanted}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _aliased(arrays: Mapping[str, Array], alias: re.Match[str]) -> Any:
    from flashwright.emulate.device_memory import make_address

    if alias[1] not in arrays:
        text = f"{alias[0]}: {alias[1]} is no argument with an array"
        raise BadArgument(f"{text}; those are: {', '.join(arrays) or 'none'}")
    try:
        return make_address(arrays[alias[1]], int(alias[2] or 0))
    except IndexError as error:
        raise BadArgument(f"{alias[0]}: {error}") from None


def expected(text: str, array: Array) -> Array:
    """What an array is compared with: `@FILE`, or a number. Raises BadArgument."""
    import numpy as np

    value = _value(text, None, (0, 0))
    if isinstance(value, np.ndarray) and value.size == array.size:
        if value.dtype.kind == "V" and value.itemsize == array.itemsize:
            value = value.view(array.dtype)
        return value.reshape(array.shape)
    if isinstance(value, int | float):
        return np.full(array.shape, value)
    found = f"the shape {value.shape}" if isinstance(value, np.ndarray) else "no array"
    raise BadArgument(f"{text} has {found}, and the argument {array.shape}: give @FILE or a number")


# --- examples ---------------------------------------------------------------------------------


def sample(kernel: EmulatedKernel | DeclaredKernel, number: int) -> str:
    """An argument that the parameter takes."""
    known = kernel.signature.parameters
    parameter, variable = known[number] if known else None, kernel.parameters[number]
    kind = parameter.type if parameter else None
    if kind is not None and kind.pointee is not None:
        dtype = _dtype_of(parameter)
        if kind.pointee.endswith("*"):
            return "null"
        return f"{dtype}[{_SAMPLE}]:random" if dtype else f"uint8[{_SAMPLE_BYTES}]:zeros"
    if kind is not None and kind.text == "bool":
        return "true"
    if variable.real:
        return "1.0"
    if variable.size > 8 or variable.size != variable.align:
        return f"hex:{'00' * variable.size}"
    if variable.size < 8 or kind is not None:
        return str(_SAMPLE if variable.size > 1 else 1)
    return f"uint8[{_SAMPLE_BYTES}]:zeros"
