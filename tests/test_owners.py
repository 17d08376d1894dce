"""Who owns a run folder, and what happens when two believe they do: real processes that race for one name."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Faults
from forge import Done, Forge, forge
from test_run import data_files, ids_written, manifest, rows, settings, sound

from fluxbatch import process
from fluxbatch.errors import FolderBusyError
from fluxbatch.storage import commit, lease
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import STALE_S, Lease

RACERS = 4
NAMES = 50


def raced(work: Callable[..., None], *arguments: Any, racers: int = RACERS) -> None:
    """The same work in several processes that start at one moment; each must end well."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(racers)
    processes = [context.Process(target=work, args=(barrier, number, *arguments)) for number in range(racers)]
    for racer in processes:
        racer.start()
    for racer in processes:
        racer.join(60)
    assert [racer.exitcode for racer in processes] == [0] * racers


def publish_files(barrier: Any, number: int, root: Path) -> None:
    content = f"{number}".encode() * 50_000
    won = []
    for name in range(NAMES):
        barrier.wait()
        won.append(commit.publish_file(root / f"{name}", lambda file: file.write(content)))
    (root / f"won-{number}").write_text(json.dumps(won))


def publish_folders(barrier: Any, number: int, root: Path) -> None:
    def fill(folder: Path) -> None:
        for part in range(3):
            (folder / f"{part}").write_text(f"{number}")

    won = []
    for name in range(NAMES):
        barrier.wait()
        won.append(commit.publish_folder(root / f"{name}", fill))
    (root / f"won-{number}").write_text(json.dumps(won))


def winners(root: Path) -> list[int]:
    """Who won each name; exactly one did."""
    told = [json.loads((root / f"won-{number}").read_text()) for number in range(RACERS)]
    assert [sum(won) for won in zip(*told, strict=True)] == [1] * NAMES
    return [won.index(True) for won in zip(*told, strict=True)]


def test_of_many_processes_that_create_one_file_exactly_one_wins_and_its_bytes_stand(
    tmp_path: Path, faults: Faults
) -> None:
    raced(publish_files, tmp_path)
    faults.race(NAMES)
    for name, winner in enumerate(winners(tmp_path)):
        assert (tmp_path / f"{name}").read_bytes() == f"{winner}".encode() * 50_000
    assert not list(tmp_path.glob(".tmp-*"))


def test_of_many_processes_that_create_one_folder_exactly_one_wins_and_no_files_mix(
    tmp_path: Path, faults: Faults
) -> None:
    raced(publish_folders, tmp_path)
    faults.race(NAMES)
    for name, winner in enumerate(winners(tmp_path)):
        assert {path.read_text() for path in (tmp_path / f"{name}").iterdir()} == {f"{winner}"}
    assert not list(tmp_path.glob(".tmp-*"))


def enter(barrier: Any, number: int, root: Path) -> None:
    barrier.wait()
    try:
        with Lease(RunFolder(root), rank=0, world_size=1):
            (root / f"owner-{number}").touch()
            barrier.wait()  # nobody leaves before all have tried
    except FolderBusyError:
        barrier.wait()


def test_of_many_starts_at_once_exactly_one_gets_the_lease(tmp_path: Path, faults: Faults) -> None:
    for attempt in range(10):
        raced(enter, tmp_path / f"{attempt}")
        faults.race()
        assert len(list((tmp_path / f"{attempt}").glob("owner-*"))) == 1
        assert list((tmp_path / f"{attempt}" / "locks").iterdir()) == []


# Stale and live leases


def left_behind(folder: RunFolder, **fields: Any) -> None:
    """The lease of another run, which was never given back."""
    record = {"rank": 0, "world_size": 1, "host": "elsewhere", "pid": 7, "process_started": "1", "job": "41",
              "since": "2026-01-01T00:00:00Z", "heartbeat": time.time()}  # fmt: skip
    commit.replace_file(folder.lease(0), json.dumps(record | fields).encode())


def dead_pid() -> int:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


@pytest.mark.parametrize("stale", ["silent", "dead", "another process has its pid", "unreadable"])
def test_a_stale_lease_is_taken_over_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stale: str
) -> None:
    folder = RunFolder(tmp_path)
    match stale:
        case "silent":
            left_behind(folder, heartbeat=time.time() - STALE_S - 1)
        case "dead":
            left_behind(folder, host=process.host(), pid=dead_pid(), process_started=None)
        case "another process has its pid":
            left_behind(folder, host=process.host(), pid=os.getpid(), process_started="1")
        case "unreadable":
            commit.replace_file(folder.lease(0), b"\0" * 40)
    with Lease(folder, rank=0, world_size=1):
        assert json.loads(folder.lease(0).read_bytes())["pid"] == os.getpid()
    assert stale == "unreadable" or "took over the lease of a dead run: host" in caplog.text
    assert list(folder.locks.iterdir()) == []


def test_a_live_lease_of_another_host_is_refused_at_once_with_host_pid_and_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    left_behind(folder)
    began = time.monotonic()
    with pytest.raises(FolderBusyError, match="host elsewhere, pid 7, job 41, rank 0") as refused:
        Lease(folder, rank=0, world_size=1).__enter__()
    assert (refused.value.exit_code, time.monotonic() - began < 1) == (6, True)


def test_a_starter_that_judged_a_stale_lease_does_not_take_the_one_that_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    left_behind(folder, heartbeat=0)
    honest = lease.is_live

    def judged_while_another_takes_over(owner: dict[str, Any]) -> bool:
        verdict = honest(owner)
        if owner["heartbeat"] == 0:
            left_behind(folder, host="quicker")
        return verdict

    monkeypatch.setattr(lease, "is_live", judged_while_another_takes_over)
    with pytest.raises(FolderBusyError, match="host quicker"):
        Lease(folder, rank=0, world_size=1).__enter__()
    assert json.loads(folder.lease(0).read_bytes())["host"] == "quicker"


def test_a_run_whose_lease_was_taken_leaves_the_new_owners_lease_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with Lease(folder, rank=0, world_size=1):
        left_behind(folder)
    assert json.loads(folder.lease(0).read_bytes())["host"] == "elsewhere"


# Copies that both believe


@pytest.fixture(scope="module")
def forges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Forge]]:
    with ExitStack() as stack:
        yield [stack.enter_context(forge(tmp_path_factory.mktemp("forge"))) for _ in range(3)]


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    assert holds()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "webdataset", "folder"])
def test_three_live_copies_whose_lease_was_removed_by_hand_end_well_with_each_row_once(
    tmp_path: Path, forges: list[Forge], kind: str, faults: Faults
) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    assert forges[0](settings(tmp_path, f"output={kind}", out="whole")).returncode == 0
    overrides = settings(tmp_path, f"output={kind}")
    lease_file = RunFolder(tmp_path / "run").lease(0)
    success = tmp_path / "run" / "_SUCCESS"
    done: list[Done] = []
    copies = []
    for number, start in enumerate(forges):
        if number:
            lease_file.unlink(missing_ok=True)
        slow = f"{0.01 * (3 - number)}"  # the later ones overtake
        copies.append(threading.Thread(target=lambda s=start, t=slow: done.append(s(overrides, FAKE_SLOW_S=t))))
        copies[-1].start()
        until(lambda: lease_file.exists() or success.exists())
        until(lambda: success.exists() or list((tmp_path / "run" / "batches").glob("*/batch-*")))
    for copy in copies:
        copy.join(120)
    faults.race(3)
    assert [copy.returncode for copy in done] == [0, 0, 0], [copy.stderr for copy in done]
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    if kind == "parquet":
        faults.rows(asked=[row["id"] for row in rows(60)], found=ids_written(tmp_path / "run"))
    sound(tmp_path / "run")
    assert not list((tmp_path / "run").rglob(".tmp-*"))
