"""The candidate to judge or measure: a kernel package, a Python callable or a shared library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flashwright.lang.diagnostic import Diagnostic, Failed

Kind = Literal["package", "python", "library"]


class Unable(Exception):
    """Raised if a candidate does not support a problem, with the reason. It is no offence."""


class InWorker(BaseException):
    """Raised if a candidate's script calls `verify` inside the candidate's process.

    A script that ends in `verify(attention, ...)` runs in the worker up to that call: by then it
    has defined its function. This is no Exception, so that no `except` of the script catches it.
    """


@dataclass(frozen=True)
class Candidate:
    """Where the code is, so that another process can load it.

    A callable takes Q, K, V, then Slopes, Sink and Idx if the spec has them, each (batch, heads,
    length, dim), and returns O, or O and LSE. A function of a shared library (with apache-tvm-ffi's
    calling convention) takes the same, and then O and LSE to write to.
    """

    kind: Kind
    where: str
    """A folder, a file, or the name of a module."""
    function: str = ""
    factory: bool = False
    """Whether the function takes the spec and returns the callable; it may raise Unable."""
    title: str = ""
    """The name the user gave it."""
    untrusted: bool = False
    """Whether a model wrote it: its process may open no other file of the user's."""

    @property
    def name(self) -> str:
        """The candidate as messages name it: its title, else its path and function."""
        return self.title or f"{self.where}:{self.function}".rstrip(":")

    @classmethod
    def package(cls, folder: Path, title: str = "") -> Candidate:
        """A kernel package, by its absolute path: the worker has another working folder."""
        return cls("package", str(folder.resolve()), title=title or str(folder))

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """From `FOLDER`, `file.py:function`, `package.module:function` or `library.so:function`.

        Raises Failed with FW857 for any other text and for a missing file.
        """
        if text and Path(text).is_dir():
            return cls.package(Path(text), text)
        where, colon, function = text.rpartition(":")
        if not colon or not where or not function:
            hint = "a folder, file.py:function, module:function or library.so:function"
            if Path(text).exists():
                hint = f"say which function: {text}:attention"
            raise Failed(Diagnostic("FW857", f"{text} is not a candidate", help=hint))
        path = Path(where)
        if path.suffix not in (".py", ".so"):
            return cls("python", where, function, title=text)
        if not path.is_file():
            raise Failed(Diagnostic("FW857", f"there is no file {where}"))
        kind: Kind = "python" if path.suffix == ".py" else "library"
        return cls(kind, str(path.resolve()), function, title=text)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Candidate:
        """A function of this program. The worker imports the file that defines it.

        Raises Failed with FW857 if the function cannot be imported.
        """
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
