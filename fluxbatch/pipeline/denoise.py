"""Integrate the flow from noise to latents. Knows nothing of prompts, pixels or batches in flight.

Legend: B rows, L packed latent tokens, C channels, S text tokens, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fluxbatch.models import Model, PromptEmbeds
from fluxbatch.records import Bucket


def denoise(
    model: Model,
    noise: Tensor,
    *,
    embeds: PromptEmbeds,
    negative_embeds: PromptEmbeds | None,
    guidance: Tensor,
    bucket: Bucket,
    before_step: Callable[[], None],
) -> Tensor:
    """Euler steps of the flow ODE from float32 noise (B, ...) to latents (B, L, C).

    Rectified flow, Liu et al. 2022, arXiv:2209.03003; the arithmetic is diffusers'
    `FlowMatchEulerDiscreteScheduler.step`. `before_step` may raise to stop early.
    """
    latents = model.pack(noise.to(model.dtype))
    schedule = model.schedule(bucket)
    sigmas = schedule.sigmas
    for timestep, sigma, sigma_next in zip(schedule.timesteps, sigmas[:-1], sigmas[1:], strict=True):
        before_step()
        if negative_embeds is None:
            velocity = model.velocity(latents, timestep=timestep, embeds=embeds, guidance=guidance, bucket=bucket)
        else:
            velocity = _two_passes(model, latents, timestep, (negative_embeds, embeds), guidance, bucket)
        if velocity.shape != latents.shape:
            raise ValueError(f"the transformer gave {tuple(velocity.shape)} for latents {tuple(latents.shape)}")
        latents = (latents.float() + (sigma_next - sigma) * velocity).to(velocity.dtype)
    return latents


def _two_passes(
    model: Model,
    latents: Tensor,
    timestep: Tensor,
    embeds: tuple[PromptEmbeds, PromptEmbeds],
    guidance: Tensor,
    bucket: Bucket,
) -> Tensor:
    """Classifier-free guidance, the negative and the positive pass in one forward of twice the batch.

    Ho and Salimans 2022, arXiv:2207.12598.
    """
    negative_embeds, positive_embeds = embeds
    both = model.velocity(
        torch.cat([latents, latents]),
        timestep=timestep,
        embeds={name: torch.cat([negative_embeds[name], positive_embeds[name]]) for name in positive_embeds},
        guidance=torch.cat([guidance, guidance]),
        bucket=bucket,
    )
    negative, positive = both.chunk(2)
    scale_B11 = model.cfg_scale(guidance).view(-1, 1, 1)
    # The float32 product is rounded once, as where diffusers multiplies by a Python number.
    return negative + (scale_B11 * (positive - negative)).to(negative.dtype)
