"""What a person sees of several processes of one run: their lines with a rank in front, and one bar over all of them.

Reads the plan, the ledger and the batch logs of the run folder, and writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluxbatch.config import TelemetryConfig
from fluxbatch.errors import FluxbatchError
from fluxbatch.output.ledger import Ledger, row_counts
from fluxbatch.output.left import begun_batches, left_to_make
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.records import RowCounts
from fluxbatch.reports.report import NOTHING
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lines import end_of, lines_since
from fluxbatch.storage.objects import ObjectPath
from fluxbatch.telemetry.metrics import OBJECT_LOG_S
from fluxbatch.telemetry.progress import Progress, one_line


class CrewView:
    """Shows a run that other processes make. Any thread may `note`; one thread looks."""

    def __init__(self, folder: RunFolder, cfg: TelemetryConfig) -> None:
        self._folder, self._cfg = folder, cfg
        self._read: dict[Path, int] = {path: end_of(path) for path in self._logs()}
        # Each look at an object store is a request a rank, which is paid for, and finds nothing between two objects.
        self._every_s = OBJECT_LOG_S if isinstance(folder.root, ObjectPath) else 0.0
        self._look_next_s = 0.0
        self._progress: Progress | None = None
        self._begun: dict[int, set[int]] = {}  # by open shard, the batches that stood on the disk when the bar began
        self._complete: set[int] = set()  # and the shards that were whole
        self._exit = contextlib.ExitStack()
        self._writing = threading.Lock()

    def __enter__(self) -> CrewView:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def note(self, text: str) -> None:
        with self._writing:
            if self._progress is not None:
                self._progress.note(text)
            else:
                print(one_line(text), file=sys.stderr, flush=True)

    def look(self, *, last: bool = False) -> None:
        """Count the batches that were finished since the last look."""
        if not last and time.monotonic() < self._look_next_s:
            return
        self._look_next_s = time.monotonic() + self._every_s
        lines = [line for path in self._logs() for line in self._new_lines(path)]
        with self._writing:
            if self._progress is not None:
                for line in lines:
                    if not self._stood(line):
                        self._progress.update(line)
            elif lines:  # the plan is there, and what stands on the disk has these batches too
                self._progress = self._exit.enter_context(self._begin())

    def _stood(self, line: dict[str, Any]) -> bool:
        """Whether the bar began with this batch: one is on the disk before its line is in the log."""
        return line["shard"] in self._complete or line["batch"] in self._begun.get(line["shard"], ())

    def counts(self) -> RowCounts:
        """The rows by state as they are now; no rows at all before there is a plan."""
        try:
            plan = RunPlan.open(self._folder)
        except FluxbatchError:  # the processes have said so
            return NOTHING
        return row_counts(self._folder, plan, Ledger.read(self._folder, plan.revisions)) if plan else NOTHING

    def _begin(self) -> Progress:
        plan = RunPlan.open(self._folder)
        assert plan is not None, "batches are drawn by a plan"
        self._begun = begun_batches(self._folder)  # first: a shard's batches go once its ledger line is there
        ledger = Ledger.read(self._folder, plan.revisions)
        counts = row_counts(self._folder, plan, ledger)
        self._complete = {shard.index for shard in plan.shards() if ledger.complete(shard)}
        pending = (shard for shard in plan.shards() if shard.index not in self._complete)
        left, drawn = left_to_make(plan, pending, self._begun)
        return Progress(
            self._cfg,
            total=counts.rows - counts.rejected,
            done=counts.written + counts.failed + drawn,
            work={run.bucket.name: run.bucket.work for part in plan.parts for run in part.runs},
            work_left=sum(bucket.work * found.rows for bucket, found in left.items()),
        )

    def _logs(self) -> list[Path]:
        return sorted(self._folder.logs.glob("metrics-rank-*.jsonl"))

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        texts, self._read[path] = lines_since(path, self._read.get(path, 0))
        for text in texts:
            with contextlib.suppress(ValueError):  # torn by a kill
                yield json.loads(text)
