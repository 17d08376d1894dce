"""run.devices: one process a device, one supervisor. Its rules with small shell processes, its promises with runs."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Faults
from fake_model import FakeModel
from test_owners import until
from test_run import TESTS, data_files, do, ids_written, manifest, rows, settings, sound

from fluxbatch import config_rules, process, stop
from fluxbatch.config import TelemetryConfig
from fluxbatch.errors import EXIT_LOST, ConfigError, Interrupted
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes import devices, supervisor
from fluxbatch.processes.crew_view import CrewView
from fluxbatch.processes.devices import Seat
from fluxbatch.processes.ranks import Rank
from fluxbatch.processes.supervisor import Crew, CrewError, Member
from fluxbatch.records import RowCounts
from fluxbatch.stop import signals_to
from fluxbatch.storage.folder import RunFolder

# Which devices


def seats(wanted: object, environ: dict[str, str] | None = None, gpus: int = 4) -> list[str | None]:
    found = devices.seats(wanted, environ or {}, count=lambda: gpus)
    return [seat.environ["CUDA_VISIBLE_DEVICES"] for seat in found]


def test_all_are_the_visible_gpus_also_by_uuid_and_as_slices() -> None:
    assert seats("all") == ["0", "1", "2", "3"]
    assert seats("all", {"CUDA_VISIBLE_DEVICES": "6,2"}, gpus=8) == ["6", "2"]
    assert seats("all", {"CUDA_VISIBLE_DEVICES": "MIG-1/2/0,GPU-ab"}) == ["MIG-1/2/0", "GPU-ab"]


def test_a_list_counts_among_the_visible_gpus() -> None:
    assert seats("0,1,3") == seats([0, 1, 3]) == seats(["cuda:0", "1", "cuda:3"]) == ["0", "1", "3"]
    assert seats([1], {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == ["GPU-b"]
    assert seats(["GPU-c"], {"CUDA_VISIBLE_DEVICES": "GPU-a"}) == ["GPU-c"]
    [first, second] = devices.seats("cpu,cpu", {}, count=pytest.fail)
    assert first == second == Seat("cpu", {"CUDA_VISIBLE_DEVICES": ""}, ("model.device=cpu",))


@pytest.mark.parametrize(
    ("wanted", "environ", "sentence"),
    [
        ([4], {}, "run.devices must be below 4, the number of visible GPUs, got 4"),
        ([1], {"CUDA_VISIBLE_DEVICES": "7"}, "must be below 1"),
        ([0, 0], {}, "run.devices must name a GPU once, got 0 twice"),
        ("all", {"CUDA_VISIBLE_DEVICES": ""}, "run.devices=all needs a GPU, and none is visible here"),
        ("all", {"CUDA_VISIBLE_DEVICES": "-1"}, "run.devices=all needs a GPU, and none is visible here"),
        ([1], {"CUDA_VISIBLE_DEVICES": "3,-1,4"}, "must be below 1"),
    ],
)
def test_devices_that_are_not_there_are_refused(wanted: object, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        seats(wanted, environ)


@pytest.mark.parametrize("value", ["every", [], "0;1", [-1], ["gpu"]])
def test_a_senseless_value_is_one_sentence(value: object) -> None:
    from test_config import composed

    cfg = composed()
    cfg.run.devices = value
    with pytest.raises(ConfigError, match=r"run\.devices must be null, all, or a list of GPU indices"):
        config_rules.check(cfg)


# What is seen of all of them


def test_batches_that_are_committed_while_the_bar_begins_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on(fail_at: int) -> None:
        with pytest.raises(RuntimeError):
            do(settings(tmp_path, "pipeline=serial"), lambda: FakeModel(fail_at={"decode": fail_at}))

    def opened(folder: RunFolder) -> RunPlan | None:
        monkeypatch.setattr(RunPlan, "open", open_plan)
        go_on(3)
        return open_plan(folder)

    manifest(tmp_path / "m.parquet", rows(30))
    open_plan = RunPlan.open
    with CrewView(RunFolder(tmp_path / "run"), TelemetryConfig(progress="lines", interval_s=1e9)) as view:
        go_on(2)
        monkeypatch.setattr(RunPlan, "open", opened)  # asked for once the first lines are read
        view.look()
        do(settings(tmp_path))
        view.look()
        capsys.readouterr()
    assert capsys.readouterr().err.startswith("30/30 rows (100.0 %)")


# The crew's rules, with small processes


def crew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *scripts: str, max_restarts: int = 3
) -> tuple[Crew, list[Member]]:
    monkeypatch.setattr(supervisor, "_command", lambda member: ["sh", "-c", scripts[member.rank.index]])
    members = [
        Member(Seat("cpu", {"CUDA_VISIBLE_DEVICES": ""}), Rank(place, len(scripts))) for place in range(len(scripts))
    ]
    view = CrewView(RunFolder(tmp_path), TelemetryConfig(progress="off"))
    return Crew(members, view, max_restarts=max_restarts), members


@pytest.mark.parametrize("end", [f"exit {EXIT_LOST}", "kill -9 $$", "kill -SEGV $$"])
def test_a_process_that_loses_its_gpu_or_is_killed_is_started_again_so_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], end: str
) -> None:
    started, [member, other] = crew(tmp_path, monkeypatch, f"echo at it >&2; {end}", "exit 0", max_restarts=2)
    started.work()
    assert (member.starts, member.code, other.code) == (3, 1, 0)
    words = capfd.readouterr().err
    assert words.count("[rank 0] at it") == 3
    assert words.count("started again") == 2 and "3 times (run.max_restarts=2)" in words


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6, 75])
def test_a_process_that_said_why_it_ended_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    started, [member] = crew(tmp_path, monkeypatch, f"exit {code}")
    started.work()
    assert (member.starts, member.code) == (1, code)


def test_a_signal_reaches_every_process_and_none_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = "trap 'exit 75' TERM; touch {}/up-$$; while :; do sleep 0.05; done"
    started, members = crew(tmp_path, monkeypatch, patient.format(tmp_path), "kill -9 $$", max_restarts=10**9)
    until_up = iter(range(10**9))

    def look(**_: bool) -> None:
        if next(until_up) == 1:
            until(lambda: list(tmp_path.glob("up-*")))
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(started._view, "look", look)
    with signals_to(started.forward):
        started.work()
    assert [member.code for member in members] == [75, 75]
    assert members[0].starts == 1


def test_a_process_that_a_signal_finds_before_it_listens_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started, [member] = crew(tmp_path, monkeypatch, "sleep 60")
    monkeypatch.setattr(started._view, "look", lambda **_: started.forward(signal.SIGTERM))
    started.work()
    assert (member.starts, member.code) == (1, 75)
    assert "run.max_restarts" not in capfd.readouterr().err


def test_a_process_whose_supervisor_is_gone_finds_its_input_closed() -> None:
    with stop.Stop(grace_s=30) as stopping:
        receiving, sending = os.pipe()
        stopping.follow(receiving)
        time.sleep(0.05)
        assert not stopping.requested()
        os.close(sending)
        until(stopping.requested)
        assert stopping.reason == "the supervisor of this process is gone"


def test_a_lost_gpu_is_told_to_a_supervisor_by_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(stop, "exit_now", lambda message, code: codes.append(code))
    stop.exit_lost("gone")
    monkeypatch.setenv(process.SUPERVISED, "1")
    stop.exit_lost("gone")
    assert codes == [1, EXIT_LOST]


@pytest.mark.parametrize(
    ("codes", "pending", "finished", "expected"),
    [
        ([0, 0], 0, True, 0), ([1, 0], 0, True, 0), ([75, 1], 3, False, 1), ([6, 2, 75], 3, False, 2),
        ([3, 1], 3, False, 3), ([6, 75], 3, False, 6), ([75, 0], 3, False, 75), ([0, 4], 3, False, 4),
        ([1, 0], 0, False, 1),  # the rows are there, and the disk had no room for the report
        ([2, 2], 0, True, 2),  # other settings, on a folder that is complete
    ],
)  # fmt: skip
def test_a_complete_job_is_done_and_else_the_worst_code_counts(
    codes: list[int], pending: int, finished: bool, expected: int
) -> None:
    from test_config import composed

    members = [Member(Seat("cpu"), Rank(place, len(codes)), code=code) for place, code in enumerate(codes)]
    counts = RowCounts(rows=9, written=9 - pending, failed=0, rejected=0, pending=pending)
    try:
        code = supervisor._exit_code(members, counts, composed(), finished=finished)
    except (CrewError, Interrupted) as error:
        code = error.exit_code
    assert code == expected


# Real runs


def started(overrides: list[str], **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            str(TESTS / "run_fake.py"),
            "run",
            *overrides,
            "run.devices=[cpu,cpu]",
            "telemetry.progress=lines",
        ],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(folder: RunFolder) -> dict[int, int]:
    """The processes that hold a lease, by rank."""
    from fluxbatch.storage.lease import live_owners

    return {owner["rank"]: owner["pid"] for owner in live_owners(folder)}


def wait_for(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)


def at_work(folder: RunFolder, process: subprocess.Popen[str]) -> dict[int, int]:
    """Both ranks, once each has finished a batch."""
    wait_for(lambda: len(pids(folder)) == 2 and len(list(folder.logs.glob("metrics-*"))) == 2, process)
    return pids(folder)


def test_two_processes_make_the_bytes_of_one_though_one_is_killed(tmp_path: Path, faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    do(settings(tmp_path, out="whole"))
    folder = RunFolder(tmp_path / "run")
    process = started(settings(tmp_path, "telemetry.interval_s=0.5"), FAKE_SLOW_S="0.3")
    os.kill(at_work(folder, process)[1], signal.SIGKILL)
    faults.kill()
    words, log = process.communicate(timeout=240)
    assert process.returncode == 0, log
    assert "[rank 1] died of SIGKILL on cpu: started again" in log
    assert "written: 60" in words
    bars = [line for line in log.splitlines() if "/60 rows (" in line]
    assert bars and not any(line.startswith("[rank") for line in bars), "one bar, of the whole job"
    assert bars[-1].startswith("60/60 rows (100.0 %)")
    assert data_files(folder.root) == data_files(tmp_path / "whole")
    faults.rows(asked=[row["id"] for row in rows(60)], found=ids_written(folder.root))
    sound(folder.root)


@pytest.mark.slow
def test_a_signal_drains_all_and_a_killed_supervisor_leaves_nobody_behind(tmp_path: Path, faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    folder = RunFolder(tmp_path / "run")
    process = started(settings(tmp_path), FAKE_SLOW_S="0.5")
    at_work(folder, process)
    process.send_signal(signal.SIGTERM)
    faults.signal()
    _, log = process.communicate(timeout=120)
    assert process.returncode == 75, log
    assert all(f"[rank {rank}] SIGTERM: finishing what is in flight" in log for rank in range(2))
    assert log.splitlines()[-1] == "fluxbatch: interrupted; the same command goes on"
    assert not list(folder.locks.glob("rank-*"))

    process = started(settings(tmp_path), FAKE_SLOW_S="0.5")
    wait_for(lambda: len(pids(folder)) == 2, process)
    process.kill()
    faults.kill()
    process.communicate()
    until(lambda: not list(folder.locks.glob("rank-*")))
    assert do(settings(tmp_path))[0].written == 60
    sound(folder.root)


@pytest.mark.gpu
def test_all_gpus_of_a_machine_draw_one_job(tmp_path: Path) -> None:
    import torch

    manifest(tmp_path / "m.parquet", rows(60))
    command = [sys.executable, "-m", "fluxbatch", *settings(tmp_path), "model=tiny", "run.devices=all"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "logs").glob("starts-*"))) == torch.cuda.device_count()
    logging.getLogger(__name__).info(done.stderr)
