"""The models behind one protocol: all that the pipeline may ask of a FLUX family.

A model is a set of stages on tensors. It knows nothing of rows, batches in flight, files of the run or threads.

Legend: N prompts, S text tokens, B batch, L packed latent tokens, C channels, H W pixels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fluxbatch.config import ModelConfig
from fluxbatch.models import compile_cache, loading, memory, tuning
from fluxbatch.models.checkpoints import convert
from fluxbatch.models.lora import read_loras
from fluxbatch.records import Bucket


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


def check_model(cfg: ModelConfig) -> None:
    """Refuse, in seconds and before any weight is read, a device, dtype or model.path that cannot work."""
    placement = loading.place(cfg)
    tuning.use_fused(cfg, placement)
    if placement.device.type == "cuda" and cfg.memory_budget_gib is not None:
        memory.budget(placement.device, wanted_gib=cfg.memory_budget_gib)
    if cfg.random_weights:
        return
    folder, file = loading.model_folder(cfg), loading.checkpoint_file(cfg)
    if file is not None:
        convert.fit(file, cfg=cfg, folder=folder)
    if cfg.loras:
        read_loras(cfg, convert.transformer_shapes(cfg, folder))


def load_model(cfg: ModelConfig, *, true_cfg_scale: float) -> Model:
    """The model of these settings on its device, one log line a component."""
    from fluxbatch.models.flux1 import Flux1  # diffusers and transformers take seconds to import
    from fluxbatch.models.flux2 import Flux2

    loading.quiet_libraries()
    loading.fix_cpu_threads(cfg)
    compile_cache.keep_compiled(cfg, loading.place(cfg).device, os.environ)
    if cfg.family == "flux1":
        return Flux1.load(cfg, true_cfg_scale=true_cfg_scale)
    return Flux2.load(cfg)
