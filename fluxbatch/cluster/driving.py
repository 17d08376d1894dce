"""Draw a share on the GPUs of a Ray cluster: shards are dealt one at a time, the longest first, until all are done.

The driver's loop. It draws nothing itself: workers draw and commit, their batch logs in the run folder feed one bar.
Decides what an answer means for the job; who lives and where is `crew`'s, which shard is next `dealer`'s.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fluxbatch import drawing
from fluxbatch.cluster.crew import Crew, Event, Member, connected
from fluxbatch.cluster.dealer import Dealer
from fluxbatch.cluster.worker import Order, versions
from fluxbatch.config import JobConfig, amounts
from fluxbatch.drawing import LoadModel
from fluxbatch.errors import ConfigError, FluxbatchError, ProcessLost
from fluxbatch.processes.crew_view import CrewView
from fluxbatch.records import ShardPlan
from fluxbatch.share import Share
from fluxbatch.stop import Stop
from fluxbatch.storage import commit, lease
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

POLL_S = 0.5
PATIENT_S = 10.0  # without a worker before that is told
LEDGER_S = 90.0  # NFS may show a ledger that another node has begun a minute late
FAILED_SHARDS = 3  # different ones in a row, on a node that has never made one: it is the node's fault


class RayDrawing:
    """Draws for one share as `Drawing` does, on a cluster. `load` replaces the model (tests)."""

    def __init__(self, share: Share, load: LoadModel | None, stop: Stop) -> None:
        self._share, self._load, self._stop = share, load, stop
        self._cfg, self._folder = share.cfg, share.folder
        self._gpus: set[str] = set()
        self._places: set[int] = set()  # ranks that our workers took
        self._proven: set[str] = set()  # nodes that have made a shard
        self._alone_since_s = 0.0
        self._said_waiting = False

    def __enter__(self) -> RayDrawing:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open between two rounds."""

    def draw(self, work: list[ShardPlan]) -> None:
        """Have all missing batches of these shards made.

        Raises FluxbatchError for shards that cannot be made, once the others are; at once for what no shard can do
        without: a model that does not load, a node's refusal where it is the last, a full disk.
        """
        self._alone_since_s = time.monotonic()
        dealer = Dealer(self._longest_first(work), max_attempts=self._cfg.run.max_shard_attempts)
        with connected(), _probe_file(self._folder) as probe:
            crew = Crew(
                lambda rank: self._order(rank, probe),
                is_free=self._is_free,
                resources=worker_resources(self._cfg),
                load=self._load,
            )
            try:
                with contextlib.closing(crew), CrewView(self._folder, self._cfg.telemetry) as view:
                    self._deal(dealer, crew, _View(view, self._folder, self._cfg))
            finally:
                for rank in self._places:  # of those who were ended
                    self._folder.lease(rank).unlink(missing_ok=True)
        self._await_ledger(dealer.done)
        if dealer.given_up:
            raise FluxbatchError(dealer.sentence())
        self._remember()

    def _remember(self) -> None:
        """For this machine's next plan; workers keep what they measured on theirs. Those of unlike GPUs are of none."""
        if len(self._gpus) < 2:
            drawing.remember_rates(self._share, min(self._gpus, default=None), rank=None)

    def _longest_first(self, work: list[ShardPlan]) -> list[int]:
        """By what the plan predicts of the batches that are left: a long shard must not be begun last."""
        costs = np.concatenate([part.shard_costs() for part in self._share.plan.parts])
        left = {shard.index: costs[shard.index] * self._share.num_missing(shard) / len(shard.batches) for shard in work}
        return sorted(left, key=lambda index: -left[index])

    def _order(self, rank: int, probe: str) -> Order:
        return Order(self._cfg, str(self._folder.root), rank, probe, versions(), str(Path.cwd()))

    def _is_free(self, rank: int) -> bool:
        owner = lease.read_owner(self._folder.lease(rank))
        return owner is None or not lease.is_live(owner)

    def _deal(self, dealer: Dealer, crew: Crew, view: _View) -> None:
        while not dealer.is_over:
            if self._stop.requested():
                self._drain(dealer, crew, view)
                return
            crew.hire(dealer.num_waiting - sum(member.state != "busy" for member in crew.members))
            for member in crew.idle:
                shard = dealer.next()
                if shard is not None:
                    crew.ask(member, shard)
            self._require_workers(crew)
            for event in crew.wait(POLL_S):
                self._take(event, dealer, crew)
            view.look()

    def _drain(self, dealer: Dealer, crew: Crew, view: _View) -> None:
        """Those at work finish what is in flight; when the grace is over, `Stop` ends this process and so theirs."""
        dealer.stop()
        crew.stop_all(self._stop.reason or "the driver stops")
        while any(member.state == "busy" for member in crew.members):
            for event in crew.wait(POLL_S):
                self._take(event, dealer, crew)
            view.look()

    def _require_workers(self, crew: Crew) -> None:
        """No cluster without a worker is waited for longer than run.ray_wait_s."""
        barred = crew.all_barred()
        if barred:
            raise barred
        if crew.working:
            self._alone_since_s, self._said_waiting = time.monotonic(), False
        waited_s = time.monotonic() - self._alone_since_s
        if waited_s > PATIENT_S and not self._said_waiting:
            self._said_waiting = True
            log.warning("no node of the Ray cluster has %s free; waiting up to run.ray_wait_s=%g seconds for one",
                        _told_resources(self._cfg), self._cfg.run.ray_wait_s)  # fmt: skip
        if waited_s > self._cfg.run.ray_wait_s:
            raise FluxbatchError(
                f"no worker could be started for run.ray_wait_s={self._cfg.run.ray_wait_s:g} seconds: no node of the "
                f"Ray cluster has {_told_resources(self._cfg)} free; the same command goes on"
            )

    def _take(self, event: Event, dealer: Dealer, crew: Crew) -> None:
        """What an answer, or a death, means for the job."""
        member, answer = event.member, event.answer
        if answer is None:
            self._lost(event, dealer)
        elif answer.state == "busy":
            crew.dismiss(member)  # another copy of this job was quicker; the next one gets another number
        elif answer.state == "refused":
            crew.bar(member, ConfigError(f"node {member.host} is left out: {answer.error}"))
            crew.dismiss(member)
        elif member.state == "joining" and answer.error is None:
            self._places.add(member.rank)
            crew.prepare(member)
        elif member.state in ("joining", "loading"):
            self._loaded(event)
        else:
            self._came_back(event, dealer, crew)

    def _lost(self, event: Event, dealer: Dealer) -> None:
        log.warning("%s", event.why)
        self._clear_place(event.member)
        if event.member.shard is not None:
            self._put_back(event.member, event.why, dealer)

    def _loaded(self, event: Event) -> None:
        member, answer = event.member, event.answer
        assert answer is not None
        if answer.error is not None:
            answer.error.add_note(f"{member.name} could not be made ready to draw")
            raise answer.error
        log.info("%s is ready%s", member.name, f" ({answer.gpu})" if answer.gpu else "")
        member.state = "idle"
        if answer.gpu and self._gpus and answer.gpu not in self._gpus:
            log.warning("%s draws on %s, others on %s: bits differ by rounding", member.name, answer.gpu,
                        ", ".join(sorted(self._gpus)))  # fmt: skip
        self._gpus |= {answer.gpu} if answer.gpu else set()

    def _came_back(self, event: Event, dealer: Dealer, crew: Crew) -> None:
        member, answer = event.member, event.answer
        assert answer is not None and member.shard is not None
        shard, member.state = member.shard, "idle"
        if answer.state == "done":
            dealer.finish(shard)
            self._share.forget(shard)
            member.shard, member.failed = None, set()
            self._proven.add(member.node)
        elif answer.state == "stopped":
            self._was_stopped(member, dealer, crew)
        elif answer.ends_job:
            assert answer.error is not None
            answer.error.add_note(f"{member.name}, shard {shard}")
            raise answer.error
        else:
            self._failed(event, dealer, crew)

    def _was_stopped(self, member: Member, dealer: Dealer, crew: Crew) -> None:
        """A worker that has stopped draws no more, whoever told it to; its place may be another copy's by now."""
        assert member.shard is not None
        self._share.look_again(self._share.plan.shard(member.shard))
        dealer.take_back(member.shard)
        member.shard = None
        if not self._stop.requested():
            log.warning("%s was stopped, and is let go", member.name)
            crew.dismiss(member)
            self._places.discard(member.rank)

    def _failed(self, event: Event, dealer: Dealer, crew: Crew) -> None:
        member, answer = event.member, event.answer
        assert answer is not None and member.shard is not None
        shard, why = member.shard, "; ".join([str(answer.error), *getattr(answer.error, "__notes__", ())])
        log.warning("%s, shard %d: %s", member.name, shard, why)
        if self._put_back(member, why, dealer):
            member.failed = set()
        else:
            member.failed.add(shard)
        if len(member.failed) >= FAILED_SHARDS and member.node not in self._proven:
            told = f"node {member.host} is left out: the first {FAILED_SHARDS} shards all failed there ({why})"
            crew.bar(member, FluxbatchError(told))
        if isinstance(answer.error, ProcessLost) or member.node in crew.barred:
            crew.dismiss(member)
            self._clear_place(member)

    def _clear_place(self, member: Member) -> None:
        """One that was ended cannot give its place back itself."""
        if member.rank in self._places:
            self._folder.lease(member.rank).unlink(missing_ok=True)

    def _put_back(self, member: Member, why: str, dealer: Dealer) -> bool:
        """The member's shard is dealt again, with what was committed of it. Whether its attempt brought a batch."""
        assert member.shard is not None
        shard = self._share.plan.shard(member.shard)
        brought = self._share.look_again(shard) > 0
        if not dealer.put_back(shard.index, why, brought=brought):
            log.warning("shard %d is given up after %d attempts", shard.index, self._cfg.run.max_shard_attempts)
        member.shard = None
        return brought

    def _await_ledger(self, done: set[int]) -> None:
        """Until this node sees what the others have written: a network file system shows it late."""
        until_s = time.monotonic() + LEDGER_S
        plan = self._share.plan
        while time.monotonic() < until_s and not self._stop.requested():
            self._share.refresh()
            if all(self._share.ledger.complete(plan.shard(index)) for index in done):
                return
            time.sleep(POLL_S)


class _View:
    """What a person sees of all workers, and now and then Prometheus."""

    def __init__(self, view: CrewView, folder: RunFolder, cfg: JobConfig) -> None:
        self._view, self._folder, self._cfg = view, folder, cfg
        self._told_s = time.monotonic()

    def look(self) -> None:
        self._view.look()
        if time.monotonic() - self._told_s >= self._cfg.telemetry.interval_s:
            drawing.tell_prometheus(self._folder, self._cfg)
            self._told_s = time.monotonic()


@contextlib.contextmanager
def _probe_file(folder: RunFolder) -> Iterator[str]:
    """A new file under locks/: who sees it works in the same folder."""
    path = commit.temporary_sibling(folder.locks / "probe")  # a later start removes what a kill leaves of it
    commit.replace_file(path, b"")
    try:
        yield path.name
    finally:
        path.unlink(missing_ok=True)


def worker_resources(cfg: JobConfig) -> dict[str, float]:
    """What one worker asks of its node: a GPU, or on the CPU its threads, where `run.ray_resources` is silent."""
    if cfg.run.ray_resources:
        return amounts(cfg.run.ray_resources)
    return {"CPU": float(cfg.model.cpu_threads)} if cfg.model.device == "cpu" else {"GPU": 1.0}


def _told_resources(cfg: JobConfig) -> str:
    return ",".join(f"{name}:{number:g}" for name, number in worker_resources(cfg).items())
