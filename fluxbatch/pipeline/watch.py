"""Notice a stage that hangs: who works on which batch, and for how long. Ends the process where nobody else can.

Knows batches by their places only, and nothing of what a stage does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from fluxbatch.errors import ProcessLost
from fluxbatch.stop import exit_lost

TICK_S = 1.0
COMMIT_S = 60.0  # what is finished may take so long to reach the disk; then the process ends in any case


class Placed(Protocol):
    """A batch that can say where it is: `stage decode, shard 3, batch 41, 1024x1024`."""

    @property
    def place(self) -> str: ...


class Watch:
    """The batches that a stage holds now, each with the moment it was taken up.

    The clock is the watchdog's own. It does not run while the process is stopped, so that one which a scheduler
    suspends for an hour has not hung for an hour.
    """

    def __init__(self) -> None:
        self.clock_s = 0.0
        self._since_s: dict[Placed, float] = {}

    def enter(self, batch: Placed) -> None:
        """The batch is being worked on; once more is a sign of life."""
        self._since_s[batch] = self.clock_s

    def leave(self, batch: Placed) -> None:
        self._since_s.pop(batch, None)

    def oldest(self) -> tuple[float, str] | None:
        """For how long the batch that is held longest has been held, and its place."""
        held = [(self.clock_s - since_s, batch) for batch, since_s in self._since_s.copy().items()]
        if not held:
            return None
        held_s, batch = max(held, key=lambda item: item[0])
        return held_s, batch.place


class Watchdog:
    """Looks after a `Watch` while the context is open; does nothing where `timeout_s` is 0.

    A hang goes to `on_hang`, which ends the run in the caller's thread. Where there is no such thread, or it has not
    come to its end in COMMIT_S, the process ends here, with exit code 1.
    """

    def __init__(self, watch: Watch, *, timeout_s: float, on_hang: Callable[[ProcessLost], None] | None) -> None:
        self.hung = False
        self._watch = watch
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fluxbatch-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._timeout_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._timeout_s and not self.hung:  # else it stays: what is cleaned up next may hang as well
            self._thread.join()

    def _look(self) -> None:
        tick_s = min(TICK_S, self._timeout_s / 4)
        looked_s = time.monotonic()
        while not self._closing.wait(tick_s):
            now_s = time.monotonic()
            self._watch.clock_s += min(now_s - looked_s, 2 * tick_s)
            looked_s = now_s
            oldest = self._watch.oldest()
            if oldest is not None and oldest[0] >= self._timeout_s:
                self._end(*oldest)
                return

    def _end(self, held_s: float, place: str) -> None:
        self.hung = True
        sentence = (
            f"{place}: no sign of life for {held_s:.0f} s (run.stage_timeout_s={self._timeout_s:g}); "
            "what was finished is committed, the other rows stay pending, the same command goes on"
        )
        if self._on_hang is not None:
            self._on_hang(ProcessLost(sentence))
            time.sleep(COMMIT_S)
        exit_lost(sentence)
