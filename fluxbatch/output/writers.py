"""One writer per output format, and its reader. Knows nothing of plans, batches, commits or the ledger.

A row comes in as one row of a table with the columns of `data_schema`, its image as the bytes of the image file.
Nothing here reads a clock or a setting: the same rows give the same bytes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fluxbatch.errors import FluxbatchError

EXTENSION = {"png": "png", "jpeg": "jpg", "webp": "webp"}
METADATA = "metadata.jsonl"
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# datasets takes the features of the other columns from the Arrow schema.
HUGGINGFACE = {b"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}}}}).encode()}
SETTINGS = ("id", "prompt", "negative_prompt", "height", "width", "seed", "num_inference_steps", "guidance_scale")
REQUESTED = ("requested_height", "requested_width")

PAGE_ROWS = 16  # rows after which a Parquet page of 1 MiB or more is closed; one page a row group costs its size again

PLAIN_KEY = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
LIKE_A_MADE_KEY = re.compile(r".*-[0-9a-f]{16}")
DEVICE_NAME = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]")  # no file may be called so on Windows


def safe_key(row_id: str) -> str:
    """The file name of a row, without its extension; no two ids share one, on file systems that ignore case too.

    An id of lower-case letters, digits, `_` and `-` (at most 100, a letter or digit first) is its own key. Any other
    (capitals, dots, slashes, other scripts, `con`) becomes what of it is safe, `-` and 16 hex digits of its SHA-256.
    The rule looks at this id alone, so a row keeps its key whatever its neighbours are.
    """
    if PLAIN_KEY.fullmatch(row_id) and not LIKE_A_MADE_KEY.fullmatch(row_id) and not DEVICE_NAME.fullmatch(row_id):
        return row_id
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", row_id)[:40].strip("-_") or "id"
    return f"{slug}-{hashlib.sha256(row_id.encode()).hexdigest()[:16]}"


def data_schema(plan: pa.Schema) -> pa.Schema:
    """The columns of a written row. From the plan's schema, so that every shard of a job has the same ones."""
    fields = [plan.field(name) for name in SETTINGS]
    fields += [pa.field("truncated", pa.bool_())]
    fields += [plan.field(name) for name in REQUESTED if name in plan.names]
    fields += [pa.field("image", IMAGE_TYPE)]
    fields += list(plan.field("extra").type) if "extra" in plan.names else []
    return pa.schema([pa.field(field.name, field.type) for field in fields], metadata=HUGGINGFACE)


def write_parquet(
    file: BinaryIO, tables: Iterable[pa.Table], *, schema: pa.Schema, image_format: str, row_group_mib: int
) -> None:
    """Row groups of at most `row_group_mib` of images (one image at least); only text is compressed."""
    others = [name for name in schema.names if name != "image"]
    text = {field.name: "zstd" for field in schema if pa.types.is_string(field.type)}
    options = {"compression": text, "use_dictionary": False, "write_statistics": others, "write_batch_size": PAGE_ROWS}
    with pq.ParquetWriter(file, schema, **options) as writer:
        for parts in _row_groups(tables, max_bytes=row_group_mib * 2**20):
            group = _join(parts, schema, image_format)
            writer.write_table(group, row_group_size=group.num_rows)


def _row_groups(tables: Iterable[pa.Table], *, max_bytes: int) -> Iterator[list[pa.Table]]:
    """The parts of each row group. Whoever takes one empties it: else its images are in memory once more."""
    parts: list[pa.Table] = []
    held_bytes = 0
    for table in tables:
        start = 0
        for row, size in enumerate(pc.binary_length(table["image"]).to_pylist()):
            if held_bytes and held_bytes + size > max_bytes:
                parts.append(table.slice(start, row - start))
                yield parts
                held_bytes, start = 0, row
            held_bytes += size
        parts.append(table.slice(start))
    if held_bytes:
        yield parts


def _join(parts: list[pa.Table], schema: pa.Schema, image_format: str) -> pa.Table:
    group = pa.concat_tables(parts)
    parts.clear()
    paths = pa.array([_image_name(row_id, image_format) for row_id in group["id"].to_pylist()], pa.string())
    content = group["image"].combine_chunks().cast(pa.binary())
    image = pa.StructArray.from_arrays([content, paths], fields=list(IMAGE_TYPE))
    return group.set_column(group.column_names.index("image"), "image", image).cast(schema)


def write_tar(file: BinaryIO, tables: Iterable[pa.Table], *, image_format: str) -> None:
    """For each row `<key>.<image extension>`, then `<key>.json` with all its columns but the image."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for row, image in _rows(tables):
            _add(tar, _image_name(row["id"], image_format), image)
            _add(tar, f"{safe_key(row['id'])}.json", _to_json(row))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its defaults are fixed: no time, no owner, mode 0644
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_folder(path: Path, tables: Iterable[pa.Table], *, image_format: str) -> bytes:
    """An image file for each row, then `metadata.jsonl`, whose content is returned.

    Its lines hold file_name, all columns but the image, and the image's size and SHA-256, so that the checksum of
    `metadata.jsonl` answers for the whole folder.
    """
    lines = []
    for row, image in _rows(tables):
        name = _image_name(row["id"], image_format)
        (path / name).write_bytes(image)
        check = {"image_bytes": len(image), "image_sha256": hashlib.sha256(image).hexdigest()}
        lines.append(_to_json({"file_name": name, **row, **check}) + b"\n")
    content = b"".join(lines)
    (path / METADATA).write_bytes(content)
    return content


def _image_name(row_id: str, image_format: str) -> str:
    return f"{safe_key(row_id)}.{EXTENSION[image_format]}"


def _rows(tables: Iterable[pa.Table]) -> Iterator[tuple[dict[str, Any], bytes]]:
    for table in tables:
        columns = table.drop_columns("image")
        columns = columns.cast(_json_schema(columns.schema))
        rows = zip(*map(_python_values, columns.columns), strict=True)
        for row, image in zip(rows, table["image"], strict=True):
            yield dict(zip(columns.column_names, row, strict=True)), image.as_py()


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()
    except (OverflowError, ValueError, KeyError):  # a date beyond Python's calendar, a zone it does not know
        naive = column.cast(pa.timestamp(column.type.unit)) if pa.types.is_timestamp(column.type) else column
        return naive.cast(pa.string()).to_pylist()


def _json_schema(schema: pa.Schema) -> pa.Schema:
    """uint64 as text: readers of JSON take integers for int64, or round what is larger to a float."""
    return pa.schema([field.with_type(pa.string()) if field.type == pa.uint64() else field for field in schema])


def _to_json(row: dict[str, Any]) -> bytes:
    return json.dumps(json_value(row), ensure_ascii=False, allow_nan=False).encode()


def json_value(value: Any) -> Any:
    """A column's value in strict JSON.

    NaN and infinities are null; dates and times ISO 8601; durations seconds; decimals (and columns of uint64) their
    digits in a string; binary Base64.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
    return str(value)


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row read back. `image` is None where its file is gone; `sha256` is what was recorded, if anything."""

    id: str
    height: int
    width: int
    file: str  # the image's own file in a folder, its name in a tar or in Parquet
    image: bytes | None
    sha256: str | None = None
    truncated: bool = False

    @property
    def sound(self) -> bool:
        """Whether the image is there, with its recorded checksum."""
        if self.image is None:
            return False
        return self.sha256 is None or hashlib.sha256(self.image).hexdigest() == self.sha256


@dataclass(frozen=True, slots=True)
class ImageFile:
    """What `metadata.jsonl` says of one image beside it."""

    path: Path
    bytes: int
    sha256: str

    def size(self) -> int:
        """The size it has now; -1 where it is gone."""
        return self.path.stat().st_size if self.path.is_file() else -1


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A whole Parquet file of a run folder, or columns of it."""
    with path.open("rb") as source:
        return pq.read_table(source, columns=columns)


def stored_ids(path: Path) -> list[str]:
    """The ids in a data or failed file, in their order. Raises FluxbatchError where it cannot be read whole."""
    with readable(path):
        if path.suffix == ".parquet":
            return read_parquet(path, ["id"])["id"].to_pylist()
        if path.suffix == ".tar":
            return [record["id"] for record, _, _ in _tar_rows(path)]
    return [row.id for row in stored_rows(path) if row.sound or _raise_lost_image(path, row)]


def _raise_lost_image(path: Path, row: StoredRow) -> bool:
    raise FluxbatchError(f"{path.with_name(row.file)} is missing or other than {path.name} says")


def stored_rows(path: Path) -> Iterator[StoredRow]:
    """The rows of a data file with their images, one row group, or one image, in memory at a time."""
    with readable(path):
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".tar":
            for record, name, image in _tar_rows(path):
                yield StoredRow(
                    record["id"], record["height"], record["width"], name, image, truncated=record["truncated"]
                )
        else:
            for record, beside in zip(_metadata(path), image_files(path), strict=True):
                name, content = beside.path.name, beside.path.read_bytes() if beside.size() >= 0 else None
                yield StoredRow(
                    record["id"], record["height"], record["width"], name, content, beside.sha256, record["truncated"]
                )


def image_files(metadata: Path) -> Iterator[ImageFile]:
    """The images of a folder shard, as its `metadata.jsonl` names them."""
    with readable(metadata):
        for record in _metadata(metadata):
            yield ImageFile(metadata.with_name(record["file_name"]), record["image_bytes"], record["image_sha256"])


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever makes a data file unreadable is a FluxbatchError with its name."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, tarfile.TarError, pa.ArrowException) as error:
        raise FluxbatchError(f"{path} cannot be read ({error or type(error).__name__})") from error


def _parquet_rows(path: Path) -> Iterator[StoredRow]:
    with path.open("rb") as source, pq.ParquetFile(source) as file:
        for group in range(file.num_row_groups):
            names = ["id", "height", "width", "truncated", "image"]
            for row in zip(*file.read_row_group(group, columns=names).select(names), strict=True):
                row_id, height, width, truncated, stored = (value.as_py() for value in row)
                yield StoredRow(row_id, height, width, stored["path"], stored["bytes"], truncated=truncated)


def _tar_rows(path: Path) -> Iterator[tuple[dict[str, Any], str, bytes]]:
    with path.open("rb") as source, tarfile.open(fileobj=source, mode="r:") as tar:
        members = iter(tar)
        for image, record in zip(members, members, strict=True):
            yield json.loads(_content(tar, record)), image.name, _content(tar, image)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is no file")
    return file.read()


def _metadata(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        yield from map(json.loads, file)
