"""The terminal's view of a run: a bar on a terminal, else one plain line now and then. Knows batch log lines, no files.

Words go to standard error. Without a terminal there is no carriage return and no colour, and every line is flushed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fluxbatch.config import TelemetryConfig

RECENT_BATCHES = 20
QUIET_S = 60.0  # a rank that is lost or done says nothing more
GRAINS_S = ((3600, 60), (120, 10), (0, 1))  # a time left of so long is told to so many seconds
BAR = "{percentage:3.0f}% {bar:20} {n_fmt}/{total_fmt} rows{postfix}"  # cut at the terminal's edge: facts by weight
# Control characters, line separators, and the marks that turn the direction of a terminal's line.
LINE_BREAKERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Progress:
    """Rows done of `total`, on a bar or in lines (`telemetry.progress`); `done` of them stood there at the start.

    `work` is that of a row of each bucket, `work_left` what this process has to do: rows of different buckets take
    different times, so the time left is told by it. Without it each row counts the same.
    """

    def __init__(
        self,
        cfg: TelemetryConfig,
        *,
        total: int,
        done: int,
        work: Mapping[str, float] | None = None,
        work_left: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._mode = _mode(cfg.progress, self._stream)
        self._interval_s = cfg.interval_s
        self._clock = clock
        self._total, self._done, self._failed = total, done, 0
        self._work = dict(work or {})
        self._work_left = total - done if work_left is None else work_left
        self._recent: dict[Any, deque[dict[str, Any]]] = {}  # of each rank: their rates add up
        self._heard_s: dict[Any, float] = {}
        self._last: dict[str, Any] = {}
        self._printed_s = -float("inf")
        self._unsaid = False
        self._bar: tqdm | None = None
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Progress:
        if self._mode == "bar":
            self._bar = tqdm(
                total=self._total, initial=self._done, file=self._stream, bar_format=BAR, unit="row", dynamic_ncols=True
            )
            self._exit.enter_context(logging_redirect_tqdm(tqdm_class=tqdm))
            self._exit.callback(self._bar.close)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._mode == "lines" and self._unsaid:
            self._say()
        self._exit.close()

    def expect(self, *, work: Mapping[str, float], work_left: float) -> None:
        """There is so much more to do than was known."""
        self._work |= work
        self._work_left += work_left

    def update(self, line: dict[str, Any]) -> None:
        """Count one batch, given as its line of the batch log."""
        rows = line["rows_ok"] + line["rows_failed"]
        self._done += rows
        self._failed += line["rows_failed"]
        self._work_left -= self._work.get(line["bucket"], 1) * rows
        self._recent.setdefault(line.get("rank"), deque(maxlen=RECENT_BATCHES)).append(line)
        self._heard_s[line.get("rank")] = self._clock()
        self._last = line
        self._unsaid = True
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._facts()), refresh=False)
            self._bar.update(rows)
        elif self._mode == "lines" and self._clock() - self._printed_s >= self._interval_s:
            self._say()

    def note(self, text: str) -> None:
        """Print one line of words without tearing the bar."""
        if self._bar is not None:
            tqdm.write(one_line(text), file=self._stream)
        else:
            print(one_line(text), file=self._stream, flush=True)

    def _say(self) -> None:
        self._printed_s, self._unsaid = self._clock(), False
        share = 100 * self._done / self._total if self._total else 100
        self.note(f"{self._done}/{self._total} rows ({share:.1f} %), {', '.join(self._facts())}")

    def _facts(self) -> list[str]:
        """`about 2:05:00 left`, `3.41 images/s`, `2 failed`, `1024x1024-28`, `GPU 98 % at 652 W`: what is known."""
        left_s, ranks = self._left_s(), self._working()
        images_per_s = sum(_per_s(lines, lambda line: line["rows_ok"]) for lines in ranks)
        facts = [f"about {duration(left_s)} left"] if left_s else []
        facts += [f"{images_per_s:.2f} images/s"] if any(map(_wall_s, ranks)) else []
        facts += [f"{self._failed} failed"] if self._failed else []
        return [*facts, self._last["bucket"], *_gpu_facts(self._last)]

    def _working(self) -> list[deque[dict[str, Any]]]:
        """The last batches of each rank that was heard of within three of its batches, or a minute."""
        now_s, ranks = self._clock(), self._recent.items()
        patience_s = {rank: max(QUIET_S, 3 * max(line["wall_s"] or 0 for line in lines)) for rank, lines in ranks}
        return [lines for rank, lines in ranks if now_s - self._heard_s[rank] <= patience_s[rank]]

    def _work_of(self, line: dict[str, Any]) -> float:
        return self._work.get(line["bucket"], 1) * (line["rows_ok"] + line["rows_failed"])

    def _left_s(self) -> float | None:
        """By the work of the last batches, first launches of a shape left out where there are others; rounded."""
        work_per_s = sum(_per_s(_usual(lines), self._work_of) for lines in self._working())
        if work_per_s <= 0 or self._work_left <= 0:
            return None
        left_s = self._work_left / work_per_s
        grain_s = next(grain_s for from_s, grain_s in GRAINS_S if left_s >= from_s)
        return round(left_s / grain_s) * grain_s


def _per_s(lines: Collection[dict[str, Any]], amount: Callable[[dict[str, Any]], float]) -> float:
    """Of one rank; 0 where no time passed."""
    wall_s = _wall_s(lines)
    return sum(map(amount, lines)) / wall_s if wall_s > 0 else 0.0


def _wall_s(lines: Collection[dict[str, Any]]) -> float:
    return sum(line["wall_s"] or 0 for line in lines)


def _usual(lines: Collection[dict[str, Any]]) -> Collection[dict[str, Any]]:
    return [line for line in lines if not line.get("first_of_shape")] or lines


def _gpu_facts(line: dict[str, Any]) -> list[str]:
    use, power_w = line.get("gpu_utilization_percent"), line.get("gpu_power_w")
    known = ([f"{use:.0f} %"] if use is not None else []) + ([f"{power_w:.0f} W"] if power_w is not None else [])
    return [f"GPU {' at '.join(known)}"] if known else []


def _mode(wanted: str, stream: TextIO) -> str:
    if wanted == "auto":
        return "bar" if stream.isatty() and _has_columns(stream) else "lines"
    return wanted


def _has_columns(stream: TextIO) -> bool:
    """A terminal may say that it is 0 columns wide (a container's, a program's): a bar would show nothing there."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True


def one_line(text: str) -> str:
    """The text with everything that would break or bend a terminal's line written out as an escape (BR-05)."""
    return LINE_BREAKERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def duration(seconds: float) -> str:
    """`41 s`, `12:05`, `3:04:05`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def data_size(num_bytes: float) -> str:
    """`812 B`, `3.4 MB`: three digits, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
