"""From tunings to the built-in author's table of measured choices (author/builtin/tuned.json)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import workload
from flashwright.author.builtin.retile import name_of
from flashwright.author.builtin.tuned import Choice
from flashwright.build.package import TUNING
from flashwright.files import write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.tune.state import Kept, Tuning, read
from flashwright.program.vocabulary import SCHEDULE_PARAMS
from flashwright.spec import AttentionSpec, BadSpec

GROUPS = (("bf16", "fp16"), ("e4m3",))
"""Element types that are served alike: as wide, and multiplied as fast."""


def write_defaults(table: Path, folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Put the best of each folder's tuning into a table, which is made where there is none.

    What became of each folder: its reasons in the table, or why it has no line there.
    """
    known = _table(table)
    told = []
    for folder in folders:
        tuning = read(folder)
        if tuning is None:
            text = f"{folder} has no {TUNING}"
            raise Failed(Diagnostic("FW001", text, help=f"flashwright tune {folder}"))
        found = choices_of(tuning)
        if isinstance(found, str):
            told.append((folder, found))
            continue
        known = [*(c for c in known if c.key != found[0].key), *found]
        told.append((folder, "; ".join(f"{name_of(c.tiling)}, {c.reason}" for c in found)))
    write(table, tuned.dump(known))
    return told


def choices_of(tuning: Tuning) -> list[Choice] | str:
    """What a tuning says of its kind of work, a choice for each class of lengths; or why it says
    nothing."""
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


def _choice(tuning: Tuning, kept: Kept, spec: AttentionSpec, gpu: gpus.Gpu) -> Choice:
    """The line of one class. Of the last, which has no end, it is the main one."""
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
        text = f"{path} is no table of measured choices: {str(error).splitlines()[0]}"
        raise Failed(Diagnostic("FW001", text, help="give another FILE")) from None
