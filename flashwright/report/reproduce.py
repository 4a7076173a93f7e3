"""How to get the same again: the commands, as they would be typed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from flashwright.measure.peers.registry import known
from flashwright.measure.tables import TABLES
from flashwright.report.model import Bench, Kernel, Report
from flashwright.spec import AttentionSpec, BadSpec

GRID = "grid"
"""What a run is called that was asked for by its shapes."""


@dataclass(frozen=True)
class Step:
    """A command and what it is for."""

    command: str
    why: str


def steps(report: Report) -> list[Step]:
    """In the order in which they would be typed."""
    found: list[Step] = []
    for kernel in report.kernels:
        if kernel.folder:
            found += _kernel(kernel)
    for bench in report.benches:
        kernels = (report.kernel(name) for name in bench.kernels.values())
        found += _bench(bench, [k.spec for k in kernels if k is not None and k.spec is not None])
    found.append(Step(_typed("report", *report.given), "this report"))
    return list(dict.fromkeys(found))


def _kernel(kernel: Kernel) -> list[Step]:
    found = []
    if kernel.tl:
        made = generate(kernel)
        if made:
            found.append(Step(made, f"{kernel.name}: writes, checks and compiles it"))
        else:
            gpu = ("--gpu", kernel.gpu) if kernel.gpu else ()
            typed = _typed("build", kernel.folder, *gpu)
            found.append(Step(typed, f"{kernel.name}: compiles its TL"))
    seed = kernel.verdict.seed if kernel.verdict else None
    options = () if seed is None else ("--seed", str(seed))
    found.append(Step(_typed("verify", kernel.folder, *options), "judges it, on a GPU"))
    return found


def generate(kernel: Kernel) -> str:
    """The command that makes a kernel of the built-in author; empty where it is not its work."""
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
    """What `generate` has options for."""
    names = ("causal", "window", "head_dim", "v_dim", "heads", "kv_heads", "dtype", "softcap")
    more = ("alibi", "sink", "sink_tokens", "lse")
    return {name: getattr(spec, name) for name in (*names, *more)}


def _bench(bench: Bench, specs: Sequence[AttentionSpec]) -> list[Step]:
    """The same run again, where its record says all that was asked for; and its receipts."""
    found = []
    run = bench.record
    if run.table is not None or run.title == GRID:
        options = [*_settings_of(bench), *_shapes(bench, specs)]
        found.append(Step(_typed("bench", *options), f"measures {run.title}, on {run.card}"))
    again = _typed("receipt", "check", bench.source)
    return [*found, Step(again, "builds, judges and measures again what the file says of ours")]


def _settings_of(bench: Bench) -> list[str]:
    run = bench.record
    told: list[str] = ["--table", str(run.table)] if run.table is not None else []
    told += ["--as", run.translated_for] if run.translated_for else []
    dtype = run.settings.get("dtype", "")
    told += ["--dtype", dtype] if dtype and " " not in dtype else []
    told += ["--layout", run.layout]
    told += ["--l2", run.settings["l2"]] if "l2" in run.settings else []
    keys = {peer.name: peer.key for peer in known().values()}
    ours = [keys[name] for name in bench.peers if name in keys]
    others = [("--peer", name) for name in bench.peers if name not in keys]
    return [*told, "--peers", ",".join(ours) or "none", *(word for pair in others for word in pair)]


def _shapes(bench: Bench, specs: Sequence[AttentionSpec]) -> list[str]:
    """Which cells, where they are not the whole table."""
    run = bench.record
    whole = TABLES.get(run.table) if run.table is not None else None
    if whole is not None and len(run.cells) == len(whole.cells()):
        return []
    told = [("--variant", s.variant) for s in specs] + [("--head-dim", s.head_dim) for s in specs]
    told += [("--length", c.length) for c in bench.cells if c.length]
    masks = {spec.causal for spec in specs}
    told += [("--mask", "causal" if True in masks else "full")] if len(masks) == 1 else []
    return [str(word) for pair in dict.fromkeys(told) for word in pair]


def _typed(*parts: str) -> str:
    return shlex.join(("flashwright", *parts))
