"""Rows to draw, and the real job over them: manifest in, shards on disk, figures out of its log. Knows no peer."""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fluxbatch.bench.measure import device_of, parse_size, synchronize
from fluxbatch.config import JobConfig, PlanConfig
from fluxbatch.models import Model, WholeModel, load_model
from fluxbatch.records import Bucket, Request, RowCounts
from fluxbatch.run import run_job
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.metrics import HANDOVERS, STAGES

log = logging.getLogger(__name__)

Line = dict[str, Any]
Figures = dict[str, Any]


def add_shape_options(parser: argparse.ArgumentParser, *, sizes: bool = True) -> None:
    """--sizes (or --size), --steps and --batch-size."""
    if sizes:
        parser.add_argument("--sizes", nargs="+", type=parse_size, help="HEIGHTxWIDTH ...; default: the model's")
    else:
        parser.add_argument("--size", type=parse_size, help="HEIGHTxWIDTH; default: the model's")
    parser.add_argument("--steps", type=int, help="denoising steps; default: the model's")
    parser.add_argument("--batch-size", type=int, help="images in one launch; default: plan.batch_size, or 4")


def batch_size(cfg: JobConfig, options: argparse.Namespace) -> int:
    return options.batch_size or (4 if cfg.plan.batch_size == "auto" else cfg.plan.batch_size)


def bucket_of(cfg: JobConfig, size: tuple[int, int] | None, steps: int | None) -> Bucket:
    """A size's bucket under these settings, with the second pass that a row of the default guidance gets."""
    height, width = size or (cfg.sampler.height, cfg.sampler.width)
    negative_pass = cfg.model.guidance == "classifier_free" and cfg.sampler.guidance_scale > 1
    return Bucket(height, width, steps or cfg.sampler.num_inference_steps, negative_pass)


def buckets_of(cfg: JobConfig, options: argparse.Namespace) -> list[Bucket]:
    return [bucket_of(cfg, size, options.steps) for size in options.sizes or [None]]


def request(number: int, bucket: Bucket, *, guidance_scale: float) -> Request:
    """Row `number` of a series: a prompt and a seed of its own."""
    prompt = f"a lighthouse on a cliff in the evening, number {number} of a series, painted in oil"
    return Request(
        id=f"{bucket.name}-{number:05d}",
        prompt=prompt,
        negative_prompt=None,
        height=bucket.height,
        width=bucket.width,
        num_inference_steps=bucket.num_inference_steps,
        guidance_scale=guidance_scale,
        seed=number,
    )


def requests(count: int, bucket: Bucket, *, guidance_scale: float, first: int = 0) -> list[Request]:
    return [request(number, bucket, guidance_scale=guidance_scale) for number in range(first, first + count)]


def write_manifest(path: Path, rows: Sequence[Request]) -> None:
    names = ("id", "prompt", "height", "width", "num_inference_steps", "guidance_scale", "seed")
    pq.write_table(pa.table({name: [getattr(row, name) for row in rows] for name in names}), path)


def load(cfg: JobConfig) -> tuple[Model, float]:
    """The model as a run loads it, and the seconds that took."""
    began = time.perf_counter()
    model = load_model(cfg.model, true_cfg_scale=cfg.sampler.true_cfg_scale)
    assert not isinstance(model, WholeModel), "bench measures stages"
    synchronize(device_of(cfg))
    return model, round(time.perf_counter() - began, 1)


@contextmanager
def scratch(folder: Path | None = None) -> Iterator[Path]:
    """A folder for manifests and run folders, gone afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fluxbatch-bench-", dir=folder) as made:
        yield Path(made)


@dataclass(frozen=True)
class JobRun:
    """One finished job: rows by state, seconds from the command's start to its end, and its batch log."""

    counts: RowCounts
    wall_s: float
    lines: list[Line]

    def steady(self) -> tuple[int, float]:
        """Images and seconds from the first batch's commit to the last one's: the pipeline is full at both ends.

        Every shape was drawn before, in a warm-up job, so nothing else has to be left out.
        """
        return _sum(self.lines[1:] or self.lines)

    @property
    def peak_gib(self) -> float | None:
        """The highest of all launches, which each reset the allocator's own figure; None on a CPU."""
        return max((line["peak_allocated_gib"] for line in self.lines if line["peak_allocated_gib"]), default=None)

    def whole(self) -> tuple[int, float]:
        """Images and seconds from an empty pipeline to the last commit, the model being loaded."""
        return _sum(self.lines)


def _sum(lines: Sequence[Line]) -> tuple[int, float]:
    return sum(line["rows_ok"] for line in lines), sum(line["wall_s"] for line in lines)


SHARDS = 8  # of a measured job: all but the last are made while others are drawn, as in a long one
MIN_SHARD_ROWS = 8


def run(cfg: JobConfig, model: Model, rows: Sequence[Request], folder: Path) -> JobRun:
    """`run_job` over these rows into a new run folder, with this loaded model."""
    number = len(list(folder.glob("job-*.parquet")))
    manifest, output = folder / f"job-{number}.parquet", folder / f"job-{number}"
    write_manifest(manifest, rows)
    job = replace(
        cfg,
        plan=replace(cfg.plan, shard_size=shard_size(cfg.plan, len(rows))),
        manifest=replace(cfg.manifest, path=str(manifest)),
        output=replace(cfg.output, dir=str(output)),
        telemetry=replace(cfg.telemetry, progress="off"),
    )
    began = time.perf_counter()
    counts, _ = run_job(job, load=lambda cfg, rank: model)
    wall_s = time.perf_counter() - began
    lines = [json.loads(line) for line in RunFolder(output).metrics(0).read_text().splitlines()]
    if counts.written < len(rows):
        log.warning("%d of %d rows were not written; rates are of written rows", len(rows) - counts.written, len(rows))
    return JobRun(counts, wall_s, lines)


def shard_size(plan: PlanConfig, num_rows: int) -> int:
    """Rows of a shard of a measured job: whole launches, since a shard's last one would be padded."""
    launch = 1 if plan.batch_size == "auto" else plan.batch_size
    rows = min(plan.shard_size, max(MIN_SHARD_ROWS, num_rows // SHARDS))
    return max(launch, rows // launch * launch)


def with_batch_size(cfg: JobConfig, size: int) -> JobConfig:
    return replace(cfg, plan=replace(cfg.plan, batch_size=size))


def stage_figures(lines: Sequence[Line]) -> Figures:
    """Milliseconds a batch of each stage (stages overlap), and how long each receiver stood idle, a batch and in share.

    `wait_prefetch_launch` is the GPU's launcher waiting for input; the others are later stages waiting for the GPU,
    which is as it should be.
    """
    batches = max(1, len(lines))
    wall_ms = sum(line["wall_s"] for line in lines) * 1e3
    stages = {f"{stage}_ms": round(sum(line[f"{stage}_ms"] or 0 for line in lines) / batches, 2) for stage in STAGES}
    waits = {}
    for handover in HANDOVERS:
        total_ms = sum(line[f"wait_{handover.replace('->', '_')}_ms"] or 0 for line in lines)
        waits[handover] = {"ms": round(total_ms / batches, 2), "percent": round(100 * total_ms / max(wall_ms, 1e-9), 2)}
    return {"stage_ms_per_batch": stages, "idle_per_batch": waits}
