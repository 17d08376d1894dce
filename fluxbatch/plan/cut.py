"""Cut counted buckets into shards and batches, by arithmetic alone. Knows nothing of files, prompts or tensors.

A plan part is fixed by a few numbers: how many rows each bucket has, the batch size of each bucket and the shard size.
Which batch, shard and slot a row falls in follows from its place; nothing is stored for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from fluxbatch.config import PlanConfig
from fluxbatch.records import BatchPlan, Bucket, ShardPlan

AUTO_PIXELS = 4 * 1024 * 1024  # in one launch: four images of 1024x1024
AUTO_MAX_IMAGES = 16

SizeOf = Callable[[Bucket, int], int]  # the batch size of a bucket with so many rows
SecondsOf = Callable[[Bucket], float | None]  # what one launched image of a bucket is likely to take; None: unknown
RULED_WORK_PER_S = 8_400_000  # pixels times steps of FLUX.1-dev on one H200: only ratios count where nothing is known


@dataclass(frozen=True, slots=True)
class BucketRun:
    """The consecutive rows of one bucket, launched `batch_size` at a time."""

    bucket: Bucket
    num_rows: int
    batch_size: int
    image_s: float | None = None  # of one launched image, as it was predicted at planning

    @property
    def launch_us(self) -> int:
        """Of one launch, padding too. A whole number: sums of it are equal on every machine."""
        image_s = self.bucket.work / RULED_WORK_PER_S if self.image_s is None else self.image_s
        return max(1, round(image_s * self.batch_size * 1e6))


@dataclass(frozen=True)
class PlanPart:
    """One plan file. Rows are counted from 0 inside it; shards and batches are numbered over the whole job."""

    index: int
    kind: str  # rows; retry: rows of earlier parts that failed; redo: rows whose content or settings changed
    first_shard: int
    first_batch: int
    shard_size: int
    runs: tuple[BucketRun, ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in self.runs)

    @cached_property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.shard_size)

    @property
    def num_batches(self) -> int:
        return int(self._batches_of_runs().sum())

    @property
    def batches_of_runs(self) -> list[int]:
        """The number of batches of each run."""
        return [int(number) for number in self._batches_of_runs()]

    @property
    def num_padded(self) -> int:
        """Slots that are launched with copies and never written."""
        _, sizes = self._starts_and_sizes()
        return int((self._batches_of_runs() * sizes).sum()) - self.num_rows

    def shard(self, index: int) -> ShardPlan:
        """The shard of this number, counted over the whole job."""
        if not self.first_shard <= index < self.first_shard + self.num_shards:
            raise IndexError(f"shard {index} is not one of plan part {self.index}")
        first = (index - self.first_shard) * self.shard_size
        stop = min(first + self.shard_size, self.num_rows)
        return ShardPlan(index=index, first_row=first, num_rows=stop - first, batches=Cut(self, first, stop, index))

    def shard_costs(self) -> np.ndarray:
        """Predicted microseconds of each shard: its launches, shard by shard and bucket by bucket."""
        costs = np.zeros(self.num_shards, dtype=np.int64)
        starts, _ = self._starts_and_sizes()
        for run, start in zip(self.runs, starts.tolist(), strict=True):
            stop = start + run.num_rows
            shard = np.arange(start // self.shard_size, -(-stop // self.shard_size))
            first, last = shard * self.shard_size, (shard + 1) * self.shard_size
            rows = np.minimum(last, stop) - np.maximum(first, start)
            costs[shard] += -(-rows // run.batch_size) * run.launch_us
        return costs

    def shards(self) -> Iterator[ShardPlan]:
        return map(self.shard, range(self.first_shard, self.first_shard + self.num_shards))

    def rows_in(self, shards: np.ndarray) -> Iterator[tuple[BucketRun, int, int]]:
        """For each run: its rows in these shards, and the batches that they are cut into."""
        first = (shards - self.first_shard) * self.shard_size
        stop = np.minimum(first + self.shard_size, self.num_rows)
        for run, start in zip(self.runs, self._starts_and_sizes()[0].tolist(), strict=True):
            low, high = (np.clip(edge, start, start + run.num_rows) for edge in (first, stop))
            yield run, int((high - low).sum()), int((-((low - high) // run.batch_size)).sum())

    def columns(self, first_row: int, num_rows: int) -> dict[str, np.ndarray]:
        """Where each row of a range stands: arrays `bucket` (its name), `batch`, `shard` and `slot`."""
        row = np.arange(first_row, first_row + num_rows)
        run, batch, slot = self._locate(row)
        names = np.array([r.bucket.name for r in self.runs], dtype=object)
        return {"bucket": names[run], "batch": batch, "shard": row // self.shard_size + self.first_shard, "slot": slot}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PlanPart:
        runs = tuple(BucketRun(**{**run, "bucket": Bucket(**run["bucket"])}) for run in fields["runs"])
        return cls(**{**fields, "runs": runs})

    def cut(self, first: int, stop: int, *, shard: int) -> Iterator[BatchPlan]:
        """The batches of rows first..stop, which are one shard."""
        starts, _ = self._starts_and_sizes()
        [at], [index], _ = self._locate(np.array([first]))
        for run, start in zip(self.runs[at:], starts[at:].tolist(), strict=True):
            end = min(start + run.num_rows, stop)
            for row in range(max(start, first), end, run.batch_size):
                yield BatchPlan(int(index), shard, run.bucket, row, min(run.batch_size, end - row), run.batch_size)
                index += 1
            if end == stop:
                return

    def _locate(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The run, batch (counted over the job) and slot of each row."""
        starts, sizes = self._starts_and_sizes()
        run = np.searchsorted(starts, row, side="right") - 1
        cut = np.maximum(starts[run], row // self.shard_size * self.shard_size)
        batches = self._batches_of_runs()
        before = (np.cumsum(batches) - batches + self.first_batch)[run]
        in_run = _count_batches(starts[run], cut, shard_size=self.shard_size, batch_size=sizes[run])
        in_cut, slot = np.divmod(row - cut, sizes[run])
        return run, before + in_run + in_cut, slot

    def _batches_of_runs(self) -> np.ndarray:
        starts, sizes = self._starts_and_sizes()
        stops = np.append(starts[1:], self.num_rows)[: len(starts)]
        return _count_batches(starts, stops, shard_size=self.shard_size, batch_size=sizes)

    def _starts_and_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        num_rows = np.array([run.num_rows for run in self.runs], dtype=np.int64)
        sizes = np.array([run.batch_size for run in self.runs], dtype=np.int64)
        return np.cumsum(num_rows) - num_rows, sizes


@dataclass(frozen=True, slots=True)
class Cut(Sequence[BatchPlan]):
    """The batches of one shard, made when they are asked for: a job has millions of them, and looks at a few."""

    part: PlanPart
    first: int
    stop: int
    shard: int

    def __iter__(self) -> Iterator[BatchPlan]:
        return self.part.cut(self.first, self.stop, shard=self.shard)

    def __len__(self) -> int:
        return sum(batches for _, _, batches in self.part.rows_in(np.array([self.shard])))

    @overload
    def __getitem__(self, at: int) -> BatchPlan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BatchPlan]: ...
    def __getitem__(self, at: int | slice) -> BatchPlan | Sequence[BatchPlan]:
        return tuple(self)[at]


def _count_batches(start: np.ndarray, stop: np.ndarray, *, shard_size: int, batch_size: np.ndarray) -> np.ndarray:
    """Batches in rows start..stop of one bucket, cut at each shard's edge too."""
    edge = np.minimum(-(-start // shard_size) * shard_size, stop)
    shards, rest = np.divmod(stop - edge, shard_size)
    return -(-(edge - start) // batch_size) + shards * -(-shard_size // batch_size) + -(-rest // batch_size)


def plan_order(bucket: Bucket) -> tuple[float, ...]:
    """Sorts the largest images first: what will not fit fails in the first minute."""
    area, guidance = bucket.height * bucket.width, bucket.guidance_scale or 0.0
    return -area, -bucket.height, -bucket.width, -bucket.num_inference_steps, -bucket.negative_pass, -guidance


def batch_size(bucket: Bucket, plan: PlanConfig, *, num_rows: int, knee: int | None = None) -> int:
    """Images in one launch of a bucket with so many rows. Never more than a shard holds.

    `auto` is the size that was measured to be worth it (`knee`), else about 4 megapixels; and less where that spares
    padding: 17 rows are two launches of 9, not of 16.
    """
    if plan.batch_size != "auto":
        return min(plan.batch_size, plan.shard_size)
    most = min(knee or _ruled(bucket), plan.shard_size)
    return -(-num_rows // -(-num_rows // most))


def _ruled(bucket: Bucket) -> int:
    return min(max(AUTO_PIXELS // (bucket.height * bucket.width), 1), AUTO_MAX_IMAGES)


def plan_part(
    counts: Mapping[Bucket, int],
    *,
    plan: PlanConfig,
    size_of: SizeOf | None = None,
    index: int = 0,
    kind: str = "rows",
    first_shard: int = 0,
    first_batch: int = 0,
    image_s: SecondsOf = lambda bucket: None,
) -> PlanPart:
    """Plan so many rows of each bucket; shards and batches are numbered from `first_shard` and `first_batch`.

    `size_of` answers the batch sizes; without it the rule of `batch_size` does. `image_s` predicts what images take.
    """
    buckets = sorted((bucket for bucket, num_rows in counts.items() if num_rows), key=plan_order)
    size_of = size_of or (lambda bucket, num_rows: batch_size(bucket, plan, num_rows=num_rows))
    runs = tuple(
        BucketRun(bucket, counts[bucket], size_of(bucket, counts[bucket]), image_s(bucket)) for bucket in buckets
    )
    return PlanPart(index, kind, first_shard, first_batch, plan.shard_size, runs)


def with_seconds(part: PlanPart, image_s: SecondsOf) -> PlanPart:
    """The same part with a prediction of what its images take."""
    return replace(part, runs=tuple(replace(run, image_s=image_s(run.bucket)) for run in part.runs))


def plan_retry(counts: Mapping[Bucket, int], parts: Sequence[PlanPart]) -> PlanPart:
    """Plan rows of `parts` again, with the batch sizes they had: a retry launches the shapes of the first attempt."""
    before = {run.bucket: run for part in parts for run in part.runs}
    last = parts[-1]
    runs = tuple(replace(before[bucket], num_rows=counts[bucket]) for bucket in sorted(counts, key=plan_order))
    first_shard, first_batch = last.first_shard + last.num_shards, last.first_batch + last.num_batches
    return PlanPart(last.index + 1, "retry", first_shard, first_batch, last.shard_size, runs)
