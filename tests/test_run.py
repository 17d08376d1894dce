"""The whole job with the fake model: resumed, killed, changed, stopped; in processes of its own where that matters."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_model import FakeModel
from three_outputs import THREE_OUTPUTS

from fluxbatch import config, config_rules, run
from fluxbatch.command import run_command
from fluxbatch.compose import with_config
from fluxbatch.errors import ConfigError, FluxbatchError, FolderBusyError, ManifestError
from fluxbatch.output import shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.verify import verify
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.records import RowCounts
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.metrics import MetricsLog

TESTS = Path(__file__).parent
SHAPES = [(64, 64), (64, 96), (96, 64)]
SETTINGS = ("plan.batch_size=4", "plan.shard_size=10", "sampler.num_inference_steps=2", "telemetry.progress=off")


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"row {n}/é",
            "prompt": f"prompt {n}",
            "height": SHAPES[n % 3][0],
            "width": SHAPES[n % 3][1],
            "price": n / 4,
        }
        for n in range(count)
    ]


def manifest(path: Path, content: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(content), path)
    return path


def settings(tmp_path: Path, *overrides: str, out: str = "run") -> list[str]:
    return [f"manifest.path={tmp_path}/m.parquet", f"output.dir={tmp_path}/{out}", *SETTINGS, *overrides]


def do(overrides: list[str], model: Callable[[], FakeModel] = FakeModel) -> tuple[RowCounts, int]:
    answers: list[tuple[RowCounts, int]] = []

    def job(cfg: config.JobConfig) -> int:
        config_rules.check(cfg)
        answers.append(run.run_job(cfg, load=lambda cfg, rank: model()))
        return 0

    with_config(overrides, job)
    return answers[0]


def command(overrides: list[str], verb: str = "run", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TESTS / "run_fake.py"), verb, *overrides],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def data_files(folder: Path) -> dict[str, str]:
    """Every durable data file by name, with its digest."""
    paths = [path for part in ("data", "failed") for path in (folder / part).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def ids_written(folder: Path) -> list[str]:
    return [
        name for path in sorted((folder / "data").glob("*.parquet")) for name in pq.read_table(path)["id"].to_pylist()
    ]


def sound(folder: Path) -> RowCounts:
    counts, found = verify(RunFolder(folder), decode=True)
    assert found == []
    assert counts.balanced
    return counts


def test_every_row_is_written_once_with_its_own_columns(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    counts, code = do(settings(tmp_path))
    assert (counts, code) == (RowCounts(rows=25, written=25, failed=0, rejected=0, pending=0), 0)
    folder = tmp_path / "run"
    assert sorted(ids_written(folder)) == sorted(row["id"] for row in rows(25))
    written = pq.read_table(folder / "data").to_pylist()
    assert {row["id"]: (row["prompt"], row["price"]) for row in written} == {
        row["id"]: (row["prompt"], row["price"]) for row in rows(25)
    }
    assert [pq.read_metadata(path).num_rows for path in sorted((folder / "data").glob("*"))] == [10, 10, 5]
    assert (folder / "_SUCCESS").exists() and not (folder / "batches").exists()
    sound(folder)


def test_the_same_command_again_rewrites_nothing_and_loads_no_model(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def no_model() -> FakeModel:
        raise AssertionError("a complete job needs no model")

    assert do(settings(tmp_path), no_model)[1] == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()} == stamps


def test_kill_before_the_ledger_line_takes_the_shard_over_without_drawing_it_again(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(10))
    assert command(settings(tmp_path), KILL_AT="before_lines:1").returncode == -signal.SIGKILL

    def no_model() -> FakeModel:
        raise AssertionError("all batches are on disk")

    before = data_files(tmp_path / "run")
    assert before, "the shard was published before the kill"
    counts, code = do(settings(tmp_path), no_model)
    assert (counts.written, code) == (10, 0)
    assert data_files(tmp_path / "run") == before


def test_a_shards_file_is_made_while_later_batches_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand images take the disk seconds: the GPU must not wait for them."""
    manifest(tmp_path / "m.parquet", rows(40))
    later = threading.Event()
    compact, commit_batch = shards.compact, shards.commit_batch

    def committed(folder: Any, done: Any) -> bool:
        if done.batch.plan.shard == 1:
            later.set()
        return commit_batch(folder, done)

    def compacted(folder: Any, shard: Any, *args: Any, **options: Any) -> Any:
        assert shard.index or later.wait(20), "the first shard's file holds up the second one's batches"
        return compact(folder, shard, *args, **options)

    monkeypatch.setattr(shards, "commit_batch", committed)
    monkeypatch.setattr(shards, "compact", compacted)
    assert do(settings(tmp_path))[1] == 0
    sound(tmp_path / "run")


def test_a_shards_file_that_cannot_be_made_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    with monkeypatch.context() as patch:
        patch.setattr(shards, "compact", lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            do(settings(tmp_path))
    assert do(settings(tmp_path))[1] == 0
    sound(tmp_path / "run")


@pytest.mark.slow
def test_br38_interrupted_three_times_95_rows_stand_in_ten_shards_none_touched_twice(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(95))
    seen: dict[str, str] = {}
    for step in ("before_lines:2", "before_lines:3", "publish:20", ""):
        command(settings(tmp_path), KILL_AT=step)
        ledger = Ledger.read(RunFolder(tmp_path / "run"))
        committed = {commit.file: commit.sha256 for commits in ledger.commits.values() for commit in commits}
        assert seen.items() <= committed.items()
        seen = committed
    assert sorted(path.name for path in (tmp_path / "run" / "data").iterdir()) == [
        f"shard-{n:05d}.parquet" for n in range(10)
    ]
    assert len(ids_written(tmp_path / "run")) == 95
    sound(tmp_path / "run")


def finish_as(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def started(overrides: list[str], **environ: str) -> subprocess.Popen[str]:
    """A run in a process of its own, up to its first committed batch."""
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "run_fake.py"), "run", *overrides],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = Path(next(o for o in overrides if o.startswith("output.dir=")).partition("=")[2])
    until = time.monotonic() + 60
    while not list(folder.glob("batches/*/batch-*")) and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_br40_a_signal_finishes_what_is_in_flight_and_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path), FAKE_SLOW_S="0.1")
    process.send_signal(number)
    code, words = finish_as(process)
    assert code == 75, words
    assert "the same command" in words and number.name in words
    counts = sound(tmp_path / "run")
    assert counts.pending > 0 and counts.rejected == 0
    assert do(settings(tmp_path))[0].written == 60
    sound(tmp_path / "run")


@pytest.mark.slow
def test_br40_a_second_signal_exits_at_once_and_that_resumes_too(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path, "run.grace_s=100"), FAKE_SLOW_S="3")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert finish_as(process)[0] == 75
    assert time.monotonic() - began < 2
    assert do(settings(tmp_path))[0].written == 60


@pytest.mark.slow
def test_grace_bounds_a_batch_that_does_not_end(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path, "run.grace_s=1"), FAKE_SLOW_S="3")
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert finish_as(process)[0] == 75
    assert time.monotonic() - began < 4, "a batch takes 6 s, run.grace_s is 1"


def test_a_deadline_stops_in_time(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    done = command(settings(tmp_path, "run.deadline=+6", "run.grace_s=4"), FAKE_SLOW_S="0.5")
    assert done.returncode == 75 and "deadline" in done.stderr


def test_a_second_live_run_is_refused_with_6_and_names_the_owner(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path), FAKE_SLOW_S="0.2")
    try:
        second = command(settings(tmp_path))
        assert second.returncode == 6
        assert f"pid {process.pid}" in second.stderr and str(tmp_path / "run") in second.stderr
        with pytest.raises(FolderBusyError):
            do(settings(tmp_path, "run.rank=1", "run.world_size=2"))
    finally:
        process.kill()
        process.communicate()
    assert do(settings(tmp_path))[0].written == 60, "the lease of a dead run is taken over"


def test_two_live_copies_that_both_believe_they_own_the_folder_write_each_row_once(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    do(settings(tmp_path, out="whole"))
    first = started(settings(tmp_path), FAKE_SLOW_S="0.05")
    (tmp_path / "run" / "locks" / "rank-00000.json").unlink()
    second = started(settings(tmp_path), FAKE_SLOW_S="0.02")
    assert (finish_as(first)[0], finish_as(second)[0]) == (0, 0)
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    sound(tmp_path / "run")


def test_ranks_make_the_same_files_as_one_process_and_the_last_one_finishes(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(45))
    do(settings(tmp_path, out="whole"))
    for rank in (2, 0, 1):
        assert not (tmp_path / "run" / "_SUCCESS").exists()
        do(settings(tmp_path, f"run.rank={rank}", "run.world_size=3"))
    assert (tmp_path / "run" / "_SUCCESS").exists()
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    sound(tmp_path / "run")


def test_another_number_of_ranks_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(45))
    do(settings(tmp_path, "run.rank=1", "run.world_size=3"))
    assert do(settings(tmp_path))[0].written == 45
    sound(tmp_path / "run")


def test_neighbours_order_batches_and_pipeline_do_not_change_a_rows_image(tmp_path: Path) -> None:
    def images(out: str) -> dict[str, bytes]:
        table = pq.read_table(tmp_path / out / "data").to_pylist()
        return {row["id"]: row["image"]["bytes"] for row in table}

    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    do(settings(tmp_path, "pipeline=serial", out="serial"))
    assert data_files(tmp_path / "serial") == data_files(tmp_path / "run")
    manifest(tmp_path / "m.parquet", list(reversed(rows(25)))[:20])
    do(settings(tmp_path, out="reversed"))
    assert images("reversed").items() <= images("run").items()


def test_verify_tells_scripts_who_ask_that_a_sound_run_is_not_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest(tmp_path / "m.parquet", rows(45))
    do(settings(tmp_path, "run.rank=1", "run.world_size=3"))
    left = sound(tmp_path / "run").pending
    asked = ["verify", "verify.complete=true", f"output.dir={tmp_path}/run"]
    assert run_command(asked) == 75
    assert f"incomplete: {left} rows are pending; the same run command makes them" in capsys.readouterr().out
    assert run_command([asked[0], asked[2]]) == 0
    do(settings(tmp_path))
    assert run_command(asked) == 0
    (tmp_path / "run" / "_SUCCESS").unlink()  # killed before its last step
    assert run_command(asked) == 75
    (tmp_path / "run" / "data" / "shard-00000.parquet").unlink()
    assert run_command(asked) == 5, "damage comes first"


# What changed underneath


def test_permuted_and_touched_manifests_go_on(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    before = data_files(tmp_path / "run")
    manifest(tmp_path / "m.parquet", list(reversed(rows(25))))
    assert do(settings(tmp_path))[1] == 0
    assert data_files(tmp_path / "run") == before


def test_appended_rows_are_added_after_success_and_other_sizes_apply_to_them_alone(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    before = data_files(tmp_path / "run")
    manifest(tmp_path / "m.parquet", rows(40))
    counts, code = do(settings(tmp_path, "plan.shard_size=7", "plan.batch_size=2"))
    assert (counts.rows, counts.written, code) == (40, 40, 0)
    assert before.items() <= data_files(tmp_path / "run").items()
    assert sorted(ids_written(tmp_path / "run")) == sorted(row["id"] for row in rows(40))
    assert (tmp_path / "run" / "_SUCCESS").exists()
    sound(tmp_path / "run")


@pytest.mark.parametrize("more", ["rows", "a retry"])
def test_a_model_that_is_gone_is_refused_before_a_finished_job_is_planned_to_have_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    def gone(cfg: config.JobConfig) -> None:
        raise ConfigError("model.path must be a folder")

    manifest(tmp_path / "m.parquet", seeded(8))
    do(settings(tmp_path), failing(range(2)))
    monkeypatch.setattr(run, "_check_model", gone)
    monkeypatch.setattr(run, "_load_model", lambda cfg, rank: pytest.fail("it was to be refused before"))
    started = settings(tmp_path, f"run.retry_failed={str(more == 'a retry').lower()}")
    if more == "rows":
        manifest(tmp_path / "m.parquet", list(reversed(seeded(8))))
        assert with_config(started, lambda cfg: run.run_job(cfg)[1]) == 4, "nothing is new, so no model is asked for"
        manifest(tmp_path / "m.parquet", seeded(9))
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match=r"model\.path must be a folder"):
        with_config(started, lambda cfg: run.run_job(cfg)[1])
    assert sorted((tmp_path / "run").rglob("*")) == before and (tmp_path / "run" / "_SUCCESS").exists()


def test_deleted_rows_are_kept(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    manifest(tmp_path / "m.parquet", rows(20))
    counts, code = do(settings(tmp_path))
    assert (counts.written, code) == (25, 0)
    assert len(ids_written(tmp_path / "run")) == 25


def test_an_edited_row_is_refused_by_its_id(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    edited = rows(25)
    edited[7]["prompt"] = "another"
    manifest(tmp_path / "m.parquet", edited)
    with pytest.raises(ManifestError, match="row 7/é"):
        do(settings(tmp_path))


def test_another_codec_is_refused_by_its_key(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    with pytest.raises(
        ConfigError, match=r"output\.image_format must be 'png', got 'jpeg', output\.quality must be 95, got 80"
    ):
        do(settings(tmp_path, "output.image_format=jpeg", "output.quality=80"))


# Damage


def test_missing_and_cut_shards_are_made_again_byte_for_byte(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(35))
    do(settings(tmp_path))
    before = data_files(tmp_path / "run")
    (tmp_path / "run" / "data" / "shard-00000.parquet").unlink()
    cut = tmp_path / "run" / "data" / "shard-00002.parquet"
    os.truncate(cut, cut.stat().st_size // 2)
    assert do(settings(tmp_path))[1] == 0
    assert data_files(tmp_path / "run") == before
    sound(tmp_path / "run")


@pytest.mark.parametrize("damage", ["longer", "other"])
def test_a_longer_or_other_shard_stops_the_run_with_its_name(tmp_path: Path, damage: str) -> None:
    manifest(tmp_path / "m.parquet", rows(15))
    do(settings(tmp_path))
    shard = tmp_path / "run" / "data" / "shard-00001.parquet"
    content = bytearray(shard.read_bytes())
    content = content + b"x" if damage == "longer" else content[:100] + bytes([content[100] ^ 1]) + content[101:]
    shard.write_bytes(bytes(content))
    with pytest.raises(FluxbatchError, match=r"shard-00001\.parquet"):
        do(settings(tmp_path))
    assert verify(RunFolder(tmp_path / "run"), decode=True)[1]


@pytest.mark.parametrize("output", THREE_OUTPUTS)
def test_a_lost_ledger_is_found_by_verify_and_mended_by_a_run(tmp_path: Path, output: str) -> None:
    manifest(tmp_path / "m.parquet", rows(15))
    do(settings(tmp_path, f"output={output}"))
    before = data_files(tmp_path / "run")
    (tmp_path / "run" / "ledger" / "rank-00000.jsonl").unlink()
    assert verify(RunFolder(tmp_path / "run"), decode=True)[1]

    def no_model() -> FakeModel:
        raise AssertionError("the shards are whole")

    assert do(settings(tmp_path, f"output={output}"), no_model)[1] == 0
    assert data_files(tmp_path / "run") == before
    sound(tmp_path / "run")


# Rows that cannot be drawn


def test_rejected_rows_stop_nothing_and_give_4(tmp_path: Path) -> None:
    content = rows(12)
    content[3]["prompt"] = None
    content[5]["height"] = 100
    manifest(tmp_path / "m.parquet", content)
    counts, code = do(settings(tmp_path))
    assert (counts.written, counts.rejected, code) == (10, 2, 4)
    assert do(settings(tmp_path, "run.fail_on_row_errors=false"))[1] == 0
    reasons = {row["id"]: row["reason"] for row in pq.read_table(tmp_path / "run" / "rejected.parquet").to_pylist()}
    assert set(reasons) == {content[3]["id"], content[5]["id"]}


def test_an_empty_manifest_is_a_finished_job(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": pa.array([], pa.string()), "prompt": pa.array([], pa.string())}), tmp_path / "m.parquet"
    )
    counts, code = do(settings(tmp_path))
    assert (counts.rows, code) == (0, 0)
    assert (tmp_path / "run" / "_SUCCESS").exists()
    sound(tmp_path / "run")


def test_metrics_lines_are_strict_json_with_the_same_keys(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    lines = (tmp_path / "run" / "logs" / "metrics-rank-00000.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert {tuple(line) for line in parsed} == {tuple(parsed[0])}
    assert sum(line["rows_ok"] for line in parsed) == 25
    assert sum(line["rows_padded"] for line in parsed) > 0


# Rows that fail while running


def failing(seeds: range) -> Callable[[], FakeModel]:
    return lambda: FakeModel(nan_pixels=list(seeds))


def seeded(count: int) -> list[dict[str, Any]]:
    return [row | {"seed": number} for number, row in enumerate(rows(count))]


def test_br36_failed_rows_are_neither_done_nor_pending_and_a_retry_draws_exactly_them(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(100))
    counts, code = do(settings(tmp_path), failing(range(0, 90, 3)))
    assert (counts.written, counts.failed, counts.pending, code) == (70, 30, 0, 4)
    before = data_files(tmp_path / "run")
    assert do(settings(tmp_path))[0].failed == 30, "a plain rerun leaves failed rows alone"
    assert data_files(tmp_path / "run") == before
    drawn: list[FakeModel] = []

    def sound_model() -> FakeModel:
        drawn.append(FakeModel())
        return drawn[-1]

    counts, code = do(settings(tmp_path, "run.retry_failed=true"), sound_model)
    assert (counts.rows, counts.written, counts.failed, code) == (100, 100, 0, 0)
    assert before.items() <= data_files(tmp_path / "run").items()
    written = ids_written(tmp_path / "run")
    assert len(written) == len(set(written)) == 100
    sound(tmp_path / "run")


def test_a_retry_that_fails_again_counts_its_attempts_once_in_the_sum(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(20))
    do(settings(tmp_path), failing(range(5)))
    counts, code = do(settings(tmp_path, "run.retry_failed=true"), failing(range(2)))
    assert (counts.written, counts.failed, code) == (18, 2, 4)
    sound(tmp_path / "run")


def test_a_job_of_failures_only_exits_4_with_a_failed_file_and_no_empty_shard(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(8))
    counts, code = do(settings(tmp_path), failing(range(8)))
    assert (counts.written, counts.failed, code) == (0, 8, 4)
    assert not list((tmp_path / "run" / "data").glob("*"))
    failed = pq.read_table(tmp_path / "run" / "failed").to_pylist()
    assert {row["stage"] for row in failed} == {"decode"} and {row["reason"] for row in failed} == {"non_finite"}
    sound(tmp_path / "run")


def test_more_failures_than_allowed_stop_the_job_with_exit_1(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(100))
    with pytest.raises(FluxbatchError, match=r"run\.max_failed_fraction=0\.25"):
        do(settings(tmp_path, "run.max_failed_fraction=0.25"), failing(range(0, 100, 2)))
    assert do(settings(tmp_path))[0].pending == 0, "the rest is drawn when the reason is gone"


def test_an_exception_of_the_model_ends_the_run_with_its_place_and_leaves_rows_pending(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(40))
    with pytest.raises(RuntimeError) as raised:
        do(settings(tmp_path), lambda: FakeModel(fail_at={"decode": 3}))
    assert any("stage decode, shard 0, batch 2" in note for note in raised.value.__notes__)
    counts = sound(tmp_path / "run")
    assert counts.failed == 0 and counts.pending == 40
    assert do(settings(tmp_path))[0].written == 40


def test_an_error_is_not_hidden_by_a_batch_log_that_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(log: MetricsLog) -> None:
        raise OSError(5, "the store is out of reach")

    manifest(tmp_path / "m.parquet", seeded(8))
    monkeypatch.setattr(MetricsLog, "flush", unreachable)
    with pytest.raises(RuntimeError) as raised:
        do(settings(tmp_path), lambda: FakeModel(fail_at={"decode": 1}))
    assert any("stage decode, shard 0, batch 0" in note for note in raised.value.__notes__)
    assert "the batch log was not ended: OSError: [Errno 5] the store is out of reach" in caplog.messages


def test_prometheus_file_tells_the_rows_by_state(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(8))
    do(settings(tmp_path, f"telemetry.prometheus_textfile={tmp_path}/flux.prom"))
    assert 'state="written"} 8' in (tmp_path / "flux.prom").read_text()


def test_a_finished_job_is_finished_whatever_the_deadline(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    assert do(settings(tmp_path, "run.deadline=+1"))[1] == 0


def test_a_damaged_rejected_file_is_found_by_verify_and_made_again(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", [*rows(5), {"id": "bad", "prompt": None}])
    do(settings(tmp_path))
    rejected = tmp_path / "run" / "rejected.parquet"
    rejected.write_bytes(b"garbage")
    assert [found.file for found in verify(RunFolder(tmp_path / "run"), decode=False)[1]] == ["rejected.parquet"]
    assert do(settings(tmp_path))[0].rejected == 1
    sound(tmp_path / "run")


def test_a_flipped_byte_of_the_plan_is_refused_by_name_or_changes_no_row(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    do(settings(tmp_path))
    folder = RunFolder(tmp_path / "run")

    def planned() -> pa.Table:
        plan = RunPlan.open(folder)
        assert plan is not None
        return plan.rows(plan.shard(0))

    content, sound_rows, refused = folder.plan().read_bytes(), planned(), 0
    for place in range(4, len(content), 61):
        folder.plan().write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert planned().equals(sound_rows), place
        except FluxbatchError as error:
            assert "plan.parquet" in str(error)
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("output", THREE_OUTPUTS)
def test_a_date_beyond_pythons_calendar_stops_nothing(tmp_path: Path, output: str) -> None:
    far = {"when": pa.array([2**62, None], pa.timestamp("us")), "day": pa.array([2**30, None], pa.date32())}
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["x", "y"], **far}), tmp_path / "m.parquet")
    assert do(settings(tmp_path, f"output={output}"))[1] == 0
    sound(tmp_path / "run")


def test_a_folder_that_vanishes_stops_the_run_and_nothing_is_written_in_its_place(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    process = started(settings(tmp_path), FAKE_SLOW_S="0.2")
    (tmp_path / "run").rename(tmp_path / "away")
    code, words = finish_as(process)
    assert code == 1 and "output.dir was moved or unmounted" in words
    assert not (tmp_path / "run" / "batches").exists()
    (tmp_path / "run").exists() and (tmp_path / "run").rmdir()
    (tmp_path / "away").rename(tmp_path / "run")
    assert do(settings(tmp_path))[0].written == 60


def test_telemetry_in_a_bad_place_and_a_lost_rejected_file(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", [*rows(5), {"id": "bad", "prompt": None}])
    assert do(settings(tmp_path, "telemetry.prometheus_textfile=/proc/nowhere/x.prom"))[1] == 4
    (tmp_path / "run" / "rejected.parquet").unlink()
    assert [found.file for found in verify(RunFolder(tmp_path / "run"), decode=False)[1]] == ["rejected.parquet"]


def test_an_output_dir_that_is_a_file_is_a_wrong_setting(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(5))
    (tmp_path / "run").write_text("x")
    with pytest.raises(ConfigError, match=r"output\.dir must be a folder"):
        do(settings(tmp_path))
