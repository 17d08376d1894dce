"""Jobs under a real Slurm: two nodes on this machine, the scripts of jobs/, and the fake model in real processes.

What each signal case must end with: drained, requeued only when right, resumed, and the bytes of one process at last.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_cluster
from conftest import Faults
from slurm_cluster import Cluster, until
from test_run import TESTS, data_files, do, ids_written, manifest, rows, settings, sound

from fluxbatch import command

REASON = slurm_cluster.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ROWS = rows(96)
# Slow until the file is gone: then what was interrupted can be seen to go on, and to end soon.
SHIM = """#!/bin/bash
export FAKE_SLOW_S=$(cat {folder}/slow 2>/dev/null || echo 0)
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} gpu=$CUDA_VISIBLE_DEVICES" >> {folder}/starts
exec {python} {script} run "${{@:3}}"  # without -m fluxbatch
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    base = Path(tempfile.mkdtemp(prefix="fluxbatch-slurm-"))
    base.chmod(0o755)
    with slurm_cluster.cluster(base) as started:
        yield started
    shutil.rmtree(base, ignore_errors=True)


class Job:
    """One run folder, a script for it as `jobs slurm` writes it, and what was submitted."""

    def __init__(self, slurm: Cluster, folder: Path, *ranks: str, slow_s: float = 0.4) -> None:
        self.slurm, self.folder, self.slow_s = slurm, folder, slow_s
        manifest(folder / "m.parquet", ROWS)
        shim = folder / "python shim"  # a path that needs quoting
        shim.write_text(SHIM.format(folder=folder, python=sys.executable, script=TESTS / "run_fake.py"))
        shim.chmod(0o755)
        self.script = folder / "job.sh"
        more = ["run.name=it's a 'quoted' name; $HOME", "run.grace_s=20"]
        more += ["pipeline.depth=1", "pipeline.encode_window=1"]  # a drain must not finish the whole share
        words = ["jobs", "slurm", *ranks, "--python", str(shim), "--to", str(self.script), *settings(folder, *more)]
        assert command.run_command(words) == 0
        subprocess.run(["bash", "-n", self.script], check=True)

    def submit(self, *options: str, slow: bool = True) -> str:
        self.be_slow(slow)
        return self.slurm.submit(*options, f"--output={self.folder}/log-%j", self.script)

    def be_slow(self, slow: bool) -> None:
        path = self.folder / "slow"
        path.write_text(f"{self.slow_s}") if slow else path.unlink(missing_ok=True)

    def wait_for_batches(self, number: int = 1) -> None:
        batches = self.folder / "run" / "batches"
        until(lambda: len(list(batches.glob("*/batch-*"))) >= number, f"{number} batches\n{self.log()}", 120)

    def wait_for_ranks(self, number: int) -> None:
        """A signal before Python has read its first line ends a process by that signal."""
        locks = self.folder / "run" / "locks"
        until(lambda: len(list(locks.glob("rank-*"))) >= number, f"{number} ranks in {self.folder}", 120)
        self.wait_for_batches()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def num_starts(self) -> int:
        return len((self.folder / "starts").read_text().splitlines())

    def must_be_whole(self, faults: Faults) -> None:
        """The bytes of one process that nothing disturbed."""
        run = self.folder / "run"
        assert (run / "_SUCCESS").exists(), self.log()
        do(settings(self.folder, out="whole"))
        assert data_files(run) == data_files(self.folder / "whole")
        faults.rows(asked=[row["id"] for row in ROWS], found=ids_written(run))
        sound(run)
        assert not list((run / "locks").iterdir())


def test_an_array_drains_near_its_time_limit_goes_on_and_stays_cancelled(
    slurm: Cluster, tmp_path: Path, faults: Faults
) -> None:
    job = Job(slurm, tmp_path, "--array", "2")
    cancelled = job.submit()
    job.wait_for_batches(2)
    slurm.command("scancel", cancelled)
    faults.signal()
    for rank in range(2):
        slurm.wait_for(f"{cancelled}_{rank}", "CANCELLED", "FAILED")
        assert slurm.restarts(f"{cancelled}_{rank}") == 0, job.log()
    until(lambda: "SIGTERM: finishing what is in flight" in job.log(), "a drain", 30)
    assert not list((tmp_path / "run" / "locks").glob("rank-*")), "the lease was given back"

    again = job.submit()
    job.wait_for_ranks(2)
    slurm.command("scancel", "--batch", "--signal=USR1", f"{again}_0")
    faults.signal()
    until(lambda: slurm.restarts(f"{again}_0") == 1, f"the requeue of rank 0 of {job.folder}", 60)
    job.be_slow(False)
    for rank in range(2):
        slurm.wait_for(f"{again}_{rank}", "COMPLETED")
    assert slurm.restarts(f"{again}_1") == 0
    job.must_be_whole(faults)


@pytest.mark.slow
def test_the_tasks_of_one_job_drain_together_go_on_and_end_at_once(
    slurm: Cluster, tmp_path: Path, faults: Faults
) -> None:
    job = Job(slurm, tmp_path, "--tasks", "3", slow_s=1.0)
    cancelled = job.submit()
    job.wait_for_ranks(3)
    slurm.command("scancel", cancelled)
    slurm.wait_for(cancelled, "CANCELLED", "FAILED")
    until(lambda: job.log().count("SIGTERM: finishing what is in flight") == 3, "three drains", 30)
    assert slurm.restarts(cancelled) == 0

    again = job.submit()
    job.wait_for_ranks(2)  # a rank that started first may have done its share
    slurm.command("scancel", "--batch", "--signal=USR1", again)
    faults.signal(2)
    until(lambda: slurm.restarts(again) == 1, f"the requeue of {job.folder}", 60)
    job.be_slow(False)
    slurm.wait_for(again, "COMPLETED")
    job.must_be_whole(faults)
    seen = [line.rpartition("gpu=")[2] for line in (tmp_path / "starts").read_text().splitlines()]
    assert all(len(gpu) == 1 for gpu in seen), f"each rank sees one GPU: {seen}"


@pytest.mark.slow
def test_a_requeue_by_hand_goes_on(slurm: Cluster, tmp_path: Path, faults: Faults) -> None:
    job = Job(slurm, tmp_path, "--array", "2")
    number = job.submit()
    job.wait_for_ranks(2)
    slurm.command("scontrol", "requeue", f"{number}_1")
    faults.signal()
    until(lambda: slurm.restarts(f"{number}_1") == 1, f"the requeue of {job.folder}", 60)
    job.be_slow(False)
    for rank in range(2):
        slurm.wait_for(f"{number}_{rank}", "COMPLETED")
    job.must_be_whole(faults)


@pytest.mark.slow
def test_a_preempted_job_goes_on_when_the_urgent_one_is_done(slurm: Cluster, tmp_path: Path, faults: Faults) -> None:
    job = Job(slurm, tmp_path, "--array", "2")
    number = job.submit()
    job.wait_for_ranks(2)
    urgent = slurm.submit("-p", "urgent", "-N2", "--gpus-per-node=2", "--wrap", "sleep 2", "-o", "/dev/null")
    until(
        lambda: slurm.restarts(f"{number}_0") == slurm.restarts(f"{number}_1") == 1,
        f"both preempted of {job.folder}",
        90,
    )
    faults.signal(2)
    until(lambda: job.log().count("SIGTERM: finishing what is in flight") >= 2, "two drains", 30)
    job.be_slow(False)
    slurm.wait_for(urgent, "COMPLETED")
    for rank in range(2):
        slurm.wait_for(f"{number}_{rank}", "COMPLETED")
    job.must_be_whole(faults)


@pytest.mark.slow
def test_a_lost_node_whose_copy_runs_on_is_replaced_and_the_stale_copy_stops(
    slurm: Cluster, tmp_path: Path, faults: Faults
) -> None:
    """Slurm starts the job again elsewhere while its first copy still runs where slurmctld cannot see it."""
    filler = slurm.submit("-w", "n1", "--gpus=2", "--wrap", "sleep 300", "-o", "/dev/null")
    slurm.wait_for(filler, "RUNNING")
    job = Job(slurm, tmp_path, "--array", "1")
    number = job.submit()
    job.wait_for_batches(2)
    slurm.command("scancel", filler)
    slurm.lose_node("n2")
    faults.race()
    try:
        until(lambda: job.num_starts() == 2, f"the second copy of {job.folder}", 60)
        until(lambda: "took over the lease of a run that was started again" in job.log(), "the new lease", 60)
        until(lambda: "this job was started again" in job.log(), f"the end of the stale copy of {job.folder}", 60)
        job.be_slow(False)
        slurm.wait_for(f"{number}_0", "COMPLETED")
        assert slurm.restarts(f"{number}_0") == 1, "the stale copy, which ended with 75, was not requeued"
        job.must_be_whole(faults)
    finally:
        slurm.start_node("n2")
        until(lambda: "idle" in slurm.command("sinfo", "-h", "-n", "n2", "-o", "%T"), "n2 to be back", 60)


@pytest.mark.slow
def test_a_real_time_limit_drains_requeues_and_ends(slurm: Cluster, tmp_path: Path, faults: Faults) -> None:
    job = Job(slurm, tmp_path, "--array", "1")
    number = job.submit("-t", "1", "--signal=B:USR1@30")
    (tmp_path / "slow").write_text("3")
    until(lambda: slurm.restarts(f"{number}_0") == 1, f"the requeue of {job.folder}", 120)
    faults.signal()
    job.be_slow(False)
    slurm.wait_for(f"{number}_0", "COMPLETED")
    job.must_be_whole(faults)
