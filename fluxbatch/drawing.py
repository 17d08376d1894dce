"""Draw shards and commit each batch as it comes, with all that is told meanwhile: batch log, bar, metrics, loggers.

Knows neither which shards, nor what becomes of a whole job. Everything is opened with the first batch to draw, so that
a rank with nothing to do loads no model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxbatch import config, forecast
from fluxbatch.config import JobConfig, ModelConfig
from fluxbatch.errors import TooManyFailures
from fluxbatch.output import ledger
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import CompressedBatch, ShardPlan
from fluxbatch.reports import report
from fluxbatch.share import Share
from fluxbatch.stop import Stop
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.loggers import Loggers
from fluxbatch.telemetry.metrics import GpuSampler, MetricsLog, PeakMemory, record_start, write_prometheus
from fluxbatch.telemetry.progress import Progress

if TYPE_CHECKING:
    from fluxbatch.models import AnyModel
    from fluxbatch.pipeline.ahead import Launch

log = logging.getLogger(__name__)

TOLD_PART = 100  # of the time at most a hundredth goes into the text file
FAILURES_JUDGED_FROM = 50  # rows; before that a share of failed rows says little

LoadModel = Callable[[JobConfig, Rank], "AnyModel"]


def check_model(cfg: JobConfig) -> None:
    """Refuse a model that is not there, or cannot run here, before anything else is done."""
    from fluxbatch.models import check_model as check

    check(cfg.model)


def load_model(cfg: JobConfig, rank: Rank) -> AnyModel:
    """The model, on this rank's GPU."""
    from fluxbatch.models import load_model as load

    return load(_on_own_device(cfg, rank), true_cfg_scale=cfg.sampler.true_cfg_scale)


def settle_packages(cfg: JobConfig, rank: Rank, launches: set[Launch]) -> None:
    """Refuse, before a weight is read, what would be drawn without its packages (`model.compile=aot`), or make them."""
    if cfg.model.compile == "aot":
        from fluxbatch.pipeline import ahead

        ahead.settle(_on_own_device(cfg, rank), launches)


def launches_of(plan: RunPlan) -> set[Launch]:
    return {(run.bucket, run.batch_size) for part in plan.parts for run in part.runs}


def _on_own_device(cfg: JobConfig, rank: Rank) -> ModelConfig:
    return replace(cfg.model, device=own_device(cfg.model.device, rank))


def own_device(wanted: str, rank: Rank) -> str:
    """`auto` and `cuda` become this rank's GPU among the visible ones."""
    import torch

    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{rank.local % torch.cuda.device_count()}"
    return wanted


class Drawing:
    """Draws for one share; `draw` may be called again and again, on one model and one bar."""

    def __init__(self, share: Share, load: Callable[[], AnyModel], stop: Stop) -> None:
        self._share, self._load, self._stop = share, load, stop
        self._budget = FailureBudget(share.cfg.run.max_failed_fraction)
        self._peaks = PeakMemory()
        self._truncated = 0
        self._tellers: _Tellers | None = None
        self._exit = ExitStack()

    def __enter__(self) -> Drawing:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            self._exit.close()  # on an object store the batch log is only written here
        except Exception as later:
            if error is None:
                raise
            log.warning("the batch log was not ended: %s: %s", type(later).__name__, later)
        if error is None and self._tellers is not None:
            self._peaks.say()
            self._share.refresh()  # the last shard's file is still being made, and its size is remembered too
            remember_rates(self._share, device_name(self._load()), rank=self._share.rank.index)
            if self._truncated:
                log.warning("%d prompts were longer than model.max_sequence_length=%d and cut; their rows say "
                            "truncated", self._truncated, self._share.cfg.model.max_sequence_length)  # fmt: skip

    def draw(self, work: list[ShardPlan]) -> None:
        """Draw all missing batches of these shards, and commit each."""
        from fluxbatch.pipeline.loop import run_pipeline  # torch: only where there is something to draw

        cfg, model = self._share.cfg, self._load()
        self._stop.check()
        tellers = self._tell_of(work, model)
        finished = run_pipeline(
            self._share.batches(work),
            model,
            pipeline=cfg.pipeline,
            model_cfg=cfg.model,
            output=cfg.output,
            step_cache=config.step_cache(cfg.sampler),
            draining=self._stop.requested,
            stage_timeout_s=cfg.run.stage_timeout_s,
        )
        with closing(finished):  # an exception here must not leave the stages' threads to a dying interpreter
            for done in finished:
                self._share.commit(done)
                self._peaks.add(done)
                self._truncated += sum(result.truncated for result in done.results)
                tellers.tell(done)
                self._budget.spend(done)

    def _tell_of(self, work: list[ShardPlan], model: AnyModel) -> _Tellers:
        """Ready to tell of these shards; everything is opened the first time."""
        if self._tellers is None:
            self._tellers = _Tellers(self._share, work, model, self._exit)
        else:
            self._tellers.expect(work)
        return self._tellers


class _Tellers:
    """All who are told of a finished batch."""

    def __init__(self, share: Share, work: list[ShardPlan], model: AnyModel, exit_stack: ExitStack) -> None:
        self._share = share
        before = ledger.row_counts(share.folder, share.plan, share.ledger)
        done = before.written + before.failed
        gpu = exit_stack.enter_context(GpuSampler(share.cfg.telemetry.nvml, _device_uuid(model)))
        self._loggers = exit_stack.enter_context(Loggers(share.cfg, share.folder, rank=share.rank.index))
        self._progress = exit_stack.enter_context(
            Progress(share.cfg.telemetry, total=before.rows - before.rejected, done=done, work_left=0)
        )
        self._metrics = MetricsLog(share.folder, share.rank.index, gpu)
        exit_stack.callback(self._metrics.flush)
        self.expect(work)
        record_start(
            share.folder,
            share.rank.index,
            gpu=device_name(model),
            rows_done=done,
            batches_to_make=sum(left.batches for left in share.left(work).values()),
        )
        self._previous_s = time.monotonic()
        self._tell_next_s = self._previous_s + share.cfg.telemetry.interval_s

    def expect(self, work: list[ShardPlan]) -> None:
        """So much more is to come."""
        left = self._share.left(work)
        self._progress.expect(
            work={bucket.name: bucket.work for bucket in left},
            work_left=sum(bucket.work * found.rows for bucket, found in left.items()),
        )
        self._previous_s = time.monotonic()  # the time between two rounds is no batch's

    def tell(self, done: CompressedBatch) -> None:
        now_s = time.monotonic()
        line = self._metrics.record(done, wall_s=now_s - self._previous_s)
        self._progress.update(line)
        self._loggers.log(line)
        if now_s >= self._tell_next_s:
            tell_prometheus(self._share.folder, self._share.cfg)
            cost_s = time.monotonic() - now_s  # it reads what all ranks wrote: of a large job seldom
            self._tell_next_s = now_s + max(self._share.cfg.telemetry.interval_s, TOLD_PART * cost_s)
        self._previous_s = now_s


def tell_prometheus(folder: RunFolder, cfg: JobConfig) -> None:
    """Replace the text file of `telemetry.prometheus_textfile`, if there is one."""
    if not cfg.telemetry.prometheus_textfile:
        return
    try:
        write_prometheus(Path(cfg.telemetry.prometheus_textfile), report.status(folder))
    except OSError as error:  # telemetry never stops a job
        log.warning("telemetry.prometheus_textfile %s: %s", cfg.telemetry.prometheus_textfile, error.strerror)


def remember_rates(share: Share, device: str | None, *, rank: int | None) -> None:
    """Keep what a rank, or all, measured on this kind of GPU, for later estimates."""
    try:
        forecast.remember_rates(share.folder, share.plan, share.cfg, device=device, rank=rank)
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
            raise TooManyFailures(
                f"{self.failed} of the first {self.rows} rows failed, more than run.max_failed_fraction="
                f"{self.max_failed_fraction:g} allows; the last one in {last.stage}: {last.message}"
            )


def _device_uuid(model: AnyModel) -> str | None:
    found = _device(model)
    return str(found.uuid) if found else None


def device_name(model: AnyModel) -> str | None:
    """As its maker calls it; None on a CPU."""
    found = _device(model)
    return str(found.name) if found else None


def _device(model: AnyModel) -> Any:
    """What torch says of the model's GPU; None on a CPU."""
    if model.device.type != "cuda":
        return None
    import torch

    return torch.cuda.get_device_properties(model.device)
