"""When to stop: signals and the deadline, as one flag the run asks for. Knows nothing of what is being done."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NoReturn

from fluxbatch import process
from fluxbatch.errors import EXIT_FATAL, EXIT_INTERRUPTED, EXIT_LOST, ConfigError, Interrupted

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LEAVE_S = 1.0


def exit_on_signals() -> None:
    """Until `Stop` takes over there is nothing in flight: a signal ends the process at once, with 75."""
    for number in SIGNALS:
        signal.signal(
            number, lambda number, _: exit_now(f"{signal.Signals(number).name}: nothing was in flight; exit 75")
        )


class Stop:
    """Turns the first signal, or the coming deadline, into `requested`; a second signal ends the process at once.

    What is in flight then has `grace_s` seconds; after them the process ends with exit code 75, which loses only
    what was in flight. Signals and deadline have threads of their own: the main thread may be deep in a library.
    """

    def __init__(self, *, grace_s: float, deadline_s: float | None = None) -> None:
        """`deadline_s`: seconds from now until the time is up; the stop is requested `grace_s` before it."""
        self.reason: str | None = None
        self.leave: Callable[[], object] = lambda: None  # done before an end at once, for LEAVE_S at most
        self._grace_s = grace_s
        self._drain_s = None if deadline_s is None else max(0.0, deadline_s - grace_s)
        self._timers: list[threading.Timer] = []
        self._is_open = True
        self._timing = threading.Lock()
        self._signals = contextlib.ExitStack()

    def __enter__(self) -> Stop:
        if self._drain_s is not None:
            self._start_timer(self._drain_s, partial(self.request, "the deadline is near"))
        if threading.current_thread() is threading.main_thread():
            self._signals.enter_context(signals_to(self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()
        with self._timing:  # a timer that fires now must not start the next one behind our back
            self._is_open = False
            for timer in self._timers:
                timer.cancel()

    def requested(self) -> bool:
        return self.reason is not None

    def follow(self, descriptor: int) -> None:
        """Stop when the other end of this pipe is closed: a supervisor that is killed can send no signal."""
        threading.Thread(target=self._await_end, args=(descriptor,), name="fluxbatch-follow", daemon=True).start()

    def _await_end(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 64):
                pass
        self.request("the supervisor of this process is gone")

    def check(self) -> None:
        """Raise `Interrupted` where a stop is requested; called between two phases of a run."""
        if self.requested():
            raise Interrupted(f"interrupted ({self.reason}); the same command goes on")

    def request(self, reason: str) -> None:
        """Finish what is in flight and stop, for a reason that the log tells."""
        if self.reason is not None:
            return
        self.reason = reason
        log.warning("%s: finishing what is in flight (run.grace_s=%g), then exit 75", reason, self._grace_s)
        self._start_timer(self._grace_s, self._give_up)

    def _start_timer(self, seconds: float, then: Callable[[], object]) -> None:
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), then)
        timer.daemon = True
        with self._timing:
            if self._is_open:
                timer.start()
                self._timers.append(timer)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.reason is not None:
            self._end(f"{name} again: exit 75 at once; the same command goes on")
        self.request(name)

    def _give_up(self) -> None:
        self._end(f"run.grace_s={self._grace_s:g} is over: exit 75 with a batch in flight; the same command goes on")

    def _end(self, message: str) -> NoReturn:
        """Leave the folder first, or a requeued job on another machine would wait for our lease to age."""
        leaving = threading.Thread(target=self.leave, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)  # the disk may be what hangs
        exit_now(message)


@contextlib.contextmanager
def signals_to(answer: Callable[[int], None]) -> Iterator[None]:
    """Call `answer` with each of SIGNALS as it comes, from a thread of its own.

    Python runs a handler in the main thread when that comes back from C, which a large sort or a load may do too
    late; the number of the signal is in the pipe at once.
    """
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    thread = threading.Thread(target=_answer_all, args=(receiving, answer), name="fluxbatch-signals", daemon=True)
    thread.start()
    previous_wakeup = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(sending)
        thread.join()
        os.close(receiving)


def _answer_all(receiving: int, answer: Callable[[int], None]) -> None:
    while numbers := os.read(receiving, 64):  # nothing: the other end is closed
        for number in numbers:
            if number in SIGNALS:  # a library's own handlers write here as well
                answer(number)


def exit_now(message: str, *, code: int = EXIT_INTERRUPTED) -> NoReturn:
    """End the process here, with a sentence and nothing cleaned up.

    Not sys.exit: a thread of the pipeline may be deep in a kernel or a codec. All that counts is on the disk.
    """
    os.write(2, f"fluxbatch: {message}\n".encode())
    os._exit(code)


def exit_lost(message: str) -> NoReturn:
    """The same for a process that is of no use any more; a supervisor is told so by a code of its own."""
    exit_now(message, code=EXIT_LOST if process.is_supervised(os.environ) else EXIT_FATAL)


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
