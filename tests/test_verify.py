"""verify names each file that does not fit, and finds nothing in a sound run, finished or interrupted."""

import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_shards import FakePlan, commit_batches, compact, finish, finished, output, png
from PIL import Image

from fluxbatch.config import JobConfig, ManifestConfig, PlanConfig
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output import shards, verify
from fluxbatch.output.ledger import Ledger, failed_rows
from fluxbatch.output.writers import stored_rows
from fluxbatch.plan import planner
from fluxbatch.records import RowCounts, RowRules, ShardCommit
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

KINDS = ("parquet", "webdataset", "folder")
IDS = ["a", "B", "c.c", "d", "e"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> FakePlan:
    fake = FakePlan(IDS, shard_size=2)
    monkeypatch.setattr(verify, "RunPlan", SimpleNamespace(open=lambda folder: fake))
    return fake


def done(folder: RunFolder, plan: FakePlan, kind: str = "parquet", failing: tuple[str, ...] = ()) -> Ledger:
    ledger = Ledger.read(folder)
    finish(folder, plan, ledger, cfg=output(kind), failing=failing)
    commit.replace_file(folder.success, b"")
    return ledger


def found(folder: RunFolder, *, decode: bool = True) -> list[tuple[str, str]]:
    return [(item.file, item.message) for item in verify.verify(folder, decode=decode)[1]]


def the_one(folder: RunFolder, *, decode: bool = True) -> tuple[str, str]:
    [item] = found(folder, decode=decode)
    return item


# Sound folders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decode", [True, False])
def test_a_finished_run_is_sound(folder: RunFolder, plan: FakePlan, kind: str, decode: bool) -> None:
    done(folder, plan, kind, failing=("B", "c.c", "d"))  # shard 1 has no image at all
    counts, discrepancies = verify.verify(folder, decode=decode)
    assert counts == RowCounts(5, written=2, failed=3, rejected=0, pending=0)
    assert discrepancies == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_is_sound_at_every_step(folder: RunFolder, plan: FakePlan, kind: str) -> None:
    ledger = Ledger()
    assert found(folder) == []
    commit_batches(folder, plan, 0)
    shards.commit_batch(folder, finished(plan, plan.shard(1).batches[0]))
    (folder.data).mkdir()
    (folder.data / ".tmp-shard-00000.parquet-123").write_bytes(b"half")
    assert found(folder) == []
    lines = compact(folder, plan, 0, cfg=output(kind))
    assert found(folder) == []  # published, no ledger line yet
    ledger.append(folder, 0, lines)
    assert found(folder) == []  # part files still there
    shards.remove_batches(folder, plan.shard(0))
    counts, discrepancies = verify.verify(folder, decode=True)
    assert discrepancies == []
    assert counts == RowCounts(5, written=2, failed=0, rejected=0, pending=3)


def test_a_torn_second_ledger_line_is_sound_while_the_parts_are_there(folder: RunFolder, plan: FakePlan) -> None:
    commit_batches(folder, plan, 0, failing=["a"])
    lines = compact(folder, plan, 0, cfg=output())
    Ledger().append(folder, 0, lines[:1])
    assert found(folder) == []


def test_a_retry_is_sound(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan, failing=("B", "d"))
    plan.add(["B", "d"], kind="retry")
    done(folder, plan, failing=("d",))
    plan.add(["d"], kind="retry")
    done(folder, plan)
    counts, discrepancies = verify.verify(folder, decode=True)
    assert discrepancies == []
    assert counts == RowCounts(5, written=5, failed=0, rejected=0, pending=0)


# Damaged files


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("damage", "words"), [("delete", "missing"), ("truncate", "bytes"), ("extend", "bytes"), ("flip", "sha256")]
)
def test_a_damaged_data_file_is_named(folder: RunFolder, plan: FakePlan, kind: str, damage: str, words: str) -> None:
    line = done(folder, plan, kind).commits[1][0]
    hurt(folder.root / line.file, damage)
    file, message = the_one(folder, decode=False)
    assert file == line.file
    assert words in message and "again" in message


@pytest.mark.parametrize("damage", ["delete", "truncate", "extend", "flip"])
def test_a_damaged_failed_file_is_named(folder: RunFolder, plan: FakePlan, damage: str) -> None:
    done(folder, plan, failing=("d",))
    hurt(folder.failed_shard(1), damage)
    assert the_one(folder)[0] == "failed/shard-00001.parquet"


@pytest.mark.parametrize("damage", ["delete", "truncate", "extend", "flip"])
@pytest.mark.parametrize("decode", [True, False])
def test_a_damaged_image_of_a_folder_is_named(folder: RunFolder, plan: FakePlan, damage: str, decode: bool) -> None:
    done(folder, plan, "folder")
    hurt(folder.data / "shard-00000/a.png", damage)
    file, message = the_one(folder, decode=decode)
    assert file == "data/shard-00000/metadata.jsonl"
    assert "a.png" in message


def hurt(path: Path, damage: str) -> None:
    """Damages a file and keeps its modification time: verify must not trust that."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    if damage == "delete":
        return path.unlink()
    if damage == "truncate":
        content = content[:-1]
    if damage == "extend":
        content += b"x"
    if damage == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    return None


def test_every_damaged_file_is_named(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan)
    for index in (0, 2):
        hurt(folder.shard(index, "parquet"), "flip")
    assert [file for file, _ in found(folder)] == ["data/shard-00000.parquet", "data/shard-00002.parquet"]


# Files and lines that do not belong


@pytest.mark.parametrize("name", ["data/shard-00009.parquet", "data/part-1.parquet.tmp", "data/notes", "failed/x.txt"])
def test_a_stray_file_is_named(folder: RunFolder, plan: FakePlan, name: str) -> None:
    done(folder, plan, failing=("a",))
    (folder.root / name).write_bytes(b"stray")
    assert the_one(folder) == (name, f"belongs to no shard of the plan; {verify.ADVICE['aside']}")


def test_a_second_file_of_a_shard_is_named(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan)
    commit_batches(folder, plan, 0)
    compact(folder, plan, 0, cfg=output("webdataset"))
    shards.remove_batches(folder, plan.shard(0))
    file, message = the_one(folder)
    assert file == "data/shard-000000.tar"
    assert "move it away" in message


def test_a_stray_image_in_a_folder_is_named(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan, "folder")
    (folder.data / "shard-00000/stray.png").write_bytes(png(1))
    assert the_one(folder)[0] == "data/shard-00000/stray.png"


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_ledger_line_is_named(folder: RunFolder, plan: FakePlan, kind: str) -> None:
    done(folder, plan, kind)
    lines = folder.ledger(0).read_bytes().splitlines(keepends=True)
    folder.ledger(0).write_bytes(lines[0] + lines[2])
    file, message = the_one(folder)
    assert (
        file
        == (folder.shard(1, kind) / ("metadata.jsonl" if kind == "folder" else "")).relative_to(folder.root).as_posix()
    )
    assert "without its ledger line" in message


def test_a_lost_ledger_line_of_failures_names_both_files(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan, failing=("a",))
    lines = folder.ledger(0).read_bytes().splitlines(keepends=True)
    folder.ledger(0).write_bytes(b"".join(lines[1:]))
    assert {file for file, _ in found(folder)} == {"data/shard-00000.parquet", "failed/shard-00000.parquet"}


def test_br35_leftover_temporaries_are_named_once_the_run_is_finished(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan)
    folder.success.unlink()
    (folder.data / ".tmp-shard-00000.parquet-123").write_bytes(b"half")
    assert found(folder) == []
    folder.success.touch()
    assert the_one(folder) == (
        "data/.tmp-shard-00000.parquet-123",
        f"is left over from a killed run; {verify.ADVICE['aside']}",
    )


def test_a_lost_plan_is_named_and_a_run_stopped_before_its_plan_is_sound(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "RunPlan", SimpleNamespace(open=lambda folder: None))
    assert found(folder) == []
    folder.data.mkdir(parents=True, exist_ok=True)
    (folder.data / "shard-00000.parquet").write_bytes(b"x")
    assert the_one(folder)[0] == "plan.parquet"


# Rows and images


def rewrite(folder: RunFolder, ledger: Ledger, shard: int, table: pa.Table, *, rows: int) -> None:
    """Puts another table in a shard's place, with a ledger line that fits it."""
    line = ledger.commits[shard][0]
    path = folder.root / line.file
    pq.write_table(table, path)
    stat = path.stat()
    ledger.append(folder, 0, [replace(line, rows=rows, bytes=stat.st_size, sha256=commit.sha256_file(path))])


def table_of(folder: RunFolder, line: ShardCommit) -> pa.Table:
    return pq.read_table(folder.root / line.file, partitioning=None)


@pytest.mark.parametrize("rows", [2, 1])
def test_a_lost_row_is_named(folder: RunFolder, plan: FakePlan, rows: int) -> None:
    ledger = done(folder, plan)
    rewrite(folder, ledger, 1, table_of(folder, ledger.commits[1][0]).slice(0, 1), rows=rows)
    file, message = the_one(folder)
    assert file == "data/shard-00001.parquet"
    assert ("'d'" if rows == 2 else "1 of the 2 rows") in message


def test_a_row_of_another_shard_is_named(folder: RunFolder, plan: FakePlan) -> None:
    ledger = done(folder, plan)
    rewrite(folder, ledger, 1, table_of(folder, ledger.commits[0][0]), rows=2)
    messages = [message for file, message in found(folder) if file == "data/shard-00001.parquet"]
    assert len(messages) == 2
    assert "lacks rows of the plan: 'c.c', 'd'" in messages[0]
    assert "not the plan's: 'B', 'a'" in messages[1]


def test_a_row_that_stands_twice_is_named(folder: RunFolder, plan: FakePlan) -> None:
    ledger = done(folder, plan)
    table = table_of(folder, ledger.commits[0][0])
    rewrite(folder, ledger, 0, pa.concat_tables([table, table.slice(0, 1)]), rows=2)
    assert "twice" in the_one(folder)[1]


def test_a_retry_of_a_row_that_was_written_is_named(folder: RunFolder, plan: FakePlan) -> None:
    done(folder, plan, failing=("a",))
    plan.add(["a", "d"], kind="retry")
    plan.add(["a"], kind="retry")
    done(folder, plan)
    assert [(fault.file, fault.fault) for fault in verify.verify(folder, decode=True)[1]] == [
        ("data/shard-00003.parquet", "holds rows that other shards have too: 'd'"),
        ("data/shard-00004.parquet", "holds rows that other shards have too: 'a'"),
    ]


@pytest.mark.parametrize(("image", "words"), [(png(1)[:-40], "does not decode"), (png(1, height=8), "8x24 where")])
def test_an_image_that_does_not_decode_to_its_size_is_named(
    folder: RunFolder, plan: FakePlan, image: bytes, words: str
) -> None:
    ledger = done(folder, plan)
    table = table_of(folder, ledger.commits[0][0])
    images = pa.array([table["image"][0].as_py(), {"bytes": image, "path": "B.png"}], table.schema.field("image").type)
    table = table.set_column(table.column_names.index("image"), table.schema.field("image"), images)
    rewrite(folder, ledger, 0, table, rows=2)
    file, message = the_one(folder)
    assert file == "data/shard-00000.parquet"
    assert "'B'" in message and words in message
    assert found(folder, decode=False) == []


def test_a_black_but_whole_image_is_sound(folder: RunFolder, plan: FakePlan) -> None:
    ledger = done(folder, plan)
    black = io.BytesIO()
    Image.new("RGB", (24, 16)).save(black, "png")
    table = table_of(folder, ledger.commits[2][0])
    images = pa.array([{"bytes": black.getvalue(), "path": "e.png"}], table.schema.field("image").type)
    rewrite(
        folder,
        ledger,
        2,
        table.set_column(table.column_names.index("image"), table.schema.field("image"), images),
        rows=1,
    )
    assert found(folder) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_the_real_plan_is_sound_through_failures_and_a_retry(tmp_path: Path, kind: str) -> None:
    folder = RunFolder(tmp_path / "run")
    table = {"id": IDS, "prompt": ["p"] * 5, "height": [16] * 5, "width": [24] * 5, "note": [None] * 4 + ["x"]}
    pq.write_table(pa.table(table), tmp_path / "m.parquet")
    cfg = JobConfig(manifest=ManifestConfig(path=str(tmp_path / "m.parquet")), plan=PlanConfig(2, shard_size=2))
    rules = RowRules(
        height=16, width=24, num_inference_steps=2, guidance_scale=3.5, seed=0, size_multiple=8, max_pixels=10**6,
        max_side=10**4, size_policy="reject", allow_blank_prompts=False, guidance="embedded", negative_prompts=True,
    )  # fmt: skip
    plan, _ = planner.prepare(folder, open_manifest(cfg.manifest), rules, cfg)
    ledger = done(folder, plan, kind, failing=("d",))  # type: ignore[arg-type]
    assert verify.verify(folder, decode=True) == (RowCounts(5, written=4, failed=1, rejected=0, pending=0), [])
    plan = planner.add_retry(folder, plan, failed_rows(folder, ledger, plan))
    assert verify.verify(folder, decode=True) == (RowCounts(5, written=4, failed=0, rejected=0, pending=1), [])
    done(folder, plan, kind)  # type: ignore[arg-type]
    assert verify.verify(folder, decode=True) == (RowCounts(5, written=5, failed=0, rejected=0, pending=0), [])
    seeds = plan.rows(plan.shard(0))["seed"].to_pylist()
    assert [row.image for row in stored_rows(ledger_path(folder, 0))] == [png(int(seed)) for seed in seeds]


def ledger_path(folder: RunFolder, shard: int) -> Path:
    return folder.root / Ledger.read(folder).commits[shard][-1].file
