"""Question: how many images a second does everything but the model keep up with on this machine, and where is the time?

python -m fluxbatch bench host --rows 20000 --size 256x256 output.image_format=jpeg [--profile] [key=value ...]

The real job (plan, tokens, noise, copies, conversion to 8 bits, compression, commit, shards, report) with a model that
returns at once: no encoder, no transformer, and pixels that are each row's own noise, enlarged. It stands on the GPU
where there is one, so that pinned memory and both copies are real. Tokens are made by the embedded model's tokenizers,
padded to 512. No warm-up: the rates are of the whole job and of its steady state. Excluded: nothing but the model.
The copies and the conversion run where the model stands; all else is the cores', whose number is stated.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

from fluxbatch import tiny
from fluxbatch.bench import jobs
from fluxbatch.bench.measure import device_of, parse_size
from fluxbatch.config import JobConfig
from fluxbatch.models import Flow, PromptEmbeds, Schedule, Tokens, loading
from fluxbatch.models.tokens import tokenize_fixed
from fluxbatch.records import Bucket, CompressedBatch
from fluxbatch.share import Share

TOKENS = 512


class InstantModel:
    """Returns at once: no weights, and pixels that are the row's own noise, enlarged."""

    name = "instant"
    dtype = torch.float32

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clip = loading.stored_tokenizer(CLIPTokenizer, tiny.FOLDER, subfolder="tokenizer")
        self._t5 = loading.stored_tokenizer(T5Tokenizer, tiny.FOLDER, subfolder="tokenizer_2")

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        clip_ids, _, _ = tokenize_fixed(self._clip, prompts, max_length=self._clip.model_max_length)
        t5_ids, _, truncated = tokenize_fixed(self._t5, prompts, max_length=TOKENS)
        return Tokens({"clip_ids": clip_ids, "t5_ids": t5_ids}, truncated)

    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        return {"prompt_embeds": tokens["t5_ids"].float()}

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        return (16, height // 8, width // 8)

    def schedule(self, bucket: Bucket) -> Schedule:
        steps = bucket.num_inference_steps
        sigmas = torch.linspace(1, 0, steps + 1, device=self.device)
        return Schedule(sigmas[:-1] * 1000, sigmas)

    def pack(self, noise: Tensor) -> Tensor:
        return noise.flatten(1).unsqueeze(1)

    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        return lambda latents, step: latents

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        return guidance

    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        small = latents.reshape(-1, 16, bucket.height // 8, bucket.width // 8)[:, :3].clamp(-1, 1)
        return torch.nn.functional.interpolate(small, scale_factor=8, mode="nearest")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--size", type=parse_size, default=(512, 512), help="HEIGHTxWIDTH")
    parser.add_argument("--batch-size", type=int, help="images in one launch; default: plan.batch_size")
    parser.add_argument("--folder", type=Path, help="where the job writes; default: a temporary folder")
    parser.add_argument("--profile", action="store_true", help="profile the thread that commits")


def measure(cfg: JobConfig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = device_of(cfg)
    if options.batch_size:
        cfg = jobs.with_batch_size(cfg, options.batch_size)
    height, width = options.size
    rows = jobs.requests(options.rows, Bucket(height, width, 1), guidance_scale=cfg.sampler.guidance_scale)
    commits_s: list[float] = []
    cpu_before = os.times()
    with jobs.scratch(options.folder) as folder, _profiled(options.profile), timed_commits(commits_s):
        done = jobs.run(cfg, InstantModel(device), rows, folder)
    cpu, (images, seconds), batches = os.times(), done.steady(), len(done.lines)
    cpu_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
    rate = images / max(seconds, 1e-9)
    figures = {
        "images": done.counts.written, "size": f"{options.size[0]}x{options.size[1]}",
        "image_format": cfg.output.image_format, "output": cfg.output.kind, "device": device.type,
        "cores": len(os.sched_getaffinity(0)), "wall_s": round(done.wall_s, 2),
        "images_per_s": round(done.counts.written / done.wall_s, 1), "steady_images_per_s": round(rate, 1),
        "cpu_ms_per_image": round(1e3 * cpu_s / max(1, done.counts.written), 3),
        "batches": batches, "batch_size": round(done.counts.written / batches, 1),
        "commit_ms_per_batch": round(1e3 * sum(commits_s) / batches, 2), **jobs.stage_figures(done.lines),
    }  # fmt: skip
    _say(figures)
    yield figures


def _say(figures: dict[str, Any]) -> None:
    print(
        f"{figures['steady_images_per_s']} images/s in steady state ({figures['images_per_s']} over the whole job) of "
        f"{figures['size']} {figures['image_format']} into {figures['output']}, model on {figures['device']}, "
        f"{figures['cores']} cores; {figures['cpu_ms_per_image']} ms of CPU an image"
    )
    print(f"milliseconds a batch of {figures['batch_size']:g}: {figures['stage_ms_per_batch']}")
    print(f"  commit {figures['commit_ms_per_batch']}, on the thread that runs the job")
    for handover, idle in figures["idle_per_batch"].items():
        print(f"  {handover:20} its receiver stood idle {idle['percent']} % of the time")


@contextmanager
def timed_commits(seconds: list[float]) -> Iterator[None]:
    """Adds the seconds of every batch's commit (and its shard's, now and then), which the batch log does not tell."""
    untimed = Share.commit

    def commit(self: Share, done: CompressedBatch) -> None:
        began = time.perf_counter()
        untimed(self, done)
        seconds.append(time.perf_counter() - began)

    Share.commit = commit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Share.commit = untimed  # type: ignore[method-assign]


@contextmanager
def _profiled(wanted: bool) -> Iterator[None]:
    profile = cProfile.Profile()
    with profile if wanted else nullcontext():
        yield
    if wanted:
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)
