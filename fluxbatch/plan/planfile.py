"""The plan as its files tell it: footers at once, rows a row group at a time. Writes nothing (`plan_writer` does).

A footer says what its file is: the arithmetic of its part, and the manifest and rules that it was planned from.
Knows nothing of how rows are checked, compared or brought into order.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.errors import FluxbatchError
from fluxbatch.plan.cut import PlanPart
from fluxbatch.records import Batch, BatchPlan, Bucket, Request, ShardPlan
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

FOOTER = b"fluxbatch"
Supersedes = Mapping[int, Iterable[int] | None]  # shard: places of the rows that a redo makes again; None: all


class DamagedPlanError(FluxbatchError):
    """A plan file, or rejected.parquet, cannot be read whole."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One plan file, known by its footer alone."""

    path: Path
    part: PlanPart
    identity: dict[str, Any]  # the manifest and rules that it was planned from
    metadata: pq.FileMetaData  # read once: that of 100 million rows takes longer than a row group
    group_starts: np.ndarray  # and one more: the number of rows
    supersedes: Mapping[int, frozenset[int] | None]  # shard: places of the rows that a redo makes again; None: all
    settings: dict[str, Any] | None  # output-affecting ones, from this part on
    reuse: dict[str, Any] | None  # the earlier run that this part was compared with; `taken`: its images are these rows


class RunPlan:
    """The plan of a run folder. Reads footers until rows are asked for, then the row groups that hold them."""

    def __init__(self, files: list[PlanFile], *, num_rejected: int, planned: dict[str, Any] | None) -> None:
        self.files = files
        self._with_shards = [file for file in files if file.part.num_shards]
        self._first_shards = [file.part.first_shard for file in self._with_shards]
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

    def with_part(self, part: PlanPart, supersedes: Supersedes) -> RunPlan:
        """As it would be with one more part, for arithmetic ahead of its file: there are no rows to read."""
        places = {shard: None if rows is None else frozenset(rows) for shard, rows in supersedes.items()}
        ahead = replace(self.files[-1], part=part, supersedes=places, settings=None, reuse=None)
        return RunPlan([*self.files, ahead], num_rejected=self.num_rejected, planned=self.planned)

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
        return self.files[0].metadata.schema.to_arrow_schema()

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
        batches = () if isinstance(dropped, range) else tuple(self._with_rows_kept(shard, dropped))
        return replace(shard, batches=batches, revision=self.revisions[index], dropped=dropped)

    @staticmethod
    def _with_rows_kept(shard: ShardPlan, dropped: frozenset[int]) -> Iterator[BatchPlan]:
        for batch in shard.batches:
            if _num_in(_places(shard, batch), dropped) < batch.num_rows:
                yield batch

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

    def taken(self, shard: int) -> str | None:
        """The run folder that a shard's images are taken over from; None for one that is drawn."""
        reuse = self._file(shard).reuse
        return reuse["from"] if reuse and reuse["taken"] else None

    def fingerprints(self) -> Iterator[pa.Table]:
        """The id and fingerprint of every row with its shard and its place in it, but for rows that were made again."""
        return self.live_rows(["id", "fingerprint"])

    def live_rows(self, columns: list[str]) -> Iterator[pa.Table]:
        """Columns of every row, with `shard` and `place` in it, but for rows that were made again."""
        for file in self.files:
            first = 0
            with (
                _naming_damage(file.path),
                file.path.open("rb") as source,
                pq.ParquetFile(source, page_checksum_verification=True) as rows,
            ):
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
        at = bisect_right(self._first_shards, shard) - 1
        if at < 0 or shard >= self._first_shards[at] + self._with_shards[at].part.num_shards:
            raise IndexError(f"no plan file holds shard {shard}")
        return self._with_shards[at]

    def _range(self, file: PlanFile, first_row: int, num_rows: int) -> pa.Table:
        low, high = np.searchsorted(file.group_starts, [first_row, first_row + num_rows - 1], side="right") - 1
        groups = pa.concat_tables(self._group(file.part.index, group) for group in range(low, high + 1))
        return groups.slice(first_row - file.group_starts[low], num_rows)

    def _read_group(self, part: int, group: int) -> pa.Table:
        path, metadata = self.files[part].path, self.files[part].metadata
        with (
            _naming_damage(path),
            path.open("rb") as source,
            pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True) as file,
        ):
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
        yield PlanFile(path, part, footer, metadata, starts, supersedes, settings, reuse)
        index += 1


def _read_footer(path: Path) -> tuple[pq.FileMetaData, dict[str, Any]]:
    with _naming_damage(path):
        with path.open("rb") as source:
            metadata = pq.read_metadata(source)
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
