"""A tuning and a study on a Ray cluster of three nodes, which loses a node and its driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashwright.fleet.processes import LocalMachine
from flashwright.measure.tune.state import Tuning, read
from flashwright.study.sample import Sample
from tests.unit import fleet_study, fleet_tune
from tests.unit.tune_fakes import package

# Otherwise Ray takes 127.0.0.1 for the machine's address in a network, and listens there.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'flashwright[ray]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HERE = {"node_ip_address": "127.0.0.1", "include_dashboard": False}


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """A head without a GPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:  # the nodes import the tests' jobs
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **HERE})
        made.gpu_nodes = []
        yield made
        made.shutdown()


@pytest.fixture
def cluster(started: Any) -> Iterator[Any]:
    """A head, and two nodes that say they have a GPU each."""
    while len(started.gpu_nodes) < 2:
        kind = {"accelerator_type:H200": 1}
        node = started.add_node(num_cpus=1, num_gpus=1, resources=kind, **HERE)
        started.gpu_nodes.append(node)
    yield started
    ray.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    """The same tuning by processes of this machine."""
    folder = package(tmp_path_factory.mktemp("local"))
    done = fleet_tune.tuned(folder, LocalMachine(look=fleet_tune.look))
    assert done.complete
    assert {one.failure for one in done.tried} != {""}, "some are wrong"
    return done


def alike(tuning: Tuning | None) -> dict[str, Any]:
    """A record without the hosts and cards that its times are from."""
    assert tuning is not None
    told = tuning.model_dump()
    for one in told["tried"]:
        for timing in (*one["first"].values(), *one["final"].values()):
            assert timing.pop("where").startswith(os.uname().nodename + ", NVIDIA H200")
    return told


class LosesANode(fleet_tune.Told):
    """Ends the machine of one GPU when the first cell is there."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.cells = cluster, 0

    def cell(self, step: Any) -> None:
        self.cells += bool(step.lines)
        if self.cells == 1 and len(self.cluster.gpu_nodes) == 2:
            self.cluster.remove_node(self.cluster.gpu_nodes.pop(), allow_graceful=False)


def test_a_tuning_survives_the_loss_of_a_node_and_ends_as_a_local_one(
    cluster: Any, local: Tuning, tmp_path: Path
) -> None:
    from flashwright.fleet.on_ray import RayCluster

    folder, told = package(tmp_path / "package"), LosesANode(cluster)
    done = fleet_tune.tuned(folder, RayCluster(cluster.address, fleet_tune.look), told)
    assert len(cluster.gpu_nodes) == 1
    assert alike(done) == alike(local)
    assert alike(read(folder)) == alike(local)


def test_a_driver_that_was_killed_goes_on_where_it_was(
    cluster: Any, local: Tuning, tmp_path: Path
) -> None:
    folder = package(tmp_path / "package")
    command = [sys.executable, "-m", "tests.unit.fleet_tune", str(folder), cluster.address]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    cells = 0
    for line in driver.stdout:
        cells += line.startswith("cell")
        if cells == 3:
            driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = read(folder)
    assert before is not None
    assert not before.complete
    kept = {one.name: dict(one.first) for one in before.tried if one.first}
    assert kept
    again = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert "compiling 0 candidates" in again.stdout
    assert "judging 0 kernels" in again.stdout
    done = read(folder)
    assert alike(done) == alike(local)
    assert again.stdout.count("cell ") < 3 * 3 + 3, "cells that were there are not measured again"
    assert done is not None
    for name, times in kept.items():
        assert times.items() <= done.by_name()[name].first.items()


# --- a study ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locally(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same study by processes of this machine."""
    root = tmp_path_factory.mktemp("study")
    fleet_study.studied(root, LocalMachine(look=fleet_tune.look))
    return records(root)


def records(root: Path) -> dict[str, Any]:
    """The files of a study, without how long anything took, and without how many replies a sample
    that was cut off has taken from its record."""
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        text = re.sub(r'"(seconds|repeated)": [\d.e-]+', r'"\1": 0', path.read_text())
        found[path.relative_to(root).as_posix()] = text
    assert f"small/tl/{fleet_study.SAMPLES}/judged.json" in found
    return found


class LosesANodeOfSamples(fleet_study.Told):
    """Ends the machine of a GPU when both have a sample that was begun."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.lost = cluster, False

    def begin(self, sample: Sample, number: int, total: int) -> None:
        if number == 2 and not self.lost:
            self.lost = True
            self.cluster.remove_node(self.cluster.gpu_nodes.pop(), allow_graceful=False)


def test_a_study_survives_the_loss_of_a_node_and_ends_as_a_local_one(
    cluster: Any, locally: dict[str, Any], tmp_path: Path
) -> None:
    from flashwright.fleet.on_ray import RayCluster

    told = LosesANodeOfSamples(cluster)
    fleet_study.studied(tmp_path, RayCluster(cluster.address, fleet_tune.look), told)
    assert told.lost
    assert records(tmp_path) == locally


def test_a_study_whose_driver_was_killed_asks_only_for_what_is_missing(
    cluster: Any, locally: dict[str, Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.unit.fleet_study", str(tmp_path), cluster.address]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("ends") and "right on a GPU" in line:
            driver.send_signal(signal.SIGKILL)
    driver.wait()
    ended = {path: path.read_bytes() for path in tmp_path.rglob("judged.json")}
    assert 0 < len(ended) < fleet_study.SAMPLES
    again = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert again.stdout.count("right on a GPU") == fleet_study.SAMPLES - len(ended)
    assert records(tmp_path) == locally
