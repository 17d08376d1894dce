"""A stage that never comes back: the process ends with 1 and one sentence, and what was finished is on the disk.

Real processes: a thread that hangs can only be left behind by the end of its process.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_run import TESTS, data_files, do, ids_written, manifest, rows, settings, sound

from fluxbatch.errors import ProcessLost
from fluxbatch.pipeline import watch as watch_room
from fluxbatch.pipeline.watch import Watch, Watchdog

STAGE_OF = {
    "tokenize": "prefetch",
    "noise": "prefetch",
    "encode": "encode",
    "velocity": "denoise",
    "decode": "decode",
    "compress": "compress",
}
HANGS = [(place, mode) for place in STAGE_OF for mode in ("double_buffered", "serial")]
QUICK = [("velocity", "double_buffered")]


def hang(tmp_path: Path, place: str, mode: str, number: int) -> tuple[int, str]:
    """A run that hangs the `number`th time it reaches the place: its exit code and its last words."""
    overrides = settings(tmp_path, "run.stage_timeout_s=1", f"pipeline={mode}", "pipeline.compress_workers=2")
    done = subprocess.run(
        [sys.executable, str(TESTS / "run_stopped.py"), "run", *overrides],
        env={**os.environ, "AT": f"{place}:{number}", "DO": "hang"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr.splitlines()[-1]


def check_hang(tmp_path: Path, faults, place: str, mode: str) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    do(settings(tmp_path, out="whole"))
    number = {"tokenize": 8, "noise": 7, "velocity": 14, "compress": 22, "encode": 3}.get(place, 7)
    code, words = hang(tmp_path, place, mode, number)
    faults.hang()
    assert code == 1, words
    assert f"stage {STAGE_OF[place]}, shard " in words and ", batch " in words, words
    assert "no sign of life for 1 s (run.stage_timeout_s=1)" in words
    counts = sound(tmp_path / "run")
    assert counts.failed == 0 and counts.pending > 0, "no row is blamed"
    assert counts.written or list((tmp_path / "run" / "batches").glob("*/batch-*")), "finished batches are kept"
    assert do(settings(tmp_path))[1] == 0
    faults.rows(asked=[row["id"] for row in rows(40)], found=ids_written(tmp_path / "run"))
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")


@pytest.mark.parametrize(("place", "mode"), QUICK)
def test_a_stage_that_hangs_ends_the_process_with_its_place_and_keeps_what_was_finished(
    tmp_path: Path, faults, place: str, mode: str
) -> None:
    check_hang(tmp_path, faults, place, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "mode"), [case for case in HANGS if case not in QUICK])
def test_every_stage_that_hangs_ends_the_process(tmp_path: Path, faults, place: str, mode: str) -> None:
    check_hang(tmp_path, faults, place, mode)


class Held:
    place = "stage decode, shard 3, batch 41, 1024x1024"


def test_the_batch_that_is_held_longest_is_named_and_a_sign_of_life_starts_its_time_again() -> None:
    watch, first, second = Watch(), Held(), Held()
    watch.enter(first)
    watch.clock_s = 5.0
    watch.enter(second)
    watch.clock_s = 7.0
    assert watch.oldest() == (7.0, Held.place)
    watch.enter(first)
    assert watch.oldest() == (2.0, Held.place)
    watch.leave(first)
    watch.leave(second)
    assert watch.oldest() is None


def test_the_hang_is_handed_to_the_run_and_the_process_ends_where_the_run_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[ProcessLost] = []
    told, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(watch_room, "COMMIT_S", 0.1)
    monkeypatch.setattr(watch_room, "exit_lost", lambda sentence: ended.set())

    def hear(error: ProcessLost) -> None:
        heard.append(error)
        told.set()

    watch = Watch()
    with Watchdog(watch, timeout_s=0.2, on_hang=hear) as watchdog:
        watch.enter(Held())
        assert told.wait(10)
    assert watchdog.hung
    assert ended.wait(10), "it outlives its context: what is cleaned up next may hang as well"
    assert str(heard[0]).startswith(Held.place) and "run.stage_timeout_s=0.2" in str(heard[0])


def test_no_limit_starts_no_thread() -> None:
    before = threading.active_count()
    with Watchdog(Watch(), timeout_s=0.0, on_hang=None):
        assert threading.active_count() == before


@pytest.mark.slow
def test_a_process_that_was_stopped_for_longer_than_the_limit_has_not_hung(tmp_path: Path, faults) -> None:
    """Schedulers suspend jobs (SIGSTOP); the clock of the watch stands still meanwhile."""
    manifest(tmp_path / "m.parquet", rows(8))
    here, told = os.pipe()
    wait, go = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "run_stopped.py"), "run", *settings(tmp_path, "run.stage_timeout_s=2")],
        env={**os.environ, "AT": "velocity:2", "DO": "pause", "HERE": str(told), "GO": str(wait)},
        pass_fds=(told, wait),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.read(here, 1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    os.write(go, b".")
    assert process.wait(60) == 0, process.communicate()[1]
    faults.signal(2)
