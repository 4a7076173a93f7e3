"""The speed of a study's samples relative to the peers, timed on a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

from flashwright import spec as specs
from flashwright.files import write
from flashwright.generate.by_model.speed import KERNEL, Stopwatch
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.measure import race
from flashwright.measure.contest import Contestant
from flashwright.measure.peers import registry
from flashwright.measure.race import RaceResult
from flashwright.study import judged

FILE = "speed.json"


def time_sample(folder: Path, progress: Callable[[str], None]) -> str | None:
    """Time a sample that is right on a GPU and not timed yet; returns the result in words."""
    if not judged.right(folder) or ratio(folder) is not None:
        return None
    progress("timing it beside its peers")
    return f"{measure(folder, Stopwatch(peers=_peers)):.2f} times as fast as the best peer"


def _peers() -> list[registry.Peer]:
    """All installed peers except the naive one, which is never the fastest."""
    return [peer for peer in registry.choose(None) if peer.key != "naive"]


def ratio(folder: Path) -> float | None:
    """The recorded ratio of a sample; None if there is none."""
    try:
        found = float(json.loads((folder / FILE).read_bytes())["ratio"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if math.isfinite(found) and found > 0 else None


def measure(folder: Path, stopwatch: Stopwatch) -> float:
    """How many times as fast as the best peer the sample is. Raises Failed."""
    candidate = judged.candidate_of(folder)
    assert candidate is not None, "it was judged"
    card, spec = stopwatch.card(), specs.load(folder / "spec.toml")
    peers = [race.peer(one) for one in stopwatch.peers()]
    raced = stopwatch.race(spec, [Contestant(KERNEL, candidate, watched=True), *peers])
    if KERNEL in raced.lost:
        raise Failed(Diagnostic("FW852", f"it cannot be timed: {raced.lost[KERNEL]}"))
    found = beside_the_best(raced)
    if found is None:
        raise Failed(Diagnostic("FW851", "no peer supports this operator"))
    record = {"ratio": found, "card": card.name, **raced.record()}
    write(folder / FILE, json.dumps(record, indent=1) + "\n")
    return found


def beside_the_best(raced: RaceResult) -> float | None:
    """The speed over that of the fastest peer at each length, as the geometric mean."""
    peers = [times for who, times in raced.times.items() if who != KERNEL]
    if not peers:
        return None
    ours = raced.times[KERNEL]
    logs = [math.log(min(t[n].seconds for t in peers) / ours[n].seconds) for n in ours]
    return math.exp(sum(logs) / len(logs))
