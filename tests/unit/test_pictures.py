"""The pictures of the README are what its scripts draw today."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.make import sparse, speed, terminal
from flashwright.build import toolchain


def shown(svg: str) -> list[str]:
    """The lines of a terminal's picture."""
    lines: dict[str, str] = {}
    for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if text.get("clip-path"):
            lines[text.get("y", "")] = lines.get(text.get("y", ""), "") + (text.text or "")
    return [line.replace("\xa0", " ").rstrip() for line in lines.values()]


def test_the_plot_of_speeds_is_drawn_from_the_records() -> None:
    assert speed.PICTURE.read_text() == speed.draw()
    assert sparse.PICTURE.read_text() == sparse.draw()


def test_the_recording_shows_what_the_checker_prints(tmp_path: Path) -> None:
    scene = terminal.check(tmp_path)
    assert "FW607" in scene.plain
    expected = shown(terminal.draw([scene]))
    assert shown(terminal.PICTURE.read_text())[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.skipif(not toolchain.has_nvcc(), reason="there is no CUDA compiler")
def test_the_recording_shows_what_the_emulator_prints() -> None:
    """Lines of PTX and addresses are the compiler's affair."""

    def told(svg: str) -> str:
        return re.sub(r"PTX line \d+|0x[0-9a-f]+", "_", " ".join(" ".join(shown(svg)).split()))

    assert told(terminal.PICTURE.read_text()) == told(terminal.draw(terminal.record()))
