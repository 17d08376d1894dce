"""What lies between manifest and plan: which rows are twice, new, edited or gone, and their order.

DuckDB answers what needs all ids at once, within a memory limit and on disk beyond it. The rows need no sort: those of
one bucket come in manifest order already, so they are spooled by bucket and read back bucket by bucket.
Knows neither tensors nor the format of the plan files, and never holds all rows.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fluxbatch import commit
from fluxbatch.config import JobConfig, ManifestConfig, PlanConfig
from fluxbatch.errors import FluxbatchError, ManifestError
from fluxbatch.folder import RunFolder
from fluxbatch.manifest import Manifest
from fluxbatch.plan import PlanPart, SizeOf, plan_part, plan_retry
from fluxbatch.planfile import RejectedFile, RunPlan, plan_schema, publish_part
from fluxbatch.records import Bucket, Rejection, RowRules
from fluxbatch.rows import drawing_digests

MAX_THREADS = 4  # of DuckDB: each one claims its part of the memory limit
INSERT_ROWS = 524_288  # 12 times as fast as a chunk at a time, and a transaction over all of them escapes the limit
NAMED_EDITS = 20  # edited rows told with their columns
OTHERWISE = "run.on_change=redo makes them again, and another output.dir keeps both"
PLACES = ("row", "bucket", "batch", "shard", "slot", "fingerprint", "negative_pass")
FETCH_ROWS = 65_536  # of duplicates, as Python objects
BUCKET = ("height", "width", "num_inference_steps", "negative_pass")
KEYS = ("row", "id", "seed", "fingerprint", "drawing", *BUCKET)

CREATE_TABLES = """
SET enable_progress_bar = false;
CREATE TABLE accepted (row BIGINT, id VARCHAR, seed DECIMAL(20, 0), fingerprint VARCHAR,
                       height INTEGER, width INTEGER, num_inference_steps INTEGER, negative_pass BOOLEAN,
                       drawing VARCHAR);
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
COUNT_EDITED_BUCKETS = f"SELECT {', '.join(BUCKET)}, count(*) FROM accepted JOIN edited USING (row) GROUP BY ALL"
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


@dataclass(frozen=True, slots=True)
class Survey:
    """A manifest in numbers: rows of each bucket, rejected rows by reason, and up to three examples of each reason."""

    rows: int
    counts: dict[Bucket, int]
    rejected: dict[str, int]
    examples: dict[str, list[Rejection]]
    taken: dict[Bucket, int]  # further rows, whose images an earlier run has
    reuse: dict[str, Any] | None  # what the comparison with it found


@dataclass(frozen=True, slots=True)
class Changes:
    """What a start found against the plan before it. `unchanged`: the same manifest and rules, so no row was read."""

    added: int
    deleted: int
    rejected: int
    unchanged: bool
    redone: int = 0  # rows to be made again because they were edited
    reused: int = 0  # of the rows added, those whose images an earlier run has


def survey(manifest: Manifest, rules: RowRules, cfg: ManifestConfig, *, earlier: Earlier | None = None) -> Survey:
    """Check and count all rows. Keeps no prompts, writes nothing to the run folder."""
    reasons: Counter[str] = Counter()
    examples: dict[str, list[Rejection]] = defaultdict(list)
    with _open_keys(cfg.memory_gib) as keys:
        for rejection in _rejections(keys, manifest, rules, cfg, compared=earlier is not None):
            reasons[rejection.reason] += 1
            if len(examples[rejection.reason]) < 3:
                examples[rejection.reason].append(rejection)
        reuse = keys.take(earlier, removed=True) if earlier else None
        counts, taken = keys.counts(), keys.counts("taken") if earlier else {}
    rows = sum(counts.values()) + sum(taken.values()) + reasons.total()
    return Survey(rows, counts, dict(reasons), dict(examples), taken, reuse)


def _rejections(
    keys: _Keys, manifest: Manifest, rules: RowRules, cfg: ManifestConfig, *, compared: bool
) -> Iterator[Rejection]:
    for chunk in manifest.chunks(rules, hashed=compared):
        keys.add(_with_drawings(chunk.accepted) if compared else chunk.accepted)
        yield from chunk.rejected
    yield from keys.drop_duplicates(manifest, cfg)


def _with_drawings(accepted: pa.Table) -> pa.Table:
    return accepted.append_column("drawing", drawing_digests(accepted))


def prepare(
    folder: RunFolder,
    manifest: Manifest,
    rules: RowRules,
    cfg: JobConfig,
    *,
    size_of: SizeOf | None = None,
    earlier: Earlier | None = None,
) -> tuple[RunPlan, Changes]:
    """Bring the plan of the run folder up to the manifest, and return it.

    `size_of` answers the batch sizes of rows that are new; it is never asked about rows that were planned before.
    New rows whose images `earlier` has become a part of their own, behind those to be drawn.

    The first start writes the plan; a later one adds the rows that are new and refuses edited ones. Any number of
    processes may do this at once: the one that publishes first wins, the others read its plan back.
    """
    identity = {"manifest_digest": manifest.digest, "rules": asdict(rules)}
    plan = RunPlan.open(folder)
    if plan is not None and plan.planned == identity:
        return plan, Changes(added=0, deleted=0, rejected=plan.num_rejected, unchanged=True)
    with _open_keys(cfg.manifest.memory_gib) as keys, _open_spool() as spool:
        refused = RejectedFile(identity)
        for chunk in manifest.chunks(rules):
            known = chunk.accepted if plan else chunk.accepted.drop_columns("fingerprint")  # nothing to compare yet
            keys.add(_with_drawings(known) if earlier else known)
            keys.add_rejected(chunk.rejected)
            refused.add(chunk.rejected)
            spool.add_chunk(chunk.accepted)
        refused.add(keys.drop_duplicates(manifest, cfg.manifest))
        deleted = redone = 0
        if plan:
            keys.add_planned(plan)
            edited = keys.find_edited()
            if edited and cfg.run.on_change == "refuse":
                raise ManifestError(_edits_sentence(keys, spool, plan, manifest, rules, cfg))
            if edited:
                published = _publish_redo(folder, plan, keys, spool, cfg.plan, size_of, identity=identity)
                if not published:
                    return prepare(folder, manifest, rules, cfg, size_of=size_of, earlier=earlier)
                plan, redone = published, edited
            deleted = keys.drop_planned()
        floored = rules.size_policy == "floor"
        schema = plan.schema if plan else plan_schema(manifest.extra_schema, seeds=keys.seed_range(), floored=floored)
        reuse = keys.take(earlier, removed=plan is None) if earlier else None
        last = plan.parts[-1] if plan else None
        part = _next_part(keys.counts(), last, cfg.plan, size_of)
        ours = _publish_rows(folder, part, keys, "accepted", spool, schema=schema, identity=identity, reuse=reuse)
        added = part.num_rows
        if ours and earlier and reuse and reuse["rows"]["reused"]:
            taken = _taken_part(keys.counts("taken"), part, cfg.plan, earlier, last=last)
            reuse |= {"taken": True}
            ours = _publish_rows(folder, taken, keys, "taken", spool, schema=schema, identity=identity, reuse=reuse)
            added += taken.num_rows
    if not ours:  # another process has planned another state of the manifest meanwhile
        return prepare(folder, manifest, rules, cfg, size_of=size_of, earlier=earlier)
    # After the plan: a crash in between costs a second comparison, the other order could lose the rows added.
    commit.replace_file(folder.rejected, refused.close())
    planned = _reopened(folder)
    reused = added - part.num_rows
    return planned, Changes(added, deleted, planned.num_rejected, unchanged=False, redone=redone, reused=reused)


def _taken_part(
    counts: Mapping[Bucket, int], drawn: PlanPart, cfg: PlanConfig, earlier: Earlier, *, last: PlanPart | None
) -> PlanPart:
    """Rows that are taken over, in launches of the sizes beside them: should an image be lost, they can be drawn.

    They follow the rows to be `drawn`, or the `last` part where there are none of these and no plan file of theirs.
    """
    if last is None or drawn.num_rows:
        last = drawn
    sizes = {**earlier.sizes, **{run.bucket: run.batch_size for run in drawn.runs}}
    return _next_part(counts, last, cfg, lambda bucket, num_rows: min(sizes.get(bucket, num_rows), cfg.shard_size))


def add_retry(folder: RunFolder, plan: RunPlan, failed: Mapping[int, set[str]]) -> RunPlan:
    """Plan failed rows again, given as ids of each shard: a new part of kind `retry`. No failed rows, no part."""
    counts: Counter[Bucket] = Counter()
    with _open_spool() as spool:
        for bucket, rows in _rows_by_bucket(plan, failed):
            spool.add(bucket, rows)
            counts[bucket] += rows.num_rows
        if not counts:
            return plan
        part = plan_retry(counts, plan.parts)
        identity = plan.files[-1].identity
        ours = publish_part(folder, part, spool.rows(part), schema=plan.schema, identity=identity)
    planned = _reopened(folder)
    if not ours and planned.parts[part.index].kind != "retry":  # another process has added rows meanwhile
        return add_retry(folder, planned, failed)
    return planned


def _reopened(folder: RunFolder) -> RunPlan:
    plan = RunPlan.open(folder)
    assert plan is not None, "published just now"
    return plan


def add_redo(
    folder: RunFolder, plan: RunPlan, cfg: JobConfig, *, settings: dict[str, Any], size_of: SizeOf | None = None
) -> RunPlan:
    """Plan every row again, for other output-affecting settings: a new part of kind `redo`, which holds them too."""
    counts: Counter[Bucket] = Counter()
    supersedes = {shard.index: None for shard in plan.shards() if shard.num_kept}
    with _open_spool() as spool:
        for bucket, rows in _rows_by_bucket(plan, _LiveIds(plan)):
            spool.add(bucket, rows)
            counts[bucket] += rows.num_rows
        part = _next_part(counts, plan.parts[-1], cfg.plan, size_of, kind="redo")
        ours = publish_part(
            folder, part, spool.rows(part), schema=plan.schema, identity=plan.files[-1].identity,
            supersedes=supersedes, settings=settings,
        )  # fmt: skip
    planned = _reopened(folder)
    if not ours and planned.settings != settings:  # another process has added rows meanwhile
        return add_redo(folder, planned, cfg, settings=settings, size_of=size_of)
    return planned


class _LiveIds(Mapping[int, set[str]]):
    """By shard, the ids that no redo has taken away; each once, for a retry repeats rows of other parts."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        parts = [part for part in plan.parts if part.kind != "retry"]
        self._shards = {shard.index: shard for part in parts for shard in plan.shards_of(part) if shard.num_kept}

    def __getitem__(self, index: int) -> set[str]:
        rows = self._plan.rows(self._shards[index])["id"].to_pylist()
        return {row_id for place, row_id in enumerate(rows) if place not in self._shards[index].dropped}

    def __iter__(self) -> Iterator[int]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def _rows_by_bucket(plan: RunPlan, ids: Mapping[int, set[str]]) -> Iterator[tuple[Bucket, pa.Table]]:
    """Rows of the plan, given as ids of each shard."""
    for index in sorted(ids):
        shard = plan.first_shard(index)
        rows = plan.rows(shard)
        wanted = pc.is_in(rows["id"], pa.array(sorted(ids[index]), pa.string()))
        first = 0
        for bucket, batches in groupby(shard.batches, key=lambda batch: batch.bucket):
            num_rows = sum(batch.num_rows for batch in batches)
            found = rows.slice(first, num_rows).filter(wanted.slice(first, num_rows))
            if found.num_rows:
                yield bucket, found
            first += num_rows


def _publish_redo(
    folder: RunFolder,
    plan: RunPlan,
    keys: _Keys,
    spool: _Spool,
    cfg: PlanConfig,
    size_of: SizeOf | None,
    *,
    identity: dict[str, Any],
) -> RunPlan | None:
    """Plan edited rows again, as they are now; None where another process has planned something else meanwhile."""
    gone = [row_id for row_id, row, *_ in keys.edited_examples(NAMED_EDITS) if row is None]
    if gone:
        raise ManifestError(
            f"rows of the plan were edited so that they are rejected now (id {', '.join(map(_quoted, gone))}), and "
            "run.on_change=redo cannot make them; mend them, or take them out of the manifest"
        )
    part = _next_part(keys.edited_counts(), plan.parts[-1], cfg, size_of, kind="redo")
    rows = spool.rows(part, keys.edited_rows())
    places = keys.edited_places()
    publish = publish_part(folder, part, rows, schema=plan.schema, identity=identity, supersedes=places)
    planned = _reopened(folder)
    same = publish or (planned.files[part.index].identity == identity and planned.parts[part.index].kind == "redo")
    return planned if same else None


def _edits_sentence(
    keys: _Keys, spool: _Spool, plan: RunPlan, manifest: Manifest, rules: RowRules, cfg: JobConfig
) -> str:
    """Which rows were edited, and in which columns; which defaults changed, if that is why."""
    number, examples = keys.num_edited(), keys.edited_examples(NAMED_EDITS)
    new = {row["id"]: row for row in spool.chosen(sorted(row for _, row, *_ in examples if row is not None))}
    told = ", ".join(
        f"{_quoted(row_id)} ({_edited_columns(plan, new.get(row_id), *at)})" for row_id, _, *at in examples
    )
    ids = f"(id {told}{', ...' if number > len(examples) else ''})"
    before, now = plan.files[-1].identity["rules"], asdict(rules)
    changed = [f"{_key(name, cfg)} was {before[name]}, is {now[name]}" for name in now if before[name] != now[name]]
    if changed:
        return f"{', '.join(changed)}: that changes {number} planned rows {ids}; {OTHERWISE}"
    place = "" if manifest.has_ids else "; without an id column a row is known by its place only"
    return f"{number} planned rows were edited since {ids}{place}; give them new ids, or: {OTHERWISE}"


def _edited_columns(plan: RunPlan, new: dict[str, Any] | None, shard: int, place: int) -> str:
    if new is None:
        return "rejected now"
    [old] = plan.rows(plan.first_shard(shard)).slice(place, 1).to_pylist()
    old, new = ({**row, **(row.get("extra") or {})} for row in (old, new))
    names = [name for name in old.keys() | new.keys() if name not in ("extra", *PLACES)]
    return ", ".join(sorted(name for name in names if old.get(name) != new.get(name))) or "content"


def _key(name: str, cfg: JobConfig) -> str:
    """The dotted key of a row rule."""
    group = next((group for group in ("sampler", "manifest", "model") if hasattr(getattr(cfg, group), name)), None)
    return f"{group}.{name}" if group else f"output.image_format's {name}"


def _quoted(row_id: str) -> str:
    return repr(row_id if len(row_id) <= 80 else row_id[:77] + "...")


def _next_part(
    counts: Mapping[Bucket, int],
    last: PlanPart | None,
    cfg: PlanConfig,
    size_of: SizeOf | None = None,
    *,
    kind: str = "rows",
) -> PlanPart:
    if last is None:
        return plan_part(counts, plan=cfg, size_of=size_of)
    shard, batch = last.first_shard + last.num_shards, last.first_batch + last.num_batches
    return plan_part(
        counts, plan=cfg, size_of=size_of, index=last.index + 1, kind=kind, first_shard=shard, first_batch=batch
    )


def _publish_rows(
    folder: RunFolder,
    part: PlanPart,
    keys: _Keys,
    table: str,
    spool: _Spool,
    *,
    schema: pa.Schema,
    identity: dict[str, Any],
    reuse: dict[str, Any] | None,
) -> bool:
    """Write the rows of a table of keys as this part; False when the part that stands there is of another manifest."""
    if part.index and not part.num_rows:
        return True
    rows = spool.rows(part, keys.rows(table) if part.num_rows < spool.num_rows else None)
    if publish_part(folder, part, rows, schema=schema, identity=identity, reuse=reuse):
        return True
    standing = _reopened(folder).files[part.index]
    return standing.identity == identity and standing.reuse == reuse


# The scratch side: keys in DuckDB, rows in a spool.


@contextmanager
def _open_keys(memory_gib: float) -> Iterator[_Keys]:
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
                yield _Keys(connection)
        except duckdb.Error as error:
            raise FluxbatchError(
                f"planning with manifest.memory_gib={memory_gib:g} in {scratch} failed: {error}"
            ) from error


@contextmanager
def _open_spool() -> Iterator[_Spool]:
    """A spool in a temporary folder of the same kind."""
    with (
        tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch,
        closing(_Spool(Path(scratch) / "rows.arrow")) as spool,
    ):
        yield spool


class _Keys:
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
            f"id {_quoted(row_id)} stands twice: {manifest.locate(first)} and {manifest.locate(row)}; "
            f"{self._value('SELECT count(*) FROM duplicate')} duplicate row(s) in all; "
            "manifest.on_duplicate=keep_first keeps the first of each"
        )

    def find_edited(self) -> int:
        """How many planned rows have other content now."""
        self._db.execute(FIND_EDITED)
        return self.num_edited()

    def num_edited(self) -> int:
        return self._value("SELECT count(*) FROM edited")

    def edited_examples(self, limit: int) -> list[tuple[str, int | None, int, int]]:
        """Some edited rows: id, row of the manifest (None: it is rejected now), shard and place in the plan."""
        query = "SELECT id, row, min(shard), arg_min(place, shard) FROM edited JOIN planned USING (id) GROUP BY id, row"
        return self._db.execute(f"{query} ORDER BY id LIMIT {limit}").fetchall()

    def edited_counts(self) -> dict[Bucket, int]:
        return {Bucket(*shape): number for *shape, number in self._db.execute(COUNT_EDITED_BUCKETS).fetchall()}

    def edited_rows(self) -> np.ndarray:
        """The numbers of the edited rows in the manifest, ascending."""
        return self._db.execute("SELECT row FROM edited WHERE row IS NOT NULL ORDER BY row").fetchnumpy()["row"]

    def edited_places(self) -> dict[int, list[int]]:
        """Where the plan has edited rows, failed attempts too: by shard, their places in it."""
        return dict(self._db.execute(EDITED_PLACES).fetchall())

    def drop_planned(self) -> int:
        """Leave only rows that no plan has yet; returns how many planned rows are gone."""
        deleted = self._value(COUNT_DELETED)
        self._db.execute(DROP_PLANNED)
        return deleted

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
        query = COUNT_BUCKETS.replace("accepted", table)
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


class _Spool:
    """Whole rows on their way into plan order: an Arrow file of batches, each of one bucket, in the order they came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pa.RecordBatchFileWriter | None = None
        self._places: dict[Bucket, list[int]] = defaultdict(list)
        self._num_batches = 0
        self.num_rows = 0

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
        self.close()
        if not part.num_rows:
            return
        with pa.OSFile(str(self._path)) as file:
            reader = pa.ipc.open_file(file)
            for place in chain.from_iterable(self._places[run.bucket] for run in part.runs):
                rows = pa.Table.from_batches([reader.get_batch(place)])
                yield rows if kept is None else rows.filter(_is_in(rows["row"].to_numpy(), kept))

    def chosen(self, rows: list[int]) -> list[dict[str, Any]]:
        """A few rows, by their numbers, as dictionaries."""
        self.close()
        if not rows:
            return []
        with pa.OSFile(str(self._path)) as file:
            reader = pa.ipc.open_file(file)
            tables = (pa.Table.from_batches([reader.get_batch(at)]) for at in range(self._num_batches))
            return [
                row
                for table in tables
                for row in table.filter(_is_in(table["row"].to_numpy(), np.array(rows))).to_pylist()
            ]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _is_in(values: np.ndarray, ascending: np.ndarray) -> pa.Array:
    at = np.searchsorted(ascending, values)
    return pa.array(ascending[np.minimum(at, len(ascending) - 1)] == values)
