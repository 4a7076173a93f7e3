"""The store of kernels: one process makes, others wait; nothing is left broken."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashwright import gpu as gpus
from flashwright.author.builtin.mods import Mods
from flashwright.author.builtin.variants import make_spec
from flashwright.generate import store
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.lang.parse import parse

ORDER = store.Order(make_spec("mha", heads=4, head_dim=64), gpus.find("h200"))


def quiet(text: str) -> None:
    """No line of progress."""


def fake(log: Path, seconds: float) -> Callable[[store.Order, Path, bool], None]:
    """A maker that takes its time and leaves a line in a file."""

    def make(order: store.Order, folder: Path, verified: bool) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        folder.mkdir(parents=True)
        (folder / "kernel.cu").write_text("half")
        time.sleep(seconds)
        (folder / "kernel.cu").write_text("whole")
        (folder / "result.json").write_text('{"ok": true}')

    return make


def ask(log: Path, seconds: float, found: Path) -> None:
    store._make = fake(log, seconds)
    folder = store.find_or_make(ORDER, quiet)
    (found / str(os.getpid())).write_text((folder / "kernel.cu").read_text())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_eight_processes_make_one_kernel(cache: Path, tmp_path: Path) -> None:
    log, found = tmp_path / "log", tmp_path / "found"
    found.mkdir()
    fork = multiprocessing.get_context("fork")
    asked = [fork.Process(target=ask, args=(log, 0.3, found)) for _ in range(8)]
    for process in asked:
        process.start()
    for process in asked:
        process.join()
    assert len(log.read_text().splitlines()) == 1
    assert [p.read_text() for p in found.iterdir()] == ["whole"] * 8


def test_a_killed_process_leaves_nothing_broken(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = multiprocessing.get_context("fork").Process(target=ask, args=(log, 60, tmp_path))
    process.start()
    while not log.exists() or not list(cache.glob("work/*/kernel/kernel.cu")):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert store.find(ORDER) is None
    store_make, store._make = store._make, fake(log, 0)
    try:
        assert (store.find_or_make(ORDER, quiet) / "kernel.cu").read_text() == "whole"
    finally:
        store._make = store_make


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file, where a folder should be")
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_make", fake(tmp_path / "log", 0))
    told: list[str] = []
    folder = store.find_or_make(ORDER, told.append)
    assert (folder / "kernel.cu").read_text() == "whole"
    assert told[0].startswith("making a kernel, once: every key visible, 4 heads, head dim 64")
    assert "kept for this process only" in told[1]
    assert "FLASHWRIGHT_CACHE names another folder" in told[1]


def test_what_is_computed_decides_which_kernel_it_is() -> None:
    mask = parse("let x = kv_idx <= q_idx").body[0].value  # type: ignore[union-attr]
    other = parse("let x = kv_idx < q_idx").body[0].value  # type: ignore[union-attr]
    spec, card = ORDER.spec, ORDER.gpu
    orders = [
        ORDER,
        store.Order(spec.model_copy(update={"causal": True}), card),
        store.Order(spec, gpus.find("a100")),
        store.Order(spec, card, Mods(mask=mask)),
        store.Order(spec, card, Mods(mask=other)),
    ]
    assert len({order.key for order in orders}) == len(orders)
    assert ORDER.key == store.Order(make_spec("mha", heads=4, head_dim=64), card).key


def test_a_kernel_that_spills_is_made_with_more_registers_free(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    class Ended:
        built: object = None
        timings: tuple[object, ...] = ()

        def __init__(self, fits: bool) -> None:
            self.ok, self.built = fits, object() if fits else None
            self.findings = () if fits else (_Found(),)

    class _Found:
        diagnostic = Diagnostic("FW823", "the kernel spills")

    def generate(*args: object, headroom: int | None, **more: object) -> Ended:
        asked.append(headroom)
        return Ended(headroom == fits_with)

    monkeypatch.setattr(store, "generate", generate)
    fits_with: int | None = 40
    store._make(ORDER, cache / "kernel", verified=False)
    assert asked == [None, 24, 40]
    fits_with = 1000
    with pytest.raises(Failed, match="the kernel spills"):
        store._make(ORDER, cache / "kernel", verified=False)
