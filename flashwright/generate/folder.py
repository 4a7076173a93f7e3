"""The folder of a run: one process at a time makes a kernel in it.

A run removes what an earlier run left and writes its files as it makes them. If the folder has a
finished kernel, the run works in a subfolder and replaces that kernel at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from flashwright.build.package import CLASSES, IN_RECORD, RECORD, STEPS, TUNING, inside
from flashwright.files import cannot, recorded, set_aside, sha256, take_lock, write
from flashwright.generate.state import Run
from flashwright.lang.diagnostic import Diagnostic, Failed

LOCK = ".making.json"
"""The process that makes a kernel in the folder, since when, and the digests of its files."""
LONGEST_LOCK = 1 << 20  # characters of it
ASIDE = ".making"
"""The subfolder of a run while the folder has a finished kernel."""
RESULT = "result.json"
FORWARD, DERIVED = "forward.tl", "derived.tl"
"""The attention whose backward pass is made, and that backward pass without sizes for the GPU."""
RECTANGULAR = "rectangular.tl"
"""The program for rectangular batches, of which one for sequences of any lengths is made."""
TASK = "task.json"
"""The task of a benchmark that the kernel is made for (formats/task.py)."""
ARTEFACTS = (
    *("spec.toml", TASK, "sketch.tl", FORWARD, DERIVED, RECTANGULAR, "code.tl", "reasoning.md"),
    *("kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx", "build.json"),
)


def write_package(folder: Path, files: Mapping[str, str | bytes], gpu: str) -> None:
    """Write a finished kernel, made without a run's stages."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, data)
    write(folder / RESULT, json.dumps({"ok": True, "gpu": gpu}) + "\n")


def finished(folder: Path) -> bool:
    """Whether the folder has the result of a run that ended right."""
    try:
        return bool(json.loads((folder / RESULT).read_bytes())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- one at a time ----------------------------------------------------------------------------


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises Failed with FW001 if another process holds it.

    The lock ends with the process. Its file stays if the run is interrupted: it tells the next run
    which files are unedited.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(folder / LOCK)
    except OSError as error:
        raise cannot("use", folder, error) from None
    if file is None:  # this process has it already
        yield
        return
    with file:
        artefacts = _read_lock(file).get("artefacts", {})
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        _write_lock(file, {**mine, "artefacts": artefacts})
        cut_off = True
        try:
            yield
            cut_off = False
        finally:
            if not (cut_off and _read_lock(file).get("artefacts")):
                (folder / LOCK).unlink(missing_ok=True)


def _locked(path: Path) -> IO[str] | None:
    """The lock's file with the lock taken; None if this process holds it already."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if not take_lock(file) and not _holder_is_gone(content := _read_lock(file)):
                if (content.get("pid"), content.get("host")) == (os.getpid(), socket.gethostname()):
                    file.close()
                    return None
                raise _in_use(path.parent, content)
            if _same_file(file, path):
                return file  # or a dead process took the lock, and its children still have it
        except BaseException:
            file.close()
            raise
        file.close()  # its holder removed it meanwhile


def _holder_is_gone(content: Mapping[str, Any]) -> bool:
    """Whether the process that took the lock has ended."""
    pid = content.get("pid")
    if not isinstance(pid, int) or pid < 1 or content.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _in_use(folder: Path, content: Mapping[str, Any]) -> Failed:
    who = f"process {content.get('pid', 'unknown')}"
    if content.get("host") not in (None, socket.gethostname()):
        who += f" on {str(content['host'])[:80]}"
    since = f" since {str(content['since'])[:40]}" if "since" in content else ""
    text = f"{folder} is in use: {who} has been making a kernel in it{since}"
    hint = "wait until it has ended, or give another folder with --out"
    return Failed(Diagnostic("FW001", text, help=hint))


def _read_lock(file: IO[str]) -> dict[str, Any]:
    """The content of the lock's file; empty if it is no JSON object."""
    file.seek(0)
    try:
        content = json.loads(file.read(LONGEST_LOCK))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _write_lock(file: IO[str], content: Mapping[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(content, file)
    file.flush()


def note(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Record what is about to be written into a folder that is held."""
    with contextlib.suppress(OSError), (folder / LOCK).open("r+", encoding="utf-8") as file:
        content = _read_lock(file)
        digests = {name: sha256(data) for name, data in files.items()}
        _write_lock(
            file, {**content, "artefacts": {**dict(content.get("artefacts", {})), **digests}}
        )


# --- from one run to the next -----------------------------------------------------------------


@contextlib.contextmanager
def place(folder: Path) -> Iterator[Path]:
    """Where a run puts its files: the folder, or one inside as long as a finished kernel is there.

    That one is removed at the end: what is to stay is `published` before.
    """
    aside = folder / ASIDE
    try:
        if aside.exists():  # of a run that was killed
            shutil.rmtree(aside)
        if finished(folder):
            aside.mkdir()
    except OSError as error:
        raise cannot("use", folder, error) from None
    try:
        yield aside if aside.is_dir() else folder
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def published(run: Run, folder: Path, mine: Mapping[str, bytes]) -> Run:
    """The run with its files in the folder, where they are not there yet; records come last."""
    if run.folder == folder:
        return run
    kept = prepare(folder, mine)
    try:
        for name in sorted(run.files, key=lambda name: name.endswith(RECORD)):
            (folder / name).parent.mkdir(exist_ok=True)
            os.replace(run.folder / name, folder / name)
    except OSError as error:
        raise cannot("use", folder, error) from None
    return replace(run, folder=folder, kept=(*run.kept, *kept))


def prepare(folder: Path, mine: Mapping[str, bytes]) -> tuple[str, ...]:
    """Make the folder and take away what an earlier run left; the names of what is kept as .bak.

    A file of `mine` that is there already stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        records = [folder / RESULT, folder / RECORD]
        known = [*records, folder / LOCK]  # the last tells of a run that was cut off
        ours = {name: digest for path in known for name, digest in recorded(path).items()}
        for path in records:  # nobody's work: they tell of files that now go
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    ours |= _there(folder, {name: sha256(data) for name, data in mine.items()})
    for attempt in folder.glob("model/*.*.*/outcome.json"):  # of a run that was cut off
        ours |= _there(folder, recorded(attempt))
    kept = set_aside(folder, (*ARTEFACTS, CLASSES, STEPS, TUNING, *mine), ours)
    others = {name.partition("/")[0] for name in ours if "/" in name} - {"", ".", ".."}
    return (*kept, *(name for other in sorted(others) for name in clear(folder, other, ours)))


def _there(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Those of the files, by their digests, that the folder has just so."""
    places = {Path(name).name: digest for name, digest in files.items()}
    return {
        name: digest
        for name, digest in places.items()
        if (folder / name).is_file() and sha256((folder / name).read_bytes()) == digest
    }


def clear(folder: Path, kernel: str, ours: Mapping[str, str]) -> tuple[str, ...]:
    """The same for a further kernel's subfolder, which goes where nothing else is in it."""
    content = recorded(folder / kernel / RECORD)
    known = {**ours, **{f"{kernel}/{name}": digest for name, digest in content.items()}}
    kept = set_aside(folder, [inside(kernel, name) for name in IN_RECORD], known)
    with contextlib.suppress(OSError):
        (folder / kernel / RECORD).unlink(missing_ok=True)
        (folder / kernel).rmdir()
    return kept


def keep(run: Run, files: Mapping[str, str | bytes]) -> Run:
    """Write files, in their order."""
    note(run.folder, files)
    for name, data in files.items():
        path = run.folder / name
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise cannot("use", path.parent, error) from None
        write(path, data)
    text = {name: data for name, data in files.items() if isinstance(data, str)}
    binary = {name: data for name, data in files.items() if isinstance(data, bytes)}
    artefacts, binaries = {**run.artefacts, **text}, {**run.binaries, **binary}
    return replace(run, artefacts=artefacts, binaries=binaries)
