"""What each row is known by, in DuckDB: which rows are twice, edited, gone, or unchanged since an earlier run.

DuckDB answers what needs all ids at once, within a memory limit and on disk beyond it. Knows no whole row.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa

from fluxbatch.config import ManifestConfig
from fluxbatch.errors import FluxbatchError, ManifestError
from fluxbatch.manifest.files import Manifest
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.row_spool import BUCKET
from fluxbatch.records import Bucket, Rejection

MAX_THREADS = 4  # of DuckDB: each one claims its part of the memory limit
INSERT_ROWS = 524_288  # 12 times as fast as a chunk at a time, and a transaction over all of them escapes the limit
FETCH_ROWS = 65_536  # of duplicates, as Python objects
KEYS = ("row", "id", "seed", "fingerprint", "drawing", *BUCKET)

CREATE_TABLES = """
SET enable_progress_bar = false;
CREATE TABLE accepted (row BIGINT, id VARCHAR, seed DECIMAL(20, 0), fingerprint VARCHAR,
                       height INTEGER, width INTEGER, num_inference_steps INTEGER, negative_pass BOOLEAN,
                       shared_guidance DOUBLE, drawing VARCHAR);
CREATE TABLE rejected (id VARCHAR);
CREATE TABLE planned (id VARCHAR, fingerprint VARCHAR, shard BIGINT, place BIGINT);
CREATE TABLE earlier (id VARCHAR, drawing VARCHAR, shard BIGINT, written BOOLEAN);
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
SELECT DISTINCT planned.id, accepted.row
FROM planned LEFT JOIN accepted ON accepted.id = planned.id
WHERE accepted.fingerprint <> planned.fingerprint
   OR (accepted.id IS NULL AND planned.id IN (SELECT id FROM rejected))
"""
COUNT_DELETED = "SELECT count(DISTINCT id) FROM planned ANTI JOIN accepted USING (id)"
DROP_PLANNED = "DELETE FROM accepted WHERE id IN (SELECT id FROM planned)"
COUNT_BUCKETS = f"SELECT {', '.join(BUCKET)}, count(*) FROM accepted GROUP BY ALL"
COUNT_ADDED_BUCKETS = f"SELECT {', '.join(BUCKET)}, count(*) FROM accepted ANTI JOIN planned USING (id) GROUP BY ALL"
COUNT_EDITED_BUCKETS = f"SELECT {', '.join(BUCKET)}, count(*) FROM accepted JOIN edited USING (row) GROUP BY ALL"
ROWS_TO_PLAN = """
SELECT row FROM accepted ANTI JOIN planned USING (id)
UNION ALL SELECT row FROM edited WHERE row IS NOT NULL ORDER BY row
"""
EDITED_PLACES = """
SELECT shard, list(place ORDER BY place) FROM planned JOIN edited USING (id) GROUP BY shard ORDER BY shard
"""
COMPARE = """
CREATE TABLE compared AS
SELECT accepted.row, id, CASE WHEN last.drawing IS NULL THEN 'added'
                              WHEN last.drawing <> accepted.drawing THEN 'changed'
                              WHEN last.written THEN 'reused' ELSE 'unwritten' END AS state
FROM accepted LEFT JOIN (SELECT id, arg_max(drawing, shard) AS drawing, arg_max(written, shard) AS written
                         FROM earlier GROUP BY id) AS last USING (id)
"""
ADD_REMOVED = "INSERT INTO compared SELECT DISTINCT NULL, id, 'removed' FROM earlier ANTI JOIN accepted USING (id)"
TAKE = """
CREATE TABLE taken AS SELECT * FROM accepted WHERE row IN (SELECT row FROM compared WHERE state = 'reused');
DELETE FROM accepted WHERE row IN (SELECT row FROM taken);
"""
COMPARED = ("reused", "changed", "added", "removed", "unwritten")
COMPARED_EXAMPLES = 5


class Earlier(Protocol):
    """Another run, as far as planning goes: its folder, its batch sizes, and what its rows were drawn from."""

    @property
    def path(self) -> str: ...

    @property
    def sizes(self) -> Mapping[Bucket, int]: ...

    def drawings(self) -> Iterator[pa.Table]:
        """Columns id, drawing, shard (the last one of an id counts) and written (whether its image is there)."""
        ...


@contextmanager
def open_keys(memory_gib: float) -> Iterator[RowKeys]:
    """DuckDB with a temporary folder (TMPDIR decides where) that is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch:
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{int(memory_gib * 1024)}MiB",
            "temp_directory": scratch,
            "threads": min(MAX_THREADS, os.cpu_count() or 1),
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,  # never a network
        }
        try:
            with duckdb.connect(config=config) as connection:
                yield RowKeys(connection)
        except duckdb.Error as error:
            raise FluxbatchError(
                f"planning with manifest.memory_gib={memory_gib:g} in {scratch} failed: {error}"
            ) from error


class RowKeys:
    """What each row is known by, in DuckDB: enough to find duplicates and to compare with an earlier plan."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._db = connection
        self._db.execute(CREATE_TABLES)
        self._held: dict[str, list[pa.Table]] = {"accepted": [], "rejected": [], "planned": [], "earlier": []}

    def add(self, accepted: pa.Table) -> None:
        self._hold("accepted", accepted.select([name for name in KEYS if name in accepted.column_names]))

    def add_rejected(self, rejections: list[Rejection]) -> None:
        ids = pa.array([rejection.id for rejection in rejections], pa.string())
        self._hold("rejected", pa.table({"id": ids}))

    def add_planned(self, plan: RunPlan) -> None:
        for rows in plan.fingerprints():
            self._hold("planned", rows)
        self._flush("planned")

    def drop_duplicates(self, manifest: Manifest, cfg: ManifestConfig) -> Iterator[Rejection]:
        """Leave the first row of each id. The others are refused one by one, or all at once with an exception."""
        self._flush("accepted")
        self._flush("rejected")
        self._db.execute(FIND_DUPLICATES)
        found = self._db.execute("SELECT row, id, first FROM duplicate ORDER BY row")
        while rows := found.fetchmany(FETCH_ROWS):
            if cfg.on_duplicate == "refuse":
                raise ManifestError(self._duplicate_message(*rows[0], manifest=manifest))
            for row, row_id, first in rows:
                message = f"id must stand once, is that of {manifest.locate(first)} too"
                yield Rejection(row=row, id=row_id, column="id", reason="duplicate_id", message=message)
        self._db.execute(DROP_DUPLICATES)

    def _duplicate_message(self, row: int, row_id: str, first: int, *, manifest: Manifest) -> str:
        return (
            f"id {quoted(row_id)} stands twice: {manifest.locate(first)} and {manifest.locate(row)}; "
            f"{self._value('SELECT count(*) FROM duplicate')} duplicate row(s) in all; "
            "manifest.on_duplicate=keep_first keeps the first of each"
        )

    def find_edited(self) -> int:
        """How many planned rows have other content now."""
        self._db.execute(FIND_EDITED)
        return self.num_edited()

    def num_edited(self) -> int:
        return self._value("SELECT count(*) FROM edited")

    def edited_examples(self, limit: int, *, rejected: bool = False) -> list[tuple[str, int | None, int, int]]:
        """Some edited rows: id, row of the manifest (None: it is rejected now), shard and place in the plan.

        With `rejected` only such as are rejected now.
        """
        query = "SELECT id, row, min(shard), arg_min(place, shard) FROM edited JOIN planned USING (id)"
        chosen = "WHERE row IS NULL" if rejected else ""
        return self._db.execute(f"{query} {chosen} GROUP BY id, row ORDER BY id LIMIT {limit}").fetchall()

    def edited_counts(self) -> dict[Bucket, int]:
        return self._bucket_counts(COUNT_EDITED_BUCKETS)

    def edited_rows(self) -> np.ndarray:
        """The numbers of the edited rows in the manifest, ascending."""
        return self._db.execute("SELECT row FROM edited WHERE row IS NOT NULL ORDER BY row").fetchnumpy()["row"]

    def edited_places(self) -> dict[int, list[int]]:
        """Where the plan has edited rows, failed attempts too: by shard, their places in it."""
        return dict(self._db.execute(EDITED_PLACES).fetchall())

    def added_counts(self, table: str = "accepted") -> dict[Bucket, int]:
        """The rows of each bucket that no plan has yet."""
        return self._bucket_counts(COUNT_ADDED_BUCKETS.replace("accepted", table))

    def rows_to_plan(self) -> np.ndarray:
        """The numbers of the rows that are added or edited, ascending."""
        return self._db.execute(ROWS_TO_PLAN).fetchnumpy()["row"]

    def num_deleted(self) -> int:
        """How many planned rows are gone from the manifest."""
        return self._value(COUNT_DELETED)

    def drop_planned(self) -> None:
        """Leave only rows that no plan has yet."""
        self._db.execute(DROP_PLANNED)

    def take(self, earlier: Earlier, *, removed: bool) -> dict[str, Any]:
        """Set aside the rows whose images another run has; what became of all rows since, with examples."""
        for rows in earlier.drawings():
            self._hold("earlier", rows)
        self._flush("earlier")
        self._db.execute(COMPARE)
        if removed:
            self._db.execute(ADD_REMOVED)
        self._db.execute(TAKE)
        counts = dict(self._db.execute("SELECT state, count(*) FROM compared GROUP BY state").fetchall())
        digest = hashlib.sha256(self.rows("taken").tobytes()).hexdigest()
        return {
            "from": earlier.path,
            "taken": False,
            "digest": digest,  # two ranks that saw the other run in two states must not mix their plans
            "rows": {state: counts.get(state, 0) for state in COMPARED},
            "examples": {state: self._compared(state) for state in COMPARED if state != "reused" and state in counts},
        }

    def _compared(self, state: str) -> list[str]:
        query = "SELECT id FROM compared WHERE state = $1 ORDER BY row, id LIMIT $2"
        return [row_id for (row_id,) in self._db.execute(query, [state, COMPARED_EXAMPLES]).fetchall()]

    def counts(self, table: str = "accepted") -> dict[Bucket, int]:
        return self._bucket_counts(COUNT_BUCKETS.replace("accepted", table))

    def _bucket_counts(self, query: str) -> dict[Bucket, int]:
        return {Bucket(*shape): number for *shape, number in self._db.execute(query).fetchall()}

    def seed_range(self) -> tuple[int, int]:
        [(low, high)] = self._db.execute("SELECT min(seed), max(seed) FROM accepted").fetchall()
        return int(low or 0), int(high or 0)

    def rows(self, table: str = "accepted") -> np.ndarray:
        """The numbers of the rows that are left, ascending: 8 bytes a row, the only thing held for each."""
        return self._db.execute(f"SELECT row FROM {table} ORDER BY row").fetchnumpy()["row"]

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


def quoted(row_id: str) -> str:
    return repr(row_id if len(row_id) <= 80 else row_id[:77] + "...")
