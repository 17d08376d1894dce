"""Question: do `serial` and `double_buffered` give equal bytes, and what does the overlap bring on this device?

python -m fluxbatch bench pipelines model=flux1_dev model.random_weights=true --rows 12 --steps 8 --batch-size 4

Warm-up: one batch a shape (reported). In the order serial, double, double, serial. Excluded: loading; files are
compressed but not written.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fluxbatch import config
from fluxbatch.bench import jobs
from fluxbatch.bench.measure import peak_gib
from fluxbatch.config import JobConfig
from fluxbatch.models import Model
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.records import Batch, BatchPlan, Bucket, CompressedBatch

STAGES = ("prefetch_ms", "encode_ms", "denoise_ms", "decode_ms", "transfer_ms", "compress_ms")


def make_batches(buckets: list[Bucket], *, rows: int, batch_size: int, guidance_scale: float) -> Iterator[Batch]:
    """`rows` rows of each bucket, in batches of `batch_size`, prompts and seeds all different."""
    index = 0
    for bucket in buckets:
        for first in range(0, rows, batch_size):
            count = min(batch_size, rows - first)
            requests = tuple(jobs.requests(count, bucket, guidance_scale=guidance_scale, first=first))
            yield Batch(BatchPlan(index, 0, bucket, first, count, batch_size), requests)
            index += 1


def run_mode(mode: str, model: Model, cfg: JobConfig, batches: list[Batch]) -> tuple[dict[str, Any], dict[str, str]]:
    """One pass over the batches: figures, and the digest of each row's image."""
    digests: dict[str, str] = {}
    finished: list[CompressedBatch] = []
    began = time.perf_counter()
    for done in _pipeline(mode, model, cfg, batches):
        finished.append(done)
        digests |= {r.id: hashlib.sha256(r.image or repr(r.failure).encode()).hexdigest() for r in done.results}
    wall_s = time.perf_counter() - began
    images = sum(done.num_ok for done in finished)
    medians = {stage: round(statistics.median(getattr(d.times, stage) for d in finished), 2) for stage in STAGES}
    waits = {
        name: round(sum(d.times.wait_ms.get(name, 0.0) for d in finished), 1) for name in finished[0].times.wait_ms
    }
    figures = {
        "mode": mode,
        "images": images,
        "wall_s": round(wall_s, 3),
        "s_per_image": round(wall_s / max(1, images), 4),
    }
    return {**figures, "median": medians, "wait_ms": waits}, digests


def _pipeline(mode: str, model: Model, cfg: JobConfig, batches: list[Batch]) -> Iterator[CompressedBatch]:
    pipeline = replace(cfg.pipeline, mode=mode, depth=1 if mode == "serial" else 2)
    return run_pipeline(
        iter(batches),
        model,
        pipeline=pipeline,
        model_cfg=cfg.model,
        output=cfg.output,
        step_cache=config.step_cache(cfg.sampler),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser)
    parser.set_defaults(steps=8)
    parser.add_argument("--rows", type=int, default=12, help="of each size")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model, load_s = jobs.load(cfg)
    buckets, size = jobs.buckets_of(cfg, options), jobs.batch_size(cfg, options)
    guidance = cfg.sampler.guidance_scale
    batches = list(make_batches(buckets, rows=options.rows, batch_size=size, guidance_scale=guidance))
    began = time.perf_counter()
    warm = [next(batch for batch in batches if batch.bucket == bucket) for bucket in buckets]
    list(_pipeline("serial", model, cfg, warm))
    warm_s = time.perf_counter() - began
    results = [
        run_mode(mode, model, cfg, batches) for mode in ("serial", "double_buffered", "double_buffered", "serial")
    ]
    equal = all(digests == results[0][1] for _, digests in results)
    for figures, _ in results:
        print(
            f"{figures['mode']:16} {figures['wall_s']:8.2f} s {figures['s_per_image']:8.4f} s/image {figures['median']}"
        )
    yield {
        "ok": equal, "equal_bytes": equal, "buckets": [bucket.name for bucket in buckets], "batch_size": size,
        "rows_per_size": options.rows, "load_s": load_s, "warm_up_s": round(warm_s, 1),
        "peak_gib": peak_gib(model.device), "modes": [figures for figures, _ in results],
    }  # fmt: skip
