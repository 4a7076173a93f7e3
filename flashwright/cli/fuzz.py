"""`flashwright fuzz`: random TL programs, the interpreter against the emulated kernel."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flashwright.cli.command import FINE, WRONG, flag, guarded

_COUNT = 200


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(rich_help_panel="Work on Flashwright")(fuzz)


@guarded
def fuzz(
    seeds: Annotated[
        str | None, typer.Option(metavar="A:B", help="The seeds from A up to B - 1.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help=f"Number of programs; default {_COUNT}.")
    ] = None,
    fresh: Annotated[bool, flag("--fresh", help="Random new seeds.")] = False,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Such as h200,t4; all four by default.")
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder of the record and the failing programs."
        ),
    ] = Path("fuzz"),
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes; one per core by default.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", min=1, help="Start no program after S seconds.")
    ] = None,
    shrink: Annotated[bool, flag("--shrink", help="Make failing programs smaller.")] = False,
    repro: Annotated[
        str | None, typer.Option(metavar="SEED|FILE", help="Run one program and print all of it.")
    ] = None,
) -> int:
    """Write random programs and compare the CPU run with the kernel under emulation.

    Every program is a line in DIR/record.jsonl; seeds that are in it are not run again. Programs
    that fail are written to DIR as TL, with their problems as JSON.
    """
    from flashwright.fuzz.campaign import Campaign, read, summary
    from flashwright.fuzz.oracle import FAILURES

    cards = _gpus(gpu)
    if repro is not None:
        return _again(repro, cards, shrink, out)
    wanted = _seeds(seeds, count, fresh)
    begun, failing = time.monotonic(), 0

    def tell(line: dict[str, Any]) -> None:
        nonlocal failing
        if line["kind"] in FAILURES:
            failing += 1
            print(f"{line['seed']} {line['gpu']} {line['kind']}: {line['detail']}", flush=True)

    print(f"seeds {wanted[0]}:{wanted[-1] + 1} on {', '.join(cards)}", flush=True)
    Campaign(wanted, out, cards, jobs or os.cpu_count() or 1, seconds=seconds).run(tell)
    asked = set(wanted)
    lines = [line for line in read(out) if line["seed"] in asked]
    spent = time.monotonic() - begun
    print(summary(lines))
    print(f"{len(lines)} programs, {spent:.0f} s, {60 * len(lines) / max(spent, 1):.0f} a minute")
    bad = [line for line in lines if line["kind"] in FAILURES]
    _save(bad, cards, out, shrink)
    return WRONG if bad else FINE


def _gpus(names: str | None) -> tuple[str, ...]:
    from flashwright.fuzz.sizes import GPUS

    if names is None:
        return GPUS
    found = tuple(name.strip().lower() for name in names.split(","))
    unknown = [name for name in found if name not in GPUS]
    if unknown:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not one of {', '.join(GPUS)}", param_hint="--gpu"
        )
    return found


def _seeds(text: str | None, count: int | None, fresh: bool) -> list[int]:
    if text is not None:
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
            raise typer.BadParameter(f"{text!r} is not a range such as 0:100", param_hint="--seeds")
        return list(range(int(low), int(high)))
    start = secrets.randbits(40) if fresh else 0
    return list(range(start, start + (count or _COUNT)))


def _again(what: str, cards: tuple[str, ...], smaller: bool, out: Path) -> int:
    """Run one program again, from its seed or its file."""
    from flashwright.fuzz.case import load, save
    from flashwright.fuzz.generate import generate
    from flashwright.fuzz.oracle import evaluate_cases
    from flashwright.fuzz.shrink import shrink

    case = generate(int(what), cards) if what.isdecimal() else load(Path(what))
    (outcome,) = evaluate_cases([case])
    if outcome.failed and smaller:
        case, outcome = shrink(case, outcome)
        path = out / f"{outcome.kind}-{case.gpu}-{case.seed}.tl"
        save(case, path, f"{outcome.kind} {case.gpu}, seed {case.seed}: {outcome.detail}")
        print(f"written to {path}")
    print(case.text)
    print(f"{case.gpu}, problems {[dict(p) for p in case.problems]}, inputs {case.inputs}")
    print(f"{outcome.kind}: {outcome.where} {outcome.detail}")
    return WRONG if outcome.failed else FINE


def _save(bad: list[dict[str, Any]], cards: tuple[str, ...], out: Path, smaller: bool) -> None:
    """Write failing programs as files. With `smaller`, shrink one per kind of failure and GPU."""
    from flashwright.fuzz.case import save
    from flashwright.fuzz.generate import generate
    from flashwright.fuzz.oracle import ProgramOutcome
    from flashwright.fuzz.shrink import shrink

    seen: set[tuple[str, str, str]] = set()
    for line in bad:
        case = generate(line["seed"], cards)
        outcome = ProgramOutcome(line["kind"], line["detail"], line["where"])
        name = f"{outcome.kind}-{case.gpu}-{case.seed}.tl"
        bucket = (line["gpu"], line["kind"], line["where"])
        if smaller and bucket not in seen:
            case, outcome = shrink(case, outcome)
        seen.add(bucket)
        save(case, out / name, f"{outcome.kind} {case.gpu}, seed {case.seed}: {outcome.detail}")
