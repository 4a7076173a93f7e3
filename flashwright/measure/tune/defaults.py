"""From tunings to the built-in author's table of measured choices (author/builtin/tuned.json)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flashwright import gpu as gpus
from flashwright.author.builtin import tuned
from flashwright.author.builtin.author import workload
from flashwright.author.builtin.tuned import Choice
from flashwright.build.package import TUNING
from flashwright.check.vocabulary import SCHEDULE_PARAMS
from flashwright.files import write
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure.tune.state import Tuning, read
from flashwright.spec import AttentionSpec, BadSpec

GROUPS = (("bf16", "fp16"), ("e4m3",))
"""Element types that are served alike: as wide, and multiplied as fast."""


def write_defaults(table: Path, folders: Iterable[Path]) -> list[tuple[Path, str]]:
    """Put the best of each folder's tuning into a table, which is made where there is none.

    What became of each folder: its reason in the table, or why it has no line there.
    """
    known = {choice.key: choice for choice in _table(table)}
    told = []
    for folder in folders:
        tuning = read(folder)
        if tuning is None:
            text = f"{folder} has no {TUNING}"
            raise Failed(Diagnostic("FW001", text, help=f"flashwright tune {folder}"))
        found = choice_of(tuning)
        if isinstance(found, Choice):
            known[found.key] = found
        told.append((folder, found.reason if isinstance(found, Choice) else found))
    write(table, tuned.dump(list(known.values())))
    return told


def choice_of(tuning: Tuning) -> Choice | str:
    """What a tuning says of its kind of work, or why it says nothing."""
    if not tuning.complete or tuning.best not in tuning.by_name():
        return "left out: it was not measured to its end"
    try:
        spec = AttentionSpec.make(**tuning.spec)
        card = gpus.find(tuning.card)
        gpu = gpus.find(tuning.gpu)
    except (BadSpec, gpus.UnknownGpu) as error:
        return f"left out: {error}"
    if card != gpu:
        return f"left out: kernels for {gpu.name}, measured on {tuning.card}"
    params = tuning.by_name()[tuning.best].params
    names = {n: v for n, v in params.items() if n not in SCHEDULE_PARAMS}
    choice = Choice.model_validate(
        {
            "gpu": gpu.name,
            "dtypes": next(g for g in GROUPS if spec.input_dtype in g),
            "qk_dim": spec.head_dim,
            "v_dim": spec.value_dim,
            "causal": spec.causal,
            **names,
            "off": tuple(n for n in SCHEDULE_PARAMS if params.get(n) == 0),
            "tried": sum(bool(one.first) for one in tuning.tried),
            "lengths": (min(tuning.lengths), max(tuning.lengths)),
        }
    )
    if not choice.serves(workload(spec), gpu):
        return "left out: the table has plain attention only, without windows and options"
    return choice


def _table(path: Path) -> list[Choice]:
    try:
        return tuned.read(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{path} is no table of measured choices: {str(error).splitlines()[0]}"
        raise Failed(Diagnostic("FW001", text, help="give another FILE")) from None
