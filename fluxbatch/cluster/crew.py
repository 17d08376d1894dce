"""The workers of a Ray cluster, one actor for each place that a node has: hired, asked, lost, let go.

The only module that calls Ray. An actor is bound to its node, so that a node which cannot work is not tried again and
again, and none waits for a GPU that is gone. Nothing is retried by Ray. Knows no shards' content and no plan.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fluxbatch.cluster.worker import Answer, Order, Worker
from fluxbatch.drawing import LoadModel
from fluxbatch.errors import FluxbatchError
from fluxbatch.stop import SIGNALS

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the nodes
CLOSE_S = 10.0  # what all workers together may take to leave
DEATHS_BEFORE_WORK = 3  # of workers of one node that die before they can draw: no more are started there
OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}  # Ray's own resources; all others are by name


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """A connection to the running cluster: RAY_ADDRESS, else that of this machine. None is ever started here."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    is_main = threading.current_thread() is threading.main_thread()
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.CRITICAL)  # `crew` tells who was lost
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        raise FluxbatchError(
            f"run.engine=ray needs a running Ray cluster (ray start, ray job submit, or RAY_ADDRESS): {error}"
        ) from error
    for number, handler in handlers.items() if is_main else ():
        signal.signal(number, handler)  # Ray's own would end the process
    try:
        with contextlib.redirect_stdout(_RayWords()):
            yield
    finally:
        ray.shutdown()


class _RayWords(io.TextIOBase):
    """What Ray prints on our standard output: pages for each node that is lost, of which the first line will do."""

    def write(self, text: str) -> int:
        line = re.sub(r"\x1b\[[0-9;]*m", "", text).strip().partition("\n")[0]
        if line:
            log.info("ray: %.200s", line)
        return len(text)


@dataclass(eq=False)
class Member:
    """One worker. `state`: joining, loading, idle, busy."""

    actor: Any
    node: str  # Ray's id
    host: str
    rank: int
    state: str = "joining"
    shard: int | None = None
    failed: set[int] = field(default_factory=set)  # shards in a row of which nothing came

    @property
    def name(self) -> str:
        return f"{self.host} worker {self.rank}"


@dataclass(frozen=True)
class Event:
    """What came of a member: its answer, or None and `why` when it died."""

    member: Member
    answer: Answer | None
    why: str = ""


class Crew:
    """Owns the workers. `order_for` makes the order of a rank; `is_free` says whether nobody holds that rank."""

    def __init__(
        self,
        order_for: Callable[[int], Order],
        *,
        is_free: Callable[[int], bool],
        resources: Mapping[str, float],
        load: LoadModel | None,
    ) -> None:
        self.members: list[Member] = []
        self.barred: dict[str, FluxbatchError] = {}  # node: why no worker is started there
        self.ranks: set[int] = set()  # of all who were hired; a lost one may live on behind a cut wire, with its logs
        self._order_for, self._is_free, self._load = order_for, is_free, load
        self._resources = dict(resources)
        self._pending: dict[Any, Member] = {}
        self._deaths: Counter[str] = Counter()
        self._looked_s = -LOOK_S
        self._actor = ray.remote(**_options(self._resources))(Worker)

    @property
    def idle(self) -> list[Member]:
        return [member for member in self.members if member.state == "idle"]

    @property
    def working(self) -> list[Member]:
        """Those that have a GPU: at work, or getting ready for it."""
        return [member for member in self.members if member.state != "joining"]

    def hire(self, wanted: int) -> None:
        """Start up to `wanted` workers where nodes have places for them."""
        if wanted <= 0 or time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for node in self._nodes_with_places():
            if node["NodeID"] in self.barred:
                continue
            there = sum(member.node == node["NodeID"] for member in self.members)
            for _ in range(min(wanted, _places(node["Resources"], self._resources) - there)):
                self._start(node)
                wanted -= 1

    def all_barred(self) -> FluxbatchError | None:
        """Why no worker can ever be started, if that is so with the nodes as they are."""
        if self.members or not self.barred:
            return None
        there = {node["NodeID"] for node in self._nodes_with_places()}
        return self.barred[min(there)] if there and there <= self.barred.keys() else None

    def _nodes_with_places(self) -> list[dict[str, Any]]:
        return [node for node in ray.nodes() if node["Alive"] and _places(node["Resources"], self._resources)]

    def _start(self, node: Mapping[str, Any]) -> None:
        rank = next(n for n in itertools.count(1) if n not in self.ranks and self._is_free(n))
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor: Any = self._actor.options(scheduling_strategy=strategy).remote(self._order_for(rank), self._load)
        self.ranks.add(rank)
        member = Member(actor, node["NodeID"], node["NodeManagerHostname"], rank)
        self.members.append(member)
        self._pending[actor.join.remote()] = member

    def prepare(self, member: Member) -> None:
        """Let a member that has joined load the model."""
        member.state = "loading"
        self._pending[member.actor.prepare.remote()] = member

    def ask(self, member: Member, shard: int) -> None:
        """Let an idle member make a shard."""
        member.state, member.shard = "busy", shard
        self._pending[member.actor.make.remote(shard)] = member

    def wait(self, seconds: float) -> list[Event]:
        """What members answered, or that they died, within so many seconds."""
        if not self._pending:
            time.sleep(seconds)
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=seconds)
        return [self._event(reference, self._pending.pop(reference)) for reference in ready]

    def _event(self, reference: Any, member: Member) -> Event:
        try:
            answer = ray.get(reference)
        except RayError as error:
            self._lose(member, _sentence(error))
            return Event(member, None, f"{member.name} was lost: {_sentence(error)}")
        for level, words in answer.said:
            log.log(level, "%s: %s", member.name, words)
        return Event(member, answer)

    def _lose(self, member: Member, why: str) -> None:
        self.dismiss(member)
        if member.state in ("joining", "loading"):
            self._deaths[member.node] += 1
        if self._deaths[member.node] >= DEATHS_BEFORE_WORK:
            told = f"node {member.host} is left out: {DEATHS_BEFORE_WORK} workers died before they could draw: {why}"
            self.bar(member, FluxbatchError(told))

    def bar(self, member: Member, why: FluxbatchError) -> None:
        """Start no worker on this member's node again."""
        self.barred[member.node] = why
        log.warning("%s", why)

    def dismiss(self, member: Member) -> None:
        """End a member's process at once; what it has committed stands."""
        self.members.remove(member)
        with contextlib.suppress(RayError):
            ray.kill(member.actor)  # one that is only cut off must not come back under this name

    def stop_all(self, reason: str) -> None:
        """Let those that draw finish what is in flight; the others are ended."""
        for member in list(self.members):
            if member.state == "busy":
                member.actor.stop.options(concurrency_group="orders").remote(reason)
            elif member.state != "idle":
                self.dismiss(member)
                self._pending = {ref: other for ref, other in self._pending.items() if other is not member}

    def close(self) -> None:
        """Let all who can leave the folder, then end them."""
        leaving = {
            member.actor.close.options(concurrency_group="orders").remote(): member
            for member in self.members
            if member.state == "idle"
        }
        with contextlib.suppress(RayError):
            ready, _ = ray.wait(list(leaving), num_returns=len(leaving), timeout=CLOSE_S) if leaving else ([], [])
            for reference in ready:
                self._event(reference, leaving[reference])
        for member in list(self.members):
            self.dismiss(member)


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    own = {OPTIONS[name]: number for name, number in resources.items() if name in OPTIONS}
    others = {name: number for name, number in resources.items() if name not in OPTIONS}
    never_again = {"max_restarts": 0, "max_task_retries": 0}
    return {"num_cpus": 0, "resources": others, "concurrency_groups": {"orders": 1}} | never_again | own


def _places(offered: Mapping[str, float], resources: Mapping[str, float]) -> int:
    """How many workers a node holds."""
    return min(int(offered.get(name, 0) / number + 1e-6) for name, number in resources.items())


def _sentence(error: Exception) -> str:
    """Of Ray's many lines the first; the last, which names the exception, where an actor could not even begin."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if "creation task" in lines[0] else lines[0]
