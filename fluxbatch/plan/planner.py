"""What lies between manifest and plan: new, edited and retried rows become parts of the plan, and changes are told.

Keys (`row_keys`) say which rows are twice, edited or gone. The rows need no sort: those of one bucket come in manifest
order already, so they are spooled by bucket (`row_spool`) and read back bucket by bucket. Knows neither tensors nor
the format of the plan files, and never holds all rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fluxbatch.config import JobConfig, PlanConfig
from fluxbatch.errors import FluxbatchError
from fluxbatch.manifest.files import Manifest
from fluxbatch.manifest.rows import drawing_digests
from fluxbatch.plan import estimate, rates
from fluxbatch.plan.cut import PlanPart, SecondsOf, SizeOf, plan_part, plan_retry
from fluxbatch.plan.edits import find_edits
from fluxbatch.plan.plan_writer import RejectedFile, plan_schema, publish_part, unfitting
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.row_keys import Earlier, RowKeys, open_keys
from fluxbatch.plan.row_spool import RowSpool, open_spool
from fluxbatch.records import Bucket, Rejection, RowRules
from fluxbatch.storage.folder import RunFolder

TAKEN_IMAGE_S = 0.001  # reading, checking and writing an image again: 4,500 in 2.6 s


@dataclass(frozen=True, slots=True)
class Survey:
    """A manifest in numbers: rows of each bucket, rejected rows by reason, and up to three examples of each reason."""

    rows: int
    counts: dict[Bucket, int]
    rejected: dict[str, int]
    examples: dict[str, list[Rejection]]
    taken: dict[Bucket, int]  # further rows, whose images an earlier run has
    reuse: dict[str, Any] | None  # what the comparison with it found
    since: Since | None  # what is otherwise than planned; None where nothing is planned, or the same


@dataclass(frozen=True, slots=True)
class Since:
    """What has become of the rows of a plan: `refusal` is what a run would end with."""

    added: dict[Bucket, int]
    taken: dict[Bucket, int]  # of these, the ones whose images an earlier run has
    edited: dict[Bucket, int]  # as they are now
    num_edited: int  # with those that are rejected now
    num_deleted: int
    places: dict[int, list[int]]  # of edited rows in the plan, by shard
    refusal: FluxbatchError | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What a start found against the plan before it. `unchanged`: the same manifest and rules, so no row was read."""

    added: int
    deleted: int
    rejected: int
    unchanged: bool
    redone: int = 0  # rows to be made again because they were edited
    reused: int = 0  # of the rows added, those whose images an earlier run has


def survey(
    manifest: Manifest, rules: RowRules, cfg: JobConfig, *, plan: RunPlan | None = None, earlier: Earlier | None = None
) -> Survey:
    """Check and count all rows, and compare them with the `plan` that stands. Writes nothing to the run folder."""
    compared = plan if plan and plan.planned != _identity(manifest, rules) else None
    reasons: Counter[str] = Counter()
    examples: dict[str, list[Rejection]] = defaultdict(list)
    with open_keys(cfg.manifest.memory_gib) as keys, open_spool() as spool:
        rows_kept = spool if compared else None
        for rejection in _take_in(keys, rows_kept, manifest, rules, cfg, plan=compared, earlier=earlier):
            reasons[rejection.reason] += 1
            if len(examples[rejection.reason]) < 3:
                examples[rejection.reason].append(rejection)
        since = _since(keys, spool, compared, manifest, rules, cfg) if compared else None
        reuse = keys.take(earlier, removed=True) if earlier else None
        counts, taken = keys.counts(), keys.counts("taken") if earlier else {}
        if since and earlier:
            since = replace(since, taken=keys.added_counts("taken"))
    rows = sum(counts.values()) + sum(taken.values()) + reasons.total()
    return Survey(rows, counts, dict(reasons), dict(examples), taken, reuse, since)


def _take_in(
    keys: RowKeys,
    spool: RowSpool | None,
    manifest: Manifest,
    rules: RowRules,
    cfg: JobConfig,
    *,
    plan: RunPlan | None,
    earlier: Earlier | None,
) -> Iterator[Rejection]:
    """Read the manifest into keys and spool, as far as it is to be compared with a plan or an earlier run."""
    hashed = spool is not None or earlier is not None
    for chunk in manifest.chunks(rules, hashed=hashed):
        known = chunk.accepted.drop_columns("fingerprint") if hashed and not plan else chunk.accepted
        keys.add(known.append_column("drawing", drawing_digests(known)) if earlier else known)
        keys.add_rejected(chunk.rejected)
        if spool is not None:
            spool.add_chunk(chunk.accepted)
        yield from chunk.rejected
    yield from keys.drop_duplicates(manifest, cfg.manifest)


def _since(keys: RowKeys, spool: RowSpool, plan: RunPlan, manifest: Manifest, rules: RowRules, cfg: JobConfig) -> Since:
    edited, refusal = find_edits(keys, spool, plan, manifest, rules, cfg)
    return Since(
        added=keys.added_counts(),
        taken={},
        edited=keys.edited_counts(),
        num_edited=edited,
        num_deleted=keys.num_deleted(),
        places={} if refusal else keys.edited_places(),
        refusal=refusal or unfitting(spool.some(keys.rows_to_plan()), plan.schema),
    )


def _identity(manifest: Manifest, rules: RowRules) -> dict[str, Any]:
    """What a plan was made of."""
    return {"manifest_digest": manifest.digest, "rules": asdict(rules)}


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
    identity = _identity(manifest, rules)
    plan = RunPlan.open(folder)
    if plan is not None and plan.planned == identity:
        return plan, Changes(added=0, deleted=0, rejected=plan.num_rejected, unchanged=True)
    with open_keys(cfg.manifest.memory_gib) as keys, open_spool() as spool:
        refused = RejectedFile(identity)
        refused.add(_take_in(keys, spool, manifest, rules, cfg, plan=plan, earlier=earlier))
        deleted = redone = 0
        if plan:
            edited, refusal = find_edits(keys, spool, plan, manifest, rules, cfg)
            if refusal:
                raise refusal
            if edited:
                published = _publish_redo(folder, plan, keys, spool, cfg, size_of, identity=identity)
                if not published:
                    return prepare(folder, manifest, rules, cfg, size_of=size_of, earlier=earlier)
                plan, redone = published, edited
            deleted = keys.num_deleted()
            keys.drop_planned()
        floored = rules.size_policy == "floor"
        image_s = estimate.image_seconds(cfg, rates.recall(cfg))
        schema = plan.schema if plan else plan_schema(manifest.extra_schema, seeds=keys.seed_range(), floored=floored)
        reuse = keys.take(earlier, removed=plan is None) if earlier else None
        last = plan.parts[-1] if plan else None
        part = next_part(keys.counts(), last, cfg.plan, size_of, image_s=image_s)
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
    refused.publish(folder)
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

    def size_of(bucket: Bucket, num_rows: int) -> int:
        return min(sizes.get(bucket, num_rows), cfg.shard_size)

    return next_part(counts, last, cfg, size_of, image_s=lambda bucket: TAKEN_IMAGE_S)


def add_retry(folder: RunFolder, plan: RunPlan, failed: Mapping[int, set[str]]) -> RunPlan:
    """Plan failed rows again, given as ids of each shard: a new part of kind `retry`. No failed rows, no part."""
    counts: Counter[Bucket] = Counter()
    with open_spool() as spool:
        for bucket, rows in rows_by_bucket(plan, failed):
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
    with open_spool() as spool:
        for bucket, rows in rows_by_bucket(plan, _LiveIds(plan)):
            spool.add(bucket, rows)
            counts[bucket] += rows.num_rows
        image_s = estimate.image_seconds(cfg, rates.recall(cfg))
        part = next_part(counts, plan.parts[-1], cfg.plan, size_of, image_s=image_s, kind="redo")
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


def rows_by_bucket(plan: RunPlan, ids: Mapping[int, set[str]]) -> Iterator[tuple[Bucket, pa.Table]]:
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
    keys: RowKeys,
    spool: RowSpool,
    cfg: JobConfig,
    size_of: SizeOf | None,
    *,
    identity: dict[str, Any],
) -> RunPlan | None:
    """Plan edited rows again, as they are now; None where another process has planned something else meanwhile."""
    image_s = estimate.image_seconds(cfg, rates.recall(cfg))
    part = next_part(keys.edited_counts(), plan.parts[-1], cfg.plan, size_of, image_s=image_s, kind="redo")
    rows = spool.rows(part, keys.edited_rows())
    places = keys.edited_places()
    publish = publish_part(folder, part, rows, schema=plan.schema, identity=identity, supersedes=places)
    planned = _reopened(folder)
    same = publish or (planned.files[part.index].identity == identity and planned.parts[part.index].kind == "redo")
    return planned if same else None


def next_part(
    counts: Mapping[Bucket, int],
    last: PlanPart | None,
    cfg: PlanConfig,
    size_of: SizeOf | None = None,
    *,
    image_s: SecondsOf,
    kind: str = "rows",
) -> PlanPart:
    """So many rows of each bucket as the part that follows the `last` one."""
    if last is None:
        return plan_part(counts, plan=cfg, size_of=size_of, image_s=image_s)
    shard, batch = last.first_shard + last.num_shards, last.first_batch + last.num_batches
    return plan_part(
        counts, plan=cfg, size_of=size_of, index=last.index + 1, kind=kind, first_shard=shard, first_batch=batch,
        image_s=image_s,
    )  # fmt: skip


def _publish_rows(
    folder: RunFolder,
    part: PlanPart,
    keys: RowKeys,
    table: str,
    spool: RowSpool,
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
