"""CUDA graphs inside of a call: captured once for each shape, replayed on copies of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_graphs: dict[Any, tuple[Any, tuple[Any, ...], Any]] = {}


def replayed(function: Callable[..., Any], *given: Any) -> Any:
    """What the function returns, by a graph that was captured at the first call of these shapes."""
    if not given[0].numel():
        return torch.empty_like(given[0])
    key = (function, *(x.shape for x in given))
    if key not in _graphs:
        _graphs[key] = _captured(function, given)
    graph, inputs, out = _graphs[key]
    for mine, theirs in zip(inputs, given, strict=True):
        mine.copy_(theirs)
    graph.replay()
    return out.clone()


def _captured(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    inputs = tuple(x.clone(memory_format=torch.contiguous_format) for x in given)
    function(*inputs)  # compiles, which no capture may
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*inputs)
    return graph, inputs, out
