"""Where the emulator's library comes from: the wheel, the cache, or the host's compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashwright.emulate import machine
from tests.unit.emulated import needs_compilers


@pytest.fixture(scope="module")
def real() -> Path:
    return machine.library_file()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """Nothing is compiled or in the cache: what would be compiled is listed."""
    made: list[Path] = []

    def note(_: str, path: Path, flags: object) -> None:
        made.append(path)

    monkeypatch.setattr(machine, "_compile", note)
    monkeypatch.setattr(machine, "BUILT_IN", tmp_path / "prebuilt")
    monkeypatch.setenv("FLASHWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "prebuilt").mkdir()
    machine._built_in.cache_clear()
    yield made
    machine._built_in.cache_clear()


@needs_compilers
def test_the_library_of_a_wheel_is_used_if_it_is_of_these_sources(
    real: Path, compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "prebuilt" / machine._built_in_name()
    shutil.copy(real, place)
    assert machine.library_file() == place
    assert compiled == []
    monkeypatch.setattr(machine, "_features", lambda: set[str]())
    machine._built_in.cache_clear()
    if machine._FEATURES.get(machine.platform.machine()):
        assert machine.library_file() == compiled[0], "this processor could not execute it"
    place.rename(place.with_name(f"machine-{'0' * 32}.so"))
    machine._built_in.cache_clear()
    assert machine.library_file() == compiled[-1], "of other sources"


def test_a_library_that_cannot_be_loaded_is_compiled_here(
    compiled: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prebuilt" / machine._built_in_name()).write_text("no library")
    assert machine.library_file(tell=True) == compiled[0]
    assert "compiling the emulator, once" in capsys.readouterr().err


def test_another_processor_has_a_library_of_its_own(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache may be on a disk that machines share, and the code is for one of them."""
    names = set()
    for processor in ("flags\t: fma", "flags\t: fma avx512f"):
        monkeypatch.setattr(machine, "_processor", lambda processor=processor: processor)
        names.add(machine.library_file().name)
    assert len(names) == 2
    assert len(compiled) == 2
