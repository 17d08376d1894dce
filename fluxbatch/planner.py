"""What lies between manifest and plan: which rows are twice, new, edited or gone, and the plan files themselves.

DuckDB answers what needs all ids at once, within a memory limit and on disk beyond it. The rows need no sort: those of
one bucket come in manifest order already, so they are spooled by bucket and read back bucket by bucket.
Knows nothing of tensors, and never holds all rows.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fluxbatch import commit
from fluxbatch.config import JobConfig, ManifestConfig, PlanConfig
from fluxbatch.errors import FluxbatchError, ManifestError
from fluxbatch.folder import RunFolder
from fluxbatch.manifest import SEED, Manifest
from fluxbatch.plan import PlanPart, plan_part, plan_retry
from fluxbatch.records import Batch, BatchPlan, Bucket, Rejection, Request, RowRules, ShardPlan

GROUP_ROWS = 65_536  # in one row group of a plan file, and
GROUP_BYTES = 64 * 2**20  # its text: a reader holds two groups
MAX_THREADS = 4  # of DuckDB: each one claims its part of the memory limit
INSERT_ROWS = 524_288  # 12 times as fast as a chunk at a time, and a transaction over all of them escapes the limit
FOOTER = b"fluxbatch"
SEED_TYPES = {"int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1), "decimal128(20, 0)": (-(2**63), 2**64 - 1)}
SEED_TYPE = {str(kind): kind for kind in (pa.int64(), pa.uint64(), SEED)}
BUCKET = ("height", "width", "num_inference_steps", "negative_pass")
KEYS = ("row", "id", "seed", "fingerprint", *BUCKET)

CREATE_TABLES = """
SET enable_progress_bar = false;
CREATE TABLE accepted (row BIGINT, id VARCHAR, seed DECIMAL(20, 0), fingerprint VARCHAR,
                       height INTEGER, width INTEGER, num_inference_steps INTEGER, negative_pass BOOLEAN);
CREATE TABLE rejected (id VARCHAR);
CREATE TABLE planned (id VARCHAR, fingerprint VARCHAR);
"""
FIND_DUPLICATES = """
CREATE TABLE duplicate AS
SELECT accepted.row, id, first
FROM accepted JOIN (SELECT id, min(row) AS first FROM accepted GROUP BY id HAVING count(*) > 1) USING (id)
WHERE accepted.row > first
"""
DROP_DUPLICATES = "DELETE FROM accepted WHERE row IN (SELECT row FROM duplicate)"
FIND_EDITED = """
CREATE TABLE edited AS
SELECT planned.id
FROM planned LEFT JOIN accepted ON accepted.id = planned.id
WHERE accepted.fingerprint <> planned.fingerprint
   OR (accepted.id IS NULL AND planned.id IN (SELECT id FROM rejected))
"""
COUNT_DELETED = "SELECT count(*) FROM planned ANTI JOIN accepted USING (id)"
DROP_PLANNED = "DELETE FROM accepted WHERE id IN (SELECT id FROM planned)"
COUNT_BUCKETS = f"SELECT {', '.join(BUCKET)}, count(*) FROM accepted GROUP BY ALL"


@dataclass(frozen=True, slots=True)
class Survey:
    """A manifest in numbers: rows of each bucket, rejected rows by reason, and up to three examples of each reason."""

    rows: int
    counts: dict[Bucket, int]
    rejected: dict[str, int]
    examples: dict[str, list[Rejection]]


@dataclass(frozen=True, slots=True)
class Changes:
    """What a start found against the plan before it. `unchanged`: the same manifest and rules, so no row was read."""

    added: int
    deleted: int
    rejected: int
    unchanged: bool


# The reading side.


@dataclass(frozen=True, slots=True)
class _PlanFile:
    path: Path
    part: PlanPart
    footer: dict[str, Any]
    schema: pa.Schema
    group_starts: np.ndarray  # and one more: the number of rows


class RunPlan:
    """The plan of a run folder. Reads footers until rows are asked for, then the row groups that hold them."""

    def __init__(self, files: list[_PlanFile], *, num_rejected: int, planned: dict[str, Any] | None) -> None:
        self.files = files
        self.num_rejected = num_rejected
        self.planned = planned  # the manifest and rules that were compared with this plan last
        self._group = lru_cache(maxsize=2)(self._read_group)  # a shard may lie across the edge of two

    @classmethod
    def open(cls, folder: RunFolder) -> RunPlan | None:
        """The plan as it stands; None before the first start."""
        files = list(_plan_files(folder))
        if not files:
            return None
        if not folder.rejected.exists():
            return cls(files, num_rejected=0, planned=None)
        metadata, footer = _read_footer(folder.rejected)
        return cls(files, num_rejected=metadata.num_rows, planned=footer)

    @property
    def parts(self) -> tuple[PlanPart, ...]:
        return tuple(file.part for file in self.files)

    @property
    def num_rows(self) -> int:
        """Accepted rows; a retry is no new row."""
        return sum(part.num_rows for part in self.parts if part.kind == "rows")

    @property
    def seed_type(self) -> pa.DataType:
        """The type of all seeds: int64 if it holds those of the first plan, else uint64, else decimal128(20, 0)."""
        return SEED_TYPE[self.files[0].footer["seed_type"]]

    @property
    def schema(self) -> pa.Schema:
        return self.files[0].schema

    def shards(self) -> Iterator[ShardPlan]:
        for part in self.parts:
            yield from part.shards()

    def shard(self, index: int) -> ShardPlan:
        return self._file(index).part.shard(index)

    def rows(self, shard: ShardPlan) -> pa.Table:
        """The rows of a shard in plan order, with all columns of the plan file."""
        return self._range(self._file(shard.index), shard.first_row, shard.num_rows)

    def batch(self, plan: BatchPlan) -> Batch:
        """A batch with its requests."""
        rows = self._range(self._file(plan.shard), plan.first_row, plan.num_rows)
        return Batch(plan=plan, requests=tuple(_requests(rows)))

    def _file(self, shard: int) -> _PlanFile:
        for file in self.files:
            if file.part.first_shard <= shard < file.part.first_shard + file.part.num_shards:
                return file
        raise IndexError(f"no plan file holds shard {shard}")

    def _range(self, file: _PlanFile, first_row: int, num_rows: int) -> pa.Table:
        low, high = np.searchsorted(file.group_starts, [first_row, first_row + num_rows - 1], side="right") - 1
        groups = pa.concat_tables(self._group(file.path, group) for group in range(low, high + 1))
        return groups.slice(first_row - file.group_starts[low], num_rows)

    @staticmethod
    def _read_group(path: Path, group: int) -> pa.Table:
        with pq.ParquetFile(path) as file:
            return file.read_row_group(group)


def _plan_files(folder: RunFolder) -> Iterator[_PlanFile]:
    index = 0
    while (path := folder.plan(index)).exists():
        metadata, footer = _read_footer(path)
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        schema = metadata.schema.to_arrow_schema()
        yield _PlanFile(path, PlanPart.from_json(footer["part"]), footer, schema, np.cumsum([0, *sizes]))
        index += 1


def _read_footer(path: Path) -> tuple[pq.FileMetaData, dict[str, Any]]:
    try:
        metadata = pq.read_metadata(path)
        return metadata, json.loads(metadata.metadata[FOOTER])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise FluxbatchError(f"{path}: not a file that fluxbatch wrote whole: {error}") from error


def _requests(rows: pa.Table) -> Iterator[Request]:
    names = list(Request.__dataclass_fields__)
    for row in rows.select(names).to_pylist():
        yield Request(**{**row, "seed": int(row["seed"])})


# The verbs.


def survey(manifest: Manifest, rules: RowRules, cfg: ManifestConfig) -> Survey:
    """Check and count all rows. Keeps no prompts, writes nothing to the run folder."""
    tally = _Tally()
    with _workbench(cfg.memory_gib) as (keys, _):
        for chunk in manifest.chunks(rules, hashed=False):
            keys.add(chunk.accepted)
            tally.add(chunk.rejected)
        tally.add(keys.drop_duplicates(manifest, cfg))
        counts = keys.counts()
    rejected = dict(tally.reasons)
    return Survey(sum(counts.values()) + sum(rejected.values()), counts, rejected, dict(tally.examples))


def prepare(folder: RunFolder, manifest: Manifest, rules: RowRules, cfg: JobConfig) -> tuple[RunPlan, Changes]:
    """Bring the plan of the run folder up to the manifest, and return it.

    The first start writes the plan; a later one adds the rows that are new and refuses edited ones. Any number of
    processes may do this at once: the one that publishes first wins, the others read its plan back.
    """
    identity = {"manifest_digest": manifest.digest, "rules": asdict(rules)}
    plan = RunPlan.open(folder)
    if plan is not None and plan.planned == identity:
        return plan, Changes(added=0, deleted=0, rejected=plan.num_rejected, unchanged=True)
    with _workbench(cfg.manifest.memory_gib) as (keys, spool):
        refused = _RejectedFile(identity)
        for chunk in manifest.chunks(rules):
            keys.add(chunk.accepted if plan else chunk.accepted.drop_columns("fingerprint"))  # nothing to compare yet
            keys.add_rejected(chunk.rejected)
            refused.add(chunk.rejected)
            spool.add_chunk(chunk.accepted)
        refused.add(keys.drop_duplicates(manifest, cfg.manifest))
        deleted = _drop_planned(keys, plan, manifest, rules, cfg) if plan else 0
        part = _next_part(keys.counts(), plan, cfg.plan)
        ours = _publish_rows(folder, part, keys, spool, _plan_schema(manifest, keys, plan), identity)
    if not ours:  # another process has planned another state of the manifest meanwhile
        return prepare(folder, manifest, rules, cfg)
    # After the plan: a crash in between costs a second comparison, the other order could lose the rows added.
    commit.replace_file(folder.rejected, refused.close())
    planned = _reopened(folder)
    return planned, Changes(added=part.num_rows, deleted=deleted, rejected=planned.num_rejected, unchanged=False)


def add_retry(folder: RunFolder, plan: RunPlan, failed: Mapping[int, set[str]]) -> RunPlan:
    """Plan failed rows again, given as ids of each shard: a new part of kind `retry`. No failed rows, no part."""
    counts: Counter[Bucket] = Counter()
    with tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch, _Spool(Path(scratch) / "rows.arrow") as spool:
        for bucket, rows in _failed_rows(plan, failed):
            spool.add(bucket, rows)
            counts[bucket] += rows.num_rows
        if not counts:
            return plan
        part = plan_retry(counts, plan.parts)
        footer = {**plan.files[-1].footer, "part": part.to_json()}
        ours = _publish_part(folder, part, spool.rows(part), plan.schema, footer)
    planned = _reopened(folder)
    if not ours and planned.parts[part.index].kind != "retry":  # another process has added rows meanwhile
        return add_retry(folder, planned, failed)
    return planned


def _reopened(folder: RunFolder) -> RunPlan:
    plan = RunPlan.open(folder)
    assert plan is not None, "published just now"
    return plan


def _failed_rows(plan: RunPlan, failed: Mapping[int, set[str]]) -> Iterator[tuple[Bucket, pa.Table]]:
    for index in sorted(failed):
        shard = plan.shard(index)
        rows = plan.rows(shard)
        wanted = pc.is_in(rows["id"], pa.array(sorted(failed[index]), pa.string()))
        first = 0
        for bucket, batches in groupby(shard.batches, key=lambda batch: batch.bucket):
            num_rows = sum(batch.num_rows for batch in batches)
            found = rows.slice(first, num_rows).filter(wanted.slice(first, num_rows))
            if found.num_rows:
                yield bucket, found
            first += num_rows


def _drop_planned(keys: _Keys, plan: RunPlan, manifest: Manifest, rules: RowRules, cfg: JobConfig) -> int:
    """Leave only rows that the plan has not; returns how many of the plan's are gone from the manifest."""
    keys.add_planned(plan)
    edited, examples = keys.edited()
    if not edited:
        return keys.drop_planned()
    ids = ", ".join(map(_quoted, examples))
    message = f"{edited} planned row(s) were edited since, id {ids}; give them new ids or another output.dir"
    before, now = plan.files[-1].footer["rules"], asdict(rules)
    changed = [f"{_key(name, cfg)} was {before[name]}, is {now[name]}" for name in now if before[name] != now[name]]
    if changed:
        message += f"; settings that rows take their values from have changed: {', '.join(changed)}"
    if not manifest.has_ids:
        message += "; without an id column a row is known by its place only"
    raise ManifestError(message)


def _key(name: str, cfg: JobConfig) -> str:
    """The dotted key of a row rule."""
    group = next((group for group in ("sampler", "manifest", "model") if hasattr(getattr(cfg, group), name)), None)
    return f"{group}.{name}" if group else f"output.image_format's {name}"


def _quoted(row_id: str) -> str:
    return repr(row_id if len(row_id) <= 80 else row_id[:77] + "...")


# Writing plan files.


def _next_part(counts: Mapping[Bucket, int], plan: RunPlan | None, cfg: PlanConfig) -> PlanPart:
    if plan is None:
        return plan_part(counts, plan=cfg)
    last = plan.parts[-1]
    shard, batch = last.first_shard + last.num_shards, last.first_batch + last.num_batches
    return plan_part(counts, plan=cfg, index=last.index + 1, first_shard=shard, first_batch=batch)


def _publish_rows(
    folder: RunFolder, part: PlanPart, keys: _Keys, spool: _Spool, schema: pa.Schema, identity: dict[str, Any]
) -> bool:
    """Write the rows left in `keys` as this part; False when the part that stands there is of another manifest."""
    if part.index and not part.num_rows:
        return True
    footer = {"part": part.to_json(), **identity, "seed_type": str(schema.field("seed").type)}
    kept = keys.rows() if part.num_rows < spool.num_rows else None
    if _publish_part(folder, part, spool.rows(part, kept), schema, footer):
        return True
    _, theirs = _read_footer(folder.plan(part.index))
    return {name: theirs.get(name) for name in identity} == identity


def _publish_part(
    folder: RunFolder, part: PlanPart, rows: Iterable[pa.Table], schema: pa.Schema, footer: dict[str, Any]
) -> bool:
    """False when another process has published this part."""
    schema = schema.with_metadata({FOOTER: json.dumps(footer).encode()})

    def write(file: BinaryIO) -> None:
        first_row = 0
        with pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=1, use_dictionary=["bucket"], write_statistics=False
        ) as writer:
            for group in _grouped(rows):
                writer.write_table(_placed(group, part, first_row, schema))
                first_row += group.num_rows
        assert first_row == part.num_rows, f"{first_row} rows for a plan of {part.num_rows}"

    return commit.publish_file(folder.plan(part.index), write)


def _grouped(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of a row group's size."""
    held: list[pa.Table] = []
    for table in tables:
        while table.num_rows:
            room = GROUP_ROWS - sum(part.num_rows for part in held)
            held.append(table.slice(0, room))
            table = table.slice(room)
            if held[-1].num_rows == room or sum(part.nbytes for part in held) >= GROUP_BYTES:
                yield pa.concat_tables(held)
                held = []
    if held:
        yield pa.concat_tables(held)


def _placed(rows: pa.Table, part: PlanPart, first_row: int, schema: pa.Schema) -> pa.Table:
    """Rows with their places in the plan, in the plan file's schema."""
    columns = dict(zip(rows.column_names, rows.columns, strict=True))
    columns.update({name: pa.array(values) for name, values in part.columns(first_row, rows.num_rows).items()})
    if "extra" in columns or "extra" in schema.names:
        columns["extra"] = _fitting_extra(columns.get("extra"), rows.num_rows, schema)
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)


def _fitting_extra(extra: pa.ChunkedArray | None, num_rows: int, schema: pa.Schema) -> pa.ChunkedArray:
    """Added rows keep to the columns of the first plan."""
    known = schema.field("extra").type if "extra" in schema.names else pa.struct([])
    if extra is None:
        return pa.nulls(num_rows, known)
    new = [name for name in extra.type.names if name not in known.names]
    hint = "leave it out with manifest.drop_columns, or use another output.dir"
    if new:
        raise ManifestError(f"column {new[0]} is not in the plan that this run began with; {hint}")
    try:
        return extra.cast(known)
    except pa.ArrowException as error:
        raise ManifestError(
            f"a column has another type than in the plan that this run began with: {error}; {hint}"
        ) from error


def _plan_schema(manifest: Manifest, keys: _Keys, plan: RunPlan | None) -> pa.Schema:
    """That of the first plan, for all shards have one schema."""
    seed_type = _seed_type(*keys.seed_range(), kinds=[str(plan.seed_type)] if plan else list(SEED_TYPES))
    if plan is not None:
        return plan.schema
    extra = {"extra": pa.struct(list(manifest.extra_schema))} if len(manifest.extra_schema) else {}
    return pa.schema(
        {
            "id": pa.string(),
            "prompt": pa.string(),
            "negative_prompt": pa.string(),
            "height": pa.int32(),
            "width": pa.int32(),
            "num_inference_steps": pa.int32(),
            "guidance_scale": pa.float64(),
            "seed": seed_type,
            "requested_height": pa.int32(),
            "requested_width": pa.int32(),
            **extra,
            "row": pa.int64(),
            "bucket": pa.string(),
            "batch": pa.int64(),
            "shard": pa.int64(),
            "slot": pa.int64(),
            "fingerprint": pa.string(),
        }
    )


def _seed_type(low: int, high: int, *, kinds: list[str]) -> pa.DataType:
    """The first of these types that holds all seeds."""
    for kind in kinds:
        least, most = SEED_TYPES[kind]
        if least <= low and high <= most:
            return SEED_TYPE[kind]
    raise ManifestError(
        f"seeds of added rows must fit {kinds[0]}, the type that this run began with, got {low} to {high}; "
        "use another output.dir"
    )


class _RejectedFile:
    """Builds rejected.parquet in memory, compressed; its footer says which manifest and rules it belongs to."""

    schema = pa.schema({"row": pa.int64()} | {name: pa.string() for name in ("id", "column", "reason", "message")})

    def __init__(self, identity: dict[str, Any]) -> None:
        self._file = io.BytesIO()
        schema = self.schema.with_metadata({FOOTER: json.dumps(identity).encode()})
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")
        self._held: list[Rejection] = []

    def add(self, rejections: Iterable[Rejection]) -> None:
        for rejection in rejections:
            self._held.append(rejection)
            if len(self._held) == GROUP_ROWS:
                self._flush()

    def _flush(self) -> None:
        rows = pa.Table.from_pylist([asdict(rejection) for rejection in self._held], self._writer.schema)
        self._writer.write_table(rows)
        self._held = []

    def close(self) -> bytes:
        self._flush()
        self._writer.close()
        return self._file.getvalue()


# The scratch side: keys in DuckDB, rows in a spool.


@dataclass
class _Tally:
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Rejection]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rejections: Iterable[Rejection]) -> None:
        for rejection in rejections:
            self.reasons[rejection.reason] += 1
            if len(self.examples[rejection.reason]) < 3:
                self.examples[rejection.reason].append(rejection)


@contextmanager
def _workbench(memory_gib: float) -> Iterator[tuple[_Keys, _Spool]]:
    """Keys and spool in a temporary folder (TMPDIR decides where) that is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch, _Spool(Path(scratch) / "rows.arrow") as spool:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{int(memory_gib * 1024)}MiB",
            "temp_directory": scratch,
            "threads": min(MAX_THREADS, os.cpu_count() or 1),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,  # never a network
        }
        try:
            with duckdb.connect(config=config) as connection:
                yield _Keys(connection), spool
        except duckdb.Error as error:
            raise FluxbatchError(
                f"planning with manifest.memory_gib={memory_gib:g} in {scratch} failed: {error}"
            ) from error


class _Keys:
    """What each row is known by, in DuckDB: enough to find duplicates and to compare with an earlier plan."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._db = connection
        self._db.execute(CREATE_TABLES)
        self._held: dict[str, list[pa.Table]] = {"accepted": [], "rejected": [], "planned": []}

    def add(self, accepted: pa.Table) -> None:
        self._hold("accepted", accepted.select([name for name in KEYS if name in accepted.column_names]))

    def add_rejected(self, rejections: list[Rejection]) -> None:
        ids = pa.array([rejection.id for rejection in rejections], pa.string())
        self._hold("rejected", pa.table({"id": ids}))

    def add_planned(self, plan: RunPlan) -> None:
        for file in plan.files:
            if file.part.kind == "rows":
                with pq.ParquetFile(file.path) as rows:
                    for batch in rows.iter_batches(columns=["id", "fingerprint"]):
                        self._hold("planned", pa.Table.from_batches([batch]))
        self._flush("planned")

    def drop_duplicates(self, manifest: Manifest, cfg: ManifestConfig) -> Iterator[Rejection]:
        """Leave the first row of each id. The others are refused one by one, or all at once with an exception."""
        self._flush("accepted")
        self._flush("rejected")
        self._db.execute(FIND_DUPLICATES)
        found = self._db.execute("SELECT row, id, first FROM duplicate ORDER BY row")
        while rows := found.fetchmany(GROUP_ROWS):
            if cfg.on_duplicate == "refuse":
                raise ManifestError(self._duplicate_message(*rows[0], manifest=manifest))
            for row, row_id, first in rows:
                message = f"id must stand once, is that of {manifest.locate(first)} too"
                yield Rejection(row=row, id=row_id, column="id", reason="duplicate_id", message=message)
        self._db.execute(DROP_DUPLICATES)

    def _duplicate_message(self, row: int, row_id: str, first: int, *, manifest: Manifest) -> str:
        return (
            f"id {_quoted(row_id)} stands twice: {manifest.locate(first)} and {manifest.locate(row)}; "
            f"{self._value('SELECT count(*) FROM duplicate')} duplicate row(s) in all; "
            "manifest.on_duplicate=keep_first keeps the first of each"
        )

    def edited(self) -> tuple[int, list[str]]:
        """How many planned rows have other content now, and three of their ids."""
        self._db.execute(FIND_EDITED)
        examples = self._db.execute("SELECT id FROM edited ORDER BY id LIMIT 3").fetchall()
        return self._value("SELECT count(*) FROM edited"), [row_id for (row_id,) in examples]

    def drop_planned(self) -> int:
        """Leave only rows that no plan has yet; returns how many planned rows are gone."""
        deleted = self._value(COUNT_DELETED)
        self._db.execute(DROP_PLANNED)
        return deleted

    def counts(self) -> dict[Bucket, int]:
        return {Bucket(*shape): number for *shape, number in self._db.execute(COUNT_BUCKETS).fetchall()}

    def seed_range(self) -> tuple[int, int]:
        [(low, high)] = self._db.execute("SELECT min(seed), max(seed) FROM accepted").fetchall()
        return int(low or 0), int(high or 0)

    def rows(self) -> np.ndarray:
        """The numbers of the rows that are left, ascending: 8 bytes a row, the only thing held for each."""
        return self._db.execute("SELECT row FROM accepted ORDER BY row").fetchnumpy()["row"]

    def _hold(self, table: str, rows: pa.Table) -> None:
        held = self._held[table]
        held.append(rows)
        if sum(part.num_rows for part in held) >= INSERT_ROWS:
            self._flush(table)

    def _flush(self, table: str) -> None:
        if self._held[table]:
            self._db.register("incoming", pa.concat_tables(self._held[table]))
            self._db.execute(f"INSERT INTO {table} BY NAME SELECT * FROM incoming")
            self._db.unregister("incoming")
            self._held[table] = []

    def _value(self, query: str) -> int:
        [(value,)] = self._db.execute(query).fetchall()
        return value


class _Spool:
    """Whole rows on their way into plan order: an Arrow file of batches, each of one bucket, in the order they came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pa.RecordBatchFileWriter | None = None
        self._places: dict[Bucket, list[int]] = defaultdict(list)
        self._num_batches = 0
        self.num_rows = 0

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()

    def add_chunk(self, accepted: pa.Table) -> None:
        """Take in accepted rows of any buckets."""
        shapes = accepted.select(BUCKET).append_column("at", pa.array(np.arange(accepted.num_rows)))
        groups = shapes.group_by(list(BUCKET), use_threads=False).aggregate([("at", "list")])
        for *shape, at in zip(*(groups[name].to_pylist() for name in BUCKET), groups["at_list"], strict=True):
            self.add(Bucket(*shape), accepted.take(at.values))

    def add(self, bucket: Bucket, rows: pa.Table) -> None:
        """Take in rows of one bucket."""
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        for batch in rows.combine_chunks().to_batches():
            self._writer.write_batch(batch)
            self._places[bucket].append(self._num_batches)
            self._num_batches += 1
        self.num_rows += rows.num_rows

    def rows(self, part: PlanPart, kept: np.ndarray | None = None) -> Iterator[pa.Table]:
        """Bucket after bucket, each in the order it came; only rows numbered in `kept` (ascending) if it is given."""
        self._finish()
        if not part.num_rows:
            return
        with pa.OSFile(str(self._path)) as file:
            reader = pa.ipc.open_file(file)
            for place in chain.from_iterable(self._places[run.bucket] for run in part.runs):
                rows = pa.Table.from_batches([reader.get_batch(place)])
                yield rows if kept is None else rows.filter(_is_in(rows["row"].to_numpy(), kept))

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _is_in(values: np.ndarray, ascending: np.ndarray) -> pa.Array:
    at = np.searchsorted(ascending, values)
    return pa.array(ascending[np.minimum(at, len(ascending) - 1)] == values)
