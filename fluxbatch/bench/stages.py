"""Question: what does each stage of the loaded model cost alone?

python -m fluxbatch bench stages model=flux1_dev model.random_weights=true --sizes 1024x1024 512x512 --batch-sizes 1 4

Encode (one launch of model.encode_batch_size prompts), one denoising step (the mean of `--steps` of them, with what is
computed once a launch), decode with the conversion to 8 bits, the copy of the pixels to pinned memory, and compression
on one core. Medians between CUDA events (a CPU: a clock), after a warm-up with whatever is compiled then. Excluded:
tokens, noise, files, and whatever stages do to each other when they overlap.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from fluxbatch.bench import jobs
from fluxbatch.bench.ceilings import codec_figures
from fluxbatch.bench.headspace import CachedBatch, encode_ms
from fluxbatch.bench.measure import GpuWatch, Limit, free_memory, peak_gib, reset_peak, table, timed_ms
from fluxbatch.config import JobConfig
from fluxbatch.models import Model
from fluxbatch.records import Bucket

COLUMNS = ("size", "batch", "step ms", "step ms/image", "decode ms/image", "D2H ms/image", "codec ms/image",
           "warm-up s", "peak GiB", "W", "MHz")  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser)
    parser.add_argument("--batch-sizes", nargs="+", type=int, help="several; default: --batch-size")
    parser.set_defaults(steps=4)
    parser.add_argument("--repeats", type=int, default=5, help="readings of each median")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit = Limit(options.limit_s)
    model, load_s = jobs.load(cfg)
    prompts = cfg.model.encode_batch_size
    figures: dict[str, Any] = {
        "load_s": load_s,
        "encode_ms_per_prompt": round(encode_ms(model, cfg.model), 3),
        "cells": [],
    }
    print(f"encode: {figures['encode_ms_per_prompt']} ms a prompt, {prompts} prompts a launch")
    table(COLUMNS, [])
    for bucket in jobs.buckets_of(cfg, options):
        for size in options.batch_sizes or [jobs.batch_size(cfg, options)]:
            if limit.over:
                return
            figures["cells"].append(_cell(model, cfg, bucket, size, repeats=options.repeats))
            table(COLUMNS, figures["cells"][-1:], header=False)
            yield figures
            free_memory(model.device)


def _cell(model: Model, cfg: JobConfig, bucket: Bucket, size: int, *, repeats: int) -> dict[str, Any]:
    device = model.device
    reset_peak(device)
    try:
        cached = CachedBatch(model, bucket, cfg, size=size)
    except torch.OutOfMemoryError as error:
        return {"size": bucket.name, "batch": size, "error": str(error).partition("\n")[0]}
    with GpuWatch(device) as watch:
        denoise_ms = timed_ms(cached.denoise, device=device, repeats=repeats, warm_up=1)
        latents = cached.denoise()
        decode_ms = timed_ms(lambda: cached.decode(latents), device=device, repeats=repeats, warm_up=1)
    pixels = cached.decode(latents)
    host = torch.empty_like(pixels, device="cpu", pin_memory=device.type == "cuda")
    copy_ms = timed_ms(lambda: host.copy_(pixels, non_blocking=True), device=device, repeats=repeats)
    codec = codec_figures(cfg.output, bucket)
    gpu, step_ms = watch.figures(), denoise_ms / bucket.num_inference_steps
    return {
        "size": bucket.name, "batch": size, "step ms": round(step_ms, 3), "step ms/image": round(step_ms / size, 3),
        "decode ms/image": round(decode_ms / size, 3), "D2H ms/image": round(copy_ms / size, 4),
        "codec ms/image": codec["ms"], "warm-up s": cached.warm_up_s, "peak GiB": peak_gib(device),
        "W": gpu["power_w"], "MHz": gpu["sm_clock_mhz"],
    }  # fmt: skip
