"""What of a plan is still to be made, counted by bucket: arithmetic, that lists no batch of an untouched shard.

Knows names of part files and no content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fluxbatch.output.ledger import Ledger
from fluxbatch.output.shards import drawn_batches, open_shards
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.records import Bucket, ShardPlan
from fluxbatch.storage.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Left:
    """Of one bucket: rows, the batches that hold them, and the images that these launch, padding too."""

    rows: int = 0
    batches: int = 0
    launched: int = 0

    def __add__(self, other: Left) -> Left:
        return Left(self.rows + other.rows, self.batches + other.batches, self.launched + other.launched)


def begun_batches(folder: RunFolder, *, ours: Callable[[int], bool] = lambda shard: True) -> dict[int, set[int]]:
    """By open shard, the batches whose part files stand, by their names alone."""
    return {shard: set(drawn_batches(folder, shard)) for shard in open_shards(folder) if ours(shard)}


def left_to_make(
    plan: RunPlan, shards: Iterable[ShardPlan], begun: Mapping[int, set[int]]
) -> tuple[dict[Bucket, Left], int]:
    """What these open shards lack, by bucket in plan order, and how many of their rows are drawn and safe already."""
    left: dict[Bucket, Left] = {}
    drawn = 0
    for part, together in groupby(shards, key=lambda shard: plan.part(shard.index)):
        untouched: list[int] = []
        for shard in together:
            if not shard.dropped and not begun.get(shard.index):
                untouched.append(shard.index)
                continue
            for bucket, more, standing in _of_shard(shard, begun.get(shard.index, set())):
                left[bucket] = left.get(bucket, Left()) + more
                drawn += standing
        for run, rows, batches in part.rows_in(np.array(untouched, np.int64)):
            if rows:
                left[run.bucket] = left.get(run.bucket, Left()) + Left(rows, batches, batches * run.batch_size)
    return left, drawn


def _of_shard(shard: ShardPlan, begun: set[int]) -> Iterator[tuple[Bucket, Left, int]]:
    for batch in shard.batches:
        if batch.index in begun:
            yield batch.bucket, Left(), batch.num_rows
        else:
            yield batch.bucket, Left(batch.num_rows, 1, batch.size), 0


def left_in_folder(folder: RunFolder, plan: RunPlan, ledger: Ledger) -> tuple[dict[Bucket, Left], int]:
    """The same for a whole run folder."""
    pending = (shard for shard in plan.shards() if not ledger.complete(shard))
    left, drawn = left_to_make(plan, pending, begun_batches(folder))
    return {bucket: found for bucket, found in left.items() if found.rows}, drawn
