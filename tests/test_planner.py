"""From manifest to plan and back: the first start, every kind of later start, retries, and two starts at once."""

import multiprocessing
import sys
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fluxbatch.config import JobConfig, ManifestConfig, ModelConfig, PlanConfig, SamplerConfig
from fluxbatch.errors import ConfigError, FluxbatchError, ManifestError
from fluxbatch.manifest.files import Manifest, open_manifest
from fluxbatch.plan import plan_writer, planner, row_spool
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.planner import Survey, add_retry, prepare, survey
from fluxbatch.records import Bucket, RowRules
from fluxbatch.storage.folder import RunFolder

RULES = {
    "height": 128, "width": 128, "num_inference_steps": 20, "guidance_scale": 3.5, "seed": 0, "size_multiple": 16,
    "max_pixels": 2**22, "max_side": 2**31 - 1, "size_policy": "reject", "allow_blank_prompts": False,
    "guidance": "embedded", "negative_prompts": True,
}  # fmt: skip
SIDES = (128, 512, 256)


def rows_of(*numbers: int) -> list[dict]:
    """Manifest rows of three sizes in turn."""
    return [{"id": f"id-{n}", "prompt": f"cat {n}", "height": SIDES[n % 3], "seed": n, "tag": f"t{n}"} for n in numbers]


class Job:
    """A manifest folder, a run folder and settings, started as often as a test likes."""

    def __init__(self, root: Path) -> None:
        self.manifest, self.folder = root / "manifest", RunFolder(root / "run")
        self.manifest.mkdir(parents=True)
        self.cfg = JobConfig(
            manifest=ManifestConfig(path=str(self.manifest)),
            model=ModelConfig(),
            sampler=SamplerConfig(),
            plan=PlanConfig(batch_size=2, shard_size=5),
        )

    def write(self, rows: list[dict] | pa.Table, name: str = "m.parquet") -> None:
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), self.manifest / name)

    def start(self, **rules) -> tuple[RunPlan, planner.Changes]:
        return prepare(self.folder, open_manifest(self.cfg.manifest), RowRules(**{**RULES, **rules}), self.cfg)

    def survey(self, **rules) -> Survey:
        return survey(open_manifest(self.cfg.manifest), RowRules(**{**RULES, **rules}), self.cfg)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.root.iterdir()}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def all_rows(plan: RunPlan) -> pa.Table:
    return pa.concat_tables(plan.rows(shard) for shard in plan.shards())


def ids(plan: RunPlan) -> list[str]:
    return all_rows(plan)["id"].to_pylist()


# The first start.


def test_the_plan_has_the_largest_images_first_and_rows_in_manifest_order(job: Job):
    job.write(rows_of(*range(10)))
    plan, changes = job.start()
    assert ids(plan) == [f"id-{n}" for n in (1, 4, 7, 2, 5, 8, 0, 3, 6, 9)]
    assert (changes.added, changes.deleted, changes.rejected, changes.unchanged) == (10, 0, 0, False)
    assert (plan.num_rows, plan.num_rejected, plan.seed_type) == (10, 0, pa.int64())


def test_every_row_is_recorded_with_its_place_and_the_manifests_own_columns(job: Job, monkeypatch):
    monkeypatch.setattr(plan_writer, "GROUP_ROWS", (1, 4))  # shards of 5 rows cross the edges of row groups
    job.write(rows_of(*range(20), 20))
    plan, _ = job.start()
    for shard in plan.shards():
        rows = plan.rows(shard).to_pylist()
        expected = [(b.bucket.name, b.index, shard.index, slot) for b in shard.batches for slot in range(b.num_rows)]
        assert [(row["bucket"], row["batch"], row["shard"], row["slot"]) for row in rows] == expected
        for row in rows:
            [asked] = rows_of(row["row"])
            assert {name: row[name] for name in ("id", "prompt", "height", "seed")} | row["extra"] == asked


def test_a_batch_comes_with_its_requests(job: Job):
    job.write(rows_of(*range(10)))
    plan, _ = job.start()
    batches = [plan.batch(batch) for shard in plan.shards() for batch in shard.batches]
    assert [request.id for batch in batches for request in batch.requests] == ids(plan)
    first = batches[0]
    assert (first.bucket, first.num_padded) == (Bucket(512, 128, 20), 0)
    request = first.requests[0]
    assert (request.prompt, request.negative_prompt, request.guidance_scale, request.seed) == ("cat 1", None, 3.5, 1)
    assert all(type(request.seed) is int for batch in batches for request in batch.requests)


@pytest.mark.parametrize(
    ("seeds", "kind"),
    [([-1, 2**63 - 1], pa.int64()), ([0, 2**64 - 1], pa.uint64()), ([-1, 2**64 - 1], pa.decimal128(20, 0))],
)
def test_seeds_have_the_narrowest_type_that_holds_them_all(job: Job, seeds, kind):
    manifest_type = pa.decimal128(38, 0) if pa.types.is_decimal(kind) else kind
    wide = pa.array([Decimal(seed) for seed in seeds]).cast(manifest_type)
    job.write(pa.table({"id": ["a", "b"], "prompt": ["x", "y"], "seed": wide}))
    plan, _ = job.start()
    assert plan.seed_type == plan.rows(plan.shard(0)).schema.field("seed").type == kind
    assert [request.seed for request in plan.batch(plan.shard(0).batches[0]).requests] == seeds


def test_br05_prompts_arrive_byte_for_byte(job: Job):
    prompts = ["👩‍🚀", "عربي\u202e", "e\u0301", "a\x00b", "x" * 200_000, "a\n\t\rb"]
    job.write([{"id": f"{prompt[:3]}\x00", "prompt": prompt} for prompt in prompts])
    plan, _ = job.start()
    assert all_rows(plan)["prompt"].to_pylist() == prompts
    assert ids(plan) == [f"{prompt[:3]}\x00" for prompt in prompts]


def test_br06_a_row_group_of_the_plan_holds_bounded_bytes(job: Job, monkeypatch):
    monkeypatch.setattr(plan_writer, "GROUP_BYTES", 10_000)
    monkeypatch.setattr("fluxbatch.manifest.files.CHUNK_ROWS", 3)
    job.write([{"id": str(n), "prompt": f"{n}" * 2000} for n in range(10, 40)])
    plan, _ = job.start()
    metadata = pq.read_metadata(job.folder.plan())
    assert max(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)) <= 5
    assert ids(plan) == [str(n) for n in range(10, 40)]


def test_rejected_rows_are_written_down_and_counted(job: Job):
    job.write([*rows_of(0, 1), {"id": "x", "prompt": None}, {"id": None, "prompt": "y"}])
    plan, changes = job.start()
    rejected = pq.read_table(job.folder.rejected)
    assert rejected.column_names == ["row", "id", "column", "reason", "message"]
    assert rejected.select(["row", "id", "reason"]).to_pylist() == [
        {"row": 2, "id": "x", "reason": "null_prompt"},
        {"row": 3, "id": None, "reason": "null_id"},
    ]
    assert (plan.num_rows, plan.num_rejected, changes.rejected) == (2, 2, 2)


def test_a_manifest_without_an_accepted_row_is_an_empty_plan(job: Job):
    job.write(pa.table({"prompt": pa.array([None, ""], pa.string())}))
    plan, _ = job.start()
    assert (plan.num_rows, plan.num_rejected, list(plan.shards())) == (0, 2, [])
    assert job.start()[1].unchanged


def test_before_the_first_start_there_is_no_plan(job: Job):
    assert RunPlan.open(job.folder) is None


def test_a_damaged_plan_file_is_named(job: Job):
    job.write(rows_of(0))
    job.start()
    job.folder.plan().write_bytes(b"PAR1")
    with pytest.raises(FluxbatchError, match=r"plan\.parquet: not a file that fluxbatch wrote whole"):
        RunPlan.open(job.folder)


# The survey.


def test_a_survey_finds_what_the_start_will_find_and_writes_nothing(job: Job):
    job.write([*rows_of(*range(10)), *({"id": f"x{n}", "prompt": ""} for n in range(5)), {"id": "y", "prompt": None}])
    found = job.survey()
    assert not job.folder.root.exists()
    plan, _ = job.start()
    assert found.counts == {run.bucket: run.num_rows for run in plan.parts[0].runs}
    assert found.rejected == Counter(pq.read_table(job.folder.rejected)["reason"].to_pylist())
    assert found.rows == 16
    assert {reason: len(examples) for reason, examples in found.examples.items()} == {
        "blank_prompt": 3,
        "null_prompt": 1,
    }


# Duplicates.


def test_br08_a_duplicate_id_is_refused_with_both_rows_and_files(job: Job):
    job.write(rows_of(*range(5)), "a.parquet")
    job.write([*rows_of(7, 8), {"id": "id-3", "prompt": "other"}, *rows_of(0)], "b.parquet")
    for verb in (job.survey, job.start):
        with pytest.raises(ManifestError) as error:
            verb()
        assert "id 'id-3' stands twice: row 3 (a.parquet, row 3) and row 7 (b.parquet, row 2)" in str(error.value)
        assert "2 duplicate row(s) in all" in str(error.value)
    assert not job.folder.root.exists()


def test_br08_keep_first_rejects_the_later_rows(job: Job):
    job.cfg.manifest.on_duplicate = "keep_first"
    job.write([*rows_of(0, 1), *rows_of(1), {"id": "id-0", "prompt": "other"}])
    found = job.survey()
    plan, _ = job.start()
    assert all_rows(plan).sort_by("row")["prompt"].to_pylist() == ["cat 0", "cat 1"]
    rejected = pq.read_table(job.folder.rejected).to_pylist()
    assert [(r["row"], r["id"], r["reason"]) for r in rejected] == [
        (2, "id-1", "duplicate_id"),
        (3, "id-0", "duplicate_id"),
    ]
    assert rejected[1]["message"] == "id must stand once, is that of row 0 (m.parquet, row 0) too"
    assert (sum(found.counts.values()), found.rejected, found.rows) == (2, {"duplicate_id": 2}, 4)
    assert job.start()[1].unchanged


def test_a_rejected_row_is_no_duplicate(job: Job):
    job.write([{"id": "a", "prompt": None}, {"id": "a", "prompt": "x"}])
    plan, changes = job.start()
    assert (ids(plan), changes.rejected) == (["a"], 1)
    job.write([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": None}])
    assert job.start()[1].deleted == 0


# Later starts.


def test_the_same_manifest_is_not_read_again(job: Job, monkeypatch):
    job.write(rows_of(*range(5)))
    job.start()
    before = job.files()
    monkeypatch.setattr(Manifest, "chunks", lambda *_, **__: pytest.fail("the manifest was read"))
    plan, changes = job.start()
    assert changes.unchanged
    assert ids(plan) == ["id-1", "id-4", "id-2", "id-0", "id-3"]
    assert job.files() == before


def test_a_touched_or_permuted_manifest_goes_on_and_is_compared_once(job: Job):
    job.write(rows_of(*range(10)))
    job.start()
    before = job.folder.plan().read_bytes()
    job.write(rows_of(*reversed(range(10))))
    _, changes = job.start()
    assert (changes.added, changes.deleted, changes.unchanged) == (0, 0, False)
    assert job.start()[1].unchanged
    assert job.folder.plan().read_bytes() == before
    assert not job.folder.plan(1).exists()


def test_appended_rows_become_a_new_part_and_the_old_one_stays(job: Job):
    job.write(rows_of(*range(7)), "a.parquet")
    first, _ = job.start()
    before = job.folder.plan().read_bytes()
    job.write(rows_of(7, 8, 9), "b.parquet")
    job.cfg.plan = PlanConfig(batch_size=3, shard_size=2)
    plan, changes = job.start()
    assert (changes.added, changes.deleted) == (3, 0)
    assert job.folder.plan().read_bytes() == before
    assert ids(plan) == [*ids(first), "id-7", "id-8", "id-9"]
    assert [shard.index for shard in plan.shards()] == [0, 1, 2, 3]
    assert [b.index for s in plan.shards() for b in s.batches] == list(range(sum(p.num_batches for p in plan.parts)))
    assert [(part.shard_size, part.runs[0].batch_size) for part in plan.parts] == [(5, 2), (2, 2)]
    assert plan.rows(plan.shard(2))["shard"].to_pylist() == [2, 2]


def test_deleted_rows_are_kept_and_counted(job: Job):
    job.write(rows_of(*range(10)))
    job.start()
    job.write(rows_of(0, 2, 4))
    plan, changes = job.start()
    assert (changes.added, changes.deleted) == (0, 7)
    assert plan.num_rows == 10


def test_an_edited_row_is_refused_with_its_id(job: Job):
    job.write(rows_of(*range(10)))
    job.start()
    before = job.files()
    changed = rows_of(*range(12))
    for n in (3, 5, 7, 9):
        changed[n]["prompt"] += "!"
    job.write(changed)
    with pytest.raises(ManifestError, match="4 planned rows were edited") as error:
        job.start()
    assert "(id 'id-3', 'id-5', 'id-7', 'id-9' (prompt))" in str(error.value)
    assert job.files() == before


@pytest.mark.parametrize("edit", [{"tag": "other"}, {"prompt": None}, {"height": 7}, {"seed": 99}])
def test_any_edit_is_refused_also_one_that_makes_the_row_invalid(job: Job, edit):
    job.write(rows_of(0, 1, 2))
    job.start()
    job.write([rows_of(0)[0] | edit, *rows_of(1, 2)])
    with pytest.raises(ManifestError, match=r"1 planned row.*'id-0'"):
        job.start()


def test_a_default_that_changed_is_named(job: Job):
    job.write([{"id": "a", "prompt": "x"}])
    job.start()
    with pytest.raises(ConfigError, match=r"sampler\.guidance_scale was 3\.5, is 4\.0.*'a'"):
        job.start(guidance_scale=4.0)


def test_a_default_that_no_row_uses_may_change(job: Job):
    job.write(rows_of(0, 1, 2))
    job.start()
    assert job.start(height=256)[1].added == 0


def test_rows_without_ids_that_moved_are_refused_with_the_reason(job: Job):
    job.write([{"prompt": "a"}, {"prompt": "b"}])
    job.start()
    job.write([{"prompt": "b"}, {"prompt": "a"}])
    with pytest.raises(ManifestError, match="without an id column a row is known by its place only"):
        job.start()


def test_a_row_that_was_rejected_and_is_mended_is_added(job: Job):
    job.write([*rows_of(0, 1), {"id": "id-2", "prompt": None}])
    job.start()
    job.write(rows_of(0, 1, 2))
    plan, changes = job.start()
    assert (changes.added, changes.rejected, plan.num_rejected) == (1, 0, 0)
    assert ids(plan)[-1] == "id-2"


def test_added_rows_keep_to_the_columns_of_the_first_plan(job: Job):
    job.write(rows_of(0, 1), "a.parquet")
    job.start()
    job.write([{"id": "n", "prompt": "x"}], "b.parquet")
    plan, _ = job.start()
    assert plan.rows(plan.shard(1))["extra"].to_pylist() == [{"tag": None}]
    job.write([{"id": "o", "prompt": "x", "mood": "calm"}], "c.parquet")
    with pytest.raises(ManifestError, match=r"column mood is not in the plan.*manifest\.drop_columns"):
        job.start()
    job.cfg.manifest.drop_columns = ["mood"]
    plan, changes = job.start()
    assert (changes.added, plan.rows(plan.shard(2)).schema) == (1, plan.rows(plan.shard(0)).schema)


def test_requested_sizes_stand_in_the_plan_only_where_rows_may_be_floored(job: Job):
    job.write([{"id": "a", "prompt": "x", "height": 130}, *rows_of(1)])
    plan, _ = job.start(size_policy="floor")
    rows = {
        row["id"]: (row["height"], row["requested_height"], row["requested_width"])
        for row in all_rows(plan).to_pylist()
    }
    assert rows == {"a": (128, 130, 128), "id-1": (512, None, None)}
    other = Job(job.manifest / "_other")
    other.write(rows_of(0, 1))
    assert not [name for name in other.start()[0].schema.names if name.startswith("requested")]


def test_a_floored_row_cannot_join_a_plan_without_requested_sizes(job: Job):
    job.write(rows_of(0), "a.parquet")
    job.start()
    job.write(rows_of(1), "b.parquet")
    assert job.start(size_policy="floor")[1].added == 1
    job.write([{"id": "c", "prompt": "x", "height": 130}], "c.parquet")
    before = job.files()
    with pytest.raises(ManifestError, match=r"manifest\.size_policy must stay reject.*use another output\.dir"):
        job.start(size_policy="floor")
    assert job.files() == before


def test_an_added_seed_must_fit_the_type_of_the_first_plan(job: Job):
    job.write(rows_of(0), "a.parquet")
    job.start()
    job.write(pa.table({"id": ["n"], "prompt": ["x"], "seed": pa.array([2**64 - 1], pa.uint64())}), "b.parquet")
    with pytest.raises(ManifestError, match=r"seeds of added rows must fit int64.*got 18446744073709551615"):
        job.start()


def test_a_crash_before_the_rejected_rows_are_written_costs_a_comparison_only(job: Job, monkeypatch):
    job.write([*rows_of(0, 1), {"id": "x", "prompt": None}])
    monkeypatch.setattr(plan_writer.commit, "replace_file", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit):
        job.start()
    monkeypatch.undo()
    plan, changes = job.start()
    assert (changes.added, changes.rejected, plan.num_rows, plan.num_rejected) == (0, 1, 2, 1)


# Retries.


def test_a_retry_plans_exactly_the_failed_rows(job: Job):
    job.write(rows_of(*range(12)))
    plan, _ = job.start()
    shards = {shard.index: plan.rows(shard)["id"].to_pylist() for shard in plan.shards()}
    failed = {2: set(shards[2]), 0: {shards[0][1]}}
    retried = add_retry(job.folder, plan, failed)
    again = [row for shard in retried.shards() if shard.index > 2 for row in retried.rows(shard).to_pylist()]
    assert sorted(row["id"] for row in again) == sorted(failed[0] | failed[2])
    assert [row["shard"] for row in again] == [3] * len(again)
    originals = {row["id"]: row for row in all_rows(plan).to_pylist()}
    places = {"bucket", "batch", "shard", "slot"}
    for row in again:
        assert {k: v for k, v in row.items() if k not in places} == {
            k: v for k, v in originals[row["id"]].items() if k not in places
        }
    assert (retried.num_rows, retried.parts[-1].kind) == (12, "retry")
    assert {b.size for s in retried.shards() for b in s.batches} == {2}


def test_no_failed_rows_are_no_retry(job: Job):
    job.write(rows_of(*range(3)))
    plan, _ = job.start()
    assert add_retry(job.folder, plan, {}) is plan
    assert not job.folder.plan(1).exists()


def test_rows_can_be_added_after_a_retry(job: Job):
    job.write(rows_of(*range(6)))
    plan, _ = job.start()
    retried = add_retry(job.folder, plan, {0: {"id-1"}})
    assert job.start()[1].unchanged
    job.write(rows_of(*range(8)))
    plan, changes = job.start()
    assert (changes.added, plan.num_rows, [part.kind for part in plan.parts]) == (2, 8, ["rows", "retry", "rows"])
    assert plan.parts[1] == retried.parts[1]
    assert ids(plan)[-2:] == ["id-7", "id-6"]
    job.write(rows_of(0, 2, 4, 6))
    assert job.start()[1].deleted == 4


def test_a_retry_that_meets_added_rows_comes_after_them(job: Job, monkeypatch):
    job.write(rows_of(*range(6)))
    plan, _ = job.start()
    publish = plan_writer.commit.publish_file

    def lose_once(path, write):
        monkeypatch.setattr(plan_writer.commit, "publish_file", publish)
        job.write(rows_of(*range(7)))
        job.start()
        return publish(path, write)

    monkeypatch.setattr(plan_writer.commit, "publish_file", lose_once)
    retried = add_retry(job.folder, plan, {0: {"id-1"}})
    assert [(part.kind, part.num_rows) for part in retried.parts] == [("rows", 6), ("rows", 1), ("retry", 1)]


# Processes and temporary files.


def race(root: Path, barrier) -> None:
    """Start when the other process stands before the same publication of the plan."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "fluxbatch.commit" and arguments[0] == "fsync":
            barrier.wait(30)

    sys.addaudithook(hook)
    job = object.__new__(Job)
    job.manifest, job.folder = root / "manifest", RunFolder(root / "run")
    job.cfg = JobConfig(manifest=ManifestConfig(path=str(job.manifest)), plan=PlanConfig(batch_size=2, shard_size=5))
    plan, changes = job.start()
    assert (len(ids(plan)), changes.added) == (10, 10)


def test_two_processes_that_plan_at_once_end_with_one_plan(job: Job, tmp_path: Path):
    job.write([*rows_of(*range(10)), {"id": "x", "prompt": None}])
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=race, args=(tmp_path, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(job.files()) == ["plan.parquet", "rejected.parquet"]
    assert job.start()[1].unchanged


def test_a_loser_of_the_race_with_another_manifest_compares_with_the_winners_plan(job: Job, monkeypatch):
    job.write(rows_of(*range(4)))
    mine = open_manifest(job.cfg.manifest)
    publish = plan_writer.commit.publish_file

    def lose_once(path, write):
        monkeypatch.setattr(plan_writer.commit, "publish_file", publish)
        job.write(rows_of(*range(3)))
        job.start()
        job.write(rows_of(*range(4)))
        return publish(path, write)

    monkeypatch.setattr(plan_writer.commit, "publish_file", lose_once)
    plan, changes = prepare(job.folder, mine, RowRules(**RULES), job.cfg)
    assert (changes.added, plan.num_rows, len(plan.parts)) == (1, 4, 2)


def test_nothing_is_left_in_the_temporary_folder(job: Job, tmp_path: Path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    seen = []
    spooled = row_spool.RowSpool.add
    monkeypatch.setattr(row_spool.RowSpool, "add", lambda *a: (spooled(*a), seen.extend(scratch.rglob("*.arrow")))[0])
    job.write(rows_of(*range(5)))
    plan, _ = job.start()
    add_retry(job.folder, plan, {0: {"id-1"}})
    job.write([*rows_of(0), *rows_of(0)])
    with pytest.raises(ManifestError):
        job.start()
    assert seen
    assert list(scratch.iterdir()) == []


def test_a_row_group_of_the_plan_holds_whole_shards_and_there_are_never_too_many(job: Job, monkeypatch):
    monkeypatch.setattr(plan_writer, "GROUP_ROWS", (1, 65_536))
    monkeypatch.setattr(plan_writer, "MAX_GROUPS", 3)
    job.write(rows_of(*range(38)))  # 8 shards of 5 rows
    job.start()
    metadata = pq.read_metadata(job.folder.plan())
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [15, 15, 8]
