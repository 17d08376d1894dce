"""Part files and data files: the same rows give the same bytes, and the first commit of a name wins."""

import datetime
import decimal
import io
import itertools
import json
import random
import tarfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from fake_shards import BUCKET, FakePlan, commit_batches, compact, finished, output, plan_table, png
from hypothesis import given
from hypothesis import strategies as st

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import shards, writers
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

KINDS = ("parquet", "webdataset", "folder")
ODD_IDS = [
    "img.v2.001",
    "img.v2.002",
    "v1.2/0001",
    ".hidden",
    "../../etc/x",
    "con",
    "a" * 300,
    "😀",
    "a b",
    "李明",
    "-rf",
]
CARD = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def load(folder: RunFolder, pattern: str) -> datasets.Dataset:
    """As a user loads it: the run folder and its card, nothing else."""
    folder.card.write_text(CARD.format(pattern))
    return datasets.load_dataset(str(folder.root), cache_dir=str(folder.root.parent / "cache"))["train"]


# Batches


def test_a_batch_is_committed_once(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"])
    done = finished(plan, plan.shard(0).batches[0], failing=["b"])
    assert shards.commit_batch(folder, done)
    before = folder.batch(0, 0).read_bytes()
    assert not shards.commit_batch(folder, finished(plan, plan.shard(0).batches[0]))
    assert folder.batch(0, 0).read_bytes() == before
    assert shards.committed_batches(folder, 0) == {0}


def test_a_part_of_other_rows_stops_the_commit(folder: RunFolder) -> None:
    other, plan = FakePlan(["x", "y"]), FakePlan(["a", "b"])
    shards.commit_batch(folder, finished(other, other.shard(0).batches[0]))
    with pytest.raises(FluxbatchError, match=r"batch-00000000\.arrow holds other rows .*'x' where 'a'"):
        shards.commit_batch(folder, finished(plan, plan.shard(0).batches[0]))


def test_br35_a_damaged_part_counts_as_never_committed_wherever_it_is_hit(
    folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    plan = FakePlan(["a", "b"])
    done = finished(plan, plan.shard(0).batches[0], failing=["b"])
    shards.commit_batch(folder, done)
    path = folder.batch(0, 0)
    whole = path.read_bytes()
    table = shards._read_part(path)
    pick = random.Random(0)
    damages = [whole[:0], whole[:-1], whole[: len(whole) // 2], bytes(len(whole)), b"{}"]
    damages += [flipped(whole, pick.randrange(len(whole))) for _ in range(400)]
    for damaged in damages:
        path.write_bytes(damaged)
        found = shards._read_part(path)
        assert found is None or found.equals(table)  # a flip in padding changes no value
    assert "is damaged" in caplog.text
    path.write_bytes(flipped(whole, whole.index(b"IDAT")))
    assert shards.committed_batches(folder, 0) == set()
    assert not path.exists()
    assert shards.commit_batch(folder, done)
    assert path.read_bytes() == whole


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]


def test_a_damaged_part_in_the_way_of_a_commit_is_replaced(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"])
    folder.open_shard(0).mkdir(parents=True)
    folder.batch(0, 0).write_bytes(b"half a fi")
    assert shards.commit_batch(folder, finished(plan, plan.shard(0).batches[0]))
    assert shards.committed_batches(folder, 0) == {0}


# Data files


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_with_its_failures_becomes_two_files_in_plan_order(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b", "c", "d"])
    commit_batches(folder, plan, 0, failing=["b"])
    failed, data = compact(folder, plan, 0, cfg=output(kind))
    assert (failed.file, failed.rows, failed.failed) == ("failed/shard-00000.parquet", 0, 1)
    assert (data.rows, data.failed) == (3, 0)
    assert (
        data.file
        == {
            "parquet": "data/shard-00000.parquet",
            "webdataset": "data/shard-000000.tar",
            "folder": "data/shard-00000/metadata.jsonl",
        }[kind]
    )
    for line in (failed, data):
        path = folder.root / line.file
        stat = path.stat()
        assert (line.bytes, line.mtime_ns, line.sha256) == (stat.st_size, stat.st_mtime_ns, commit.sha256_file(path))
    rows = list(writers.stored_rows(folder.root / data.file))
    assert [row.id for row in rows] == ["a", "c", "d"]
    assert [row.image for row in rows] == [png(0), png(2), png(3)]
    [reason] = pq.read_table(folder.failed_shard(0), partitioning=None).to_pylist()
    assert reason == {
        "id": "b", "stage": "decode", "reason": "non_finite", "message": "NaN in the pixels", "attempts": 1,
        "prompt": "prompt of b", "height": BUCKET.height, "width": BUCKET.width,
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_br38_a_shard_of_failures_alone_leaves_no_empty_data_file(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b"])
    commit_batches(folder, plan, 0, failing=["a", "b"])
    [failed] = compact(folder, plan, 0, cfg=output(kind))
    assert (failed.file, failed.rows, failed.failed) == ("failed/shard-00000.parquet", 0, 2)
    assert not folder.data.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_rows_give_the_same_bytes(tmp_path: Path, kind: str) -> None:
    plan = FakePlan(["a", "b", "c", "D.d", "e"], shard_size=5)
    contents = []
    for name in ("one", "two"):
        folder = RunFolder(tmp_path / name)
        commit_batches(folder, plan, 0, failing=["c"])
        compact(folder, plan, 0, cfg=output(kind))
        contents.append({p.relative_to(folder.root): p.read_bytes() for p in folder.data.rglob("*") if p.is_file()})
    assert contents[0] == contents[1]


@pytest.mark.parametrize("kind", KINDS)
def test_br38_a_finished_shard_is_read_back_and_never_written_again(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b", "c"])
    commit_batches(folder, plan, 0, failing=["b"])
    first = compact(folder, plan, 0, cfg=output(kind))
    assert compact(folder, plan, 0, cfg=output(kind)) == first  # mtime_ns too
    assert not list(folder.root.rglob(".tmp-*"))


@pytest.mark.parametrize("kind", KINDS)
def test_another_attempts_bytes_win_when_they_stand_first(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b"])
    theirs, ours = output(kind, image_format="png"), output(kind, image_format="webp")
    commit_batches(folder, plan, 0)
    first = compact(folder, plan, 0, cfg=theirs)
    assert compact(folder, plan, 0, cfg=ours) == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_file_in_the_way_is_named(folder: RunFolder, kind: str) -> None:
    other, plan = FakePlan(["x", "y"]), FakePlan(["a", "b"])
    commit_batches(folder, other, 0)
    [line] = compact(folder, other, 0, cfg=output(kind))
    shards.remove_batches(folder, other.shard(0))
    commit_batches(folder, plan, 0)
    with pytest.raises(FluxbatchError, match=rf"{line.file} holds other rows .*move it away"):
        compact(folder, plan, 0, cfg=output(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_br35_a_cut_file_in_the_way_is_named(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b"])
    commit_batches(folder, plan, 0)
    [line] = compact(folder, plan, 0, cfg=output(kind))
    path = folder.root / line.file
    path.write_bytes(path.read_bytes()[: line.bytes // 4])
    with pytest.raises(FluxbatchError, match=line.file):
        compact(folder, plan, 0, cfg=output(kind))


def test_an_image_lost_from_a_folder_in_the_way_is_named(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"])
    commit_batches(folder, plan, 0)
    compact(folder, plan, 0, cfg=output("folder"))
    (folder.data / "shard-00000/b.png").write_bytes(png(7))
    with pytest.raises(FluxbatchError, match=r"shard-00000/b\.png"):
        compact(folder, plan, 0, cfg=output("folder"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_stands_as_failed_stays_failed_so_a_lost_data_file_comes_back_byte_for_byte(
    folder: RunFolder, kind: str
) -> None:
    plan = FakePlan(["a", "b", "c"])
    commit_batches(folder, plan, 0, failing=["b"])
    before = compact(folder, plan, 0, cfg=output(kind))
    shards.remove_batches(folder, plan.shard(0))
    (folder.root / before[1].file).unlink()
    shards.remove_shard_file(folder, before[1])
    commit_batches(folder, plan, 0)  # this time b does not fail
    after = compact(folder, plan, 0, cfg=output(kind))
    assert [(line.file, line.sha256) for line in after] == [(line.file, line.sha256) for line in before]


def test_a_row_that_fails_anew_beside_a_committed_failure_file_is_named(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b", "c"])
    commit_batches(folder, plan, 0, failing=["b"])
    compact(folder, plan, 0, cfg=output())
    shards.remove_batches(folder, plan.shard(0))
    commit_batches(folder, plan, 0, failing=["a", "b"])
    with pytest.raises(FluxbatchError, match=r"failed/shard-00000\.parquet holds other rows"):
        compact(folder, plan, 0, cfg=output())


def test_a_lost_part_is_named(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b", "c"])
    commit_batches(folder, plan, 0)
    folder.batch(1, 0).unlink()
    with pytest.raises(FluxbatchError, match=r"batch-00000001\.arrow is gone"):
        compact(folder, plan, 0, cfg=output())


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_copy_whose_parts_were_cleared_by_the_winner_takes_the_winners_shard(
    folder: RunFolder, kind: str
) -> None:
    plan = FakePlan(["a", "b", "c"])
    commit_batches(folder, plan, 0, failing=["a"])
    winner = compact(folder, plan, 0, cfg=output(kind))
    shards.remove_batches(folder, plan.shard(0))
    assert compact(folder, plan, 0, cfg=output(kind)) == winner


# Taking over what stands there


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_shard_without_ledger_line_is_adopted(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(["a", "b", "c"])
    rows = plan.rows(plan.shard(0))
    assert shards.adopt(folder, plan.shard(0), rows, output=output(kind)) == []
    commit_batches(folder, plan, 0, failing=["c"])
    lines = compact(folder, plan, 0, cfg=output(kind))
    assert shards.adopt(folder, plan.shard(0), rows, output=output(kind)) == lines
    (folder.root / lines[1].file).unlink()  # the failures alone are not the shard
    assert shards.adopt(folder, plan.shard(0), rows, output=output(kind)) == []


def test_foreign_rows_are_not_adopted(folder: RunFolder) -> None:
    other, plan = FakePlan(["x", "b"]), FakePlan(["a", "b"])
    commit_batches(folder, other, 0)
    compact(folder, other, 0, cfg=output())
    with pytest.raises(FluxbatchError, match=r"shard-00000\.parquet holds other rows"):
        shards.adopt(folder, plan.shard(0), plan.rows(plan.shard(0)), output=output())


def test_a_shard_made_again_by_another_rank_is_not_removed(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"])
    commit_batches(folder, plan, 0)
    [line] = compact(folder, plan, 0, cfg=output())
    shards.remove_shard_file(folder, line)
    assert folder.shard(0, "parquet").exists()


# Columns


def extras(size: int) -> pa.Array:
    """Columns of every kind that a manifest may carry; the last rows are null."""
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 600_000, tzinfo=datetime.UTC)
    values = {
        "label": pa.array(["x"] * size),
        "score": pa.array([float("nan")] * size, pa.float32()),
        "day": pa.array([moment.date()] * size),
        "at": pa.array([moment] * size, pa.timestamp("us", tz="UTC")),
        "price": pa.array([decimal.Decimal("1.50")] * size, pa.decimal128(9, 2)),
        "raw": pa.array([b"\xff\x00"] * size),
        "tags": pa.array([["a", None]] * size),
        "nested": pa.array([{"k": 1.0, "when": moment.date()}] * size),
        "took": pa.array([datetime.timedelta(seconds=1.5)] * size),
        "nothing": pa.nulls(size, pa.string()),
        "a.b": pa.array(range(size), pa.int16()),
    }
    return pa.StructArray.from_arrays(
        list(values.values()), names=list(values), mask=pa.array([False] * (size - 1) + [True])
    )


def test_parquet_holds_every_column_uncompressed_images_and_the_features_of_datasets(folder: RunFolder) -> None:
    plan = FakePlan(["a", "B", "c"], extra=extras(3))
    commit_batches(folder, plan, 0)
    compact(folder, plan, 0, cfg=output())
    file = pq.ParquetFile(folder.shard(0, "parquet"))
    assert file.schema_arrow.names == [
        *writers.SETTINGS[:5], "seed", "num_inference_steps", "guidance_scale", "truncated", "image",
        *extras(1).type.names,
    ]  # fmt: skip
    assert all(field.nullable for field in file.schema_arrow)
    group = file.metadata.row_group(0)
    columns = {column["path_in_schema"]: column for column in group.to_dict()["columns"]}
    assert columns["prompt"]["compression"] == "ZSTD"
    assert columns["image.bytes"]["compression"] == columns["height"]["compression"] == "UNCOMPRESSED"
    assert "RLE_DICTIONARY" not in columns["image.bytes"]["encodings"]
    assert [row["path"] for row in file.read(columns=["image"])["image"].to_pylist()] == [
        "a.png",
        f"{writers.safe_key('B')}.png",
        "c.png",
    ]
    rows = load(folder, "data/*")
    assert rows.features["image"] == datasets.Image()
    assert rows.features["tags"] == datasets.List(datasets.Value("string"))
    assert rows[0]["image"].size == (BUCKET.width, BUCKET.height)
    assert rows[0]["image"].getpixel((0, 0)) == (0, 0, 99)
    assert (rows[0]["id"], rows[0]["seed"], rows[1]["truncated"]) == ("a", 0, True)
    assert (rows[0]["label"], rows[2]["label"], rows[0]["price"]) == ("x", None, decimal.Decimal("1.50"))


def test_one_schema_for_the_job_even_where_a_column_is_all_null(folder: RunFolder) -> None:
    extra = pa.array([{"note": None}, {"note": None}, {"note": "x"}], pa.struct([("note", pa.string())]))
    plan = FakePlan(["a", "b", "c"], shard_size=2, extra=extra)
    for shard in (0, 1):
        commit_batches(folder, plan, shard)
        compact(folder, plan, shard, cfg=output())
    first, second = (pq.read_schema(folder.shard(i, "parquet")) for i in (0, 1))
    assert first.equals(second, check_metadata=True)
    assert load(folder, "data/*")["note"][:] == [None, None, "x"]


def test_a_floored_size_keeps_what_was_requested(folder: RunFolder) -> None:
    requested = {
        "requested_height": pa.array([17, None], pa.int32()),
        "requested_width": pa.array([25, None], pa.int32()),
    }
    schema = writers.data_schema(
        pa.table(dict(zip((t := plan_table(["a", "b"])).column_names, t.columns, strict=True)) | requested).schema
    )
    assert schema.names[8:12] == ["truncated", "requested_height", "requested_width", "image"]


@pytest.mark.parametrize("seed_type", [pa.int64(), pa.uint64(), pa.decimal128(20, 0)])
def test_seeds_keep_the_type_of_the_plan_and_their_value(folder: RunFolder, seed_type: pa.DataType) -> None:
    plan = FakePlan(["a", "b"])
    big = 2**63 - 1 if seed_type == pa.int64() else 2**64 - 1
    seeds = pa.array([decimal.Decimal(big), decimal.Decimal(1)], pa.decimal128(20, 0)).cast(seed_type)
    rows = plan.rows(plan.shard(0)).set_column(7, "seed", seeds)
    commit_batches(folder, plan, 0)
    for kind in KINDS:
        shards.compact(folder, plan.shard(0), rows, output=output(kind))
    assert pq.read_table(folder.shard(0, "parquet"))["seed"].to_pylist()[0] == big
    expected = big if seed_type == pa.int64() else str(big)  # readers of JSON would round what is beyond int64
    with tarfile.open(folder.shard(0, "webdataset")) as tar:
        assert json.load(tar.extractfile("a.json"))["seed"] == expected
    assert load(folder, "data/shard-00000/**")["seed"][0] == expected


def test_br31_row_groups_are_cut_by_the_bytes_of_their_images(folder: RunFolder) -> None:
    pick = random.Random(1)
    sizes = [600_000, 600_000, 100_000, 2_000_000, 300_000, 300_000]
    table = pa.table({name: plan_table([str(i) for i in range(6)])[name] for name in writers.SETTINGS})
    table = table.append_column("truncated", pa.array([False] * 6))
    table = table.append_column("image", pa.array([pick.randbytes(size) for size in sizes], pa.large_binary()))
    schema = writers.data_schema(plan_table(["x"]).schema)
    files = [io.BytesIO(), io.BytesIO()]
    for file, cuts in zip(files, ([0, 6], [0, 1, 4, 4, 6]), strict=True):  # however the batches lie
        parts = [table.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
        writers.write_parquet(file, parts, schema=schema, image_format="png", row_group_mib=1)
    assert files[0].getvalue() == files[1].getvalue()
    file = pq.ParquetFile(io.BytesIO(files[0].getvalue()))
    groups = [file.read_row_group(i)["image"].to_pylist() for i in range(file.num_row_groups)]
    assert [[len(image["bytes"]) for image in group] for group in groups] == [
        sizes[:1],
        sizes[1:3],
        sizes[3:4],
        sizes[4:],
    ]


def test_a_tar_reads_the_same_in_webdataset_and_datasets(folder: RunFolder) -> None:
    plan = FakePlan(["a", "b"], extra=extras(2))
    commit_batches(folder, plan, 0)
    compact(folder, plan, 0, cfg=output("webdataset"))
    path = folder.shard(0, "webdataset")
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == ["a.png", "a.json", "b.png", "b.json"]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode("pil"))
    assert samples[0]["json"] == {
        "id": "a", "prompt": "prompt of a", "negative_prompt": None, "height": 16, "width": 24, "seed": 0,
        "num_inference_steps": 2, "guidance_scale": 3.5, "truncated": False,
        "label": "x", "score": None, "day": "2026-01-02", "at": "2026-01-02T03:04:05.600000+00:00", "price": "1.50",
        "raw": "/wA=", "tags": ["a", None], "nested": {"k": 1.0, "when": "2026-01-02"}, "took": 1.5,
        "nothing": None, "a.b": 0,
    }  # fmt: skip
    assert samples[1]["json"]["label"] is None
    assert samples[0]["png"].size == (BUCKET.width, BUCKET.height)
    rows = load(folder, "data/*.tar")
    assert [row["json"]["id"] for row in rows] == ["a", "b"]
    assert rows[0]["png"].size == (BUCKET.width, BUCKET.height)


def test_a_folder_opens_as_imagefolder(folder: RunFolder) -> None:
    plan = FakePlan(["a", "B.b", "c"], shard_size=2)
    for shard in (0, 1):
        commit_batches(folder, plan, shard)
        compact(folder, plan, shard, cfg=output("folder"))
    rows = load(folder, "data/**")
    assert {(row["id"], row["image"].getpixel((0, 0))[0]) for row in rows} == {("a", 0), ("B.b", 1), ("c", 2)}
    assert set(rows.column_names) == {"image", *writers.SETTINGS, "truncated", "image_bytes", "image_sha256"}


# Keys


@pytest.mark.parametrize("kind", ["webdataset", "folder"])
def test_br29_odd_ids_are_as_many_samples_and_stay_unchanged_in_the_record(folder: RunFolder, kind: str) -> None:
    plan = FakePlan(ODD_IDS, shard_size=100)
    commit_batches(folder, plan, 0)
    [line] = compact(folder, plan, 0, cfg=output(kind))
    assert line.rows == len(ODD_IDS)
    rows = load(folder, "data/*.tar" if kind == "webdataset" else "data/**")
    assert sorted(row["json"]["id"] if kind == "webdataset" else row["id"] for row in rows) == sorted(ODD_IDS)
    if kind == "webdataset":
        samples = list(webdataset.WebDataset(str(folder.shard(0, kind)), shardshuffle=False).decode())
        assert [sample["json"]["id"] for sample in samples] == ODD_IDS
    assert {path.name for path in folder.root.parent.iterdir()} <= {"run", "cache"}


def test_keys_are_unique_where_ids_differ_by_case_or_look_like_keys() -> None:
    ids = [*ODD_IDS, "cat", "Cat", "CAT", "cat.", ".cat", "ca/t", "con", "CON", "nul", "com1"]
    ids += [writers.safe_key(row_id) for row_id in ids]
    keys = {writers.safe_key(row_id).lower() for row_id in ids}
    assert len(keys) == len(set(ids))
    assert writers.safe_key("con") != "con"
    assert writers.safe_key("row-000000042") == "row-000000042"
    assert writers.safe_key("550e8400-e29b-41d4-a716-446655440000") == "550e8400-e29b-41d4-a716-446655440000"


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_key_is_a_safe_file_name(row_id: str) -> None:
    key = writers.safe_key(row_id)
    assert 0 < len(key) <= 100
    assert key.isascii() and key.replace("-", "").replace("_", "").isalnum() and key[0].isalnum()
    assert key == row_id or key != writers.safe_key(key)


def test_json_values_have_strict_forms() -> None:
    assert writers.json_value({"a": [float("inf"), datetime.time(1, 2)], "m": [("k", b"x")], "n": 2**64 - 1}) == {
        "a": [None, "01:02:00"],
        "m": [["k", "eA=="]],
        "n": 2**64 - 1,
    }
