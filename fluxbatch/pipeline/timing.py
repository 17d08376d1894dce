"""Measure what each batch costs and say where it was when something broke. Knows stages by their names only.

On a GPU a stage is measured between two CUDA events, which are read only after the work behind them; on a CPU with a
monotonic clock around the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from fluxbatch.pipeline.ring import Stopped
from fluxbatch.pipeline.watch import Watch
from fluxbatch.records import Batch, StageTimes

STAGES = ("prefetch", "encode", "denoise", "decode", "transfer", "compress")
HANDOVERS = ("prefetch->launch", "launch->transfer", "transfer->compress", "compress->commit")
CPU = torch.device("cpu")


class BatchTimes:
    """The clocks of one batch. One thread at a time holds a batch, so nothing is locked."""

    def __init__(self, batch: Batch, watch: Watch | None = None) -> None:
        self.batch = batch
        self._watch = watch or Watch()
        self.current_stage = ""  # the last one entered
        self.first_of_shape = False
        self.out_of_memory_splits = 0
        self.peak_gib: tuple[float, float] | None = None  # allocated, reserved
        self._spans_ms: dict[str, list[Callable[[], float]]] = {stage: [] for stage in STAGES}
        self._wait_ms = dict.fromkeys(HANDOVERS, 0.0)

    @contextmanager
    def stage(self, name: str, *, on: torch.device = CPU) -> Iterator[None]:
        """Measure a stage on the device's current stream."""
        with self.located(name):
            elapsed_ms = _cuda_span() if on.type == "cuda" else _host_span()
            yield
            self._spans_ms[name].append(elapsed_ms())

    @contextmanager
    def located(self, name: str) -> Iterator[None]:
        """An exception that passes is told the stage and the batch; one that takes for ever is noticed by the watch."""
        self.current_stage = name
        self._watch.enter(self)
        try:
            yield
        except Stopped:
            raise
        except BaseException as error:
            error.add_note(self.place)
            raise
        finally:
            self._watch.leave(self)

    def alive(self) -> None:
        """A sign of life of a stage that goes on."""
        self._watch.enter(self)

    @property
    def place(self) -> str:
        """`stage decode, shard 3, batch 41, 1024x1024`."""
        plan = self.batch.plan
        return (
            f"stage {self.current_stage}, shard {plan.shard}, batch {plan.index}, "
            f"{plan.bucket.height}x{plan.bucket.width}"
        )

    def add_ms(self, stage: str, milliseconds: float) -> None:
        self._spans_ms[stage].append(lambda: milliseconds)

    def add_wait_ms(self, handover: str, milliseconds: float) -> None:
        self._wait_ms[handover] += milliseconds

    def read(self) -> StageTimes:
        """All of it, once the batch's last event has passed."""
        allocated_gib, reserved_gib = self.peak_gib or (None, None)
        stages = {f"{stage}_ms": sum(span() for span in spans) for stage, spans in self._spans_ms.items()}
        return StageTimes(
            **stages,
            wait_ms=dict(self._wait_ms),
            first_of_shape=self.first_of_shape,
            out_of_memory_splits=self.out_of_memory_splits,
            peak_allocated_gib=allocated_gib,
            peak_reserved_gib=reserved_gib,
        )


def _host_span() -> Callable[[], Callable[[], float]]:
    start_s = time.perf_counter()

    def stop() -> Callable[[], float]:
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        return lambda: elapsed_ms

    return stop


def _cuda_span() -> Callable[[], Callable[[], float]]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()

    def stop() -> Callable[[], float]:
        end.record()
        return lambda: start.elapsed_time(end)

    return stop


class Timed(Protocol):
    @property
    def times(self) -> BatchTimes: ...


TimedT = TypeVar("TimedT", bound=Timed)


def waited(items: Iterable[TimedT], handover: str) -> Iterator[TimedT]:
    """The items, each told how long its receiver stood idle for it."""
    iterator = iter(items)
    while True:
        start_s = time.perf_counter()
        item = next(iterator, None)
        if item is None:
            return
        item.times.add_wait_ms(handover, (time.perf_counter() - start_s) * 1e3)
        yield item
