"""Single images of a committed data file, found by id and read one at a time. Changes nothing, judges no content.

The three outputs differ in how one image is reached: a row group of Parquet, a stretch of a tar, a file of a folder.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.errors import FluxbatchError
from fluxbatch.output import writers
from fluxbatch.output.writers import StoredRow

COLUMNS = ["id", "height", "width", "truncated", "image"]
Reader = Callable[[], StoredRow]


def open_images(path: Path) -> Mapping[str, Reader]:
    """By id, what reads its row with its image. Raises FluxbatchError where the file cannot be read."""
    opened = {".parquet": _in_parquet, ".tar": _in_tar}.get(path.suffix, _in_folder)
    with writers.readable(path):
        return opened(path)


def _in_parquet(path: Path) -> dict[str, Reader]:
    file = pq.ParquetFile(path.open("rb"))

    @lru_cache(maxsize=1)  # ids are mostly asked for in the order of the file
    def group(number: int) -> pa.Table:
        return file.read_row_group(number, columns=COLUMNS)

    def read(number: int, at: int) -> StoredRow:
        with writers.readable(path):
            row = group(number).slice(at, 1).to_pylist()[0]
        image = row.pop("image")
        return StoredRow(**row, file=image["path"], image=image["bytes"])

    ids = [file.read_row_group(number, columns=["id"])["id"].to_pylist() for number in range(file.num_row_groups)]
    return {
        row_id: lambda number=number, at=at: read(number, at)  # type: ignore[misc]
        for number, group_ids in enumerate(ids)
        for at, row_id in enumerate(group_ids)
    }


def _in_tar(path: Path) -> dict[str, Reader]:
    def read(record: dict[str, Any], member: tarfile.TarInfo) -> StoredRow:
        with path.open("rb") as file:
            file.seek(member.offset_data)
            return _stored(record, member.name, file.read(member.size))

    with path.open("rb") as source, tarfile.open(fileobj=source, mode="r:") as tar:
        members = tar.getmembers()
        records = [(json.load(tar.extractfile(text)), image) for image, text in zip(*[iter(members)] * 2, strict=True)]  # type: ignore[arg-type]
    return {record["id"]: lambda record=record, image=image: read(record, image) for record, image in records}  # type: ignore[misc]


def _in_folder(metadata: Path) -> dict[str, Reader]:
    def read(record: dict[str, Any]) -> StoredRow:
        image = metadata.with_name(record["file_name"])
        content = image.read_bytes() if image.is_file() else None
        return _stored(record, record["file_name"], content, record["image_sha256"])

    with metadata.open("rb") as file:
        return {record["id"]: lambda record=record: read(record) for record in map(json.loads, file)}  # type: ignore[misc]


def _stored(record: dict[str, Any], file: str, image: bytes | None, sha256: str | None = None) -> StoredRow:
    return StoredRow(record["id"], record["height"], record["width"], file, image, sha256, record["truncated"])


def read_image(path: Path, row_id: str) -> StoredRow:
    """One row with its image; FluxbatchError where it is not in the file, or not what the file says of it."""
    found = open_images(path).get(row_id)
    if found is None:
        raise FluxbatchError(f"{path} has no row {row_id!r}; `verify` tells more")
    stored = found()
    if not stored.sound:
        raise FluxbatchError(f"{path.with_name(stored.file)} is missing or other than {path.name} says")
    return stored
