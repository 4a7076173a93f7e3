"""The kernels of a grid: generated, translated and compiled, several at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from flashwright import gpu as gpus
from flashwright.build.driver import Card
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lower.launch_plan import LaunchPlan
from flashwright.spec import AttentionSpec

Step = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Made:
    """A compiled kernel, or why there is none."""

    spec: AttentionSpec
    plan: LaunchPlan | None = None
    cubin: bytes = b""
    ptx: bytes = b""
    registers: int = 0
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def why(self) -> str:
        """Why there is no kernel, in a line."""
        return "; ".join(f"{d.code}: {d.message}" for d in self.diagnostics)


def make(spec: AttentionSpec, gpu: str, card: Card) -> Made:
    """One kernel: written for the GPU named `gpu`, compiled for the card at hand."""
    from flashwright.author.builtin.author import write_code, write_sketch
    from flashwright.author.builtin.choose import NothingFits
    from flashwright.build.make import make as translate_and_build
    from flashwright.check.check import check
    from flashwright.lang.parse import parse

    target = gpus.find(gpu)
    try:
        code = write_code(write_sketch(spec), spec, target).code
        checked = check(parse(code), target)
        if checked.program is None or checked.errors:
            return Made(spec, diagnostics=tuple(checked.errors))
        arch = target.arch
        if not card.takes(arch):
            text = f"a kernel for {target.title} ({arch}) cannot run on {card.name} ({card.arch})"
            raise Failed(Diagnostic("FW851", text, help="name an older GPU: --as a100"))
        real = None if arch.rstrip("af") == card.arch else card.arch
        made, built = translate_and_build(checked.program, target, real=real, tl=code)
    except Failed as failed:  # returned and not raised: it has to go from process to process
        return Made(spec, diagnostics=failed.diagnostics)
    except NothingFits as error:
        return Made(spec, diagnostics=(Diagnostic("FW905", str(error)),))
    return Made(spec, made.plan, built.cubin, built.ptx.encode(), built.registers)


def make_all(
    specs: Iterable[AttentionSpec], gpu: str, card: Card, step: Step, jobs: int = 0
) -> Iterator[Made]:
    """The kernels as they are done; processes of their own, so that Ctrl-C ends their compilers."""
    wanted = list(dict.fromkeys(specs))
    context = multiprocessing.get_context("spawn")
    workers = min(jobs or os.cpu_count() or 1, len(wanted))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            futures = [pool.submit(make, spec, gpu, card) for spec in wanted]
            for done, future in enumerate(as_completed(futures), 1):
                step(done, len(wanted), "")
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
