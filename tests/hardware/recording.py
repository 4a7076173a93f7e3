"""What a GPU answered, as a file: one array of bytes, and which of them belong to which snippet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.hardware.snippet import Operands, Prepared

FILE = Path(__file__).with_name("recorded.npz")


@dataclass(frozen=True)
class Recording:
    """The results of snippets, each with the digest of what they are the results of."""

    machine: str
    results: Mapping[str, tuple[str, bytes]]
    failed: Mapping[str, str]
    """Snippets that this GPU or its driver did not take, and why."""

    def of(self, one: Prepared) -> Operands | None:
        """A snippet's results; None where it was not recorded, or was another one then."""
        digest, data = self.results.get(one.snippet.name, ("", b""))
        return one.results(data) if digest == one.digest else None


def save(path: Path, recording: Recording) -> None:
    """One file, the same bytes for the same results."""
    index, parts, at = {}, [], 0
    for name, (digest, data) in sorted(recording.results.items()):
        index[name] = [digest, at, len(data)]
        parts.append(data)
        at += len(data)
    about = json.dumps(
        {"machine": recording.machine, "failed": recording.failed, "snippets": index}
    )
    np.savez_compressed(
        path,
        about=np.frombuffer(about.encode(), np.uint8),
        results=np.frombuffer(b"".join(parts) or b"\0", np.uint8),
    )


def load(path: Path = FILE) -> Recording | None:
    """The recording, if there is one."""
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        about = json.loads(arrays["about"].tobytes())
        data = arrays["results"].tobytes()
    results = {
        name: (digest, data[at : at + size])
        for name, (digest, at, size) in about["snippets"].items()
    }
    return Recording(about["machine"], results, about["failed"])
