"""The line to a server: what may come over it, and whom it leads to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """What a server may take and send."""

    connect: float = 10.0
    """Seconds until it answers the call."""
    silence: float = 1800.0
    """Seconds without a byte, before the reply and within it; a keep-alive is a byte. A reasoning
    model may think for many minutes before it sends its first word."""
    reply: int = 2_000_000
    """Bytes of a reply's text, its thoughts included."""
    sent: int = 32_000_000
    """Bytes of one answer as sent: each token has a frame of some hundred bytes."""


@dataclass(frozen=True)
class Line:
    """A server: its address, how messages name it, and the key that none of them may contain."""

    url: str
    where: str
    """Host and port, for a person."""
    variable: str
    """The environment variable that the key is from."""
    key: str = field(repr=False)
    local: bool = False
    """Whether it is this machine's own."""
    limits: Limits = Limits()
