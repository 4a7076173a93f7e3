"""Tensor maps as the launcher has the driver encode them: TMA loads what slicing gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.gpu.on_device import Code, compiled, dtype_of, run
from tests.gpu.tiles import STRIDED, TILES, Tile


@pytest.mark.parametrize("tile", [*TILES, *STRIDED], ids=lambda t: t.name)
def test_a_tile_is_what_slicing_gives(tile: Tile) -> None:
    import torch

    dtype = dtype_of(tile.dtype)
    memory = torch.from_numpy(tile.values()).to("cuda").to(dtype)
    src = memory[tile.cut].permute(tile.axes)
    expected = torch.from_numpy(tile.expected()).to("cuda").to(dtype)
    assert torch.equal(_loaded(tile, src).view(torch.uint8), expected.view(torch.uint8))


def test_a_broadcast_tensor() -> None:
    """Its stride is 0, which the documentation neither allows nor forbids."""
    import torch

    tile = Tile("broadcast", (3, 40, 64), (1, 16, 64), (2, 30, 0), 128)
    src = torch.from_numpy(tile.values()[0]).to("cuda").to(torch.bfloat16)
    expected = torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16)
    expected[:10] = src[30:]
    assert torch.equal(_loaded(tile, src.expand(3, 40, 64)), expected.view(-1))


def test_a_captured_call_keeps_its_map() -> None:
    """Also the first one of a tensor without elements, which needs zeros of the device."""
    import torch

    for tile in TILES[-2:]:
        src = torch.from_numpy(tile.values()).to("cuda").to(torch.bfloat16)
        code = dataclasses.replace(tile.code, lines=(*tile.code.lines, "// captured"))
        out = torch.full((tile.elements,), torch.nan, device="cuda", dtype=torch.bfloat16)
        compiled(code)  # here nothing but the call is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _launch(tile, code, src, out)
        graph.replay()
        assert torch.equal(out, torch.zeros_like(out))


def _loaded(tile: Tile, src: Any) -> Any:
    import torch

    out = torch.full((tile.elements,), 55, device="cuda").to(dtype_of(tile.dtype))
    _launch(tile, tile.code, src, out)
    return out


def _launch(tile: Tile, code: Code, src: Any, out: Any) -> None:
    settings: dict[str, Any] = {"threads": 128, "shared": tile.shared, "maps": (tile.map,)}
    run(code, {"src": src}, {"out": out}, **settings, **tile.starts)
