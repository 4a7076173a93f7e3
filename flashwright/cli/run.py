"""`flashwright run`: executes code on the CPU and compares it with fp64 if there is a spec."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashwright.cli.command import (
    FINE,
    WRONG,
    Blamed,
    blaming,
    exit_code,
    load_kernels,
    load_spec,
    shown_name,
    tell,
)
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.judge.cpu import CpuVerdict
    from flashwright.program.kernels import Kernels
    from flashwright.spec import AttentionSpec

SMALL = 128  # default length of a problem


@dataclass(frozen=True)
class RunOptions:
    """The options of the command: the program, the given sizes, and the output format."""

    file: str
    sizes: Mapping[str, int]
    seed: int = 0
    as_json: bool = False

    @property
    def name(self) -> str:
        """The name of the program in messages."""
        return shown_name(self.file)


def run(options: RunOptions, spec: str | None) -> int:
    """Run the program, and compare if there is a spec. Returns the exit code."""
    try:
        kernels, source = load_kernels(options.file, spec=spec)
        meant = load_spec(spec, options.file)
        with blaming(options.name, source):
            if meant is None:
                return _run_alone(kernels, options)
            return _run_and_compare(kernels, source, *meant, options)
    except Blamed as blamed:
        if not options.as_json:
            raise
        _print_json(options, False, diagnostics=blamed.diagnostics, blamed=blamed.filename)
        return exit_code(blamed.diagnostics)


def _run_and_compare(
    kernels: Kernels, source: str, spec: AttentionSpec, base: Path, options: RunOptions
) -> int:
    from flashwright.cli import show

    with show.progress(f"running {options.name}") as step:
        verdict = _judged(kernels, spec, base, options, step)
    if options.as_json:
        _print_json(options, verdict.ok, verdict.diagnostics, verdict, spec)
    else:
        out = show.console()
        out.print(f"{options.name} against fp64: {spec.in_words}")
        out.print(show.cases_table(verdict))
        if verdict.diagnostics:
            tell(verdict.diagnostics, options.name, source)
        elif verdict.ok:
            out.print(f"agrees with fp64; {show.errors_in_words(verdict)}")
            for line in show.not_reached(verdict.unreached):
                out.print(line)
    return FINE if verdict.ok else max(WRONG, exit_code(verdict.diagnostics))


def _judged(
    kernels: Kernels,
    spec: AttentionSpec,
    base: Path,
    options: RunOptions,
    step: Callable[[int, int, str], None] | None = None,
) -> CpuVerdict:
    from flashwright.judge.cpu import has_groups, judge
    from flashwright.spec import BadSpec

    whole = has_groups(kernels)
    cases = [problem(options.sizes, spec, whole)] if options.sizes else None
    try:
        return judge(kernels, spec, cases=cases, seed=options.seed, base=base, progress=step)
    except BadSpec as error:  # the user's own reference cannot be used
        found = [Diagnostic("FW903", line) for line in error.lines]
        raise Blamed(found, spec.reference or "spec", "") from None


def problem(
    sizes: Mapping[str, int], spec: AttentionSpec | None = None, whole_groups: bool = False
) -> dict[str, int]:
    """A problem with the given sizes and small defaults for the others."""
    q_len = sizes.get("q_len", sizes.get("kv_len", SMALL))
    kv_len = sizes.get("kv_len", q_len)
    usual = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    if spec is not None:
        from flashwright.judge.cpu import default_cases

        # The judge knows what else a spec needs: in NSA's compressed branch kv_len counts tokens.
        usual = default_cases(spec, [(q_len, kv_len)], whole_groups)[0]
    group = usual["heads"] // usual["kv_heads"]
    kv_heads = sizes.get("kv_heads", max(sizes.get("heads", usual["heads"]) // group, 1))
    heads = sizes.get("heads", kv_heads * group)
    if heads % kv_heads:
        text = f"kv heads ({kv_heads}) must divide the query heads ({heads})"
        raise Failed(Diagnostic("FW901", text, help="give --heads and --kv-heads"))
    several = spec is not None and spec.batch is not None
    batch = sizes.get("batch", usual["batch"] if several else 1)
    return {**usual, "batch": batch, "heads": heads, "kv_heads": kv_heads}


def _run_alone(kernels: Kernels, options: RunOptions) -> int:
    """Run without a spec: print a summary of the outputs and that nothing was compared."""
    import numpy as np

    from flashwright.judge.inputs import random_tensor
    from flashwright.semantics.interpret import interpret_all, shape_of

    dims, rng = problem(options.sizes), np.random.default_rng(options.seed)
    missing = [d for d in kernels.dims if d not in dims]
    if missing:
        text = f"no value is given for {', '.join(missing)}"
        hint = f"give a spec with it: --spec 'dims.{missing[0]}=4'"
        raise Failed(Diagnostic("FW904", text, help=hint))
    inputs = {}
    for tensor in kernels.inputs:
        shape = shape_of(tensor, kernels.owner(tensor), dims)
        inputs[tensor.name] = random_tensor(shape, tensor.dtype, rng)
    outputs = interpret_all(kernels, inputs, dims)
    rows = []
    for tensor in kernels.outputs:
        array = outputs[tensor.name].astype(np.float64)
        finite = np.isfinite(array)
        rms = float(np.sqrt(np.mean(array[finite] ** 2))) if finite.any() else 0.0
        rows.append(
            {
                "output": tensor.name,
                "shape": list(array.shape),
                "dtype": tensor.dtype,
                "finite": int(finite.sum()),
                "size": array.size,
                "rms": rms,
            }
        )
    _tell_outputs(rows, dims, options)
    return FINE


def _tell_outputs(rows: list[dict[str, Any]], dims: Mapping[str, int], options: RunOptions) -> None:
    if options.as_json:
        _print_json(options, True, outputs=rows, dims=dims)
        return
    from flashwright.cli import show

    out = show.console()
    listed = ", ".join(f"{name} {size}" for name, size in dims.items())
    out.print(f"{options.name} on random inputs: {listed}")
    shown = show.table("output", "shape", "dtype", "finite", "rms", right=("rms",))
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        finite = "all" if row["finite"] == row["size"] else f"{row['finite']} of {row['size']}"
        shown.add_row(row["output"], shape, row["dtype"], finite, f"{row['rms']:.4g}")
    out.print(shown)
    out.print(
        "NOTHING WAS COMPARED: there is no spec that says what is right.\n"
        "Give one: --spec 'causal, head_dim=64', or a spec.toml beside the program."
    )


def _print_json(
    options: RunOptions,
    ok: bool,
    diagnostics: Sequence[Diagnostic] = (),
    verdict: CpuVerdict | None = None,
    spec: AttentionSpec | None = None,
    blamed: str | None = None,
    **more: object,
) -> None:
    from flashwright.lang.render import as_json

    record = {
        "file": options.name,
        "ok": ok,
        "compared": verdict is not None,
        "spec": spec.model_dump(mode="json") if spec else None,
        "cases": verdict.record() if verdict else [],
        "unreached": list(verdict.unreached) if verdict else [],
        "diagnostics": json.loads(as_json(diagnostics, blamed or options.name)),
        **more,
    }
    print(json.dumps(record, indent=2))
