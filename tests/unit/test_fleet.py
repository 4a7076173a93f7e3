"""Fleets: what runs where, what is lost and what is not; test_fleet_ray.py has a real cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flashwright.build.driver import Card
from flashwright.fleet import on_ray
from flashwright.fleet.engine import connect
from flashwright.fleet.fleet import Fleet
from flashwright.fleet.folders import FolderChanges, apply, packed, unpack
from flashwright.fleet.job import CPU, Job, JobBroken, JobEnd, JobPart, Need, Send, plain
from flashwright.fleet.processes import VISIBLE, LocalMachine
from flashwright.lang.diagnostic import Diagnostic, Failed
from tests.unit.measure_fakes import H200

TWO = (H200, Card(1, H200.name, H200.capability), Card(2, "NVIDIA A100-SXM4-80GB", (8, 0)))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(LocalMachine(look=lambda: TWO)) as made:
        yield made


def ends(fleet: Fleet, need: Need, *jobs: Job) -> dict[str, JobEnd]:
    return {end.name: end for end in fleet.ends(need, jobs)}


# --- jobs, at the top level as they are pickled ------------------------------------------------


def squares(number: int, send: Send) -> int:
    for n in range(number):
        send(n * n)
    return number


def visible() -> str | None:
    return os.environ.get(VISIBLE)


def alone(place: Path) -> str:
    """The GPU that it has; a file says for how long, so that two at a time would see each other."""
    gpu = os.environ[VISIBLE]
    mark = place / gpu
    mark.touch(exist_ok=False)
    time.sleep(0.1)
    mark.unlink()
    return gpu


def dies(place: Path, times: int) -> str:
    """Ends its process the first times that it is run."""
    tried = len([*place.iterdir()])
    if tried < times:
        (place / str(tried)).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def fails(kind: str) -> None:
    raise Failed(Diagnostic("FW823", "it spills")) if kind == "failed" else ValueError(kind)


# --- what runs where ---------------------------------------------------------------------------


def test_results_and_their_parts_come_from_processes_without_a_gpu(fleet: Fleet) -> None:
    events = [*fleet.run(Need(jobs=2), [Job(str(n), partial(squares, n)) for n in (1, 3)])]
    parts = [(event.name, event.value) for event in events if isinstance(event, JobPart)]
    assert [value for name, value in parts if name == "3"] == [0, 1, 4]
    assert {e.name: e.result() for e in events if isinstance(e, JobEnd)} == {"1": 1, "3": 3}
    assert ends(fleet, CPU, Job("gpu", plain(visible)))["gpu"].result() == ""


def test_jobs_of_one_gpu_run_one_after_another_and_only_on_the_kind_that_is_named(
    fleet: Fleet, tmp_path: Path
) -> None:
    jobs = [Job(str(n), plain(alone, tmp_path)) for n in range(6)]
    done = ends(fleet, Need(H200.name), *jobs)
    assert {end.result() for end in done.values()} == {"0", "1"}
    for end in done.values():
        assert end.place is not None
        assert end.place.card == TWO[int(end.value)]
        assert str(end.place) == f"{os.uname().nodename}, NVIDIA H200 ({end.value})"
    assert fleet.card("a100") == TWO[2]
    assert fleet.card("b200") == TWO[0], "one that may run its kernels too: the caller looks"


def test_gpus_that_are_hidden_stay_hidden(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5,7,GPU-12")
    assert ends(fleet, Need(TWO[2].name), Job("x", plain(visible)))["x"].result() == "GPU-12"


def test_without_a_machine_that_has_the_gpu_it_says_so(fleet: Fleet) -> None:
    with pytest.raises(Failed, match="no machine has a NVIDIA B200"):
        ends(fleet, Need("NVIDIA B200"), Job("x", plain(visible)))


# --- losses -----------------------------------------------------------------------------------


def test_a_job_whose_process_dies_runs_once_more_and_then_says_so(
    fleet: Fleet, tmp_path: Path
) -> None:
    once, always = tmp_path / "once", tmp_path / "always"
    once.mkdir()
    always.mkdir()
    jobs = [Job("once", plain(dies, once, 1)), Job("always", plain(dies, always, 99))]
    done = ends(fleet, CPU, *jobs, Job("other", plain(visible)))
    assert done["once"].result() == "done"
    with pytest.raises(Failed, match=r"always: lost 2 times, .* exit code -9") as failed:
        done["always"].result()
    assert failed.value.diagnostics[0].code == "FW859"
    assert len([*always.iterdir()]) == 2
    assert done["other"].result() == ""


def test_a_failure_is_a_result_with_its_reason(fleet: Fleet) -> None:
    done = ends(fleet, Need(jobs=1), *(Job(kind, plain(fails, kind)) for kind in ("failed", "bug")))
    with pytest.raises(Failed, match="FW823: it spills"):
        done["failed"].result()
    with pytest.raises(JobBroken, match="ValueError: bug"):
        done["bug"].result()


DRIVER = """
import sys
from flashwright.fleet.engine import connect
from flashwright.fleet.job import Job, Need
from tests.unit import test_fleet
with connect() as fleet:
    for event in fleet.run(Need(jobs=1), [Job("long", test_fleet.long)]):
        print(event.value, flush=True)
"""


def long(send: Send) -> None:
    """Starts a process, names both, and never ends."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        send(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    finally:
        child.kill()


@pytest.mark.parametrize("ends_with", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_after_the_driver(ends_with: int) -> None:
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n  exec({DRIVER!r})"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    driver.send_signal(ends_with)
    driver.wait()
    while any(_runs(pid) for pid in pids):
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- folders ----------------------------------------------------------------------------------


def test_a_folder_travels_and_its_changes_come_back(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    unpack({"a": b"1", "deep/b": b"2", "gone": b"3"}, here)
    changes = FolderChanges(unpack(packed(here), there))
    assert changes.take() == ()
    (there / "gone").unlink()
    unpack({"deep/b": b"4", "new/c": b"5"}, there)
    (there / ".half.0.tmp").write_bytes(b"half")
    told = changes.take()
    assert set(told) == {("gone", None), ("deep/b", b"4"), ("new/c", b"5")}
    assert changes.take() == ()
    apply(told, here)
    assert packed(here) == {"a": b"1", "deep/b": b"4", "new/c": b"5"}


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_a_worker_writes_nothing_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    for change in ((name, b"1"), (name, None)):
        with pytest.raises(Failed, match="outside of the folder"):
            apply([change], tmp_path)


# --- --on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["slurm", "ray:head", "ray://", "ray://a b"])
def test_what_is_no_fleet_is_told_so(on: str) -> None:
    with pytest.raises(Failed, match=r"is not a fleet\n  help: give local, ray or ray://HOST:PORT"):
        connect(on)


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Failed, match=r"Ray is not installed\n  help: pip install"):
        connect("ray")


class FakeRay:
    """What is asked of Ray before anything runs."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H200": 1}}
        return [dead, *({"Alive": True, "Resources": resources} for resources in self._nodes)]


def test_a_cluster_has_the_gpus_of_the_kind_on_nodes_that_are_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eight = {"CPU": 16.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
    consumer = {"CPU": 4.0, "GPU": 1.0, "accelerator_type:GeForce-RTX-4090": 1.0}
    monkeypatch.setattr(on_ray, "_import", lambda: FakeRay(eight, consumer, {"CPU": 2.0}))
    cluster = on_ray.RayCluster("auto")
    assert cluster.slots(CPU) == 22
    for card, slots in (
        ("NVIDIA H100 80GB HBM3", 8),
        ("NVIDIA H100 PCIe", 8),  # Ray has one name for both: the card that comes is looked at
        ("NVIDIA GeForce RTX 4090", 1),
    ):
        assert cluster.slots(Need(card)) == slots
    assert cluster.slots(Need("NVIDIA H200")) == 0
    with pytest.raises(Failed, match="FW851: no node of the Ray cluster has a h200: its GPUs are"):
        cluster.card("h200")
