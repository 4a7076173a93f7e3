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
from flashwright.measure.tune.state import LengthClass, Tuning, read
from flashwright.program.vocabulary import SCHEDULE_PARAMS
from flashwright.spec import AttentionSpec, BadSpec

GROUPS = (("bf16", "fp16"), ("e4m3",))
"""Element types that share a choice: same width, same tensor core rate."""


def write_defaults(table: Path, folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Put the best tiling of each folder's tuning into a table; a missing table is created.

    Returns for each folder the chosen tilings with their reasons, or why it was left out.
    """
    known = _table(table)
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
        known = [*(c for c in known if c.key != found[0].key), *found]
        outcomes.append((folder, "; ".join(f"{name_of(c.tiling)}, {c.reason}" for c in found)))
    write(table, tuned.dump(known))
    return outcomes


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
