"""Question: do `serial` and `double_buffered` give equal bytes, and what does the overlap bring on this device?

python -m fluxbatch.bench.pipelines model=flux1_dev model.random_weights=true --rows 12 --steps 8 --batch-size 4

Excluded: loading, and one warm-up batch a shape (reported on its own). Files are compressed but not written. Ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig, check
from fluxbatch.models import Model, load_model
from fluxbatch.pipeline.loop import run_pipeline
from fluxbatch.records import Batch, BatchPlan, Bucket, CompressedBatch, Request

STAGES = ("prefetch_ms", "encode_ms", "denoise_ms", "decode_ms", "transfer_ms", "compress_ms")


def make_batches(buckets: list[Bucket], *, rows: int, batch_size: int, guidance_scale: float) -> Iterator[Batch]:
    """`rows` rows of each bucket, in batches of `batch_size`, prompts and seeds all different."""
    index = 0
    for bucket in buckets:
        for first in range(0, rows, batch_size):
            numbers = range(first, min(first + batch_size, rows))
            requests = tuple(_request(f"{bucket.name}-{n}", n, bucket, guidance_scale) for n in numbers)
            yield Batch(BatchPlan(index, 0, bucket, first, len(requests), batch_size), requests)
            index += 1


def _request(name: str, number: int, bucket: Bucket, guidance_scale: float) -> Request:
    prompt = f"a lighthouse on a cliff in the evening, number {number} of a series, painted in oil"
    return Request(name, prompt, None, bucket.height, bucket.width, bucket.num_inference_steps, guidance_scale, number)


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
    return run_pipeline(iter(batches), model, pipeline=pipeline, model_cfg=cfg.model, output=cfg.output)


def _bucket(size: str, steps: int) -> Bucket:
    height, width = map(int, size.split("x"))
    return Bucket(height, width, steps)


def measure(cfg: JobConfig, options: argparse.Namespace) -> int:
    check(cfg)
    began = time.perf_counter()
    model = load_model(cfg.model, true_cfg_scale=cfg.sampler.true_cfg_scale)
    load_s = time.perf_counter() - began
    buckets = [_bucket(size, options.steps) for size in options.sizes]
    guidance = cfg.sampler.guidance_scale
    batches = list(make_batches(buckets, rows=options.rows, batch_size=options.batch_size, guidance_scale=guidance))
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
    summary = {
        "bench": "pipelines", "model": cfg.model.name, "sizes": options.sizes, "steps": options.steps,
        "batch_size": options.batch_size, "rows_per_size": options.rows, "load_s": round(load_s, 1),
        "warm_up_s": round(warm_s, 1), "equal_bytes": equal, "modes": [figures for figures, _ in results],
        **_hardware(model),
    }  # fmt: skip
    print(json.dumps(summary))
    return 0 if equal else 1


def _hardware(model: Model) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "dtype": str(model.dtype)}
    if model.device.type != "cuda":
        return {"device": f"cpu, {torch.get_num_threads()} threads", **versions}
    peak = torch.cuda.max_memory_allocated(model.device) / 2**30
    return {"device": torch.cuda.get_device_name(model.device), "peak_vram_gib": round(peak, 1), **versions}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sizes", nargs="+", default=["1024x1024"], help="HEIGHTxWIDTH")
    options, overrides = parser.parse_known_args()
    sys.exit(with_config(overrides, lambda cfg: measure(cfg, options)))


if __name__ == "__main__":
    main()
