"""Carry noise to the device and pixels back, each on its own stream. Knows nothing of models or codecs.

On a CPU the same code runs without streams. Legend: B rows, H W pixels.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fluxbatch.pipeline.prefetch import StagedBatch, TokenizedBatch
from fluxbatch.pipeline.ring import Slot
from fluxbatch.pipeline.timing import BatchTimes
from fluxbatch.records import Batch, RowFailure

CHECKED_STAGES = ("encode", "denoise", "decode")  # the finite flags of a row, in this order


def finite_rows(tensor: Tensor) -> Tensor:
    """(B, ...) to (B,) bool. Both extremes pass NaN on; `isfinite` of every element took 20 times as long on a CPU."""
    rows = tensor.flatten(1)
    return rows.amax(1).isfinite() & rows.amin(1).isfinite()


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the copies to the device, the model and the copies back run. All None on a CPU."""

    copy_in: torch.cuda.Stream | None = None
    compute: torch.cuda.Stream | None = None
    copy_out: torch.cuda.Stream | None = None

    @classmethod
    def on(cls, device: torch.device) -> Streams:
        if device.type != "cuda":
            return cls()
        return cls(torch.cuda.Stream(device), torch.cuda.default_stream(device), torch.cuda.Stream(device))

    @staticmethod
    def join(
        stream: torch.cuda.Stream | None, *, after: torch.cuda.Stream | None, reads: Iterable[Tensor] = ()
    ) -> None:
        """`stream` goes on after all that is enqueued on `after`, and reads tensors that were made there."""
        if stream is None or after is None:
            return
        stream.wait_stream(after)
        for tensor in reads:
            tensor.record_stream(stream)  # else its memory may be given away while `stream` still reads it


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one launch drew: rows from `first_row` on, without padding. Pixels (B, H, W, 3) uint8, flags (B, 3) bool."""

    first_row: int
    pixels_BHWC: Tensor
    finite_B3: Tensor
    dtypes: tuple[torch.dtype, ...]  # of the three stages


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch whose pixels and flags are on their way into `slot`; read them after `receive`."""

    tokenized: TokenizedBatch
    slot: Slot
    pixels_BHWC: Tensor
    finite_B3: Tensor
    dtypes: tuple[torch.dtype, ...]
    failures: dict[int, RowFailure]

    @property
    def times(self) -> BatchTimes:
        return self.tokenized.times


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch on the host: pixels (B, H, W, 3) inside `slot`, and by row index why some of them are no pictures."""

    batch: Batch
    slot: Slot
    pixels_BHWC: np.ndarray
    truncated: tuple[bool, ...]
    failures: dict[int, RowFailure]
    times: BatchTimes


def copy_in(staged: StagedBatch, streams: Streams, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Noise and guidance on the device, safe to read on the compute stream; the slot may go back to its ring."""
    with torch.cuda.stream(streams.copy_in):
        inputs = [tensor.to(device, non_blocking=True, copy=True) for tensor in (staged.noise, staged.guidance)]
    staged.slot.record(streams.copy_in)
    streams.join(streams.compute, after=streams.copy_in, reads=inputs)
    noise, guidance = inputs
    return noise, guidance


def copy_out(
    tokenized: TokenizedBatch,
    drawn: Sequence[Drawn],
    failures: dict[int, RowFailure],
    slot: Slot,
    streams: Streams,
    *,
    device: torch.device,
) -> LaunchedBatch:
    """Enqueue the copies of every launch's pixels and flags into the slot."""
    bucket, rows = tokenized.batch.bucket, len(tokenized.batch.requests)
    pixels, finite = slot.carve(
        ((rows, bucket.height, bucket.width, 3), torch.uint8), ((rows, len(CHECKED_STAGES)), torch.bool)
    )
    streams.join(
        streams.copy_out, after=streams.compute, reads=[t for d in drawn for t in (d.pixels_BHWC, d.finite_B3)]
    )
    with torch.cuda.stream(streams.copy_out), tokenized.times.stage("transfer", on=device):
        for part in drawn:
            stop = part.first_row + part.pixels_BHWC.shape[0]
            pixels[part.first_row : stop].copy_(part.pixels_BHWC, non_blocking=True)
            finite[part.first_row : stop].copy_(part.finite_B3, non_blocking=True)
    slot.record(streams.copy_out)
    dtypes = drawn[0].dtypes if drawn else ()
    return LaunchedBatch(tokenized, slot, pixels, finite, dtypes, failures)


def receive(launched: LaunchedBatch) -> HostBatch:
    """Wait until the pixels have arrived; name the rows that are no pictures."""
    start_s = time.perf_counter()
    with launched.times.located("transfer"):
        launched.slot.wait()  # Read only after the event: before it the slot holds an older batch, or half of this one.
    launched.times.add_wait_ms("launch->transfer", (time.perf_counter() - start_s) * 1e3)
    tokenized = launched.tokenized
    return HostBatch(
        batch=tokenized.batch,
        slot=launched.slot,
        pixels_BHWC=launched.pixels_BHWC.numpy(),
        truncated=tokenized.truncated,
        failures=launched.failures | _non_finite(launched),
        times=tokenized.times,
    )


def _non_finite(launched: LaunchedBatch) -> dict[int, RowFailure]:
    """The earliest stage that broke each of the rows that were drawn."""
    failures = {}
    for row, flags in enumerate(launched.finite_B3.tolist()):
        broken = [] if row in launched.failures else [stage for stage, finite in enumerate(flags) if not finite]
        if broken:
            stage, dtype = CHECKED_STAGES[broken[0]], str(launched.dtypes[broken[0]]).removeprefix("torch.")
            failures[row] = RowFailure(stage, "non_finite", f"{stage} gave NaN or infinity in {dtype}")
    return failures
