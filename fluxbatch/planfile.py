"""The plan files and rejected.parquet: written once in plan order, read a row group at a time.

A footer says what its file is: the arithmetic of its part, and the manifest and rules that it was planned from.
Knows nothing of how rows are checked, compared or brought into order.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch import commit
from fluxbatch.errors import FluxbatchError, ManifestError
from fluxbatch.folder import RunFolder
from fluxbatch.plan import PlanPart
from fluxbatch.records import Batch, BatchPlan, Bucket, Rejection, Request, ShardPlan
from fluxbatch.rows import SEED

log = logging.getLogger(__name__)

GROUP_ROWS = 65_536  # in one row group of a plan file, and
GROUP_BYTES = 64 * 2**20  # its text: a reader holds two groups
FOOTER = b"fluxbatch"
SEED_RANGES = {pa.int64(): (-(2**63), 2**63 - 1), pa.uint64(): (0, 2**64 - 1), SEED: (-(2**63), 2**64 - 1)}
REQUESTED = {"requested_height": pa.int32(), "requested_width": pa.int32()}


class DamagedPlanError(FluxbatchError):
    """A plan file, or rejected.parquet, cannot be read whole."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One plan file, known by its footer alone."""

    path: Path
    part: PlanPart
    identity: dict[str, Any]  # the manifest and rules that it was planned from
    schema: pa.Schema
    group_starts: np.ndarray  # and one more: the number of rows
    supersedes: Mapping[int, frozenset[int] | None]  # shard: places of the rows that a redo makes again; None: all
    settings: dict[str, Any] | None  # output-affecting ones, from this part on
    reuse: dict[str, Any] | None  # the earlier run that this part was compared with; `taken`: its images are these rows

    @property
    def is_redo(self) -> bool:
        return self.part.kind == "redo"


class RunPlan:
    """The plan of a run folder. Reads footers until rows are asked for, then the row groups that hold them."""

    def __init__(self, files: list[PlanFile], *, num_rejected: int, planned: dict[str, Any] | None) -> None:
        self.files = files
        self.num_rejected = num_rejected
        self.planned = planned  # the manifest and rules that were compared with this plan last
        self.revisions: dict[int, int] = {}
        self._dropped: dict[int, frozenset[int] | range] = {}  # a range: the whole shard
        for file in files:
            for shard, places in file.supersedes.items():
                self._drop(shard, places)
                self.revisions[shard] = file.part.index
        self._group = lru_cache(maxsize=2)(self._read_group)  # a shard may lie across the edge of two

    @classmethod
    def open(cls, folder: RunFolder) -> RunPlan | None:
        """The plan as it stands; None before the first start."""
        files = list(_plan_files(folder))
        if not files:
            return None
        if not folder.rejected.exists():
            return cls(files, num_rejected=0, planned=None)
        try:
            metadata, footer = _read_footer(folder.rejected)
        except DamagedPlanError as error:  # derived from the manifest: the next start compares again and makes it anew
            log.warning("%s", error)
            return cls(files, num_rejected=0, planned=None)
        return cls(files, num_rejected=metadata.num_rows, planned=footer)

    @property
    def parts(self) -> tuple[PlanPart, ...]:
        return tuple(file.part for file in self.files)

    @property
    def num_rows(self) -> int:
        """Accepted rows; a retry or a redo is no new row."""
        return sum(part.num_rows for part in self.parts if part.kind == "rows")

    @property
    def schema(self) -> pa.Schema:
        """That of the first plan, for all shards have one schema."""
        return self.files[0].schema

    @property
    def seed_type(self) -> pa.DataType:
        """The type of all seeds: int64 if it holds those of the first plan, else uint64, else decimal128(20, 0)."""
        return self.schema.field("seed").type

    @property
    def settings(self) -> dict[str, Any] | None:
        """The output-affecting settings of the last redo that changed them; None: those that the job began with."""
        return next((file.settings for file in reversed(self.files) if file.settings is not None), None)

    def shards(self) -> Iterator[ShardPlan]:
        for part in self.parts:
            yield from self.shards_of(part)

    def shards_of(self, part: PlanPart) -> Iterator[ShardPlan]:
        return map(self.shard, range(part.first_shard, part.first_shard + part.num_shards))

    def shard(self, index: int) -> ShardPlan:
        """A shard as it is now, without the rows that a redo took away."""
        shard, dropped = self.first_shard(index), self._dropped.get(index)
        if dropped is None:
            return shard
        batches = tuple(batch for batch in shard.batches if _num_in(_places(shard, batch), dropped) < batch.num_rows)
        return replace(shard, batches=batches, revision=self.revisions[index], dropped=dropped)

    def first_shard(self, index: int) -> ShardPlan:
        """A shard as it was planned first."""
        return self._file(index).part.shard(index)

    def part(self, shard: int) -> PlanPart:
        """The part of the plan that a shard belongs to."""
        return self._file(shard).part

    def _drop(self, shard: int, places: frozenset[int] | None) -> None:
        whole = range(self.first_shard(shard).num_rows)
        before = self._dropped.get(shard, frozenset())
        if places is None or isinstance(before, range) or len(before | places) == len(whole):
            self._dropped[shard] = whole
        else:
            self._dropped[shard] = before | places

    def bucket_rows(self) -> dict[Bucket, int]:
        """The rows of each bucket, each row once, in the order of the plan."""
        rows: dict[Bucket, int] = {}
        for part in self.parts:
            for run in part.runs if part.kind != "retry" else ():
                rows[run.bucket] = rows.get(run.bucket, 0) + run.num_rows
        for index, dropped in self._dropped.items():
            file, shard = self._file(index), self.first_shard(index)
            for batch in shard.batches if file.part.kind != "retry" else ():
                rows[batch.bucket] -= _num_in(_places(shard, batch), dropped)
        return {bucket: number for bucket, number in rows.items() if number}

    def rows(self, shard: ShardPlan) -> pa.Table:
        """The rows of a shard in plan order, with all columns of the plan file."""
        return self._range(self._file(shard.index), shard.first_row, shard.num_rows)

    def batch(self, plan: BatchPlan) -> Batch:
        """A batch with its requests."""
        rows = self._range(self._file(plan.shard), plan.first_row, plan.num_rows)
        return Batch(plan=plan, requests=tuple(_requests(rows)))

    @property
    def reuse(self) -> dict[str, Any] | None:
        """What was compared with an earlier run and taken over from it, over all parts; None without one."""
        found = [(file.reuse, file.part.num_rows) for file in self.files if file.reuse]
        if not found:
            return None
        compared = [reuse for reuse, _ in found if not reuse["taken"]]
        first = (compared or [reuse for reuse, _ in found])[0]
        counts = {name: sum(reuse["rows"][name] for reuse in compared) for name in first["rows"]}
        counts["reused"] = sum(num_rows for reuse, num_rows in found if reuse["taken"])
        return {"from": first["from"], **counts, "examples": first["examples"]}

    def taken(self, shard: int) -> Path | None:
        """The run folder that a shard's images are taken over from; None for one that is drawn."""
        reuse = self._file(shard).reuse
        return Path(reuse["from"]) if reuse and reuse["taken"] else None

    def fingerprints(self) -> Iterator[pa.Table]:
        """The id and fingerprint of every row with its shard and its place in it, but for rows that were made again."""
        return self.live_rows(["id", "fingerprint"])

    def live_rows(self, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of every row, with `shard` and `place` in it, but for rows that were made again."""
        for file in self.files:
            first = 0
            with _naming_damage(file.path), pq.ParquetFile(file.path, page_checksum_verification=True) as rows:
                for batch in rows.iter_batches(columns=columns):
                    shard, place = np.divmod(np.arange(first, first + batch.num_rows), file.part.shard_size)
                    shard += file.part.first_shard
                    first += batch.num_rows
                    table = pa.Table.from_batches([batch]).append_column("shard", pa.array(shard))
                    yield self._live(table.append_column("place", pa.array(place)), shard, place)

    def _live(self, table: pa.Table, shard: np.ndarray, place: np.ndarray) -> pa.Table:
        revised = [index for index in np.unique(shard).tolist() if index in self._dropped]
        keep = np.ones(len(shard), bool)
        for index in revised:
            dropped = self._dropped[index]
            gone = isinstance(dropped, range) or np.isin(place, list(dropped))
            keep &= (shard != index) | ~np.broadcast_to(gone, shard.shape)
        return table.filter(pa.array(keep)) if revised else table

    def _file(self, shard: int) -> PlanFile:
        for file in self.files:
            if file.part.first_shard <= shard < file.part.first_shard + file.part.num_shards:
                return file
        raise IndexError(f"no plan file holds shard {shard}")

    def _range(self, file: PlanFile, first_row: int, num_rows: int) -> pa.Table:
        low, high = np.searchsorted(file.group_starts, [first_row, first_row + num_rows - 1], side="right") - 1
        groups = pa.concat_tables(self._group(file.path, group) for group in range(low, high + 1))
        return groups.slice(first_row - file.group_starts[low], num_rows)

    @staticmethod
    def _read_group(path: Path, group: int) -> pa.Table:
        with _naming_damage(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read_row_group(group)


def _plan_files(folder: RunFolder) -> Iterator[PlanFile]:
    index = 0
    while (path := folder.plan(index)).exists():
        metadata, footer = _read_footer(path)
        with _naming_damage(path):
            part = PlanPart.from_json(footer.pop("part"))
            supersedes = {
                int(shard): None if places is None else frozenset(places)
                for shard, places in footer.pop("supersedes", {}).items()
            }
            settings, reuse = footer.pop("settings", None), footer.pop("reuse", None)
            if part.num_rows != metadata.num_rows:
                raise ValueError(f"{metadata.num_rows} rows for a plan of {part.num_rows}")
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        yield PlanFile(path, part, footer, metadata.schema.to_arrow_schema(), starts, supersedes, settings, reuse)
        index += 1


def _read_footer(path: Path) -> tuple[pq.FileMetaData, dict[str, Any]]:
    with _naming_damage(path):
        metadata = pq.read_metadata(path)
        return metadata, json.loads(metadata.metadata[FOOTER])


@contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise DamagedPlanError(f"{path}: not a file that fluxbatch wrote whole: {error}") from error


def _places(shard: ShardPlan, batch: BatchPlan) -> range:
    """Where a batch's rows stand in their shard."""
    first = batch.first_row - shard.first_row
    return range(first, first + batch.num_rows)


def _num_in(places: range, dropped: frozenset[int] | range) -> int:
    return len(places) if isinstance(dropped, range) else sum(place in dropped for place in places)


def _requests(rows: pa.Table) -> Iterator[Request]:
    names = list(Request.__dataclass_fields__)
    for row in rows.select(names).to_pylist():
        yield Request(**{**row, "seed": int(row["seed"])})


# Writing.


def plan_schema(extra: pa.Schema, *, seeds: tuple[int, int], floored: bool) -> pa.Schema:
    """The schema of a first plan, whose seeds lie in this range; with requested sizes if rows may be `floored`."""
    low, high = seeds
    seed_type = next(kind for kind, (least, most) in SEED_RANGES.items() if least <= low and high <= most)
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
            **(REQUESTED if floored else {}),
            **({"extra": pa.struct(list(extra))} if len(extra) else {}),
            "row": pa.int64(),
            "bucket": pa.string(),
            "batch": pa.int64(),
            "shard": pa.int64(),
            "slot": pa.int64(),
            "fingerprint": pa.string(),
        }
    )


def publish_part(
    folder: RunFolder,
    part: PlanPart,
    rows: Iterable[pa.Table],
    *,
    schema: pa.Schema,
    identity: dict[str, Any],
    supersedes: Mapping[int, Sequence[int] | None] | None = None,
    settings: dict[str, Any] | None = None,
    reuse: dict[str, Any] | None = None,
) -> bool:
    """Write accepted rows, which come in plan order. False when another process has published this part.

    A redo says which places of which shards its rows supersede, and the settings that hold from here on if they are
    others: all of it becomes true with this one file. `reuse` says what an earlier run has of the rows.
    """
    redo = {"supersedes": supersedes, "settings": settings} if supersedes is not None else {}
    footer = {"part": part.to_json(), **redo, **({"reuse": reuse} if reuse else {}), **identity}
    schema = schema.with_metadata({FOOTER: json.dumps(footer).encode()})

    def write(file: BinaryIO) -> None:
        first_row = 0
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["bucket"],
            write_statistics=False,
            write_page_checksum=True,
        ) as writer:
            for group in _grouped(rows):
                writer.write_table(_placed(group, part, first_row, schema))
                first_row += group.num_rows
        assert first_row == part.num_rows, f"{first_row} rows for a plan of {part.num_rows}"

    folder.success.unlink(missing_ok=True)  # a plan that grows is not done
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
    columns["seed"] = _fitting_seeds(columns["seed"], schema)
    if "requested_height" in columns and "requested_height" not in schema.names:
        _refuse_floored(columns["requested_height"])
    if "extra" in columns or "extra" in schema.names:
        columns["extra"] = _fitting_extra(columns.get("extra"), rows.num_rows, schema)
    return pa.table({name: columns[name] for name in schema.names}).cast(schema)


# What added rows must keep to: the columns and types of the first plan, for they are those of all shards.


def _fitting_seeds(seeds: pa.ChunkedArray, schema: pa.Schema) -> pa.ChunkedArray:
    kind = schema.field("seed").type
    try:
        return seeds.cast(kind)
    except pa.ArrowInvalid as error:
        least, most = SEED_RANGES[kind]
        bad = next(seed for seed in seeds.to_pylist() if not least <= seed <= most)
        raise ManifestError(
            f"seeds of added rows must fit {kind}, the type that this run began with, got {bad}; use another output.dir"
        ) from error


def _refuse_floored(requested: pa.ChunkedArray) -> None:
    if requested.null_count < len(requested):
        raise ManifestError(
            "manifest.size_policy must stay reject, for this run began with it and has no place for requested sizes, "
            "got floor; use another output.dir"
        )


def _fitting_extra(extra: pa.ChunkedArray | None, num_rows: int, schema: pa.Schema) -> pa.ChunkedArray:
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


class RejectedFile:
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

    def close(self) -> bytes:
        """The content of the finished file."""
        self._flush()
        self._writer.close()
        return self._file.getvalue()

    def _flush(self) -> None:
        rows = pa.Table.from_pylist([asdict(rejection) for rejection in self._held], self._writer.schema)
        self._writer.write_table(rows)
        self._held = []
