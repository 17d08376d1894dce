"""Cases of the bug reports that no other file tests: several processes, a reader beside a writer, caches."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_run import TESTS, command, data_files, do, finish_as, ids_written, manifest, rows, settings, sound, started

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import shards
from fluxbatch.output.verify import verify
from fluxbatch.reports import report
from fluxbatch.storage.folder import RunFolder

RUN = [sys.executable, str(TESTS / "run_fake.py"), "run"]


def start_together(commands: list[list[str]], cwd: Path) -> list[tuple[int, str]]:
    """Exit codes and words of commands that are started in the same moment."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*RUN, *command], cwd=cwd, **pipes) for command in commands]
    return [finish_as(process) for process in processes]


@pytest.mark.slow
def test_br41_runs_started_in_one_second_share_nothing_and_two_of_one_folder_are_told_apart(
    tmp_path: Path, faults
) -> None:
    """Hydra's own run folder is a timestamp; the job's identity is output.dir, whatever the current folder is."""
    manifest(tmp_path / "m.parquet", rows(12))
    do(settings(tmp_path, out="whole"))
    one, two = (settings(tmp_path, out=out) for out in ("one", "two"))
    ends = start_together([one, two, two], cwd=tmp_path)
    faults.race()
    assert ends[0][0] == 0
    assert sorted(code for code, _ in ends[1:]) in ([0, 6], [0, 0]), ends  # the second may come after the first's end
    for out in ("one", "two"):
        assert data_files(tmp_path / out) == data_files(tmp_path / "whole")
        faults.rows(asked=[row["id"] for row in rows(12)], found=ids_written(tmp_path / out))
    assert {path.name for path in tmp_path.iterdir()} == {"m.parquet", "one", "two", "whole"}, "no folder of Hydra's"


@pytest.mark.slow
def test_br41_relative_paths_stand_on_the_folder_of_the_start_though_hydra_may_change_it(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(4))
    relative = ["manifest.path=m.parquet", "output.dir=run", "sampler.num_inference_steps=1"]
    for more in ([], ["hydra.job.chdir=true"]):
        done = subprocess.run([*RUN, *relative, *more], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"output.dir {tmp_path}/run" in done.stderr
    stored = json.loads((tmp_path / "run" / "job.json").read_text())
    assert stored["settings"]["output"]["dir"] in ("run", str(tmp_path / "run"))


@pytest.mark.slow
def test_br35_a_reader_beside_a_running_job_never_sees_half_a_file(tmp_path: Path, faults) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path), FAKE_SLOW_S="0.05")
    folder, written, looks = RunFolder(tmp_path / "run"), [0], 0
    while process.poll() is None:
        status = report.status(folder)
        counts, found = verify(folder, decode=False)
        assert counts.balanced and not found, found
        assert status["written"] >= written[-1], "rows are never taken back"
        written.append(status["written"])
        looks += 1
    assert finish_as(process)[0] == 0
    faults.race(looks)
    assert looks > 3 and len(set(written)) > 2, "it was looked at while it grew"


def test_br33_a_writer_that_fails_ends_the_run_with_its_own_traceback_and_no_thread_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = shards.commit_batch, []

    def commit_batch(folder, done):
        calls.append(done)
        if len(calls) == 3:
            raise ZeroDivisionError("a bug of the writer")
        return plain(folder, done)

    monkeypatch.setattr(shards, "commit_batch", commit_batch)
    manifest(tmp_path / "m.parquet", rows(60))
    with pytest.raises(ZeroDivisionError, match="a bug of the writer") as caught:
        do(settings(tmp_path))
    assert "commit_batch" in [entry.name for entry in caught.traceback]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("fluxbatch")]
    monkeypatch.undo()
    assert do(settings(tmp_path))[0].written == 60


@pytest.mark.parametrize("name", ["plan.parquet", "job.json", "ledger/rank-00000.jsonl", "locks/rank-00000.json"])
@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b'{"fingerprint": 3, "settings": []}\n'])
def test_br35_state_that_a_power_cut_left_empty_or_all_nul_is_named_or_made_again(
    tmp_path: Path, faults, name: str, content: bytes
) -> None:
    manifest(tmp_path / "m.parquet", rows(12))
    do(settings(tmp_path))
    before = data_files(tmp_path / "run")
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    faults.fuzz(1)
    try:
        counts, code = do(settings(tmp_path))
    except FluxbatchError as error:
        assert name in str(error)
        return
    assert (counts.written, code) == (12, 0)
    assert data_files(tmp_path / "run") == before
    sound(tmp_path / "run")


@pytest.mark.slow
def test_br44_the_second_of_two_copies_a_minute_apart_ends_at_once_and_names_the_first(tmp_path: Path, faults) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    first = started(settings(tmp_path), FAKE_SLOW_S="0.2")
    try:
        second = command(settings(tmp_path))
        faults.race()
        assert second.returncode == 6 and f"pid {first.pid}" in second.stderr
        assert second.stderr.count("\n") == 1, "one sentence in cron's mail"
    finally:
        first.kill()
        first.communicate()
