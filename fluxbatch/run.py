"""A whole job: manifest -> plan -> pipeline -> shards -> ledger -> report.

The only module that knows both files and tensors. It decides the order, and leaves each step to its room.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fluxbatch import config, forecast, helping, process
from fluxbatch.cluster import require_ray
from fluxbatch.config import JobConfig, RunConfig
from fluxbatch.drawing import Drawing, LoadModel, launches_of, own_device, settle_packages, tell_prometheus
from fluxbatch.drawing import check_model as _check_model
from fluxbatch.drawing import load_model as _load_model
from fluxbatch.errors import ConfigError, end_code
from fluxbatch.output import ledger, preflight
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.reuse import open_earlier
from fluxbatch.plan import deal
from fluxbatch.plan.batch_size import Machine, MeasuredSizes, RememberedSizes
from fluxbatch.plan.cut import SizeOf, batch_size
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.planning import Planned, plan_job
from fluxbatch.processes import ranks
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import Batch, Bucket, CompressedBatch, LaunchCost, RowCounts
from fluxbatch.reports import report
from fluxbatch.share import Share
from fluxbatch.stop import Stop, seconds_left
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease
from fluxbatch.telemetry.loggers import require_loggers

if TYPE_CHECKING:
    from fluxbatch.cluster.driving import RayDrawing
    from fluxbatch.models import AnyModel
    from fluxbatch.pipeline.ahead import Prepared
    from fluxbatch.pipeline.measure import LaunchMeter

log = logging.getLogger(__name__)


def run_job(cfg: JobConfig, *, load: LoadModel | None = None) -> tuple[RowCounts, int]:
    """Do the job, or go on with it: all of it, or the share of this rank. Returns the rows by state, and the exit code.

    Raises a `FluxbatchError` for everything that a person must act on; `Interrupted` when a signal or the deadline
    stopped it. `load` replaces the model (tests).
    """
    folder = RunFolder(config.output_dir(cfg))
    if folder.root.exists() and not folder.root.is_dir():
        raise ConfigError(f"output.dir must be a folder, got the file {folder.root}")
    require_model = _model_check(cfg, load)
    if not folder.success.exists():  # else once there turns out to be something to draw
        require_model()
    require_loggers(cfg.telemetry.loggers)
    rank = ranks.resolve(cfg.run, os.environ)
    require_ray(cfg, rank)
    earlier = open_earlier(cfg)  # refuses before anything is written down of this job
    preflight.probe_folder(folder)
    stop = Stop(grace_s=cfg.run.grace_s, deadline_s=seconds_left(cfg.run.deadline, os.environ))
    lease = Lease(folder, rank=rank.index, world_size=rank.world_size, superseded=stop.request)
    with stop, lease:
        stop.leave = lease.release
        if process.is_supervised(os.environ):
            stop.follow(sys.stdin.fileno())
        log.info("output.dir %s, rank %d of %d", folder.root, rank.index, rank.world_size)
        model = functools.cache(functools.partial(load or _load_model, cfg, rank))
        size_of = _size_of(cfg, rank, model, stop)
        planned = plan_job(
            folder, cfg, rank, lease, size_of=size_of, require_model=require_model, earlier=earlier, check=stop.check
        )
        if cfg.run.plan_only:
            counts = ledger.row_counts(folder, planned.plan, planned.ledger)
            return counts, _exit_code(counts, cfg)
        share = Share(folder, planned.plan, planned.ledger, cfg, rank, lease)
        dealt = deal.shards_of(share.plan.parts, rank.index, rank.world_size)
        if not dealt and rank.world_size > 1:
            log.warning("rank %d has no shard: there are fewer than ranks (plan.shard_size=%d)",
                        rank.index, cfg.plan.shard_size)  # fmt: skip
        with share, _drawing(share, model, stop, load) as drawing:
            make_shards(share, dealt, drawing, stop)
            while cfg.run.help_ranks and not stop.requested() and (more := helping.next_shards(share)):
                make_shards(share, more, drawing, stop)
        counts = _finish(share, planned)
        if share.pending:
            stop.check()
    return counts, _exit_code(counts, cfg)


def _model_check(cfg: JobConfig, load: LoadModel | None) -> Callable[[], None]:
    """Refuses, once, a model that is not there or cannot run here: not on Ray, where workers draw, nor for a plan."""
    if load is not None or cfg.run.engine != "local" or cfg.run.plan_only:
        return lambda: None
    return functools.cache(functools.partial(_check_model, cfg))


def _drawing(share: Share, model: Callable[[], AnyModel], stop: Stop, load: LoadModel | None) -> Drawing | RayDrawing:
    """Who draws: this process, or the workers of a Ray cluster."""
    if share.cfg.run.engine == "local":
        return Drawing(share, functools.cache(functools.partial(_prepared, share, model)), stop)
    from fluxbatch.cluster.driving import RayDrawing  # Ray is an extra

    return RayDrawing(share, load, stop)


def make_shards(share: Share, shards: Sequence[int], drawing: Drawing | RayDrawing, stop: Stop) -> None:
    """Make all of these shards that is not there yet. Whoever deals out the work deals in these numbers."""
    work = share.open(shards)
    if work:
        preflight.require_room(share.folder.root, share.left(work), share.cfg.output)
        stop.check()
        share.folder.success.unlink(missing_ok=True)
        drawn = share.take_over(work, check=stop.check)
        if drawn:
            drawing.draw(drawn)


def draw(cfg: JobConfig, batch: Batch) -> CompressedBatch:
    """One batch by itself, in a launch of the size that it says. No run folder is looked at, nothing is written."""
    from fluxbatch.pipeline.loop import run_pipeline

    _check_model(cfg)
    alone = ranks.resolve(RunConfig(rank=0, world_size=1), {})
    settle_packages(cfg, alone, {(batch.plan.bucket, batch.plan.size)})
    model = _load_model(cfg, alone)
    [done] = run_pipeline(
        [batch],
        model,
        pipeline=cfg.pipeline,
        model_cfg=cfg.model,
        output=cfg.output,
        step_cache=config.step_cache(cfg.sampler),
    )
    return done


def prepare_launches(cfg: JobConfig) -> Prepared:
    """Compile what a run of this job would launch, as far as nobody has (`model.compile=aot`). Draws nothing."""
    from fluxbatch.pipeline import ahead

    _check_model(cfg)
    return ahead.prepare(cfg.model, forecast.launches(cfg))


def _prepared(share: Share, loaded: Callable[[], AnyModel]) -> AnyModel:
    """The model, once there are packages for whatever the plan launches, if it wants any."""
    settle_packages(share.cfg, share.rank, launches_of(share.plan))
    return loaded()


def _size_of(cfg: JobConfig, rank: Rank, model: Callable[[], AnyModel], stop: Stop) -> SizeOf:
    """Batch sizes for rows that are new: measured on a GPU, by rule elsewhere. Nothing is loaded until it is asked.

    A plan that is made ahead of the GPUs takes what one of them was measured to do before.
    """
    remembered = RememberedSizes(cfg)

    @functools.cache
    def measured() -> MeasuredSizes | None:
        # On Ray the GPUs are other nodes'. Packages fit one size: trying several would take one of each first.
        measures = cfg.plan.batch_size == "auto" and cfg.run.engine == "local" and cfg.model.compile != "aot"
        machine = _machine(cfg, rank) if measures else None
        return MeasuredSizes(cfg, machine, measure) if machine else None

    @functools.cache
    def meter() -> LaunchMeter:
        from fluxbatch.models import WholeModel
        from fluxbatch.pipeline.measure import LaunchMeter

        loaded = model()
        assert not isinstance(loaded, WholeModel), "_machine answers none for it"
        return LaunchMeter(loaded, model_cfg=cfg.model, pipeline=cfg.pipeline, check=stop.check)

    def measure(bucket: Bucket, size: int) -> LaunchCost | None:
        return meter()(bucket, size)

    def size_of(bucket: Bucket, num_rows: int) -> int:
        sizes = measured() or (remembered if cfg.run.plan_only else None)
        return sizes(bucket, num_rows) if sizes else batch_size(bucket, cfg.plan, num_rows=num_rows)

    return size_of


def _machine(cfg: JobConfig, rank: Rank) -> Machine | None:
    """The GPU that this rank will use; None where there is none, or nothing that can be measured on it."""
    if cfg.model.family == "diffusers":  # a call cannot be timed stage by stage
        return None
    device = own_device(cfg.model.device, rank)
    if not device.startswith("cuda"):
        return None
    from fluxbatch.models import memory

    budget = memory.budget(device, wanted_gib=cfg.model.memory_budget_gib)
    return Machine(gpu=budget.gpu, memory_gib=budget.total_gib, budget_gib=budget.budget_gib)


def _finish(share: Share, planned: Planned) -> RowCounts:
    """Write report, card and _SUCCESS when the whole job is complete; whichever rank finds it so does it.

    Several may find it so at once: each writes the same, whole files under temporary names.
    """
    plan = RunPlan.open(share.folder) or share.plan  # another rank may have changed it meanwhile
    counts = ledger.row_counts(share.folder, plan, Ledger.read(share.folder, plan.revisions))
    told = all(path.exists() for path in (share.folder.success, *share.folder.told()))
    if counts.pending == 0 and not (told and planned.changes.unchanged):
        _drop_empty(share.folder)
        report.write_report(share.folder, job=planned.description)
        commit.replace_file(share.folder.success, b"")
    tell_prometheus(share.folder, share.cfg)
    return counts


def _drop_empty(folder: RunFolder) -> None:
    """The folder of open batches is gone at the end; another live copy may be quicker, or still use it."""
    try:
        folder.batches.rmdir()
    except OSError:
        log.debug("%s stays: it is gone already or not empty", folder.batches)


def _exit_code(counts: RowCounts, cfg: JobConfig) -> int:
    return end_code(counts.rejected + counts.failed, fail_on_row_errors=cfg.run.fail_on_row_errors)
