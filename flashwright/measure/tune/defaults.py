"""From tunings to the built-in author's table of measured choices (author/builtin/tuned.json)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashwright import gpu as gpus
from flashwright import spec as specs
from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import workload, write_code, write_sketch
from flashwright.author.builtin.choose import NothingFits
from flashwright.author.builtin.retile import name_of
from flashwright.author.builtin.tuned import Choice
from flashwright.build.package import TUNING
from flashwright.files import cannot, content, sha256, write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.kernels import CODE, SPEC
from flashwright.measure.tune.state import LengthClass, Tuning, read
from flashwright.program.vocabulary import SCHEDULE_PARAMS
from flashwright.spec import AttentionSpec, BadSpec

GROUPS = (("bf16", "fp16"), ("e4m3",))
"""Element types that share a choice: same width, same tensor core rate."""


def write_defaults(table: Path, folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Put the best tiling of each folder's tuning into a table; a missing table is created.

    Returns for each folder the chosen tilings with their reasons, or why it was left out.
    """
    before = known = _table(table)
    outcomes = []
    for folder in folders:
        tuning = read(folder)
        if tuning is None:
            text = f"{folder} has no {TUNING}"
            raise Failed(Diagnostic("FW001", text, help=f"flashwright tune {folder}"))
        found = choices_of(tuning)
        if isinstance(found, str):
            outcomes.append((folder, found))
            continue
        evidence = _keep_evidence(table, tuning)
        found = [choice.model_copy(update={"evidence": evidence}) for choice in found]
        known = [*(c for c in known if c.key != found[0].key), *found]
        outcomes.append((folder, "; ".join(f"{name_of(c.tiling)}, {c.reason}" for c in found)))
    write(table, tuned.dump(known))
    _drop_evidence(table, before, known)
    return outcomes


def begin_package(folder: Path, spec: AttentionSpec, gpu: gpus.Gpu) -> Path:
    """A package of the built-in author's program, not built yet; an equal one stays as it is.

    Raises Failed if the folder has another, or if no sizes fit the GPU.
    """
    try:
        code = write_code(write_sketch(spec), spec, gpu).code
    except NothingFits as error:
        raise Failed(Diagnostic("FW905", f"{folder.name}: {error}")) from None
    files = {CODE: code, SPEC: specs.dump(spec)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    for name, text in files.items():
        before = content(folder / name)
        if before is not None and before != text.encode():
            said = f"{folder} has another {name} than the author writes for this operator today"
            raise Failed(Diagnostic("FW904", said, help="give another --out"))
        if before is None:
            write(folder / name, text)
    return folder


def evidence_folder(table: Path) -> Path:
    """The folder beside a table that has the tunings of its choices, by digest."""
    return table.with_suffix("")


def _keep_evidence(table: Path, tuning: Tuning) -> str:
    """Put a tuning beside the table: every candidate, its times, its hosts. Returns its name."""
    text = tuning.model_dump_json(exclude_defaults=True) + "\n"
    name, folder = sha256(text)[:16], evidence_folder(table)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot("use", folder, error) from None
    write(folder / f"{name}.json", text)
    return name


def _drop_evidence(table: Path, before: Iterable[Choice], now: Iterable[Choice]) -> None:
    """Remove the tunings of choices that have been replaced."""
    for name in {choice.evidence for choice in before} - {choice.evidence for choice in now}:
        (evidence_folder(table) / f"{name}.json").unlink(missing_ok=True)


def choices_of(tuning: Tuning) -> list[Choice] | str:
    """The choices of a tuning, one for each class of lengths; or a text why there are none."""
    known = tuning.by_name()
    if not tuning.complete or not tuning.kept or any(k.tried not in known for k in tuning.kept):
        return "left out: it was not measured to its end"
    try:
        spec = AttentionSpec.make(**tuning.spec)
        card = gpus.find(tuning.card)
        gpu = gpus.find(tuning.gpu)
    except (BadSpec, gpus.UnknownGpu) as error:
        return f"left out: {error}"
    if card != gpu:
        return f"left out: kernels for {gpu.name}, measured on {tuning.card}"
    choices = [_choice(tuning, kept, spec, gpu) for kept in tuning.kept]
    if not choices[0].serves(workload(spec), gpu):
        return "left out: the table has kernels with as many queries as keys and free tiles"
    return choices


def _choice(tuning: Tuning, kept: LengthClass, spec: AttentionSpec, gpu: gpus.Gpu) -> Choice:
    """The choice for one class of lengths; the last class, without a limit, is the main one."""
    params = tuning.by_name()[kept.tried].params
    return Choice.model_validate(
        {
            "gpu": gpu.name,
            "dtypes": next(g for g in GROUPS if spec.input_dtype in g),
            "qk_dim": spec.head_dim,
            "v_dim": spec.value_dim,
            "causal": spec.causal,
            "beyond": tuned.beyond(workload(spec)),
            "up_to": kept.up_to,
            **{n: v for n, v in params.items() if n not in SCHEDULE_PARAMS},
            "off": tuple(n for n in SCHEDULE_PARAMS if params.get(n) == 0),
            "tried": sum(bool(one.first) for one in tuning.tried),
            "lengths": (min(kept.lengths), max(kept.lengths)),
        }
    )


def _table(path: Path) -> list[Choice]:
    try:
        return tuned.read(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is not a table of measured choices: {str(error).splitlines()[0]}"
        raise Failed(Diagnostic("FW001", text, help="give another FILE")) from None
