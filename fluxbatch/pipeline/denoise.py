"""Integrate the flow from noise to latents. Knows nothing of prompts, pixels or batches in flight.

Legend: B rows, L packed latent tokens, C channels, S text tokens, D embedding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fluxbatch.models import Flow, Model, PromptEmbeds
from fluxbatch.pipeline.extrapolate import extrapolated
from fluxbatch.records import Bucket
from fluxbatch.step_cache import EVERY_STEP, StepCache


def denoise(
    model: Model,
    noise: Tensor,
    *,
    embeds: PromptEmbeds,
    negative_embeds: PromptEmbeds | None,
    guidance: Tensor,
    bucket: Bucket,
    before_step: Callable[[], None],
    step_cache: StepCache = EVERY_STEP,
) -> Tensor:
    """Euler steps of the flow ODE from float32 noise (B, ...) to latents (B, L, C).

    Rectified flow, Liu et al. 2022, arXiv:2209.03003; the arithmetic is diffusers'
    `FlowMatchEulerDiscreteScheduler.step`. `before_step` may raise to stop early. `step_cache` may leave steps to be
    extrapolated.
    """
    latents = model.pack(noise.to(model.dtype))
    sigmas = model.schedule(bucket).sigmas
    num_steps = bucket.num_inference_steps
    flow = extrapolated(
        _flow(model, embeds, negative_embeds, guidance, bucket),
        sigmas,
        computed=step_cache.computed(num_steps),
        num_steps=num_steps,
        order=step_cache.order,
    )
    for step in range(num_steps):
        before_step()
        velocity = flow(latents, step)
        if velocity.shape != latents.shape:
            raise ValueError(f"the transformer gave {tuple(velocity.shape)} for latents {tuple(latents.shape)}")
        latents = (latents.float() + (sigmas[step + 1] - sigmas[step]) * velocity).to(velocity.dtype)
    return latents


def _flow(
    model: Model, embeds: PromptEmbeds, negative_embeds: PromptEmbeds | None, guidance: Tensor, bucket: Bucket
) -> Flow:
    """The model's flow, or with negative prompts that of classifier-free guidance: two passes in one launch.

    Ho and Salimans 2022, arXiv:2207.12598.
    """
    if negative_embeds is None:
        return model.flow(embeds=embeds, guidance=guidance, bucket=bucket)
    both = model.flow(
        embeds={name: torch.cat([negative_embeds[name], embeds[name]]) for name in embeds},
        guidance=torch.cat([guidance, guidance]),
        bucket=bucket,
    )
    scale_B11 = model.cfg_scale(guidance).view(-1, 1, 1)

    def guided(latents: Tensor, step: int) -> Tensor:
        negative, positive = both(torch.cat([latents, latents]), step).chunk(2)
        # The float32 product is rounded once, as where diffusers multiplies by a Python number.
        return negative + (scale_B11 * (positive - negative)).to(negative.dtype)

    return guided
