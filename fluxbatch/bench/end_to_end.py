"""Question: how near does the real job come to what the GPU alone could do (`headspace`)?

python -m fluxbatch bench end_to_end model=flux1_dev model.random_weights=true --size 1024x1024 --batch-size 4

The model is loaded once. Warm-up: one job of two batches, with whatever is compiled then. Then half of the replay, the
real job (manifest in, shards and report on disk), the other half of the replay, so that both see the same temperature.
Steady state: from the first batch's commit to the last one's; the first batch, which fills the pipeline, is left out.
`percent_of_ceiling` counts all GPU work of the job as loss but denoise and decode; `..._with_encode` adds to the
ceiling what encoding the prompts costs the GPU, which nothing can hide. `--trace` runs a short job more under the
profiler and reports the pauses between GPU kernels. Excluded: loading, planning, the end of the job.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fluxbatch.bench import jobs
from fluxbatch.bench.headspace import CachedBatch
from fluxbatch.bench.measure import GpuWatch, Limit, table
from fluxbatch.config import JobConfig
from fluxbatch.models import Model
from fluxbatch.records import Bucket, Request

WARM_UP_BATCHES = 2
TRACED_BATCHES = 4
LONG_GAP_MS = 1.0
COLUMNS = ("name", "images", "s/image", "% of ceiling", "% with encode", "busy %", "W", "MHz", "peak GiB")


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser, sizes=False)
    parser.add_argument("--seconds", type=float, default=60, help="of steady state; the replay takes a third of it")
    parser.add_argument("--folder", type=Path, help="where the job writes; default: a temporary folder")
    parser.add_argument("--trace", action="store_true", help="look for pauses between kernels")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit, size = Limit(options.limit_s), jobs.batch_size(cfg, options)
    cfg, bucket = jobs.with_batch_size(cfg, size), jobs.bucket_of(cfg, options.size, options.steps)
    model, load_s = jobs.load(cfg)
    figures: dict[str, Any] = {"bucket": bucket.name, "batch_size": size, "load_s": load_s}
    with jobs.scratch(options.folder) as folder:
        warm = jobs.run(cfg, model, _rows(cfg, bucket, WARM_UP_BATCHES * size), folder)
        cached = CachedBatch(model, bucket, cfg, size=size)
        replay_s = min(options.seconds, limit.left_s()) / 6
        before = cached.replay(seconds=replay_s)
        figures |= {"warm_up_s": round(warm.wall_s, 1), "headspace": [before]}
        yield figures
        seconds = min(options.seconds, limit.left_s() - replay_s)
        batches = 1 + max(2, math.ceil(seconds / (before["s_per_image"] * size)))
        figures["job"] = _job(cfg, model, _rows(cfg, bucket, batches * size), folder)
        figures["headspace"].append(cached.replay(seconds=replay_s))
        figures |= _compared(figures)
        table(COLUMNS, [_row(name, figures) for name in ("headspace", "job")])
        _say_idle(figures["job"])
        yield figures
        if options.trace and not limit.over:
            figures["trace"] = _traced(cfg, model, _rows(cfg, bucket, TRACED_BATCHES * size), folder)
            print(f"pauses between kernels: {figures['trace']}")
            yield figures


def _rows(cfg: JobConfig, bucket: Bucket, count: int) -> list[Request]:
    return jobs.requests(count, bucket, guidance_scale=cfg.sampler.guidance_scale)


def _job(cfg: JobConfig, model: Model, rows: Sequence[Request], folder: Path) -> dict[str, Any]:
    with GpuWatch(model.device) as watch:
        done = jobs.run(cfg, model, rows, folder)
    images, seconds = done.steady()
    return {
        "images": images, "seconds": round(seconds, 3), "s_per_image": round(seconds / max(1, images), 5),
        "whole_job_s": round(done.wall_s, 2), "peak_gib": done.peak_gib, "gpu": watch.figures(),
        **jobs.stage_figures(done.lines[1:]),
    }  # fmt: skip


def _compared(figures: dict[str, Any]) -> dict[str, float]:
    replays = figures["headspace"]
    ceiling_s = sum(replay["s_per_image"] * replay["batches"] for replay in replays)
    ceiling_s /= sum(replay["batches"] for replay in replays)
    encode_s = replays[0]["encode_ms_per_prompt"] / 1e3
    job_s = figures["job"]["s_per_image"]
    return {
        "ceiling_s_per_image": round(ceiling_s, 5),
        "percent_of_ceiling": round(100 * ceiling_s / job_s, 2),
        "percent_of_ceiling_with_encode": round(100 * (ceiling_s + encode_s) / job_s, 2),
    }


def _row(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    if name == "headspace":
        last = figures["headspace"][-1]
        shown = {"images": last["batches"] * last["batch_size"], "s/image": figures["ceiling_s_per_image"]}
    else:
        last = figures["job"]
        shown = {"images": last["images"], "s/image": last["s_per_image"],
                 "% of ceiling": figures["percent_of_ceiling"],
                 "% with encode": figures["percent_of_ceiling_with_encode"]}  # fmt: skip
    gpu = last["gpu"]
    return {"name": name, **shown, "busy %": gpu["busy_percent"], "W": gpu["power_w"], "MHz": gpu["sm_clock_mhz"],
            "peak GiB": last["peak_gib"]}  # fmt: skip


def _say_idle(job: dict[str, Any]) -> None:
    print(f"milliseconds a batch: {job['stage_ms_per_batch']}")
    for handover, idle in job["idle_per_batch"].items():
        print(f"  {handover:20} its receiver stood idle {idle['ms']} ms a batch, {idle['percent']} % of the time")


def _traced(cfg: JobConfig, model: Model, rows: Sequence[Request], folder: Path) -> dict[str, Any]:
    on_gpu = model.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        jobs.run(cfg, model, rows, folder)
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    ran = [event for event in events if event.device_type() == kind and not event.is_user_annotation()]
    return kernel_gaps([(event.start_ns(), event.start_ns() + event.duration_ns()) for event in ran])


def kernel_gaps(spans_ns: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Where no kernel and no copy ran, in the middle half of the trace: the pipeline fills before and drains after."""
    spans = sorted(spans_ns)
    if not spans:
        return {"kernels": 0}
    first, last = spans[0][0], max(end for _, end in spans)
    start, stop = first + (last - first) // 4, last - (last - first) // 4
    gaps_ms, reached = [], start
    for begin, end in spans:
        if begin > stop:
            break
        if begin > reached and reached > start:
            gaps_ms.append((begin - reached) / 1e6)
        reached = max(reached, end)
    idle_ms = sum(gaps_ms)
    return {
        "kernels": len(spans), "middle_ms": round((stop - start) / 1e6, 2), "idle_ms": round(idle_ms, 3),
        "busy_percent": round(100 * (1 - idle_ms / max((stop - start) / 1e6, 1e-9)), 3),
        "longest_gap_ms": round(max(gaps_ms, default=0.0), 4),
        "gaps_over_1_ms": sum(gap > LONG_GAP_MS for gap in gaps_ms),
    }  # fmt: skip
