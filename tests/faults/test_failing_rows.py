"""Rows that fail while running, and a device that is lost: who is blamed, who stays pending, who is tried again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from fake_model import FakeModel
from test_run import TESTS, command, data_files, do, failing, ids_written, manifest, rows, seeded, settings, sound

from fluxbatch.errors import FluxbatchError, ProcessLost
from fluxbatch.pipeline.device import is_context_lost, is_out_of_memory
from fluxbatch.records import RowCounts
from fluxbatch.storage.folder import RunFolder

SLOW = pytest.mark.slow
LOST = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"
POISONS = {
    "velocity": "CUDA error: an illegal memory access was encountered",
    "decode": LOST,
    "encode": "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
    "noise": "CUDA error: unspecified launch failure",
}


def failed_records(folder: Path) -> dict[str, dict]:
    """The last record of each id that failed."""
    paths = sorted((folder / "failed").glob("*.parquet"))
    return {row["id"]: row for path in paths for row in pq.read_table(path, partitioning=None).to_pylist()}


def all_ids(count: int) -> list[str]:
    return [row["id"] for row in rows(count)]


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [pytest.param(4, marks=SLOW), 2, pytest.param(1, marks=SLOW)])
def test_br22_out_of_memory_at_8_4_2_goes_on_with_what_fits_and_draws_the_same(tmp_path: Path, faults, fits) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    do(settings(tmp_path, "plan.batch_size=8", out="whole"))
    counts, code = do(settings(tmp_path, "plan.batch_size=8"), lambda: FakeModel(max_rows=fits))
    assert (counts.written, code) == (40, 0)
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole"), "the fake's bits depend on no neighbour"
    faults.rows(asked=all_ids(40), found=ids_written(tmp_path / "run"))


@pytest.mark.slow
def test_br22_what_does_not_fit_alone_fails_with_the_reason_and_a_retry_draws_it(tmp_path: Path, faults) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    counts, code = do(settings(tmp_path, "run.max_failed_fraction=1"), lambda: FakeModel(max_rows=0))
    assert (counts.failed, code) == (40, 4)
    records = failed_records(tmp_path / "run")
    assert {(row["stage"], row["reason"]) for row in records.values()} == {("denoise", "out_of_memory")}
    assert do(settings(tmp_path, "run.retry_failed=true"))[0].written == 40
    faults.rows(asked=all_ids(40), found=ids_written(tmp_path / "run"))


@pytest.mark.slow
def test_br22_noise_that_finds_no_room_on_the_device_is_tried_again_and_then_fails_its_batch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxbatch.pipeline import transfer

    plain, calls = transfer.copy_in, []

    def copy_in(staged, streams, *, device):
        calls.append(staged.batch.plan.index)
        if calls.count(calls[-1]) == 1 or calls[-1] == 2:  # each first time, and batch 2 for good
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return plain(staged, streams, device=device)

    monkeypatch.setattr(transfer, "copy_in", copy_in)
    manifest(tmp_path / "m.parquet", rows(40))
    counts, _ = do(settings(tmp_path))
    assert calls == [batch for batch in range(len(calls) // 2) for _ in "12"]
    assert 0 < counts.failed <= 4 and counts.written == 40 - counts.failed
    assert {(r["stage"], r["reason"]) for r in failed_records(tmp_path / "run").values()} == {
        ("transfer", "out_of_memory")
    }


@pytest.mark.parametrize(
    ("error", "memory", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (torch.AcceleratorError("CUDA error: out of memory"), True, False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False, True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("the size of tensor a (3) must match"), False, False),
        (ValueError("CUDA error: said by somebody else"), False, False),
    ],
)
def test_what_a_devices_errors_mean(error: Exception, memory: bool, lost: bool) -> None:
    assert (is_out_of_memory(error), is_context_lost(error)) == (memory, lost)


# --- a lost device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("velocity", "double_buffered"),
        pytest.param("decode", "serial", marks=SLOW),
        pytest.param("encode", "double_buffered", marks=SLOW),
        pytest.param("noise", "serial", marks=SLOW),
    ],
)
def test_a_poisoned_context_ends_the_process_in_one_sentence_and_blames_no_row(
    tmp_path: Path, faults, place: str, mode: str
) -> None:
    manifest(tmp_path / "m.parquet", rows(40))
    do(settings(tmp_path, out="whole"))
    done = subprocess.run(
        [sys.executable, str(TESTS / "run_stopped.py"), "run", *settings(tmp_path, f"pipeline={mode}")],
        env={**os.environ, "AT": f"{place}:{3 if place == 'encode' else 7}", "DO": POISONS[place]},
        capture_output=True,
        text=True,
        timeout=100,
    )
    faults.kill()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith("fluxbatch: stage ") and POISONS[place].partition("\n")[0] in last
    counts = sound(tmp_path / "run")
    assert counts.failed == 0 and counts.pending > 0 and not (tmp_path / "run" / "failed").exists()
    assert do(settings(tmp_path))[1] == 0
    assert data_files(tmp_path / "run") == data_files(tmp_path / "whole")
    faults.rows(asked=all_ids(40), found=ids_written(tmp_path / "run"))


def test_a_context_that_is_lost_while_memory_is_given_back_is_no_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty_cache() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    manifest(tmp_path / "m.parquet", rows(40))
    with pytest.raises(ProcessLost, match="unspecified launch failure"):
        do(settings(tmp_path), lambda: FakeModel(max_rows=2))
    assert sound(tmp_path / "run").failed == 0


# --- the codec --------------------------------------------------------------------------------------------------------


def test_br33_a_codec_that_raises_fails_its_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fluxbatch.pipeline import compress

    plain, broken = compress.compress, all_ids(40)[7]

    def refuse(pixels, asked, output):
        if asked.id == broken:
            raise OSError("encoding error 5")
        return plain(pixels, asked, output)

    monkeypatch.setattr(compress, "compress", refuse)
    manifest(tmp_path / "m.parquet", rows(40))
    counts, code = do(settings(tmp_path))
    assert (counts.written, counts.failed, code) == (39, 1, 4)
    record = failed_records(tmp_path / "run")[broken]
    assert (record["stage"], record["reason"]) == ("compress", "codec_error")
    assert record["message"] == "OSError: encoding error 5"


# --- the budget, and trying again -------------------------------------------------------------------------------------


def test_br36_a_run_in_which_every_row_fails_stops_after_50_rows_with_exit_1(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", seeded(200))
    with pytest.raises(FluxbatchError, match=r"of the first \d+ rows failed, more than run.max_failed_fraction=0\.5"):
        do(settings(tmp_path), failing(range(200)))
    counts = sound(tmp_path / "run")
    assert counts.written == 0 and counts.pending >= 100


def test_br36_each_retry_draws_exactly_the_rows_that_still_fail_and_counts_their_attempts(
    tmp_path: Path, faults
) -> None:
    manifest(tmp_path / "m.parquet", seeded(40))
    do(settings(tmp_path), failing(range(8)))
    assert {row["attempts"] for row in failed_records(tmp_path / "run").values()} == {1}
    again = settings(tmp_path, "run.retry_failed=true")
    for attempts, still_failing in ((2, 5), (3, 2)):
        drawn: list[FakeModel] = []

        def model(still: int = still_failing, drawn: list[FakeModel] = drawn) -> FakeModel:
            drawn.append(failing(range(still))())
            return drawn[-1]

        before = data_files(tmp_path / "run")
        counts, code = do(again, model)
        assert (counts.written, counts.failed, code) == (40 - still_failing, still_failing, 4)
        assert before.items() <= data_files(tmp_path / "run").items(), "nothing that stood there is touched"
        records = failed_records(tmp_path / "run")
        ids = {f"row {n}/é" for n in range(still_failing)}
        assert {row_id for row_id, row in records.items() if row["attempts"] == attempts} == ids
        sound(tmp_path / "run")
    assert do(settings(tmp_path))[0].failed == 2, "without the setting failed rows are left alone"
    assert do(again)[0] == RowCounts(rows=40, written=40, failed=0, rejected=0, pending=0)
    faults.rows(asked=all_ids(40), found=ids_written(tmp_path / "run"))
    sound(tmp_path / "run")


@pytest.mark.parametrize("step", ["publish:1", pytest.param("fsync:2", marks=pytest.mark.slow), "before_lines:1"])
def test_br36_a_retry_that_is_killed_goes_on_and_plans_no_row_a_third_time(tmp_path: Path, faults, step: str) -> None:
    """Also where the second start says run.retry_failed=true again, as a requeued job does."""
    manifest(tmp_path / "m.parquet", seeded(40))
    do(settings(tmp_path), failing(range(12)))
    again = settings(tmp_path, "run.retry_failed=true")
    assert command(again, KILL_AT=step).returncode == -signal.SIGKILL
    faults.kill()
    counts, code = do(again)
    assert (counts, code) == (RowCounts(rows=40, written=40, failed=0, rejected=0, pending=0), 0)
    assert not RunFolder(tmp_path / "run").plan(2).exists(), "one retry is one part of the plan"
    faults.rows(asked=all_ids(40), found=ids_written(tmp_path / "run"))
    sound(tmp_path / "run")
