"""Reads the files of a kernel package. Errors name the file and the field."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TypeVar

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from pydantic import BaseModel, ConfigDict, ValidationError

from flashwright.build.package import COMPILED, RECORD, STEPS
from flashwright.build.plan_rules import cards_of, faults
from flashwright.files import content, sha256
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan

PLAN, CUBIN, PTX, SOURCE = "launch.json", "kernel.cubin", "kernel.ptx", "kernel.cu"
TL = "code.tl"
MOST_JSON = 4 << 20
_AGAIN = "build the package again"
_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.MULTILINE)
_CUDA = "EM_CUDA"
_NEW_ABI = 8  # from here on the architecture is in the second byte of the ELF flags

Model = TypeVar("Model", bound=BaseModel)


def unusable(path: Path, text: str, hint: str = _AGAIN) -> Failed:
    """FW852 for a file of a package that cannot be used."""
    return Failed(Diagnostic("FW852", f"{path}: {text}", help=hint))


def read_model(model: type[Model], path: Path, hint: str = _AGAIN) -> Model | None:
    """A JSON file as data, or None without the file. Raises Failed with FW852 and the wrong field.

    Types are strict: "128", 128.0 and true are not integers.
    """
    data = content(path, MOST_JSON)
    if data is None:
        return None
    try:
        return model.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200] or "the file"
        raise unusable(path, f"{where}: {first['msg']}", hint) from None


def read_plan(folder: Path) -> LaunchPlan:
    """The launch plan of a kernel package. Raises Failed with FW852 if missing or invalid."""
    path = folder / PLAN
    plan = read_model(LaunchPlan, path)
    if plan is None:
        hint = "a kernel package is a folder made by `flashwright generate` or `flashwright build`"
        text = f"{folder} is no kernel package: it has no {PLAN}"
        if (folder / STEPS).is_file():
            text = f"{folder} has a program of several kernels, which cannot be used here yet"
            hint = f"each kernel is a package of its own: {folder / '1'}"
        raise Failed(Diagnostic("FW852", text, help=hint))
    found = list(faults(plan))
    if found:
        raise Failed(*(Diagnostic("FW852", f"{path}: {text}", help=_AGAIN) for text in found[:8]))
    return plan


# --- what was compiled ------------------------------------------------------------------------


def read_cubin(folder: Path, plan: LaunchPlan) -> bytes:
    """A package's cubin, or empty. Raises Failed with FW852 if it is for another GPU."""
    path = folder / CUBIN
    data = content(path)
    if data is None:
        return b""
    found, wanted = cubin_version(path, data), _version(plan.arch)
    if found < wanted:
        raise unusable(path, f"it is for sm_{found}, and {PLAN} says {plan.arch}")
    return data


def read_ptx(path: Path, plan: LaunchPlan) -> str | None:
    """A package's PTX, or None. Raises Failed with FW852 if it is for another GPU."""
    data = content(path)
    if data is None:
        return None
    text = data.decode("utf-8", errors="replace")
    target = _TARGET.search(text)
    if target is None:
        raise unusable(path, "it names no .target: it is no PTX")
    if target[1] != plan.arch or not cards_of(target[1]):
        raise unusable(path, f"it is for {target[1]}, and {PLAN} says {plan.arch}")
    return text


def cubin_version(path: Path, data: bytes) -> int:
    """The architecture of a cubin, 80 for sm_80. Raises Failed with FW852 if it is no cubin."""
    try:
        header = ELFFile(io.BytesIO(data)).header
        machine, flags = header["e_machine"], int(header["e_flags"])
        version = int(header["e_ident"]["EI_ABIVERSION"])
    except (ELFError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise unusable(path, "it is no cubin: it is no ELF file") from None
    except Exception as error:  # pyelftools raises many kinds of errors on malformed files
        raise unusable(path, f"it is no cubin: {type(error).__name__}") from None
    if machine != _CUDA:
        raise unusable(path, "it is no cubin: it is an ELF file for another machine")
    return flags >> 8 & 0xFF if version >= _NEW_ABI else flags & 0xFF


def _version(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))


# --- what was built together ------------------------------------------------------------------


class _BuildRecord(BaseModel):
    """The digests in build.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    artefacts: dict[str, str] = {}


def untied(folder: Path) -> str:
    """Why a verdict on a package's PTX does not cover its cubin; empty if build.json links them.

    Raises Failed with FW852 if a file does not match its digest in build.json.
    """
    path = folder / RECORD
    record = read_model(_BuildRecord, path)
    told = record.artefacts if record is not None else {}
    there = {n: content(folder / n) for n in (*COMPILED, SOURCE, PLAN, TL, STEPS)}
    changed = [
        name
        for name, data in there.items()
        if data is not None and name in told and sha256(data) != told[name]
    ]
    if changed:
        text = f"{', '.join(changed)} in {folder} is not what {RECORD} has the digest of"
        if len(changed) > 1:
            text = text.replace(" is not what", " are not what")
        raise Failed(Diagnostic("FW852", text, help=_AGAIN))
    if there[CUBIN] is None:
        return f"there is no {CUBIN}"
    missing = [name for name in COMPILED if name not in told]
    return f"{RECORD} has no digest of {' and '.join(missing)}" if missing else ""
