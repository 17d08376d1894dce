"""A real Ray cluster on this machine: each node is a raylet of its own, and dies by SIGKILL."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from forge import TESTS

QUICK = {  # a dead node is noticed in a second or two, not in half a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
}
OBJECT_STORE_BYTES = 80 * 2**20


class Cluster:
    """Nodes are added with places for so many workers, and killed."""

    def __init__(self, places: list[int]) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._cluster = RayCluster(
            initialize_head=True, head_node_args={**self._node(places[0]), "include_dashboard": False}
        )
        self.nodes = [self._cluster.head_node, *map(self.add, places[1:])]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, places: int) -> Any:
        return self._cluster.add_node(**self._node(places), wait=True)

    @staticmethod
    def _node(places: int) -> dict[str, Any]:
        return {"num_cpus": 1, "num_gpus": 0, "resources": {"place": places}, "object_store_memory": OBJECT_STORE_BYTES}

    def kill(self, node: Any) -> None:
        """The raylet and all its workers, at once."""
        workers = self.processes(node)
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in workers:
            kill(pid)

    def processes(self, node: Any) -> list[int]:
        """The worker processes of a node."""
        [raylet] = node.all_processes["raylet"]
        return [child.pid for child in psutil.Process(raylet.process.pid).children(recursive=True)]

    def wait_for_resource(self, name: str) -> None:
        """Until a node that was started elsewhere has joined."""
        until_s = time.monotonic() + 120
        while not any(name in node.get("Resources", {}) for node in self._cluster.global_state.node_table()):
            assert time.monotonic() < until_s, f"no node with {name} has joined"
            time.sleep(0.2)

    def close(self) -> None:
        self._cluster.shutdown()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def cluster(*places: int) -> Iterator[Cluster]:
    """A head and further nodes, each with places for so many workers."""
    before = dict(os.environ)
    paths = [str(TESTS), str(TESTS.parent), *sys.path]
    os.environ.update(QUICK, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    os.environ.pop("RAY_ADDRESS", None)
    made = Cluster(list(places))
    try:
        yield made
    finally:
        made.close()
        os.environ.clear()
        os.environ.update(before)
