"""The one folder that an agent's tools may use: its paths, and what its specs refer to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from flashwright import spec as specs
from flashwright.build import cache
from flashwright.confine.landlock import restrict
from flashwright.confine.start import UNCONFINED
from flashwright.files import cannot, write
from flashwright.judge.reference import split
from flashwright.lang.diagnostic import Diagnostic, Failed

SKILL = Path(__file__).with_name("skills") / "write-attention-kernel"
"""The folder of the skill that teaches an agent to write a kernel."""
MOST_BYTES = 1 << 20
TEXTS = (".tl", ".toml", ".py", ".md", ".txt")
"""The files that an agent may write."""
DEVICES = ("/dev", "/proc")
GPU_CACHES = (".nv", ".triton", ".cache/torch")
"""Of CUDA, Triton and PyTorch, in the user's home."""


class Workspace:
    """A folder, and the paths in it. Every method raises Failed (FW006) for a path outside."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.resolve()
        if not self.root.is_dir():
            text = f"{folder}, which is to be the workspace, is not a folder"
            raise Failed(
                Diagnostic("FW001", text, help="make it, or give another: --workspace DIR")
            )

    def confine(self) -> bool:
        """Let this process and its children write here, to the caches and to temporary files only.

        Returns whether the system can do that. It is permanent.
        """
        if os.environ.get(UNCONFINED) == "1":
            return False
        cache.folder().mkdir(parents=True, exist_ok=True)
        home = [str(Path.home() / name) for name in GPU_CACHES]
        mine = (str(self.root), str(cache.folder()), tempfile.gettempdir(), *DEVICES, *home)
        return restrict(("/",), mine)

    def path(self, given: str) -> str:
        """The path, relative to the folder, as a command may take it."""
        if not given or "\0" in given:
            raise _outside(given, "is no path")
        path = PurePosixPath(given)
        if path.is_absolute() or given.startswith("~"):
            raise _outside(given, "is absolute")
        if ".." in path.parts:
            raise _outside(given, "has `..` in it")
        if any(part.startswith("-") for part in path.parts):
            raise _outside(given, "has a name that begins with `-`")
        self._refuse_links(self.root / path, given)
        return str(path)

    def tree(self, given: str) -> str:
        """The path, of which no link in it leads out."""
        name = self.path(given)
        for path in (self.root / name).rglob("*"):
            self._refuse_links(path, str(path.relative_to(self.root)))
        return name

    def program(self, given: str, spec: str | None = None) -> str:
        """A TL file or a package's folder, whose spec names no file outside."""
        name = self.tree(given)
        here = self.root / name
        folder = here if here.is_dir() else here.parent
        beside = (here.with_suffix(".toml"), folder / "spec.toml")
        for path in beside if spec is None else ():
            if path.is_file():
                self.spec(str(path.relative_to(self.root)))
        if spec is not None:
            self.spec(spec)
        return name

    def spec(self, given: str) -> str:
        """The option `--spec`: a file of the folder or settings, and a reference of the folder."""
        is_file = given.endswith(".toml") or (self.root / given).is_file()
        base = (self.root / self.path(given)).parent if is_file else self.root
        try:
            if is_file:
                reference = specs.load(self.root / given).reference
            else:
                reference = specs.parse_inline(given).get("reference")
        except specs.BadSpec:
            return given  # the command says what is wrong with it, and reads no reference
        if isinstance(reference, str):
            self._refuse_links(base / split(reference)[0], reference)
        return given

    def write(self, given: str, text: str) -> str:
        """Write a text file. Its folder is made if it is missing."""
        name = self.path(given)
        if PurePosixPath(name).suffix not in TEXTS:
            raise _outside(given, f"may not be written: the names end in {', '.join(TEXTS)}")
        if len(text.encode("utf-8", "replace")) > MOST_BYTES:
            raise Failed(Diagnostic("FW003", f"{given} would have more than {MOST_BYTES} bytes"))
        path = self.root / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot("write", Path(given), error) from None
        write(path, text)
        return name

    def read(self, given: str) -> str:
        """A text file."""
        path = self.root / self.path(given)
        if not path.is_file():
            raise cannot("read", Path(given), FileNotFoundError(2, "No such file"))
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                text = f"{given} has more than {MOST_BYTES} bytes"
                raise Failed(Diagnostic("FW003", text))
            return data.decode()
        except OSError as error:
            raise cannot("read", Path(given), error) from None
        except UnicodeDecodeError:
            raise Failed(Diagnostic("FW002", f"{given} is not UTF-8 text")) from None

    def listing(self, most: int = 500) -> list[str]:
        """The files of the folder, without hidden ones."""
        names = (str(path.relative_to(self.root)) for path in _files(self.root))
        return sorted(name for name, _ in zip(names, range(most), strict=False))

    def _refuse_links(self, path: Path, given: str) -> None:
        try:
            inside = path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # a circle of links
            inside = False
        if not inside:
            raise _outside(given, "leads out of the workspace")


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _outside(given: str, why: str) -> Failed:
    hint = "give a path relative to the workspace, such as `ops/mine.tl`"
    return Failed(Diagnostic("FW006", f"{given or 'the empty path'} {why}", help=hint))
