"""A share of a job, some of its shards: which batches are missing, and the way from batches on disk to a ledger line.

Knows no tensors and no signals; what is drawn, and when to stop, is decided in run.py.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Self

from fluxbatch.config import JobConfig
from fluxbatch.errors import FluxbatchError
from fluxbatch.output import ledger, reuse, shards
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.left import Left, left_to_make
from fluxbatch.output.reuse import Donor
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import Batch, BatchPlan, Bucket, CompressedBatch, RowResult, ShardCommit, ShardPlan
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder, revision_of, shard_of
from fluxbatch.storage.lease import Lease

log = logging.getLogger(__name__)

ASKED_ONE_BY_ONE = 20


@dataclass
class Share:
    """The shards that were opened: which batches are still to be made, and the way from batches to a ledger line."""

    folder: RunFolder
    plan: RunPlan
    ledger: Ledger
    cfg: JobConfig
    rank: Rank
    lease: Lease
    pending: set[int] = field(default_factory=set)  # opened shards with batches to make
    drawn: dict[int, set[int]] = field(default_factory=dict)  # of these, the batches that are on disk
    begun: set[int] = field(default_factory=set)  # shards that this process has drawn at
    _is_cleared: bool = False
    _standing: set[int | None] | None = None  # shards with files when shards were opened last; None: not looked at
    _settler: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="fluxbatch-settle")
    )
    _settling: Future[None] | None = None
    _handing_over: threading.RLock = field(default_factory=threading.RLock)  # by main thread and prefetch
    _attempts: dict[int, dict[str, int]] = field(default_factory=dict)  # plan part -> its rows' attempts before it

    def open(self, indices: Iterable[int]) -> list[ShardPlan]:
        """Commit every one of these shards that needs no GPU any more; returns those with batches to make."""
        ours = [self.plan.shard(index) for index in indices]
        begun = {shard.index for shard in ours} & set(shards.open_shards(self.folder))
        self._clear_temporaries(begun)
        on_disk = {shard: shards.committed_batches(self.folder, shard) for shard in begun}
        revised = [shard for shard in ours if shard.revision]
        if revised:
            self._clear_superseded(revised, on_disk)
        self._look_for_files(ours)
        return [shard for shard in ours if not self._is_settled(shard, on_disk.get(shard.index, set()))]

    def _look_for_files(self, ours: list[ShardPlan]) -> None:
        """Which open shards have a file all the same: of many, one listing tells it sooner than a question for each."""
        num_open = sum(not self.ledger.complete(shard) for shard in ours)
        files = shards.standing_files(self.folder) if num_open > ASKED_ONE_BY_ONE else None
        self._standing = None if files is None else {shard_of(file) for file in files}

    def _clear_temporaries(self, begun: Iterable[int]) -> None:
        """What dead attempts left beside these shards' batches, and, the first time, anywhere."""
        places = [*shards.shard_places(self.folder), self.folder.batches, self.folder.locks, self.folder.root]
        for path in (*map(self.folder.open_shard, begun), *(places if not self._is_cleared else ())):
            commit.remove_temporaries(path)
        self._is_cleared = True

    def refresh(self) -> None:
        """Read what all ranks have committed meanwhile."""
        self._wait_for_settling()
        self.ledger = Ledger.read(self.folder, self.plan.revisions)

    def _clear_superseded(self, revised: list[ShardPlan], on_disk: dict[int, set[int]]) -> None:
        """What is left of older revisions becomes part files again, where it is still needed; then the old files go.

        In this order a kill costs nothing, and no row ever stands in two data files.
        """
        old = defaultdict(list)
        for file in shards.standing_files(self.folder):
            old[shard_of(file)].append(file)
        for shard in revised:
            files = [file for file in old[shard.index] if revision_of(file) < shard.revision]
            standing = on_disk.setdefault(shard.index, set())
            if files and not self.ledger.complete(shard):
                standing |= self._unpack(shard, standing)
            for file in files:
                shards.remove_file(self.folder, file)
                commit.step("superseded", self.folder.root / file)
            kept = {batch.index for batch in shard.batches}
            for batch in standing - kept:
                self.folder.batch(batch, shard.index).unlink(missing_ok=True)
            standing &= kept

    def _unpack(self, shard: ShardPlan, on_disk: set[int]) -> set[int]:
        """Part files of the batches that an older revision holds; empty where it cannot be trusted."""
        lines = self.ledger.superseded.get(shard.index, ())
        newest = max((revision_of(line.file) for line in lines), default=0)
        lines = tuple(line for line in lines if revision_of(line.file) == newest)
        wanted = [batch for batch in shard.batches if batch.index not in on_disk]
        superseded = set(self.plan.rows(shard)["id"].to_pylist()) - set(shards.kept_ids(shard, self.plan.rows(shard)))
        made = set()
        try:
            for done in shards.unpack(self.folder, lines, map(self.plan.batch, wanted), superseded=superseded):
                shards.commit_batch(self.folder, done)
                made.add(done.batch.plan.index)
        except FluxbatchError as error:
            log.warning("%s; the rows of shard %d are made again", error, shard.index)
        return made

    def _is_settled(self, shard: ShardPlan, on_disk: set[int]) -> bool:
        if self.ledger.complete(shard):
            if on_disk:  # killed between the ledger line and the clearing up
                shards.remove_batches(self.folder, shard)
            return True
        if on_disk and {batch.index for batch in shard.batches} <= on_disk:
            self.settle(shard)
            return True
        found = self._adopt(shard)
        if found:
            log.warning("shard %d stood there without its ledger line; it is whole and was taken over", shard.index)
            self._record(shard, found)
            return True
        self.pending.add(shard.index)
        if on_disk:
            self.drawn[shard.index] = on_disk
        return False

    def _adopt(self, shard: ShardPlan) -> list[ShardCommit]:
        if self._standing is not None and shard.index not in self._standing:
            return []
        if not shards.stands(self.folder, shard, output=self.cfg.output):
            return []
        found = shards.adopt(self.folder, shard, self.plan.rows(shard), output=self.cfg.output)
        data = shards.data_file(self.folder, shard, self.cfg.output)
        if not found and data.exists() and not any(line.rows for line in self.ledger.commits.get(shard.index, ())):
            raise FluxbatchError(
                f"{data} holds only some rows of its shard and has no ledger line; `verify --repair` sets it aside"
            )
        return found

    def settle(self, shard: ShardPlan) -> None:
        """All batches of a shard are on disk: make its file, then its ledger line, then drop the batches."""
        commits = shards.compact(self.folder, shard, self.plan.rows(shard), output=self.cfg.output)
        self._record(shard, commits)

    def _record(self, shard: ShardPlan, commits: list[ShardCommit]) -> None:
        self.ledger.append(self.folder, self.rank.index, commits)
        shards.remove_batches(self.folder, shard)
        self.lease.give_back(self.folder.claim(shard.index))

    def take_over(self, work: list[ShardPlan], *, check: Callable[[], None]) -> list[ShardPlan]:
        """Commit what an earlier run has of the missing batches; returns the shards that still have batches to make.

        `check` is called between batches, and raises to stop.
        """
        donors = functools.cache(lambda path: reuse.open_donor(path, self.cfg))
        taken, began = 0, time.monotonic()
        for shard in work:
            path = self.plan.taken(shard.index)
            donor = donors(path) if path else None
            taken += self._take(shard, donor, check) if donor else 0
        if taken:
            log.info("%d images were taken over in %.1f s", taken, time.monotonic() - began)
        return [shard for shard in work if shard.index in self.pending]

    def _take(self, shard: ShardPlan, donor: Donor, check: Callable[[], None]) -> int:
        found, rows = donor.locate(self.plan.rows(shard)), 0
        for plan in list(self.missing_batches([shard])):
            check()
            batch = self.plan.batch(plan)
            results = donor.results(batch, found)
            if results:
                self.commit(CompressedBatch(batch, results))
                rows += len(results)
        log.debug("shard %d: %d images taken over", shard.index, rows)
        return rows

    def num_missing(self, shard: ShardPlan) -> int:
        """Batches of an opened shard that are not on disk, as far as is known."""
        return len(shard.batches) - len(self.drawn.get(shard.index, ()))

    def look_again(self, shard: ShardPlan) -> int:
        """See what others have drawn of an opened shard; the number of batches that are new."""
        known = self.drawn.setdefault(shard.index, set())
        before = len(known)
        known.update(shards.drawn_batches(self.folder, shard.index))
        return len(known) - before

    def left(self, work: list[ShardPlan]) -> dict[Bucket, Left]:
        """The batches to make, counted by bucket."""
        left, _ = left_to_make(self.plan, work, self.drawn)
        return left

    def missing_batches(self, work: list[ShardPlan]) -> Iterator[BatchPlan]:
        """The batches to make, in plan order."""
        for shard in work:
            drawn = frozenset(self.drawn.get(shard.index, ()))
            yield from (batch for batch in shard.batches if batch.index not in drawn)

    def batches(self, work: list[ShardPlan]) -> Iterator[Batch]:
        """The same with their rows, but for shards that another rank has taken meanwhile."""
        for shard in work:
            if self.rank.world_size == 1 or self._begin(shard):
                yield from map(self.plan.batch, self.missing_batches([shard]))

    def _begin(self, shard: ShardPlan) -> bool:
        """Claim a shard, and whether there is something of it to draw: another rank may be at it, or have been.

        Called by the thread that prefetches.
        """
        other = self.lease.take(self.folder.claim(shard.index))
        if other is None:
            self.begun.add(shard.index)
            self.look_again(shard)
            if shards.stands(self.folder, shard, output=self.cfg.output) and self._is_complete_by_now(shard):
                self.lease.give_back(self.folder.claim(shard.index))
            elif self.num_missing(shard):
                return True
            else:
                self._settle_behind(shard)
        else:
            log.info("shard %d is being made by rank %s, who has done its own share", shard.index, other.get("rank"))
        self.forget(shard.index)
        return False

    def forget(self, shard: int) -> None:
        """It is no longer ours to make."""
        self.pending.discard(shard)
        self.drawn.pop(shard, None)

    def _is_complete_by_now(self, shard: ShardPlan) -> bool:
        return Ledger.read(self.folder, self.plan.revisions).complete(shard)

    def commit(self, done: CompressedBatch) -> None:
        """Make a finished batch durable, and its shard when it was the last one missing."""
        if not self.folder.job.exists():  # else the batches would go on under a bare mount point
            raise FluxbatchError(
                f"{self.folder.job} is gone: output.dir was moved or unmounted; nothing more is written"
            )
        shards.commit_batch(self.folder, self._with_attempts(done))
        shard = self.plan.shard(done.batch.plan.shard)
        drawn = self.drawn.setdefault(shard.index, set())
        drawn.add(done.batch.plan.index)
        if len(drawn) == len(shard.batches):
            self.forget(shard.index)
            self._settle_behind(shard)

    def _settle_behind(self, shard: ShardPlan) -> None:
        """Make the shard's file while later batches are drawn: a thousand images take the disk seconds.

        One shard at a time: a disk that cannot keep up holds the run here.
        """
        with self._handing_over:
            self._wait_for_settling()
            self._settling = self._settler.submit(self.settle, shard)

    def _wait_for_settling(self) -> None:
        with self._handing_over:
            if self._settling is not None:
                settling, self._settling = self._settling, None
                settling.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """All that was begun is on the disk. Its error is raised, unless there is another one already."""
        self._settler.shutdown(wait=True)
        if error is None:
            self._wait_for_settling()

    def _with_attempts(self, done: CompressedBatch) -> CompressedBatch:
        """Failures of a retry say how often their row has been tried."""
        part = self.plan.part(done.batch.plan.shard)
        if not done.num_failed or part.kind != "retry":
            return done
        if part.index not in self._attempts:
            self._wait_for_settling()  # it writes to the ledger that is read here
            self._attempts[part.index] = ledger.attempts(self.folder, self.ledger, before_shard=part.first_shard)
        earlier = self._attempts[part.index]
        return replace(done, results=tuple(_counted(result, earlier.get(result.id, 0)) for result in done.results))


def _counted(result: RowResult, earlier: int) -> RowResult:
    if result.failure is None:
        return result
    return replace(result, failure=replace(result.failure, attempts=earlier + 1))
