"""`flashwright run`: code on the CPU, beside attention in fp64 where a spec says what is meant."""

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
    load_program,
    load_spec,
    shown_name,
    tell,
)
from flashwright.lang.diagnostic import Diagnostic, Failed

if TYPE_CHECKING:
    from flashwright.judge.cpu import CpuVerdict
    from flashwright.program.program import Program
    from flashwright.spec import AttentionSpec

SMALL = 128  # the length of a problem where none is given


@dataclass(frozen=True)
class Asked:
    """What the command line says: the program, the sizes that were given, and how to answer."""

    file: str
    sizes: Mapping[str, int]
    seed: int = 0
    as_json: bool = False

    @property
    def name(self) -> str:
        """The program as messages call it."""
        return shown_name(self.file)


def run(asked: Asked, spec: str | None) -> int:
    """Run and compare, or run alone; the exit code."""
    try:
        program, source = load_program(asked.file, spec=spec)
        meant = load_spec(spec, asked.file)
        with blaming(asked.name, source):
            if meant is None:
                return _run_alone(program, asked)
            return _run_and_compare(program, source, *meant, asked)
    except Blamed as blamed:
        if not asked.as_json:
            raise
        _print_json(asked, False, diagnostics=blamed.diagnostics, blamed=blamed.filename)
        return exit_code(blamed.diagnostics)


def _run_and_compare(
    program: Program, source: str, spec: AttentionSpec, base: Path, asked: Asked
) -> int:
    if asked.as_json:
        verdict = _judged(program, spec, base, asked)
        _print_json(asked, verdict.ok, verdict.diagnostics, verdict, spec)
    else:
        from flashwright.cli import show

        with show.progress(f"running {asked.name}") as step:
            verdict = _judged(program, spec, base, asked, step)
        out = show.console()
        out.print(f"{asked.name} against fp64: {spec.in_words}")
        out.print(show.cases_table(verdict))
        if verdict.diagnostics:
            tell(verdict.diagnostics, asked.name, source)
        elif verdict.ok:
            out.print(f"agrees with fp64; {show.errors_in_words(verdict)}")
            for line in show.not_reached(verdict.unreached):
                out.print(line)
    return FINE if verdict.ok else max(WRONG, exit_code(verdict.diagnostics))


def _judged(
    program: Program,
    spec: AttentionSpec,
    base: Path,
    asked: Asked,
    step: Callable[[int, int, str], None] | None = None,
) -> CpuVerdict:
    from flashwright.judge.cpu import judge
    from flashwright.spec import BadSpec

    cases = [problem(asked.sizes, spec)] if asked.sizes else None
    try:
        return judge(program, spec, cases=cases, seed=asked.seed, base=base, progress=step)
    except BadSpec as error:  # the user's own reference cannot be used
        found = [Diagnostic("FW903", line) for line in error.lines]
        raise Blamed(found, spec.reference or "spec", "") from None


def problem(sizes: Mapping[str, int], spec: AttentionSpec | None = None) -> dict[str, int]:
    """A whole problem from the sizes that were given: small where nothing is said."""
    q_len = sizes.get("q_len", sizes.get("kv_len", SMALL))
    kv_len = sizes.get("kv_len", q_len)
    usual = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": q_len, "kv_len": kv_len}
    if spec is not None:
        from flashwright.judge.cpu import default_cases

        # The judge knows what else a spec needs: in NSA's compressed branch kv_len counts tokens.
        usual = default_cases(spec, [(q_len, kv_len)])[0]
    group = usual["heads"] // usual["kv_heads"]
    kv_heads = sizes.get("kv_heads", max(sizes.get("heads", usual["heads"]) // group, 1))
    heads = sizes.get("heads", kv_heads * group)
    if heads % kv_heads:
        text = f"kv heads ({kv_heads}) must divide the query heads ({heads})"
        raise Failed(Diagnostic("FW901", text, help="give --heads and --kv-heads"))
    batch = sizes.get("batch", 1)
    return {**usual, "batch": batch, "heads": heads, "kv_heads": kv_heads}


def _run_alone(program: Program, asked: Asked) -> int:
    """Without a spec there is nothing to compare with: say what came out, and that."""
    import numpy as np

    from flashwright.judge.inputs import random_tensor
    from flashwright.semantics.interpret import interpret, shape_of

    dims, rng = problem(asked.sizes), np.random.default_rng(asked.seed)
    missing = [d for d in program.dims if d not in dims]
    if missing:
        text = f"no value is given for {', '.join(missing)}"
        hint = f"give a spec with it: --spec 'dims.{missing[0]}=4'"
        raise Failed(Diagnostic("FW904", text, help=hint))
    inputs = {
        t.name: random_tensor(shape_of(t, program, dims), t.dtype, rng) for t in program.inputs
    }
    outputs = interpret(program, inputs, dims)
    rows = []
    for tensor in program.outputs:
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
    _tell_outputs(rows, dims, asked)
    return FINE


def _tell_outputs(rows: list[dict[str, Any]], dims: Mapping[str, int], asked: Asked) -> None:
    if asked.as_json:
        _print_json(asked, True, outputs=rows, dims=dims)
        return
    from flashwright.cli import show

    out = show.console()
    listed = ", ".join(f"{name} {size}" for name, size in dims.items())
    out.print(f"{asked.name} on random inputs: {listed}")
    shown = show.table("output", "shape", "dtype", "finite", "rms", right=("rms",))
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        finite = "all" if row["finite"] == row["size"] else f"{row['finite']} of {row['size']}"
        shown.add_row(row["output"], shape, row["dtype"], finite, f"{row['rms']:.4g}")
    out.print(shown)
    out.print(
        "NOTHING WAS COMPARED: there is no spec, so nobody knows what is right here.\n"
        "Give one: --spec 'causal, head_dim=64', or a spec.toml beside the program."
    )


def _print_json(
    asked: Asked,
    ok: bool,
    diagnostics: Sequence[Diagnostic] = (),
    verdict: CpuVerdict | None = None,
    spec: AttentionSpec | None = None,
    blamed: str | None = None,
    **more: object,
) -> None:
    from flashwright.lang.render import as_json

    record = {
        "file": asked.name,
        "ok": ok,
        "compared": verdict is not None,
        "spec": spec.model_dump(mode="json") if spec else None,
        "cases": verdict.record() if verdict else [],
        "unreached": list(verdict.unreached) if verdict else [],
        "diagnostics": json.loads(as_json(diagnostics, blamed or asked.name)),
        **more,
    }
    print(json.dumps(record, indent=2))
