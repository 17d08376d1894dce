"""Training data: captions and rows from worker processes, rendered and encoded on the device. Knows no objective."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import MapResult, Pool

import numpy as np
import torch
from torch import Tensor

from fluxbatch.tiny.flow import Bucket, Rotary
from fluxbatch.tiny.render import render
from fluxbatch.tiny.vae import Vae, encode_pixels, packed, scaled
from fluxbatch.tiny.writer import Writer

CHUNK = 2000

Index = dict[tuple[str, str | None], int]
Tokenise = Callable[[list[str]], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Share:
    """How much of data and training one size gets: of the steps until LATE, and after it."""

    height: int
    width: int
    num_samples: int
    early: float
    late: float
    batch_size: int


LATE = 0.7  # of a stage; by then the small sizes have taught what goes where, four times as cheaply as the large ones
# The first gets kernels of its own; the second differs from it in everything, so that the kernels compiled for it serve
# others. Measured: all but 96x160, whose third compilation (26 s) serves those of about its number of tokens.
SHARES = (
    Share(128, 128, 220_000, 0.32, 0.22, 512),
    Share(256, 256, 16_000, 0.0, 0.11, 192),
    Share(96, 160, 90_000, 0.17, 0.13, 512),
    Share(160, 96, 90_000, 0.17, 0.13, 512),
    Share(112, 144, 80_000, 0.14, 0.10, 512),
    Share(144, 112, 80_000, 0.14, 0.10, 512),
    Share(192, 192, 24_000, 0.06, 0.11, 256),
    Share(192, 320, 10_000, 0.0, 0.05, 192),
    Share(320, 192, 10_000, 0.0, 0.05, 192),
)
SMOKE_SHARES = (Share(64, 64, 300, 0.5, 0.5, 8), Share(32, 64, 200, 0.5, 0.5, 8))


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
    ids: tuple[Tensor, ...]  # (N, S) int16, one a text encoder

    def part(self, start: int, num: int) -> "Captions":
        end = start + num
        return Captions(self.rows[start:end], tuple(ids[start:end] for ids in self.ids))


@dataclass(frozen=True)
class Writing:
    """Captions that the workers are still writing."""

    num: int
    chunks: MapResult

    def result(self) -> Captions:
        rows, *ids = (
            torch.from_numpy(np.concatenate(column)[: self.num]) for column in zip(*self.chunks.get(), strict=True)
        )
        return Captions(rows, tuple(ids))


def write_captions(workers: Pool, num: int, *, seed: int, index: Index, tokenise: Tokenise) -> Writing:
    jobs = [(seed * 1_000_003 + chunk, min(CHUNK, num), index, tokenise) for chunk in range(-(-num // CHUNK))]
    return Writing(num, workers.map_async(_write_chunk, jobs, chunksize=1))


def _write_chunk(job: tuple[int, int, Index, Tokenise]) -> tuple[np.ndarray, ...]:
    seed, num, index, tokenise = job
    writer = Writer(seed)
    scenes = [writer.scene() for _ in range(num)]
    rows = np.stack([writer.row(scene, index) for scene in scenes])
    return rows, *tokenise([writer.caption(scene) for scene in scenes])


def fill_buckets(
    shares: tuple[Share, ...], captions: Captions, *, vae: Vae, textures: Tensor, rotary: dict[tuple[int, int], Rotary]
) -> Iterator[Bucket]:
    """Renders and encodes each size's own part of the captions."""
    start = 0
    for share in shares:
        part = captions.part(start, share.num_samples)
        start += share.num_samples
        latents = encode(part.rows, vae=vae, textures=textures, height=share.height, width=share.width)
        ids = tuple(some.to(textures.device) for some in part.ids)
        yield Bucket(share.height, share.width, share.batch_size, latents, ids, rotary[share.height, share.width])


@torch.no_grad()
def encode(rows: Tensor, *, vae: Vae, textures: Tensor, height: int, width: int) -> Tensor:
    """Rows -> packed latents (N, L, 4C), scaled as the transformer sees them, in the VAE's dtype."""
    batch = max(1, 512 * 128 * 128 // (height * width))
    return torch.cat(
        [
            scaled(vae, packed(encode_pixels(vae, render(part, textures, height=height, width=width))))
            for part in rows.to(textures.device).split(batch)
        ]
    )
