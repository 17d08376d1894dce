"""Make planned batches ready for the device ahead of time: token ids and noise, on the CPU, into pinned memory.

Knows nothing of the device's work. Legend: N prompts, S text tokens, B rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxbatch.models import AnyModel
from fluxbatch.pipeline.ring import Ring, Slot
from fluxbatch.pipeline.timing import BatchTimes
from fluxbatch.pipeline.watch import Watch
from fluxbatch.records import Batch, Request

TokenRow = dict[str, Tensor]  # each (S,)


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """A batch whose prompts are known: `prompts` and `negatives` have one text a row, `tokens` one entry a text."""

    batch: Batch
    prompts: tuple[str, ...]
    negatives: tuple[str, ...]  # empty where there is no second pass
    tokens: dict[str, TokenRow]
    truncated: tuple[bool, ...]
    times: BatchTimes


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch ready for the device: float32 noise (B, ...) in its natural shape and guidance (B,), both in `slot`."""

    tokenized: TokenizedBatch
    slot: Slot
    noise: Tensor
    guidance: Tensor

    @property
    def batch(self) -> Batch:
        return self.tokenized.batch

    @property
    def times(self) -> BatchTimes:
        return self.tokenized.times


class Prefetcher:
    """Owns the batches between the plan and the device. `staged` runs on one thread, the other methods on another.

    At most `window` batches are tokenised ahead, and as many have noise as the ring has slots.
    """

    def __init__(
        self, model: AnyModel, ring: Ring, *, window: int, draining: Callable[[], bool], watch: Watch | None = None
    ) -> None:
        self._model = model
        self._watch = watch
        self._ring = ring
        self._window = window
        self._draining = draining
        self._ahead: deque[TokenizedBatch] = deque()  # tokenised, not yet launched, in order
        self._lock = threading.Lock()

    def staged(self, batches: Iterable[Batch]) -> Iterator[StagedBatch]:
        """Batches in order. One that can be staged never waits for the window to fill."""
        source = iter(batches)
        unstaged: deque[TokenizedBatch] = deque()
        while unstaged or self._pull(source, unstaged):
            while self._ring.is_exhausted and len(unstaged) < self._window and self._pull(source, unstaged):
                pass
            yield self._stage(unstaged.popleft(), self._ring.acquire())

    def _pull(self, source: Iterator[Batch], unstaged: deque[TokenizedBatch]) -> bool:
        batch = None if self._draining() else next(source, None)
        if batch is None:
            return False
        tokenized = tokenize(self._model, batch, self._watch)
        unstaged.append(tokenized)
        with self._lock:
            self._ahead.append(tokenized)
        return True

    def _stage(self, tokenized: TokenizedBatch, slot: Slot) -> StagedBatch:
        with tokenized.times.stage("prefetch"):
            bucket, requests = tokenized.batch.bucket, tokenized.batch.requests
            shape = self._model.noise_shape(height=bucket.height, width=bucket.width)
            rows = len(requests)
            noise, guidance = slot.carve(((rows, *shape), torch.float32), ((rows,), torch.float32))
            for row_noise, request in zip(noise, requests, strict=True):
                draw_noise(row_noise, seed=request.seed)
            guidance.copy_(torch.tensor([request.guidance_scale for request in requests], dtype=torch.float32))
        return StagedBatch(tokenized, slot, noise, guidance)

    def take(self, tokenized: TokenizedBatch) -> list[TokenizedBatch]:
        """The batch leaves for the device: those that are known to follow it."""
        with self._lock:
            assert self._ahead.popleft() is tokenized, "batches are launched in order"
            return list(self._ahead)


def draw_noise(noise: Tensor, *, seed: int) -> None:
    """One row's noise, in place: what diffusers draws from a CPU generator of this seed, whoever shares the batch."""
    torch.randn(noise.shape, generator=torch.Generator("cpu").manual_seed(seed), out=noise)


def tokenize(model: AnyModel, batch: Batch, watch: Watch | None = None) -> TokenizedBatch:
    """Each distinct text of the batch once."""
    times = BatchTimes(batch, watch)
    with times.stage("prefetch"):
        prompts = tuple(request.prompt for request in batch.requests)
        negatives = _negatives(batch.requests) if batch.bucket.negative_pass else ()
        texts = list(dict.fromkeys(prompts + negatives))
        tokens = model.tokenize(texts)
        truncated = dict(zip(texts, tokens.truncated, strict=True))
        return TokenizedBatch(
            batch=batch,
            prompts=prompts,
            negatives=negatives,
            tokens={text: token_row(tokens.tensors, index) for index, text in enumerate(texts)},
            truncated=tuple(truncated[prompt] for prompt in prompts),
            times=times,
        )


def token_row(tensors: dict[str, Tensor], index: int) -> TokenRow:
    return {name: tensor[index] for name, tensor in tensors.items()}


def _negatives(requests: Sequence[Request]) -> tuple[str, ...]:
    return tuple(request.negative_prompt or "" for request in requests)
