"""What all commands share: input, diagnostics, exit codes."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO

import typer

from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.nodes import Dim, Tree, line_span
from flashwright.version import __version__

if TYPE_CHECKING:
    from flashwright.gpu import Gpu
    from flashwright.program.kernels import Kernels
    from flashwright.program.program import Program
    from flashwright.spec import AttentionSpec

MESSAGES = "FLASHWRIGHT_MESSAGES"
"""Set to json: diagnostics and progress go to stderr as JSON, an object on each line."""
FINE, WRONG, BAD_INPUT, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 70, 130, 141

P = ParamSpec("P")


# --- errors -----------------------------------------------------------------------------------


class Blamed(Exception):
    """Diagnostics with the file and the text they are about."""

    def __init__(self, diagnostics: Sequence[Diagnostic], filename: str, source: str) -> None:
        super().__init__(filename)
        self.diagnostics, self.filename, self.source = diagnostics, filename, source


@contextmanager
def blaming(filename: str, source: str = "") -> Iterator[None]:
    """Turns Failed into Blamed, with this file and its text."""
    try:
        yield
    except Failed as failed:
        raise Blamed(failed.diagnostics, filename, source) from None


def guarded(command: Callable[P, int]) -> Callable[P, None]:
    """Wraps a command so that every exception becomes a message and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
            sys.stdout.flush()  # a full disk fails here, before the exit code says success
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise  # handled by typer
        except BrokenPipeError:  # the reader has closed the pipe (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = PIPE_CLOSED
        except KeyboardInterrupt:
            print("\nInterrupted. What was finished is kept.", file=sys.stderr)
            code = INTERRUPTED
        except Blamed as blamed:
            code = tell(blamed.diagnostics, blamed.filename, blamed.source)
        except Failed as failed:
            code = tell(failed.diagnostics, "command line", "")
        except MemoryError:
            found = Diagnostic("FW904", "this problem does not fit into the machine's memory")
            code = tell([found], "command line", "")
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            reason = error.strerror or type(error).__name__
            found = Diagnostic("FW001", f"cannot read or write{where}: {reason}")
            code = tell([found], "command line", "")
        except Exception as error:
            code = confess(error)
        raise typer.Exit(code)

    return run


def tell(diagnostics: Sequence[Diagnostic], filename: str, source: str) -> int:
    """Print diagnostics to stderr. Returns their exit code."""
    show_diagnostics(diagnostics, filename, source, sys.stderr)
    return exit_code(diagnostics)


def show_diagnostics(
    diagnostics: Sequence[Diagnostic], filename: str, source: str, stream: TextIO
) -> None:
    """Print diagnostics for a reader; with FLASHWRIGHT_MESSAGES=json as a message on stderr."""
    from flashwright.lang import render

    if not diagnostics:
        return
    if messages_as_json():
        send(diagnostics=json.loads(render.as_json(diagnostics, filename)))
    else:
        print(render.terminal(diagnostics, source, filename, colored(stream)), end="", file=stream)


def messages_as_json() -> bool:
    """Whether diagnostics and progress are for a program: a JSON object on each line of stderr."""
    return os.environ.get(MESSAGES) == "json"


def send(**message: Any) -> None:
    """Write a message for the program that started the command."""
    print(json.dumps(message), file=sys.stderr, flush=True)


def exit_code(diagnostics: Sequence[Diagnostic]) -> int:
    """2 for bad input, 1 for other errors, 0 for warnings or no diagnostics."""
    errors = [d for d in diagnostics if d.severity == "error"]
    if any(d.bad_input for d in errors):
        return BAD_INPUT
    return WRONG if errors else FINE


def confess(error: Exception) -> int:
    """Report an unexpected exception as a bug of Flashwright. Returns the exit code."""
    if os.environ.get("FLASHWRIGHT_DEBUG") == "1":
        traceback.print_exception(error)
        return BUG
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}" if last else "nowhere"
    print(
        f"This is a bug in Flashwright {__version__}, not in your input: please report it.\n"
        f"  {type(error).__name__}: {str(error)[:500]}\n"
        f"  at {place}\n"
        "Set FLASHWRIGHT_DEBUG=1 for the whole traceback.",
        file=sys.stderr,
    )
    return BUG


def colored(stream: Any) -> bool:
    """Whether a stream is a terminal that wants colour."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(stream.isatty())


# --- what commands share ----------------------------------------------------------------------


def shown_name(file: str) -> str:
    """The name of a program in messages."""
    return "<stdin>" if file == "-" else file


def read_source(file: str) -> str:
    """The program's text, from a file or stdin; Failed if it is not text of a sensible size."""
    from flashwright.lang import parse

    if file != "-":
        return parse.read(file)
    return parse.decode(sys.stdin.buffer.read(parse.MAX_BYTES + 1), "stdin")


def write_source(file: str, text: str) -> None:
    """Write a changed program back to its file, with the same line endings."""
    from flashwright.files import write

    path = Path(file)
    with path.open("rb") as old:
        ends = old.readline().endswith(b"\r\n")
    write(path, text.replace("\n", "\r\n") if ends else text)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name. Raises Failed with FW705 if there is none."""
    from flashwright import gpu

    try:
        return gpu.find(name)
    except gpu.UnknownGpu as error:
        message, _, known = str(error).partition(" Known: ")
        hint = f"known are {known.rstrip('.')}" if known else None
        raise Failed(Diagnostic("FW705", message, help=hint)) from None


def load_program(file: str, gpu: Gpu | None = None, spec: str | None = None) -> tuple[Program, str]:
    """The checked program and its text, for a command that takes one kernel."""
    kernels, source = load_kernels(file, gpu, spec)
    if len(kernels.programs) == 1:
        return kernels.programs[0], source
    text = f"this program has {len(kernels.programs)} kernels; the command takes one"
    hint = "`check`, `run` and `build` take several"
    second = kernels.programs[1].grid.span
    raise Blamed([Diagnostic("FW811", text, second, help=hint)], shown_name(file), source)


def load_kernels(file: str, gpu: Gpu | None = None, spec: str | None = None) -> tuple[Kernels, str]:
    """The kernels of the checked program, and its text; a sketch has nothing to run or to
    translate. `spec` is the command's `--spec`."""
    from flashwright.check.check import check
    from flashwright.lang.parse import parse
    from flashwright.program.kernels import Kernels

    name = shown_name(file)
    with blaming(name):
        source = read_source(file)
    with blaming(name, source):
        tree = parse(source)
        verdict = check(tree, gpu, own_dims(tree, spec, file))
        if verdict.kernels and not verdict.errors:
            return Kernels(verdict.kernels), source
        if verdict.ok:
            hint = (
                "add param, grid and Allocate statements (docs/language.md), or let the built-in "
                "author choose the sizes: flashwright generate"
            )
            text = "this is a sketch: it has no sizes, so there is nothing to run yet"
            raise Failed(Diagnostic("FW207", text, help=hint))
        raise Failed(*verdict.errors)


def variant_spec(variant: str, options: Mapping[str, Any]) -> tuple[AttentionSpec, str]:
    """The spec of a built-in variant, and what the variant is in words."""
    from flashwright.author.builtin.variants import UnknownVariant, find, make_spec
    from flashwright.spec import BadSpec

    try:
        spec = make_spec(variant, **options)
    except UnknownVariant as error:
        raise Failed(Diagnostic("FW902", str(error), help="see `flashwright variants`")) from None
    except BadSpec as error:
        raise Failed(*(Diagnostic("FW901", line) for line in error.lines)) from None
    return spec, find(spec.variant).summary


def load_spec(option: str | None, file: str) -> tuple[AttentionSpec, Path] | None:
    """The spec to compare with, and the folder its paths are relative to.

    It is `--spec` (a TOML file, or settings such as `causal, head_dim=64`), or else the TOML file
    of the program's own name, or else spec.toml beside it.
    """
    if option is None:
        beside = [Path(file).with_suffix(".toml"), Path(file).with_name("spec.toml")]
        found = next((p for p in beside if file != "-" and p.is_file()), None)
        return None if found is None else (_spec_file(found), found.parent)
    if option.endswith(".toml") or os.path.isfile(option):
        return _spec_file(Path(option)), Path(option).parent
    return _inline_spec(option), Path()


def own_dims(tree: Tree, option: str | None, file: str) -> Mapping[str, int]:
    """The sizes that the spec gives to the program's own dims. A spec that cannot be used gives
    none; the command that needs the spec reports why."""
    if not any(isinstance(stmt, Dim) for stmt in tree.body):
        return {}
    try:
        found = load_spec(option, file)
    except (Failed, Blamed):
        return {}
    return found[0].dims if found else {}


def _inline_spec(text: str) -> AttentionSpec:
    from flashwright.spec import AttentionSpec, BadSpec, parse_inline

    try:
        settings = {"variant": "custom", **parse_inline(text)}
    except BadSpec as error:
        raise _bad_spec("FW903", error.lines, "--spec") from None
    try:
        return AttentionSpec.make(**settings)
    except BadSpec as error:
        raise _bad_spec("FW901", error.lines, "--spec") from None


def _spec_file(path: Path) -> AttentionSpec:
    from flashwright.spec import BadSpec, load

    try:
        return load(path)
    except BadSpec as error:
        source, code = "", "FW903"
        try:
            source = path.read_bytes().decode()
            tomllib.loads(source)
            code = "FW901"  # the file can be read, so its content is at fault
        except (OSError, ValueError, RecursionError):
            pass
        raise _bad_spec(code, error.lines, str(path), source) from None


def _bad_spec(code: str, lines: Sequence[str], filename: str, source: str = "") -> Blamed:
    """The errors of a spec as diagnostics, each at the line of the file that it names."""
    found = []
    for line in lines:
        place = re.match(rf"{re.escape(filename)}(?::(\d+))?(?::\d+)?: ", line)
        span = line_span(source, int(place[1])) if place and place[1] else None
        found.append(Diagnostic(code, line[place.end() :] if place else line, span))
    return Blamed(found, filename, source)


# --- options ----------------------------------------------------------------------------------


def flag(*names: str, **settings: Any) -> Any:
    """An option without a value. The metavar hides typer's `bool` in the help."""
    return typer.Option(*names, metavar=" ", **settings)


AllowSpills = Annotated[
    int,
    typer.Option(metavar="BYTES", min=0, help="Accept a kernel that spills up to BYTES a thread."),
]
"""The option `--allow-spills` of the commands that compile."""


class Dtype(StrEnum):
    """Element types of Q, K, V and O."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class KeyDtype(StrEnum):
    """Element types that K and V may have beside a Q of 16 bits."""

    FP8 = "fp8"
    INT8 = "int8"
