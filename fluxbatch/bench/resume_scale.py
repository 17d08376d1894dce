"""Question: how long does a job of 100,000 shards take to start again, and its folder to be asked for?

python -m fluxbatch bench resume_scale --shards 100000 [--rows-a-shard 10] [--world-size 1000] [--folder /scratch]

Makes a run folder of small real shards, all committed but one in a hundred, with their ledger lines spread over
`--world-size` ranks, then measures each step in a process of its own: `ledger` (all lines), `start` (what one process
does until it would load the model), `start_rank` (the same as one rank of many), `status`, `plan`, `report` and
`verify` (without decoding). Memory is the peak resident set. Excluded: making the folder. Real shards hold more rows;
what follows the number of rows is measured by plan_scale.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fluxbatch import config, forecast
from fluxbatch.bench.plan_scale import measured
from fluxbatch.config import JobConfig
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output import job, verify, writers
from fluxbatch.output.ledger import Ledger
from fluxbatch.output.shards import data_file
from fluxbatch.plan.planner import prepare
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import ShardCommit
from fluxbatch.reports import report
from fluxbatch.run import run_job
from fluxbatch.storage.folder import RunFolder

LINE = {"wall_s": 1.0, "rows_ok": 4, "rows_failed": 0, "rows_padded": 0, "time": "2026-01-01T00:00:00.000+00:00"}


class _LoadedError(Exception):
    """Raised where the model would be loaded: until there a start costs no GPU time."""


def make_folder(cfg: JobConfig, *, shards: int, world_size: int) -> None:
    """A run folder of so many shards, of which one in a hundred is still to be made."""
    rows = shards * cfg.plan.shard_size
    pq.write_table(pa.table({"prompt": ["a red mug"] * rows}), str(cfg.manifest.path))
    folder = RunFolder(config.output_dir(cfg))
    job.open_job(folder, cfg)
    plan, _ = prepare(folder, open_manifest(cfg.manifest), config.row_rules(cfg), cfg)
    image = _image(cfg)
    schema = writers.data_schema(plan.schema)
    lines: dict[int, list[ShardCommit]] = {}
    for shard in plan.shards():
        if shard.index % 100 == 99:
            continue
        path = data_file(folder, shard, cfg.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        planned = plan.rows(shard)
        columns = {name: planned[name] for name in schema.names if name in planned.column_names}
        columns |= {"truncated": pa.array([False] * shard.num_rows), "image": pa.array([image] * shard.num_rows)}
        table = pa.table({name: columns[name] for name in schema.names})
        content = io.BytesIO()
        writers.write_parquet(content, [table], schema=schema, image_format="png", row_group_mib=32)
        path.write_bytes(content.getvalue())
        line = ShardCommit(
            shard.index, path.relative_to(folder.root).as_posix(), shard.num_rows, 0, path.stat().st_size,
            writers.hashlib.sha256(content.getvalue()).hexdigest(), path.stat().st_mtime_ns,
        )  # fmt: skip
        lines.setdefault(shard.index % world_size, []).append(line)
    for rank, found in lines.items():
        folder.ledgers.mkdir(exist_ok=True)
        folder.ledger(rank).write_text("".join(json.dumps(asdict(line)) + "\n" for line in found))
        folder.logs.mkdir(exist_ok=True)
        told = [LINE | {"rank": rank, "batch": 3 * line.shard + at, "bucket": "x"} for line in found for at in range(3)]
        folder.metrics(rank).write_text("".join(json.dumps(line) + "\n" for line in told))


def _image(cfg: JobConfig) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (cfg.sampler.width, cfg.sampler.height)).save(content, "png")
    return content.getvalue()


def _ledger(cfg: JobConfig, folder: RunFolder) -> None:
    Ledger.read(folder)


def _start(cfg: JobConfig, folder: RunFolder) -> None:
    def load(cfg: JobConfig, rank: Rank) -> Any:
        raise _LoadedError

    try:
        run_job(cfg, load=load)
    except _LoadedError:
        return
    raise AssertionError("there was nothing to draw")


def _start_rank(cfg: JobConfig, folder: RunFolder) -> None:
    world_size = len(list(folder.ledgers.iterdir()))
    _start(replace(cfg, run=replace(cfg.run, rank=world_size - 1, world_size=world_size)), folder)


def _status(cfg: JobConfig, folder: RunFolder) -> None:
    report.status(folder)


def _plan(cfg: JobConfig, folder: RunFolder) -> None:
    forecast.forecast(cfg)


def _report(cfg: JobConfig, folder: RunFolder) -> None:
    description = job.read_job(folder)
    assert description is not None
    report.write_report(folder, job=description)


def _verify(cfg: JobConfig, folder: RunFolder) -> None:
    _, found = verify.verify(folder, decode=False)
    assert not found, found[:3]


STEPS: dict[str, Callable[[JobConfig, RunFolder], None]] = {
    "ledger": _ledger,
    "start": _start,
    "start_rank": _start_rank,
    "status": _status,
    "plan": _plan,
    "report": _report,
    "verify": _verify,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--rows-a-shard", type=int, default=10)
    parser.add_argument("--world-size", type=int, default=1000, help="ranks that the ledger lines are spread over")
    parser.add_argument("--folder", type=Path, help="where the run folder goes; default: a temporary folder")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        cfg = replace(
            cfg,
            manifest=replace(cfg.manifest, path=f"{scratch}/manifest.parquet"),
            output=replace(cfg.output, dir=f"{scratch}/run"),
            plan=replace(cfg.plan, shard_size=options.rows_a_shard, batch_size=min(4, options.rows_a_shard)),
        )
        with spawn.Pool(1) as pool:
            pool.apply(make_folder, (cfg,), {"shards": options.shards, "world_size": options.world_size})
        result: dict[str, Any] = {"shards": options.shards, "world_size": options.world_size}
        print(f"{'step':12} {'seconds':>9} {'CPU s':>9} {'peak MiB':>9}")
        for name, step in STEPS.items():
            with spawn.Pool(1) as pool:
                found = pool.apply(measured, (step, cfg, RunFolder(Path(scratch) / "run")))
            print(f"{name:12} {found['wall_s']:9.2f} {found['cpu_s']:9.2f} {found['peak_rss_mib']:9,}", flush=True)
            result[name] = found
            yield result
