"""CUDA of your own to PTX: with your include folders, macros and options of nvcc, and instances of
your templates.

ptxas has no part in it: what only ptxas refuses, such as a wgmma that it would serialise, runs.
Compiled PTX is cached by the source, the options and every header that was read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flashwright.build import blame
from flashwright.build.cache import Cache, CacheEntry, digest
from flashwright.build.compile import NAME, TIME_LIMIT, target
from flashwright.build.process import run
from flashwright.build.toolchain import Toolchain, find
from flashwright.files import cannot
from flashwright.lang.diagnostic import Diagnostic, Failed

_FLAGS = ("-O3", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-ptx", "-lineinfo")
_STANDARD = "-std=c++17"
_PTX, _LIST = "kernel.ptx", "kernel.d"
# nvcc refuses an option that is given twice.
_OWN_OPTION = re.compile(r"(?:--?std|-O\d?|--optimize|--extended-lambda|-lineinfo)\b")
_TAKEN = re.compile(r"-(?:o|c|ptx|cubin|fatbin|dc|dlink|E|M+D?|MF|run|lib|link|keep|dryrun)$")
_ARCH = re.compile(r"--?(?:arch|gencode|gpu-architecture|gpu-code|generate-code|code)\b")
_MISSING = re.compile(r"(\S+): No such file or directory")


@dataclass(frozen=True)
class CompileOptions:
    """How the source is compiled."""

    arch: str = "sm_80"
    include: tuple[str, ...] = ()
    """Folders of headers; that of the source file comes first."""
    define: Mapping[str, str | None] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Further options of nvcc."""
    instantiate: tuple[str, ...] = ()
    """Instances of templates, such as `reduce<float, 256>`."""

    @property
    def command(self) -> list[str]:
        """The options of nvcc. Raises Failed with FW831 for one that cannot be taken."""
        _check_flags(self.flags)
        replaced = {f.split("=")[0].lstrip("-")[:3] for f in self.flags if _OWN_OPTION.match(f)}
        own = [f for f in (_STANDARD, *_FLAGS) if not _is_replaced(f, replaced)]
        try:
            own += target(self.arch, self.arch)
        except ValueError as error:
            raise _unusable(str(error)) from None
        macros = [f"-D{n}" if v is None else f"-D{n}={v}" for n, v in self.define.items()]
        return [*own, *macros, *self.flags, *(f"-I{folder}" for folder in self.include)]


def _is_replaced(flag: str, replaced: set[str]) -> bool:
    name = flag.split("=")[0].lstrip("-")[:3]
    return name in replaced or (flag == "-O3" and any(one[:1] == "O" for one in replaced))


def _check_flags(flags: Sequence[str]) -> None:
    for flag in flags:
        if _ARCH.match(flag):
            raise _unusable(f"the option {flag} of nvcc: name the architecture by arch=")
        if _TAKEN.match(flag):
            raise _unusable(f"the option {flag} of nvcc: the emulator chooses what nvcc makes")


def _unusable(text: str) -> Failed:
    return Failed(Diagnostic("FW831", text))


def checked_folders(folders: Sequence[str | Path]) -> tuple[str, ...]:
    """Include folders as absolute paths. Raises Failed with FW001 for one that is not there."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise Failed(Diagnostic("FW001", f"there is no include folder {folder}"))
    return tuple(str(Path(folder).resolve()) for folder in folders)


def compile_own(source: str, options: CompileOptions, name: str = NAME) -> str:
    """The PTX of a source. `name` stands for it in messages.

    Raises Failed: FW821 without nvcc, FW822 if nvcc rejects the code, FW831 for an option that
    cannot be taken.
    """
    text = _with_instances(source, options.instantiate)
    tools, store, arguments = find(), Cache(), options.command
    key = digest(["own", text, tools.version, *arguments], [])
    entry = store.get(key)
    if entry is None or not _is_current(entry):
        with store.locked(key, patience=TIME_LIMIT):
            entry = store.get(key)  # the previous holder of the lock may have compiled it
            if entry is None or not _is_current(entry):
                entry = _compiled(text, arguments, tools, store, _Told(source, name, options))
                store.put(key, entry)
    return entry.ptx.decode()


def _with_instances(source: str, instances: Sequence[str]) -> str:
    """The source and, behind its last line, a use of each instance, which makes nvcc compile it."""
    lines = [
        f"namespace {{ [[maybe_unused]] auto* flashwright_instance_{n} = &{instance}; }}"
        for n, instance in enumerate(instances)
    ]
    return "\n".join([source, *lines, ""]) if lines else source


@dataclass(frozen=True)
class _Told:
    """What messages are about."""

    source: str
    name: str
    options: CompileOptions


def _compiled(
    text: str, arguments: Sequence[str], tools: Toolchain, store: Cache, told: _Told
) -> CacheEntry:
    with store.workplace() as place:
        folders = ["-I", str(tools.device), "-I", str(tools.cutlass)]
        listed = ["-MD", "-MF", _LIST]
        command = [str(tools.nvcc), *arguments, *folders, *listed, "-o", _PTX, NAME]
        try:
            (place / NAME).write_text(text, encoding="utf-8")
            code, log = run(command, place, TIME_LIMIT)
            if code:
                failed = blame.refused(code, log, blame.LineMap(None, text, own=True))
                raise Failed(*(_explained(one, told) for one in failed.diagnostics))
            if not (place / _PTX).is_file():
                raise Failed(Diagnostic("FW822", f"nvcc makes no PTX: {log.strip()[:300]}"))
            files = {path: _digest(path) for path in _read_files(place)}
            return CacheEntry({"files": files}, b"", (place / _PTX).read_bytes())
        except OSError as error:
            raise cannot("compile in", place, error) from None


def _explained(one: Diagnostic, told: _Told) -> Diagnostic:
    """An error of nvcc with its remedy; one behind the source's last line is an instance's."""
    lines = told.source.count("\n") + 1
    if one.span is not None and one.span.line > lines:
        instance = told.options.instantiate[one.span.line - lines - 1]
        return replace(one, message=f"cannot instantiate {instance}: {one.message}", span=None)
    if _MISSING.search(one.message):
        return replace(one, help="name the folder of the header: include=[...], --include FOLDER")
    return one


# --- the files that were read -----------------------------------------------------------------


def _read_files(place: Path) -> Iterator[str]:
    """The headers, by the rule that nvcc writes for make."""
    _, _, names = (place / _LIST).read_text().replace("\\\n", " ").partition(" : ")
    for name in re.findall(r"(?:\\[ #\\]|[^\s])+", names):
        path = Path(place, re.sub(r"\\([ #\\])", r"\1", name).replace("$$", "$"))
        if path.name != NAME or path.parent != place:
            yield str(path)


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _is_current(entry: CacheEntry) -> bool:
    """Whether all headers are as they were when it was compiled."""
    try:
        return all(_digest(path) == known for path, known in entry.facts["files"].items())
    except (OSError, KeyError):
        return False
