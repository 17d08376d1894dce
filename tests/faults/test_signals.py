"""BR-40: signals and deadlines in every phase of a real process, which waits there until the signal was sent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_run import TESTS, data_files, do, ids_written, manifest, rows, settings

ROWS = rows(60)  # more batches than can be in flight
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Each phase by the place where the process waits: mid-run wherever a place is reached more than once.
PHASES = {
    "importing": "import:1",
    "planning": "plan:1",
    "loading": "load:1",
    "prefetching": "noise:4",
    "encoding": "encode:2",
    "denoising": "velocity:5",
    "decoding": "decode:4",
    "compressing": "compress:9",
    "compacting": "compaction:1",
}


@dataclass
class Waiting:
    """A run that stands still in one place until `go`."""

    process: subprocess.Popen[str]
    go_to: int

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def go(self) -> None:
        os.write(self.go_to, b".")

    def end(self) -> tuple[int, str]:
        _, words = self.process.communicate(timeout=60)
        return self.process.returncode, words


@contextmanager
def waiting(overrides: list[str], place: str, *, command: list[str] | None = None, **environ: str) -> Iterator[Waiting]:
    from_child, here = os.pipe()
    go, to_child = os.pipe()
    process = subprocess.Popen(
        command or [sys.executable, str(TESTS / "run_stopped.py"), "run", *overrides],
        env={**os.environ, "AT": place, "DO": "pause", "HERE": str(here), "GO": str(go), **environ},
        pass_fds=(here, go),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(here)
    try:
        assert os.read(from_child, 1), f"{place} was never reached: {process.communicate()[1]}"
        yield Waiting(process, to_child)
    finally:
        process.kill()
        process.wait()
        for descriptor in (from_child, go, to_child):
            os.close(descriptor)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The data files of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    manifest(folder / "m.parquet", ROWS)
    do(settings(folder))
    return data_files(folder / "run")


def goes_on(tmp_path: Path, faults, whole: dict[str, str]) -> None:
    assert do(settings(tmp_path))[1] == 0
    assert data_files(tmp_path / "run") == whole
    faults.rows(asked=[row["id"] for row in ROWS], found=ids_written(tmp_path / "run"))


def check_phase(tmp_path: Path, faults, whole: dict[str, str], phase: str, number: signal.Signals, *more: str) -> None:
    manifest(tmp_path / "m.parquet", ROWS)
    with waiting(settings(tmp_path, *more), PHASES[phase]) as run:
        run.send(number)
        faults.signal()
        if phase != "importing":  # there nothing is in flight, and it ends where it stands
            run.go()
        code, words = run.end()
    assert code == 75, words
    assert number.name in words
    goes_on(tmp_path, faults, whole)


def phases(*quick: str) -> list[Any]:
    """All phases; those that are not quick have the marker slow."""
    return [phase if phase in quick else pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES]


@pytest.mark.parametrize(
    ("phase", "number"),
    [("importing", SIGNALS[0]), ("loading", SIGNALS[1]), ("compressing", SIGNALS[2]), ("compacting", SIGNALS[0])],
)
def test_br40_a_signal_in_any_phase_exits_75_and_the_same_command_goes_on(
    tmp_path: Path, faults, whole: dict[str, str], phase: str, number: signal.Signals
) -> None:
    check_phase(tmp_path, faults, whole, phase, number)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["double_buffered", "serial"])
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", PHASES)
def test_br40_every_signal_in_every_phase(
    tmp_path: Path, faults, whole: dict[str, str], phase: str, number: signal.Signals, pipeline: str
) -> None:
    check_phase(tmp_path, faults, whole, phase, number, f"pipeline={pipeline}")


@pytest.mark.parametrize("phase", phases("planning", "denoising")[1:])
def test_br40_a_second_signal_ends_any_phase_at_once_with_75(
    tmp_path: Path, faults, whole: dict[str, str], phase: str
) -> None:
    """The process never leaves the place where it stands."""
    manifest(tmp_path / "m.parquet", ROWS)
    with waiting(settings(tmp_path, "run.grace_s=1000"), PHASES[phase]) as run:
        run.send(signal.SIGTERM)
        wait_for_words(run)
        run.send(signal.SIGTERM)
        faults.signal(2)
        code, words = run.end()
    assert code == 75 and "SIGTERM again" in words
    assert_left(tmp_path)
    goes_on(tmp_path, faults, whole)


def assert_left(tmp_path: Path) -> None:
    """A lease that stays would send a requeued job on another machine away with 6 for two minutes."""
    assert not list((tmp_path / "run" / "locks").glob("rank-*.json"))


def wait_for_words(run: Waiting) -> None:
    """Until the first signal has been heard: two that come at once may be one to the kernel."""
    assert run.process.stderr is not None
    while "finishing what is in flight" not in run.process.stderr.readline():
        assert run.process.poll() is None


@pytest.mark.parametrize("phase", phases("loading")[1:])
def test_br40_the_grace_ends_a_phase_that_does_not(tmp_path: Path, faults, whole: dict[str, str], phase: str) -> None:
    manifest(tmp_path / "m.parquet", ROWS)
    with waiting(settings(tmp_path, "run.grace_s=0.2"), PHASES[phase]) as run:
        run.send(signal.SIGTERM)
        faults.signal()
        code, words = run.end()
    assert code == 75 and "run.grace_s=0.2 is over" in words
    assert_left(tmp_path)
    goes_on(tmp_path, faults, whole)


@pytest.mark.parametrize("phase", phases("compressing")[2:])
def test_br40_a_deadline_ends_a_phase_that_does_not(tmp_path: Path, faults, whole: dict[str, str], phase: str) -> None:
    """Eight seconds are enough to reach any phase; there the process stands still until the time is up."""
    check_deadline(tmp_path, faults, whole, phase, "run.deadline=+8")


def test_br40_slurms_end_of_the_job_is_a_deadline(tmp_path: Path, faults, whole: dict[str, str]) -> None:
    end = int(time.time()) + 12  # the interpreter starts within it
    check_deadline(tmp_path, faults, whole, "denoising", SLURM_JOB_END_TIME=str(end))


def check_deadline(tmp_path: Path, faults, whole: dict[str, str], phase: str, *more: str, **environ: str) -> None:
    manifest(tmp_path / "m.parquet", ROWS)
    with waiting(settings(tmp_path, "run.grace_s=1", *more), PHASES[phase], **environ) as run:
        code, words = run.end()
    assert code == 75 and "the deadline is near" in words and "run.grace_s=1 is over" in words
    goes_on(tmp_path, faults, whole)


@pytest.mark.slow
def test_br40_a_signal_while_the_report_of_a_whole_job_is_written_lets_it_finish(
    tmp_path: Path, faults, whole: dict[str, str]
) -> None:
    """Nothing is left to go on with, so 75 would be a lie; a second signal still ends it at once."""
    manifest(tmp_path / "m.parquet", ROWS)
    with waiting(settings(tmp_path), "report:1") as run:
        run.send(signal.SIGTERM)
        wait_for_words(run)
        run.send(signal.SIGINT)
        assert run.end()[0] == 75
    assert not (tmp_path / "run" / "_SUCCESS").exists()
    with waiting(settings(tmp_path), "report:1") as run:
        run.send(signal.SIGTERM)
        wait_for_words(run)
        run.go()
        assert run.end()[0] == 0
    faults.signal(3)
    assert (tmp_path / "run" / "_SUCCESS").exists()
    goes_on(tmp_path, faults, whole)


def test_br40_a_signal_is_heard_while_the_main_thread_is_deep_in_a_library() -> None:
    """Python's own handlers wait until the main thread comes back from C; a large sort takes minutes there."""
    program = (
        "import hashlib, sys; from fluxbatch.stop import Stop\n"
        "with Stop(grace_s=0.1):\n"
        "    print('deep', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "deep\n"
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(30) == 75
    finally:
        process.kill()
        process.communicate()


SHIM = """#!/bin/bash
echo "$$" > "$PID_FILE"
exec {python} {script} run "${{@:3}}"  # without -m fluxbatch
"""


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGTERM, False), (signal.SIGUSR1, True)])
def test_br40_a_signal_to_the_batch_shell_alone_reaches_the_run(
    tmp_path: Path, faults, whole: dict[str, str], number: signal.Signals, requeued: bool
) -> None:
    """Slurm signals the shell of a batch script (`--signal=B:USR1@180`), and a shell passes nothing on by itself."""
    manifest(tmp_path / "m.parquet", ROWS)
    for name, text in {
        "python": SHIM.format(python=sys.executable, script=TESTS / "run_stopped.py"),
        "scontrol": f'#!/bin/bash\necho "$@" > {tmp_path}/scontrol.said\n',
        "sleep": "#!/bin/bash\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PID_FILE": f"{tmp_path}/pid", "SLURM_JOB_ID": "7"}
    command = ["bash", str(TESTS.parent / "jobs" / "slurm_array.sh"), *settings(tmp_path)]
    with waiting([], PHASES["denoising"], command=command, SLURM_ARRAY_TASK_ID="0", **environ) as run:
        assert int((tmp_path / "pid").read_text()) != run.process.pid
        run.send(number)
        wait_for_words(run)
        faults.signal()
        run.go()
        assert run.end()[0] == 75
    assert (tmp_path / "scontrol.said").exists() is requeued
    goes_on(tmp_path, faults, whole)
