"""Question: how fast is the GPU alone? One cached batch, its embeddings and noise on the device, is drawn again and
again: denoise and decode back to back, nothing else. Its seconds an image are the GPU-only ceiling of a job.

python -m fluxbatch bench headspace model=flux1_dev model.random_weights=true --sizes 1024x1024 --batch-size 4
python -m fluxbatch bench headspace model=flux1_dev model.random_weights=true --step-caches off medium aggressive

Warm-up: two batches of each size, with whatever is compiled then (reported). Excluded: text encoding (reported on its
own, a prompt), tokens, noise, copies, codecs, files. Seconds are from the first replay's start to the last one's end,
between CUDA events, without a pause.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fluxbatch import config
from fluxbatch.bench import jobs
from fluxbatch.bench.measure import GpuWatch, Limit, free_memory, peak_gib, reset_peak, synchronize, table, timed_ms
from fluxbatch.config import JobConfig, ModelConfig
from fluxbatch.models import Model, PromptEmbeds
from fluxbatch.pipeline.decode import decode
from fluxbatch.pipeline.denoise import denoise
from fluxbatch.pipeline.prefetch import draw_noise
from fluxbatch.records import Bucket
from fluxbatch.step_cache import CHOICES

COLUMNS = (
    "size",
    "steps",
    "step cache",
    "batch",
    "s/image",
    "denoise ms",
    "decode ms",
    "encode ms/prompt",
    "peak GiB",
    "W",
    "MHz",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    jobs.add_shape_options(parser)
    parser.add_argument("--seconds", type=float, default=20, help="of replay, a size")
    parser.add_argument("--step-caches", nargs="+", choices=CHOICES, help="in turns; default: sampler.step_cache")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    limit = Limit(options.limit_s)
    model, load_s = jobs.load(cfg)
    figures: dict[str, Any] = {"load_s": load_s, "cells": []}
    table(COLUMNS, [])
    for bucket in jobs.buckets_of(cfg, options):
        if limit.over:
            break
        cached = CachedBatch(model, bucket, cfg, size=jobs.batch_size(cfg, options))
        for schedule in options.step_caches or [None]:
            if schedule is not None:
                cached.step_cache = replace(cached.step_cache, schedule=schedule)
            found = cached.replay(seconds=min(options.seconds, limit.left_s()))
            table(COLUMNS, [row_of(found)], header=False)
            figures["cells"].append(found)
            yield figures
        del cached
        free_memory(model.device)


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "size": found["bucket"], "steps": found["steps"], "step cache": found["step_cache"],
        "batch": found["batch_size"], "s/image": found["s_per_image"], "denoise ms": found["denoise_ms"],
        "decode ms": found["decode_ms"], "encode ms/prompt": found["encode_ms_per_prompt"],
        "peak GiB": found["peak_gib"], "W": found["gpu"]["power_w"], "MHz": found["gpu"]["sm_clock_mhz"],
    }  # fmt: skip


class CachedBatch:
    """Owns one batch's embeddings and noise on the device, drawn from text and seeds as a job draws them."""

    def __init__(self, model: Model, bucket: Bucket, cfg: JobConfig, *, size: int) -> None:
        self.model, self.bucket, self.size = model, bucket, size
        self._decode_max_pixels = cfg.model.decode_max_pixels
        self.step_cache = config.step_cache(cfg.sampler)
        rows = jobs.requests(size, bucket, guidance_scale=cfg.sampler.guidance_scale)
        self._noise = _noise(model, bucket, seeds=[row.seed for row in rows])
        self._guidance = torch.tensor([row.guidance_scale for row in rows], device=model.device)
        self._encode_ms = encode_ms(model, cfg.model)
        with torch.inference_mode():
            self._embeds = encode(model, [row.prompt for row in rows])
            self._negative = encode(model, [""] * size) if bucket.negative_pass else None
        self.warm_up_s = self._warm_up()

    def _warm_up(self) -> float:
        began = time.perf_counter()
        for _ in range(2):
            self.decode(self.denoise())
        synchronize(self.model.device)
        return round(time.perf_counter() - began, 2)

    @torch.inference_mode()
    def denoise(self) -> Tensor:
        return denoise(
            self.model,
            self._noise,
            embeds=self._embeds,
            negative_embeds=self._negative,
            guidance=self._guidance,
            bucket=self.bucket,
            before_step=lambda: None,
            step_cache=self.step_cache,
        )

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        pixels, _, _ = decode(self.model, latents, bucket=self.bucket, max_pixels=self._decode_max_pixels)
        return pixels

    def replay(self, *, seconds: float) -> dict[str, Any]:
        """Draw the batch for so many seconds, at least twice."""
        device = self.model.device
        reset_peak(device)
        with GpuWatch(device) as watch:
            total_s, denoise_ms, decode_ms, batches = self._replay(seconds)
        return {
            "bucket": self.bucket.name, "steps": self.bucket.num_inference_steps, "step_cache": str(self.step_cache),
            "computed_steps": len(self.step_cache.computed(self.bucket.num_inference_steps)), "batch_size": self.size,
            "batches": batches, "s_per_image": round(total_s / batches / self.size, 5),
            "denoise_ms": round(denoise_ms, 2), "decode_ms": round(decode_ms, 2),
            "encode_ms_per_prompt": round(self._encode_ms, 3), "peak_gib": peak_gib(device),
            "warm_up_s": self.warm_up_s, "gpu": watch.figures(),
        }  # fmt: skip

    def _replay(self, seconds: float) -> tuple[float, float, float, int]:
        """Seconds of all batches, mean milliseconds of both stages, number of batches."""
        device, ends_s = self.model.device, time.perf_counter() + seconds
        marks = [Mark(device)]
        while len(marks) < 5 or time.perf_counter() < ends_s:
            latents = self.denoise()
            marks.append(Mark(device))
            self.decode(latents)
            marks.append(Mark(device))
            if len(marks) >= 5:
                marks[-3].wait()  # the host stays at most one batch ahead, so that `seconds` are the device's
        marks[-1].wait()
        spans_ms = [end.ms_since(start) for start, end in pairwise(marks)]
        batches = len(spans_ms) // 2
        total_s = marks[-1].ms_since(marks[0]) / 1e3
        return total_s, sum(spans_ms[::2]) / batches, sum(spans_ms[1::2]) / batches, batches


class Mark:
    """A point in the device's work: a CUDA event, or the clock of a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._now_s = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        if self._event is None or earlier._event is None:
            return (self._now_s - earlier._now_s) * 1e3
        return earlier._event.elapsed_time(self._event)


def encode(model: Model, prompts: list[str]) -> PromptEmbeds:
    tokens = model.tokenize(prompts).tensors
    return model.encode({name: tensor.to(model.device) for name, tensor in tokens.items()})


def encode_ms(model: Model, cfg: ModelConfig) -> float:
    """Milliseconds a prompt of one text-encoder launch as a job launches it, tokens on the device already."""
    prompts = [f"prompt number {number} of a launch" for number in range(cfg.encode_batch_size)]
    tokens = {name: tensor.to(model.device) for name, tensor in model.tokenize(prompts).tensors.items()}
    with torch.inference_mode():
        return timed_ms(lambda: model.encode(tokens), device=model.device, repeats=5) / len(prompts)


def _noise(model: Model, bucket: Bucket, *, seeds: list[int]) -> Tensor:
    noise = torch.empty(len(seeds), *model.noise_shape(height=bucket.height, width=bucket.width))
    for row, seed in zip(noise, seeds, strict=True):
        draw_noise(row, seed=seed)
    return noise.to(model.device)
