"""One batch onto the device: copied in, encoded, denoised and decoded, in fewer rows at once where memory is short.

Knows the order of the stages of a launch and no thread, and nothing of where batches come from and go to.
Legend: B rows of one launch.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from fluxbatch.config import ModelConfig, PipelineConfig
from fluxbatch.models import AnyModel, Model, PromptEmbeds, WholeModel, memory
from fluxbatch.models.compile_cache import CompileWatch
from fluxbatch.pipeline import transfer
from fluxbatch.pipeline.decode import decode, launch_size, padded
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.pipeline.device import cuda_index, is_out_of_memory
from fluxbatch.pipeline.encode import PromptEncoder
from fluxbatch.pipeline.prefetch import Prefetcher, StagedBatch, TokenizedBatch
from fluxbatch.pipeline.ring import Ring
from fluxbatch.pipeline.timing import BatchTimes
from fluxbatch.pipeline.transfer import Drawn, LaunchedBatch, Streams, finite_rows
from fluxbatch.pipeline.whole import draw_whole
from fluxbatch.records import Bucket, RowFailure
from fluxbatch.step_cache import StepCache

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One attempt that did not fit."""

    stage: str
    message: str


class Launcher:
    """Owns the device: every launch of a run comes from the one thread that calls it, as CUDA graphs demand.

    Nothing here waits for the device; a truth test or `.item()` of a tensor would.
    """

    def __init__(
        self,
        model: AnyModel,
        prefetch: Prefetcher,
        inputs: Ring,
        outputs: Ring,
        *,
        pipeline: PipelineConfig,
        model_cfg: ModelConfig,
        step_cache: StepCache,
    ) -> None:
        self._model = model
        self._step_cache = step_cache
        self._prefetch = prefetch
        self._inputs = inputs
        self._outputs = outputs
        self._device_index = cuda_index(model.device)
        self._streams = Streams.on(model.device)
        self._encoder: PromptEncoder | None = None
        if not isinstance(model, WholeModel):
            self._encoder = PromptEncoder(
                model, self._streams, launch_size=model_cfg.encode_batch_size, capacity=pipeline.prompt_cache
            )
        self._decode_max_pixels = model_cfg.decode_max_pixels
        self._max_rows: dict[Bucket, int] = {}  # what has fitted into memory after a launch that did not
        self._max_decode_rows: dict[Bucket, int] = {}  # the same of the decoder's launches
        self._shapes: set[tuple[int, int, bool, int]] = set()
        self._compile_watch = CompileWatch()

    @torch.inference_mode()
    def __call__(self, staged: StagedBatch) -> LaunchedBatch:
        with torch.cuda.device(self._device_index), self._observed(staged.times):  # a new thread starts on device 0
            tokenized = staged.tokenized
            upcoming = self._prefetch.take(tokenized)
            inputs = self._attempt_twice(tokenized.times, partial(self._copy_in, staged))
            self._inputs.release(staged.slot)
            encoded = self._attempt_twice(tokenized.times, partial(self._prepare_prompts, tokenized, upcoming))
            drawn: list[Drawn] = []
            if isinstance(inputs, OutOfMemory):
                failures = _all_fail(tokenized, inputs)
            elif isinstance(encoded, OutOfMemory):
                failures = _all_fail(tokenized, encoded)
            else:
                drawn, failures = self._draw(tokenized, *inputs)
            slot = self._outputs.acquire()
            return transfer.copy_out(tokenized, drawn, failures, slot, self._streams, device=self._model.device)

    @contextmanager
    def _observed(self, times: BatchTimes) -> Iterator[None]:
        """What a launch needs at most, which the allocator knows at once, and what the first of a shape compiles."""
        before = self._compile_watch.read()
        memory.reset_peak(self._model.device)
        yield
        times.peak_gib = memory.peak_gib(self._model.device)
        if times.first_of_shape and self._model.device.type == "cuda":
            log.info("bucket %s, %d a launch: %s", times.batch.bucket.name, times.batch.plan.size,
                     self._compile_watch.read() - before)  # fmt: skip

    def _copy_in(self, staged: StagedBatch) -> tuple[Tensor, Tensor]:
        with staged.times.located("transfer"):
            return transfer.copy_in(staged, self._streams, device=self._model.device)

    def _prepare_prompts(self, tokenized: TokenizedBatch, upcoming: Sequence[TokenizedBatch]) -> None:
        if self._encoder is not None:
            with tokenized.times.stage("encode", on=self._model.device):
                self._encoder.prepare(tokenized, upcoming)

    def _draw(
        self, tokenized: TokenizedBatch, noise: Tensor, guidance: Tensor
    ) -> tuple[list[Drawn], dict[int, RowFailure]]:
        """The batch in one launch, or in several of half, a quarter, ... of its size where memory is short."""
        plan, num_rows = tokenized.batch.plan, len(tokenized.prompts)
        size = min(plan.size, self._max_rows.get(plan.bucket, plan.size))
        drawn: list[Drawn] = []
        failures: dict[int, RowFailure] = {}
        first_row = 0
        while first_row < num_rows:
            work = partial(self._launch, tokenized, noise, guidance, first_row=first_row, size=size)
            outcome = self._attempt(tokenized.times, work)
            if isinstance(outcome, Drawn):
                drawn.append(outcome)
                first_row += size
            elif size > 1:
                size = self._halve(tokenized.times, size, outcome)
            else:
                failures[first_row] = _failure(outcome)
                first_row += 1
        return drawn, failures

    def _halve(self, times: BatchTimes, size: int, outcome: OutOfMemory) -> int:
        times.out_of_memory_splits += 1
        bucket = times.batch.bucket
        self._max_rows[bucket] = size // 2
        log.warning("%s: out of memory with %d images; bucket %s goes on with %d a launch (%s)",
                    times.place, size, bucket.name, size // 2, outcome.message)  # fmt: skip
        return size // 2

    def _launch(
        self, tokenized: TokenizedBatch, noise: Tensor, guidance: Tensor, *, first_row: int, size: int
    ) -> Drawn | OutOfMemory:
        """Draw up to `size` rows; the launch has that size in any case, padded with its last row."""
        self._mark_first_of_shape(tokenized.times, tokenized.batch.bucket, size)
        if not isinstance(self._model, WholeModel):
            return self._launch_stages(self._model, tokenized, noise, guidance, first_row=first_row, size=size)
        return draw_whole(
            self._model,
            tokenized.batch.requests[first_row : first_row + size],
            first_row=first_row,
            size=size,
            bucket=tokenized.batch.bucket,
            times=tokenized.times,
            before_step=partial(self._before_step, tokenized.times),
            decode_max_pixels=self._decode_max_pixels,
        )

    def _launch_stages(
        self, model: Model, tokenized: TokenizedBatch, noise: Tensor, guidance: Tensor, *, first_row: int, size: int
    ) -> Drawn | OutOfMemory:
        times, bucket, device = tokenized.times, tokenized.batch.bucket, model.device
        rows = slice(first_row, first_row + size)
        embeds, encode_finite = self._embeds(tokenized.prompts[rows], size)
        negative_embeds = None
        if bucket.negative_pass:
            negative_embeds, negative_finite = self._embeds(tokenized.negatives[rows], size)
            encode_finite = encode_finite & negative_finite
        with times.stage("denoise", on=device):
            latents = denoise(
                model,
                padded(noise[rows], size),
                embeds=embeds,
                negative_embeds=negative_embeds,
                guidance=padded(guidance[rows], size),
                bucket=bucket,
                before_step=partial(self._before_step, times),
                step_cache=self._step_cache,
            )
        denoise_finite = finite_rows(latents)
        decoded = self._decode(model, times, latents)
        if isinstance(decoded, OutOfMemory):
            return decoded
        pixels, decode_finite, vae_dtype = decoded
        num_rows = len(tokenized.prompts[rows])
        finite_B3 = torch.stack([encode_finite, denoise_finite, decode_finite], dim=1)
        dtypes = (next(iter(embeds.values())).dtype, latents.dtype, vae_dtype)
        return Drawn(first_row, pixels[:num_rows], finite_B3[:num_rows], dtypes)

    def _decode(
        self, model: Model, times: BatchTimes, latents: Tensor
    ) -> tuple[Tensor, Tensor, torch.dtype] | OutOfMemory:
        """Pixels of the latents. The decoder's launches are halved where memory is short; the denoise stands."""
        bucket = times.batch.bucket
        area = bucket.height * bucket.width
        rows = launch_size(len(latents), max_rows=max(1, self._decode_max_pixels // area))
        rows = min(rows, self._max_decode_rows.get(bucket, rows))
        while True:
            work = partial(self._decode_launches, model, times, latents, max_pixels=rows * area)
            outcome = self._attempt(times, work)
            if not isinstance(outcome, OutOfMemory) or rows == 1:
                return outcome
            rows //= 2
            times.out_of_memory_splits += 1
            self._max_decode_rows[bucket] = rows
            log.warning("%s: out of memory; bucket %s goes on with %d images in a launch of the decoder (%s)",
                        times.place, bucket.name, rows, outcome.message)  # fmt: skip

    def _decode_launches(
        self, model: Model, times: BatchTimes, latents: Tensor, *, max_pixels: int
    ) -> tuple[Tensor, Tensor, torch.dtype]:
        with times.stage("decode", on=model.device):
            return decode(model, latents, bucket=times.batch.bucket, max_pixels=max_pixels)

    def _before_step(self, times: BatchTimes) -> None:
        self._outputs.check()
        times.alive()

    def _embeds(self, texts: Sequence[str], size: int) -> tuple[PromptEmbeds, Tensor]:
        assert self._encoder is not None, "a whole call encodes for itself"
        return self._encoder.rows([*texts, *[texts[-1]] * (size - len(texts))])

    def _mark_first_of_shape(self, times: BatchTimes, bucket: Bucket, size: int) -> None:
        shape = (bucket.height, bucket.width, bucket.negative_pass, size)
        times.first_of_shape |= shape not in self._shapes
        self._shapes.add(shape)

    def _attempt(self, times: BatchTimes, work: Callable[[], T]) -> T | OutOfMemory:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            outcome = OutOfMemory(times.current_stage, str(error).partition("\n")[0])
        # Only now: inside the handler the exception's frames still hold every tensor of the attempt.
        gc.collect()
        torch.cuda.empty_cache()
        return outcome

    def _attempt_twice(self, times: BatchTimes, work: Callable[[], T]) -> T | OutOfMemory:
        """For work that cannot be made smaller: one more try with all memory given back."""
        outcome = self._attempt(times, work)
        return self._attempt(times, work) if isinstance(outcome, OutOfMemory) else outcome


def _all_fail(tokenized: TokenizedBatch, outcome: OutOfMemory) -> dict[int, RowFailure]:
    return {row: _failure(outcome) for row in range(len(tokenized.prompts))}


def _failure(outcome: OutOfMemory) -> RowFailure:
    return RowFailure(outcome.stage, "out_of_memory", outcome.message)
