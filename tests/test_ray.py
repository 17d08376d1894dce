"""run.engine=ray on real clusters: nodes that die and join, shards and models that fail, drivers that are stopped."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Faults
from forge import TESTS
from test_run import data_files, do, ids_written, manifest, rows, settings, sound

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fluxbatch[ray]'")

from ray_cluster import Cluster, cluster

COUNT = 60  # rows, in six shards of three batches
ON_RAY = ("run.engine=ray", "run.ray_resources={place:1}", "telemetry.progress=lines", "telemetry.interval_s=1")
PATIENCE_S = 180


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head that is no worker, and two nodes of one place."""
    with cluster(0, 1, 1) as made:
        yield made


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The data files of one process that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    manifest(folder / "m.parquet", rows(COUNT))
    do(settings(folder))
    return data_files(folder / "run")


class Job:
    """The command on a cluster, in a process of its own. `marks/` is where its workers leave their signs."""

    def __init__(self, folder: Path, nodes: Cluster, *overrides: str, fake: str = "load", **keywords: Any) -> None:
        self.folder, self.marks = folder, folder / "marks"
        self.marks.mkdir(exist_ok=True)
        self._words = folder / "words"
        fakes = json.dumps([fake, {"marks": str(self.marks), **keywords}])
        with open(self._words, "w") as words:
            self.process = subprocess.Popen(
                [sys.executable, str(TESTS / "run_ray.py"), "run", *settings(folder), *ON_RAY, *overrides],
                env={**os.environ, "RAY_ADDRESS": nodes.address, "FAKE": fakes},
                stdout=words,
                stderr=words,
            )

    @property
    def words(self) -> str:
        return self._words.read_text()

    def marked(self, count: int = 1, *, but: tuple[int, ...] = ()) -> list[int]:
        """The workers that are in the middle of their shards, once there are so many."""
        return self.wait_for(lambda: sorted({int(mark.name) for mark in self.marks.iterdir()} - {*but}), count)

    def wait_for(self, find: Callable[[], list[int]], count: int = 1) -> list[int]:
        until_s = time.monotonic() + PATIENCE_S
        while len(found := find()) < count:
            assert self.process.poll() is None, self.words
            assert time.monotonic() < until_s, self.words
            time.sleep(0.05)
        return found

    def end(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.words) from None


def ends_like(folder: Path, whole: dict[str, str], faults: Faults) -> None:
    run = folder / "run"
    assert data_files(run) == whole
    assert sound(run).written == COUNT
    assert not (run / "batches").exists() and list((run / "locks").iterdir()) == []
    assert (run / "_SUCCESS").exists() and (run / "report.json").exists()
    faults.rows(asked=[row["id"] for row in rows(COUNT)], found=ids_written(run))


def node_of(nodes: Cluster, pid: int) -> Any:
    return next(node for node in nodes.nodes if pid in nodes.processes(node))


def test_a_node_is_killed_in_the_middle_of_a_shard_and_one_joins_and_the_bytes_are_those_of_one_process(
    tmp_path: Path, nodes: Cluster, whole: dict[str, str], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, slow_s=0.5)
    first = job.marked(2)
    node = node_of(nodes, first[0])
    nodes.kill(node)
    nodes.nodes.remove(node)
    faults.kill()
    nodes.nodes.append(nodes.add(1))
    job.marked(1, but=tuple(first))  # a worker of the node that has joined
    assert job.end() == 0, job.words
    assert "was lost" in job.words
    ends_like(tmp_path, whole, faults)
    lines = [path.read_text().count("\n") for path in (tmp_path / "run" / "logs").glob("metrics-rank-*.jsonl")]
    assert len(lines) >= 2 and sum(lines) >= 18
    assert f"{COUNT}/{COUNT} rows (100.0 %)" in job.words
