"""run.engine=ray on real clusters: nodes that die and join, shards and models that fail, drivers that are stopped."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Faults
from forge import TESTS
from test_run import data_files, do, ids_written, manifest, rows, settings, sound

from fluxbatch import process
from fluxbatch.output import job
from fluxbatch.plan import rates

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fluxbatch[ray]'")

from ray_cluster import OBJECT_STORE_BYTES, QUICK, Cluster, cluster

from fluxbatch.cluster.crew import Event, Member
from fluxbatch.cluster.dealer import Dealer
from fluxbatch.cluster.driving import RayDrawing
from fluxbatch.cluster.worker import Answer
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder

COUNT = 60  # rows, in six shards of three batches
ON_RAY = ("run.engine=ray", "run.ray_resources=place:1", "telemetry.progress=lines", "telemetry.interval_s=1")
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
        return self.wait_for(lambda: sorted({int(mark.name) for mark in self.marks.glob("[0-9]*")} - {*but}), count)

    def says(self, words: str) -> None:
        self.wait_for(lambda: [words] if words in self.words else [])

    def go(self) -> None:
        """Let workers that hold go on."""
        (self.marks / "go").touch()

    def wait_for(self, find: Callable[[], list[Any]], count: int = 1) -> list[Any]:
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


def batches_drawn(run: Path) -> int:
    return sum(path.read_text().count("\n") for path in (run / "logs").glob("metrics-rank-*.jsonl"))


def node_of(nodes: Cluster, pid: int) -> Any:
    return next(node for node in nodes.nodes if pid in nodes.processes(node))


@pytest.mark.slow
def test_a_node_is_killed_in_the_middle_of_a_shard_and_one_joins_and_the_bytes_are_those_of_one_process(
    tmp_path: Path, nodes: Cluster, whole: dict[str, str], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, mark_at=2, hold=True)
    first = job.marked(2)
    job.wait_for(lambda: [1] * batches_drawn(tmp_path / "run"), 4)  # two of each shard: no kill before a batch's line
    node = node_of(nodes, first[0])
    nodes.kill(node)
    nodes.nodes.remove(node)
    faults.kill()
    nodes.nodes.append(nodes.add(1))
    job.marked(1, but=tuple(first))  # a worker of the node that has joined
    job.go()
    assert job.end() == 0, job.words
    assert "was lost" in job.words and "[state-dump]" not in job.words
    ends_like(tmp_path, whole, faults)
    assert len(list((tmp_path / "run" / "logs").glob("metrics-rank-*.jsonl"))) >= 2
    assert batches_drawn(tmp_path / "run") == 18, "the batches that the lost worker had committed are kept"
    assert f"{COUNT}/{COUNT} rows (100.0 %)" in job.words


@pytest.mark.slow
def test_a_signal_to_the_driver_lets_the_workers_finish_their_batches_and_the_same_command_goes_on(
    tmp_path: Path, nodes: Cluster, whole: dict[str, str], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, hold=True)
    job.marked(1)
    job.process.send_signal(signal.SIGTERM)
    faults.signal()
    job.says("SIGTERM: finishing what is in flight")
    job.go()
    assert job.end() == 75, job.words
    assert "SIGTERM" in job.words
    run = tmp_path / "run"
    assert sound(run).pending > 0 and list((run / "locks").iterdir()) == []
    assert batches_drawn(run) >= 1, "what was in flight is finished"
    assert Job(tmp_path, nodes).end() == 0
    ends_like(tmp_path, whole, faults)
    assert batches_drawn(run) == 18, "none is drawn twice"


@pytest.mark.slow
def test_workers_end_with_a_driver_that_is_killed_and_the_same_command_goes_on(
    tmp_path: Path, nodes: Cluster, whole: dict[str, str], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, hold=True)
    workers = job.marked(2)
    job.process.kill()
    faults.kill()
    job.end()
    until_s = time.monotonic() + 60
    while any(process.is_alive(pid) for pid in workers):
        assert time.monotonic() < until_s, "a worker outlives its driver"
        time.sleep(0.1)
    assert Job(tmp_path, nodes).end() == 0
    ends_like(tmp_path, whole, faults)


@pytest.mark.slow
def test_shards_that_fail_or_kill_their_workers_are_given_up_and_named_once_the_others_are_done(
    tmp_path: Path, nodes: Cluster, faults: Faults
) -> None:
    content = rows(COUNT)
    content[2]["prompt"] += " poison"  # in shard 0
    content[0]["prompt"] += " deadly"  # in shard 4
    manifest(tmp_path / "m.parquet", content)
    job = Job(tmp_path, nodes, "run.max_shard_attempts=2")
    assert job.end() == 1, job.words
    assert "shards 0, 4 could not be made in run.max_shard_attempts=2 attempts" in job.words
    assert "shard 0: RuntimeError: poisoned; stage prefetch" in job.words
    faults.kill(2)
    counts = sound(tmp_path / "run")
    assert (counts.written, counts.pending) == (COUNT - 20, 20)
    assert Job(tmp_path, nodes, fake="load_forgiving").end() == 0
    faults.rows(asked=[row["id"] for row in content], found=ids_written(tmp_path / "run"))
    assert sound(tmp_path / "run").written == COUNT


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_job_at_once(tmp_path: Path, nodes: Cluster) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, fake="load_nothing")
    assert job.end() == 1, job.words
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/models/gone/model.safetensors'" in job.words
    assert len(list(job.marks.glob("tried-*"))) <= 2, "each worker tries once"
    assert list((tmp_path / "run" / "locks").iterdir()) == []


@pytest.mark.slow
def test_a_node_that_does_not_see_the_run_folder_is_left_out_by_name(
    tmp_path: Path, nodes: Cluster, whole: dict[str, str], faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    (tmp_path / "run").mkdir()
    with blind_node(nodes, tmp_path / "run"):
        job = Job(tmp_path, nodes, "run.ray_resources=place:1,blind:1")
        assert job.end() == 2, job.words
        assert "is left out: it does not see output.dir" in job.words
        job = Job(tmp_path, nodes, hold=True)
        job.says("is left out: it does not see output.dir")
        job.go()
        assert job.end() == 0, job.words
    ends_like(tmp_path, whole, faults)


@contextmanager
def blind_node(nodes: Cluster, hidden: Path) -> Iterator[None]:
    """A node with a place, in a mount namespace where another, empty folder stands in the place of this one."""
    resources = json.dumps({"place": 1, "blind": 1})
    start = [f"{Path(sys.executable).parent}/ray", "start", f"--address={nodes.address}", "--num-cpus=1", "--block",
             f"--resources={resources}", f"--object-store-memory={OBJECT_STORE_BYTES}"]  # fmt: skip
    hiding = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
    if subprocess.run([*hiding, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    process = subprocess.Popen([*hiding, *start], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        nodes.wait_for_resource("blind")
        yield
    finally:
        process.terminate()  # never `ray stop`, which ends every cluster of this machine
        process.wait(60)


@pytest.mark.slow
def test_without_a_free_place_the_job_says_so_and_ends(tmp_path: Path, nodes: Cluster) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    job = Job(tmp_path, nodes, "run.ray_resources=GPU:1", "run.ray_wait_s=11")
    assert job.end() == 1, job.words
    assert "no node of the Ray cluster has GPU:1 free; waiting up to run.ray_wait_s=11 seconds for one" in job.words
    assert "no worker could be started for run.ray_wait_s=11 seconds" in job.words


@contextmanager
def head_with_dashboard(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node that takes submitted jobs; yields the environment of who submits one."""
    tools = Path(sys.executable).parent
    environ = {**os.environ, **QUICK, "PATH": f"{tools}:{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    environ.pop("RAY_ADDRESS", None)
    ports = free_ports(2)
    start = [f"{tools}/ray", "start", "--head", "--block", "--num-cpus=1", f"--port={ports[0]}",
             "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports[1]}",
             f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}"]  # fmt: skip
    with open(folder / "words", "w") as words:
        process = subprocess.Popen(start, env=environ, stdout=words, stderr=words)
    try:
        address = f"http://127.0.0.1:{ports[1]}"
        await_agent(address, process)
        yield {**environ, "RAY_ADDRESS": address}
    finally:
        process.terminate()  # never `ray stop`, which ends every cluster of this machine
        process.wait(60)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def await_agent(address: str, process: subprocess.Popen[bytes]) -> None:
    """Until a job is taken: the dashboard answers before the agent that starts jobs does."""
    from ray.job_submission import JobSubmissionClient

    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        assert process.poll() is None, "the head ended"
        with contextlib.suppress(RuntimeError, ConnectionError):
            JobSubmissionClient(address).submit_job(entrypoint="true")
            return
        time.sleep(1)
    raise AssertionError("the cluster never took a job")


@pytest.mark.slow
def test_a_submitted_job_draws_with_the_embedded_model_and_its_own_exit_code_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    content = [{"id": f"{n}", "prompt": "a red circle"} for n in range(7)] + [{"id": "blank", "prompt": " "}]
    manifest(tmp_path / "m.parquet", content)
    place = ["manifest.path=" + str(tmp_path / "m.parquet"), f"output.dir={tmp_path}/run", "model=tiny"]
    small = ["model.device=cpu", "sampler.num_inference_steps=2", "plan.batch_size=2", "plan.shard_size=4"]
    with tempfile.TemporaryDirectory(prefix="ray") as short, head_with_dashboard(Path(short)) as environ:
        done = subprocess.run(
            ["bash", str(TESTS.parent / "jobs" / "ray_submit.sh"), *place, *small],
            env=environ,
            capture_output=True,
            text=True,
            timeout=400,
        )
    assert done.returncode == 4, done.stdout + done.stderr  # a rejected row; `ray job submit` would say 1
    assert "written: 7" in done.stdout
    assert sound(tmp_path / "run").written == 7


def test_the_longest_shard_by_what_it_misses_is_dealt_first() -> None:
    class Part:
        def shard_costs(self) -> np.ndarray:
            return np.array([100, 400, 300])

    plan = SimpleNamespace(parts=[Part(), Part()])
    missing = {0: {0, 1}, 1: {2}, 4: {8, 9}, 5: {10, 11}}  # of two batches each
    left = lambda shard: len(missing[shard.index])  # noqa: E731
    share = SimpleNamespace(plan=plan, num_missing=left, cfg=None, folder=None)
    work = [SimpleNamespace(index=index, batches=(None, None)) for index in missing]
    assert RayDrawing(share, None, None)._longest_first(work) == [4, 5, 1, 0]


@pytest.mark.parametrize("driver_stops", [False, True])
def test_a_worker_that_stopped_gets_no_more_shards_and_costs_none(driver_stops: bool) -> None:
    dismissed: list[Member] = []
    share = SimpleNamespace(
        plan=SimpleNamespace(shard=lambda index: SimpleNamespace(index=index)),
        look_again=lambda shard: 0,
        cfg=SimpleNamespace(run=SimpleNamespace(max_shard_attempts=1)),
        folder=None,
    )
    drawing = RayDrawing(share, None, SimpleNamespace(requested=lambda: driver_stops))
    dealer, member = Dealer([5], max_attempts=1), Member(None, "node", "host", 1, "busy", shard=5)
    assert dealer.next() == 5
    drawing._take(Event(member, Answer("stopped")), dealer, SimpleNamespace(dismiss=dismissed.append))
    assert (dealer.num_waiting, dealer.given_up, member.shard) == (1, {}, None)
    assert dismissed == ([] if driver_stops else [member])


def test_what_the_workers_measured_is_kept_for_the_next_plan_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    do(settings(tmp_path))
    folder = RunFolder(tmp_path / "run")
    folder.metrics(0).rename(folder.metrics(1))  # rank 0 drives, and draws nothing
    monkeypatch.setenv("FLUXBATCH_CACHE", str(tmp_path / "cache"))
    cfg = job.recorded_config(job.read_job(folder))
    RayDrawing(SimpleNamespace(cfg=cfg, folder=folder, plan=RunPlan.open(folder)), None, None)._remember()
    assert {known.bucket.height for known in rates.recall(cfg)} == {64, 96}
