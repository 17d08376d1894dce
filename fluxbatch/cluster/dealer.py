"""Which shard is handed out next, and what becomes of one that does not come back done. Knows no Ray and no files."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class Dealer:
    """The shards of one start. Each is waiting, out with a worker, done, or given up.

    An attempt that brings at least one batch is not held against it: a node that is lost after an hour's work is no
    fault of the shard. `max_attempts` in a row without a batch give it up, so attempts are bounded by its batches.
    """

    def __init__(self, shards: Iterable[int], *, max_attempts: int) -> None:
        self.given_up: dict[int, str] = {}  # shard: why its last attempt failed
        self.done: set[int] = set()
        self._waiting = deque(shards)
        self._out: set[int] = set()
        self._barren: Counter[int] = Counter()
        self._max_attempts = max_attempts

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        """Nothing waits and nothing is out: what was out may still come back."""
        return not self._waiting and not self._out

    def next(self) -> int | None:
        """Hand out a shard; None where none waits."""
        if not self._waiting:
            return None
        shard = self._waiting.popleft()
        self._out.add(shard)
        return shard

    def finish(self, shard: int) -> None:
        self._out.remove(shard)
        self.done.add(shard)

    def put_back(self, shard: int, why: str, *, brought: bool) -> bool:
        """A shard that failed, or lost its worker. `brought`: a batch came of the attempt. False: it is given up.

        Begun ones go first, barren ones last: the others are not held up by a shard that kills its workers.
        """
        self._out.remove(shard)
        self._barren[shard] = 0 if brought else self._barren[shard] + 1
        if self._barren[shard] >= self._max_attempts:
            self.given_up[shard] = why
            return False
        if brought:
            self._waiting.appendleft(shard)
        else:
            self._waiting.append(shard)
        return True

    def take_back(self, shard: int) -> None:
        """One whose worker was told to stop: that is no attempt of the shard's."""
        self._out.remove(shard)
        self._waiting.appendleft(shard)

    def stop(self) -> None:
        """Hand out nothing more."""
        self._waiting.clear()

    def sentence(self) -> str:
        """What was given up, and why."""
        shards = ", ".join(map(str, sorted(self.given_up)))
        last = self.given_up[max(self.given_up)]
        return (
            f"{'shard' if len(self.given_up) == 1 else 'shards'} {shards} could not be made in run.max_shard_attempts="
            f"{self._max_attempts} attempts ({last}); their rows stay pending, the same command tries them again"
        )
