"""Training data: captions and rows from worker processes, rendered and encoded on the device. Knows no objective."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxbatch.tiny.flow import Bucket, Rotary
from fluxbatch.tiny.render import render
from fluxbatch.tiny.scenes import Writer

CLIP_TOKENS, T5_TOKENS = 32, 40  # longer captions of the little language do not occur
CHUNK = 2000

Vae = Any  # AutoencoderKL: diffusers' lazy imports hide its attributes from mypy
Index = dict[tuple[str, str | None], int]


@dataclass(frozen=True)
class Share:
    """How much of data and training one size gets."""

    height: int
    width: int
    num_samples: int
    steps: float
    batch_size: int


# Most of the time goes to the five sizes of about 128 x 128; the others are kept in mind. The first gets kernels of its
# own; the second differs from it in everything, so that the kernels compiled for it serve all others.
SHARES = (
    Share(128, 128, 260_000, 0.44, 512),
    Share(256, 256, 25_000, 0.05, 192),
    Share(96, 160, 50_000, 0.11, 512),
    Share(160, 96, 50_000, 0.11, 512),
    Share(112, 144, 50_000, 0.085, 512),
    Share(144, 112, 50_000, 0.085, 512),
    Share(64, 64, 20_000, 0.02, 512),
    Share(192, 192, 25_000, 0.05, 256),
    Share(192, 320, 12_000, 0.025, 192),
    Share(320, 192, 12_000, 0.025, 192),
)
SMOKE_SHARES = (Share(64, 64, 300, 0.5, 8), Share(32, 64, 200, 0.5, 8))


def start_workers() -> Pool:
    """Forked before CUDA is touched. A worker must die when told to, whatever the parent does with SIGTERM."""
    num = max(1, min(15, (os.cpu_count() or 1) - 1))
    return multiprocessing.get_context("fork").Pool(num, initializer=_start_worker)


def _start_worker() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Captions:
    """Scenes of the little language as the renderer and the text encoders take them."""

    rows: Tensor  # (N, ROW) float32
    clip_ids: Tensor  # (N, CLIP_TOKENS) int16
    t5_ids: Tensor  # (N, T5_TOKENS) int16

    def part(self, start: int, num: int) -> "Captions":
        end = start + num
        return Captions(self.rows[start:end], self.clip_ids[start:end], self.t5_ids[start:end])


def write_captions(workers: Pool, num: int, *, seed: int, index: Index, folder: Path) -> Captions:
    jobs = [(seed * 1_000_003 + chunk, min(CHUNK, num), index, folder) for chunk in range(-(-num // CHUNK))]
    columns = zip(*workers.imap(_write_chunk, jobs), strict=True)
    return Captions(*(torch.from_numpy(np.concatenate(column)[:num]) for column in columns))


def _write_chunk(job: tuple[int, int, Index, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seed, num, index, folder = job
    writer = Writer(seed)
    scenes = [writer.scene() for _ in range(num)]
    rows = np.stack([writer.row(scene, index) for scene in scenes])
    return rows, *token_ids([writer.caption(scene) for scene in scenes], folder)


def token_ids(captions: list[str], folder: Path) -> tuple[np.ndarray, np.ndarray]:
    clip, t5 = _tokenizers(folder)
    clip_ids = clip(captions, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="np")
    t5_ids = t5(captions, padding="max_length", max_length=T5_TOKENS, truncation=True, return_tensors="np")
    return clip_ids.input_ids.astype(np.int16), t5_ids.input_ids.astype(np.int16)


@cache
def _tokenizers(folder: Path) -> tuple:
    from transformers import CLIPTokenizer, T5Tokenizer

    return CLIPTokenizer.from_pretrained(folder / "tokenizer"), T5Tokenizer.from_pretrained(folder / "tokenizer_2")


def fill_buckets(
    shares: tuple[Share, ...], captions: Captions, *, vae: Vae, textures: Tensor, rotary: dict[tuple, Rotary]
) -> Iterator[Bucket]:
    """Renders and encodes each size's own part of the captions."""
    start = 0
    for share in shares:
        part = captions.part(start, share.num_samples)
        start += share.num_samples
        latents = encode(part.rows, vae=vae, textures=textures, height=share.height, width=share.width)
        ids = (part.clip_ids.to(textures.device), part.t5_ids.to(textures.device))
        yield Bucket(share.height, share.width, share.batch_size, latents, *ids, rotary[share.height, share.width])


@torch.no_grad()
def encode(rows: Tensor, *, vae: Vae, textures: Tensor, height: int, width: int) -> Tensor:
    """Rows -> packed latents (N, L, 64), scaled as the transformer sees them, in the VAE's dtype."""
    batch = max(1, 512 * 128 * 128 // (height * width))
    return torch.cat(
        [
            packed(encode_pixels(vae, render(part, textures, height=height, width=width)))
            for part in rows.to(textures.device).split(batch)
        ]
    )


def encode_pixels(vae: Vae, pixels: Tensor) -> Tensor:
    """Pixels (B, 3, H, W) in 0..1 -> the mean of their scaled latents (B, 16, H/8, W/8)."""
    pixels = (pixels * 2 - 1).to(vae.dtype).contiguous(memory_format=torch.channels_last)
    return (vae.encode(pixels).latent_dist.mean - vae.config.shift_factor) * vae.config.scaling_factor


def packed(latents: Tensor) -> Tensor:
    """FluxPipeline's order: (B, C, H, W) -> (B, H/2 * W/2, 4C)."""
    batch, channels, height, width = latents.shape
    tiles = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(batch, height // 2 * (width // 2), channels * 4).contiguous()
