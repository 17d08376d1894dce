"""What batches are handed over in: bounded channels, and rings of pinned memory that is refilled only when it is free.

Knows nothing of what travels.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
ALIGNMENT_BYTES = 64  # a cache line; every dtype's views start on one


class Stopped(Exception):
    """The run is being torn down: ends whichever thread waits or is about to hand something over."""


class Channel(Generic[T]):
    """A bounded hand-over between two threads. Its capacity is the back-pressure."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[T] = deque()
        self._closed = False
        self._aborted = False
        self._changed = threading.Condition()

    def put(self, item: T) -> None:
        """Blocks while full; `Stopped` once closed or aborted."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._capacity or self._closed)
            if self._closed:
                raise Stopped
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> T | None:
        """Blocks while empty; None after the last item of a closed channel; `Stopped` once aborted."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closed)
            if self._aborted:
                raise Stopped
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def __iter__(self) -> Iterator[T]:
        while (item := self.get()) is not None:
            yield item

    def __len__(self) -> int:
        return len(self._items)

    def close(self) -> None:
        """Nothing more comes; what is there is still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Nothing more comes and nothing more is taken."""
        with self._changed:
            self._aborted = self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """`Stopped` once aborted: for long work between two hand-overs."""
        if self._aborted:
            raise Stopped


class Slot:
    """Host memory of one batch in flight, page-locked for a GPU, with the event of the last copy that touches it."""

    def __init__(self, *, pinned: bool) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = pinned
        self._copied = torch.cuda.Event(blocking=True) if pinned else None  # blocking: sleeps where others would spin

    def carve(self, *fields: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """One tensor for each (shape, dtype). Grows to the largest batch seen and stays there."""
        used_bytes = [math.prod(shape) * dtype.itemsize for shape, dtype in fields]
        part_bytes = [-(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for used in used_bytes]
        if sum(part_bytes) > self._memory.numel():
            self._memory = torch.empty(sum(part_bytes), dtype=torch.uint8, pin_memory=self._pinned)
        parts = self._memory[: sum(part_bytes)].split(part_bytes)
        return [
            part[:used].view(dtype).view(shape)
            for part, used, (shape, dtype) in zip(parts, used_bytes, fields, strict=True)
        ]

    def record(self, stream: torch.cuda.Stream | None) -> None:
        """The copies enqueued on `stream` so far touch this memory."""
        if stream is not None and self._copied is not None:
            stream.record_event(self._copied)

    def wait(self) -> None:
        """The host waits for those copies."""
        if self._copied is not None:
            self._copied.synchronize()


class Ring:
    """A fixed number of slots. Whoever holds one may fill it; release it after the last reader is done or recorded."""

    def __init__(self, depth: int, *, device: torch.device) -> None:
        self._free: Channel[Slot] = Channel(depth)
        for _ in range(depth):
            self._free.put(Slot(pinned=device.type == "cuda"))

    def acquire(self) -> Slot:
        """Blocks while every slot is in use; `Stopped` once aborted."""
        slot = self._free.get()
        assert slot is not None, "a ring is aborted, never closed"
        slot.wait()  # Refill only after the event: the copy engine may still be reading this slot.
        return slot

    def release(self, slot: Slot) -> None:
        try:
            self._free.put(slot)
        except Stopped:
            return  # a compressor that ends after the run was closed

    @property
    def is_exhausted(self) -> bool:
        return not len(self._free)

    def abort(self) -> None:
        self._free.abort()

    def check(self) -> None:
        self._free.check()
