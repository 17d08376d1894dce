"""Bring the plan of a run folder up to its manifest and settings, once for all ranks: one plans, the others wait.

Decides the order of the steps between a start and its work, and tells what changed. Knows no tensors: batch sizes are
answered by whoever holds the model. Two that plan at once harm nothing, for a plan file is created once.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.manifest.files import Manifest, open_manifest
from fluxbatch.output import job, ledger, shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan import deal
from fluxbatch.plan.cut import SizeOf
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.planner import Changes, add_redo, add_retry, prepare
from fluxbatch.plan.row_keys import Earlier
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import Bucket
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease, who
from fluxbatch.telemetry.progress import duration

log = logging.getLogger(__name__)

POLL_S = 0.25
POLLS_PER_S = 200  # of all ranks together: each looks for the plan, and for a planner that died


@dataclass(frozen=True, slots=True)
class Planned:
    """A job that is ready to be worked at, as one process sees it."""

    description: dict[str, Any]  # job.json
    plan: RunPlan
    changes: Changes
    ledger: Ledger


def plan_job(
    folder: RunFolder,
    cfg: JobConfig,
    rank: Rank,
    lease: Lease,
    *,
    size_of: SizeOf,
    require_model: Callable[[], None],
    earlier: Earlier | None,
    check: Callable[[], None],
) -> Planned:
    """Start the folder's job or go on with it. `check` is called while another rank plans, and raises to stop.

    `require_model` is called before rows are planned that are to be drawn, and raises where they cannot be.

    Raises a FluxbatchError for a folder, settings or rows that do not fit what was begun there.
    """

    def size_of_drawn(bucket: Bucket, num_rows: int) -> int:
        require_model()
        return size_of(bucket, num_rows)

    manifest = open_manifest(cfg.manifest)
    with _turn(folder, rank, lease, is_over=lambda: _is_planned(folder, manifest, cfg), check=check):
        description = job.open_job(folder, cfg)
        description = _settle_settings(folder, description, cfg, size_of_drawn)
        plan, changes = prepare(folder, manifest, config.row_rules(cfg), cfg, size_of=size_of_drawn, earlier=earlier)
        _say_changes(changes, description, cfg)
        redone = [
            (file.path.name, file.part.num_rows, file.settings) for file in plan.files if file.part.kind == "redo"
        ]
        description = job.record_redo(folder, cfg, description, redone)
        description = job.record_reuse(folder, description, plan.reuse)
        committed = _sound_ledger(folder, plan, rank)
        failed = ledger.failed_rows(folder, committed, plan) if cfg.run.retry_failed else {}
        if failed:
            require_model()
            plan = add_retry(folder, plan, failed)
    return Planned(description, plan, changes, committed)


def poll_s(world_size: int) -> float:
    """Seconds between two looks of one waiting rank."""
    return max(POLL_S, world_size / POLLS_PER_S)


@contextlib.contextmanager
def _turn(
    folder: RunFolder, rank: Rank, lease: Lease, *, is_over: Callable[[], bool], check: Callable[[], None]
) -> Iterator[None]:
    """Ours to plan, or nobody's any more because it is done. A planner that dies is followed by the next."""
    began = None
    while rank.world_size > 1 and not is_over():
        planner = lease.take(folder.planning)
        if planner is None:
            break
        if began is None:
            log.info("waiting for the plan, which another rank makes: %s", who(planner))
            began = time.monotonic()
        check()
        time.sleep(poll_s(rank.world_size))
    if began is not None:
        log.info("waited %s for the plan", duration(time.monotonic() - began))
    try:
        yield
    finally:
        lease.give_back(folder.planning)


def _is_planned(folder: RunFolder, manifest: Manifest, cfg: JobConfig) -> bool:
    """Whether a start with these settings would find nothing to plan."""
    plan, stored = RunPlan.open(folder), job.read_job(folder)
    if plan is None or stored is None or cfg.run.retry_failed:
        return False
    same_rows = plan.planned == {"manifest_digest": manifest.digest, "rules": asdict(config.row_rules(cfg))}
    return same_rows and not changed_settings(plan, stored, cfg)


def changed_settings(plan: RunPlan | None, stored: dict[str, Any], cfg: JobConfig) -> job.Differences:
    """The output-affecting settings that are others than the job's: those of its last redo, else of its job.json."""
    return job.differences(plan.settings if plan and plan.settings else stored["fingerprint"], cfg)


def _settle_settings(folder: RunFolder, description: dict[str, Any], cfg: JobConfig, size_of: SizeOf) -> dict[str, Any]:
    """Refuse other output-affecting settings than the job's, or plan all rows again for them (run.on_change=redo)."""
    plan = RunPlan.open(folder)
    changed = changed_settings(plan, description, cfg)
    if not changed:
        return description
    if cfg.run.on_change == "refuse":
        job.refuse_differences(folder, changed)
    if plan is None:  # stopped before anything was planned
        return job.begin_again(folder, cfg)
    told = ", ".join(f"{key} was {change['was']!r}, is {change['is']!r}" for key, change in changed.items())
    log.warning("all rows are made again: %s", told)
    add_redo(folder, plan, cfg, settings=job.settings_record(cfg), size_of=size_of)
    return description


def _sound_ledger(folder: RunFolder, plan: RunPlan, rank: Rank) -> Ledger:
    """The ledger, without the files that are gone or cut: those are removed here and made again."""
    committed = Ledger.read(folder, plan.revisions)
    ours = set(deal.shards_of(plan.parts, rank.index, rank.world_size))
    for lost in ledger.check_files(folder, committed, ours=ours.__contains__):
        log.warning("%s is missing or cut; its rows are made again", folder.root / lost.file)
        shards.remove_shard_file(folder, lost)
        committed.forget(folder, rank.index, lost)
    return committed


def _say_changes(changes: Changes, description: dict[str, Any], cfg: JobConfig) -> None:
    planned = description["settings"]["plan"]
    if any(planned.get(key) != getattr(cfg.plan, key) for key in ("batch_size", "shard_size")):
        log.info("the plan stands: other batch and shard sizes apply to rows added since")
    if changes.added:
        log.info("%d rows were added to the plan", changes.added)
    if cfg.run.reuse_from and changes.added:
        drawn = changes.added - changes.reused
        log.info("%d images are taken over from %s, %d rows are drawn", changes.reused, cfg.run.reuse_from, drawn)
    if changes.redone:
        log.warning("%d rows were edited and are made again; their old images are superseded", changes.redone)
    if changes.deleted:
        log.warning("%d rows of the plan are no longer in the manifest; what was made of them is kept", changes.deleted)
    if changes.rejected:
        log.warning("%d rows of the manifest are rejected; see rejected.parquet", changes.rejected)
