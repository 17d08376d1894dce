"""Who makes which shard: the shards of a plan dealt to ranks, so that each has as much predicted work as the others.

Pure. The plan (which holds the predicted costs) and the number of ranks decide, so ranks on any machines agree without
a word, and another number of ranks on the next start loses and doubles nothing. Knows no files and no processes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from fluxbatch.plan.cut import PlanPart


def owners(parts: Sequence[PlanPart], world_size: int) -> np.ndarray:
    """The rank of each shard, by its number over the whole job.

    In each part the most expensive shard first, to the rank with the least work so far (Graham 1969: the last rank
    ends at most a third later than with the best deal). A part that is added later changes nothing of those before it:
    ranks that started before it was there agree with those that know it. Shards that are done already count too.
    """
    if world_size == 1:
        return np.zeros(sum(part.num_shards for part in parts), dtype=np.int64)
    loads = [(0, rank) for rank in range(world_size)]  # microseconds, as whole numbers: sums agree everywhere
    dealt = []
    for part in parts:
        costs = part.shard_costs()
        ranks = np.zeros(part.num_shards, dtype=np.int64)
        for shard in np.argsort(-costs, kind="stable").tolist():
            load, rank = loads[0]
            ranks[shard] = rank
            heapq.heapreplace(loads, (load + int(costs[shard]), rank))
        dealt.append(ranks)
    return np.concatenate(dealt) if dealt else np.zeros(0, dtype=np.int64)


def shards_of(parts: Sequence[PlanPart], rank: int, world_size: int) -> list[int]:
    """The shards of one rank, in plan order."""
    return np.flatnonzero(owners(parts, world_size) == rank).tolist()


def loads(parts: Sequence[PlanPart], world_size: int) -> list[int]:
    """Predicted microseconds of each rank."""
    costs = np.concatenate([part.shard_costs() for part in parts]) if parts else np.zeros(0, dtype=np.int64)
    dealt = owners(parts, world_size)
    return [int(costs[dealt == rank].sum()) for rank in range(world_size)]
