"""A model that returns at once and paints what it was given into the pixels, so that each id's image can be traced.

Channel 0 of the latents keeps the row's noise untouched (the seed), channel 1 takes on the prompt, channel 2 guidance
and steps; the decoder shows the three as red, green and blue blocks of 8 by 8 pixels. All arithmetic is by element,
so a row's bits do not depend on its neighbours. The knobs break it in every way that the pipeline must survive.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fluxbatch.models import Flow, PromptEmbeds, Schedule, Tokens
from fluxbatch.records import Bucket, Request

CHANNELS = 4
MAX_PROMPT_CHARACTERS = 200  # beyond it a prompt counts as truncated
TRUE_CFG_SCALE = 2.0


@dataclass
class FakeModel:
    name: str = "fake"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    fail_at: dict[str, int] = field(default_factory=dict)  # {"decode": 3}: the third call raises RuntimeError
    nan_prompts: Sequence[str] = ()
    nan_latents: Sequence[int] = ()  # seeds
    nan_pixels: Sequence[int] = ()  # seeds
    max_rows: int | None = None  # more rows in one forward: OutOfMemoryError
    max_prompts: int | None = None  # more prompts in one encoder launch: OutOfMemoryError
    extra_images: int = 0  # what decode gives beyond its rows
    hook: Callable[[str, int], None] = lambda stage, call: None  # called first, with the stage's 1-based call number

    def __post_init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.threads: defaultdict[str, set[int]] = defaultdict(set)
        self.encoded: list[str] = []  # every prompt in every launch, padding too
        self.rows: list[int] = []  # rows of every forward
        self.decoded_rows: list[int] = []
        self._texts: dict[int, str] = {}

    def _called(self, stage: str) -> None:
        self.calls[stage] += 1
        self.threads[stage].add(threading.get_ident())
        self.hook(stage, self.calls[stage])
        if self.fail_at.get(stage) == self.calls[stage]:
            raise RuntimeError(f"fake failure of {stage}")

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        self._called("tokenize")
        codes = [zlib.crc32(prompt.encode()) for prompt in prompts]
        self._texts.update(zip(codes, prompts, strict=True))
        ids = torch.tensor([[code, len(prompt)] for code, prompt in zip(codes, prompts, strict=True)])
        return Tokens({"ids": ids}, tuple(len(prompt) > MAX_PROMPT_CHARACTERS for prompt in prompts))

    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        self._called("encode")
        codes = tokens["ids"][:, 0]
        if self.max_prompts is not None and len(codes) > self.max_prompts:
            raise torch.OutOfMemoryError("fake: out of memory in the text encoder")
        texts = [self._texts[code] for code in codes.tolist()]
        self.encoded += texts
        values = codes.double().div(2**32).float().view(-1, 1, 1).repeat(1, 3, 2)
        for index, text in enumerate(texts):
            if text in self.nan_prompts:
                values[index, 1, 0] = torch.nan
        return {"prompt_embeds": values.to(self.dtype), "pooled": values[:, 0].to(self.dtype)}

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        self._called("noise")
        return CHANNELS, height // 8, width // 8

    def schedule(self, bucket: Bucket) -> Schedule:
        sigmas = torch.linspace(1, 0, bucket.num_inference_steps + 1, device=self.device)
        return Schedule(timesteps=sigmas[:-1] * 1000, sigmas=sigmas)

    def pack(self, noise: Tensor) -> Tensor:
        return noise.flatten(2).transpose(1, 2)

    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        return lambda latents, step: self.velocity(latents, embeds=embeds, guidance=guidance, bucket=bucket)

    def velocity(self, latents: Tensor, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Tensor:
        self._called("velocity")
        if self.max_rows is not None and len(latents) > self.max_rows:
            raise torch.OutOfMemoryError(f"fake: {len(latents)} rows do not fit")
        self.rows.append(len(latents))
        velocity = torch.zeros_like(latents)
        velocity[..., 1] = embeds["prompt_embeds"][:, 0, :1]
        velocity[..., 2] = guidance[:, None] * 0.125 + bucket.num_inference_steps * 0.01
        velocity[self._is_seed(latents, self.nan_latents)] = torch.nan
        return velocity

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        return torch.full_like(guidance, TRUE_CFG_SCALE)

    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        self._called("decode")
        self.decoded_rows.append(len(latents))
        rows = len(latents) + self.extra_images
        colours = latents.transpose(1, 2)[:, :3].clone().view(len(latents), 3, bucket.height // 8, bucket.width // 8)
        colours[self._is_seed(latents, self.nan_pixels)] = torch.inf
        pixels = torch.nn.functional.interpolate(colours * 0.4, scale_factor=8, mode="nearest")
        return torch.cat([pixels, pixels[:1].expand(max(0, self.extra_images), -1, -1, -1)])[:rows]

    def _is_seed(self, latents: Tensor, seeds: Sequence[int]) -> Tensor:
        """Which rows began as the noise of one of the seeds; channel 0 still shows it."""
        first = torch.tensor([first_noise(seed) for seed in seeds], dtype=latents.dtype, device=latents.device)
        return (latents[:, 0, :1] == first).any(1)


def first_noise(seed: int) -> float:
    return torch.randn(16, generator=torch.Generator().manual_seed(seed))[0].item()


def expected_pixels(request: Request, bucket: Bucket) -> np.ndarray:
    """What the fake draws for a row, made by hand: no batch, no pipeline."""
    model = FakeModel()
    shape = model.noise_shape(height=request.height, width=request.width)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(request.seed))[None]
    embeds = model.encode(model.tokenize([request.prompt]).tensors)
    negative = model.encode(model.tokenize([request.negative_prompt or ""]).tensors)
    guidance = torch.tensor([request.guidance_scale])
    latents, schedule = model.pack(noise), model.schedule(bucket)
    for index in range(bucket.num_inference_steps):
        arguments = {"guidance": guidance, "bucket": bucket}
        velocity = model.velocity(latents, embeds=embeds, **arguments)
        if bucket.negative_pass:
            away = model.velocity(latents, embeds=negative, **arguments)
            velocity = away + TRUE_CFG_SCALE * (velocity - away)
        latents = latents + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * velocity
    pixels = (model.decode(latents, bucket=bucket)[0] / 2 + 0.5).clamp(0, 1) * 255
    return pixels.round().to(torch.uint8).permute(1, 2, 0).numpy()
