"""Batches become part files, a full shard's part files become its data file. Knows no ledger and no manifest.

The first commit of a name wins and never changes. Part files are shared by all attempts at a shard, so attempts
agree; where they do not, what stands in the folder is the truth as long as it is this shard's rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fluxbatch.config import OutputConfig
from fluxbatch.errors import FluxbatchError, symlink_refused
from fluxbatch.output import writers
from fluxbatch.output.writers import StoredRow
from fluxbatch.records import Batch, BatchPlan, CompressedBatch, RowFailure, RowResult, ShardCommit, ShardPlan
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

PART_SCHEMA = pa.schema(
    [
        ("slot", pa.int32()),
        ("id", pa.string()),
        ("image", pa.large_binary()),  # null: the row failed
        ("truncated", pa.bool_()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("attempts", pa.int32()),
    ]
)
FAILURE = ("stage", "reason", "message", "attempts")
FAILED_COLUMNS = ["id", *FAILURE, "prompt", "height", "width"]
DIGEST_KEY = b"sha256"
SUPERSEDED = RowFailure("plan", "superseded", "a later plan part makes this row again", attempts=0)


def commit_batch(folder: RunFolder, done: CompressedBatch) -> bool:
    """Make a finished batch durable as one part file. False when it stood there already, with the same rows."""
    table = _part_table(done.results)
    path = folder.batch(done.batch.plan.index, done.batch.plan.shard)
    while not commit.publish_file(path, lambda file: _write_part(file, table)):
        standing = _read_part(path)
        if standing is not None:
            _require(standing["id"].to_pylist(), table["id"].to_pylist(), path)
            return False
    return True


def open_shards(folder: RunFolder) -> list[int]:
    """The shards that have a folder of batches, of all ranks."""
    names = [path.name for path in folder.batches.glob("shard-*")] if folder.batches.is_dir() else []
    return sorted(int(name.removeprefix("shard-")) for name in names if name.removeprefix("shard-").isdigit())


def drawn_batches(folder: RunFolder, shard: int) -> list[int]:
    """The batches of an open shard that have a part file, sound or not."""
    names = [path.stem.removeprefix("batch-") for path in folder.open_shard(shard).glob("batch-*.arrow")]
    return sorted(int(name) for name in names if name.isdigit())


def committed_batches(folder: RunFolder, shard: int) -> set[int]:
    """The batches of a shard that have a sound part file. One that is cut or altered is deleted and does not count."""
    drawn = drawn_batches(folder, shard)
    for path in (folder.batch(batch, shard) for batch in drawn):
        if isinstance(path, Path) and path.is_symlink():
            raise symlink_refused(path)
    return {batch for batch in drawn if _read_part(folder.batch(batch, shard)) is not None}


def _part_table(results: Sequence[RowResult]) -> pa.Table:
    rows = [_part_row(slot, result) for slot, result in enumerate(results)]
    table = pa.Table.from_pylist(rows, schema=PART_SCHEMA)
    return table.replace_schema_metadata({DIGEST_KEY: _digest(table)})


def _part_row(slot: int, result: RowResult) -> dict[str, Any]:
    row = {"slot": slot, "id": result.id, "image": result.image, "truncated": result.truncated}
    return row | {name: getattr(result.failure, name) for name in FAILURE if result.failure}


def _write_part(file: BinaryIO, table: pa.Table) -> None:
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _digest(table: pa.Table) -> str:
    """SHA-256 over every value: each row's small fields as one JSON line, then its image."""
    digest = hashlib.sha256()
    for row, image in zip(table.drop_columns("image").to_pylist(), table["image"], strict=True):
        content = image.as_buffer()
        size = None if content is None else content.size
        digest.update(json.dumps([*row.values(), size]).encode() + b"\n")
        digest.update(content or b"")
    return digest.hexdigest()


def _read_part(path: Path) -> pa.Table | None:
    """A part file, checked; None where there is no sound one."""
    try:
        table = _load_part(path)
        table.validate(full=True)  # an altered offset must not be followed
        digest = (table.schema.metadata or {}).get(DIGEST_KEY, b"").decode()
        if table.schema.equals(PART_SCHEMA) and digest == _digest(table):
            return table
        fault = "its checksum does not match"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, pa.ArrowException) as error:
        fault = str(error)
    log.warning("%s is damaged (%s): deleted, the batch is made again", path, fault)
    path.unlink(missing_ok=True)
    return None


def _load_part(path: Path) -> pa.Table:
    # Read, not mapped: where another copy of the job unlinks it on NFS, a mapped file ends in SIGBUS.
    return pa.ipc.open_file(path.read_bytes()).read_all()


class _LostPartError(FluxbatchError):
    """A part file is not there any more."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is gone or was damaged; run the same command again, it makes this batch again")


def compact(folder: RunFolder, shard: ShardPlan, rows: pa.Table, *, output: OutputConfig) -> list[ShardCommit]:
    """Publish a shard from its part files: first what failed, then the images. Writes no ledger line, deletes no part.

    `rows` are the shard's rows of the plan. A name that is taken keeps its file: it is read back, and must hold this
    shard's rows; rows that stand as failed are failed, whatever our parts say. Raises FluxbatchError naming a part
    that is gone or a file that holds other rows.
    """
    superseded = _superseded(shard, rows)
    try:
        drawn = [_with_outcomes(folder, shard, rows, batch) for batch in shard.batches]
        failed = _commit_failures(folder, shard, _without(pa.concat_tables(drawn), superseded))
        failed_ids = writers.stored_ids(folder.root / failed[0].file) if failed else []
        return failed + _commit_images(folder, shard, drawn, superseded | set(failed_ids), output)
    except _LostPartError:
        found = adopt(folder, shard, rows, output=output)  # another live copy may have cleared up after its own commit
        if found:
            return found
        raise


def kept_ids(shard: ShardPlan, rows: pa.Table) -> list[str]:
    """The ids of a shard's rows, in plan order, but for those that a redo took away."""
    return [row_id for place, row_id in enumerate(rows["id"].to_pylist()) if place not in shard.dropped]


def _superseded(shard: ShardPlan, rows: pa.Table) -> set[str]:
    return {rows["id"][place].as_py() for place in shard.dropped}


def _with_outcomes(folder: RunFolder, shard: ShardPlan, rows: pa.Table, batch: BatchPlan) -> pa.Table:
    """A batch's rows of the plan, and what its part file says became of them."""
    path = folder.batch(batch.index, shard.index)
    outcomes = _outcomes(_part(path))
    table = rows.slice(batch.first_row - shard.first_row, batch.num_rows)
    _require(outcomes["id"].to_pylist(), table["id"].to_pylist(), path)
    for name in ("truncated", *FAILURE):
        table = table.append_column(PART_SCHEMA.field(name), outcomes[name])
    return table


def _without(rows: pa.Table, ids: set[str]) -> pa.Table:
    """The rows of other ids; where there are none of these, the very same table."""
    kept = [place for place, row_id in enumerate(rows["id"].to_pylist()) if row_id not in ids]
    return rows if len(kept) == rows.num_rows else rows.take(pa.array(kept, pa.int64()))


def _part(path: Path) -> pa.Table:
    part = _read_part(path)
    if part is None:
        raise _LostPartError(path)
    return part


def _images(path: Path) -> pa.ChunkedArray:
    """The images of a part whose checksum was compared when its outcomes were read."""
    try:
        return _load_part(path)["image"]
    except FileNotFoundError:
        raise _LostPartError(path) from None


def _outcomes(part: pa.Table) -> pa.Table:
    """A part without its images, in memory of its own: a selected column would hold on to the whole file."""
    small = part.drop_columns("image")
    return pa.Table.from_pylist(small.to_pylist(), schema=small.schema)


def _commit_failures(folder: RunFolder, shard: ShardPlan, rows: pa.Table) -> list[ShardCommit]:
    path = folder.failed_shard(shard.index, shard.revision)
    failed = rows.filter(pc.is_valid(rows["stage"])).select(FAILED_COLUMNS)
    if failed.num_rows:
        sha256 = _publish_file(path, lambda file: _write_failures(file, failed.combine_chunks()))
    elif path.exists():
        sha256 = None
    else:
        return []
    standing = writers.stored_ids(path)
    _require(standing, _among(rows["id"].to_pylist(), {*standing, *failed["id"].to_pylist()}), path)
    return [_describe(folder, shard, path, failed=len(standing), sha256=sha256)]


def _write_failures(file: BinaryIO, failed: pa.Table) -> None:
    text = {field.name: "zstd" for field in failed.schema if pa.types.is_string(field.type)}
    pq.write_table(failed.replace_schema_metadata(None), file, compression=text)


def _commit_images(
    folder: RunFolder, shard: ShardPlan, drawn: Sequence[pa.Table], without: set[str], output: OutputConfig
) -> list[ShardCommit]:
    ids = [row_id for rows in drawn for row_id in rows["id"].to_pylist() if row_id not in without]
    if not ids:
        return []
    path = data_file(folder, shard, output)
    schema = writers.data_schema(drawn[0].schema)
    sha256 = _publish_images(path, _data_tables(folder, shard, drawn, without, schema), schema=schema, output=output)
    if sha256 is None:
        _require(writers.stored_ids(path), ids, path)
    return [_describe(folder, shard, path, rows=len(ids), sha256=sha256)]


def data_file(folder: RunFolder, shard: ShardPlan, output: OutputConfig) -> Path:
    """The file that the ledger names for a shard."""
    path = folder.shard(shard.index, output.kind, shard.revision)
    return path / writers.METADATA if output.kind == "folder" else path


def _data_tables(
    folder: RunFolder, shard: ShardPlan, drawn: Sequence[pa.Table], without: set[str], schema: pa.Schema
) -> Iterator[pa.Table]:
    """What the writers take: the columns of `schema`, the image as its bytes; one batch in memory at a time."""
    for batch, rows in zip(shard.batches, drawn, strict=True):
        table = rows.append_column(PART_SCHEMA.field("image"), _images(folder.batch(batch.index, shard.index)))
        table = _without(table, without)
        yield pa.table({name: _data_column(table, name) for name in schema.names})


def _data_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name in table.column_names:
        return table[name]
    return pc.struct_field(table["extra"], [table.schema.field("extra").type.get_field_index(name)])


def _publish_images(path: Path, tables: Iterator[pa.Table], *, schema: pa.Schema, output: OutputConfig) -> str | None:
    """The SHA-256 of what was published under `path`; None where the name was taken."""
    if output.kind == "parquet":
        options = {"schema": schema, "image_format": output.image_format, "row_group_mib": output.row_group_mib}
        return _publish_file(path, lambda file: writers.write_parquet(file, tables, **options))
    if output.kind == "webdataset":
        return _publish_file(path, lambda file: writers.write_tar(file, tables, image_format=output.image_format))
    digest = hashlib.sha256()
    published = commit.publish_folder(
        path.parent,
        lambda temporary: digest.update(writers.write_folder(temporary, tables, image_format=output.image_format)),
    )
    return digest.hexdigest() if published else None


def _publish_file(path: Path, write: Callable[[BinaryIO], None]) -> str | None:
    digest = hashlib.sha256()
    published = commit.publish_file(path, lambda file: write(cast(BinaryIO, _Hashed(file, digest))))
    return digest.hexdigest() if published else None


class _Hashed(io.RawIOBase):
    """Passes on what is written and sums it, so that nothing need be read back."""

    def __init__(self, file: BinaryIO, digest: hashlib._Hash) -> None:
        self._file, self._digest = file, digest

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return self._file.write(content)


def _describe(
    folder: RunFolder, shard: ShardPlan, path: Path, *, rows: int = 0, failed: int = 0, sha256: str | None = None
) -> ShardCommit:
    """The ledger line of a file that stands; it is read only where its checksum is not known from writing it."""
    stat = path.stat()
    return ShardCommit(
        shard=shard.index,
        file=path.relative_to(folder.root).as_posix(),
        rows=rows,
        failed=failed,
        bytes=stat.st_size,
        sha256=sha256 or commit.sha256_file(path),
        mtime_ns=stat.st_mtime_ns,
    )


def shard_places(folder: RunFolder) -> Iterator[Path]:
    """The folders that shards and failures stand in."""
    for place in (folder.data, folder.failures):
        if place.is_dir():
            yield from (place, *sorted(place.glob("shards-*")))


def standing_files(folder: RunFolder) -> Iterator[str]:
    """What stands in data/ and failed/, relative to the run folder; temporary files and images in folders left out."""
    for place in shard_places(folder):
        for path in sorted(place.iterdir()):
            if not path.name.startswith((commit.TEMPORARY_PREFIX, "shards-")):
                file = path / writers.METADATA if not path.suffix and path.is_dir() else path
                yield file.relative_to(folder.root).as_posix()


def stands(folder: RunFolder, shard: ShardPlan, *, output: OutputConfig) -> bool:
    """Whether a file of this shard is in the folder, whatever its ledger says."""
    return folder.failed_shard(shard.index, shard.revision).exists() or data_file(folder, shard, output).exists()


def adopt(folder: RunFolder, shard: ShardPlan, rows: pa.Table, *, output: OutputConfig) -> list[ShardCommit]:
    """The commits of a shard that stands whole in the folder: its ledger line is lost, or another copy has made it.

    Empty where nothing stands, or only a part of the shard. Raises FluxbatchError naming a file that cannot be read
    or holds other rows.
    """
    failed_path, data_path = folder.failed_shard(shard.index, shard.revision), data_file(folder, shard, output)
    failed = writers.stored_ids(failed_path) if failed_path.exists() else []
    written = writers.stored_ids(data_path) if data_path.exists() else []
    planned = kept_ids(shard, rows)
    _require(failed, _among(planned, set(failed)), failed_path)
    _require(written, _among(planned, set(written) - set(failed)), data_path)
    if len(failed) + len(written) < len(planned):
        return []
    commits = [_describe(folder, shard, failed_path, failed=len(failed))] if failed else []
    return commits + ([_describe(folder, shard, data_path, rows=len(written))] if written else [])


def _among(planned: list[str], ids: set[str]) -> list[str]:
    return [row_id for row_id in planned if row_id in ids]


def _require(ids: list[str], wanted: list[str], path: Path) -> None:
    if ids != wanted:
        odd = next(
            (f"{got!r} where {want!r} belongs" for got, want in zip(ids, wanted, strict=False) if got != want), ""
        )
        rows = f"{len(ids)} rows where {len(wanted)} belong"
        raise FluxbatchError(f"{path} holds other rows than the plan ({odd or rows}); move it away and start again")


def remove_batches(folder: RunFolder, shard: ShardPlan) -> None:
    """Delete a shard's part files, after its ledger line; their folder too, unless another copy still writes there."""
    for batch in drawn_batches(folder, shard.index):
        folder.batch(batch, shard.index).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.open_shard(shard.index).rmdir()


def unpack(
    folder: RunFolder, lines: Sequence[ShardCommit], batches: Iterable[Batch], *, superseded: set[str]
) -> Iterator[CompressedBatch]:
    """What a committed shard holds, as the batches that it was made of: a revision is compacted from them again.

    A row that is `superseded` comes as failed, for its place is not written. Raises FluxbatchError where a file is not
    what its ledger line says, or lacks a row.
    """
    for line in lines:
        path = folder.root / line.file
        if not path.exists() or commit.sha256_file(path) != line.sha256:
            raise FluxbatchError(f"{path} is not the file that its ledger line names")
    known = {row_id: failure for line in lines if line.failed for row_id, failure in _failures(folder.root / line.file)}
    stored = (row for line in lines if line.rows for row in writers.stored_rows(folder.root / line.file))
    for batch in batches:
        results = []
        for request in batch.requests:
            if request.id in superseded:
                results.append(RowResult(request.id, None, failure=SUPERSEDED))
            elif request.id in known:
                results.append(RowResult(request.id, None, failure=known[request.id]))
            else:
                results.append(_stored_result(request.id, stored))
        yield CompressedBatch(batch, tuple(results))


def _failures(path: Path) -> Iterator[tuple[str, RowFailure]]:
    for row in writers.read_parquet(path, ["id", *FAILURE]).to_pylist():
        yield row.pop("id"), RowFailure(**row)


def _stored_result(row_id: str, stored: Iterator[StoredRow]) -> RowResult:
    """The row of this id, further on in the file: those before it are superseded."""
    for row in stored:
        if row.id == row_id:
            if not row.sound:
                raise FluxbatchError(f"{row.file} is missing or has another sha256 than recorded")
            return RowResult(row_id, row.image, truncated=row.truncated)
    raise FluxbatchError(f"row {row_id!r} is not where its ledger line says")


def remove_file(folder: RunFolder, file: str) -> None:
    """Delete a shard's file, or the folder of a `metadata.jsonl`, from under its name in one step."""
    path = folder.root / file
    if path.name != writers.METADATA:
        path.unlink(missing_ok=True)
    elif path.parent.exists():
        # Away from its name in one step: half a folder under it would be taken for another attempt's.
        leftover = commit.temporary_sibling(path.parent)
        path.parent.rename(leftover)
        shutil.rmtree(leftover)


def is_cut(path: Path, committed: ShardCommit) -> bool:
    """Whether a committed file, or an image beside a `metadata.jsonl`, is missing or shorter than it was."""
    size = path.stat().st_size if path.exists() else -1
    if size < committed.bytes or path.name != writers.METADATA or size > committed.bytes:
        return size < committed.bytes
    return any(image.size() < image.bytes for image in writers.image_files(path))


def remove_shard_file(folder: RunFolder, lost: ShardCommit) -> None:
    """Delete what is left of a cut shard file. One that another rank has made again meanwhile stays."""
    if is_cut(folder.root / lost.file, lost):
        remove_file(folder, lost.file)
