"""A whole job: manifest -> plan -> pipeline -> shards -> ledger -> report.

The only module that knows both files and tensors. It decides the order, and leaves each step to its room.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxbatch import commit, config, forecast, job, ledger, preflight, ranks, report, shards
from fluxbatch.batch_size import Machine, MeasuredSizes
from fluxbatch.config import JobConfig, RunConfig
from fluxbatch.errors import EXIT_DONE, EXIT_ROW_ERRORS, ConfigError, FluxbatchError
from fluxbatch.folder import RunFolder
from fluxbatch.lease import Lease
from fluxbatch.ledger import Ledger
from fluxbatch.loggers import Loggers, require_loggers
from fluxbatch.manifest import open_manifest
from fluxbatch.metrics import GpuSampler, MetricsLog, PeakMemory, record_start, write_prometheus
from fluxbatch.plan import SizeOf, batch_size
from fluxbatch.planfile import RunPlan
from fluxbatch.planner import Changes, add_redo, add_retry, prepare
from fluxbatch.progress import Progress
from fluxbatch.ranks import Rank
from fluxbatch.records import Batch, Bucket, CompressedBatch, LaunchCost, RowCounts, ShardPlan
from fluxbatch.reuse import open_earlier
from fluxbatch.share import Share
from fluxbatch.stop import Stop, seconds_left

if TYPE_CHECKING:
    from fluxbatch.models import Model
    from fluxbatch.pipeline.measure import LaunchMeter

log = logging.getLogger(__name__)

FAILURES_JUDGED_FROM = 50  # rows; before that a share of failed rows says little

LoadModel = Callable[[JobConfig, Rank], "Model"]


def run_job(cfg: JobConfig, *, load: LoadModel | None = None) -> tuple[RowCounts, int]:
    """Do the job, or go on with it. Returns the rows by state, and the exit code.

    Raises a `FluxbatchError` for everything that a person must act on; `Interrupted` when a signal or the deadline
    stopped it. `load` replaces the model (tests).
    """
    folder = RunFolder(config.output_dir(cfg))
    if folder.root.exists() and not folder.root.is_dir():
        raise ConfigError(f"output.dir must be a folder, got the file {folder.root}")
    if load is None and not folder.success.exists():
        _check_model(cfg)
    require_loggers(cfg.telemetry.loggers)
    earlier = open_earlier(cfg)  # refuses before anything is written down of this job
    preflight.probe_folder(folder)
    rank = ranks.resolve(cfg.run, os.environ)
    stop = Stop(grace_s=cfg.run.grace_s, deadline_s=seconds_left(cfg.run.deadline, os.environ))
    with stop, Lease(folder, rank=rank.index, world_size=rank.world_size) as lease:
        stop.leave = lease.release
        log.info("output.dir %s, rank %d of %d", folder.root, rank.index, rank.world_size)
        description = job.open_job(folder, cfg)
        model = functools.cache(functools.partial(load or _load_model, cfg, rank))
        size_of = _size_of(cfg, rank, model, stop)
        description = _settle_settings(folder, description, cfg, size_of)
        plan, changes = prepare(
            folder, open_manifest(cfg.manifest), config.row_rules(cfg), cfg, size_of=size_of, earlier=earlier
        )
        _say_changes(changes, description, cfg)
        redone = [
            (file.path.name, file.part.num_rows, file.settings) for file in plan.files if file.part.kind == "redo"
        ]
        description = job.record_redo(folder, cfg, description, redone)
        description = job.record_reuse(folder, description, plan.reuse)
        committed = _sound_ledger(folder, plan, rank)
        if cfg.run.retry_failed:
            plan = add_retry(folder, plan, ledger.failed_rows(folder, committed, plan))
        share = Share(folder, plan, committed, cfg, rank)
        work = share.settle_all()
        if work:
            preflight.require_room(folder.root, share.left(work), cfg.output)
            stop.check()
            folder.success.unlink(missing_ok=True)
            with share:
                drawn = share.take_over(work, check=stop.check)
                if drawn:
                    _render(share, drawn, model, stop=stop)
        counts = _finish(share, description, changes)
        if share.open:
            stop.check()
    return counts, _exit_code(counts, cfg)


def _render(share: Share, work: list[ShardPlan], loaded: Callable[[], Model], *, stop: Stop) -> None:
    """Draw all missing batches and commit each as it comes."""
    from fluxbatch.pipeline.loop import run_pipeline  # torch: only where there is something to draw

    cfg = share.cfg
    before = ledger.row_counts(share.folder, share.plan, share.ledger)
    model = loaded()
    stop.check()
    budget = FailureBudget(cfg.run.max_failed_fraction)
    truncated, peaks = 0, PeakMemory()
    finished = run_pipeline(
        share.batches(work),
        model,
        pipeline=cfg.pipeline,
        model_cfg=cfg.model,
        output=cfg.output,
        draining=stop.requested,
        stage_timeout_s=cfg.run.stage_timeout_s,
    )
    with (
        closing(finished),  # an exception here must not leave the stages' threads to a dying interpreter
        GpuSampler(cfg.telemetry.nvml, _device_uuid(model)) as gpu,
        Loggers(cfg, share.folder, rank=share.rank.index) as loggers,
        _progress(share, work, before) as progress,
    ):
        metrics = MetricsLog(share.folder, share.rank.index, gpu)
        record_start(
            share.folder,
            share.rank.index,
            gpu=_device_name(model),
            rows_done=before.written + before.failed,
            batches_to_make=sum(left.batches for left in share.left(work).values()),
        )
        previous = told = time.monotonic()
        for done in finished:
            share.commit(done)
            peaks.add(done)
            truncated += sum(result.truncated for result in done.results)
            now = time.monotonic()
            line = metrics.record(done, wall_s=now - previous)
            progress.update(line)
            loggers.log(line)
            if now - told >= cfg.telemetry.interval_s:
                _tell_prometheus(share.folder, cfg)
                told = now
            previous = now
            budget.spend(done)
    peaks.say()
    _remember_rates(share, _device_name(model))
    if truncated:
        log.warning("%d prompts were longer than model.max_sequence_length=%d and cut; their rows say truncated",
                    truncated, cfg.model.max_sequence_length)  # fmt: skip


def _progress(share: Share, work: list[ShardPlan], before: RowCounts) -> Progress:
    left = share.left(work)
    return Progress(
        share.cfg.telemetry,
        total=before.rows - before.rejected,
        done=before.written + before.failed,
        work={bucket.name: bucket.work for bucket in left},
        work_left=sum(bucket.work * found.rows for bucket, found in left.items()),
    )


def _remember_rates(share: Share, device: str | None) -> None:
    try:
        forecast.remember_rates(share.folder, share.plan, share.cfg, device=device, rank=share.rank.index)
    except OSError as error:  # the next plan's estimate is worth no job
        log.warning("%s: what was measured cannot be kept: %s", error.filename, error.strerror)


@dataclass
class FailureBudget:
    """Stops a job that fails more than it draws: something is wrong with the job, not with its rows."""

    max_failed_fraction: float
    rows: int = 0
    failed: int = 0

    def spend(self, done: CompressedBatch) -> None:
        self.rows += len(done.results)
        self.failed += done.num_failed
        if self.rows >= FAILURES_JUDGED_FROM and self.failed > self.max_failed_fraction * self.rows:
            last = next(result.failure for result in reversed(done.results) if result.failure)
            raise FluxbatchError(
                f"{self.failed} of the first {self.rows} rows failed, more than run.max_failed_fraction="
                f"{self.max_failed_fraction:g} allows; the last one in {last.stage}: {last.message}"
            )


def _check_model(cfg: JobConfig) -> None:
    """Refuse a model that is not there, or cannot run here, before the manifest is planned."""
    from fluxbatch.models import check_model

    check_model(cfg.model)


def draw(cfg: JobConfig, batch: Batch) -> CompressedBatch:
    """One batch by itself, in a launch of the size that it says. No run folder is looked at, nothing is written."""
    from fluxbatch.pipeline.loop import run_pipeline

    _check_model(cfg)
    model = _load_model(cfg, ranks.resolve(RunConfig(rank=0, world_size=1), {}))
    [done] = run_pipeline([batch], model, pipeline=cfg.pipeline, model_cfg=cfg.model, output=cfg.output)
    return done


def _load_model(cfg: JobConfig, rank: Rank) -> Model:
    from fluxbatch.models import load_model

    return load_model(
        replace(cfg.model, device=_device(cfg.model.device, rank)), true_cfg_scale=cfg.sampler.true_cfg_scale
    )


def _device(wanted: str, rank: Rank) -> str:
    """`auto` and `cuda` become this rank's GPU among the visible ones."""
    import torch

    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{rank.local % torch.cuda.device_count()}"
    return wanted


def _size_of(cfg: JobConfig, rank: Rank, model: Callable[[], Model], stop: Stop) -> SizeOf:
    """Batch sizes for rows that are new: measured on a GPU, by rule elsewhere. Nothing is loaded until it is asked."""

    @functools.cache
    def measured() -> MeasuredSizes | None:
        machine = _machine(cfg, rank) if cfg.plan.batch_size == "auto" else None
        return MeasuredSizes(cfg, machine, measure) if machine else None

    @functools.cache
    def meter() -> LaunchMeter:
        from fluxbatch.pipeline.measure import LaunchMeter

        return LaunchMeter(model(), model_cfg=cfg.model, pipeline=cfg.pipeline, check=stop.check)

    def measure(bucket: Bucket, size: int) -> LaunchCost | None:
        return meter()(bucket, size)

    def size_of(bucket: Bucket, num_rows: int) -> int:
        sizes = measured()
        return sizes(bucket, num_rows) if sizes else batch_size(bucket, cfg.plan, num_rows=num_rows)

    return size_of


def _machine(cfg: JobConfig, rank: Rank) -> Machine | None:
    """The GPU that this rank will use; None where there is none."""
    device = _device(cfg.model.device, rank)
    if not device.startswith("cuda"):
        return None
    from fluxbatch.models import memory

    budget = memory.budget(device, wanted_gib=cfg.model.memory_budget_gib)
    return Machine(gpu=budget.gpu, memory_gib=budget.total_gib, budget_gib=budget.budget_gib)


def _device_uuid(model: Model) -> str | None:
    if model.device.type != "cuda":
        return None
    import torch

    return str(torch.cuda.get_device_properties(model.device).uuid)


def _device_name(model: Model) -> str | None:
    if model.device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name(model.device)


def _settle_settings(folder: RunFolder, description: dict[str, Any], cfg: JobConfig, size_of: SizeOf) -> dict[str, Any]:
    """Refuse other output-affecting settings than the job's, or plan all rows again for them (run.on_change=redo)."""
    plan = RunPlan.open(folder)
    stored = plan.settings if plan and plan.settings else description["fingerprint"]
    changed = job.differences(stored, cfg)
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
    for lost in ledger.check_files(folder, committed, ours=rank.owns):
        log.warning("%s is missing or cut; its rows are made again", folder.root / lost.file)
        shards.remove_shard_file(folder, lost)
        committed.forget(folder, rank.index, lost)
    return committed


def _finish(share: Share, description: dict[str, Any], changes: Changes) -> RowCounts:
    """Write report, card and _SUCCESS when the whole job is complete; whichever rank finds it so does it."""
    plan = RunPlan.open(share.folder) or share.plan  # another rank may have changed it meanwhile
    counts = ledger.row_counts(share.folder, plan, Ledger.read(share.folder, plan.revisions))
    told = all(path.exists() for path in (share.folder.success, *share.folder.told()))
    if counts.pending == 0 and not (told and changes.unchanged):
        _drop_empty(share.folder)
        report.write_report(share.folder, job=description)
        commit.replace_file(share.folder.success, b"")
    _tell_prometheus(share.folder, share.cfg)
    return counts


def _tell_prometheus(folder: RunFolder, cfg: JobConfig) -> None:
    if not cfg.telemetry.prometheus_textfile:
        return
    try:
        write_prometheus(Path(cfg.telemetry.prometheus_textfile), report.status(folder))
    except OSError as error:  # telemetry never stops a job
        log.warning("telemetry.prometheus_textfile %s: %s", cfg.telemetry.prometheus_textfile, error.strerror)


def _drop_empty(folder: RunFolder) -> None:
    """The folder of open batches is gone at the end; another live copy may be quicker, or still use it."""
    try:
        folder.batches.rmdir()
    except OSError:
        log.debug("%s stays: it is gone already or not empty", folder.batches)


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


def _exit_code(counts: RowCounts, cfg: JobConfig) -> int:
    row_errors = counts.rejected + counts.failed > 0 and cfg.run.fail_on_row_errors
    return EXIT_ROW_ERRORS if row_errors else EXIT_DONE
