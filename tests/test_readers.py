"""Every output, opened by each library that people open such data with: all rows, their columns, their pixels."""

import importlib
import io
import json
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.json
import pyarrow.parquet as pq
import pytest
import webdataset
from datasets.exceptions import DataFilesNotFoundError
from fake_model import FakeModel, expected_pixels
from PIL import Image
from test_run import do, manifest, rows, settings

from fluxbatch.plan.planfile import RunPlan
from fluxbatch.storage.folder import RunFolder

Row = tuple[dict[str, Any], Image.Image]
Reader = Callable[[Path], Iterator[Row]]


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


# Parquet


def with_datasets(folder: Path) -> Iterator[Row]:
    for row in datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache")):
        image = row.get("image") or row.get("png") or row.get("webp")
        yield row.get("json", row), image


def streamed(folder: Path) -> Iterator[Row]:
    for row in datasets.load_dataset(str(folder), split="train", streaming=True):
        image = row.get("image") or row.get("png") or row.get("webp")
        yield row.get("json", row), image


def parquet_with_pyarrow(folder: Path) -> Iterator[Row]:
    for row in pyarrow.dataset.dataset(folder / "data", format="parquet").to_table().to_pylist():
        yield row, opened(row["image"]["bytes"])


def parquet_with_pandas(folder: Path) -> Iterator[Row]:
    for row in pd.read_parquet(folder / "data").to_dict("records"):
        yield row, opened(row["image"]["bytes"])


def parquet_with_polars(folder: Path) -> Iterator[Row]:
    for row in pl.scan_parquet(folder / "data" / "*.parquet").collect().iter_rows(named=True):
        yield row, opened(row["image"]["bytes"])


def parquet_with_duckdb(folder: Path) -> Iterator[Row]:
    found = duckdb.sql(f"SELECT * REPLACE (image.bytes AS image) FROM '{folder}/data/*.parquet'")
    for values in found.fetchall():
        row = dict(zip(found.columns, values, strict=True))
        yield row, opened(row["image"])


def ray_data() -> Any:
    """Ray Data on a small Ray of its own, which the fixture `no_ray_is_left` ends."""
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    if not ray.is_initialized():
        ray.init(
            num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip
    return importlib.import_module("ray.data")


@pytest.fixture(autouse=True, scope="module")
def no_ray_is_left() -> Iterator[None]:
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def parquet_with_ray(folder: Path) -> Iterator[Row]:
    for row in ray_data().read_parquet(str(folder / "data")).take_all():
        yield row, opened(row["image"]["bytes"])


# Tars


def tar_with_webdataset(folder: Path) -> Iterator[Row]:
    urls = [str(path) for path in sorted((folder / "data").glob("*.tar"))]
    for sample in webdataset.WebDataset(urls, shardshuffle=False).decode("pilrgb"):
        yield sample["json"], sample.get("png") or sample["webp"]


def tar_with_tarfile_and_pillow(folder: Path) -> Iterator[Row]:
    for path in sorted((folder / "data").glob("*.tar")):
        with tarfile.open(path) as tar:
            content = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name in (name for name in content if name.endswith(".json")):
            [image] = {other for other in content if other.startswith(name[: -len("json")])} - {name}
            yield json.loads(content[name]), opened(content[image])


def tar_with_ray(folder: Path) -> Iterator[Row]:
    for row in ray_data().read_webdataset(str(folder / "data"), decoder=None).take_all():
        yield json.loads(row["json"]), opened(row.get("png") or row["webp"])


# Folders


def beside(metadata: Path, row: dict[str, Any]) -> Row:
    return row, Image.open(metadata.with_name(row["file_name"]))


def folder_with(read: Callable[[Path], list[dict[str, Any]]]) -> Reader:
    def rows_of(folder: Path) -> Iterator[Row]:
        for path in sorted((folder / "data").glob("*/metadata.jsonl")):
            for row in read(path):
                yield beside(path, row)

    return rows_of


def lines_with_duckdb(path: Path) -> list[dict[str, Any]]:
    found = duckdb.sql(f"SELECT * FROM read_json('{path}', format='newline_delimited')")
    return [dict(zip(found.columns, values, strict=True)) for values in found.fetchall()]


READERS: dict[tuple[str, str], Reader] = {
    ("parquet", "datasets"): with_datasets,
    ("parquet", "datasets, streamed"): streamed,
    ("parquet", "pyarrow"): parquet_with_pyarrow,
    ("parquet", "pandas"): parquet_with_pandas,
    ("parquet", "polars"): parquet_with_polars,
    ("parquet", "duckdb"): parquet_with_duckdb,
    ("parquet", "ray"): parquet_with_ray,
    ("webdataset", "datasets"): with_datasets,
    ("webdataset", "datasets, streamed"): streamed,
    ("webdataset", "webdataset"): tar_with_webdataset,
    ("webdataset", "tar and Pillow"): tar_with_tarfile_and_pillow,
    ("webdataset", "ray"): tar_with_ray,
    ("folder", "datasets"): with_datasets,
    ("folder", "datasets, streamed"): streamed,
    ("folder", "json and Pillow"): folder_with(
        lambda path: [json.loads(line) for line in path.read_bytes().splitlines()]
    ),
    ("folder", "pyarrow"): folder_with(lambda path: pyarrow.json.read_json(path).to_pylist()),
    ("folder", "pandas"): folder_with(lambda path: pd.read_json(path, lines=True, dtype=False).to_dict("records")),
    ("folder", "polars"): folder_with(lambda path: pl.read_ndjson(path).to_dicts()),
    ("folder", "duckdb"): folder_with(lines_with_duckdb),
}
NAMES = [pytest.param(*key, id=" by ".join(key)) for key in READERS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, str], Path]:
    """Runs of some output, number of rows and image format, each made once."""
    made: dict[tuple[str, int, str], Path] = {}

    def run(kind: str, count: int, image_format: str) -> Path:
        if (kind, count, image_format) not in made:
            place = tmp_path_factory.mktemp(f"{kind}-{count}")
            content = [row | {"note": None if n % 2 else f"“{n}”\n,;"} for n, row in enumerate(rows(count))]
            manifest(place / "m.parquet", content)
            assert do(settings(place, f"output={kind}", f"output.image_format={image_format}"))[1] == 0
            made[kind, count, image_format] = place / "run"
        return made[kind, count, image_format]

    return run


def expected(folder: Path) -> dict[str, tuple[str, int, int, int, np.ndarray]]:
    """By id: prompt, seed, height, width and pixels, as the fake model's rule gives them."""
    plan = RunPlan.open(RunFolder(folder))
    assert plan
    batches = [plan.batch(batch) for shard in plan.shards() for batch in shard.batches]
    return {
        request.id: (
            request.prompt,
            request.seed,
            request.height,
            request.width,
            expected_pixels(request, batch.bucket),
        )
        for batch in batches
        for request in batch.requests
    }


@pytest.mark.parametrize(("kind", "reader"), NAMES)
@pytest.mark.parametrize(("count", "image_format"), [(25, "png"), (1, "webp")])
def test_every_row_is_read_once_with_its_columns_and_pixels(
    runs: Callable[[str, int, str], Path], kind: str, reader: str, count: int, image_format: str
) -> None:
    folder = runs(kind, count, image_format)
    wanted = expected(folder)
    found = list(READERS[kind, reader](folder))
    assert sorted(row["id"] for row, _ in found) == sorted(wanted)
    for row, image in found:
        prompt, seed, height, width, pixels = wanted[row["id"]]
        number = int(row["id"].split()[1].removesuffix("/é"))
        note = None if number % 2 else f"“{number}”\n,;"
        assert (row["prompt"], int(row["seed"]), row["height"], row["width"]) == (prompt, seed, height, width)
        assert row["price"] == number / 4 and not row["truncated"] and row["num_inference_steps"] == 2
        assert (None if pd.isna(row["note"]) else row["note"]) == note
        assert image.size == (width, height)
        if image_format == "png":
            assert np.array_equal(np.asarray(image.convert("RGB")), pixels)


@pytest.mark.parametrize(("kind", "reader"), NAMES)
def test_br29_ids_with_dots_are_as_many_rows_in_every_library(tmp_path: Path, kind: str, reader: str) -> None:
    ids = ["img.v2.001", "img.v2.002", "v1.2/0001", ".hidden"]
    manifest(tmp_path / "m.parquet", [row | {"id": row_id} for row, row_id in zip(rows(4), ids, strict=True)])
    do(settings(tmp_path, f"output={kind}"))
    assert sorted(row["id"] for row, _ in READERS[kind, reader](tmp_path / "run")) == sorted(ids)


@pytest.mark.parametrize("kind", ["parquet", "webdataset", "folder"])
@pytest.mark.parametrize("why", ["empty", "all failed"])
def test_a_run_without_images_is_told_as_such_and_never_read_as_something_else(
    tmp_path: Path, kind: str, why: str
) -> None:
    content = [row | {"seed": n} for n, row in enumerate(rows(3))]
    table = pa.Table.from_pylist(content)
    pq.write_table(table.slice(0, 0) if why == "empty" else table, tmp_path / "m.parquet")
    counts, _ = do(settings(tmp_path, f"output={kind}"), lambda: FakeModel(nan_pixels=[0, 1, 2]))
    assert counts.written == 0 and not (tmp_path / "run" / "data").exists()
    for options in ({}, {"streaming": True}):
        with pytest.raises(DataFilesNotFoundError, match=r"No .* data files found"):
            datasets.load_dataset(str(tmp_path / "run"), cache_dir=str(tmp_path / "cache"), **options)
    assert (tmp_path / "run" / "failed").exists() == (why == "all failed")


def test_failed_and_rejected_rows_are_read_by_every_library_of_tables(tmp_path: Path) -> None:
    content = [row | {"seed": n} for n, row in enumerate(rows(4))]
    content[3] |= {"prompt": ""}
    manifest(tmp_path / "m.parquet", content)
    do(settings(tmp_path), lambda: FakeModel(nan_pixels=[0, 1]))
    for file, ids in (("failed/*.parquet", {"row 0/é", "row 1/é"}), ("rejected.parquet", {"row 3/é"})):
        [path] = (tmp_path / "run").glob(file)
        assert set(pq.read_table(path)["id"].to_pylist()) == ids
        assert set(pd.read_parquet(path)["id"]) == ids
        assert set(pl.read_parquet(path)["id"]) == ids
        assert {row_id for (row_id,) in duckdb.sql(f"SELECT id FROM '{path}'").fetchall()} == ids
