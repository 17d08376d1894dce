"""Whole rows on their way from manifest order to plan order, on disk. Knows neither duplicates nor plan files."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fluxbatch.plan.cut import PlanPart
from fluxbatch.records import Bucket

BUCKET = ("height", "width", "num_inference_steps", "negative_pass", "shared_guidance")


@contextmanager
def open_spool() -> Iterator[RowSpool]:
    """A spool in a temporary folder of the same kind."""
    with (
        tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch,
        closing(RowSpool(Path(scratch) / "rows.arrow")) as spool,
    ):
        yield spool


class RowSpool:
    """Whole rows on their way into plan order: an Arrow file of batches, each of one bucket, in the order they came."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pa.RecordBatchFileWriter | None = None
        self._places: dict[Bucket, list[int]] = defaultdict(list)
        self._num_batches = 0
        self.num_rows = 0

    def add_chunk(self, accepted: pa.Table) -> None:
        """Take in accepted rows of any buckets."""
        shapes = accepted.select(BUCKET).append_column("at", pa.array(np.arange(accepted.num_rows)))
        groups = shapes.group_by(list(BUCKET), use_threads=False).aggregate([("at", "list")])
        for *shape, at in zip(*(groups[name].to_pylist() for name in BUCKET), groups["at_list"], strict=True):
            self.add(Bucket(*shape), accepted.take(at.values))

    def add(self, bucket: Bucket, rows: pa.Table) -> None:
        """Take in rows of one bucket."""
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        for batch in rows.combine_chunks().to_batches():
            self._writer.write_batch(batch)
            self._places[bucket].append(self._num_batches)
            self._num_batches += 1
        self.num_rows += rows.num_rows

    def rows(self, part: PlanPart, kept: np.ndarray | None = None) -> Iterator[pa.Table]:
        """Bucket after bucket, each in the order it came; only rows numbered in `kept` (ascending) if it is given."""
        self.close()
        if not part.num_rows:
            return
        with pa.OSFile(str(self._path)) as file:
            reader = pa.ipc.open_file(file)
            for place in chain.from_iterable(self._places[run.bucket] for run in part.runs):
                rows = pa.Table.from_batches([reader.get_batch(place)])
                yield rows if kept is None else rows.filter(_is_in(rows["row"].to_numpy(), kept))

    def some(self, rows: np.ndarray) -> Iterator[pa.Table]:
        """Those numbered in `rows` (ascending), in the order they came."""
        self.close()
        if not len(rows):
            return
        with pa.OSFile(str(self._path)) as file:
            reader = pa.ipc.open_file(file)
            for at in range(self._num_batches):
                table = pa.Table.from_batches([reader.get_batch(at)])
                yield table.filter(_is_in(table["row"].to_numpy(), rows))

    def chosen(self, rows: list[int]) -> list[dict[str, Any]]:
        """A few rows, by their numbers (ascending), as dictionaries."""
        return [row for table in self.some(np.array(rows)) for row in table.to_pylist()]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _is_in(values: np.ndarray, ascending: np.ndarray) -> pa.Array:
    at = np.searchsorted(ascending, values)
    return pa.array(ascending[np.minimum(at, len(ascending) - 1)] == values)
