"""The registry of peers: built-in ones by key, those of other packages by entry point, callables.

A package registers a peer with an entry point of the group `flashwright.peers`, whose value is a
factory like those of this package: `my-kernel = "my_package.attention:factory"`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec

from flashwright.sandbox.candidate import Candidate

GROUP = "flashwright.peers"
HERE = "flashwright.measure.peers"


class UnknownPeer(ValueError):
    """The peer does not exist; the message lists the peers and suggests one."""


@dataclass(frozen=True)
class Peer:
    """A library or function to compare with."""

    key: str
    """Its name on the command line."""
    name: str
    """Its name in tables and records."""
    candidate: Candidate
    module: str = ""
    """The module it needs besides torch; by default it takes part only if that is installed."""
    distribution: str = ""
    """The distribution whose version is recorded."""
    stands_for: tuple[str, ...] = ()
    """The systems of the paper's tables that it corresponds to."""
    slack: float = 1.0
    """Factor on the usual error limit."""
    watched: bool = False
    """Whether its event times are checked against the wall clock (custom code, like ours)."""

    @property
    def installed(self) -> bool:
        """Whether the module it needs is installed."""
        return not self.module or find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """The version of its distribution; empty if it is part of torch."""
        try:
            return version(self.distribution) if self.distribution else ""
        except PackageNotFoundError:
            return ""


def _own(key: str, name: str, function: str, *stands_for: str, slack: float = 1.0) -> Peer:
    candidate = Candidate("python", HERE, function, factory=True, title=name)
    return Peer(key, name, candidate, stands_for=stands_for, slack=slack)


def _package(key: str, name: str, function: str, module: str, distribution: str) -> Peer:
    candidate = Candidate("python", HERE, function, factory=True, title=name)
    stands_for = ("flash-attn v2",) if key == "fa2" else ()
    return Peer(key, name, candidate, module, distribution, stands_for)


BUILT_IN = (
    _own("flash", "torch flash", "torch_flash", "flash-attn v2", "flash-attn v1"),
    _own("cudnn", "torch cuDNN", "torch_cudnn", "cuDNN"),
    _own("efficient", "torch efficient", "torch_efficient"),
    _own("flex", "FlexAttention", "flex_attention", "FlexAttention"),
    # It rounds its scores to 16 bits, which about doubles the error.
    _own(
        *("naive", "naive torch", "naive_torch"),
        *("torch", "vanilla DeepSeek-V3", "naive PyTorch NSA"),
        slack=4.0,
    ),
    _package(
        "fa3", "FlashAttention-3", "flash_attention_3", "flash_attn_interface", "flash_attn_3"
    ),
    _package("fa2", "FlashAttention-2", "flash_attention_2", "flash_attn", "flash_attn"),
    _package("flashinfer", "FlashInfer", "flash_infer", "flashinfer", "flashinfer-python"),
    _package("fla", "fla, Flex window", "flash_linear_attention", "fla", "fla-core"),
)


def known() -> dict[str, Peer]:
    """All peers by key: the built-in ones and those of installed packages."""
    found = {peer.key: peer for peer in BUILT_IN}
    for point in entry_points(group=GROUP):
        distribution = point.dist.name if point.dist else ""
        candidate = Candidate("python", point.module, point.attr, factory=True, title=point.name)
        found[point.name] = Peer(
            point.name, point.name, candidate, distribution=distribution, watched=True
        )
    return found


def choose(
    asked: Sequence[str] | None, callables: Sequence[str] = (), always: Sequence[str] = ()
) -> list[Peer]:
    """The peers asked for, or all installed ones and `always` those; then callables. Raises
    UnknownPeer.

    `none` stands for no peer. A callable is `file.py:function` or `module:function`.
    """
    every = known()
    if asked is None:
        chosen = [peer for peer in every.values() if peer.installed or peer.key in always]
    else:
        chosen = [_find(key, every) for key in dict.fromkeys(asked) if key != "none"]
    for text in callables:
        chosen.append(Peer(text, text, Candidate.parse(text), watched=True))
    return chosen


def _find(key: str, every: dict[str, Peer]) -> Peer:
    for peer in every.values():
        if key.strip().lower() in (peer.key.lower(), peer.name.lower()):
            return peer
    near = difflib.get_close_matches(key, every, n=1)
    guess = f"; did you mean {near[0]}?" if near else "."
    raise UnknownPeer(f"there is no peer {key!r}{guess} Known are {', '.join(every)}")
