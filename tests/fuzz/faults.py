"""Planted faults: how many random programs it takes until the fuzzer notices a one-line change.

    python -m tests.fuzz.faults [NAME ...] [--programs N]

A fault is a file of the package, a piece of its text, and what stands there instead. The package is
copied, the copy is changed, and the same seeds run with both. A fault is found at the first program
that agrees with the package as it is, and fails with the copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashwright.fuzz.campaign import read
from flashwright.fuzz.oracle import FAILURES

ROOT = Path(__file__).parents[2]
PROGRAMS = 200
CHUNK = 24


@dataclass(frozen=True)
class Fault:
    """A change of one file; `gpus` are those whose kernels it can show in."""

    name: str
    file: str
    old: str
    new: str
    gpus: tuple[str, ...]


HOPPER, AMPERE, TURING = ("h200",), ("a100",), ("t4",)
FAULTS = (
    # --- rows that warpgroups share ---------------------------------------------------------
    Fault(
        "the second warpgroup multiplies the columns of the first",
        "device/fw/wgmma.cuh",
        "int const first = group * columns + n * piece;",
        "int const first = 0 * columns + n * piece;",
        HOPPER,
    ),
    Fault(
        "one place for values that warpgroups exchange",
        "device/fw/wgmma.cuh",
        "    place ^= 1;\n",
        "",
        HOPPER,
    ),
    Fault(
        "a sum's first value added by every warpgroup that shares the row",
        "lower/passes/split_columns.py",
        "            value = _first_only(assign.value)\n",
        "            value = assign.value\n",
        HOPPER,
    ),
    Fault(
        "a maximum over a warpgroup's own columns",
        "lower/passes/split_columns.py",
        "            for found in () if assign.partial else dict.fromkeys(_reductions(value)):",
        "            for found in ():",
        HOPPER,
    ),
    # --- passes of the translator; the first four are those of tests/cases ------------------
    Fault(
        "let_in_loop: unmasked iterations tested with the let of the first",
        "lower/passes/software_pipeline.py",
        "    lets = defined(loop.body)\n",
        "    lets = defined(loop.body)\n"
        "    lets = {name: substitute(x, {loop.var: loop.low}) for name, x in lets.items()}\n",
        HOPPER,
    ),
    Fault(
        "sink_if: positions of the then arm win",
        "lower/frontend/positions.py",
        "coord = either(condition, self.current(then), self.current(orelse))",
        "coord = self.current(then)",
        AMPERE,
    ),
    Fault(
        "late_p: a Reshape moves behind what changes its source",
        "lower/passes/overlap.py",
        "        settle, started = self._nodes(order.settle)",
        "        rest = tuple(sorted(rest, key=lambda n: isinstance(n, ir.Operand)))\n"
        "        settle, started = self._nodes(order.settle)",
        HOPPER,
    ),
    Fault(
        "if_q: a tile copied in an if is released there",
        "lower/passes/rings.py",
        "        elif not held and key in effects(node).reads:\n            return False\n",
        "",
        HOPPER,
    ),
    Fault(
        "v_before_k: the producer keeps the program's order",
        "lower/passes/rings.py",
        "behind = [n for n in nodes if _filled(n) and _filled(n) <= late - tied]",
        "behind: list[ir.Statement] = []",
        HOPPER,
    ),
    Fault(
        "place_where: every where counts as its last arm",
        "lower/frontend/positions.py",
        'case Call(Name("where"), (_, yes, no)) if self.form(yes) == self.form(no):',
        'case Call(Name("where"), (_, no, yes)):',
        HOPPER,
    ),
    Fault(
        "wait_group leaves one group more",
        "lower/passes/wgmma_groups.py",
        "return [ir.Finish(len(open), ",
        "return [ir.Finish(len(open) + 1, ",
        HOPPER,
    ),
    Fault(
        "a tile is released under the product that reads it",
        "lower/passes/wgmma_groups.py",
        "given = {left} if older else {gemm.right, left}",
        "given = {left}",
        HOPPER,
    ),
    Fault(
        "no dependence of a write on an earlier read",
        "lower/passes/effects.py",
        "return bool(self.writes & later.all or self.reads & later.writes)",
        "return bool(self.writes & later.all)",
        HOPPER,
    ),
    Fault(
        "prologue runs when there is no iteration",
        "lower/passes/software_pipeline.py",
        "condition = substitute(loop.condition, {loop.var: loop.low})\n",
        'condition = binary("<=", loop.low, loop.low)\n',
        HOPPER,
    ),
    Fault(
        "early exit an iteration too soon",
        "lower/passes/early_exit.py",
        'return call("ceil_div", end, step, type="int")',
        'return plus(call("ceil_div", end, step, type="int"), -1)',
        HOPPER,
    ),
    Fault(
        "accumulators count as zero before a loop",
        "lower/passes/software_pipeline.py",
        "return len(values) == 1 and isinstance(values[0], Leaf) and values[0].value == 0",
        "return True",
        HOPPER,
    ),
    Fault(
        "a mask is left out one column too soon",
        "lower/frontend/masks.py",
        'last = _apply(made, "-", _apply(made, "+", first, size), constant(1))',
        'last = _apply(made, "-", _apply(computes, "+", first, size), constant(2))',
        AMPERE,
    ),
    Fault(
        "a sum begun in a branch is kept in parts",
        "lower/passes/partial_sums.py",
        "if any(a.target == target or reads(a.value, target) for a in _assigns((node,))):",
        "if False:",
        AMPERE,
    ),
    Fault(
        "the parts of a sum are not put together",
        "lower/passes/partial_sums.py",
        'assign = ir.Assign(target, Op("row_sum", (target,)), buffer)',
        "assign = ir.Assign(target, target, buffer)",
        AMPERE,
    ),
    Fault(
        "readers one stage behind the copies",
        "lower/passes/prefetch.py",
        "stage=_modulo(plus(count, n - 1), n)",
        "stage=_modulo(plus(count, n), n)",
        AMPERE,
    ),
    Fault(
        "a tile read after its loop is prefetched",
        "lower/passes/prefetch.py",
        "stale = _reads_first(loop.body, node.dest) or _reads_first(after, node.dest)",
        "stale = False",
        AMPERE,
    ),
    Fault(
        "no barrier before a copy overwrites a tile",
        "lower/passes/place_barriers.py",
        "if direct and any(self.state[k].read or self.state[k].arrived for k in keys):",
        "if False:",
        AMPERE,
    ),
    Fault(
        "behind a branch a tile is visible if one arm says so",
        "lower/passes/place_barriers.py",
        "self.visible and other.visible",
        "self.visible or other.visible",
        AMPERE,
    ),
    Fault(
        "fractions are compared by their numerators",
        "lower/frontend/scalars.py",
        "    x, y, _ = _common(a, b)\n    return x, y\n",
        "    return a.term, b.term\n",
        AMPERE,
    ),
    Fault(
        "a factor that is put off is forgotten",
        "lower/frontend/computes.py",
        "            self.settle(target)\n        axes = self.made.axes\n",
        "            self.forget(target)\n        axes = self.made.axes\n",
        TURING,
    ),
    # --- headers of the device ----------------------------------------------------------------
    Fault("ring phase never turns", "device/fw/ring.cuh", "phase ^= stage;", "", HOPPER),
    Fault(
        "producer does not wait for an empty stage",
        "device/fw/ring.cuh",
        "mbarrier_wait(empty(stage), phase ^ 1);",
        "",
        HOPPER,
    ),
    Fault(
        "consumer does not wait for a full stage",
        "device/fw/ring.cuh",
        "{ mbarrier_wait(full + 8 * stage, phase); }",
        "{}",
        HOPPER,
    ),
    Fault(
        "half of the expected bytes",
        "device/fw/ring.cuh",
        "ring.acquire(Tile::bytes)",
        "ring.acquire(Tile::bytes / 2)",
        HOPPER,
    ),
    Fault(
        "wgmma wait one group short",
        "device/fw/wgmma.cuh",
        '"n"(Left) : "memory"',
        '"n"(Left + 1) : "memory"',
        HOPPER,
    ),
    Fault(
        "no wgmma fence", "device/fw/wgmma.cuh", "wgmma.fence.sync.aligned;", "// no fence", HOPPER
    ),
    Fault(
        "scheduler skips a tile",
        "device/fw/tile_scheduler.cuh",
        "tile += grid",
        "tile += 1 + grid",
        HOPPER,
    ),
    Fault(
        "negative maxima not seen",
        "device/fw/maxima.cuh",
        "return __all_sync(0xffffffffu, all);",
        "return 1;",
        HOPPER,
    ),
    Fault(
        "warp barrier missing in the epilogue",
        "device/fw/epilogue.cuh",
        "    __syncwarp();\n    CUTE_UNROLL\n    for (int n = 0; n < 16 / rows; ++n) {",
        "    CUTE_UNROLL\n    for (int n = 0; n < 16 / rows; ++n) {",
        HOPPER,
    ),
    Fault(
        "cp.async wait one group short",
        "device/fw/copy.cuh",
        "cp_async_wait<Left>()",
        "cp_async_wait<Left + 1>()",
        AMPERE,
    ),
    Fault(
        "no zero fill", "device/fw/copy.cuh", "return count > row ? 16 : 0;", "return 16;", AMPERE
    ),
    Fault(
        "one row too many",
        "device/fw/copy.cuh",
        "if (inside(row, valid) && inside(col - Column, cols)) {",
        "if (inside(row - 1, valid) && inside(col - Column, cols)) {",
        TURING,
    ),
    Fault(
        "swizzle looked up once",
        "device/fw/copy.cuh",
        "down % 8 == 0 ? first",
        "true ? first",
        TURING,
    ),
    Fault(
        "floor_mod truncates",
        "device/fw/global.cuh",
        "return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;",
        "return rest;",
        AMPERE,
    ),
    Fault(
        "floor_div truncates",
        "device/fw/global.cuh",
        "return a / b - (a % b < 0);",
        "return a / b;",
        AMPERE,
    ),
    Fault(
        "row maximum over two of four threads",
        "device/fw/math.cuh",
        "return max(x, __shfl_xor_sync(0xffffffffu, x, 2));",
        "return x;",
        TURING,
    ),
    Fault(
        "row sum over two of four threads",
        "device/fw/math.cuh",
        "return x + __shfl_xor_sync(0xffffffffu, x, 2);",
        "return x;",
        TURING,
    ),
    Fault(
        "key vector one short",
        "device/fw/fragment.cuh",
        "values(n) = inside(place.col(n), valid) ?",
        "values(n) = inside(place.col(n) + 1, valid) ?",
        AMPERE,
    ),
    Fault(
        "LSE of the last row missing",
        "device/fw/fragment.cuh",
        "if (writes_rows<Warps, Beside>() && inside(place.row(m), valid))",
        "if (writes_rows<Warps, Beside>() && inside(place.row(m) + 1, valid))",
        AMPERE,
    ),
)


def plant(fault: Fault, folder: Path) -> Path:
    """A copy of the package with the fault; ValueError where the text is not in the file."""
    target = folder / "flashwright"
    shutil.copytree(ROOT / "flashwright", target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / fault.file
    text = path.read_text()
    if fault.old not in text:
        raise ValueError(f"{fault.name}: {fault.file} has no {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new, 1))
    return folder


def outcomes(package: Path, seeds: Sequence[int], gpus: Sequence[str], out: Path) -> dict[int, str]:
    """What became of each seed, with the package in a folder; `out` keeps the record."""
    span = f"{seeds[0]}:{seeds[-1] + 1}"
    command = [sys.executable, "-m", "flashwright", "fuzz", "--seeds", span]
    command += ["--gpu", ",".join(gpus), "--out", str(out), "--jobs", "1"]
    env = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    env["FLASHWRIGHT_VERIFY"] = "0"  # the kernels and the interpreter alone are to tell
    subprocess.run(command, cwd=package, env=env, stdout=subprocess.DEVNULL, check=False)
    return {line["seed"]: line["kind"] for line in read(out) if line["seed"] in set(seeds)}


def programs_until_found(
    fault: Fault,
    programs: int = PROGRAMS,
    first: int = 0,
    chunk: int = CHUNK,
    base: Path | None = None,
) -> int | None:
    """How many programs ran until one showed the fault, or None; `base` keeps the clean runs."""
    with tempfile.TemporaryDirectory(prefix="flashwright-fault-") as name:
        folder = Path(name)
        changed = plant(fault, folder / "changed")
        clean = (base or folder) / f"clean-{'-'.join(fault.gpus)}"
        ran = 0
        for seeds in _chunks(first, programs, chunk):
            before = outcomes(ROOT, seeds, fault.gpus, clean)
            after = outcomes(changed, seeds, fault.gpus, folder / "record")
            for seed in seeds:
                if before.get(seed) == "agree":
                    ran += 1
                    if after.get(seed) in FAILURES:
                        return ran
    return None


def _chunks(first: int, programs: int, size: int) -> Iterator[range]:
    for start in range(first, first + programs, size):
        yield range(start, min(start + size, first + programs))


def main() -> None:
    """Plant the faults that are named, or all, and say how many programs each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    given = parser.parse_args()
    base = Path(tempfile.gettempdir()) / "flashwright-faults"
    chosen = [f for f in FAULTS if not given.names or f.name in given.names]
    missed = 0
    for fault in chosen:
        took = programs_until_found(fault, given.programs, base=base)
        missed += took is None
        print(f"{fault.name}: {'not found' if took is None else f'{took} programs'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")


if __name__ == "__main__":
    main()
