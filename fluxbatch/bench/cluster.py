"""Question: what would a thousand GPUs do to one run folder, and what would stragglers and failures cost?

python -m fluxbatch bench cluster [--gpus 1000] [--rows 100000000] [--seconds-an-image 2.34] [--mtbf-h 10000]

First counts what really reaches the file system: every system call on files that a start, a batch, a shard and a
heartbeat make here, with small images in a temporary folder. Then a plain model of the whole job, shard by shard:
dealt by work (`deal`), each GPU with a speed of its own (`--spread`), some of them slow, failures at random, a restart
after each; with and without helping the ranks that are behind. Seconds an image and bytes an image are given (defaults:
FLUX.1-dev, FP8, 1024x1024 PNG on one H200); planning rows a second is that of plan_scale. Excluded: the network's own
limits, which the rates in the last table are to be held against.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.manifest.files import open_manifest
from fluxbatch.output import job
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan import deal
from fluxbatch.plan.cut import plan_part
from fluxbatch.plan.planner import prepare
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import Bucket, CompressedBatch, RowResult
from fluxbatch.share import Share
from fluxbatch.storage import lease
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease

# What a client asks a metadata server for; reads and writes of content go to others.
CREATING = ("link", "mkdir", "rename", "replace", "unlink", "rmdir")
ASKING = ("stat", "lstat", "scandir", "listdir")
OPENING = "open"
SYNCING = "fsync"
IMAGE = b"an image of a few bytes"
PLANNED_ROWS_S = 235_000  # plan_scale, 100 million rows, one busy core


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls on files that this process makes, by name."""
    counts: Counter[str] = Counter()
    is_open = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_open[0] and event == OPENING and isinstance(arguments[0], str | os.PathLike):
            counts[OPENING] += 1

    sys.addaudithook(hook)  # there is no way to take it away again; it only looks
    with contextlib.ExitStack() as stack:
        for name in (*CREATING, *ASKING, SYNCING):
            stack.enter_context(_wrapped(name, counts))
        yield counts
    is_open[0] = False


@contextlib.contextmanager
def _wrapped(name: str, counts: Counter[str]) -> Iterator[None]:
    original = getattr(os, name)

    def count(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return original(*arguments, **options)

    setattr(os, name, count)
    try:
        yield
    finally:
        setattr(os, name, original)


def count_operations(cfg: JobConfig, scratch: Path, *, batches: int = 8) -> dict[str, Counter[str]]:
    """Calls of one start, one batch, one shard (its batches left out) and one heartbeat."""
    size = cfg.plan.batch_size if isinstance(cfg.plan.batch_size, int) else 4
    plan_cfg = replace(cfg.plan, batch_size=size, shard_size=batches * size)
    manifest = scratch / "manifest.parquet"
    cfg = replace(cfg, manifest=replace(cfg.manifest, path=str(manifest)), plan=plan_cfg,
                  output=replace(cfg.output, dir=str(scratch / "run"), kind="parquet"))  # fmt: skip
    pq.write_table(pa.table({"prompt": ["a red mug"] * (2 * batches * size)}), manifest)
    folder = RunFolder(config.output_dir(cfg))
    job.open_job(folder, cfg)
    prepare(folder, open_manifest(cfg.manifest), config.row_rules(cfg), cfg)
    with Lease(folder, rank=0, world_size=2) as mine:
        with counted() as starting:
            plan, _ = prepare(folder, open_manifest(cfg.manifest), config.row_rules(cfg), cfg)
            share = Share(folder, plan, Ledger.read(folder, plan.revisions), cfg, Rank(0, 2), mine)
            work = share.open([0, 1])
        with counted() as drawing:
            made = list(share.batches(work[:1]))
            for batch in made[:-1]:
                share.commit(_drawn(batch))
        with counted() as finishing, share:
            share.commit(_drawn(made[-1]))
        with counted() as beating:
            mine.beat()
    each = Counter({name: number / (len(made) - 1) for name, number in drawing.items()})
    finishing.subtract({name: round(number) for name, number in each.items()})
    return {"start": starting, "batch": each, "shard": +finishing, "heartbeat": beating}


def _drawn(batch: Any) -> CompressedBatch:
    return CompressedBatch(batch, tuple(RowResult(request.id, IMAGE) for request in batch.requests))


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines of a model: seconds, hours and fractions as the options say."""

    gpus: int
    image_s: float
    batch: int
    shard_rows: int
    spread: float
    slow: float
    slow_factor: float
    mtbf_h: float
    restart_s: float
    helping: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a modelled job."""

    wall_h: float
    idle_gpu_h: float  # at the end, for others that are not done
    lost_gpu_h: float  # batches in flight at a failure
    down_gpu_h: float  # until a failed process draws again
    failures: int


def simulate(fleet: Fleet, *, rows: int, seed: int = 0) -> Outcome:
    """Whole shards, dealt evenly; a GPU that is done takes the last shard of the one with most left."""
    rng = np.random.default_rng(seed)
    speed = np.exp(rng.normal(0, fleet.spread, fleet.gpus))
    speed[rng.random(fleet.gpus) < fleet.slow] *= fleet.slow_factor
    shards = -(-rows // fleet.shard_rows)
    part = plan_part({Bucket(1024, 1024, 28): shards}, plan=config.PlanConfig(batch_size=1, shard_size=1))
    own: list[list[int]] = [[] for _ in range(fleet.gpus)]
    for shard, rank in enumerate(deal.owners([part], fleet.gpus).tolist()):
        own[rank].append(shard)
    shard_s = fleet.shard_rows * fleet.image_s
    free = [(0.0, rank) for rank in range(fleet.gpus)]
    ends, lost_s, down_s, failures = np.zeros(fleet.gpus), 0.0, 0.0, 0
    while free:
        now_s, rank = heapq.heappop(free)
        giver = rank if own[rank] else max(range(fleet.gpus), key=lambda of: len(own[of])) if fleet.helping else rank
        if not own[giver]:
            ends[rank] = now_s
            continue
        own[giver].pop(0 if giver == rank else -1)
        failed = int(rng.poisson(shard_s * speed[rank] / 3600 / fleet.mtbf_h))
        lost = failed * 1.5 * fleet.batch * fleet.image_s  # half a batch being drawn, one on its way to the disk
        failures, lost_s, down_s = failures + failed, lost_s + lost, down_s + failed * fleet.restart_s
        heapq.heappush(free, (now_s + shard_s * speed[rank] + lost + failed * fleet.restart_s, rank))
    wall_s = float(ends.max())
    return Outcome(wall_s / 3600, float((wall_s - ends).sum()) / 3600, lost_s / 3600, down_s / 3600, failures)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--shard-rows", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4, help="images in a launch")
    parser.add_argument("--seconds-an-image", type=float, default=2.34)
    parser.add_argument("--bytes-an-image", type=float, default=1.5e6)
    parser.add_argument("--spread", type=float, default=0.03, help="of the speeds of GPUs (standard deviation)")
    parser.add_argument("--slow", type=float, default=0.01, help="share of GPUs that are slow all along")
    parser.add_argument("--slow-factor", type=float, default=2.0, help="and how many times as long they take")
    parser.add_argument("--mtbf-h", type=float, default=10_000, help="hours of one GPU until its process fails")
    parser.add_argument("--restart-s", type=float, default=900, help="until it draws again")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        operations = count_operations(cfg, Path(scratch))
    result: dict[str, Any] = {"operations": {of: dict(found) for of, found in operations.items()}}
    for of, found in operations.items():
        print(f"{of:10} {found.total():6.1f} calls: " + ", ".join(f"{name} {n:g}" for name, n in sorted(found.items())))
    yield result
    fleet = Fleet(options.gpus, options.seconds_an_image, options.batch, options.shard_rows, options.spread,
                  options.slow, options.slow_factor, options.mtbf_h, options.restart_s)  # fmt: skip
    for name, variant in _variants(fleet).items():
        outcome = asdict(simulate(variant, rows=options.rows))
        result[name] = {key: round(value, 2) for key, value in outcome.items()}
        print(f"{name:22} " + ", ".join(f"{field} {value:,}" for field, value in result[name].items()), flush=True)
        yield result
    result["rates"] = {name: round(rate, 1) for name, rate in _rates(options, operations).items()}
    for name, rate in result["rates"].items():
        print(f"{name:44} {rate:12,.1f}")
    yield result


def _variants(fleet: Fleet) -> dict[str, Fleet]:
    return {
        "as it is": fleet,
        "nobody helps": replace(fleet, helping=False),
        "nothing fails": replace(fleet, mtbf_h=1e12),
        "shards of a quarter": replace(fleet, shard_rows=max(1, fleet.shard_rows // 4)),
    }


def _rates(options: argparse.Namespace, operations: dict[str, Counter[str]]) -> dict[str, float]:
    """What all GPUs together ask of the shared storage, a second."""
    images_s = options.gpus / options.seconds_an_image
    calls: Callable[[str], float] = lambda of: operations[of].total()  # noqa: E731
    beat_s = lease.heartbeat_s(options.gpus)
    return {
        "images a second": images_s,
        "MB a second, part files and shards": 2 * images_s * options.bytes_an_image / 1e6,
        "calls a second, batches": images_s / options.batch * calls("batch"),
        "calls a second, shards": images_s / options.shard_rows * calls("shard"),
        "calls a second, heartbeats": options.gpus / beat_s * calls("heartbeat"),
        "fsyncs a second": images_s / options.batch * operations["batch"][SYNCING],
        "calls of a start of all ranks": options.gpus * calls("start"),
        "ledgers and leases opened by such a start": 2.0 * options.gpus**2,
        "GPU hours that wait for the plan": options.gpus * options.rows / PLANNED_ROWS_S / 3600,
        "ledger lines, MB": options.rows / options.shard_rows * 250 / 1e6,
        "batch log, GB": options.rows / options.batch * 800 / 1e9,
    }
