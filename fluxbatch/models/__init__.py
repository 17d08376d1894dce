"""The models behind two protocols: all that the pipeline may ask of a FLUX family, or of any other pipeline.

A model of a FLUX family is a set of stages on tensors, any other one a single call. None knows anything of batches in
flight, files of the run or threads.

Legend: N prompts, S text tokens, B batch, L packed latent tokens, C channels, H W pixels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fluxbatch.config import ModelConfig
from fluxbatch.models import compile_cache, homes, loading, memory, tuning
from fluxbatch.models.aot.parts import Part
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.lora import read_loras
from fluxbatch.records import Bucket, Request


@dataclass(frozen=True)
class Tokens:
    """Tokenised prompts on the CPU, each tensor (N, S) and padded to a length that no neighbour changes.

    `truncated` speaks of the encoder that the transformer reads (T5, Qwen3); CLIP's 77 tokens only colour the pooled
    embedding, and cutting there is normal.
    """

    tensors: dict[str, Tensor]
    truncated: tuple[bool, ...]


PromptEmbeds = dict[str, Tensor]  # every tensor has first dimension N, in the transformer's dtype


@dataclass(frozen=True)
class Schedule:
    """Timesteps (n,) from 1000 down and sigmas (n+1,) from 1 to 0, float32 on the model's device."""

    timesteps: Tensor
    sigmas: Tensor


Flow = Callable[[Tensor, int], Tensor]  # latents (B, L, C) and the number of the step to their velocity (B, L, C)
Decode = Callable[[Tensor], Tensor]  # the VAE's natural latents (B, C, h, w) to pixels (B, 3, H, W)


class Model(Protocol):
    """One loaded model. Every stage works on whole batches; only `tokenize` is bound to one thread at a time."""

    name: str
    device: torch.device
    dtype: torch.dtype

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        """Prompts to padded token ids, on the CPU."""

    def encode(self, tokens: dict[str, Tensor]) -> PromptEmbeds:
        """Tokens, already on the device, to embeddings."""

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        """The natural (unpacked) shape of one row's noise."""

    def schedule(self, bucket: Bucket) -> Schedule:
        """The bucket's noise levels; computed once."""

    def pack(self, noise: Tensor) -> Tensor:
        """Natural latents to the transformer's (B, L, C)."""

    def flow(self, *, embeds: PromptEmbeds, guidance: Tensor, bucket: Bucket) -> Flow:
        """The velocity of one launch: what does not change between its steps is made here. `guidance` float32 (B,)."""

    def cfg_scale(self, guidance: Tensor) -> Tensor:
        """The weight (B,) of the positive pass where the bucket has a negative one."""

    def decode(self, latents: Tensor, *, bucket: Bucket) -> Tensor:
        """(B, L, C) to pixels (B, 3, H, W), nominally in [-1, 1], in the VAE's dtype."""


class Seams(Protocol):
    """Where a call that draws whole is looked at from outside."""

    def before_step(self) -> None:
        """Called before each step; may raise to stop early."""

    def decode(self, decode: Decode, latents: Tensor) -> Tensor:
        """Decode all latents (B, ...) with this decoder, in launches as memory allows."""


@runtime_checkable
class WholeModel(Protocol):
    """A model that draws from text to pixels in one call. Only `tokenize` may be called from another thread."""

    name: str
    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    sampler: str  # as image viewers show it

    def tokenize(self, prompts: Sequence[str]) -> Tokens:
        """Which prompts are too long; no tokens."""

    def noise_shape(self, *, height: int, width: int) -> tuple[int, ...]:
        """Of nothing: noise is drawn in the call."""

    def draw(self, rows: Sequence[Request], *, bucket: Bucket, seams: Seams) -> Tensor:
        """Pixels (B, 3, H, W) in [0, 1]. A row's do not depend on the others, at the same number of rows."""


AnyModel = Model | WholeModel


class Blueprint(Model, Protocol):
    """A model without weights: everything has its shape. It cannot encode."""

    def blank_embeds(self, size: int) -> PromptEmbeds:
        """Zeros in the form of so many prompts' embeddings."""


def check_model(cfg: ModelConfig) -> None:
    """Refuse, in seconds and before any weight is read, a device, dtype or model.path that cannot work."""
    placement = loading.place(cfg)
    if cfg.family == "diffusers":
        from fluxbatch.models import whole

        whole.check(cfg)
        return
    tuning.use_fused(cfg, placement)
    if placement.device.type == "cuda" and cfg.memory_budget_gib is not None:
        memory.budget(placement.device, wanted_gib=cfg.memory_budget_gib)
    if cfg.random_weights:
        return
    folder, file = homes.model_folder(cfg), homes.checkpoint_file(cfg)
    if file is not None:
        convert.fit(file, cfg=cfg, folder=folder)
    if cfg.loras:
        read_loras(cfg, convert.transformer_shapes(cfg, folder))


def blueprint(cfg: ModelConfig) -> tuple[Blueprint, list[Part]]:
    """For the shapes of what launches call, and the parts that can be packages; one block of each kind for all."""
    from fluxbatch.models.flux1 import Flux1
    from fluxbatch.models.flux2 import Flux2

    return Flux1.blueprint(cfg) if cfg.family == "flux1" else Flux2.blueprint(cfg)


def load_model(cfg: ModelConfig, *, true_cfg_scale: float) -> AnyModel:
    """The model of these settings on its device, one log line a component."""
    # First of all: diffusers imports Inductor, which takes the folder of its cache for settled from then on.
    compile_cache.keep_compiled(cfg, loading.place(cfg).device, os.environ)
    loading.quiet_libraries()
    loading.fix_cpu_threads(cfg)
    if cfg.family == "diffusers":
        from fluxbatch.models.whole import WholePipeline  # diffusers and transformers take seconds to import

        return WholePipeline.load(cfg, true_cfg_scale=true_cfg_scale)
    if cfg.family == "flux1":
        from fluxbatch.models.flux1 import Flux1

        return Flux1.load(cfg, true_cfg_scale=true_cfg_scale)
    from fluxbatch.models.flux2 import Flux2

    return Flux2.load(cfg)
