"""When to stop: signals and the deadline, as one flag the run asks for. Knows nothing of what is being done."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from fluxbatch.errors import EXIT_INTERRUPTED, ConfigError, Interrupted

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def exit_on_signals() -> None:
    """Until `Stop` takes over there is nothing in flight: a signal ends the process at once, with 75."""
    for number in SIGNALS:
        signal.signal(
            number, lambda number, _: _exit_now(f"{signal.Signals(number).name}: nothing was in flight; exit 75")
        )


class Stop:
    """Turns the first signal, or the coming deadline, into `requested`; a second signal ends the process at once.

    What is in flight then has `grace_s` seconds; after them the process ends with exit code 75, which loses only
    what was in flight.
    """

    def __init__(self, *, grace_s: float, deadline_s: float | None = None) -> None:
        """`deadline_s`: seconds from now until the time is up; the stop is requested `grace_s` before it."""
        self.reason: str | None = None
        self._grace_s = grace_s
        self._drain_at = None if deadline_s is None else time.monotonic() + max(0.0, deadline_s - grace_s)
        self._watchdog: threading.Timer | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._watchdog:
            self._watchdog.cancel()

    def requested(self) -> bool:
        if self.reason is None and self._drain_at is not None and time.monotonic() >= self._drain_at:
            self._request("the deadline is near")
        return self.reason is not None

    def check(self) -> None:
        """Raise `Interrupted` where a stop is requested; called between two phases of a run."""
        if self.requested():
            raise Interrupted(f"interrupted ({self.reason}); the same command goes on")

    def _request(self, reason: str) -> None:
        self.reason = reason
        self._watchdog = threading.Timer(self._grace_s, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()
        log.warning("%s: finishing what is in flight (run.grace_s=%g), then exit 75", reason, self._grace_s)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.reason is not None:
            _exit_now(f"{name} again: exit 75 at once; the same command goes on")
        self._request(name)

    def _give_up(self) -> None:
        _exit_now(f"run.grace_s={self._grace_s:g} is over: exit 75 with a batch in flight; the same command goes on")


def _exit_now(message: str) -> None:
    # Not sys.exit: a thread of the pipeline may be deep in a kernel or a codec. All that counts is on the disk.
    os.write(sys.stderr.fileno(), f"fluxbatch: {message}\n".encode())
    os._exit(EXIT_INTERRUPTED)


def seconds_left(deadline: str | None, environ: Mapping[str, str]) -> float | None:
    """Seconds until `run.deadline` (ISO 8601 with a zone, or +SECONDS), else until Slurm's end of the job, if any."""
    if deadline is None:
        end = environ.get("SLURM_JOB_END_TIME", "")
        return float(end) - time.time() if end.isdigit() else None
    try:
        if deadline.startswith("+"):
            return float(deadline)
        moment = datetime.fromisoformat(deadline)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigError(
            f"run.deadline must be +SECONDS or a time with its zone (2026-01-31T06:00:00+00:00), got {deadline!r}"
        )
    return (moment - datetime.now(UTC)).total_seconds()
