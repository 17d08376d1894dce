"""Turn planned batches into compressed images:

    prefetch -> encode -> denoise -> decode -> transfer -> compress

`double_buffered` gives prefetch, launch (encode to decode) and transfer one thread each and compression a pool, so
that copies, inference and codecs overlap; `serial` calls the same functions one after another. Knows nothing of files
or resume, and of a launch only that it takes a staged batch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from fluxbatch.config import ModelConfig, OutputConfig, PipelineConfig
from fluxbatch.errors import ProcessLost
from fluxbatch.models import AnyModel, WholeModel
from fluxbatch.pipeline import compress, transfer
from fluxbatch.pipeline.device import is_context_lost
from fluxbatch.pipeline.launch import Launcher
from fluxbatch.pipeline.prefetch import Prefetcher, StagedBatch
from fluxbatch.pipeline.ring import Channel, Ring, Stopped
from fluxbatch.pipeline.timing import waited
from fluxbatch.pipeline.transfer import HostBatch, LaunchedBatch
from fluxbatch.pipeline.watch import Watch, Watchdog
from fluxbatch.records import Batch, CompressedBatch
from fluxbatch.step_cache import EVERY_STEP, StepCache

JOIN_S = 10.0  # how long a closing run waits for a thread that is deep inside the model


def run_pipeline(
    batches: Iterable[Batch],
    model: AnyModel,
    *,
    pipeline: PipelineConfig,
    model_cfg: ModelConfig,
    output: OutputConfig,
    step_cache: StepCache = EVERY_STEP,
    draining: Callable[[], bool] = lambda: False,
    stage_timeout_s: float = 0.0,
) -> Generator[CompressedBatch]:
    """Finished batches in order. Once `draining()` is true no further batch is launched.

    A row that fails is a result; any other exception of a stage is raised here, in the caller's thread, with its own
    traceback and a note of the place. Closing the iterator ends all threads.

    `ProcessLost`, once all that is finished has been handed out, for a GPU that takes no more work, and for a stage
    that gives no sign of life for `stage_timeout_s` (0: for ever); without a thread of its own such a stage ends the
    process.
    """
    depth = 1 if pipeline.mode == "serial" else pipeline.depth
    inputs, outputs = Ring(depth, device=model.device), Ring(depth, device=model.device)
    watch = Watch()
    prefetch = Prefetcher(model, inputs, window=pipeline.encode_window, draining=draining, watch=watch)
    launch = Launcher(model, prefetch, inputs, outputs, pipeline=pipeline, model_cfg=model_cfg, step_cache=step_cache)
    words = {"sampler": model.sampler} if isinstance(model, WholeModel) else compress.NO_WORDS
    if pipeline.mode == "serial":
        watchdog = Watchdog(watch, timeout_s=stage_timeout_s, on_hang=None)
        staged = prefetch.staged(batches)
        return _explained(_serial(staged, launch, outputs, output=output, words=words, watchdog=watchdog))
    stages = _Stages(prefetch.staged(batches), launch, inputs, outputs, draining, watch, stage_timeout_s)
    workers = pipeline.compress_workers or usable_cores()
    return _explained(_double_buffered(stages, output=output, words=words, depth=depth, workers=workers))


def _explained(finished: Generator[CompressedBatch]) -> Generator[CompressedBatch]:
    """A lost CUDA context is no row's fault and no bug of ours: one sentence with the place."""
    try:
        yield from finished
    except RuntimeError as error:
        if not is_context_lost(error):
            raise
        words = [*getattr(error, "__notes__", ()), str(error).partition("\n")[0]]
        raise ProcessLost(
            f"{': '.join(words)}: the GPU takes no more work from this process; "
            "the rows in flight stay pending, the same command goes on"
        ) from error


def _serial(
    staged: Iterator[StagedBatch],
    launch: Launcher,
    outputs: Ring,
    *,
    output: OutputConfig,
    words: compress.Words,
    watchdog: Watchdog,
) -> Generator[CompressedBatch]:
    with watchdog:
        for batch in staged:
            host = transfer.receive(launch(batch))
            with host.times.located("compress"):
                rows = [compress.compress_row(host, row, output, words) for row in range(len(host.batch.requests))]
            outputs.release(host.slot)
            yield _finished(host, rows)


@dataclass(frozen=True, slots=True)
class _Stages:
    staged: Iterator[StagedBatch]
    launch: Launcher
    inputs: Ring
    outputs: Ring
    draining: Callable[[], bool]
    watch: Watch
    stage_timeout_s: float


def _double_buffered(
    stages: _Stages, *, output: OutputConfig, words: compress.Words, depth: int, workers: int
) -> Generator[CompressedBatch]:
    staged: Channel[StagedBatch] = Channel(depth)
    launched: Channel[LaunchedBatch] = Channel(depth)
    compressing: Channel[compress.CompressingBatch] = Channel(depth)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fluxbatch-compress")
    crew = Crew(stages.inputs, staged, launched, stages.outputs, last=compressing)

    def launches() -> Iterator[LaunchedBatch]:
        to_launch = waited(staged, "prefetch->launch")
        return map(stages.launch, takewhile(lambda _: not stages.draining(), to_launch))

    def submissions() -> Iterator[compress.CompressingBatch]:
        for host in map(transfer.receive, waited(launched, "launch->transfer")):
            release = partial(stages.outputs.release, host.slot)
            yield compress.submit(pool, host, output, release=release, words=words)

    with Watchdog(stages.watch, timeout_s=stages.stage_timeout_s, on_hang=crew.fail) as watchdog:
        try:
            crew.start("prefetch", stages.staged, staged)
            crew.start("launch", launches(), launched)
            crew.start("transfer", submissions(), compressing)
            yield from _collected(waited(compressing, "compress->commit"), unless=lambda: watchdog.hung)
        finally:
            crew.stop(join_s=0.0 if watchdog.hung else JOIN_S)
            pool.shutdown(wait=not watchdog.hung, cancel_futures=True)
    crew.raise_error()


def _collected(
    batches: Iterator[compress.CompressingBatch], *, unless: Callable[[], bool]
) -> Generator[CompressedBatch]:
    """Each batch when its rows are there; once something hangs (`unless`), those that are there already."""
    idle_since_s = time.perf_counter()
    for batch in batches:
        rows = batch.collect(unless=unless)
        if rows:
            batch.times.add_wait_ms("transfer->compress", max(0.0, rows[0].start_s - idle_since_s) * 1e3)
            idle_since_s = max(row.end_s for row in rows)
            yield _finished(batch.host, rows)


def _finished(host: HostBatch, rows: Sequence[compress.CompressedRow]) -> CompressedBatch:
    """`compress_ms` is the time from the first row's start to the last row's end."""
    host.times.add_ms("compress", (max(row.end_s for row in rows) - rows[0].start_s) * 1e3)
    return CompressedBatch(host.batch, tuple(row.result for row in rows), host.times.read())


def usable_cores() -> int:
    """Cores of this process, at most 16: by then the codecs keep up with any one GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(16, cores)


class Crew:
    """Owns the threads of one run and wakes them all when one fails or the run is closed."""

    def __init__(self, *upstream: Channel[Any] | Ring, last: Channel[Any]) -> None:
        self._upstream = upstream
        self._last = last
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def start(self, name: str, items: Iterator[Any], sink: Channel[Any]) -> None:
        """A thread that pulls `items` into `sink`."""
        thread = threading.Thread(target=self._pump, args=(items, sink), name=f"fluxbatch-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pump(self, items: Iterator[Any], sink: Channel[Any]) -> None:
        try:
            for item in items:
                sink.put(item)
        except Stopped:
            return
        except BaseException as error:
            self.fail(error)
        sink.close()

    def fail(self, error: BaseException) -> None:
        """Batches whose pixels are on the host already are still handed out; the rest is dropped."""
        self._error = self._error or error
        self._last.close()
        self._abort()

    def _abort(self) -> None:
        for waited_on in self._upstream:
            waited_on.abort()

    def stop(self, *, join_s: float) -> None:
        self._abort()
        self._last.abort()
        deadline_s = time.monotonic() + join_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error
