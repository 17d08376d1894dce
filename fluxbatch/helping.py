"""Which shard of another rank is taken next by a rank that has done its share.

Only ranks that are there, or died here, are helped: one that was never started, or ended in order, keeps its shards for
its own next start. A shard is claimed before it is drawn (`Share`), so helpers and owner do not draw the same one; the
owner begins at the front of its share, a helper at the end. Losing a race costs the work of a shard, never a row.
"""

from __future__ import annotations

import logging

import numpy as np

from fluxbatch.plan import deal
from fluxbatch.share import Share
from fluxbatch.storage.lease import Owner, holds_lease, is_live, is_same_owner, read_owner, seen_owners

log = logging.getLogger(__name__)


def next_shards(share: Share) -> list[int]:
    """One open shard that nobody is making, of the rank that has the most of them; empty where there is none."""
    if share.rank.world_size == 1:
        return []
    share.refresh()
    parts = share.plan.parts
    dealt, costs = deal.owners(parts, share.rank.world_size), np.concatenate([part.shard_costs() for part in parts])
    there = {int(owner["rank"]): owner for owner in seen_owners(share.folder)}
    free = {rank: _free(share, np.flatnonzero(dealt == rank).tolist(), there[rank]) for rank in sorted(there)}
    rank = max(free, key=lambda rank: sum(costs[free[rank]]), default=None)
    if rank is None or not free[rank]:
        return []
    shard = free[rank][-1]
    log.info("this rank's share is done; it helps rank %d with shard %d", rank, shard)
    return [shard]


def _free(share: Share, indices: list[int], owner: Owner) -> list[int]:
    """Of the shards of a rank, those that are open and in nobody's hands."""
    found = [index for index in indices if not share.ledger.complete(share.plan.shard(index))]
    if is_live(owner) and not is_same_owner(owner, share.lease.record):
        # It may be clearing up behind a redo just now.
        found = [index for index in found if index not in share.plan.revisions]
    return [index for index in found if index not in share.begun and not _is_claimed(share, index)]


def _is_claimed(share: Share, index: int) -> bool:
    claim = read_owner(share.folder.claim(index))
    return claim is not None and holds_lease(share.folder, claim)
