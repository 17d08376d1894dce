"""What the batch logs of all ranks say: rates and stage times, now and over the whole run. Knows no shards.

Images are written ones and time is that of the monotonic clock in the lines. Stage times overlap in the double buffer,
so they are never added up.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import pyarrow as pa

from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lines import last_lines, read_lines
from fluxbatch.telemetry.metrics import HANDOVERS, STAGES, finite, rate, wait_key

RECENT_BATCHES = 20
TAIL_BYTES = 64 * 1024  # holds some 60 lines
QUIET_S = 600.0  # a rank silent for so long, or for three of its batches, is not taken for a working one
CHUNK = 65_536  # lines held as Python objects at a time
POINTS = 120

LOG_BYTES = 2**29  # of the newest lines: some 600,000
EXACT_LINES = 2_000_000

Line = dict[str, Any]
Log: TypeAlias = (
    "pa.Table | duckdb.DuckDBPyConnection"  # with the columns of SCHEMA; a connection has them as the table `log`
)

SCHEMA = pa.schema(
    [("time", pa.string()), ("rank", pa.int64()), ("batch", pa.int64()), ("bucket", pa.string())]
    + [(name, pa.int64()) for name in ("rows_ok", "rows_failed", "rows_padded", "out_of_memory_splits")]
    + [(name, pa.float64()) for name in ("wall_s", "peak_reserved_gib", *(f"{stage}_ms" for stage in STAGES))]
    + [(wait_key(handover), pa.float64()) for handover in HANDOVERS]
    + [(f"gpu_{name}", pa.float64()) for name in ("joules", "utilization_percent", "power_w")]
    + [("first_of_shape", pa.bool_())]
)


def recent_lines(folder: RunFolder, *, count: int = RECENT_BATCHES) -> dict[int, list[Line]]:
    """The last `count` lines of each rank, oldest first, read from the end of each file."""
    tails = (_last_lines(path, count) for path in _logs(folder))
    return {lines[-1]["rank"]: lines for lines in tails if lines}


def _last_lines(path: Path, count: int) -> list[Line]:
    newest_first = map(_line, reversed(last_lines(path, TAIL_BYTES)))
    return list(islice(filter(None, newest_first), count))[::-1]


def _logs(folder: RunFolder) -> list[Path]:
    return sorted(folder.logs.glob("metrics-rank-*.jsonl"))


def _line(text: bytes) -> Line | None:
    try:
        record = json.loads(text)
    except ValueError:  # torn by a kill, or cut by our own seek
        return None
    return record if isinstance(record, dict) and "batch" in record else None


def working(recent: Mapping[int, list[Line]]) -> dict[int, list[Line]]:
    """The ranks that still work, by the times of their last lines."""
    ends = {rank: datetime.fromisoformat(lines[-1]["time"]).timestamp() for rank, lines in recent.items()}
    newest = max(ends.values(), default=0.0)
    patience = {rank: max(QUIET_S, *(3 * (line["wall_s"] or 0) for line in lines)) for rank, lines in recent.items()}
    return {rank: lines for rank, lines in recent.items() if newest - ends[rank] <= patience[rank]}


def images_per_s(ranks: Mapping[int, list[Line]]) -> float | None:
    """Written images a second of all these ranks together."""
    return _summed_rate(ranks, [[line["rows_ok"] for line in lines] for lines in ranks.values()])


def work_per_s(ranks: Mapping[int, list[Line]], work: Mapping[str, float]) -> float | None:
    """The same for any unit of work, given for one row of each bucket; failed rows cost what written ones do."""
    done = [
        [work.get(line["bucket"], 0) * (line["rows_ok"] + line["rows_failed"]) for line in lines]
        for lines in ranks.values()
    ]
    return _summed_rate(ranks, done)


def mean(ranks: Mapping[int, list[Line]], key: str, *, scale: float = 1.0) -> float | None:
    """Of a number in the last batches of all these ranks; None where none of them knows it."""
    values = [line[key] for lines in ranks.values() for line in lines if line.get(key) is not None]
    return scale * sum(values) / len(values) if values else None


def _summed_rate(ranks: Mapping[int, list[Line]], amounts: Sequence[Sequence[float]]) -> float | None:
    walls = [sum(line["wall_s"] or 0 for line in lines) for lines in ranks.values()]
    rates = [sum(amount) / wall_s for amount, wall_s in zip(amounts, walls, strict=True) if wall_s > 0]
    return sum(rates) if rates else None


def read_log(folder: RunFolder, *, rank: int | None = None) -> pa.Table:
    """The newest lines of all ranks, or of one: one column a key of SCHEMA; torn and foreign lines are passed over.

    No more than LOG_BYTES of files are read, the same of each.
    """
    paths = [path for path in _logs(folder) if rank is None or path.name == folder.metrics(rank).name]
    texts = (text for path in paths for text in last_lines(path, LOG_BYTES // len(paths)))
    return pa.concat_tables([SCHEMA.empty_table(), *_chunks(filter(None, map(_line, texts)))])


@contextmanager
def open_log(folder: RunFolder) -> Iterator[Log]:
    """All lines of all ranks, on disk while the context is open: those of a hundred million rows fit no memory."""
    lines = (line for path in _logs(folder) for line in read_lines(path) if "batch" in line)
    with tempfile.TemporaryDirectory(prefix="fluxbatch-") as scratch:
        config: dict[str, Any] = {"memory_limit": "1GiB", "temp_directory": scratch, "threads": 2}
        with duckdb.connect(f"{scratch}/log", config=config) as database:
            database.register("empty", SCHEMA.empty_table())
            database.execute("SET enable_progress_bar = false; CREATE TABLE log AS SELECT * FROM empty")
            for chunk in _chunks(lines):
                database.register("incoming", chunk)
                database.execute("INSERT INTO log SELECT * FROM incoming")
            yield database


def _chunks(lines: Iterator[Line]) -> Iterator[pa.Table]:
    while chunk := list(islice(lines, CHUNK)):
        yield pa.Table.from_pylist(chunk, SCHEMA)


def _median(log: Log) -> str:
    """DuckDB's median holds every value, which a billion values do not allow; the other is right within a percent."""
    [row] = _query(log, "SELECT count(*) AS lines FROM log")
    return "median({})" if row["lines"] <= EXACT_LINES else "approx_quantile({}, 0.5)"


def by_bucket(log: Log) -> dict[str, dict[str, Any]]:
    """For each bucket: images, images a second of one rank, and what its batches cost.

    `median_ms` is that of a batch; `ms_per_image` the mean, which is right also where one batch does a stage's work for
    its neighbours (prompts are encoded for several batches at once). `warm_up_s` went by in first launches of a shape.
    """
    median = _median(log)
    medians = ", ".join(f"{median.format(f'{stage}_ms')} AS {stage}" for stage in STAGES)
    means = ", ".join(f"sum({stage}_ms) / nullif(sum(rows_ok + rows_failed), 0) AS {stage}_mean" for stage in STAGES)
    rows = _query(
        log,
        f"""
        SELECT bucket, sum(rows_ok) AS images, sum(wall_s) AS wall_s, sum(gpu_joules) AS joules,
            max(peak_reserved_gib) AS peak_gib, coalesce(sum(out_of_memory_splits), 0)::BIGINT AS splits,
            sum(wall_s) FILTER (first_of_shape) AS warm_up_s, {medians}, {means}
        FROM log GROUP BY bucket
        """,
    )
    return {row["bucket"]: _bucket_figures(row) for row in rows}


def _bucket_figures(row: Mapping[str, Any]) -> dict[str, Any]:
    images = int(row["images"])
    return {
        "images": images,
        "images_per_s": rate(images, row["wall_s"] or 0),
        "median_ms": {stage: finite(row[stage]) for stage in STAGES},
        "ms_per_image": {stage: finite(row[f"{stage}_mean"], digits=4) for stage in STAGES},
        "gpu_joules_per_image": finite(row["joules"] / images) if images and row["joules"] is not None else None,
        "peak_reserved_gib": finite(row["peak_gib"]),
        "out_of_memory_splits": row["splits"],
        "warm_up_s": finite(row["warm_up_s"]),
    }


def launches(log: Log) -> list[dict[str, Any]]:
    """For each bucket: launched images (padding too) and seconds without first launches of a shape, seconds an image of
    a quick and of a slow batch, seconds in first launches, and the peak memory. Buckets with fewer than three other
    batches are left out."""
    return _query(
        log,
        """
        SELECT bucket, sum(images) FILTER (steady)::BIGINT AS launched, sum(wall_s) FILTER (steady) AS seconds,
            quantile_cont(wall_s / images, 0.1) FILTER (steady) AS low_s,
            quantile_cont(wall_s / images, 0.9) FILTER (steady) AS high_s,
            coalesce(sum(wall_s) FILTER (NOT steady), 0) AS warm_up_s, max(peak_reserved_gib) AS peak_gib
        FROM (
            SELECT *, rows_ok + rows_failed + rows_padded AS images, NOT coalesce(first_of_shape, false) AS steady
            FROM log WHERE wall_s > 0
        )
        GROUP BY bucket HAVING count(*) FILTER (steady) >= 3 ORDER BY bucket
        """,
    )


def occupancy(log: Log) -> dict[str, dict[str, float | None]]:
    """Of the wall time of all ranks: the share that each stage was at work, and that each receiver stood waiting.

    Stages overlap, and several threads compress at once, so shares add up to more than 1 and one may exceed it.
    """
    sums = [f"sum({stage}_ms) AS {stage}" for stage in STAGES]
    sums += [f"sum({wait_key(handover)}) AS {wait_key(handover)}" for handover in HANDOVERS]
    [row] = _query(log, f"SELECT sum(wall_s) * 1000 AS wall_ms, {', '.join(sums)} FROM log")

    def share(key: str) -> float | None:
        return finite(row[key] / row["wall_ms"], digits=4) if row["wall_ms"] and row[key] is not None else None

    return {
        "busy": {stage: share(stage) for stage in STAGES},
        "waiting": {handover: share(wait_key(handover)) for handover in HANDOVERS},
    }


def totals(log: Log) -> dict[str, Any]:
    """The whole run. Ranks work side by side, so `wall_s` is that of the rank that worked longest."""
    [row] = _query(
        log,
        """
        SELECT coalesce(sum(images), 0) AS images, coalesce(sum(batches), 0) AS batches,
            coalesce(sum(padded), 0) AS padded, count(*) AS ranks, coalesce(max(wall_s), 0) AS wall_s,
            sum(joules) AS joules, min(first) AS first, max(last) AS last, avg(gpu) / 100 AS gpu
        FROM (
            SELECT sum(rows_ok) AS images, count(*) AS batches, sum(rows_padded) AS padded, sum(wall_s) AS wall_s,
                sum(gpu_joules) AS joules, min(time) AS first, max(time) AS last,
                sum(gpu_utilization_percent * wall_s) / nullif(sum(wall_s) FILTER (gpu_utilization_percent >= 0), 0)
                    AS gpu
            FROM log GROUP BY rank
        )
        """,
    )
    images = int(row["images"])
    return {
        "images": images,
        "batches": int(row["batches"]),
        "rows_padded": int(row["padded"]),
        "ranks": row["ranks"],
        "wall_s": finite(row["wall_s"]),
        "images_per_s": rate(images, row["wall_s"]),
        "gpu_busy_share": finite(row["gpu"], digits=4),
        "gpu_joules": finite(row["joules"]),
        "gpu_joules_per_image": finite(row["joules"] / images) if images and row["joules"] is not None else None,
        "first_time": row["first"],
        "last_time": row["last"],
    }


def over_time(log: Log, *, count: int = POINTS) -> list[dict[str, Any]]:
    """The run in at most `count` equal numbers of batches: `worked_s` since its first one (pauses left out), images a
    second of all ranks, and the GPU's use and power."""
    return _query(
        log,
        f"""
        SELECT sum(seconds) OVER (ORDER BY piece) AS worked_s, time, images_per_s, gpu_utilization_percent, gpu_power_w
        FROM (
            SELECT piece, sum(wall_s) / count(DISTINCT rank) AS seconds, max(time) AS time,
                coalesce(sum(rows_ok) / nullif(sum(wall_s), 0), 0) * count(DISTINCT rank) AS images_per_s,
                avg(gpu_utilization_percent) AS gpu_utilization_percent, avg(gpu_power_w) AS gpu_power_w
            FROM (SELECT *, ntile({count}) OVER (ORDER BY time) AS piece FROM log) GROUP BY piece
        ) ORDER BY piece
        """,
    )


def made_again(log: Log) -> int:
    """Rows of batches that the logs tell twice: their files were lost or damaged in between."""
    [row] = _query(
        log,
        """
        SELECT coalesce(sum(made - most), 0)::BIGINT AS again FROM (
            SELECT sum(rows_ok + rows_failed) AS made, max(rows_ok + rows_failed) AS most FROM log GROUP BY batch
        )
        """,
    )
    return row["again"]


def starts(folder: RunFolder) -> list[Line]:
    """What each start of a rank that had something to draw wrote down (`metrics.record_start`), in order of time."""
    paths = sorted(folder.logs.glob("starts-rank-*.jsonl"))
    found = [line for path in paths for line in read_lines(path) if isinstance(line.get("time"), str)]
    return sorted(found, key=lambda line: line["time"])


def _query(log: Log, sql: str) -> list[dict[str, Any]]:
    if not isinstance(log, pa.Table):
        return log.sql(sql).to_arrow_table().to_pylist()
    with duckdb.connect() as database:
        database.register("log", log)
        return database.sql(sql).to_arrow_table().to_pylist()
