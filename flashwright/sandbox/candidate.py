"""What is judged or measured: a kernel package, a Python callable, or a shared library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashwright.lang.diagnostic import Diagnostic, Failed

Kind = Literal["package", "python", "library"]


class Unable(Exception):
    """A candidate that does not do a problem; the message says why. That is no offence."""


class InWorker(BaseException):
    """Asked for inside a candidate's own process, where nothing is judged.

    A script that ends in `verify(attention, ...)` runs in the worker only until there: by then it
    has defined what is judged. Not an Exception, so that no `except` of the script takes it.
    """


@dataclass(frozen=True)
class Candidate:
    """Where the code is, so that another process can load it.

    A callable takes Q, K, V, then Slopes, Sink and Idx where the spec has them, each (batch, heads,
    length, dim), and returns O, or O and LSE. A function of a shared library (apache-tvm-ffi's
    calling convention) takes the same, and then O and LSE to write to.
    """

    kind: Kind
    where: str
    """A folder, a file, or the name of a module."""
    function: str = ""
    factory: bool = False
    """The function is given the spec and returns the callable; it may raise Unable."""
    title: str = ""
    """As the user named it."""
    untrusted: bool = False
    """A model wrote it: its process opens its own file and no other of the user's."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.title or f"{self.where}:{self.function}".rstrip(":")

    @classmethod
    def package(cls, folder: Path, title: str = "") -> Candidate:
        """A kernel package; the other process may stand in another folder."""
        return cls("package", str(folder.resolve()), title=title or str(folder))

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """`FOLDER`, `file.py:function`, `package.module:function` or `library.so:function`."""
        if text and Path(text).is_dir():
            return cls.package(Path(text), text)
        where, colon, function = text.rpartition(":")
        if not colon or not where or not function:
            hint = "a folder, file.py:function, module:function or library.so:function"
            if Path(text).exists():
                hint = f"say which function: {text}:attention"
            raise Failed(Diagnostic("FW857", f"{text} is nothing that can be judged", help=hint))
        path = Path(where)
        if path.suffix not in (".py", ".so"):
            return cls("python", where, function, title=text)
        if not path.is_file():
            raise Failed(Diagnostic("FW857", f"there is no file {where}"))
        kind: Kind = "python" if path.suffix == ".py" else "library"
        return cls(kind, str(path.resolve()), function, title=text)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Candidate:
        """A function of this program: the other process imports the file that it is defined in."""
        name = str(getattr(function, "__qualname__", "") or getattr(function, "__name__", ""))
        module = getattr(function, "__module__", None)
        found: Any = sys.modules.get(str(module))
        for part in name.split("."):
            found = getattr(found, part, None)
        if not name or module is None or (found is not None and found is not function):
            raise _unreachable(function)
        if found is None and "<" in name:
            raise _unreachable(function)
        if module != "__main__":
            return cls("python", module, name, title=f"{module}:{name}")
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise _unreachable(function)
        return cls("python", str(Path(file).resolve()), name, title=f"{Path(file).name}:{name}")


def _unreachable(function: object) -> Failed:
    text = f"{function!r} cannot be loaded in another process"
    hint = "define it with `def` at the top level of a file, so that it can be imported"
    return Failed(Diagnostic("FW857", text, help=hint))
