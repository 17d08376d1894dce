"""What keeps a job of 100,000 shards and a thousand ranks small: nothing is listed, and a rank looks at its own."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from fake_model import FakeModel
from fake_shards import FakePlan, commit_batches, finished
from test_run import do, manifest, rows, settings

from fluxbatch.output import shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.left import Left, begun_batches, left_to_make
from fluxbatch.output.verify import verify
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.planning import poll_s
from fluxbatch.reports import report
from fluxbatch.storage import folder
from fluxbatch.storage.folder import RunFolder, shard_of
from fluxbatch.storage.lease import STALE_S, heartbeat_s
from fluxbatch.telemetry import throughput


def test_what_is_left_is_counted_without_a_look_at_shards_that_nobody_began(tmp_path: Path) -> None:
    plan, run = FakePlan([str(n) for n in range(22)]), RunFolder(tmp_path)
    commit_batches(run, plan, 0)
    shards.commit_batch(run, finished(plan, plan.shard(2).batches[0]))
    begun = begun_batches(run)
    left, drawn = left_to_make(plan, plan.shards(), begun)  # type: ignore[arg-type]
    listed = [
        batch for shard in plan.shards() for batch in shard.batches if batch.index not in begun.get(shard.index, ())
    ]
    [found] = left.values()
    assert found == Left(sum(b.num_rows for b in listed), len(listed), sum(b.size for b in listed)) and drawn == 6


def test_a_rank_reads_the_part_files_of_its_own_shards_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, run = FakePlan([str(n) for n in range(12)]), RunFolder(tmp_path)
    for shard in range(3):
        commit_batches(run, plan, shard)
    read: list[Path] = []
    load = shards._load_part
    monkeypatch.setattr(shards, "_load_part", lambda path: read.append(path) or load(path))
    assert shards.committed_batches(run, 1) == {batch.index for batch in plan.shard(1).batches}
    assert {path.parent.name for path in read} == {"shard-00001"}


def test_the_folder_of_a_shards_batches_goes_with_them(tmp_path: Path) -> None:
    plan, run = FakePlan([str(n) for n in range(8)]), RunFolder(tmp_path)
    commit_batches(run, plan, 0)
    commit_batches(run, plan, 1)
    shards.remove_batches(run, plan.shard(0))
    assert shards.open_shards(run) == [1] and not run.open_shard(0).exists()


def test_a_shards_name_tells_its_folder_and_no_other_is_taken_for_it() -> None:
    run = RunFolder(Path("run"))
    for index in (0, 9_999, 10_000, 123_456):
        for kind in ("parquet", "webdataset"):
            assert shard_of(run.shard(index, kind).relative_to(run.root).as_posix()) == index
    assert (
        run.shard(123_456, "parquet").parent.name == "shards-120000" and run.shard(9_999, "parquet").parent == run.data
    )
    assert shard_of("data/shard-10000.parquet") is None and shard_of("data/shards-20000/shard-10000.parquet") is None


@pytest.mark.parametrize("kind", ["parquet", "webdataset", "folder"])
def test_a_job_of_many_shards_spreads_them_over_folders_and_loads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(folder, "SHARDS_TOGETHER", 2)
    monkeypatch.setattr(folder, "SHARD_FILE", folder.SHARD_FILE)
    manifest(tmp_path / "m.parquet", rows(25))
    assert do([*settings(tmp_path, f"output={kind}"), "plan.shard_size=5"])[0].written == 25
    run = RunFolder(tmp_path / "run")
    assert sorted(path.name for path in run.data.glob("shards-*")) == ["shards-00002", "shards-00004"]
    assert verify(run, decode=True)[1] == []
    loaded = datasets.load_dataset(str(tmp_path / "run"), cache_dir=str(tmp_path / "cache"))["train"]
    assert len(loaded) == 25
    assert do([*settings(tmp_path, f"output={kind}"), "plan.shard_size=5"])[0].written == 25, "an unchanged start"


def test_heartbeats_and_looks_of_many_ranks_stay_few_and_no_lease_grows_stale_between_two() -> None:
    assert heartbeat_s(1) == heartbeat_s(64) == 10
    assert 1000 / heartbeat_s(1000) < 40 and 1000 / poll_s(1000) <= 200 and poll_s(8) < 1
    assert all(3 * heartbeat_s(ranks) < STALE_S for ranks in (1, 300, 1000, 100_000))


def test_a_log_on_disk_says_what_one_in_memory_says(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    run = RunFolder(tmp_path / "run")
    memory = throughput.read_log(run)
    with throughput.open_log(run) as disk:
        for figures in (throughput.totals, throughput.occupancy, throughput.by_bucket, throughput.made_again):
            assert figures(disk) == figures(memory)


def test_rejected_and_failed_rows_are_counted_table_by_table() -> None:
    tables = [
        pa.table({"reason": ["a", "b", "a"], "message": ["1", "2", "3"]}),
        pa.table({"reason": ["b", "b"], "message": ["4", "5"]}),
    ]
    found = report._by_reason(tables)
    assert list(found) == ["b", "a"] and found["b"]["rows"] == 3
    assert [row["message"] for row in found["b"]["listed"]] == ["2", "4", "5"]


def test_shards_that_stand_without_a_ledger_line_are_found_by_one_listing_where_many_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    run, asked = RunFolder(tmp_path / "run"), list[int]()
    (run.data / "shard-00001.parquet").unlink()
    run.ledger(0).unlink()
    monkeypatch.setattr("fluxbatch.share.ASKED_ONE_BY_ONE", 1)
    stands = shards.stands
    monkeypatch.setattr(shards, "stands", lambda f, shard, **kw: asked.append(shard.index) or stands(f, shard, **kw))
    assert do(settings(tmp_path))[0].written == 25 and asked == [0, 2]


def test_a_plan_made_ahead_is_the_one_that_is_drawn(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))

    def never() -> FakeModel:
        raise AssertionError("a model was loaded")

    counts, code = do([*settings(tmp_path), "run.plan_only=true"], never)
    run = RunFolder(tmp_path / "run")
    assert (counts.pending, code, run.success.exists(), list(run.locks.iterdir())) == (25, 0, False, [])
    planned = run.plan().read_bytes()
    assert do(settings(tmp_path))[0].written == 25 and run.plan().read_bytes() == planned


def test_status_of_an_untouched_plan_makes_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    do(settings(tmp_path))
    run = RunFolder(tmp_path / "run")
    plan = RunPlan.open(run)
    assert plan is not None

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a batch was listed")

    monkeypatch.setattr("fluxbatch.plan.cut.PlanPart.cut", never)
    for ledger in run.ledgers.iterdir():
        ledger.write_text("")
    assert Ledger.read(run).commits == {} and report.status(run)["pending"] == 25
    json.dumps(report.status(run))
