"""Tasks of benchmarks on this machine's GPU: generated, judged, exported, and the submission run.

    python -m tests.gpu.task_submissions GPU TASK...

TASK is what `generate --from` takes. Each submission is compared with its task's own reference on
the GPU: KernelBench's model in fp16 with its tolerance of 0.01, a Definition's `run`, forward_fn.
A line of a task says `right` or what is wrong; the exit code is 1 if any is not right.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from flashwright.formats.task import FLASHINFER, KERNELBENCH, Task
from flashwright.generate.folder import TASK

TOLERANCE = 0.01  # of KernelBench for fp16
PART_OF_RMS = 0.02  # of a Definition, whose own output is rounded to bf16


def main() -> None:
    """Try every task, and print a line for each."""
    gpu, *files = sys.argv[1:]
    results = {file: submission(gpu, Path(file)) for file in files}
    for file, result in results.items():
        print(f"{Path(file).name}: {result}")
    sys.exit(any(not result.startswith("right") for result in results.values()))


def submission(gpu: str, file: Path) -> str:
    """What comes of a task: `right`, or the reason."""
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place, "package"), Path(place, "submission")
        for step in (
            ["generate", "--from", str(file), "--gpu", gpu, "--out", str(folder), "-q"],
            ["export", str(folder), "--as", "", "-o", str(out)],
        ):
            if step[0] == "export":
                task = Task(**json.loads((folder / TASK).read_text()))
                step[3] = task.format
            done = subprocess.run(
                [sys.executable, "-m", "flashwright", *step], capture_output=True, text=True
            )
            print(done.stdout + done.stderr, flush=True)
            if done.returncode:
                return f"{step[0]} ended with {done.returncode}: {done.stderr.strip()[-200:]}"
        told: dict[str, Any] = json.loads((folder / "result.json").read_text())
        kind = told["verdict"]
        if task.format == FLASHINFER:
            return f"{_of_definition(task, out)}; verdict: {kind}"
        if task.format == KERNELBENCH:
            return f"{_of_module(out)}; verdict: {kind}"
        return f"{_of_forward(file, out)}; verdict: {kind}"


def _compared(found: Any, wanted: Any) -> str:
    worst = float((found - wanted).abs().max())
    close = torch.allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    return f"{'right' if close else 'WRONG'}: largest difference {worst:.2g}"


def _of_module(out: Path) -> str:
    """ModelNew against Model, as KernelBench's eval does it: the same seed, fp16."""
    sys.path.insert(0, str(out))
    sys.modules.pop("model_new", None)
    task = importlib.import_module("model_new")
    sys.path.remove(str(out))
    models = []
    for kind in (task.Model, task.ModelNew):
        torch.manual_seed(42)
        models.append(kind(*task.get_init_inputs()).cuda().half())
    inputs = [x.cuda().half() for x in task.get_inputs()]
    with torch.no_grad():
        return _compared(models[1](*inputs), models[0](*inputs))


def _of_forward(folder: Path, out: Path) -> str:
    """forward.cu against forward_fn, as robust-kbench does it; in fp32."""
    from torch.utils.cpp_extension import load

    from flashwright.build import toolchain

    extension = load(
        name="forward_of_task",
        sources=[str(out / "forward.cu")],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        extra_include_paths=[str(toolchain.find().cutlass)],
    )
    sys.path.insert(0, str(folder))
    sys.modules.pop("func_forward", None)
    task = importlib.import_module("func_forward")
    config = json.loads((folder / "config_forward.json").read_text())
    shared = config["single_shared_configs"][0]
    torch.manual_seed(42)
    model = task.Model(**config["single_init_configs"][0], **shared).cuda()
    inputs = [x.cuda() for x in task.get_inputs(**config["single_input_configs"][0], **shared)]
    with torch.no_grad():
        return _compared(model(*inputs, fn=extension.forward), model(*inputs, fn=task.forward_fn))


def _of_definition(task: Task, out: Path) -> str:
    """The Solution's run against the Definition's, on small workloads."""
    from flashwright.formats.definition_process import workload

    definition = json.loads(task.source)
    (file,) = (out / "solutions").rglob("*.json")
    package = out / "solution_here"
    package.mkdir()
    for source in json.loads(file.read_text())["sources"]:
        (package / source["path"]).write_text(source["content"])
    (package / "__init__.py").write_text("")
    sys.path.insert(0, str(out))
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]
    run = importlib.import_module("solution_here.main").run
    sys.path.remove(str(out))
    made = workload(definition, {"variant": task.variant, **task.options})
    inputs = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in made.items()}
    space: dict[str, Any] = {}
    exec(definition["reference"], space)
    output, lse = space["run"](**inputs)
    found, logs = torch.full_like(output, torch.nan), torch.full_like(lse, torch.nan)
    run(*inputs.values(), found, logs)
    part = float((found.double() - output.double()).norm() / output.double().norm())
    off = float((logs - lse)[lse.isfinite()].abs().max())
    right = part <= PART_OF_RMS and off <= 0.02 and torch.equal(logs.isfinite(), lse.isfinite())
    return f"{'right' if right else 'WRONG'}: off by {part:.2g} of the RMS, lse by {off:.2g}"


if __name__ == "__main__":
    main()
