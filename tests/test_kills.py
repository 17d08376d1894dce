"""SIGKILL at every step that a commit announces, and at random moments: the same bytes, each id once, nothing left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Faults
from forge import TESTS, Forge
from test_run import data_files, ids_written, manifest, rows, settings, sound
from three_outputs import ONE_OUTPUT

from fluxbatch.output.verify import verify
from fluxbatch.storage.folder import RunFolder

KINDS = ("parquet", "webdataset", "folder")
COUNT = 25
RANDOM_KILLS = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forked: Forge) -> Any:
    """By output: the data files of an uninterrupted run, and the steps that it announced."""
    place = tmp_path_factory.mktemp("whole")
    manifest(place / "m.parquet", rows(COUNT))
    made: dict[str, tuple[dict[str, str], list[str]]] = {}

    def of(kind: str) -> tuple[dict[str, str], list[str]]:
        if kind not in made:
            told = place / f"steps-{kind}"
            assert forked(settings(place, f"output={kind}", out=kind), STEPS_TO=str(told)).returncode == 0
            made[kind] = data_files(place / kind), told.read_text().splitlines()
        return made[kind]

    return of


def never_unsound(folder: Path) -> None:
    """Whatever was killed whenever, verify finds nothing that a run does not mend."""
    counts, found = verify(RunFolder(folder), decode=False)
    assert counts.balanced and [fault for fault in found if fault.remedy != "run"] == []


def ends_like(folder: Path, files: dict[str, str], faults: Faults) -> None:
    assert data_files(folder) == files
    sound(folder)
    assert list(folder.rglob(".tmp-*")) == []
    assert not (folder / "batches").exists() and list((folder / "locks").iterdir()) == []
    if (folder / "data" / "shard-00000.parquet").exists():
        faults.rows(asked=[row["id"] for row in rows(COUNT)], found=ids_written(folder))


def test_every_room_that_writes_announces_its_steps(whole: Any) -> None:
    """What the loops below kill at: probe, lease, job.json, plan, batches, shards, ledger and report."""
    told = [line.split(" ", 1) for line in whole("parquet")[1]]
    steps, names = {step for step, _ in told}, {Path(path).name for _, path in told}
    assert steps >= {"probe", "temporary", "fsync", "publish", "before_lines", "lines", "ledger", "replaced"}
    assert names >= {"rank-00000.json", "job.json", "plan.parquet", "batch-00000000.arrow", "rejected.parquet"}
    assert names >= {"shard-00000.parquet", "rank-00000.jsonl", "report.json", "README.md", "_SUCCESS"}


def killed_fresh(forked: Forge, tmp_path: Path, kind: str, number: int, whole: Any, faults: Faults) -> None:
    """One kill at step `number` of a first start, then one plain start."""
    out = f"run-{number}"
    done = forked(settings(tmp_path, f"output={kind}", out=out), KILL_AT=f"any:{number}")
    assert done.returncode == -signal.SIGKILL, f"step {number}: {done.stderr}"
    faults.kill()
    never_unsound(tmp_path / out)
    again = forked(settings(tmp_path, f"output={kind}", out=out))
    assert again.returncode == 0, f"step {number}: {again.stderr}"
    ends_like(tmp_path / out, whole(kind)[0], faults)


@pytest.mark.parametrize("kind", ONE_OUTPUT)
def test_killed_at_a_step_and_started_again_it_writes_the_same_bytes(
    forked: Forge, tmp_path: Path, kind: str, whole: Any, faults: Faults
) -> None:
    """Some steps for each output, others for each; all of them behind the marker `slow`."""
    manifest(tmp_path / "m.parquet", rows(COUNT))
    for number in range(2 + 6 * KINDS.index(kind), len(whole(kind)[1]) + 1, 19):
        killed_fresh(forked, tmp_path, kind, number, whole, faults)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_step_in_turn(forked: Forge, tmp_path: Path, kind: str, whole: Any, faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    for number in range(1, len(whole(kind)[1]) + 1):
        killed_fresh(forked, tmp_path, kind, number, whole, faults)


@pytest.mark.parametrize("kind", ONE_OUTPUT)
def test_killed_in_each_resume_too_until_it_is_done(
    forked: Forge, tmp_path: Path, kind: str, whole: Any, faults: Faults
) -> None:
    """Each start is killed a few steps after it began to do new work; one job survives them all."""
    manifest(tmp_path / "m.parquet", rows(COUNT))
    overrides = settings(tmp_path, f"output={kind}")
    for start in range(200):
        done = forked(overrides, KILL_AT=f"any:{24 + start % 7}")
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        faults.kill()
        never_unsound(tmp_path / "run")
    assert forked(overrides).returncode == 0
    ends_like(tmp_path / "run", whole(kind)[0], faults)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_random_kills_in_a_row_on_one_job(
    forked: Forge, tmp_path: Path, kind: str, whole: Any, faults: Faults
) -> None:
    """At moments that nobody chose, in processes of their own; a start that ends before its kill begins a new job."""
    manifest(tmp_path / "m.parquet", rows(COUNT))
    chance = random.Random(kind)
    job, kills = 0, 0
    while kills < RANDOM_KILLS:
        overrides = settings(tmp_path, f"output={kind}", out=f"run-{job}")
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "run_fake.py"), "run", *overrides],
            env={**os.environ, "FAKE_SLOW_S": "0.02"},
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        lease = RunFolder(tmp_path / f"run-{job}").lease(0)
        until = time.monotonic() + 60  # the interpreter's own start is not worth killing
        while not lease.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.expovariate(1 / 0.25))
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            ends_like(tmp_path / f"run-{job}", whole(kind)[0], faults)
            job += 1
            continue
        kills += 1
        faults.kill()
        never_unsound(tmp_path / f"run-{job}")
    assert forked(overrides).returncode == 0
    ends_like(tmp_path / f"run-{job}", whole(kind)[0], faults)


def test_a_report_killed_half_way_is_made_whole_by_the_next_start(
    forked: Forge, tmp_path: Path, whole: Any, faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(COUNT))
    overrides = settings(tmp_path)
    assert forked(overrides).returncode == 0
    for number in range(1, 9, 3):
        done = forked([f"output.dir={tmp_path}/run"], "report", KILL_AT=f"any:{number}")
        assert done.returncode == -signal.SIGKILL, done.stderr
        faults.kill()
    assert forked(overrides).returncode == 0
    ends_like(tmp_path / "run", whole("parquet")[0], faults)
    for path in RunFolder(tmp_path / "run").told():
        assert path.stat().st_size > 0


@pytest.mark.slow
def test_a_job_that_grows_is_killed_while_its_plan_grows(forked: Forge, tmp_path: Path, faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(30))
    assert forked(settings(tmp_path, out="whole")).returncode == 0
    for out in ("calm", "run"):
        manifest(tmp_path / "m.parquet", rows(20))
        assert forked(settings(tmp_path, out=out)).returncode == 0
    manifest(tmp_path / "m.parquet", rows(30))
    assert forked(settings(tmp_path, out="calm")).returncode == 0
    for number in range(2, 24, 5):
        done = forked(settings(tmp_path), KILL_AT=f"any:{number}")
        faults.kill(done.returncode == -signal.SIGKILL)
        never_unsound(tmp_path / "run")
    assert forked(settings(tmp_path)).returncode == 0
    assert data_files(tmp_path / "run") == data_files(tmp_path / "calm")
    assert sorted(ids_written(tmp_path / "run")) == sorted(row["id"] for row in rows(30))
    sound(tmp_path / "run")
