"""The commands that reproduce a report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.measure.peers.registry import known
from flashwright.measure.tables import TABLES
from flashwright.report.model import Bench, Report, ReportKernel
from flashwright.spec import AttentionSpec, BadSpec

GRID = "grid"
"""The title of a run that was chosen by its shapes."""


@dataclass(frozen=True)
class Command:
    """A command and what it is for."""

    command: str
    why: str


def steps(report: Report) -> list[Command]:
    """All commands, in the order to run them."""
    found: list[Command] = []
    for kernel in report.kernels:
        if kernel.folder:
            found += _kernel(kernel)
    for bench in report.benches:
        kernels = (report.kernel(name) for name in bench.kernels.values())
        found += _bench(bench, [k.spec for k in kernels if k is not None and k.spec is not None])
    found.append(Command(_typed("report", *report.given), "this report"))
    return list(dict.fromkeys(found))


def _kernel(kernel: ReportKernel) -> list[Command]:
    found = []
    if kernel.tl:
        made = generate(kernel)
        if made:
            found.append(Command(made, f"{kernel.name}: writes, checks and compiles it"))
        else:
            gpu = ("--gpu", kernel.gpu) if kernel.gpu else ()
            typed = _typed("build", kernel.folder, *gpu)
            found.append(Command(typed, f"{kernel.name}: compiles its TL"))
    seed = kernel.verdict.seed if kernel.verdict else None
    options = () if seed is None else ("--seed", str(seed))
    found.append(Command(_typed("verify", kernel.folder, *options), "judges it, on a GPU"))
    return found


def generate(kernel: ReportKernel) -> str:
    """The command that makes a kernel; empty if it is not by the built-in author."""
    from flashwright.author.builtin.variants import UnknownVariant, make_spec

    spec = kernel.spec
    if spec is None or not kernel.gpu:
        return ""
    settings = _settings(spec)
    try:
        if make_spec(spec.variant, **settings) != spec:
            return ""
    except (UnknownVariant, BadSpec):
        return ""
    options: list[str] = ["--gpu", kernel.gpu]
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "lse":
            options += [] if value else ["--no-lse"]
        elif isinstance(value, bool):
            options += [flag] if value else []
        elif value is not None:
            options += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    folder = ("--out", kernel.folder) if kernel.folder else ()
    return _typed("generate", spec.variant, *options, *folder)


def _settings(spec: AttentionSpec) -> dict[str, object]:
    """The settings of a spec that are options of `generate`."""
    names = ("causal", "window", "head_dim", "v_dim", "heads", "kv_heads", "dtype", "softcap")
    more = ("alibi", "sink", "sink_tokens", "lse")
    return {name: getattr(spec, name) for name in (*names, *more)}


def _bench(bench: Bench, specs: Sequence[AttentionSpec]) -> list[Command]:
    """Commands that repeat a run, if its record has all settings, and check its receipts."""
    found = []
    run = bench.record
    if run.table is not None or run.title == GRID:
        options = [*_settings_of(bench), *_shapes(bench, specs)]
        found.append(Command(_typed("bench", *options), f"measures {run.title}, on {run.card}"))
    again = _typed("receipt", "check", bench.source)
    return [*found, Command(again, "builds, judges and measures again what the file says of ours")]


def _settings_of(bench: Bench) -> list[str]:
    run = bench.record
    options: list[str] = ["--table", str(run.table)] if run.table is not None else []
    options += ["--as", run.translated_for] if run.translated_for else []
    dtype = run.settings.get("dtype", "")
    options += ["--dtype", dtype] if dtype and " " not in dtype else []
    options += ["--layout", run.layout]
    options += ["--l2", run.settings["l2"]] if "l2" in run.settings else []
    keys = {peer.name: peer.key for peer in known().values()}
    ours = [keys[name] for name in bench.peers if name in keys]
    others = [("--peer", name) for name in bench.peers if name not in keys]
    return [
        *options,
        "--peers",
        ",".join(ours) or "none",
        *(word for pair in others for word in pair),
    ]


def _shapes(bench: Bench, specs: Sequence[AttentionSpec]) -> list[str]:
    """The options that choose cells; none for a whole table."""
    run = bench.record
    whole = TABLES.get(run.table) if run.table is not None else None
    if whole is not None and len(run.cells) == len(whole.cells()):
        return []
    options = [("--variant", s.variant) for s in specs] + [
        ("--head-dim", s.head_dim) for s in specs
    ]
    options += [("--length", c.length) for c in bench.cells if c.length]
    masks = {spec.causal for spec in specs}
    options += [("--mask", "causal" if True in masks else "full")] if len(masks) == 1 else []
    return [str(word) for pair in dict.fromkeys(options) for word in pair]


def _typed(*parts: str) -> str:
    return shlex.join(("flashwright", *parts))
