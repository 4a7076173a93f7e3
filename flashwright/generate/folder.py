"""The folder of a run: one process at a time makes a kernel in it.

What an earlier run left goes, and what is made is put there as it comes. A kernel that is finished
stays as it is until the next one is: that one is made in a folder inside and then takes its place.
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

from flashwright.build.package import CLASSES, IN_RECORD, RECORD, TUNING, inside
from flashwright.files import cannot, recorded, set_aside, sha256, write
from flashwright.generate.state import Run
from flashwright.lang.diagnostic import Diagnostic, Failed

LOCK = ".making.json"
"""Who makes a kernel in the folder, since when, and the digests of what was put there so far."""
MOST_TOLD = 1 << 20  # characters of it
ASIDE = ".making"
"""Where the next kernel is made as long as a finished one is in the folder."""
RESULT = "result.json"
ARTEFACTS = (
    *("spec.toml", "sketch.tl", "code.tl", "reasoning.md"),
    *("kernel.cu", "kernel.map.json", "launch.json"),
    *("kernel.cubin", "kernel.ptx", "build.json"),
)


def finished(folder: Path) -> bool:
    """Whether it has what a run made that came out right."""
    try:
        return bool(json.loads((folder / RESULT).read_bytes())["ok"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- one at a time ----------------------------------------------------------------------------


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder is this process's alone; Failed with FW001 where it is another's.

    The lock is the operating system's and goes with the process. Its file stays where a run is cut
    off: the next one learns from it which files nobody has edited.
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
        artefacts = _told(file).get("artefacts", {})
        now = datetime.now(UTC).isoformat(timespec="seconds")
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        _tell(file, {**mine, "artefacts": artefacts})
        cut_off = True
        try:
            yield
            cut_off = False
        finally:
            if not (cut_off and _told(file).get("artefacts")):
                (folder / LOCK).unlink(missing_ok=True)


def _locked(path: Path) -> IO[str] | None:
    """The lock's file, with the lock; None where this process has it already."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            if _taken(file) and not _left(told := _told(file)):
                if (told.get("pid"), told.get("host")) == (os.getpid(), socket.gethostname()):
                    file.close()
                    return None
                raise _in_use(path.parent, told)
            if _same_file(file, path):
                return file  # or of a process that is gone, whose children keep the lock
        except BaseException:
            file.close()
            raise
        file.close()  # it was removed in between, by the one that had it


def _taken(file: IO[str]) -> bool:
    """Try to get the lock; whether another has it."""
    try:
        import fcntl  # not on Windows: there nobody is kept out
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _left(told: Mapping[str, Any]) -> bool:
    """Whether the process that took the lock is gone."""
    pid = told.get("pid")
    if not isinstance(pid, int) or pid < 1 or told.get("host") != socket.gethostname():
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


def _in_use(folder: Path, told: Mapping[str, Any]) -> Failed:
    who = f"process {told.get('pid', 'unknown')}"
    if told.get("host") not in (None, socket.gethostname()):
        who += f" on {str(told['host'])[:80]}"
    since = f" since {str(told['since'])[:40]}" if "since" in told else ""
    text = f"{folder} is in use: {who} has been making a kernel in it{since}"
    hint = "wait until it has ended, or give another folder with --out"
    return Failed(Diagnostic("FW001", text, help=hint))


def _told(file: IO[str]) -> dict[str, Any]:
    """What the lock's file says; it may be half written, or anybody's."""
    file.seek(0)
    try:
        told = json.loads(file.read(MOST_TOLD))
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _tell(file: IO[str], told: Mapping[str, Any]) -> None:
    file.seek(0)
    file.truncate()
    json.dump(told, file)
    file.flush()


def note(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Record what is about to be written into a folder that is held."""
    with contextlib.suppress(OSError), (folder / LOCK).open("r+", encoding="utf-8") as file:
        told = _told(file)
        digests = {name: sha256(data) for name, data in files.items()}
        _tell(file, {**told, "artefacts": {**dict(told.get("artefacts", {})), **digests}})


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
    kept = set_aside(folder, (*ARTEFACTS, CLASSES, TUNING, *mine), ours)
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
    told = recorded(folder / kernel / RECORD)
    known = {**ours, **{f"{kernel}/{name}": digest for name, digest in told.items()}}
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
