"""Workers on the nodes of a Ray cluster: actors that hold one CPU or one whole GPU each."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from flashwright import gpu as gpus
from flashwright.build import driver
from flashwright.build.driver import Card
from flashwright.fleet.job import JobBroken, Lost, Need, Send, Work, WorkerPlace, unusable
from flashwright.fleet.processes import VISIBLE, answer
from flashwright.lang.diagnostic import Diagnostic, Failed
from flashwright.version import __version__

KIND = "accelerator_type:"
"""The resource by which Ray says what GPUs a node has."""
Look = Callable[[], Sequence[Card]]
_TAKE = 10.0  # seconds that an actor waits for something to report


class RayCluster:
    """The nodes of a cluster, also those that join later."""

    patience = 60.0

    def __init__(self, address: str, look: Look = driver.cards) -> None:
        """Connect: `auto` is the cluster of this machine, else `ray://HOST:PORT`. `look` gives the
        GPUs that a worker can see."""
        self._ray, self._look = _import(), look
        self._ours = not self._ray.is_initialized()
        if not self._ours:
            return
        try:
            self._ray.init(address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0][:300]
            hint = "start one: `ray start --head` here, `ray start --address=HOST:PORT` elsewhere"
            where = "that this machine is a node of" if address == "auto" else f"at {address}"
            raise unusable(f"there is no Ray cluster {where}: {reason}", hint) from None

    def slots(self, need: Need) -> int:
        """The CPUs, or the GPUs of the kind, of all nodes that are alive."""
        nodes = self._nodes()
        if not need.card:
            return sum(int(node.get("CPU", 0)) for node in nodes)
        kind = self._kind(need.card)
        return sum(int(node.get("GPU", 0)) for node in nodes if kind in node)

    def _nodes(self) -> list[dict[str, float]]:
        """What each node that is alive has."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def start(self, need: Need) -> RayWorker:
        """Start an actor, and wait until Ray has placed it."""
        if not need.card:
            return RayWorker(self._ray, {"num_cpus": 1}, self._look)
        kind = self._kind(need.card)
        if not kind:
            raise Lost(f"no node has a {need.card} any more")
        worker = RayWorker(self._ray, _one_gpu(kind), self._look)
        found = worker.place.card
        if found is not None and found.name != need.card:
            worker.close()
            text = f"{worker.place.host} has the GPU {found.name}, the run is on {need.card}"
            raise unusable(text, "one run uses one kind of GPU")
        return worker

    def card(self, gpu: str) -> Card:
        """The cluster's cards of that kind, from one of them."""
        kind = self._kind(gpu)
        if not kind:
            kinds = ", ".join(kind.removeprefix(KIND) for kind in self._kinds())
            there = f"its GPUs are {kinds}" if kinds else "it has no GPUs"
            hint = "add a node that has one: ray start --address=HEAD:6379"
            text = f"no node of the Ray cluster has a {gpu}: {there}"
            raise Failed(Diagnostic("FW851", text, help=hint))
        try:
            worker = RayWorker(self._ray, _one_gpu(kind), self._look)
        except Lost as lost:
            raise unusable(f"no worker with a {gpu} can be started: {lost}") from None
        worker.close()
        card = worker.place.card
        assert card is not None, "it has a GPU"
        return card

    def close(self) -> None:
        """Disconnect, if this connected."""
        if self._ours:
            self._ray.shutdown()

    def _kinds(self) -> list[str]:
        """The resources that say what GPUs there are."""
        names = dict.fromkeys(name for resources in self._nodes() for name in resources)
        return [name for name in names if name.startswith(KIND)]

    def _kind(self, name: str) -> str:
        """The resource of a GPU, given as gpu.py or as its driver names it; empty if no node has
        it."""
        wanted = gpus.find(name)
        return next((kind for kind in self._kinds() if _akin(kind, wanted)), "")


def _one_gpu(kind: str) -> dict[str, Any]:
    """What an actor asks for, to hold one whole GPU of a kind."""
    return {"num_cpus": 1, "num_gpus": 1, "resources": {kind: 0.001}}


def _akin(kind: str, wanted: gpus.Gpu) -> bool:
    """Whether Ray's name may mean this GPU: it calls both kinds of H100 H100."""
    try:
        found = gpus.find(kind.removeprefix(KIND))
    except gpus.UnknownGpu:
        return False
    return found.arch == wanted.arch and wanted.name.startswith(found.name.partition("-")[0])


def _import() -> Any:
    try:
        import ray
    except ImportError:
        hint = "pip install 'flashwright[ray]', here and on every node"
        raise unusable("Ray is not installed", hint) from None
    return ray


class RayWorker:
    """An actor in a cluster, from the side of this program."""

    def __init__(self, ray: Any, options: dict[str, Any], look: Look) -> None:
        self._ray = ray
        self._actor = ray.remote(**options)(_Actor).remote(look if "num_gpus" in options else None)
        place = self._get(self._actor.place.remote())
        if isinstance(place, tuple):
            raise Failed(*place)
        self.place: WorkerPlace = place

    def run(self, work: Work, send: Send) -> Any:
        """Run a job there, asking for what is new until it has ended."""
        self._get(self._actor.begin.remote(work))
        while True:
            for kind, value in self._get(self._actor.take.remote()):
                if kind == "part":
                    send(value)
                elif kind == "failed":
                    raise Failed(*value)
                elif kind == "broken":
                    raise JobBroken(value)
                else:
                    return value

    def close(self) -> None:
        """End the actor's process."""
        with contextlib.suppress(Exception):  # it may be gone, and the cluster with it
            self._ray.kill(self._actor)

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except (self._ray.exceptions.RayError, ConnectionError) as error:
            raise Lost(str(error).strip().partition("\n")[0][:300]) from None


class _Actor:
    """The actor: one process on a node, which runs one job at a time in a thread of its own.

    The call that starts a job returns at once, so that parts can be taken while it runs. Ray's
    client (ray://) has no other way to get them.
    """

    def __init__(self, look: Look | None) -> None:
        self._said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._look = look
        if look is None:
            os.environ[VISIBLE] = ""  # a job that needs a CPU must not disturb one that times

    def place(self) -> Any:
        """Where this is; diagnostics if there is no GPU that can be used."""
        try:
            card = self._look()[0] if self._look is not None else None
        except Failed as failed:
            return failed.diagnostics
        return WorkerPlace(socket.gethostname(), __version__, card, os.environ.get(VISIBLE, ""))

    def begin(self, work: Work) -> None:
        """Start a job. Its thread lives as long as the job: Linux ends the processes with it."""
        run = threading.Thread(target=self._run, args=(work,), daemon=True)
        run.start()

    def take(self) -> list[tuple[str, Any]]:
        """What is new since the last call; empty after some seconds without anything new."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._said.get(timeout=_TAKE))
            while True:
                found.append(self._said.get_nowait())
        return found

    def _run(self, work: Work) -> None:
        self._said.put(answer(work, lambda part: self._said.put(("part", part))))
